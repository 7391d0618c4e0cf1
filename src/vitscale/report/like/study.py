"""A published study as data: its figures, what was published beside them, its tables, its claims as tests.

For each figure it tells which series of the results are drawn, or what these lack and which command would produce it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from vitscale.analysis import Analysis
from vitscale.prediction.network.links import Network
from vitscale.present.document import Table
from vitscale.report.like.series import DATASET_NAMES, Hosts, PublishedPoints, Series, all_series
from vitscale.trial.trial import Mode

Kind = Literal[
    "scaling", "speedup", "efficiency", "doublings", "utilisation", "hosts", "accuracy by GPUs", "loss and accuracy",
    "time split", "run waterfall", "accuracy by micro-batch",
]  # fmt: skip


@dataclass(frozen=True)
class StudyFigure:
    """One figure of a study."""

    study: str
    """The study's name in `report --like`."""
    number: int | None
    """The study's own number; None where it is not known."""
    title: str
    draws: str
    """What the figure draws, in words."""
    kind: Kind
    mode: Mode | None = None
    """strong-micro is what the studies call strong or weak scaling with a fixed batch per GPU. None: any mode."""
    hosts: Hosts | None = None
    """Place of the GPUs. None: anywhere."""
    dataset: str | None = None
    """None: each dataset separately. Results without any dataset of the study show their own in its place."""
    micro_batch: int | None = None
    """Images per GPU. None: each micro-batch separately."""

    @property
    def name(self) -> str:
        """The figure's name, also that of its file without the ending."""
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
    """The network between the ranks, as it was checked or declared; None: not asked for."""

    @classmethod
    def of(cls, analysis: Analysis, network: Network | None = None) -> Material:
        """The material that some results give."""
        return cls(analysis, tuple(all_series(analysis)), network)


@dataclass(frozen=True)
class Tested:
    """The outcome of testing a claim."""

    sentences: tuple[str, ...]
    """Empty where nothing could be tested."""
    entries: Mapping[str, Sequence[Mapping[str, Any]]]
    """Entries for JSON: name to each single test."""


@dataclass(frozen=True)
class Claim:
    """Something that the study says, as a question to the results at hand."""

    question: str
    meaning: str
    test: Callable[[Material], Tested]
    untested: str
    """Text where a test has no sentences: what is missing, and what would produce it."""


@dataclass(frozen=True)
class PublishedStudy:
    """Everything about one published study."""

    name: str
    """The study's name in `report --like`."""
    short: str
    """Name in titles: "the published study"."""
    source: str
    """Title and where it is found."""
    reading: str
    """How the figures relate to the study's own, which is named in it."""
    figures: tuple[StudyFigure, ...]
    claims: tuple[Claim, ...]
    published_points: Callable[[Sequence[Series]], PublishedPoints] = field(default=lambda _series: PublishedPoints())
    """Published points of the workloads of some series."""
    tables: Callable[[Material], Sequence[Table]] = field(default=lambda _material: ())

    @property
    def claims_text(self) -> str:
        """The number of claims in words: "two claims"."""
        return "claim" if len(self.claims) == 1 else "two claims"


_NAMED = ("cifar10", "cifar100")
"""Datasets that figures ask for by name."""


@dataclass(frozen=True)
class Selection:
    """What a figure draws."""

    series: tuple[Series, ...]
    notes: tuple[str, ...] = ()
    """Departures from the study's own figure."""


def select(figure: StudyFigure, series: Sequence[Series]) -> Selection | str:
    """The series of a figure, or what is missing, in words."""
    fitting = [curve for curve in series if figure.mode in (None, curve.mode) and figure.hosts in (None, curve.hosts)]
    if figure.kind == "scaling":
        fitting = [curve for curve in fitting if len({member.gpus for member in curve.members}) > 1]
    fitting = _lightest(fitting) if figure.mode is None else fitting
    notes: list[str] = []
    if figure.dataset is not None:
        fitting, note = _of_dataset(fitting, figure.dataset, series)
        notes += note
    if figure.micro_batch is not None:
        fitting, note = _of_micro_batch(fitting, figure.micro_batch)
        notes += note
    if not fitting:
        return _reason(figure, series)
    in_order = sorted(fitting, key=lambda curve: (curve.hosts != "one host", curve.dataset, curve.micro_batch))
    return Selection(tuple(in_order), tuple(notes))


def steps_for(figure: StudyFigure) -> tuple[str, ...]:
    """What to write into a study file (valid TOML), and what to run then."""
    spread = figure.hosts not in (None, "one host")
    lines = [] if figure.dataset is None else ["[data]", f'name = "{figure.dataset}"']
    if figure.micro_batch is not None:
        lines += ["[train]", f"micro_batch = {figure.micro_batch}"]
    lines += ["[scaling]", f'mode = "{figure.mode or "strong-micro"}"', "gpus = [1, 2, 4, 8]"]
    lines += ["gpus_per_node = 1"] if spread else []
    lines += {
        "run waterfall": ["[measure]", "steps = 50", "explain = true", "checkpoint = true"],
        "time split": ["[sweep]", '"train.micro_batch" = [16, 32, 64, 128]', "[measure]", "explain = true"],
        "accuracy by micro-batch": ["[sweep]", '"train.micro_batch" = [16, 32, 64, 128]'],
        "hosts": ["[sweep]", '"scaling.gpus_per_node" = [1, 8]'],
    }.get(figure.kind, [])
    hosts = " --hostfile HOSTS" if spread or figure.kind == "hosts" else ""
    return (*lines, f"# vitscale run STUDY.toml{hosts} -o RESULTS", f"# vitscale report --like {figure.study} RESULTS")


def _lightest(fitting: list[Series]) -> list[Series]:
    """For a figure of any mode the series of one mode: strong-micro where there is one."""
    modes = [curve.mode for curve in fitting]
    chosen = "strong-micro" if "strong-micro" in modes else modes[0] if modes else None
    return [curve for curve in fitting if curve.mode == chosen]


def _of_dataset(fitting: list[Series], dataset: str, series: Sequence[Series]) -> tuple[list[Series], list[str]]:
    """The series of the figure's dataset; where the results hold none of the study's, of their own dataset instead."""
    own = list(dict.fromkeys(curve.dataset for curve in series))
    if any(name in _NAMED for name in own) or not own:
        return [curve for curve in fitting if curve.dataset == dataset], []
    stand_in = own[min(_NAMED.index(dataset), len(own) - 1)]
    note = f"{stand_in} in place of {DATASET_NAMES[dataset]}"
    return [curve for curve in fitting if curve.dataset == stand_in], [note]


def _of_micro_batch(fitting: list[Series], micro_batch: int) -> tuple[list[Series], list[str]]:
    """The series of the figure's micro-batch; where the results have neither 16 nor 64, their smallest or largest."""
    own = sorted({curve.micro_batch for curve in fitting})
    if not own or {16, 64} & set(own):
        return [curve for curve in fitting if curve.micro_batch == micro_batch], []
    if micro_batch == 64 and len(own) == 1:
        return [], []
    stand_in = own[0] if micro_batch == 16 else own[-1]
    return [curve for curve in fitting if curve.micro_batch == stand_in], [f"{stand_in} in place of {micro_batch}"]


_HOSTS: dict[Hosts, str] = {
    "one host": "in one host",
    "several like hosts": "over several hosts with GPUs of one kind",
    "several unlike hosts": "over several hosts with GPUs of unlike kinds",
}


def _reason(figure: StudyFigure, series: Sequence[Series]) -> str:
    if not series:
        return "No trial of these results has completed."
    what = {"weak": "weak scaling", "strong-micro": "strong scaling (strong-micro)"}.get(
        figure.mode or "", "any scaling"
    )
    parts = [what]
    if figure.dataset is not None:
        parts.append(f"on {DATASET_NAMES[figure.dataset]}")
    if figure.micro_batch is not None:
        parts.append(f"at micro-batch {figure.micro_batch}")
    if figure.hosts is not None:
        parts.append(_HOSTS[figure.hosts])
    own = sorted(
        {
            f"{'weak' if curve.mode == 'weak' else curve.mode} {_HOSTS[curve.hosts]} on "
            f"{DATASET_NAMES.get(curve.dataset, curve.dataset)} (micro-batch {curve.micro_batch})"
            for curve in series
        }
    )
    more = f" and {len(own) - 4} more" if len(own) > 4 else ""
    return f"These results hold no {' '.join(parts)}. They hold {'; '.join(own[:4])}{more}."
