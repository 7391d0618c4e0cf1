"""The report's document. A chart that no section shows is absent from every form of the page, and nobody misses it."""

from __future__ import annotations

from advice_factory import advised
from explained_factory import batch_study
from prediction_factory import make_forecast, make_prediction
from results_factory import make_curve, make_results, make_trial, steady_run
from vitscale.analysis import Analysis, analyse
from vitscale.pages.document import CHARTS, PICTURES_ALONE, charts, report_document
from vitscale.present.document import Document, Figure, Section
from vitscale.trial.model_spec import ModelSpec, resolve


def figures_in(document: Document | Section) -> set[str]:
    """Names of the figures of a document, those of folded sections too."""
    names: set[str] = set()
    for block in document.blocks:
        if isinstance(block, Figure):
            names.add(block.name)
        elif isinstance(block, Section):
            names |= figures_in(block)
    return names


def by_image_size() -> Analysis:
    """A study that says what an image's size costs: 32 and 64 pixels."""
    curves, runs = [], []
    for pixels, seconds in ((32, 0.1), (64, 0.25)):
        model = resolve(ModelSpec(name="vit-ti16", image_size=pixels), 10)
        trial = make_trial().model_copy(update={"model": model})
        curves.append((make_curve([trial], model__image_size=pixels), [trial]))
        runs.append(steady_run(trial, seconds))
    return analyse(make_results(curves, runs))


def test_every_chart_stands_in_a_section_of_the_report() -> None:
    explained = analyse(batch_study([16], [1, 2]))
    drawn: dict[str, Figure] = {}
    shown: set[str] = set()
    for analysis, forecast, advice in (
        (explained, make_forecast(explained, [make_prediction(8)]), advised()),
        (by_image_size(), None, None),
    ):
        drawn |= charts(analysis, forecast, advice)
        shown |= figures_in(report_document(analysis, forecast, advice))
    assert set(drawn) == set(CHARTS), "one of the studies above has to have data for each chart"
    assert [figure.name for figure in drawn.values()] == list(drawn)
    assert set(CHARTS) - shown == PICTURES_ALONE, "name the chart in its section, or in PICTURES_ALONE"
