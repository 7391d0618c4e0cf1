"""The answer of `vitscale plan`: a document, JSON fields, and the commands or batch scripts alone."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from vitscale.analysis.scaling import split_name
from vitscale.engines.names import engine_name
from vitscale.present import document as doc
from vitscale.present.data import finding_fields
from vitscale.present.units import counted, rough_percent
from vitscale.runner.one_run import RANK_MODULE, launch_plan, next_attempt
from vitscale.runner.plan_estimate import NOTHING_KNOWN, PlanEstimate, buckets_note
from vitscale.runner.planning import Plan, check_folder
from vitscale.runner.todo import addable_runs, outstanding_runs, refuse_damaged
from vitscale.schedulers import Submitter
from vitscale.store import RunIndex
from vitscale.store.reading import EndedAttempt, RunKey
from vitscale.study.sections import AUTO
from vitscale.trial import model_cost
from vitscale.trial.model_words import CountedModel, parameter_fields, parameter_lines
from vitscale.trial.rank_batches import in_words
from vitscale.trial.trial import TrainSpec, Trial

_NO_GATHER_BUCKETS_NOTE = (
    "train.gather_bucket_mib has no effect below zero_stage = 3, which alone gathers weights in buckets"
)
_ANY_RUN_FOLDER = Path("RESULTS/runs/TRIAL")
"""Stands for a run's folder in commands that are shown without one."""


def plan_document(
    plan: Plan, estimate: PlanEstimate = NOTHING_KNOWN, findings: Sequence[doc.Finding] = ()
) -> doc.Document:
    """Show the number of runs and what they take, the trials, and the commands for them.

    Args:
        plan: the study.
        estimate: what its trials are expected to take.
        findings: what is wrong with the trials' DeepSpeed files, and with the installed torch for them.
    """
    trials = plan.record.trials
    heading = f"{plan.record.name}: {counted(len(trials), 'trial')}, {_runs_in_words(plan, estimate)}"
    summary = (
        *_saving_lines(plan),
        *estimate.lines(plan),
        *parameter_lines(_counted_models(trials)),
        *plan.expansion.notes,
    )
    counted_findings = [
        replace(finding, message=f"{finding.message}{_trials_concerned(plan, finding)}") for finding in findings
    ]
    return doc.Document(
        "",
        (
            doc.Paragraph(heading, "strong"),
            doc.Bullets(summary),
            *counted_findings,
            _trial_table(plan, estimate),
            doc.Section("Commands", (doc.Code(tuple(_command_lines(plan))),)),
        ),
    )


def _trial_table(plan: Plan, estimate: PlanEstimate) -> doc.Table:
    """Return a table of the trials.

    Some columns are left out where all trials have the same value (`_HIDDEN_WHERE_SHARED`). Others become a note then
    (`_NOTED_WHERE_SHARED`).
    """
    trials = plan.record.trials
    swept_values = _swept_values(plan)
    rows = [
        {"model": trial.model_name or "model", "swept": swept_values.get(trial_id, "")}
        | _study_cells(plan, trial_id, trial)
        | estimate.cells(trial_id, trial)
        for trial_id, trial in trials.items()
    ]
    shared = _shared_values(rows)
    noted = {name: value for name, value in shared.items() if name in _NOTED_WHERE_SHARED}
    hidden = shared.keys() & {*_NOTED_WHERE_SHARED, *_HIDDEN_WHERE_SHARED}
    shown_names = rows[0].keys() - hidden if rows else set()
    columns = [column for column in _COLUMNS if column.name in shown_names]
    cell_rows = []
    for row in rows:
        cell_rows.append(tuple(doc.Cell(row[column.name]) for column in columns))
    notes = _table_notes(trials, noted, shows_largest_batches=estimate.shows_largest_batches)
    return doc.Table(tuple(columns), (doc.RowGroup("", tuple(cell_rows)),), tuple(notes))


def _shared_values(rows: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return column -> its value, for the columns in which all rows have the same value; rows have the same columns."""
    shared = {}
    for name in rows[0] if rows else ():
        values = {row[name] for row in rows}
        if len(values) == 1:
            shared[name] = values.pop()
    return shared


def _table_notes(
    trials: Mapping[str, Trial], shared_values: Mapping[str, str], *, shows_largest_batches: bool
) -> list[str]:
    """Return the notes below the table.

    Args:
        trials: the study's trials.
        shared_values: values that all trials have, by column.
        shows_largest_batches: whether the table has a column of the largest micro-batches that fit.
    """
    notes = []
    if shared_values:
        notes.append("in all trials: " + ", ".join(f"{name} {value}" for name, value in shared_values.items()))
    notes.append("memory: forecast peak of one rank's tensors; libraries and fragmentation come on top")
    if shows_largest_batches:
        notes.append("fits up to: the largest micro-batch (in brackets: with train.activation_checkpointing) that fits")
    buckets = buckets_note(trials)
    if buckets:
        notes.append(buckets)
    train_specs = [trial.train for trial in trials.values()]
    if any(train.gather_bucket_mib and train.zero_stage < 3 for train in train_specs):
        notes.append(_NO_GATHER_BUCKETS_NOTE)
    return notes


def _command_lines(plan: Plan) -> list[str]:
    """Return the different commands of all trials, each as a line for a shell."""
    # Launcher and world alone decide the commands, and many trials share them.
    trial_by_start = {(trial.launcher, trial.world): trial for trial in plan.record.trials.values()}
    lines: set[str] = set()
    for trial in trial_by_start.values():
        lines.update(map(shlex.join, commands_of(plan, trial)))
    return sorted(lines)


def _counted_models(trials: Mapping[str, Trial]) -> Iterator[CountedModel]:
    """Yield each different model of the trials with its number of parameters."""
    # Few different models stand in many trials, and counting one takes long.
    models = dict.fromkeys((trial.model_name or "model", trial.model) for trial in trials.values())
    for name, model in models:
        yield CountedModel(name, model_cost.counted_parameters(model))


_COLUMNS = (
    *(doc.Column(name, words=True) for name in ("model", "engine", "precision")),
    doc.Column("image"),
    doc.Column("activations", words=True),
    doc.Column("ranks"),
    doc.Column("shared model", words=True),
    doc.Column("replicas", words=True),
    *map(doc.Column, ("hosts", "threads", "batch", "data", "per epoch", "steps", "memory")),
    doc.Column("fits", words=True),
    doc.Column("fits up to"),
    *map(doc.Column, ("time", "GPU-h", "cost")),
    doc.Column("swept", words=True),
    doc.Column("trial", words=True, narrow=None),
)
_HIDDEN_WHERE_SHARED = ("model", "image", "activations", "shared model", "replicas", "swept")
"""Columns that are left out where all trials have the same value."""
_NOTED_WHERE_SHARED = ("precision", "hosts", "threads", "data", "per epoch", "steps")
"""Columns that become one line below the table where all trials have the same value."""


def _study_cells(plan: Plan, trial_id: str, trial: Trial) -> dict[str, str]:
    """Return one trial's cells that follow from the study alone, by column."""
    steps = plan.steps_of(trial_id)
    train = trial.train
    return {
        "trial": trial_id,
        "engine": engine_name(train),
        "precision": train.precision,
        "image": str(trial.model.image_size),
        "activations": "computed again" if train.activation_checkpointing else "kept",
        "ranks": str(trial.world.size),
        "shared model": split_name(trial.parallel.model_split) or "no",
        "replicas": _replicas_in_words(trial),
        "hosts": str(trial.world.nodes),
        "threads": str(trial.world.threads_per_rank),
        "batch": _batch_in_words(train),
        "data": f"{trial.data.fraction:.3g}",
        "per epoch": str(steps.per_epoch),
        "steps": str(steps.per_run),
    }


def _replicas_in_words(trial: Trial) -> str:
    """Return replicas and their ranks: "2 of 4"; "no" where all ranks shard one, or none shards."""
    replicas = trial.parallel.replicate
    return "no" if replicas == 1 else f"{replicas} of {trial.layout.sharding_ranks}"


_FIELDS_WITH_COLUMN = frozenset(
    {"model.name", "model.hf", "model.factory", "model.image_size", "data.fraction", "launch.threads_per_rank"}
    | {f"train.{name}" for name in ("engine", "accelerate_backend", "zero_stage", "precision", "micro_batch",
                                    "micro_batches", "grad_accum", "global_batch", "activation_checkpointing")}
)  # fmt: skip
"""Fields that have columns of their own."""


def _swept_values(plan: Plan) -> dict[str, str]:
    """Return, by trial, the swept values that have no column of their own: "learning_rate 0.1, workers 0"."""
    words_by_trial: dict[str, str] = {}
    for curve in plan.record.curves:
        values = [
            f"{field.rpartition('.')[2]} {value}"
            for field, value in curve.labels.items()
            if field not in _FIELDS_WITH_COLUMN and not field.startswith(("scaling.", "parallel."))
        ]
        words_by_trial |= dict.fromkeys((point.trial_id for point in curve.points), ", ".join(values))
    return words_by_trial


def _batch_in_words(train: TrainSpec) -> str:
    """Return the images per micro-step, of every rank or of each, and the accumulation.

    Example: "16", "16 x2", or "(20 + 12) x2" where two ranks have different shares.
    """
    images = in_words(train.micro_batches) if train.micro_batches else str(train.micro_batch)
    if train.grad_accum == 1:
        return images
    if train.micro_batches:
        images = f"({images})"
    return f"{images} x{train.grad_accum}"


def finding_lines(plan: Plan, findings: Sequence[doc.Finding]) -> list[str]:
    """Return a line for each finding of `plan_document`."""
    lines = []
    for finding in findings:
        key = f"{doc.shown_key(finding.about.key)}: " if finding.about.key else ""
        concerned = _trials_concerned(plan, finding)
        lines.append(f"{finding.severity}: {key}{finding.message}. Fix: {finding.advice}.{concerned}")
    return lines


def _trials_concerned(plan: Plan, finding: doc.Finding) -> str:
    """Return " (2 of 6 trials)": how many trials the finding concerns; empty where it concerns all."""
    concerned = len(finding.about.trials)
    trials = len(plan.record.trials)
    return f" ({concerned} of {trials} trials)" if concerned < trials else ""


def runs_to_do(plan: Plan, estimate: PlanEstimate) -> int:
    """Return the number of planned runs that are neither done nor of a trial that is skipped."""
    return sum(task not in estimate.done and task.trial_id not in estimate.skipped for task in plan.tasks)


def _runs_in_words(plan: Plan, estimate: PlanEstimate) -> str:
    """Return "4 of 6 runs to do", with what `measure` adds to it and its limits."""
    runs = counted(len(plan.tasks), "run")
    to_do = runs_to_do(plan, estimate)
    if to_do < len(plan.tasks):
        runs = f"{to_do} of {runs} to do"
    limits = ""
    max_gpu_hours = plan.measure.max_gpu_hours
    if max_gpu_hours is not None:
        limits += f", within {max_gpu_hours:g} GPU-hours (measure.max_gpu_hours)"
    parallel_runs = plan.measure.parallel_runs
    if parallel_runs is not None:
        alone = f", {len(plan.alone)} of them alone" if plan.alone else ""
        limits += f", up to {parallel_runs} at a time (measure.parallel_runs){alone}"
    most_added = estimate.most_added(plan, plan.record.repeats)
    if most_added:
        return f"{runs}, and up to {most_added} more {_until_target(plan)}{limits}"
    return runs + limits


def _until_target(plan: Plan) -> str:
    """Return until when `measure.target_ci` adds runs, as the end of a sentence."""
    target_percent = 100 * (plan.measure.target_ci or 0.0)
    return f"until each epoch time is known within {target_percent:.3g} % (measure.target_ci)"


_PUBLISHED_EPOCHS = 5
"""Epochs per run in published scaling studies of vision transformers (arXiv 2602.21081)."""


def _saving_lines(plan: Plan) -> list[str]:
    """Return a line on the GPU time that `measure.steps = "auto"` saves against runs of `_PUBLISHED_EPOCHS` epochs.

    Empty without that setting. Only the time of steps is compared.
    """
    measure = plan.measure
    if measure.steps != AUTO:
        return []
    published_gpu_steps = 0  # steps of one published run of each trial, times its GPUs
    round_gpu_steps = 0  # the same of one run of this study
    for trial_id, trial in plan.record.trials.items():
        steps = plan.steps_of(trial_id)
        published_gpu_steps += _PUBLISHED_EPOCHS * steps.per_epoch * trial.world.size
        round_gpu_steps += steps.per_run * trial.world.size
    most_repeats = measure.repeats if measure.target_ci is None else measure.max_repeats
    fewest_repeats = plan.fewest_repeats
    runs = f"{fewest_repeats} to {most_repeats} runs"
    if fewest_repeats == most_repeats:
        runs = counted(most_repeats, "run")
    shares = [
        rough_percent(repeats * round_gpu_steps / published_gpu_steps)
        for repeats in dict.fromkeys((fewest_repeats, most_repeats))
    ]
    saves_nothing = fewest_repeats * round_gpu_steps >= published_gpu_steps
    nothing_saved = ": nothing is saved" if saves_nothing else ""
    return [
        f'steps = "auto": {runs} a trial take {" to ".join(shares)} of the GPU time of {_PUBLISHED_EPOCHS} epochs each'
        f"{nothing_saved}; start-up of every run comes on top"
    ]


def plan_fields(
    plan: Plan, estimate: PlanEstimate = NOTHING_KNOWN, findings: Sequence[doc.Finding] = ()
) -> dict[str, Any]:
    """Return the plan as JSON fields, with one object per trial. Arguments as of `plan_document`."""
    trials = []
    for trial_id, trial in plan.record.trials.items():
        steps = plan.steps_of(trial_id)
        trials.append(
            {
                "trial": trial_id,
                "gpus": trial.world.size,
                "repeats": plan.record.repeats,
                "steps_per_epoch": steps.per_epoch,
                "steps": steps.per_run,
                "global_batch": trial.global_batch,
                **parameter_fields(model_cost.counted_parameters(trial.model)),
                **estimate.as_json(trial_id, trial),
                "nodes": trial.world.nodes,
                "commands": commands_of(plan, trial),
                "resolved": trial.model_dump(mode="json"),
            }
        )
    return {
        "study": plan.record.name,
        "runs": len(plan.tasks),
        "runs_to_do": runs_to_do(plan, estimate),
        "most_runs": plan.most_runs,
        "target_ci": plan.measure.target_ci,
        "expected": estimate.total_json(plan),
        "largest_image_sizes": estimate.largest_json(plan),
        "trials": trials,
        "findings": [finding_fields(finding) for finding in findings],
    }


def commands_of(plan: Plan, trial: Trial, run_folder: Path = _ANY_RUN_FOLDER) -> tuple[tuple[str, ...], ...]:
    """Return the exact argvs that would start a trial's ranks: one, or one for each host."""
    spawn = launch_plan(
        plan.scheduler,
        plan.context.launch,
        trial.launcher,
        trial.world,
        run_folder,
        RANK_MODULE,
        device=trial.train.device,
    )
    return spawn.commands


_ANY_RESULTS_FOLDER = Path("RESULTS")


def command_list(plan: Plan, results: Path | None, *, retry_failed: bool = False, unfit: Collection[str] = ()) -> str:
    """Return the commands as text: a block for each trial, under a comment on it; for a batch system the jobs' scripts.

    Runs that `measure.target_ci` may add are not listed: a last comment says how many there may be.

    Args:
        plan: the study.
        results: folder of the results, whose finished runs are left out; None: all runs, under a placeholder.
        retry_failed: list runs that did not complete too.
        unfit: trials to leave out.

    Raises:
        StoreError: the folder holds something else, or a damaged pack.
    """
    if results is None:
        work = _WorkInFolder(tasks=list(plan.tasks))
    else:
        work = _work_in_folder(plan, results, retry_failed=retry_failed)
    tasks = [task for task in work.tasks if task.trial_id not in unfit]
    added = addable_runs(plan.record, work.finished, work.repeated, results) - work.repeated
    most_added = sum(run.trial_id not in unfit for run in added)
    comment = f"# Up to {counted(most_added, 'more run')} may be added {_until_target(plan)}.\n"
    if not tasks and most_added:
        return comment
    if not tasks:
        left_out = ", or is left out" if unfit else ""
        return f"# Nothing to do: every run of this study has its outcome{left_out}.\n"
    folder = results.absolute() if results is not None else _ANY_RESULTS_FOLDER
    if isinstance(plan.scheduler, Submitter):
        from vitscale.runner.batch_jobs import job_scripts

        blocks = job_scripts(plan.in_folder(folder), plan.scheduler, tasks)
    else:
        blocks = _trial_blocks(plan, tasks, work.attempts, folder)
    if most_added:
        blocks.append(comment)
    return "\n".join(blocks)


class _WorkInFolder(NamedTuple):
    """The runs that a results folder leaves to do."""

    tasks: list[RunKey]
    attempts: Mapping[RunKey, int] = {}
    """Highest attempt number in use, by (trial, repeat)."""
    finished: Mapping[RunKey, EndedAttempt] = {}
    """As in `RunIndex`."""
    repeated: frozenset[RunKey] = frozenset()
    """The tasks, where some of their runs may have outcomes already; empty without a folder."""


def _work_in_folder(plan: Plan, results: Path, *, retry_failed: bool) -> _WorkInFolder:
    """Return the work that is left in a folder of this study, or in a new one.

    Raises:
        StoreError: the folder holds something else, or a damaged pack.
    """
    check_folder(results, plan.record, allow_version_change=True)
    index = RunIndex(results)
    refuse_damaged(results, index)
    tasks = outstanding_runs(plan, index, retry_failed=retry_failed)
    return _WorkInFolder(tasks, index.attempts, index.finished, frozenset(tasks))


def _trial_blocks(plan: Plan, tasks: Sequence[RunKey], attempts: Mapping[RunKey, int], results: Path) -> list[str]:
    """Return a block of lines for each trial: a comment, and the commands of the first of its runs."""
    runs_by_trial: dict[str, list[RunKey]] = {}
    for task in tasks:
        runs_by_trial.setdefault(task.trial_id, []).append(task)
    blocks = []
    for trial_id, runs in runs_by_trial.items():
        trial = plan.record.trials[trial_id]
        world = trial.world
        first_run = runs[0]
        attempt = next_attempt(attempts, first_run)
        run_folder = results / "runs" / f"{trial_id}-r{first_run.repeat}-a{attempt}"
        comment = f"# {trial_id}: {world.nodes} x {world.ranks_per_node} ranks, {counted(len(runs), 'run')}"
        commands = [shlex.join(command) for command in commands_of(plan, trial, run_folder)]
        blocks.append("\n".join([comment, *commands]) + "\n")
    return blocks
