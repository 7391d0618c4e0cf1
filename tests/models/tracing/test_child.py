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

from models.tracing.real_steps import CLASSES, VIT, card_of, named
from vitscale.models.tracing.__main__ import main
from vitscale.trial.model_card import ModelCard, TraceRequest
from vitscale.trial.model_spec import ModelSpec
from vitscale.trial.trace_messages import NumberedRequest

TESTS = Path(__file__).parents[2]
Answers = list[dict[str, Any]]


def line_of(request_id: int, spec: ModelSpec) -> str:
    """A request as a line, without its end."""
    return NumberedRequest(request_id=request_id, request=TraceRequest(model=spec)).model_dump_json()


def answers(*specs: ModelSpec, options: tuple[str, ...] = (), encoding: str = "utf-8") -> Answers:
    """What a process prints for requests, one after the other, but for their numbers."""
    process = subprocess.run(
        [sys.executable, "-m", "vitscale.models.tracing", *options],
        input="".join(f"{line_of(number, spec)}\n" for number, spec in enumerate(specs)),
        env={"PYTHONPATH": str(TESTS), "PATH": "", "PYTHONIOENCODING": encoding},
        capture_output=True,
        encoding="utf-8",
        timeout=300,
    )
    assert "Traceback" not in process.stderr
    printed = [json.loads(line) for line in process.stdout.split("\n")[:-1]]
    assert [answer.pop("request_id") for answer in printed] == [*range(len(printed))]
    return printed


def is_running(process_id: int) -> bool:
    """Whether a process is there, and is no zombie that nobody has waited for."""
    try:
        stat = Path(f"/proc/{process_id}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def factory(name: str) -> ModelSpec:
    return ModelSpec(factory=f"models.tracing.factories:{name}", image_size=8, num_classes=CLASSES)


MEMORY_BYTES = 4_000_000_000
IN_TURN = (named(VIT), factory("huge"), factory("modèle"), factory("linear"), factory("ending"), factory("linear"))


@pytest.fixture(scope="module")
def printed() -> Answers:
    """What one process prints for `IN_TURN`, in a locale that cannot write all of it."""
    options = ("--memory-bytes", str(MEMORY_BYTES), "--cpu-seconds", "60")
    return answers(*IN_TURN, options=options, encoding="latin-1")


def test_a_process_prints_the_card_that_trace_returns(printed: Answers) -> None:
    assert ModelCard.model_validate(printed[0]["card"]) == card_of(IN_TURN[0])


def is_refused_and_the_next_one_answered(beyond: dict[str, Any], within: dict[str, Any], message: str) -> None:
    assert beyond.keys() == {"error"}
    assert message in beyond["error"]["reason"]
    assert ModelCard.model_validate(within["card"]).parameters == (3 * 8 * 8 + 1) * CLASSES


def test_a_request_beyond_its_memory_is_one_sentence_and_the_next_one_is_answered(
    printed: Answers,
) -> None:
    message = "counting the model took more than 4,000,000,000 bytes of memory"
    is_refused_and_the_next_one_answered(printed[1], printed[2], message)
    assert printed[1]["error"]["is_out_of_time"] is False


def test_a_request_beyond_its_time_is_one_sentence_and_the_next_one_is_answered() -> None:
    beyond, within = answers(factory("endless"), factory("linear"), options=("--cpu-seconds", "4"))
    is_refused_and_the_next_one_answered(beyond, within, "counting the model took longer than 4 CPU seconds")
    assert beyond["error"]["is_out_of_time"] is True


def test_a_model_that_ends_the_process_leaves_its_request_without_an_answer(printed: Answers) -> None:
    assert len(printed) == len(IN_TURN) - 2


def test_requests_are_utf_8_whatever_the_locale_says(printed: Answers) -> None:
    card = ModelCard.model_validate(printed[2]["card"])
    assert card.request.model.factory == "models.tracing.factories:modèle"


def test_a_process_ends_with_its_caller() -> None:
    request_json = line_of(1, factory("sleeping"))
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
        (line_of(1, factory("branching")), "at the operation _local_scalar_dense"),
        (line_of(1, factory("leaving")), "the model's code ended with SystemExit: 3"),
        (line_of(1, factory("unspeakable")), r"ValueError: \udc80"),
        (line_of(1, factory("wordless")), "the model's code ended with WordlessError"),
        (line_of(1, factory("nowhere")), "no function of that name in the module"),
        (line_of(1, ModelSpec(name="vit-b16")), "resolve"),
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
    assert message in json.loads(lines[0])["error"]["reason"]
