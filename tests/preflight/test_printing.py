"""What a stranger reads, to the letter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from check_factory import checked, record, request, sweep, trial
from vitscale.preflight.fit import fits
from vitscale.preflight.judging import check_document, judged
from vitscale.present.terminal import lines
from vitscale.present.units import DASH
from vitscale.store.checks import CheckRecord, LoaderLine, LoaderNeed
from vitscale.trial.trial import World


def printed(whole: CheckRecord) -> str:
    document = check_document(whole, judged(whole), Path("results/checks/20260102T030405-abcdef.json"))
    return "\n".join(line.plain for line in lines(document, verbose=True))


def test_two_hosts_to_the_letter() -> None:
    lines = (*sweep("across nodes", "all_reduce", 2, 5e-4, 25e6), *sweep("across nodes", "all_gather", 2, 5e-4, 24e6))
    ranks = [checked(0, collectives=lines), checked(1, collectives=lines, pace=31.0, name="GTX 1070")]
    assert printed(record(*ranks, fits=fits(ranks))) == EXPECTED


EXPECTED = """\
2 hosts, 2 ranks; gloo on cpu; started by torchrun: 3 warnings

warning  slow-rank
  rank 1 (GTX 1070, host1) computes at 0.31 of the others: with equal shares the
  job runs at its pace. Its matrix-multiply rate is 0.31 of the others' too: the
  device is slower.
  Next: Leave it out, or give smaller shares: in [train] rank_speeds = [1.0,
  0.31].

warning  mixed-devices
  the ranks compute on unlike devices: NVIDIA A100 (rank 0) and GTX 1070 (rank
  1); the slowest type sets the pace of every step, and the least memory the
  largest batch.
  Next: Use one type, or shares that follow the speeds (rank_speeds in [train]).

warning  slow-link
  all-reduce across nodes reaches 25.0 MB/s, 0.20 of the interface's 125 MB/s.
  Next: See whether others use the network, and whether a switch or a limit lies
  between the hosts (iperf3 -P 8).

rank  cores  memory        matmul  pace  host   device
───────────────────────────────────────────────────────────
   0      8  40 GiB   100 GFLOP/s  1.00  host0  NVIDIA A100
   1      8  40 GiB  31.0 GFLOP/s  0.31  host1  GTX 1070

collectives   operation   ranks  latency  bandwidth  largest    took
────────────────────────────────────────────────────────────────────
across nodes  all-reduce      2   500 us  25.0 MB/s   64 MiB  2.68 s
across nodes  all-gather      2   500 us  24.0 MB/s   64 MiB  1.40 s

- disk: 931 GiB free; a record is safe after 1.00 ms; other ranks see a new file
  at once

Stored: results/checks/20260102T030405-abcdef.json"""


def test_what_is_unknown_is_a_dash_or_unavailable_and_never_zero() -> None:
    bare = checked(1, facts=None, matmul=None, compute=None, disk=None)
    text = printed(record(checked(0, disk=None), bare))
    assert f"   1      {DASH}       {DASH}            {DASH}     {DASH}  unavailable  unavailable" in text
    assert "disk: unavailable" in text


def test_the_loader_with_what_the_model_needs() -> None:
    loader = LoaderLine(images_per_second=1234.5, workers=2, batch=32)
    need = LoaderNeed(images_per_second=300.0, source="run", described="as a stored run did")
    whole = record(checked(0, loader=loader), loader_need=need, request=request(1, trial=trial(workers=2)))
    assert "loader: 1,234 images/s per rank, 2 workers; needed: 300 images/s (run)" in printed(whole)


@pytest.mark.parametrize("nodes", [1, 4096])
def test_no_line_is_wider_than_the_terminal(nodes: int) -> None:
    world = World(nodes=nodes, ranks_per_node=1, threads_per_rank=1)
    name = "an-unusually-long-name-of-a-host.some-department.example.org"
    fields: dict[str, Any] = {"name": "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "cpu_quota_cores": 7.5}
    ranks = [checked(n, nodes, host=f"{n}-{name}", pace=100.0 if n else 10.0, **fields) for n in range(min(nodes, 100))]
    text = printed(record(*ranks, request=request(world=world)))
    stored = "Stored: "  # a path stays whole, for the mouse
    assert max(len(line) for line in text.splitlines() if not line.startswith(stored)) <= 80
