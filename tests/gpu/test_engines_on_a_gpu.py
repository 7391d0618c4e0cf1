"""Every engine on CUDA and NCCL against one process without any: as many ranks as there are GPUs, up to two."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.torch_version import TorchVersion

from engines import jobs
from engines.curves import Curve, Job, largest_difference, train
from engines.test_parallel import job_of, reference_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.ranks,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: torch.cuda.is_available() is False"),
]

EQUAL = 1e-5
"""Of the loss, in fp32: the kernels of one device."""
COMPILED = 1e-4
"""Where a compiler has put the sums in another order."""
Train = dict[str, Any]
CUDA: Train = {"device": "cuda"}
FP16: Train = jobs.ADAMW | {"precision": "fp16"}
HALF: dict[str, Train] = {"bf16": jobs.AUTOCAST, "fp16": FP16}
HALF_ENGINES = ("ddp", "fsdp2")
ACCELERATE_FSDP2: Train = {"engine": "accelerate", "accelerate_backend": "fsdp2"}
COMPILED_ENGINES = ("ddp", "fsdp2", "zero-1", *(["zero-3"] if TorchVersion(torch.__version__) >= "2.12" else []))


def ranks() -> int:
    return min(torch.cuda.device_count(), 2)


def job(name: str, fields: Train, **more: Any) -> Job:
    found: Job = {"name": name, "train": fields | CUDA, "steps": 20}
    found.update(more)  # type: ignore[typeddict-item]  # fields of a job
    return found


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Curve]:
    fields = {setting: values for setting, values in jobs.SETTINGS.items() if "accumulated" not in setting}
    fields |= {"adamw": jobs.ADAMW, "sgd": jobs.SGD}
    fields |= {
        f"{precision}-{parts}": values | {"grad_accum": parts}
        for precision, values in HALF.items()
        for parts in jobs.MICRO_BATCHES
    }
    all_jobs = [job(name, {"engine": "none"} | values) for name, values in fields.items()]
    return train(all_jobs, 1, tmp_path_factory.mktemp("reference") / "1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engines") / "ranks"


@pytest.fixture(scope="module")
def curves(folder: Path) -> dict[str, Curve]:
    """Each engine with each setting and a checkpoint, resumed; then precisions and compiling."""
    all_jobs = []
    for engine, fields in jobs.ENGINE_FIELDS.items():
        for setting, values in jobs.SETTINGS.items():
            name = f"{engine} {setting}"
            more = {"save_before": jobs.SAVED_BEFORE} if setting == "adamw-clipped" else {}
            all_jobs.append(job(name, fields | values, **more))
            if more:
                all_jobs.append(job(f"{engine} resumed", fields | values, load=str(folder / name)))
        if engine in HALF_ENGINES:
            all_jobs += [job(f"{engine} {precision}", fields | values) for precision, values in HALF.items()]
        if engine in COMPILED_ENGINES:
            all_jobs.append(job(f"{engine} compiled", fields | jobs.ADAMW | {"compile": True}))
    for stage in (0, 1, 3):
        name, fields = f"zero-{stage} fp16", jobs.ENGINE_FIELDS[f"zero-{stage}"] | FP16
        all_jobs.append(job(name, fields, save_before=jobs.SAVED_BEFORE))
        all_jobs.append(job(f"{name} resumed", fields, load=str(folder / name)))
    return train(all_jobs, ranks(), folder, timeout=1200)


def test_every_engine_trains_as_one_process_does(curves: dict[str, Curve], reference: dict[str, Curve]) -> None:
    for engine in jobs.ENGINE_FIELDS:
        for setting in jobs.SETTINGS:
            known = reference[setting.removesuffix("-accumulated")].losses
            assert largest_difference(curves[f"{engine} {setting}"].losses, known) < EQUAL, (engine, setting)


def test_checkpoints_restore_the_curve(curves: dict[str, Curve], reference: dict[str, Curve]) -> None:
    for engine in jobs.ENGINE_FIELDS:
        known = reference["adamw-clipped"].losses[jobs.SAVED_BEFORE :]
        assert largest_difference(curves[f"{engine} resumed"].losses, known) < EQUAL, engine


@pytest.mark.parametrize("precision", HALF)
def test_half_precision_is_as_near_as_the_reference_is_to_itself(
    curves: dict[str, Curve], reference: dict[str, Curve], precision: str
) -> None:
    runs = [reference[f"{precision}-{parts}"].losses for parts in jobs.MICRO_BATCHES]
    bound = 2 * max(largest_difference(left, right) for left in runs for right in runs)
    assert 0 < bound < 1e-2
    for engine in HALF_ENGINES:
        assert largest_difference(curves[f"{engine} {precision}"].losses, runs[0]) < bound, engine


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_deepspeeds_loss_scale_is_restored(curves: dict[str, Curve], stage: int) -> None:
    """A scale that began anew would overflow again, and skip other steps."""
    whole, resumed = curves[f"zero-{stage} fp16"].losses, curves[f"zero-{stage} fp16 resumed"].losses
    assert largest_difference(resumed, whole[jobs.SAVED_BEFORE :]) < 1e-3


def test_compiled_blocks_train_alike(curves: dict[str, Curve], reference: dict[str, Curve]) -> None:
    for engine in COMPILED_ENGINES:
        assert largest_difference(curves[f"{engine} compiled"].losses, reference["adamw"].losses) < COMPILED, engine


def test_fsdp2_through_accelerate(tmp_path: Path, reference: dict[str, Curve]) -> None:
    some = train([job("clipped", ACCELERATE_FSDP2 | jobs.SETTINGS["adamw-clipped"])], ranks(), tmp_path / "ranks")
    assert largest_difference(some["clipped"].losses, reference["adamw-clipped"].losses) < EQUAL


def test_bf16_is_the_same_precision_through_accelerate(tmp_path: Path, reference: dict[str, Curve]) -> None:
    some = train([job("bf16", ACCELERATE_FSDP2 | HALF["bf16"])], ranks(), tmp_path / "ranks")
    runs = [reference[f"bf16-{parts}"].losses for parts in jobs.MICRO_BATCHES]
    bound = 2 * max(largest_difference(left, right) for left in runs for right in runs)
    assert some["bf16"].gradient_dtype == "float32"
    assert largest_difference(some["bf16"].losses, runs[0]) < bound


def test_fsdp2_with_its_weights_on_the_host(tmp_path: Path, reference: dict[str, Curve]) -> None:
    """Clipping takes the norm of gradients that lie on the host: a group of GPUs alone cannot add it up."""
    offloaded = {"engine": "fsdp2", "offload": "parameters"}
    fields, clipped = offloaded | jobs.ADAMW, offloaded | jobs.SETTINGS["adamw-clipped"]
    some = train(
        [
            job("whole", fields, save_before=6),
            job("resumed", fields, load=str(tmp_path / "ranks" / "whole")),
            job("clipped", clipped),
        ],
        ranks(),
        tmp_path / "ranks",
    )
    for name, curve in some.items():
        known = reference["adamw-clipped" if name == "clipped" else "adamw"].losses
        assert largest_difference(curve.losses, known[curve.first :]) < EQUAL, name


@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs megatron-core")
def test_megatron_core(tmp_path: Path, reference: dict[str, Curve]) -> None:
    settings = {setting: values for setting, values in jobs.SETTINGS.items() if setting.startswith("adamw")}
    some = train(
        [job(setting, {"engine": "megatron"} | values) for setting, values in settings.items()],
        ranks(),
        tmp_path / "ranks",
    )
    for setting, curve in some.items():
        known = reference[setting.removesuffix("-accumulated")].losses
        assert largest_difference(curve.losses, known) < EQUAL, setting


@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs megatron-core")
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs, which share a model")
def test_tensor_ranks_of_megatron_core(tmp_path: Path) -> None:
    """Of a vision transformer, accumulated and from a checkpoint too, and of Swin V2."""

    def on_gpus(name: str) -> Job:
        own = job_of(name, "adamw-clipped")
        own["train"] = own["train"] | CUDA
        return own

    whole, resumed = on_gpus("megatron tensor=2"), on_gpus("megatron tensor=2")
    whole["save_before"] = jobs.SAVED_BEFORE
    resumed["name"], resumed["load"] = "resumed", str(tmp_path / "2" / whole["name"])
    others = [on_gpus(f"{model}megatron tensor=2 grad_accum=3") for model in ("", "swinv2:tiny ")]
    some = train([whole, resumed, *others], 2, tmp_path / "2")
    alone = train([on_gpus("none"), on_gpus("swinv2:tiny none")], 1, tmp_path / "1")
    for name, curve in some.items():
        known = alone[reference_of(name, "adamw-clipped")].losses[curve.first :]
        assert largest_difference(curve.losses, known) < EQUAL, name
