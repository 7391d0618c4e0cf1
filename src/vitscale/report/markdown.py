"""The report as Markdown, for a README, an issue or a terminal pager."""

from __future__ import annotations

from collections.abc import Iterable

from vitscale.analysis import Analysis
from vitscale.report import words
from vitscale.report.comparison_tables import ComparisonTable, comparison_tables
from vitscale.report.tables import failure_lines, mode_tables


def to_markdown(analysis: Analysis) -> str:
    """The report as Markdown: findings, verdicts, a table per batch policy, waterfalls, failed trials, problems."""
    lines = [f"# {_md(analysis.study.name)}", ""]
    lines += _bullets(_md(text) for text in (*words.headlines(analysis), *filter(None, [words.equality(analysis)])))
    if analysis.verdicts:
        lines += ["## Can this be trusted?", ""]
        lines += _bullets(f"**{_md(v.kind)}**: {_md(v.message)}. {_md(v.advice)}" for v in analysis.verdicts)
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
        lines += ["", "Figures in brackets: 95 % intervals over runs. `~`: extrapolated from steps.", ""]
    if compared := comparison_tables(analysis):
        lines += ["## Curve against curve", "", *(line for table in compared for line in _comparison(table))]
    if explained := _waterfalls(analysis):
        lines += ["## From ideal to measured", "", *_bullets(_md(text) for text in explained)]
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


def _waterfalls(analysis: Analysis) -> list[str]:
    """Every waterfall as a sentence, why others are missing, and what explaining cost."""
    found = [f"{one.curve}, {one.mode}: {words.waterfall(one)}" for one in analysis.waterfalls if one.factors]
    return [*found, *words.unexplained(analysis), *filter(None, [words.explaining_cost(analysis)])]


def _md(text: str) -> str:
    """User text with all that Markdown or HTML would act on taken literally."""
    return "".join(f"\\{c}" if c in "\\`*_[]#|~" else {"<": "&lt;", "&": "&amp;"}.get(c, c) for c in words.plain(text))


def _bullets(items: Iterable[str]) -> list[str]:
    lines = [f"- {item}" for item in items]
    return [*lines, ""] if lines else []
