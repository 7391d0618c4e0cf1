"""Trace files of others: read whatever they hold, their steps found, their time told by our definition."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kineto_traces import A100, ALEXNET, MI300X, V100, trace_of, trace_path
from vitscale.base.time_spans import complement, intersection, length
from vitscale.errors import StoreError
from vitscale.profiles import trace_json
from vitscale.profiles.kernels import kind_of
from vitscale.profiles.timeline import steps_on_cuda
from vitscale.profiles.trace_figures import DeviceTime, product_rate, step_spans, steps_of, traffic_lines
from vitscale.profiles.trace_file import Trace, product_flops, read_trace
from vitscale.profiles.trace_json import is_trace

ALL = (A100, ALEXNET, MI300X, V100)
LOADER = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
BACKWARD = "autograd::engine::evaluate_function: AddBackward0"


def written(folder: Path, content: Any, name: str = "rank0.json") -> Path:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def kernel(start_us: float, end_us: float, name: str = "gemm", stream: int = 7, correlation: int = 1) -> dict[str, Any]:
    arguments = {"stream": stream, "correlation": correlation, "device": 0}
    return {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": stream, "ts": start_us, "dur": end_us - start_us,
            "args": arguments}  # fmt: skip


def launch(at_us: float, correlation: int) -> dict[str, Any]:
    return {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 9, "tid": 9, "ts": at_us, "dur": 1,
            "args": {"correlation": correlation, "External id": correlation}}  # fmt: skip


def marked(start_us: float, end_us: float, name: str) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": "user_annotation",
        "name": name,
        "pid": 9,
        "tid": 9,
        "ts": start_us,
        "dur": end_us - start_us,
    }


TWO_STEPS = [
    *(marked(at, at + 100, f"ProfilerStep#{number}") for number, at in ((3, 100), (4, 200))),
    *(launch(at, number) for number, at in enumerate((110, 120, 210, 220), start=1)),
    kernel(150, 190, correlation=1),
    kernel(180, 230, "ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 20, 2),
    kernel(260, 300, correlation=3),
    {**kernel(310, 330, "Memcpy HtoD (Pinned -> Device)", 7, 4), "cat": "gpu_memcpy"},
]
"""Step 3 ends at 230; in step 4, 30 us of nothing, 40 of computing, 10 of nothing, and 20 of copying."""


def test_time_adds_up_by_hand(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, {"traceEvents": TWO_STEPS, "distributedInfo": {"rank": 1, "world_size": 2}}))
    assert (trace.rank, trace.world_size) == (1, 2)
    device, steps = DeviceTime(trace), steps_of(trace)
    assert steps.numbers == (3, 4)
    assert device.span is not None
    whole = device.shares(device.span).as_json()
    assert {name: round(value * 1e6, 6) for name, value in whole.items() if name.endswith("seconds")} == {
        "total_seconds": 180, "compute_seconds": 80, "exposed_communication_seconds": 40, "copy_seconds": 20,
        "idle_seconds": 40, "communication_seconds": 50, "copying_seconds": 20,
    }  # fmt: skip
    assert whole["communication_overlap_share"] == pytest.approx(0.2)
    (three, first, known), (four, second, second_known) = step_spans(trace, steps)
    assert (three, four, known, second_known) == (3, 4, False, True)
    assert first[1] - first[0] == 80_000
    assert device.shares(second).as_json() == pytest.approx({
        "total_seconds": 1e-4, "compute_seconds": 4e-5, "exposed_communication_seconds": 0, "copy_seconds": 2e-5,
        "idle_seconds": 4e-5, "communication_seconds": 0, "copying_seconds": 2e-5, "communication_overlap_share": None,
    })  # fmt: skip


@pytest.mark.parametrize("name", ALL)
def test_parts_of_real_traces_add_up_and_agree_with_a_grid(name: str) -> None:
    trace = trace_of(name)
    device = DeviceTime(trace)
    assert device.span is not None
    begin, end = device.span
    shares = device.shares(device.span)
    grid = np.zeros((3, int((end - begin) / 1000) + 2), bool)
    for event in trace.on_device:
        row = 2 if event.kind == "copy" else int(kind_of(event.name) == "communication")
        grid[row, round((event.start_ns - begin) / 1000) : round((event.end_ns - begin) / 1000)] = True
    compute, communication, copies = grid
    expected = [compute, communication & ~compute, copies & ~compute & ~communication, ~grid.any(axis=0)]
    told = [shares.compute_seconds, shares.exposed_communication_seconds, shares.copy_seconds, shares.idle_seconds]
    assert told == pytest.approx(
        [some.sum() / 1e6 for some in expected], rel=0.01, abs=3e-5 * len(trace.on_device) / 100
    )
    assert sum(told) == pytest.approx(shares.total_seconds, abs=1e-9)


@pytest.mark.parametrize(
    ("name", "numbers", "by"),
    [
        (A100, (4, 5, 6), "by the profiler's own marks"),
        (MI300X, (15, 16, 17), "by the profiler's own marks"),
        (V100, (2, 3, 4, 5, 6), "by the profiler's own marks"),
        (ALEXNET, (0,), "not at all"),
    ],
)
def test_steps_of_real_traces(name: str, numbers: tuple[int, ...], by: str) -> None:
    steps = steps_of(trace_of(name))
    assert (steps.numbers, steps.found_by[: len(by)]) == (numbers, by)


def without(trace: Trace, *names: str) -> Trace:
    kept = [event for event in trace.events if not event.name.startswith(names)]
    return replace(trace, events=kept)


@pytest.mark.parametrize("name", [A100, V100, MI300X])
@pytest.mark.parametrize(
    ("hidden", "by"),
    [
        (("ProfilerStep",), "by the optimizer"),
        (("ProfilerStep", "Optimizer", "## optimizer"), "by kernels that repeat"),
    ],
)
def test_steps_without_marks_take_as_long(name: str, hidden: tuple[str, ...], by: str) -> None:
    trace = trace_of(name)
    bare = without(trace, *hidden)
    steps = steps_of(bare)
    if "kernels" in by and name != V100:  # three steps are too few to call a pattern
        assert steps.found_by.startswith("not at all")
        return
    assert steps.found_by.startswith(by)
    marked_spans = [b - a for _, (a, b), _ in step_spans(trace, steps_of(trace))][1:]
    spans = [b - a for _, (a, b), whole in step_spans(bare, steps) if whole]
    assert np.median(spans) == pytest.approx(np.median(marked_spans), rel=0.03)


def test_what_was_launched_before_the_profile_is_of_no_step() -> None:
    trace = trace_of(MI300X)
    spans = step_spans(trace, steps_of(trace))
    assert [whole for _, _, whole in spans] == [True, True, True]
    assert [(b - a) / 1e6 for _, (a, b), _ in spans] == pytest.approx([18.98, 18.98, 18.55], abs=0.01)


def test_traffic_where_sizes_are_recorded() -> None:
    lines = traffic_lines(trace_of(A100), steps_of(trace_of(A100)))
    assert [line.step for line in lines] == [4, 5, 6]
    assert lines[1].collectives is not None
    assert sum(one.input_elements for one in lines[1].collectives if one.operation == "all_reduce") == 25_557_032
    assert {(one.ranks, one.dtype) for one in lines[1].collectives if one.operation == "all_reduce"} == {(2, "float32")}
    bare = traffic_lines(trace_of(V100), steps_of(trace_of(V100)))
    assert {line.collectives for line in bare} == {None}
    assert bare[0].reason == "the trace's calls of collectives carry no sizes"


@pytest.mark.parametrize(
    ("spoilt", "known"),
    [({}, True), ({"Group size": 0}, False), ({"In msg nelems": -1}, False), ({"In msg nelems": 0}, True),
     ({"In msg nelems": 0, "Out msg nelems": 0}, False), ({"Out msg nelems": -5}, False), ({"dtype": ""}, False)],
)  # fmt: skip
def test_a_call_of_impossible_size_is_unknown(spoilt: dict[str, Any], known: bool, tmp_path: Path) -> None:
    told = {
        "Collective name": "allreduce",
        "Group size": 2,
        "dtype": "Float",
        "In msg nelems": 10,
        "Out msg nelems": 10,
    }
    call = {**launch(112, 0), "cat": "cpu_op", "name": "record_param_comms", "args": told | spoilt}
    trace = read_trace(written(tmp_path, {"traceEvents": [call, *TWO_STEPS]}))
    line = traffic_lines(trace, steps_of(trace))[0]
    assert (line.collectives is not None) == known
    assert known or line.reason == "the trace's calls of collectives carry no sizes"


def test_rate_of_products_where_shapes_are_recorded() -> None:
    """ResNet-18 at 224 takes 1.82 G multiply-adds an image forward, twice that backward; it recomputes its forward."""
    trace = trace_of(MI300X)
    steps = steps_of(trace)
    device = DeviceTime(trace)
    rate = product_rate(trace, steps, device)
    seconds = sum(device.shares(span).compute_seconds for _, span, _ in step_spans(trace, steps))
    assert rate is not None
    assert rate * seconds / 3 / 10 == pytest.approx(2 * 1.82e9 * 4, rel=0.05)
    assert product_rate(trace_of(A100), steps_of(trace_of(A100)), DeviceTime(trace_of(A100))) is None


@pytest.mark.parametrize(
    ("name", "shapes", "concrete", "flops"),
    [
        ("aten::mm", [[2, 3], [3, 5]], [], 60),
        ("aten::addmm", [[5], [2, 3], [3, 5]], [], 60),
        ("aten::_scaled_mm", [[2, 3], [3, 5], [1], [1]], [], 60),
        ("aten::bmm", [[7, 2, 3], [7, 3, 5]], [], 420),
        ("aten::convolution", [[4, 3, 8, 8], [16, 3, 3, 3]],
         ["", "", "", "[2, 2]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "1"], 2 * 4 * 16 * 27 * 16),
        ("aten::convolution_backward", [[4, 16, 4, 4], [4, 3, 8, 8], [16, 3, 3, 3]],
         ["", "", "", "[0]", "[2, 2]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "1", "[False, True, False]"],
         2 * 4 * 16 * 27 * 16),
        # Transposed, 32 x 32 pixels to 64 x 64: each pixel that goes in meets the whole weight.
        ("aten::convolution", [[1, 64, 32, 32], [64, 64, 2, 2]],
         ["", "", "", "[2, 2]", "[0, 0]", "[1, 1]", "True", "[0, 0]", "1"], 2 * 1024 * 64 * 64 * 4),
        ("aten::convolution_backward", [[1, 64, 64, 64], [1, 64, 32, 32], [64, 64, 2, 2]],
         ["", "", "", "[64]", "[2, 2]", "[0, 0]", "[1, 1]", "True", "[0, 0]", "1", "[True, True, True]"],
         2 * 2 * 1024 * 64 * 64 * 4),
        ("aten::_scaled_dot_product_flash_attention", [[1, 2, 5, 4], [1, 2, 7, 4], [1, 2, 7, 4]], [], 1120),
        ("aten::mm", [[2, 3]], [], None),
        ("aten::convolution", [[4, 3, 8, 8], [16, 3, 3, 3]], [], None),
        ("aten::add", [[2, 3], [2, 3]], [], None),
    ],
)  # fmt: skip
def test_flops_by_hand(name: str, shapes: list[list[int]], concrete: list[object], flops: int | None) -> None:
    assert product_flops(name, shapes, concrete) == flops


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)", "communication"),
        ("ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)", "communication"),
        ("void vllm::cross_device_reduce_1stage<float, 2>", "communication"),
        ("void flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128>>", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80", "attention"),
        ("nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_TNT", "matrix product"),
        ("Cijk_Ailk_Bljk_BBS_BH_MT32x32x64_MI16x16x16x1", "matrix product"),
        ("SubTensorOpWithScalar1d", "elementwise"),
        ("void at::native::detail::chunk_cat_cuda_kernel<float, float>", "elementwise"),
        ("void at::native::(anonymous namespace)::compute_grad_weight<c10::BFloat16>", "elementwise"),
        ("void cutlass::device_kernel<flash::FlashAttnFwdSm90<flash::Mainloop>>", "attention"),
        ("triton_tem_fused_addmm_relu_3", "matrix product"),
        ("void at::native::batch_norm_transform_input_kernel<float>", "norm"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native>", "optimizer"),
        ("Memset (Device)", "memset"),
        ("__amd_rocclr_copyBuffer", "copy"),
        ("void flashinfer::norm::RMSNormKernel<8u, __half>(__half*)", "norm"),
        ("void flashinfer::activation::act_and_mul_kernel<__half, silu>", "elementwise"),
        ("void flashinfer::BatchPrefillWithPagedKVCacheKernel<128>", "attention"),
        ("void transformer_engine::normalization::ln_fwd_tuned_kernel<float>", "norm"),
        ("_attn_fwd", "attention"),
        ("triton_tem_fused_flex_attention_3", "attention"),
        ("triton_poi_fused__scaled_dot_product_flash_attention_clone_3", "elementwise"),
        ("triton_poi_fused_convolution_5", "elementwise"),
        ("triton_red_fused_convolution_backward_sum_2", "reduction"),
        ("of_nobody", "unknown"),
    ],
)
def test_kinds_of_kernels(name: str, kind: str) -> None:
    assert kind_of(name) == kind


@pytest.mark.parametrize(
    "name",
    [
        "ncclSymDevKernel_AllReduce_RSxLDMC_AGxSTMC_sum_bf16",
        "void c10d::intra_node_comm::oneShotAllReduceKernel<8u, true>(c10::BFloat16*)",
        "void c10d::intra_node_comm::twoShotAllReduceKernel<8u, true>(c10::BFloat16*)",
        "void c10d::intra_node_comm::hybridCubeMeshAllReduceKernel<true>(c10::BFloat16*)",
        "void (anonymous namespace)::two_shot_all_reduce_kernel<c10::BFloat16, 16, true>",
        "void c10d::symmetric_memory::multimem_all_gather_kernel<16>",
        "void vllm::cross_device_reduce_2stage<__nv_bfloat16, 8>",
        "void quickreduce::allreduce_prototype_twoshot<quickreduce::AllReduceTwoshot>",
        "void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<0, 8>",
        "void tensorrt_llm::kernels::twoShotAllReduceKernel<__half, 8>",
        "void userbuffers_fp16_sum_inplace_gpu_rw_ag<8>(int, int)",
        "kuserbuffers_pushsend",
        "void ccl::allreduce_large_kernel<float>",
        "oneapi::ccl::reduce_scatter_small",
        "onecclKernel",
        "hccl_allreduce",
    ],
)
def test_other_collectives_than_nccls_are_communication(name: str) -> None:
    assert kind_of(name) == "communication"


@pytest.mark.parametrize(
    "name",
    [
        "triton_red_fused_all_gather_matmul_3",
        "triton_poi_fused_add_one_shot_all_reduce_0",
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>",
        "void at::native::multi_tensor_apply_kernel<TensorListMetadata<2>, SumFunctor nccl>",
        "void compute_occlusion_kernel<float>",
        "ccl::small_label_kernel",
        "void flash::flash_fwd_kernel<64>",
        "void flashinfer::BatchPrefillWithPagedKVCacheKernel<128>",
        "void one_shot_lookup<float>",
        "void cub::DeviceReduceKernel<float>",
        "fusion_reduce_all_kernel",
    ],
)
def test_what_sounds_like_a_collective_is_none(name: str) -> None:
    assert kind_of(name) != "communication"


@pytest.mark.parametrize("name", ALL)
def test_every_kernel_of_the_real_traces_is_known(name: str) -> None:
    assert {
        event.name for event in trace_of(name).on_device if event.kind == "kernel" and kind_of(event.name) == "unknown"
    } == set()
    assert trace_of(name).unknown == {}


ODD = st.text(alphabet='}{,[]"\\ab \n:', max_size=12)


@given(
    names=st.lists(ODD, min_size=1, max_size=40), block=st.integers(1, 400), bare=st.booleans(), indent=st.booleans()
)
def test_however_a_file_is_cut_into_blocks_its_events_are_the_same(
    names: list[str], block: int, bare: bool, indent: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    events = [kernel(10 * place + 1, 10 * place + 5, name) for place, name in enumerate(names)]
    around = {"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "GPU"}, {"id": 1}]}
    after = {"distributedInfo": {"rank": 3}, "after": [{}, {"a": 1}]}
    content: Any = events if bare else {**around, "traceEvents": events, **after}
    path = tmp_path_factory.mktemp("blocks") / "trace.json"
    path.write_text(json.dumps(content, indent=2 if indent else None))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace_json, "_BLOCK_BYTES", block)
        trace = read_trace(path)
    assert [event.name for event in trace.events] == names
    assert (trace.rank, trace.device) == ((None, None) if bare else (3, "GPU"))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda text: text[: len(text) // 2], "is cut off or broken after"),
        (lambda text: text.replace('"ph"', "ph", 1), "is cut off or broken after"),
        (lambda text: "{}", "has no list of traceEvents"),
        (lambda text: "steps: 3", "it is no JSON object"),
        (lambda text: "", "it is no JSON object"),
        (lambda text: '{"traceEvents": [' + "[" * 100_000, "is cut off or broken after"),
    ],
)
def test_what_is_no_trace_is_one_message(spoil: Callable[[str], str], said: str, tmp_path: Path) -> None:
    path = written(tmp_path, spoil(json.dumps({"traceEvents": TWO_STEPS})))
    with pytest.raises(StoreError, match=said):
        read_trace(path)


@pytest.mark.parametrize(
    "event",
    [
        7, None, [], {}, {"ph": "X"}, {"ph": "X", "cat": 3, "name": []}, {"ph": "X", "cat": "kernel", "name": {}},
        {**kernel(1, 2), "ts": "soon"}, {**kernel(1, 2), "ts": -5}, {**kernel(1, 2), "dur": 1e300},
        {**kernel(1, 2), "args": 5}, {**kernel(1, 2), "args": {"stream": "x", "correlation": [1]}},
        {**kernel(1, 2), "ts": 10**400}, {**kernel(1, 2), "pid": "GPU 0", "tid": "stream 7"},
    ],
)  # fmt: skip
def test_hostile_events_are_passed_over_or_counted(event: object, tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, {"traceEvents": [event, *TWO_STEPS, event]}))
    own = {1, 2, 3, 4}
    assert own <= {one.correlation for one in trace.on_device}
    assert all(one.start_ns > 0 for one in trace.on_device)


@pytest.mark.parametrize("odd", [None, [], [1], {}, "x", 10**30, [{"id": [1], "name": "GPU"}], [{"ranks": 3}]])
@pytest.mark.parametrize("name", ["deviceProperties", "distributedInfo", "trace_id", "baseTimeNanoseconds", "rank"])
def test_what_stands_around_the_events_may_be_anything(name: str, odd: object, tmp_path: Path) -> None:
    about = {"distributedInfo": {"rank": odd, "pg_config": odd}} if name == "rank" else {name: odd}
    assert len(read_trace(written(tmp_path, {**about, "traceEvents": TWO_STEPS})).on_device) == 4


def test_a_bomb_and_a_file_cut_off_inside_gzip_are_messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_json, "_MOST_BYTES", 10_000_000)
    bomb = tmp_path / "bomb.json.gz"
    bomb.write_bytes(gzip.compress(b'{"traceEvents": [' + b" " * 11_000_000))
    with pytest.raises(StoreError, match="unpacked"):
        read_trace(bomb)
    whole = gzip.compress(json.dumps({"traceEvents": TWO_STEPS * 100}).encode())
    (tmp_path / "half.json.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(StoreError, match="is cut off or broken"):
        read_trace(tmp_path / "half.json.gz")
    (tmp_path / "bad.json.gz").write_bytes(whole[:20] + b"\xff" * 30 + whole[50:])
    with pytest.raises(StoreError, match=r"cannot be unpacked|cut off"):
        read_trace(tmp_path / "bad.json.gz")


def test_an_early_release_in_capitals_and_whole_microseconds(tmp_path: Path) -> None:
    capitals = {"kernel": "Kernel", "cuda_runtime": "Runtime", "gpu_memcpy": "Memcpy", "user_annotation": "cpu_op"}
    early = [{**event, "cat": capitals[event["cat"]]} for event in TWO_STEPS]
    now, then = (
        read_trace(written(tmp_path, {"traceEvents": TWO_STEPS})),
        read_trace(written(tmp_path, {"traceEvents": early})),
    )
    assert sorted(now.events) == sorted(then.events)


def test_one_launch_of_a_graph_runs_many_kernels(tmp_path: Path) -> None:
    graph = [
        marked(100, 200, "ProfilerStep#0"), marked(200, 300, "ProfilerStep#1"),
        {**launch(150, 5), "name": "cudaGraphLaunch"}, {**launch(250, 6), "name": "cudaGraphLaunch"},
        *(kernel(160 + 10 * place, 168 + 10 * place, correlation=5) for place in range(12)),
        *(kernel(300 + 10 * place, 308 + 10 * place, correlation=6) for place in range(3)),
    ]  # fmt: skip
    trace = read_trace(written(tmp_path, {"traceEvents": graph}))
    (_, first, _), (_, second, _) = step_spans(trace, steps_of(trace))
    assert (first[1] - first[0], second[1] - second[0]) == (118_000, 50_000)


class Hand:
    """A trace written by hand, in microseconds: what the host marks and launches, and what then runs at once."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.free_us = 0.0

    def mark(self, name: str, start_us: float, end_us: float, tid: int = 9) -> None:
        """A range of the user's, or a backward function."""
        category = "cpu_op" if name.startswith(("aten", "autograd")) else "user_annotation"
        self.events.append({**marked(start_us, end_us, name), "cat": category, "tid": tid})

    def run(self, at_us: float, lasts_us: float, name: str = "gemm", call: str = "cudaLaunchKernel") -> None:
        """A kernel or copy that runs when it is launched and the device is free."""
        start = max(at_us + 1, self.free_us)
        self.free_us = start + lasts_us
        number = len(self.events) + 1
        category = "gpu_memcpy" if name.startswith("Memcpy") else "kernel"
        own = {"cat": category, "args": {"stream": 7, "correlation": number, "device": 0}}
        self.events += [{**launch(at_us, number), "name": call}, {**kernel(start, self.free_us, name), **own}]

    def read(self, folder: Path) -> Trace:
        return read_trace(written(folder, {"traceEvents": self.events}))

    def phases(self, folder: Path) -> tuple[dict[str, int], dict[str, str]]:
        """Busy microseconds of each phase in the last step, and what is unknown."""
        trace = self.read(folder)
        steps = steps_of(trace)
        events = [*(event for event in trace.events if event.kind != "annotation"), *steps.annotations]
        line = steps_on_cuda(events, steps.numbers, 0, 1)[-1]
        busy: dict[str, int] = {}
        for phase, start, end in line.phases:
            seconds = length(intersection(complement(line.idle, (0.0, line.seconds)), [(start, end)]))
            busy[phase] = busy.get(phase, 0) + round(seconds * 1e6)
        return busy, dict(line.unknown)


def trained(
    hand: Hand,
    at: float,
    *,
    forward: str = "DistributedDataParallel.forward",
    loss: float = 0,
    copies: int = 0,
    nccl: bool = False,
) -> None:
    """A step of 1,000: forward 100, backward 200, copies of 10 each, clipping 20, update 30, mean weights 40."""
    hand.mark(LOADER, at + 1, at + 5)
    if forward:
        hand.mark(forward, at + 10, at + 100)
    hand.mark("aten::linear", at + 10, at + 100)
    hand.run(at + 20, 100)
    if loss:
        hand.run(at + 110, loss, "softmax_loss")
    hand.mark("autograd::engine::evaluate_function: AddBackward0", at + 130, at + 200, 11)
    hand.run(at + 140, 200, "gemm_backward")
    if nccl:
        hand.run(at + 150, 1, "ncclDevKernel_AllReduce_Sum_f32_RING_LL")
    for place in range(copies):
        hand.run(at + 205 + place, 10, "Memcpy DtoD (Device -> Device)")
    hand.run(at + 250, 20, "norm_of_all")
    hand.mark("Optimizer.step#SGD.step", at + 260, at + 290)
    hand.run(at + 270, 30, "multi_tensor_apply")
    hand.run(at + 300, 40, "ema")


@pytest.mark.parametrize("forward", ["DistributedDataParallel.forward", "## forward ##", ""])
@pytest.mark.parametrize(("loss", "copies", "nccl"), [(0, 0, False), (150, 0, False), (150, 6, True), (0, 6, False)])
def test_what_is_launched_between_the_marks_is_of_the_phase_that_it_belongs_to(
    forward: str, loss: int, copies: int, nccl: bool, tmp_path: Path
) -> None:
    """The loss to forward, the copies by which DDP hands gradients back to backward, clipping to the update."""
    hand = Hand()
    for at in (1000, 2000, 3000):
        hand.mark(f"ProfilerStep#{at}", at, at + 1000)
        trained(hand, at, forward=forward, loss=loss, copies=copies, nccl=nccl)
    handed_back, others = (10 * copies, 0) if nccl else (0, 10 * copies)
    expected = {"forward": 100 + loss, "backward": 200 + handed_back, "optimizer": 20 + 30 + others}
    assert hand.phases(tmp_path) == (expected, {})


def test_the_update_of_real_traces_is_what_was_launched_under_its_mark() -> None:
    """By the ranges that torch repeats on the device: one kernel of 28 to 32 us, and nine of 0.69 ms together."""
    for name, low_us, high_us in ((MI300X, 28, 33), (A100, 690, 695)):
        trace = trace_of(name)
        steps = steps_of(trace)
        events = [*(event for event in trace.events if event.kind != "annotation"), *steps.annotations]
        for line in steps_on_cuda(events, steps.numbers, 0, 8):
            ((start, end),) = [(start, end) for phase, start, end in line.phases if phase == "optimizer"]
            busy = length(intersection(complement(line.idle, (0.0, line.seconds)), [(start, end)]))
            assert low_us < busy * 1e6 < high_us


@pytest.mark.parametrize("updates", [True, False])
def test_phases_inside_a_graph_are_unknown(updates: bool, tmp_path: Path) -> None:
    """Of a whole step, or of forward and backward before an update of its own. The gap is known all the same."""
    hand = Hand()
    for at in (1000, 2000, 3000):
        hand.mark(f"ProfilerStep#{at}", at, at + 1000)
        hand.mark(LOADER, at + 1, at + 5)
        hand.mark("aten::copy_", at + 10, at + 20)
        hand.run(at + 30, 300, call="cudaGraphLaunch")
        if updates:
            hand.mark("Optimizer.step#SGD.step", at + 600, at + 650)
            hand.run(at + 610, 30, "multi_tensor_apply")
    busy, unknown = hand.phases(tmp_path)
    assert set(unknown) == {"forward", "backward", "optimizer"}
    assert busy == {"forward": 330 if updates else 300}
    why = "an update is marked, but nothing tells where backward was" if updates else "a CUDA graph was launched"
    assert all(said.startswith(why) for said in unknown.values())


def test_without_operators_of_the_host_no_phase_is_known(tmp_path: Path) -> None:
    """A profile of ProfilerActivity.CUDA alone: forward 100, backward 200, update 50, and no loader that is marked."""
    hand = Hand()
    for at in range(1000, 6000, 1000):
        for begin, lasts, name in ((20, 100, "fwd"), (140, 200, "bwd"), (350, 50, "multi_tensor_apply")):
            hand.run(at + begin, lasts, name)
    busy, unknown = hand.phases(tmp_path)
    assert busy == {"forward": 350}  # stands for all three, so that gaps are known
    assert set(unknown) == {"data_wait", "forward", "backward", "optimizer"}
    assert unknown["backward"].startswith("the host's operators are not recorded")


def test_an_update_that_is_not_marked_is_unknown_and_not_0(tmp_path: Path) -> None:
    hand = Hand()
    for at in (1000, 2000, 3000):
        hand.mark(f"ProfilerStep#{at}", at, at + 1000)
        hand.mark(LOADER, at + 1, at + 5)
        hand.run(at + 20, 100)
        hand.mark(BACKWARD, at + 130, at + 200, 11)
        hand.run(at + 140, 200)
        hand.run(at + 350, 50, "multi_tensor_apply")
    busy, unknown = hand.phases(tmp_path)
    assert (busy, set(unknown)) == ({"forward": 100, "backward": 200}, {"optimizer"})


def test_a_step_that_only_evaluates_is_forward_beside_others_that_train(tmp_path: Path) -> None:
    hand = Hand()
    for at in (1000, 2000, 3000):
        hand.mark(f"ProfilerStep#{at}", at, at + 1000)
        if at < 3000:
            trained(hand, at)
        else:
            hand.run(at + 20, 100)
    assert hand.phases(tmp_path) == ({"forward": 100}, {})


def step_seconds(hand: Hand, folder: Path) -> dict[int, float]:
    """Number of each step of a trace -> its seconds, as an import records them."""
    trace = hand.read(folder)
    steps = steps_of(trace)
    events = [*(event for event in trace.events if event.kind != "annotation"), *steps.annotations]
    lines = steps_on_cuda(
        events, steps.numbers, 0, 1, first_is_whole=steps.first_is_whole, first_begin_ns=steps.first_begin_ns
    )
    return {line.step: line.seconds for line in lines}


def three_steps() -> Hand:
    """Steps 1 to 3 of 1,000 us on host and device, each with its last kernel 340 us after it began."""
    hand = Hand()
    for number in (1, 2, 3):
        hand.mark(f"ProfilerStep#{number}", 1000 * number, 1000 * number + 1000)
        trained(hand, 1000 * number)
    return hand


@pytest.mark.parametrize("lasts_us", [1, 49, 5000])
def test_a_mark_in_which_nothing_was_launched_is_no_step(lasts_us: int, tmp_path: Path) -> None:
    """`prof.step()` after the last batch opens one, which lasts until the profiler ends."""
    marks = three_steps()
    marks.mark("ProfilerStep#4", 4000, 4000 + lasts_us)
    assert step_seconds(marks, tmp_path) == pytest.approx({2: 1e-3, 3: 1e-3})
    assert steps_of(marks.read(tmp_path)).found_by.endswith("(ProfilerStep); ProfilerStep#4 launched nothing: left out")


def test_an_empty_mark_before_the_first_step_or_between_two_is_no_step(tmp_path: Path) -> None:
    marks = Hand()
    marks.mark("ProfilerStep#1", 900, 1000)
    for number, at in ((2, 1000), (3, 2000), (5, 3000)):
        marks.mark(f"ProfilerStep#{number}", at, at + 990)
        trained(marks, at)
    marks.mark("ProfilerStep#4", 2990, 3000)
    assert step_seconds(marks, tmp_path) == pytest.approx({3: 1e-3, 5: 1e-3})


@pytest.mark.parametrize(("kernels", "is_step"), [(1, False), (3, False), (5, True)])
def test_a_last_mark_that_the_profilers_end_cuts_is_no_step(kernels: int, is_step: bool, tmp_path: Path) -> None:
    """A whole step launches 5 kernels in 1,000 us."""
    marks = three_steps()
    marks.mark("ProfilerStep#4", 4000, 4100)
    for place in range(kernels):
        marks.run(4010 + 10 * place, 5)
    assert (4 in step_seconds(marks, tmp_path)) is is_step
    assert {2, 3} <= {*step_seconds(marks, tmp_path)}
    left_out = f"ProfilerStep#4 ({kernels} of a whole step's 5 launches) cut off: left out"
    assert (left_out in steps_of(marks.read(tmp_path)).found_by) is not is_step


def test_a_first_mark_that_the_profilers_beginning_cut_is_no_step(tmp_path: Path) -> None:
    """What follows it is a whole step: what ran before is recorded."""
    marks = Hand()
    marks.mark("ProfilerStep#0", 900, 1000)
    marks.run(950, 20)
    for number in (1, 2, 3):
        marks.mark(f"ProfilerStep#{number}", 1000 * number, 1000 * number + 1000)
        trained(marks, 1000 * number)
    steps = step_seconds(marks, tmp_path)
    assert sorted(steps) == [1, 2, 3]
    assert steps[2] == steps[3] == pytest.approx(1e-3)


def test_steps_of_accumulated_gradients_are_not_taken_for_cut_ones(tmp_path: Path) -> None:
    """Marks of micro-steps: every second one updates, and the last one does not."""
    marks = Hand()
    for number in range(1, 6):
        marks.mark(f"ProfilerStep#{number}", 1000 * number, 1000 * number + 600 + 400 * (number % 2 == 0))
        for place in range(3 + 2 * (number % 2 == 0)):
            marks.run(1000 * number + 20 + 50 * place, 40)
    assert sorted(step_seconds(marks, tmp_path)) == [2, 3, 4, 5]


def test_the_only_step_lasts_as_long_as_its_mark_at_least(tmp_path: Path) -> None:
    """The host needs 1,000 us a step, the device works for the last 300 of them at first."""
    marks = Hand()
    marks.mark("ProfilerStep#1", 1000, 2000)
    marks.run(1650, 100)
    marks.run(1800, 150)
    marks.mark("ProfilerStep#2", 2010, 2060)
    assert step_seconds(marks, tmp_path) == pytest.approx({1: 1e-3})
    ((number, (begin, end), is_whole),) = step_spans(marks.read(tmp_path), steps_of(marks.read(tmp_path)))
    assert (number, end - begin, is_whole) == (1, 1_000_000, True)


@pytest.mark.parametrize("name", [A100, V100, MI300X])
def test_an_empty_mark_more_changes_nothing_of_a_real_trace(name: str, tmp_path: Path) -> None:
    job = json.loads(gzip.decompress(trace_path(name).read_bytes()))
    marks = [event for event in job["traceEvents"] if str(event.get("name")).startswith("ProfilerStep")]
    last = max((event for event in marks if event["cat"] == "user_annotation"), key=lambda event: float(event["ts"]))
    begin = float(last["ts"]) + float(last["dur"]) + 5
    empty = {**last, "name": "ProfilerStep#999", "ts": begin, "dur": 40}
    path = written(tmp_path, {**job, "traceEvents": [*job["traceEvents"], empty]})
    before, after = trace_of(name), read_trace(path)
    assert steps_of(after).numbers == steps_of(before).numbers
    spans = [step_spans(trace, steps_of(trace)) for trace in (before, after)]
    lengths = [[(number, end - begin, is_whole) for number, (begin, end), is_whole in steps] for steps in spans]
    assert lengths[0] == lengths[1]


def test_what_fsdp2_reduces_last_is_of_backward(tmp_path: Path) -> None:
    """The root's gradients: its inputs are images, so that no backward function of torch's reduces them."""
    hand = Hand()
    for at in (1000, 2000, 3000):
        hand.mark(f"ProfilerStep#{at}", at, at + 1000)
        hand.mark(LOADER, at + 1, at + 5)
        hand.run(at + 20, 100)
        hand.mark(BACKWARD, at + 130, at + 200, 11)
        hand.run(at + 140, 200)
        hand.mark("FSDP::root_post_backward_callback", at + 205, at + 245, 11)
        hand.run(at + 210, 60, "chunk_cat_cuda_kernel")
        hand.mark("Optimizer.step#AdamW.step", at + 260, at + 290)
        hand.run(at + 270, 30, "multi_tensor_apply")
    assert hand.phases(tmp_path) == ({"forward": 100, "backward": 260, "optimizer": 30}, {})


def test_a_step_of_two_updates_is_one_and_of_two_passes_two(tmp_path: Path) -> None:
    """An optimizer for each of two groups of weights is no GAN, whose two passes are a step each."""
    for passes, expected in ((1, 4), (2, 8)):
        hand = Hand()
        for at in (1000, 2000, 3000, 4000):
            trained(hand, at, forward="")
            if passes == 2:
                hand.mark("autograd::engine::evaluate_function: AddBackward0", at + 350, at + 380, 11)
            hand.mark("Optimizer.step#SGD.step", at + 400, at + 430)
            hand.run(at + 410, 30, "multi_tensor_apply")
        steps = steps_of(hand.read(tmp_path))
        assert (len(steps.numbers), steps.found_by[:16]) == (expected, "by the optimizer")


def test_an_update_inside_backward_ends_no_step(tmp_path: Path) -> None:
    hand = Hand()
    for at in (1000, 2000, 3000, 4000):
        trained(hand, at)
        for place in range(3):
            hand.mark("Optimizer.step#SGD.step", at + 140 + 20 * place, at + 150 + 20 * place, 11)
    assert len(steps_of(hand.read(tmp_path)).numbers) == 4


@pytest.mark.parametrize(
    ("every", "what", "lasts_us", "expected"),
    [(4, "log", 50, 10_000), (4, "multi_tensor_apply", 50, 40_000), (4, "head", 500, 40_000), (0, "", 0, 10_000)],
)
def test_the_shortest_pattern_that_repeats_is_the_step_unless_it_lacks_what_a_step_does(
    every: int, what: str, lasts_us: int, expected: int, tmp_path: Path
) -> None:
    """A step that also logs is one of several; layers and micro-steps, between updates or heads, are none."""
    hand = Hand()
    for number in range(20):
        for place in range(30):
            hand.run(1000 + 10_000 * number + 300 * place, 190, f"gemm_{place}")
        if every and number % every == 0:
            hand.run(1000 + 10_000 * number + 9100, lasts_us, what)
    trace = hand.read(tmp_path)
    steps = steps_of(trace)
    assert steps.found_by.startswith(
        f"by kernels that repeat, {30 * expected // 10_000 + (expected > 10_000)} to a step"
    )
    assert np.median([end - start for _, (start, end), _ in step_spans(trace, steps)]) == pytest.approx(
        expected * 1000, rel=0.01
    )


def test_marks_of_a_thread_with_a_streams_numbers_are_kept(tmp_path: Path) -> None:
    """The host's process 9 and thread 9; what runs is of GPU 9, stream 9."""
    events = [
        {**event, "pid": 9, "tid": 9} if event["cat"] in ("kernel", "gpu_memcpy") else event for event in TWO_STEPS
    ]
    assert steps_of(read_trace(written(tmp_path, {"traceEvents": events}))).numbers == (3, 4)


def test_a_process_group_has_the_same_name_on_all_its_ranks(tmp_path: Path) -> None:
    """Whatever a rank recorded first: rank 1's file begins with a collective of another group."""
    lines = []
    for rank, first in ((0, ""), (1, "1")):
        told = {"Collective name": "allreduce", "dtype": "Float", "Group size": 2}
        events = [marked(100, 400, "ProfilerStep#3"), launch(110, 1), kernel(150, 160, correlation=1)]
        for place, group in enumerate((first, "0", "1")):
            number, at = 2 + place, 90 + 30 * place
            reduce = kernel(at + 90, at + 100, "ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 20 + place, number)
            reduce["args"] |= told | {"Process Group Name": group}
            events += [launch(at, number), reduce] if group else []
        trace = read_trace(written(tmp_path, {"traceEvents": events}, f"rank{rank}.json"))
        steps = steps_of(trace)
        kept = [*(event for event in trace.events if event.kind != "annotation"), *steps.annotations]
        (line,) = steps_on_cuda(kept, steps.numbers, 0, 2, first_is_whole=True)
        lines.append([communicator for communicator, *_ in line.collectives])
    assert lines == [["nccl-0", "nccl-1"]] * 2


def test_real_traces_are_recognised() -> None:
    assert all(is_trace(trace_path(name)) for name in ALL)
