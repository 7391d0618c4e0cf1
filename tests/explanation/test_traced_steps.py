"""On a GPU the parts come from the traces of all ranks, read as imported ones are, and scaled to unprofiled steps."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hooked_factory import SimulatedJob
from kineto_traces import A100, MI300X, trace_path
from vitscale.explanation.answer import explain_ranks
from vitscale.explanation.parts import StepPart, job_parts
from vitscale.explanation.rank_record import HookedRank
from vitscale.hook import lines

pytestmark = pytest.mark.computing

GPU = "NVIDIA A100-SXM4-80GB"
STEPS = 5
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"


def event(cat: str, name: str, start_us: float, end_us: float, lane: int = 9, **arguments: Any) -> dict[str, Any]:
    times = {"ts": start_us, "dur": end_us - start_us}
    return {"ph": "X", "cat": cat, "name": name, "pid": 9, "tid": lane, **times, "args": arguments}


def kernel(name: str, launch_us: float, start_us: float, end_us: float, stream: int = 7) -> list[dict[str, Any]]:
    """A kernel and its launch."""
    linked = {"correlation": round(launch_us), "External id": round(launch_us)}
    return [
        event("cuda_runtime", "cudaLaunchKernel", launch_us, launch_us + 1, **linked),
        event("kernel", name, start_us, end_us, lane=stream, stream=stream, device=0, **linked),
    ]


def trace(rank: int, *, late_us: float = 0.0, step_us: float = 10_000.0, world_size: int = 2) -> dict[str, Any]:
    """Five steps of 10 ms: the device computes forward and backward for 5 ms, exchanges until 8 ms, updates until 8.5.

    Args:
        rank: number of the rank.
        late_us: how much longer this rank computes; its exchange is as much shorter.
        step_us: length of a step; what follows the update is idle.
        world_size: number of ranks.
    """
    events = []
    for step in range(STEPS):
        at = 1e6 + step * step_us
        reached = at + 5000 + late_us
        events += [
            event("user_annotation", f"ProfilerStep#{20 + step}", at, at + step_us),
            event("user_annotation", "DistributedDataParallel.forward", at + 50, at + 200),
            *kernel("gemm", at + 100, at, at + 2000),
            event("cpu_op", "autograd::engine::evaluate_function: AddmmBackward0", at + 250, at + 500),
            *kernel("gemm", at + 300, at + 2000, reached),
            *kernel(ALL_REDUCE, at + 400, reached, at + 8000, stream=20),
            event("user_annotation", "Optimizer.step#AdamW.step", at + 550, at + 700),
            *kernel("multi_tensor_apply_kernel", at + 600, at + 8000, at + 8500),
        ]
    about = {"distributedInfo": {"rank": rank, "world_size": world_size, "backend": "nccl"}}
    return {"deviceProperties": [{"id": 0, "name": GPU}], "traceEvents": events, **about}


def job(folder: Path, traces: Sequence[Mapping[str, Any]], *, world_size: int | None = None) -> list[HookedRank]:
    """Ranks on GPUs whose steps take 10 ms by the host's clock, each with one of the traces."""
    simulated = SimulatedJob(
        ranks=world_size or len(traces),
        spread=0.0,
        data=lambda rank, step: 0.0001,
        forward=lambda rank, step: 0.001,
        backward=lambda rank, step: 0.002,
        optimizer=lambda rank, step: 0.0009,
        transfer=lambda rank, step: 0.005,
        rank_fields={"device": GPU},
    )
    records = []
    for number, record in enumerate(simulated.records()):
        if number < len(traces):
            name = f"node-{number}.json.gz"
            (folder / name).write_bytes(gzip.compress(json.dumps(traces[number]).encode(), 1))
            record = replace(record, profile=lines.HookedProfileLine(first_step=20, steps=STEPS, trace=name))
        records.append(record)
    return records


def parts_in_ms(records: Sequence[HookedRank], folder: Path, rank: int) -> dict[StepPart, float]:
    parts = job_parts(records, folder)
    assert parts is not None
    return {part: 1e3 * seconds for part, seconds in parts.ranks[rank].parts.items() if seconds is not None}


def test_parts_of_two_traces_by_hand(tmp_path: Path) -> None:
    """Rank 1 computes 2 ms longer, so rank 0 waits 2 of its 3 ms in the exchange, and 1 ms is transfer."""
    records = job(tmp_path, [trace(0), trace(1, late_us=2000)])
    first = parts_in_ms(records, tmp_path, 0)
    second = parts_in_ms(records, tmp_path, 1)
    assert first["forward"] == pytest.approx(2.0, abs=0.01)
    assert [first["backward"], second["backward"]] == pytest.approx([3.0, 5.0], abs=0.01)
    assert [first["wait"], second["wait"]] == pytest.approx([2.0, 0.0], abs=0.01)
    assert first["transfer"] == pytest.approx(1.0, abs=0.01)
    assert sum(first.values()) == pytest.approx(10.0, abs=0.02)


def test_the_slow_rank_of_two_traces_is_named(tmp_path: Path) -> None:
    answer = explain_ranks(job(tmp_path, [trace(0), trace(1, late_us=2000)]), tmp_path)
    cause = answer.causes[0]
    assert (cause.kind, cause.ranks) == ("slow-rank", (1,))
    assert "in backward" in cause.evidence
    assert cause.cost is not None
    assert cause.cost.value == pytest.approx(0.002, rel=0.02)


def test_a_long_transfer_of_two_traces_is_named(tmp_path: Path) -> None:
    answer = explain_ranks(job(tmp_path, [trace(0), trace(1)]), tmp_path)
    communication = next(cause for cause in answer.causes if cause.kind == "communication")
    assert communication.cost is not None
    assert communication.cost.value == pytest.approx(0.003, rel=0.02)


def test_what_the_profiler_adds_is_taken_out(tmp_path: Path) -> None:
    """Traced steps are 20 ms long, others 10 ms: the kernels last as long as before, and the gaps become shorter."""
    slowed = [trace(rank, step_us=20_000.0) for rank in range(2)]
    parts = parts_in_ms(job(tmp_path, slowed), tmp_path, 0)
    assert parts["forward"] == pytest.approx(2.0, rel=0.05)
    assert sum(parts.values()) == pytest.approx(10.0, rel=0.02)


def test_waiting_and_transfer_are_not_told_apart_where_a_rank_left_no_trace(tmp_path: Path) -> None:
    records = job(tmp_path, [trace(0)], world_size=2)
    parts = job_parts(records, tmp_path)
    assert parts is not None
    known = {part: seconds for part, seconds in parts.ranks[0].parts.items() if seconds is not None}
    assert known["exchange"] == pytest.approx(0.003, abs=1e-5)
    assert {"wait", "transfer"}.isdisjoint(known)
    assert "1 rank left no trace: waiting and transfer are not told apart" in parts.notes


@pytest.mark.parametrize("name", ["../outside.json.gz", "/etc/passwd", "missing.json.gz", "", "."])
def test_a_trace_outside_the_folder_is_not_read(name: str, tmp_path: Path) -> None:
    (tmp_path / "traces").mkdir()
    (tmp_path / "outside.json.gz").write_bytes(gzip.compress(json.dumps(trace(0)).encode()))
    records = [
        replace(record, profile=lines.HookedProfileLine(20, STEPS, name))
        for record in job(tmp_path / "traces", [trace(0)])
    ]
    parts = job_parts(records, tmp_path / "traces")
    assert parts is not None
    assert parts.ranks == ()
    assert "the trace of rank 0 is missing" in parts.notes


def test_a_trace_that_is_damaged_is_left_out_and_said(tmp_path: Path) -> None:
    records = job(tmp_path, [trace(0), trace(1)])
    (tmp_path / "node-1.json.gz").write_bytes(b"no trace")
    parts = job_parts(records, tmp_path)
    assert parts is not None
    assert any(note.startswith("the trace of rank 1 is left out: ") for note in parts.notes)
    assert [rank.rank for rank in parts.ranks] == [0]


@pytest.mark.parametrize(("name", "world_size"), [(A100, 2), (MI300X, 8)])
def test_parts_of_real_traces_add_up(name: str, world_size: int, tmp_path: Path) -> None:
    records = []
    for record in job(tmp_path, [], world_size=world_size)[:1]:
        records.append(replace(record, profile=lines.HookedProfileLine(1, 3, name)))
    (tmp_path / name).write_bytes(trace_path(name).read_bytes())
    parts = job_parts(records, tmp_path)
    assert parts is not None
    (rank,) = parts.ranks
    assert sum(seconds for seconds in rank.parts.values() if seconds is not None) == pytest.approx(0.01, rel=0.05)
