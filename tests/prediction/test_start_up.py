from __future__ import annotations

import math
from dataclasses import replace

import pytest

from evidence_factory import make_evidence, make_point
from vitscale.prediction.evidence import MeasuredPoint
from vitscale.prediction.fitting import fit
from vitscale.prediction.predicting import Question, predict
from vitscale.prediction.results import Prediction
from vitscale.prediction.start_up import launcher_of, start_up
from vitscale.trial.trial import Trial


def point(
    gpus: int, *seconds: float, engine: str = "ddp", launcher: str = "torchrun", micro_batch: int = 8
) -> MeasuredPoint:
    made = make_point(gpus, [0.1])
    train = made.trial.train.model_copy(update={"engine": engine, "micro_batch": micro_batch})
    trial = made.trial.model_copy(update={"train": train, "launcher": launcher})
    return replace(made, trial_id=trial.identity(), trial=trial, startup_seconds=seconds)


def trial(gpus: int, engine: str = "ddp", launcher: str = "torchrun") -> Trial:
    return point(gpus, 1.0, engine=engine, launcher=launcher).trial


def test_a_measured_configuration_has_its_own_start_up_whatever_others_took() -> None:
    measured = [point(1, 9.0, 9.66, 10.0), point(2, 36.4, engine="fsdp2"), point(2, 12.0)]

    found = start_up(measured, trial(1))

    assert found is not None
    assert (found.seconds.value, found.known_by, found.assumption) == (9.66, "measured", None)
    assert found.seconds.future_ends[0] < 9.0 < 10.0 < found.seconds.future_ends[1] < 2 * 9.66


def test_the_nearest_rank_count_of_the_same_engine_comes_next_and_is_less_sure() -> None:
    measured = [point(1, 5.0), point(4, 8.0), point(8, 30.0, engine="fsdp2")]

    found = start_up(measured, trial(8))
    there = start_up(measured, trial(4))

    assert found is not None
    assert there is not None
    assert (found.seconds.value, found.known_by, found.assumption) == (8.0, "nearest", None)
    # One doubling away: 0.2, beside 0.3 for another batch and 0.35 from run to run, as logarithms; t of 3 degrees.
    mean = 2.3534 * math.sqrt(0.35**2 + 0.2**2 + 0.3**2)
    assert math.log(found.seconds.ends[1] / found.seconds.value) == pytest.approx(mean, rel=1e-4)
    assert math.log(there.seconds.ends[1] / there.seconds.value) == pytest.approx(2.3534 * 0.35, rel=1e-4)


def test_an_engine_that_nobody_ran_is_assumed_from_all_widely() -> None:
    found = start_up(
        [point(2, 4.0), point(2, 9.0, engine="fsdp2"), point(2, 6.0, engine="none")], trial(2, "deepspeed")
    )

    assert found is not None
    assert found.assumption is not None
    assert (found.seconds.value, found.known_by) == (6.0, "assumed")
    assert found.seconds.future_ends[0] < 4.0 < 9.0 < found.seconds.future_ends[1]
    assert found.assumption.part == "start-up"


def test_start_ups_of_launchers_are_never_pooled() -> None:
    measured = [point(1, 0.3, launcher="local"), point(2, 9.0)]

    assert start_up(measured, trial(4, launcher="mpirun")) is None
    of_local, of_torchrun = start_up(measured, trial(4, launcher="local")), start_up(measured, trial(4))
    assert of_local is not None
    assert of_torchrun is not None
    assert (of_local.seconds.value, of_torchrun.seconds.value) == (0.3, 9.0)
    assert (launcher_of(measured, 1), launcher_of(measured, 16)) == ("local", "torchrun")


def test_a_trial_that_stands_on_two_curves_ran_once() -> None:
    once = [point(1, 5.0, 7.0), point(2, 6.0)]

    assert start_up([*once, *once], trial(1)) == start_up(once, trial(1))


def test_another_series_of_the_workload_tells_of_start_ups_and_of_another_data_set_none() -> None:
    """As `advise` has it, whose figures are to be those of `predict`."""
    own = make_evidence([point(1, 5.0), point(2, 6.0)])
    eight = point(8, 30.0, micro_batch=16)
    data = eight.trial.data.model_copy(update={"name": "cifar100"})
    other = replace(eight, trial=eight.trial.model_copy(update={"data": data}))
    found: list[Prediction] = []
    for further in (eight, other):
        (series,) = make_evidence([further], name="batch 16").series
        both = replace(own, series=(*own.series, series))
        found += predict(fit(both), Question((8,), series="ddp"))
    assert [one.startup_seconds.value for one in found if one.startup_seconds] == [30.0, 6.0]


def test_runs_that_differ_more_make_it_less_sure() -> None:
    alike, unlike = start_up([point(1, 5.0, 5.0, 5.0)], trial(1)), start_up([point(1, 2.5, 5.0, 10.0)], trial(1))

    assert alike is not None
    assert unlike is not None
    assert unlike.seconds.value == alike.seconds.value == 5.0
    assert unlike.seconds.future_ends[1] > 1.5 * alike.seconds.future_ends[1]
