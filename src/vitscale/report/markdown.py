"""The report as Markdown, for a README, an issue or a terminal pager."""

from __future__ import annotations

from collections.abc import Iterable

from vitscale.analysis import Analysis
from vitscale.prediction.results import Forecast
from vitscale.report import prediction_words, words
from vitscale.report.comparison_tables import ComparisonTable, comparison_tables
from vitscale.report.grouped_table import GroupedTable
from vitscale.report.prediction_table import Foretold, SeriesTable, prediction_tables, shared_notes
from vitscale.report.resolutions import resolution_table
from vitscale.report.tables import failure_lines, mode_tables


def _remarks(analysis: Analysis) -> list[str]:
    return [words.equality(analysis), words.multiplicity(analysis), words.scope(analysis)]


def to_markdown(analysis: Analysis, outlook: Forecast | None = None) -> str:
    """The report as Markdown: findings, verdicts, a table per batch policy, waterfalls, predictions, failed trials,
    problems.
    """
    lines = [f"# {_md(analysis.study.name)}", ""]
    lines += _bullets(_md(text) for text in (*words.headlines(analysis), *filter(None, _remarks(analysis))))
    if analysis.findings:
        lines += ["## Can this be trusted?", ""]
        lines += _bullets(f"**{_md(v.kind)}**: {_md(v.message)}. {_md(v.advice)}" for v in analysis.findings)
    for table in mode_tables(analysis):
        lines += [f"## {words.MODE_TITLES[table.mode]}", "", words.MODE_MEANINGS[table.mode], ""]
        lines += _bullets(_md(text) for text in table.baselines)
        lines += [
            f"| curve | {' | '.join(table.columns)} | outcome |",
            f"|:--|{'--:|' * len(table.columns)}:--|",
        ]
        lines += [
            f"| {_md(row.curve)} | {' | '.join(map(str, row.cells))} | {row.outcome or 'completed'} |"
            for row in table.rows
        ]
        lines += [
            "",
            "Figures in brackets: 95 % intervals over runs; of elapsed epochs (barrier to barrier, slow steps in "
            "them) how many.",
            "",
        ]
    if sizes := resolution_table(analysis):
        lines += [f"## {sizes.title}", "", *_grouped(sizes), *_bullets(map(_md, sizes.notes))]
    if compared := comparison_tables(analysis):
        lines += ["## Curve against curve", "", *(line for table in compared for line in _comparison(table))]
    if explained := _waterfalls(analysis):
        lines += ["## From ideal to measured", "", *_bullets(_md(text) for text in explained)]
    if outlook is not None:
        lines += ["## What nobody has measured", "", *_predictions(outlook)]
    if failures := failure_lines(analysis):
        lines += ["## Trials that did not complete", "", *_bullets(_md(text) for text in failures)]
    if analysis.problems:
        lines += ["## What of the records could not be used", "", *_bullets(_md(text) for text in analysis.problems)]
    return "\n".join(lines)


def _comparison(table: ComparisonTable) -> list[str]:
    """A row per curve: how many times as fast as the reference an epoch is."""
    rows = [f"| {_md(row.curve)} | {' | '.join(map(str, row.cells))} |" for row in table.rows]
    head = [f"| {_md(table.title)} | {' | '.join(table.columns)} |", f"|:--|{'--:|' * len(table.columns)}"]
    return [*head, *rows, ""]


def _grouped(table: GroupedTable) -> list[str]:
    """A line per trial, its curve first."""
    rows = [
        f"| {_md(group.name)} | {' | '.join(map(str, line.cells))} |" for group in table.groups for line in group.lines
    ]
    return [f"| curve | {' | '.join(table.columns)} |", f"|:--|{'--:|' * len(table.columns)}", *rows, ""]


def _waterfalls(analysis: Analysis) -> list[str]:
    """Every waterfall as a sentence, why others are missing, and what explaining cost."""
    found = [f"{one.curve}, {one.mode}: {words.waterfall(one)}" for one in analysis.waterfalls if one.factors]
    return [*found, *words.unexplained(analysis), *filter(None, [words.explaining_cost(analysis)])]


def _predictions(outlook: Forecast) -> list[str]:
    """How good such predictions are where it is known, a table per series, what they rest on."""
    lines = [prediction_words.INTERVALS_MEANING, ""]
    lines += _bullets(map(_md, prediction_words.scores(outlook)))
    tables = prediction_tables(outlook)
    for table in tables:
        lines += [f"### {_md(table.title)}", "", *([_md(f"{table.measured}."), ""] if table.measured else [])]
        lines += [*_foretold(table), *_bullets(map(_md, table.notes))]
    resting = [
        *shared_notes(tables),
        prediction_words.network(outlook.evidence),
        *prediction_words.labels(outlook.predictions),
    ]
    return [*lines, *_bullets(_md(text) for text in (*resting, prediction_words.ASK_FOR_MORE))]


def _foretold(table: SeriesTable) -> list[str]:
    """A line per rank count; in brackets the 90 % intervals of the mean and of one run."""
    cells = [[_with_intervals(column.cells[place]) for column in table.columns] for place in range(len(table.gpus))]
    rows = [f"| {' | '.join(row)} | {label} |" for row, label in zip(cells, table.labels, strict=True)]
    head = [f"| {' | '.join(table.headings)} |", f"|{'--:|' * len(table.columns)}:--|"]
    return [*head, *rows, "", "In brackets: 90 % intervals, of the mean; of one run.", ""]


def _with_intervals(cell: Foretold) -> str:
    return f"{cell.text} ({cell.mean}; {cell.run})" if cell.mean else cell.text


def _md(text: str) -> str:
    """User text with all that Markdown or HTML would act on taken literally."""
    return "".join(f"\\{c}" if c in "\\`*_[]#|~" else {"<": "&lt;", "&": "&amp;"}.get(c, c) for c in words.plain(text))


def _bullets(items: Iterable[str]) -> list[str]:
    lines = [f"- {item}" for item in items]
    return [*lines, ""] if lines else []
