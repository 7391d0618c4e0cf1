"""`python -m vitscale.processes.host_agent FOLDER -- ARGV...`: runs ARGV here as long as the run's driver lives.

The driver starts what runs on other hosts through it. A remote shell leaves behind what it has started when its other
end dies; this agent does not: with its heartbeat it ends every process of the run on this host. And
`python -m vitscale.processes.host_agent --end TOKEN` ends the run of that token here.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from vitscale.processes import launch_file
from vitscale.processes.cleanup import end_all
from vitscale.processes.heartbeat import Heartbeat

_USAGE = "usage: python -m vitscale.processes.host_agent FOLDER -- COMMAND... | --end TOKEN"


def main(arguments: list[str]) -> int:
    """Does what the arguments say; returns the exit code."""
    match arguments:
        case ["--end", token]:
            end_all(token)
            return 0
        case [folder, "--", *command] if command:
            return _keep(Path(folder), command)
        case _:
            sys.exit(_USAGE)


def _keep(run_folder: Path, command: list[str]) -> int:
    try:
        launch = launch_file.read(run_folder)
    except (OSError, ValueError) as error:
        sys.exit(f"vitscale: {run_folder / launch_file.NAME} cannot be read on this host: {error}")
    if launch is None:
        sys.exit(f"vitscale: {run_folder} is not seen on this host: is the results folder shared by all hosts?")
    try:
        heartbeat = Heartbeat(launch, "agent", lost=lambda: end_all(launch.token))
    except (OSError, ValueError) as error:
        sys.exit(f"vitscale: the driver at {launch.lifeline} is not reached from this host: {error}")
    # Tied to this process: SIGKILL of this agent ends the command too.
    tied = [sys.executable, "-m", "vitscale.processes.parent_death", str(os.getpid()), "--", *command]
    code = subprocess.call(tied, stdin=subprocess.DEVNULL, env=launch_file.completed_environment(launch))
    heartbeat.close()
    # As a shell tells of a signal.
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
