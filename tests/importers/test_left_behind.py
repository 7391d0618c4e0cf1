"""A script without a Probe that leaves a trainer_state.json: its epochs are known, and nothing else is touched."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from importers.test_trainer_state import state
from results_factory import make_curve, make_results, make_run, make_trial, write_results
from vitscale import analysis, store
from vitscale.importers.trainer_state import take_in
from vitscale.store.records import EpochLine, ModelLine, RankRecord
from vitscale.store.results import Results

NOTHING = dict.fromkeys(
    ("steps", "images", "train_loss", "train_accuracy", "held_out_loss", "held_out_accuracy", "peak_bytes")
)
UNKNOWN = dict.fromkeys(("parameters", "gradient_dtype", "synchronised_timing", "train_samples", "held_out_samples"))
TRIAL = make_trial("script", 4, script="/home/ada/train.py", arguments=("--output_dir", "{output}"))
WHOLE_SECONDS = 300.0


def scripted() -> Results:
    """As a rank writes it whose script told nothing."""
    ranks = [
        RankRecord(
            rank=rank,
            start=None,
            model=ModelLine.model_validate(UNKNOWN | {"dataset_fingerprint": "script"}),
            phases=(),
            steps=(),
            epochs=(EpochLine.model_validate(NOTHING | {"epoch": 0, "seconds": WHOLE_SECONDS, "complete": True}),),
            error=None,
            ended=True,
            broken=(),
        )
        for rank in range(4)
    ]
    return make_results([(make_curve([TRIAL]), [TRIAL])], [make_run(TRIAL, ranks)])


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write_results(scripted(), tmp_path / "results")
    (folder,) = (tmp_path / "results" / "runs").iterdir()
    (folder / "log.txt").write_text("training\n")
    (folder / "output" / "checkpoint-300").mkdir(parents=True)
    return folder


def epoch_seconds(run: Path) -> list[float]:
    (result,) = analysis.analyse(store.load(run.parent.parent)).trials.values()
    return [figures.epoch_seconds or 0.0 for figures in result.runs]


def test_its_epochs_stand_for_the_whole_time(run: Path) -> None:
    """180 s less 30 s of evaluation are three epochs of 50 s, of 6,400 images."""
    assert epoch_seconds(run) == [WHOLE_SECONDS]
    state(run / "output" / "checkpoint-300")
    take_in(run, TRIAL)
    assert epoch_seconds(run) == pytest.approx([50.0])
    (told,) = store.load(run.parent.parent).runs
    assert [rank.broken for rank in told.ranks] == [()] * 4
    assert [line.held_out_accuracy for line in told.ranks[3].epochs] == pytest.approx([0.2, 0.4, 0.6])
    assert {rank.model.train_samples for rank in told.ranks if rank.model} == {6400}
    assert all(rank.ended for rank in told.ranks)
    assert "checkpoint-300/trainer_state.json stands for the time" in (run / "log.txt").read_text()


def test_the_newest_state_counts(run: Path) -> None:
    old = state(run / "output", log_history=[{"epoch": 1.0, "step": 100, "train_runtime": 9.0}])
    os.utime(old, (1, 1))
    state(run / "output" / "checkpoint-300")
    take_in(run, TRIAL)
    assert epoch_seconds(run) == pytest.approx([50.0])


def test_what_cannot_be_used_is_told_and_changes_nothing(run: Path) -> None:
    state(run / "output", log_history=[])
    before = (run / "rank-0.jsonl").read_bytes()
    take_in(run, TRIAL)
    assert (run / "rank-0.jsonl").read_bytes() == before
    assert "was not used: trainer_state.json: no training has ended in it" in (run / "log.txt").read_text()


@pytest.mark.parametrize("place", ["file", "folder", "output"])
def test_no_link_is_followed(run: Path, tmp_path: Path, place: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    there = state(elsewhere)
    if place == "file":
        (run / "output" / "trainer_state.json").symlink_to(there)
    elif place == "folder":
        (run / "output" / "more").symlink_to(elsewhere)
    else:
        (run / "output" / "checkpoint-300").rmdir()
        (run / "output").rmdir()
        (run / "output").symlink_to(elsewhere)
    before = (run / "rank-0.jsonl").read_bytes()
    take_in(run, TRIAL)
    assert (run / "rank-0.jsonl").read_bytes() == before


def test_what_a_probe_told_stays(run: Path) -> None:
    state(run / "output")
    with (run / "rank-0.jsonl").open("a") as file:
        file.write('{"kind":"step","step":0,"epoch":0,"seconds":0.1,"images":8,"loss":null,"warmup":false}\n')
    before = (run / "rank-0.jsonl").read_bytes()
    take_in(run, TRIAL)
    assert (run / "rank-0.jsonl").read_bytes() == before
