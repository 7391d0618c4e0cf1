"""What a reader found in the files of others, before it is made a study: runs, notes, and what could not be used."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vitscale.errors import printable
from vitscale.store.records import EpochLine, ExplainedLine, StepLine, TrafficLine
from vitscale.store.results import ImportedFile
from vitscale.trial.trial import Device, Precision

MOST_NAMED = 5
"""So many broken lines are named; of the others the number is told."""


@dataclass(frozen=True)
class Setting:
    """What a file says of one run's trial. None: it does not tell."""

    gpus: int
    nodes: int = 1
    micro_batch: int | None = None
    grad_accum: int = 1
    fraction: float = 1.0
    cluster: str | None = None
    layout: str | None = None
    """As the file words it."""
    dataset: str | None = None
    series: str | None = None
    """A name that a plain CSV gives to what belongs together."""
    engine: str | None = None
    zero_stage: int | None = None
    precision: Precision | None = None
    model: str | None = None
    """By a name that need not be known here."""
    parameters: int | None = None
    train_samples: int | None = None
    """Training images of the whole dataset, where the file itself tells them."""
    devices: tuple[str, ...] = ()
    """Different GPU types of the ranks, by name."""
    device: Device = "cuda"


@dataclass(frozen=True)
class LogRank:
    """One rank's lines."""

    rank: int
    device: str | None = None
    host: str | None = None
    steps: tuple[StepLine, ...] = ()
    epochs: tuple[EpochLine, ...] = ()
    explained: tuple[ExplainedLine, ...] = ()
    traffic: tuple[TrafficLine, ...] = ()


@dataclass(frozen=True)
class LogRun:
    """One run of one setting."""

    setting: Setting
    name: str
    """Tells it apart from other runs of its setting: the value of `run`, or the file."""
    files: tuple[ImportedFile, ...]
    ranks: tuple[LogRank, ...]
    versions: dict[str, str | None] = field(default_factory=dict)
    synchronised: bool | None = None
    """Whether something waited for the device inside each step."""
    of_the_run: bool = False
    """The times are the run's own, not those of one rank."""
    started_unix_seconds: float = 0.0
    warmup_steps: int = 0


@dataclass(frozen=True)
class LogContents:
    """All that the files of one import hold."""

    runs: tuple[LogRun, ...]
    notes: tuple[str, ...]
    """What was assumed or left aside, and stands."""
    problems: tuple[str, ...]
    """What could not be used."""
    data: dict[str, list[Any]] = field(default_factory=dict)
    """What a format tells beyond runs, for the JSON of the import."""


class Problems:
    """Broken lines of one file: a few by number, then a count."""

    def __init__(self, file: str) -> None:
        self._file = printable(file)[:100]
        self._named: dict[str, list[str]] = {}
        self._counts: dict[str, int] = {}

    def line(self, number: int, what: str, kind: str = "broken") -> None:
        """One line that cannot be used.

        Args:
            number: counted from 1.
            what: why, in a few words.
            kind: what such lines are called in the count: broken, duplicate, cut off.
        """
        self._counts[kind] = self._counts.get(kind, 0) + 1
        named = self._named.setdefault(kind, [])
        if len(named) < MOST_NAMED:
            named.append(f"line {number} ({printable(what)[:120]})")

    @property
    def count(self) -> int:
        """How many broken lines were told of."""
        return sum(self._counts.values())

    def told(self) -> tuple[str, ...]:
        """One sentence for each kind."""
        return tuple(self._sentence(kind, count) for kind, count in self._counts.items())

    def _sentence(self, kind: str, count: int) -> str:
        named = self._named[kind]
        more = f" and {count - len(named):,} more" if count > len(named) else ""
        lines = f"{count:,} {kind} line{'s' if count != 1 else ''}"
        return f"{self._file}: {lines} left out: {', '.join(named)}{more}"
