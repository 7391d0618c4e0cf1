"""Entry points of other packages, listed without importing anything and loaded only where one is named.

So a broken one affects nobody who does not name it. docs/extending.md describes the kinds.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from importlib import metadata
from typing import Any, Literal, TypeVar

from vitscale.errors import RequestError, shown, unknown

T = TypeVar("T")
Kind = Literal["engine", "model", "dataset", "launcher", "scheduler", "probe", "chart", "importer"]


def names(kind: Kind) -> set[str]:
    """Names of what installed packages offer of a kind; nothing is imported."""
    return set(metadata.entry_points(group=f"vitscale.{kind}s").names)


def target(kind: Kind, name: str) -> str | None:
    """The "module:object" that a package offers as `name`; None where none does."""
    entry = _entry(kind, name)
    return None if entry is None else entry.value


def load(kind: Kind, name: str, *needs: str, of: type = object) -> Any | None:
    """The object that a package offers as `name`; None where none does.

    Args:
        kind: kind of thing; its group is `vitscale.<kind>s`.
        name: name of the entry point, which points at an object or at a class that makes one without arguments.
        needs: methods that the object must have; "__call__" for a function.
        of: class of which it must be an instance.

    Raises:
        RequestError: it cannot be imported, or is something else; the message names its package.
    """
    entry = _entry(kind, name)
    if entry is None:
        return None
    try:
        loaded = entry.load()
        made = loaded() if isinstance(loaded, type) else loaded
    except (Exception, SystemExit) as error:  # a foreign module may do anything while it is imported
        raise _broken(kind, entry, f"{type(error).__name__}: {error}") from None
    if not isinstance(made, of):
        raise _broken(kind, entry, f"it is {type(made).__name__}, and no {of.__name__}")
    if lacking := [method for method in needs if not callable(getattr(made, method, None))]:
        raise _broken(kind, entry, f"it has no {' and no '.join(lacking)}")
    return made


def known(kind: Kind, name: str, own: Mapping[str, T], *needs: str, of: type = object, next_step: str = "") -> T:
    """The thing called `name`: one of vitscale's `own`, which nobody replaces, else an installed package's (`load`).

    Raises:
        RequestError: there is none, with the names that there are; or the package that offers it is broken.
    """
    if name in own:
        return own[name]
    loaded: T | None = load(kind, name, *needs, of=of)
    if loaded is None:
        raise unknown(kind, name, {*own, *names(kind)}, next_step=next_step)
    return loaded


def referred(reference: str) -> Any:
    """The object that "module:name" names, for things that are declared on one plane and done on the other."""
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)


def fault(error: BaseException) -> str:
    """What another package's code raised, and where in it: "OSError: meter unplugged (meter.py, line 7)"."""
    trace, where = error.__traceback__, ""
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is not None and not str(trace.tb_frame.f_globals.get("__name__")).startswith("vitscale."):
        where = f" ({trace.tb_frame.f_code.co_filename.rpartition('/')[2]}, line {trace.tb_lineno})"
    return f"{type(error).__name__}: {error}{where}"


def _entry(kind: Kind, name: str) -> metadata.EntryPoint | None:
    return next(iter(metadata.entry_points(group=f"vitscale.{kind}s", name=name)), None)


def _broken(kind: Kind, entry: metadata.EntryPoint, why: str) -> RequestError:
    package = entry.dist.name if entry.dist is not None else "an unknown package"
    what = f"{kind} {shown(entry.name)} of {package} ({entry.value}) cannot be loaded: {shown(why)}"
    return RequestError(what, next_step=f"Repair or remove that package, or use another {kind}")
