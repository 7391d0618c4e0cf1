"""One contestant of `benchmarks/training_loop.py` on one rank: trains, and prints the seconds of its timed steps.

python inside_training_loop.py NAME SIZE LAYERS MICRO_BATCH PRECISION WARMUP_STEPS STEPS CORES DEVICE

Under torch's rank variables (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT); of one rank no group is made. All train
ViT-B/16's shape, with so many layers, by AdamW at a fixed rate on random images, on these cores ("0,1").
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

CLASSES = 10
RATE, DECAY = 1e-4, 0.05


@dataclass(frozen=True)
class Job:
    """What is trained, on how many ranks."""

    size: int
    layers: int
    micro_batch: int
    precision: str
    warmup_steps: int
    steps: int
    device: str

    @property
    def ranks(self) -> int:
        """In all."""
        return int(os.environ.get("WORLD_SIZE", "1"))

    @property
    def on_gpu(self) -> bool:
        """Whether steps are the GPU's."""
        return self.device == "cuda"

    @property
    def batches(self) -> int:
        """One more than is timed and warmed up: a loop that ends measures its last step too."""
        return self.warmup_steps + self.steps + 1

    def autocast(self) -> AbstractContextManager[object]:
        """As each loop would enter it."""
        return torch.autocast(self.device, torch.bfloat16) if self.precision == "bf16" else nullcontext()


class Block(nn.Module):
    """As people write it by hand: one projection for queries, keys and values, fused attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        """[b, tokens, width] of the same."""
        three = self.qkv(self.before(hidden)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        hidden = hidden + self.out(scaled_dot_product_attention(*three).transpose(1, 2).flatten(2))
        return hidden + self.down(gelu(self.up(self.after(hidden))))


class HandWritten(nn.Module):
    """ViT-B/16."""

    def __init__(self, job: Job, width: int = 768, heads: int = 12) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, (job.size // 16) ** 2 + 1, width) * 0.02)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(job.layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Logits [b, classes] of images [b, 3, size, size]."""
        patches = self.patches(images).flatten(2).transpose(1, 2)
        hidden = torch.cat((self.token.expand(len(images), -1, -1), patches), 1) + self.positions
        return self.head(self.norm(self.blocks(hidden))[:, 0])


def of_transformers(job: Job) -> nn.Module:
    """The library's classifier of that shape."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=job.size, num_labels=CLASSES, num_hidden_layers=job.layers, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, attn_implementation="sdpa",
    )  # fmt: skip
    return ViTForImageClassification(config)


def images_of(job: Job, size: int | None = None) -> list[tuple[Tensor, Tensor]]:
    """Batches, in memory before the first step."""
    torch.manual_seed(int(os.environ.get("RANK", "0")))
    shape = (job.micro_batch, 3, size or job.size, size or job.size)
    batches = [(torch.randn(shape), torch.randint(CLASSES, (job.micro_batch,))) for _ in range(job.batches)]
    return [(images.pin_memory(), labels.pin_memory()) for images, labels in batches] if job.on_gpu else batches


class Clock:
    """Reads a host's clock, or on a GPU records events, which are read once all is over: no step waits."""

    def __init__(self, job: Job) -> None:
        self.on_gpu, self.times = job.on_gpu, list[Any]()

    def mark(self) -> None:
        """Notes when this is reached."""
        if self.on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.times.append(event)
        else:
            self.times.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """From each mark to the next."""
        if self.on_gpu:
            torch.cuda.synchronize()
            return [before.elapsed_time(after) / 1000 for before, after in pairwise(self.times)]
        return [after - before for before, after in pairwise(self.times)]


def timed(job: Job, batches: Iterator[Any], step: Callable[[Sequence[Tensor]], object]) -> list[float]:
    """Seconds of each step, from the end of one to the end of the next, its batch included."""
    clock = Clock(job)
    clock.mark()
    for batch in batches:
        step([part.to(job.device, non_blocking=True) for part in batch])
        clock.mark()
    return clock.seconds()


def adamw(model: nn.Module, *, fused: bool = True) -> torch.optim.Optimizer:
    """At the rate of all contestants."""
    return torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY, fused=fused)


def joined(model: nn.Module, job: Job) -> nn.Module:
    """Under DDP where there are several ranks."""
    model = model.to(job.device)
    if job.ranks == 1:
        return model
    dist.init_process_group("gloo")
    return nn.parallel.DistributedDataParallel(model)


def plain(job: Job, model: nn.Module, logits_of: Callable[[Any], Tensor] = lambda told: told) -> list[float]:
    """A loop as one would write it, with fused AdamW; `logits_of` what the model gives."""
    wrapped = joined(model, job)
    optimizer = adamw(wrapped)

    def step(batch: Sequence[Tensor]) -> None:
        with job.autocast():
            loss = cross_entropy(logits_of(wrapped(batch[0])), batch[1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return timed(job, iter(images_of(job)), step)


def bare(job: Job) -> list[float]:
    """The fastest loop that one would write: fused projection, attention and AdamW."""
    return plain(job, HandWritten(job))


def plain_transformers(job: Job) -> list[float]:
    """transformers' model in the same loop."""
    return plain(job, of_transformers(job), lambda told: told.logits)


def trainer(job: Job) -> list[float]:
    """Hugging Face Trainer with its defaults, on the CPU."""
    import tempfile

    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Marks(TrainerCallback):  # type: ignore[misc]  # untyped
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            if not clock.times:
                clock.mark()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.mark()

    class Images(torch.utils.data.Dataset[dict[str, Tensor]]):
        def __init__(self) -> None:
            one = images_of(job)[0]
            self.rows = [{"pixel_values": image, "labels": label} for image, label in zip(*one, strict=True)]

        def __len__(self) -> int:
            return job.batches * job.micro_batch * job.ranks

        def __getitem__(self, index: int) -> dict[str, Tensor]:
            return self.rows[index % len(self.rows)]

    clock = Clock(job)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, use_cpu=not job.on_gpu, bf16=job.precision == "bf16", learning_rate=RATE,
            weight_decay=DECAY, dataloader_num_workers=8 if job.on_gpu else 0,
            per_device_train_batch_size=job.micro_batch, max_steps=job.batches, report_to=[], save_strategy="no",
            disable_tqdm=True, ddp_backend="gloo" if job.ranks > 1 else None,
        )  # fmt: skip
        Trainer(model=of_transformers(job), args=arguments, train_dataset=Images(), callbacks=[Marks()]).train()
    return clock.seconds()


def accelerate(job: Job) -> list[float]:
    """A loop through Accelerate."""
    from accelerate import Accelerator

    prepared = Accelerator(cpu=not job.on_gpu, mixed_precision="bf16" if job.precision == "bf16" else "no")
    model = of_transformers(job).to(job.device)
    model, optimizer = prepared.prepare(model, adamw(model))

    def step(batch: Sequence[Tensor]) -> None:
        loss = cross_entropy(model(pixel_values=batch[0]).logits, batch[1])
        prepared.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

    return timed(job, iter(images_of(job)), step)


def fabric(job: Job) -> list[float]:
    """A loop through Lightning Fabric."""
    from lightning_fabric import Fabric

    strategy = {"strategy": "ddp", "devices": job.ranks} if job.ranks > 1 else {"devices": 1}
    prepared = Fabric(
        accelerator=job.device, precision="bf16-mixed" if job.precision == "bf16" else "32-true", **strategy
    )  # fmt: skip
    prepared.launch()
    model = of_transformers(job).to(job.device)
    model, optimizer = prepared.setup(model, adamw(model))

    def step(batch: Sequence[Tensor]) -> None:
        loss = cross_entropy(model(pixel_values=batch[0]).logits, batch[1])
        prepared.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

    return timed(job, iter(images_of(job)), step)


def timm(job: Job) -> list[float]:
    """timm's model in the plain loop."""
    from timm.models.vision_transformer import VisionTransformer

    return plain(job, VisionTransformer(img_size=job.size, num_classes=CLASSES, depth=job.layers))


def published(job: Job) -> list[float]:
    """As studies of scaling are often written: fp32, 32 x 32 images resized one by one on the CPU, the loss and the
    accuracy read in each step."""
    import numpy as np
    from PIL import Image

    model = joined(of_transformers(job), job)
    optimizer = adamw(model, fused=False)
    rng = np.random.default_rng(0)
    small = [Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)) for _ in range(job.micro_batch)]

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(job.batches):
            large = [np.asarray(image.resize((job.size, job.size), Image.Resampling.BILINEAR)) for image in small]
            tensors = [torch.from_numpy(image.copy()).permute(2, 0, 1).float().div(255) for image in large]
            yield torch.stack(tensors).sub(0.5).div(0.5), torch.randint(CLASSES, (job.micro_batch,))

    def step(batch: Sequence[Tensor]) -> None:
        optimizer.zero_grad()
        logits = model(batch[0]).logits
        loss = cross_entropy(logits, batch[1])
        loss.backward()
        optimizer.step()
        loss.item(), (logits.argmax(1) == batch[1]).float().mean().item()

    return timed(job, batches(), step)


CONTESTANTS: dict[str, Callable[[Job], list[float]]] = {
    "bare": bare, "transformers": plain_transformers, "trainer": trainer, "accelerate": accelerate, "fabric": fabric,
    "timm": timm, "published": published,
}  # fmt: skip


def main() -> None:
    """Prints {"step_seconds": [...]} or {"unavailable": reason}."""
    name, size, layers, micro_batch, precision, warmup_steps, steps, cores, device = sys.argv[1:]
    job = Job(int(size), int(layers), int(micro_batch), precision, int(warmup_steps), int(steps), device)
    os.sched_setaffinity(0, [int(core) for core in cores.split(",")])
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    try:
        seconds = CONTESTANTS[name](job)
    except ImportError as error:
        print(json.dumps({"unavailable": str(error)}))
        return
    print(json.dumps({"step_seconds": seconds[job.warmup_steps : job.warmup_steps + job.steps]}), flush=True)
    os._exit(0)  # groups need no goodbye


if __name__ == "__main__":
    main()
