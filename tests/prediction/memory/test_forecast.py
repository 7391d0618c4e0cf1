"""Forecasts of memory: hand-computed per engine and stage, and what must hold whatever the shape."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitscale.prediction.memory.activations import activations
from vitscale.prediction.memory.forecast import MemoryForecast, forecast, forecast_bytes, totals, unavailable
from vitscale.prediction.memory.in_parts import pieces
from vitscale.prediction.step.messages import messages
from vitscale.trial.model_cost import VitShape, parameters, vit_shape
from vitscale.trial.model_spec import ModelSpec, resolve
from vitscale.trial.trial import DataSpec, TrainSpec, Trial, WindowSpec, World

TINY = ModelSpec(name="vit-ti16", image_size=4, patch_size=2, hidden_size=4, heads=2, layers=2, mlp_size=6)
"""3 classes, 5 tokens.

Embedding: class token 4, positions 20, projection 4*12 + 4: 76. Block: q, k, v, output 4 * (16 + 4) = 80, two norms 16,
MLP 4*6 + 6 + 6*4 + 4 = 58: 154. Head: norm 8, classifier 12 + 3: 23. In all 76 + 2*154 + 23 = 407: of them 345 in
tensors of two dimensions or more (4 + 20 + 48, twice 64 + 48 = 112, 12: 72 + 224 + 12 = 308 with weight decay), 99
without.
"""
VIT_UPERNET = resolve(
    ModelSpec(name="vit-ti16", image_size=32, patch_size=8, layers=2, task="segmentation", decoder_size=24), 3
)
PSI = 407
DECAYED = 308
SWIN = ModelSpec(name="swinv2-t", image_size=8, patch_size=4, hidden_size=4, heads=1, depths=(1,), window_size=2)
UPERNET = ModelSpec(
    task="segmentation", name="swinv2-t", image_size=64, hidden_size=16, heads=2, depths=(1, 1, 1, 1), window_size=4,
    decoder_size=24,
)  # fmt: skip


def trial(ranks: int = 1, model: ModelSpec = TINY, device: Any = "cuda", **train: Any) -> Trial:
    chosen: dict[str, Any] = {"engine": "none", "precision": "fp32", "micro_batch": 2} | train
    return Trial(
        model=resolve(model, 3),
        data=DataSpec(name="synthetic"),
        train=TrainSpec(device=device, **chosen),
        world=World(ranks_per_node=ranks, threads_per_rank=1),
        window=WindowSpec(steps=1),
        launcher="torchrun",
    )


def known(wanted: Trial) -> MemoryForecast:
    found = forecast(wanted)
    assert found is not None
    return found


def deepspeed(stage: int, ranks: int = 2, bucket: int = 100, **train: Any) -> MemoryForecast:
    zero = {"reduce_bucket_size": bucket, "stage3_prefetch_bucket_size": 10, "stage3_param_persistence_threshold": 20}
    config = {"zero_optimization": zero | train.pop("zero", {})}
    return known(trial(ranks, engine="deepspeed", zero_stage=stage, deepspeed_config=config, **train))


# --- by hand ----------------------------------------------------------------------------------------------------------


def test_the_tiny_model_is_the_one_counted_above() -> None:
    assert parameters(resolve(TINY, 3)) == PSI


def test_the_activations_of_the_tiny_model() -> None:
    # 10 rows (2 images, 5 tokens). Per block 8*4 + 2*6 = 44 elements a row, and 2 norms' mean and deviation and 2
    # heads' log-sum-exp: 6 more. After both blocks: the last norm's input and output (8), its statistics (2), and
    # twice 2 * 3 logits.
    block, head = 10 * (44 + 6) * 4, 10 * (8 + 2) * 4 + 2 * 2 * 3 * 4
    end = known(trial()).moments["end of forward"]
    assert end["activations"] == 2 * block + head
    assert end["images"] == 2 * 3 * 16 * 4
    # The head's backward comes first: all that both blocks and the head keep is there, and a gradient of 3*4 is new.
    start = known(trial(micro_batch=200)).moments["backward"]
    assert start["activations"] == 100 * (2 * block + head)
    assert start["gradients"] == 12 * 4
    # With a wider MLP the last block's is higher: the gradients of its output (4) and of GELU's output (100) are there
    # beside what both blocks keep; the head's 23 gradients are made and one of 4*100 is new.
    wide_block = 10 * (8 * 4 + 2 * 100 + 6) * 4
    widest = known(trial(model=TINY.model_copy(update={"mlp_size": 100}), micro_batch=200)).moments["backward"]
    assert widest["activations"] == 100 * 2 * wide_block
    assert widest["passed on in backward"] == 1000 * (4 + 100) * 4
    assert widest["gradients"] == (23 + 400) * 4


def test_without_an_engine_a_parameter_takes_sixteen_bytes() -> None:
    step = known(trial()).moments["step"]
    assert step == {"weights": 4 * PSI, "optimizer states": 8 * PSI, "images": 384, "gradients": 4 * PSI}
    assert known(trial(optimizer="sgd")).moments["step"]["optimizer states"] == 4 * PSI
    assert known(trial(optimizer="lamb")).moments["step"]["optimizer states"] == 8 * PSI
    pure = known(trial(precision="bf16-params")).moments["step"]
    assert (pure["weights"], pure["optimizer states"], pure["gradients"]) == (2 * PSI, 4 * PSI, 2 * PSI)


def test_sgd_without_momentum_keeps_no_states_and_lambs_updates_are_as_large_as_the_model() -> None:
    engines: tuple[dict[str, Any], ...] = ({}, {"engine": "fsdp2"}, {"engine": "deepspeed", "zero_stage": 2})
    for engine in engines:
        own: dict[str, Any] = {"ranks": 2 if engine else 1, "optimizer": "sgd"} | engine
        assert known(trial(**own)).moments["step"]["optimizer states"] > 0
        assert "optimizer states" not in known(trial(**own, momentum=0.0)).moments["step"]
    for name in ("none", "ddp"):
        lamb, adamw = (known(trial(engine=name, optimizer=each)).moments["step"] for each in ("lamb", "adamw"))
        assert lamb == {**adamw, "temporaries": 4 * PSI}


def test_views_save_nothing_while_micro_steps_add_up_and_another_dtype_takes_a_copy() -> None:
    """Of the other micro-steps gradients are tensors of their own, and what travels in 16 bits is cast before."""
    views, copies = (known(trial(engine="ddp", grad_accum=2, gradient_as_bucket_view=given)) for given in (True, False))
    assert views.moments["backward"] == copies.moments["backward"]
    assert views.moments["exchange"] == copies.moments["exchange"]
    assert "gradients" not in views.moments["step"]
    for device, copies_of_fp16 in (
        ("cpu", 1),
        ("cuda", 2),
    ):  # on a GPU those of the first step too, but no more buckets
        cast = known(trial(2, engine="ddp", gradient_dtype="fp16", device=device)).moments["exchange"]
        assert cast["buckets"] == (4 + copies_of_fp16 * 2) * PSI


@pytest.mark.parametrize("ranks", [1, 2])
def test_ddp_adds_its_buckets_and_views_take_the_gradients_away(ranks: int) -> None:
    assert known(trial(ranks, engine="ddp", device="cpu")).moments["step"]["buckets"] == 4 * PSI
    views = known(trial(ranks, engine="ddp", device="cpu", gradient_as_bucket_view=True)).moments["step"]
    assert views["buckets"] == 4 * PSI
    assert "gradients" not in views
    many: dict[str, Any] = {"engine": "ddp", "micro_batch": 200}
    many |= {"model": TINY.model_copy(update={"mlp_size": 100})}
    assert known(trial(ranks, **many)).moments["backward"]["gradients"] == 4 * (23 + 400)
    viewed = known(trial(ranks, gradient_as_bucket_view=True, **many))
    assert viewed.moments["backward"]["gradients"] == 4 * 400  # not in its bucket yet


def test_on_a_gpu_ddp_s_first_buckets_are_there_beside_those_it_keeps() -> None:
    """As an H200 showed: ViT-B/16 (343.5 MB of gradients, one rank, micro-batch 64) took 688.7 MB more under DDP than
    plain in fp32, and 687.6 MB in bf16. Accelerate wraps nothing on one GPU."""
    for ranks in (1, 2):
        assert known(trial(ranks, engine="ddp")).moments["step"]["buckets"] == 2 * 4 * PSI
    accelerated: dict[str, Any] = {"engine": "accelerate", "accelerate_backend": "ddp"}
    assert known(trial(1, **accelerated)).moments == known(trial(1)).moments
    assert known(trial(2, **accelerated)).moments == known(trial(2, engine="ddp")).moments


def test_autocast_keeps_sixteen_bit_copies() -> None:
    # Linear and convolution weights with their biases: 48 + 4, per block 64 + 16 + 48 + 10, 12 + 3.
    end = known(trial(precision="bf16")).moments["end of forward"]
    assert end["autocast's copies"] == 2 * (52 + 2 * 138 + 15)
    assert end["weights"] == 4 * PSI


def test_zero_0_flattens_all_gradients_at_one_rank_too() -> None:
    for ranks in (1, 2):
        exchange = deepspeed(0, ranks).moments["exchange"]
        assert exchange["gradients"] == exchange["buckets"] == 4 * PSI
    pure = deepspeed(0, precision="bf16-params").moments["step"]
    assert pure["weights"] + pure["master weights"] + pure["optimizer states"] == (2 + 4 + 8) * PSI
    assert (pure["gradients"], pure["temporaries"]) == (2 * PSI, 4 * PSI)


def test_zero_1_keeps_all_gradients_and_fp32_masters_beside_fp32_weights() -> None:
    # 407 are odd: the larger part is 204. Rank 1 takes the second half of 308 with decay; it begins at 154, inside the
    # first block's fc1, which begins at 72 + 64 = 136. Of the 99 without, the first part of 50 ends where a tensor
    # does. Copied whole that is 308 - 136 + 49 = 221 on rank 1, and 160 + 50 on rank 0.
    found = deepspeed(1)
    steady = found.moments["step"]
    assert steady["weights"] == 4 * PSI
    assert steady["master weights"] == 4 * 204
    assert steady["optimizer states"] == 8 * 204
    assert steady["gradients"] == 4 * 221
    assert steady["temporaries"] == 4 * DECAYED // 2
    exchange = found.moments["exchange"]
    assert exchange["buckets"] == 4 * 100
    assert exchange["gradients"] == 4 * (PSI - 100 + 221)


def test_zero_2_keeps_its_part_of_the_gradients() -> None:
    found = deepspeed(2)
    assert found.moments["exchange"]["gradients"] == 4 * 221
    assert found.moments["exchange"]["temporaries"] == 4 * 100
    assert deepspeed(2, overlap_comm=True).moments["backward"]["buckets"] == 2 * 4 * 100
    assert deepspeed(2, precision="bf16").moments["backward"]["buckets"] == 2 * 4 * 100
    again = deepspeed(2, grad_accum=2).moments
    assert again["end of forward"]["gradients"] == 4 * 221


def test_a_bucket_is_full_where_fewer_activations_are_there() -> None:
    # One image, 5 rows. In the order of backward gradients are: head 23, fc2 4 and 24, fc1 6 and 24, norm 8, output
    # 4 and 16. A bucket of 100 is first full with 93, for the output's 16 do not fit. The next 16, three times 4 and 16
    # with the norm's 8, and of the first block fc2's 4 are 88: its 24 do not fit. Of that block 4 of 154 are made.
    found = deepspeed(2, bucket=100, micro_batch=1).moments["backward"]
    block = 5 * (44 + 6) * 4
    assert found["activations"] == block - round(4 / 154 * block)
    assert found["passed on in backward"] == 5 * 4 * (4 + 6)
    assert found["gradients"] == 4 * (221 + 24), "this rank's part is there since the first exchange"
    assert found["temporaries"] == 4 * 88


def test_without_overlap_a_bucket_is_copied_once_and_on_a_gpu_with_it_twice() -> None:
    def exchanged(device: Any, overlap: bool) -> int:
        config = {"zero_optimization": {"reduce_bucket_size": 100}}
        asked = trial(2, device=device, engine="deepspeed", zero_stage=2, overlap_comm=overlap, deepspeed_config=config)
        return known(asked).moments["exchange"]["temporaries"]

    assert exchanged("cuda", False) == exchanged("cpu", False) == exchanged("cpu", True) == 4 * 100
    assert exchanged("cuda", True) == 2 * 4 * 100


def test_zero_3_keeps_small_weights_gathered_and_large_ones_until_their_backward() -> None:
    # Above 20 elements: the projection 48, and per block fc1 and fc2, 24 each.
    found = deepspeed(3)
    small = PSI - 48 - 4 * 24
    assert found.moments["end of forward"]["gathered weights"] == 4 * PSI
    assert found.moments["exchange"]["gathered weights"] == 4 * small
    steady = found.moments["step"]
    assert steady["weights"] == steady["gradients"] == steady["master weights"] == 4 * 204
    assert steady["temporaries"] == 4 * DECAYED // 2
    assert "gathered weights" not in deepspeed(3, ranks=1).moments["end of forward"]
    # What limits fetching ahead releases nothing while few elements lie between; and where it is not limited, it has
    # soon passed over the next use, which keeps a weight.
    for stays in ({"stage3_max_live_parameters": 0}, {"stage3_max_reuse_distance": 0}):
        assert deepspeed(3, zero=stays).moments["end of forward"]["gathered weights"] == 4 * PSI
    released = deepspeed(3, zero={"max_live_parameters": 0, "max_reuse_distance": 0}).moments
    assert released["end of forward"]["gathered weights"] == 4 * small


def test_zero_3_gathers_twice_in_a_model_without_wrapped_blocks_too() -> None:
    # Stages of one block each: none of them repeats, so that nothing is wrapped.
    moments = deepspeed(3, model=SWIN, zero={"max_live_parameters": 0, "max_reuse_distance": 0}).moments
    small, gathered = (moments[moment]["gathered weights"] for moment in ("exchange", "end of forward"))
    # What is gathered one after the other is more than what always stays; all of it, and the buffers in which it
    # arrives, would be twice the weights.
    assert small < gathered < 2 * 4 * (parameters(resolve(SWIN, 3)) or 0)


MEASURED_OF_ZERO_3: list[tuple[dict[str, int], dict[str, Any], float, int, float]] = [
    ({}, {}, 42.4, 84, 1.0),
    ({"max_live_parameters": 0}, {}, 42.3, 104, 1.0),
    ({"max_live_parameters": 0, "max_reuse_distance": 0}, {}, 33.3, 143, 1.994),
    ({"max_live_parameters": 0, "max_reuse_distance": 2_800_000}, {}, 37.4, 123, 1.450),
    ({"max_live_parameters": 500_000, "max_reuse_distance": 1_000_000}, {}, 34.9, 120, 1.776),
    ({"max_reuse_distance": 2_800_000}, {}, 43.8, 87, 1.178),
    ({"max_reuse_distance": 5_700_000}, {}, 42.3, 84, 1.0),
    ({"max_reuse_distance": 0}, {}, 43.4, 87, 1.178),
    ({"max_reuse_distance": 0, "prefetch_bucket_size": 1_000_000}, {}, 49.9, 68, 1.0),
    ({"max_reuse_distance": 5_700_000}, {"activation_checkpointing": True, "micro_batch": 32}, 51.3, 87, 1.178),
    ({"max_reuse_distance": 8_700_000}, {"activation_checkpointing": True, "micro_batch": 32}, 50.7, 84, 1.0),
    ({"max_live_parameters": 0, "max_reuse_distance": 0}, {"activation_checkpointing": True}, 33.3, 173, 2.647),
]
"""Settings of a model of 2,712,010 parameters, and the peak (MB), the all-gathers and the share of the model in them
that two ranks of DeepSpeed 0.19.8 took on a CPU with neither AMX nor AVX512-BF16."""


@pytest.mark.parametrize(("zero", "train", "megabytes", "calls", "gathered"), MEASURED_OF_ZERO_3)
def test_zero_3_holds_and_gathers_what_was_measured(
    zero: dict[str, int], train: dict[str, Any], megabytes: float, calls: int, gathered: float
) -> None:
    model = resolve(ModelSpec(name="vit-ti16", image_size=32, patch_size=8, layers=6), 10)
    common = {"reduce_bucket_size": 200_000, "prefetch_bucket_size": 100_000, "param_persistence_threshold": 1_000}
    fields = {"micro_batch": 2, "deepspeed_config": {"zero_optimization": common | zero}} | train
    asked = trial(2, model, "cpu", engine="deepspeed", zero_stage=3, **fields)
    assert -0.05 < known(asked).peak_bytes / 1e6 / megabytes - 1 < 0.05
    sent = [message for message in messages(asked) or () if message.operation == "all_gather"]
    assert abs(sum(message.calls for message in sent) - calls) <= 1
    share = sum(message.tensor_bytes * message.calls for message in sent) / (4 * 2_712_010)
    assert share == pytest.approx(gathered, abs=0.02)


def test_of_a_model_that_is_gathered_a_second_time_fetching_ahead_keeps_most() -> None:
    """ViT-H/14 at DeepSpeed's defaults: 1e9 is 1.6 of its 632 million parameters, not twice as much."""
    huge = trial(8, ModelSpec(name="vit-h14"), engine="deepspeed", zero_stage=3, bucket_mib=25)
    sent = [message for message in messages(huge) or () if message.operation == "all_gather"]
    whole = 4 * (parameters(huge.model) or 0)
    assert 1.0 < sum(message.tensor_bytes * message.calls for message in sent) / whole < 1.21
    end = known(huge).moments["end of forward"]["gathered weights"]
    assert end >= whole


def test_deepspeeds_own_bucket_is_two_gigabytes_whatever_the_model() -> None:
    found = known(trial(2, engine="deepspeed", zero_stage=2))
    assert found.parts["buckets"] == 4 * 500_000_000
    assert known(trial(2, engine="deepspeed", zero_stage=2, bucket_mib=1)).parts["buckets"] == 2**20


def test_a_tensor_too_large_for_a_bucket_is_reduced_alone() -> None:
    # No tensor of 24 elements fits into 10: each is flattened by itself, and none leaves backward's gradients early.
    assert deepspeed(2, bucket=10).moments["exchange"]["temporaries"] == 4 * 24
    assert deepspeed(1, bucket=10).moments["exchange"]["gradients"] == 4 * (PSI + 221)


def test_one_bucket_for_everything_leaves_nothing_outside_it() -> None:
    exchange = deepspeed(1, bucket=1000).moments["exchange"]
    assert "gradients" not in exchange
    assert (exchange["buckets"], exchange["temporaries"]) == (4 * 1000, 4 * PSI)


def test_fsdp2_gathers_block_by_block() -> None:
    found = known(trial(2, engine="fsdp2"))
    steady = found.moments["step"]
    assert steady["weights"] == steady["gradients"] == 4 * 204
    assert steady["optimizer states"] == 8 * 204
    # The last block is there twice: in the buffer in which it came, and copied out of it. One rank needs no buffer.
    root, block = 76 + 23, 154
    assert found.moments["end of forward"]["gathered weights"] == 4 * (root + 2 * block)
    assert known(trial(1, engine="fsdp2")).moments["end of forward"]["gathered weights"] == 4 * (root + block)
    kept = known(trial(2, engine="fsdp2", reshard_after_forward=False)).moments
    assert kept["end of forward"]["gathered weights"] == 4 * (root + block + 2 * block)
    mastered = known(trial(2, engine="fsdp2", precision="bf16-params", master_weights=True)).moments
    assert mastered["step"]["weights"] == mastered["step"]["gradients"] == 4 * 204
    assert mastered["step"]["optimizer states"] == 8 * 204
    assert mastered["end of forward"]["gathered weights"] == 2 * (root + 2 * block)
    few: dict[str, Any] = {"micro_batch": 1, "activation_checkpointing": True}
    gloo = known(trial(2, engine="fsdp2", device="cpu", **few)).moments
    assert gloo["end of forward"]["gloo's copies"] == 4 * block
    # While a block runs backward, the buffer is there out of which the block behind it was scattered.
    assert gloo["backward"]["buckets"] == 4 * block


def test_between_micro_steps_fsdp2_keeps_its_shard_of_the_gradient_and_nothing_else() -> None:
    once, twice = (
        known(trial(2, SWIN, "cpu", engine="fsdp2", grad_accum=count)).moments["end of forward"] for count in (1, 2)
    )
    assert twice == {**once, "gradients": once["weights"]}


def test_checkpointing_keeps_the_inputs_of_blocks_and_one_block_whole() -> None:
    end = known(trial(activation_checkpointing=True)).moments["end of forward"]
    assert end["activations"] == 2 * 10 * 4 * 4 + 10 * (8 + 2) * 4 + 2 * 2 * 3 * 4
    first = known(trial(activation_checkpointing=True, micro_batch=200)).moments["backward"]
    # Both blocks' inputs (4); of the last one all else that is computed again, and the gradients (4 + 6) passed on.
    assert first["activations"] == 1000 * 2 * 4 * 4
    assert first["passed on in backward"] == 1000 * (44 + 6 - 4 + 4 + 6) * 4


def test_under_autocast_checkpointing_casts_one_block_again() -> None:
    # Matrices with their biases: per block 64 + 48 + 26, embedding 48 + 4, classifier 12 + 3. In the last block's
    # backward the classifier's are gone.
    asked: dict[str, Any] = {"precision": "bf16", "micro_batch": 200}
    plainly, again = (known(trial(activation_checkpointing=flag, **asked)).moments for flag in (False, True))
    for found in (plainly, again):
        assert found["end of forward"]["autocast's copies"] == 2 * (2 * (112 + 26) + 60 + 7)
    assert plainly["backward"]["autocast's copies"] == 2 * (2 * 138 + 52)
    assert again["backward"]["autocast's copies"] == 2 * 138


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_accelerate_takes_what_it_stands_for(stage: int) -> None:
    fields: dict[str, Any] = {"zero_stage": stage, "bucket_mib": 1}
    through = trial(2, engine="accelerate", accelerate_backend="deepspeed", **fields)
    assert known(through) == known(trial(2, engine="deepspeed", **fields))


@pytest.mark.parametrize("name", ["Adam", "AdamW", "ADAMW"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_adam_of_the_users_file_keeps_what_the_studys_adamw_keeps(name: str, stage: int) -> None:
    """Two fp32 moments, in FusedAdam of DeepSpeed (ops/adam/fused_adam.py) as in torch's AdamW."""
    file = {"optimizer": {"type": name, "params": {"lr": 1e-3, "weight_decay": 0.05}}, "bf16": {"enabled": True}}
    fields: dict[str, Any] = {"engine": "deepspeed", "zero_stage": stage, "precision": "bf16-params"}
    ours = known(trial(2, deepspeed_config={"bf16": {"enabled": True}}, **fields))
    assert known(trial(2, optimizer="deepspeed_config", deepspeed_config=file, **fields)) == ours


@pytest.mark.parametrize(
    ("train", "reason"),
    [
        ({"zero_stage": 2, "deepspeed_config": {"optimizer": {"type": "Lion"}}}, "the states of 'Lion' are not"),
        ({"zero_stage": 0, "precision": "fp16", "deepspeed_config": {"optimizer": {"type": "Adam"}}}, "'Adam' are not"),
    ],
)
def test_another_optimizer_of_the_users_file_is_named(train: dict[str, Any], reason: str) -> None:
    asked = trial(2, engine="deepspeed", optimizer="deepspeed_config", **train)
    assert reason in unavailable(asked)


# --- unknown ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "train",
    [
        {"engine": "megatron"},
        {"engine": "deepspeed", "optimizer": "deepspeed_config", "deepspeed_config": {"optimizer": {"type": "Lion"}}},
        {"engine": "deepspeed", "deepspeed_config": {"data_types": {"grad_accum_dtype": "fp32"}}},
        {
            "engine": "deepspeed",
            "zero_stage": 1,
            "precision": "bf16-params",
            "deepspeed_config": {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
        },
        *(
            {"engine": "deepspeed", "zero_stage": 2, "deepspeed_config": {"zero_optimization": zero}}
            for zero in (
                {"contiguous_gradients": False},
                {"contiguous_gradients": "off"},
                {"zenflow": {"topk_ratio": 0.1}},
            )
        ),
    ],
)
def test_what_is_not_modelled_is_unknown(train: dict[str, Any]) -> None:
    assert forecast(trial(2, **train)) is None
    assert forecast_bytes(trial(2, **train)) is None


def test_a_bucket_beyond_all_memory_is_a_number_all_the_same() -> None:
    for size in (10**400, "9" * 400):
        assert deepspeed(2, bucket=size).peak_bytes > 10**15  # type: ignore[arg-type]  # as a file may have it


def test_a_model_of_the_users_own_is_unknown() -> None:
    asked = trial(model=ModelSpec(factory="my_models:build"))
    assert forecast_bytes(asked) is None
    assert unavailable(asked) == "no formula and no card counts this model"


@pytest.mark.parametrize(
    ("model", "device", "train", "reason"),
    [
        (SWIN, "cpu", {"engine": "fsdp2"}, ""),
        (SWIN, "cpu", {"engine": "fsdp2", "grad_accum": 2}, ""),
        (UPERNET, "cuda", {"engine": "deepspeed", "zero_stage": 2}, ""),
        (UPERNET, "cpu", {"engine": "deepspeed", "zero_stage": 1, "overlap_comm": True}, ""),
        (UPERNET, "cuda", {"engine": "deepspeed", "zero_stage": 3}, ""),
        (UPERNET, "cuda", {"engine": "ddp", "precision": "bf16"}, "this model was not traced for bf16 on cuda"),
        (SWIN, "cpu", {"engine": "megatron"}, "what megatron holds is not modelled"),
        (SWIN, "cuda", {"engine": "ddp"}, ""),
    ],
)
def test_what_is_not_modelled_of_swin_and_upernet_is_unavailable_with_its_reason(
    model: ModelSpec, device: Any, train: dict[str, Any], reason: str
) -> None:
    asked = trial(2, model, device, **train)
    assert unavailable(asked).startswith(reason)
    assert (forecast(asked) is None) == bool(reason)


# --- Swin V2 and UperNet ----------------------------------------------------------------------------------------------


def test_the_parts_of_a_tiny_swin_by_hand() -> None:
    """4 patches of 4 x 4 in one window, one block of width 4 with one head; 2 images, 3 classes.

    Patches keep 4 values and two statistics of each of 8 tokens, 192 bytes. The block, of an image: 4 tokens x (28 * 4
    + 16 + 8 * 4) + 4 x (44 * 4 + 16) = 1,408; and 9 places x 512 of its biases' network with 16 biases, 18,496. While
    it runs there are 4 streams of 128 bytes and the embedded patches, 128. The head keeps 2 images x (4 x 24 + 40).
    """
    found = known(trial(model=SWIN))
    embedding, block, head = 192, 2 * 1_408 + 18_496, 2 * (96 + 40)
    assert found.moments["end of forward"]["activations"] == max(embedding + block + 640, embedding + block + head)
    # Patches 16 * 3 * 4 weights with bias and norm; the block's products 12 * 16, biases 3 + 5 and norms 16 of width
    # 4, one scale, and 512 * 3 + 512 of its biases; the last norm, and the classifier.
    count = 204 + (12 * 16 + 3 * 4 + 5 * 4 + 4 * 4 + 1 + 2_048) + 8 + 15
    assert parameters(resolve(SWIN, 3)) == count
    assert found.moments["step"]["gradients"] == 4 * count
    # Of the window's 4 x 4 pairs of tokens which of 9 distances they have, in 64 bits, and these, of two numbers each.
    assert found.moments["step"]["buffers of the model"] == 8 * 16 + 4 * 2 * 9
    assert known(trial(model=SWIN, engine="ddp", device="cpu")).moments["step"]["buckets"] == 4 * count


def test_the_loss_of_pixels_takes_five_times_their_logits() -> None:
    """On a CPU with an auxiliary head: log-probabilities of both, both logits, and a copy in another order."""
    classes = 150
    few, many = (
        known(trial(model=resolve(UPERNET.model_copy(update={"num_classes": count}), 3), device="cpu"))
        for count in (classes, 2 * classes)
    )
    of_head = 4 * (24 + 12 + 2) * classes  # the two classifiers' weights; the gradients are not there yet
    more = many.moments["end of forward"], few.moments["end of forward"]
    of_loss = sum(more[0][part] - more[1][part] for part in ("activations", "logits"))
    assert of_loss == 2 * 5 * 4 * classes * 64 * 64
    assert more[0]["weights"] - more[1]["weights"] == of_head


@pytest.mark.parametrize("model", [SWIN, UPERNET], ids=["classification", "segmentation"])
def test_checkpointing_keeps_what_stages_take(model: ModelSpec) -> None:
    shape = {"image_size": 64, "depths": (1, 1, 1, 1)}
    large: dict[str, Any] = {"model": model.model_copy(update=shape), "micro_batch": 16}
    kept, again = (known(trial(activation_checkpointing=flag, **large)).peak_bytes for flag in (False, True))
    assert again < kept


@settings(max_examples=30, deadline=None)
@given(st.sampled_from([16, 24, 32, 48, 64]), st.integers(1, 8), st.booleans(), st.sampled_from(["cpu", "cuda"]))
def test_larger_images_never_take_less(size: int, images: int, segments: bool, device: Any) -> None:
    model = UPERNET if segments else SWIN.model_copy(update={"depths": (1, 1)})
    smaller, larger = (
        known(trial(model=model.model_copy(update={"image_size": pixels}), micro_batch=images, device=device))
        for pixels in (max(size, 64 if segments else 16), max(size, 64 if segments else 16) + 32)
    )
    assert smaller.peak_bytes < larger.peak_bytes


def test_what_is_left_out_is_named() -> None:
    left_out = known(trial()).not_covered
    assert {"libraries", "fragmentation", "start-up"} <= left_out.keys()
    assert "compile" not in left_out
    assert "compile" in known(trial(compile=True)).not_covered
    assert "cuda-graphs" not in known(trial(compile=True)).not_covered
    assert "cuda-graphs" in known(trial(compile=True, compile_mode="reduce-overhead")).not_covered


def test_a_file_that_offloads_nothing_changes_nothing() -> None:
    said = {"offload_optimizer": {"device": "none"}, "contiguous_gradients": True, "cpu_offload": False}
    groups = {"zero_hpz_partition_size": 1, "mics_shard_size": -1, "zero_quantized_weights": "false", "zenflow": None}
    assert deepspeed(2, zero=said | groups) == deepspeed(2)


def test_settings_count_under_both_names_and_as_pydantic_reads_them() -> None:
    short = {"max_live_parameters": 0, "max_reuse_distance": 0, "param_persistence_threshold": 30}
    long = {f"stage3_{key}": value for key, value in short.items()}
    config = {"zero_optimization": {"reduce_bucket_size": 100}}
    by_short, by_long = (
        known(trial(2, engine="deepspeed", zero_stage=3, deepspeed_config={"zero_optimization": zero}))
        for zero in (config["zero_optimization"] | short, config["zero_optimization"] | long)
    )
    assert by_short == by_long
    quoted = deepspeed(2, zero={"reduce_bucket_size": "100", "overlap_comm": "true"})
    assert quoted == deepspeed(2, zero={"overlap_comm": 1}) == deepspeed(2, zero={"overlap_comm": True})
    assert quoted != deepspeed(2)


def test_settings_that_are_no_numbers_are_deepspeeds_defaults() -> None:
    assert deepspeed(2, zero={"reduce_bucket_size": "auto"}).parts["buckets"] == 4 * 500_000_000
    assert known(trial(2, engine="deepspeed", zero_stage=2, deepspeed_config={"zero_optimization": []})).peak_bytes > 0


# --- whatever the shape -----------------------------------------------------------------------------------------------

SHAPES = st.builds(
    lambda heads, layers, mlp, patches: ModelSpec(
        name="vit-ti16", image_size=2 * patches, patch_size=2, hidden_size=4 * heads, heads=heads, layers=layers,
        mlp_size=mlp,
    ),
    heads=st.integers(1, 6), layers=st.integers(1, 6), mlp=st.integers(1, 60), patches=st.integers(1, 6),
)  # fmt: skip
PRECISIONS = st.sampled_from(["fp32", "bf16", "bf16-params"])
WRAPPED = st.sampled_from(
    [{"engine": "ddp"}, {"engine": "fsdp2"}]
    + [{"engine": "deepspeed", "zero_stage": stage, "bucket_mib": 1} for stage in range(4)]
)
STATES = ("weights", "master weights", "optimizer states")


def state_bytes(found: MemoryForecast) -> int:
    return sum(found.moments["step"].get(part, 0) for part in STATES)


@given(SHAPES, PRECISIONS, WRAPPED, st.integers(1, 40))
def test_more_ranks_never_need_more_states_each(
    model: ModelSpec, precision: str, train: dict[str, Any], ranks: int
) -> None:
    fewer = state_bytes(known(trial(ranks, model, precision=precision, **train)))
    assert state_bytes(known(trial(ranks + 1, model, precision=precision, **train))) <= fewer


@given(SHAPES, PRECISIONS, st.integers(1, 40))
def test_a_higher_stage_never_needs_more_states(model: ModelSpec, precision: str, ranks: int) -> None:
    by_stage = [
        state_bytes(known(trial(ranks, model, engine="deepspeed", zero_stage=stage, precision=precision, bucket_mib=1)))
        for stage in (1, 2, 3)
    ]
    assert by_stage == sorted(by_stage, reverse=True)


@given(SHAPES, PRECISIONS, WRAPPED, st.booleans(), st.integers(1, 100))
def test_activations_grow_with_the_micro_batch_and_nothing_else_does(
    model: ModelSpec, precision: str, train: dict[str, Any], checkpointed: bool, images: int
) -> None:
    def end(micro_batch: int) -> dict[str, int]:
        asked = trial(
            2, model, precision=precision, micro_batch=micro_batch, activation_checkpointing=checkpointed, **train
        )
        return dict(known(asked).moments["end of forward"])

    # One image's forward may be highest at its beginning, where the weights arrive; many images' is at its end.
    fewer, more = end(10_000), end(10_000 + images)
    of_image = {part: more[part] - fewer[part] for part in fewer}
    assert {part for part, part_bytes in of_image.items() if part_bytes} == {"activations", "images"}
    assert of_image["activations"] * 10_000 == images * fewer["activations"]
    assert of_image["images"] * 10_000 == images * fewer["images"]


def test_the_largest_share_decides() -> None:
    assert forecast(trial(2, micro_batch=8, micro_batches=(14, 2))) == forecast(trial(2, micro_batch=14))


def test_the_peak_is_the_highest_moment() -> None:
    found = known(trial())
    assert found.peak_bytes == sum(found.parts.values()) == max(sum(m.values()) for m in found.moments.values())
    assert found.moments[found.peak_moment] == found.parts


@given(SHAPES, PRECISIONS, WRAPPED, st.integers(1, 40), st.integers(1, 50), st.integers(1, 2), st.booleans())
def test_the_peak_is_the_highest_of_all_moments_counted_one_by_one(
    model: ModelSpec, precision: str, train: dict[str, Any], ranks: int, images: int, accumulated: int, overlap: bool
) -> None:
    more = {"overlap_comm": overlap} if train["engine"] == "deepspeed" else {}
    asked = trial(
        ranks, model, device="cpu", precision=precision, micro_batch=images, grad_accum=accumulated, **train | more
    )
    assert known(asked).peak_bytes == max(totals(asked))


def test_importing_it_imports_no_torch() -> None:
    code = "import sys, vitscale.prediction.memory.forecast; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("precision", "packed"), [("fp32", 0), ("bf16-params", 2 * 5 * 6 * 2), ("bf16", 2 * 5 * 6 * 2)]
)
def test_a_16_bit_product_on_a_cpu_packs_its_wider_operand(precision: str, packed: int) -> None:
    """2 images x 5 tokens x an MLP of 6, in 2 bytes."""
    on_gpu, on_cpu = (
        activations(one.model, one.train, known_shape(one))
        for one in (trial(precision=precision), trial(precision=precision, device="cpu"))
    )
    assert on_cpu.backward_of_block - on_gpu.backward_of_block == packed
    assert on_cpu.kept_of_block == on_gpu.kept_of_block


def known_shape(wanted: Trial) -> VitShape:
    found = vit_shape(wanted.model)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("engine", "measured_bytes"), [("none", 22_860_000), ("ddp", 29_273_608)], ids=["neither", "AMX"]
)
def test_16_bit_products_are_within_the_bar_on_processors_that_pack_otherwise(engine: str, measured_bytes: int) -> None:
    """One with neither AMX nor AVX512-BF16 sums in fp32; one with AMX pads a patch's 3 channels to 16 and 32."""
    model = resolve(ModelSpec(name="vit-ti16", image_size=32, patch_size=8, layers=6), 10)
    found = known(trial(1, model, engine=engine, device="cpu", precision="bf16-params", micro_batch=8))
    assert -0.05 < found.peak_bytes / measured_bytes - 1 < 0.05


@pytest.mark.parametrize(
    ("shape", "pixels", "images", "megabytes"),
    [((192, 6, (1, 1)), 64, 1, 43.7), ((96, 3, (1, 2, 2)), 64, 1, 78.8), ((192, 6, (1, 1)), 32, 1, 41.2)],
)
def test_no_part_is_less_than_nothing_where_wide_blocks_have_few_images(
    shape: tuple[int, int, tuple[int, ...]], pixels: int, images: int, megabytes: float
) -> None:
    """ZeRO-2 under autocast, as the fuller of two ranks took it on a processor that widens 16-bit products."""
    width, heads, depths = shape
    model = ModelSpec(name="swinv2-t", image_size=pixels, hidden_size=width, heads=heads, depths=depths, window_size=4)
    fields = {"precision": "bf16", "micro_batch": images, "bucket_mib": 1}
    found = known(trial(2, resolve(model, 10), "cpu", engine="deepspeed", zero_stage=2, **fields))
    assert all(size >= 0 for parts in found.moments.values() for size in parts.values())
    assert -0.05 < found.peak_bytes / 1e6 / megabytes - 1 < 0.05


def test_the_parts_of_a_vit_lie_in_its_blocks_before_and_behind_them() -> None:
    """A decoder's parts lie behind; the copies that autocast makes are those of all products."""
    blocks = {
        "classification": [0, 1, 2, -1],
        "segmentation": [0, 1, 2, *[-1] * len(pieces(VIT_UPERNET, trial().train).parts[3:])],
    }
    assert [part.block for part in pieces(resolve(TINY, 3), trial().train).parts] == blocks["classification"]
    parts = pieces(VIT_UPERNET, trial().train).parts
    assert [part.block for part in parts] == blocks["segmentation"]
    assert all(part.copied_elements is None for part in parts)
