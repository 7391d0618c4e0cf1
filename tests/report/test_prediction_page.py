from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import vl_convert

from prediction_factory import make_outlook, make_prediction, make_score, series_of, study
from vitscale.prediction.evidence import Evidence
from vitscale.prediction.results import Assumption
from vitscale.report import outputs
from vitscale.report.drawing import vega_lite_version
from vitscale.report.page import to_html
from vitscale.report.prediction_charts import prediction_figures

HOSTILE = "</script><img src=x onerror=alert(1)><!-- {{7*7}} '\"&"


@pytest.fixture(autouse=True)
def without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """What draws in the browser takes seconds to put together and is nothing of these tests."""
    monkeypatch.setattr("vitscale.report.page._library", lambda: "")


def section(page: str) -> str:
    """The words and tags of the section on what is predicted."""
    return page.partition('<section id="prediction">')[2].partition("</section>")[0]


def test_the_section_is_there_with_an_outlook_only() -> None:
    analysis = study()
    page = to_html(analysis, make_outlook(analysis, scores=[make_score()]))
    shown = section(page)
    assert "What nobody has measured" in shown
    assert "predicting 8 ranks from 1, 2 and 4 was off by 2.1 %" in shown
    assert 'data-chart="strong-micro-prediction"' in shown
    assert "Assumed: network between hosts: about 3 GB/s" in shown
    assert '<td class="prior-driven">prior-driven</td>' in shown
    # On 8 ranks, 2.176 s: the mean's interval, then a run's.
    assert '2.18<span class="bounds">2.09\u20132.26</span><span class="bounds run">1.96\u20132.39</span>' in shown
    assert '<a href="#prediction">prediction</a>' in page
    without = to_html(analysis)
    assert "What nobody has measured" not in without
    assert "#prediction" not in without


def test_what_holds_of_all_series_is_told_once() -> None:
    analysis = study()
    outlook = make_outlook(analysis, [make_prediction(8), make_prediction(8, "prior-driven", series="fsdp2")])
    two = Evidence((series_of(analysis), series_of(analysis, "fsdp2")), outlook.evidence.network)
    shown = section(to_html(analysis, dataclasses.replace(outlook, evidence=two)))
    assert shown.count("Energy: unavailable: no run recorded it.") == 1
    assert shown.count("Assumed: network between hosts") == 1


def test_nothing_of_a_prediction_can_act_on_the_page() -> None:
    analysis = study()
    rows = [
        make_prediction(
            8,
            "prior-driven",
            series=HOSTILE,
            reasons={"speedup": HOSTILE},
            assumptions=(Assumption(HOSTILE, HOSTILE, HOSTILE),),
        )
    ]
    outlook = make_outlook(analysis, rows, [make_score(series=HOSTILE)])
    hostile = Evidence((series_of(analysis, HOSTILE),), outlook.evidence.network)
    page = to_html(analysis, dataclasses.replace(outlook, evidence=hostile))
    assert HOSTILE not in page
    assert "<img src=x" not in page
    assert "&lt;img src=x" in section(page)


def test_the_chart_can_be_drawn_and_is_the_same_twice() -> None:
    analysis = study({4: [0.1]})
    rows = [make_prediction(8), make_prediction(16, "prior-driven")]
    (figure,) = prediction_figures(analysis, make_outlook(analysis, rows))
    drawn = vl_convert.vegalite_to_svg(figure.spec, vl_version=vega_lite_version())
    for part in ("Predicted epoch time", "measured", "extrapolated", "prior-driven", "ideal"):
        assert part in drawn, part
    assert prediction_figures(analysis, make_outlook(analysis, rows)) == [figure]


@pytest.mark.parametrize(("kind", "name"), [("md", "report.md"), ("json", "report.json")])
def test_each_form_of_the_report_has_it(tmp_path: Path, kind: str, name: str) -> None:
    analysis = study()
    outputs.write(analysis, tmp_path, [kind], tmp_path / name, make_outlook(analysis))
    assert "network between hosts" in (tmp_path / name).read_text(encoding="utf-8")


def test_the_csv_is_what_it_was(tmp_path: Path) -> None:
    analysis = study()
    outputs.write(analysis, tmp_path, ["csv"], tmp_path / "without.csv")
    outputs.write(analysis, tmp_path, ["csv"], tmp_path / "with.csv", make_outlook(analysis))
    assert (tmp_path / "with.csv").read_bytes() == (tmp_path / "without.csv").read_bytes()
