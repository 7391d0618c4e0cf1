"""The tracer in a process of its own: a card or one sentence, within bounds."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from models.tracing.real_steps import CLASSES, VIT, named
from vitscale.models.tracing import trace
from vitscale.models.tracing.__main__ import main
from vitscale.trial.model_card import ModelCard, TraceRequest
from vitscale.trial.model_spec import ModelSpec

TESTS = Path(__file__).parents[2]


def answers(*specs: ModelSpec, options: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """What a process prints for requests, one after the other."""
    process = subprocess.run(
        [sys.executable, "-m", "vitscale.models.tracing", *options],
        input="".join(f"{TraceRequest(model=spec).model_dump_json()}\n" for spec in specs),
        env={"PYTHONPATH": str(TESTS), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "Traceback" not in process.stderr
    return [json.loads(line) for line in process.stdout.splitlines()]


def factory(name: str) -> ModelSpec:
    return ModelSpec(factory=f"models.tracing.factories:{name}", image_size=8, num_classes=CLASSES)


def test_a_process_prints_the_card_that_trace_returns() -> None:
    spec = named(VIT)
    (printed,) = answers(spec, options=("--memory-bytes", "4000000000", "--cpu-seconds", "60"))
    assert ModelCard.model_validate(printed) == trace(TraceRequest(model=spec))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("endless", ("--cpu-seconds", "4"), "counting the model took longer than 4 CPU seconds"),
        ("huge", ("--memory-bytes", "2000000000"), "counting the model took more than 2,000,000,000 bytes of memory"),
    ],
)
def test_a_request_beyond_its_bounds_is_one_sentence_and_the_next_one_is_answered(
    name: str, options: tuple[str, str], message: str
) -> None:
    beyond, within = answers(factory(name), factory("linear"), options=options)
    assert beyond.keys() == {"error"}
    assert message in beyond["error"]
    assert ModelCard.model_validate(within).parameters == (3 * 8 * 8 + 1) * CLASSES


def test_a_model_that_ends_the_process_leaves_its_request_without_an_answer() -> None:
    assert len(answers(factory("linear"), factory("ending"), factory("linear"))) == 1


@pytest.mark.parametrize(
    ("request_json", "message"),
    [
        (TraceRequest(model=factory("branching")).model_dump_json(), "at the operation _local_scalar_dense"),
        (TraceRequest(model=factory("leaving")).model_dump_json(), "the model's code ended with SystemExit: 3"),
        (TraceRequest(model=factory("nowhere")).model_dump_json(), "no function of that name in the module"),
        (TraceRequest(model=ModelSpec(name="vit-b16")).model_dump_json(), "resolve"),
        ("{}", "standard input is no request: Field required"),
        ("", "standard input is no request: Invalid JSON"),
    ],
)
def test_what_stops_a_trace_is_one_sentence(
    request_json: str, message: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{request_json}\n"))
    assert main([]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert len(lines) == 1
    assert message in json.loads(lines[0])["error"]
