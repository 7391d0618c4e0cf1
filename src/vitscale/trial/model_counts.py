"""Parameters, products and kept activations of Swin V2 and of the segmentation decoders, by arithmetic.

Counted as transformers 5.23 builds them (`modeling_swinv2.py`, `modeling_upernet.py`): its attention is not fused, and
sides that a window does not divide are padded. Images are square.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from vitscale.trial.parallel import even_parts

BIAS_WIDTH = 512
"""Hidden width of the small network that makes a window's position biases."""


class Module(NamedTuple):
    """A module with trainable tensors of its own."""

    tensors: tuple[tuple[int, ...], ...]
    """Their shapes, in the order of registration."""
    macs: int = 0
    """MACs of one image's forward that are done in it, or with its output beside it (attention)."""
    cast: bool = False
    """Whether it is a linear layer or a plain convolution, which DeepSpeed sends in 16 bits under autocast. (Autocast
    itself computes all products in 16 bits.)"""
    cut: Literal["", "outputs", "inputs"] = ""
    """Which side tensor ranks cut (`splits`, `swin_split` of `engines.shared`); empty: each rank has it whole."""

    def part(self, ranks: int) -> Module:
        """The part that one of `ranks` tensor ranks has: a bias is cut with outputs, and stays whole beside inputs."""
        if not self.cut or ranks == 1:
            return self
        (outputs, *rest), *biases = self.tensors
        own = math.ceil(outputs / ranks)
        tensors = ((own, *rest), *((own,) for _ in biases))
        if self.cut == "inputs":
            tensors = ((outputs, math.ceil(rest[0] / ranks)), *biases)
        return self._replace(tensors=tensors, macs=self.macs // ranks)

    @property
    def elements(self) -> int:
        """Number of elements of all its tensors."""
        return sum(map(math.prod, self.tensors))

    @property
    def gradients(self) -> tuple[tuple[int, ...], ...]:
        """Shapes in the order of their gradients in autograd: a linear layer's bias first, positions before tokens."""
        return self.tensors[::-1] if len(self.tensors[0]) in (2, 3) else self.tensors


class ModelBlock(NamedTuple):
    """Modules that forward takes one after the other, as one part of a model."""

    modules: tuple[Module, ...]
    """In the order of registration."""
    forward: tuple[int, ...]
    """Indices of `modules` in the order of forward; backward has the reverse order."""
    repeats: int = 1
    """Number of equal blocks in a row."""
    wrapped: bool = False
    """Whether it is one of the model's repeated blocks, which engines wrap singly (`models.blocks.blocks_of`)."""

    @property
    def elements(self) -> int:
        """Number of elements of one block's tensors."""
        return sum(module.elements for module in self.modules)

    @property
    def in_forward(self) -> tuple[Module, ...]:
        """The modules in the order of forward."""
        return tuple(self.modules[index] for index in self.forward)


def in_order(modules: Iterable[Module]) -> ModelBlock:
    """A block whose forward takes its modules in the order of registration."""
    listed = tuple(modules)
    return ModelBlock(listed, tuple(range(len(listed))))


def linear(
    inputs: int, outputs: int, rows: int, cut: Literal["", "outputs", "inputs"] = "", *, bias: bool = True,
    extra_macs: int = 0,
) -> Module:  # fmt: skip
    """A linear layer on `rows` rows of an image."""
    own = ((outputs,),) if bias else ()
    return Module(((outputs, inputs), *own), rows * inputs * outputs + extra_macs, cast=True, cut=cut)


def norm(width: int) -> Module:
    """A norm with its weight and bias."""
    return Module(((width,), (width,)))


def convolution(inputs: int, outputs: int, kernel: int, side: int, *, bias: bool = True) -> Module:
    """A convolution that gives `side` x `side` pixels per image."""
    own = ((outputs,),) if bias else ()
    return Module(((outputs, inputs, kernel, kernel), *own), side**2 * inputs * outputs * kernel**2, cast=True)


class SwinShape(NamedTuple):
    """All that Swin V2's counts need."""

    image_size: int
    channels: int
    patch_size: int
    hidden_size: int
    """Width of the first stage; each further stage has twice the width."""
    heads: int
    """Heads of the first stage; each further stage has twice as many."""
    depths: tuple[int, ...]
    window_size: int


class SwinStage(NamedTuple):
    """One of Swin's stages."""

    width: int
    heads: int
    depth: int
    side: int
    """Tokens along an image's side."""
    window: int
    """Tokens along a window's side; 0 where the image is too small for this stage."""
    rows: int
    """Rows of tokens that one rank has: all, unless sequence ranks share them."""
    ranks: int
    """Sequence ranks that share them; in attention each has all tokens of as large a part of the heads."""

    @property
    def tokens(self) -> int:
        """Tokens of one image that one rank has."""
        return self.rows * self.side

    @property
    def merged(self) -> int:
        """Tokens that these become where the stage is merged."""
        return (self.rows + 1) // 2 * ((self.side + 1) // 2)

    @property
    def padded(self) -> int:
        """Tokens of an image padded to whole windows."""
        return (-(-self.side // self.window) * self.window) ** 2

    @property
    def positions(self) -> int:
        """Number of relative positions of two tokens in a window."""
        return (2 * self.window - 1) ** 2


def stages(shape: SwinShape, ranks: int = 1, rank: int = 0) -> list[SwinStage]:
    """The stages of a Swin on one of `ranks` sequence ranks. Sides are rounded up; a window is no larger than the side
    rounded down."""
    first = -(-shape.image_size // shape.patch_size)
    side, nominal = first, shape.image_size // shape.patch_size
    built = []
    for number, depth in enumerate(shape.depths):
        window = min(nominal >> number, shape.window_size)
        rows = rows_of_ranks(first, number, len(shape.depths), ranks)[rank]
        built.append(SwinStage(shape.hidden_size << number, shape.heads << number, depth, side, window, rows, ranks))
        side = (side + 1) // 2
    return built


def rows_of_ranks(side: int, stage: int, count: int, ranks: int) -> list[int]:
    """Rows of a stage's map on each of `ranks` sequence ranks. They become whole rows of the last stage's map, of which
    the first ranks have one more where they do not divide.

    Args:
        side: rows of the first stage's map.
        stage: counted from 0.
        count: of stages.
        ranks: that share the map.
    """
    each, rows = 2 ** (count - 1 - stage), -(-side >> stage)
    parts = even_parts(-(-rows // each), ranks)
    return [min(part.stop * each, rows) - min(part.start * each, rows) for part in parts]


def swin(shape: SwinShape) -> list[ModelBlock]:
    """Swin V2 (Liu et al., "Swin Transformer V2", CVPR 2022) from its patches to the end of its last stage.

    Left out of the products, as for the ViT: biases, norms, GELU, softmax, and the two vector norms of its attention.
    """
    built = stages(shape)
    patches = convolution(shape.channels, shape.hidden_size, shape.patch_size, built[0].side)
    if len(built) == 1:  # engines do not take a list of one stage for blocks, so its own blocks are
        blocks = [swin_block(built[0])._replace(repeats=built[0].depth, wrapped=built[0].depth > 1)]
    else:
        blocks = [_stage(s, s is built[-1]) for s in built]
    return [in_order([patches, norm(shape.hidden_size)]), *blocks]


def swin_units(shape: SwinShape) -> list[tuple[ModelBlock, ...]]:
    """The blocks one by one, as a pipeline's stages take them; the last block of a stage comes with its merging."""
    built = stages(shape)
    units = []
    for s in built:
        merge = () if s is built[-1] else (in_order(swin_merge(s))._replace(wrapped=True),)
        block = swin_block(s)._replace(wrapped=True)
        units += [(block,)] * (s.depth - 1) + [(block, *merge)]
    return units


def swin_maps(
    shape: SwinShape, ranks: int = 1, rank: int = 0, *, segments: bool = False
) -> list[tuple[tuple[int, int, int], ...]]:
    """Return the sizes (rows, side, width) of the maps that leave each of `swin_units` for one image.

    The first is that of the hidden states. With `segments` the outputs of all stages so far follow, for UperNet's
    heads; a stage's output counts once its merging, which makes other hidden states of it, is done.

    Args:
        shape: sizes of the model.
        ranks: sequence ranks that share the tokens.
        rank: the sequence rank.
        segments: whether the model has UperNet's heads.
    """
    stage_sizes = [(stage.rows, stage.side, stage.width) for stage in stages(shape, ranks, rank)]
    maps_by_unit: list[tuple[tuple[int, int, int], ...]] = []
    for number, (depth, own_size) in enumerate(zip(shape.depths, stage_sizes, strict=True)):
        is_last_stage = number == len(stage_sizes) - 1
        outputs_before = stage_sizes[:number] if segments else []
        maps_by_unit += [(own_size, *outputs_before)] * (depth - 1)
        # The last block of a stage comes with its merging, so what leaves it has the next stage's size.
        if is_last_stage:
            maps_by_unit.append((own_size, *outputs_before))
        else:
            own_output = [own_size] if segments else []
            maps_by_unit.append((stage_sizes[number + 1], *outputs_before, *own_output))
    return maps_by_unit


def _stage(s: SwinStage, last: bool) -> ModelBlock:
    modules, forward = swin_block(s)[:2]
    indices = tuple(number * len(modules) + index for number in range(s.depth) for index in forward)
    merge = () if last else swin_merge(s)
    behind = tuple(len(indices) + index for index in range(len(merge)))
    return ModelBlock(s.depth * modules + merge, indices + behind, wrapped=True)


def swin_merge(s: SwinStage) -> tuple[Module, Module]:
    """The merging behind a stage, except the last: four tokens become one of twice the width, then a norm."""
    return linear(4 * s.width, 2 * s.width, ((s.side + 1) // 2) ** 2, bias=False), norm(2 * s.width)


def swin_block(s: SwinStage) -> ModelBlock:
    """A block: attention in windows, by cosines and with learnt position biases; a four times wider MLP; two norms.

    Half of attention's products count with the values. The other half counts with the small network that makes the
    biases (once for any number of images): these products come before that network has its gradient.
    """
    c, positions, attention = s.width, s.positions, s.padded * s.window**2 * s.width
    modules = (
        Module(((s.heads, 1, 1),), cut="outputs"),
        linear(2, BIAS_WIDTH, positions),
        linear(BIAS_WIDTH, s.heads, positions, "outputs", bias=False, extra_macs=attention),
        linear(c, c, s.padded, "outputs"),
        linear(c, c, s.padded, "outputs", bias=False),
        linear(c, c, s.padded, "outputs", extra_macs=attention),
        linear(c, c, s.padded, "inputs"),
        norm(c),
        linear(c, 4 * c, s.side**2, "outputs"),
        linear(4 * c, c, s.side**2, "inputs"),
        norm(c),
    )
    return ModelBlock(modules, (3, 4, 5, 0, 1, 2, 6, 7, 8, 9, 10))


_KEPT: dict[str, tuple[int, int, int, int]] = {
    "fp32": (4, 16, 8, 16),
    "bf16": (2, 8, 8, 16),
    "bf16-params": (2, 8, 4, 8),
    "fp16": (2, 8, 8, 16),
}
"""Bytes that a block keeps, by precision: (per element; per padded token and head; per score; per token).

The lengths of q and k, twice each (4 elements); scores before scaling and after softmax (2); both norms' mean and
deviation (4). Autocast casts softmax back from fp32; it was held against a CPU's, where norms give 16 bit.
"""


def block_kept_bytes(stage: SwinStage, precision: str, tensor_ranks: int = 1) -> int:
    """Return the bytes that a block keeps of one image for backward, on each of its ranks.

    Kept in attention, for each padded token and channel: the windows (1); by heads q, k and v, the normalised q and k,
    and attention's output (6). Kept outside attention, for each token and channel: inputs of both norms and of the
    MLP's first layer (3); cut over tensor ranks the inputs of GELU and of the second layer, each four times as
    wide (8).

    On sequence ranks inputs of q, k and v (1) and attention's output (1) are of the rank's own tokens, without padding,
    instead of windows and attention's output by heads.
    """
    element_bytes, padded_head_bytes, score_bytes, token_bytes = _KEPT[precision]
    has_own_tokens = stage.ranks > 1
    heads = stage.heads // (tensor_ranks * stage.ranks)
    width_of_tensor_rank = stage.width // tensor_ranks

    head_bytes = (padded_head_bytes + score_bytes * stage.window**2) * heads
    in_attention = stage.width + 6 * width_of_tensor_rank
    outside_attention = 3 * stage.width + 8 * width_of_tensor_rank
    if has_own_tokens:
        in_attention = 5 * width_of_tensor_rank // stage.ranks
        outside_attention += stage.width + width_of_tensor_rank

    padded_token_bytes = element_bytes * in_attention + head_bytes
    own_token_bytes = element_bytes * outside_attention + token_bytes
    return stage.padded * padded_token_bytes + stage.tokens * own_token_bytes


def merge_kept_bytes(s: SwinStage, precision: str) -> int:
    """Bytes kept by the merging after a stage: inputs of its product and of its norm, and the norm's statistics."""
    element, statistics = (4 if precision == "fp32" else 2), _KEPT[precision][-1] // 4
    return int(s.merged * (element * (4 + 2) * s.width + 2 * statistics))


def bias_kept(s: SwinStage, ranks: int = 1) -> int:
    """Elements that a block's position biases keep, whatever the number of images: those of the small network, and the
    sigmoid for the heads of one of `ranks` tensor ranks."""
    return s.positions * BIAS_WIDTH + s.heads // (ranks * s.ranks) * s.window**4


class DecoderShape(NamedTuple):
    """All that UperNet's counts need."""

    widths: tuple[int, ...]
    """Channels of each feature map, the largest map first."""
    sides: tuple[int, ...]
    size: int
    """Channels inside the head; the auxiliary head has half as many."""
    classes: int
    auxiliary: bool


_POOLED_SIDES = (1, 2, 3, 6)
"""Pixels along a side to which the last map is pooled."""
_AUXILIARY_MAP = 2
"""Index of the map that the auxiliary head takes."""


class DecoderLayer(NamedTuple):
    """A convolution of UperNet with the norm and the ReLU behind it; counts are elements of one image."""

    modules: tuple[Module, ...]
    """The convolution, and its batch norm where it has one."""
    taken: int
    """Elements of its input."""
    given: int
    """Elements of its output, which its norm takes."""
    kept: int
    """Elements kept for backward: inputs of the convolution, its norm and what follows its ReLU, each only once."""

    @property
    def norm(self) -> int:
        """Channels of its batch norm; 0 where it has neither norm nor ReLU."""
        return self.modules[1].tensors[0][0] if len(self.modules) > 1 else 0


class _UperNet(NamedTuple):
    """UperNet's layers by what they do."""

    laterals: list[DecoderLayer]
    """One on each map but the last."""
    pooled: list[DecoderLayer]
    """One on the last map at each of the pooled sizes."""
    bottleneck: DecoderLayer
    """Joins the last map and what was pooled of it."""
    outputs: list[DecoderLayer]
    """One on each map but the last, after the smaller maps were added to it."""
    fusion: DecoderLayer
    """Joins all maps at the side of the largest."""
    classifier: DecoderLayer
    auxiliary: list[DecoderLayer]
    """The auxiliary head: a convolution and a classifier, or nothing."""

    @classmethod
    def of(cls, shape: DecoderShape) -> _UperNet:
        """Return the layers for a decoder's sizes."""
        size = shape.size
        *other_sides, last_side = shape.sides
        *other_widths, last_width = shape.widths
        largest_side = shape.sides[0]
        pooled = [_layer(last_width, size, 1, side) for side in _POOLED_SIDES]
        last_map = last_width * last_side**2
        pooled[0] = pooled[0]._replace(kept=pooled[0].kept + last_map)  # pooling keeps its input
        return cls(
            laterals=[_layer(width, size, 1, side) for width, side in zip(other_widths, other_sides, strict=True)],
            pooled=pooled,
            bottleneck=_layer(last_width + len(_POOLED_SIDES) * size, size, 3, last_side),
            outputs=[_layer(size, size, 3, side) for side in other_sides],
            fusion=_layer(len(shape.widths) * size, size, 3, largest_side),
            classifier=_classifier(size, shape.classes, largest_side),
            auxiliary=_auxiliary_head(shape) if shape.auxiliary else [],
        )

    def main_in_forward(self) -> list[DecoderLayer]:
        """Return the layers without the auxiliary head, in the order of forward."""
        return [*self.laterals, *self.pooled, self.bottleneck, *self.outputs, self.fusion, self.classifier]

    def as_registered(self) -> list[DecoderLayer]:
        """Return all layers in the order in which the library's module registers them."""
        return [
            self.classifier, *self.pooled, self.bottleneck, *self.laterals, *self.outputs, self.fusion, *self.auxiliary,
        ]  # fmt: skip


def _auxiliary_head(shape: DecoderShape) -> list[DecoderLayer]:
    half_size = (shape.size + 1) // 2
    side = shape.sides[_AUXILIARY_MAP]
    on_map = _layer(shape.widths[_AUXILIARY_MAP], half_size, 3, side)
    # The map itself is kept already, by the lateral that takes it too.
    on_map = on_map._replace(kept=2 * on_map.given)
    return [on_map, _classifier(half_size, shape.classes, side)]


def upernet_layers(shape: DecoderShape) -> list[DecoderLayer]:
    """Return the layers of UperNet in the order of forward, the auxiliary head's last.

    UperNet (Xiao et al., "Unified Perceptual Parsing for Scene Understanding", ECCV 2018) pools the last map to 1, 2, 3
    and 6 pixels a side, adds maps from the smallest to the largest, joins all at the largest, and classifies. Its
    auxiliary head is one convolution on the third map, and a classifier.

    Each convolution keeps what it takes, each norm what it takes, each ReLU what it gives; what one gives and the next
    takes is kept once.
    """
    decoder = _UperNet.of(shape)
    return [*decoder.main_in_forward(), *decoder.auxiliary]


def upernet(shape: DecoderShape, before: Sequence[Module] = (), *, auxiliary_first: bool = False) -> ModelBlock:
    """Return UperNet's modules as one block.

    Args:
        shape: sizes of the decoder.
        before: modules that the model registers, and takes in forward, before these.
        auxiliary_first: whether forward goes through the auxiliary head before the main one.
    """
    decoder = _UperNet.of(shape)
    modules = list(before)
    indices_by_layer: dict[int, range] = {}  # by identity: layers of two maps may be equal
    for layer in decoder.as_registered():
        begin = len(modules)
        modules += layer.modules
        indices_by_layer[id(layer)] = range(begin, len(modules))
    main = decoder.main_in_forward()
    in_forward = [*decoder.auxiliary, *main] if auxiliary_first else [*main, *decoder.auxiliary]
    forward = list(range(len(before)))
    for layer in in_forward:
        forward += indices_by_layer[id(layer)]
    return ModelBlock(tuple(modules), tuple(forward))


def _layer(inputs: int, outputs: int, kernel: int, side: int) -> DecoderLayer:
    """A convolution that keeps the side and has no bias, with a batch norm."""
    modules = (convolution(inputs, outputs, kernel, side, bias=False), norm(outputs))
    taken, given = inputs * side**2, outputs * side**2
    return DecoderLayer(modules, taken, given, taken + 2 * given)


def _classifier(size: int, classes: int, side: int) -> DecoderLayer:
    return DecoderLayer((convolution(size, classes, 1, side),), size * side**2, classes * side**2, 0)


def pyramid(width: int, side: int) -> tuple[Module, ...]:
    """Modules for maps of 4, 2, 1 and 1/2 times a ViT's side: two transposed convolutions, one, none, and a pooling."""
    tensors = ((width, width, 2, 2), (width,))
    return tuple(Module(tensors, side**2 * 4 * width**2 * times) for times in (1, 4, 1))


def pyramid_kept_bytes(width: int, side: int, element_bytes: int) -> int:
    """Bytes that a ViT's pyramid keeps of one image beside the maps; pooling keeps 64-bit indices."""
    beside_the_map = width * element_bytes  # the class token lies in the memory of the third map
    return beside_the_map + 2 * width * (2 * side) ** 2 * element_bytes + width * (side // 2) ** 2 * 8
