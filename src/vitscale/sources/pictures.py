"""One image file: is it whole, and its pixels as a square of a given side."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from vitscale.errors import RequestError, explain, shown
from vitscale.sources.base import Images
from vitscale.sources.paths import reason

if TYPE_CHECKING:
    from PIL.Image import Image

T = TypeVar("T")
R = TypeVar("R")

EXTENSIONS = {
    ".jpg": "JPEG",
    ".jpeg": "JPEG",
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
"""More is refused before it is decoded: a file of a few kilobytes may claim to hold terabytes."""
_TAIL_BYTES = 4096
_BLOCK = 4096
"""Items handed to the threads at once: a future for each of a million would cost a gigabyte."""
_END_MARKS = {"JPEG": b"\xff\xd9", "PNG": b"IEND"}


def verify_picture(path: str) -> None:
    """Raises `RequestError` naming the file unless its header is good and, as far as is cheap to tell, it is whole."""
    with _opened(path) as image:
        mark = _END_MARKS.get(image.format or "")
        # Without its end mark a file may still be good, with other data after it: only decoding tells.
        if mark is not None and mark not in _tail(path):
            image.load()


def decode_square(path: str, side: int) -> Images:
    """Pixels uint8 `[side, side, 3]`: the centre square, scaled with an antialiasing bilinear filter.

    The same as scaling the short side to `side` and cropping the centre, without the scaled long side in memory.
    Raises `RequestError` naming the file.
    """
    from PIL import Image

    with _opened(path) as image:
        image.draft("RGB", (side, side))  # lets JPEG decode at a half, quarter, ... that is still large enough
        width, height = image.size
        short = min(width, height)
        left, top = (width - short) / 2, (height - short) / 2
        square = _rgb(image).resize((side, side), Image.Resampling.BILINEAR, box=(left, top, left + short, top + short))
        return np.asarray(square)


def in_threads(function: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """Results in order, from a thread per core that this process may use; the first failure ends the rest.

    Pillow releases the interpreter lock while it decodes.
    """
    remaining = iter(items)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        while block := list(islice(remaining, _BLOCK)):
            yield from pool.map(function, block)


@functools.cache
def _pillow() -> ModuleType:
    from PIL import Image

    # Pillow warns of what `_opened` refuses or what does no harm (odd metadata): the user gets one message or none.
    warnings.filterwarnings("ignore", module=r"PIL\.")
    return Image


@contextmanager
def _opened(path: str) -> Iterator[Image]:
    pillow = _pillow()
    try:
        with pillow.open(path, formats=sorted(set(EXTENSIONS.values()))) as image:
            width, height = image.size
            if width * height > MOST_PIXELS:
                raise _broken(path, f"it claims {width:,} x {height:,} pixels, more than {MOST_PIXELS:,}")
            yield image
    except RequestError:
        raise
    except pillow.UnidentifiedImageError:
        raise _broken(path, "not an image that can be read") from None
    except Exception as error:  # hostile files make Pillow's parsers raise nearly anything
        raise _broken(path, reason(error) or type(error).__name__) from None


def _tail(path: str) -> bytes:
    with Path(path).open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
        return file.read()


def _rgb(image: Image) -> Image:
    from PIL import Image

    if image.mode.startswith("I;16"):  # Pillow would clip 16-bit grey to white
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image.convert("RGB")


def _broken(path: str, what: str) -> RequestError:
    return RequestError(explain(f"the image {shown(path)} is broken: {what}", next_step="Repair or remove the file"))
