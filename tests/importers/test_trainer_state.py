"""Hugging Face's trainer_state.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from importers.logs import imported
from vitscale.errors import RequestError, StoreError
from vitscale.importers.contents import ImportOptions
from vitscale.importers.importing import import_logs


def state(folder: Path, name: str = "trainer_state.json", **changes: Any) -> Path:
    """Of a run on 4 GPUs x 8 images x 2 micro-steps: 3 epochs of 100 steps at 0.5 s, and 30 s of evaluation."""
    end = {
        "epoch": 3.0,
        "step": 300,
        "train_loss": 1.2,
        "train_runtime": 180.0,
        "train_samples_per_second": 3 * 6400 / 180,
        "train_steps_per_second": 300 / 180,
    }
    content: dict[str, Any] = {
        "epoch": 3.0,
        "global_step": 300,
        "max_steps": 300,
        "num_train_epochs": 3,
        "train_batch_size": 8,
        "log_history": [
            {"epoch": 0.5, "loss": 2.0, "learning_rate": 1e-4, "step": 50},
            {"epoch": 1.0, "loss": 1.5, "step": 100},
            *({"epoch": k, "eval_loss": 1.0, "eval_accuracy": 0.2 * k, "eval_runtime": 10.0} for k in (1.0, 2.0, 3.0)),
            end,
        ],
    }
    path = folder / name
    path.write_text(json.dumps(content | changes))
    return path


def test_steps_epochs_and_losses(tmp_path: Path) -> None:
    found = imported(tmp_path, [state(tmp_path)], "trainer-state", gpus=4)
    ((_, trial),) = found.trials.items()
    assert trial.trial.train.micro_batch == 8
    assert trial.trial.train.grad_accum == 2
    assert trial.epoch_costs == pytest.approx([50.0])
    assert trial.step_seconds is not None
    assert trial.step_seconds.value == pytest.approx(0.5)
    assert trial.images_per_second is not None
    assert trial.images_per_second.value == pytest.approx(6400 / 50)
    assert [epoch.held_out_accuracy for epoch in trial.epochs] == pytest.approx([0.2, 0.4, 0.6])
    assert trial.epochs[0].train_loss == 1.5


def test_each_of_several_evaluations_is_taken_out(tmp_path: Path) -> None:
    history = json.loads(state(tmp_path).read_text())["log_history"]
    named = [{key.replace("eval_", "eval_real_"): value for key, value in entry.items()} for entry in history]
    several = [entry for pair in zip(history[:-1], named[:-1], strict=True) for entry in pair] + history[-1:]
    found = imported(tmp_path, [state(tmp_path, "two.json", log_history=several)], "trainer-state", gpus=4)
    (trial,) = found.trials.values()
    assert trial.epoch_costs == pytest.approx([(180 - 60) / 3])


def test_less_than_an_epoch_is_a_mean_step(tmp_path: Path) -> None:
    end = {"epoch": 0.4, "step": 40, "train_runtime": 20.0}
    path = state(tmp_path, log_history=[end], max_steps=40, num_train_epochs=1)
    found = imported(tmp_path, [path], "trainer-state", gpus=4)
    ((_, trial),) = found.trials.items()
    assert trial.step_seconds is not None
    assert trial.step_seconds.value == pytest.approx(0.5)


def test_the_gpus_must_be_told(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="--gpus"):
        import_logs([state(tmp_path)], "trainer-state", ImportOptions(), tmp_path / "results")


def test_gpus_that_do_not_fit_the_rates_are_noted(tmp_path: Path) -> None:
    found = imported(tmp_path, [state(tmp_path)], "trainer-state", gpus=3)
    assert found.study.imported is not None
    assert any("is --gpus right?" in note for note in found.study.imported.notes)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"log_history": [', "no JSON, or cut off"),
        ("[" * 100_000, "nested too deeply|no JSON"),
        ("[]", "no log_history"),
        ('{"log_history": [{"loss": 1}]}', "no training has ended"),
        ('{"log_history": [{"train_runtime": NaN, "step": 3}]}', "no training has ended"),
        ('{"log_history": [{"eval_runtime": 9}, {"train_runtime": 5, "step": 3}]}', "is no time"),
        ('{"log_history": [{"train_runtime": 5, "step": true}]}', "does not tell its steps"),
    ],
)
def test_what_is_no_finished_run_is_refused(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "state.json"
    path.write_text(text)
    with pytest.raises(StoreError, match=why):
        import_logs([path], "trainer-state", ImportOptions(gpus=2, micro_batch=8), tmp_path / "results")


def ended(epoch: float, steps: int, seconds: float, own: int | None = None) -> dict[str, Any]:
    """The entry of a call of `train` after `steps` steps in all, of which its rates have `own`."""
    rated = steps if own is None else own
    return {"epoch": epoch, "step": steps, "train_runtime": seconds, "train_samples_per_second": 64 * rated / seconds,
            "train_steps_per_second": rated / seconds, "train_loss": 1.0}  # fmt: skip


EVALUATION = {"epoch": 3.0, "eval_loss": 1.0, "eval_runtime": 60.0}


@pytest.mark.parametrize(
    ("history", "epochs"),
    [
        # Evaluated after training: not in its time.
        ([ended(3.0, 300, 150.0), EVALUATION], 3),
        # Trained for 3 epochs, evaluated, then for 3 more: the time is of the latter.
        ([ended(3.0, 300, 999.0), EVALUATION, ended(6.0, 600, 150.0, 300)], 3),
        # As older transformers write it, with rates of all steps.
        ([ended(3.0, 300, 999.0), EVALUATION, ended(6.0, 600, 150.0)], 3),
        # Continued from a checkpoint in another process: the rates alone tell.
        ([ended(6.0, 600, 150.0, 300)], 3),
        # Which had evaluated three times before, and evaluated three times.
        (
            [
                *({"epoch": k, "step": 100 * k, "eval_loss": 1.0, "eval_runtime": 20.0} for k in range(1, 7)),
                ended(6.0, 600, 210.0, 300),
            ],
            3,
        ),
        # With `include_num_input_tokens_seen` each entry has the time so far.
        ([*({"step": 10 * n, "train_runtime": 5.0 * n} for n in range(1, 30)), ended(3.0, 300, 150.0)], 3),
    ],
)
def test_only_what_the_last_training_did_is_in_its_time(
    tmp_path: Path, history: list[dict[str, Any]], epochs: int
) -> None:
    """100 steps of 0.5 s an epoch."""
    last = [entry for entry in history if "train_runtime" in entry][-1]
    changes = {"epoch": last["epoch"], "global_step": last["step"], "max_steps": last["step"]}
    changes |= {"num_train_epochs": int(last["epoch"]), "log_history": history}
    found = imported(tmp_path, [state(tmp_path, **changes)], "trainer-state", gpus=4)
    (trial,) = found.trials.values()
    assert trial.epoch_costs == pytest.approx([50.0])
    assert len(trial.epochs) == epochs
    assert trial.images_per_second is not None
    assert trial.images_per_second.value == pytest.approx(6400 / 50)


def test_gpus_of_each_file_make_a_curve(tmp_path: Path) -> None:
    """64 images a step on 4 GPUs x 8 x 2; on 8 GPUs twice as many, as fast."""
    history = [ended(3.0, 150, 75.0)]
    history[0]["train_samples_per_second"] *= 2
    last: dict[str, Any] = {"global_step": 150, "max_steps": 150, "log_history": history}
    paths = [state(tmp_path, "4.json"), state(tmp_path, "8.json", **last)]
    with pytest.raises(RequestError, match=r"Give them: --gpus 1,8 \(one for each file"):
        import_logs(paths, "trainer-state", ImportOptions(), tmp_path / "none")
    (curve,) = imported(tmp_path, paths, "trainer-state", each_gpus=(4, 8)).curves
    assert [point.speedup.value for point in curve.points if point.speedup] == pytest.approx([1.0, 2.0])
    alike = imported(tmp_path / "alike", paths, "trainer-state", gpus=4).study.imported
    assert alike is not None
    said = "with --gpus 4 the files accumulate 2 or 4 micro-steps: if their GPUs differ instead, say --gpus 1,8 (one"
    assert any(note.startswith(said) for note in alike.notes)
