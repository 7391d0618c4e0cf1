"""Evidence gathered from an analysed results folder: each figure in its place, and what is left out."""

from __future__ import annotations

import pytest

from evidence_factory import UNKNOWN
from explained_factory import BACKWARD, DATA_WAIT, FORWARD, OPTIMIZER, OTHER, SLOWDOWN, SLOWER, WIRE, run_of
from results_factory import TRAIN_SAMPLES, failed_run, make_curve, make_results, make_trial, one_curve, steady_run
from vitscale.analysis import analyse
from vitscale.prediction.evidence import MeasuredPoint, gather
from vitscale.store.records import Collective, TrafficLine
from vitscale.store.results import Results, Run
from vitscale.trial.trial import Trial


def points(results: Results) -> dict[int, MeasuredPoint]:
    (series,) = gather(analyse(results), UNKNOWN).series
    return {point.gpus: point for point in series.points}


def test_a_curve_becomes_a_series_with_a_point_for_each_measured_trial() -> None:
    evidence = gather(analyse(one_curve({1: [0.2, 0.21], 2: [0.22], 4: []})), UNKNOWN, loader_images_per_second=900.0)
    (series,) = evidence.series
    assert (series.name, series.mode) == ("ddp", "strong-micro")
    assert [p.gpus for p in series.points] == [1, 2]
    assert [list(p.step_seconds) for p in series.points] == [pytest.approx([0.2, 0.21]), pytest.approx([0.22])]
    assert [(p.images, p.steps_per_epoch) for p in series.points] == [(TRAIN_SAMPLES, 128), (TRAIN_SAMPLES, 64)]
    assert series.points[0].devices == ("Example CPU",)
    assert series.points[1].devices == ("Example CPU",) * 2
    assert series.points[0].backend == "gloo"
    assert evidence.loader_images_per_second == 900.0
    assert series.points[0].startup_seconds == (6.0,) * len(series.points[0].step_seconds)


def test_failed_trials_and_empty_curves_are_left_out() -> None:
    trials = [make_trial("ddp", n) for n in (1, 2)]
    results = make_results([(make_curve(trials), trials)], [failed_run(trial, "oom", "too large") for trial in trials])
    assert gather(analyse(results), UNKNOWN).series == ()


def test_a_trial_that_drifts_does_other_work_and_is_left_out() -> None:
    plain, drifting = make_trial("none", 1), make_trial("ddp", 1)
    losses = [2.0 / (1 + 0.1 * k) for k in range(384)]
    wrong = [loss * (1 + 0.05 * (k % 7)) for k, loss in enumerate(losses)]
    results = make_results(
        [(make_curve([trial]), [trial]) for trial in (plain, drifting)],
        [steady_run(plain, 0.2, losses=losses), steady_run(drifting, 0.2, losses=wrong)],
    )
    analysis = analyse(results)
    assert analysis.trials[drifting.identity()].drifts
    assert [series.points[0].trial.train.engine for series in gather(analysis, UNKNOWN).series] == ["none"]


def test_series_of_one_name_under_two_policies_are_told_apart() -> None:
    strong = one_curve({1: [0.2], 2: [0.2]})
    weak = one_curve({1: [0.2], 2: [0.2]}, mode="weak")
    both = make_results(
        [
            (curve, [r.study.trials[p.trial_id] for p in curve.points])
            for r in (strong, weak)
            for curve in r.study.curves
        ],
        [*strong.runs, *weak.runs],
    )
    names = [series.name for series in gather(analyse(both), UNKNOWN).series]
    assert names == ["ddp, strong-micro", "ddp, weak"]


def test_the_parts_of_a_step_are_those_of_light_steps() -> None:
    """Explained steps are 5 % slower; the typical rank computes, waits for the last one, and transfers."""
    trials = [make_trial("ddp", n) for n in (1, 2)]
    found = points(make_results([(make_curve(trials), trials)], [run_of(trial) for trial in trials]))
    one, two = found[1].parts, found[2].parts
    assert one is not None
    assert two is not None
    light, images = 1 + SLOWDOWN, trials[0].train.micro_batch
    assert one.compute == pytest.approx(((FORWARD + BACKWARD) * images + OTHER) / light)
    assert one.backward == pytest.approx(BACKWARD * images / light)
    assert one.optimizer == pytest.approx(OPTIMIZER / light)
    assert one.data_wait == pytest.approx(DATA_WAIT / light)
    assert one.exposed == 0.0
    assert one.wire == 0.0
    assert two.wire == pytest.approx(WIRE / light)
    assert two.wait == pytest.approx((FORWARD + BACKWARD) * images * SLOWER / light)
    assert two.exposed == pytest.approx((WIRE + (FORWARD + BACKWARD) * images * SLOWER) / light)


def test_ranks_of_unlike_speed_are_told() -> None:
    trial = make_trial("ddp", 2)
    found = points(make_results([(make_curve([trial]), [trial])], [run_of(trial)]))
    assert found[2].rank_speeds == (1.0, 0.8)


def counted_run(trial: Trial, collectives: tuple[Collective, ...], backend: str = "gloo") -> Run:
    run = steady_run(trial, 0.2)
    lines = (TrafficLine(step=1, backend=backend, collectives=collectives),)
    return run.model_copy(update={"ranks": tuple(rank.model_copy(update={"traffic": lines}) for rank in run.ranks)})


def test_what_was_counted_is_the_bytes_of_whole_tensors() -> None:
    trial = make_trial("ddp", 2)
    reduce = Collective(
        communicator="world", ranks=2, operation="all_reduce", dtype="float32", input_elements=100, output_elements=100
    )
    gather_ = reduce.model_copy(update={"operation": "all_gather", "dtype": "bfloat16", "input_elements": 50})
    found = points(make_results([(make_curve([trial]), [trial])], [counted_run(trial, (reduce, reduce, gather_))]))
    assert found[2].sent_bytes == {("all_reduce", "float32"): 800, ("all_gather", "bfloat16"): 200}
    assert found[2].sent_calls == {("all_reduce", "float32"): 2, ("all_gather", "bfloat16"): 1}


def test_the_spread_within_a_run_is_a_standard_deviation() -> None:
    trial = make_trial("ddp", 1, warmup_steps=0, epochs=1)
    run = steady_run(trial, 0.2)
    wobble = [0.19, 0.20, 0.21] * 60
    steps = tuple(line.model_copy(update={"seconds": wobble[k]}) for k, line in enumerate(run.ranks[0].steps))
    ranks = (run.ranks[0].model_copy(update={"steps": steps}),)
    found = points(make_results([(make_curve([trial]), [trial])], [run.model_copy(update={"ranks": ranks})]))
    assert found[1].step_spread == pytest.approx(0.02 / 0.2 / 1.349, rel=0.01)
