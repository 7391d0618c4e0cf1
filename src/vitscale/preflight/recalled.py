"""What the last check found of the hosts' pace, told again before a study runs on them."""

from __future__ import annotations

import socket
import time
from pathlib import Path

from vitscale.preflight.pace_verdicts import mixed_devices, slow_ranks
from vitscale.runner import Plan
from vitscale.store.checks import latest


def pace_warnings(plan: Plan, results: Path) -> list[str]:
    """A line for each finding that ranks compute unlike: of the folder's newest check, else of the user's newest one of
    these very hosts; none where there is no check, or all ranks are alike.

    Args:
        plan: the study; the hosts of its largest world count.
        results: the folder given with -o, or what stands for it.
    """
    largest = max((trial.world for trial in plan.record.trials.values()), key=lambda world: world.size)
    hosts = tuple(host.name for host in plan.scheduler.hosts(largest)) or (socket.gethostname(),)
    record = latest(results, hosts)
    if record is None:
        return []
    when = time.strftime("%Y-%m-%d", time.gmtime(record.started_unix_seconds))
    found = [verdict for rule in (slow_ranks, mixed_devices) for verdict in rule(record)]
    return [f"{verdict.message} (vitscale check, {when}). {verdict.advice}" for verdict in found]
