"""A page's figures are drawn by a process beside, and here where it has failed."""

from __future__ import annotations

import os
import sys

import pytest

from vitscale.present import drawing

SPECS = [{"data": {"values": [{"x": x}]}, "mark": "point", "encoding": {"x": {"field": "x"}}} for x in (1, 2)]


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "vl_convert", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(drawing, "still", lambda spec: f"here: {spec['data']['values'][0]['x']}")
    drawing.draw_beside()


@pytest.mark.usefixtures("beside")
def test_figures_are_drawn_beside_in_their_order() -> None:
    first, second = drawing.stills(SPECS)()
    assert first.startswith("<svg")
    assert (">1<" in first, ">1<" in second) == (True, False)
    assert drawing.stills(SPECS)() == ["here: 1", "here: 2"], "a process draws one page"


@pytest.mark.usefixtures("beside")
@pytest.mark.parametrize("ended", ["before it is asked", "while it draws"])
def test_what_draws_beside_may_be_ended(ended: str) -> None:
    (process,) = drawing._beside
    if ended == "before it is asked":
        process.kill()
        process.wait()
    drawn = drawing.stills(SPECS)
    process.kill()
    assert drawn() == ["here: 1", "here: 2"]


def test_on_one_core_and_where_the_library_is_loaded_nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subprocess.Popen", None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    monkeypatch.delitem(sys.modules, "vl_convert", raising=False)
    drawing.draw_beside()
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setitem(sys.modules, "vl_convert", sys)
    drawing.draw_beside()
