"""Engines, which make training distributed: a folder for each, and the table of their facts.

In a folder only `wrap` imports torch: it trains, inside a rank, on `engines.base`. All else (`facts`, `config`,
`messages`, `states`) is for the control plane. Engines of other packages register by entry points (`vitscale.engines`).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from vitscale.base import plugins
from vitscale.engines.accelerate.facts import FACTS as ACCELERATE
from vitscale.engines.ddp.facts import FACTS as DDP
from vitscale.engines.deepspeed.facts import FACTS as DEEPSPEED
from vitscale.engines.facts import EngineFacts
from vitscale.engines.fsdp2.facts import FACTS as FSDP2
from vitscale.engines.megatron.facts import FACTS as MEGATRON
from vitscale.engines.plain.facts import FACTS as PLAIN
from vitscale.errors import RequestError
from vitscale.trial import script
from vitscale.trial.fields import fields_where
from vitscale.trial.hints import meant_value
from vitscale.trial.trial import TrainSpec

ENGINES: Mapping[str, EngineFacts] = {
    "none": PLAIN,
    "ddp": DDP,
    "fsdp2": FSDP2,
    "deepspeed": DEEPSPEED,
    "accelerate": ACCELERATE,
    "megatron": MEGATRON,
}
"""The engines of vitscale, by `train.engine`."""
OPTIONS = tuple(
    option
    for option in fields_where(TrainSpec, lambda traits: traits.role in ("wrapper", "execution"))
    if option != "engine"
)
"""Fields of [train] that an engine must say it reads: how training is distributed, and how the same is executed."""
_NO_FACTS = EngineFacts(engine="")
_SCRIPT_FACTS = EngineFacts(
    engine="",
    title="own script",
    norms_unknown=lambda _: "a script's gradients are its own affair",
    checkpoint_unknown="the model is the script's",
)


def known(engine: str) -> EngineFacts:
    """Return the facts of an engine that a study is to train with; an unknown one is an error.

    Raises:
        RequestError: nobody has it, or the package that does is broken.
    """
    if engine == script.NAME:
        return _SCRIPT_FACTS
    next_step = meant_value("train.engine", engine) or "Correct train.engine"
    return plugins.known("engine", engine, ENGINES, of=EngineFacts, next_step=next_step)


@lru_cache
def of_engine(engine: str) -> EngineFacts:
    """Return the facts of an engine that results name; empty ones of an unknown engine, as an imported log may name."""
    try:
        return known(engine)
    except RequestError:
        return _NO_FACTS


def wrapper_facts(train: TrainSpec) -> EngineFacts:
    """Return the facts of the engine that wraps the model: the one that Accelerate stands for, else the trial's."""
    return of_engine(train.wrapper)


def readers_of(option: str) -> tuple[str, ...]:
    """Return the engines of vitscale that read an option of [train]."""
    return tuple(name for name, facts in ENGINES.items() if option in (*facts.options, facts.stands_for))
