"""Launchers that other packages bring, by entry point: loaded only when named."""

from __future__ import annotations

from importlib import metadata

from vitscale.errors import RequestError, explain, shown
from vitscale.launchers.base import Launcher

GROUP = "vitscale.launchers"
"""The entry point's object is a class without arguments, or an object, with `launch`, `unavailable` and `unfit`."""


def names() -> set[str]:
    """The launchers that installed packages offer; none of them is loaded."""
    return metadata.entry_points(group=GROUP).names


def load(name: str) -> Launcher | None:
    """The launcher of that name; None where no package offers it.

    Raises:
        RequestError: it cannot be imported, or is no launcher; with the package that it came from.
    """
    found = next(iter(metadata.entry_points(group=GROUP, name=name)), None)
    if found is None:
        return None
    try:
        loaded = found.load()
        launcher = loaded() if isinstance(loaded, type) else loaded
    except (Exception, SystemExit) as error:  # whatever a stranger's module does while it is imported
        raise _broken(found, f"{type(error).__name__}: {error}") from None
    if lacking := [part for part in ("launch", "unavailable", "unfit") if not callable(getattr(launcher, part, None))]:
        raise _broken(found, f"it has no {' and no '.join(lacking)}")
    return launcher  # type: ignore[no-any-return]


def _broken(found: metadata.EntryPoint, why: str) -> RequestError:
    package = found.dist.name if found.dist is not None else "an unknown package"
    return RequestError(
        explain(
            f"launcher {shown(found.name)} of {package} ({found.value}) cannot be loaded: {shown(why)}",
            next_step="Repair or remove that package, or use another launcher",
        )
    )
