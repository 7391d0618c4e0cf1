"""All verdicts on a check, the most severe first."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from vitscale.preflight import data_verdicts, host_verdicts, network_verdicts, pace_verdicts, reach_verdicts
from vitscale.preflight.verdict import SEVERITIES, Verdict
from vitscale.store.check_records import CheckRecord

RULES: tuple[Callable[[CheckRecord], Iterable[Verdict]], ...] = (
    reach_verdicts.unreachable_hosts,
    reach_verdicts.missing_ranks,
    reach_verdicts.rank_0_not_reached,
    reach_verdicts.failed_stages,
    network_verdicts.interface_choices,
    data_verdicts.unshared_folder,
    data_verdicts.full_disk,
    pace_verdicts.slow_ranks,
    pace_verdicts.throttled,
    pace_verdicts.clocks_differ,
    pace_verdicts.mixed_devices,
    host_verdicts.too_few_cores,
    host_verdicts.versions_differ,
    host_verdicts.drivers_differ,
    network_verdicts.slow_link,
    data_verdicts.slow_loader,
    data_verdicts.slow_disk,
    pace_verdicts.power_limits,
    pace_verdicts.unsteady,
    reach_verdicts.broken_lines,
)
"""The whole list; among verdicts of one severity its order is kept."""


def judged(record: CheckRecord) -> tuple[Verdict, ...]:
    """What is to be said of a check."""
    found = [verdict for rule in RULES for verdict in rule(record)]
    return tuple(sorted(found, key=lambda verdict: SEVERITIES.index(verdict.severity)))
