"""Which model, and its parameter, FLOP and activation counts by arithmetic, without torch.

`resolve` turns what a user wrote into a spec that leaves nothing open; the counts take only resolved specs and are held
against the real models by tests. A count that cannot be known without building the model is None, never 0.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from vitscale.errors import RequestError, explain, shown, unknown
from vitscale.hf_config import hf_shape


class ModelSpec(BaseModel):
    """A named vision transformer, a Hugging Face image-classification configuration, or the user's own factory.

    None of the three: an imported log does not say which model it was, and every count of it is None.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    name: str | None = None
    """vit-ti16, vit-s16, vit-b16, vit-l16 or vit-h14."""
    hf: str | None = None
    """Folder or hub name of an image-classification configuration; weights start random."""
    factory: str | None = None
    """"module:function", called with `num_classes` and `image_size`."""
    image_size: int = Field(default=224, ge=1, le=8192)
    patch_size: int | None = Field(default=None, ge=1, le=1024)
    num_classes: int | None = Field(default=None, ge=1, le=10_000_000)
    """Null takes the dataset's count."""
    hidden_size: int | None = Field(default=None, ge=1, le=65_536)
    layers: int | None = Field(default=None, ge=1, le=1000)
    heads: int | None = Field(default=None, ge=1, le=1024)
    mlp_size: int | None = Field(default=None, ge=1, le=1_000_000)
    """Width inside the MLP; null takes 4 x hidden_size, as all five named models have it."""

    @property
    def unknown(self) -> bool:
        """Whether nothing says which model it is."""
        return self.name is None and self.hf is None and self.factory is None


class _NamedShape(NamedTuple):
    patch_size: int
    hidden_size: int
    layers: int
    heads: int


# B, L and H: Dosovitskiy et al., "An Image is Worth 16x16 Words" (ICLR 2021), table 1. Ti and S: Touvron et al.,
# "Training data-efficient image transformers" (ICML 2021), table 1, here without the distillation token.
NAMED_MODELS: dict[str, _NamedShape] = {
    "vit-ti16": _NamedShape(16, 192, 12, 3),
    "vit-s16": _NamedShape(16, 384, 12, 6),
    "vit-b16": _NamedShape(16, 768, 12, 12),
    "vit-l16": _NamedShape(16, 1024, 24, 16),
    "vit-h14": _NamedShape(14, 1280, 32, 16),
}

SHAPE_FIELDS = ("patch_size", "hidden_size", "layers", "heads", "mlp_size")

_IDENTIFIER = r"[^\W\d]\w*"
_FACTORY = re.compile(rf"{_IDENTIFIER}(\.{_IDENTIFIER})*:{_IDENTIFIER}")


def resolve(spec: ModelSpec, dataset_classes: int) -> ModelSpec:
    """`spec` with every field filled that can be known here, so that a trial's identity holds real values.

    A named model gets its whole shape; `hf` gets the shape in its folder's config.json where that is a plain ViT or
    DeiT; `num_classes` comes from the dataset unless given. Resolving twice changes nothing.

    Raises `RequestError` for anything that cannot be built: the message names the bad value and the valid ones.
    """
    given = [key for key in ("name", "hf", "factory") if getattr(spec, key) is not None]
    if len(given) != 1:
        got = " and ".join(given) if given else "none of them"
        raise RequestError(
            explain(f"[model] needs exactly one of name, hf and factory; it has {got}", valid=NAMED_MODELS)
        )
    classes = dataset_classes if spec.num_classes is None else spec.num_classes
    if classes < dataset_classes:
        raise RequestError(
            explain(
                f"model.num_classes = {classes} is fewer than the dataset's {dataset_classes} classes",
                next_step="Leave num_classes out to take the dataset's count",
            )
        )
    filled: dict[str, int] = {"num_classes": classes}
    if spec.name is not None:
        filled |= _named_shape(spec)
    elif spec.hf is not None:
        filled |= _hf_fields(spec)
    else:
        _refuse_shape_fields(spec, "factory", {})
        if not _FACTORY.fullmatch(spec.factory or "") or len(spec.factory or "") > 500:
            raise RequestError(
                explain(
                    f"model.factory {shown(spec.factory)} is not of the form 'module:function'",
                    next_step="Name an importable function, such as 'my_models.vit:build'",
                )
            )
    resolved = spec.model_copy(update=filled)
    _check_shape(resolved)
    return resolved


def _named_shape(spec: ModelSpec) -> dict[str, int]:
    shape = NAMED_MODELS.get(spec.name or "")
    if shape is None:
        raise unknown("model", spec.name, NAMED_MODELS)
    filled = {key: getattr(spec, key) or value for key, value in shape._asdict().items()}
    return filled | {"mlp_size": spec.mlp_size or 4 * filled["hidden_size"]}


def _check_shape(spec: ModelSpec) -> None:
    patch = spec.patch_size
    if patch is not None and spec.image_size % patch:
        below = spec.image_size // patch * patch
        nearest = [size for size in (below, below + patch) if 0 < size <= 8192]
        raise RequestError(
            explain(
                f"model.image_size = {spec.image_size} is not divisible by patch_size = {patch}",
                valid=nearest,
                next_step="Take one of these image sizes, or set model.patch_size",
            )
        )
    hidden, heads = spec.hidden_size, spec.heads
    if hidden is not None and heads is not None and hidden % heads:
        divisors = [n for n in range(1, min(hidden, 1024) + 1) if hidden % n == 0]
        raise RequestError(
            explain(
                f"model.hidden_size = {hidden} is not divisible by heads = {heads}",
                valid=sorted(sorted(divisors, key=lambda n: abs(n - heads))[:4]),
                next_step="Take one of these numbers of heads, or another hidden_size",
            )
        )


def _refuse_shape_fields(spec: ModelSpec, source: str, allowed: dict[str, int]) -> None:
    """Refuses a shape field whose value is not the one `source` itself fixes (`allowed`)."""
    for key in SHAPE_FIELDS:
        value = getattr(spec, key)
        if value is not None and value != allowed.get(key):
            fixed = f", which says {allowed[key]}" if key in allowed else ""
            raise RequestError(
                explain(
                    f"model.{key} = {value} cannot be set with model.{source}{fixed}",
                    valid=["image_size", "num_classes"],
                    next_step=f"Remove {key}, or use a named model",
                )
            )


def _hf_fields(spec: ModelSpec) -> dict[str, int]:
    config = hf_shape(spec.hf or "")
    shape = {} if config is None else config.fields()
    _refuse_shape_fields(spec, "hf", shape)
    if config is None or "image_size" in spec.model_fields_set:
        return shape
    return shape | {"image_size": config.image_size}


class _Shape(NamedTuple):
    """All that the counts need; sizes in elements."""

    tokens: int
    special_tokens: int
    patch_inputs: int
    hidden: int
    layers: int
    mlp: int
    classes: int
    qkv_bias: bool


def _shape(spec: ModelSpec) -> _Shape | None:
    if spec.factory is not None or spec.unknown:
        return None
    special_tokens, qkv_bias = 1, True
    if spec.hf is not None:
        config = hf_shape(spec.hf)
        if config is None:
            return None
        special_tokens, qkv_bias = (2 if config.model_type == "deit" else 1), config.qkv_bias
    sizes = [getattr(spec, key) for key in (*SHAPE_FIELDS, "num_classes")]
    if None in sizes:
        raise ValueError("counts need a resolved spec: call resolve(spec, dataset_classes) first")
    patch, hidden, layers, _, mlp, classes = sizes
    patches = (spec.image_size // patch) ** 2
    return _Shape(patches + special_tokens, special_tokens, 3 * patch * patch, hidden, layers, mlp, classes, qkv_bias)


class ParameterShapes(NamedTuple):
    """Shapes of a model's trainable tensors in the order in which a named model holds them."""

    embedding: tuple[tuple[int, ...], ...]
    block: tuple[tuple[int, ...], ...]
    """Of one of `layers` like blocks."""
    layers: int
    head: tuple[tuple[int, ...], ...]
    """The last norm and the classifier."""


def parameter_shapes(spec: ModelSpec) -> ParameterShapes | None:
    """The shapes of a resolved spec's trainable tensors; None where only building the model could tell."""
    s = _shape(spec)
    if s is None:
        return None
    h, m = s.hidden, s.mlp
    side = math.isqrt(s.patch_inputs // 3)
    tokens = ((1, 1, h),) * s.special_tokens + ((1, s.tokens, h),)
    projection = ((h, h), (h,)) if s.qkv_bias else ((h, h),)
    block = 3 * projection + ((h, h), (h,)) + 4 * ((h,),) + ((m, h), (m,), (h, m), (h,))
    return ParameterShapes(
        embedding=(*tokens, (h, 3, side, side), (h,)),
        block=block,
        layers=s.layers,
        head=((h,), (h,), (s.classes, h), (s.classes,)),
    )


def recorded_shapes(spec: ModelSpec) -> ParameterShapes | None:
    """The same of a recorded spec; None too where it was never resolved: a record is input, and may hold anything."""
    try:
        return parameter_shapes(spec)
    except ValueError:
        return None


def parameters(spec: ModelSpec) -> int | None:
    """Trainable parameters of a resolved spec; None where only building the model could tell.

    Per block: two layer norms (2 x 2h), attention (4h^2 + 4h with biases) and the MLP (2hm + m + h).
    """
    shapes = parameter_shapes(spec)
    if shapes is None:
        return None
    once = sum(map(math.prod, shapes.embedding + shapes.head))
    return once + shapes.layers * sum(map(math.prod, shapes.block))


def forward_flops(spec: ModelSpec) -> int | None:
    """FLOPs of one image's forward pass (1 MAC = 2 FLOP), matrix products only; None where unknown.

    Per block and token: 4h^2 MACs of projections, 2sh of attention (scores and values over s tokens), 2hm of the MLP.
    Plus the patch projection and, on the class token alone, the classifier. Biases, norms, GELU and softmax are left
    out, as in Kaplan et al. (2020), section 2.1, and torch's FlopCounterMode.
    """
    s = _shape(spec)
    if s is None:
        return None
    h, t = s.hidden, s.tokens
    patch_macs = (t - s.special_tokens) * s.patch_inputs * h
    block_macs = t * (4 * h * h + 2 * t * h + 2 * h * s.mlp)
    return 2 * (patch_macs + s.layers * block_macs + h * s.classes)


def training_flops(spec: ModelSpec) -> int | None:
    """FLOPs of one image's forward and backward pass: 3 x forward; None where unknown."""
    forward = forward_flops(spec)
    return None if forward is None else 3 * forward


# Bytes an element saved for backward takes, and how many bytes more than that autocast keeps per token and unit of
# hidden size: the inputs of both norms stay in fp32 (2 x 2), and q, k and v each cast the first norm's output anew,
# which makes two copies more (2 x 2).
_SAVED_BYTES: dict[str, tuple[int, int]] = {
    "fp32": (4, 0),
    "bf16": (2, 8),
    "bf16-params": (2, 0),
    "fp16": (2, 8),
}


def activation_bytes(spec: ModelSpec, micro_batch: int, precision: str) -> int | None:
    """Bytes the blocks keep for backward at `micro_batch` images with fused attention; None where unknown.

    Per block and token 8h + 2m elements: the inputs of both layer norms (2h) and their outputs (2h), q, k, v (3h), the
    attention's output (h), the input and the output of GELU (2m). With m = 4h and s tokens this is `c * s * b * h * L`
    with c = 64 (fp32), 32 (bf16-params) and 40 (bf16, which is autocast; 36 where one product makes q, k and v). Left
    out: the statistics of norms and softmax (16 bytes + 4 per head), embedding and head.
    """
    if precision not in _SAVED_BYTES:
        raise unknown("precision", precision, _SAVED_BYTES)
    s = _shape(spec)
    if s is None:
        return None
    element_bytes, autocast_bytes = _SAVED_BYTES[precision]
    token_bytes = element_bytes * (8 * s.hidden + 2 * s.mlp) + autocast_bytes * s.hidden
    return token_bytes * s.tokens * micro_batch * s.layers
