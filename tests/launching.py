"""Worlds and hosts for tests of launchers, and the argv that a launcher makes of them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from study_factory import expanded
from vitscale.launchers import Launcher, Spawn
from vitscale.launchers.base import hosts_refusal
from vitscale.machine.hosts import Host
from vitscale.trial.trial import Trial, World

PYTHON = sys.executable
FOLDER = Path("/results/with a space/runs/0123456789ab-r0-a0")
PLAIN_FOLDER = Path("/results/runs/0123456789ab-r0-a0")


class BareLauncher(Launcher):
    """Starts one rank by its own command, with nothing in between: the lightest start, for tests of all around it."""

    def launch(self, world: World, spawn: Spawn) -> Spawn:
        del world
        return replace(spawn, per_host=bool(spawn.hosts))

    def unfit(self, world: World, hosts: tuple[Host, ...]) -> str | None:
        return hosts_refusal(world, hosts) if world.size == 1 else f"it starts one rank, not {world.size}"


def world(nodes: int, ranks_per_node: int) -> World:
    return World(nodes=nodes, ranks_per_node=ranks_per_node, threads_per_rank=2)


def hosts(number: int) -> tuple[Host, ...]:
    return tuple(Host(f"node{n}", 8) for n in range(number))


def launch(
    launcher: Launcher,
    of: World,
    on: tuple[Host, ...] = (),
    *,
    folder: Path = FOLDER,
    interface: str | None = None,
) -> Spawn:
    """As the driver asks for it."""
    command = (PYTHON, "-P", "-m", "vitscale.worker", str(folder))
    return launcher.launch(of, Spawn((command,), folder, on, master_port=29500, interface=interface))


def a_trial(tmp_path: Path, launcher: str, of: World) -> Trial:
    trial = next(iter(expanded(tmp_path).trials.values()))
    return trial.model_copy(update={"launcher": launcher, "world": of})


def options(argv: Iterable[str]) -> list[str]:
    """The names of the options in an argv, up to the module that the ranks run."""
    names = []
    for word in argv:
        if word == "vitscale.worker":
            break
        if word.startswith("--"):
            names.append(word.partition("=")[0])
    return names


def help_of(*argv: str) -> str:
    """What a program says of its options."""
    answer = subprocess.run(argv, capture_output=True, text=True, check=True)
    return answer.stdout + answer.stderr
