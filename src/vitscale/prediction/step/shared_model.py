"""What ranks that share a model send one another, as `engines.shared.splits` and `engines.shared.stages` cut the model.

Data parallelism sends its own messages besides. Nothing is computed meanwhile.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from vitscale.engines import wrapper_facts
from vitscale.engines.messages import Message, RankGroup, StepPhase
from vitscale.prediction.shares import Share
from vitscale.trial import model_counts
from vitscale.trial.model_cost import VitShape, swin_shape, vit_shape
from vitscale.trial.model_counts import SwinShape, SwinStage
from vitscale.trial.rank_batches import largest_micro_batch
from vitscale.trial.trial import TrainSpec, Trial

_NORM_BYTES = 8
"""A squared norm, in float64."""
_BOTH: tuple[StepPhase, StepPhase] = ("forward", "backward")


def exchanges(trial: Trial, share: Share) -> tuple[Message, ...]:
    """Messages of a rank in an optimizer step, without those of its data-parallel engine.

    Tensor ranks (Shoeybi et al., arXiv 1909.08053, section 3) all-reduce all activations after attention and after the
    MLP, in forward and in backward. With sharded norms a gather and a scatter take the place of each (Korthikanti et
    al., arXiv 2205.05198, section 4.2.2), and the gradients of norms are all-reduced. Sequence ranks (Jacobs et al.,
    arXiv 2309.14509, section 3.2) exchange queries, keys and values for heads, and what attention gives for tokens.
    Stages send the activations of a micro-batch across each boundary, and their gradients back.

    Heads of segmentation lie on every rank: tensor ranks send nothing for them, and sequence ranks hand each other all
    tokens of the images that each labels. With an engine's own layers the classifier lies on every rank, too. What is
    computed again in backward is exchanged again, up to the last tensor that backward needs. In a ViT's block that is
    all but the MLP's sum; in a stage of Swin, whose norms come last, everything.
    """
    swin, vit = swin_shape(trial.model), vit_shape(trial.model)
    parallel = trial.parallel
    exchanged: list[Message] = []
    if vit is not None:
        exchanged += _of_vit(trial, vit, share)
    elif swin is not None:
        exchanged += _of_swin(trial, swin, share)
    if (
        trial.train.gradient_clipping > 0
        and (parallel.tensor > 1 or parallel.pipeline > 1)
        and not _has_own_layers(trial)
    ):
        return *exchanged, Message("all_reduce", _NORM_BYTES, 1, "after", None, micro_steps="last", group="all")
    return tuple(exchanged)


def _has_own_layers(trial: Trial) -> bool:
    """Whether tensor ranks compute with layers of the engine's own library."""
    return wrapper_facts(trial.train).own_tensor_layers


def _to_mlp(trial: Trial, made: _Made, passed: int) -> int:
    """Bytes of an element of the gradient that tensor ranks add up before an MLP; `passed`: in its input's own dtype.

    A layer of the engine's own (Megatron-Core's) adds up what its product gives, DTensor what becomes of it.
    """
    return made.products if _has_own_layers(trial) else passed


def _of_parts(count: int, ranks: int) -> int:
    """As many as `ranks` equal parts of `count` things have, the last one padded."""
    return math.ceil(count / ranks) * ranks


class _Made(NamedTuple):
    """Makes the messages of a trial's micro-batch; `weights` and `products` are bytes of an element."""

    images: int
    weights: int
    products: int

    def message(
        self, operation: str, size: float, calls: float, phase: StepPhase, group: RankGroup = "tensor"
    ) -> Message:
        """A message of `size` bytes for the micro-batch."""
        return Message(operation, size, calls, phase, None, micro_steps="all", group=group, images=self.images)


def _made(train: TrainSpec) -> _Made:
    narrow = 2 if train.precision in ("bf16", "fp16", "bf16-params") else 4
    return _Made(largest_micro_batch(train), 2 if train.precision == "bf16-params" else 4, narrow)


def _of_swin(trial: Trial, swin: SwinShape, share: Share) -> Iterator[Message]:
    """Messages of a rank of a Swin.

    Stages hand on a map whose size changes with each merging; below a head of UperNet all maps that were merged go on
    beside it. What tensor and sequence ranks send around attention: see below. At the end sequence ranks exchange what
    their tokens have in the mean; where pixels are labelled, the map of every stage.
    """
    made = _made(trial.train)
    # On a CPU autocast's norms give 16 bits too.
    passed = made.products if trial.train.device == "cpu" else made.weights
    segments, ranks = trial.model.task == "segmentation", trial.parallel.sequence
    handed_on = model_counts.swin_maps(swin, ranks, segments=segments)
    sizes = [[made.images * rows * side * width * passed for rows, side, width in maps] for maps in handed_on]
    yield from _of_stages(made, share, sizes)
    stages = model_counts.stages(swin, ranks)
    every = [stage for stage in stages for _ in range(stage.depth)]
    own = Counter([every[block] for chunk in share.chunks for block in chunk] if share.chunks else every)
    if trial.parallel.tensor > 1:
        yield from _of_swins_heads(trial, made, passed, own)
        if share.last and not segments and not _has_own_layers(trial):
            classes = _of_parts(trial.model.num_classes or 0, trial.parallel.tensor)
            yield made.message("all_gather", made.images * classes * made.products, 1, "forward")
            yield made.message("all_reduce", made.images * stages[-1].width * passed, 1, "backward")
    if ranks > 1:
        for stage, blocks in own.items():
            yield from _around_attention(made, trial, made.images * stage.tokens * stage.width, blocks)
        labelled = math.ceil(made.images / ranks)
        to_heads = [max(made.images * stage.tokens, labelled * stage.side**2) * stage.width for stage in stages]
        for size in (to_heads if segments else [ranks * made.images * stages[-1].width]) * share.last:
            for phase in _BOTH:
                yield made.message("all_to_all", size * passed, 1, phase, "sequence")


def _of_swins_heads(trial: Trial, made: _Made, passed: int, own: Counter[SwinStage]) -> Iterator[Message]:
    """What tensor ranks send for a Swin's blocks: attention's tokens, in whole windows where a rank has all of an
    image, and the gradient of what each block's position biases are made of, as large for any number of images.

    Args:
        trial: of which model.
        made: its messages.
        passed: bytes of an element of what blocks hand on.
        own: a rank's blocks, by their stage.
    """
    for stage, blocks in own.items():
        of_attention = stage.padded if trial.parallel.sequence == 1 else stage.tokens
        for tokens, back in ((of_attention, passed), (stage.tokens, _to_mlp(trial, made, passed))):
            row = made.images * tokens * stage.width
            yield made.message("all_reduce", row * made.products, blocks, "forward")
            yield made.message("all_reduce", row * back, blocks, "backward")
            if trial.train.activation_checkpointing:
                yield made.message("all_reduce", row * made.products, blocks, "backward")
        of_biases = stage.positions * model_counts.BIAS_WIDTH * made.products
        yield Message("all_reduce", of_biases, blocks, "backward", None, micro_steps="all", group="tensor")


def _around_attention(made: _Made, trial: Trial, row: int, blocks: int) -> Iterator[Message]:
    """What sequence ranks send around attention: queries, keys and values, of `row` elements each, to heads, and what
    they mix to back."""
    for phase in _BOTH:
        calls = blocks * (1 + (trial.train.activation_checkpointing if phase == "backward" else 0))
        for tensors in (3, 1):
            size = tensors * row * made.products // trial.parallel.tensor
            yield made.message("all_to_all", size, calls, phase, "sequence")


def _of_stages(made: _Made, share: Share, given: Sequence[Sequence[float]]) -> Iterator[Message]:
    """Messages across each boundary of a rank's stages; `given`: bytes of each tensor that each block hands on."""
    sending, taking = share.chunks[: len(share.chunks) - share.last], share.chunks[int(share.first) :]
    handed_on = Counter(size for chunk in sending for size in given[chunk.stop - 1])
    received = Counter(size for chunk in taking for size in given[chunk.start - 1])
    for size, calls in handed_on.items():
        yield made.message("send", size, calls, "forward", "pipeline")
    for size, calls in received.items():
        yield made.message("send", size, calls, "backward", "pipeline")


def _of_vit(trial: Trial, vit: VitShape, share: Share) -> Iterator[Message]:
    parallel = trial.parallel
    images, weights, products = made = _made(trial.train)
    message, blocks = made.message, share.blocks if share.chunks else vit.layers
    again = blocks * trial.train.activation_checkpointing
    tokens = math.ceil(vit.tokens / parallel.sequence)
    row, segments = images * vit.hidden, trial.model.task == "segmentation"

    if parallel.tensor > 1:
        # Autocast's products leave in 16 bits; their inputs' gradients are added up in the input's own dtype.
        each = {"forward": products, "backward": weights}
        # Where tokens do not divide, DTensor pads its shards to equal ones.
        padded = _of_parts(tokens, parallel.tensor) if parallel.shard_norms else tokens
        for phase in _BOTH:
            size, calls = row * padded * each[phase], 2 * blocks
            if not parallel.shard_norms:
                of_mlp = _to_mlp(trial, made, weights) if phase == "backward" else products
                sizes = Counter({size: blocks}) + Counter({row * tokens * of_mlp: blocks})
                yield from (message("all_reduce", size, calls, phase, "tensor") for size, calls in sizes.items())
                continue
            yield message("reduce_scatter", size, calls, phase, "tensor")
            yield message("all_gather", row * padded * weights, calls + share.last, phase, "tensor")
        if again:
            operation = "reduce_scatter" if parallel.shard_norms else "all_reduce"
            yield message(operation, row * padded * products, again, "backward", "tensor")
        if parallel.shard_norms:
            if again:
                yield message("all_gather", row * padded * weights, 2 * again, "backward", "tensor")
            yield Message(
                "all_reduce",
                vit.hidden * weights,
                calls=2 * (2 * blocks + 1),
                phase="backward",
                ready=None,
                micro_steps="all",
                group="tensor",
            )
        if share.last and not segments and not _has_own_layers(trial):
            classes = _of_parts(vit.classes, parallel.tensor)
            yield message("all_gather", images * classes * products, 1, "forward", "tensor")
            yield message("all_reduce", row * weights, 1, "backward", "tensor")
    if parallel.sequence > 1:
        yield from _around_attention(made, trial, row * tokens, blocks)
        # All tokens of some images, or the class token of all, for the rank that sends or takes most.
        of_images = max(row * tokens, math.ceil(images / parallel.sequence) * vit.tokens * vit.hidden)
        to_head = of_images if segments else parallel.sequence * row
        for phase in _BOTH if share.last else ():
            yield message("all_to_all", to_head * weights, 1, phase, "sequence")
    yield from _of_stages(made, share, [[row * tokens * weights]] * vit.layers)
