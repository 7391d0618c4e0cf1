"""What `vitscale plan` shows."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vitscale.analysis.scaling import split_name
from vitscale.engines.names import engine_name
from vitscale.present import document as doc
from vitscale.present.data import finding_fields
from vitscale.present.units import counted, rough_percent
from vitscale.runner.one_run import RANK_MODULE, launch_plan
from vitscale.runner.plan_estimate import NOTHING_KNOWN, PlanEstimate, buckets_note
from vitscale.runner.planning import Plan, check_folder
from vitscale.runner.todo import may_be_added, outstanding, refuse_damaged
from vitscale.schedulers import Submitter
from vitscale.store import RunIndex
from vitscale.study.sections import AUTO
from vitscale.trial import model_cost
from vitscale.trial.rank_batches import in_words
from vitscale.trial.trial import TrainSpec, Trial

_NO_BUCKETS = "train.gather_bucket_mib has no effect below zero_stage = 3, which alone gathers weights in buckets"
_ANY_RUN = Path("RESULTS/runs/TRIAL")


def plan_document(
    plan: Plan, estimate: PlanEstimate = NOTHING_KNOWN, file_findings: Sequence[doc.Finding] = ()
) -> doc.Document:
    """Shows the number of runs and what they take, the trials, and the commands for them.

    Args:
        plan: the study.
        estimate: what its trials are expected to take.
        file_findings: findings on the trials' DeepSpeed files (`vitscale.deepspeed_lint.rules.findings_of`).
    """
    trials, swept = plan.record.trials, _swept(plan)
    rows = {
        trial_id: {"model": (trial.model_name or "model"), "swept": swept.get(trial_id, "")}
        | _row(plan, trial_id, trial)
        | estimate.cells(trial_id, trial)
        for trial_id, trial in trials.items()
    }
    values = {name: {row[name] for row in rows.values()} for name in next(iter(rows.values()), {})}
    alike = {name: each.pop() for name, each in values.items() if name in _SAID_ONCE and len(each) == 1}
    constant = {*alike, *(name for name in _SAID_WHERE_VARIED if len(values.get(name, ())) == 1)}
    columns = [column for column in _COLUMNS if column.name in values and column.name not in constant]
    cells = [[doc.Cell(row[c.name]) for c in columns] for row in rows.values()]
    same = "in all trials: " + ", ".join(f"{name} {value}" for name, value in alike.items())
    notes = (
        *([same] if alike else []),
        "memory: forecast peak of one rank's tensors; libraries and fragmentation come on top",
        *filter(None, [buckets_note(trials)]),
        *([_NO_BUCKETS] if any(t.train.gather_bucket_mib and t.train.zero_stage < 3 for t in trials.values()) else []),
    )
    heading = f"{plan.record.name}: {counted(len(trials), 'trial')}, {_runs(plan, estimate)}"
    # Launcher and world alone decide the commands, and many trials share them.
    started_alike = {(trial.launcher, trial.world): trial for trial in trials.values()}
    commands = sorted({shlex.join(each) for trial in started_alike.values() for each in commands_of(plan, trial)})
    return doc.Document(
        "",
        (
            doc.Paragraph(heading, "strong"),
            doc.Bullets((*_saving(plan), *estimate.lines(plan), *_parameters(trials), *plan.expansion.notes)),
            *(replace(own, message=f"{own.message}{_whose(plan, own)}") for own in file_findings),
            doc.Table(tuple(columns), (doc.RowGroup("", tuple(map(tuple, cells))),), notes),
            doc.Section("Commands", (doc.Code(tuple(commands)),)),
        ),
    )


def _parameters(trials: Mapping[str, Trial]) -> list[str]:
    """Lines with the models' numbers of parameters; models with the same number share a line."""
    models: dict[str, dict[int | None, None]] = {}
    # Few different models stand in many trials, and counting one takes long.
    for name, model in dict.fromkeys((trial.model_name or "model", trial.model) for trial in trials.values()):
        models.setdefault(name, {})[model_cost.parameters(model)] = None
    alike: dict[str, list[str]] = {}
    for name, counts in models.items():
        known = " or ".join(f"{count:,}" for count in counts if count is not None)
        told = f"{known} parameters" if known else "number of parameters unavailable"
        alike.setdefault(f"{told}, unavailable for some" if known and None in counts else told, []).append(name)
    return [f"{', '.join(names)}: {told}" for told, names in alike.items()]


_COLUMNS = (
    *(doc.Column(name, words=True) for name in ("model", "engine", "precision")),
    doc.Column("image"),
    doc.Column("activations", words=True),
    doc.Column("ranks"),
    doc.Column("shared model", words=True),
    *map(doc.Column, ("hosts", "threads", "batch", "data", "per epoch", "steps", "memory")),
    doc.Column("fits", words=True),
    *map(doc.Column, ("time", "GPU-h", "cost")),
    doc.Column("swept", words=True),
    doc.Column("trial", words=True, narrow=None),
)
_SAID_WHERE_VARIED = ("model", "image", "activations", "shared model", "swept")
"""Columns that are left out where all trials have the same value."""
_SAID_ONCE = ("precision", "hosts", "threads", "data", "per epoch", "steps")
"""Columns that become one line below the table where all trials have the same value."""


def _row(plan: Plan, trial_id: str, trial: Trial) -> dict[str, str]:
    """What the table says of one trial, by column."""
    epoch, steps = plan.steps_of(trial_id)
    train = trial.train
    return {
        "trial": trial_id,
        "engine": engine_name(train),
        "precision": train.precision,
        "image": str(trial.model.image_size),
        "activations": "computed again" if train.activation_checkpointing else "kept",
        "ranks": str(trial.world.size),
        "shared model": split_name(trial.parallel) or "no",
        "hosts": str(trial.world.nodes),
        "threads": str(trial.world.threads_per_rank),
        "batch": _batch(train),
        "data": f"{trial.data.fraction:.3g}",
        "per epoch": str(epoch),
        "steps": str(steps),
    }


_SHOWN = frozenset(
    {"model.name", "model.hf", "model.factory", "model.image_size", "data.fraction", "launch.threads_per_rank"}
    | {f"train.{name}" for name in ("engine", "accelerate_backend", "zero_stage", "precision", "micro_batch",
                                    "micro_batches", "grad_accum", "global_batch", "activation_checkpointing")}
)  # fmt: skip
"""Fields that columns of their own tell."""


def _swept(plan: Plan) -> dict[str, str]:
    """What else the sweep gives each trial: "learning_rate 0.1, workers 0"."""
    told: dict[str, str] = {}
    for curve in plan.record.curves:
        values = {field: value for field, value in curve.labels.items() if field not in _SHOWN}
        own = ", ".join(
            f"{field.rpartition('.')[2]} {value}"
            for field, value in values.items()
            if not field.startswith(("scaling.", "parallel."))
        )
        told |= dict.fromkeys((point.trial_id for point in curve.points), own)
    return told


def _batch(train: TrainSpec) -> str:
    """Images per micro-step, of every rank or of each, and the accumulation: "16", "16 x2" or "(20 + 12) x2"."""
    at_once = in_words(train.micro_batches) if train.micro_batches else str(train.micro_batch)
    if train.grad_accum == 1:
        return at_once
    return f"({at_once}) x{train.grad_accum}" if train.micro_batches else f"{at_once} x{train.grad_accum}"


def finding_lines(plan: Plan, file_findings: Sequence[doc.Finding]) -> list[str]:
    """Words what the trials' DeepSpeed files will really do: one line for each finding."""
    told = []
    for finding in file_findings:
        where = f"{doc.shown_key(finding.about.key)}: " if finding.about.key else ""
        told.append(f"{finding.severity}: {where}{finding.message}. Fix: {finding.advice}.{_whose(plan, finding)}")
    return told


def _whose(plan: Plan, finding: doc.Finding) -> str:
    """Says how many trials the finding concerns, where that is not all."""
    concerned, trials = len(finding.about.trials), len(plan.record.trials)
    return f" ({concerned} of {trials} trials)" if concerned < trials else ""


def runs_to_do(plan: Plan, estimate: PlanEstimate) -> int:
    """Runs that `vitscale run` would start: neither done nor of a trial that is skipped."""
    return sum(
        (task.trial_id, task.repeat) not in estimate.done and task.trial_id not in estimate.skipped
        for task in plan.tasks
    )


def _runs(plan: Plan, estimate: PlanEstimate) -> str:
    runs = counted(len(plan.tasks), "run")
    if (to_do := runs_to_do(plan, estimate)) < len(plan.tasks):
        runs = f"{to_do} of {runs} to do"
    limit = plan.measure.max_gpu_hours
    within = "" if limit is None else f", within {limit:g} GPU-hours (measure.max_gpu_hours)"
    if (most := plan.measure.parallel_runs) is not None:
        alone = f", {len(plan.alone)} of them alone" if plan.alone else ""
        within += f", up to {most} at a time (measure.parallel_runs){alone}"
    more = estimate.most_added(plan, plan.record.repeats)
    return f"{runs}, and up to {more} more {_until(plan)}{within}" if more else runs + within


def _until(plan: Plan) -> str:
    return f"until each epoch time is known within {100 * (plan.measure.target_ci or 0.0):.3g} % (measure.target_ci)"


_EPOCHS_A_POINT = 5
"""Epochs per run in published scaling studies of vision transformers (arXiv 2602.21081)."""


def _saving(plan: Plan) -> list[str]:
    """What `measure.steps = "auto"` saves against `_EPOCHS_A_POINT`, in GPU time of steps; empty without it."""
    measure = plan.measure
    if measure.steps != AUTO:
        return []
    sizes = {trial_id: trial.world.size for trial_id, trial in plan.record.trials.items()}
    steps = {trial_id: plan.steps_of(trial_id) for trial_id in sizes}
    usual = sum(_EPOCHS_A_POINT * epoch * sizes[trial_id] for trial_id, (epoch, _) in steps.items())
    a_round = sum(run * sizes[trial_id] for trial_id, (_, run) in steps.items())
    most = measure.repeats if measure.target_ci is None else measure.max_repeats
    least = plan.fewest_repeats
    shares = " to ".join(rough_percent(runs * a_round / usual) for runs in dict.fromkeys((least, most)))
    runs = counted(most, "run") if least == most else f"{least} to {most} runs"
    nothing = ": nothing is saved" if least * a_round >= usual else ""
    return [
        f'steps = "auto": {runs} a trial take {shares} of the GPU time of {_EPOCHS_A_POINT} epochs each{nothing}; '
        "start-up of every run comes on top"
    ]


def plan_fields(
    plan: Plan, estimate: PlanEstimate = NOTHING_KNOWN, file_findings: Sequence[doc.Finding] = ()
) -> dict[str, Any]:
    """The plan as JSON fields, with one object per trial. Arguments as of `plan_document`."""
    trials = []
    for trial_id, trial in plan.record.trials.items():
        epoch, steps = plan.steps_of(trial_id)
        trials.append(
            {
                "trial": trial_id,
                "gpus": trial.world.size,
                "repeats": plan.record.repeats,
                "steps_per_epoch": epoch,
                "steps": steps,
                "global_batch": trial.global_batch,
                "parameters": model_cost.parameters(trial.model),
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
        "findings": [finding_fields(finding) for finding in file_findings],
    }


def commands_of(plan: Plan, trial: Trial, run_folder: Path = _ANY_RUN) -> tuple[tuple[str, ...], ...]:
    """The exact argvs that would start a trial's ranks: one, or one for each host."""
    section = plan.context.launch
    return launch_plan(plan.scheduler, section, trial.launcher, trial.world, run_folder, RANK_MODULE).commands


_ANY_RESULTS = Path("RESULTS")


def command_list(plan: Plan, results: Path | None, *, retry_failed: bool = False, unfit: Collection[str] = ()) -> str:
    """A block for each trial, with a comment that describes it and its commands; for a batch system the jobs' scripts.

    Runs that `measure.target_ci` may add are not listed: a last comment says how many there may be.

    Args:
        plan: the study.
        results: folder of the results, whose finished runs are left out; None: all runs, under a placeholder.
        retry_failed: list runs that did not complete too.
        unfit: trials to leave out.

    Raises:
        StoreError: the folder holds something else, or a damaged pack.
    """
    tasks = list(plan.tasks)
    attempts: Mapping[tuple[str, int], int] = {}
    again: set[tuple[str, int]] = set()
    index = None
    if results is not None:
        check_folder(results, plan.record, allow_version_change=True)
        index = RunIndex(results)
        refuse_damaged(results, index)
        attempts = index.attempts
        tasks = outstanding(plan, index, retry_failed=retry_failed)
        again = {(task.trial_id, task.repeat) for task in tasks}
    tasks = [task for task in tasks if task.trial_id not in unfit]
    added = may_be_added(plan.record, index.finished if index else {}, again, results) - again
    most = sum(trial_id not in unfit for trial_id, _ in added)
    more = f"# Up to {counted(most, 'more run')} may be added {_until(plan)}.\n"
    if not tasks and most:
        return more
    if not tasks:
        left_out = ", or is left out" if unfit else ""
        return f"# Nothing to do: every run of this study has its outcome{left_out}.\n"
    where = results.absolute() if results is not None else _ANY_RESULTS
    if isinstance(plan.scheduler, Submitter):
        from vitscale.runner.batch_jobs import script_for

        scripts = script_for(plan.in_folder(where), plan.scheduler, tasks)
        return "\n".join([*scripts, *([more] if most else [])])
    blocks = []
    for trial_id in dict.fromkeys(task.trial_id for task in tasks):
        trial = plan.record.trials[trial_id]
        world = trial.world
        repeats = [task.repeat for task in tasks if task.trial_id == trial_id]
        attempt = attempts.get((trial_id, repeats[0]), -1) + 1
        commands = commands_of(plan, trial, where / "runs" / f"{trial_id}-r{repeats[0]}-a{attempt}")
        head = f"# {trial_id}: {world.nodes} x {world.ranks_per_node} ranks, {counted(len(repeats), 'run')}"
        blocks.append("\n".join([head, *(shlex.join(command) for command in commands)]) + "\n")
    return "\n".join([*blocks, *([more] if most else [])])
