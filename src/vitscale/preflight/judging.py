"""All findings of a check, the most severe first; and those on pace again, before a study runs on the same hosts."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from vitscale.preflight import host_verdicts, network_verdicts, pace_verdicts, reach_verdicts
from vitscale.present.document import Finding, most_severe_first
from vitscale.runner import Plan
from vitscale.store.check_records import CheckRecord
from vitscale.store.checks import latest

RULES: tuple[Callable[[CheckRecord], Iterable[Finding]], ...] = (
    reach_verdicts.unreachable_hosts,
    reach_verdicts.missing_ranks,
    reach_verdicts.rank_0_not_reached,
    reach_verdicts.failed_stages,
    network_verdicts.interface_choices,
    host_verdicts.unshared_folder,
    host_verdicts.full_disk,
    pace_verdicts.slow_ranks,
    pace_verdicts.throttled,
    pace_verdicts.clocks_differ,
    pace_verdicts.mixed_devices,
    host_verdicts.too_few_cores,
    host_verdicts.versions_differ,
    host_verdicts.drivers_differ,
    network_verdicts.slow_link,
    host_verdicts.slow_loader,
    host_verdicts.slow_disk,
    pace_verdicts.power_limits,
    pace_verdicts.unsteady,
    reach_verdicts.broken_lines,
)
"""The whole list; among findings of one severity its order is kept."""


def judged(record: CheckRecord) -> tuple[Finding, ...]:
    """What is to be said of a check."""
    return most_severe_first([finding for rule in RULES for finding in rule(record)])


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
    findings = [finding for rule in (pace_verdicts.slow_ranks, pace_verdicts.mixed_devices) for finding in rule(record)]
    return [f"{finding.message} (vitscale check, {when}). {finding.advice}" for finding in findings]
