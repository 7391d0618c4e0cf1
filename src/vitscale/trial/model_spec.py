"""Which model is trained: as the user wrote it, and `resolve`, which makes of that a spec that leaves nothing open.

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
from vitscale.trial.library_names import LibraryName, check_image_size, default_image_size, library_name

Task = Literal["classification", "segmentation"]

Depths = Annotated[
    tuple[Annotated[int, Field(ge=1, le=100)], ...],
    Field(min_length=1, max_length=8),
    BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value),
]


class ModelSpec(Spec):
    """A named ViT or Swin V2, a model of timm or torchvision, a Hugging Face configuration, or the user's own factory.

    With none of the three, an imported log does not say which model it was: every count is None, except the parameters
    where its user gave them.
    """

    task: Task = "classification"
    """What is labelled: each image, or each pixel. Named models of segmentation have UperNet's head."""
    name: Annotated[str | None, FieldTraits(curve_words="{}")] = None
    """One of `NAMED_MODELS`, or a model of timm or torchvision: "timm/vit_base_patch16_224", "torchvision/vit_b_16". A
    study may also write here what `hf` takes."""
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
    """Parameters of a model that nothing else counts: as an import's user gave them, or as the ranks counted them."""

    @property
    def unknown(self) -> bool:
        """Whether nothing says which model it is."""
        return self.name is None and self.hf is None and self.factory is None

    @property
    def library(self) -> LibraryName | None:
        """The model of timm or torchvision that it names; None for all others."""
        return None if self.name is None else library_name(self.name)

    @property
    def own_name(self) -> str | None:
        """The name where vitscale builds the model itself; None for models of timm, torchvision and all others."""
        return None if self.library is not None else self.name

    @property
    def blocks(self) -> int | None:
        """Number of blocks of a resolved ViT or Swin; None for other models."""
        return self.layers if self.depths is None else sum(self.depths)


class _NamedShape(NamedTuple):
    """The shape of a named model, by field names of `ModelSpec`."""

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
    """Return `spec` with every field filled that can be known here, so that a trial's identity holds real values.

    A named model gets its whole shape; `hf` gets the shape in its folder's config.json where that is a plain ViT or
    DeiT; `num_classes` comes from the dataset unless given. Resolving twice changes nothing.

    Args:
        spec: the model as the user wrote it.
        dataset_classes: number of the dataset's classes.
        channels: channels of the dataset's images, which the model always takes; None where they are not known here.

    Raises:
        RequestError: it cannot be built: the message names the bad value and the valid ones.
    """
    sources = [key for key in ("name", "hf", "factory") if getattr(spec, key) is not None]
    if len(sources) != 1:
        listed_sources = " and ".join(sources) if sources else "none of them"
        what = f"[model] needs exactly one of name, hf and factory; it has {listed_sources}"
        raise RequestError(what, valid=NAMED_MODELS)
    if spec.parameter_count is not None:
        raise RequestError("model.parameter_count is of imported logs alone", next_step="Remove it")
    filled: dict[str, object] = {
        "num_classes": _class_count(spec, dataset_classes),
        "channels": _channel_count(spec, channels),
    }
    library = spec.library
    if library is not None:
        filled |= _library_fields(spec, library)
    elif spec.name is not None:
        filled |= _named_shape(spec, spec.name)
    elif spec.hf is not None:
        filled |= _hf_fields(spec, spec.hf)
    else:
        _check_factory(spec, spec.factory or "")
    resolved = spec.model_copy(update=filled | _segmentation_fields(spec))
    _check_shape(resolved)
    return resolved


def _class_count(spec: ModelSpec, dataset_classes: int) -> int:
    """Return the number of classes that [model] sets, else that of the dataset.

    Raises:
        RequestError: the model has fewer classes than the dataset.
    """
    if spec.num_classes is None:
        return dataset_classes
    if spec.num_classes < dataset_classes:
        what = f"model.num_classes = {spec.num_classes} is fewer than the dataset's {dataset_classes} classes"
        raise RequestError(what, next_step="Leave num_classes out to take the dataset's count")
    return spec.num_classes


def _channel_count(spec: ModelSpec, channels: int | None) -> int:
    """Return the channels of the dataset's images, `channels`; where that is None, those that [model] has.

    Raises:
        RequestError: the user sets another number of channels than the images have.
    """
    if channels is None:
        return spec.channels
    is_set_by_hand = "channels" in spec.model_fields_set
    if is_set_by_hand and spec.channels != channels:
        what = f"model.channels = {spec.channels}, and the images have {channels}"
        raise RequestError(what, next_step="Remove it: the model takes what data.channels says")
    return channels


_LONGEST_FACTORY = 500


def _check_factory(spec: ModelSpec, factory: str) -> None:
    """Refuse a factory that is no "module:function", and fields of the model's shape beside it."""
    _refuse_shape_fields(spec, "factory", fixed_shape={})
    if len(factory) > _LONGEST_FACTORY or not _FACTORY.fullmatch(factory):
        what = f"model.factory {shown(factory)} is not of the form 'module:function'"
        raise RequestError(what, next_step="Name an importable function, such as 'my_models.vit:build'")


_LEAST_STAGES = 3
_DECODER_SIZE = 512
_AUXILIARY_WEIGHT = 0.4


def _segmentation_fields(spec: ModelSpec) -> dict[str, object]:
    """Return the fields of segmentation, filled in; none for classification.

    Raises:
        RequestError: a field has no meaning for the task or the model, or the model has no segmentation head.
    """
    is_segmentation = spec.task == "segmentation"
    if spec.decoder_size is not None and not (is_segmentation and spec.own_name is not None):
        raise _meaningless_field("decoder_size", spec.decoder_size, owner="a named model of segmentation")
    if spec.auxiliary_weight is not None and not is_segmentation:
        raise _meaningless_field("auxiliary_weight", spec.auxiliary_weight, owner='model.task = "segmentation"')
    if not is_segmentation:
        return {}
    if spec.library is not None:
        raise RequestError(
            f"model.name = {shown(spec.name)} classifies images, and has no segmentation head",
            next_step="Name a vit-* or swinv2-* model, or a configuration of dinov2, swin, convnext, beit or segformer",
        )
    if spec.hf is not None and hf_shape(spec.hf) is not None:
        raise RequestError(
            f"model.hf {shown(spec.hf)} is a plain ViT, which transformers has no segmentation head for",
            next_step="Name a vit-* model, whose pyramid is vitscale's own, or a configuration of upernet, beit, "
            "dpt or segformer",
        )
    if spec.own_name is None:
        return {}
    auxiliary_weight = _AUXILIARY_WEIGHT if spec.auxiliary_weight is None else spec.auxiliary_weight
    return {"decoder_size": spec.decoder_size or _DECODER_SIZE, "auxiliary_weight": auxiliary_weight}


def _meaningless_field(key: str, value: object, *, owner: str) -> RequestError:
    """Return the error for a field that has a meaning only for other models, which `owner` names in words."""
    return RequestError(f"model.{key} = {value} is of {owner} alone", next_step=f"Remove {key}")


_NAMES_ELSEWHERE = re.compile(
    r"(?:google/|facebook/)?(?:vit|deit)[-_]?(ti|s|b|l|h|tiny|small|base|large|huge)"
    r"(?:[-_/]?(?:patch)?(8|14|16|32)(?:\D.*)?)?",
    re.IGNORECASE,
)


def _step_for_name(name: str) -> str:
    """Return what to write for a name that timm, torchvision or the hub have for a model; empty where it is not known.

    Example: for "vit_base_patch32_224" 'Write name = "vit-b16" with patch_size = 32, or ...'.
    """
    match = _NAMES_ELSEWHERE.fullmatch(name)
    if match is None:
        return meant_value("model.name", name)
    size_letter = match[1][0].lower()  # "b" for "base"
    patch_size = match[2]  # "32"; None where the name has none
    for named_model in NAMED_MODELS:
        if named_model.startswith(f"vit-{size_letter}"):
            has_other_patch = patch_size is not None and not named_model.endswith(patch_size)
            addition = f" with patch_size = {patch_size}" if has_other_patch else ""
            return f'Write name = "{named_model}"{addition}, or hf = "..." for a configuration of the hub'
    return ""


def _named_shape(spec: ModelSpec, name: str) -> dict[str, object]:
    """Return the shape of a named model by field, with the user's values in place of its own.

    Raises:
        RequestError: there is no such model, or a field has no meaning for it.
    """
    shape = NAMED_MODELS.get(name)
    if shape is None:
        raise unknown("model", name, {*NAMED_MODELS, *names("model")}, next_step=_step_for_name(name))
    is_swin = shape.depths is not None
    shape_fields = SWIN_FIELDS if is_swin else VIT_FIELDS
    for key in SHAPE_FIELDS:
        value = getattr(spec, key)
        if value is not None and key not in shape_fields:
            what = f"model.{key} = {shown(value)} has no meaning for {name}"
            raise RequestError(what, valid=shape_fields, next_step=f"Remove {key}")
    filled = {key: getattr(spec, key) or getattr(shape, key, None) for key in shape_fields}
    if not is_swin:
        hidden_size = spec.hidden_size or shape.hidden_size
        filled["mlp_size"] = spec.mlp_size or 4 * hidden_size
    return filled


def _library_fields(spec: ModelSpec, name: LibraryName) -> dict[str, object]:
    """Return the image size for which a model of timm or torchvision is named, unless the user sets another.

    Raises:
        RequestError: the user sets a field of the shape, which the name fixes.
    """
    _refuse_shape_fields(spec, "name", fixed_shape={})
    if "image_size" in spec.model_fields_set:
        return {}
    return {"image_size": default_image_size(name)}


def _check_shape(spec: ModelSpec) -> None:
    """Refuse sizes of a resolved model that do not go together."""
    if spec.library is not None:
        check_image_size(spec.library, spec.image_size)
    if spec.task == "segmentation" and spec.own_name is not None:
        _check_feature_maps(spec)
    if spec.patch_size is not None:
        _check_image_size(spec, spec.patch_size)
    if spec.hidden_size is not None and spec.heads is not None:
        _check_heads(spec.hidden_size, spec.heads)


def _check_feature_maps(spec: ModelSpec) -> None:
    """Refuse a named model whose feature maps are too few or too small for UperNet."""
    if spec.depths is not None:
        if len(spec.depths) < _LEAST_STAGES:
            what = f"model.depths = {list(spec.depths)} makes {len(spec.depths)} feature maps, too few for UperNet"
            raise RequestError(what, valid=[f"{_LEAST_STAGES} stages or more"])
    elif spec.patch_size is not None and spec.image_size < 2 * spec.patch_size:
        what = f"model.image_size = {spec.image_size} is one patch, and a pyramid's smallest map has half its side"
        raise RequestError(what, valid=[f"{2 * spec.patch_size} or more"])


_LARGEST_IMAGE = 8192


def _check_image_size(spec: ModelSpec, patch_size: int) -> None:
    """Refuse images of which a Swin's last stage has no token, or that a ViT's patches do not fill."""
    image_size = spec.image_size
    if spec.depths is not None:
        # Each further stage joins two tokens a side into one; transformers pads the rest.
        stage_count = len(spec.depths)
        pixels_per_token: int = patch_size * 2 ** (stage_count - 1)  # a side, in the last stage
        if image_size < pixels_per_token:
            raise RequestError(
                f"model.image_size = {image_size} leaves nothing of an image for the last of {stage_count} stages",
                valid=[f"{pixels_per_token} or more"],
                next_step="Use larger images, or fewer model.depths",
            )
    elif image_size % patch_size:
        below = image_size // patch_size * patch_size
        nearest = [size for size in (below, below + patch_size) if 0 < size <= _LARGEST_IMAGE]
        what = f"model.image_size = {image_size} is not divisible by patch_size = {patch_size}"
        raise RequestError(what, valid=nearest, next_step="Take one of these image sizes, or set model.patch_size")


_MOST_HEADS = 1024


def _check_heads(hidden_size: int, heads: int) -> None:
    """Refuse heads that do not divide the width, and name the four nearest numbers of heads that do."""
    if hidden_size % heads == 0:
        return
    most_heads = min(hidden_size, _MOST_HEADS)
    divisors = [count for count in range(1, most_heads + 1) if hidden_size % count == 0]
    nearest_first = sorted(divisors, key=lambda count: abs(count - heads))
    raise RequestError(
        f"model.hidden_size = {hidden_size} is not divisible by heads = {heads}",
        valid=sorted(nearest_first[:4]),
        next_step="Take one of these numbers of heads, or another hidden_size",
    )


def _refuse_shape_fields(spec: ModelSpec, source: str, *, fixed_shape: dict[str, int]) -> None:
    """Refuse a shape field that the user sets although another field fixes the shape, unless both agree.

    Args:
        spec: the model as the user wrote it.
        source: the field that fixes the shape: "hf", "factory", or "name" with a model of timm or torchvision.
        fixed_shape: the shape, as far as it is known, by field.
    """
    for key in SHAPE_FIELDS:
        value = getattr(spec, key)
        if value is not None and value != fixed_shape.get(key):
            conflict = f", which says {fixed_shape[key]}" if key in fixed_shape else ""
            library_model = f" = {shown(spec.name)}" if source == "name" else ""
            raise RequestError(
                f"model.{key} = {shown(value)} cannot be set with model.{source}{library_model}{conflict}",
                valid=["image_size", "num_classes"],
                next_step=f"Remove {key}, or use a named model",
            )


def _hf_fields(spec: ModelSpec, hf: str) -> dict[str, object]:
    """Return the shape in a Hugging Face configuration by field, with its image size unless the user sets one."""
    config = hf_shape(hf)
    shape = {} if config is None else config.fields()
    _refuse_shape_fields(spec, "hf", fixed_shape=shape)
    is_image_size_set = "image_size" in spec.model_fields_set
    if config is None or is_image_size_set:
        return {**shape}
    return {**shape, "image_size": config.image_size}


def fields_named(name: str, next_step: str = "Or give the folder of a Hugging Face model") -> dict[str, Any]:
    """Return the field of a `ModelSpec` that a user's word for a model means.

    It is a name here, a name of timm or torchvision with the library in front, or a Hugging Face folder.

    Raises:
        RequestError: it is none of them.
    """
    if name in NAMED_MODELS:
        return {"name": name}
    library_model = library_name(name)
    if library_model is not None:
        return {"name": library_model.without_tag}
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
    def _side_of_square(cls, value: object) -> object:
        """Read [224, 224] as 224; other pairs stay, and are refused."""
        if isinstance(value, list) and len(value) == 2 and value[0] == value[1]:
            return value[0]
        return value

    def fields(self) -> dict[str, int]:
        """Return the shape by field names of `ModelSpec`."""
        return {key: getattr(self, key) for key in VIT_FIELDS}


def hf_shape(hf: str) -> HfShape | None:
    """Return the shape in the configuration of folder `hf`.

    Return None for a name on the hub, and for an architecture whose parameters vitscale cannot count.

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
    """Return the content of config.json in folder `hf`, or None where `hf` is a hub name and no folder.

    Raises:
        RequestError: `hf` is neither, or the file is missing, above 1 MiB or no JSON object.
    """
    try:
        folder = Path(hf).expanduser()
        if not folder.is_dir():
            if _HUB_NAME.fullmatch(hf):
                return None
            raise _unusable_hf(hf, "is neither a folder nor a name on the hub")
        path = folder / "config.json"
        if not path.is_file():
            raise _unusable_hf(hf, "has no file config.json")
        with path.open("rb") as file:
            text = file.read(_LARGEST_CONFIG_BYTES + 1)
        content = json.loads(text) if len(text) <= _LARGEST_CONFIG_BYTES else None
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: no home folder, or nested too deeply
        problem = f"cannot be read: {type(error).__name__}: {str(error)[:200]}"
        raise _unusable_hf(hf, problem) from None
    if not isinstance(content, dict):
        raise _unusable_hf(hf, "has a config.json that is no JSON object of at most 1 MiB")
    return content


def _unusable_hf(hf: str, problem: str) -> RequestError:
    next_step = "Name a folder with an image-classification config.json, or a model of the hub"
    return RequestError(f"model.hf {shown(hf)} {problem}", next_step=next_step)
