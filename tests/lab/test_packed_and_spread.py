"""The same rank count packed onto one host and spread over two: separate curves, compared by intervals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import needs
from lab.hosts import vitscale_on
from vitscale.lab import laboratory

pytestmark = [pytest.mark.long(9), pytest.mark.ranks]

EXAMPLE = Path(__file__).parents[2] / "examples" / "packed_and_spread.toml"


@pytest.fixture(scope="module")
def contract(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The example under one batch policy, on two hosts with a link that is slow for what it carries."""
    needs.root_and("unshare", "nsenter", "ip", "sshd", "ssh", "mpirun")
    folder = tmp_path_factory.mktemp("packed")
    text = (
        EXAMPLE.read_text()
        .replace('["strong-micro", "weak"]', '["strong-micro"]')
        .replace("repeats = 3", "repeats = 2")
        .replace("steps = 20", "steps = 6")
        # bf16 takes several times as long on a processor that has no instructions for it.
        .replace("micro_batch = 32", 'micro_batch = 32\nprecision = "fp32"')
    )
    (folder / "study.toml").write_text(text)
    with laboratory(hosts=2, slots=2, bandwidth_mbit=400.0) as lab:
        argv = ["run", "study.toml", "-o", "results", "--hostfile", str(lab.hostfile), "--launcher", "mpirun", "--json"]
        answer = vitscale_on(lab, *argv, cwd=folder, timeout=400)
    assert answer.returncode == 0, answer.stderr
    found: dict[str, Any] = json.loads(answer.stdout)
    return found


def test_packed_and_spread_are_curves_of_their_own_that_share_the_baseline(contract: dict[str, Any]) -> None:
    trials = {trial["trial"]: trial for trial in contract["trials"]}
    curves = {curve["name"]: [trials[point["trial"]] for point in curve["points"]] for curve in contract["curves"]}
    shapes = {name: [(trial["nodes"], trial["gpus"]) for trial in points] for name, points in curves.items()}
    assert shapes == {"ddp, 1 to a host": [(1, 1), (2, 2)], "ddp, 2 to a host": [(1, 1), (1, 2)]}
    spread, packed = curves.values()
    assert spread[0] == packed[0]
    assert spread[1]["threads_per_rank"] == packed[1]["threads_per_rank"]


def test_they_are_compared_with_an_interval(contract: dict[str, Any]) -> None:
    (found,) = (one for one in contract["comparisons"] if one["gpus"] == 2)
    assert {found["first"], found["second"]} == {"ddp, 1 to a host", "ddp, 2 to a host"}
    assert found["times_as_fast_low"] < found["times_as_fast"] < found["times_as_fast_high"]
    assert found["sentence"]


def test_the_wire_is_dearer_between_hosts_than_inside_one(contract: dict[str, Any]) -> None:
    """Over 400 Mbit/s, against shared memory."""
    wire = {
        trial["nodes"]: max(rank["parts"]["wire"] for rank in trial["breakdown"]["ranks"])
        for trial in contract["trials"]
        if trial["gpus"] == 2
    }
    assert wire[2] > 2 * wire[1]
