"""What `vitscale plan` shows."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table

from vitscale.analysis.curve_names import engine_name
from vitscale.lint.of_trials import findings_of
from vitscale.present.data import finding_fields
from vitscale.present.document import Finding, shown_key
from vitscale.runner.lengths import steps_of
from vitscale.runner.outlook import NOTHING_KNOWN, Outlook
from vitscale.runner.planning import Plan
from vitscale.runner.starting import worked_out
from vitscale.trial import model_spec
from vitscale.trial.rank_batches import in_words
from vitscale.trial.trial import TrainSpec, Trial

_PLACEHOLDER = Path("RESULTS/runs/TRIAL")


def preview_table(plan: Plan, outlook: Outlook = NOTHING_KNOWN) -> list[RenderableType]:
    """A table of the trials that fits a terminal of 80 columns, what they take, and the commands that start them."""
    models: dict[str, list[str]] = {}
    for trial in plan.record.trials.values():
        count = model_spec.parameters(trial.model)
        told = models.setdefault(_model_of(trial), [])
        told += [one for one in ["unavailable number of" if count is None else f"{count:,}"] if one not in told]
    lines: list[RenderableType] = [
        escape(f"{plan.record.name}: {len(plan.record.trials)} trials, {_runs(plan)}"),
        *(escape(f"{name}: {' or '.join(counts)} parameters") for name, counts in models.items()),
    ]
    rows = {
        trial_id: _row(plan, trial_id, trial) | outlook.cells(trial_id, trial)
        for trial_id, trial in plan.record.trials.items()
    }
    for name in _SAID_WHERE_VARIED:
        if _all_alike(rows.values(), name):
            for row in rows.values():
                del row[name]
    same = {
        name: row[name] for row in list(rows.values())[:1] for name in _SAID_ONCE if _all_alike(rows.values(), name)
    }
    if same:
        lines.append(escape("in all trials: " + ", ".join(f"{name} {value}" for name, value in same.items())))
    columns = [name for name in _COLUMNS if name not in same and name in next(iter(rows.values()), {})]
    # Times and costs leave room for one space between columns.
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0) if "time" in columns else (0, 1))
    table.add_column("trial", no_wrap=True)
    if len(models) > 1:
        table.add_column("model", overflow="fold")
    for name in columns:
        table.add_column(name, justify=_COLUMNS[name], overflow="fold", no_wrap=name in ("memory", "time"))
    for trial_id, trial in plan.record.trials.items():
        named = [escape(_model_of(trial))] if len(models) > 1 else []
        table.add_row(trial_id, *named, *(escape(rows[trial_id][name]) for name in columns))
    commands = sorted({shlex.join(each) for trial in plan.record.trials.values() for each in commands_of(plan, trial)})
    findings = [escape(line) for line in finding_lines(plan)]
    about_the_file = ["", "The DeepSpeed file (vitscale lint tells the sources):", *findings] if findings else []
    return [
        *lines,
        "",
        table,
        "memory: forecast peak of one rank's tensors; libraries and fragmentation come on top",
        *(escape(line) for line in outlook.lines(plan)),
        "",
        "Commands:",
        *(escape(f"  {command}") for command in commands),
        *about_the_file,
    ]


_COLUMNS: dict[str, Literal["left", "right"]] = {
    "engine": "left",
    "precision": "left",
    "image": "right",
    "activations": "left",
    "ranks": "right",
    "hosts": "right",
    "threads": "right",
    "batch": "right",
    "data": "right",
    "per epoch": "right",
    "steps": "right",
    "memory": "right",
    "fits": "left",
    "time": "right",
    "GPU-h": "right",
    "cost": "right",
}
_SAID_WHERE_VARIED = ("image", "activations")
"""Columns that are nowhere where all trials have the same in them."""
_SAID_ONCE = ("precision", "hosts", "threads", "data", "per epoch", "steps")
"""Columns that are one line above the table where all trials have the same in them."""


def _row(plan: Plan, trial_id: str, trial: Trial) -> dict[str, str]:
    """What the table says of one trial, by column."""
    epoch, steps = steps_of(plan, trial_id, trial)
    train = trial.train
    return {
        "engine": engine_name(train),
        "precision": train.precision,
        "image": str(trial.model.image_size),
        "activations": "computed again" if train.activation_checkpointing else "kept",
        "ranks": str(trial.world.size),
        "hosts": str(trial.world.nodes),
        "threads": str(trial.world.threads_per_rank),
        "batch": _batch(train),
        "data": f"{trial.data.fraction:.3g}",
        "per epoch": str(epoch),
        "steps": str(steps),
    }


def _batch(train: TrainSpec) -> str:
    """ "16", "16 x2" or "(20 + 12) x2": the images per micro-step of a rank, or of each, and the accumulation."""
    at_once = in_words(train.micro_batches) if train.micro_batches else str(train.micro_batch)
    if train.grad_accum == 1:
        return at_once
    return f"({at_once}) x{train.grad_accum}" if train.micro_batches else f"{at_once} x{train.grad_accum}"


def _all_alike(rows: Iterable[dict[str, str]], name: str) -> bool:
    return len({row[name] for row in rows}) == 1


def finding_lines(plan: Plan) -> list[str]:
    """What the user's DeepSpeed file will really do, one line for each finding; empty where no trial has a file."""
    trials = len(plan.record.trials)
    return [
        f"{finding.severity}: {_place(finding)}{finding.message}. Fix: {finding.advice}."
        + (f" ({len(concerned)} of {trials} trials)" if len(concerned := finding.about.trials) < trials else "")
        for finding in findings_of(plan.record.trials)
    ]


def _place(finding: Finding) -> str:
    return f"{shown_key(finding.about.key)}: " if finding.about.key else ""


def _runs(plan: Plan) -> str:
    if plan.measure.target_ci is None:
        return f"{len(plan.tasks)} runs"
    more = plan.most_runs - len(plan.tasks)
    target = f"{100 * plan.measure.target_ci:.3g} % (measure.target_ci)"
    return f"{len(plan.tasks)} runs, and up to {more} more until each epoch time is known within {target}"


def _model_of(trial: Trial) -> str:
    return trial.model.name or trial.model.hf or trial.model.factory or "model"


def preview_json(plan: Plan, outlook: Outlook = NOTHING_KNOWN) -> str:
    """The same as JSON: one object per trial."""
    trials = []
    for trial_id, trial in plan.record.trials.items():
        epoch, steps = steps_of(plan, trial_id, trial)
        trials.append(
            {
                "trial": trial_id,
                "gpus": trial.world.size,
                "repeats": plan.record.repeats,
                "steps_per_epoch": epoch,
                "steps": steps,
                "global_batch": trial.global_batch,
                "parameters": model_spec.parameters(trial.model),
                **outlook.as_json(trial_id, trial),
                "nodes": trial.world.nodes,
                "commands": commands_of(plan, trial),
                "resolved": trial.model_dump(mode="json"),
            }
        )
    content = {
        "version": 2,
        "study": plan.record.name,
        "runs": len(plan.tasks),
        "most_runs": plan.most_runs,
        "target_ci": plan.measure.target_ci,
        "expected": outlook.total_json(plan),
        "largest_image_sizes": outlook.largest_json(plan),
        "trials": trials,
        "findings": [finding_fields(finding) for finding in findings_of(plan.record.trials)],
    }
    return json.dumps(content, indent=1)


def commands_of(plan: Plan, trial: Trial, run_folder: Path = _PLACEHOLDER) -> list[list[str]]:
    """The exact argv, one or one for each host, that would start a trial's ranks."""
    return worked_out(plan.scheduler, plan.launch, trial.launcher, trial.world, run_folder, "vitscale.worker").commands
