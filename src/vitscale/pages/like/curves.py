"""Figures of curves by GPU count: epoch time, speedup and efficiency.

The report's own charts draw them; published points are added where they are of the same workload.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from vitscale.pages.charts.axes import HEIGHT, ChartRow, ChartSpec, Plot, add_curves, scaled, tooltip
from vitscale.pages.charts.scaling import ScalingAxis, YScale, both_axes, far_end, ideal_line, point_row
from vitscale.pages.like.selection import Selection
from vitscale.pages.like.series import DATASET_NAMES, FigureSeries, Member, PublishedPoints, names
from vitscale.pages.like.study import StudyFigure
from vitscale.present import units
from vitscale.present.document import ControlOption, Figure, FigureView

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
    rows, left_out = plot.datasets["rows"], plot.datasets.get("left_out", [])
    label = list(choices.values())[-1].label
    x, usual = both_axes([*rows, *left_out], y_title, axis, y_scale)
    told = {"series": "curve", "x": axis.title, "shown": label, "bounds": "95 % interval"}
    add_curves(plot, x, y or usual, tooltip(**told, runs="runs"), ordered=ordered, joined=joined)
    if left_out:
        mark = {"type": "text", "angle": 270, "align": "left", "fontSize": 11}
        plot.add("left_out", mark, x=x, y={"value": HEIGHT - 6}, text={"field": "text", "type": "nominal"})
    summary = " ".join([far_end(rows, label, axis, less_is_better=less_is_better), *more])
    name = "-".join(choice.value for choice in choices.values())
    title = ", ".join(choice.label for choice in reversed(list(choices.values())))
    subtitle = "; ".join(filter(None, notes))
    return FigureView(name, choices, title[:1].upper() + title[1:], subtitle, plot.spec(summary), told, summary)


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
            if (seconds := member.trial.epoch_seconds) is not None:
                times.append(_row(name, member, point_row(seconds, units.seconds, len(member.trial.run_figures))))
        if series.base is not None and series.base.trial.epoch_seconds is not None:
            level = partial(_ideal_seconds, series.base.trial.epoch_seconds.value, is_weak)
            ideals += ideal_line(name, series.base.gpus, series.members[-1].gpus, level)
    if not times:
        return None
    unit = units.time_unit(row["value"] for row in times)
    data = {"rows": times, "ideal": ideals, "published": _published(published, chosen, labels, relative=False)}
    plot = Plot({name: scaled(rows, unit.factor) for name, rows in data.items()})
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


def _relative_view(figure: StudyFigure, chosen: Selection, published: PublishedPoints, what: str) -> FigureView | None:
    """Against the smallest GPU count: speedup, or efficiency of weak series or per GPU; None if there is no second."""
    labels, per_gpu = names(chosen.series), what == "efficiency" and figure.mode != "weak"
    rows = [
        _row(name, member, point_row(value.times(series.base.gpus / member.gpus if per_gpu else 1.0), units.share,
                                     len(member.trial.run_figures)))
        for series, name in zip(chosen.series, labels, strict=True)
        for member in series.members
        if (value := member.against_base) is not None and series.base is not None
    ]  # fmt: skip
    if len({row["x"] for row in rows}) < 2:
        return None
    is_level = what == "efficiency"
    largest = max(row["x"] for row in rows)
    ideals = [
        row
        for base in sorted({series.base.gpus for series in chosen.series if series.base is not None})
        for row in ideal_line(f"ideal {base}", base, largest, lambda times: 1.0 if is_level else times)
    ]
    beside = [] if per_gpu else _published(published, chosen, labels, relative=True)
    baselines = [
        f"Baseline of {name}: {gpus_text(base.gpus)}, {units.seconds(base.trial.epoch_seconds.value)} an epoch."
        for series, name in zip(chosen.series, labels, strict=True)
        if (base := series.base) is not None and base.trial.epoch_seconds is not None and _has_relatives(series)
    ]
    plot = Plot({"rows": rows, "ideal": ideals, "published": beside})
    without = _counts_without(chosen, {row["x"] for row in rows})
    if without:
        plot.datasets["left_out"] = [{"x": gpus, "text": f"no {what}{why}"} for gpus, why in without.items()]
    return curves_view(
        {"measure": ControlOption(what, what)},
        plot,
        what,
        _notes(chosen, rows, published, what),
        y_scale="from zero" if is_level else "log2 by log2",
        more=[*baselines, *_not_compared(chosen)],
    )


def _has_relatives(series: FigureSeries) -> bool:
    """Whether any of its members is compared with the base."""
    return any(member.against_base is not None for member in series.members)


def _row(name: str, member: Member, row: ChartRow) -> ChartRow:
    return {"series": name, "x": member.gpus} | row


def _ideal_seconds(base: float, weak: bool, times: float) -> float:
    """Ideal epoch seconds: fewer with every GPU, or constant in weak scaling."""
    return base if weak else base / times


def _published(
    published: PublishedPoints, chosen: Selection, labels: Sequence[str], *, relative: bool
) -> list[ChartRow]:
    """The published epoch seconds, each in the shape of the series beside which it stands.

    `relative`: speedups, or efficiencies of weak series, against the GPU count of the series' own base; left out where
    that count was not published.
    """
    name_of = {id(series): name for series, name in zip(chosen.series, labels, strict=True)}
    rows = []
    for series, facts in published.facts:
        base = next((fact.epoch_seconds for fact in facts if series.base and fact.gpus == series.base.gpus), None)
        for fact in facts if base is not None or not relative else ():
            value = base / fact.epoch_seconds if relative and base is not None else fact.epoch_seconds
            dataset, devices = DATASET_NAMES[fact.dataset], ", ".join(fact.devices)
            what = f"published: {dataset}, micro-batch {fact.micro_batch}, {devices}"
            shown = units.share(value) if relative else units.seconds(value)
            rows.append({"series": name_of[id(series)], "what": what, "x": fact.gpus, "value": value, "shown": shown})
    return rows


def _notes(chosen: Selection, rows: Sequence[ChartRow], published: PublishedPoints, relative: str) -> list[str]:
    """What a reader must know; `relative`: the quantity that GPU counts which may not be compared do not have."""
    bases = {base.gpus for series in chosen.series if (base := series.base) is not None}
    unlike = any(_are_unlike_hosts(series) for series in chosen.series)
    return [
        *chosen.notes,
        *_without_notes(chosen, relative),
        bars_note(rows),
        f"relative to {' and '.join(map(str, sorted(bases)))} GPUs" if bases - {1} else "",
        _borrowed_note(chosen),
        "dashed: ideal, were every host like the first" if unlike else "dashed: ideal",
        published.note,
    ]


def _are_unlike_hosts(series: FigureSeries) -> bool:
    """Whether the hosts of a series have GPUs of several kinds by what its records name, its base among them."""
    of_base = series.base.devices if series.base is not None else ()
    return series.hosts != "one host" and len({*series.devices, *of_base}) > 1


def bars_note(rows: Sequence[ChartRow]) -> str:
    """What the bars of some rows are, or why there are none."""
    if any(row["low"] is not None for row in rows):
        return "bars: 95 % intervals over runs"
    most = max(row["runs"] for row in rows)
    return "one run each: no intervals" if most == 1 else f"{most} runs at most: no intervals"


def _left_out(chosen: Selection) -> list[tuple[FigureSeries, Member]]:
    """Members that may not be compared with their base."""
    return [
        (series, member)
        for series in chosen.series
        for member in series.members
        if member.reasons and series.base is not None
    ]


def _counts_without(chosen: Selection, compared: set[int]) -> dict[int, str]:
    """GPU counts at which no series is compared, and a word why where that is one of a few letters."""
    reasons_of: dict[int, set[str]] = {}
    for _, member in _left_out(chosen):
        if member.gpus not in compared:
            reasons_of.setdefault(member.gpus, set()).update(member.reasons)
    return {
        gpus: ": unlike GPUs" if all(reason.startswith(_OF_DEVICES) for reason in reasons) else ""
        for gpus, reasons in sorted(reasons_of.items())
    }


def _without_notes(chosen: Selection, what: str) -> list[str]:
    """Which GPU counts have no speedup or efficiency, and why, in a line that a picture has room for:
    "4 and 5 GPUs have no speedup: their GPUs are not all like the first (Tesla T4)".

    Counts that other curves have are said to be of their curve.
    """
    label_of = {id(series): name for series, name in zip(chosen.series, names(chosen.series), strict=True)}
    compared = {m.gpus for series in chosen.series for m in series.members if m.against_base is not None}
    counts_of: dict[tuple[str, str], set[int]] = {}
    for series, member in _left_out(chosen):
        which = f" for {label_of[id(series)]}" if member.gpus in compared else ""
        for reason in member.reasons:
            counts_of.setdefault((which, _short_reason(series, reason)), set()).add(member.gpus)
    return [
        f"{units.listed(sorted(counts))} GPU{'s have' if max(counts) > 1 else ' has'} no {what}{which}: {reason}"
        for (which, reason), counts in counts_of.items()
    ]


def _short_reason(series: FigureSeries, reason: str) -> str:
    """A reason without its values: the summary has these."""
    subject, has_values, _ = reason.partition(": ")
    if reason.startswith(_OF_DEVICES) and series.base is not None:
        return f"their GPUs are not all like the first ({' and '.join(series.base.devices)})"
    return f"unlike {subject}" if has_values else reason


def _not_compared(chosen: Selection) -> list[str]:
    """Members that are not compared with the base, and why; where not all series have them, for which ones."""
    label_of = {id(series): name for series, name in zip(chosen.series, names(chosen.series), strict=True)}
    series_of: dict[tuple[int, int, str], list[FigureSeries]] = {}
    for series, member in _left_out(chosen):
        if series.base is not None:
            series_of.setdefault((member.gpus, series.base.gpus, member.why_not), []).append(series)
    sentences = []
    for (gpus, base_gpus, why_not), some in series_of.items():
        labels = units.listed(label_of[id(series)] for series in some)
        which = f" for {labels}" if len(some) < len(chosen.series) else ""
        sentences.append(f"{gpus} GPUs are not held against {base_gpus}{which}: {why_not}.")
    return sentences


def _borrowed_note(chosen: Selection) -> str:
    """That the one-GPU point of a curve over several hosts was measured with those of one host."""
    for series in chosen.series:
        of_curve = {point.trial_id for point in series.curve.points}
        if any(member.trial.trial_id not in of_curve for member in series.members):
            return "1 GPU: from the measurements in one host"
    return ""


def gpus_text(count: int) -> str:
    """ "1 GPU", "8 GPUs"."""
    return units.counted(count, "GPU")
