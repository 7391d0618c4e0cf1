"""A script without a Probe that leaves a trainer_state.json or traces: what these tell is known, the rest as it was."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest

from importers.test_traces import job_of, late_rank, write
from importers.test_train_logs import STEPS, timm
from importers.test_trainer_state import state
from kineto_traces import A100
from results_factory import make_curve, make_results, make_run, make_trial, write_results
from vitscale import analysis, store
from vitscale.importers import left_behind
from vitscale.importers.left_behind import take_in
from vitscale.store.records import EpochLine, ModelLine, RankRecord
from vitscale.store.results import Results
from vitscale.trial.trial import Trial

NOTHING = dict.fromkeys(
    ("steps", "images", "train_loss", "train_accuracy", "held_out_loss", "held_out_accuracy", "peak_bytes")
)
UNKNOWN = dict.fromkeys(("parameters", "gradient_dtype", "synchronised_timing", "train_samples", "held_out_samples"))
TRIAL = make_trial("script", 4, script="/home/ada/train.py", arguments=("--output_dir", "{output}"))
WHOLE_SECONDS = 300.0


def scripted(trial: Trial = TRIAL) -> Results:
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
        for rank in range(trial.world.size)
    ]
    return make_results([(make_curve([trial]), [trial])], [make_run(trial, ranks)])


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return scripted_run(tmp_path, TRIAL)


def scripted_run(where: Path, trial: Trial) -> Path:
    """The folder of its run."""
    write_results(scripted(trial), where / "results")
    (folder,) = (where / "results" / "runs").iterdir()
    (folder / "log.txt").write_text("training\n")
    (folder / "output" / "checkpoint-300").mkdir(parents=True)
    return folder


def epoch_seconds(run: Path) -> list[float]:
    (result,) = analysis.analyse(store.load(run.parent.parent)).trials.values()
    return [figures.epoch_seconds or 0.0 for figures in result.run_figures]


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


def test_the_lines_of_a_known_loop_are_its_steps(run: Path) -> None:
    """Of four ranks, two on each of two hosts, of which each has one that prints."""
    lines = [line.replace("total 8", "total 4") for line in timm()]
    (run / "log.txt").write_text("\n".join(f"[rank{rank}]: {line}" for line in lines for rank in (0, 2)) + "\n")
    take_in(run, TRIAL)
    (result,) = analysis.analyse(store.load(run.parent.parent)).trials.values()
    (figures,) = result.run_figures
    assert figures.timed_steps == len(STEPS)
    assert figures.step_seconds == pytest.approx(sum(STEPS) / len(STEPS), rel=1e-3)
    assert result.images_per_second is not None
    assert result.images_per_second.value == pytest.approx(
        4 * TRIAL.train.micro_batch * len(STEPS) / sum(STEPS), rel=1e-3
    )
    assert figures.elapsed_epoch_seconds is None
    (told,) = store.load(run.parent.parent).runs
    assert [rank.broken for rank in told.ranks] == [()] * 4
    assert "vitscale: log.txt: these steps stand for the time" in (run / "log.txt").read_text()


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (timm(), "its loop tells of 8 ranks, and these are 4"),
        (timm()[2:3], "its loop tells of no step after its first ones"),
    ],
)
def test_lines_that_cannot_be_its_steps_are_not_used(run: Path, lines: list[str], why: str) -> None:
    (run / "log.txt").write_text("\n".join(lines) + "\n")
    take_in(run, TRIAL)
    assert epoch_seconds(run) == [WHOLE_SECONDS]
    assert f"vitscale: log.txt was not used: {why}" in (run / "log.txt").read_text()


def test_a_state_goes_before_lines(run: Path) -> None:
    (run / "log.txt").write_text("\n".join(line.replace("total 8", "total 4") for line in timm()) + "\n")
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


# --- traces ----------------------------------------------------------------------------------------------------------

PAIR = make_trial("script", 2, script="/home/ada/train.py", arguments=("{output}",))


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    return scripted_run(tmp_path, PAIR)


def test_waits_that_are_known_come_out_beside_the_time_as_a_whole(pair: Path) -> None:
    """Rank 1 is made late by so much in each step of a real trace: rank 0 waits for it, and rank 1 for nobody."""
    job = job_of(A100)
    second, late = late_rank(job, 1)
    write(pair / "output", "a.pt.trace.json.gz", job)
    write(pair / "output" / "checkpoint-300", "b.json.gz", second)
    take_in(pair, PAIR)
    results = store.load(pair.parent.parent)
    analysed = analysis.analyse(results)
    assert "few-steps" not in {finding.kind for finding in analysed.findings}
    (trial,) = analysed.trials.values()
    assert trial.breakdown is not None
    assert trial.run_figures[0].epoch_seconds == WHOLE_SECONDS
    first, other = trial.breakdown.ranks
    steps = [{line.step for line in rank.explained} for rank in results.runs[0].ranks]
    whole = steps[0] & steps[1] & late.keys()
    assert first.parts["wait"] is not None
    assert 0 < first.parts["wait"] <= sum(late[step] for step in whole) / trial.breakdown.steps + 1e-9
    assert other.parts["wait"] == pytest.approx(0.0, abs=1e-6)
    assert "a.pt.trace.json.gz explains" in (pair / "log.txt").read_text()


def test_of_one_ranks_trace_the_exposed_communication_is_known(pair: Path) -> None:
    """Most scripts profile rank 0 alone: what waits and what is sent cannot be told apart there, nor be taken for 0."""
    write(pair / "output", "a.json.gz", job_of(A100))
    take_in(pair, PAIR)
    (trial,) = analysis.analyse(store.load(pair.parent.parent)).trials.values()
    assert trial.breakdown is not None
    (rank,) = trial.breakdown.ranks
    assert rank.exposed_seconds is not None
    assert rank.exposed_seconds > 0
    assert (rank.parts["wait"], rank.parts["wire"]) == (None, None)


def test_the_newest_trace_of_a_rank_counts_and_the_others_are_told(pair: Path) -> None:
    job = job_of(A100)
    old = {**job, "traceEvents": [event for event in job["traceEvents"] if "ProfilerStep" not in event["name"]]}
    os.utime(write(pair / "output", "old.json.gz", old), (1, 1))
    write(pair / "output", "new.json.gz", job)
    take_in(pair, PAIR)
    said = (pair / "log.txt").read_text()
    assert "output/new.json.gz explains" in said
    assert "told by the profiler's own marks" in said
    assert "output/old.json.gz was not used: rank 0 has a newer trace" in said


def test_traces_that_cannot_be_used_are_told_and_change_nothing(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu = {"schemaVersion": 1, "traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "a", "ts": 1, "dur": 2}]}
    (pair / "output" / "cpu.json").write_text(json.dumps(on_cpu))
    (pair / "output" / "cut.json.gz").write_bytes(gzip.compress(b'{"traceEvents": [{"ph": "X"')[:-9])
    (pair / "output" / "metrics.json").write_text('{"loss": 1.0}')
    third, _ = late_rank(job_of(A100), 2)
    write(pair / "output", "third.json.gz", third)
    before = (pair / "rank-0.jsonl").read_bytes()
    take_in(pair, PAIR)
    assert (pair / "rank-0.jsonl").read_bytes() == before
    said = (pair / "log.txt").read_text()
    assert "output/cpu.json was not used: nothing in " in said
    assert "output/cut.json.gz was not used: " in said
    assert "output/third.json.gz was not used: it is of rank 2 of 2" in said
    assert "metrics.json" not in said

    monkeypatch.setattr(left_behind, "_MOST_TRACE_BYTES", 1000)
    write(pair / "output", "large.json.gz", job_of(A100))
    take_in(pair, PAIR)
    assert (pair / "rank-0.jsonl").read_bytes() == before
    assert "large.json.gz was not used: with newer ones it is more than" in (pair / "log.txt").read_text()
