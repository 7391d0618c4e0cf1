"""Predictions for a terminal of 80 columns: of each series how long it takes, then what it is made of."""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from vitscale.prediction.results import Forecast
from vitscale.report import prediction_words, words
from vitscale.report.prediction_table import Column, SeriesTable, prediction_tables, shared_notes

_STEP = ("images", "speedup", "compute", "wait", "wire", "norm")
_MADE_OF = (*_STEP, "memory", "oom", "energy", "cost")
_MOST_FIGURES = 8
"""Beside each other in 80 columns."""
_HEADINGS = {
    "images": "images\n/s",
    "wait": "exposed\nwait",
    "wire": "exposed\nwire",
    "norm": "sync.\nnorm",
    "oom": "OOM\nchance",
    "energy": "energy\n/epoch",
    "cost": "cost\n/epoch",
    "efficiency": "eff.",
}
_LABEL_STYLES = {"interpolated": "green", "extrapolated": "", "prior-driven": "yellow", "does not fit": "red"}


def prediction_text(outlook: Forecast, finish: RenderableType | None = None) -> RenderableType:
    """Two tables for each series and what they rest on; then how well such predictions did where it is known.

    Args:
        outlook: the predictions.
        finish: the time to finish, where it was asked for.
    """
    parts: list[RenderableType] = []
    tables = prediction_tables(outlook)
    for table in tables:
        title = f"{table.title}{f': {table.measured}' if table.measured else ''}"
        parts += [Text(words.plain(title), "bold"), _how_long(table), *_made_of(table)]
        parts += [Padding(_lines(table.notes), (0, 0, 1, 0))] if table.notes else []
    parts += [] if finish is None else [finish]
    last = [*shared_notes(tables), *prediction_words.left_out(outlook.left_out), *prediction_words.scores(outlook)]
    last += [prediction_words.network(outlook.evidence), prediction_words.INTERVALS_MEANING]
    parts.append(_lines([*last, *prediction_words.labels(outlook.predictions)]))
    return Group(*parts)


def _how_long(table: SeriesTable) -> Table:
    """Step and epoch; the intervals are of the epoch, or of the step where the images are unknown."""
    laid = plain_table("")
    step, epoch, efficiency = (table.column(key) for key in ("step", "epoch", "efficiency"))
    bounded = epoch or step
    of = "epoch" if epoch else "step"
    laid.add_column("ranks", justify="right", overflow="fold")
    laid.add_column("hosts", justify="right", overflow="fold")
    _add(laid, step)
    _add(laid, epoch)
    laid.add_column(f"{of}, mean\n90 %", justify="right", overflow="fold", vertical="bottom")
    laid.add_column(f"{of}, one run\n90 %", justify="right", overflow="fold", vertical="bottom")
    _add(laid, efficiency)
    laid.add_column("label", no_wrap=True)
    for place, label in enumerate(table.labels):
        cells = [f"{table.gpus[place]:,}", f"{table.nodes[place]:,}"]
        cells += [column.cells[place].text for column in (step, epoch) if column]
        if bounded:
            cells += [bounded.cells[place].mean, bounded.cells[place].run]
        cells += [efficiency.cells[place].text] if efficiency else []
        laid.add_row(*cells, Text(label, _LABEL_STYLES[label]))
    return laid


def _made_of(table: SeriesTable) -> list[Table]:
    """In one table, or where 80 columns do not hold all figures in two."""
    shown = [column for key in _MADE_OF if (column := table.column(key))]
    of_step = [column for column in shown if column.key in _STEP]
    parts = [of_step, shown[len(of_step) :]] if len(shown) > _MOST_FIGURES else [shown]
    tables = []
    for part in parts:
        laid = plain_table("")
        laid.add_column("ranks", justify="right", overflow="fold")
        for column in part:
            _add(laid, column)
        for place, gpus in enumerate(table.gpus):
            laid.add_row(f"{gpus:,}", *(column.cells[place].text for column in part))
        tables.append(laid)
    return tables


def _add(laid: Table, column: Column | None) -> None:
    if column is None:
        return
    heading = _HEADINGS.get(column.key, column.heading)
    lines = [*heading.split("\n"), *([f"({column.unit})"] if column.unit else [])]
    laid.add_column("\n".join(lines), justify="right", overflow="fold", vertical="bottom")


def plain_table(title: str) -> Table:
    """Without columns yet; empty for no title."""
    return Table(
        title=Text(words.plain(title)) if title else None,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )


def _lines(texts: Iterable[str]) -> Text:
    return Text("\n".join(words.plain(text) for text in texts))
