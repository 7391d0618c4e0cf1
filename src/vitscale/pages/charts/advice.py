"""Time against GPU-hours or money: each engine's curve over rank counts, the Pareto front, the answers, the limits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vitscale.advice import sentences as advised
from vitscale.advice.pipeline import Advice
from vitscale.advice.request import Option
from vitscale.base.files import told_if_unwritable
from vitscale.errors import RequestError, shown, unknown
from vitscale.pages.charts.axes import (
    DASHED,
    IDEAL_COLOUR,
    ChartRow,
    ChartSpec,
    Plot,
    colour_encoding,
    quantity,
    shape_encoding,
    tooltip,
)
from vitscale.prediction.configurations import Candidate
from vitscale.present import units
from vitscale.present.data import estimate_fields
from vitscale.present.document import Figure, FigureView
from vitscale.present.drawing import picture
from vitscale.store import write_whole

_MOST_ENGINES = 7
"""Number of engines that are drawn, measured ones first: nobody tells apart more curves than there are shapes."""
FORMATS = ("png", "svg", "html")


def advice_chart(advice: Advice) -> Figure | None:
    """The Pareto chart; None where there is nothing to draw."""
    if not advice.by_count:
        return None
    names = list(dict.fromkeys(_name(option) for option in advice.by_count))[:_MOST_ENGINES]
    unit = units.time_unit(option.seconds.value for option in advice.by_count)
    drawn = [option for option in advice.by_count if _name(option) in names]
    spent_unit = _spent_unit(advice, drawn)
    rows = [_row(option, unit.factor, spent_unit) for option in drawn]
    chosen = _chosen(advice)
    picked = [_row(option, unit.factor, spent_unit) | {"answer": name} for name, option in chosen]
    picked.sort(key=lambda row: float(row["time"]))
    for index, row in enumerate(picked):
        row["above"] = index % 2 == 0  # above and below in turn: answers may lie side by side
    in_front = [_row(option, unit.factor, spent_unit) for option in advice.front]
    costs = spent_unit.sign
    scale = {"type": "log", "nice": False, "padding": 36}
    axis = {"format": "~r", "labelOverlap": True, "tickCount": 6}
    x = quantity("time", f"time of the whole work ({unit.sign})", scale=scale, axis=axis)
    y = quantity("spent", costs, scale=scale, axis=axis)
    colour, shape = colour_encoding(names), shape_encoding(names)
    told = tooltip(what="configuration", shown_time="time", shown_spent=costs, eff="efficiency", told="known by")
    plot = Plot({"rows": rows, "front": in_front, "picked": picked})
    band = {"type": "line", "color": IDEAL_COLOUR, "strokeWidth": 7, "strokeOpacity": 0.3, "strokeCap": "round"}
    plot.add("front", band, x=x, y=y)
    _add_limits(plot, advice, unit.factor, spent_unit, x, y)
    bar: ChartSpec = {"x": quantity("time_low"), "x2": {"field": "time_high"}}
    plot.add(
        "front",
        {"type": "rule", "strokeWidth": 1.5},
        y=quantity("spent_low"),
        y2={"field": "spent_high"},
        color=colour,
        **bar,
    )
    line = {"type": "line", "strokeWidth": 1.2, "strokeOpacity": 0.7}
    plot.add("rows", line, x=x, y=y, color=colour, order=quantity("ranks"))
    point = {"type": "point", "size": 45, "filled": True, "opacity": 1}
    plot.add("rows", point, x=x, y=y, color=colour, shape=shape, tooltip=told)
    plot.add("front", {"type": "text", "dy": 14, "fontSize": 10}, x=x, y=y, text=quantity("ranks"))
    ring = {"type": "point", "size": 260, "filled": False, "strokeWidth": 2.2, "shape": "circle"}
    plot.add("picked", ring, x=x, y=y)
    for only, dy in (("datum.above", -19), ("!datum.above", 30)):
        text = {"type": "text", "dy": dy, "fontSize": 11, "fontWeight": 600}
        plot.add("picked", text, only, x=x, y=y, text={"field": "answer"})
    title = f"What it takes: time against {costs}"
    subtitle = "numbers: ranks; grey band: nothing else is both faster and cheaper, with 90 % of future runs"
    if any(not option.measured_engine for option in drawn):
        subtitle += "; *: not measured"
    answers = [f"{name}: {advised.in_short(option)}: {advised.time(option.seconds)}" for name, option in chosen]
    summary = "; ".join(answers[:3]) + "."
    columns = {"what": "configuration", "shown_time": "time", "shown_spent": costs, "told": "known by"}
    view = FigureView("advice", {}, title, subtitle, plot.spec(summary, 340), columns, summary)
    return Figure("advice", title, (view,), tuple(names))


def _chosen(advice: Advice) -> list[tuple[str, Option]]:
    """The answers; those with the same configuration share one name."""
    named = [(advised.question(advice, answer), answer.option) for answer in advice.answers]
    if advice.closest is not None:
        named.insert(0, ("nearest to the limits", advice.closest))
    names: dict[Candidate, list[str]] = {}
    for name, option in named:
        names.setdefault(option.candidate, []).append(name)
    of = {option.candidate: option for _, option in named}
    return [(" = ".join(alike), of[candidate]) for candidate, alike in names.items()]


def _name(option: Option) -> str:
    instance = option.candidate.instance
    rented = "" if instance is None else f"{instance.name}, "
    return rented + advised.engine(option) + ("" if option.measured_engine else " *")


def _spent_unit(advice: Advice, options: Sequence[Option]) -> units.Unit:
    """The unit of what is spent: money as it was given, or the time of all ranks."""
    if advice.asked.priced:
        return units.Unit(1.0, "cost")
    return units.rank_time_unit([option.gpu_hours.value for option in options], advice.device)


def _row(option: Option, per_second: float, spent_unit: units.Unit) -> ChartRow:
    spent = (option.gpu_hours if option.cost is None else option.cost).times(spent_unit.factor)
    return {
        "series": _name(option),
        "ranks": option.gpus,
        **estimate_fields("time", option.seconds.times(per_second)),
        **estimate_fields("spent", spent),
        "what": advised.in_short(option),
        "shown_time": advised.time(option.seconds),
        "shown_spent": advised.amount(spent),
        "eff": f"{option.efficiency.value:.2f}",
        "told": option.label,
    }


def _add_limits(
    plot: Plot, advice: Advice, per_second: float, spent_unit: units.Unit, x: ChartSpec, y: ChartSpec
) -> None:
    """Draws the deadline as a vertical line, the budget as a horizontal one."""
    asked, dashed = advice.asked, {"type": "rule", "strokeDash": DASHED, "color": IDEAL_COLOUR}
    if asked.deadline_seconds is not None:
        plot.datasets["deadline"] = [{"time": asked.deadline_seconds * per_second}]
        plot.add("deadline", dashed, x=x)
    if asked.budget is not None:
        plot.datasets["budget"] = [{"spent": asked.budget * spent_unit.factor}]
        plot.add("budget", dashed, y=y)


def write_advice_chart(advice: Advice, path: Path) -> None:
    """Draws the Pareto chart into a file: png, svg or html, by the ending of its name.

    Raises:
        RequestError: the ending is another, there is nothing to draw, or the file cannot be written.
    """
    kind = check_format(path)
    chart = advice_chart(advice)
    if chart is None:
        raise RequestError("there is nothing to draw: no configuration's time is known")
    with told_if_unwritable("the chart", path, is_answer=False):
        write_whole(path, picture(chart.views[0], kind), make_folder=True)


def check_format(path: Path) -> str:
    """The kind of picture that a file's name asks for.

    Raises:
        RequestError: it asks for no kind of ours.
    """
    kind = path.suffix.lower().removeprefix(".")
    if kind not in FORMATS:
        raise unknown("chart format", kind, FORMATS, next_step=f"End the name of {shown(path.name)} in one of these")
    return kind
