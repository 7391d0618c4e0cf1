"""Entry points of other packages, listed without importing anything and loaded only where one is named.

So a broken one affects nobody who does not name it. docs/extending.md describes the kinds.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Container, Mapping
from importlib import metadata
from typing import Any, Literal, TypeVar

from vitscale.errors import RequestError, VitscaleError, shown, unknown

T = TypeVar("T")
Kind = Literal["engine", "model", "dataset", "launcher", "scheduler", "meter", "chart", "importer"]


def names(kind: Kind) -> set[str]:
    """Names of what installed packages offer of a kind; nothing is imported."""
    return set(metadata.entry_points(group=f"vitscale.{kind}s").names)


def target(kind: Kind, name: str) -> str | None:
    """The "module:object" that a package offers as `name`; None where none does."""
    entry = _entry(kind, name)
    return None if entry is None else entry.value


def package(kind: Kind, name: str) -> str | None:
    """The name of the package that offers a thing; None where none does."""
    entry = _entry(kind, name)
    return None if entry is None else _package(entry)


def known(kind: Kind, name: str, own: Mapping[str, T], *needs: str, of: type = object, next_step: str = "") -> T:
    """The thing called `name`: one of vitscale's `own`, which nobody replaces, else what an installed package offers.

    Args:
        kind: kind of thing; its group is `vitscale.<kind>s`.
        name: name of the thing; an entry point leads to an object or to a class that makes one without arguments.
        own: vitscale's own things.
        needs: methods that a package's object must have; "__call__" for a function.
        of: class of which it must be an instance.
        next_step: what to do where there is none.

    Raises:
        RequestError: there is none, with the names that there are; or a package's cannot be imported, or is something
            else; the message names its package.
    """
    if name in own:
        return own[name]
    entry = _entry(kind, name)
    if entry is None:
        raise unknown(kind, name, {*own, *names(kind)}, next_step=next_step)
    try:
        loaded = entry.load()
        made: T = loaded() if isinstance(loaded, type) else loaded
    except (Exception, SystemExit) as error:  # a foreign module may do anything while it is imported
        raise _broken(kind, entry, fault(error)) from None
    if not isinstance(made, of):
        raise _broken(kind, entry, f"it is {type(made).__name__}, and no {of.__name__}")
    if lacking := [method for method in needs if not callable(getattr(made, method, None))]:
        raise _broken(kind, entry, f"it has no {' and no '.join(lacking)}")
    return made


def answer(kind: Kind, name: str, own: Container[str], ask: Callable[[], T], *of: type) -> T:
    """What `ask` returns, which asks a thing of `known` something; what ours raises goes on as it is.

    Args:
        kind: the thing's kind.
        name: its name.
        own: names of vitscale's own things.
        ask: calls the thing.
        of: classes of which the answer must be an instance.

    Raises:
        RequestError: a package's thing raised, or returned something else; the message names the package.
    """
    entry = None if name in own else _entry(kind, name)
    if entry is None:
        return ask()
    try:
        answered = ask()
    except (VitscaleError, MemoryError):
        raise
    except (Exception, SystemExit) as error:
        raise _broken(kind, entry, fault(error), "failed") from error
    if not isinstance(answered, of):
        classes = " or ".join("None" if each is type(None) else each.__name__ for each in of)
        raise _broken(kind, entry, f"it returned {shown(answered)}, and no {classes}", "failed")
    return answered


def referred(reference: str) -> Any:
    """The object that "module:name" names, for things that are declared on one plane and done on the other."""
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)


def fault(error: BaseException) -> str:
    """What another package's code raised, and where in it: "OSError: meter unplugged (meter.py, line 7)"."""
    trace, where = error.__traceback__, ""
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    ours = ("vitscale.", "importlib")
    if trace is not None and not str(trace.tb_frame.f_globals.get("__name__")).startswith(ours):
        where = f" ({trace.tb_frame.f_code.co_filename.rpartition('/')[2]}, line {trace.tb_lineno})"
    return f"{type(error).__name__}: {error}{where}"


def _entry(kind: Kind, name: str) -> metadata.EntryPoint | None:
    """What declares the name; None where nobody does.

    Raises:
        RequestError: several packages do, and which of them is meant would depend on the search path.
    """
    by_package = {_package(each): each for each in metadata.entry_points(group=f"vitscale.{kind}s", name=name)}
    if len(by_package) > 1:
        what = f"{kind} {shown(name)} is offered by several packages: {' and '.join(sorted(by_package))}"
        raise RequestError(what, next_step="Remove all of them but one, or rename its entry point")
    return next(iter(by_package.values()), None)


def _package(entry: metadata.EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else "an unknown package"


def _broken(kind: Kind, entry: metadata.EntryPoint, why: str, how: str = "cannot be loaded") -> RequestError:
    what = f"{kind} {shown(entry.name)} of {_package(entry)} ({entry.value}) {how}: {shown(why)}"
    return RequestError(what, next_step=f"Repair or remove that package, or use another {kind}")
