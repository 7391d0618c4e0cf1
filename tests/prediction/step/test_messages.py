"""What engines were counted to send goes against the arithmetic; and the schedules, by hand."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.curves import PYRAMID, SEGMENTER
from engines.many_engines import trial_of
from engines.test_traffic_volumes import BLOCK, PSI, TOKENS, TWO_RANKS, Case, Kinds, fsdp2, named, zero
from evidence_factory import make_trial
from vitscale.engines.messages import Message
from vitscale.prediction.step.messages import messages, norm_messages, rescaled
from vitscale.trial.model_spec import ModelSpec, resolve
from vitscale.trial.trial import Trial, World

BYTES = {"float32": 4, "bfloat16": 2, "float64": 8, "uint8": 1}
VIT_B = resolve(ModelSpec(name="vit-b16"), 1000)
MIB = 2**20


def large(case: Case, ranks: int = 2) -> Trial:
    """A ViT-B on GPUs."""
    given = trial_of({"device": "cuda"} | case, 1)
    world = World(nodes=ranks, ranks_per_node=1, threads_per_rank=1)
    return given.model_copy(update={"model": VIT_B, "world": world})


def sent(trial: Trial) -> tuple[Message, ...]:
    found = messages(trial)
    assert found is not None
    return found


@pytest.mark.parametrize(("case", "kinds"), TWO_RANKS, ids=[named(case) for case, _ in TWO_RANKS])
def test_calls_and_bytes_of_each_operation_are_those_that_were_counted(case: Case, kinds: Kinds) -> None:
    """The counts of real ranks that tests/engines/test_traffic_volumes.py holds, with accumulation 1 and 3."""
    counted_calls: Counter[str] = Counter()
    counted_bytes: Counter[str] = Counter()
    for kind, (number, elements) in kinds.items():
        operation, dtype = kind.split()
        counted_calls[operation] += number
        counted_bytes[operation] += elements * BYTES[dtype]
    calls: Counter[str] = Counter()
    amounts: Counter[str] = Counter()
    for one in sent(trial_of(case, 2)):
        times = one.times(case.get("grad_accum", 1))
        calls[one.operation] += round(times)
        amounts[one.operation] += round(times * one.tensor_bytes)
    assert calls == counted_calls
    assert amounts == pytest.approx(counted_bytes, abs=3)  # one flag of a byte, which counts as four


@pytest.mark.parametrize(
    ("case", "multiple"),
    [
        # docs/traffic.md, A = 3, in units of Psi, an all-reduce twice.
        ({"engine": "ddp"}, 2.00),
        (zero(0), 2.00),
        (zero(1), 3.00),
        (zero(2), 7.00),
        (zero(3), 5.42),
        (fsdp2(), 8.57),
        (fsdp2(reshard_after_forward=False), 6.01),
    ],
)
def test_multiples_of_the_parameters_with_accumulation(case: Case, multiple: float) -> None:
    found = sent(trial_of(case | {"grad_accum": 3}, 2))
    volume = sum((2 if m.operation == "all_reduce" else 1) * m.times(3) * m.tensor_bytes for m in found)
    assert volume / 4 / PSI == pytest.approx(multiple, abs=0.005)


def test_synchronised_norms_send_two_all_reduces_of_doubles_each_in_every_micro_step() -> None:
    """UperNet on three maps: ten norms of 16 channels, one of 8; 8 bytes a number. On a ViT's four maps two more."""
    trial = trial_of({"engine": "fsdp2", "grad_accum": 2, "batch_norm": "synchronised"}, 2)
    found = norm_messages(trial.model_copy(update={"model": SEGMENTER}))
    assert found is not None
    assert {(one.phase, one.tensor_bytes, one.times(2)) for one in found} == {
        ("forward", 8 * 33, 20), ("backward", 8 * 32, 20), ("forward", 8 * 17, 2), ("backward", 8 * 16, 2),
    }  # fmt: skip
    assert {(one.operation, one.ready, one.micro_steps) for one in found} == {("all_reduce", None, "all")}
    pyramid = norm_messages(trial.model_copy(update={"model": PYRAMID})) or ()
    assert sum(one.calls for one in pyramid) == 2 * (12 + 1)


def test_without_synchronised_norms_nothing_is_sent_for_them_and_of_unknown_models_it_is_unknown() -> None:
    trial = trial_of({"engine": "ddp", "batch_norm": "synchronised"}, 2)
    assert norm_messages(trial) == ()  # a ViT that classifies has none
    own = trial.model_copy(update={"model": ModelSpec(factory="own.module:build")})
    assert norm_messages(own) is None
    local = own.model_copy(update={"train": own.train.model_copy(update={"batch_norm": "local"})})
    assert norm_messages(local) == ()


def test_the_buckets_of_ddp_on_a_large_model() -> None:
    """1 MiB is full with the classifier's weights; 25 MiB with four of a block's 9 MiB and the 2.25 MiB ones ahead."""
    found = sent(large({"engine": "ddp"}))
    assert found[0].tensor_bytes == 4 * (1000 + 1000 * 768)
    assert all(25 * MIB <= one.tensor_bytes <= 34.1 * MIB for one in found[1:-1])
    assert sum(one.tensor_bytes for one in found) == 4 * 86_567_656
    ready = [one.ready for one in found if one.ready is not None]
    assert ready == sorted(ready)
    assert ready[0] == pytest.approx(0.0, abs=1e-3)  # the classifier is computed on one token of 197
    assert ready[-1] == pytest.approx(1.0)
    assert {one.micro_steps for one in found} == {"last"}


def test_buckets_are_ready_in_proportion_to_the_blocks_that_are_done() -> None:
    """Twelve like blocks, patches and classifier next to nothing: half of the bytes at about half of backward."""
    found = sent(large({"engine": "ddp", "bucket_mib": 1}))
    done, total = 0.0, sum(one.tensor_bytes for one in found)
    for one in found:
        done += one.tensor_bytes
        assert one.ready == pytest.approx(done / total, abs=0.05)


def test_the_default_bucket_of_zero_leaves_nothing_to_overlap() -> None:
    """5e8 elements hold a ViT-B, so that its gradients leave when backward is over, overlap or not."""
    overlapping = [m for m in sent(large(zero(2, overlap_comm=True))) if m.phase == "backward"]
    assert [one.ready for one in overlapping] == [1.0]
    small = [m for m in sent(large(zero(2, overlap_comm=True, bucket_mib=50))) if m.phase == "backward"]
    assert small[0].ready is not None
    assert small[0].ready < 0.3
    assert all(one.ready is None for one in sent(large(zero(2, bucket_mib=50))))


def test_fsdp2_gathers_a_block_while_the_one_before_is_computed() -> None:
    found = sent(large(fsdp2()))
    forward = [m for m in found if m.phase == "forward"]
    assert forward[0].ready is None  # the root
    assert forward[1].ready == forward[1].needed
    for before, one in pairwise(forward[1:]):
        assert one.ready == before.needed
        assert one.needed is not None
        assert before.needed is not None
        assert one.needed > before.needed
    backward = [m for m in found if m.phase == "backward" and m.operation == "all_gather"]
    assert backward[0].needed == pytest.approx(0.0, abs=1e-3)
    assert [m.ready for m in backward[1:]] == [m.needed for m in backward[:-1]]
    scattered = [m.ready for m in found if m.operation == "reduce_scatter"]
    assert scattered == sorted(ready for ready in scattered if ready is not None)
    assert scattered[-1] == 1.0


def test_on_a_cpu_fsdp2_waits_for_every_call() -> None:
    assert all(one.ready is None for one in sent(trial_of(fsdp2(), 2)))


def test_a_tensor_one_long_is_sent_once_per_rank_by_fsdp2() -> None:
    """Class token and positions of the small model: at 64 ranks 64 times as much. Blocks of 192 stay as they are."""
    world = World(nodes=64, ranks_per_node=1, threads_per_rank=1)
    found = sent(trial_of(fsdp2(), 1).model_copy(update={"world": world}))
    outside = PSI - 2 * BLOCK - TOKENS - 10 * 192 - 10
    padded_classes = 64 * 192 + 64
    assert found[0].tensor_bytes == 4 * (outside + 64 * TOKENS + padded_classes)
    assert found[1].tensor_bytes == 4 * BLOCK


def test_zero_3_fetches_ahead_in_pieces() -> None:
    found = [m for m in sent(large(zero(3, gather_bucket_mib=50))) if m.phase == "forward"]
    assert len(found) > 4
    assert found[0].ready == found[0].needed == 0.0
    # One piece at each module, however much has been asked for already.
    asked = [m.ready for m in found if m.ready is not None]
    needed = [m.needed for m in found if m.needed is not None]
    assert len(asked) == len(needed) == len(found)
    assert asked == sorted(asked)
    assert needed == sorted(needed)
    assert all(early < late for early, late in zip(asked[2:], needed[2:], strict=True))
    assert all(m.tensor_bytes >= 50 * MIB for m in found[:-1])


@pytest.mark.parametrize("stage", [1, 2])
def test_updated_weights_are_gathered_in_two_calls_whatever_their_bucket(stage: int) -> None:
    """As two ranks of DeepSpeed 0.19.8 were counted to do with a bucket of 1 MiB."""
    assert sum(m.calls for m in sent(large(zero(stage, gather_bucket_mib=1))) if m.operation == "all_gather") == 2


@pytest.mark.parametrize("zero_file", [{"cpu_offload": True}, {"offload_optimizer": {"device": "cpu"}}])
def test_where_states_lie_changes_nothing_that_is_sent(zero_file: dict[str, Any]) -> None:
    assert sent(large(zero(2, deepspeed_config={"zero_optimization": zero_file}))) == sent(large(zero(2)))


def test_megatron_scatters_once_and_gathers_once() -> None:
    """In buffers in which each tensor begins at a multiple of 64 elements and all end at one of 128: here 24 more."""
    plain = sent(large({"engine": "megatron"}))
    total = 4.0 * (86_567_656 + 24)
    assert {m.operation: m.tensor_bytes for m in plain if m.tensor_bytes > 4} == {
        "reduce_scatter": total, "all_gather": total,
    }  # fmt: skip
    assert all(m.ready is None for m in plain)
    overlapping = [m for m in sent(large({"engine": "megatron", "overlap_comm": True})) if m.ready is not None]
    assert len(overlapping) == 3  # of 4e7 elements at least
    assert total <= sum(m.tensor_bytes for m in overlapping) < total + 3 * 4 * 128


def test_one_process_sends_nothing() -> None:
    assert messages(trial_of({"engine": "none"}, 1)) == ()


@pytest.mark.parametrize(
    "case",
    [
        zero(1, optimizer="deepspeed_config"),
        zero(3, deepspeed_config={"zero_optimization": {"zero_quantized_weights": True}}),
        zero(3, hpz=2, deepspeed_config={"zero_optimization": {"zero_quantized_gradients": True}}),
        zero(3, deepspeed_config={"zero_optimization": {"zeropp_loco_param": {"err_beta": 0.8}}}),
        zero(1, deepspeed_config={"data_types": {"grad_accum_dtype": "bf16"}}),
    ],
)
def test_what_exchanges_something_else_is_unknown(case: Case) -> None:
    assert messages(trial_of(case, 2)) is None


def test_a_setting_that_is_off_changes_nothing() -> None:
    off = {"zero_optimization": {"zero_quantized_weights": False, "zero_hpz_partition_size": 1, "mics_shard_size": -1}}
    assert messages(trial_of(zero(3, deepspeed_config=off), 2)) == messages(trial_of(zero(3), 2))


def test_a_model_that_only_building_it_could_count_is_unknown() -> None:
    model = ModelSpec(factory="my.models:build", num_classes=10)
    assert messages(trial_of({"engine": "ddp"}, 2).model_copy(update={"model": model})) is None


@pytest.mark.parametrize("case", [{"engine": "ddp"}, zero(2), zero(3), fsdp2()])
def test_rescaled_to_what_was_counted(case: Case) -> None:
    found = sent(trial_of(case | {"grad_accum": 3}, 2))
    wanted = {one.operation: 1000 * (place + 1) for place, one in enumerate(found)}
    counted = {(operation, "float32"): amount for operation, amount in wanted.items()} | {("broadcast", "int64"): 8}
    again = rescaled(found, counted, 3)
    amounts: defaultdict[str, float] = defaultdict(float)
    for one in again:
        amounts[one.operation] += one.times(3) * one.tensor_bytes
    assert dict(amounts) == pytest.approx(wanted | {"broadcast": 8})
    assert [m.ready for m in again[:-1]] == [m.ready for m in found]
    assert again[-1] == Message("broadcast", 8, 1, "after", None, "last")


def test_an_operation_that_was_not_counted_is_left_out() -> None:
    found = sent(trial_of(zero(1), 2))
    assert {m.operation for m in rescaled(found, {("all_reduce", "float32"): 7}, 1)} == {"all_reduce"}


@given(
    st.sampled_from([{"engine": "ddp"}, zero(0), zero(1), zero(2), zero(3), fsdp2(), {"engine": "megatron"}]),
    st.integers(1, 2000),
    st.sampled_from(["fp32", "bf16", "bf16-params"]),
    st.none() | st.integers(1, 4096),
)
def test_every_schedule_can_be_carried_out(case: Case, ranks: int, precision: str, bucket: int | None) -> None:
    options: dict[str, Any] = {"precision": precision}
    if bucket is not None and case["engine"] != "fsdp2":
        options["bucket_mib"] = bucket
    found = sent(large(case | options, ranks))
    reduced = sum(m.tensor_bytes * m.calls for m in found if m.operation in ("all_reduce", "reduce_scatter"))
    assert reduced >= 2 * 86_567_656
    for one in found:
        assert one.tensor_bytes > 0
        assert one.calls >= 1
        assert one.ready is None or 0 <= one.ready <= 1
        assert one.needed is None or (one.ready or 0) <= one.needed <= 1


def test_what_fsdp2_pads_grows_with_the_ranks() -> None:
    """A class token and 197 positions of 768 are one row: at 1,000 ranks there are 1,000 of it."""
    few, many = (sent(large({"engine": "fsdp2"}, ranks)) for ranks in (2, 1000))
    assert many[0].tensor_bytes > 1000 * 198 * 768 * 4 > 100 * few[0].tensor_bytes / 2
    for one, other in zip(few, many, strict=True):
        assert one.tensor_bytes_at(np.array([1000.0]), np.array([1.0])) == pytest.approx(other.tensor_bytes)
        assert one.tensor_bytes_at(np.array([2.0]), np.array([1.0])) == pytest.approx(one.tensor_bytes)
    assert (
        sent(large({"engine": "ddp"}))[0].tensor_bytes_at(np.array([1000.0]), np.array([1.0]))
        == sent(large({"engine": "ddp"}))[0].tensor_bytes
    )


def test_a_recorded_model_that_was_never_resolved_is_unknown() -> None:
    assert messages(large({"engine": "ddp"}).model_copy(update={"model": ModelSpec(name="vit-b16")})) is None


def of_parameters(count: int, engine: str = "ddp", **train: Any) -> tuple[Message, ...]:
    made = make_trial(8, model=None, engine=engine, precision="fp32", **train)
    found = messages(made.model_copy(update={"model": ModelSpec(parameter_count=count)}))
    assert found is not None
    return found


def total(found: tuple[Message, ...], operation: str) -> float:
    return sum(one.tensor_bytes * one.calls for one in found if one.operation == operation)


@pytest.mark.parametrize("count", [1, 1000, 25_557_032, 110_000_000, 7_000_000_000])
def test_of_parameters_alone_ddp_sends_all_of_them_in_its_buckets(count: int) -> None:
    found = of_parameters(count)
    assert total(found, "all_reduce") == 4 * count
    assert [one.ready for one in found] == sorted(one.ready or 0 for one in found)
    assert found[-1].ready == 1.0
    if count == 110_000_000:  # 419.6 MiB: 1, then 16 of 25, and what is left
        sizes = [one.tensor_bytes / MIB for one in found]
        assert sizes[:-1] == [1.0] + [25.0] * 16
        assert sizes[-1] == pytest.approx(18.6, rel=0.01)


@pytest.mark.parametrize(
    ("engine", "stage", "gathered", "reduced"),
    [("fsdp2", 0, 2, ("reduce_scatter", 1)), ("deepspeed", 1, 1, ("all_reduce", 1)),
     ("deepspeed", 2, 1, ("all_reduce", 1)), ("deepspeed", 3, 1, ("reduce_scatter", 1))],
)  # fmt: skip
def test_of_parameters_alone_the_sums_are_those_of_the_engine(
    engine: str, stage: int, gathered: int, reduced: tuple[str, int]
) -> None:
    found, count = of_parameters(110_000_000, engine, zero_stage=stage), 110_000_000
    assert total(found, "all_gather") == pytest.approx(gathered * 4 * count, rel=0.02)
    assert total(found, reduced[0]) == pytest.approx(reduced[1] * 4 * count, rel=0.01)


def test_an_engine_that_is_not_modelled_stays_unknown() -> None:
    made = make_trial(8, model=None, engine="horovod")
    assert messages(made.model_copy(update={"model": ModelSpec(parameter_count=10**8)})) is None
