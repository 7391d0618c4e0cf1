"""What a model costs: its parameters, FLOPs and activations by arithmetic, without torch.

Counts take only specs that `model_spec.resolve` has filled, and are held against the real models by tests. A count that
cannot be known without building the model is None, never 0. The ViT is counted here, Swin V2 and the decoders in
`model_counts`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, lru_cache
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple

from vitscale.errors import RequestError, VitscaleError, shown
from vitscale.trial import model_counts
from vitscale.trial.known_models import KNOWN_MODELS
from vitscale.trial.model_card import CardPart, ModelCard
from vitscale.trial.model_counts import DecoderShape, ModelBlock, Module, SwinShape
from vitscale.trial.model_spec import VIT_FIELDS, ModelSpec, hf_shape


class VitShape(NamedTuple):
    """All that a ViT's counts need; sizes in elements."""

    tokens: int
    special_tokens: int
    channels: int
    patch: int
    hidden: int
    layers: int
    mlp: int
    classes: int
    qkv_bias: bool


def vit_shape(spec: ModelSpec) -> VitShape | None:
    """The shape of a resolved ViT, whatever head it has; None for any other model.

    Raises:
        ValueError: the spec is not resolved.
    """
    if spec.factory is not None or spec.library is not None or spec.unknown or spec.depths is not None:
        return None
    special_tokens, qkv_bias = 1, True
    if spec.hf is not None:
        config = hf_shape(spec.hf)
        if config is None:
            return None
        special_tokens, qkv_bias = (2 if config.model_type == "deit" else 1), config.qkv_bias
    sizes = [getattr(spec, key) for key in (*VIT_FIELDS, "num_classes")]
    if None in sizes:
        raise ValueError("counts need a resolved spec: call resolve(spec, dataset_classes) first")
    patch, hidden, layers, _, mlp, classes = sizes
    patches = (spec.image_size // patch) ** 2
    return VitShape(
        patches + special_tokens, special_tokens, spec.channels, patch, hidden, layers, mlp, classes, qkv_bias
    )


def swin_shape(spec: ModelSpec) -> SwinShape | None:
    """The shape of a resolved Swin; None for any other model."""
    if spec.depths is None or spec.patch_size is None or spec.hidden_size is None or spec.heads is None:
        return None
    return SwinShape(
        spec.image_size, spec.channels, spec.patch_size, spec.hidden_size, spec.heads, spec.depths,
        spec.window_size or 0,
    )  # fmt: skip


_OWN_MAP = 2
"""Index of the map with a ViT's own side in its pyramid."""


def decoder_shape(spec: ModelSpec) -> DecoderShape | None:
    """UperNet on a named model of segmentation; None for all else."""
    swin, vit = swin_shape(spec), vit_shape(spec)
    if spec.task == "classification" or (swin is None and vit is None):
        return None
    if swin is not None:
        stages = model_counts.stages(swin)
        widths, sides = tuple(s.width for s in stages), tuple(s.side for s in stages)
    elif vit is not None:
        grid = math.isqrt(vit.tokens - vit.special_tokens)
        widths, sides = (vit.hidden,) * 4, (4 * grid, 2 * grid, grid, grid // 2)
    return DecoderShape(widths, sides, spec.decoder_size or 0, spec.num_classes or 0, bool(spec.auxiliary_weight))


def batch_norms(spec: ModelSpec) -> tuple[int, ...] | None:
    """Channels of each batch norm of a recorded spec; None where only building the model could tell."""
    if recorded_shapes(spec) is None:
        return None
    if not has_formula(spec):
        card = KNOWN_MODELS.counts(spec)
        return None if card is None else card.batch_norm_channels
    decoder = decoder_shape(spec)
    return () if decoder is None else tuple(layer.norm for layer in model_counts.upernet_layers(decoder) if layer.norm)


class ParameterShapes(NamedTuple):
    """A model's trainable tensors by block, in the order in which a named model registers them."""

    blocks: tuple[ModelBlock, ...]
    units: tuple[tuple[ModelBlock, ...], ...] = ()
    """What a pipeline's stages take one by one, between embedding and head; empty where that is `blocks[1]`."""

    @property
    def in_a_row(self) -> tuple[tuple[ModelBlock, ...], ...]:
        """The units between embedding and head, one by one."""
        return self.units or ((self.blocks[1]._replace(repeats=1),),) * self.blocks[1].repeats

    def each(self) -> Iterator[ModelBlock]:
        """Every block by itself, repeated ones one after the other."""
        return (block for block in self.blocks for _ in range(block.repeats))

    def tensors(self) -> list[tuple[int, ...]]:
        """Shapes of all tensors."""
        return [shape for block in self.each() for module in block.modules for shape in module.tensors]


def has_formula(spec: ModelSpec) -> bool:
    """Whether a resolved model is counted by formulas here; all others are counted by tracing them (`model_card`)."""
    return swin_shape(spec) is not None or vit_shape(spec) is not None


def parameter_shapes(spec: ModelSpec) -> ParameterShapes | None:
    """Return the shapes of a resolved spec's trainable tensors; None where no formula and no card has them."""
    by_formula = _shapes(swin_shape(spec), vit_shape(spec), decoder_shape(spec), spec.num_classes or 0)
    if by_formula is not None:
        return by_formula
    card = KNOWN_MODELS.counts(spec)
    return None if card is None else _card_shapes(card)


_MOST_CARDS_WITH_SHAPES = 256
_shapes_by_card: dict[int, tuple[ModelCard, ParameterShapes]] = {}
"""Identity of a card -> the card, which keeps that identity from being given to another, and its shapes."""


def _card_shapes(card: ModelCard) -> ParameterShapes:
    """Return the shapes of a card's tensors; worked out once for each card, for many trials ask for them."""
    known = _shapes_by_card.get(id(card))
    if known is not None:
        return known[1]
    shapes = ParameterShapes(tuple(card_block(part) for part in card.parts if part.modules))
    if len(_shapes_by_card) >= _MOST_CARDS_WITH_SHAPES:
        _shapes_by_card.clear()
    _shapes_by_card[id(card)] = (card, shapes)
    return shapes


def card_block(part: CardPart) -> ModelBlock:
    """Return a card's part as a block of its trainable modules.

    The part's products are spread over its linear layers and convolutions by their number of weights.
    """
    part_macs = max(1, part.forward_flops.per_image // 2)
    product_elements = sum(_elements(module.shapes) for module in part.modules if module.is_cast)
    modules = []
    for module in part.modules:
        is_product = module.is_cast and product_elements > 0
        macs = part_macs * _elements(module.shapes) // product_elements if is_product else 0
        modules.append(Module(module.shapes, macs, cast=module.is_cast))
    return model_counts.in_order(modules)._replace(wrapped=part.block > 0)


def _elements(shapes: Iterable[tuple[int, ...]]) -> int:
    return sum(math.prod(shape) for shape in shapes)


@lru_cache(maxsize=256)
def _shapes(
    swin: SwinShape | None, vit: VitShape | None, decoder: DecoderShape | None, classes: int
) -> ParameterShapes | None:
    if swin is not None:
        blocks, width = model_counts.swin(swin), model_counts.stages(swin)[-1].width
        units = tuple(model_counts.swin_units(swin)) if len(swin.depths) > 1 else ()
    elif vit is not None:
        blocks, width, units = _vit_blocks(vit), vit.hidden, ()
    else:
        return None
    norm = model_counts.norm(width)
    if decoder is None:
        head = model_counts.in_order([norm, model_counts.linear(width, classes, 1, "outputs")])
        return ParameterShapes((*blocks, head), units=units)
    before = [] if vit is None else [norm, *model_counts.pyramid(width, decoder.sides[_OWN_MAP])]
    return ParameterShapes((*blocks, model_counts.upernet(decoder, before, auxiliary_first=vit is not None)), units)


def _vit_blocks(s: VitShape) -> list[ModelBlock]:
    """Two blocks: tokens, positions and patches; the repeated blocks."""
    h, t = s.hidden, s.tokens
    patches = Module(
        ((h, s.channels, s.patch, s.patch), (h,)), (t - s.special_tokens) * s.channels * s.patch**2 * h, cast=True
    )
    embedding = [Module(((1, 1, h),) * s.special_tokens + ((1, t, h),)), patches]
    projections = [
        model_counts.linear(h, h, t, "outputs", bias=s.qkv_bias, extra_macs=2 * t * t * h if values else 0)
        for values in (False, False, True)
    ]
    out, norm = model_counts.linear(h, h, t, "inputs"), model_counts.norm(h)
    mlp = (model_counts.linear(h, s.mlp, t, "outputs"), model_counts.linear(s.mlp, h, t, "inputs"))
    block = ModelBlock((*projections, out, norm, norm, *mlp), (4, 0, 1, 2, 3, 5, 6, 7), s.layers, wrapped=s.layers > 1)
    return [ModelBlock(tuple(embedding), (1, 0)), block]


def recorded_shapes(spec: ModelSpec) -> ParameterShapes | None:
    """The shapes of a recorded spec's tensors. None also where it was never resolved, or its configuration is gone: a
    record is input, and may hold anything."""
    try:
        return parameter_shapes(spec)
    except (ValueError, VitscaleError):
        return None


CountSource = Literal["by formula", "traced", "measured", "told", "unknown"]
"""How a count of a model is known. "measured": ranks counted it as they built the model; "told": a user, a script or an
imported log states it; "unknown": it is recorded, and the record, of an earlier version, does not say how."""


class ParameterCount(NamedTuple):
    """A number of parameters, and how it is known."""

    parameters: int
    source: CountSource


def counted_parameters(spec: ModelSpec) -> ParameterCount | None:
    """Return the parameters of a spec, frozen ones included, and how they are known; None where unknown.

    A number in the spec itself was stated: what ranks counted stands in their records (`analysis.model_counts`).

    Args:
        spec: resolved, or without anything that says which model it is.
    """
    if has_formula(spec):
        shapes = parameter_shapes(spec)
        blocks = shapes.blocks if shapes is not None else ()
        return ParameterCount(sum(block.repeats * block.elements for block in blocks), "by formula")
    card = KNOWN_MODELS.counts(spec)
    if card is not None:
        return ParameterCount(card.parameters, "traced")
    if spec.parameter_count is not None:
        return ParameterCount(spec.parameter_count, "told")
    return None


def parameters(spec: ModelSpec) -> int | None:
    """Return the parameters of a resolved spec, frozen ones included; None where they are unknown."""
    count = counted_parameters(spec)
    return None if count is None else count.parameters


_COUNT = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)\s*([kKmMgGbBtT]?)")
_THOUSANDS = {"": 0, "k": 1, "m": 2, "g": 3, "b": 3, "t": 4}


def counted(text: str) -> int:
    """The number of parameters that "110M", "1.3B" or "25557032" states.

    Raises:
        RequestError: it is no such count.
    """
    match = _COUNT.fullmatch(text.strip().replace(",", "").replace("_", ""))
    count = round(float(match[1]) * 1000 ** _THOUSANDS[match[2].lower()]) if match else 0
    if not 1 <= count <= 10**14:
        raise RequestError(
            f"{shown(text)} is no number of parameters", valid=["1 to 10^14"], next_step="Write 110M or 1.3B"
        )
    return count


def forward_flops(spec: ModelSpec) -> int | None:
    """FLOPs of one image's forward pass (1 MAC = 2 FLOP), matrix products only; None where unknown.

    A ViT's block takes 4h^2 MACs per token for projections, 2sh for attention (scores and values over s tokens), 2hm
    for the MLP. The patch projection and the head are added: a classifier on the class token alone, or UperNet's
    convolutions. Biases, norms, GELU and softmax do not count, as in Kaplan et al. (2020), section 2.1, and torch's
    FlopCounterMode. Other models are counted by their card.
    """
    if not has_formula(spec):
        card = KNOWN_MODELS.counts(spec)
        return None if card is None else card.flops("forward").of(1)
    shapes = parameter_shapes(spec)
    if shapes is None:
        return None
    return 2 * sum(block.repeats * module.macs for block in shapes.blocks for module in block.modules)


def training_flops(spec: ModelSpec, images: int = 1) -> int | None:
    """Return the FLOPs of one image's forward and backward pass; None where unknown.

    By formula they are 3 x forward. A card has both passes, and products that a micro-batch takes once whatever its
    size (a Swin's position biases): each image has its share of those.

    Args:
        spec: resolved.
        images: images of a micro-batch.
    """
    if not has_formula(spec):
        card = KNOWN_MODELS.counts(spec)
        if card is None:
            return None
        total = card.flops("forward").of(images) + card.flops("backward").of(images)
        return total // images if total > 0 else None
    forward = forward_flops(spec)
    return None if forward is None else 3 * forward


def most_stages(spec: ModelSpec) -> int:
    """Return the most stages into which a resolved model can be cut: its blocks, and in segmentation the heads too."""
    blocks = spec.blocks or 0
    return blocks + 1 if spec.task == "segmentation" else blocks


def stage_blocks(spec: ModelSpec, stages: int) -> tuple[range, ...]:
    """Return the blocks of each pipeline stage of a resolved model, cut so that the largest stage has the fewest FLOPs.

    The first stage also has the embedding, and the last one the head; in segmentation the last may have nothing else.

    Args:
        spec: a resolved model.
        stages: number of stages.

    Raises:
        ValueError: they are more than `most_stages`.
    """
    shapes = parameter_shapes(spec)
    if shapes is None or most_stages(spec) < stages:
        raise ValueError(f"{spec.blocks} blocks do not make {stages} stages")
    embedding_macs = _macs(shapes.blocks[:1])
    head_macs = _macs(shapes.blocks[-1:])
    block_macs = [_macs(unit) for unit in shapes.in_a_row]
    may_be_head_alone = spec.task == "segmentation"
    cut = _cut_different_blocks if shapes.units else _cut_equal_blocks
    ends = cut(block_macs, stages, embedding_macs, head_macs, may_be_head_alone=may_be_head_alone)
    return tuple(range(begin, end) for begin, end in pairwise((0, *ends)))


def _macs(blocks: Iterable[ModelBlock]) -> int:
    """Return the MACs of one image's forward in these blocks, each taken once."""
    return sum(module.macs for block in blocks for module in block.modules)


def _cut_different_blocks(
    block_macs: Sequence[int], stages: int, embedding_macs: int, head_macs: int, *, may_be_head_alone: bool
) -> tuple[int, ...]:
    """Return the end of each stage, as an index of blocks, for blocks that differ in size (Swin)."""
    blocks = len(block_macs)
    costs = list(block_macs)
    costs[0] += embedding_macs
    if not may_be_head_alone:
        costs[-1] += head_macs
        return balanced(tuple(costs), stages)
    ends = balanced((*costs, head_macs), stages)  # the head as one more block
    is_head_alone = stages > 1 and ends[-2] == blocks
    if is_head_alone:  # the blocks are balanced over the other stages
        return (*balanced(tuple(costs), stages - 1), blocks)
    return (*ends[:-1], blocks)


def _cut_equal_blocks(
    block_macs: Sequence[int], stages: int, embedding_macs: int, head_macs: int, *, may_be_head_alone: bool
) -> tuple[int, ...]:
    """Return the end of each stage, as an index of blocks, for blocks of one size.

    Blocks go one by one to the stage with the least so far, which is optimal. Among equals the last stage gets the
    block, because later stages hold fewer activations.
    """
    counts = [1] * stages
    if may_be_head_alone:
        counts[-1] = 0
    stage_macs = [block_macs[0] * count for count in counts]
    stage_macs[0] += embedding_macs
    stage_macs[-1] += head_macs
    for _ in range(len(block_macs) - sum(counts)):
        least = min(range(stages), key=lambda stage: (stage_macs[stage], -stage))
        counts[least] += 1
        stage_macs[least] += block_macs[0]
    return tuple(accumulate(counts))


@lru_cache(maxsize=1024)
def balanced(costs: tuple[int, ...], groups: int) -> tuple[int, ...]:
    """Return the ends of `groups` runs of `costs`, chosen so that the largest sum of a run is least.

    Example: costs (3, 1, 1, 4) in two groups have the ends (2, 4), for sums of 4 and 5.
    """

    @cache
    def cut(begin: int, groups_left: int) -> _Cut:
        if groups_left == 1:
            return _Cut(sum(costs[begin:]), (len(costs),))
        candidates = []
        for end in range(begin + 1, len(costs) - groups_left + 2):
            following = cut(end, groups_left - 1)
            largest = max(sum(costs[begin:end]), following.largest_sum)
            candidates.append(_Cut(largest, (end, *following.ends)))
        return min(candidates)

    return cut(0, groups).ends


class _Cut(NamedTuple):
    """A way to cut a row of costs into groups; ways are compared by the sum, then by the ends."""

    largest_sum: int
    ends: tuple[int, ...]
