"""Whatever records hold, the report of them is strict JSON, charts that can be written, and no traceback."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from explained_factory import run_of
from results_factory import make_curve, make_results, make_trial
from vitscale.analysis import Analysis, analyse
from vitscale.pages import detail_tables
from vitscale.pages.charts.accuracy import accuracy_chart
from vitscale.pages.charts.resources import resource_chart
from vitscale.pages.charts.time import breakdown_chart
from vitscale.pages.charts.timeline import timeline_chart
from vitscale.pages.contract import to_json, to_table, trial_rows
from vitscale.store.records import ExplainedLine, ResourcesLine
from vitscale.store.results import Run

TRIAL = make_trial("ddp", 2, micro_batch=16)
SOUND = run_of(TRIAL)


def analysis_of(explained: dict[str, Any], used: dict[str, Any], other: Run | None = None) -> Analysis:
    """Two ranks of one run with some fields of all their explained steps and of their resources replaced."""

    def lines(own: tuple[Any, ...], changes: dict[str, Any]) -> tuple[Any, ...]:
        # As a record is read: what no record can hold is no test of the report.
        return tuple(type(line).model_validate(line.model_dump() | changes) for line in own)

    ranks = tuple(
        rank.model_copy(
            update={"explained": lines(rank.explained, explained), "resources": lines(rank.resources, used)}
        )
        for rank in SOUND.ranks
    )
    runs = [SOUND.model_copy(update={"ranks": ranks}), *([other] if other else [])]
    return analyse(make_results([(make_curve([TRIAL]), [TRIAL])], runs))


def reported(analysis: Analysis) -> None:
    curves = analysis.curves
    drawn = [breakdown_chart(analysis, curves), timeline_chart(analysis), resource_chart(analysis, curves)]
    for figure in (*drawn, accuracy_chart(analysis, curves)):
        for view in figure.views if figure else ():
            json.dumps(view.spec, allow_nan=False)
    json.loads(to_json(analysis))
    to_table(trial_rows(analysis), "csv")
    for table in (detail_tables.four_figures, detail_tables.parts_table, detail_tables.resource_table):
        table(analysis)
    detail_tables.accuracy_table(analysis, analysis.curves)


_NO_SHRINKING = (Phase.explicit, Phase.reuse, Phase.generate)
"""A chart takes a while to build: what failed is told as it was found."""
NUMBERS = st.sampled_from([-1e9, -1.0, 0.0, 1e-300, 0.01, 0.05, 0.077, 1.0, 1e12, 1e200])
LENGTHS = st.sampled_from([0.0, 1e-300, 0.01, 0.077, 1.0, 1e12, 1e200])
INTERVALS = st.lists(st.tuples(NUMBERS, NUMBERS), max_size=3).map(tuple)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow], phases=_NO_SHRINKING)
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "seconds": LENGTHS,
            "device": st.sampled_from(["cpu", "cuda"]),
            "phases": st.lists(
                st.tuples(st.sampled_from(["data", "forward", "backward"]), NUMBERS, NUMBERS), max_size=3
            ),
            "idle": INTERVALS,
            "copies": INTERVALS,
            "host_data": INTERVALS,
            "collectives": st.lists(st.tuples(st.just("group"), st.just("all_reduce"), NUMBERS, NUMBERS), max_size=3),
            "unknown": st.dictionaries(st.sampled_from(["other", "forward", "wait", "nonsense"]), st.just("why")),
        },
    ),
    st.fixed_dictionaries({}, optional={"seconds": LENGTHS, "cpu_seconds": LENGTHS, "epoch": st.just(99)}),
)
def test_no_record_breaks_the_report(explained: dict[str, Any], used: dict[str, Any]) -> None:
    reported(analysis_of(explained, used))


def test_an_endless_step_whose_one_known_part_has_no_length_is_in_no_bar() -> None:
    unknown = dict.fromkeys(("other", "forward", "wait"), "why")
    endless = {"seconds": 1e200, "unknown": unknown, "device": "cuda", "idle": ((0.0, 1.0),), "phases": []}
    copies: dict[str, Any] = {"copies": ((-1.0, 1e-300),), "collectives": [], "host_data": ()}
    analysis = analysis_of(endless | copies, {})
    assert breakdown_chart(analysis, analysis.curves) is None


@pytest.mark.parametrize("seconds", [0.0, 1e12])
def test_steps_that_cannot_be_are_in_no_chart(seconds: float) -> None:
    analysis = analysis_of({"seconds": seconds}, {})
    assert breakdown_chart(analysis, analysis.curves) is None
    assert timeline_chart(analysis) is None


def test_an_infinite_figure_is_drawn_as_an_unknown_one() -> None:
    analysis = analysis_of({}, {"seconds": 1e-300, "cpu_seconds": 1e200})
    used = next(iter(analysis.trials.values())).resources
    assert used is not None
    assert used.cpu_utilisation == math.inf
    reported(analysis)


def test_the_sound_ones_are() -> None:
    """That the two tests above test what they seem to."""
    analysis = analysis_of({}, {})
    found = breakdown_chart(analysis, analysis.curves)
    assert found is not None
    assert len(found.views) == 2
    assert timeline_chart(analysis) is not None
    assert ExplainedLine.model_fields.keys() >= {"seconds", "phases", "idle", "copies", "host_data", "collectives"}
    assert ResourcesLine.model_fields.keys() >= {"seconds", "cpu_seconds"}
