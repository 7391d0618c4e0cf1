"""What a launcher is: a trial in, an argv out."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from vitscale.trial import World


class Launcher(Protocol):
    """Turns a world into the command that starts its ranks; each rank runs `python -m vitscale.worker FOLDER`."""

    def command(self, world: World, run_folder: Path) -> list[str]:
        """The exact argv. No shell is involved."""
        ...

    def unavailable(self) -> str | None:
        """Why it cannot be used on this machine, with what to do; None where it can."""
        ...

    def unfit(self, world: World) -> str | None:
        """Why it cannot start this world, with what to do; None where it can."""
        ...
