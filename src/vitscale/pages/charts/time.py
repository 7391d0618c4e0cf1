"""The parts of a step as stacked bars, and the waterfall from ideal to measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vitscale.analysis import Analysis, CurveResult, Waterfall, by_mode
from vitscale.analysis.time.breakdown import Breakdown
from vitscale.analysis.time.run_waterfall import CHECKPOINT, EVALUATION, START_UP
from vitscale.analysis.time.waterfall import STEP_ROUNDING
from vitscale.pages.charts import axes
from vitscale.pages.statements import WATERFALL, claim, worst_loss
from vitscale.present import units
from vitscale.present.document import ControlOption, Figure, FigureView
from vitscale.present.estimate import Estimate
from vitscale.store.records import COMMUNICATION, EXPOSED

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
"""The parts in the order of the stack, as a reader wants them named."""
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
    """Part to seconds, in the order of the stack; unknown parts are absent."""


def bars(analysis: Analysis, curves: Sequence[CurveResult]) -> list[Bar]:
    """One bar for each explained trial of these curves."""
    drawn = []
    names = axes.families(analysis, curves)
    for curve, family in zip(curves, names, strict=True):
        for point in curve.points:
            trial = analysis.trials[point.trial_id]
            if trial.breakdown is None or not _sound(trial.breakdown):
                continue
            seconds, parts = trial.breakdown.typical.seconds, parts_of(trial.breakdown)
            drawn.append(Bar(family, *axes.kept_batch(curve, trial), point.gpus, point.trial_id, seconds, parts))
    return drawn


def _sound(breakdown: Breakdown) -> bool:
    """Whether its step took a known time above 0, and neither it nor a part more than any can."""
    parts = parts_of(breakdown).values()
    possible = 0 < breakdown.typical.seconds < LONGEST_STEP
    return possible and any(parts) and all(0 <= part < LONGEST_STEP for part in parts)


def parts_of(breakdown: Breakdown) -> dict[str, float]:
    """The known parts of the typical rank's step in seconds, in the order of the stack; they add up to the step."""
    typical = breakdown.typical
    parts = {part: seconds for part, seconds in typical.parts.items() if seconds is not None}
    if not all(part in parts for part in EXPOSED):
        parts = {part: seconds for part, seconds in parts.items() if part not in EXPOSED}
        if typical.exposed_seconds is not None:
            parts[COMMUNICATION] = typical.exposed_seconds
    return {part: parts[part] for part in PART_NAMES if part in parts}


def unknown_parts(reasons_of: Sequence[Mapping[str, str]]) -> list[str]:
    """Why parts are unknown: each reason once, with its parts and the number of trials it holds for."""
    by_reason: dict[str, dict[str, None]] = {}
    for reasons in reasons_of:
        for part, reason in reasons.items():
            by_reason.setdefault(reason, {})[PART_NAMES.get(part, part)] = None
    return [
        f"Unknown in {sum(reason in reasons.values() for reasons in reasons_of)} of {len(reasons_of)} trials: "
        f"{', '.join(parts)}: {reason}."
        for reason, parts in by_reason.items()
    ]


_LEAST_LABELLED = 0.06
"""Share of the axis below which a part has no room for its label."""
_LEAST_UNKNOWN = 0.01
_LIGHT_PARTS = [PART_NAMES[part] for part in ("forward", "wait", "norm", "data_wait", "other")]
"""Parts with dark labels."""
_SHARES = "shares"
_UNLIKE = 20
"""Ratio of two steps' times above which the short one would be a line if drawn as time."""


def breakdown_chart(analysis: Analysis, curves: Sequence[CurveResult]) -> Figure | None:
    """Stacked bars in seconds and as shares, a view per batch policy and batch size; None without explained steps."""
    views = []
    for mode, of_mode in by_mode(curves).items():
        own = bars(analysis, of_mode)
        batches = sorted({(bar.batch_order, bar.batch) for bar in own})
        for order, batch in batches:
            some = [bar for bar in own if (bar.batch_order, bar.batch) == (order, batch)]
            of_batch = f"-{order}" if len(batches) > 1 else ""
            unit = units.time_unit([min(bar.seconds for bar in some)])
            choices = {"batch policy": ControlOption(mode, mode), "batch": ControlOption(str(order), batch)}
            forms = [(unit, ControlOption("time", "time")), (None, ControlOption(_SHARES, _SHARES))]
            if max(bar.seconds for bar in some) > _UNLIKE * min(bar.seconds for bar in some):
                forms.reverse()
            for scale, as_what in forms:
                name = f"{mode}-breakdown{'' if scale else '-share'}{of_batch}"
                views.append(_stacked_view(name, mode, some, scale, choices | {"as": as_what}))
    if not views:
        return None
    return Figure("breakdown", "Where the time of a step goes", tuple(views))


def stacked(bars: Sequence[Bar], *, unit: units.Unit | None = None) -> list[axes.ChartRow]:
    """One row per part with a length: where it begins and ends in its bar.

    Args:
        bars: the bars.
        unit: unit of time; None: shares of the step.
    """
    rows = []
    for bar in bars:
        scale = unit.factor if unit else 1 / bar.seconds
        length = 0.0
        for order, (part, name) in enumerate(PART_NAMES.items()):
            seconds = bar.parts.get(part, 0.0)
            if seconds > 0:
                where = {"bar": f"{bar.family}, {units.ranks(bar.gpus)}", "family": bar.family, "gpus": bar.gpus}
                span = {"start": length * scale, "end": (length + seconds) * scale}
                told = {"shown": units.seconds(seconds), "share": units.percent(seconds / bar.seconds)}
                rows.append(where | {"trial": bar.trial_id, "part": name, "order": order} | span | told)
            length += seconds
    return rows


def _stacked_view(
    name: str, mode: str, bars: Sequence[Bar], unit: units.Unit | None, choices: Mapping[str, ControlOption]
) -> FigureView:
    rows = stacked(bars, unit=unit)
    longest = max(row["end"] for row in rows)
    bars_in_order = list(dict.fromkeys(row["bar"] for row in rows))
    for row in rows:
        row["place"] = bars_in_order.index(row["bar"])
        long = (row["end"] - row["start"]) / longest >= _LEAST_LABELLED
        shown = units.number(row["end"] - row["start"], 2) if unit else row["share"]
        row["label"] = shown if long else ""
        row["ink"] = "#1c2430" if row["part"] in _LIGHT_PARTS else "#ffffff"
        row["middle"] = (row["start"] + row["end"]) / 2
    y = axes.nominal("bar", sort=axes.IN_ORDER, axis={"labelLimit": 220, "ticks": False})
    title = f"step ({unit.sign})" if unit else "share of the step"
    x = axes.quantity(
        "start", title, axis={"format": "~r" if unit else "%", "tickCount": 6}, scale={"nice": bool(unit)}
    )
    told = axes.tooltip(bar="trial", part="part", shown="time", share="share of the step", trial="trial")
    plot = axes.Plot({"rows": rows})
    plot.add("rows", {"type": "bar"}, x=x, x2={"field": "end"}, y=y, color=part_colours(rows), tooltip=told)
    text = {"type": "text", "fontSize": 10, "baseline": "middle"}
    label: axes.ChartSpec = {"text": {"field": "label"}, "color": {"field": "ink", "type": "nominal", "scale": None}}
    plot.add("rows", text, x=axes.quantity("middle"), y=y, **label)
    summary = _largest_parts(bars)
    return FigureView(
        name,
        choices,
        f"Where the time of a step goes, {mode}, {choices['batch'].label}",
        "mean explained step of the rank with the median wait; on a GPU without what explaining adds",
        plot.spec(summary, {"step": 26}),
        {"bar": "curve and ranks", "part": "part", "shown": "time", "share": "share of the step"},
        summary,
    )


def part_colours(rows: Sequence[axes.ChartRow]) -> axes.ChartSpec:
    """The colours of the parts that occur, in the order of the stack."""
    parts = {name: COLOURS[part] for part, name in PART_NAMES.items() if any(row["part"] == name for row in rows)}
    legend = {"title": None, "orient": "top", "columns": 4, "labelLimit": 400, "symbolType": "square"}
    return axes.nominal("part", scale={"domain": [*parts], "range": [*parts.values()]}, legend=legend)


def _largest_parts(bars: Sequence[Bar]) -> str:
    """The three longest parts of the bar with the most ranks, and how much of it is of unknown parts, as a sentence."""
    bar = max(bars, key=lambda bar: bar.gpus)
    longest = sorted(bar.parts.items(), key=lambda item: -item[1])[:3]
    shares = {PART_NAMES[part]: seconds / bar.seconds for part, seconds in longest}
    if (rest := 1 - sum(bar.parts.values()) / bar.seconds) >= _LEAST_UNKNOWN:
        shares["unknown"] = rest
    named = ", ".join(f"{name} {units.percent(share)}" for name, share in shares.items())
    return f"{bar.family} on {units.ranks(bar.gpus)}: {units.seconds(bar.seconds)} a step: {named}."


_IDEAL, _MEASURED = "ideal", "measured"
_FACTOR_COLOURS = {
    _IDEAL: axes.IDEAL_COLOUR,
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
    _MEASURED: axes.IDEAL_COLOUR,
}
_ROOM_FOR_LABELS = 1.16
"""Room right of the longest bar, as a factor of its length."""
_HEADROOM = 1.5
"""How far beyond the longest bar an interval may reach, as a factor."""


def waterfall_chart(waterfalls: Sequence[Waterfall], chosen: str = "") -> Figure | None:
    """A view for each trial whose efficiency could be taken apart; the `chosen` trial or the worst comes first."""
    known = [waterfall for waterfall in waterfalls if waterfall.factors]
    if not known:
        return None
    front = of_trial(known, chosen) or largest_loss(known)
    in_order = [front, *(waterfall for waterfall in known if waterfall is not front)] if front is not None else known
    views = [_waterfall_view(waterfall, index) for index, waterfall in enumerate(in_order, 1)]
    return Figure("waterfall", "From ideal to measured", tuple(views))


def of_trial(known: Sequence[Waterfall], trial_id: str) -> Waterfall | None:
    """The first waterfall of a trial that could be taken apart; None if there is none."""
    return next((waterfall for waterfall in known if waterfall.factors and waterfall.trial_id == trial_id), None)


def largest_loss(known: Sequence[Waterfall]) -> Waterfall | None:
    """The waterfall of the lowest efficiency among those on the most ranks; None if none could be taken apart."""
    worst = worst_loss([waterfall for waterfall in known if waterfall.factors])
    return worst.waterfall if worst is not None else None


def _waterfall_view(waterfall: Waterfall, number: int) -> FigureView:
    rows = waterfall_rows(waterfall)
    steps = [row["step"] for row in rows]
    axes.cut_bars(rows, 0.0, _HEADROOM * max(row["right"] for row in rows))
    for row in rows:
        row["right"] = max(row["right"], row["high"] or 0.0)
    longest = max(row["right"] for row in rows)
    y = axes.nominal("step", sort=steps, axis={"ticks": False, "domain": False, "labelLimit": 200, "labelPadding": 6})
    ticks = {"values": [0, 25, 50, 75, 100]} if longest < 150 else {}
    x = axes.quantity(
        "start",
        "% of ideal",
        scale={"domain": [min(0.0, *(min(row["start"], row["end"]) for row in rows)), longest * _ROOM_FOR_LABELS],
               "nice": False},
        axis={**ticks, "tickCount": 5, "format": "d", "grid": False},
    )  # fmt: skip
    colour = axes.nominal(
        "step", scale={"domain": steps, "range": [_FACTOR_COLOURS[step] for step in steps]}, legend=None
    )
    told = axes.tooltip(step="step", label="% of ideal, or points", bounds="95 % interval", factor="factor")
    plot = axes.Plot({"rows": rows})
    joint = {"type": "rule", "strokeWidth": 1, "color": axes.IDEAL_COLOUR}
    band = {"bandPosition": 0.5}
    plot.add("rows", joint, x=axes.quantity("end"), y=y | band, y2={"field": "next", **band})
    bar = {"type": "bar", "height": {"band": 0.72}, "stroke": "#80808080", "strokeWidth": 0.5}
    plot.add("rows", bar, x=x, x2={"field": "end"}, y=y, color=colour, tooltip=told)
    axes.add_bars(plot, "rows", y, None, upright=False)
    text = {"type": "text", "align": "left", "dx": 4, "fontSize": 11}
    plot.add("rows", text, x=axes.quantity("right"), y=y, text={"field": "label"})
    label = f"{waterfall.curve}, {units.ranks(waterfall.gpus)}"
    summary = claim(WATERFALL, waterfall).text
    return FigureView(
        "waterfall" if number == 1 else f"waterfall-{number}",
        {
            "batch policy": ControlOption(waterfall.mode, waterfall.mode),
            "trial": ControlOption(f"{waterfall.mode}-{number}", label),
        },
        f"From ideal to measured: {label}, {waterfall.mode}",
        "points of efficiency that each factor takes or gives"
        + ("; thin bars: 95 % intervals" if any(row["low"] is not None for row in rows) else ""),
        plot.spec(summary, {"step": 19}),
        {"step": "factor", "label": "% of ideal, or points", "bounds": "95 % interval", "factor": "as a factor"},
        summary,
    )


def waterfall_rows(waterfall: Waterfall) -> list[axes.ChartRow]:
    """One bar per row, in percent of ideal: ideal, each factor from the end of the one before, and the measured one."""
    reached, interval = waterfall.efficiency or 0.0, waterfall.interval
    sure = interval if interval and not interval.note else None
    rows = [_bar(_IDEAL, 0.0, Estimate(100.0), "100 %")]
    for factor in sorted(waterfall.factors, key=lambda factor: list(_FACTOR_COLOURS).index(factor.name)):
        points = factor.interval or Estimate(factor.points)
        low, high = (None if end is None else -100 * end for end in (points.high, points.low))
        change = Estimate(-100 * factor.points, low, high)
        rows.append(_bar(factor.name, rows[-1]["end"], change, _signed(change.value), f"{factor.factor:.3f}"))
    whole = (sure or Estimate(reached)).times(100)
    rows.append(_bar(_MEASURED, 0.0, whole, f"{whole.value:.0f} %"))
    following = [row["step"] for row in rows[1:]] + [_MEASURED]
    return [row | {"next": after} for row, after in zip(rows, following, strict=True)]


def _bar(step: str, start: float, change: Estimate, label: str, factor: str = "") -> axes.ChartRow:
    """A bar from `start` on by `change`, whose interval lies around the bar's end."""
    row: axes.ChartRow = {"step": step, "start": start, "end": start + change.value, "label": label, "factor": factor}
    row |= {"low": None, "high": None, "bounds": "", "right": max(start, start + change.value)}
    if change.low is not None and change.high is not None:
        row |= {"low": start + change.low, "high": start + change.high}
        row["bounds"] = f"{_signed(change.low)} to {_signed(change.high)}"
    return row


def _signed(points: float) -> str:
    """ "-17.2", "+3.1", "0"."""
    text = f"{points:+.1f}"
    return "0" if float(text) == 0 else text.replace("-", "\N{MINUS SIGN}")
