"""What ranks that share a model send one another, beside what data parallelism does: as `engines.splits` and
`engines.stages` have it. Nothing is computed meanwhile."""

from __future__ import annotations

import math
from collections.abc import Iterator

from vitscale.prediction.shares import Share
from vitscale.prediction.step.messages import Group, Message, Phase
from vitscale.trial.model_cost import VitShape
from vitscale.trial.rank_batches import largest_micro_batch
from vitscale.trial.trial import Trial

_NORM_BYTES = 8
"""A squared norm, in float64."""


def exchanges(trial: Trial, vit: VitShape, share: Share) -> tuple[Message, ...]:
    """Of a rank in an optimizer step, without those of its data-parallel engine.

    Tensors (Shoeybi et al., arXiv 1909.08053, section 3): an all-reduce of all activations after attention and after
    the MLP, in forward and in backward; with sharded norms a gather and a scatter instead of each (Korthikanti et al.,
    arXiv 2205.05198, section 4.2.2), and the gradients of norms. Tokens (Jacobs et al., arXiv 2309.14509, section 3.2):
    queries, keys and values to heads, what attention gives back to tokens. Stages: the activations of a micro-batch
    across each boundary, and their gradients.
    """
    return tuple(_messages(trial, vit, share))


def _messages(trial: Trial, vit: VitShape, share: Share) -> Iterator[Message]:
    parallel, train = trial.parallel, trial.train
    images, blocks = largest_micro_batch(train), sum(share.chunks) or vit.layers
    weights = 2 if train.precision == "bf16-params" else 4
    products = 2 if train.precision in ("bf16", "fp16", "bf16-params") else 4
    tokens = math.ceil(vit.tokens / parallel.sequence)
    row = images * vit.hidden
    both: tuple[Phase, Phase] = ("forward", "backward")

    def message(operation: str, size: float, calls: float, phase: Phase, group: Group) -> Message:
        return Message(operation, size, calls, phase, None, True, group=group, images=images)

    if parallel.tensor > 1:
        # Autocast's products leave in 16 bits; their inputs' gradients are added up in the input's own dtype.
        each = {"forward": products, "backward": weights}
        for phase in both:
            size, calls = row * tokens * each[phase], 2 * blocks
            if not parallel.shard_norms:
                yield message("all_reduce", size, calls, phase, "tensor")
                continue
            yield message("reduce_scatter", size, calls, phase, "tensor")
            yield message("all_gather", row * tokens * weights, calls + share.last, phase, "tensor")
        if parallel.shard_norms:
            yield Message(
                "all_reduce", vit.hidden * weights, 2 * (2 * blocks + 1), "backward", None, True, group="tensor"
            )
        if share.last:
            yield message("all_gather", images * vit.classes * products, 1, "forward", "tensor")
            yield message("all_reduce", row * weights, 1, "backward", "tensor")
    if parallel.sequence > 1:
        for phase in both:
            yield message("all_to_all", 3 * row * tokens * products // parallel.tensor, blocks, phase, "sequence")
            yield message("all_to_all", row * tokens * products // parallel.tensor, blocks, phase, "sequence")
            if share.last:
                yield message("all_to_all", parallel.sequence * row * weights, 1, phase, "sequence")
    if parallel.pipeline > 1:
        yield message("send", row * tokens * weights, share.handed_on, "forward", "pipeline")
        yield message("send", row * tokens * weights, share.received, "backward", "pipeline")
    if train.gradient_clipping > 0 and (parallel.tensor > 1 or parallel.pipeline > 1):
        yield Message("all_reduce", _NORM_BYTES, 1, "after", None, False, group="all")
