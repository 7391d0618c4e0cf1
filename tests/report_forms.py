"""A report in its forms, and what stands in its charts."""

from __future__ import annotations

from typing import Any

from vitscale.analysis import Analysis
from vitscale.pages.answers import terminal_document
from vitscale.pages.document import charts, report_document
from vitscale.prediction.results import Forecast
from vitscale.present.document import Figure, FigureView
from vitscale.present.html import to_html
from vitscale.present.latex import to_latex
from vitscale.present.markdown import to_markdown
from vitscale.present.terminal import lines
from vitscale.present.unread import beginning_with_unread


def page(analysis: Analysis, forecast: Forecast | None = None) -> str:
    return to_html(report_document(analysis, forecast))


def markdown(analysis: Analysis, forecast: Forecast | None = None) -> str:
    return to_markdown(report_document(analysis, forecast))


def latex(analysis: Analysis) -> str:
    return to_latex(report_document(analysis))


def terminal(analysis: Analysis, width: int = 80, *, verbose: bool = False) -> list[str]:
    document = beginning_with_unread(terminal_document(analysis, ["Report: x"]), analysis.unread)
    return [line.plain for line in lines(document, width, verbose)]


def views(analysis: Analysis, forecast: Forecast | None = None) -> dict[str, FigureView]:
    """All views of all charts, by the name of their file."""
    return {view.name: view for figure in charts(analysis, forecast).values() for view in figure.views}


def of(figure: Figure | None) -> dict[str, FigureView]:
    """The views of a chart, by name; none of no chart."""
    return {} if figure is None else {view.name: view for view in figure.views}


def layers(view: FigureView, mark: str) -> list[dict[str, Any]]:
    return [layer for layer in view.spec["layer"] if layer["mark"]["type"] == mark]


def marks(view: FigureView) -> set[str]:
    return {layer["mark"]["type"] for layer in view.spec["layer"]}
