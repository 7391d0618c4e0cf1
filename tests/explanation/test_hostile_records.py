"""Records in which anything may stand: there is always an answer of 25 lines, and its JSON can be written."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hooked_factory import SimulatedJob, samples
from vitscale.explanation.answer import explain_ranks
from vitscale.explanation.rank_record import HookedRank
from vitscale.explanation.words import SessionFacts, answer_document, answer_fields
from vitscale.hook import lines
from vitscale.present.data import nonfinite_as_null
from vitscale.present.terminal import lines as terminal_lines

pytestmark = pytest.mark.computing

SESSION = SessionFacts(Path("vitscale-explain-1"))
WHOLE = (-1, 0, 1, 2, 7, 10**9, 2**63, 2**80, -(2**63))
REAL = (-1.0, 0.0, 1e-300, 1e-9, 0.1, 1.0, 1e5, 1e9, 1e300, math.nan, math.inf, -math.inf)
TEXTS = ("", "cpu", "NVIDIA H100 80GB HBM3", "evaluation", "odd", "float32", "x" * 5000, "\x1b[2J\n\u202e", "a\0b")


def odd_value(value: object, noise: random.Random) -> object:
    """A value of the same type that no rank would write, or None."""
    if isinstance(value, bool):
        return noise.random() < 0.5
    if isinstance(value, int):
        return noise.choice(WHOLE)
    if isinstance(value, float):
        return noise.choice(REAL)
    if isinstance(value, str):
        return noise.choice(TEXTS)
    return value


def odd(line: Any, noise: random.Random, share: float) -> Any:
    """The same line with some of its fields replaced."""
    changes = {}
    for field in dataclasses.fields(line):
        if noise.random() < share:
            changes[field.name] = odd_value(getattr(line, field.name), noise)
    return dataclasses.replace(line, **changes)


def spoil_steps(record: HookedRank, noise: random.Random) -> HookedRank:
    return dataclasses.replace(record, steps=[odd(step, noise, 0.02) for step in record.steps])


def spoil_all_steps(record: HookedRank, noise: random.Random) -> HookedRank:
    return dataclasses.replace(record, steps=[odd(step, noise, 0.5) for step in record.steps])


def spoil_facts(record: HookedRank, noise: random.Random) -> HookedRank:
    facts: dict[str, Any] = {}
    for name in ("rank", "model", "loader", "optimizer"):
        facts[name] = odd(getattr(record, name), noise, 0.4)
    return dataclasses.replace(record, **facts)


def spoil_breaks_and_samples(record: HookedRank, noise: random.Random) -> HookedRank:
    breaks = [odd(line, noise, 0.4) for line in record.breaks]
    rows = [(noise.choice(TEXTS), noise.choice(WHOLE), noise.choice(TEXTS), noise.choice(WHOLE)) for _ in range(5)]
    parts = [samples(part, rows, noise.choice(WHOLE)) for part in (*lines.SAMPLED_PARTS, "odd")]
    return dataclasses.replace(record, breaks=breaks, samples=parts)


def lose_some(record: HookedRank, noise: random.Random) -> HookedRank:
    """A record without most kinds of lines, and with some of its steps in any order."""
    steps = [step for step in record.steps if noise.random() < 0.8]
    noise.shuffle(steps)
    return HookedRank(record.rank, steps=steps, breaks=record.breaks)


SPOILERS = (spoil_steps, spoil_all_steps, spoil_facts, spoil_breaks_and_samples, lose_some)


@pytest.mark.parametrize("spoil", SPOILERS)
@pytest.mark.parametrize("ranks", [1, 3])
def test_there_is_an_answer_whatever_stands_in_the_records(
    spoil: Callable[[HookedRank, random.Random], HookedRank], ranks: int
) -> None:
    job = SimulatedJob(
        ranks=ranks,
        planted={"data": lambda rank, step: 0.05, "other": lambda rank, step: 0.2 if step % 10 == 0 else 0.0},
        breaks={step: {0: 1.0} for step in range(10, 41, 10)},
    )
    records = job.records()
    for seed in range(25):
        noise = random.Random(seed)
        answer = explain_ranks([spoil(record, noise) for record in records], Path("no-such-folder"))
        text = [line.plain for line in terminal_lines(answer_document(answer, SESSION))]
        assert len(text) <= 25
        assert all(line.isprintable() for line in text)
        json.dumps(nonfinite_as_null(answer_fields(answer, SESSION)), allow_nan=False)
        if answer.parts is not None:
            assert 0 < answer.parts.step.value <= 1e6
