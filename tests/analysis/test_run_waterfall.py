"""The waterfall of whole runs: start-up, evaluation and checkpoint beside the parts of steps; loading and decoding."""

from __future__ import annotations

from typing import Any

import pytest

from results_factory import explained_run, make_curve, make_results, make_trial
from vitscale.analysis import Analysis, Waterfall, analyse
from vitscale.analysis.time.run_waterfall import run_breakdown, run_seconds, run_waterfalls
from vitscale.analysis.time.waterfall import Unexplained
from vitscale.store.records import CheckpointLine
from vitscale.store.results import Run
from vitscale.trial.trial import Trial

ONE_RANK = {"data_wait": 0.002, "forward": 0.03, "backward": 0.05, "optimizer": 0.006, "other": 0.002}
"""A step of 90 ms; an epoch of 1,024 images has 128 of them on one rank, 11.52 s."""


def run_of(trial: Trial, parts: list[dict[str, Any]], repeat: int = 0, save: float | None = 0.5, **epoch: Any) -> Run:
    """A run that starts in 1 s beyond its first step; `epoch`: more of each line of an epoch."""
    run = explained_run(trial, parts, repeat=repeat, phases={"launch": 1.0, "first_step": 0.09})
    saved = None if save is None else CheckpointLine(save_seconds=save, load_seconds=save, bytes=1000)
    ranks = tuple(
        rank.model_copy(
            update={"epochs": tuple(line.model_copy(update=epoch) for line in rank.epochs), "checkpoint": saved}
        )
        for rank in run.ranks
    )
    return run.model_copy(update={"ranks": ranks})


def study(runs: list[Run]) -> Analysis:
    trials = list({run.header.trial_id: run.header.trial for run in runs}.values())
    return analyse(make_results([(make_curve(trials), trials)], runs))


def of_runs(analysis: Analysis) -> tuple[Waterfall, ...]:
    return run_waterfalls(analysis.curves[0], analysis.trials)


def costing(found: Waterfall) -> dict[str, float]:
    return {factor.name: factor.points for factor in found.factors if abs(factor.points) > 1e-9}


def test_start_up_and_checkpoint_that_do_not_shrink_by_hand() -> None:
    one, two = make_trial(gpus=1, epochs=2), make_trial(gpus=2, epochs=2)
    analysis = study(
        [run_of(one, [ONE_RANK], evaluation_seconds=2.0), run_of(two, [ONE_RANK] * 2, evaluation_seconds=1.0)]
    )
    (found,) = of_runs(analysis)
    # 1 + 2 x (11.52 + 2) + 0.5 s on one rank; half of it is ideal, and 0.5 s of start-up and 0.25 s of saving too much.
    ideal, taken = (1.5 + 2 * 13.52) / 2, 1.5 + 2 * 6.76
    assert found.efficiency == pytest.approx(ideal / taken)
    lost = 1 - ideal / taken
    assert costing(found) == pytest.approx({"start-up": lost * 2 / 3, "checkpoint": lost / 3})
    assert run_seconds(analysis.trials[two.identity()]) == pytest.approx([taken])


def test_all_factors_multiply_to_the_efficiency_of_the_run_and_take_what_is_missing() -> None:
    one, two = make_trial(gpus=1, epochs=2), make_trial(gpus=2, epochs=2)
    slow = ONE_RANK | {"wire": 0.03, "data_wait": 0.022}
    analysis = study([run_of(one, [ONE_RANK], evaluation_seconds=2.0),
                      run_of(two, [slow] * 2, evaluation_seconds=2.5)])  # fmt: skip
    (found,), (of_epochs,) = of_runs(analysis), analysis.waterfalls
    assert found.efficiency is not None
    product = 1.0
    for factor in found.factors:
        product *= factor.factor
    assert product == pytest.approx(found.efficiency)
    assert sum(factor.points for factor in found.factors) == pytest.approx(1 - found.efficiency)
    # Points go by the seconds that each adds: 128 x 0.03 of transfer, 128 x 0.02 of data wait, 3 of evaluation.
    points = costing(found)
    assert points["wire"] / points["data wait"] == pytest.approx(1.5)
    assert points["evaluation"] / points["data wait"] == pytest.approx(3.0 / (128 * 0.02))
    inside = {factor.name: factor.points for factor in of_epochs.factors}
    assert points["wire"] / points["data wait"] == pytest.approx(inside["wire"] / inside["data wait"])


def test_data_wait_is_shared_out_as_the_loaders_threads_shared_out_their_time() -> None:
    one, two = make_trial(gpus=1, epochs=2), make_trial(gpus=2, epochs=2)
    spent: dict[str, Any] = {"evaluation_seconds": 1.0, "loader_reading_seconds": 1.0, "loader_decoding_seconds": 3.0}
    waiting = ONE_RANK | {"data_wait": 0.042}
    analysis = study([run_of(one, [ONE_RANK], **spent), run_of(two, [waiting] * 2, **spent)])
    points = costing(analysis.waterfalls[0])
    assert points["decoding"] == pytest.approx(3 * points["loading"])
    assert "data wait" not in {factor.name for factor in analysis.waterfalls[0].factors}
    breakdown = run_breakdown(analysis.trials[two.identity()])
    # 128 steps of 42 ms of waiting in 2 epochs.
    assert (breakdown["loading"], breakdown["decoding"]) == pytest.approx((128 * 0.042 / 4, 128 * 0.042 * 3 / 4))


@pytest.mark.parametrize(
    "base",
    [{}, {"loader_reading_seconds": 1.0, "loader_decoding_seconds": None}],
    ids=["not recorded", "not told apart"],
)
def test_data_wait_stays_whole_where_a_side_does_not_tell(base: dict[str, Any]) -> None:
    one, two = make_trial(gpus=1, epochs=2), make_trial(gpus=2, epochs=2)
    spent: dict[str, Any] = {"loader_reading_seconds": 1.0, "loader_decoding_seconds": 3.0}
    analysis = study([run_of(one, [ONE_RANK], **base), run_of(two, [ONE_RANK] * 2, **spent)])
    names = {factor.name for factor in analysis.waterfalls[0].factors}
    assert "data wait" in names
    assert not {"loading", "decoding"} & names


def test_what_is_stored_decoded_is_no_part_of_its_own() -> None:
    one, two = make_trial(gpus=1, epochs=2), make_trial(gpus=2, epochs=2)
    spent: dict[str, Any] = {"loader_reading_seconds": 1.0, "loader_decoding_seconds": 0.0}
    analysis = study([run_of(one, [ONE_RANK], **spent), run_of(two, [ONE_RANK] * 2, **spent)])
    assert "data wait" in {factor.name for factor in analysis.waterfalls[0].factors}


def test_repeated_runs_give_factors_and_efficiency_an_interval() -> None:
    one, two = make_trial(gpus=1, epochs=2), make_trial(gpus=2, epochs=2)
    seconds = {0: 0.03, 1: 0.031, 2: 0.029}
    runs = [
        run_of(trial, [ONE_RANK | {"forward": forward}] * trial.world.size, repeat, evaluation_seconds=1.0)
        for trial in (one, two)
        for repeat, forward in seconds.items()
    ]
    (found,) = of_runs(study(runs))
    assert found.interval is not None
    assert found.interval.low is not None
    assert found.interval.high is not None
    assert found.interval.low < (found.efficiency or 0.0) < found.interval.high
    assert all(factor.interval is not None for factor in found.factors)


def test_a_part_that_nobody_timed_is_a_reason_and_not_nothing() -> None:
    one, two = make_trial(gpus=1, epochs=2), make_trial(gpus=2, epochs=2)
    analysis = study([run_of(one, [ONE_RANK]), run_of(two, [ONE_RANK] * 2, evaluation_seconds=1.0)])
    (found,) = of_runs(analysis)
    assert (found.factors, found.efficiency, found.interval) == ((), None, None)
    assert found.reason == "how long an evaluation takes is unknown"
    assert run_seconds(analysis.trials[one.identity()]) == []


def test_a_checkpoint_timed_on_one_side_alone_is_in_neither_run() -> None:
    one, two = make_trial(gpus=1, epochs=2), make_trial(gpus=2, epochs=2)
    analysis = study([run_of(one, [ONE_RANK], save=None, evaluation_seconds=2.0),
                      run_of(two, [ONE_RANK] * 2, evaluation_seconds=1.0)])  # fmt: skip
    (found,) = of_runs(analysis)
    assert list(costing(found)) == ["start-up"]


def test_runs_that_end_at_an_accuracy_have_no_common_length() -> None:
    """The trial's epochs are only a limit there."""
    trials = [make_trial("ddp", gpus, epochs=100, target_accuracy=0.6) for gpus in (1, 2)]
    for trial in study([run_of(trial, [ONE_RANK] * trial.world.size) for trial in trials]).trials.values():
        assert run_seconds(trial) == []
        with pytest.raises(Unexplained, match=r"train\.target_accuracy"):
            run_breakdown(trial)
