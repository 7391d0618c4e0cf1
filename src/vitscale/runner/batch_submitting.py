"""Makes batch jobs of the runs that are to be done, and submits them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from vitscale.runner.batch_file import BatchTask, JobFile
from vitscale.runner.batch_watching import Say, patiently
from vitscale.runner.one_run import Task
from vitscale.schedulers.slurm_commands import SlurmError, job_states, submit
from vitscale.schedulers.slurm_script import BatchJob, batch_script
from vitscale.store import write_whole
from vitscale.study.sections import LaunchSection, MeasureSection, SlurmSection
from vitscale.trial.trial import Trial, World

_MOST_ELEMENTS = 1000
"""Of one array: Slurm's MaxArraySize is 1001 unless a site sets it."""


@dataclass(frozen=True)
class Batch:
    """What all jobs of a study share."""

    results: Path
    """Absolute."""
    study_folder: Path
    trials: Mapping[str, Trial]
    launch: LaunchSection
    slurm: SlurmSection
    measure: MeasureSection


def new_jobs(
    batch: Batch, tasks: Iterable[Task], attempts: Mapping[tuple[str, int], int], digits: Callable[[], str]
) -> Iterator[JobFile]:
    """One job, or one array, for each shape of world; tasks keep their order."""
    groups: dict[tuple[World, bool], list[BatchTask]] = {}
    for task in tasks:
        attempt = attempts.get((task.trial_id, task.repeat), -1) + 1
        shape = (batch.trials[task.trial_id].world, _on_gpus(batch, task.trial_id))
        groups.setdefault(shape, []).append(BatchTask(trial_id=task.trial_id, repeat=task.repeat, attempt=attempt))
    array = batch.slurm.jobs == "array"
    for (world, _), group in groups.items():
        most = _MOST_ELEMENTS if array else len(group)
        for first in range(0, len(group), most):
            yield JobFile(
                name=f"vitscale-{world.nodes}x{world.ranks_per_node}-{digits()}",
                array=array,
                tasks=tuple(group[first : first + most]),
                study_folder=str(batch.study_folder),
                launch=batch.launch,
                slurm=batch.slurm,
                measure=batch.measure,
            )


def _on_gpus(batch: Batch, trial_id: str) -> bool:
    return batch.trials[trial_id].train.device == "cuda"


def asked_for(batch: Batch, job: JobFile) -> BatchJob:
    """What the job's script asks Slurm for."""
    trial_id = job.tasks[0].trial_id
    return BatchJob(
        name=job.name,
        world=batch.trials[trial_id].world,
        on_gpus=_on_gpus(batch, trial_id),
        results=batch.results,
        cwd=Path.cwd(),
        elements=len(job.tasks) if job.array else None,
    )


def submitted(batch: Batch, job: JobFile, say: Say) -> JobFile:
    """Writes the job down before it is submitted, and its number after: a crash between never makes two jobs of it.

    Raises:
        SlurmError: Slurm refuses the job, and nothing of it is kept.
        RequestError: a value of [slurm] cannot stand in a script.
    """
    text = batch_script(batch.slurm, asked_for(batch, job))
    job.write(batch.results)
    script = batch.results / "jobs" / f"{job.name}.sh"
    write_whole(script, text)

    def job_id() -> str:
        # An earlier answer may have been lost on its way: the job may be there.
        known = [state.array_id for state in job_states([job.name])]
        return known[0] if known else submit(script)

    try:
        job = job.model_copy(update={"job_id": patiently(job_id, say)})
    except SlurmError:
        for path in (script, script.with_suffix(".json")):
            path.unlink()
        raise
    job.write(batch.results)
    world = batch.trials[job.tasks[0].trial_id].world
    what = "array" if job.array else "job"
    say(f"{what} {job.job_id} submitted: {len(job.tasks)} run(s) on {world.nodes} x {world.ranks_per_node} ranks")
    return job
