"""Which series a figure draws; or what the results lack for it, and which command would produce that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vitscale.report.like.series import DATASET_NAMES, Place, Series
from vitscale.report.like.study import StudyFigure

_NAMED = ("cifar10", "cifar100")
"""Datasets that figures ask for by name."""


@dataclass(frozen=True)
class Selection:
    """What a figure draws."""

    series: tuple[Series, ...]
    notes: tuple[str, ...] = ()
    """Where it departs from the study's own figure."""


@dataclass(frozen=True)
class Lack:
    """Why a figure cannot be drawn."""

    reason: str
    steps: tuple[str, ...]
    """Lines of a study file and commands that would produce what is missing."""


def select(figure: StudyFigure, found: Sequence[Series]) -> Selection | Lack:
    """The series of a figure, or what is missing."""
    fitting = [one for one in found if figure.mode in (None, one.mode) and figure.place in (None, one.place)]
    if figure.kind == "scaling":
        fitting = [one for one in fitting if len({member.gpus for member in one.members}) > 1]
    fitting = _lightest(fitting) if figure.mode is None else fitting
    notes: list[str] = []
    if figure.dataset is not None:
        fitting, note = _of_dataset(fitting, figure.dataset, found)
        notes += note
    if figure.micro_batch is not None:
        fitting, note = _of_micro_batch(fitting, figure.micro_batch)
        notes += note
    if not fitting:
        return Lack(_reason(figure, found), steps_for(figure))
    in_order = sorted(fitting, key=lambda one: (one.place != "one host", one.dataset, one.micro_batch))
    return Selection(tuple(in_order), tuple(notes))


def steps_for(figure: StudyFigure) -> tuple[str, ...]:
    """What to write into a study file (valid TOML), and what to run then."""
    spread = figure.place not in (None, "one host")
    lines = [] if figure.dataset is None else ["[data]", f'name = "{figure.dataset}"']
    if figure.micro_batch is not None:
        lines += ["[train]", f"micro_batch = {figure.micro_batch}"]
    lines += ["[scaling]", f'mode = "{figure.mode or "strong-micro"}"', "gpus = [1, 2, 4, 8]"]
    lines += ["gpus_per_node = 1"] if spread else []
    lines += {
        "run waterfall": ["[measure]", "explain = true", "checkpoint = true"],
        "time split": ["[sweep]", '"train.micro_batch" = [16, 32, 64, 128]', "[measure]", "explain = true"],
        "accuracy by micro-batch": ["[sweep]", '"train.micro_batch" = [16, 32, 64, 128]'],
        "hosts": ["[sweep]", '"scaling.gpus_per_node" = [1, 8]'],
    }.get(figure.kind, [])
    hosts = " --hostfile HOSTS" if spread or figure.kind == "hosts" else ""
    return (*lines, f"# vitscale run STUDY.toml{hosts} -o RESULTS", f"# vitscale report --like {figure.study} RESULTS")


def _lightest(fitting: list[Series]) -> list[Series]:
    """Of figures of any mode those of one mode: strong-micro where there is one."""
    modes = [one.mode for one in fitting]
    chosen = "strong-micro" if "strong-micro" in modes else modes[0] if modes else None
    return [one for one in fitting if one.mode == chosen]


def _of_dataset(fitting: list[Series], dataset: str, found: Sequence[Series]) -> tuple[list[Series], list[str]]:
    """Those of the figure's dataset; the results' own in its place where they hold none of the study's."""
    own = list(dict.fromkeys(one.dataset for one in found))
    if any(name in _NAMED for name in own) or not own:
        return [one for one in fitting if one.dataset == dataset], []
    stand_in = own[min(_NAMED.index(dataset), len(own) - 1)]
    note = f"{stand_in} in place of {DATASET_NAMES[dataset]}"
    return [one for one in fitting if one.dataset == stand_in], [note]


def _of_micro_batch(fitting: list[Series], micro_batch: int) -> tuple[list[Series], list[str]]:
    """Those of the figure's micro-batch; where the results have neither 16 nor 64, their smallest and largest."""
    own = sorted({one.micro_batch for one in fitting})
    if not own or {16, 64} & set(own):
        return [one for one in fitting if one.micro_batch == micro_batch], []
    if micro_batch == 64 and len(own) == 1:
        return [], []
    stand_in = own[0] if micro_batch == 16 else own[-1]
    return [one for one in fitting if one.micro_batch == stand_in], [f"{stand_in} in place of {micro_batch}"]


_PLACES: dict[Place, str] = {
    "one host": "in one host",
    "several like hosts": "over several hosts with GPUs of one kind",
    "several unlike hosts": "over several hosts with GPUs of unlike kinds",
}


def _reason(figure: StudyFigure, found: Sequence[Series]) -> str:
    if not found:
        return "No trial of these results has completed."
    what = {"weak": "weak scaling", "strong-micro": "strong scaling (strong-micro)"}.get(
        figure.mode or "", "any scaling"
    )
    parts = [what]
    if figure.dataset is not None:
        parts.append(f"on {DATASET_NAMES[figure.dataset]}")
    if figure.micro_batch is not None:
        parts.append(f"at micro-batch {figure.micro_batch}")
    if figure.place is not None:
        parts.append(_PLACES[figure.place])
    own = sorted(
        {
            f"{'weak' if one.mode == 'weak' else one.mode} {_PLACES[one.place]} on "
            f"{DATASET_NAMES.get(one.dataset, one.dataset)} (micro-batch {one.micro_batch})"
            for one in found
        }
    )
    more = f" and {len(own) - 4} more" if len(own) > 4 else ""
    return f"These results hold no {' '.join(parts)}. They hold {'; '.join(own[:4])}{more}."
