"""In-process: the one process that is started is the rank; no launcher stands around it."""

from __future__ import annotations

import sys
from pathlib import Path

from vitscale.trial import World


class InProcess:
    """One rank, nothing in between: the shortest start-up, and the easiest to debug."""

    def command(self, world: World, run_folder: Path) -> list[str]:  # noqa: ARG002 - one signature for every launcher
        """`python -m vitscale.worker FOLDER`."""
        return [sys.executable, "-m", "vitscale.worker", str(run_folder)]

    def unavailable(self) -> str | None:
        """Always available."""
        return None

    def unfit(self, world: World) -> str | None:
        """Starts one rank only."""
        if world.size == 1:
            return None
        return f"it starts one rank, not {world.size}; use launcher = 'torchrun', or scaling.gpus = [1]"
