"""Real ranks that go wrong: one outcome each, with the true reason; the study goes on; no process is left."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from driving import processes_naming, vitscale
from vitscale import store
from vitscale.store.results import Outcome

pytestmark = [pytest.mark.long(12), pytest.mark.ranks]

STUDY = """
name = "faults"
[model]
factory = "misbehaving:well"
image_size = 8
[data]
name = "digits"
[train]
engine = "ddp"
precision = "fp32"
micro_batch = 32
[scaling]
gpus = [2]
[sweep]
"model.factory" = {factories}
[measure]
steps = 40
warmup_steps = 1
repeats = 1
hang_seconds = 30
evaluate = false
"""
STUDIES = (
    ("raises", "out_of_memory", "well"),
    ("hangs", "exits_early"),
    ("stuck_in_a_collective", "killed", "loses_link"),
)
"""At work at the same time, so that what hangs is waited for once. Each trial is in one of them alone: the same trial
twice at a time would meet itself at its port."""


def run_faults(where: Path, faults: Sequence[str], *arguments: str) -> Path:
    """A study of models that go wrong so; returns its folder."""
    where.mkdir()
    (where / "study.toml").write_text(STUDY.format(factories=[f"misbehaving:{fault}" for fault in faults]))
    shutil.copy(Path(__file__).with_name("misbehaving.py"), where)
    answer = vitscale("run", "study.toml", "-o", "results", *arguments, cwd=where)
    assert answer.returncode == 1, answer.stdout + answer.stderr
    assert "Traceback" not in answer.stderr
    (where / "stdout").write_text(answer.stdout)
    return where


@pytest.fixture(scope="module")
def studies(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The folder of each."""
    folder = tmp_path_factory.mktemp("faults")
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda faults: run_faults(folder / faults[0], faults), STUDIES))


@pytest.fixture(scope="module")
def study(studies: list[Path]) -> Path:
    """In which nothing hangs."""
    return studies[0]


@pytest.fixture(scope="module")
def outcomes(studies: list[Path]) -> dict[str, Outcome]:
    return {
        str(run.header.trial.model.factory).partition(":")[2]: run.outcome
        for study in studies
        for run in store.load(study / "results").runs
    }


def test_each_run_has_one_outcome_and_the_study_went_on(outcomes: dict[str, Outcome]) -> None:
    assert {name: outcome.kind for name, outcome in outcomes.items()} == {
        "raises": "failed",
        "out_of_memory": "oom",
        "exits_early": "failed",
        "killed": "failed",
        "hangs": "hang",
        "stuck_in_a_collective": "hang",
        "loses_link": "failed",
        "well": "completed",
    }


def test_the_guilty_rank_and_its_traceback_are_told(outcomes: dict[str, Outcome]) -> None:
    raised = outcomes["raises"]
    assert raised.reason == "rank 1 raised ValueError: the sensor on rank 1 reads nonsense"
    assert raised.rank == 1
    assert "misbehaving.py" in raised.detail
    assert outcomes["out_of_memory"].rank == 1
    killed = outcomes["killed"]
    assert (killed.rank, killed.reason) == (1, "rank 1 was ended by SIGKILL without a word")
    assert "rank 1" in outcomes["exits_early"].reason or outcomes["exits_early"].rank == 1
    assert "30 s" in outcomes["hangs"].reason


def test_a_hang_is_told_by_the_collectives_that_each_rank_has_entered(outcomes: dict[str, Outcome]) -> None:
    """gloo's own flight recorder: a rank in no collective, and two ranks that wait for each other in two groups."""
    hangs = outcomes["hangs"]
    assert hangs.rank == 1
    entered = r"rank 1 has not entered all_reduce number \d+ of group .*\([\d,]+ elements?\), in which rank 0 waits"
    assert re.search(entered + "; it stands in forward of step 3$", hangs.reason), hangs.reason
    stuck = outcomes["stuck_in_a_collective"]
    assert stuck.rank is None
    assert "ranks wait for each other, " in stuck.reason
    assert re.search(r"rank 0 in all_reduce number \d+ of group .* for rank 1", stuck.reason), stuck.reason
    assert re.search(r"rank 1 in all_reduce number 1 of group .*\(1 element\) for rank 0", stuck.reason), stuck.reason
    assert "they call collectives in unlike orders" in stuck.reason


def test_a_rank_that_nccl_s_watchdog_ends_has_its_words_and_another_try(studies: list[Path]) -> None:
    (run,) = [
        run
        for study in studies
        for run in store.load(study / "results").runs
        if run.header.trial.model.factory == "misbehaving:loses_link"
    ]
    assert (run.outcome.rank, run.outcome.transient, run.header.attempt) == (1, True, 1)
    assert run.outcome.reason == (
        "NCCL remote error (ncclRemoteError) on rank 1: socketProgress: Connection closed by remote peer node2<4711> "
        "(a link has failed, or another rank is gone)"
    )


def test_a_launcher_of_others_comes_to_the_same(tmp_path: Path, outcomes: dict[str, Outcome]) -> None:
    """Of `local` all faults are tried above. These ranks import torch anew: long on a busy machine, and no hang."""
    arguments = ("--launcher", "torchrun", "measure.hang_seconds=300")
    (run,) = store.load(run_faults(tmp_path / "study", ["killed"], *arguments) / "results").runs
    ours = outcomes["killed"]
    assert (run.outcome.kind, run.outcome.rank, run.outcome.reason) == (ours.kind, ours.rank, ours.reason)


def test_no_process_is_left(studies: list[Path]) -> None:
    assert [processes_naming(study / "results") for study in studies] == [[]] * 3


def test_the_report_lists_failures_with_their_reasons(study: Path, outcomes: dict[str, Outcome]) -> None:
    answer = vitscale("report", study / "results", "--format", "json")
    trials = {t["model"].partition(":")[2]: t for t in json.loads(answer.stdout)["trials"]}
    assert trials["raises"]["outcome"] == "failed"
    assert "nonsense" in trials["raises"]["reason"]
    assert trials["raises"]["step_seconds"] is None
    assert trials["well"]["outcome"] == "completed"
    assert "failed: " in (study / "stdout").read_text()


def test_failed_runs_are_kept_unless_a_retry_is_asked_for(study: Path, outcomes: dict[str, Outcome]) -> None:
    again = vitscale("run", "study.toml", "-o", "results", cwd=study)
    assert again.returncode == 1
    assert "Nothing to do" in again.stdout
