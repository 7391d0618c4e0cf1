"""The shape in a Hugging Face configuration on disk, read as plain JSON: no torch, no transformers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from vitscale.errors import RequestError, shown

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?", re.ASCII)
_LARGEST_CONFIG_BYTES = 1 << 20


class HfShape(BaseModel):
    """What counts in the config.json of a plain ViT or DeiT; defaults are those of transformers' ViTConfig."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore", protected_namespaces=())

    model_type: Literal["vit", "deit"]
    hidden_size: int = Field(default=768, ge=1, le=65_536)
    num_hidden_layers: int = Field(default=12, ge=1, le=1000)
    num_attention_heads: int = Field(default=12, ge=1, le=1024)
    intermediate_size: int = Field(default=3072, ge=1, le=1_000_000)
    image_size: int = Field(default=224, ge=1, le=8192)
    patch_size: int = Field(default=16, ge=1, le=1024)
    qkv_bias: bool = True

    @field_validator("image_size", "patch_size", mode="before")
    @classmethod
    def _square(cls, value: object) -> object:
        return value[0] if isinstance(value, list) and len(value) == 2 and value[0] == value[1] else value

    def fields(self) -> dict[str, int]:
        """The shape under the names of `ModelSpec`."""
        return {
            "patch_size": self.patch_size,
            "hidden_size": self.hidden_size,
            "layers": self.num_hidden_layers,
            "heads": self.num_attention_heads,
            "mlp_size": self.intermediate_size,
        }


def hf_shape(hf: str) -> HfShape | None:
    """The configuration in folder `hf`; None for a hub name, and for an architecture that is not counted here."""
    content = read_config(hf)
    # head_dim makes attention wider or narrower than hidden_size: such a model is built, but not counted.
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
