"""From profiler events to intervals: hand-made profiles of a host and of a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

from results_factory import make_rank, make_run, make_trial
from vitscale.analysis.time.breakdown import breakdown
from vitscale.analysis.time.exposure import exposures, step_parts
from vitscale.base.time_spans import length
from vitscale.probes.steps import _activity_name, timeline_events
from vitscale.profiles.timeline import NO_NCCL, STEP, Event, EventKind, steps_on_cpu, steps_on_cuda
from vitscale.store.records import COMMUNICATION, NORM_MARK, PARTS, ExplainedLine
from vitscale.store.results import Run

MS = 1_000_000


def event(kind: EventKind, name: str, start_ms: float, end_ms: float, lane: int = 1, correlation: int = 0) -> Event:
    return Event(kind, name, int(start_ms * MS), int(end_ms * MS), lane, correlation)


def phases(start_ms: float, *lengths: tuple[str, float]) -> list[Event]:
    """Annotations one after the other."""
    found = []
    for name, milliseconds in lengths:
        found.append(event("annotation", f"vitscale.{name}", start_ms, start_ms + milliseconds))
        start_ms += milliseconds
    return found


def host_step(start_ms: float) -> list[Event]:
    """100 ms: data 10, forward 20, backward 60 of which the last 25 wait for gloo, optimizer 9, other 1."""
    a = start_ms
    return [
        event("annotation", STEP, a, a + 100),
        *phases(a, ("data", 10), ("forward", 20), ("backward", 60), ("optimizer", 9)),
        event("operator", "aten::linear", a + 10, a + 30),
        event("operator", "aten::mm", a + 30, a + 49.96),
        event("operator", "aten::mm", a + 50, a + 65),
        event("operator", "c10d::allreduce_", a + 60, a + 90),
        event("operator", "autograd::engine::evaluate_function: AddmmBackward0", a + 30, a + 90),
        event("collective", "gloo:all_reduce", a + 55, a + 90, lane=2),
        event("operator", "aten::_fused_adamw_", a + 90, a + 99),
    ]


def test_a_hosts_step_is_read_off_its_operators() -> None:
    events = [event("operator", "aten::earlier", 0, 5), *host_step(100), *host_step(250)]
    first, second = steps_on_cpu(events, [7, 8], block=2)
    assert (first.step, second.step, first.block, first.device) == (7, 8, 2, "cpu")
    assert first.seconds == 0.1
    assert first.phases == (
        ("data", 0.0, 0.01), ("forward", 0.01, 0.03), ("backward", 0.03, 0.09), ("optimizer", 0.09, 0.099),
    )  # fmt: skip
    assert first.collectives == (("gloo", "all_reduce", 0.055, 0.09),)
    # Not the 40 us between two operators, not the wait for data: neither is a wait for a collective. And an operator
    # that only hands work over is no computing.
    assert first.idle == ((0.065, 0.09),)
    assert first.model_copy(update={"step": 8}) == second
    assert set(first.unknown) == {"h2d", "launch_gaps"}


def test_an_operator_that_waits_for_a_collective_inside_itself_does_not_compute_meanwhile() -> None:
    """ZeRO 2 and 3 reduce a gradient in a hook, inside the operator that accumulates it; FSDP2 in its own backward."""
    for holder in ("torch::autograd::AccumulateGrad", "RegisterPostBackwardFunctionBackward"):
        events = [
            event("annotation", STEP, 0, 100),
            *phases(0, ("forward", 20), ("backward", 70), ("optimizer", 10)),
            event("operator", "aten::linear", 0, 20),
            event("operator", "aten::mm", 20, 40),
            event("operator", holder, 40, 90),
            event("operator", "aten::add_", 40, 45),  # what it computes itself shows on its own
            event("operator", "c10d::allreduce_", 45, 46),
            event("collective", "gloo:all_reduce", 45, 85, lane=2),
            event("operator", "aten::div_", 85, 90),
            event("operator", holder, 90, 91, lane=3),  # of another thread, without a collective
            event("operator", "aten::_fused_adamw_", 90, 100),
        ]
        (line,) = steps_on_cpu(events, [1], block=0)
        assert line.idle == ((0.045, 0.085),)


def as_run(*lines: object) -> Run:
    trial = make_trial("ddp", 1)
    rank = make_rank(trial, 0, [0.1]).model_copy(update={"explained": lines})
    return make_run(trial, [rank])


def test_the_parts_of_the_hosts_step() -> None:
    found = breakdown(as_run(*steps_on_cpu(host_step(100), [7], block=0)))
    assert found is not None
    milliseconds = {name: None if s is None else round(s * 1e3, 6) for name, s in found.typical.parts.items()}
    assert milliseconds == {
        "data_wait": 10.0, "h2d": None, "forward": 20.0, "backward": 35.0, "bubble": 0.0, "wait": 0.0, "wire": 25.0,
        "norm": 0.0, "optimizer": 9.0, "launch_gaps": None, "other": 1.0,
    }  # fmt: skip


def test_on_a_host_what_a_norm_exchanges_is_what_is_issued_under_its_mark() -> None:
    """In forward; in backward, which another thread runs; and a bucket beside it, issued ahead, that is none."""
    events = [
        event("annotation", STEP, 0, 100),
        *phases(0, ("forward", 30), ("backward", 60), ("optimizer", 10)),
        event("operator", "aten::linear", 0, 10),
        event("annotation", NORM_MARK, 10, 15.1),
        event("operator", "_Synchronised", 9.5, 15.2),
        event("operator", "c10d::allreduce_", 10, 10.1),
        event("collective", "gloo:all_reduce", 10, 15, lane=2),
        event("operator", "aten::linear", 15, 40),
        event("collective", "gloo:all_reduce", 39, 60, lane=3),
        event("annotation", NORM_MARK, 40, 52, lane=4),
        event("operator", "c10d::allreduce_", 40, 40.1, lane=4),
        event("collective", "gloo:all_reduce", 40, 52, lane=2),
        event("operator", "aten::mm", 52, 90),
        event("operator", "aten::_fused_adamw_", 90, 100),
    ]
    (line,) = steps_on_cpu(events, [7], block=0)
    assert [start for _, _, start, _ in line.collectives] == [0.01, 0.039, 0.04]
    assert line.norms == (0, 2)
    found = breakdown(as_run(line))
    assert found is not None
    assert found.typical.sum_of("norm") == pytest.approx(0.005 + 0.012)
    assert (found.typical.sum_of("wire"), found.typical.sum_of("wait")) == (0.0, 0.0)
    assert found.typical.exposed_seconds == pytest.approx(0.017)


def device_step(host_ms: float, device_ms: float) -> list[Event]:
    """The host issues in 20 ms what the device takes 100 ms for; the device begins when the host's data has come.

    On the device: 10 idle while the host waits for data, 5 of copying, 20 forward, 4 of gap inside it, 40 backward with
    an all-reduce of 30 of which 12 stick out, 9 optimizer.
    """
    h, d = host_ms, device_ms
    launches = [
        event("launch", "cudaMemcpyAsync", h + 10, h + 10.1, correlation=int(h * 10) + 1),
        event("launch", "cudaLaunchKernel", h + 12, h + 12.1, correlation=int(h * 10) + 2),
        event("launch", "cudaLaunchKernel", h + 13, h + 13.1, correlation=int(h * 10) + 3),
        event("launch", "cudaLaunchKernel", h + 15, h + 15.1, correlation=int(h * 10) + 4),
        event("launch", "cudaLaunchKernel", h + 15.5, h + 15.6, correlation=int(h * 10) + 5),
        event("launch", "cudaLaunchKernel", h + 18, h + 18.1, correlation=int(h * 10) + 6),
    ]
    work = [
        event("copy", "Memcpy HtoD (Pinned -> Device)", d + 10, d + 15, 7, int(h * 10) + 1),
        event("kernel", "gemm_forward", d + 15, d + 25, 7, int(h * 10) + 2),
        event("kernel", "gelu", d + 29, d + 39, 7, int(h * 10) + 3),
        event("kernel", "gemm_backward", d + 39, d + 79, 7, int(h * 10) + 4),
        event("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", d + 61, d + 91, 20, int(h * 10) + 5),
        event("kernel", "multi_tensor_adamw", d + 91, d + 100, 7, int(h * 10) + 6),
    ]
    annotations = phases(h, ("data", 10), ("h2d", 1.5), ("forward", 3), ("backward", 2.5), ("optimizer", 2))
    return [event("annotation", STEP, h, h + 20), *annotations, *launches, *work]


def two_device_steps() -> list[Event]:
    return [*device_step(0, 0), *device_step(100, 100)]


def test_a_gpus_step_is_read_off_the_device() -> None:
    (line,) = steps_on_cuda(two_device_steps(), [3, 4], block=1, world_size=2)
    assert (line.step, line.seconds, line.device) == (4, 0.1, "cuda")
    assert line.collectives == (("nccl-0", "all_reduce", 0.061, 0.091),)
    assert line.copies == ((0.01, 0.015),)
    assert line.host_data == ((0.0, 0.01),)
    # A phase ends when the device has done what was launched in it, so the next one's first gap is its own.
    assert line.phases == (
        ("h2d", 0.0, 0.015), ("forward", 0.015, 0.039), ("backward", 0.039, 0.091), ("optimizer", 0.091, 0.1),
    )  # fmt: skip
    assert line.unknown == {}


def test_the_parts_of_the_gpus_step() -> None:
    found = breakdown(as_run(*steps_on_cuda(two_device_steps(), [3, 4], block=1, world_size=1)))
    assert found is not None
    milliseconds = {name: None if s is None else round(s * 1e3, 6) for name, s in found.typical.parts.items()}
    assert milliseconds == {
        "data_wait": 10.0, "h2d": 5.0, "forward": 20.0, "backward": 40.0, "bubble": 0.0, "wait": 0.0, "wire": 12.0,
        "norm": 0.0, "optimizer": 9.0, "launch_gaps": 4.0, "other": 0.0,
    }  # fmt: skip


def test_a_copy_on_the_device_is_work_of_its_phase_and_no_launch_gap() -> None:
    """DDP copies gradients into its buckets: 3 of the 4 ms of gap in forward, and 2 of 12 ms of exposed transfer."""
    copies = [
        event("launch", "cudaMemcpyAsync", 112.2, 112.3, correlation=1101),
        event("copy", "Memcpy DtoD (Device -> Device)", 125, 128, 7, 1101),
        event("launch", "cudaMemcpyAsync", 115.6, 115.7, correlation=1102),
        event("copy", "Memcpy DtoH (Device -> Pinned)", 180, 182, 7, 1102),
    ]
    (line,) = steps_on_cuda([*two_device_steps(), *copies], [3, 4], block=1, world_size=1)
    assert line.copies == ((0.01, 0.015),)  # of the batch alone
    assert line.idle == ((0.0, 0.015), (0.028, 0.029), (0.079, 0.08), (0.082, 0.091))
    found = breakdown(as_run(line))
    assert found is not None
    milliseconds = {name: None if s is None else round(s * 1e3, 6) for name, s in found.typical.parts.items()}
    assert milliseconds == {
        "data_wait": 10.0, "h2d": 5.0, "forward": 23.0, "backward": 42.0, "bubble": 0.0, "wait": 0.0, "wire": 10.0,
        "norm": 0.0, "optimizer": 9.0, "launch_gaps": 1.0, "other": 0.0,
    }  # fmt: skip


def test_on_a_gpu_what_a_norm_exchanges_is_what_is_launched_under_its_mark() -> None:
    """The host has long gone on when the kernel runs; another kernel, launched there too, is no exchange."""
    marked = [*two_device_steps(), event("annotation", NORM_MARK, 114.9, 115.55, lane=3)]
    (line,) = steps_on_cuda(marked, [3, 4], block=1, world_size=1)
    assert line.norms == (0,)
    found = breakdown(as_run(line))
    assert found is not None
    assert found.typical.sum_of("norm") == pytest.approx(0.012)
    assert found.typical.sum_of("wire") == 0.0
    elsewhere = [*two_device_steps(), event("annotation", NORM_MARK, 116, 117)]
    assert steps_on_cuda(elsewhere, [3, 4], block=1, world_size=1)[0].norms == ()


def test_an_exchange_of_norms_whose_kernel_was_not_recognised_is_unknown_and_not_0() -> None:
    renamed = [
        e._replace(name="collective_of_tomorrow") if e.name.startswith("nccl") else e for e in two_device_steps()
    ]
    marked = [*renamed, event("annotation", NORM_MARK, 115, 115.55)]
    (line,) = steps_on_cuda(marked, [3, 4], block=0, world_size=2)
    assert line.unknown == {"wait": NO_NCCL, "wire": NO_NCCL, "norm": NO_NCCL, COMMUNICATION: NO_NCCL}
    found = breakdown(as_run(line))
    assert found is not None
    assert (found.typical.parts["norm"], found.reasons["norm"]) == (None, NO_NCCL)


def test_no_recognised_nccl_kernel_among_several_ranks_is_said_and_not_taken_for_none() -> None:
    renamed = [
        e._replace(name="collective_of_tomorrow") if e.name.startswith("nccl") else e for e in two_device_steps()
    ]
    (line,) = steps_on_cuda(renamed, [3, 4], block=0, world_size=2)
    assert line.unknown == {"wait": NO_NCCL, "wire": NO_NCCL, COMMUNICATION: NO_NCCL}
    (alone,) = steps_on_cuda(renamed, [3, 4], block=0, world_size=1)
    assert alone.unknown == {}


def test_kernel_names_of_different_nccl_versions() -> None:
    names = {
        "ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)": "all_reduce",
        "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "reduce_scatter",
        "ncclDevKernel_AllGather_RING_LL(ncclDevComm*, unsigned long, ncclWork*)": "all_gather",
        "ncclDevKernel_Broadcast_RING_LL(x)": "broadcast",
        "ncclDevKernel_Reduce_Sum_f32_RING_LL(x)": "reduce",
        "ncclDevKernel_SendRecv(x)": "send_recv",
    }
    for kernel, operation in names.items():
        events = [e._replace(name=kernel) if e.name.startswith("nccl") else e for e in two_device_steps()]
        (line,) = steps_on_cuda(events, [3, 4], block=0, world_size=2)
        assert [collective[1] for collective in line.collectives] == [operation]


def test_a_lost_kernel_leaves_nothing_that_can_be_told_of_a_step_of_six_launches() -> None:
    """Else its 40 ms of backward would stand as 18 of transfer and 22 of launch gaps."""
    lost = [event for event in two_device_steps() if event.name != "gemm_backward"]
    (line,) = steps_on_cuda(lost, [3, 4], block=0, world_size=1)
    assert line.unknown == dict.fromkeys(
        [*PARTS, COMMUNICATION], "the profiler lost 1 of 6 launched kernels and copies (17 %)"
    )
    found = breakdown(as_run(line))
    assert found is not None
    assert (set(found.typical.parts.values()), found.typical.exposed_seconds) == ({None}, None)
    assert set(found.reasons) == set(PARTS)


def test_kernels_of_one_communicator_on_two_streams_have_one_name_and_of_two_on_one_stream_two() -> None:
    """FSDP2's all-gathers and reduce-scatters share a communicator; its name differs for groups of some ranks."""

    def named(step: list[Event], *groups: str) -> list[tuple[str, str]]:
        reduce = next(e for e in step if e.name.startswith("nccl"))
        launch = next(e for e in step if e.kind == "launch" and e.correlation == reduce.correlation)
        found = [e for e in step if e not in (reduce, launch)]
        for place, group in enumerate(groups):
            found.append(launch._replace(correlation=9_000 + place, start_ns=launch.start_ns + place))
            kernel = reduce._replace(correlation=9_000 + place, start_ns=reduce.start_ns + place, lane=20 + place % 2)
            found.append(kernel._replace(communicator=group, name="ncclDevKernel_Generic", operation="_allgather_base"))
        (line,) = steps_on_cuda([*device_step(0, 0), *found], [3, 4], block=0, world_size=2)
        assert line.unknown == {}
        return [(communicator, operation) for communicator, operation, _, _ in line.collectives]

    # The first step's reduction is linked to no communicator: its stream stands for one, the first of all.
    step = device_step(100, 100)
    assert named(step, "0", "0") == [("nccl-1", "all_gather")] * 2
    assert named(step, "7", "7", "8") == [("nccl-1", "all_gather")] * 2 + [("nccl-2", "all_gather")]
    assert named(step, "", "") == [("nccl-0", "all_gather"), ("nccl-1", "all_gather")]


def test_a_kernel_is_nccls_if_its_name_begins_so() -> None:
    for name, operations in [
        ("ncclDevKernel_Generic(x)", ["unknown"]),
        ("mscclKernel_Sum_float", ["unknown"]),
        ("void rcclGenericKernel<1>", ["unknown"]),
        ("copy_for_ncclAllReduce", []),
    ]:
        events = [e._replace(name=name) if e.name.startswith("nccl") else e for e in two_device_steps()]
        (line,) = steps_on_cuda(events, [3, 4], block=0, world_size=1)
        assert [operation for _, operation, _, _ in line.collectives] == operations


def test_work_launched_between_two_phases_is_of_neither() -> None:
    """Backward takes 30 ms; 22 more are launched after it and before the update, which takes 9 as before."""
    ends = {"gemm_backward": 169, "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)": 169, "vitscale.backward": 116}
    events = [
        *device_step(0, 0),
        *(e._replace(end_ns=ends[e.name] * MS) if e.name in ends else e for e in device_step(100, 100)),
        event("launch", "cudaLaunchKernel", 116.5, 116.6, correlation=1900),
        event("kernel", "ema", 169, 191, 7, 1900),
    ]
    (line,) = steps_on_cuda(events, [3, 4], block=1, world_size=1)
    assert line.phases[-2:] == (("backward", 0.039, 0.069), ("optimizer", 0.091, 0.1))
    found = breakdown(as_run(line))
    assert found is not None
    assert found.typical.sum_of("optimizer") == pytest.approx(0.009)
    assert found.typical.sum_of("other") == pytest.approx(0.022)


def test_a_collective_that_begins_before_its_step_is_exposed_in_it() -> None:
    """On a stream of its own, while the step before still computes: 10 of its 15 ms lie in its own step."""
    early = [
        event("launch", "cudaLaunchKernel", 100.1, 100.2, correlation=1900),
        event("kernel", "ncclDevKernel_AllGather_RING_LL(x)", 95, 110, 20, 1900),
    ]
    (line,) = steps_on_cuda([*two_device_steps(), *early], [3, 4], block=1, world_size=2)
    assert line.collectives[0] == ("nccl-0", "all_gather", 0.0, 0.01)
    found = breakdown(as_run(line))
    assert found is not None
    assert found.typical.sum_of("wire") == pytest.approx(0.010 + 0.012)
    assert found.typical.sum_of("data_wait", "launch_gaps") == pytest.approx(0.004)


@pytest.mark.parametrize("behind_ms", [5, 50])
def test_a_device_whose_clock_is_behind_the_hosts_waits_for_data_as_long(behind_ms: int) -> None:
    """The first copy runs as soon as it is launched, which proves how far the clock is behind."""
    events = [
        e._replace(start_ns=e.start_ns - behind_ms * MS, end_ns=e.end_ns - behind_ms * MS)
        if e.kind in ("kernel", "copy") else e
        for e in (*device_step(100, 100), *device_step(200, 200))
    ]  # fmt: skip
    (line,) = steps_on_cuda(events, [3, 4], block=1, world_size=2)
    assert line.host_data == ((0.0, 0.01),)


def test_what_is_launched_while_a_graph_is_recorded_is_not_lost() -> None:
    """By the thread that records it, and by autograd's, which runs the backward pass that is recorded."""
    capture = [
        event("launch", "hipStreamBeginCapture", 116.5, 116.6, correlation=1801),
        *(event("launch", "cudaLaunchKernel", 117, 117.1, lane=1 + n % 2, correlation=1900 + n) for n in range(10)),
        event("launch", "hipStreamEndCapture", 117.5, 117.6, correlation=1802),
    ]
    (line,) = steps_on_cuda([*two_device_steps(), *capture], [3, 4], block=1, world_size=2)
    assert line.unknown == {}
    (line,) = steps_on_cuda([*two_device_steps(), *capture[:-1]], [3, 4], block=1, world_size=2)
    assert line.unknown["forward"] == "the profiler lost 10 of 16 launched kernels and copies (62 %)"


def test_a_loss_of_nearly_all_is_told_without_a_power_of_ten() -> None:
    step = device_step(100, 100)
    gone = [event("launch", "cudaLaunchKernel", 117, 117.1, correlation=2000 + n) for n in range(2000)]
    (line,) = steps_on_cuda([*device_step(0, 0), *step, *gone], [3, 4], block=1, world_size=1)
    assert line.unknown["forward"] == "the profiler lost 2,000 of 2,006 launched kernels and copies (100 %)"


def test_what_one_rank_recorded_before_its_first_step_does_not_rename_its_communicators() -> None:
    def named(*before: str) -> list[tuple[str, str]]:
        step = [e._replace(communicator="a") if e.name.startswith("nccl") else e for e in device_step(100, 100)]
        more = [
            event("launch", "cudaLaunchKernel", 115.7, 115.8, correlation=1900),
            event("kernel", "ncclDevKernel_AllGather_RING_LL(x)", 191, 192, 24, 1900)._replace(communicator="b"),
        ]
        early = [
            event("launch", "cudaLaunchKernel", 90, 90.1, correlation=900),
            event("kernel", "ncclDevKernel_AllGather_RING_LL(x)", 91, 92, 24, 900)._replace(communicator="b"),
        ]
        (line,) = steps_on_cuda([*step, *more, *(early if before else ())], [4], 1, 2, first_is_whole=True)
        return [(communicator, operation) for communicator, operation, _, _ in line.collectives]

    assert named() == named("b") == [("nccl-0", "all_reduce"), ("nccl-1", "all_gather")]


def test_gloo_s_collectives_beside_nccl_s_are_communication_and_no_gap_of_launches() -> None:
    """The norm of gradients that FSDP2 keeps on the host: for 6 ms of it the device has nothing to do."""
    norm = event("collective", "gloo:all_reduce", 191, 197)
    of_another_step = event("collective", "gloo:barrier", 90, 99)
    *others, _adamw = device_step(100, 100)
    adamw = event("kernel", "multi_tensor_adamw", 197, 200, 7, 1_006)
    # The host waits for the norm before it launches the optimizer.
    step = [each._replace(end_ns=198 * MS) if each.name == STEP else each for each in others]
    events = [*device_step(0, 0), *step, adamw]
    (without,) = steps_on_cuda(events, [3, 4], block=1, world_size=2)
    (line,) = steps_on_cuda([*events, norm, of_another_step], [3, 4], block=1, world_size=2)
    assert line.collectives == (("nccl-0", "all_reduce", 0.061, 0.091), ("gloo", "all_reduce", 0.091, 0.097))
    assert launch_gap_seconds(without) == pytest.approx(0.010)  # 4 ms of them in forward
    assert launch_gap_seconds(line) == pytest.approx(0.004)
    (alone,) = exposures([(0, line)])
    assert alone.wire_seconds == pytest.approx(0.036)


def launch_gap_seconds(line: ExplainedLine) -> float:
    (alone,) = exposures([(0, line)])
    return length(step_parts(line, alone)["launch_gaps"])


class Profile(list[Event]):
    """Events that count how often they are gone through."""

    scans = 0

    def __iter__(self) -> Iterator[Event]:
        self.scans += 1
        return super().__iter__()


def test_a_profile_is_gone_through_as_often_for_many_steps_as_for_few() -> None:
    """Else a trace of 800 steps takes ten times as long as one of as many kernels in 10."""
    few, many = (
        Profile(e for number in range(steps) for e in device_step(100 * number, 100 * number)) for steps in (2, 20)
    )
    steps_on_cuda(few, range(2), 0, 1)
    steps_on_cuda(many, range(20), 0, 1)
    assert few.scans == many.scans > 0


class KinetoEvent:
    """What `events_of` asks of torch's own event."""

    def __init__(
        self, activity: str, name: str, correlation: int, linked: int = 0, meta: Mapping[str, str] | None = None
    ) -> None:
        self.activity_type, self.name = (lambda: activity), (lambda: name)
        self.start_ns, self.end_ns, self.device_resource_id = (lambda: 5), (lambda: 9), (lambda: 7)
        self.correlation_id, self.linked_correlation_id = (lambda: correlation), (lambda: linked)
        self.extra_meta = lambda: meta or {}


class OldKinetoEvent:
    """As torch 2.11 has them: an activity is not told, and the fields of a call are in the exported trace alone."""

    def __init__(self, name: str, correlation: int, linked: int = 0, **told: Any) -> None:
        self.name = lambda: name
        self.start_ns, self.end_ns, self.device_resource_id = (lambda: 5), (lambda: 9), (lambda: 7)
        self.correlation_id, self.linked_correlation_id = (lambda: correlation), (lambda: linked)
        self.is_user_annotation = lambda: bool(told.get("annotates"))
        self.device_type = lambda: getattr(torch._C._autograd.DeviceType, told.get("device", "CPU"))


def test_torch_2_11_tells_the_same_events_by_their_device_and_their_names() -> None:
    exported = {33: {"Process Group Name": "0", "Collective name": "_allgather_base"}}
    found = timeline_events(
        [
            OldKinetoEvent("record_param_comms", 33),
            OldKinetoEvent("record_param_comms", 34),
            OldKinetoEvent("ncclDevKernel_Generic", 900, linked=33, device="CUDA"),
            OldKinetoEvent("ncclDevKernel_Generic", 901, linked=34, device="CUDA"),
            OldKinetoEvent("cublasLtMatmul", 0),
            OldKinetoEvent("cudaLaunchKernel", 901),
            OldKinetoEvent("cuLaunchKernelEx", 902),
            OldKinetoEvent("hipLaunchKernel", 905),
            OldKinetoEvent("Memcpy HtoD (Pinned -> Device)", 903, device="CUDA"),
            OldKinetoEvent("Memset (Device)", 904, device="CUDA"),
            OldKinetoEvent("vitscale:step", 0, annotates=True),
            OldKinetoEvent("vitscale:step", 0, annotates=True, device="CUDA"),
        ],
        exported,
    )
    assert [event.kind for event in found] == [
        "operator", "operator", "kernel", "kernel", "operator", "launch", "launch", "launch", "copy", "kernel",
        "annotation",
    ]  # fmt: skip
    assert found[2] == Event("kernel", "ncclDevKernel_Generic", 5, 9, 7, 900, "0", "_allgather_base")
    assert found[3] == Event("kernel", "ncclDevKernel_Generic", 5, 9, 7, 901)


@pytest.mark.skipif(torch.__version__ < "2.12", reason="needs torch 2.12, which tells an event's activity")
def test_what_is_derived_for_torch_2_11_is_what_a_later_torch_tells() -> None:
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu) as profile, torch.profiler.record_function("vitscale:forward"):
        torch.nn.Linear(4, 4)(torch.ones(2, 4)).sum().backward()
    results: Any = profile.profiler
    events = results.kineto_results.events()
    assert {_activity_name(event) for event in events} == {"cpu_op", "user_annotation"}
    assert [_activity_name(event) for event in events] == [event.activity_type() for event in events]


def test_a_kernel_of_nccl_has_the_communicator_and_the_operation_of_the_call_it_is_linked_to() -> None:
    """torch's values of these are quoted, and their names have blanks."""
    call = {"Process Group Name": '"0"', "Collective name": '"_allgather_base"', "dtype": '"Float"'}
    found = timeline_events(
        [
            KinetoEvent("cpu_op", "record_param_comms", 33, meta=call),
            KinetoEvent("kernel", "ncclDevKernel_Generic", 900, linked=33),
            KinetoEvent("kernel", "gemm", 901, linked=34),
            KinetoEvent("python_function", "forward", 0),
        ]
    )
    assert found[1] == Event("kernel", "ncclDevKernel_Generic", 5, 9, 7, 900, "0", "_allgather_base")
    assert found[2] == Event("kernel", "gemm", 5, 9, 7, 901)
    assert len(found) == 3
