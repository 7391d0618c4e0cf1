"""Figures of curves by GPU count: epoch time, speedup and efficiency.

The report's own charts draw them. Published points are added where they are of the same workload.

A series is one curve of the results, and its members are the GPU counts that were measured. The members are compared
with the base of the series, which is usually the smallest count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from vitscale.pages.charts.axes import HEIGHT, ChartRow, ChartSpec, Plot, add_curves, capitalised, scaled, tooltip
from vitscale.pages.charts.scaling import ScalingAxis, YScale, best_at_largest, both_axes, ideal_line, point_row
from vitscale.pages.like.selection import Selection
from vitscale.pages.like.series import DATASET_NAMES, FigureSeries, Member, PublishedPoints, distinct_series_names
from vitscale.pages.like.study import StudyFigure
from vitscale.present import units
from vitscale.present.document import ControlOption, Figure, FigureView
from vitscale.present.estimate import Estimate
from vitscale.published import PublishedFact

_GPU_AXIS = ScalingAxis("gpus", "GPUs", "GPUs")
_DEVICE_REASON = "device: "
"""Beginning of the reason that two GPU counts have unlike devices."""


def curves_view(
    choices: Mapping[str, ControlOption],
    plot: Plot,
    y_title: str,
    notes: Sequence[str],
    *,
    axis: ScalingAxis = _GPU_AXIS,
    y: ChartSpec | None = None,
    y_scale: YScale = "from zero",
    less_is_better: bool = False,
    ordered: bool = False,
    joined: bool = True,
    further_sentences: Sequence[str] = (),
) -> FigureView:
    """Return one picture of curves.

    Args:
        choices: name of a control of the page -> its option that shows this view. The label of the last option names
            the drawn quantity.
        plot: the plot, with the datasets that `add_curves` draws. Layers that it already has lie below the curves. Its
            dataset `left_out`, if any, has a row for each GPU count without a value, with a text that says why.
        y_title: title of the axis of values.
        notes: parts of the subtitle. Empty ones are left out.
        axis: the horizontal axis.
        y: the axis of values. None: an axis with `y_scale`.
        y_scale: scale of the axis of values, unless `y` is passed.
        less_is_better: whether lower values are better.
        ordered: whether the curves have an order, which their colours then show.
        joined: whether lines join the points of a curve.
        further_sentences: sentences that follow the summary.
    """
    rows = plot.datasets["rows"]
    left_out = plot.datasets.get("left_out", [])
    last_choice = list(choices.values())[-1]
    label = last_choice.label
    default_axes = both_axes([*rows, *left_out], y_title, axis, y_scale)
    columns = {"series": "curve", "x": axis.title, "shown": label, "bounds": "95 % interval"}
    tooltips = tooltip(**columns, runs="runs")
    add_curves(plot, default_axes.x, y or default_axes.y, tooltips, ordered=ordered, joined=joined)
    if left_out:
        mark = {"type": "text", "angle": 270, "align": "left", "fontSize": 11}
        text = {"field": "text", "type": "nominal"}
        plot.add("left_out", mark, x=default_axes.x, y={"value": HEIGHT - 6}, text=text)
    summary = " ".join([best_at_largest(rows, label, axis, less_is_better=less_is_better), *further_sentences])
    return FigureView(
        name="-".join(choice.value for choice in choices.values()),
        choices=choices,
        title=capitalised(", ".join(choice.label for choice in reversed(list(choices.values())))),
        subtitle="; ".join(note for note in notes if note),
        spec=plot.spec(summary),
        columns=columns,
        summary=summary,
    )


class _RelativeQuantity(NamedTuple):
    """A quantity that compares the members of a series with its base: "speedup" or "efficiency".

    The speedup is the epoch seconds of the base over those of the member. The efficiency is the speedup divided by the
    ratio of GPUs; in weak scaling, where the work grows with the GPUs, it is the speedup itself.
    """

    name: str
    is_weak: bool
    """Whether the series are of weak scaling."""

    @property
    def is_efficiency(self) -> bool:
        """Whether it is the efficiency."""
        return self.name == "efficiency"

    @property
    def is_per_gpu(self) -> bool:
        """Whether it is the speedup divided by the ratio of GPUs."""
        return self.is_efficiency and not self.is_weak

    def from_speedup(self, speedup: Estimate, *, gpus: int, base_gpus: int) -> Estimate:
        """Return the quantity of a member with this speedup on `gpus` GPUs against a base on `base_gpus`."""
        return speedup.times(base_gpus / gpus) if self.is_per_gpu else speedup

    def ideal(self, gpu_ratio: float) -> float:
        """Return the ideal of a member with `gpu_ratio` times as many GPUs as the base."""
        return 1.0 if self.is_efficiency else gpu_ratio


def _usual_relative_quantity(figure: StudyFigure) -> _RelativeQuantity:
    """Return the efficiency for a figure of weak scaling, else the speedup."""
    is_weak = figure.mode == "weak"
    return _RelativeQuantity("efficiency" if is_weak else "speedup", is_weak)


def scaling_pair(figure: StudyFigure, selection: Selection, published: PublishedPoints) -> Figure | str:
    """Return the epoch times of the selected series, and their speedup or efficiency where two GPU counts have one.

    Where no epoch time is known, return a sentence that says so.
    """
    labels = distinct_series_names(selection.series)
    times = times_view(figure, selection, labels, published)
    if times is None:
        return "No trial of this kind has recorded an epoch time."
    views = [times]
    relative = _relative_view(selection, published, _usual_relative_quantity(figure))
    if relative is not None:
        views.append(relative)
    return Figure(figure.name, figure.heading, tuple(views), tuple(labels))


def times_view(
    figure: StudyFigure, selection: Selection, labels: Sequence[str], published: PublishedPoints
) -> FigureView | None:
    """Return a picture of epoch times and their ideal, a curve for each series under its label.

    Return None where no epoch time is known.
    """
    is_weak = figure.mode == "weak"
    times: list[ChartRow] = []
    ideals: list[ChartRow] = []
    for series, label in zip(selection.series, labels, strict=True):
        for member in series.members:
            seconds = member.trial.epoch_seconds
            if seconds is not None:
                times.append(_member_row(label, member, seconds, units.seconds))
        if series.base is not None and series.base.trial.epoch_seconds is not None:
            base_seconds = series.base.trial.epoch_seconds.value
            ideal_seconds = partial(_ideal_seconds, base_seconds, is_weak)
            ideals += ideal_line(label, series.base.gpus, series.members[-1].gpus, ideal_seconds)
    if not times:
        return None
    unit = units.time_unit(row["value"] for row in times)
    published_rows = _published_time_rows(published, selection, labels)
    datasets = {"rows": times, "ideal": ideals, "published": published_rows}
    plot = Plot({name: scaled(rows, unit.factor) for name, rows in datasets.items()})
    return curves_view(
        {"measure": ControlOption("epoch-seconds", "epoch time")},
        plot,
        f"epoch time ({unit.sign})",
        _subtitle_parts(selection, times, published, relative_name=_usual_relative_quantity(figure).name),
        y_scale="from zero" if is_weak else "as x",
        less_is_better=True,
        further_sentences=_uncompared_sentences(selection),
    )


def relative_to_base_figure(figure: StudyFigure, selection: Selection, published: PublishedPoints) -> Figure | str:
    """Return the speedup or the efficiency, as the figure's quantity says, of every selected series against its base.

    Where fewer than two GPU counts have one, return a sentence that says so.
    """
    quantity = _RelativeQuantity(figure.quantity, is_weak=figure.mode == "weak")
    view = _relative_view(selection, published, quantity)
    if view is None:
        return "No two GPU counts of these results may be held against each other."
    return Figure(figure.name, figure.heading, (view,), tuple(distinct_series_names(selection.series)))


def _relative_view(selection: Selection, published: PublishedPoints, quantity: _RelativeQuantity) -> FigureView | None:
    """Return a picture of the speedup or efficiency of each series, with its ideal and published points.

    Return None where fewer than two GPU counts have the quantity.
    """
    labels = distinct_series_names(selection.series)
    rows = _relative_rows(selection, labels, quantity)
    compared_counts = {row["x"] for row in rows}
    if len(compared_counts) < 2:
        return None
    ideals = _relative_ideals(selection, quantity, largest=max(compared_counts))
    # Published points are speedups: they do not suit an axis of speedups per GPU.
    published_rows = [] if quantity.is_per_gpu else _published_speedup_rows(published, selection, labels)
    plot = Plot({"rows": rows, "ideal": ideals, "published": published_rows})
    texts_at_gaps = _texts_at_uncompared_counts(selection, compared_counts, quantity.name)
    if texts_at_gaps:
        plot.datasets["left_out"] = texts_at_gaps
    return curves_view(
        {"measure": ControlOption(quantity.name, quantity.name)},
        plot,
        quantity.name,
        _subtitle_parts(selection, rows, published, relative_name=quantity.name),
        y_scale="from zero" if quantity.is_efficiency else "log2 by log2",
        further_sentences=[*_baseline_sentences(selection, labels), *_uncompared_sentences(selection)],
    )


def _relative_rows(selection: Selection, labels: Sequence[str], quantity: _RelativeQuantity) -> list[ChartRow]:
    """Return a row with the quantity of each member that is compared with its base."""
    rows = []
    for series, label in zip(selection.series, labels, strict=True):
        for member in series.members:
            if member.speedup_over_base is None or series.base is None:
                continue
            value = quantity.from_speedup(member.speedup_over_base, gpus=member.gpus, base_gpus=series.base.gpus)
            rows.append(_member_row(label, member, value, units.share))
    return rows


def _relative_ideals(selection: Selection, quantity: _RelativeQuantity, largest: int) -> list[ChartRow]:
    """Return the rows of the ideal lines up to `largest` GPUs: one line for each GPU count that is a base."""
    rows: list[ChartRow] = []
    for base_gpus in sorted(_base_counts(selection)):
        rows += ideal_line(f"ideal {base_gpus}", base_gpus, largest, quantity.ideal)
    return rows


def _base_counts(selection: Selection) -> set[int]:
    """Return the GPU counts of the bases of the series."""
    return {series.base.gpus for series in selection.series if series.base is not None}


def _baseline_sentences(selection: Selection, labels: Sequence[str]) -> list[str]:
    """Return "Baseline of CIFAR-10: 1 GPU, 3.2 s an epoch." for each series with a member compared with its base."""
    sentences = []
    for series, label in zip(selection.series, labels, strict=True):
        base = series.base
        if base is not None and base.trial.epoch_seconds is not None and _has_compared_member(series):
            seconds = units.seconds(base.trial.epoch_seconds.value)
            sentences.append(f"Baseline of {label}: {gpus_text(base.gpus)}, {seconds} an epoch.")
    return sentences


def _has_compared_member(series: FigureSeries) -> bool:
    """Whether any member is compared with the base."""
    return any(member.speedup_over_base is not None for member in series.members)


def _member_row(label: str, member: Member, value: Estimate, show: Callable[[float | None], str]) -> ChartRow:
    """Return the chart's row with a value of a member, on the curve with this label."""
    return {"series": label, "x": member.gpus} | point_row(value, show, len(member.trial.run_figures))


def _ideal_seconds(base_seconds: float, is_weak: bool, gpu_ratio: float) -> float:
    """Return the ideal epoch seconds on `gpu_ratio` times as many GPUs as the base: constant in weak scaling."""
    return base_seconds if is_weak else base_seconds / gpu_ratio


def _published_time_rows(published: PublishedPoints, selection: Selection, labels: Sequence[str]) -> list[ChartRow]:
    """Return a row with each published epoch time, under the label of the series of the same workload."""
    label_by_series = _label_by_series(selection, labels)
    rows = []
    for series, facts in published.facts:
        label = label_by_series[id(series)]
        for fact in facts:
            rows.append(_published_row(label, fact, fact.epoch_seconds, units.seconds))
    return rows


def _published_speedup_rows(published: PublishedPoints, selection: Selection, labels: Sequence[str]) -> list[ChartRow]:
    """Return a row with each published speedup, under the label of the series of the same workload.

    A speedup is against the published epoch time at the GPU count of that series' base. Where none was published at
    that count, the series has no rows.
    """
    label_by_series = _label_by_series(selection, labels)
    rows = []
    for series, facts in published.facts:
        base_seconds = _published_base_seconds(series, facts)
        if base_seconds is None:
            continue
        label = label_by_series[id(series)]
        for fact in facts:
            rows.append(_published_row(label, fact, base_seconds / fact.epoch_seconds, units.share))
    return rows


def _published_row(label: str, fact: PublishedFact, value: float, show: Callable[[float | None], str]) -> ChartRow:
    """Return the chart's row with a value of a published measurement."""
    workload = f"{DATASET_NAMES[fact.dataset]}, micro-batch {fact.micro_batch}, {', '.join(fact.devices)}"
    return {"series": label, "what": f"published: {workload}", "x": fact.gpus, "value": value, "shown": show(value)}


def _published_base_seconds(series: FigureSeries, facts: Sequence[PublishedFact]) -> float | None:
    """Return the published epoch seconds at the GPU count of a series' base; None where none were published."""
    if series.base is None:
        return None
    for fact in facts:
        if fact.gpus == series.base.gpus:
            return fact.epoch_seconds
    return None


def _label_by_series(selection: Selection, labels: Sequence[str]) -> dict[int, str]:
    """Return `id` of a series -> its label: series may be equal, and have no hash."""
    return {id(series): label for series, label in zip(selection.series, labels, strict=True)}


def _subtitle_parts(
    selection: Selection, rows: Sequence[ChartRow], published: PublishedPoints, *, relative_name: str
) -> list[str]:
    """Return the parts of a view's subtitle; some may be empty.

    Args:
        selection: the series.
        rows: the drawn rows.
        published: the published points.
        relative_name: "speedup" or "efficiency", which GPU counts lack that may not be compared with the base.
    """
    base_counts = _base_counts(selection)
    bases = " and ".join(map(str, sorted(base_counts)))
    has_unlike_hosts = any(_are_unlike_hosts(series) for series in selection.series)
    return [
        *selection.notes,
        *_uncompared_notes(selection, relative_name),
        bars_note(rows),
        "" if base_counts <= {1} else f"relative to {bases} GPUs",
        _borrowed_note(selection),
        "dashed: ideal, were every host like the first" if has_unlike_hosts else "dashed: ideal",
        published.note,
    ]


def _are_unlike_hosts(series: FigureSeries) -> bool:
    """Whether a series over several hosts has several kinds of GPU by what its records name, its base included."""
    base_devices = series.base.devices if series.base is not None else ()
    return series.hosts != "one host" and len({*series.devices, *base_devices}) > 1


def bars_note(rows: Sequence[ChartRow]) -> str:
    """Return a note on what the bars of these rows mean, or why they have none."""
    if any(row["low"] is not None for row in rows):
        return "bars: 95 % intervals over runs"
    most_runs = max(row["runs"] for row in rows)
    return "one run each: no intervals" if most_runs == 1 else f"{most_runs} runs at most: no intervals"


# --- members that may not be compared with their base ---------------------------------------------------------------


class _Uncompared(NamedTuple):
    """A member that may not be compared with its base."""

    series: FigureSeries
    member: Member
    base: Member


def _uncompared_members(selection: Selection) -> list[_Uncompared]:
    """Return the members of all series that may not be compared with their base."""
    uncompared = []
    for series in selection.series:
        base = series.base
        if base is not None:
            uncompared += [
                _Uncompared(series, member, base) for member in series.members if member.reasons_not_compared
            ]
    return uncompared


def _texts_at_uncompared_counts(selection: Selection, compared_counts: set[int], relative_name: str) -> list[ChartRow]:
    """Return a row for each GPU count at which no series is compared with its base.

    Example: {"x": 4, "text": "no speedup: unlike GPUs"}. Other reasons are too long for the picture, and are left out.
    """
    reasons_by_gpus: dict[int, set[str]] = {}
    for _, member, _ in _uncompared_members(selection):
        if member.gpus not in compared_counts:
            reasons_by_gpus.setdefault(member.gpus, set()).update(member.reasons_not_compared)
    rows = []
    for gpus, reasons in sorted(reasons_by_gpus.items()):
        is_only_devices = all(reason.startswith(_DEVICE_REASON) for reason in reasons)
        short_reason = ": unlike GPUs" if is_only_devices else ""
        rows.append({"x": gpus, "text": f"no {relative_name}{short_reason}"})
    return rows


class _GapClause(NamedTuple):
    """Why GPU counts have no speedup or efficiency."""

    curve: str
    """ " for CIFAR-10"; empty where no other curve has these counts."""
    reason: str


def _uncompared_notes(selection: Selection, relative_name: str) -> list[str]:
    """Return a note, short enough for a picture, on each reason for which GPU counts have no speedup or efficiency.

    Example: "4 and 5 GPUs have no speedup: their GPUs are not all like the first (Tesla T4)". Where other curves have
    one at these counts, the note names the curve that has none.
    """
    label_by_series = _label_by_series(selection, distinct_series_names(selection.series))
    compared_counts: set[int] = set()
    for series in selection.series:
        compared_counts |= {member.gpus for member in series.members if member.speedup_over_base is not None}
    counts_by_clause: dict[_GapClause, set[int]] = {}
    for series, member, _ in _uncompared_members(selection):
        curve = f" for {label_by_series[id(series)]}" if member.gpus in compared_counts else ""
        for reason in member.reasons_not_compared:
            clause = _GapClause(curve, _short_reason(series, reason))
            counts_by_clause.setdefault(clause, set()).add(member.gpus)
    notes = []
    for clause, counts in counts_by_clause.items():
        gpus_have = "GPUs have" if max(counts) > 1 else "GPU has"
        notes.append(f"{units.listed(sorted(counts))} {gpus_have} no {relative_name}{clause.curve}: {clause.reason}")
    return notes


def _short_reason(series: FigureSeries, reason: str) -> str:
    """Return a reason without its values, which the summary has: "unlike CPU" for "CPU: 8 cores against 16"."""
    subject, has_values, _ = reason.partition(": ")
    if reason.startswith(_DEVICE_REASON) and series.base is not None:
        return f"their GPUs are not all like the first ({' and '.join(series.base.devices)})"
    return f"unlike {subject}" if has_values else reason


class _RefusedComparison(NamedTuple):
    """Two GPU counts that may not be compared, and why."""

    gpus: int
    base_gpus: int
    reason: str


def _uncompared_sentences(selection: Selection) -> list[str]:
    """Return "4 GPUs are not held against 1: REASON." for each comparison with a base that may not be made.

    Where it concerns only some of the series, the sentence names them.
    """
    label_by_series = _label_by_series(selection, distinct_series_names(selection.series))
    labels_by_comparison: dict[_RefusedComparison, list[str]] = {}
    for series, member, base in _uncompared_members(selection):
        comparison = _RefusedComparison(member.gpus, base.gpus, member.why_not_compared)
        labels_by_comparison.setdefault(comparison, []).append(label_by_series[id(series)])
    sentences = []
    for comparison, labels in labels_by_comparison.items():
        for_curves = f" for {units.listed(labels)}" if len(labels) < len(selection.series) else ""
        counts = f"{comparison.gpus} GPUs are not held against {comparison.base_gpus}"
        sentences.append(f"{counts}{for_curves}: {comparison.reason}.")
    return sentences


def _borrowed_note(selection: Selection) -> str:
    """Return a note where a curve over several hosts borrows its one-GPU point from the curve of one host; else ""."""
    for series in selection.series:
        curve_trial_ids = {point.trial_id for point in series.curve.points}
        if any(member.trial.trial_id not in curve_trial_ids for member in series.members):
            return "1 GPU: from the measurements in one host"
    return ""


def gpus_text(count: int) -> str:
    """Return "1 GPU", "8 GPUs"."""
    return units.counted(count, "GPU")
