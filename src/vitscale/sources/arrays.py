"""Images of any number of channels and bits, each within limits: NumPy's files, TIFF, and HDF5 in fastMRI's layout."""

from __future__ import annotations

import io
import logging
import lzma
import math
import os
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitscale.errors import RequestError, shown
from vitscale.sources.base import Content, Images, library, reason
from vitscale.sources.pictures import MOST_PIXELS, BrokenImage, centre_box
from vitscale.trial.trial import PixelType

ARRAY_EXTENSIONS = (".npy", ".npz", ".h5", ".hdf5", ".tif", ".tiff")
"""Extensions of array files. TIFF is read as a picture where pictures are asked for: 3 channels of 8 bits."""
MOST_BYTES = 1 << 31
"""Largest size of one decoded image; a file that claims or unpacks to more is refused."""

_Array = NDArray[Any]
_RECONSTRUCTIONS = ("reconstruction_rss", "reconstruction_esc")
_UNPACKERS: Mapping[int, Callable[[], Any]] = {
    8: zlib.decompressobj, 32946: zlib.decompressobj, 34925: partial(lzma.LZMADecompressor, memlimit=MOST_BYTES),
}  # fmt: skip
"""TIFF's number of a compression with large ratios -> what unpacks it step by step."""
_MOST_PAGES = 4096
"""Most pages of a TIFF: as many as an image may have channels."""
_MOST_FROM_DEFLATED = 1032
"""Most bytes that zlib makes of one."""
_MOST_SLICES = 16_384
"""Most slices of an HDF5 volume, each of which becomes an entry of the image set."""
_HARMLESS_SLICES = 256
"""Slices of a volume that is not refused for the bytes that it claims: each image is checked anyway as it is read."""
_WITHOUT_OTHER_FILES = {"is_ome": False, "is_mmstack": False, "is_ndtiff": False}
"""Arguments by which tifffile reads the pages of a TIFF alone: in these formats it may name other files, whose pixels
tifffile would read wherever they lie."""
_DEFLATE, _FILTERS = 1, {1: "gzip", 2: "shuffle", 3: "fletcher32", 32000: "lzf"}
"""HDF5's numbers of the filters that chunks may be packed with."""
_CHECKSUM_BYTES = 4
"""Size of fletcher32's checksum, which may be packed too."""
_HARMLESS_BYTES = 1 << 28
"""Size up to which a chunk may unpack unchecked."""


class ArrayShape(NamedTuple):
    """How every array of a set is stored."""

    side: int
    channels: int
    dtype: PixelType


class _Stored(NamedTuple):
    """An array that has not been read yet."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    read: Callable[[], _Array]
    channels_first: bool | None = None
    """Whether channels come first. None: not told; they have the axis of that length, if in doubt the last one."""
    bytes_there: int | None = None
    """Size of an array that lies in the file uncompressed; None: it is compressed, or its library checks this."""
    verify: Callable[[], None] = lambda: None
    """Raises `BrokenImage` if the data unpacks to more than it should; called once the shape is fine."""


def images_in(content: Content, name: str) -> int:
    """Number of images that a file holds: the slices of an HDF5 volume, else 1.

    Raises:
        RequestError: it is broken.
    """
    if not name.lower().endswith((".h5", ".hdf5")):
        return 1
    file_bytes = len(content) if isinstance(content, bytes) else Path(content).stat().st_size
    with _reported(name), _hdf5(content) as file:
        volume = _volume(file, name)
        _verify_slices(volume, file_bytes, name)
        return int(volume.shape[0])


def _verify_slices(volume: Any, file_bytes: int, name: str) -> None:
    """Refuses a volume of too many slices, and one that claims more bytes than a file of `file_bytes` can hold.

    HDF5 stores no chunk that nobody has written: a file of a kilobyte may claim any number of slices.

    Raises:
        BrokenImage: the volume is refused.
    """
    slices = int(volume.shape[0])
    if slices > _MOST_SLICES:
        raise BrokenImage(name, f"it claims {slices:,} slices, more than {_MOST_SLICES:,}")
    if slices <= _HARMLESS_SLICES:
        return
    claimed_bytes = math.prod(map(int, volume.shape)) * volume.dtype.itemsize
    most_bytes = file_bytes * _MOST_FROM_DEFLATED
    if claimed_bytes > most_bytes:
        what = f"it claims {claimed_bytes:,} bytes of slices, and a file of {file_bytes:,} holds at most {most_bytes:,}"
        raise BrokenImage(name, what)


def acquisition_of(path: str) -> str | None:
    """fastMRI's kind of scan from the file's attributes; None where it has none.

    Raises:
        RequestError: it is broken.
    """
    with _reported(path), _hdf5(path) as file:
        value = file.attrs.get("acquisition")
        return value.decode(errors="replace") if isinstance(value, bytes) else value if isinstance(value, str) else None


def verify_array(content: Content, shape: ArrayShape, name: str) -> None:
    """Raises `RequestError` naming the file unless its headers say that it is whole and can be stored as `shape`."""
    with _reported(name), _stored(content, 0, name) as stored:
        _channel_axis(stored, shape, name)


def decode_array(content: Content, shape: ArrayShape, part: int, name: str) -> Images:
    """Image `part` of a file as `[side, side, channels]`: the centre square, scaled as pictures are.

    Raises:
        RequestError: it is broken, or holds other channels or more bits than `shape`.
    """
    with _reported(name), _stored(content, part, name) as stored:
        axis = _channel_axis(stored, shape, name)
        pixels = stored.read()
        if pixels.dtype.kind == "c":
            pixels = np.abs(pixels)
        image = pixels[..., None] if axis is None else np.moveaxis(pixels, axis, -1)
        if image.dtype.kind == "f" and not np.isfinite(image).all():
            raise BrokenImage(name, "it holds values that are not finite")
        return _square(image, shape)


def _square(image: _Array, shape: ArrayShape) -> Images:
    height, width, channels = image.shape
    if height == width == shape.side:
        return image.astype(shape.dtype, order="C")
    from PIL import Image

    out = np.empty((shape.side, shape.side, channels), np.float32)
    for channel in range(channels):
        plane = Image.fromarray(np.ascontiguousarray(image[..., channel], dtype=np.float32))
        scaled = plane.resize(out.shape[:2], Image.Resampling.BILINEAR, box=centre_box(width, height))
        out[..., channel] = np.asarray(scaled)
    return out.astype(shape.dtype) if shape.dtype == "float32" else np.rint(out).astype(shape.dtype)


def _channel_axis(stored: _Stored, shape: ArrayShape, name: str) -> int | None:
    """The axis of channels; None for one channel without an axis. Refuses what `shape` cannot hold."""
    sides = stored.shape
    if len(sides) == 2 and shape.channels == 1:
        axis = None
    elif len(sides) == 3 and sides[-1] == shape.channels and not stored.channels_first:
        axis = 2
    elif len(sides) == 3 and sides[0] == shape.channels and stored.channels_first is not False:
        axis = 0
    else:
        size = " x ".join(map(str, sides)) or "a single value"
        raise BrokenImage(name, f"it holds {size}, not height x width x {shape.channels} (data.channels)")
    # float32 takes every number of any size; other types take only what fits.
    wide = stored.dtype.kind in "biufc" if shape.dtype == "float32" else np.can_cast(stored.dtype, shape.dtype)
    if not wide:
        raise BrokenImage(name, f"it holds {stored.dtype}, which data.dtype = '{shape.dtype}' cannot")
    return axis


@contextmanager
def _reported(name: str) -> Iterator[None]:
    try:
        yield
    except RequestError:
        raise
    except Exception as error:  # hostile files make parsers raise nearly anything
        raise BrokenImage(name, reason(error) or type(error).__name__) from None


@contextmanager
def _stored(content: Content, part: int, name: str) -> Iterator[_Stored]:
    """Yields the array of `part`, checked against the limits."""
    opened = {".npy": _npy, ".npz": _npz, ".tif": _tiff, ".tiff": _tiff}.get(Path(name).suffix.lower())
    with opened(content, name) if opened is not None else _slice(content, part, name) as stored:
        pixels = math.prod(sorted(stored.shape)[-2:])
        claimed = math.prod(stored.shape) * stored.dtype.itemsize
        if pixels > MOST_PIXELS:
            raise BrokenImage(name, f"it claims {pixels:,} pixels, more than {MOST_PIXELS:,}")
        if claimed > MOST_BYTES:
            raise BrokenImage(name, f"it claims {claimed:,} bytes, more than {MOST_BYTES:,}")
        if stored.bytes_there is not None and stored.bytes_there < claimed:
            raise BrokenImage(name, "it is truncated")
        if 0 in stored.shape:
            raise BrokenImage(name, "it is empty")
        stored.verify()
        yield stored


def _file(content: Content) -> Any:
    return io.BytesIO(content) if isinstance(content, bytes) else Path(content).open("rb")


@contextmanager
def _npy(content: Content, name: str) -> Iterator[_Stored]:
    with _file(content) as file:
        stored = _npy_header(file, name)
        begins = file.tell()
        left = file.seek(0, os.SEEK_END) - begins
        file.seek(0)
        yield stored._replace(read=lambda: np.load(file, allow_pickle=False), bytes_there=left)


def _npy_header(file: Any, name: str) -> _Stored:
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(file)
    if dtype.hasobject:
        raise BrokenImage(name, "it holds Python objects, which are not read")
    return _Stored(shape, dtype, lambda: np.empty(0))


@contextmanager
def _npz(content: Content, name: str) -> Iterator[_Stored]:
    with _file(content) as file, zipfile.ZipFile(file) as archive:
        members = [member for member in archive.infolist() if member.filename.endswith(".npy")]
        chosen = [member for member in members if len(members) == 1 or member.filename == "image.npy"]
        if not chosen:
            raise BrokenImage(name, f"it holds {len(members)} arrays, and none is called 'image'")
        if chosen[0].file_size > MOST_BYTES:
            raise BrokenImage(name, f"it claims {chosen[0].file_size:,} bytes, more than {MOST_BYTES:,}")

        def read() -> _Array:
            with archive.open(chosen[0]) as member:  # it gives no more than `file_size`
                array: _Array = np.lib.format.read_array(member, allow_pickle=False)
                return array

        with archive.open(chosen[0]) as member:
            stored = _npy_header(member, name)
        yield stored._replace(read=read)


@contextmanager
def _tiff(content: Content, name: str) -> Iterator[_Stored]:
    tifffile = library("tifffile", "TIFF of other than 3 channels of 8 bits", "images")
    logging.getLogger("tifffile").setLevel(logging.CRITICAL)  # one message, or none
    with _file(content) as file, tifffile.TiffFile(file, **_WITHOUT_OTHER_FILES) as tiff:
        size = file.seek(0, os.SEEK_END)
        _verify_pages(file, tiff.tiff, name)
        series = tiff.series[0]
        for page in series.pages:
            _verify_segments(file, page, size, name)
        first = False if series.axes.endswith("S") else True if len(series.shape) == 3 else None
        yield _Stored(tuple(series.shape), np.dtype(series.dtype), series.asarray, first)


def _verify_pages(file: Any, form: Any, name: str) -> None:
    """Refuses too many pages, and any that leads back to an earlier one: tifffile would go round for ever."""
    seen: set[int] = set()
    file.seek(4 if form.offsetsize == 4 else 8)
    while len(told := file.read(form.offsetsize)) == form.offsetsize:
        (offset,) = struct.unpack(form.offsetformat, told)
        file.seek(offset)
        if len(told := file.read(form.tagnosize)) < form.tagnosize or not offset:
            return
        if offset in seen or len(seen) == _MOST_PAGES:
            what = "its pages lead round in a circle" if offset in seen else f"it has more than {_MOST_PAGES:,} pages"
            raise BrokenImage(name, what)
        seen.add(offset)
        file.seek(struct.unpack(form.tagnoformat, told)[0] * form.tagsize, os.SEEK_CUR)


def _verify_segments(file: Any, page: Any, size: int, name: str) -> None:
    """Refuses strips or tiles that end outside the file, or unpack to more than they should."""
    shape = page.keyframe.chunks
    whole = math.prod(shape) * page.keyframe.dtype.itemsize
    for offset, count in zip(page.dataoffsets, page.databytecounts, strict=True):
        if offset + count > size:
            raise BrokenImage(name, "it is truncated")
        if whole > MOST_BYTES:
            raise BrokenImage(name, f"it claims {whole:,} bytes, more than {MOST_BYTES:,}")
        unpacker = _UNPACKERS.get(page.keyframe.compression)
        could = math.inf if unpacker is not zlib.decompressobj else count * _MOST_FROM_DEFLATED
        if unpacker is not None and could > 8 * whole:
            file.seek(offset)
            _refuse_more(unpacker().decompress(file.read(count), whole + 1), whole, name)


def _refuse_more(unpacked: bytes, whole: int, name: str) -> None:
    if len(unpacked) > whole:
        raise BrokenImage(name, f"it unpacks to more than the {whole:,} bytes of its size")


def _hdf5(content: Content) -> Any:
    h5py = library("h5py", "HDF5", "images")
    return h5py.File(io.BytesIO(content) if isinstance(content, bytes) else content, "r")


@contextmanager
def _slice(content: Content, part: int, name: str) -> Iterator[_Stored]:
    with _hdf5(content) as file:
        volume = _volume(file, name)
        shape, first = tuple(volume.shape[1:]), True if volume.ndim == 4 else None

        def read() -> _Array:
            values: _Array = volume[part]
            if volume.name == "/kspace":
                axes = (-2, -1)
                centred = np.fft.ifft2(np.fft.ifftshift(values, axes), norm="ortho")
                return np.abs(np.fft.fftshift(centred, axes)).astype(np.float32)
            return values

        yield _Stored(shape, volume.dtype, read, first, verify=partial(_verify_chunks, volume, part, name))


def _volume(file: Any, name: str) -> Any:
    """fastMRI's reconstruction [slices, H, W], else its k-space [slices, coils, H, W] (one coil: [slices, H, W])."""
    h5py = library("h5py", "HDF5", "images")
    key = next((key for key in (*_RECONSTRUCTIONS, "kspace") if key in file.keys()), None)  # noqa: SIM118  not the values
    if key is None:
        has = ", ".join(shown(str(key)) for key in list(file.keys())[:10]) or "nothing"
        raise BrokenImage(name, f"it holds {has}, and none of fastMRI's {', '.join((*_RECONSTRUCTIONS, 'kspace'))}")
    if not isinstance(file.get(key, getlink=True), h5py.HardLink):
        raise BrokenImage(name, f"its {key} is a link out of the file")
    volume = file[key]
    if not isinstance(volume, h5py.Dataset) or volume.is_virtual or volume.external:
        raise BrokenImage(name, f"its {key} lies in other files, or is no array")
    if volume.ndim not in (3, 4) or volume.dtype.kind not in "iufc":
        raise BrokenImage(name, f"its {key} is no volume of numbers")
    # Each filter only once: of two unpackers, one would unpack a thousandfold what the other has unpacked.
    if len(set(filters := _filters(volume))) < len(filters) or not _FILTERS.keys() >= set(filters):
        packed = ", ".join(_FILTERS.get(number, f"number {number}") for number in filters)
        raise BrokenImage(name, f"its {key} is packed by {packed}; read is {', '.join(_FILTERS.values())}, each once")
    return volume


def _filters(volume: Any) -> list[int]:
    packing = volume.id.get_create_plist()
    return [packing.get_filter(number)[0] for number in range(packing.get_nfilters())]


def _verify_chunks(volume: Any, part: int, name: str) -> None:
    """Refuses a slice whose chunks unpack to more than they should."""
    if volume.chunks is None:
        return
    whole = math.prod(volume.chunks) * volume.dtype.itemsize
    if whole > MOST_BYTES:
        raise BrokenImage(name, f"it claims {whole:,} bytes a chunk, more than {MOST_BYTES:,}")
    first, chunks, filters = part - part % volume.chunks[0], [], _filters(volume)
    volume.id.chunk_iter(lambda chunk: chunks.append(chunk) if chunk.chunk_offset[0] == first else None)
    for chunk in chunks:
        if chunk.size > whole + whole // 8 + 1024:
            raise BrokenImage(name, f"it claims {whole:,} bytes a chunk, stored in {chunk.size:,}")
        unpacked = _DEFLATE in filters and not chunk.filter_mask >> filters.index(_DEFLATE) & 1
        if unpacked and chunk.size * _MOST_FROM_DEFLATED > max(8 * whole, _HARMLESS_BYTES):
            _, content = volume.id.read_direct_chunk(chunk.chunk_offset)
            at_most = whole + _CHECKSUM_BYTES
            _refuse_more(zlib.decompressobj().decompress(content, at_most + 1), at_most, name)
