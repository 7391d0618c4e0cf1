"""An option as a study file that `vitscale plan` and `vitscale run` take, and the command that starts its ranks."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any, NamedTuple

from vitscale.advice.candidates import as_configured
from vitscale.advice.request import Option, Work
from vitscale.base.interpreter import python_module
from vitscale.engines.variants import EngineVariant
from vitscale.errors import RequestError
from vitscale.launchers import LOCAL, Spawn, usable_launcher, with_launch_commands
from vitscale.machine.hosts import Host
from vitscale.present import units
from vitscale.study.sections import TrainSection
from vitscale.trial import script
from vitscale.trial.fields import Spec
from vitscale.trial.trial import TrainSpec, Trial, WindowSpec, World


def advised_trial(option: Option, trial: Trial, work: Work) -> Trial:
    """Return the trial that an option would run: the measured trial with the option's engine, batch and ranks.

    Args:
        option: what was advised.
        trial: the measured trial.
        work: gives the epochs to train.

    Raises:
        RequestError: the study used a DeepSpeed file of its own, or was imported: only its author can repeat that.
    """
    candidate = option.candidate
    _refuse_unrepeatable(trial, candidate.variant)
    length = _advised_length(trial, work)
    # Unequal micro-batches are for the ranks that were measured, so all ranks get the same again.
    train_changes = {"epochs": length.epochs, "micro_batches": None}
    trial_changes = {
        "train": as_configured(trial.train, candidate).model_copy(update=train_changes),
        "window": length.window,
        "world": World(
            nodes=option.nodes, ranks_per_node=candidate.ranks_per_node, threads_per_rank=trial.world.threads_per_rank
        ),
        "parallel": candidate.parallel,
        "launcher": _advised_launcher(trial.launcher, option.nodes),
    }
    return trial.model_copy(update=trial_changes)


def _refuse_unrepeatable(trial: Trial, advised_variant: EngineVariant) -> None:
    """Raise RequestError where the results lack something that a study of the advised training needs."""
    if trial.origin is not None:
        message = "these results were imported, and do not say how to start such a training"
        raise RequestError(message, next_step="Write a study with the engine, batch and ranks as advised")
    keeps_engine = EngineVariant.of_train(trial.train) == advised_variant
    if keeps_engine and trial.train.deepspeed_config is not None:
        raise RequestError(
            "the study trained with a DeepSpeed file of its own, which the results hold no copy of that a study "
            "could name",
            next_step="Take the study's own file, and set [scaling] and [train] as advised",
        )


class _TrainingLength(NamedTuple):
    """How long a trial trains, and how long it measures."""

    epochs: int | None
    window: WindowSpec


def _advised_length(trial: Trial, work: Work) -> _TrainingLength:
    """Return the epochs of the work, all of which are measured.

    Where a script of the user's takes no number of epochs it decides itself how long it trains. The study then measures
    as many steps as the one before.
    """
    train = trial.train
    script_decides = train.script is not None and "epochs" not in script.placeholders(train.arguments)
    if script_decides:
        return _TrainingLength(train.epochs, trial.window)
    return _TrainingLength(work.epochs, trial.window.model_copy(update={"steps": None}))


def _advised_launcher(measured_launcher: str, nodes: int) -> str:
    """Return the measured launcher; torchrun instead of the one that starts ranks on one host alone, for several."""
    return "torchrun" if measured_launcher == LOCAL and nodes > 1 else measured_launcher


def study_text(name: str, option: Option, trial: Trial, work: Work) -> str:
    """Return a study of one trial as TOML. Every value that decides the trial is written out, none is left to "auto".

    Args:
        name: the study's name; characters that it may not have are replaced by "-".
        option: what was advised.
        trial: the trial of the measured series that it was worked out from.
        work: for the epochs.

    Raises:
        RequestError: as `advised_trial`.
    """
    advised = advised_trial(option, trial, work)
    gpu_time = units.rank_time(option.gpu_hours.value, advised.train.device)
    interval = f"{units.seconds(option.seconds.low)} to {units.seconds(option.seconds.high)} for 9 runs in 10"
    batch_note = "." if option.keeps_batch else ", which is NOT the one that the measured study trains with."
    lines = [
        "# Written by vitscale advise.",
        f"# Expected: {units.seconds(option.seconds.value)} ({interval}), {gpu_time}; {option.label}.",
        f"# Global batch {option.global_batch:,}{batch_note}",
    ]
    if advised.launcher != trial.launcher:
        lines.append(
            f'# Measured under launcher = "{trial.launcher}", which starts ranks on one host alone: '
            f'"{advised.launcher}" starts them on several.'
        )
    study_name = re.sub(r"[^A-Za-z0-9._-]", "-", name)
    lines.append(f"name = {toml_value(study_name)}")
    for section, fields in _study_sections(option, advised).items():
        lines += ["", f"[{section}]"]
        lines += [f"{field} = {toml_value(value)}" for field, value in fields.items()]
    return "\n".join(lines) + "\n"


def _study_sections(option: Option, advised: Trial) -> dict[str, dict[str, Any]]:
    """Return section of the study -> its fields with their values, in the order of the file."""
    sections: dict[str, dict[str, Any]] = {}
    if not advised.model.unknown:
        sections["model"] = advised.model.model_dump(exclude_none=True)
    sections["data"] = _non_default_fields(advised.data)
    sections["train"] = _train_section(advised.train)
    parallel = _non_default_fields(advised.parallel)
    if parallel:
        sections["parallel"] = parallel
    sections["scaling"] = {
        "mode": "strong-micro",
        "gpus": [option.gpus],
        "gpus_per_node": option.candidate.ranks_per_node,
    }
    sections["launch"] = {"launcher": advised.launcher, "threads_per_rank": advised.world.threads_per_rank}
    window = advised.window
    sections["measure"] = {"repeats": 1, "warmup_steps": window.warmup_steps, "evaluate": window.evaluate}
    if window.steps is not None:
        sections["measure"]["steps"] = window.steps
    return sections


def _train_section(train: TrainSpec) -> dict[str, Any]:
    """Return the fields of a [train] section: those not at their defaults; precision, device and micro-batch always."""
    always: dict[str, Any] = {"engine": train.engine} if train.script is None else {}
    always |= {"precision": train.precision, "device": train.device, "micro_batch": train.micro_batch}
    left_out = {"deepspeed_config", "engine", *always}
    changed = {
        field: value
        for field, value in _non_default_fields(train).items()
        if field in TrainSection.model_fields and field not in left_out
    }
    return always | changed


def _non_default_fields(spec: Spec) -> dict[str, Any]:
    """Return the fields that are not at their defaults, and those that have none."""
    return spec.model_dump(exclude_defaults=True, exclude_none=True)


def toml_value(value: Any) -> str:
    """Return a value as TOML. It is written as in JSON, with one more character escaped."""
    text = json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False)
    return text.replace("\x7f", "\\u007f")


def start_line(file: Path, option: Option, trial: Trial, start: str | None) -> str:
    """Return the command that starts a written file.

    Args:
        file: the file.
        option: what was advised.
        trial: the trial that it was worked out from.
        start: the command of another format's file ("sky launch"); None: it is a study, for `vitscale run`.
    """
    quoted_file = shlex.quote(str(file))
    if start:
        return f"{start} {quoted_file}"
    line = f"vitscale run {quoted_file}"
    if option.nodes == 1:
        return line
    hosts = "--scheduler slurm" if trial.launcher == "srun" else "--hostfile HOSTS"
    return f"{line} {hosts}"


_SHOWN_RUN_FOLDER = Path("RESULTS/runs/TRIAL")
"""The folder of a run, in commands that are shown."""
_SHOWN_PORT = 29_500
_MOST_HOSTS_SHOWN = 2
"""Number of hosts whose commands are shown; the others' differ only in the host's number."""


def launch_lines(trial: Trial) -> list[str]:
    """Return the commands that `vitscale run` would start, a line for each of the first hosts.

    Where it would be refused, the one line is "unavailable: " and the reason.
    """
    world = trial.world
    hosts: tuple[Host, ...] = ()
    if world.nodes > 1:
        hosts = tuple(Host(f"HOST{number}", world.ranks_per_node) for number in range(1, world.nodes + 1))
    try:
        launcher = usable_launcher(trial.launcher, world, hosts)
        rank = python_module("vitscale.worker", str(_SHOWN_RUN_FOLDER), interpreter="python")
        spawn = Spawn((rank,), _SHOWN_RUN_FOLDER, hosts, _SHOWN_PORT)
        launch = with_launch_commands(trial.launcher, launcher, world, spawn)
    except RequestError as error:
        return [f"unavailable: {error}"]
    lines = [shlex.join(command) for command in launch.commands[:_MOST_HOSTS_SHOWN]]
    other_commands = len(launch.commands) - _MOST_HOSTS_SHOWN
    if other_commands > 0:
        lines.append(f"... and {other_commands} more, one on each host")
    return lines
