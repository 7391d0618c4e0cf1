"""`python -m arriving_driver LAUNCHER HOSTFILE FOLDER`: starts arriving_ranks on two hosts, has one killed, ends all.

What `vitscale run` does for a run, without training: its launchers, schedulers and heartbeats are the real ones.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from processes import wait_until
from vitscale.machine.hosts import read_hostfile
from vitscale.runner.one_run import launch_plan, start_ranks
from vitscale.schedulers.hostfile import Hostfile
from vitscale.study.sections import LaunchSection
from vitscale.trial.trial import World

VALUE = 'it\'s "quoted"; $(exit) `exit` %h\nand more'
"""What no shell between the driver and a rank may touch."""
WORLD = World(nodes=2, ranks_per_node=2, threads_per_rank=1)


TESTS = Path(__file__).parent


def _python_with_tests(folder: Path) -> Path:
    """An interpreter that finds the tests' modules on every host, whatever variables reach it."""
    program = folder / "python"
    program.write_text(f'#!/bin/sh\nPYTHONPATH={TESTS} exec {sys.executable} "$@"\n')
    program.chmod(0o755)
    return program


def main(launcher: str, hostfile: Path, folder: Path) -> None:
    section = LaunchSection(interface="eth0", environment={"ARRIVING": VALUE})
    scheduler = Hostfile(read_hostfile(hostfile))
    scheduler.python = str(_python_with_tests(folder))
    spawn = launch_plan(scheduler, section, launcher, WORLD, folder, "arriving_ranks")
    search_path = {"PYTHONPATH": f"{TESTS}:$(touch {folder.parent}/executed)"}
    started = start_ranks(spawn, scheduler, section, environment=search_path)
    try:
        wait_until(lambda: len([*folder.glob("arrived-*.json")]) == WORLD.size or started.exit_code, "all arrive")
        last = WORLD.size - 1
        (folder / f"kill-{last}").touch()
        wait_until(
            lambda: (status := started.heartbeats.statuses().get(last)) and status.disconnection,
            "the driver hears of the loss",
        )
        exit_code = started.wait(3.0)
    finally:
        unreached = started.end()
    print(json.dumps({"exit_code": exit_code, "unreached": unreached}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
