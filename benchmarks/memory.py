"""Peak memory of a rank by engine and stage: forecast against measured, as a table.

    python benchmarks/memory.py [--only TEXT ...] [--device cpu|cuda] [--ranks 1 2 3] [--steps 8] [--json]
                                [--rows FILE] [--write docs/memory.md [--mark "unlike blocks"]]

Every configuration trains a small ViT (on a GPU ViT-B/16). What the tensors of a rank take at the highest moment of the
third optimizer step (on a GPU of the second to fourth) is counted by torch's allocator, and stands beside
`vitscale.prediction.memory`. With several ranks on gloo it is the highest of eight steps (`--steps`): gloo's threads
let go of what they worked on late in some steps and not in others, and a run of hundreds of steps meets both. The
configurations of a rank count and their ranks share the imports, and are forked off one after the other. `--rows` keeps
what is measured in a file as it comes: the same command with the same file goes on where it was stopped, and forecasts
what it has anew. `--write` puts the table between the markers of a document.
Without `--json` it exits with 1 where a forecast is off by more than the bar.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

from between_marks import write_between
from traced_models import write_configurations

from vitscale.prediction.memory.forecast import forecast
from vitscale.study.cards import find_cards
from vitscale.trial.model_spec import ModelSpec, resolve
from vitscale.trial.parallel import ParallelSpec, even_parts
from vitscale.trial.trial import DataSpec, TrainSpec, Trial, WindowSpec, World

MODEL = resolve(ModelSpec(name="vit-ti16", image_size=32, patch_size=8, layers=6), 10)
"""2.7 million parameters: 10.8 MB of fp32 weights, and 10.4 MB of activations at a micro-batch of 8."""
MODEL_ON_A_GPU = resolve(ModelSpec(name="vit-b16"), 1000)
"""Large against the workspaces that cuBLAS takes from the allocator too."""
SWIN = {
    "name": "swinv2-t", "image_size": 64, "hidden_size": 24, "heads": 3, "depths": (2, 2, 2), "window_size": 4,
}  # fmt: skip
TRACED = {
    name: resolve(ModelSpec(hf=str(folder), image_size=64), 10)
    for name, folder in write_configurations(Path(tempfile.gettempdir()) / "vitscale-traced-models").items()
}
"""Counted by their cards alone."""
UPERNET = {"task": "segmentation", "decoder_size": 32}
OTHERS = {
    "Swin V2": resolve(ModelSpec(**SWIN), 10),
    "Swin V2 with UperNet": resolve(ModelSpec(**SWIN, **UPERNET), 20),
    "ViT with UperNet": resolve(ModelSpec(name="vit-ti16", image_size=64, patch_size=8, layers=3, **UPERNET), 20),
}
"""Counted part by part; on engines that keep everything on every rank."""
COMMON: dict[str, Any] = {"precision": "fp32", "micro_batch": 8}
STEPS_ON_GLOO = 8
"""Watched with several ranks, after two that are not, unless told otherwise; else one."""
LOWEST, HIGHEST = -0.05, 0.05
"""The bar, as shares of what is measured."""
BUCKETS = {"bucket_mib": 1, "gather_bucket_mib": 1}
"""DeepSpeed's own would dwarf everything else."""

VARIANTS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "fp32, 32 images": {"micro_batch": 32},
    "fp32, 2 micro-steps": {"grad_accum": 2},
    "fp32, checkpointing": {"activation_checkpointing": True, "micro_batch": 32},
    "fp32, SGD": {"optimizer": "sgd"},
    "bf16": {"precision": "bf16"},
    "bf16-params": {"precision": "bf16-params"},
    "fp32, 128 images": {"micro_batch": 128},
    "fp32, 64 pixels": {"model": {"image_size": 64}},
    "bf16, 64 pixels, checkpointing": {
        "precision": "bf16", "activation_checkpointing": True, "model": {"image_size": 64},
    },
    "fp32, another shape": {
        "model": {
            "image_size": 96, "hidden_size": 384, "heads": 6, "mlp_size": 1000, "layers": 3, "num_classes": 700,
        },
    },
}  # fmt: skip
"""Fields of `train`, and of the model under "model"."""

SPLIT_VARIANTS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "fp32, 32 images": {"micro_batch": 32},
    "fp32, checkpointing": {"activation_checkpointing": True, "micro_batch": 32},
    "bf16": {"precision": "bf16"},
    "bf16-params": {"precision": "bf16-params"},
    "fp32, another shape": VARIANTS["fp32, another shape"],
}  # fmt: skip
SPLITS: dict[str, tuple[str, dict[str, Any]]] = {
    "tensor 2": ("fsdp2", {"tensor": 2}),
    "tensor 2, sharded norms": ("fsdp2", {"tensor": 2, "shard_norms": True}),
    "sequence 2": ("ddp", {"sequence": 2}),
    "sequence 2, sharded weights": ("fsdp2", {"sequence": 2}),
    "pipeline 2": ("ddp", {"pipeline": 2}),
    "pipeline 2, gpipe": ("ddp", {"pipeline": 2, "schedule": "gpipe"}),
    "pipeline 2, interleaved": ("ddp", {"pipeline": 2, "schedule": "interleaved"}),
    "pipeline 3": ("ddp", {"pipeline": 3}),
    "pipeline 2, sharded weights": ("fsdp2", {"pipeline": 2}),
    "pipeline 2, gpipe, sharded weights": ("fsdp2", {"pipeline": 2, "schedule": "gpipe"}),
    "pipeline 2, interleaved, sharded weights": ("fsdp2", {"pipeline": 2, "schedule": "interleaved"}),
}
"""Engine and [parallel]; of 6 heads, in 4 micro-batches where there are stages."""
REPLICATED: dict[str, dict[str, Any]] = {
    "fp32": {},
    "fp32, 32 images": {"micro_batch": 32},
    "fp32, 2 micro-steps": {"grad_accum": 2},
    "fp32, bf16 gradients": {"gradient_dtype": "bf16"},
    "fp32, kept after forward": {"reshard_after_forward": False},
    "bf16-params": {"precision": "bf16-params"},
    "bf16-params, fp32 masters": {"precision": "bf16-params", "master_weights": True},
    "Swin V2, fp32": {"model": OTHERS["Swin V2"]},
    "Swin V2, 2 micro-steps": {"model": OTHERS["Swin V2"], "grad_accum": 2},
    "Swin V2, bf16 gradients": {"model": OTHERS["Swin V2"], "gradient_dtype": "bf16"},
}
"""Fields of `train` under FSDP2 with two replicas or as many as ranks, and the model."""
SHARED_SWINS: dict[str, dict[str, Any]] = {
    "fp32, 8 images": {},
    "fp32, 32 images": {"micro_batch": 32},
    "fp32, 2 micro-steps": {"grad_accum": 2},
    "fp32, checkpointing": {"activation_checkpointing": True},
    "bf16, 8 images": {"precision": "bf16"},
    "bf16-params": {"precision": "bf16-params"},
    "fp32, another shape": {
        "model": {"image_size": 96, "hidden_size": 48, "depths": (1, 3), "window_size": 8}, "micro_batch": 5,
    },
    "fp32, padded windows": {"model": {"image_size": 72, "hidden_size": 36, "window_size": 5}},
    "fp32, one image": {"micro_batch": 1},
}  # fmt: skip
"""Fields of `train`, and of Swin V2 with 6 heads under "model"; two tensor ranks, which three and six may be, too."""

OFFLOADING = ("optimizer offloaded", "parameters offloaded", "hpZ")
"""Beginnings of the variants of `offloading`, which have a table of their own."""

SHARED_SEGMENTERS = {
    "tensor 2": ("ViT", "Swin V2"),
    "tensor 2, sharded norms": ("ViT",),
    "sequence 2": ("ViT", "Swin V2"),
    "sequence 2, sharded weights": ("ViT", "Swin V2"),
} | {name: ("ViT", "Swin V2") for name, (_, parallel) in SPLITS.items() if "pipeline" in parallel}
"""Of `SPLITS`, what UperNet labels pixels of, as in `OTHERS` but with 6 heads."""


def configurations() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Engine, variant, and the fields of `train`."""
    for variant, fields in VARIANTS.items():
        yield "none", variant, {"engine": "none"} | fields
        yield "ddp", variant, {"engine": "ddp", "bucket_mib": 1} | fields
        yield "fsdp2", variant, {"engine": "fsdp2"} | fields
        for stage in range(4):
            engine = f"deepspeed, ZeRO-{stage}"
            yield engine, variant, {"engine": "deepspeed", "zero_stage": stage} | BUCKETS | fields
    yield "ddp", "fp32, bucket views", {"engine": "ddp", "gradient_as_bucket_view": True}
    yield (
        "ddp",
        "fp32, bucket views, 2 micro-steps",
        {"engine": "ddp", "gradient_as_bucket_view": True, "grad_accum": 2},
    )
    yield "ddp", "fp32, fp16 gradients", {"engine": "ddp", "gradient_dtype": "fp16"}
    yield "ddp", "fp32, LAMB", {"engine": "ddp", "optimizer": "lamb"}
    yield "ddp", "fp32, SGD without momentum", {"engine": "ddp", "optimizer": "sgd", "momentum": 0.0}
    yield "fsdp2", "fp32, kept after forward", {"engine": "fsdp2", "reshard_after_forward": False}
    yield "fsdp2", "bf16-params, fp32 masters", {"engine": "fsdp2", "precision": "bf16-params", "master_weights": True}
    for stage in (1, 2):
        engine = f"deepspeed, ZeRO-{stage}"
        yield engine, "fp32, overlap", {"engine": "deepspeed", "zero_stage": stage, "overlap_comm": True} | BUCKETS
    for stage in (1, 2, 3):
        engine = f"deepspeed, ZeRO-{stage}"
        yield engine, "fp32, DeepSpeed's buckets", {"engine": "deepspeed", "zero_stage": stage}
    yield from offloading()
    for name, model in OTHERS.items():
        norm = {"batch_norm": "synchronised"} if model.task == "segmentation" else {}
        wrapped: list[tuple[str, dict[str, Any]]] = [
            ("none", {"engine": "none"}), ("ddp", {"engine": "ddp", "bucket_mib": 1}), ("fsdp2", {"engine": "fsdp2"})
        ]  # fmt: skip
        for stage in range(4):
            wrapped.append((f"deepspeed, ZeRO-{stage}", {"engine": "deepspeed", "zero_stage": stage} | BUCKETS))
        for engine, fields in wrapped:
            whole = fields | norm | {"model": model}
            yield engine, f"{name}, fp32", whole
            yield engine, f"{name}, bf16-params", whole | {"precision": "bf16-params"}
            yield engine, f"{name}, bf16", whole | {"precision": "bf16"}
            yield engine, f"{name}, checkpointing", whole | {"activation_checkpointing": True}
            yield engine, f"{name}, 32 images", whole | {"micro_batch": 32}
            if engine == "fsdp2":
                yield engine, f"{name}, 2 micro-steps", whole | {"grad_accum": 2}
    for name, model in TRACED.items():
        for engine, fields in thirteen_engines():
            yield engine, f"traced {name}", fields | {"model": model}
    for name, (engine, parallel) in SPLITS.items():
        staged = "pipeline" in parallel
        for variant, fields in SPLIT_VARIANTS.items():
            whole = {"engine": engine, "parallel": parallel, "grad_accum": 4 if staged else 1} | fields
            model = {"heads": 6, "image_size": 64} | fields.get("model", {})
            yield f"{engine}, {name}", variant, whole | {"model": model | ({"layers": 5} if "layers" in model else {})}
    for replicas in (2, 4):
        for variant, fields in REPLICATED.items():
            yield (
                f"fsdp2, {replicas} replicas",
                variant,
                {"engine": "fsdp2", "parallel": {"replicate": replicas}} | fields,
            )
    for ranks in (2, 3):
        for variant, fields in SHARED_SWINS.items():
            spec = ModelSpec(**SWIN | {"heads": 6} | fields.get("model", {}))
            whole = {"engine": "fsdp2", "parallel": {"tensor": ranks}} | fields
            yield f"fsdp2, tensor {ranks}, Swin", variant, whole | {"model": resolve(spec, 10)}
    for name, segmenters in SHARED_SEGMENTERS.items():
        engine, parallel = SPLITS[name]
        whole = {"engine": engine, "parallel": parallel, "batch_norm": "synchronised"}
        whole |= {"grad_accum": 4} if "pipeline" in parallel else {}
        variants = ("fp32, 8 images", "fp32, 32 images", "bf16, 8 images", "bf16-params")
        for model, variant in product(segmenters, variants):
            spec = OTHERS[f"{model} with UperNet"].model_copy(update={"heads": 6})
            yield f"{engine}, {name}, UperNet on {model}", variant, whole | SHARED_SWINS[variant] | {"model": spec}
    for name, (engine, parallel) in SPLITS.items():
        for variant, fields in SHARED_SWINS.items():
            staged = "pipeline" in parallel
            if (staged and "micro-steps" not in variant) or "sequence" in parallel:
                heads = {} if staged else {"heads": 6}
                spec = ModelSpec(**SWIN | heads | fields.get("model", {}))
                whole = {"engine": engine, "parallel": parallel, "grad_accum": 4 if staged else 1} | fields
                yield f"{engine}, {name}, Swin", variant, whole | {"model": resolve(spec, 10)}
    yield "accelerate, DDP", "fp32", {"engine": "accelerate", "accelerate_backend": "ddp", "bucket_mib": 1}
    through = {"engine": "accelerate", "accelerate_backend": "deepspeed", "zero_stage": 2}
    yield "accelerate, ZeRO-2", "fp32", through | BUCKETS


def offloading() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield engine, variant and the fields of `train` of ZeRO that offloads, or keeps second shards (hpZ)."""
    variants = ("fp32", "fp32, 32 images", "fp32, 2 micro-steps", "bf16", "bf16-params")
    for stage, variant in product((1, 2, 3), variants):
        fields = {"engine": "deepspeed", "zero_stage": stage} | BUCKETS | VARIANTS[variant]
        engine = f"deepspeed, ZeRO-{stage}"
        yield engine, f"optimizer offloaded, {variant}", fields | {"offload": "optimizer"}
        if stage == 3:
            yield engine, f"parameters offloaded, {variant}", fields | {"offload": "parameters"}
            # Two ranks are one node here: the second shard is as large as the first.
            hpz = {"zero_optimization": {"zero_hpz_partition_size": 2}}
            yield engine, f"hpZ, {variant}", fields | {"deepspeed_config": hpz}


def thirteen_engines() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the fields of `train` of every engine without and with what it may take: 13 in all."""
    yield "none", {"engine": "none"}
    yield "none, checkpointing", {"engine": "none", "activation_checkpointing": True}
    yield "none, bf16", {"engine": "none", "precision": "bf16"}
    yield "ddp", {"engine": "ddp", "bucket_mib": 1}
    yield "ddp, bucket views", {"engine": "ddp", "gradient_as_bucket_view": True}
    yield "ddp, 2 micro-steps", {"engine": "ddp", "grad_accum": 2, "bucket_mib": 1}
    yield "fsdp2", {"engine": "fsdp2"}
    yield "fsdp2, bf16-params", {"engine": "fsdp2", "precision": "bf16-params"}
    for stage in range(4):
        yield f"deepspeed, ZeRO-{stage}", {"engine": "deepspeed", "zero_stage": stage} | BUCKETS
    yield "accelerate, DDP", {"engine": "accelerate", "accelerate_backend": "ddp", "bucket_mib": 1}


def chosen(only: Sequence[str], ranks: int, device: str) -> dict[tuple[str, str], Trial]:
    """Those whose name holds one of `only`, else all of the main table; no engine means one rank, hpZ even counts."""
    return {
        (engine, variant): trial(fields, ranks, device)
        for engine, variant, fields in configurations()
        if (
            any(text in f"{engine}, {variant}" for text in only)
            if only
            else not variant.startswith((*OTHERS, "traced", *OFFLOADING))
        )
        and not (device == "cuda" and variant.startswith(tuple(OTHERS)))  # small against workspaces
        and (ranks == 1 or not engine.startswith("none"))
        and (ranks % 2 == 0 or not variant.startswith("hpZ"))
        and ranks % ParallelSpec(**fields.get("parallel", {})).least_ranks == 0
    }


def trial(fields: dict[str, Any], ranks: int, device: str) -> Trial:
    of_train = {key: value for key, value in fields.items() if key not in ("model", "parallel")}
    model = MODEL_ON_A_GPU if device == "cuda" else MODEL
    other = fields.get("model", {})
    return Trial(
        model=other if isinstance(other, ModelSpec) else model.model_copy(update=other),
        data=DataSpec(name="synthetic", samples=64, augment=False),
        train=TrainSpec(device=device, **COMMON | of_train),
        parallel=ParallelSpec(**fields.get("parallel", {})),
        world=World(ranks_per_node=ranks, threads_per_rank=1),
        window=WindowSpec(steps=3, warmup_steps=0, evaluate=False),
        launcher="torchrun",
    )


def measure(wanted: Trial, device: Any, steps_on_gloo: int) -> dict[str, int]:
    """Peak bytes of the start (building the engine, first step) and of the watched steps, on this rank.

    The start is left out where fewer steps are watched than the table takes: reading its profile takes longest.
    """
    import torch
    from tensor_memory import tensor_memory

    from vitscale import models
    from vitscale.engines import building
    from vitscale.models.losses import label_losses, slot_loss
    from vitscale.models.named import AuxiliaryLogits

    train, segments = wanted.train, wanted.model.task == "segmentation"
    auxiliary: Any = None
    memory = tensor_memory(device)
    torch.manual_seed(0)

    def step(engine: Any) -> None:
        for micro_step in range(train.grad_accum):
            side = wanted.model.image_size
            # Not zeros: of these Swin V2's attention has no finite gradients, and DeepSpeed would leave out its steps.
            images = torch.randn(train.micro_batch, 3, side, side, device=device)
            pixels = (side, side) if segments else ()
            labels = torch.zeros(train.micro_batch, *pixels, dtype=torch.long, device=device)

            # Sequence ranks label the pixels of some of the images each.
            at = wanted.layout.coordinates(int(os.environ.get("RANK", 0))).sequence
            own = labels[even_parts(len(labels), wanted.layout.sequence)[at]] if segments else labels

            def loss_of(logits: Any, labels: Any = own) -> Any:
                losses = label_losses(logits, labels)
                second = auxiliary.take() if auxiliary else None
                if second is not None:
                    losses = losses + auxiliary.weight * label_losses(second.float(), labels)
                return slot_loss(losses, wanted.global_batch, wanted.layout.data, train.grad_accum)

            engine.micro_step(images, loss_of, last=micro_step == train.grad_accum - 1)
        engine.step()

    found = {}
    with memory.watch() if steps_on_gloo >= STEPS_ON_GLOO else nullcontext():
        engine = building.build(models.build(wanted.model), wanted, device)
        auxiliary = AuxiliaryLogits(engine.module, wanted.model.auxiliary_weight) if segments else None
        step(engine)
    if steps_on_gloo >= STEPS_ON_GLOO:
        found["start_bytes"] = memory.peak_bytes
    if device.type == "cpu":
        step(engine)
    highest = 0
    # On a GPU the second step and on: in it DDP's first buckets are there too.
    for _ in range((steps_on_gloo if wanted.world.size > 1 else 1) if device.type == "cpu" else 3):
        with memory.watch():
            step(engine)
        highest = max(highest, memory.peak_bytes)
    del engine
    return found | {"step_bytes": highest}


def be_all_ranks(only: Sequence[str], ranks: int, kind: str, steps_on_gloo: int, rows: Path) -> None:
    """Measures every configuration that `rows` lacks in turn, each rank of it in a process of its own, forked off after
    the imports, and appends its row: the most that any rank took.

    In one process the leavings of one engine would be freed, and counted, during the next.
    """
    import torch

    from vitscale import models
    from vitscale.engines import building

    torch.set_num_threads(1)
    cases = lacking(rows, chosen(only, ranks, kind))
    for wanted in cases.values():
        models.preload(wanted.model)
        building.preload(wanted.train)
    gc.freeze()  # DeepSpeed looks for garbage when it builds an engine: not among what is imported
    for (engine, variant), wanted in cases.items():
        with tempfile.TemporaryDirectory() as folder:
            children = []
            for rank in range(ranks):
                child = os.fork()
                if child == 0:
                    # Ends without taking engines apart, which can wait for ranks that are gone.
                    os._exit(measured_alone(wanted, rank, kind, steps_on_gloo, Path(folder)))
                children.append(child)
            for child in children:
                os.waitpid(child, 0)
            of_ranks = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(ranks)]
        names = {name for of_rank in of_ranks for name in of_rank}
        most = {name: max(of_rank[name] for of_rank in of_ranks if name in of_rank) for name in sorted(names)}
        with rows.open("a") as file:
            file.write(json.dumps({"engine": engine, "variant": variant, "ranks": ranks} | most) + "\n")


def measured_alone(wanted: Trial, rank: int, kind: str, steps_on_gloo: int, out: Path) -> int:
    """In the forked process: joins the other ranks and writes what `measure` finds, or the error."""
    import torch
    import torch.distributed as dist

    ranks = wanted.world.size
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    device = torch.device("cpu")
    found: dict[str, Any]
    try:
        if kind == "cuda":
            device = torch.device("cuda", rank)
            torch.cuda.set_device(device)
        store = dist.FileStore(str(out / "store"), ranks)
        dist.init_process_group("nccl" if kind == "cuda" else "gloo", store=store, rank=rank, world_size=ranks)
        found = measure(wanted, device, steps_on_gloo)
        dist.barrier()
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {error}"}
    (out / f"{rank}.json").write_text(json.dumps(found))
    return 0


def start_ranks(only: Sequence[str], ranks: int, device: str, steps_on_gloo: int, rows: Path) -> None:
    """Measures what `rows` lacks on so many ranks."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    argv = [sys.executable, __file__, "--be-ranks", "--rows", str(rows), "--device", device, "--ranks", str(ranks)]
    argv += ["--steps", str(steps_on_gloo), "--only", *only]
    with tempfile.TemporaryFile("w+") as log:
        code = subprocess.run(argv, env=os.environ | place, stdout=log, stderr=log, check=False).returncode
        if code:
            log.seek(0)
            sys.exit(f"ranks ended with {code}\n{log.read()[-3000:]}")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """What was measured: engine, variant, ranks, and bytes or an error."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def lacking(path: Path, cases: dict[tuple[str, str], Trial]) -> dict[tuple[str, str], Trial]:
    """Those that were not measured yet, or failed."""
    done = {(row["engine"], row["variant"], row["ranks"]) for row in read_rows(path) if "error" not in row}
    return {name: wanted for name, wanted in cases.items() if (*name, wanted.world.size) not in done}


def forecasted(row: dict[str, Any], wanted: Trial) -> dict[str, Any]:
    """The row with what arithmetic says now."""
    predicted = None if "error" in row else forecast(wanted)
    return row | {
        "forecast_bytes": predicted.peak_bytes if predicted else None,
        "moment": predicted.peak_moment if predicted else None,
        "parts": dict(predicted.parts) if predicted else None,
    }


def as_table(rows: list[dict[str, Any]], device: str) -> str:
    """The rows in Markdown, one per configuration. MB are 10^6 bytes."""
    import torch

    counts = sorted({row["ranks"] for row in rows})
    said = ", ".join(f"{name} {version(name)}" for name in ("torch", "deepspeed", "transformers", "accelerate"))
    where = torch.cuda.get_device_name(0) if device == "cuda" else "CPU, gloo"
    by_name: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
    for row in rows:
        by_name.setdefault((row["engine"], row["variant"]), {})[row["ranks"]] = row
    text = [
        f"{said}; {where}. {summary(rows)}",
        "",
        "Forecast / measured in MB (10^6 bytes) of the rank that takes most, and their ratio.",
        "",
        "| engine | configuration | " + " | ".join(f"ranks: {n}" for n in counts) + " | highest moment | start (MB) |",
        "| --- | --- |" + " ---: |" * len(counts) + " --- | ---: |",
    ]
    for (engine, variant), found in by_name.items():
        cells = [_cell(found.get(n)) for n in counts]
        largest = found[max(found)]
        start_bytes = largest.get("start_bytes")
        moment, start = largest.get("moment") or "", f"{start_bytes / 1e6:.1f}" if start_bytes else ""
        text.append(f"| {engine} | {variant} | " + " | ".join(cells) + f" | {moment} | {start} |")
    return "\n".join(text)


def as_table_by_model(rows: list[dict[str, Any]], device: str) -> str:
    """One row per model in Markdown: the lowest and the highest forecast / measured among its configurations."""
    import torch

    said = ", ".join(f"{name} {version(name)}" for name in ("torch", "deepspeed", "transformers", "accelerate"))
    where = torch.cuda.get_device_name(0) if device == "cuda" else "CPU, gloo"
    text = [
        f"{said}; {where}. {summary(rows)}",
        "",
        "| model | configurations | lowest forecast / measured | highest |",
        "| --- | --: | --- | --- |",
    ]
    rows_by_model: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        rows_by_model.setdefault(row["variant"], []).append(row)
    for model, own_rows in rows_by_model.items():
        ratios = [(row["forecast_bytes"] / row["step_bytes"], row) for row in own_rows if row.get("forecast_bytes")]
        if not ratios:
            continue
        ends = []
        for ratio, row in (min(ratios, key=lambda item: item[0]), max(ratios, key=lambda item: item[0])):
            ends.append(f"{ratio:.3f} ({row['engine']}, {row['ranks']} rank{'s' * (row['ranks'] > 1)})")
        text.append(f"| {model.removeprefix('traced ')} | {len(ratios)} | {ends[0]} | {ends[1]} |")
    return "\n".join(text)


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    if "error" in row:
        return f"failed: {row['error'].splitlines()[0][:80]}"
    measured, predicted = row["step_bytes"], row["forecast_bytes"]
    if not predicted:
        return f"unknown / {measured / 1e6:.1f}"
    return f"{predicted / 1e6:.1f} / {measured / 1e6:.1f}, {predicted / measured:.3f}"


def errors(rows: list[dict[str, Any]]) -> list[float]:
    """Of each forecast, as a share of what was measured."""
    return [row["forecast_bytes"] / row["step_bytes"] - 1 for row in rows if row.get("forecast_bytes")]


def held(rows: list[dict[str, Any]]) -> bool:
    """Whether every configuration ran, was forecast, and is within the bar."""
    found = errors(rows)
    return len(found) == len(rows) and all(LOWEST <= error <= HIGHEST for error in found)


def summary(rows: list[dict[str, Any]]) -> str:
    """One sentence on all errors."""
    found = errors(rows)
    close = sum(abs(error) <= 0.01 for error in found)
    spread = math.sqrt(sum(math.log1p(error) ** 2 for error in found) / len(found))
    return (
        f"Of {len(rows)} configurations {len(found)} were forecast, {close} of them within 1 %: from {min(found):+.1%} "
        f"to {max(found):+.1%} of what was measured, {spread:.1%} in the root of the mean square. "
        f"Bar: {LOWEST:+.0%} to {HIGHEST:+.0%}, {'held' if held(rows) else 'NOT held'}."
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="those whose name holds one of these: 'ZeRO-2, bf16'")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=STEPS_ON_GLOO, help="that are watched with several ranks on gloo")
    parser.add_argument("--json", action="store_true", help="one object per line instead of the table")
    parser.add_argument("--rows", type=Path, help="a file that keeps what is measured; its rows are not measured again")
    parser.add_argument("--by-model", action="store_true", help="one row for each model, with its extreme forecasts")
    parser.add_argument("--write", type=Path, help="a document with the table's markers")
    parser.add_argument("--mark", default="memory table", help="the text of these markers")
    parser.add_argument("--be-ranks", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.be_ranks:
        (ranks,) = options.ranks
        be_all_ranks(options.only, ranks, options.device, options.steps, options.rows)
        return 0
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        kept = options.rows or Path(folder) / "rows.jsonl"
        for ranks in options.ranks:
            cases = chosen(options.only, ranks, options.device)
            if lacking(kept, cases):
                start_ranks(options.only, ranks, options.device, options.steps, kept)
            of_ranks = {(row["engine"], row["variant"]): row for row in read_rows(kept) if row["ranks"] == ranks}
            find_cards({f"{engine}, {variant}": wanted for (engine, variant), wanted in cases.items()}, {}, ())
            rows += [forecasted(of_ranks[name], wanted) for name, wanted in cases.items()]
    if options.json:
        print("\n".join(map(json.dumps, rows)))
        return 0
    rows.sort(key=lambda row: [(e, v) for e, v, _ in configurations()].index((row["engine"], row["variant"])))
    table = (as_table_by_model if options.by_model else as_table)(rows, options.device)
    print(table)
    if options.write:
        write_between(options.write, options.mark, f"\n{table}\n")
    return 0 if held(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
