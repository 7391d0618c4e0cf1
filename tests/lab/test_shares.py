"""Real ranks of unlike speed: with shares that follow their speed nobody waits, and the step is as short as it can be.

Each image takes a rank a known time, whatever else the machine does. By ratio.
"""

from __future__ import annotations

import pytest

from lab.ranks import make_trial, run_ranks
from vitscale.analysis.quality.shares import time_saved
from vitscale.analysis.runs.figures import run_figures
from vitscale.analysis.summaries import summarise
from vitscale.analysis.time.breakdown import Breakdown, breakdown
from vitscale.analysis.trials import TrialFigures
from vitscale.store.results import Run
from vitscale.trial.model_spec import ModelSpec
from vitscale.trial.rank_batches import longest, shares

pytestmark = [pytest.mark.ranks, pytest.mark.alone]

SMALL = ModelSpec(name="vit-ti16", image_size=16, patch_size=8, layers=1, hidden_size=32, heads=2, mlp_size=64)
"""Next to no parameters, and next to no time of its own for an image."""
SPEEDS = (1.0, 0.5)
IMAGE_SECONDS = (0.01, 0.02)
MICRO_BATCH = 12
RUNS = {"equal": None, "by speed": shares(2 * MICRO_BATCH, SPEEDS)}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """The same 24 images in each step, in equal shares and in those that follow the speeds."""
    folder = tmp_path_factory.mktemp("unlike")
    found = {}
    for name, sizes in RUNS.items():
        trial = make_trial("ddp", 2, micro_batch=MICRO_BATCH, model=SMALL, steps=18, micro_batches=sizes)
        found[name] = run_ranks(trial, folder, injected={"image_seconds": IMAGE_SECONDS})
    return found


def result(run: Run) -> TrialFigures:
    return summarise(run.header.trial_id, run.header.trial, [run], combine_unlike=False)


def explained(run: Run) -> Breakdown:
    found = breakdown(run)
    assert found is not None
    return found


def test_shares_make_the_step_as_much_shorter_as_arithmetic_says(runs: dict[str, Run]) -> None:
    """12 images at half the speed take as long as 24, 16 and 8 as long as 16: 1.5 times as fast."""
    assert RUNS["by speed"] == (16, 8)
    expected = longest((MICRO_BATCH, MICRO_BATCH), SPEEDS) / longest((16, 8), SPEEDS)
    assert expected == 1.5
    seconds = {name: run_figures(run).step_seconds for name, run in runs.items()}
    assert seconds["equal"] is not None
    assert seconds["by speed"] is not None
    assert seconds["equal"] / seconds["by speed"] == pytest.approx(expected, rel=0.15)


def test_waiting_for_the_slow_rank_is_gone(runs: dict[str, Run]) -> None:
    equal, by_speed = explained(runs["equal"]), explained(runs["by speed"])
    late = MICRO_BATCH * (IMAGE_SECONDS[1] - IMAGE_SECONDS[0])
    assert equal.ranks[0].sum_of("wait") == pytest.approx(late, rel=0.2)
    assert equal.straggler is not None
    assert equal.straggler.rank == 1
    assert max(rank.sum_of("wait") for rank in by_speed.ranks) < 0.25 * late


@pytest.mark.parametrize("name", RUNS)
def test_the_speeds_are_found_again_from_either_run(runs: dict[str, Run], name: str) -> None:
    """So the advice after a run with equal shares is the shares that the other run has."""
    found = result(runs[name]).rank_speeds
    assert found is not None
    assert found == pytest.approx(SPEEDS, rel=0.1)
    expected = {"equal": 1 - 1 / 1.5, "by speed": 0.0}[name]
    assert time_saved(result(runs[name]).trial, found) == pytest.approx(expected, abs=0.05)


def test_every_image_of_a_step_is_counted_once_and_none_twice(runs: dict[str, Run]) -> None:
    for name, own in (("equal", (12, 12)), ("by speed", (16, 8))):
        full = [line.images for rank in runs[name].ranks for line in rank.steps if line.step == 0]
        assert tuple(full) == own
        assert [rank.epochs[0].images for rank in runs[name].ranks] == [
            sum(line.images for rank in runs[name].ranks for line in rank.steps if line.epoch == 0)
        ] * 2


def test_losses_are_those_of_equal_shares(runs: dict[str, Run]) -> None:
    equal, by_speed = (dict(run_figures(runs[name]).loss_by_step) for name in RUNS)
    assert equal.keys() == by_speed.keys()
    assert max(abs((equal[s] or 0) - (by_speed[s] or 1)) / (equal[s] or 1) for s in equal) < 1e-5
