"""Figures and verdicts of runs that were imported: what their files do not tell is not asked for."""

from __future__ import annotations

import pytest

from results_factory import make_curve, make_rank, make_results, make_run, make_trial, steady_run
from vitscale.analysis import analyse
from vitscale.analysis.runs.figures import run_figures
from vitscale.analysis.scaling import curve_name
from vitscale.store.results import Imported, ImportedFile, Results, Run, StudyImport
from vitscale.trial.trial import Trial

FILE = ImportedFile(name="a.log", sha256="0" * 64)


def other(trial: Trial, origin: str = "north") -> Trial:
    """The trial as an import has it."""
    window = trial.window.model_copy(update={"warmup_steps": 0, "explain": False})
    train = trial.train.model_copy(update={"engine": "unknown"})
    return trial.model_copy(update={"origin": origin, "window": window, "train": train})


def imported(run: Run, *, ranks: tuple[int, ...], of_the_run: bool = False) -> Run:
    """The run as an import has it: these ranks alone, and no start-up."""
    told = Imported(log_format="epochs", files=(FILE,), ranks=ranks, of_the_run=of_the_run)
    kept = [rank.model_copy(update={"phases": ()}) for rank in run.ranks if rank.rank in ranks]
    return run.model_copy(update={"header": run.header.model_copy(update={"imported": told}), "ranks": tuple(kept)})


def without_steps(run: Run) -> Run:
    ranks = [rank.model_copy(update={"steps": ()}) for rank in run.ranks]
    return run.model_copy(update={"ranks": tuple(ranks)})


def test_one_rank_of_four_is_enough_and_others_take_as_many_images() -> None:
    run = imported(steady_run(other(make_trial(gpus=4)), 0.1), ranks=(0,))
    found = run_figures(run)
    assert found.step_seconds == pytest.approx(0.1)
    assert found.pace.source == "steps"
    assert found.images_per_second == pytest.approx(4 * 8 / 0.1)
    assert found.notes == ()
    own = steady_run(make_trial(gpus=4), 0.1)
    assert run_figures(own.model_copy(update={"ranks": own.ranks[:1]})).step_seconds is None


def test_steps_from_epochs() -> None:
    trial = other(make_trial(gpus=4, epochs=3))
    found = run_figures(imported(without_steps(steady_run(trial, 0.1)), ranks=(0, 1, 2, 3)))
    # 1,024 images on 4 x 8: 32 steps of 0.1 s.
    assert found.epoch_seconds == pytest.approx(3.2)
    assert found.step_seconds == pytest.approx(0.1)
    assert found.pace.source == "epochs"
    assert found.images_per_second == pytest.approx(1024 / 3.2)
    assert found.timed_steps == 0
    assert found.notes == ()


def test_epochs_without_the_size_of_the_dataset() -> None:
    trial = other(make_trial(gpus=2, epochs=3))
    run = without_steps(steady_run(trial, 0.1))
    ranks = [
        rank.model_copy(update={"model": rank.model.model_copy(update={"train_samples": None})})
        for rank in run.ranks
        if rank.model
    ]
    found = run_figures(imported(run.model_copy(update={"ranks": tuple(ranks)}), ranks=(0, 1)))
    assert found.epoch_seconds == pytest.approx(6.4)
    assert found.step_seconds is None
    assert found.images_per_second is None
    assert found.pace.source == "epochs"


def test_an_epoch_that_one_rank_lacks_has_no_seconds() -> None:
    trial = other(make_trial(gpus=2, epochs=3))
    run = without_steps(steady_run(trial, 0.1))
    lacking = run.ranks[1].model_copy(update={"epochs": run.ranks[1].epochs[::2]})
    found = run_figures(imported(run.model_copy(update={"ranks": (run.ranks[0], lacking)}), ranks=(0, 1)))
    assert [epoch.elapsed_seconds for epoch in found.epochs] == [pytest.approx(6.4), None, pytest.approx(6.4)]
    assert any("epoch 1: left out" in note for note in found.notes)


def test_a_loss_that_is_not_told_is_not_a_loss_that_is_not_finite() -> None:
    trial = other(make_trial())
    rank = make_rank(trial, 0, [0.1] * 20, losses=[None] * 20)
    assert run_figures(imported(make_run(trial, [rank]), ranks=(0,))).loss_by_step == ()
    assert len(run_figures(make_run(make_trial(), [rank])).loss_by_step) == 20


@pytest.mark.parametrize(
    ("told", "known"),
    [
        ([None] * 20, []),
        ([2.0, *[None] * 9] * 2, [2.0, 2.0]),
        ([None, *[2.0] * 19], [2.0] * 19),
        ([2.0] * 15 + [None] * 5, [2.0] * 15 + [None] * 5),
    ],
    ids=["never", "every tenth", "not at first", "not finite from a step on"],
)
def test_a_script_tells_the_losses_that_it_likes(told: list[float | None], known: list[float | None]) -> None:
    trial = make_trial(engine="script", script="train.py")
    found = run_figures(make_run(trial, [make_rank(trial, 0, [0.1] * 20, losses=told)]))
    assert [loss for _, loss in found.loss_by_step] == known


def study(*runs: Run, **told: object) -> Results:
    trials = list({run.header.trial_id: run.header.trial for run in runs}.values())
    results = make_results([(make_curve(trials), trials)], list(runs), repeats=1)
    about = StudyImport(log_format="epochs", files=(FILE,), options={}, notes=("fp32 is assumed",), problems=())
    return results.model_copy(update={"study": results.study.model_copy(update={"imported": about})})


def test_verdicts_ask_for_nothing_that_a_log_cannot_tell() -> None:
    runs = []
    for gpus in (2, 4):
        trial = other(make_trial(gpus=gpus))
        runs.append(imported(without_steps(steady_run(trial, 0.1)), ranks=tuple(range(gpus))))
    found = {one.kind: one for one in analyse(study(*runs)).findings}
    assert set(found) == {"too-few-repeats", "baseline-missing", "imported", "steps-from-epochs"}
    assert "fp32 is assumed" in found["imported"].message
    assert "a.log" in found["imported"].message
    assert "Import" in found["too-few-repeats"].advice
    assert "Import" in found["baseline-missing"].advice


def test_some_ranks_are_told_unless_the_times_are_the_runs_own() -> None:
    run = steady_run(other(make_trial(gpus=2)), 0.1)
    for whole in (True, False):
        kinds = [one.kind for one in analyse(study(imported(run, ranks=(0,), of_the_run=whole))).findings]
        assert ("some-ranks" in kinds) is not whole


def test_names_of_imported_curves() -> None:
    labels = {"cluster": "north", "layout": "one-gpu-per-node", "data.name": "cifar10", "train.micro_batch": 16}
    assert curve_name(labels, other(make_trial())) == "north, one GPU per node, cifar10, micro-batch 16"
    assert curve_name({}, other(make_trial())) == "unknown engine"
    assert curve_name({"train.engine": "unknown"}, make_trial()) == "unknown engine"
    weak = {"scaling.fraction_per_gpu": 0.1, "series": "A"}
    assert curve_name(weak, other(make_trial())) == "0.1 of the data per GPU, A"
