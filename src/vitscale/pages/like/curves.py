"""Figures of curves by GPU count: epoch time, speedup and efficiency.

The report's own charts draw them; published points are added where they are of the same workload.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from vitscale.pages.charts.axes import HEIGHT, ChartRow, ChartSpec, Plot, add_curves, capitalised, scaled, tooltip
from vitscale.pages.charts.scaling import ScalingAxis, YScale, both_axes, far_end, ideal_line, point_row
from vitscale.pages.like.selection import Selection
from vitscale.pages.like.series import DATASET_NAMES, FigureSeries, Member, PublishedPoints, names
from vitscale.pages.like.study import StudyFigure
from vitscale.present import units
from vitscale.present.document import ControlOption, Figure, FigureView
from vitscale.present.estimate import Estimate
from vitscale.published import PublishedFact

_GPUS = ScalingAxis("gpus", "GPUs", "GPUs")
_OF_DEVICES = "device: "
"""How the reason begins that devices are unlike."""


def curves_view(
    choices: Mapping[str, ControlOption],
    plot: Plot,
    y_title: str,
    notes: Sequence[str],
    *,
    axis: ScalingAxis = _GPUS,
    y: ChartSpec | None = None,
    y_scale: YScale = "from zero",
    less_is_better: bool = False,
    ordered: bool = False,
    joined: bool = True,
    more: Sequence[str] = (),
) -> FigureView:
    """One picture of curves.

    Args:
        choices: control to the option that shows this view; the last one names what it shows.
        plot: the plot, with the datasets that `add_curves` draws, and `left_out` with the GPU counts that have no
            value, and a word why; layers that it already has lie below.
        y_title: title of the axis of values.
        notes: what a reader must know about the view.
        axis: what the points stand along.
        y: the axis of values; None: by `y_scale`.
        y_scale: see `y`.
        less_is_better: whether lower values are better.
        ordered: whether the curves have an order.
        joined: whether the points of a curve are joined.
        more: sentences after the summary.
    """
    rows = plot.datasets["rows"]
    left_out = plot.datasets.get("left_out", [])
    label = list(choices.values())[-1].label
    usual = both_axes([*rows, *left_out], y_title, axis, y_scale)
    columns = {"series": "curve", "x": axis.title, "shown": label, "bounds": "95 % interval"}
    shown = tooltip(**columns, runs="runs")
    add_curves(plot, usual.x, y or usual.y, shown, ordered=ordered, joined=joined)
    if left_out:
        mark = {"type": "text", "angle": 270, "align": "left", "fontSize": 11}
        plot.add("left_out", mark, x=usual.x, y={"value": HEIGHT - 6}, text={"field": "text", "type": "nominal"})
    summary = " ".join([far_end(rows, label, axis, less_is_better=less_is_better), *more])
    return FigureView(
        name="-".join(choice.value for choice in choices.values()),
        choices=choices,
        title=capitalised(", ".join(choice.label for choice in reversed(list(choices.values())))),
        subtitle="; ".join(note for note in notes if note),
        spec=plot.spec(summary),
        columns=columns,
        summary=summary,
    )


def scaling_pair(figure: StudyFigure, chosen: Selection, published: PublishedPoints) -> Figure | str:
    """The epoch times of the chosen series, and their speedup or efficiency where it can be worked out."""
    labels = names(chosen.series)
    times = times_view(figure, chosen, labels, published)
    if times is None:
        return "No trial of this kind has recorded an epoch time."
    relative = _relative_view(figure, chosen, published, _relative_quantity(figure))
    views = [view for view in (times, relative) if view is not None]
    return Figure(figure.name, figure.heading, tuple(views), tuple(labels))


def _relative_quantity(figure: StudyFigure) -> str:
    return "efficiency" if figure.mode == "weak" else "speedup"


def times_view(
    figure: StudyFigure, chosen: Selection, labels: Sequence[str], published: PublishedPoints
) -> FigureView | None:
    """Epoch times beside the ideal, a curve for each series under its label; None where none is known."""
    is_weak = figure.mode == "weak"
    times: list[ChartRow] = []
    ideals: list[ChartRow] = []
    for series, name in zip(chosen.series, labels, strict=True):
        for member in series.members:
            seconds = member.trial.epoch_seconds
            if seconds is not None:
                times.append(_row(name, member, seconds, units.seconds))
        if series.base is not None and series.base.trial.epoch_seconds is not None:
            level = partial(_ideal_seconds, series.base.trial.epoch_seconds.value, is_weak)
            ideals += ideal_line(name, series.base.gpus, series.members[-1].gpus, level)
    if not times:
        return None
    unit = units.time_unit(row["value"] for row in times)
    published_rows = _published_rows(published, chosen, labels, relative=False)
    datasets = {"rows": times, "ideal": ideals, "published": published_rows}
    plot = Plot({name: scaled(rows, unit.factor) for name, rows in datasets.items()})
    return curves_view(
        {"measure": ControlOption("epoch-seconds", "epoch time")},
        plot,
        f"epoch time ({unit.sign})",
        _notes(chosen, times, published, _relative_quantity(figure)),
        y_scale="from zero" if is_weak else "as x",
        less_is_better=True,
        more=_not_compared(chosen),
    )


def against_base(figure: StudyFigure, chosen: Selection, published: PublishedPoints) -> Figure | str:
    """The speedup, or the efficiency, of every chosen series over its smallest GPU count."""
    view = _relative_view(figure, chosen, published, figure.quantity)
    if view is None:
        return "No two GPU counts of these results may be held against each other."
    return Figure(figure.name, figure.heading, (view,), tuple(names(chosen.series)))


def _relative_view(
    figure: StudyFigure, chosen: Selection, published: PublishedPoints, quantity: str
) -> FigureView | None:
    """Draw the speedup against the smallest GPU count, or the efficiency; None where there is no second count.

    Args:
        figure: the study's figure.
        chosen: the series.
        published: published points.
        quantity: "speedup" or "efficiency", which is the speedup of weak series, or per GPU.
    """
    labels = names(chosen.series)
    is_efficiency = quantity == "efficiency"
    is_per_gpu = is_efficiency and figure.mode != "weak"
    rows = _relative_rows(chosen, labels, is_per_gpu=is_per_gpu)
    counts = {row["x"] for row in rows}
    if len(counts) < 2:
        return None
    ideals: list[ChartRow] = []
    for base_gpus in sorted({series.base.gpus for series in chosen.series if series.base is not None}):
        level = _level if is_efficiency else _as_many_times
        ideals += ideal_line(f"ideal {base_gpus}", base_gpus, max(counts), level)
    published_rows = [] if is_per_gpu else _published_rows(published, chosen, labels, relative=True)
    plot = Plot({"rows": rows, "ideal": ideals, "published": published_rows})
    remark_by_gpus = _counts_without(chosen, compared=counts)
    if remark_by_gpus:
        plot.datasets["left_out"] = [
            {"x": gpus, "text": f"no {quantity}{remark}"} for gpus, remark in remark_by_gpus.items()
        ]
    return curves_view(
        {"measure": ControlOption(quantity, quantity)},
        plot,
        quantity,
        _notes(chosen, rows, published, quantity),
        y_scale="from zero" if is_efficiency else "log2 by log2",
        more=[*_baseline_sentences(chosen, labels), *_not_compared(chosen)],
    )


def _relative_rows(chosen: Selection, labels: Sequence[str], *, is_per_gpu: bool) -> list[ChartRow]:
    """A row for each member that is compared with its base; `is_per_gpu`: its speedup over the ratio of GPUs."""
    rows = []
    for series, name in zip(chosen.series, labels, strict=True):
        for member in series.members:
            if member.against_base is None or series.base is None:
                continue
            factor = series.base.gpus / member.gpus if is_per_gpu else 1.0
            rows.append(_row(name, member, member.against_base.times(factor), units.share))
    return rows


def _level(_times: float) -> float:
    return 1.0


def _as_many_times(times: float) -> float:
    return times


def _baseline_sentences(chosen: Selection, labels: Sequence[str]) -> list[str]:
    """ "Baseline of CIFAR-10: 1 GPU, 3.2 s an epoch.": for each series that is compared with a base."""
    sentences = []
    for series, name in zip(chosen.series, labels, strict=True):
        base = series.base
        if base is not None and base.trial.epoch_seconds is not None and _has_relatives(series):
            seconds = units.seconds(base.trial.epoch_seconds.value)
            sentences.append(f"Baseline of {name}: {gpus_text(base.gpus)}, {seconds} an epoch.")
    return sentences


def _has_relatives(series: FigureSeries) -> bool:
    """Whether any of its members is compared with the base."""
    return any(member.against_base is not None for member in series.members)


def _row(name: str, member: Member, value: Estimate, show: Callable[[float | None], str]) -> ChartRow:
    """A figure of a member of a series, which has this name."""
    return {"series": name, "x": member.gpus} | point_row(value, show, len(member.trial.run_figures))


def _ideal_seconds(base_seconds: float, is_weak: bool, times: float) -> float:
    """Ideal epoch seconds at a multiple of the base's GPUs: fewer with every GPU, or constant in weak scaling."""
    return base_seconds if is_weak else base_seconds / times


def _published_rows(
    published: PublishedPoints, chosen: Selection, labels: Sequence[str], *, relative: bool
) -> list[ChartRow]:
    """The published epoch seconds, each in the shape of the series beside which it stands.

    `relative`: speedups, or efficiencies of weak series, against the GPU count of the series' own base; left out where
    that count was not published.
    """
    label_by_series = _label_by_series(chosen, labels)
    rows = []
    for series, facts in published.facts:
        base_seconds = _published_base_seconds(series, facts)
        for fact in facts:
            if not relative:
                value = fact.epoch_seconds
                shown = units.seconds(value)
            elif base_seconds is not None:
                value = base_seconds / fact.epoch_seconds
                shown = units.share(value)
            else:
                continue
            workload = f"{DATASET_NAMES[fact.dataset]}, micro-batch {fact.micro_batch}, {', '.join(fact.devices)}"
            row = {"series": label_by_series[id(series)], "what": f"published: {workload}"}
            rows.append(row | {"x": fact.gpus, "value": value, "shown": shown})
    return rows


def _published_base_seconds(series: FigureSeries, facts: Sequence[PublishedFact]) -> float | None:
    """The published epoch seconds at the GPU count of a series' base; None where that count was not published."""
    if series.base is None:
        return None
    for fact in facts:
        if fact.gpus == series.base.gpus:
            return fact.epoch_seconds
    return None


def _label_by_series(chosen: Selection, labels: Sequence[str]) -> dict[int, str]:
    """`id` of a series -> its label: series may be equal, and have no hash."""
    return {id(series): label for series, label in zip(chosen.series, labels, strict=True)}


def _notes(chosen: Selection, rows: Sequence[ChartRow], published: PublishedPoints, relative: str) -> list[str]:
    """What a reader must know; some may be empty.

    `relative`: the quantity that GPU counts which may not be compared do not have.
    """
    base_counts = {series.base.gpus for series in chosen.series if series.base is not None}
    bases = " and ".join(map(str, sorted(base_counts)))
    has_unlike_hosts = any(_are_unlike_hosts(series) for series in chosen.series)
    return [
        *chosen.notes,
        *_without_notes(chosen, relative),
        bars_note(rows),
        "" if base_counts <= {1} else f"relative to {bases} GPUs",
        _borrowed_note(chosen),
        "dashed: ideal, were every host like the first" if has_unlike_hosts else "dashed: ideal",
        published.note,
    ]


def _are_unlike_hosts(series: FigureSeries) -> bool:
    """Whether the hosts of a series have GPUs of several kinds by what its records name, its base among them."""
    base_devices = series.base.devices if series.base is not None else ()
    return series.hosts != "one host" and len({*series.devices, *base_devices}) > 1


def bars_note(rows: Sequence[ChartRow]) -> str:
    """What the bars of some rows are, or why there are none."""
    if any(row["low"] is not None for row in rows):
        return "bars: 95 % intervals over runs"
    most = max(row["runs"] for row in rows)
    return "one run each: no intervals" if most == 1 else f"{most} runs at most: no intervals"


class _LeftOut(NamedTuple):
    """A member that may not be compared with its base."""

    series: FigureSeries
    member: Member
    base: Member


def _left_out(chosen: Selection) -> list[_LeftOut]:
    """The members of all series that may not be compared with their base."""
    left_out = []
    for series in chosen.series:
        base = series.base
        if base is not None:
            left_out += [_LeftOut(series, member, base) for member in series.members if member.reasons]
    return left_out


def _counts_without(chosen: Selection, compared: set[int]) -> dict[int, str]:
    """GPU counts at which no series is compared, and a word why where that is one of a few letters."""
    reasons_by_gpus: dict[int, set[str]] = {}
    for _, member, _ in _left_out(chosen):
        if member.gpus not in compared:
            reasons_by_gpus.setdefault(member.gpus, set()).update(member.reasons)
    return {gpus: _remark(reasons) for gpus, reasons in sorted(reasons_by_gpus.items())}


def _remark(reasons: Iterable[str]) -> str:
    is_of_devices = all(reason.startswith(_OF_DEVICES) for reason in reasons)
    return ": unlike GPUs" if is_of_devices else ""


def _without_notes(chosen: Selection, quantity: str) -> list[str]:
    """Say which GPU counts have no speedup or efficiency, and why, in a line that a picture has room for:
    "4 and 5 GPUs have no speedup: their GPUs are not all like the first (Tesla T4)".

    Counts that other curves have are said to be of their curve.
    """
    label_by_series = _label_by_series(chosen, names(chosen.series))
    compared: set[int] = set()
    for series in chosen.series:
        compared |= {member.gpus for member in series.members if member.against_base is not None}
    counts_by_clause: dict[tuple[str, str], set[int]] = {}
    for series, member, _ in _left_out(chosen):
        of_curve = f" for {label_by_series[id(series)]}" if member.gpus in compared else ""
        for reason in member.reasons:
            clause = (of_curve, _short_reason(series, reason))
            counts_by_clause.setdefault(clause, set()).add(member.gpus)
    notes = []
    for (of_curve, reason), counts in counts_by_clause.items():
        have = "s have" if max(counts) > 1 else " has"
        notes.append(f"{units.listed(sorted(counts))} GPU{have} no {quantity}{of_curve}: {reason}")
    return notes


def _short_reason(series: FigureSeries, reason: str) -> str:
    """A reason without its values: the summary has these."""
    subject, has_values, _ = reason.partition(": ")
    if reason.startswith(_OF_DEVICES) and series.base is not None:
        return f"their GPUs are not all like the first ({' and '.join(series.base.devices)})"
    return f"unlike {subject}" if has_values else reason


class _Comparison(NamedTuple):
    """Two GPU counts that are not compared, and why."""

    gpus: int
    base_gpus: int
    reason: str


def _not_compared(chosen: Selection) -> list[str]:
    """Say which members are not compared with the base, and why; where not all series have them, for which ones."""
    label_by_series = _label_by_series(chosen, names(chosen.series))
    labels_by_comparison: dict[_Comparison, list[str]] = {}
    for series, member, base in _left_out(chosen):
        comparison = _Comparison(member.gpus, base.gpus, member.why_not)
        labels_by_comparison.setdefault(comparison, []).append(label_by_series[id(series)])
    sentences = []
    for comparison, labels in labels_by_comparison.items():
        of_curves = f" for {units.listed(labels)}" if len(labels) < len(chosen.series) else ""
        counts = f"{comparison.gpus} GPUs are not held against {comparison.base_gpus}"
        sentences.append(f"{counts}{of_curves}: {comparison.reason}.")
    return sentences


def _borrowed_note(chosen: Selection) -> str:
    """That the one-GPU point of a curve over several hosts was measured with those of one host."""
    for series in chosen.series:
        trials_of_curve = {point.trial_id for point in series.curve.points}
        if any(member.trial.trial_id not in trials_of_curve for member in series.members):
            return "1 GPU: from the measurements in one host"
    return ""


def gpus_text(count: int) -> str:
    """ "1 GPU", "8 GPUs"."""
    return units.counted(count, "GPU")
