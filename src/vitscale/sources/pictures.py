"""Pictures of common formats: whether one is whole, and its pixels as a square of a given side."""

from __future__ import annotations

import functools
import importlib
import io
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from vitscale.errors import RequestError, explain, shown
from vitscale.sources.base import Content, Images, reason, spending

if TYPE_CHECKING:
    from PIL.Image import Image

EXTENSIONS = {
    ".jpg": "JPEG",
    ".jpeg": "JPEG",
    ".jpe": "JPEG",
    ".jfif": "JPEG",
    ".png": "PNG",
    ".bmp": "BMP",
    ".webp": "WEBP",
    ".gif": "GIF",
    ".tif": "TIFF",
    ".tiff": "TIFF",
    ".ppm": "PPM",
    ".pgm": "PPM",
}
"""Extension -> Pillow's name of the format. The only formats read: some of Pillow's others start programs."""

MOST_PIXELS = 100_000_000
"""Most pixels of a picture; more are refused before decoding: a file of a few kilobytes may claim to hold terabytes."""
_MOST_BYTES_AT_ONCE = 100_000_000
"""Largest file that is read whole before decoding; its decoder reads a larger one."""
_TAIL_BYTES = 4096
_JPEG = b"\xff\xd8\xff"
_END_MARKS = {"JPEG": b"\xff\xd9", "PNG": b"IEND"}


def verify_picture(content: Content, name: str = "") -> tuple[int, int]:
    """Width and height of a picture, checked to be whole as far as is cheap.

    Raises:
        RequestError: it is broken; names the file.
    """
    with _opened(content, name) as image:
        mark = _END_MARKS.get(image.format or "")
        # A file without its end mark may still be good, with other data behind: only decoding tells.
        if mark is not None and mark not in _tail(content):
            image.load()
        return image.width, image.height


def decode_square(content: Content, side: int, channels: int = 3, name: str = "", *, deep: bool = False) -> Images:
    """Pixels uint8 `[side, side, channels]`: the centre square, scaled with an antialiasing bilinear filter.

    The same as scaling the short side to `side` and cropping the centre, without the scaled long side in memory.

    Args:
        content: path of the file, or its bytes.
        side: side of the square in pixels.
        channels: 1 (grey) or 3 (RGB).
        name: name of the file in messages; by default its path.
        deep: whether grey of 16 bits keeps them, as float32, instead of its upper 8.

    Raises:
        RequestError: it is broken, or `deep` and in colours of 16 bits.
    """
    with _stored(content) as stored:
        image, _ = _decoded(stored, lambda *_: (side, side), channels, _name(name, content), deep=deep)
        return _square(image, side, channels)


def decode_within(content: Content, side: int, name: str = "") -> tuple[Images, tuple[int, int]]:
    """A whole picture, scaled down as in `decode_square` if one of its sides is longer than `side`.

    Returns:
        Pixels uint8 `[h, w, 3]`, and the width and height that it has in its file.

    Raises:
        RequestError: it is broken.
    """
    with _stored(content) as stored:
        image, own = _decoded(stored, lambda width, height: within(width, height, side), 3, _name(name, content))
        size = within(*own, side)
        return np.asarray(image if image.size == size else image.resize(size, _pillow().Resampling.BILINEAR)), own


def decode_labels(content: Content, name: str = "") -> NDArray[np.uint8]:
    """The values `[H, W]` of a picture that has one channel of 8 or 16 bits, or a palette.

    Raises:
        RequestError: it is broken, or holds something else.
    """
    name = _name(name, content)
    with _stored(content) as stored, _opened(stored, name) as image:
        # Pillow spreads grey of fewer bits over all of 0 to 255: a PNG's 1 of 4 bits becomes 17.
        tiles = getattr(image, "tile", ())
        fewer_bits = image.mode == "L" and any(codec == "ppm" or ";" in str(mode) for codec, *_, mode in tiles)
        if image.mode not in ("L", "P", "I;16", "I;16B") or fewer_bits:
            kind = "grey of fewer bits" if fewer_bits else image.mode
            raise BrokenImage(name, f"labels are one channel of 8 or 16 bits, and this is {kind}")
        labels = np.array(image)
    if (most := int(labels.max())) > np.iinfo(np.uint8).max:
        raise BrokenImage(name, f"it has the label {most:,}, and labels are numbers from 0 to 255")
    return labels.astype(np.uint8, copy=False)


def within(width: int, height: int, side: int) -> tuple[int, int]:
    """Width and height of a picture scaled down in its own proportions so that neither is more than `side`."""
    longer = max(width, height)
    if longer <= side:
        return width, height
    return tuple(max(1, (2 * edge * side + longer) // (2 * longer)) for edge in (width, height))  # type: ignore[return-value]  # of two edges


def _name(name: str, content: Content) -> str:
    return name or (content if isinstance(content, str) else "")


@contextmanager
def _stored(content: Content) -> Iterator[Content]:
    """Yields what to decode: a file's bytes, whose reading is timed separately, or the path of a very large file."""
    stored = content
    if isinstance(content, str):
        with spending("reading"), suppress(OSError):  # reported by the next one to open it, like any other fault
            if Path(content).stat().st_size <= _MOST_BYTES_AT_ONCE:
                stored = Path(content).read_bytes()
    with spending("decoding" if isinstance(stored, bytes) else "both"):
        yield stored


def centre_box(width: int, height: int) -> tuple[float, float, float, float]:
    """Left, upper, right and lower edge of the centre square."""
    short = min(width, height)
    left, top = (width - short) / 2, (height - short) / 2
    return left, top, left + short, top + short


def _square(image: Image, side: int, channels: int) -> Images:
    square = image.resize((side, side), _pillow().Resampling.BILINEAR, box=centre_box(*image.size))
    return np.asarray(square).reshape(side, side, channels)


_Target = Callable[[int, int], tuple[int, int]]
"""Width and height of a picture -> those at which it is wanted."""


def _decoded(
    content: Content, target: _Target, channels: int, name: str, *, deep: bool = False
) -> tuple[Image, tuple[int, int]]:
    """A picture, decoded no larger than `target` needs, and its own width and height."""
    if (decoded := _jpeg(content, target, channels)) is not None:
        return _pillow().fromarray(decoded[0]), decoded[1]
    with _opened(content, name) as image:
        own = image.size
        # Lets JPEG decode at a half, a quarter, ... as long as that is large enough.
        image.draft("L" if channels == 1 else "RGB", target(*own))
        if deep and channels == 1 and _wide(image):
            return _pillow().fromarray(np.asarray(image).astype(np.float32)), own
        if deep and any(";16" in str(mode) for *_, mode in getattr(image, "tile", ())):
            what = f"the image {name} has 16 bits, of which 8 would be lost in {channels} channels"
            raise RequestError(what, next_step="Store such images as TIFF or .npy, or set data.dtype = 'uint8'")
        return _grey(image) if channels == 1 else _rgb(image), own


def _jpeg(content: Content, target: _Target, channels: int) -> tuple[Images, tuple[int, int]] | None:
    """Decodes a JPEG exactly as Pillow does, but faster; None for anything odd, which is left to Pillow.

    Both are libjpeg-turbo with its exact transform. Pillow scales by halves, so no other scale is asked for here.
    """
    simplejpeg = _simplejpeg()
    if simplejpeg is None or not (isinstance(content, bytes) and content.startswith(_JPEG)):
        return None
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(content)
        if colours not in ("YCbCr", "Gray") or height * width > MOST_PIXELS:
            return None
        size, halvings = target(width, height), 0
        while halvings < 3 and width >= size[0] << (halvings + 1) and height >= size[1] << (halvings + 1):
            halvings += 1
        smaller = {"min_height": -(-height >> halvings), "min_width": -(-width >> halvings)} if halvings else {}
        pixels: Images = simplejpeg.decode_jpeg(content, "GRAY" if channels == 1 else "RGB", **smaller)
    except (OSError, ValueError):  # broken, or with a warning that Pillow ignores
        return None
    return (pixels[..., 0] if channels == 1 else pixels), (width, height)


@functools.cache
def _simplejpeg() -> ModuleType | None:
    try:
        return importlib.import_module("simplejpeg")
    except ImportError:
        return None


@functools.cache
def _pillow() -> ModuleType:
    from PIL import Image

    # Pillow warns of things that `_opened` refuses, or that do no harm (odd metadata): the user gets one message or
    # none.
    warnings.filterwarnings("ignore", module=r"PIL\.")
    return Image


@contextmanager
def _opened(content: Content, name: str) -> Iterator[Image]:
    pillow, name = _pillow(), name or str(content)
    try:
        file = io.BytesIO(content) if isinstance(content, bytes) else content
        with pillow.open(file, formats=sorted(set(EXTENSIONS.values()))) as image:
            width, height = image.size
            if width * height > MOST_PIXELS:
                raise BrokenImage(name, f"it claims {width:,} x {height:,} pixels, more than {MOST_PIXELS:,}")
            yield image
    except RequestError:
        raise
    except pillow.UnidentifiedImageError:
        raise BrokenImage(name, "not an image that can be read") from None
    except Exception as error:  # hostile files make Pillow's parsers raise nearly anything
        raise BrokenImage(name, reason(error) or type(error).__name__) from None


def _tail(content: Content) -> bytes:
    if isinstance(content, bytes):
        return content[-_TAIL_BYTES:]
    with Path(content).open("rb") as file:
        file.seek(max(0, file.seek(0, io.SEEK_END) - _TAIL_BYTES))
        return file.read()


def _grey(image: Image) -> Image:
    # Wider grey goes through `_rgb` and comes back as one of its three equal channels.
    return _rgb(image).getchannel(0) if image.mode.startswith(("I", "F")) else image.convert("L")


def _wide(image: Image) -> bool:
    """Whether it is grey of 16 bits."""
    return image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PPM")


def _rgb(image: Image) -> Image:
    from PIL import Image

    if image.mode in ("I", "F") and not _wide(image):  # Pillow would clip values above 255, and show fractions as black
        raise ValueError(f"it holds {'whole numbers' if image.mode == 'I' else 'fractions'} of 32 bits, no colours")
    if _wide(image):  # Pillow would clip 16-bit grey to white
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image.convert("RGB")


class BrokenImage(RequestError):
    """A file that cannot be an image of the set; `name` says which file, `what` what is wrong."""

    def __init__(self, name: str, what: str) -> None:
        self.name, self.what = name, what
        super().__init__(explain(f"the image {shown(name)} is broken: {what}", next_step="Repair or remove the file"))
