"""An option as a study file that `vitscale plan` and `vitscale run` take, and the command that starts its ranks."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

from vitscale.advice.candidates import as_configured
from vitscale.advice.request import Option, Work
from vitscale.base.interpreter import python_module
from vitscale.engines.variants import EngineVariant
from vitscale.errors import RequestError
from vitscale.launchers import LOCAL, Spawn, launched, launcher_named
from vitscale.machine.hosts import Host
from vitscale.present import units
from vitscale.study.sections import TrainSection
from vitscale.trial import script
from vitscale.trial.fields import Spec
from vitscale.trial.trial import TrainSpec, Trial, World


def advised_trial(option: Option, trial: Trial, work: Work) -> Trial:
    """What an option would run: the measured `trial` with the option's engine, batch and ranks.

    The launcher is the measured one too, but for torchrun where that one cannot reach the option's other hosts.

    Raises:
        RequestError: the study used a DeepSpeed file of its own, or was imported: only its author can repeat that.
    """
    own = trial.train
    chosen = option.candidate
    if trial.origin is not None:
        what = "these results were imported, and do not say how to start such a training"
        raise RequestError(what, next_step="Write a study with the engine, batch and ranks as advised")
    if own.deepspeed_config is not None and EngineVariant.of_train(own) == chosen.variant:
        raise RequestError(
            "the study trained with a DeepSpeed file of its own, which the results hold no copy of that a study "
            "could name",
            next_step="Take the study's own file, and set [scaling] and [train] as advised",
        )
    train = as_configured(own, chosen).model_copy(update={"epochs": work.epochs, "micro_batches": None})
    window = trial.window.model_copy(update={"steps": None})
    if own.script is not None and "epochs" not in script.placeholders(own.arguments):
        # The script itself decides how long it trains: the study measures as many steps as the one before.
        train, window = train.model_copy(update={"epochs": own.epochs}), trial.window
    world = World(
        nodes=option.nodes, ranks_per_node=chosen.ranks_per_node, threads_per_rank=trial.world.threads_per_rank
    )
    launcher = "torchrun" if world.nodes > 1 and trial.launcher == LOCAL else trial.launcher
    return trial.model_copy(
        update={"train": train, "world": world, "window": window, "parallel": chosen.parallel, "launcher": launcher}
    )


def study_text(name: str, option: Option, trial: Trial, work: Work) -> str:
    """TOML of one trial: every value that decides it is written out, none left to "auto".

    Args:
        name: the study's name; what a study's name may not hold is replaced.
        option: what was advised.
        trial: the trial of the measured series that it was worked out from.
        work: for the epochs.

    Raises:
        RequestError: as `advised_trial`.
    """
    advised = advised_trial(option, trial, work)
    window = advised.window
    sections: dict[str, dict[str, Any]] = {
        **({} if advised.model.unknown else {"model": advised.model.model_dump(exclude_none=True)}),
        "data": _changed(advised.data),
        "train": _train(advised.train),
        **({"parallel": split} if (split := _changed(advised.parallel)) else {}),
        "scaling": {"mode": "strong-micro", "gpus": [option.gpus], "gpus_per_node": option.candidate.ranks_per_node},
        "launch": {"launcher": advised.launcher, "threads_per_rank": advised.world.threads_per_rank},
        "measure": {"repeats": 1, "warmup_steps": window.warmup_steps, "evaluate": window.evaluate}
        | ({} if window.steps is None else {"steps": window.steps}),
    }
    spent = units.rank_time(option.gpu_hours.value, advised.train.device)
    lines = [
        "# Written by vitscale advise.",
        f"# Expected: {units.seconds(option.seconds.value)} ({units.seconds(option.seconds.low)} to "
        f"{units.seconds(option.seconds.high)} for 9 runs in 10), {spent}; "
        f"{option.label}.",
        f"# Global batch {option.global_batch:,}"
        + ("." if option.keeps_batch else ", which is NOT the one that the measured study trains with."),
        f"name = {toml_value(re.sub(r'[^A-Za-z0-9._-]', '-', name))}",
    ]
    if advised.launcher != trial.launcher:
        lines[-1:-1] = [
            f'# Measured under launcher = "{trial.launcher}", which starts ranks on one host alone: '
            f'"{advised.launcher}" starts them on several.'
        ]
    for section, keys in sections.items():
        lines += ["", f"[{section}]", *(f"{key} = {toml_value(value)}" for key, value in keys.items())]
    return "\n".join(lines) + "\n"


def _train(train: TrainSpec) -> dict[str, Any]:
    """Fields of a [train] section that are not at their defaults; precision, device and micro-batch in any case."""
    always = {
        **({"engine": train.engine} if train.script is None else {}),
        "precision": train.precision,
        "device": train.device,
        "micro_batch": train.micro_batch,
    }
    taken = {key: value for key, value in _changed(train).items() if key in TrainSection.model_fields}
    return always | {key: value for key, value in taken.items() if key not in ("deepspeed_config", "engine", *always)}


def _changed(spec: Spec) -> dict[str, Any]:
    """Fields that are not at their defaults, and those that have none."""
    return spec.model_dump(exclude_defaults=True, exclude_none=True)


def toml_value(value: Any) -> str:
    """A TOML value: JSON's are TOML's too, but for what must be escaped in a string."""
    text = json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False)
    return text.replace("\x7f", "\\u007f")


def start_line(file: Path, option: Option, trial: Trial, start: str | None) -> str:
    """The command that starts a written file: by another format's `start`, or a study's, with where hosts are named."""
    hosts = "--scheduler slurm" if trial.launcher == "srun" else "--hostfile HOSTS"
    line = f"{start or 'vitscale run'} {shlex.quote(str(file))}"
    return line if start or option.nodes == 1 else f"{line} {hosts}"


_FOLDER = Path("RESULTS/runs/TRIAL")
_PORT = 29_500
_SHOWN = 2
"""How many hosts' commands are shown; the others' differ only in the host's number."""


def launch_lines(trial: Trial) -> list[str]:
    """What `vitscale run` would start, one line for each of the first hosts; else one line that says why not."""
    world = trial.world
    hosts = tuple(Host(f"HOST{n}", world.ranks_per_node) for n in range(1, world.nodes + 1)) if world.nodes > 1 else ()
    try:
        launcher = launcher_named(trial.launcher, world, hosts)
        rank = python_module("vitscale.worker", str(_FOLDER), interpreter="python")
        spawn = Spawn((rank,), _FOLDER, hosts, _PORT)
        launch = launched(trial.launcher, launcher, world, spawn)
    except RequestError as error:
        return [f"unavailable: {error}"]
    lines = [shlex.join(command) for command in launch.commands[:_SHOWN]]
    if (more := len(launch.commands) - _SHOWN) > 0:
        lines.append(f"... and {more} more, one on each host")
    return lines
