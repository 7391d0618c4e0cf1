"""Verifies and decodes pictures of common formats."""

from __future__ import annotations

import functools
import importlib
import io
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

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
_JPEG_START = b"\xff\xd8\xff"
_END_MARK_BY_FORMAT = {"JPEG": b"\xff\xd9", "PNG": b"IEND"}


class Size(NamedTuple):
    """Size of a picture in pixels."""

    width: int
    height: int


class Picture(NamedTuple):
    """A picture whose pixels have been decoded."""

    pixels: Images
    """uint8 `[h, w, 3]`."""
    stored_size: Size
    """Its size in its file."""


def verify_picture(content: Content, name: str = "") -> Size:
    """Checks that a picture is whole, as far as is cheap; returns its size.

    Raises:
        RequestError: it is broken; names the file.
    """
    with _opened_picture(content, name) as image:
        end_mark = _END_MARK_BY_FORMAT.get(image.format or "")
        # A file without its end mark may still be good, with other data behind: only decoding shows that.
        if end_mark is not None and end_mark not in _last_bytes(content):
            image.load()
        return Size(image.width, image.height)


def decode_square(content: Content, side: int, channels: int = 3, name: str = "", *, deep: bool = False) -> Images:
    """Decodes the centre square of a picture, scaled to `[side, side, channels]` of uint8, or of float32 if `deep`.

    It is scaled with an antialiasing bilinear filter. The result is that of scaling the short side to `side` and then
    cropping the centre; but the scaled long side never is in memory.

    Args:
        content: path of the file, or its bytes.
        side: side of the square in pixels.
        channels: 1 (grey) or 3 (RGB).
        name: name of the file in messages; by default its path.
        deep: whether grey of 16 bits keeps all bits, as float32; else its upper 8 bits are kept, as uint8. Pictures of
            8 bits are uint8 all the same.

    Raises:
        RequestError: it is broken, or it is `deep` and has colours of 16 bits.
    """

    def needed_size(_stored_size: Size) -> Size:
        return Size(side, side)

    with _content_to_decode(content) as stored:
        decoded = _decode_reduced(stored, needed_size, channels, _name_in_messages(name, content), deep=deep)
        return _scale_centre(decoded.image, side, channels)


def decode_within(content: Content, side: int, name: str = "") -> Picture:
    """Decodes a whole picture, scaled down as in `decode_square` if one of its sides is longer than `side`.

    Raises:
        RequestError: it is broken.
    """

    def needed_size(stored_size: Size) -> Size:
        return size_within(stored_size.width, stored_size.height, side)

    with _content_to_decode(content) as stored:
        decoded = _decode_reduced(stored, needed_size, 3, _name_in_messages(name, content))
        image = decoded.image
        size = needed_size(decoded.stored_size)
        if image.size != size:
            image = image.resize(size, _pillow().Resampling.BILINEAR)
        return Picture(np.asarray(image), decoded.stored_size)


def decode_labels(content: Content, name: str = "") -> NDArray[np.uint8]:
    """Returns the values `[H, W]` of a picture that has one channel of 8 or 16 bits, or a palette.

    Raises:
        RequestError: it is broken, or holds something else.
    """
    name = _name_in_messages(name, content)
    with _content_to_decode(content) as stored, _opened_picture(stored, name) as image:
        unfit_kind = _kind_unfit_for_labels(image)
        if unfit_kind is not None:
            raise BrokenImage(name, f"labels are one channel of 8 or 16 bits, and this is {unfit_kind}")
        labels = np.array(image)
    highest = int(labels.max())
    if highest > np.iinfo(np.uint8).max:
        raise BrokenImage(name, f"it has the label {highest:,}, and labels are numbers from 0 to 255")
    return labels.astype(np.uint8, copy=False)


_LABEL_MODES = ("L", "P", "I;16", "I;16B")
"""Pillow's modes of pictures whose values are labels: grey of 8 bits, indices into a palette, and grey of 16 bits with
the low or the high byte first."""


def _kind_unfit_for_labels(image: Image) -> str | None:
    """Returns the kind of a picture, in words, if its values cannot be labels; None where they can."""
    if image.mode not in _LABEL_MODES:
        return image.mode
    if image.mode == "L" and _has_fewer_bits(image):
        return "grey of fewer bits"
    return None


def _has_fewer_bits(image: Image) -> bool:
    """Whether a grey picture of Pillow's mode "L" may have fewer than 8 bits in its file.

    Pillow spreads these over all of 0 to 255: a PNG's 1 of 4 bits becomes 17, which is no label any more. Its tiles,
    which say how the file is decoded, then have a mode like "L;4".
    """
    return any(codec == "ppm" or ";" in str(mode) for codec, *_, mode in getattr(image, "tile", ()))


def size_within(width: int, height: int, side: int) -> Size:
    """Returns the size of a picture that is scaled down until its longer edge has at most `side` pixels.

    Proportions stay; the shorter edge is rounded to whole pixels, and is at least 1.
    """
    longer = max(width, height)
    if longer <= side:
        return Size(width, height)
    return Size(width=_scaled_edge(width, side, longer), height=_scaled_edge(height, side, longer))


def _scaled_edge(edge: int, side: int, longer: int) -> int:
    """Returns `edge` x `side` / `longer`, rounded half up by integers alone, and at least 1."""
    return max(1, (2 * edge * side + longer) // (2 * longer))


def _name_in_messages(name: str, content: Content) -> str:
    """Returns the name in messages: by default the path, and nothing for bytes."""
    if name:
        return name
    return content if isinstance(content, str) else ""


@contextmanager
def _content_to_decode(content: Content) -> Iterator[Content]:
    """Yields what to decode: the bytes of a file, or the path of a very large file.

    Reading the bytes is counted as reading, and the time inside of the `with` as decoding. Who decodes a path reads it
    at the same time, which is counted as both.
    """
    stored = content
    if isinstance(content, str):
        with spending("reading"), suppress(OSError):  # reported by the next one to open it, like any other fault
            if Path(content).stat().st_size <= _MOST_BYTES_AT_ONCE:
                stored = Path(content).read_bytes()
    with spending("decoding" if isinstance(stored, bytes) else "both"):
        yield stored


class Box(NamedTuple):
    """Edges of a part of a picture, in pixels from its upper left corner."""

    left: float
    upper: float
    right: float
    lower: float


def centre_box(width: int, height: int) -> Box:
    """Returns the centre square of a picture."""
    side = min(width, height)
    left = (width - side) / 2
    upper = (height - side) / 2
    return Box(left, upper, right=left + side, lower=upper + side)


def _scale_centre(image: Image, side: int, channels: int) -> Images:
    """Returns the centre square of a picture, scaled to `[side, side, channels]`."""
    square = image.resize((side, side), _pillow().Resampling.BILINEAR, box=centre_box(*image.size))
    return np.asarray(square).reshape(side, side, channels)


_NeededSize = Callable[[Size], Size]
"""Size of a picture in its file -> the size at which it is needed."""


class _Decoded(NamedTuple):
    """A picture, decoded at its own size or at a half, a quarter or an eighth of it."""

    image: Image
    stored_size: Size


def _decode_reduced(
    content: Content, needed_size: _NeededSize, channels: int, name: str, *, deep: bool = False
) -> _Decoded:
    """Decodes a picture, a JPEG at a smaller size if that is still as large as `needed_size`; see `decode_square`."""
    jpeg = _decode_jpeg(content, needed_size, channels)
    if jpeg is not None:
        return _Decoded(_pillow().fromarray(jpeg.pixels), jpeg.stored_size)
    with _opened_picture(content, name) as image:
        stored_size = Size(*image.size)
        # Lets JPEG decode at a half, a quarter, ... as long as that is large enough.
        image.draft("L" if channels == 1 else "RGB", needed_size(stored_size))
        if deep and channels == 1 and _is_wide_grey(image):
            return _Decoded(_pillow().fromarray(np.asarray(image).astype(np.float32)), stored_size)
        if deep and _has_16_bits(image):
            what = f"the image {name} has 16 bits, of which 8 would be lost in {channels} channels"
            raise RequestError(what, next_step="Store such images as TIFF or .npy, or set data.dtype = 'uint8'")
        return _Decoded(_as_grey(image) if channels == 1 else _as_rgb(image), stored_size)


def _has_16_bits(image: Image) -> bool:
    """Whether a picture that is not decoded yet has channels of 16 bits in its file, as mode "RGB;16B" of a tile."""
    return any(";16" in str(mode) for *_, mode in getattr(image, "tile", ()))


def _decode_jpeg(content: Content, needed_size: _NeededSize, channels: int) -> Picture | None:
    """Decodes a JPEG exactly as Pillow does, but faster; None for anything odd, which is left to Pillow.

    Both are libjpeg-turbo with its exact transform. Pillow scales by halves, so no other scale is asked for here.
    """
    simplejpeg = _simplejpeg()
    if simplejpeg is None or not (isinstance(content, bytes) and content.startswith(_JPEG_START)):
        return None
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(content)
        if colours not in ("YCbCr", "Gray") or height * width > MOST_PIXELS:
            return None
        stored_size = Size(width, height)
        halvings = _halvings(stored_size, needed_size(stored_size))
        least_size: dict[str, int] = {}
        if halvings > 0:
            divisor = 1 << halvings
            least_size = {"min_height": math.ceil(height / divisor), "min_width": math.ceil(width / divisor)}
        colour_space = "GRAY" if channels == 1 else "RGB"
        pixels: Images = simplejpeg.decode_jpeg(content, colour_space, **least_size)
    except (OSError, ValueError):  # broken, or with a warning that Pillow ignores
        return None
    if channels == 1:
        pixels = pixels[..., 0]
    return Picture(pixels, stored_size)


_MOST_HALVINGS = 3
"""libjpeg decodes at a half, a quarter or an eighth."""


def _halvings(stored_size: Size, size: Size) -> int:
    """Returns how often a picture can be halved and is still as large as `size`, up to `_MOST_HALVINGS`."""
    halvings = 0
    while halvings < _MOST_HALVINGS:
        next_width = size.width << (halvings + 1)
        next_height = size.height << (halvings + 1)
        if stored_size.width < next_width or stored_size.height < next_height:
            break
        halvings += 1
    return halvings


@functools.cache
def _simplejpeg() -> ModuleType | None:
    """Returns the module simplejpeg; None where it is not installed."""
    try:
        return importlib.import_module("simplejpeg")
    except ImportError:
        return None


@functools.cache
def _pillow() -> ModuleType:
    """Imports Pillow's `Image`, without its warnings."""
    from PIL import Image

    # Pillow warns of things that `_opened_picture` refuses, or that do no harm (odd metadata): the user gets one
    # message or none.
    warnings.filterwarnings("ignore", module=r"PIL\.")
    return Image


@contextmanager
def _opened_picture(content: Content, name: str) -> Iterator[Image]:
    """Yields a picture that Pillow has opened, and not decoded yet.

    Raises:
        BrokenImage: it cannot be read, or claims too many pixels; also for what fails inside the `with`.
    """
    pillow = _pillow()
    name = name or str(content)
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


def _last_bytes(content: Content) -> bytes:
    """Returns the last bytes of a file."""
    if isinstance(content, bytes):
        return content[-_TAIL_BYTES:]
    with Path(content).open("rb") as file:
        file.seek(max(0, file.seek(0, io.SEEK_END) - _TAIL_BYTES))
        return file.read()


def _as_grey(image: Image) -> Image:
    """Returns a picture in grey of 8 bits."""
    if image.mode.startswith(("I", "F")):  # wider grey, of which `_as_rgb` makes three equal channels
        return _as_rgb(image).getchannel(0)
    return image.convert("L")


def _is_wide_grey(image: Image) -> bool:
    """Whether it is grey of 16 bits."""
    return image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PPM")


def _as_rgb(image: Image) -> Image:
    """Returns a picture in colours of 8 bits. Raises `ValueError` for numbers of 32 bits."""
    from PIL import Image

    is_wide_grey = _is_wide_grey(image)
    if image.mode in ("I", "F") and not is_wide_grey:  # Pillow would clip values above 255, and show fractions as black
        numbers = "whole numbers" if image.mode == "I" else "fractions"
        raise ValueError(f"it holds {numbers} of 32 bits, no colours")
    if is_wide_grey:  # Pillow would clip 16-bit grey to white
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image.convert("RGB")


class BrokenImage(RequestError):
    """A file that cannot be an image of the set; `name` says which file, `what` what is wrong."""

    def __init__(self, name: str, what: str) -> None:
        self.name = name
        self.what = what
        super().__init__(explain(f"the image {shown(name)} is broken: {what}", next_step="Repair or remove the file"))
