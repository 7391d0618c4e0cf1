"""A user's own training script: what placeholders in its arguments stand for, and what can be asked of it.

"{micro_batch}" is a field of [train] or of the world, "{model.image_size}" and "{data.root}" those of other sections,
"{output}" a folder of the run's own. "{{" and "}}" are braces. Words stay words: no shell sees them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from vitscale.errors import RequestError, nearest, shown
from vitscale.trial.trial import TrainFields, TrainSpec, Trial

NAME = "script"
"""Name of a script's engine, as it distributes training itself, and of its data where the study names none."""
OUTPUT = "output"
"""Placeholder of the run's own folder, and the name of that folder."""
_PART = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")
_NOT_HANDED_ON = ("script", "arguments", "engine", "micro_batches", "deepspeed_config")
OF_OUR_LOOP = ("rank_speeds", "target_accuracy", "deepspeed_config", "accelerate_backend")
"""Fields of [train] that mean nothing to a script."""
ALWAYS_TOLD = ("script", "arguments", "engine", "device", "micro_batch", "grad_accum", "global_batch")
"""Fields of [train] that count even if no argument passes them on: what a Probe is told is checked against them."""


def placeholders(arguments: Iterable[str]) -> set[str]:
    """The names in braces."""
    return {match[1] for word in arguments for match in _PART.finditer(word) if match[1] is not None}


def filled(arguments: Sequence[str], trial: Trial, *, seed: int, repeat: int, output: Path) -> list[str]:
    """The script's arguments with the values of one run.

    Args:
        arguments: the study's arguments.
        trial: the trial whose values they take.
        seed: seed of the run.
        repeat: its number.
        output: the run's own folder for what the script writes.

    Raises:
        RequestError: a placeholder is unknown or has no value in this trial, or a brace stands alone.
    """
    values = _values(trial) | {"seed": seed, "repeat": repeat, OUTPUT: str(output)}

    def value(match: re.Match[str]) -> str:
        if match[0] in ("{{", "}}"):
            return match[0][0]
        if (name := match[1]) is None:
            raise _wrong(f"{shown(match.string)} has a brace that stands alone", "Write {{ or }} for a brace")
        if name not in values:
            what, valid = f"train.arguments: unknown placeholder {shown(match[0])}", sorted(values)
            raise RequestError(what, valid=valid, hint=nearest(name, valid))
        if values[name] is None:
            raise _wrong(f"{shown(match[0])} has no value in this trial", f"Set {name}, or remove the argument")
        return _text(values[name])

    return [_PART.sub(value, word) for word in arguments]


def _wrong(what: str, next_step: str) -> RequestError:
    return RequestError(f"train.arguments: {what}", next_step=next_step)


def _values(trial: Trial) -> dict[str, object]:
    train, world, window = trial.train, trial.world, trial.window
    return {
        **{name: value for name, value in train if name not in _NOT_HANDED_ON},
        **{f"model.{name}": value for name, value in trial.model},
        **{f"data.{name}": value for name, value in trial.data},
        "nodes": world.nodes,
        "gpus": world.size,
        "gpus_per_node": world.ranks_per_node,
        "threads_per_rank": world.threads_per_rank,
        "global_batch": trial.global_batch,
        "steps": window.steps,
        "warmup_steps": window.warmup_steps,
    }


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def unfit(train: TrainSpec) -> Iterator[tuple[str, str]]:
    """Why a script does not go with the rest of [train]: (what is in the way, next step)."""
    if train.script is None:
        what = "train.arguments" if train.arguments else f"train.engine = {shown(NAME)}"
        yield f"{what} has no meaning without train.script", 'Add script = "train.py", or remove it'
    elif train.engine != NAME:
        yield (
            f"train.engine = {shown(train.engine)} has no meaning with train.script: the script distributes training",
            'Remove it; hand a choice of the script\'s own on by train.arguments, which "train.arguments" = [[...], '
            "[...]] in [sweep] varies",
        )


def untold(train: TrainFields, by_hand: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Fields of [train] that the study sets but the script never hears of, as (what is in the way, next step).

    Args:
        train: training by a script.
        by_hand: fields that the study sets, "train.momentum" among them.
    """
    told = {*placeholders(train.arguments), *ALWAYS_TOLD}
    for field in sorted(name.removeprefix("train.") for name in by_hand if name.startswith("train.")):
        if field in OF_OUR_LOOP:
            yield f"train.{field} has no meaning with train.script: it is of vitscale's own loop", "Remove it"
        elif field != "precision" and field not in told:
            hand_on = f'Hand it on: arguments = ["--{field.replace("_", "-")}", "{{{field}}}"], or remove it'
            hand_on += " and give measure.steps, as many as the script takes" * (field == "epochs")
            yield f"train.{field} is set, and no argument of train.script hands it on", hand_on
    if "train.precision" not in by_hand and "precision" not in told:
        yield (
            "train.precision is not told to train.script: nobody knows what it computes in",
            'Set it to what the script computes in, or hand it on: "{precision}"',
        )
