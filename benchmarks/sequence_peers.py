"""Tokens shared by two ranks, as vitscale does it and as DeepSpeed's two parts do: equality, bytes, memory, time.

    python benchmarks/sequence_peers.py [--steps 6] [--write docs/parallelism.md]

A vision transformer of 4 blocks, 192 wide with 6 heads, on 4 images a step: of 240 pixels, 226 tokens, which two ranks
share evenly, and of 224, 197 tokens. DeepSpeed's `DistributedAttention` stands where vitscale's exchange does; it is
not called unevenly, for on gloo that ends the process. Its `UlyssesSPViTAttention` wraps each block's attention, and
every rank holds the class token, as it asks for. Equality is with one process, of logits and of the whole gradient (L2
norm), for the wrapper with the better of the ranks' mean and sum. Bytes are those of a rank's inputs to collectives in
forward and backward, counted; memory the highest moment of a step's tensors; time a rank's processor seconds, the
median of steps that take turns. One minute on two cores.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import deepspeed.comm
import torch
import torch.distributed as dist
from between_marks import write_between
from deepspeed.sequence.autosp_vit import UlyssesSPViTAttention
from deepspeed.sequence.layer import DistributedAttention
from tensor_memory import tensor_memory
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from vitscale.engines.shared.splits import split_tokens
from vitscale.models.named import Attention, VisionTransformer
from vitscale.probes.traffic import TrafficCounter
from vitscale.trial.model_spec import ModelSpec, resolve

RANKS, IMAGES, CLASSES = 2, 4, 10
OURS, EXCHANGE, WRAPPER = "vitscale", "DeepSpeed's DistributedAttention", "DeepSpeed's UlyssesSPViTAttention"
COLUMNS = (
    "| tokens | exchange | logits | gradient | gradient of patches | sent by a rank, MB | peak, MB | processor s |\n"
    "| ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |"
)


def model_of(pixels: int) -> VisionTransformer:
    """Alike in every process."""
    spec = ModelSpec(
        name="vit-ti16", image_size=pixels, patch_size=16, layers=4, hidden_size=192, heads=6, mlp_size=768
    )
    torch.manual_seed(0)
    return VisionTransformer(resolve(spec, CLASSES))


def exchanged_by_deepspeed(model: VisionTransformer, group: dist.ProcessGroup) -> None:
    """As vitscale cuts the model, but for the exchange around attention."""

    def local(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        queries, keys, values = (of_all.transpose(1, 2) for of_all in (query, key, value))
        return scaled_dot_product_attention(queries, keys, values).transpose(1, 2)

    split_tokens(model, group)
    shared = DistributedAttention(local, group, scatter_idx=2, gather_idx=1)
    for module in model.modules():
        if isinstance(module, Attention):
            module.attend = lambda *of_heads: shared(*(x.transpose(1, 2) for x in of_heads), 0).transpose(1, 2)


def wrapped_by_deepspeed(model: VisionTransformer, group: dist.ProcessGroup) -> None:
    """Each block's attention wrapped; every rank has the class token and a run of patches."""
    rank, patches = group.rank(), model.vit.embeddings.position_embeddings.shape[1] - 1
    begin, end = patches * rank // RANKS, patches * (rank + 1) // RANKS

    def own(module: nn.Module, inputs: object, embedded: Tensor) -> Tensor:
        del module, inputs
        return torch.cat((embedded[:, :1], embedded[:, 1 + begin : 1 + end]), dim=1)

    model.vit.embeddings.register_forward_hook(own)
    for block in model.vit.layers:
        block.attention = UlyssesSPViTAttention(block.attention, group)


WAYS: dict[str, Callable[[VisionTransformer, dist.ProcessGroup], None]] = {
    OURS: split_tokens,
    EXCHANGE: exchanged_by_deepspeed,
    WRAPPER: wrapped_by_deepspeed,
}


def trained(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Logits of a step, after which gradients are there."""
    model.zero_grad()
    logits: Tensor = model(images)
    cross_entropy(logits, labels).backward()
    return logits


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """By the names of the whole model; zeros where there is none."""
    return {
        name.replace(".attention.attn.", ".attention."): torch.zeros_like(own) if own.grad is None else own.grad.clone()
        for name, own in model.named_parameters()
    }


def apart(own: dict[str, Tensor], whole: dict[str, Tensor], scale: float = 1.0) -> float:
    """L2 norm of the difference, as a share of that of `whole`."""
    joint = torch.cat([(scale * own[name] - whole[name]).flatten() for name in whole])
    return float(joint.norm() / torch.cat([value.flatten() for value in whole.values()]).norm())


def rows(pixels: int, steps: int) -> Iterator[str]:
    """One for each way, made on all ranks at once."""
    images, labels = torch.randn(IMAGES, 3, pixels, pixels), torch.arange(IMAGES)
    alone = model_of(pixels)
    tokens = alone.vit.embeddings.position_embeddings.shape[1]
    expected = trained(alone, images, labels).detach()
    whole = gradients(alone)
    patches = "vit.embeddings.patch_embeddings.projection.weight"
    models, seconds, figures = dict[str, VisionTransformer](), dict[str, list[float]](), dict[str, list[str]]()
    for name, way in WAYS.items():
        if name == EXCHANGE and tokens % RANKS:
            continue
        memory = tensor_memory(torch.device("cpu"))
        model = models[name] = model_of(pixels)
        assert dist.group.WORLD is not None
        way(model, dist.group.WORLD)
        trained(model, images, labels)
        counter = TrafficCounter()
        with counter.step(0):
            logits = trained(model, images, labels).detach()
        sent = Counter[str]()
        for call in counter.lines()[0].collectives or ():
            sent[call.operation] += call.input_elements * (8 if call.dtype == "int64" else 4)
        with memory.watch():
            trained(model, images, labels)
        mean = gradients(model)
        for gradient in mean.values():
            dist.all_reduce(gradient)
            gradient /= RANKS
        figures[name] = [
            f"{float((logits - expected).norm() / expected.norm()):.1e}",
            f"{min(apart(mean, whole), apart(mean, whole, RANKS)):.1e}",
            f"{float(mean[patches].norm() / whole[patches].norm()):.3f} of it",
            f"{sum(sent.values()) / 1e6:.2f} ({', '.join(sorted(sent))})",
            f"{memory.peak_bytes / 1e6:.1f}",
        ]
    for _ in range(steps):
        for name, model in models.items():
            dist.barrier()
            began = time.process_time()
            trained(model, images, labels)
            seconds.setdefault(name, []).append(time.process_time() - began)
    for name, told in figures.items():
        yield f"| {tokens} | {name} | {' | '.join(told)} | {statistics.median(seconds[name]):.3f} |"


def be_rank(rank: int, steps: int, folder: Path) -> None:
    """In a process of its own; rank 0 writes the rows."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    deepspeed.comm.init_distributed("gloo", verbose=False)
    torch.manual_seed(1)
    made = [row for pixels in (240, 224) for row in rows(pixels, steps)]
    if rank == 0:
        (folder / "rows").write_text("\n".join(made))
    dist.barrier()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--write", type=Path)
    asked: Any = parser.parse_args()
    os.environ |= {"TORCH_FR_BUFFER_SIZE": "4096", "MASTER_ADDR": "127.0.0.1", "DS_ACCELERATOR": "cpu"}
    with tempfile.TemporaryDirectory() as scratch:
        children = []
        for rank in range(RANKS):
            if (child := os.fork()) == 0:
                code = 1
                try:
                    be_rank(rank, asked.steps, Path(scratch))
                    code = 0
                except Exception:
                    traceback.print_exc()
                finally:
                    sys.stderr.flush()
                    os._exit(code)
            children.append(child)
        codes = [os.waitpid(child, 0)[1] for child in children]
        if any(codes):
            sys.exit(f"ranks ended with {codes}")
        table = f"{COLUMNS}\n{(Path(scratch) / 'rows').read_text()}"
    print(table)
    if asked.write:
        write_between(asked.write, "sequence peers", f"\n{table}\n")


if __name__ == "__main__":
    main()
