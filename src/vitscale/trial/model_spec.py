"""Which model is trained: the user's words, and `resolve`, which turns them into a spec that leaves nothing open.

The shape in a Hugging Face configuration on disk is read as plain JSON: no torch, no transformers.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator

from vitscale.base.plugins import names
from vitscale.errors import RequestError, shown, unknown
from vitscale.trial.fields import FieldTraits, Spec
from vitscale.trial.hints import meant_value

Task = Literal["classification", "segmentation"]

Depths = Annotated[
    tuple[Annotated[int, Field(ge=1, le=100)], ...],
    Field(min_length=1, max_length=8),
    BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value),
]


class ModelSpec(Spec):
    """A named ViT or Swin V2, a Hugging Face configuration, or the user's own factory.

    With none of the three, an imported log does not say which model it was: every count is None, except the parameters
    where its user gave them.
    """

    task: Task = "classification"
    """What is labelled: each image, or each pixel. Named models of segmentation have UperNet's head."""
    name: Annotated[str | None, FieldTraits(curve_words="{}")] = None
    """One of `NAMED_MODELS`."""
    hf: str | None = None
    """Folder or hub name of a configuration for the task; weights start random unless `weights` names some."""
    factory: str | None = None
    """ "module:function", called with `num_classes` and `image_size`, and with `channels` where it takes them."""
    image_size: int = Field(default=224, ge=1, le=8192)
    """Side in pixels of the images that the model sees; others are resized on the device."""
    patch_size: int | None = Field(default=None, ge=1, le=1024)
    """Side in pixels of a patch; null takes that of the named model."""
    num_classes: int | None = Field(default=None, ge=1, le=10_000_000)
    """Number of classes; null takes the dataset's."""
    channels: int = Field(default=3, ge=1, le=4096)
    """Channels of an image; always the dataset's."""
    hidden_size: int | None = Field(default=None, ge=1, le=65_536)
    """Width; in Swin that of the first stage. Each further stage has twice the width and twice the `heads`."""
    layers: int | None = Field(default=None, ge=1, le=1000)
    """Number of blocks of a ViT."""
    heads: int | None = Field(default=None, ge=1, le=1024)
    """Number of attention heads; in Swin that of the first stage."""
    mlp_size: int | None = Field(default=None, ge=1, le=1_000_000)
    """Width inside a ViT's MLP; null takes 4 x hidden_size, as all named models have it."""
    depths: Depths | None = None
    """Number of blocks in each stage of a Swin."""
    window_size: int | None = Field(default=None, ge=1, le=1024)
    """Tokens along the side of a Swin's window."""
    decoder_size: int | None = Field(default=None, ge=1, le=65_536)
    """Channels inside the segmentation head of a named model; null takes 512. The auxiliary head has half as many."""
    auxiliary_weight: float | None = Field(default=None, ge=0.0, le=100.0)
    """Weight of the auxiliary head's loss in segmentation; 0 removes the head. Null: 0.4, or the configuration's."""
    weights: str | None = None
    """Folder or hub name of a pretrained model of the same body; heads of other classes do not take its weights."""

    parameter_count: int | None = Field(default=None, ge=1, le=10**14)
    """Parameters of an imported log's model of which nothing else is known."""

    @property
    def unknown(self) -> bool:
        """Whether nothing says which model it is."""
        return self.name is None and self.hf is None and self.factory is None

    @property
    def blocks(self) -> int | None:
        """Number of blocks of a resolved ViT or Swin; None for other models."""
        return self.layers if self.depths is None else sum(self.depths)


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
    """Fills every field of `spec` that can be known here, so that a trial's identity holds real values.

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
    r"(?:google/|facebook/)?(?:vit|deit)[-_]?(ti|s|b|l|h|tiny|small|base|large|huge)"
    r"(?:[-_/]?(?:patch)?(8|14|16|32)(?:\D.*)?)?",
    re.IGNORECASE,
)


def _meant(name: str) -> str:
    """The next step for a name of timm's, torchvision's or the hub's; empty where the name is not recognised."""
    if match := _OTHERS_NAMES.fullmatch(name):
        letter = match[1][0].lower()
        own = next((ours for ours in NAMED_MODELS if ours.startswith(f"vit-{letter}")), None)
        patch = match[2]
        other_patch = f" with patch_size = {patch}" if own and patch and not own.endswith(patch) else ""
        return f'Write name = "{own}"{other_patch}, or hf = "..." for a configuration of the hub' if own else ""
    return meant_value("model.name", name)


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
        least = patch << (len(spec.depths) - 1)  # transformers pads the rest
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
    """Refuses a shape field whose value differs from the one that `source` fixes (`allowed`)."""
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


def fields_named(name: str, next_step: str = "Or give the folder of a Hugging Face model") -> dict[str, Any]:
    """The field of a `ModelSpec` that a user's word for a model means: a name here, or a Hugging Face folder.

    Raises:
        RequestError: it is neither.
    """
    if name in NAMED_MODELS:
        return {"name": name}
    try:
        if Path(name).is_dir():
            return {"hf": name}
    except (OSError, ValueError):  # a NUL in it, or a name too long
        pass
    raise unknown("model", name, NAMED_MODELS, next_step)


_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?", re.ASCII)
_LARGEST_CONFIG_BYTES = 1 << 20


class HfShape(BaseModel):
    """The relevant keys of the config.json of a plain ViT or DeiT, whose own names for them are the aliases; defaults
    are those of transformers' ViTConfig."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore", protected_namespaces=())

    model_type: Literal["vit", "deit"]
    hidden_size: int = Field(default=768, ge=1, le=65_536)
    layers: int = Field(default=12, ge=1, le=1000, alias="num_hidden_layers")
    heads: int = Field(default=12, ge=1, le=1024, alias="num_attention_heads")
    mlp_size: int = Field(default=3072, ge=1, le=1_000_000, alias="intermediate_size")
    image_size: int = Field(default=224, ge=1, le=8192)
    patch_size: int = Field(default=16, ge=1, le=1024)
    qkv_bias: bool = True

    @field_validator("image_size", "patch_size", mode="before")
    @classmethod
    def _square(cls, value: object) -> object:
        return value[0] if isinstance(value, list) and len(value) == 2 and value[0] == value[1] else value

    def fields(self) -> dict[str, int]:
        """The shape by field names of `ModelSpec`."""
        return {key: getattr(self, key) for key in VIT_FIELDS}


def hf_shape(hf: str) -> HfShape | None:
    """The configuration in folder `hf`; None for a hub name, and for an architecture that is not counted here.

    Raises:
        RequestError: a field of config.json cannot be used.
    """
    content = read_config(hf)
    # head_dim makes attention wider or narrower than hidden_size: such models are built, but not counted.
    if content is None or content.get("model_type") not in ("vit", "deit") or "head_dim" in content:
        return None
    try:
        return HfShape.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise RequestError(
            f"model.hf {shown(hf)}: {key} = {shown(first['input'])} in config.json cannot be used: {first['msg']}"
        ) from None


def read_config(hf: str) -> dict[str, Any] | None:
    """The content of config.json in folder `hf`, or None where `hf` is a hub name and no folder.

    Raises `RequestError` where `hf` is neither, and where the file is missing, above 1 MiB or no JSON object.
    """
    problem = ""
    try:
        folder = Path(hf).expanduser()
        if not folder.is_dir():
            if _HUB_NAME.fullmatch(hf):
                return None
            problem = "is neither a folder nor a name on the hub"
        elif not (folder / "config.json").is_file():
            problem = "has no file config.json"
        else:
            with (folder / "config.json").open("rb") as file:
                text = file.read(_LARGEST_CONFIG_BYTES + 1)
            content = json.loads(text) if len(text) <= _LARGEST_CONFIG_BYTES else None
            if isinstance(content, dict):
                return content
            problem = "has a config.json that is no JSON object of at most 1 MiB"
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: no home folder, or nested too deeply
        problem = f"cannot be read: {type(error).__name__}: {str(error)[:200]}"
    what = f"model.hf {shown(hf)} {problem}"
    raise RequestError(what, next_step="Name a folder with an image-classification config.json, or a model of the hub")
