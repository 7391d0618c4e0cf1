"""A published study as data: its figures, what was published beside them, its tables, its claims as tests.

`selection` decides which series of the results a figure draws.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from vitscale.analysis import Analysis
from vitscale.pages.like.series import FigureSeries, Hosts, PublishedPoints, all_series
from vitscale.prediction.network.links import Network
from vitscale.present.document import Table
from vitscale.trial.trial import Mode

Quantity = Literal[
    "epoch time", "epoch time by micro-batch", "speedup", "efficiency", "doublings", "one host against several",
    "accuracy of datasets", "accuracy by micro-batch", "loss and accuracy", "utilisation", "run waterfall",
]  # fmt: skip
"""What a figure shows; epoch time comes with speedup, or with efficiency in weak scaling."""


@dataclass(frozen=True, kw_only=True)
class StudyFigure:
    """One figure of a study: what its caption says, and what it draws from other results."""

    study: str
    """The study's name in `report --like`."""
    number: int | None = None
    """The study's own number; None where it is not known."""
    caption: str
    """The study's caption, without number and batch size."""
    draws: str
    """What the figure draws here, in words."""
    quantity: Quantity
    mode: Mode
    """strong-micro is what the studies call strong or weak scaling with a fixed batch per GPU."""
    cluster: str = ""
    """The study's cluster. Results of the study's other clusters are not drawn; results of no named cluster are."""
    hosts: tuple[Hosts, ...] = ()
    """Where GPUs are; a series is needed for each of these. Empty: any will do."""
    datasets: tuple[str, ...] = ()
    """A series is needed for each of these; in results without any dataset of the study theirs stand in. Empty: each
    dataset of the results is drawn separately."""
    micro_batch: int | None = None
    """Images per GPU. None: each micro-batch of the results is drawn separately."""
    gpus: tuple[int, ...] = (1, 2, 4, 8)
    """GPU counts that a study like this would measure."""

    @property
    def name(self) -> str:
        """The figure's name, also that of its file without the ending."""
        caption = self.caption.lower().replace(",", "").replace(" ", "-")
        return f"figure-{self.number:02d}-{caption}" if self.number is not None else caption

    @property
    def title(self) -> str:
        """The caption with the batch size, without the number."""
        return f"{self.caption} (batch size {self.micro_batch})" if self.micro_batch is not None else self.caption

    @property
    def heading(self) -> str:
        """The title, after the number where there is one."""
        return f"Figure {self.number}. {self.title}" if self.number is not None else self.title


@dataclass(frozen=True)
class MeasuredData:
    """The results at hand, from which a study's figures and tables are made and on which its claims are tested."""

    analysis: Analysis
    series: tuple[FigureSeries, ...]
    network: Network | None = None
    """The network between the ranks, as it was checked or declared, for what transfers take; None: it is not needed."""

    @classmethod
    def of(cls, analysis: Analysis, network: Network | None = None) -> MeasuredData:
        """Take the series from results that were analysed."""
        return cls(analysis, tuple(all_series(analysis)), network)


@dataclass(frozen=True)
class ClaimOutcome:
    """The outcome of testing a claim."""

    sentences: tuple[str, ...]
    """Empty where nothing could be tested."""
    entries: Mapping[str, Sequence[Mapping[str, Any]]]
    """Entries for JSON: name to each single test."""


@dataclass(frozen=True)
class StudyClaim:
    """A claim of the study, as a question to the results at hand."""

    question: str
    """The claim as a question, the heading of its test."""
    meaning: str
    test: Callable[[MeasuredData], ClaimOutcome]
    untested: str
    """Text where a test has no sentences: what is missing, and what would produce it."""


@dataclass(frozen=True)
class PublishedStudy:
    """Everything about one published study."""

    name: str
    """The study's name in `report --like`."""
    title_name: str
    """Name in titles: "the published study"."""
    source: str
    """Title and where it is found."""
    reading_note: str
    """How the figures relate to the study's own, which is named in it."""
    figures: tuple[StudyFigure, ...]
    claims: tuple[StudyClaim, ...]
    published_points: Callable[[Sequence[FigureSeries]], PublishedPoints] = field(
        default=lambda _series: PublishedPoints()
    )
    """Published points of the workloads of some series."""
    tables: Callable[[MeasuredData], Sequence[Table]] = field(default=lambda _measured: ())

    @property
    def claims_text(self) -> str:
        """The number of claims in words: "two claims"."""
        return "claim" if len(self.claims) == 1 else "two claims"
