"""torchrun: PyTorch's own launcher, one agent per node."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from vitscale.trial import World


class Torchrun:
    """One node; the agent picks a free port by itself."""

    def command(self, world: World, run_folder: Path) -> list[str]:
        """`python -m torch.distributed.run`, which is what `torchrun` runs, under this very interpreter.

        No restarts: a rank that fails ends the run, and the driver decides what comes next.
        """
        return [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={world.ranks_per_node}",
            "--max-restarts=0",
            "-m",
            "vitscale.worker",
            str(run_folder),
        ]

    def unavailable(self) -> str | None:
        """Needs torch, found without importing it."""
        if importlib.util.find_spec("torch") is None:
            return "torch is not installed; install it, or use a machine where it is"
        return None

    def unfit(self, world: World) -> str | None:
        """One node, any number of ranks."""
        if world.nodes == 1:
            return None
        return f"it is used on one node here, not {world.nodes}"
