"""Times that no step takes are left out and named, and no warning of numpy reaches the terminal."""

from __future__ import annotations

from pathlib import Path

import pytest

from evidence_factory import make_evidence, make_point
from prediction_factory import resolved_study
from vitscale.analysis import analyse
from vitscale.errors import RequestError
from vitscale.prediction.answering import Changes, answer, questions
from vitscale.prediction.evidence import evidence_of
from vitscale.prediction.fitting import fit
from vitscale.prediction.predicting import Question, predict

pytestmark = pytest.mark.filterwarnings("error")


@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "deepspeed", "unknown"])
@pytest.mark.parametrize(
    "seconds",
    [{1: 1e-9, 2: 1e-9}, {1: 1e9, 2: 1e9}, {1: 1e-9, 2: 1e9}, {1: 1e9, 2: 1e-9, 4: 1.0}, {4: 1e-9}, {4: 1e9}],
)
def test_the_shortest_and_longest_times_that_are_believed_raise_no_warning(
    seconds: dict[int, float], engine: str
) -> None:
    points = [make_point(gpus, (step, 1.01 * step, 1.02 * step), engine=engine) for gpus, step in seconds.items()]
    for answered in predict(fit(make_evidence(points)), Question((2, 64), nodes_of=8)):
        assert answered.step_seconds.value > 0


@pytest.mark.parametrize(("step", "limit"), [(1e-320, "shorter than 1e-09 s"), (1e19, "longer than 1e\\+09 s")])
def test_runs_that_cannot_be_are_left_out_and_named(step: float, limit: str, tmp_path: Path) -> None:
    usual = {1: [0.1, 0.101, 0.102], 4: [0.108, 0.109, 0.11]}
    without = evidence_of(tmp_path, analyse(resolved_study(usual)))
    beside = evidence_of(tmp_path, analyse(resolved_study({**usual, 2: [step, step, step]})))
    assert [point.gpus for point in beside.series[0].points] == [1, 4]
    (said,) = beside.left_out
    asked = questions(beside, (8,), Changes())
    assert answer(fit(beside), asked).left_out == (said,)
    assert answer(fit(beside), asked).predictions == answer(fit(without), asked).predictions
    alone = evidence_of(tmp_path, analyse(resolved_study({2: [step, step, step]})))
    with pytest.raises(RequestError, match=f"tell of no step that can be .*{limit}"):
        questions(alone, (8,), Changes())
