from __future__ import annotations

import dataclasses
import math

import pytest

from prediction_factory import estimate, make_forecast, make_prediction, study
from vitscale.analysis import Analysis
from vitscale.analysis.trials import CheckpointCost
from vitscale.errors import RequestError
from vitscale.prediction.finishing import NODE_MTBF_SECONDS, Finish, Horizon, finish, horizon, time_to_finish
from vitscale.prediction.results import Prediction
from vitscale.trial.model_spec import resolve


def finished(asked: Horizon, *predictions: Prediction, analysis: Analysis | None = None) -> list[Finish]:
    found = analysis or study()
    rows = [
        dataclasses.replace(one, trial=one.trial.model_copy(update={"model": resolve(one.trial.model, 10)}))
        for one in predictions
    ]
    return list(finish(asked, rows, make_forecast(found, rows).evidence, found))


def test_all_is_as_the_user_says_and_the_start_comes_first() -> None:
    # 1,000 epochs of 2.176 s on two hosts; a restart takes 600 s, 6 s of start-up and as long as a checkpoint to load.
    (one,) = finished(Horizon(1000, 5.0, 8_640_000.0), make_prediction(8, cost_per_epoch=estimate(0.5)))
    known = time_to_finish(2176.0, 2, 5.0, 611.0, 8_640_000.0)
    assert one.work_seconds == pytest.approx(2176)
    assert one.wall_seconds == pytest.approx(6 + known.wall_seconds)
    assert one.failures == pytest.approx(known.failures)
    assert one.lost_share == pytest.approx(known.lost_share)
    assert one.cost == pytest.approx(0.5 * (6 + known.wall_seconds) / 2.176)
    # A run may be a tenth faster or slower, and so, for other reasons, may its start-up: the squares add up.
    fast, slow = (time_to_finish(times * 2176, 2, 5.0, 611.0, 8_640_000.0).wall_seconds for times in (0.9, 1.1))
    assert one.low == pytest.approx(6 + known.wall_seconds - math.hypot(0.6, known.wall_seconds - fast))
    assert one.high == pytest.approx(6 + known.wall_seconds + math.hypot(0.6, slow - known.wall_seconds))
    assert [assumed.part for assumed in one.assumptions] == ["restarts"]


def test_what_nobody_says_is_assumed_and_told() -> None:
    (one,) = finished(Horizon(1000), make_prediction(8))
    assert [assumed.part for assumed in one.assumptions] == ["failures of hosts", "saving a checkpoint", "restarts"]
    # vit-ti16 at 32 pixels with 10 classes has 5,490,058 parameters: 12 bytes of each at 1 GB/s.
    seconds = 12 * 5_490_058 / 1e9
    assert one.wall_seconds == pytest.approx(
        6 + time_to_finish(2176.0, 2, seconds, 606 + seconds, NODE_MTBF_SECONDS).wall_seconds
    )


def test_a_checkpoint_that_was_timed_is_taken() -> None:
    analysis = study()
    timed = {
        name: dataclasses.replace(trial, checkpoint=CheckpointCost(20.0, 10.0, 1e9))
        for name, trial in analysis.trials.items()
    }
    (one,) = finished(
        Horizon(1000, None, 86_400.0), make_prediction(8), analysis=dataclasses.replace(analysis, trials=timed)
    )
    assert one.wall_seconds == pytest.approx(6 + time_to_finish(2176.0, 2, 20.0, 616.0, 86_400.0).wall_seconds)
    assert [assumed.part for assumed in one.assumptions] == ["restarts"]


def test_hosts_that_fail_all_the_time_never_finish() -> None:
    (one,) = finished(Horizon(1000, 1e6, 3.6), make_prediction(8))
    assert (one.wall_seconds, one.low, one.high, one.failures, one.lost_share, one.cost) == (None,) * 6
    assert one.reason == "hosts fail so often that it would practically never end"
    assert one.work_seconds is not None
    assert math.isfinite(one.work_seconds)


def test_without_epochs_the_time_to_finish_is_unavailable() -> None:
    (one,) = finished(
        Horizon(10), make_prediction(8, epoch_seconds=None, reasons={"epoch_seconds": "images are not recorded"})
    )
    assert (one.wall_seconds, one.work_seconds, one.reason) == (None, None, "images are not recorded")


def test_what_the_command_line_says() -> None:
    assert horizon(None, None, None) is None
    assert horizon(90, 12.5, 1000) == Horizon(90, 12.5, 3_600_000)
    assert horizon(1, 0, None) == Horizon(1, 0, None)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((0, None, None), "--epochs is 0"),
        ((-1, None, None), "--epochs is -1"),
        ((10, -1.0, None), "--checkpoint-seconds is -1.0"),
        ((10, math.nan, None), "--checkpoint-seconds is nan"),
        ((10, None, 0.0), "--node-mtbf is 0.0"),
        ((10, None, math.inf), "--node-mtbf is inf"),
        ((None, 5.0, None), "--checkpoint-seconds says nothing without --epochs"),
        ((None, None, 5.0), "--node-mtbf says nothing without --epochs"),
    ],
)
def test_what_cannot_be_is_refused(given: tuple[int | None, float | None, float | None], said: str) -> None:
    with pytest.raises(RequestError) as refused:
        horizon(*given)
    assert said in str(refused.value)
