"""Peaks of many configurations: each the very forecast of the trial that it stands for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitscale.prediction.memory.forecast import forecast_bytes, peak_bytes_of_many
from vitscale.trial.model_cost import parameters
from vitscale.trial.model_spec import ModelSpec, resolve
from vitscale.trial.parallel import ParallelSpec
from vitscale.trial.trial import DataSpec, TrainSpec, Trial, WindowSpec, World, world_of_hosts

MODEL = resolve(ModelSpec(name="vit-ti16", image_size=32, patch_size=8, layers=3), 10)


def peak_bytes(
    template: Trial,
    hosts: World,
    engine: str,
    stage: int,
    images: int,
    accumulated: int,
    checkpointed: bool = False,
) -> float | None:
    """Of one micro-batch on these hosts, asked for beside others on other hosts."""
    same = template.train.engine == engine
    changes = {
        "engine": engine, "accelerate_backend": template.train.accelerate_backend if same else None,
        "zero_stage": stage, "activation_checkpointing": checkpointed,
    }  # fmt: skip
    changed = template.model_copy(update={"train": template.train.model_copy(update=changes)})
    ranks = np.array([hosts.size + 1, hosts.size, hosts.size, hosts.size])
    per_node = np.array([8, 2 * hosts.size, hosts.ranks_per_node, hosts.ranks_per_node])
    batches = np.array([images, images, images, 2 * images])
    _, _, found, _ = peak_bytes_of_many(changed, ranks, per_node, min(accumulated, 2), batches)
    return None if np.isnan(found) else float(found)


def trial(ranks: int, model: ModelSpec = MODEL, device: Any = "cuda", **train: Any) -> Trial:
    chosen: dict[str, Any] = {"engine": "ddp", "precision": "fp32", "micro_batch": 8, "bucket_mib": 1} | train
    return Trial(
        model=model,
        data=DataSpec(name="synthetic"),
        train=TrainSpec(device=device, **chosen),
        world=World(ranks_per_node=ranks, threads_per_rank=1),
        window=WindowSpec(steps=1),
        launcher="torchrun",
    )


SWIN = ModelSpec(name="swinv2-t", image_size=32, hidden_size=16, heads=2, depths=(1, 1, 2), window_size=4)
SEGMENTING: dict[str, Any] = {"task": "segmentation", "decoder_size": 24}
OTHERS = [
    resolve(SWIN, 10),
    resolve(SWIN.model_copy(update=SEGMENTING), 5),
    resolve(ModelSpec(name="vit-ti16", image_size=32, patch_size=8, layers=2, **SEGMENTING), 5),
]
QUANTISED: dict[str, dict[str, Any]] = {"zero_optimization": {"zero_quantized_gradients": True}}
"""Among several hosts no flat copy of a bucket is scattered."""
TEMPLATES = [
    *(trial(2, model, device="cpu", precision=precision) for model in OTHERS for precision in ("fp32", "bf16")),
    *(trial(2, device=device, precision=precision, **more)
    for device in ("cpu", "cuda")
    for precision in ("fp32", "bf16", "bf16-params")
    for more in (
        {}, {"micro_batches": (14, 2)}, {"engine": "accelerate", "accelerate_backend": "fsdp2"},
        {"engine": "deepspeed", "deepspeed_config": {"zero_optimization": {"stage3_max_live_parameters": 10}}},
    )),
    trial(2, engine="deepspeed", zero_stage=3, precision="bf16-params", deepspeed_config=QUANTISED),
]  # fmt: skip


@settings(max_examples=500)
@given(
    st.sampled_from(TEMPLATES),
    st.sampled_from(["none", "ddp", "fsdp2", "deepspeed", "accelerate", "megatron"]),
    st.integers(0, 3), st.integers(1, 300), st.integers(1, 300), st.integers(1, 600), st.integers(1, 4), st.booleans(),
)  # fmt: skip
def test_each_is_the_forecast_of_its_trial(
    template: Trial,
    engine: str,
    stage: int,
    gpus: int,
    ranks_per_node: int,
    images: int,
    accumulated: int,
    checkpointed: bool,
) -> None:
    hosts = world_of_hosts(gpus, ranks_per_node, threads_per_rank=1)
    said = peak_bytes(template, hosts, engine, stage, images, accumulated, checkpointed)
    same = template.train.engine == engine
    fields = template.train.model_dump() | {
        "engine": engine,
        "accelerate_backend": template.train.accelerate_backend if same else None,
        "zero_stage": stage,
        "micro_batch": images,
        "micro_batches": None,
        "grad_accum": accumulated,
        "activation_checkpointing": checkpointed,
    }
    whole = template.model_dump() | {"train": fields, "world": hosts.model_dump()}
    alone = forecast_bytes(Trial.model_validate(whole))
    if alone is None:
        assert said is None
    else:
        rounding = 2 * images  # of the share of a block's activations that is gone where a bucket is full
        assert said == pytest.approx(alone, rel=0, abs=rounding)


def test_gradients_are_quantised_between_hosts_alone() -> None:
    """One host scatters a flat copy of 16 bits, several hosts shards of one byte an element at most.

    With few weights gathered at a time and all gradients in one bucket, the exchange is the highest moment.
    """
    few = {"stage3_max_live_parameters": 1, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 1}
    file = {"zero_optimization": QUANTISED["zero_optimization"] | few}
    options: dict[str, Any] = {"precision": "bf16-params", "bucket_mib": 64, "deepspeed_config": file}
    template = trial(16, engine="deepspeed", zero_stage=3, **options)
    gpus, ranks_per_node = np.array([16, 16]), np.array([16, 8])
    on_one_host, on_two_hosts = peak_bytes_of_many(template, gpus, ranks_per_node, 1, np.array([1, 1]))
    assert on_one_host - on_two_hosts == parameters(MODEL)


def test_a_model_of_the_users_own_is_unknown() -> None:
    own = trial(1, ModelSpec(factory="my_models:build"))
    assert peak_bytes(own, own.world, "ddp", 0, 8, 1) is None


def test_replicas_of_a_sharded_model_are_forecast_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank has a whole model to compute, as without replicas: no trial is forecast on its own."""
    template = trial(8, engine="fsdp2").model_copy(update={"parallel": ParallelSpec(replicate=2)})
    ranks, batches = np.array([8, 8, 4]), np.array([1, 64, 8])
    alone = []
    for gpus, images in zip(ranks.tolist(), batches.tolist(), strict=True):
        train = template.train.model_copy(update={"micro_batch": images})
        world = World(ranks_per_node=gpus, threads_per_rank=1)
        alone.append(forecast_bytes(template.model_copy(update={"train": train, "world": world})))

    def refuse(one: Trial) -> None:
        raise AssertionError(f"{one.world.size} ranks were forecast on their own")

    monkeypatch.setattr("vitscale.prediction.memory.forecast.totals", refuse)
    assert peak_bytes_of_many(template, ranks, ranks, 1, batches).tolist() == pytest.approx(alone, rel=0, abs=2 * 64)
