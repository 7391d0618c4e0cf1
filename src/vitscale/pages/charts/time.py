"""The parts of a step as stacked bars, and the waterfall from ideal to measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vitscale.analysis import Analysis, CurveResult, Factor, Waterfall, by_mode
from vitscale.analysis.time.breakdown import Breakdown
from vitscale.analysis.time.run_waterfall import CHECKPOINT, EVALUATION, START_UP
from vitscale.analysis.time.waterfall import STEP_ROUNDING
from vitscale.pages.charts import axes
from vitscale.pages.statements import WATERFALL, claim, worst_loss
from vitscale.present import units
from vitscale.present.document import ControlOption, Figure, FigureView
from vitscale.present.estimate import Estimate
from vitscale.store.records import COMMUNICATION, EXPOSED
from vitscale.trial.trial import Mode

PART_NAMES: Mapping[str, str] = {
    "data_wait": "data wait",
    "h2d": "copy to device",
    "forward": "forward",
    "backward": "backward",
    "bubble": "pipeline bubble",
    "wait": "exposed wait",
    "wire": "exposed wire",
    "norm": "synchronised norm",
    COMMUNICATION: "exposed communication",
    "optimizer": "optimizer",
    "launch_gaps": "launch gaps",
    "other": "other",
}
"""Part of a step -> its name for a reader, in the order in which bars stack them."""
LONGEST_STEP = 1e9
"""Seconds. A longer step comes from a broken clock or record, and would leave no room for anything else."""
COLOURS: Mapping[str, str] = axes.PART_COLOURS | {COMMUNICATION: axes.COMMUNICATION_COLOUR}


@dataclass(frozen=True)
class Bar:
    """The mean explained step of a trial's typical rank."""

    family: str
    """The curve's name without its batch size: bars of one family differ only in batch size and rank count."""
    batch: str
    batch_order: int
    gpus: int
    trial_id: str
    seconds: float
    parts: Mapping[str, float]
    """Part -> seconds, in the order of the stack; unknown parts are absent."""

    @property
    def kept_batch(self) -> axes.KeptBatch:
        """The batch size that its curve keeps."""
        return axes.KeptBatch(self.batch, self.batch_order)


def bars(analysis: Analysis, curves: Sequence[CurveResult]) -> list[Bar]:
    """Return one bar for each explained trial of these curves."""
    trial_bars = []
    for curve, family in zip(curves, axes.families(analysis, curves), strict=True):
        for point in curve.points:
            trial = analysis.trials[point.trial_id]
            if trial.breakdown is None or not _can_be_drawn(trial.breakdown):
                continue
            batch = axes.kept_batch(curve, trial)
            bar = Bar(
                family=family,
                batch=batch.label,
                batch_order=batch.images,
                gpus=point.gpus,
                trial_id=point.trial_id,
                seconds=trial.breakdown.typical.seconds,
                parts=known_part_seconds(trial.breakdown),
            )
            trial_bars.append(bar)
    return trial_bars


def _can_be_drawn(breakdown: Breakdown) -> bool:
    """Whether the step took a possible time above 0, and all of its known parts possible times, not all of them 0."""
    if not 0 < breakdown.typical.seconds < LONGEST_STEP:
        return False
    parts = known_part_seconds(breakdown).values()
    return any(parts) and all(0 <= part < LONGEST_STEP for part in parts)


def known_part_seconds(breakdown: Breakdown) -> dict[str, float]:
    """Return the known parts of the typical rank's step in seconds, in the order of the stack; they add up to the step.

    Where a part of the exposed communication is unknown, its parts are replaced by their sum (`COMMUNICATION`).
    """
    typical = breakdown.typical
    known_parts = {part: seconds for part, seconds in typical.parts.items() if seconds is not None}
    is_communication_split = all(part in known_parts for part in EXPOSED)
    if is_communication_split:
        parts = known_parts
    else:
        parts = {part: seconds for part, seconds in known_parts.items() if part not in EXPOSED}
        if typical.exposed_seconds is not None:
            parts[COMMUNICATION] = typical.exposed_seconds
    return {part: parts[part] for part in PART_NAMES if part in parts}


def unknown_parts(reasons_of: Sequence[Mapping[str, str]]) -> list[str]:
    """Return a sentence on each reason why parts are unknown, with these parts and the number of trials.

    `reasons_of`: for each trial, unknown part -> the reason.
    """
    parts_by_reason: dict[str, dict[str, None]] = {}
    for reasons in reasons_of:
        for part, reason in reasons.items():
            parts_by_reason.setdefault(reason, {})[PART_NAMES.get(part, part)] = None
    sentences = []
    for reason, parts in parts_by_reason.items():
        trials = sum(reason in reasons.values() for reasons in reasons_of)
        sentences.append(f"Unknown in {trials} of {len(reasons_of)} trials: {', '.join(parts)}: {reason}.")
    return sentences


_SMALLEST_LABELLED_SHARE = 0.06
"""Share of the axis below which a part has no room for its label."""
_SMALLEST_UNKNOWN_SHARE = 0.01
_PARTS_WITH_DARK_LABELS = [PART_NAMES[part] for part in ("forward", "wait", "norm", "data_wait", "other")]
"""Parts with dark labels."""
_LARGEST_TIME_RATIO = 20
"""Ratio of two steps' times above which the short one would be a line if drawn as time."""


def breakdown_chart(analysis: Analysis, curves: Sequence[CurveResult]) -> Figure | None:
    """Draw stacked bars in seconds and as shares, a view of each per batch policy and batch size.

    Return None where no step was explained.
    """
    views: list[FigureView] = []
    for mode, mode_curves in by_mode(curves).items():
        mode_bars = bars(analysis, mode_curves)
        batches = sorted({bar.kept_batch for bar in mode_bars}, key=lambda batch: (batch.images, batch.label))
        for batch in batches:
            batch_bars = [bar for bar in mode_bars if bar.kept_batch == batch]
            name_addition = f"-{batch.images}" if len(batches) > 1 else ""
            views += _views_of_batch(batch_bars, mode, name_addition)
    return Figure("breakdown", "Where the time of a step goes", tuple(views)) if views else None


def _views_of_batch(bars: Sequence[Bar], mode: Mode, name_addition: str) -> list[FigureView]:
    """Draw the bars of one batch as time and as shares; as shares first where steps differ too much in time."""
    shortest = min(bar.seconds for bar in bars)
    in_time = _StackedForm("breakdown", "time", units.time_unit([shortest]))
    as_shares = _StackedForm("breakdown-share", "shares", unit=None)
    forms = [in_time, as_shares]
    if max(bar.seconds for bar in bars) > _LARGEST_TIME_RATIO * shortest:
        forms.reverse()
    return [_stacked_view(f"{mode}-{form.name}{name_addition}", mode, bars, form) for form in forms]


class _StackedForm(NamedTuple):
    """The quantity that the length of a bar shows: time, or shares of the step."""

    name: str
    label: str
    unit: units.Unit | None
    """Unit of time; None: shares of the step."""


def stacked_rows(bars: Sequence[Bar], *, unit: units.Unit | None = None) -> list[axes.ChartRow]:
    """Return a row for each part that took any time, with its start and end in its bar.

    Args:
        bars: the bars.
        unit: unit of time; None: shares of the step.
    """
    rows = []
    for bar in bars:
        scale = unit.factor if unit else 1 / bar.seconds
        start_seconds = 0.0
        for order, (part, name) in enumerate(PART_NAMES.items()):
            seconds = bar.parts.get(part, 0.0)
            end_seconds = start_seconds + seconds
            if seconds > 0:
                row = {
                    "bar": f"{bar.family}, {units.ranks(bar.gpus)}",
                    "family": bar.family,
                    "gpus": bar.gpus,
                    "trial": bar.trial_id,
                    "part": name,
                    "order": order,
                    "start": start_seconds * scale,
                    "end": end_seconds * scale,
                    "shown": units.seconds(seconds),
                    "share": units.percent(seconds / bar.seconds),
                }
                rows.append(row)
            start_seconds = end_seconds
    return rows


def _stacked_view(name: str, mode: Mode, bars: Sequence[Bar], form: _StackedForm) -> FigureView:
    """Draw the bars of one batch, stacked by part, as time or as shares of the step."""
    rows = stacked_rows(bars, unit=form.unit)
    _add_labels(rows, form.unit)
    if form.unit is None:
        x_title = "share of the step"
        x_format = "%"
    else:
        x_title = f"step ({form.unit.sign})"
        x_format = "~r"
    x_axis = {"format": x_format, "tickCount": 6}
    x = axes.quantity("start", x_title, axis=x_axis, scale={"nice": form.unit is not None})
    y = axes.nominal("bar", sort=axes.IN_ORDER, axis={"labelLimit": 220, "ticks": False})
    point_tooltip = axes.tooltip(bar="trial", part="part", shown="time", share="share of the step", trial="trial")
    plot = axes.Plot({"rows": rows})
    plot.add("rows", {"type": "bar"}, x=x, x2={"field": "end"}, y=y, color=part_colours(rows), tooltip=point_tooltip)
    text = {"type": "text", "fontSize": 10, "baseline": "middle"}
    ink = {"field": "ink", "type": "nominal", "scale": None}
    plot.add("rows", text, x=axes.quantity("middle"), y=y, text={"field": "label"}, color=ink)
    summary = _longest_parts_sentence(bars)
    batch = ControlOption(str(bars[0].kept_batch.images), bars[0].kept_batch.label)
    return FigureView(
        name=name,
        choices={
            "batch policy": ControlOption(mode, mode),
            "batch": batch,
            "as": ControlOption(form.label, form.label),
        },
        title=f"Where the time of a step goes, {mode}, {batch.label}",
        subtitle="mean explained step of the rank with the median wait; on a GPU without what explaining adds",
        spec=plot.spec(summary, {"step": 26}),
        columns={"bar": "curve and ranks", "part": "part", "shown": "time", "share": "share of the step"},
        summary=summary,
    )


def _add_labels(rows: Sequence[axes.ChartRow], unit: units.Unit | None) -> None:
    """Add fields to each row, in place: the number of its bar, and the label in its middle with position and colour.

    The label is empty where there is no room.
    """
    places = {bar: place for place, bar in enumerate(dict.fromkeys(row["bar"] for row in rows))}
    longest = max(row["end"] for row in rows)
    for row in rows:
        length = row["end"] - row["start"]
        label = row["share"] if unit is None else units.number(length, 2)
        row["place"] = places[row["bar"]]
        row["label"] = label if length / longest >= _SMALLEST_LABELLED_SHARE else ""
        row["ink"] = "#1c2430" if row["part"] in _PARTS_WITH_DARK_LABELS else "#ffffff"
        row["middle"] = (row["start"] + row["end"]) / 2


def part_colours(rows: Sequence[axes.ChartRow]) -> axes.ChartSpec:
    """Encode the colours of the parts that occur, in the order of the stack."""
    present = {row["part"] for row in rows}
    colours = {name: COLOURS[part] for part, name in PART_NAMES.items() if name in present}
    legend = {"title": None, "orient": "top", "columns": 4, "labelLimit": 400, "symbolType": "square"}
    scale = {"domain": list(colours), "range": list(colours.values())}
    return axes.nominal("part", scale=scale, legend=legend)


def _longest_parts_sentence(bars: Sequence[Bar]) -> str:
    """Return a sentence on the bar with the most ranks: its three longest parts, and the share of unknown ones."""
    bar = max(bars, key=lambda bar: bar.gpus)
    longest = sorted(bar.parts.items(), key=lambda item: -item[1])[:3]
    shares = {PART_NAMES[part]: seconds / bar.seconds for part, seconds in longest}
    unknown_share = 1 - sum(bar.parts.values()) / bar.seconds
    if unknown_share >= _SMALLEST_UNKNOWN_SHARE:
        shares["unknown"] = unknown_share
    parts = ", ".join(f"{name} {units.percent(share)}" for name, share in shares.items())
    return f"{bar.family} on {units.ranks(bar.gpus)}: {units.seconds(bar.seconds)} a step: {parts}."


_IDEAL_BAR = "ideal"
_MEASURED_BAR = "measured"
_FACTOR_COLOURS = {
    _IDEAL_BAR: axes.IDEAL_COLOUR,
    STEP_ROUNDING: axes.ROUNDING_COLOUR,
    START_UP: axes.PART_COLOURS["h2d"],
    "compute scaling": axes.PART_COLOURS["backward"],
    "data wait": axes.PART_COLOURS["data_wait"],
    "loading": axes.PART_COLOURS["data_wait"],
    "decoding": axes.PART_COLOURS["forward"],
    "pipeline bubble": axes.PART_COLOURS["bubble"],
    "straggler wait": axes.PART_COLOURS["wait"],
    "wire": axes.PART_COLOURS["wire"],
    "synchronised norm": axes.PART_COLOURS["norm"],
    COMMUNICATION: axes.COMMUNICATION_COLOUR,
    "optimizer": axes.PART_COLOURS["optimizer"],
    "launch gaps": axes.PART_COLOURS["launch_gaps"],
    "other": axes.PART_COLOURS["other"],
    EVALUATION: axes.PART_COLOURS["launch_gaps"],
    CHECKPOINT: axes.PART_COLOURS["optimizer"],
    _MEASURED_BAR: axes.IDEAL_COLOUR,
}
_ROOM_FOR_LABELS = 1.16
"""Room right of the longest bar, as a factor of its length."""
_INTERVAL_HEADROOM = 1.5
"""How far beyond the longest bar an interval may reach, as a factor."""


def waterfall_chart(waterfalls: Sequence[Waterfall], front_trial_id: str = "") -> Figure | None:
    """Draw a view for each trial whose efficiency could be taken apart.

    Args:
        waterfalls: the waterfalls; those without factors are not drawn.
        front_trial_id: identity of the trial that comes first; where it has no waterfall, the largest loss does.
    """
    drawable = [waterfall for waterfall in waterfalls if waterfall.factors]
    if not drawable:
        return None
    front = waterfall_of_trial(drawable, front_trial_id) or largest_loss(drawable)
    in_order = sorted(drawable, key=lambda waterfall: waterfall is not front)
    views = [_waterfall_view(waterfall, number) for number, waterfall in enumerate(in_order, 1)]
    return Figure("waterfall", "From ideal to measured", tuple(views))


def waterfall_of_trial(waterfalls: Sequence[Waterfall], trial_id: str) -> Waterfall | None:
    """Return the first waterfall of a trial that has factors; None if there is none."""
    for waterfall in waterfalls:
        if waterfall.factors and waterfall.trial_id == trial_id:
            return waterfall
    return None


def largest_loss(waterfalls: Sequence[Waterfall]) -> Waterfall | None:
    """Return the waterfall of the lowest efficiency among those on the most ranks; None if none has factors."""
    worst = worst_loss([waterfall for waterfall in waterfalls if waterfall.factors])
    return worst.waterfall if worst is not None else None


def _waterfall_view(waterfall: Waterfall, number: int) -> FigureView:
    """Draw one waterfall. `number`: its number among the views, from 1, by which its file is named."""
    rows = waterfall_rows(waterfall)
    axes.cut_bars(rows, 0.0, _INTERVAL_HEADROOM * max(row["right"] for row in rows))
    for row in rows:
        row["right"] = max(row["right"], row["high"] or 0.0)
    plot = _waterfall_plot(rows)
    label = f"{waterfall.curve}, {units.ranks(waterfall.gpus)}"
    summary = claim(WATERFALL, waterfall).text
    subtitle = "points of efficiency that each factor takes or gives"
    if axes.has_intervals(rows):
        subtitle += "; thin bars: 95 % intervals"
    return FigureView(
        name="waterfall" if number == 1 else f"waterfall-{number}",
        choices={
            "batch policy": ControlOption(waterfall.mode, waterfall.mode),
            "trial": ControlOption(f"{waterfall.mode}-{number}", label),
        },
        title=f"From ideal to measured: {label}, {waterfall.mode}",
        subtitle=subtitle,
        spec=plot.spec(summary, {"step": 19}),
        columns={
            "step": "factor",
            "label": "% of ideal, or points",
            "bounds": "95 % interval",
            "factor": "as a factor",
        },
        summary=summary,
    )


def _waterfall_plot(rows: list[axes.ChartRow]) -> axes.Plot:
    """Draw bars below one another, each joined to the next, with intervals and labels."""
    steps = [row["step"] for row in rows]
    rightmost = max(row["right"] for row in rows)
    leftmost = min(0.0, *(min(row["start"], row["end"]) for row in rows))
    ticks = {"values": [0, 25, 50, 75, 100]} if rightmost < 150 else {}
    x = axes.quantity(
        "start",
        "% of ideal",
        scale={"domain": [leftmost, rightmost * _ROOM_FOR_LABELS], "nice": False},
        axis={**ticks, "tickCount": 5, "format": "d", "grid": False},
    )
    y = axes.nominal("step", sort=steps, axis={"ticks": False, "domain": False, "labelLimit": 200, "labelPadding": 6})
    colours = {"domain": steps, "range": [_FACTOR_COLOURS[step] for step in steps]}
    point_tooltip = axes.tooltip(step="step", label="% of ideal, or points", bounds="95 % interval", factor="factor")
    plot = axes.Plot({"rows": rows})
    joint = {"type": "rule", "strokeWidth": 1, "color": axes.IDEAL_COLOUR}
    middle = {"bandPosition": 0.5}
    plot.add("rows", joint, x=axes.quantity("end"), y=y | middle, y2={"field": "next", **middle})
    bar = {"type": "bar", "height": {"band": 0.72}, "stroke": "#80808080", "strokeWidth": 0.5}
    colour = axes.nominal("step", scale=colours, legend=None)
    plot.add("rows", bar, x=x, x2={"field": "end"}, y=y, color=colour, tooltip=point_tooltip)
    axes.add_bars(plot, "rows", y, colour=None, upright=False)
    text = {"type": "text", "align": "left", "dx": 4, "fontSize": 11}
    plot.add("rows", text, x=axes.quantity("right"), y=y, text={"field": "label"})
    return plot


def waterfall_rows(waterfall: Waterfall) -> list[axes.ChartRow]:
    """Return the bars of a waterfall, in percent of ideal: the ideal, each factor, and the measured efficiency.

    Each factor's bar begins where the one before ends. The field `next` names the bar below.
    """
    rows = [_bar_row(_IDEAL_BAR, 0.0, Estimate(100.0), "100 %")]
    order = list(_FACTOR_COLOURS)
    for factor in sorted(waterfall.factors, key=lambda factor: order.index(factor.name)):
        change = _change_in_percent(factor)
        start = rows[-1]["end"]
        rows.append(_bar_row(factor.name, start, change, _signed_points_text(change.value), f"{factor.factor:.3f}"))
    measured = _measured_efficiency(waterfall).times(100)
    rows.append(_bar_row(_MEASURED_BAR, 0.0, measured, f"{measured.value:.0f} %"))
    next_steps = [*(row["step"] for row in rows[1:]), _MEASURED_BAR]
    return [row | {"next": next_step} for row, next_step in zip(rows, next_steps, strict=True)]


def _change_in_percent(factor: Factor) -> Estimate:
    """Return the change of efficiency by a factor, in percent of ideal: below 0 where the factor takes from it.

    `factor.points` are above 0 there, so signs change, and the low end comes from the high one.
    """
    points = factor.interval or Estimate(factor.points)
    low = None if points.high is None else -100 * points.high
    high = None if points.low is None else -100 * points.low
    return Estimate(-100 * factor.points, low, high)


def _measured_efficiency(waterfall: Waterfall) -> Estimate:
    """Return the measured efficiency; without an interval where runs are too few for one."""
    interval = waterfall.interval
    if interval and not interval.note:
        return interval
    return Estimate(waterfall.efficiency or 0.0)


def _bar_row(step: str, start: float, change: Estimate, label: str, factor: str = "") -> axes.ChartRow:
    """Return the row of a bar from `start` to `start + change`; the interval of `change` lies around its end."""
    end = start + change.value
    row: axes.ChartRow = {
        "step": step,
        "start": start,
        "end": end,
        "label": label,
        "factor": factor,
        "low": None,
        "high": None,
        "bounds": "",
        "right": max(start, end),
    }
    if change.low is not None and change.high is not None:
        row["low"] = start + change.low
        row["high"] = start + change.high
        row["bounds"] = f"{_signed_points_text(change.low)} to {_signed_points_text(change.high)}"
    return row


def _signed_points_text(points: float) -> str:
    """Return "-17.2" (with a minus sign), "+3.1" or "0"."""
    text = f"{points:+.1f}"
    return "0" if float(text) == 0 else text.replace("-", "\N{MINUS SIGN}")
