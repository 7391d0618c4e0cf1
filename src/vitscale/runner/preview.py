"""What `vitscale plan` shows."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table

from vitscale import model_spec
from vitscale.launchers import launcher_for
from vitscale.runner.planning import Plan
from vitscale.trial import Trial, samples_used, steps_per_epoch

_PLACEHOLDER = Path("RESULTS/runs/TRIAL")


def _steps(plan: Plan, trial_id: str, trial: Trial) -> tuple[int, int]:
    """Optimizer steps in an epoch and in the run."""
    train = trial.train
    images = samples_used(plan.expansion.train_samples[trial_id], trial.data.fraction)
    epoch = steps_per_epoch(images, trial.world.size, train.micro_batch, train.grad_accum, train.drop_last)
    if trial.window.steps is not None:
        return epoch, trial.window.steps + trial.window.warmup_steps
    return epoch, epoch * (train.epochs or 0)


def preview_table(plan: Plan) -> list[RenderableType]:
    """A table of the trials that fits a terminal of 80 columns, and the commands that would start them."""
    models = {_model_of(trial): model_spec.parameters(trial.model) for trial in plan.record.trials.values()}
    lines: list[RenderableType] = [
        escape(f"{plan.record.name}: {len(plan.record.trials)} trials, {_runs(plan)}"),
        *(
            escape(f"{name}: {f'{count:,}' if count is not None else 'unavailable number of'} parameters")
            for name, count in models.items()
        ),
    ]
    table = Table(box=None, pad_edge=False)
    table.add_column("trial", no_wrap=True)
    if len(models) > 1:
        table.add_column("model", overflow="fold")
    for name in ("engine", "precision"):
        table.add_column(name)
    for name in ("ranks", "threads", "batch", "data", "per epoch", "steps"):
        table.add_column(name, justify="right")
    for trial_id, trial in plan.record.trials.items():
        epoch, steps = _steps(plan, trial_id, trial)
        train = trial.train
        table.add_row(
            trial_id,
            *([escape(_model_of(trial))] if len(models) > 1 else []),
            train.engine,
            train.precision,
            str(trial.world.size),
            str(trial.world.threads_per_rank),
            str(train.micro_batch) + (f" x{train.grad_accum}" if train.grad_accum > 1 else ""),
            f"{trial.data.fraction:.3g}",
            str(epoch),
            str(steps),
        )
    commands = sorted({shlex.join(_command(trial)) for trial in plan.record.trials.values()})
    return [*lines, "", table, "", "Commands:", *(escape(f"  {command}") for command in commands)]


def _runs(plan: Plan) -> str:
    if plan.measure.target_ci is None:
        return f"{len(plan.tasks)} runs"
    more = plan.most_runs - len(plan.tasks)
    target = f"{100 * plan.measure.target_ci:.3g} % (measure.target_ci)"
    return f"{len(plan.tasks)} runs, and up to {more} more until each epoch time is known within {target}"


def _model_of(trial: Trial) -> str:
    return trial.model.name or trial.model.hf or trial.model.factory or "model"


def preview_json(plan: Plan) -> str:
    """The same as JSON: one object per trial."""
    trials = []
    for trial_id, trial in plan.record.trials.items():
        epoch, steps = _steps(plan, trial_id, trial)
        trials.append(
            {
                "trial": trial_id,
                "gpus": trial.world.size,
                "repeats": plan.record.repeats,
                "steps_per_epoch": epoch,
                "steps": steps,
                "global_batch": trial.global_batch,
                "parameters": model_spec.parameters(trial.model),
                "command": _command(trial),
                "resolved": trial.model_dump(mode="json"),
            }
        )
    content = {
        "version": 1,
        "study": plan.record.name,
        "runs": len(plan.tasks),
        "most_runs": plan.most_runs,
        "target_ci": plan.measure.target_ci,
        "trials": trials,
    }
    return json.dumps(content, indent=1)


def _command(trial: Trial) -> list[str]:
    return launcher_for(trial).command(trial.world, _PLACEHOLDER)
