"""Are the hosts alike, and have they cores enough for what runs on them?"""

from __future__ import annotations

from collections.abc import Iterable

from vitscale.preflight.verdict import finding, hosts_of
from vitscale.present.document import Finding
from vitscale.present.units import listed
from vitscale.store.check_records import CheckedRank, CheckRecord

_NEAR = 1.05
"""A quota is no number of cores; so much more may be asked of it."""


def versions_differ(record: CheckRecord) -> Iterable[Finding]:
    """Libraries of another version on some hosts."""
    found: dict[str, dict[str, list[CheckedRank]]] = {}
    for rank in record.ranks:
        if rank.facts is not None:
            for name, version in rank.facts.environment.versions.items():
                found.setdefault(name, {}).setdefault(version or "absent", []).append(rank)
    unlike = {name: by_version for name, by_version in found.items() if len(by_version) > 1}
    if unlike:
        each = []
        for name, by_version in unlike.items():
            usual = max(by_version, key=lambda version: len(by_version[version]))
            odd = [f"{v} on {listed(hosts_of(ranks))}" for v, ranks in by_version.items() if v != usual]
            each.append(f"{name} {usual}, but {listed(odd)}")
        yield finding(
            "versions-differ",
            "warning",
            f"not all hosts have the same versions: {'; '.join(each[:8])}",
            "Install the same versions everywhere, or use one environment on a shared disk",
        )


def drivers_differ(record: CheckRecord) -> Iterable[Finding]:
    """GPU drivers of other versions on some hosts."""
    found: dict[str, list[CheckedRank]] = {}
    for rank in record.ranks:
        if rank.facts is not None and rank.facts.environment.device.driver is not None:
            found.setdefault(rank.facts.environment.device.driver, []).append(rank)
    if len(found) > 1:
        each = [f"{driver} on {listed(hosts_of(ranks))}" for driver, ranks in found.items()]
        yield finding(
            "drivers-differ",
            "warning",
            f"not all hosts have the same GPU driver: {listed(each)}",
            "Install one driver everywhere; until then compare no figures across these hosts",
        )


def too_few_cores(record: CheckRecord) -> Iterable[Finding]:
    """More threads on a host than it has cores, or than its quota grants; loader threads counted apart."""
    threads = record.request.world.threads_per_rank
    workers = record.request.trial.data.workers if record.request.trial is not None else 0
    crowded: dict[str, str] = {}
    crowded_by_workers: dict[str, str] = {}
    by_host: dict[str, list[CheckedRank]] = {}
    for rank in record.ranks:
        if rank.facts is not None:
            by_host.setdefault(rank.facts.environment.host, []).append(rank)
    for host, ranks in by_host.items():
        facts = ranks[0].facts
        if facts is None:
            continue
        quota = facts.environment.cpu_quota_cores
        room = min(facts.host_cores, quota if quota is not None else facts.host_cores)
        has = f"{room:g} cores" + (" by its quota" if room < facts.host_cores else "")
        if len(ranks) * threads > _NEAR * room:
            crowded[host] = f"{len(ranks)} x {threads} threads on {has}"
        elif workers and len(ranks) * (threads + workers) > _NEAR * room:
            crowded_by_workers[host] = f"{len(ranks)} x ({threads} threads + {workers} loader threads) on {has}"
    if crowded:
        yield finding(
            "too-few-cores",
            "warning",
            f"ranks share cores on {listed([*crowded])}: {next(iter(crowded.values()))}",
            "Use fewer ranks per host or a smaller launch.threads_per_rank, or ask for more cores",
            hosts=tuple(crowded),
        )
    if crowded_by_workers:
        yield finding(
            "loader-shares-cores",
            "warning",
            f"loader threads share cores with the ranks on {listed([*crowded_by_workers])}: "
            f"{next(iter(crowded_by_workers.values()))}",
            "Set data.workers lower, or ask for more cores per rank",
            hosts=tuple(crowded_by_workers),
        )
