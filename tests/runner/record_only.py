"""The command line with one launcher more, whose ranks only write records: a run takes a fraction of a second.

Everything else is the product: driver, lock, folders, watching, outcomes. As the agent of a host:
`record_only.py FOLDER FIRST RANKS`.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path

from vitscale.launchers.base import Spawn
from vitscale.machine.hosts import Host
from vitscale.processes import launch_file
from vitscale.store import RankLog
from vitscale.store.records import EndLine, StepLine
from vitscale.store.results import RunHeader
from vitscale.trial.trial import World
from vitscale.worker.rank_process import die_with_parent

STEP_SECONDS = "VITSCALE_TEST_STEP_SECONDS"
"""A variable of the ranks: how long a step takes them."""
HOLD = "hold"
"""A file beside the results: ranks that have written a line wait while it is there."""


class RecordOnly:
    """Starts a process on each host that starts its ranks, as torchrun does."""

    def launch(self, world: World, spawn: Spawn) -> Spawn:
        local = world.ranks_per_node
        agents = tuple(
            (sys.executable, __file__, str(spawn.run_folder), str(node * local), str(local))
            for node in range(world.nodes)
        )
        return replace(spawn, commands=agents, per_host=bool(spawn.hosts))

    def unavailable(self) -> str | None:
        return None

    def unfit(self, world: World, hosts: tuple[Host, ...]) -> str | None:
        return None


def agent(run_folder: Path, first: int, ranks: int) -> int:
    """Forks so many ranks, from the first one on, into sessions of their own and waits for them."""
    launch = launch_file.read(run_folder)
    die_with_parent(launch)
    children = []
    for number in range(first, first + ranks):
        child = os.fork()
        if child == 0:
            os.setsid()
            die_with_parent(launch)
            os._exit(rank(run_folder, number))
        children.append(child)
    return max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)


def rank(run_folder: Path, number: int) -> int:
    """Writes one line per step; each names its run, so that a mixture would show."""
    header = RunHeader.model_validate_json((run_folder / "trial.json").read_text())
    log = RankLog(run_folder, number)
    mark = int(header.trial_id, 16) % 1_000_000 + header.repeat
    for step in range(20):
        log.write(StepLine(step=step, epoch=0, seconds=0.001, images=mark, loss=float(number), warmup=False))
        time.sleep(float(os.environ.get(STEP_SECONDS, "0.002")))
        while (run_folder.parents[2] / HOLD).exists():
            time.sleep(0.01)
    log.write(EndLine())
    log.close()
    return 0


def cli(arguments: list[str]) -> None:
    """`vitscale ARGUMENTS` in this process, with the launcher `record-only`."""
    from vitscale import cli as command_line
    from vitscale import launchers
    from vitscale.schedulers import Hostfile

    launchers.LAUNCHERS["record-only"] = RecordOnly()
    # Addresses of this machine pass for hosts.
    Hostfile.pool = lambda self: self._hosts  # type: ignore[method-assign]  # in this process
    sys.argv = ["vitscale", *arguments]
    command_line.main()


def drive(arguments: list[str], folder: Path, output: Path) -> None:
    """The same in a folder, and into a file."""
    with output.open("w") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    os.chdir(folder)
    cli(arguments)


if __name__ == "__main__":
    if sys.argv[1] == "cli":
        cli(sys.argv[2:])
    else:
        sys.exit(agent(Path(sys.argv[1]), *map(int, sys.argv[2:])))
