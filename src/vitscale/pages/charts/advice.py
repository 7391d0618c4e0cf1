"""The Pareto chart of advice: time against GPU-hours or money, a curve over rank counts for each engine.

The Pareto front is a band; the answers of the advice are ringed; the limits of the request are dashed lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from vitscale.advice import sentences as advised
from vitscale.advice.pipeline import Advice
from vitscale.advice.request import Option
from vitscale.base.files import unwritable_as_request_error
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

_MOST_ENGINES_DRAWN = 7
"""Number of engines that are drawn, measured ones first: nobody tells apart more curves than there are shapes."""
FORMATS = ("png", "svg", "html")


class _SpendingAxes(NamedTuple):
    """The units in which an advice's chart shows time and spending, and their axes."""

    time_unit: units.Unit
    spent_unit: units.Unit
    """The unit of what is spent: money as it was given, or the time of all ranks."""
    x: ChartSpec
    y: ChartSpec


class _NamedAnswer(NamedTuple):
    """A configuration that is an answer, named after the questions that it answers."""

    name: str
    """ "fastest = cheapest"."""
    option: Option


def advice_chart(advice: Advice) -> Figure | None:
    """Draw the Pareto chart; None where there is nothing to draw."""
    if not advice.by_count:
        return None
    distinct_names = list(dict.fromkeys(_curve_name(option) for option in advice.by_count))
    names = distinct_names[:_MOST_ENGINES_DRAWN]
    options = [option for option in advice.by_count if _curve_name(option) in names]
    answers = _named_answers(advice)
    axes = _spending_axes(advice, options)
    plot = _advice_plot(advice, options, answers, axes, names)
    title = f"What it takes: time against {axes.spent_unit.sign}"
    subtitle = "numbers: ranks; grey band: nothing else is both faster and cheaper, with 90 % of future runs"
    if any(not option.measured_engine for option in options):
        subtitle += "; *: not measured"
    sentences = [f"{name}: {advised.in_short(option)}: {advised.time(option.seconds)}" for name, option in answers]
    summary = "; ".join(sentences[:3]) + "."
    view = FigureView(
        name="advice",
        choices={},
        title=title,
        subtitle=subtitle,
        spec=plot.spec(summary, 340),
        columns={
            "what": "configuration",
            "shown_time": "time",
            "shown_spent": axes.spent_unit.sign,
            "told": "known by",
        },
        summary=summary,
    )
    return Figure("advice", title, (view,), tuple(names))


def _spending_axes(advice: Advice, options: Sequence[Option]) -> _SpendingAxes:
    """Return both axes, which are logarithmic, in units that suit the options."""
    time_unit = units.time_unit(option.seconds.value for option in advice.by_count)
    if advice.asked.priced:
        spent_unit = units.Unit(1.0, "cost")
    else:
        spent_unit = units.rank_time_unit([option.gpu_hours.value for option in options], advice.device)
    scale = {"type": "log", "nice": False, "padding": 36}
    axis = {"format": "~r", "labelOverlap": True, "tickCount": 6}
    x = quantity("time", f"time of the whole work ({time_unit.sign})", scale=scale, axis=axis)
    y = quantity("spent", spent_unit.sign, scale=scale, axis=axis)
    return _SpendingAxes(time_unit, spent_unit, x, y)


def _advice_plot(
    advice: Advice,
    options: Sequence[Option],
    answers: Sequence[_NamedAnswer],
    axes: _SpendingAxes,
    names: Sequence[str],
) -> Plot:
    """Draw the front as a band, the limits, the curve of each engine, and rings around the answers.

    Args:
        advice: the advice, of which the front and the limits are drawn.
        options: the configurations that are drawn.
        answers: the answers of the advice.
        axes: the axes and their units.
        names: the engines that are drawn.
    """
    rows = [_option_row(option, axes) for option in options]
    front = [_option_row(option, axes) for option in advice.front]
    plot = Plot({"rows": rows, "front": front, "picked": _answer_rows(answers, axes)})
    _add_front_band(plot, axes)
    _add_limits(plot, advice, axes)
    _add_front_bars(plot, names)
    _add_engine_curves(plot, axes, names)
    plot.add("front", {"type": "text", "dy": 14, "fontSize": 10}, x=axes.x, y=axes.y, text=quantity("ranks"))
    _add_answers(plot, axes)
    return plot


def _add_front_band(plot: Plot, axes: _SpendingAxes) -> None:
    band = {"type": "line", "color": IDEAL_COLOUR, "strokeWidth": 7, "strokeOpacity": 0.3, "strokeCap": "round"}
    plot.add("front", band, x=axes.x, y=axes.y)


def _add_front_bars(plot: Plot, names: Sequence[str]) -> None:
    """Add the intervals of the configurations on the front: slanted lines from (low, low) to (high, high)."""
    bar = {"type": "rule", "strokeWidth": 1.5}
    plot.add(
        "front",
        bar,
        y=quantity("spent_low"),
        y2={"field": "spent_high"},
        color=colour_encoding(names),
        x=quantity("time_low"),
        x2={"field": "time_high"},
    )


def _add_engine_curves(plot: Plot, axes: _SpendingAxes, names: Sequence[str]) -> None:
    """Add a point for each configuration, and a line over the rank counts of each engine."""
    colour = colour_encoding(names)
    line = {"type": "line", "strokeWidth": 1.2, "strokeOpacity": 0.7}
    plot.add("rows", line, x=axes.x, y=axes.y, color=colour, order=quantity("ranks"))
    point = {"type": "point", "size": 45, "filled": True, "opacity": 1}
    point_tooltip = tooltip(
        what="configuration",
        shown_time="time",
        shown_spent=axes.spent_unit.sign,
        eff="efficiency",
        told="known by",
    )
    plot.add("rows", point, x=axes.x, y=axes.y, color=colour, shape=shape_encoding(names), tooltip=point_tooltip)


def _add_answers(plot: Plot, axes: _SpendingAxes) -> None:
    """Add a ring around each answer, and its name above or below the ring."""
    ring = {"type": "point", "size": 260, "filled": False, "strokeWidth": 2.2, "shape": "circle"}
    plot.add("picked", ring, x=axes.x, y=axes.y)
    for is_drawn, pixels_down in (("datum.above", -19), ("!datum.above", 30)):
        text = {"type": "text", "dy": pixels_down, "fontSize": 11, "fontWeight": 600}
        plot.add("picked", text, is_drawn, x=axes.x, y=axes.y, text={"field": "answer"})


def _answer_rows(answers: Sequence[_NamedAnswer], axes: _SpendingAxes) -> list[ChartRow]:
    """Return a row for each answer, the fastest first.

    The field `above` says that the name stands above the answer: of every second one, as they may lie side by side.
    """
    rows = [_option_row(answer.option, axes) | {"answer": answer.name} for answer in answers]
    rows.sort(key=lambda row: float(row["time"]))
    return [row | {"above": index % 2 == 0} for index, row in enumerate(rows)]


def _named_answers(advice: Advice) -> list[_NamedAnswer]:
    """Return the answers of an advice, those with the same configuration as one: "fastest = cheapest"."""
    answers = [_NamedAnswer(advised.question(advice, answer), answer.option) for answer in advice.answers]
    if advice.closest is not None:
        answers.insert(0, _NamedAnswer("nearest to the limits", advice.closest))
    names: dict[Candidate, list[str]] = {}
    option_by_candidate: dict[Candidate, Option] = {}
    for name, option in answers:
        names.setdefault(option.candidate, []).append(name)
        option_by_candidate[option.candidate] = option
    return [_NamedAnswer(" = ".join(names[candidate]), option_by_candidate[candidate]) for candidate in names]


def _curve_name(option: Option) -> str:
    """Return the name of an option's curve: "p4d.24xlarge, ddp *".

    It is the rented instance, the engine, and a star where the engine was not measured.
    """
    instance = option.candidate.instance
    rented = "" if instance is None else f"{instance.name}, "
    star = "" if option.measured_engine else " *"
    return f"{rented}{advised.engine(option)}{star}"


def _option_row(option: Option, axes: _SpendingAxes) -> ChartRow:
    """Return the chart's row of a configuration, in the units of the axes."""
    spent = (option.gpu_hours if option.cost is None else option.cost).times(axes.spent_unit.factor)
    return {
        "series": _curve_name(option),
        "ranks": option.gpus,
        **estimate_fields("time", option.seconds.times(axes.time_unit.factor)),
        **estimate_fields("spent", spent),
        "what": advised.in_short(option),
        "shown_time": advised.time(option.seconds),
        "shown_spent": advised.amount(spent),
        "eff": f"{option.efficiency.value:.2f}",
        "told": option.label,
    }


def _add_limits(plot: Plot, advice: Advice, axes: _SpendingAxes) -> None:
    """Add the deadline as a vertical line, the budget as a horizontal one."""
    request = advice.asked
    dashed = {"type": "rule", "strokeDash": DASHED, "color": IDEAL_COLOUR}
    if request.deadline_seconds is not None:
        plot.datasets["deadline"] = [{"time": request.deadline_seconds * axes.time_unit.factor}]
        plot.add("deadline", dashed, x=axes.x)
    if request.budget is not None:
        plot.datasets["budget"] = [{"spent": request.budget * axes.spent_unit.factor}]
        plot.add("budget", dashed, y=axes.y)


def write_advice_chart(advice: Advice, path: Path) -> None:
    """Draw the Pareto chart into a file: png, svg or html, by the ending of its name.

    Raises:
        RequestError: the ending is another, there is nothing to draw, or the file cannot be written.
    """
    file_format = check_format(path)
    chart = advice_chart(advice)
    if chart is None:
        raise RequestError("there is nothing to draw: no configuration's time is known")
    with unwritable_as_request_error("the chart", path, is_answer=False):
        write_whole(path, picture(chart.views[0], file_format), make_folder=True)


def check_format(path: Path) -> str:
    """Return the kind of picture that a file's name asks for.

    Raises:
        RequestError: it asks for no kind of ours.
    """
    file_format = path.suffix.lower().removeprefix(".")
    if file_format not in FORMATS:
        raise unknown(
            "chart format", file_format, FORMATS, next_step=f"End the name of {shown(path.name)} in one of these"
        )
    return file_format
