"""Stands in for the process that traces models, without torch: `python -m study.quick_tracer`, as a real process.

It answers each request with the card of `card_factory`, in its own way where the model is one of these factories.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from card_factory import make_card
from vitscale.base.distribution import versions_of
from vitscale.processes.parent_death import end_with_parent
from vitscale.trial.model_card import TRACER_VERSION, ModelCard, TraceRequest
from vitscale.trial.trace_messages import CardAnswer, NumberedRequest

SLEEP_SECONDS = 600


def card_of(request: TraceRequest) -> ModelCard:
    """The card with which every request is answered."""
    installed = {library: version for library, version in versions_of(["torch"]).items() if version is not None}
    return make_card().model_copy(update={"request": request, "versions": installed | {"tracer": TRACER_VERSION}})


def write_line(line: bytes) -> None:
    os.write(1, line + b"\n")


def answer(asked: NumberedRequest) -> None:
    write_line(CardAnswer(request_id=asked.request_id, card=card_of(asked.request)).model_dump_json().encode())


def junk_then_answer(asked: NumberedRequest) -> None:
    write_line(b"junk")
    answer(asked)


def answer_then_junk(asked: NumberedRequest) -> None:
    answer(asked)
    write_line(b"junk")


def answer_twice(asked: NumberedRequest) -> None:
    answer(asked)
    answer(asked)


def answer_to_another(asked: NumberedRequest) -> None:
    answer(asked.model_copy(update={"request_id": asked.request_id + 1}))


def card_of_another(asked: NumberedRequest) -> None:
    request = asked.request.model_copy(update={"device": "cuda"})
    answer(asked.model_copy(update={"request": request}))


def sleep(asked: NumberedRequest) -> None:
    """Writes the process's id into the folder of modules, and sleeps."""
    folder = next(argument.partition("=")[2] for argument in sys.argv if argument.startswith("--import-folder="))
    with Path(folder, "pids").open("a") as file:
        file.write(f"{os.getpid()}\n")
    time.sleep(SLEEP_SECONDS)


BEHAVIOURS: Mapping[str, Callable[[NumberedRequest], None]] = {
    "junk_then_answer": junk_then_answer,
    "answer_then_junk": answer_then_junk,
    "answer_twice": answer_twice,
    "answer_to_another": answer_to_another,
    "card_of_another": card_of_another,
    "sleeping": sleep,
}


def main() -> None:
    parent = next(argument.partition("=")[2] for argument in sys.argv if argument.startswith("--parent="))
    if not end_with_parent(int(parent)):
        return
    for line in sys.stdin.buffer:
        asked = NumberedRequest.model_validate_json(line)
        function = (asked.request.model.factory or "").partition(":")[2]
        BEHAVIOURS.get(function, answer)(asked)


if __name__ == "__main__":
    main()
