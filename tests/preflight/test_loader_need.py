"""What a model needs of its loader: by a stored run where there is one, by arithmetic where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from check_factory import checked
from results_factory import failed_run, make_curve, make_results, make_trial, steady_run, write_results
from vitscale.preflight.running import loader_need
from vitscale.trial.model_cost import training_flops
from vitscale.trial.model_spec import resolve


def test_the_fastest_rank_of_stored_runs_of_the_same_model(tmp_path: Path) -> None:
    one, two, other = make_trial(gpus=1), make_trial(gpus=2), make_trial(gpus=1, model="vit-s16")
    runs = [steady_run(one, 0.5), steady_run(two, 1.0), steady_run(other, 0.01), failed_run(one, "oom", "", repeat=1)]
    trials = (one, two, other)
    write_results(make_results([(make_curve(trials), trials)], runs), tmp_path)
    need = loader_need(two, [checked(0)], tmp_path)
    assert need is not None
    # 8 images in half a second by one rank; the two do 16 in a second, 8 each.
    assert (need.source, round(need.images_per_second, 6)) == ("run", 16.0)


def test_without_a_run_the_matmul_rate_over_the_models_flops(tmp_path: Path) -> None:
    trial = make_trial()
    trial = trial.model_copy(update={"model": resolve(trial.model, 10)})
    need = loader_need(trial, [checked(0, pace=100.0), checked(1, pace=100.0)], tmp_path / "empty")
    assert need is not None
    assert need.source == "arithmetic"
    assert need.images_per_second == pytest.approx(1e11 / (training_flops(trial.model) or 0))


def test_without_either_it_is_unknown() -> None:
    assert loader_need(make_trial(), [checked(0, matmul=None)], None) is None
