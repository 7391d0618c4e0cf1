"""A finding of a check, and the words that findings share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

from vitscale.present.document import SEVERITIES, About, Finding, Severity
from vitscale.present.units import listed
from vitscale.store.checks import CheckedRank


def finding(
    severity: Severity, kind: str, message: str, advice: str, ranks: Sequence[int] = (), hosts: Sequence[str] = ()
) -> Finding:
    """One finding of a check. An error: training will not start, or not end; a warning: it will be slower than it could
    be, or its figures may mislead.

    Args:
        severity: how much it matters.
        kind: a fixed name: host-unreachable, slow-rank, ...
        message: what is there.
        advice: what to do.
        ranks: whom it is about; empty: hosts, or all.
        hosts: likewise.
    """
    return Finding(kind, severity, message, advice, About(ranks=tuple(ranks), hosts=tuple(hosts)))


error, warning, note = (partial(finding, severity) for severity in SEVERITIES)


def host_of(rank: CheckedRank) -> str | None:
    """What a rank's host calls itself."""
    return rank.facts.environment.host if rank.facts is not None else None


def hosts_of(ranks: Iterable[CheckedRank]) -> tuple[str, ...]:
    """The hosts of these ranks, each once, in order."""
    return tuple(dict.fromkeys(host for rank in ranks if (host := host_of(rank)) is not None))


def ranks_named(ranks: Sequence[int]) -> str:
    """ "rank 3", "ranks 1, 2 and 5"."""
    return f"rank{'s' if len(ranks) != 1 else ''} {listed(ranks)}"
