"""Parameters, products and kept activations of Swin V2 and of the decoders of segmentation, by arithmetic.

As transformers 5.23 builds them (`modeling_swinv2.py`, `modeling_upernet.py`): its attention is not fused, and what a
window does not divide is padded. Images are square.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

_BIAS_WIDTH = 512
"""Of the small network that makes a window's position biases."""


class Counts(NamedTuple):
    """Of a part of a model."""

    parameters: int
    macs: int
    """Products of one image's forward pass."""

    def plus(self, other: Counts) -> Counts:
        """Of both parts together."""
        return Counts(self.parameters + other.parameters, self.macs + other.macs)


def total(parts: Iterator[Counts] | Sequence[Counts]) -> Counts:
    """Of all parts together."""
    whole = Counts(0, 0)
    for part in parts:
        whole = whole.plus(part)
    return whole


class SwinShape(NamedTuple):
    """All that Swin V2's counts need."""

    image_size: int
    channels: int
    patch_size: int
    hidden_size: int
    """Of the first stage; each further one has twice as much."""
    heads: int
    """Of the first stage; each further one has twice as many."""
    depths: tuple[int, ...]
    window_size: int


class Stage(NamedTuple):
    """One of Swin's stages."""

    width: int
    heads: int
    depth: int
    side: int
    """Tokens along an image's side."""
    window: int
    """Tokens along a window's side; 0 where nothing is left of the image."""

    @property
    def padded(self) -> int:
        """Tokens of an image in whole windows."""
        return (-(-self.side // self.window) * self.window) ** 2


def stages(shape: SwinShape) -> list[Stage]:
    """Swin's stages. Sides are rounded up; a window is no larger than the side rounded down."""
    side, nominal = -(-shape.image_size // shape.patch_size), shape.image_size // shape.patch_size
    found = []
    for number, depth in enumerate(shape.depths):
        window = min(nominal >> number, shape.window_size)
        found.append(Stage(shape.hidden_size << number, shape.heads << number, depth, side, window))
        side = (side + 1) // 2
    return found


def swin(shape: SwinShape) -> Counts:
    """Swin V2 (Liu et al., "Swin Transformer V2", CVPR 2022) from its patches to the end of its last stage.

    Left out of the products, as for the ViT: biases, norms, GELU, softmax, and the two vector norms of its attention.
    """
    found = stages(shape)
    pixels, width = shape.channels * shape.patch_size**2, shape.hidden_size
    embedding = Counts(pixels * width + 3 * width, found[0].side ** 2 * pixels * width)
    blocks = (swin_block(stage) for stage in found for _ in range(stage.depth))
    return total([embedding, *map(swin_merge, found[:-1]), *blocks])


def swin_merge(s: Stage) -> Counts:
    """What follows a stage that is not the last: four tokens side by side to twice the width, and a norm."""
    return Counts(8 * s.width**2 + 4 * s.width, ((s.side + 1) // 2) ** 2 * 8 * s.width**2)


def swin_block(s: Stage) -> Counts:
    """Attention in windows, by cosines and with learnt position biases; an MLP of four times the width; two norms."""
    c, tokens = s.width, s.side**2
    biases = 3 * _BIAS_WIDTH + _BIAS_WIDTH * s.heads
    parameters = 4 * c * c + 3 * c + s.heads + biases + 8 * c * c + 5 * c + 4 * c
    positions = (2 * s.window - 1) ** 2 * (2 * _BIAS_WIDTH + _BIAS_WIDTH * s.heads)  # once, however many the images
    attention = s.padded * (4 * c * c + 2 * s.window**2 * c)
    return Counts(parameters, attention + positions + tokens * 8 * c * c)


_KEPT: dict[str, tuple[int, int, int, int, int]] = {
    "fp32": (28, 16, 8, 44, 16),
    "bf16": (14, 8, 8, 22, 16),
    "bf16-params": (14, 8, 4, 22, 8),
    "fp16": (14, 8, 8, 22, 16),
}
"""Bytes of a block by precision: per padded token and width, padded token and head, score, token and width, token.

In elements: windows, q, k and v, q and k normalised, what attention gives (7); the lengths of q and k, twice each (4);
scores before scaling and after softmax (2); what the norms and the MLP's two layers take, and GELU (1 + 1 + 1 + 4 + 4);
both norms' mean and deviation (4). Autocast casts softmax back from fp32; it was held against a CPU's, where norms give
16 bit.
"""


def swin_kept_bytes(shape: SwinShape, precision: str) -> int:
    """Bytes that Swin's blocks and the merging between stages keep of one image for backward."""
    found = stages(shape)
    return sum(s.depth * block_kept_bytes(s, precision) for s in found) + sum(
        merge_kept_bytes(s, precision) for s in found[:-1]
    )


def block_kept_bytes(s: Stage, precision: str) -> int:
    """Of one block."""
    padded_width, padded_heads, scores, width, token = _KEPT[precision]
    of_padded = padded_width * s.width + (padded_heads + scores * s.window**2) * s.heads
    return s.padded * of_padded + s.side**2 * (width * s.width + token)


def merge_kept_bytes(s: Stage, precision: str) -> int:
    """Of the merging after a stage: what its product and its norm take, and the norm's statistics."""
    element, statistics = (4 if precision == "fp32" else 2), _KEPT[precision][-1] // 4
    return int(((s.side + 1) // 2) ** 2 * (element * (4 + 2) * s.width + 2 * statistics))


def bias_kept(s: Stage) -> int:
    """Elements that a block's position biases keep, however many the images: its small network's, and their sigmoid."""
    return (2 * s.window - 1) ** 2 * _BIAS_WIDTH + s.heads * s.window**4


class DecoderShape(NamedTuple):
    """All that UperNet's counts need."""

    widths: tuple[int, ...]
    """Channels of each feature map, the largest map first."""
    sides: tuple[int, ...]
    size: int
    """Channels inside the head; the auxiliary head has half of them."""
    classes: int
    auxiliary: bool


_POOLED = (1, 2, 3, 6)
_AUXILIARY_MAP = 2


class DecoderLayer(NamedTuple):
    """A convolution of UperNet with the norm and the ReLU behind it; elements of one image."""

    counts: Counts
    taken: int
    """What it takes."""
    given: int
    """What it gives, and its norm takes."""
    kept: int
    """For backward: what it, its norm and what takes its ReLU's output take; once what is kept already."""
    norm: int = 0
    """Channels of its batch norm; 0: it has neither norm nor ReLU."""


def upernet(shape: DecoderShape) -> Counts:
    """Of all its layers together."""
    return total([layer.counts for layer in upernet_layers(shape)])


def upernet_kept(shape: DecoderShape) -> int:
    """Elements that UperNet keeps of one image for backward."""
    return sum(layer.kept for layer in upernet_layers(shape))


def upernet_norms(shape: DecoderShape) -> tuple[int, ...]:
    """Channels of each of UperNet's batch norms: one after every convolution but the classifiers."""
    return tuple(layer.norm for layer in upernet_layers(shape) if layer.norm)


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
    pooled[0] = pooled[0]._replace(kept=pooled[0].kept + width * side**2)  # pooling keeps the map
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


def _layer(inputs: int, outputs: int, kernel: int, side: int) -> DecoderLayer:
    """A convolution without bias that keeps the side, and a batch norm."""
    products = inputs * outputs * kernel**2
    taken, given = inputs * side**2, outputs * side**2
    return DecoderLayer(Counts(products + 2 * outputs, side**2 * products), taken, given, taken + 2 * given, outputs)


def _classifier(size: int, classes: int, side: int) -> DecoderLayer:
    counts = Counts(size * classes + classes, side**2 * size * classes)
    return DecoderLayer(counts, size * side**2, classes * side**2, 0)


def pyramid(width: int, side: int) -> Counts:
    """The maps of 4, 2, 1 and 1/2 times a ViT's side: two transposed convolutions, one, none, and a pooling."""
    product = 4 * width * width
    return Counts(3 * (product + width), side**2 * product * (1 + 4 + 1))


def pyramid_kept_bytes(width: int, side: int, element_bytes: int) -> int:
    """What a ViT's last norm and its pyramid keep of one image, beside the maps; pooling keeps 64-bit places."""
    tokens = side**2 + 1
    norm = width * tokens * element_bytes + 2 * tokens * min(4, element_bytes)
    beside_the_map = width * element_bytes  # the class token's, in the memory of the third map
    return norm + beside_the_map + 2 * width * (2 * side) ** 2 * element_bytes + width * (side // 2) ** 2 * 8
