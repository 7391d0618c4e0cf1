"""`vitscale check` on two hosts of a lab: the link's bandwidth, the slowed rank and the missing host are found.

The truth is physical: the kernel's shaper sets the link's rate, its CPU controller the hosts' speeds.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

import needs
from driving import start
from processes import wait_until
from vitscale.lab import Laboratory, laboratory

pytestmark = [pytest.mark.ranks, pytest.mark.alone]

MEGABITS = 240.0
CORES = (0.8, 0.4)
"""Of each host. With much less, the agents that share it with the ranks would show in the pace."""
NOBODY = "10.77.0.99"


@dataclass(frozen=True)
class Checked:
    lab: Laboratory
    exit_code: int
    told: dict[str, Any]

    def verdict(self, kind: str) -> dict[str, Any]:
        (found,) = (one for one in self.told["verdicts"] if one["kind"] == kind)
        return dict(found)


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checked]:
    needs.root_and("ip", "tc", "ssh", "sshd", "taskset")
    folder = tmp_path_factory.mktemp("checked")
    with laboratory(hosts=2, bandwidth_mbit=MEGABITS, cores_per_host=CORES[0]) as lab:
        hostfile = folder / "hosts"
        hostfile.write_text(lab.hostfile.read_text() + f"{NOBODY} slots=1\n")
        # Every rank is pinned to the first core that its host may use, and without this that is the same one.
        apart = ["taskset", "-c", str(max(os.sched_getaffinity(0)))]
        command = [sys.executable, "-m", "vitscale", "check", "--hostfile", str(hostfile), "--json", "-o", str(folder)]
        check = start(*lab.command(0, [*apart, *command]), cwd=folder)
        # Only once rank 1 measures: importing torch with so little would take half a minute.
        wait_until(lambda: any(path.stat().st_size for path in folder.glob("checks/*/rank-1.jsonl")), "rank 1 measures")
        lab.slow(1, CORES[1])
        printed, _ = check.communicate(timeout=300)
        yield Checked(lab, check.returncode, json.loads(printed[printed.index("{") :]))


def test_the_links_bandwidth_is_found(checked: Checked) -> None:
    fit = next(fit for fit in checked.told["check"]["fits"] if fit["operation"] == "all_reduce")
    assert (fit["group"], fit["ranks"]) == ("across nodes", 2)
    assert fit["bandwidth_bytes_per_second"] == pytest.approx(MEGABITS * 1e6 / 8, rel=0.1)
    # As fast as the link at most, for every operation.
    for other in checked.told["check"]["fits"]:
        assert other["bandwidth_bytes_per_second"] < 1.05 * MEGABITS * 1e6 / 8


def test_no_size_is_tried_that_would_take_longer_than_a_second(checked: Checked) -> None:
    lines = [line for rank in checked.told["check"]["ranks"] for line in rank["collectives"]]
    assert {line["operation"] for line in lines} == {"all_reduce", "all_gather", "reduce_scatter", "all_to_all"}
    largest = max(line["size_bytes"] for line in lines if line["operation"] == "all_reduce")
    assert largest == 16 * 2**20  # it takes 0.56 s; the next, 64 MiB, would take 2.2 s


def test_the_slowed_rank_is_found_and_named(checked: Checked) -> None:
    """The truth is the CPU time that the kernel gave: of a machine that others use too, less than the quota."""
    shares = [rank["compute"]["cpu_share"] for rank in checked.told["check"]["ranks"]]
    assert shares[0] <= 1.1 * CORES[0]
    assert shares[1] <= 1.1 * CORES[1]
    fastest, slow = checked.told["rank_speeds"]
    assert fastest == 1.0
    assert slow == pytest.approx(shares[1] / shares[0], rel=0.15)
    found = checked.verdict("slow-rank")
    assert (found["ranks"], found["hosts"]) == ([1], ["host1"])
    assert f"rank_speeds = [1.0, {slow}]" in found["advice"]


def test_the_host_that_is_not_there_is_named_and_the_others_are_measured(checked: Checked) -> None:
    assert checked.exit_code == 1
    found = checked.verdict("host-unreachable")
    assert (found["severity"], found["hosts"]) == ("error", [NOBODY])
    assert checked.told["check"]["ending"] == "ended"
    assert [rank["facts"]["environment"]["host"] for rank in checked.told["check"]["ranks"]] == ["host0", "host1"]
    assert all(rank["ended"] for rank in checked.told["check"]["ranks"])
    answers = [(host["name"], host["seconds"] is not None) for host in checked.told["check"]["hosts"]]
    assert answers == [("host0", True), ("host1", True), (NOBODY, False)]


def test_rank_1_reached_rank_0_and_saw_its_file(checked: Checked) -> None:
    rank = checked.told["check"]["ranks"][1]
    assert (rank["reach"]["address"], rank["reach"]["reason"]) == ("host0", "")
    assert rank["reach"]["seconds"] > 0
    assert rank["disk"]["seen_seconds"] > 0


def test_nothing_is_left_on_the_hosts(checked: Checked) -> None:
    wait_until(lambda: checked.lab.processes(0) + checked.lab.processes(1) == [], "nothing of the check is left")
