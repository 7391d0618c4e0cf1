"""Which model, and its parameter, FLOP and activation counts by arithmetic, without torch.

`resolve` turns what a user wrote into a spec that leaves nothing open; the counts take only resolved specs and are held
against the real models by tests. A count that cannot be known without building the model is None, never 0. The ViT is
counted here, Swin V2 in `model_counts`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Annotated, Literal, NamedTuple

from pydantic import BeforeValidator, Field

from vitscale.base.plugins import names
from vitscale.errors import RequestError, VitscaleError, shown, unknown
from vitscale.trial import model_counts
from vitscale.trial.facts import Fact, Spec
from vitscale.trial.hf_config import hf_shape
from vitscale.trial.model_counts import Block, DecoderShape, Module, SwinShape

Task = Literal["classification", "segmentation"]

Depths = Annotated[
    tuple[Annotated[int, Field(ge=1, le=100)], ...],
    Field(min_length=1, max_length=8),
    BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value),
]


class ModelSpec(Spec):
    """A named ViT or Swin V2, a Hugging Face configuration, or the user's own factory.

    None of the three: an imported log does not say which model it was, and every count of it is None but that of its
    parameters where its user told them.
    """

    task: Annotated[Task, Fact(since=7)] = "classification"
    """A label for each image, or for each pixel. Named models of segmentation have UperNet's head."""
    name: Annotated[str | None, Fact(short="{}")] = None
    """One of `NAMED_MODELS`."""
    hf: str | None = None
    """Folder or hub name of a configuration for the task; weights start random unless `weights` names some."""
    factory: str | None = None
    """"module:function", called with `num_classes` and `image_size`, and `channels` where it takes them."""
    image_size: int = Field(default=224, ge=1, le=8192)
    patch_size: int | None = Field(default=None, ge=1, le=1024)
    num_classes: int | None = Field(default=None, ge=1, le=10_000_000)
    """Null takes the dataset's count."""
    channels: Annotated[int, Fact(since=7)] = Field(default=3, ge=1, le=4096)
    """Of an image: always the dataset's."""
    hidden_size: int | None = Field(default=None, ge=1, le=65_536)
    """Of Swin that of its first stage, as `heads`; each further stage has twice as much and as many."""
    layers: int | None = Field(default=None, ge=1, le=1000)
    """Of a ViT."""
    heads: int | None = Field(default=None, ge=1, le=1024)
    mlp_size: int | None = Field(default=None, ge=1, le=1_000_000)
    """Width inside a ViT's MLP; null takes 4 x hidden_size, as all named models have it."""
    depths: Annotated[Depths | None, Fact(since=7)] = None
    """Of Swin: blocks of each stage."""
    window_size: Annotated[int | None, Fact(since=7)] = Field(default=None, ge=1, le=1024)
    """Of Swin: tokens along a window's side."""
    decoder_size: Annotated[int | None, Fact(since=7)] = Field(default=None, ge=1, le=65_536)
    """Channels inside the segmentation head of a named model; null takes 512. The auxiliary head has half of them."""
    auxiliary_weight: Annotated[float | None, Fact(since=7)] = Field(default=None, ge=0.0, le=100.0)
    """Of the auxiliary head's loss in segmentation; 0 leaves the head out. Null: 0.4, or as the configuration says."""
    weights: Annotated[str | None, Fact(since=7)] = None
    """Folder or hub name of a pretrained model, whose weights are taken wherever names and shapes are alike."""

    parameter_count: Annotated[int | None, Fact(since=8)] = Field(default=None, ge=1, le=10**14)
    """Of an imported log's model that nothing else describes."""

    @property
    def unknown(self) -> bool:
        """Whether nothing says which model it is."""
        return self.name is None and self.hf is None and self.factory is None


class _NamedShape(NamedTuple):
    patch_size: int
    hidden_size: int
    heads: int
    layers: int | None = None
    depths: tuple[int, ...] | None = None
    window_size: int | None = None


# ViT-B, -L and -H: Dosovitskiy et al., "An Image is Worth 16x16 Words" (ICLR 2021), table 1. Ti and S: Touvron et al.,
# "Training data-efficient image transformers" (ICML 2021), table 1, here without the distillation token. Swin V2: Liu
# et al., "Swin Transformer V2" (CVPR 2022), section 4.1, with the windows of its models for 256 pixels.
NAMED_MODELS: dict[str, _NamedShape] = {
    "vit-ti16": _NamedShape(16, 192, 3, layers=12),
    "vit-s16": _NamedShape(16, 384, 6, layers=12),
    "vit-b16": _NamedShape(16, 768, 12, layers=12),
    "vit-l16": _NamedShape(16, 1024, 16, layers=24),
    "vit-h14": _NamedShape(14, 1280, 16, layers=32),
    "swinv2-t": _NamedShape(4, 96, 3, depths=(2, 2, 6, 2), window_size=8),
    "swinv2-s": _NamedShape(4, 96, 3, depths=(2, 2, 18, 2), window_size=8),
    "swinv2-b": _NamedShape(4, 128, 4, depths=(2, 2, 18, 2), window_size=8),
    "swinv2-l": _NamedShape(4, 192, 6, depths=(2, 2, 18, 2), window_size=8),
}

VIT_FIELDS = ("patch_size", "hidden_size", "layers", "heads", "mlp_size")
SWIN_FIELDS = ("patch_size", "hidden_size", "heads", "depths", "window_size")
SHAPE_FIELDS = tuple(dict.fromkeys(VIT_FIELDS + SWIN_FIELDS))

_IDENTIFIER = r"[^\W\d]\w*"
_FACTORY = re.compile(rf"{_IDENTIFIER}(\.{_IDENTIFIER})*:{_IDENTIFIER}")


def resolve(spec: ModelSpec, dataset_classes: int, channels: int | None = None) -> ModelSpec:
    """`spec` with every field filled that can be known here, so that a trial's identity holds real values.

    A named model gets its whole shape; `hf` gets the shape in its folder's config.json where that is a plain ViT or
    DeiT; `num_classes` comes from the dataset unless given, and `channels` (None: not known here) always. Resolving
    twice changes nothing.

    Raises `RequestError` for anything that cannot be built: the message names the bad value and the valid ones.
    """
    given = [key for key in ("name", "hf", "factory") if getattr(spec, key) is not None]
    if len(given) != 1:
        got = " and ".join(given) if given else "none of them"
        raise RequestError(f"[model] needs exactly one of name, hf and factory; it has {got}", valid=NAMED_MODELS)
    if spec.parameter_count is not None:
        raise RequestError("model.parameter_count is of imported logs alone", next_step="Remove it")
    classes = dataset_classes if spec.num_classes is None else spec.num_classes
    if classes < dataset_classes:
        what = f"model.num_classes = {classes} is fewer than the dataset's {dataset_classes} classes"
        raise RequestError(what, next_step="Leave num_classes out to take the dataset's count")
    if channels is None:
        channels = spec.channels
    elif "channels" in spec.model_fields_set and spec.channels != channels:
        what = f"model.channels = {spec.channels}, and the images have {channels}"
        raise RequestError(what, next_step="Remove it: the model takes what data.channels says")
    filled: dict[str, object] = {"num_classes": classes, "channels": channels}
    if spec.name is not None:
        filled |= _named_shape(spec)
    elif spec.hf is not None:
        filled |= _hf_fields(spec)
    else:
        _refuse_shape_fields(spec, "factory", {})
        if not _FACTORY.fullmatch(spec.factory or "") or len(spec.factory or "") > 500:
            what = f"model.factory {shown(spec.factory)} is not of the form 'module:function'"
            raise RequestError(what, next_step="Name an importable function, such as 'my_models.vit:build'")
    resolved = spec.model_copy(update=filled | _segmentation(spec))
    _check_shape(resolved)
    return resolved


_LEAST_STAGES = 3
_DECODER_SIZE = 512
_AUXILIARY_WEIGHT = 0.4


def _segmentation(spec: ModelSpec) -> dict[str, object]:
    """The fields of segmentation, filled or refused."""
    for key, applies, where in (
        ("decoder_size", spec.task == "segmentation" and spec.name is not None, "a named model of segmentation"),
        ("auxiliary_weight", spec.task == "segmentation", 'model.task = "segmentation"'),
    ):
        if not applies and (value := getattr(spec, key)) is not None:
            raise RequestError(f"model.{key} = {value} is of {where} alone", next_step=f"Remove {key}")
    if spec.task == "classification":
        return {}
    if spec.hf is not None and hf_shape(spec.hf) is not None:
        raise RequestError(
            f"model.hf {shown(spec.hf)} is a plain ViT, which transformers has no segmentation head for",
            next_step="Name a vit-* model, whose pyramid is vitscale's own, or a configuration of upernet, beit, "
            "dpt or segformer",
        )
    if spec.name is None:
        return {}
    weight = _AUXILIARY_WEIGHT if spec.auxiliary_weight is None else spec.auxiliary_weight
    return {"decoder_size": spec.decoder_size or _DECODER_SIZE, "auxiliary_weight": weight}


_OTHERS_NAMES = re.compile(
    r"(?:google/|facebook/)?(?:vit|deit)[-_]?(ti|s|b|l|h|tiny|small|base|large|huge)(?:[-_](?:patch)?(14|16)\b.*|[-_]patch"
    r"(14|16).*)?",
    re.IGNORECASE,
)


def _meant(name: str) -> str:
    """What a name of timm's, torchvision's or the hub's comes to here, as a next step; empty where it is none."""
    if match := _OTHERS_NAMES.fullmatch(name):
        letter = match[1][0].lower()
        own = next((ours for ours in NAMED_MODELS if ours.startswith(f"vit-{letter}")), None)
        patch = match[2] or match[3]
        other_patch = f" with patch_size = {patch}" if own and patch and not own.endswith(patch) else ""
        return f'Write name = "{own}"{other_patch}, or hf = "..." for a configuration of the hub' if own else ""
    return ""


def _named_shape(spec: ModelSpec) -> dict[str, object]:
    shape = NAMED_MODELS.get(spec.name or "")
    if shape is None:
        raise unknown("model", spec.name, {*NAMED_MODELS, *names("model")}, next_step=_meant(spec.name or ""))
    own = SWIN_FIELDS if shape.depths else VIT_FIELDS
    for key in SHAPE_FIELDS:
        if key not in own and getattr(spec, key) is not None:
            what = f"model.{key} = {shown(getattr(spec, key))} has no meaning for {spec.name}"
            raise RequestError(what, valid=own, next_step=f"Remove {key}")
    filled = {key: getattr(spec, key) or getattr(shape, key, None) for key in own}
    return filled if shape.depths else filled | {"mlp_size": spec.mlp_size or 4 * (filled["hidden_size"] or 0)}


def _check_shape(spec: ModelSpec) -> None:
    patch = spec.patch_size
    segments = spec.task == "segmentation" and spec.name is not None
    if segments and spec.depths is not None and len(spec.depths) < _LEAST_STAGES:
        what = f"model.depths = {list(spec.depths)} makes {len(spec.depths)} feature maps, too few for UperNet"
        raise RequestError(what, valid=[f"{_LEAST_STAGES} stages or more"])
    if segments and spec.depths is None and patch is not None and spec.image_size < 2 * patch:
        what = f"model.image_size = {spec.image_size} is one patch, and a pyramid's smallest map has half its side"
        raise RequestError(what, valid=[f"{2 * patch} or more"])
    if patch is not None and spec.depths is not None:
        least = patch << (len(spec.depths) - 1)  # the library pads the rest
        if spec.image_size < least:
            raise RequestError(
                f"model.image_size = {spec.image_size} leaves nothing of an image for the last of "
                f"{len(spec.depths)} stages",
                valid=[f"{least} or more"],
                next_step="Use larger images, or fewer model.depths",
            )
    elif patch is not None and spec.image_size % patch:
        below = spec.image_size // patch * patch
        nearest = [size for size in (below, below + patch) if 0 < size <= 8192]
        what = f"model.image_size = {spec.image_size} is not divisible by patch_size = {patch}"
        raise RequestError(what, valid=nearest, next_step="Take one of these image sizes, or set model.patch_size")
    hidden, heads = spec.hidden_size, spec.heads
    if hidden is not None and heads is not None and hidden % heads:
        divisors = [n for n in range(1, min(hidden, 1024) + 1) if hidden % n == 0]
        raise RequestError(
            f"model.hidden_size = {hidden} is not divisible by heads = {heads}",
            valid=sorted(sorted(divisors, key=lambda n: abs(n - heads))[:4]),
            next_step="Take one of these numbers of heads, or another hidden_size",
        )


def _refuse_shape_fields(spec: ModelSpec, source: str, allowed: dict[str, int]) -> None:
    """Refuses a shape field whose value is not the one `source` itself fixes (`allowed`)."""
    for key in SHAPE_FIELDS:
        value = getattr(spec, key)
        if value is not None and value != allowed.get(key):
            fixed = f", which says {allowed[key]}" if key in allowed else ""
            raise RequestError(
                f"model.{key} = {value} cannot be set with model.{source}{fixed}",
                valid=["image_size", "num_classes"],
                next_step=f"Remove {key}, or use a named model",
            )


def _hf_fields(spec: ModelSpec) -> dict[str, object]:
    config = hf_shape(spec.hf or "")
    shape = {} if config is None else config.fields()
    _refuse_shape_fields(spec, "hf", shape)
    if config is None or "image_size" in spec.model_fields_set:
        return {**shape}
    return {**shape, "image_size": config.image_size}


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
    """A resolved ViT's, whatever stands on it; None of all else."""
    if spec.factory is not None or spec.unknown or spec.depths is not None:
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
    """A resolved Swin's; None of all else."""
    if spec.depths is None or spec.patch_size is None or spec.hidden_size is None or spec.heads is None:
        return None
    return SwinShape(
        spec.image_size, spec.channels, spec.patch_size, spec.hidden_size, spec.heads, spec.depths,
        spec.window_size or 0,
    )  # fmt: skip


_OWN_MAP = 2
"""Of a ViT's pyramid: the map of its own side."""


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
    decoder = decoder_shape(spec)
    return () if decoder is None else tuple(layer.norm for layer in model_counts.upernet_layers(decoder) if layer.norm)


class ParameterShapes(NamedTuple):
    """A model's trainable tensors by block, in the order in which a named model registers them."""

    blocks: tuple[Block, ...]
    wrapped_in_decoder: bool = False
    """Whether engines wrap a list of the decoder's convolutions, which has more parameters than that of the blocks."""

    def each(self) -> Iterator[Block]:
        """Every block by itself: like ones one after the other."""
        return (block for block in self.blocks for _ in range(block.repeats))

    def tensors(self) -> list[tuple[int, ...]]:
        """All shapes."""
        return [shape for block in self.each() for module in block.modules for shape in module.tensors]


def parameter_shapes(spec: ModelSpec) -> ParameterShapes | None:
    """The shapes of a resolved spec's trainable tensors; None where only building the model could tell."""
    return _shapes(swin_shape(spec), vit_shape(spec), decoder_shape(spec), spec.num_classes or 0)


@lru_cache(maxsize=256)
def _shapes(
    swin: SwinShape | None, vit: VitShape | None, decoder: DecoderShape | None, classes: int
) -> ParameterShapes | None:
    if swin is not None:
        blocks, width = model_counts.swin(swin), model_counts.stages(swin)[-1].width
    elif vit is not None:
        blocks, width = _vit_blocks(vit), vit.hidden
    else:
        return None
    norm = model_counts.norm(width)
    if decoder is None:
        return ParameterShapes((*blocks, model_counts.in_order([norm, model_counts.linear(width, classes, 1)])))
    before = [] if vit is None else [norm, *model_counts.pyramid(width, decoder.sides[_OWN_MAP])]
    wrapped = sum(block.repeats * block.elements for block in blocks if block.wrapped)
    return ParameterShapes(
        (*blocks, model_counts.upernet(decoder, before, auxiliary_first=vit is not None)),
        model_counts.upernet_lists(decoder) > wrapped,
    )


def _vit_blocks(s: VitShape) -> list[Block]:
    """Tokens, positions and patches; the blocks."""
    h, t = s.hidden, s.tokens
    patches = Module(
        ((h, s.channels, s.patch, s.patch), (h,)), (t - s.special_tokens) * s.channels * s.patch**2 * h, cast=True
    )
    embedding = [Module(((1, 1, h),) * s.special_tokens + ((1, t, h),)), patches]
    projections = [
        model_counts.linear(h, h, t, bias=s.qkv_bias, extra_macs=2 * t * t * h if values else 0)
        for values in (False, False, True)
    ]
    out, norm = model_counts.linear(h, h, t), model_counts.norm(h)
    mlp = (model_counts.linear(h, s.mlp, t), model_counts.linear(s.mlp, h, t))
    block = Block((*projections, out, norm, norm, *mlp), (4, 0, 1, 2, 3, 5, 6, 7), s.layers, wrapped=s.layers > 1)
    return [Block(tuple(embedding), (1, 0)), block]


def recorded_shapes(spec: ModelSpec) -> ParameterShapes | None:
    """The same of a recorded spec; None too where it was never resolved, or its configuration is not here any more: a
    record is input, and may hold anything."""
    try:
        return parameter_shapes(spec)
    except (ValueError, VitscaleError):
        return None


def parameters(spec: ModelSpec) -> int | None:
    """Trainable parameters of a resolved spec, or as an import's user told them; None where only building the model
    could tell."""
    shapes = parameter_shapes(spec)
    return spec.parameter_count if shapes is None else sum(block.repeats * block.elements for block in shapes.blocks)


_COUNT = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)\s*([kKmMgGbBtT]?)")
_THOUSANDS = {"": 0, "k": 1, "m": 2, "g": 3, "b": 3, "t": 4}


def counted(text: str) -> int:
    """The parameters of "110M", "1.3B" or "25557032".

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

    Of a ViT's block and token: 4h^2 MACs of projections, 2sh of attention (scores and values over s tokens), 2hm of the
    MLP. Plus the patch projection and the head: a classifier on the class token alone, or UperNet's convolutions.
    Biases, norms, GELU and softmax are left out, as in Kaplan et al. (2020), section 2.1, and torch's FlopCounterMode.
    """
    shapes = parameter_shapes(spec)
    if shapes is None:
        return None
    return 2 * sum(block.repeats * module.macs for block in shapes.blocks for module in block.modules)


def training_flops(spec: ModelSpec) -> int | None:
    """FLOPs of one image's forward and backward pass: 3 x forward; None where unknown."""
    forward = forward_flops(spec)
    return None if forward is None else 3 * forward


# Bytes an element saved for backward takes, and how many bytes more than that autocast keeps per token and unit of
# hidden size: the inputs of both norms stay in fp32 (2 x 2), and q, k and v each cast the first norm's output anew,
# which makes two copies more (2 x 2).
_SAVED_BYTES: dict[str, tuple[int, int]] = {"fp32": (4, 0), "bf16": (2, 8), "bf16-params": (2, 0), "fp16": (2, 8)}


def activation_bytes(spec: ModelSpec, micro_batch: int, precision: str) -> int | None:
    """Bytes kept for backward at `micro_batch` images by the blocks, and by UperNet; None where unknown.

    Of a ViT, with fused attention, per block and token 8h + 2m elements: the inputs of both layer norms (2h) and their
    outputs (2h), q, k, v (3h), the attention's output (h), the input and the output of GELU (2m). With m = 4h and s
    tokens this is `c * s * b * h * L` with c = 64 (fp32), 32 (bf16-params) and 40 (bf16, which is autocast; 36 where
    one product makes q, k and v). Left out: the statistics of norms and softmax (16 bytes + 4 per head), embedding,
    classifier and loss. Of Swin `model_counts.swin_kept_bytes`, of UperNet `model_counts.upernet_kept`.
    """
    if precision not in _SAVED_BYTES:
        raise unknown("precision", precision, _SAVED_BYTES)
    element_bytes, autocast_bytes = _SAVED_BYTES[precision]
    swin, s, decoder = swin_shape(spec), vit_shape(spec), decoder_shape(spec)
    if swin is not None:
        kept = model_counts.swin_kept_bytes(swin, precision)
    elif s is not None:
        kept = (element_bytes * (8 * s.hidden + 2 * s.mlp) + autocast_bytes * s.hidden) * s.tokens * s.layers
    else:
        return None
    if decoder is not None:
        kept += element_bytes * sum(layer.kept for layer in model_counts.upernet_layers(decoder))
        if s is not None:
            kept += model_counts.pyramid_kept_bytes(s.hidden, decoder.sides[_OWN_MAP], element_bytes)
    return kept * micro_batch
