"""One host against several: which trials may be held against each other, and the test of all their GPU counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vitscale.analysis import TrialResult
from vitscale.analysis.claims import HostsTest, hosts_test
from vitscale.analysis.environments import differences
from vitscale.report.like_paper.series import Series, names


@dataclass(frozen=True)
class HostPair:
    """One workload, in one host and over several."""

    name: str
    inside: Series
    spread: Series
    test: HostsTest


def host_pairs(found: Sequence[Series]) -> list[HostPair]:
    """Every strong-scaling workload that was measured both ways, on like hardware, at a count of two GPUs or more."""
    strong = [one for one in found if one.mode == "strong-micro"]
    pairs = []
    for inside in (one for one in strong if one.place == "one host"):
        for spread in (one for one in strong if one.place != "one host" and one.group == inside.group):
            test = _test(inside, spread)
            if test is not None:
                pairs.append((inside, spread, test))
    labels = names([inside for inside, _, _ in pairs])
    return [HostPair(name, *pair) for name, pair in zip(labels, pairs, strict=True)]


def _test(inside: Series, spread: Series) -> HostsTest | None:
    one_host, several = _trials(inside), _trials(spread)
    both = [
        gpus
        for gpus in one_host
        if gpus in several
        and several[gpus].trial.world.nodes > 1
        and not differences(one_host[gpus].surroundings, several[gpus].surroundings)
    ]
    return hosts_test(
        {gpus: one_host[gpus].comparable_costs for gpus in both},
        {gpus: several[gpus].comparable_costs for gpus in both},
    )


def _trials(one: Series) -> dict[int, TrialResult]:
    return {member.gpus: member.trial for member in one.members if member.trial.comparable_costs}
