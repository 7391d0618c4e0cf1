"""The collectives of training on one rank: none."""

from __future__ import annotations

from vitscale.engines.messages import Message
from vitscale.trial.model_cost import ParameterShapes
from vitscale.trial.trial import Trial


def messages(trial: Trial, shapes: ParameterShapes) -> tuple[Message, ...]:
    """Return nothing: there is nobody to send to."""
    del trial, shapes
    return ()
