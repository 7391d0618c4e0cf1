"""A job whose last run ended while another call planned is closed by that call, and asks nothing of Slurm."""

from __future__ import annotations

from pathlib import Path

from vitscale.runner.batch_file import BatchTask, JobFile, read_job
from vitscale.runner.batch_jobs import submit_and_watch
from vitscale.runner.one_run import RunContext
from vitscale.schedulers.slurm_cluster import SlurmCluster
from vitscale.store import write_outcome
from vitscale.store.results import Outcome, StudyRecord
from vitscale.study.sections import LaunchSection, MeasureSection, SlurmSection


def submitted(results: Path, name: str, trial_id: str) -> None:
    JobFile(
        name=name,
        job_id="7",
        array=False,
        tasks=tuple(BatchTask(trial_id=trial_id, repeat=repeat, attempt=0) for repeat in (0, 1)),
        study_folder=str(results),
        launch=LaunchSection(),
        slurm=SlurmSection(),
        measure=MeasureSection(),
    ).write(results)


def complete(results: Path, trial_id: str, repeat: int) -> None:
    folder = results / "runs" / f"{trial_id}-r{repeat}-a0"
    folder.mkdir(parents=True)
    write_outcome(folder, Outcome(kind="completed", reason="", started_unix_seconds=1.0, wall_seconds=1.0))


def test_what_ended_since_the_last_look_is_closed_and_the_runs_of_others_stay_open(tmp_path: Path) -> None:
    ended, half = "vitscale-1x1-aaaaaaaa", "vitscale-2x1-bbbbbbbb"
    submitted(tmp_path, ended, "0" * 12)
    submitted(tmp_path, half, "1" * 12)
    for trial_id, repeat in (("0" * 12, 0), ("0" * 12, 1), ("1" * 12, 0)):
        complete(tmp_path, trial_id, repeat)
    record = StudyRecord(name="s", text="", repeats=2, curves=(), trials={}, versions={}, dataset_fingerprints={})
    context = RunContext(record, MeasureSection(), LaunchSection(), SlurmSection(), tmp_path, tmp_path)
    said: list[str] = []
    submit_and_watch(context, SlurmCluster(SlurmSection(), None), [], said.append, lambda *_: None)
    assert said == []
    assert (read_job(tmp_path, ended).closed, read_job(tmp_path, half).closed) == (True, False)
