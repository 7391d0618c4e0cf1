"""Trackers by their own clients, kept on this machine: what was sent is read back with what they bring."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from prediction_factory import resolved_study
from vitscale.analysis import Analysis, analyse
from vitscale.errors import RequestError
from vitscale.pages.sinks import send, tracked_runs


@pytest.fixture(scope="module")
def analysis() -> Analysis:
    """Two runs of one rank and one of two: 1,024 images in batches of 8 are 128 steps an epoch, three epochs."""
    return analyse(resolved_study({1: [0.1, 0.2], 2: [0.1]}))


def test_a_run_as_a_tracker_gets_it(analysis: Analysis) -> None:
    first, second, third = tracked_runs(analysis)
    assert len({first.key, second.key, third.key}) == 3
    assert [run.name.rpartition(", ")[2] for run in (first, second, third)] == ["repeat 1", "repeat 2", "repeat 1"]
    assert first.parameters["engine"] == "ddp"
    assert first.parameters["gpus"] == "1"
    assert third.parameters["gpus"] == "2"
    assert first.figures["step_seconds"] == pytest.approx(0.1)
    assert first.figures["images_per_second"] == pytest.approx(80.0)
    assert len(first.curves) == 384
    assert first.curves[1] == {"step_seconds": 0.1, "loss": pytest.approx(2.0 / 1.1)}
    # The first epoch's figures stand at its last step.
    assert first.curves[127]["held_out_accuracy"] == pytest.approx(0.35)
    assert "held_out_accuracy" not in first.curves[126]
    assert [run.key for run in tracked_runs(analysis)] == [first.key, second.key, third.key]


def test_a_name_is_no_path(analysis: Analysis) -> None:
    hostile = analyse(
        resolved_study({1: [0.1]}).model_copy(update={"study": analysis.study.model_copy(update={"name": "../../x"})})
    )
    assert next(tracked_runs(hostile)).study == "x"


def test_a_client_that_is_not_there_is_named(
    analysis: Analysis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(RequestError, match=r"the client of mlflow is not installed.*Run pip install .*\[track\]'"):
        send("mlflow", analysis, tmp_path)


def test_what_a_client_raises_is_one_message(
    analysis: Analysis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refusing:
        @staticmethod
        def MlflowClient() -> Any:
            raise ConnectionError("no such server\nand more")

    monkeypatch.setitem(sys.modules, "mlflow", Refusing)
    with pytest.raises(RequestError, match="mlflow does not take the runs: no such server"):
        send("mlflow", analysis, tmp_path)


def test_tensorboard_reads_what_was_sent(analysis: Analysis, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert send("tensorboard", analysis, tmp_path) == (3, 0)
    first = next(tracked_runs(analysis))
    events = EventAccumulator(str(tmp_path / first.study / first.key), size_guidance={"scalars": 0})
    events.Reload()
    loss = events.Scalars("loss")
    assert [(point.step, point.value) for point in loss[:2]] == [(0, 2.0), (1, pytest.approx(2.0 / 1.1))]
    assert len(loss) == 384
    assert events.Scalars("summary/images_per_second")[0].value == pytest.approx(80.0)
    assert send("tensorboard", analysis, tmp_path) == (0, 3)


def test_mlflow_reads_what_was_sent(analysis: Analysis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri(f"file:{tmp_path}/mlruns")
    assert send("mlflow", analysis, tmp_path) == (3, 0)
    assert send("mlflow", analysis, tmp_path) == (0, 3)
    client = mlflow.MlflowClient()
    runs = client.search_runs([client.get_experiment_by_name("example").experiment_id])
    by_key = {run.data.tags["vitscale.run"]: run for run in runs}
    first = next(tracked_runs(analysis))
    own = by_key[first.key]
    assert own.info.status == "FINISHED"
    assert own.data.params["engine"] == "ddp"
    assert own.data.metrics["images_per_second"] == pytest.approx(80.0)
    history = client.get_metric_history(own.info.run_id, "curve/loss")
    assert len(history) == 384
    assert min(history, key=lambda point: point.step).value == 2.0


def test_wandb_keeps_what_was_sent_while_offline(
    analysis: Analysis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert send("wandb", analysis, tmp_path) == (3, 0)
    kept = sorted(path.name for path in (tmp_path / "wandb").glob("offline-run-*"))
    assert {name.rpartition("-")[2] for name in kept} == {run.key for run in tracked_runs(analysis)}
    assert all(next((tmp_path / "wandb" / name).glob("*.wandb")).stat().st_size > 10_000 for name in kept)
