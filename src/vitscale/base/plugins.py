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
PluginKind = Literal["engine", "model", "dataset", "launcher", "scheduler", "meter", "chart", "importer"]


def names(kind: PluginKind) -> set[str]:
    """Return the names of all things of a kind that installed packages offer; nothing is imported."""
    return set(metadata.entry_points(group=f"vitscale.{kind}s").names)


def target(kind: PluginKind, name: str) -> str | None:
    """Return the "module:object" that a package offers as `name`; None where none does."""
    entry = _entry_point(kind, name)
    return None if entry is None else entry.value


def package(kind: PluginKind, name: str) -> str | None:
    """Return the name of the package that offers a thing; None where none does."""
    entry = _entry_point(kind, name)
    return None if entry is None else _package_name(entry)


def known(kind: PluginKind, name: str, own: Mapping[str, T], *needs: str, of: type = object, next_step: str = "") -> T:
    """Return the thing called `name`: vitscale's own where it has one of this name, else an installed package's.

    A package declares its thing as an entry point, which leads to an object, or to a class that is called without
    arguments to make one.

    Args:
        kind: kind of thing; its group of entry points is `vitscale.<kind>s`.
        name: name of the thing.
        own: vitscale's own things by name.
        needs: methods that a package's object must have; "__call__" for a function.
        of: class of which it must be an instance.
        next_step: what to do where there is none.

    Raises:
        RequestError: there is none of this name (the message lists the names that exist); or a package's thing cannot
            be imported, or is not what it must be (the message names the package).
    """
    if name in own:
        return own[name]
    entry = _entry_point(kind, name)
    if entry is None:
        raise unknown(kind, name, {*own, *names(kind)}, next_step=next_step)
    try:
        loaded = entry.load()
        thing: T = loaded() if isinstance(loaded, type) else loaded
    except (Exception, SystemExit) as error:  # a foreign module may do anything while it is imported
        raise _unusable_error(kind, entry, fault(error)) from None
    if not isinstance(thing, of):
        raise _unusable_error(kind, entry, f"it is {type(thing).__name__}, and no {of.__name__}")
    lacking = [method for method in needs if not callable(getattr(thing, method, None))]
    if lacking:
        raise _unusable_error(kind, entry, f"it has no {' and no '.join(lacking)}")
    return thing


def answer(kind: PluginKind, name: str, own: Container[str], ask: Callable[[], T], *of: type) -> T:
    """Call `ask`, which uses a thing that `known` has returned, and return its result.

    What one of vitscale's own things raises stays as it is. Where a package's thing fails, the message names the
    package.

    Args:
        kind: the thing's kind.
        name: its name.
        own: names of vitscale's own things.
        ask: calls the thing.
        of: classes of which the result of a package's thing must be an instance.

    Raises:
        RequestError: a package's thing raised, or returned something else; the message names the package.
    """
    entry = None if name in own else _entry_point(kind, name)
    if entry is None:
        return ask()
    try:
        value = ask()
    except (VitscaleError, MemoryError):
        raise
    except (Exception, SystemExit) as error:
        raise _unusable_error(kind, entry, fault(error), failure="failed") from error
    if not isinstance(value, of):
        class_names = ["None" if expected is type(None) else expected.__name__ for expected in of]
        raise _unusable_error(
            kind, entry, f"it returned {shown(value)}, and no {' or '.join(class_names)}", failure="failed"
        )
    return value


def referred(reference: str) -> Any:
    """Import the object that a reference names, and return it.

    A table may refer to an object whose module needs torch: it is imported only here.

    Example: "vitscale.engines.ddp.wrap:DdpEngine" gives the class `DdpEngine` of module `vitscale.engines.ddp.wrap`.
    """
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)


def fault(error: BaseException) -> str:
    """Return what another package's code raised, and where: "OSError: meter unplugged (meter.py, line 7)"."""
    text = f"{type(error).__name__}: {error}"
    innermost = error.__traceback__
    while innermost is not None and innermost.tb_next is not None:
        innermost = innermost.tb_next
    if innermost is None:
        return text
    module = str(innermost.tb_frame.f_globals.get("__name__"))
    # Raised where vitscale calls the package, or where Python imports it: then no line of the package is to blame.
    is_raised_outside_package = module.startswith(("vitscale.", "importlib"))
    if is_raised_outside_package:
        return text
    file_name = innermost.tb_frame.f_code.co_filename.rpartition("/")[2]
    return f"{text} ({file_name}, line {innermost.tb_lineno})"


def _entry_point(kind: PluginKind, name: str) -> metadata.EntryPoint | None:
    """Return the entry point that declares the name; None where no package has one.

    Raises:
        RequestError: several packages do, and which of them is meant would depend on the search path.
    """
    entries = metadata.entry_points(group=f"vitscale.{kind}s", name=name)
    by_package = {_package_name(entry): entry for entry in entries}
    if len(by_package) > 1:
        message = f"{kind} {shown(name)} is offered by several packages: {' and '.join(sorted(by_package))}"
        raise RequestError(message, next_step="Remove all of them but one, or rename its entry point")
    return next(iter(by_package.values()), None)


def _package_name(entry: metadata.EntryPoint) -> str:
    """Return the name of the package that declares an entry point."""
    return entry.dist.name if entry.dist is not None else "an unknown package"


def _unusable_error(
    kind: PluginKind, entry: metadata.EntryPoint, reason: str, failure: str = "cannot be loaded"
) -> RequestError:
    """Return the error of a package's thing that cannot be used: "meter 'x' of PACKAGE (module:X) failed: reason"."""
    message = f"{kind} {shown(entry.name)} of {_package_name(entry)} ({entry.value}) {failure}: {shown(reason)}"
    return RequestError(message, next_step=f"Repair or remove that package, or use another {kind}")
