"""A page's figures are drawn by a process beside, and here where it has failed."""

from __future__ import annotations

import os

import pytest

from vitscale.errors import printable
from vitscale.present import drawing
from vitscale.present.document import FigureView

SPECS = [{"data": {"values": [{"x": x}]}, "mark": "point", "encoding": {"x": {"field": "x"}}} for x in (1, 2)]


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(drawing, "still", lambda spec: f"here: {spec['data']['values'][0]['x']}")
    drawing.start_drawing_process()


@pytest.mark.usefixtures("beside")
def test_figures_are_drawn_beside_in_their_order() -> None:
    first, second = drawing.stills(SPECS)()
    assert first.startswith("<svg")
    assert (">1<" in first, ">1<" in second) == (True, False)
    assert drawing.stills(SPECS)() == ["here: 1", "here: 2"], "a process draws one page"


@pytest.mark.usefixtures("beside")
@pytest.mark.parametrize("ended", ["before it is asked", "while it draws"])
def test_what_draws_beside_may_be_ended(ended: str) -> None:
    (process,) = drawing._drawing_processes
    if ended == "before it is asked":
        process.kill()
        process.wait()
    drawn = drawing.stills(SPECS)
    process.kill()
    assert drawn() == ["here: 1", "here: 2"]


def test_on_one_core_nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subprocess.Popen", None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    drawing.start_drawing_process()


@pytest.mark.usefixtures("beside")
def test_a_process_that_has_drawn_begins_one_for_its_next_page() -> None:
    """Whatever it has loaded by then."""
    drawing.stills(SPECS)()
    drawing.start_drawing_process()
    (process,) = drawing._drawing_processes
    assert process.poll() is None
    assert drawing.stills(SPECS)()[0].startswith("<svg")


ODD = ("\x01", "\x1b[31m", "\ufffe", "\uffff", "\udcff", "\x00", "\u202e")


@pytest.mark.parametrize("odd", ODD)
def test_a_chart_s_texts_are_escaped_wherever_they_stand(odd: str) -> None:
    """The library ends its process over most of them."""
    label = f"before{odd}after"
    spec = {
        "title": {"text": label},
        "datasets": {"rows": [{"series": label, "y": 1.0}]},
        "data": {"name": "rows"},
        "mark": {"type": "point"},
        "encoding": {
            "y": {"field": "y", "type": "quantitative", "title": label},
            "color": {"field": "series", "scale": {"domain": [label], "range": ["#000"]}},
        },
    }
    drawn = drawing.still(spec)
    written = printable(label)
    assert odd not in drawn
    assert drawn.count(f">{written}<") >= 2, "the title and the legend"
    view = FigureView("odd", {}, label, label, spec, {"text": ""}, label)
    for kind in drawing.FIGURE_FORMATS:
        assert drawing.picture(view, kind)


def test_long_texts_are_shortened_and_stay_apart() -> None:
    first, second = "a" * 10_000 + "1" + "b" * 10_000, "a" * 10_000 + "2" + "b" * 10_000
    rows = [{"series": first}, {"series": second}, {"series": first}, {"series": "short"}]
    told = [row["series"] for row in drawing.drawable({"datasets": {"rows": rows}})["datasets"]["rows"]]
    assert told[0] == told[2] != told[1]
    assert told[3] == "short"
    assert max(map(len, told)) < 500
    assert all(text.startswith("aaa") and "..." in text for text in told[:3])


def test_what_is_no_text_is_drawn_as_it_was() -> None:
    for spec in SPECS:
        assert drawing.drawable(spec) == spec
