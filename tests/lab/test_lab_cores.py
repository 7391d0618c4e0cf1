"""Hosts of a lab compute on cores of their own where there are enough."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import needs
from vitscale.lab import laboratory
from vitscale.lab.building import own_cores
from vitscale.lab.state import LabPlan


@pytest.mark.parametrize(
    ("plan", "cores", "expected"),
    [
        (LabPlan(hosts=2), [0, 1], [{0}, {1}]),
        (LabPlan(hosts=2), [0, 1, 2, 3, 4], [{0, 1}, {2, 3}]),
        (LabPlan(hosts=3, cores_per_host=0.4), [4, 7], [{4}, {7}, {4}]),
        (LabPlan(hosts=2, slots=2), [0, 1, 2, 3], [{0, 1}, {2, 3}]),
        (LabPlan(hosts=2, slots=2), [0, 1], None),  # two ranks would sit on one core, and one be idle
    ],
)
def test_shares(plan: LabPlan, cores: list[int], expected: list[set[int]] | None) -> None:
    assert own_cores(plan, cores) == expected


def test_what_runs_on_a_host_is_held_to_its_cores() -> None:
    """Started from outside, and over ssh from another host."""
    needs.root_and("ip", "ssh", "sshd")
    program = "import os; print(sorted(os.sched_getaffinity(0)))"
    cores = sorted(os.sched_getaffinity(0))
    with laboratory(hosts=2) as lab:
        entered = [lab.command(host, [sys.executable, "-c", program]) for host in (0, 1)]
        by_ssh = lab.command(0, ["ssh", "host1", f"{sys.executable} -c '{program}'"])
        seen = [subprocess.run(argv, capture_output=True, text=True, check=True).stdout for argv in (*entered, by_ssh)]
    shares = own_cores(LabPlan(hosts=2), cores)
    assert shares is not None
    first, second = (f"{sorted(share)}\n" for share in shares)
    assert seen == [first, second, second]
