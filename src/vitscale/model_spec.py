"""Which model, and its parameter, FLOP and activation counts by arithmetic, without torch."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, model_validator


class ModelSpec(BaseModel):
    """A named vision transformer, a Hugging Face image-classification configuration, or the user's own factory."""

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
