"""Peaks of many configurations: each the very forecast of the trial that it stands for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitscale.prediction.memory.forecast import forecast_bytes, peak_bytes_of_many
from vitscale.trial.model_spec import ModelSpec, resolve
from vitscale.trial.parallel import ParallelSpec
from vitscale.trial.trial import DataSpec, TrainSpec, Trial, WindowSpec, World

MODEL = resolve(ModelSpec(name="vit-ti16", image_size=32, patch_size=8, layers=3), 10)


def peak_bytes(
    template: Trial, gpus: int, engine: str, stage: int, images: int, accumulated: int, checkpointed: bool = False
) -> float | None:
    """Of one micro-batch on so many ranks, asked for beside others."""
    same = template.train.engine == engine
    changes = {
        "engine": engine, "accelerate_backend": template.train.accelerate_backend if same else None,
        "zero_stage": stage, "activation_checkpointing": checkpointed,
    }  # fmt: skip
    changed = template.model_copy(update={"train": template.train.model_copy(update=changes)})
    ranks, batches = np.array([gpus + 1, gpus, gpus]), np.array([images, images, 2 * images])
    _, found, _ = peak_bytes_of_many(changed, ranks, min(accumulated, 2), batches)
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
TEMPLATES = [
    *(trial(2, model, device="cpu", precision=precision) for model in OTHERS for precision in ("fp32", "bf16")),
    *(trial(2, device=device, precision=precision, **more)
    for device in ("cpu", "cuda")
    for precision in ("fp32", "bf16", "bf16-params")
    for more in (
        {}, {"micro_batches": (14, 2)}, {"engine": "accelerate", "accelerate_backend": "fsdp2"},
        {"engine": "deepspeed", "deepspeed_config": {"zero_optimization": {"stage3_max_live_parameters": 10}}},
    ))
]  # fmt: skip


@given(
    st.sampled_from(TEMPLATES),
    st.sampled_from(["none", "ddp", "fsdp2", "deepspeed", "accelerate", "megatron"]),
    st.integers(0, 3), st.integers(1, 300), st.integers(1, 600), st.integers(1, 4), st.booleans(),
)  # fmt: skip
def test_each_is_the_forecast_of_its_trial(
    template: Trial, engine: str, stage: int, gpus: int, images: int, accumulated: int, checkpointed: bool
) -> None:
    said = peak_bytes(template, gpus, engine, stage, images, accumulated, checkpointed)
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
    whole = template.model_dump() | {"train": fields, "world": {"ranks_per_node": gpus, "threads_per_rank": 1}}
    alone = forecast_bytes(Trial.model_validate(whole))
    if alone is None:
        assert said is None
    else:
        rounding = 2 * images  # of the share of a block's activations that is gone where a bucket is full
        assert said == pytest.approx(alone, rel=0, abs=rounding)


def test_a_model_of_the_users_own_is_unknown() -> None:
    own = trial(1, ModelSpec(factory="my_models:build"))
    assert peak_bytes(own, 2, "ddp", 0, 8, 1) is None


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
    assert peak_bytes_of_many(template, ranks, 1, batches).tolist() == pytest.approx(alone, rel=0, abs=2 * 64)
