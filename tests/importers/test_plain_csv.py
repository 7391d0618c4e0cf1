"""A plain table of measured times."""

from __future__ import annotations

from pathlib import Path

import pytest

from importers.logs import imported
from vitscale.errors import RequestError
from vitscale.importers import Options, import_logs


def table(folder: Path, text: str) -> Path:
    path = folder / "times.csv"
    path.write_text(text)
    return path


def test_steps_become_epochs_where_the_dataset_is_known(tmp_path: Path) -> None:
    path = table(tmp_path, "gpus,step_seconds,micro_batch\n1,0.20,8\n2,0.25,8\n4,0.25,8\n")
    found = imported(tmp_path, [path], "csv", train_samples=3200)
    (curve,) = found.curves
    assert [point.efficiency.centre for point in curve.points if point.efficiency] == pytest.approx([1.0, 0.8, 0.8])


def test_rates_and_epochs(tmp_path: Path) -> None:
    path = table(tmp_path, "gpus,images_per_second,epoch_seconds,micro_batch,series\n4,160,,8,rates\n4,,99,8,epochs\n")
    found = imported(tmp_path, [path], "csv", train_samples=3200)
    by_name = {curve.name: found.trials[curve.points[0].trial_id] for curve in found.curves}
    rates, epochs = by_name["rates"], by_name["epochs"]
    assert rates.step_seconds is not None
    assert rates.step_seconds.centre == pytest.approx(32 / 160)
    assert rates.images_per_second is not None
    assert rates.images_per_second.centre == pytest.approx(160)
    assert epochs.epoch_costs == [99.0]
    assert epochs.step_seconds is not None
    assert epochs.step_seconds.centre == pytest.approx(99 / 100)
    assert "some-ranks" not in {verdict.kind for verdict in found.verdicts}


def test_rows_of_one_run_are_its_steps_and_others_are_repeats(tmp_path: Path) -> None:
    rows = "".join(f"2,8,{run},{seconds}\n" for run in ("a", "b", "c") for seconds in (0.1, 0.2, 0.4))
    found = imported(tmp_path, [table(tmp_path, "gpus,micro_batch,run,step_seconds\n" + rows)], "csv")
    ((_, trial),) = found.trials.items()
    assert [run.step_seconds for run in trial.runs] == pytest.approx([0.7 / 3] * 3)


def test_engines_and_hosts(tmp_path: Path) -> None:
    head = "gpus,nodes,micro_batch,engine,zero_stage,precision,step_seconds\n"
    text = f"{head}4,2,8,deepspeed,3,bf16,0.2\n4,2,8,ddp,,bf16,0.3\n"
    found = imported(tmp_path, [table(tmp_path, text)], "csv")
    worlds = {(t.trial.train.engine, t.trial.train.zero_stage, t.trial.world.nodes) for t in found.trials.values()}
    assert worlds == {("deepspeed", 3, 2), ("ddp", 0, 2)}
    assert {t.trial.train.precision for t in found.trials.values()} == {"bf16"}
    assert sorted(curve.name.split(",")[0] for curve in found.curves) == ["ddp", "deepspeed ZeRO-3"]


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ("0,8,1", "'0' is no whole number from 1"),
        ("2.5,8,1", "'2.5' is no whole number"),
        ("2,8,nan", "'nan' is no number"),
        ("2,8,-1", "'-1' is no time"),
        ("2,8,", "none of step_seconds"),
        ("2,8", "2 cells where the header has 3"),
    ],
)
def test_broken_rows_are_named(tmp_path: Path, row: str, why: str) -> None:
    found = imported(tmp_path, [table(tmp_path, f"gpus,micro_batch,step_seconds\n{row}\n2,8,0.5\n")], "csv")
    assert len(found.trials) == 1
    assert any(why in problem and "line 2" in problem for problem in found.problems)


def test_no_column_of_times(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no column of times"):
        import_logs([table(tmp_path, "gpus,seconds\n1,2\n")], "csv", Options(), tmp_path / "results")


def test_without_a_micro_batch_a_rate_stands_and_a_step_is_of_an_image(tmp_path: Path) -> None:
    found = imported(tmp_path, [table(tmp_path, "gpus,images_per_second\n1,100\n2,180\n")], "csv")
    rates = [trial.images_per_second.centre for trial in found.trials.values() if trial.images_per_second]
    assert rates == pytest.approx([100.0, 180.0])
    timed = imported(tmp_path / "steps", [table(tmp_path, "gpus,step_seconds\n1,0.5\n")], "csv", train_samples=100)
    ((_, trial),) = timed.trials.items()
    assert trial.step_seconds is not None
    assert trial.images_per_second is None
    assert trial.epoch_seconds is None
