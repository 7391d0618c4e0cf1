"""This machine, with a variable that tells its processes who started them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from vitscale.launchers.base import Spawn
from vitscale.schedulers.base import LocalHost
from vitscale.study.sections import LaunchSection, NodeSection, SlurmSection


class Noted(LocalHost):
    """As `local`."""

    def adapt(self, spawn: Spawn) -> Spawn:
        return replace(spawn, environment={**spawn.environment, "STARTED_BY": "vitscale-example"})


def noted(launch: LaunchSection, slurm: SlurmSection, node: NodeSection | None, study_path: Path) -> Noted:
    """What the study says of hosts is nothing to it."""
    return Noted()
