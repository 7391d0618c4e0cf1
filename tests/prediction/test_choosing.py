"""Settings replaced by name, and chosen by all sources but the one that they are tried on."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import published_tables
import pytest
from choosing import Setting, choose, replaced, settings_of
from paired import OURS, Point

from vitscale.errors import RequestError
from vitscale.prediction import fitting, parameters


def points(**off: float) -> list[Point]:
    """One of each source, predicted too fast by so much, within 10 % either way."""
    return [
        Point(source, source, source, 8, "extrapolated", 1.0, 1.0, {OURS: math.exp(by)}, math.exp(by - 0.1),
              math.exp(by + 0.1), 1.0, 1.0)
        for source, by in off.items()
    ]  # fmt: skip


@pytest.mark.parametrize("by", ["score", "error"])
def test_each_source_gets_what_the_others_choose_and_has_no_say_itself(by: str) -> None:
    """The second setting is perfect for a, at no cost to b and little to c: b and c choose the first or third for a."""
    as_it_is, of_a, third = points(a=0.5, b=0.3, c=0.3), points(a=0.0, b=0.3, c=0.4), points(a=0.9, b=0.2, c=0.3)
    found, chosen = choose([as_it_is, of_a, third], by)
    assert chosen == {"a": 2, "b": 1, "c": 1}
    assert [round(math.log(one.predicted[OURS]), 3) for one in found] == [0.9, 0.3, 0.4]


def test_what_is_chosen_then_is_tried_with_what_was_chosen_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the first setting b and c are better with the weight, so a gets it; under the second all are without it."""
    priors: list[Setting] = [{}, {"growth": {"spread": 1.0}}]
    weights: list[Setting] = [{}, {"amdahl.WEIGHT": 0.1}]
    off = {
        (False, False): points(a=0.5, b=0.3, c=0.3),
        (False, True): points(a=0.6, b=0.2, c=0.2),
        (True, False): points(a=0.1, b=0.4, c=0.1),
        (True, True): points(a=0.2, b=0.5, c=0.2),
    }
    monkeypatch.setattr(
        published_tables, "_under", lambda one, *_: (off["growth" in one, "amdahl.WEIGHT" in one], dict[str, str]())
    )
    found, second = published_tables.chosen_then(
        points(a=0.5, b=0.4, c=0.1), priors, {"a": 0, "b": 1, "c": 1}, weights, [], ()
    )
    assert second == {"a": weights[1], "b": weights[0], "c": weights[0]}
    assert [round(math.log(one.predicted[OURS]), 3) for one in found] == [0.6, 0.4, 0.1]


def test_a_unit_counts_once_however_many_points_it_has() -> None:
    """One unit of three points is better by 0.1 each, another by 0.2 the other way."""
    left_out = points(a=0.0)
    many = [replace(one, series="s", unit="u", source="b") for one in points(x=0.1, y=0.1, z=0.1)]
    before = [*left_out, *many, replace(points(w=0.4)[0], source="b")]
    after = [
        *left_out,
        *(replace(one, predicted={OURS: 1.0}) for one in many),
        replace(before[-1], predicted={OURS: 1.9}),
    ]
    assert choose([before, after], "error")[1]["a"] == 0


def test_one_source_leaves_nobody_to_choose() -> None:
    with pytest.raises(RequestError, match="Give a folder of two sources or more"):
        choose([points(a=0.1)], "score")


def test_a_setting_holds_within_alone() -> None:
    growth = parameters.PRIORS["growth"]
    jobs = fitting.DRAWS
    with replaced({"growth": {"spread": 0.25}, "fitting.DRAWS": 7}):
        assert parameters.PRIORS["growth"] == replace(growth, spread=0.25)
        assert fitting.DRAWS == 7
    assert parameters.PRIORS["growth"] == growth
    assert jobs == fitting.DRAWS


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"grwth": {"spread": 1}}, "unknown prior 'grwth'.*Did you mean 'growth'"),
        ({"growth": 1.5}, "growth is 1.5.*spread"),
        ({"growth": {"width": 1.5}}, "unknown figure of a prior 'width'"),
        ({"growth": {"spread": "wide"}}, "growth is"),
        ({"fitting.NO_SUCH": 1}, "has no constant fitting.NO_SUCH"),
        ({"no_module.X": 1}, "has no constant no_module.X"),
        ({"fitting.DRAWS": "many"}, "fitting.DRAWS is 'many'"),
    ],
)
def test_a_setting_that_is_none_is_told(setting: Setting, said: str) -> None:
    before = dict(parameters.PRIORS)
    with pytest.raises(RequestError, match=said), replaced(setting):
        pass
    assert before == parameters.PRIORS


def test_settings_come_after_the_one_that_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    path.write_text(json.dumps([{"growth": {"spread": 1}}]), encoding="utf-8")
    assert settings_of(path) == [{}, {"growth": {"spread": 1}}]
    path.write_text("{}", encoding="utf-8")
    with pytest.raises(RequestError, match="is no list"):
        settings_of(path)
