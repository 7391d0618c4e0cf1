"""Lines of JSON between a plan and the process that traces models: numbered requests, and an answer to each.

    {"request_id": 1, "request": {...}}                                                 a request
    {"request_id": 1, "card": {...}}                                                    its answer: the card
    {"request_id": 1, "error": {"reason": "one sentence", "is_out_of_time": false}}     or why there is none

An answer repeats the number of its request: any other line, as a model's own code may print, is no answer to it.
"""

from __future__ import annotations

from functools import cache
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from vitscale.trial.model_card import ModelCard, TraceRequest


class _TraceMessage(BaseModel):
    """Base of messages and their parts: immutable; unknown keys are refused, for both directions are input."""

    # Validators are built at first use: most plans import this module, and trace nothing.
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


class NumberedRequest(_TraceMessage):
    """A model to trace."""

    request_id: int
    request: TraceRequest


class TraceRefusal(_TraceMessage):
    """Why a model has no card."""

    reason: Annotated[str, Field(min_length=1)]
    is_out_of_time: bool = False
    """Whether tracing took too long, as it would again for the same model in another precision or image size."""


class CardAnswer(_TraceMessage):
    """The card of a request."""

    request_id: int
    card: ModelCard

    def is_of(self, numbered: NumberedRequest) -> bool:
        """Whether it answers this request."""
        return self.request_id == numbered.request_id and self.card.request == numbered.request


class RefusalAnswer(_TraceMessage):
    """Why a request has no card."""

    request_id: int | None
    """None where the line was no request."""
    error: TraceRefusal

    def is_of(self, numbered: NumberedRequest) -> bool:
        """Whether it answers this request."""
        return self.request_id == numbered.request_id


TraceAnswer = CardAnswer | RefusalAnswer


@cache
def _answer_adapter() -> TypeAdapter[TraceAnswer]:
    """Return what validates answers."""
    return TypeAdapter(TraceAnswer)


def parse_answer(line: bytes) -> TraceAnswer | None:
    """Return the answer that a line of JSON is; None where it is none."""
    try:
        return _answer_adapter().validate_json(line)
    except ValueError:
        return None
