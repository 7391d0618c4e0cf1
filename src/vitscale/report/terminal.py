"""The scaling tables for a terminal of 80 columns or more."""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from vitscale.analysis import Analysis
from vitscale.prediction.results import Forecast
from vitscale.report import prediction_words, words
from vitscale.report.tables import ModeTable, Row, failure_lines, mode_tables

_HEADERS = {
    "efficiency": "eff.", "images/s": "images\n/s", "runs x steps": "runs\nx steps", "start-up (s)": "start-\nup (s)",
}  # fmt: skip
_COLUMNS = ("ranks", "runs", "step", "epoch", "images/s", "speedup", "efficiency", "start-up")
_WITH_BOUNDS = ("speedup",)


def terminal_table(analysis: Analysis, outlook: Forecast | None = None) -> RenderableType:
    """One table per batch policy with its baselines in absolute time; then findings, how well larger rank counts are
    predicted, failures, what to mind.
    """
    parts: list[RenderableType] = []
    for mode_table in mode_tables(analysis):
        parts += [_table(mode_table), Padding(_lines(mode_table.baselines), (0, 0, 1, 2))]
    more = filter(None, [words.explaining_cost(analysis), words.equality(analysis), words.scope(analysis)])
    if sentences := [*words.headlines(analysis), *words.unexplained(analysis), *more]:
        parts.append(Padding(_lines(sentences), (0, 0, 1, 0)))
    if outlook is not None and outlook.scores:
        parts.append(Padding(_lines(prediction_words.scores(outlook)), (0, 0, 1, 0)))
    if failures := failure_lines(analysis):
        parts.append(Padding(_lines(failures, "red"), (0, 0, 1, 0)))
    parts += [
        Text(f"! {words.plain(v.message)}", "yellow" if v.severity == "warning" else "") for v in analysis.findings
    ]
    return Group(*parts)


def _table(mode_table: ModeTable) -> Table:
    table = Table(
        title=words.MODE_TITLES[mode_table.mode],
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    shown = [place for place, name in enumerate(mode_table.columns) if name.startswith(_COLUMNS)]
    table.add_column("curve", max_width=24, overflow="fold")
    for place in shown:
        name = mode_table.columns[place]
        # The unit on a line of its own keeps eight columns within 80 characters.
        table.add_column(_HEADERS.get(name, name.replace(" (", "\n(")), justify="right", no_wrap=True)
    before = None
    for row in mode_table.rows:
        if before is not None and row.curve_place != before:
            table.add_section()
        cells = [_cell(row, place, mode_table.columns[place]) for place in shown]
        table.add_row(Text(words.plain(row.curve) if row.curve_place != before else ""), *cells)
        before = row.curve_place
    return table


def _cell(row: Row, place: int, column: str) -> Text:
    if row.outcome and column.startswith("step"):
        return Text(row.outcome.removesuffix(" yet"), "red")
    cell = row.cells[place]
    return Text(str(cell) if column in _WITH_BOUNDS else cell.text)


def _lines(texts: Iterable[str], style: str = "") -> Text:
    return Text("\n".join(words.plain(text) for text in texts), style)
