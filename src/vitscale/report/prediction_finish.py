"""The time to finish a job, failures included: a table and what it assumes for the terminal, fields for the JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from vitscale.prediction.finishing import Finish
from vitscale.prediction.results import Prediction
from vitscale.report import words
from vitscale.report.prediction_contract import Object
from vitscale.report.prediction_terminal import plain_table
from vitscale.report.words import DASH, UNKNOWN, number, seconds

_NEVER = "never"


def finish_fields(one: Finish) -> Object:
    """What `vitscale predict --json` says of it beside the prediction; null where it is unavailable."""
    return {
        "epochs": one.epochs,
        "work_seconds": one.work_seconds,
        "finish_seconds": one.wall_seconds,
        "finish_seconds_low": one.low,
        "finish_seconds_high": one.high,
        "finish_failures": one.failures,
        "finish_lost_share": one.lost_share,
        "checkpoint_interval_seconds": one.checkpoint_interval_seconds,
        "finish_cost": one.cost,
        "finish_label": "prior-driven",
        "finish_assumptions": [asdict(assumed) for assumed in one.assumptions],
        "finish_reason": one.reason or None,
    }


def finish_text(predictions: Sequence[Prediction], finishes: Sequence[Finish]) -> RenderableType:
    """A line for each prediction, then what all of it assumes."""
    several = len({one.series for one in predictions}) > 1
    laid = plain_table(
        f"Time to finish {finishes[0].epochs:,} epoch{'s' if finishes[0].epochs > 1 else ''} (prior-driven)"
    )
    headings = [*(["series"] if several else []), "ranks", "epochs\nalone", "to finish", "90 % for\none run"]
    priced = any(one.cost is not None for one in finishes)
    headings += ["failures", "lost", "checkpoint\nevery", *(["cost"] if priced else [])]
    for heading in headings:
        laid.add_column(heading, justify="left" if heading == "series" else "right", overflow="fold", vertical="bottom")
    for one, end in zip(predictions, finishes, strict=True):
        name = [Text(words.plain(one.series))] if several else []
        laid.add_row(*name, f"{one.gpus:,}", *_cells(end), *([number(end.cost)] if priced else []))
    # What is assumed of hosts differs with their number: that of the most stands for all.
    assumed = {
        (one.series, taken.part): taken
        for one, end in zip(predictions, finishes, strict=True)
        for taken in end.assumptions
    }
    told = [f"Assumed: {taken.part}: {taken.taken}." for taken in assumed.values()]
    reasons = [f"Time to finish unavailable: {end.reason}." for end in finishes if end.reason]
    lines = "\n".join(words.plain(text) for text in dict.fromkeys([*told, *reasons]))
    return Group(laid, Padding(Text(lines), (0, 0, 1, 0)))


def _cells(end: Finish) -> tuple[str, ...]:
    if end.work_seconds is None:
        return (UNKNOWN,) * 6
    ends = _NEVER if end.wall_seconds is None else seconds(end.wall_seconds)
    return (
        seconds(end.work_seconds),
        ends,
        _bounds(end.low, end.high),
        number(end.failures, 2) if end.failures is not None else UNKNOWN,
        words.percent(end.lost_share),
        seconds(end.checkpoint_interval_seconds),
    )


def _bounds(low: float | None, high: float | None) -> str:
    """In the unit of the upper end, which may be never."""
    if low is None or high is None:
        return f"{_NEVER if low is None else seconds(low)}{DASH}{_NEVER}"
    unit = words.time_unit([high])
    return f"{number(low * unit.per_second)}{DASH}{number(high * unit.per_second)} {unit.sign}"
