"""Time against GPU-hours or money: each engine's curve over rank counts, the Pareto front, the answers, the limits."""

from __future__ import annotations

import json
import os
from pathlib import Path

import altair as alt

from vitscale.advice import words as advised
from vitscale.advice.option import Option
from vitscale.advice.pipeline import Advice
from vitscale.errors import RequestError, explain, shown, unknown
from vitscale.prediction.configurations import Candidate
from vitscale.report import words
from vitscale.report.chart_data import Row
from vitscale.report.drawing import vega_lite_version
from vitscale.report.figure import Figure, colour_of, finished, shape_of
from vitscale.report.style import DASHED, IDEAL_COLOUR, LIGHT

_WIDTH, _HEIGHT = 620, 380
_MOST_ENGINES = 7
"""Measured ones first: more curves than shapes nobody tells apart."""
FORMATS = ("png", "svg", "html")


def advice_figure(advice: Advice) -> Figure | None:
    """The Pareto chart; None where there is nothing to draw."""
    if not advice.by_count:
        return None
    names = list(dict.fromkeys(_name(option) for option in advice.by_count))[:_MOST_ENGINES]
    unit = words.time_unit(option.seconds.value for option in advice.by_count)
    drawn = [option for option in advice.by_count if _name(option) in names]
    rows = [_row(option, unit.per_second) for option in drawn]
    chosen = _chosen(advice)
    picked = [_row(option, unit.per_second) | {"answer": name} for name, option in chosen]
    picked.sort(key=lambda row: float(row["time"]))
    in_front = [_row(option, unit.per_second) for option in advice.front]
    costs = "cost" if advice.asked.priced else "GPU-hours"
    x = alt.X("time:Q", title=f"time of the whole work ({unit.sign})", scale=_scale(), axis=_axis())
    y = alt.Y("spent:Q", title=costs, scale=_scale(), axis=_axis())
    colour, shape = colour_of(names), shape_of(names)
    tooltip = [
        alt.Tooltip(f"{key}:N", title=title)
        for key, title in (
            ("what", "configuration"), ("shown_time", "time"), ("shown_spent", costs), ("eff", "efficiency"),
            ("told", "known by"),
        )
    ]  # fmt: skip
    curves = alt.Chart(alt.InlineData(values=rows))
    on_top = alt.Chart(alt.InlineData(values=rows[::-1]))  # measured engines come first, and are drawn last
    layers: list[alt.Chart] = [
        alt.Chart(alt.InlineData(values=in_front))
        .mark_line(color=IDEAL_COLOUR, strokeWidth=7, strokeOpacity=0.3, strokeCap="round")
        .encode(x=x, y=y),
        *_limits(advice, unit.per_second, x, y),
        alt.Chart(alt.InlineData(values=in_front))
        .mark_rule(strokeWidth=1.5)
        .encode(x=alt.X("time_low:Q"), x2="time_high:Q", y=alt.Y("spent_low:Q"), y2="spent_high:Q", color=colour),
        curves.mark_line(strokeWidth=1.2, strokeOpacity=0.7).encode(x=x, y=y, color=colour, order="ranks:Q"),
        on_top.mark_point(size=45, filled=True, opacity=1).encode(x=x, y=y, color=colour, shape=shape, tooltip=tooltip),
        alt.Chart(alt.InlineData(values=in_front))
        .mark_text(dy=14, fontSize=10)
        .encode(x=x, y=y, text=alt.Text("ranks:Q")),
        alt.Chart(alt.InlineData(values=picked))
        .mark_point(size=260, filled=False, strokeWidth=2.2, color="#1c2430", shape="circle")
        .encode(x=x, y=y),
        # Above and below in turn: answers may lie side by side.
        *(
            alt.Chart(alt.InlineData(values=some))
            .mark_text(dy=dy, fontSize=11, fontWeight=600, color="#1c2430")
            .encode(x=x, y=y, text="answer:N")
            for some, dy in ((picked[::2], -19), (picked[1::2], 30))
            if some
        ),
    ]
    title = f"What it takes: time against {costs}"
    subtitle = "numbers: ranks; grey band: nothing else is both faster and cheaper, with 90 % of future runs"
    if any(not option.measured_engine for option in drawn):
        subtitle += "; *: not measured"
    chart = alt.layer(*layers).properties(width=_WIDTH, height=_HEIGHT, title=alt.Title(title, subtitle=subtitle))
    text = [f"{name}: {advised.in_short(option)}: {advised.time(option.seconds)}" for name, option in chosen] + [
        f"front: {advised.in_short(option)}: {words.seconds(option.seconds.value)}" for option in advice.front
    ]
    return finished("advice", None, title, chart, text, wide=True)


def _chosen(advice: Advice) -> list[tuple[str, Option]]:
    """The answers; those that are one configuration under one name."""
    found = [(advised.question(advice, answer), answer.option) for answer in advice.answers]
    if advice.closest is not None:
        found.insert(0, ("nearest to the limits", advice.closest))
    names: dict[Candidate, list[str]] = {}
    for name, option in found:
        names.setdefault(option.candidate, []).append(name)
    of = {option.candidate: option for _, option in found}
    return [(" = ".join(alike), of[candidate]) for candidate, alike in names.items()]


def _name(option: Option) -> str:
    instance = option.candidate.instance
    rented = "" if instance is None else f"{instance.name}, "
    return rented + advised.engine(option) + ("" if option.measured_engine else " *")


def _row(option: Option, per_second: float) -> Row:
    spent = option.gpu_hours if option.cost is None else option.cost
    time = option.seconds.times(per_second)
    return {
        "series": _name(option),
        "ranks": option.gpus,
        "time": time.value,
        "time_low": time.low,
        "time_high": time.high,
        "spent": spent.value,
        "spent_low": spent.low,
        "spent_high": spent.high,
        "what": advised.in_short(option),
        "shown_time": advised.time(option.seconds),
        "shown_spent": advised.amount(spent),
        "eff": f"{option.efficiency.value:.2f}",
        "told": option.label,
    }


def _limits(advice: Advice, per_second: float, x: alt.X, y: alt.Y) -> list[alt.Chart]:
    """The deadline as a line down, the budget as one across."""
    asked = advice.asked
    found = []
    if asked.deadline_seconds is not None:
        at = alt.Chart(alt.InlineData(values=[{"time": asked.deadline_seconds * per_second}]))
        found.append(at.mark_rule(strokeDash=DASHED, color=IDEAL_COLOUR).encode(x=x))
    if asked.budget is not None:
        at = alt.Chart(alt.InlineData(values=[{"spent": asked.budget}]))
        found.append(at.mark_rule(strokeDash=DASHED, color=IDEAL_COLOUR).encode(y=y))
    return found


def _scale() -> alt.Scale:
    return alt.Scale(type="log", nice=False, padding=48)


def _axis() -> alt.Axis:
    return alt.Axis(format="~r", labelOverlap=True, tickCount=6)


def write_advice_chart(advice: Advice, path: Path) -> None:
    """Draws the Pareto chart into a file: png, svg or html, by the ending of its name.

    Raises:
        RequestError: another ending, nothing to draw, or the file cannot be written.
    """
    kind = check_format(path)
    figure = advice_figure(advice)
    if figure is None:
        raise RequestError(explain("there is nothing to draw: no configuration's time is known"))
    draft = path.with_name(f".{path.name}.{os.getpid()}.draft")
    try:
        draft.write_bytes(_drawn(figure, kind))
        draft.replace(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise RequestError(
            explain(f"the chart cannot be written to {shown(str(path))}: {error.strerror or error}")
        ) from error


def check_format(path: Path) -> str:
    """The kind of picture that a name asks for.

    Raises:
        RequestError: none of ours.
    """
    kind = path.suffix.lower().removeprefix(".")
    if kind not in FORMATS:
        raise unknown("chart format", kind, FORMATS, next_step=f"End the name of {shown(path.name)} in one of these")
    return kind


def _drawn(figure: Figure, kind: str) -> bytes:
    import vl_convert

    spec, version = figure.spec | {"config": LIGHT}, vega_lite_version()
    if kind == "png":
        png: bytes = vl_convert.vegalite_to_png(json.dumps(spec), vl_version=version, scale=2)
        return png
    text: str
    if kind == "svg":
        text = vl_convert.vegalite_to_svg(json.dumps(spec), vl_version=version)
    else:
        text = vl_convert.vegalite_to_html(json.dumps(spec), vl_version=version, bundle=True)
    return text.encode()
