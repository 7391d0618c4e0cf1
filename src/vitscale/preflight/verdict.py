"""A finding of a check, and the words that findings share."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import partial

from vitscale.present.document import EVERYTHING, SEVERITIES, About, Finding, Severity
from vitscale.present.units import listed
from vitscale.store.checks import CheckedRank


def finding(severity: Severity, kind: str, message: str, advice: str, about: About = EVERYTHING) -> Finding:
    """Return one finding of a check.

    An error means that training will not start, or not end; a warning that it will be slower than possible, or that its
    figures may mislead.

    Args:
        severity: how much it matters.
        kind: a fixed name: host-unreachable, slow-rank, ...
        message: the fact that matters.
        advice: what to do.
        about: ranks and hosts that it concerns.
    """
    return Finding(kind, severity, message, advice, about)


error, warning, note = (partial(finding, severity) for severity in SEVERITIES)


def host_of(rank: CheckedRank) -> str | None:
    """Return the name that a rank's host gives itself; None where unknown."""
    return rank.facts.environment.host if rank.facts is not None else None


def hosts_of(ranks: Iterable[CheckedRank]) -> tuple[str, ...]:
    """Return the hosts of these ranks, each once, in order."""
    hosts = dict.fromkeys(map(host_of, ranks))
    return tuple(host for host in hosts if host is not None)


def concerning(ranks: Collection[CheckedRank]) -> About:
    """Return these ranks and their hosts, as what a finding is about."""
    return About(ranks=tuple(rank.rank for rank in ranks), hosts=hosts_of(ranks))


def ranks_named(ranks: Sequence[int]) -> str:
    """Return ranks in words: "rank 3", "ranks 1, 2 and 5"."""
    noun = "rank" if len(ranks) == 1 else "ranks"
    return f"{noun} {listed(ranks)}"
