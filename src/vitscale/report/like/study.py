"""A published study as data: its figures, what was published beside them, its tables, and its claims as tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from vitscale.analysis import Analysis
from vitscale.prediction.network.links import Network
from vitscale.present.document import Table
from vitscale.report.like.beside import Beside, no_points
from vitscale.report.like.series import Place, Series, all_series
from vitscale.trial.trial import Mode

Kind = Literal[
    "scaling", "speedup", "efficiency", "doublings", "utilisation", "hosts", "accuracy by GPUs", "loss and accuracy",
    "time split", "run waterfall", "accuracy by micro-batch",
]  # fmt: skip


@dataclass(frozen=True)
class StudyFigure:
    """One figure of a study."""

    study: str
    """As `report --like` names it."""
    number: int | None
    """The study's own; None where it is not known."""
    title: str
    draws: str
    """In words."""
    kind: Kind
    mode: Mode | None = None
    """strong-micro is what the studies call strong or weak scaling of a fixed batch per GPU. None: any."""
    place: Place | None = None
    """Where the GPUs are. None: anywhere."""
    dataset: str | None = None
    """None: each one separately. Results that hold no dataset of the study show their own in its place."""
    micro_batch: int | None = None
    """Images per GPU. None: each one separately."""

    @property
    def name(self) -> str:
        """Also the file's name, without its ending."""
        title = self.title.lower().replace(",", "").replace(" ", "-")
        return f"figure-{self.number:02d}-{title}" if self.number is not None else title

    @property
    def heading(self) -> str:
        """The title, after the number where there is one."""
        return f"Figure {self.number}. {self.title}" if self.number is not None else self.title


@dataclass(frozen=True)
class Material:
    """What figures, tables and claims are made from."""

    analysis: Analysis
    series: tuple[Series, ...]
    network: Network | None = None
    """Between the ranks, as it was checked or declared; None: not asked for."""

    @classmethod
    def of(cls, analysis: Analysis, network: Network | None = None) -> Material:
        """That of some results."""
        return cls(analysis, tuple(all_series(analysis)), network)


@dataclass(frozen=True)
class Tested:
    """What came of a claim."""

    sentences: tuple[str, ...]
    """Empty where nothing could be tested."""
    entries: Mapping[str, Sequence[Mapping[str, Any]]]
    """For JSON: name to each single test."""


@dataclass(frozen=True)
class Claim:
    """Something that the study says, as a question to the results at hand."""

    question: str
    meaning: str
    test: Callable[[Material], Tested]
    untested: str
    """Said where it has no sentences: what is missing, and what would produce it."""


@dataclass(frozen=True)
class PublishedStudy:
    """All of it."""

    name: str
    """As `report --like` takes it."""
    short: str
    """ "the published study": in titles."""
    source: str
    """Title and where it is found."""
    reading: str
    """How the figures relate to the study's own, which is named in it."""
    figures: tuple[StudyFigure, ...]
    claims: tuple[Claim, ...]
    beside: Callable[[Sequence[Series]], Beside] = field(default=no_points)
    """Published points of the workloads of some series."""
    tables: Callable[[Material], Sequence[Table]] = field(default=lambda _material: ())

    @property
    def claims_text(self) -> str:
        """ "two claims"."""
        return "claim" if len(self.claims) == 1 else "two claims"
