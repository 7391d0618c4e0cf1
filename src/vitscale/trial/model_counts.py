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
    """(rows, side, width) of the maps that leave each of `swin_units` for one image on one of `ranks` sequence ranks:
    hidden states, and with `segments`, for UperNet's heads, the outputs of all stages merged so far."""
    built = stages(shape, ranks, rank)
    sizes = [(s.rows, s.side, s.width) for s in built]
    following = [*sizes[1:], sizes[-1]]
    return [
        (hidden, *sizes[: number + (hidden is not sizes[number])] * segments)
        for number, s in enumerate(built)
        for hidden in [sizes[number]] * (s.depth - 1) + [following[number]]
    ]


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


def block_kept_bytes(s: SwinStage, precision: str, ranks: int = 1) -> int:
    """Bytes that a block keeps of one image for backward, on each of `ranks` tensor ranks.

    Elements per padded token and width: the windows (1); cut by heads, q, k and v, normalised q and k, and attention's
    output (6). Elements per token and width: inputs of the norms and of the MLP's first layer (3); cut by the MLP's
    width, inputs of GELU and of the second layer (8).
    On sequence ranks inputs of q, k and v and attention's output are of the own tokens, without padding.
    """
    element, padded_heads, scores, token = _KEPT[precision]
    of_heads = (padded_heads + scores * s.window**2) * (s.heads // (ranks * s.ranks))
    own = s.width // ranks
    whole, by_heads = (s.width, 6 * own) if s.ranks == 1 else (0, 5 * own // s.ranks)
    of_tokens = 3 * s.width + 8 * own + (s.width + own if s.ranks > 1 else 0)
    return s.padded * (element * (whole + by_heads) + of_heads) + s.tokens * (element * of_tokens + token)


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


_POOLED = (1, 2, 3, 6)
_AUXILIARY_MAP = 2


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


def upernet_layers(shape: DecoderShape) -> list[DecoderLayer]:
    """UperNet (Xiao et al., "Unified Perceptual Parsing for Scene Understanding", ECCV 2018) on feature maps.

    The last map is pooled to 1, 2, 3 and 6 pixels a side; maps are added from the smallest to the largest; all are
    joined at the largest, and classified. Its auxiliary head is one convolution on the third map.

    Returns:
        The layers in the order of forward. Each convolution keeps what it takes, each norm what it takes, each ReLU
        what it gives; what one gives and the next takes is kept once.
    """
    size, classes, first = shape.size, shape.classes, shape.sides[0]
    *others, (width, side) = zip(shape.widths, shape.sides, strict=True)
    laterals = [_layer(w, size, 1, s) for w, s in others]
    pooled = [_layer(width, size, 1, pixels) for pixels in _POOLED]
    pooled[0] = pooled[0]._replace(kept=pooled[0].kept + width * side**2)  # pooling keeps its input map
    bottleneck = _layer(width + len(_POOLED) * size, size, 3, side)
    outputs = [_layer(size, size, 3, s) for _, s in others]
    joined = _layer(len(shape.widths) * size, size, 3, first)
    auxiliary = []
    if shape.auxiliary:
        half, third = (size + 1) // 2, shape.sides[_AUXILIARY_MAP]
        on_map = _layer(shape.widths[_AUXILIARY_MAP], half, 3, third)
        auxiliary = [on_map._replace(kept=2 * on_map.given), _classifier(half, classes, third)]
    decoder = [*laterals, *pooled, bottleneck, *outputs, joined, _classifier(size, classes, first)]
    return [*decoder, *auxiliary]


def upernet(shape: DecoderShape, before: Sequence[Module] = (), *, auxiliary_first: bool = False) -> ModelBlock:
    """UperNet's modules, behind those that a model registers `before` it.

    Registered are the classifier, what is pooled and its bottleneck, the laterals, then the rest as in forward.
    `auxiliary_first`: whether forward goes through the auxiliary head before the other one.
    """
    layers, others = upernet_layers(shape), len(shape.widths) - 1
    pooled = others + len(_POOLED) + 1
    joined = pooled + others
    auxiliary = range(joined + 2, len(layers))
    order = [joined + 1, *range(others, pooled), *range(others), *range(pooled, joined + 1), *auxiliary]
    modules = list(before)
    indices: dict[int, range] = {}
    for number in order:
        indices[number] = range(len(modules), len(modules) + len(layers[number].modules))
        modules += layers[number].modules
    heads = (range(joined + 2), auxiliary)
    forward = [index for head in (reversed(heads) if auxiliary_first else heads) for n in head for index in indices[n]]
    return ModelBlock(tuple(modules), (*range(len(before)), *forward))


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
