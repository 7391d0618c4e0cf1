"""The tracer in a process of its own: a card or one sentence, within bounds."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from models.tracing.real_steps import CLASSES, VIT, named
from vitscale.models.tracing import trace
from vitscale.models.tracing.__main__ import main
from vitscale.trial.model_card import ModelCard, TraceRequest
from vitscale.trial.model_spec import ModelSpec

TESTS = Path(__file__).parents[2]


def answers(*specs: ModelSpec, options: tuple[str, ...] = (), encoding: str = "utf-8") -> list[dict[str, Any]]:
    """What a process prints for requests, one after the other."""
    process = subprocess.run(
        [sys.executable, "-m", "vitscale.models.tracing", *options],
        input="".join(f"{TraceRequest(model=spec).model_dump_json()}\n" for spec in specs),
        env={"PYTHONPATH": str(TESTS), "PATH": "", "PYTHONIOENCODING": encoding},
        capture_output=True,
        encoding="utf-8",
        timeout=120,
    )
    assert "Traceback" not in process.stderr
    return [json.loads(line) for line in process.stdout.split("\n")[:-1]]


def is_running(process_id: int) -> bool:
    """Whether a process is there, and is no zombie that nobody has waited for."""
    try:
        stat = Path(f"/proc/{process_id}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


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


def test_requests_are_utf_8_whatever_the_locale_says() -> None:
    (printed,) = answers(factory("modèle"), encoding="latin-1")
    assert ModelCard.model_validate(printed).request.model.factory == "models.tracing.factories:modèle"


def test_a_process_ends_with_its_caller() -> None:
    request_json = TraceRequest(model=factory("sleeping")).model_dump_json()
    caller = f"""
import os, subprocess, sys
options = ["-m", "vitscale.models.tracing", f"--parent={{os.getpid()}}"]
process = subprocess.Popen([sys.executable, *options], stdin=subprocess.PIPE, stderr=subprocess.PIPE)
process.stdin.write({request_json.encode()!r} + b"\\n")
process.stdin.flush()
assert process.stderr.readline() == b"sleeping\\n"
print(process.pid, flush=True)
os._exit(0)  # what SIGKILL would do: nothing is tidied up
"""
    printed = subprocess.run(
        [sys.executable, "-c", caller], env={"PYTHONPATH": str(TESTS), "PATH": ""}, stdout=subprocess.PIPE, timeout=120
    ).stdout
    deadline = time.monotonic() + 20
    while is_running(int(printed)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


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
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(f"{request_json}\n".encode())))
    assert main([]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert len(lines) == 1
    assert message in json.loads(lines[0])["error"]
