"""What other packages bring: entry points, listed without importing anything and loaded where a study or a command
names them, so that a broken one fails nobody else. docs/extending.md says what each kind is."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from importlib import metadata
from typing import Any, Literal, TypeVar

from vitscale.errors import RequestError, shown, unknown

T = TypeVar("T")
Kind = Literal["engine", "model", "dataset", "launcher", "scheduler", "probe", "chart", "importer"]


def names(kind: Kind) -> set[str]:
    """What installed packages offer; none of it is imported."""
    return set(metadata.entry_points(group=f"vitscale.{kind}s").names)


def target(kind: Kind, name: str) -> str | None:
    """The "module:object" that a package offers by that name; None where none does."""
    entry = _entry(kind, name)
    return None if entry is None else entry.value


def load(kind: Kind, name: str, *needs: str, of: type = object) -> Any | None:
    """What a package offers by that name; None where none does.

    Args:
        kind: of thing; its group is `vitscale.<kind>s`.
        name: of the entry point. What it points at is an object, or a class that makes one without arguments.
        needs: methods that it must have; "__call__" of a function.
        of: class that it must be of.

    Raises:
        RequestError: it cannot be imported, or is something else; with the package that it came from.
    """
    entry = _entry(kind, name)
    if entry is None:
        return None
    try:
        loaded = entry.load()
        made = loaded() if isinstance(loaded, type) else loaded
    except (Exception, SystemExit) as error:  # whatever a stranger's module does while it is imported
        raise _broken(kind, entry, f"{type(error).__name__}: {error}") from None
    if not isinstance(made, of):
        raise _broken(kind, entry, f"it is {type(made).__name__}, and no {of.__name__}")
    if lacking := [method for method in needs if not callable(getattr(made, method, None))]:
        raise _broken(kind, entry, f"it has no {' and no '.join(lacking)}")
    return made


def known(kind: Kind, name: str, own: Mapping[str, T], *needs: str, of: type = object, next_step: str = "") -> T:
    """What is called so: of vitscale's `own`, which nobody replaces, else of an installed package (`load`).

    Raises:
        RequestError: nothing is, with what there is; or the package that offers it is broken.
    """
    if name in own:
        return own[name]
    loaded: T | None = load(kind, name, *needs, of=of)
    if loaded is None:
        raise unknown(kind, name, {*own, *names(kind)}, next_step=next_step)
    return loaded


def referred(reference: str) -> Any:
    """The object that "module:name" names: of what is declared on one plane and done on the other."""
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)


def _entry(kind: Kind, name: str) -> metadata.EntryPoint | None:
    return next(iter(metadata.entry_points(group=f"vitscale.{kind}s", name=name)), None)


def _broken(kind: Kind, entry: metadata.EntryPoint, why: str) -> RequestError:
    package = entry.dist.name if entry.dist is not None else "an unknown package"
    what = f"{kind} {shown(entry.name)} of {package} ({entry.value}) cannot be loaded: {shown(why)}"
    return RequestError(what, next_step=f"Repair or remove that package, or use another {kind}")
