"""Forecasts where states lie on the host, or ranks keep second shards: by hand, and beside what was measured."""

from __future__ import annotations

from typing import Any

import pytest

from vitscale.engines.deepspeed.states import part_gathers
from vitscale.engines.states import Parts
from vitscale.prediction.memory.forecast import MemoryForecast, forecast, unavailable
from vitscale.prediction.memory.in_parts import pieces
from vitscale.trial.model_spec import ModelSpec, resolve
from vitscale.trial.trial import DataSpec, TrainSpec, Trial, WindowSpec, World

TINY = resolve(ModelSpec(name="vit-ti16", image_size=4, patch_size=2, hidden_size=4, heads=2, layers=2, mlp_size=6), 3)
"""407 parameters, of which the larger half is 204. The largest tensor, which makes patches, has 48; the largest of a
block 24. Above 20 elements are that one and, in each of two blocks, two of 24: 144 in all."""
VIT_B16 = resolve(ModelSpec(name="vit-b16"), 100)
BENCHMARKED = resolve(ModelSpec(name="vit-ti16", image_size=32, patch_size=8, layers=6), 10)
"""That of `benchmarks/memory.py`."""


def trial(ranks: int, *, model: ModelSpec = TINY, device: Any = "cuda", nodes: int = 1, **train: Any) -> Trial:
    chosen: dict[str, Any] = {"precision": "fp32", "micro_batch": 2} | train
    return Trial(
        model=model,
        data=DataSpec(name="synthetic"),
        train=TrainSpec(device=device, **chosen),
        world=World(nodes=nodes, ranks_per_node=ranks // nodes, threads_per_rank=1),
        window=WindowSpec(steps=1),
        launcher="torchrun",
    )


def known(asked: Trial) -> MemoryForecast:
    found = forecast(asked)
    assert found is not None, unavailable(asked)
    return found


def zero_trial(stage: int, ranks: int = 2, *, keys: dict[str, Any] | None = None, **train: Any) -> Trial:
    buckets = {"reduce_bucket_size": 100, "prefetch_bucket_size": 10, "param_persistence_threshold": 20}
    file = {"zero_optimization": buckets | (keys or {})}
    return trial(ranks, engine="deepspeed", zero_stage=stage, deepspeed_config=file, **train)


def zero(stage: int, ranks: int = 2, **options: Any) -> MemoryForecast:
    return known(zero_trial(stage, ranks, **options))


def arriving(ranks: int = 2, **options: Any) -> Parts:
    """What ZeRO-3 gathers in the forward of the first block, when weights of the second are on their way."""
    asked = zero_trial(3, ranks, **options)
    gathers = part_gathers(asked, pieces(asked.model, asked.train).parts)
    assert gathers is not None
    return gathers.forward[1]


# --- by hand ----------------------------------------------------------------------------------------------------------


def test_zero_2_steps_on_the_host_and_keeps_a_buffer_of_the_largest_tensor() -> None:
    found = zero(2, offload="optimizer")
    step = {part: size for part, size in found.moments["step"].items() if part != "images"}
    assert step == {"weights": 4 * 407, "temporaries": 4 * 48}
    assert found.host == {
        "master weights": 4 * 204, "optimizer states": 8 * 204, "gradients": 4 * 204, "temporaries": 4 * (204 + 48),
    }  # fmt: skip
    # Its part of the gradients has left the device when the bucket's flat copy is gone.
    assert "gradients" not in found.moments["exchange"]
    assert found.moments["exchange"]["temporaries"] == 4 * 48 + 4 * 100


def test_norms_of_offloaded_gradients_are_taken_in_64_bits() -> None:
    # A bucket of 10 elements is reduced tensor by tensor, of which the largest of a block has 24.
    found = zero(2, keys={"reduce_bucket_size": 10}, offload="optimizer")
    assert found.moments["exchange"]["temporaries"] == 4 * 48 + 8 * 48


@pytest.mark.parametrize(("stage", "sums"), [(1, 0), (2, 4 * 221)])
def test_micro_steps_add_up_on_the_host_at_stage_2_and_on_the_device_at_stage_1(stage: int, sums: int) -> None:
    """The larger rank has a piece of tensors with 221 elements (`test_forecast.py` counts them)."""
    found = zero(stage, offload="optimizer", grad_accum=2)
    assert found.host["gradients"] == 4 * 204 + sums
    assert found.moments["end of forward"].get("gradients", 0) == (4 * 407 if stage == 1 else 0)


def test_zero_3_with_all_on_the_host_gathers_out_of_it() -> None:
    found = zero(3, offload="parameters")
    assert found.host == {
        "weights": 4 * 204, "master weights": 4 * 204, "optimizer states": 8 * 204, "gradients": 4 * 204 + 4 * 204,
    }  # fmt: skip
    assert not {"weights", "master weights", "optimizer states", "gradients"} & found.moments["step"].keys()
    assert found.moments["end of forward"]["gathered weights"] == 4 * 407
    # At most 10 and one tensor of 48 more are on their way; this rank's half is copied to the device first.
    first_block = arriving(offload="parameters")
    assert first_block["gathered weights"] == 4 * (407 + 58)
    assert first_block["temporaries"] == 4 * 58 // 2


def test_one_rank_gathers_from_the_host_without_a_buffer() -> None:
    found = zero(3, ranks=1, offload="parameters")
    assert found.moments["end of forward"]["gathered weights"] == 4 * 407
    first_block = arriving(ranks=1, offload="parameters")
    assert (first_block["gathered weights"], first_block["temporaries"]) == (4 * 407, 0)
    assert "gathered weights" not in zero(3, ranks=1, offload="optimizer").moments["end of forward"]


def test_fsdp2_with_shards_on_the_host_holds_what_is_gathered() -> None:
    plain, found = (known(trial(2, engine="fsdp2", offload=offload)) for offload in ("none", "parameters"))
    assert found.host == {"weights": 4 * 204, "optimizer states": 8 * 204, "gradients": 4 * 204}
    assert plain.host == {}
    assert set(found.moments["step"]) == {"images"}
    assert found.moments["end of forward"]["gathered weights"] == plain.moments["end of forward"]["gathered weights"]
    again = known(trial(2, engine="fsdp2", offload="parameters", grad_accum=2))
    assert "gradients" not in again.moments["end of forward"]


def test_unlike_blocks_offload_too() -> None:
    swin = ModelSpec(name="swinv2-t", image_size=8, patch_size=4, hidden_size=4, heads=1, depths=(1,), window_size=2)
    model = resolve(swin, 3)
    of_fsdp2 = known(trial(2, model=model, engine="fsdp2", offload="parameters"))
    assert set(of_fsdp2.moments["step"]) == {"images", "buffers of the model"}
    of_zero_3 = known(trial(1, model=model, engine="deepspeed", zero_stage=3, offload="parameters"))
    weight_bytes = of_zero_3.host["weights"]
    # The loss begins when all weights are gathered.
    assert of_zero_3.moments["end of forward"]["gathered weights"] == weight_bytes
    assert of_fsdp2.host["optimizer states"] == weight_bytes + weight_bytes % 8  # of half of the weights, twice


@pytest.mark.parametrize(
    ("stage", "offload", "keys"),
    [
        (2, "optimizer", {"offload_optimizer": {"device": "cpu", "pin_memory": False}}),
        (2, "optimizer", {"cpu_offload": True}),
        (1, "optimizer", {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}),
        (3, "parameters", {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}),
        (3, "parameters", {"cpu_offload": 1, "cpu_offload_param": "true"}),
    ],
)
def test_a_file_offloads_as_the_study_does(stage: int, offload: str, keys: dict[str, Any]) -> None:
    assert zero(stage, keys=keys) == zero(stage, offload=offload)


def test_gloo_copies_the_new_weights_of_the_largest_group() -> None:
    """Of the tiny model 308 elements take weight decay, and 99 do not."""
    assert zero(2, device="cpu", offload="optimizer").moments["step"]["gloo's copies"] == 4 * 308
    assert "gloo's copies" not in zero(2, ranks=1, device="cpu", offload="optimizer").moments["step"]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_on_a_cpu_all_lies_in_one_memory(stage: int) -> None:
    on_gpu, on_cpu = (zero(stage, offload="optimizer", device=device) for device in ("cuda", "cpu"))
    of_gpu, of_cpu = (sum(found.moments["step"].values()) for found in (on_gpu, on_cpu))
    of_cpu -= on_cpu.moments["step"].get("gloo's copies", 0)
    assert on_cpu.host == {}
    assert of_cpu - of_gpu == sum(on_gpu.host.values())


def test_hpz_keeps_a_second_shard_from_the_first_release_to_the_end_of_the_step() -> None:
    plain, found = (zero(3, ranks=4, keys={"zero_hpz_partition_size": size}) for size in (1, 2))
    second = "second shard of weights"
    assert second not in found.moments["end of forward"]
    assert found.moments["exchange"][second] == 4 * 144 // 2  # small weights are not released before the step
    assert found.moments["step"][second] == 4 * 204
    assert plain.moments["end of forward"] == found.moments["end of forward"]
    again = zero(3, ranks=4, keys={"zero_hpz_partition_size": 2}, grad_accum=2)
    assert again.moments["end of forward"][second] == 4 * 144 // 2
    assert second not in zero(2, ranks=4, keys={"zero_hpz_partition_size": 2}).moments["step"]
    offloaded = zero(3, ranks=4, keys={"zero_hpz_partition_size": 2}, offload="parameters")
    assert second not in offloaded.moments["step"]
    assert offloaded.host[second] == 4 * 204


def test_hpz_of_the_study_holds_what_that_of_the_file_does() -> None:
    for ranks in (1, 4, 6):
        in_file = zero(3, ranks=ranks, keys={"zero_hpz_partition_size": 2}, grad_accum=2)
        assert zero(3, ranks=ranks, hpz=2, grad_accum=2) == in_file
        assert in_file != zero(3, ranks=ranks, grad_accum=2)


def test_a_group_is_of_all_ranks_where_there_are_fewer() -> None:
    """One rank has all 407 elements once more, of which 144 are released before the step."""
    second = "second shard of weights"
    assert zero(3, ranks=2, hpz=8).moments["step"][second] == 4 * 204
    alone = zero(3, ranks=1, hpz=8)
    assert (alone.moments["exchange"][second], alone.moments["step"][second]) == (4 * 144, 4 * 407)


def test_hpz_keeps_a_second_shard_of_what_forward_has_released() -> None:
    """A distance of 100 elements lets the last 50 of 144 stay: from the first of them to its backward it is 2 x 50.

    Biases and norms count in that distance. From the last block's second matrix it is 46 to its backward, a norm of 8
    and a head of 15 twice, and from its first one 102, so that one of 24 is there at the end of forward.
    """
    short = {"stage3_max_live_parameters": 10, "stage3_max_reuse_distance": 100, "zero_hpz_partition_size": 2}
    found = zero(3, ranks=4, keys=short)
    assert found.moments["end of forward"]["second shard of weights"] == 4 * (144 - 50) // 2
    assert found.moments["end of forward"]["gathered weights"] == 4 * (263 + 24)


def test_one_rank_has_what_it_takes_from_the_host_once() -> None:
    short = {"stage3_max_live_parameters": 10, "stage3_max_reuse_distance": 100}
    first_block = arriving(ranks=1, keys=short, offload="parameters")
    assert first_block["gathered weights"] == 4 * (263 + 24)  # one matrix is enough for a limit of 10
    assert arriving(ranks=1, keys=short, offload="optimizer")["gathered weights"] == 0


def test_quantised_weights_arrive_in_8_bits_and_are_expanded_to_16() -> None:
    plain, found = (arriving(keys={"zero_quantized_weights": quantised}) for quantised in (False, True))
    assert plain["gathered weights"] - found["gathered weights"] == 58 * (4 - 3)
    assert zero(3, ranks=1, keys={"zero_quantized_weights": True}) == zero(3, ranks=1)


def test_quantised_gradients_need_no_flat_copy_between_hosts() -> None:
    keys = {"zero_quantized_gradients": True}
    assert zero(3, keys=keys) == zero(3)  # one host: DeepSpeed scatters as ever
    found = zero(3, nodes=2, keys=keys)
    assert found.moments["exchange"]["temporaries"] == 100


@pytest.mark.parametrize(
    ("stage", "keys", "device", "named"),
    [
        (3, {"offload_optimizer": {"device": "nvme"}}, "cuda", "offload_optimizer.device = 'nvme'"),
        (3, {"offload_param": {"device": "nvme"}}, "cuda", "offload_param.device = 'nvme'"),
        (3, {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}, "cuda", "offload_optimizer.ratio = 0.5"),
        (3, {"offload_optimizer": {"device": "cpu", "super_offload": True}}, "cuda", "offload_optimizer.super_offload"),
        (0, {"offload_optimizer": {"device": "cpu"}}, "cuda", "offload_optimizer at stage 0"),
        (3, {"mics_shard_size": 2}, "cuda", "mics_shard_size"),
        (2, {"zenflow": {"topk_ratio": 0.1}}, "cuda", "zenflow"),
        (3, {"zero_quantized_nontrainable_weights": True}, "cuda", "zero_quantized_nontrainable_weights"),
        (3, {"zero_quantized_weights": True}, "cpu", "zero_quantized_weights on a CPU, where DeepSpeed has no kernel"),
    ],
)
def test_what_is_not_modelled_is_named_by_its_key(stage: int, keys: dict[str, Any], device: str, named: str) -> None:
    asked = trial(2, engine="deepspeed", zero_stage=stage, device=device, deepspeed_config={"zero_optimization": keys})
    assert forecast(asked) is None
    assert unavailable(asked).startswith(f"zero_optimization.{named}")
    assert unavailable(asked).endswith("of the DeepSpeed file is not modelled")


# --- measured ---------------------------------------------------------------------------------------------------------

MEASURED_ON_A_GPU: list[tuple[dict[str, Any], float]] = [
    ({"engine": "fsdp2"}, 5.40),
    ({"engine": "fsdp2", "offload": "parameters"}, 4.44),
    ({"engine": "deepspeed", "zero_stage": 2}, 9.42),
    ({"engine": "deepspeed", "zero_stage": 2, "offload": "optimizer"}, 8.46),
    ({"engine": "deepspeed", "zero_stage": 3}, 8.63),
    ({"engine": "deepspeed", "zero_stage": 3, "offload": "parameters"}, 7.35),
]
"""GiB that torch's allocator counted on one H200: ViT-B/16, 64 images, autocast to bf16 (docs/benchmarks/README.md)."""
WORKSPACE_GIB = 3 * 32 / 1024
"""cuBLAS takes three workspaces of 32 MiB, which no forecast counts (docs/memory.md)."""


@pytest.mark.parametrize(("fields", "gib"), MEASURED_ON_A_GPU)
def test_one_rank_of_a_gpu_took_what_is_forecast(fields: dict[str, Any], gib: float) -> None:
    found = known(trial(1, model=VIT_B16, precision="bf16", micro_batch=64, **fields))
    assert -0.05 < found.peak_bytes / 2**30 / gib - 1 < 0
    assert found.peak_bytes / 2**30 + WORKSPACE_GIB == pytest.approx(gib, rel=0.02)


MEASURED_ON_A_CPU: list[tuple[int, dict[str, Any], dict[str, Any], float]] = [
    (1, {"offload": "optimizer"}, {}, 51.99),
    (1, {"offload": "optimizer", "micro_batch": 32}, {}, 83.48),
    (1, {"offload": "optimizer", "grad_accum": 2}, {}, 62.31),
    (2, {"offload": "optimizer"}, {}, 51.46),
    (2, {"offload": "optimizer", "micro_batch": 32}, {}, 83.47),
    (2, {"offload": "optimizer", "grad_accum": 2}, {}, 57.40),
    (2, {"offload": "optimizer", "micro_batch": 4}, {}, 50.0),
    (2, {"offload": "optimizer", "micro_batch": 4, "overlap_comm": True, "optimizer": "sgd"}, {}, 44.6),
    (3, {"offload": "optimizer"}, {}, 55.77),
    (3, {"offload": "parameters", "micro_batch": 32}, {}, 87.71),
    (3, {"offload": "parameters", "grad_accum": 2}, {}, 55.77),
    (3, {}, {"zero_hpz_partition_size": 2}, 50.34),
    (3, {"micro_batch": 32}, {"zero_hpz_partition_size": 2}, 82.29),
    (3, {"grad_accum": 2}, {"zero_hpz_partition_size": 2}, 53.88),
]
"""Stage, settings, keys of the file, and the peak (MB) of two ranks of DeepSpeed 0.19.8 (`benchmarks/memory.py`)."""


@pytest.mark.parametrize(("stage", "fields", "keys", "megabytes"), MEASURED_ON_A_CPU)
def test_two_ranks_of_a_cpu_took_what_is_forecast(
    stage: int, fields: dict[str, Any], keys: dict[str, Any], megabytes: float
) -> None:
    buckets = {"bucket_mib": 1, "gather_bucket_mib": 1, "deepspeed_config": {"zero_optimization": keys}}
    settings: dict[str, Any] = {"engine": "deepspeed", "zero_stage": stage, "micro_batch": 8} | buckets | fields
    found = known(trial(2, model=BENCHMARKED, device="cpu", **settings))
    # A rule of two settings stands for what ZeRO-3's coordinator gathers when (`states._lasting_elements`).
    tolerance = 0.02 if stage == 3 else 0.01
    assert found.peak_bytes / 1e6 == pytest.approx(megabytes, rel=tolerance)
