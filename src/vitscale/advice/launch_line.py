"""The exact command that would start an advised trial's ranks, on hosts that have no names yet."""

from __future__ import annotations

import shlex
from pathlib import Path

from vitscale.errors import RequestError
from vitscale.launchers import Start, launcher_named
from vitscale.machine.hosts import Host
from vitscale.trial.trial import Trial

_FOLDER = Path("RESULTS/runs/TRIAL")
_PORT = 29_500
_SHOWN = 2
"""Commands of the first hosts; the others' differ in the host's number alone."""


def launch_lines(trial: Trial) -> list[str]:
    """What `vitscale run` would start, one line for each of the first hosts; else one line that says why not."""
    world = trial.world
    hosts = tuple(Host(f"HOST{n}", world.ranks_per_node) for n in range(1, world.nodes + 1)) if world.nodes > 1 else ()
    try:
        launcher = launcher_named(trial.launcher, world, hosts)
        launch = launcher.launch(world, Start(("python", "-m", "vitscale.worker", str(_FOLDER)), _FOLDER, hosts, _PORT))
    except RequestError as error:
        return [f"unavailable: {error}"]
    lines = [shlex.join(command) for command in launch.commands[:_SHOWN]]
    if (more := len(launch.commands) - _SHOWN) > 0:
        lines.append(f"... and {more} more, one on each host")
    return lines
