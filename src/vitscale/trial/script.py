"""A user's own training script: the placeholders in its arguments, and the fields of a study that it may leave out.

"{micro_batch}" is a field of [train] or of the world, "{model.image_size}" and "{data.root}" those of other sections,
"{output}" a folder of the run's own. "{{" and "}}" are braces. Words stay words: no shell sees them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from vitscale.errors import RequestError, nearest, shown
from vitscale.trial.trial import TrainFields, TrainSpec, Trial

NAME = "script"
"""Name of a script's engine, as it distributes training itself, and of its data where the study names none."""
OUTPUT = "output"
"""Placeholder of the run's own folder, and the name of that folder."""
_BRACE_OR_PLACEHOLDER = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")
"""A doubled brace, a placeholder, or a brace that stands alone."""
_FIELDS_WITHOUT_PLACEHOLDER = ("script", "arguments", "engine", "micro_batches", "deepspeed_config")
"""Fields of [train] that cannot be handed on."""
VITSCALE_LOOP_FIELDS = ("rank_speeds", "target_accuracy", "deepspeed_config", "accelerate_backend")
"""Fields of [train] that mean nothing to a script."""
CHECKED_FIELDS = ("script", "arguments", "engine", "device", "micro_batch", "grad_accum", "global_batch")
"""Fields of [train] that count even if no argument passes them on: the values that a script gives to its Probe are
checked against them."""


def placeholders(arguments: Iterable[str]) -> set[str]:
    """Return the names in single braces: {"micro_batch"} for "--batch={micro_batch}"."""
    names = set()
    for word in arguments:
        for match in _BRACE_OR_PLACEHOLDER.finditer(word):
            if match[1] is not None:
                names.add(match[1])
    return names


def filled(arguments: Sequence[str], trial: Trial, *, seed: int, repeat: int, output: Path) -> list[str]:
    """Return the script's arguments with the values of one run in place of placeholders.

    Args:
        arguments: the study's arguments.
        trial: the trial whose values they take.
        seed: seed of the run.
        repeat: its number.
        output: the run's own folder for what the script writes.

    Raises:
        RequestError: a placeholder is unknown or has no value in this trial, or a brace stands alone.
    """
    values = _value_by_placeholder(trial) | {"seed": seed, "repeat": repeat, OUTPUT: str(output)}

    def replacement(match: re.Match[str]) -> str:
        if match[0] in ("{{", "}}"):
            return match[0][0]
        name = match[1]
        if name is None:
            what = f"{shown(match.string)} has a brace that stands alone"
            raise _wrong_argument(what, next_step="Write {{ or }} for a brace")
        if name not in values:
            valid = sorted(values)
            what = f"train.arguments: unknown placeholder {shown(match[0])}"
            raise RequestError(what, valid=valid, hint=nearest(name, valid))
        if values[name] is None:
            what = f"{shown(match[0])} has no value in this trial"
            raise _wrong_argument(what, next_step=f"Set {name}, or remove the argument")
        return _argument_text(values[name])

    return [_BRACE_OR_PLACEHOLDER.sub(replacement, word) for word in arguments]


def _wrong_argument(what: str, *, next_step: str) -> RequestError:
    """Return the error for an argument of the script that cannot be filled."""
    return RequestError(f"train.arguments: {what}", next_step=next_step)


def _value_by_placeholder(trial: Trial) -> dict[str, object]:
    """Return placeholder -> its value in a trial, all but those of a single run; None where a field is not set."""
    train = trial.train
    world = trial.world
    window = trial.window
    return {
        **{name: value for name, value in train if name not in _FIELDS_WITHOUT_PLACEHOLDER},
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


def _argument_text(value: object) -> str:
    """Return "true", "1,2" for the tuple (1, 2), and else what `str` gives."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value)


class Obstacle(NamedTuple):
    """A field of [train] that does not go with the script."""

    what: str
    """What is wrong, for a message."""
    next_step: str


def unfit(train: TrainSpec) -> Iterator[Obstacle]:
    """Yield the fields of [train] that need a script which is not there, or an engine that a script does not use."""
    if train.script is None:
        what = "train.arguments" if train.arguments else f"train.engine = {shown(NAME)}"
        yield Obstacle(f"{what} has no meaning without train.script", 'Add script = "train.py", or remove it')
    elif train.engine != NAME:
        yield Obstacle(
            f"train.engine = {shown(train.engine)} has no meaning with train.script: the script distributes training",
            'Remove it; hand a choice of the script\'s own on by train.arguments, which "train.arguments" = [[...], '
            "[...]] in [sweep] varies",
        )


def fields_not_handed_on(train: TrainFields, set_fields: Iterable[str]) -> Iterator[Obstacle]:
    """Yield the fields of [train] that the study sets and no argument of the script hands on.

    Args:
        train: training by a script.
        set_fields: fields that the study sets, "train.momentum" among them.
    """
    set_fields = frozenset(set_fields)
    handed_on = {*placeholders(train.arguments), *CHECKED_FIELDS}
    names = [field.removeprefix("train.") for field in set_fields if field.startswith("train.")]
    for name in sorted(names):
        if name in VITSCALE_LOOP_FIELDS:
            what = f"train.{name} has no meaning with train.script: it is of vitscale's own loop"
            yield Obstacle(what, next_step="Remove it")
        elif name != "precision" and name not in handed_on:
            what = f"train.{name} is set, and no argument of train.script hands it on"
            yield Obstacle(what, next_step=_how_to_hand_on(name))
    if "train.precision" not in set_fields and "precision" not in handed_on:
        yield Obstacle(
            "train.precision is not told to train.script: nobody knows what it computes in",
            'Set it to what the script computes in, or hand it on: "{precision}"',
        )


def _how_to_hand_on(field: str) -> str:
    """Return what to write so that a script gets a field of [train].

    Example: 'Hand it on: arguments = ["--grad-accum", "{grad_accum}"], or remove it'.
    """
    option = field.replace("_", "-")
    step = f'Hand it on: arguments = ["--{option}", "{{{field}}}"], or remove it'
    if field == "epochs":  # without steps the length of a script's run would not be known
        step += " and give measure.steps, as many as the script takes"
    return step
