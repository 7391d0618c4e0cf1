"""What a study, an analysis and a prediction know of the engine; torch is not imported here."""

from __future__ import annotations

import math

from vitscale.engines.facts import BLOCK_OPTIONS, ONE_PROCESS, EngineFacts
from vitscale.engines.messages import Message
from vitscale.trial.model_cost import ParameterShapes
from vitscale.trial.trial import Trial


def messages(trial: Trial, shapes: ParameterShapes) -> tuple[Message, ...]:
    """One sum of each gradient when backward is over."""
    sizes = (4 * math.prod(shape) for shape in shapes.tensors())
    return tuple(Message("all_reduce", size, 1, "after", None, micro_steps="last") for size in sizes)


FACTS = EngineFacts(
    engine="vitscale_example.engine:SummedEngine",
    packages=("vitscale-example",),
    options=BLOCK_OPTIONS,
    trains_like=ONE_PROCESS,
    steps_between_exchanges=lambda _: 1,
    messages="vitscale_example.engine_facts:messages",
)
