"""Steps of ViT-B/16 on one GPU, launched kernel by kernel and replayed as CUDA graphs, beside their products alone.

    python benchmarks/gpu/cuda_graphs.py --micro-batch 64 --rounds 4 --steps 20

A plain loop: the named ViT at 224, autocast to bf16, fused AdamW, batches copied from pinned memory. Every way trains
from the same weights on the same batches; the losses of its first steps are printed, so that a graph that trains
otherwise is seen. Then rounds of timed steps, the ways by turns. `products alone` are the step's matrix products and
attention, forward and backward, replayed as one graph: nothing computes them faster on this GPU.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from vitscale.models import build
from vitscale.models.blocks import blocks_of
from vitscale.trial.model_spec import ModelSpec, resolve

CLASSES = 100
BATCHES = 6
Step = Callable[[Tensor, Tensor], Tensor]
"""Trains on images and labels, and returns the loss."""


def compile_blocks(model: nn.Module, mode: str) -> None:
    """Compile each block, as `train.compile` does."""
    for block in blocks_of(model):
        block.compile(dynamic=False, mode=mode)


def compile_whole(model: nn.Module, mode: str) -> None:
    """Compile the model as one piece."""
    model.compile(dynamic=False, mode=mode)


def fresh_model() -> nn.Module:
    """Return ViT-B/16 on the GPU, with the same weights each time."""
    torch.manual_seed(0)
    return build(resolve(ModelSpec(name="vit-b16"), CLASSES)).cuda()


def launched(compiled: Callable[[nn.Module, str], None] | None, mode: str) -> Callable[[int], Step]:
    """Return a maker of steps whose kernels the host launches, or torch's compiler replays (`reduce-overhead`)."""

    def make(micro_batch: int) -> Step:
        model = fresh_model()
        if compiled is not None:
            compiled(model, mode)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

        def step(images: Tensor, labels: Tensor) -> Tensor:
            torch.compiler.cudagraph_mark_step_begin()
            with torch.autocast("cuda", torch.bfloat16):
                loss = cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return loss.detach().clone()

        return step

    return make


def captured(compiled: Callable[[nn.Module, str], None] | None) -> Callable[[int], Step]:
    """Return a maker of steps captured as one graph: forward, backward and the optimizer."""

    def make(micro_batch: int) -> Step:
        model = fresh_model()
        if compiled is not None:
            compiled(model, "default")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, capturable=True)
        fixed_images = torch.randn(micro_batch, 3, 224, 224, device="cuda")
        fixed_labels = torch.zeros(micro_batch, dtype=torch.long, device="cuda")
        weights = {name: value.clone() for name, value in model.state_dict().items()}

        def train() -> Tensor:
            optimizer.zero_grad(set_to_none=True)
            # A graph keeps no weights cast in an earlier forward.
            with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
                loss = cross_entropy(model(fixed_images), fixed_labels)
            loss.backward()
            optimizer.step()
            return loss

        run_beside(train)
        model.load_state_dict(weights)
        for state in optimizer.state.values():
            for value in state.values():
                value.zero_()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = train()

        def step(images: Tensor, labels: Tensor) -> Tensor:
            fixed_images.copy_(images)
            fixed_labels.copy_(labels)
            graph.replay()
            return loss.detach().clone()

        return step

    return make


def products(micro_batch: int) -> Step:
    """Return a graph of the step's products and attention alone, in bf16."""
    tokens, width, heads, layers = 197, 768, 12, 12
    rows = micro_batch * tokens
    widths = [(width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)]

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    layer = [(random(rows, before), random(before, after), random(rows, after)) for before, after in widths]
    patches, kernel, embedded = random(micro_batch * 196, 768), random(768, 768), random(micro_batch * 196, 768)
    query, key, value = (random(micro_batch, heads, tokens, 64).requires_grad_() for _ in range(3))
    gradient = random(micro_batch, heads, tokens, 64)

    def compute() -> None:
        torch.mm(patches, kernel)
        torch.mm(patches.t(), embedded)
        for _ in range(layers):
            for inputs, weights, outputs in layer:
                torch.mm(inputs, weights)
                torch.mm(outputs, weights.t())
                torch.mm(inputs.t(), outputs)
            torch.autograd.grad(scaled_dot_product_attention(query, key, value), (query, key, value), gradient)

    run_beside(compute)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        compute()
    nothing = torch.zeros((), device="cuda")

    def step(images: Tensor, labels: Tensor) -> Tensor:
        del images, labels
        graph.replay()
        return nothing

    return step


def run_beside(work: Callable[[], object]) -> None:
    """Run what is to be captured three times on another stream first, as capturing demands."""
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(beside)


WAYS: dict[str, Callable[[int], Step]] = {
    "launched": launched(None, "default"),
    "blocks compiled": launched(compile_blocks, "default"),
    "blocks compiled, graphs": launched(compile_blocks, "reduce-overhead"),
    "captured": captured(None),
    "blocks compiled, captured": captured(compile_blocks),
    "compiled whole": launched(compile_whole, "default"),
    "compiled whole, graphs": launched(compile_whole, "reduce-overhead"),
    "compiled whole, captured": captured(compile_whole),
    "products alone": products,
}


def milliseconds(step: Callable[[], object], steps: int) -> list[float]:
    """Return the device's time of each step."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) for before, after in itertools.pairwise(events)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--micro-batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--only", nargs="+", choices=tuple(WAYS), default=tuple(WAYS))
    options = parser.parse_args()
    batches = [
        (
            torch.randn(options.micro_batch, 3, 224, 224).pin_memory(),
            torch.randint(CLASSES, (options.micro_batch,)).pin_memory(),
        )
        for _ in range(BATCHES)
    ]
    ready: dict[str, Callable[[], Tensor]] = {}
    for name in options.only:
        step, turns = WAYS[name](options.micro_batch), itertools.cycle(batches)

        def train(step: Step = step, turns: itertools.cycle[tuple[Tensor, Tensor]] = turns) -> Tensor:
            images, labels = next(turns)
            return step(images.cuda(non_blocking=True), labels.cuda(non_blocking=True))

        losses = [round(float(train()), 5) for _ in range(BATCHES)]
        print(json.dumps({"way": name, "losses": losses}), flush=True)
        ready[name] = train
    rounds: dict[str, list[float]] = {name: [] for name in ready}
    names = list(ready)
    for number in range(options.rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            rounds[name].append(statistics.median(milliseconds(ready[name], options.steps)))
    for name, medians in rounds.items():
        each = [round(median, 2) for median in medians]
        print(json.dumps({"way": name, "ms": round(statistics.median(medians), 2), "rounds": each}))


if __name__ == "__main__":
    main()
