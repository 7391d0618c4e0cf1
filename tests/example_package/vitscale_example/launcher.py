"""Ranks that leave the machine to others."""

from __future__ import annotations

from dataclasses import replace

from vitscale.launchers.base import Spawn
from vitscale.launchers.local import Local
from vitscale.trial.trial import World


class Niced(Local):
    """As `local`, one step down in the kernel's order."""

    def launch(self, world: World, spawn: Spawn) -> Spawn:
        local = super().launch(world, spawn)
        commands = tuple(("nice", "-n", "1", *command) for command in local.commands)
        return replace(local, commands=commands, from_prepared=False)
