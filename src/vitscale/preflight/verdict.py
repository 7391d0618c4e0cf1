"""One verdict of a check: what was found, why it matters, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from vitscale.store.check_records import CheckedRank

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
"""Most severe first. An error: training will not start, or not end. A warning: it will be slower than it could be, or
its figures may mislead. A note: worth knowing."""
_MOST_NAMED = 8


@dataclass(frozen=True)
class Verdict:
    """One finding of a check."""

    kind: str
    """A fixed name: host-unreachable, slow-rank, ..."""
    severity: Severity
    message: str
    advice: str
    ranks: tuple[int, ...] = ()
    """The ranks it is about; empty: hosts, or all."""
    hosts: tuple[str, ...] = ()


def host_of(rank: CheckedRank) -> str | None:
    """What a rank's host calls itself."""
    return rank.facts.environment.host if rank.facts is not None else None


def hosts_of(ranks: Iterable[CheckedRank]) -> tuple[str, ...]:
    """The hosts of these ranks, each once, in order."""
    return tuple(dict.fromkeys(host for rank in ranks if (host := host_of(rank)) is not None))


def listed(things: Sequence[object]) -> str:
    """ "a, b and c"; of many the first eight."""
    words = [str(thing) for thing in things]
    if len(words) > _MOST_NAMED:
        words = [*words[:_MOST_NAMED], f"{len(words) - _MOST_NAMED} more"]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}" if words else "none"


def ranks_named(ranks: Sequence[int]) -> str:
    """ "rank 3", "ranks 1, 2 and 5"."""
    return f"rank{'s' if len(ranks) != 1 else ''} {listed(ranks)}"
