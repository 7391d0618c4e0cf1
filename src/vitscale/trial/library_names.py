"""Names of models that timm and torchvision build: "timm/vit_base_patch16_224", "torchvision/vit_b_16".

Only what a name says of itself is read here. Whether the installed library has the model is looked up in
`study.library_models`, and the model is built in `models.libraries`.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple, cast

from vitscale.errors import RequestError

Library = Literal["timm", "torchvision"]
LIBRARIES: tuple[Library, ...] = ("timm", "torchvision")
IMAGE_SIZE = 224
"""Side in pixels of a model's images where neither the study nor its name says another."""


class LibraryName(NamedTuple):
    """A model of a library: "timm/vit_base_patch16_224.augreg_in1k" in parts."""

    library: Library
    model: str
    """ "vit_base_patch16_224"."""
    tag: str = ""
    """ "augreg_in1k", which names pretrained weights and changes nothing in the model; empty where there is none."""

    @property
    def without_tag(self) -> str:
        """The name as a study has it: "timm/vit_base_patch16_224"."""
        return f"{self.library}/{self.model}"


_LIBRARY_NAME = re.compile(r"(timm|torchvision)/(\w{1,100})(?:\.([\w.]{1,100}))?", re.ASCII)


def library_name(name: str) -> LibraryName | None:
    """Return the parts of a name of timm or torchvision; None for other names."""
    match = _LIBRARY_NAME.fullmatch(name)
    if match is None:
        return None
    return LibraryName(cast("Library", match[1]), match[2], match[3] or "")


_SIZE_AT_END = re.compile(r"(?:_|to)(\d{3,4})$")
_SMALLEST_SIZE = 192
"""Smaller numbers at the end of a timm name are widths: "mobilenetv3_large_100" is 100 % wide."""
_NUMBERS_OF_ANOTHER_KIND = re.compile(r"levit|mobilevit|regnet|repghostnet|rexnet")
"""Families whose names end with a width or with millions of operations: "levit_384", "regnety_320"."""


def default_image_size(name: LibraryName) -> int:
    """Return the side of the images for which a model is named: 384 for "timm/vit_base_patch16_384", else 224."""
    if name.library != "timm" or _NUMBERS_OF_ANOTHER_KIND.match(name.model):
        return IMAGE_SIZE
    number_at_end = _SIZE_AT_END.search(name.model)
    if number_at_end is None:
        return IMAGE_SIZE
    size = int(number_at_end[1])
    return size if size >= _SMALLEST_SIZE else IMAGE_SIZE


_MAXVIT_DIVISOR = 224
"""torchvision's MaxViT cuts the maps of all its stages, the last 1/32 of the image's side, into windows of 7."""
_TORCHVISION_VIT = re.compile(r"vit_[blh]_(\d+)")
"""The number is the side of its patches."""


def check_image_size(name: LibraryName, image_size: int) -> None:
    """Refuse an image size that a model of torchvision cannot take.

    Those of timm are left to the library, which pads or resizes in ways that names do not show.

    Raises:
        RequestError: the model does not take this size; the message names the nearest that it takes.
    """
    divisor = _size_divisor(name)
    if divisor is None or image_size % divisor == 0:
        return
    smaller_size = image_size // divisor * divisor
    larger_size = smaller_size + divisor
    raise RequestError(
        f"model.image_size = {image_size} is not divisible by {divisor}, as {name.without_tag} needs",
        valid=[size for size in (smaller_size, larger_size) if size > 0],
        next_step="Take one of these image sizes",
    )


def _size_divisor(name: LibraryName) -> int | None:
    """Return what a model's image size must be a multiple of, in pixels; None where it takes any size."""
    if name.library != "torchvision":
        return None
    if name.model == "maxvit_t":
        return _MAXVIT_DIVISOR
    vit = _TORCHVISION_VIT.fullmatch(name.model)
    return None if vit is None else int(vit[1])
