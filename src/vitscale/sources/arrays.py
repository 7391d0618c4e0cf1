"""Decodes images of any number of channels and bits, within limits, from NumPy's files, TIFF and fastMRI's HDF5."""

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
_VOLUME_NAMES = ("reconstruction_rss", "reconstruction_esc", "kspace")
"""fastMRI's names of volumes, the preferred one first."""
_UNPACKER_BY_COMPRESSION: Mapping[int, Callable[[], Any]] = {
    8: zlib.decompressobj, 32946: zlib.decompressobj, 34925: partial(lzma.LZMADecompressor, memlimit=MOST_BYTES),
}  # fmt: skip
"""TIFF's number of a compression with large ratios -> what unpacks it step by step."""
_MOST_PAGES = 4096
"""Most pages of a TIFF: as many as an image may have channels."""
_MOST_INFLATION = 1032
"""Most bytes that zlib makes of one."""
_MOST_SLICES = 16_384
"""Most slices of an HDF5 volume, each of which becomes an entry of the image set."""
_HARMLESS_SLICES = 256
"""Slices of a volume that is not refused for the bytes that it claims: each image is checked anyway as it is read."""
_READ_NO_OTHER_FILES = {"is_ome": False, "is_mmstack": False, "is_ndtiff": False}
"""Arguments by which tifffile reads the pages of a TIFF alone: in these formats it may name other files, whose pixels
tifffile would read wherever they lie."""
_DEFLATE_FILTER = 1
_FILTER_NAMES = {1: "gzip", 2: "shuffle", 3: "fletcher32", 32000: "lzf"}
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


class _StoredArray(NamedTuple):
    """An array in a file, which has not been read yet."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    read: Callable[[], _Array]
    channels_first: bool | None = None
    """Whether channels come first. None: unknown; they have the axis of that length, if in doubt the last one."""
    bytes_there: int | None = None
    """Size of an array that lies in the file uncompressed; None: it is compressed, or its library checks this."""
    verify: Callable[[], None] = lambda: None
    """Raises `BrokenImage` if the data unpacks to more than it should; called once the shape is fine."""


def images_in(content: Content, name: str) -> int:
    """Returns the number of images that a file holds: the slices of an HDF5 volume, else 1.

    Raises:
        RequestError: it is broken.
    """
    if not name.lower().endswith((".h5", ".hdf5")):
        return 1
    file_bytes = len(content) if isinstance(content, bytes) else Path(content).stat().st_size
    with _broken_image_errors(name), _opened_hdf5(content) as file:
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
    most_bytes = file_bytes * _MOST_INFLATION
    if claimed_bytes > most_bytes:
        what = f"it claims {claimed_bytes:,} bytes of slices, and a file of {file_bytes:,} holds at most {most_bytes:,}"
        raise BrokenImage(name, what)


def acquisition_of(path: str) -> str | None:
    """Returns fastMRI's kind of scan from the file's attributes; None where it has none.

    Raises:
        RequestError: it is broken.
    """
    with _broken_image_errors(path), _opened_hdf5(path) as file:
        value = file.attrs.get("acquisition")
        if isinstance(value, bytes):
            return value.decode(errors="replace")
        return value if isinstance(value, str) else None


def verify_array(content: Content, shape: ArrayShape, name: str) -> None:
    """Raises `RequestError` naming the file unless its headers say that it is whole and can be stored as `shape`."""
    with _broken_image_errors(name), _opened_array(content, 0, name) as stored:
        _channel_axis(stored, shape, name)


def decode_array(content: Content, shape: ArrayShape, part: int, name: str) -> Images:
    """Decodes image `part` of a file to `[side, side, channels]`: the centre square, scaled as pictures are.

    Raises:
        RequestError: it is broken, or holds other channels or more bits than `shape`.
    """
    with _broken_image_errors(name), _opened_array(content, part, name) as stored:
        axis = _channel_axis(stored, shape, name)
        pixels = stored.read()
        if pixels.dtype.kind == "c":
            pixels = np.abs(pixels)
        image = pixels[..., None] if axis is None else np.moveaxis(pixels, source=axis, destination=-1)
        if image.dtype.kind == "f" and not np.isfinite(image).all():
            raise BrokenImage(name, "it holds values that are not finite")
        return _scaled_square(image, shape)


def _scaled_square(image: _Array, shape: ArrayShape) -> Images:
    """Scales the centre square of an image `[H, W, C]`, channel by channel."""
    height, width, channels = image.shape
    if height == width == shape.side:
        return image.astype(shape.dtype, order="C")
    from PIL import Image

    square = np.empty((shape.side, shape.side, channels), np.float32)
    for channel in range(channels):
        plane = Image.fromarray(np.ascontiguousarray(image[..., channel], dtype=np.float32))
        scaled_plane = plane.resize(square.shape[:2], Image.Resampling.BILINEAR, box=centre_box(width, height))
        square[..., channel] = np.asarray(scaled_plane)
    if shape.dtype != "float32":
        square = np.rint(square)
    return square.astype(shape.dtype)


def _channel_axis(stored: _StoredArray, shape: ArrayShape, name: str) -> int | None:
    """Returns the axis of channels; None for one channel without an axis.

    Raises:
        BrokenImage: `shape` cannot hold the array.
    """
    lengths = stored.shape
    may_be_last = stored.channels_first is not True
    may_be_first = stored.channels_first is not False
    axis: int | None
    if len(lengths) == 2 and shape.channels == 1:
        axis = None
    elif len(lengths) == 3 and lengths[-1] == shape.channels and may_be_last:
        axis = 2
    elif len(lengths) == 3 and lengths[0] == shape.channels and may_be_first:
        axis = 0
    else:
        size = " x ".join(map(str, lengths)) or "a single value"
        raise BrokenImage(name, f"it holds {size}, not height x width x {shape.channels} (data.channels)")
    if not _can_hold(shape.dtype, stored.dtype):
        raise BrokenImage(name, f"it holds {stored.dtype}, which data.dtype = '{shape.dtype}' cannot")
    return axis


def _can_hold(dtype: PixelType, stored: np.dtype[Any]) -> bool:
    """Whether a type holds numbers of the stored type: float32 those of any size, another type only what fits."""
    if dtype == "float32":
        return stored.kind in "biufc"  # booleans, integers, fractions, complex numbers (by their size)
    return bool(np.can_cast(stored, dtype))


@contextmanager
def _broken_image_errors(name: str) -> Iterator[None]:
    """Turns whatever is raised inside into a `BrokenImage` that names the file."""
    try:
        yield
    except RequestError:
        raise
    except Exception as error:  # hostile files make parsers raise nearly anything
        raise BrokenImage(name, reason(error) or type(error).__name__) from None


@contextmanager
def _opened_array(content: Content, part: int, name: str) -> Iterator[_StoredArray]:
    """Yields the array of `part`, checked against the limits."""
    openers = {".npy": _opened_npy, ".npz": _opened_npz, ".tif": _opened_tiff, ".tiff": _opened_tiff}
    open_array = openers.get(Path(name).suffix.lower())
    with open_array(content, name) if open_array is not None else _opened_slice(content, part, name) as stored:
        pixels = math.prod(sorted(stored.shape)[-2:])  # of the two longest axes: which are sides is not known yet
        claimed_bytes = math.prod(stored.shape) * stored.dtype.itemsize
        if pixels > MOST_PIXELS:
            raise BrokenImage(name, f"it claims {pixels:,} pixels, more than {MOST_PIXELS:,}")
        if claimed_bytes > MOST_BYTES:
            raise BrokenImage(name, f"it claims {claimed_bytes:,} bytes, more than {MOST_BYTES:,}")
        if stored.bytes_there is not None and stored.bytes_there < claimed_bytes:
            raise BrokenImage(name, "it is truncated")
        if 0 in stored.shape:
            raise BrokenImage(name, "it is empty")
        stored.verify()
        yield stored


def _opened_file(content: Content) -> Any:
    """Opens a file, or the bytes of one, for reading."""
    return io.BytesIO(content) if isinstance(content, bytes) else Path(content).open("rb")


@contextmanager
def _opened_npy(content: Content, name: str) -> Iterator[_StoredArray]:
    """Yields the array of a .npy file."""
    with _opened_file(content) as file:
        stored = _npy_header(file, name)
        data_begin = file.tell()
        data_bytes = file.seek(0, os.SEEK_END) - data_begin
        file.seek(0)
        yield stored._replace(read=lambda: np.load(file, allow_pickle=False), bytes_there=data_bytes)


def _npy_header(file: Any, name: str) -> _StoredArray:
    """Reads the header of a .npy file; `read` of what it returns is a placeholder."""
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(file)
    if dtype.hasobject:
        raise BrokenImage(name, "it holds Python objects, which are not read")
    return _StoredArray(shape, dtype, lambda: np.empty(0))


@contextmanager
def _opened_npz(content: Content, name: str) -> Iterator[_StoredArray]:
    """Yields the only array of a .npz file, or the one called "image"."""
    with _opened_file(content) as file, zipfile.ZipFile(file) as archive:
        member = _npz_member(archive, name)
        if member.file_size > MOST_BYTES:
            raise BrokenImage(name, f"it claims {member.file_size:,} bytes, more than {MOST_BYTES:,}")

        def read() -> _Array:
            with archive.open(member) as opened:  # it gives no more than `file_size`
                array: _Array = np.lib.format.read_array(opened, allow_pickle=False)
                return array

        with archive.open(member) as opened:
            stored = _npy_header(opened, name)
        yield stored._replace(read=read)


def _npz_member(archive: zipfile.ZipFile, name: str) -> zipfile.ZipInfo:
    """Returns the only array of an archive, or the first that is called "image".

    Raises:
        BrokenImage: there is none.
    """
    arrays = [member for member in archive.infolist() if member.filename.endswith(".npy")]
    if len(arrays) == 1:
        return arrays[0]
    for member in arrays:
        if member.filename == "image.npy":
            return member
    raise BrokenImage(name, f"it holds {len(arrays)} arrays, and none is called 'image'")


@contextmanager
def _opened_tiff(content: Content, name: str) -> Iterator[_StoredArray]:
    """Yields the first series of pages of a TIFF."""
    tifffile = library("tifffile", "TIFF of other than 3 channels of 8 bits", "images")
    logging.getLogger("tifffile").setLevel(logging.CRITICAL)  # one message, or none
    with _opened_file(content) as file, tifffile.TiffFile(file, **_READ_NO_OTHER_FILES) as tiff:
        size = file.seek(0, os.SEEK_END)
        _verify_pages(file, tiff.tiff, name)
        series = tiff.series[0]
        for page in series.pages:
            _verify_segments(file, page, size, name)
        channels_first: bool | None = None
        if series.axes.endswith("S"):  # samples of each pixel
            channels_first = False
        elif len(series.shape) == 3:
            channels_first = True
        yield _StoredArray(tuple(series.shape), np.dtype(series.dtype), series.asarray, channels_first)


def _verify_pages(file: Any, form: Any, name: str) -> None:
    """Refuses too many pages, and any that leads back to an earlier one: tifffile would go round for ever.

    A page is the number of its tags, these tags, and the offset of the next page, which is 0 after the last one (TIFF
    6.0, section 2).

    Args:
        file: the TIFF.
        form: tifffile's sizes and formats of these numbers.
        name: name of the file, for messages.
    """
    offsets: set[int] = set()
    # The offset of the first page stands behind the head, which has 4 bytes, and 8 where offsets have 8 (BigTIFF).
    file.seek(4 if form.offsetsize == 4 else 8)
    while True:
        offset_bytes = file.read(form.offsetsize)
        if len(offset_bytes) < form.offsetsize:
            return
        (offset,) = struct.unpack(form.offsetformat, offset_bytes)
        file.seek(offset)
        tag_count_bytes = file.read(form.tagnosize)
        if len(tag_count_bytes) < form.tagnosize or offset == 0:
            return
        if offset in offsets:
            raise BrokenImage(name, "its pages lead round in a circle")
        if len(offsets) == _MOST_PAGES:
            raise BrokenImage(name, f"it has more than {_MOST_PAGES:,} pages")
        offsets.add(offset)
        (tag_count,) = struct.unpack(form.tagnoformat, tag_count_bytes)
        file.seek(tag_count * form.tagsize, os.SEEK_CUR)


def _verify_segments(file: Any, page: Any, size: int, name: str) -> None:
    """Refuses strips or tiles that end outside the file, or unpack to more than they should."""
    segment_bytes = math.prod(page.keyframe.chunks) * page.keyframe.dtype.itemsize
    unpacker = _UNPACKER_BY_COMPRESSION.get(page.keyframe.compression)
    for offset, packed_bytes in zip(page.dataoffsets, page.databytecounts, strict=True):
        if offset + packed_bytes > size:
            raise BrokenImage(name, "it is truncated")
        if segment_bytes > MOST_BYTES:
            raise BrokenImage(name, f"it claims {segment_bytes:,} bytes, more than {MOST_BYTES:,}")
        if unpacker is None:
            continue
        is_deflated = unpacker is zlib.decompressobj
        most_unpacked_bytes = packed_bytes * _MOST_INFLATION if is_deflated else math.inf
        if most_unpacked_bytes > 8 * segment_bytes:
            file.seek(offset)
            unpacked = unpacker().decompress(file.read(packed_bytes), segment_bytes + 1)
            _refuse_larger(unpacked, segment_bytes, name)


def _refuse_larger(unpacked: bytes, limit: int, name: str) -> None:
    """Refuses data that unpacks to more than `limit` bytes."""
    if len(unpacked) > limit:
        raise BrokenImage(name, f"it unpacks to more than the {limit:,} bytes of its size")


def _opened_hdf5(content: Content) -> Any:
    """Opens an HDF5 file for reading."""
    h5py = library("h5py", "HDF5", "images")
    return h5py.File(io.BytesIO(content) if isinstance(content, bytes) else content, "r")


@contextmanager
def _opened_slice(content: Content, part: int, name: str) -> Iterator[_StoredArray]:
    """Yields slice `part` of a volume; of k-space its image, the inverse Fourier transform."""
    with _opened_hdf5(content) as file:
        volume = _volume(file, name)
        channels_first = True if volume.ndim == 4 else None

        def read() -> _Array:
            values: _Array = volume[part]
            if volume.name == "/kspace":
                # Its frequency 0, and the middle of the image, lie in the middle; numpy has both at index 0.
                axes = (-2, -1)
                image = np.fft.ifft2(np.fft.ifftshift(values, axes), norm="ortho")
                return np.abs(np.fft.fftshift(image, axes)).astype(np.float32)
            return values

        verify = partial(_verify_chunks, volume, part, name)
        yield _StoredArray(tuple(volume.shape[1:]), volume.dtype, read, channels_first, verify=verify)


def _volume(file: Any, name: str) -> Any:
    """Returns fastMRI's reconstruction [slices, H, W], else its k-space [slices, coils, H, W].

    Of one coil k-space is [slices, H, W].

    Raises:
        BrokenImage: it has neither, or one that is no plain array of numbers within the file.
    """
    h5py = library("h5py", "HDF5", "images")
    key = next((key for key in _VOLUME_NAMES if key in file.keys()), None)  # noqa: SIM118  not the values
    if key is None:
        quoted_names = ", ".join(shown(str(key)) for key in list(file.keys())[:10]) or "nothing"
        raise BrokenImage(name, f"it holds {quoted_names}, and none of fastMRI's {', '.join(_VOLUME_NAMES)}")
    if not isinstance(file.get(key, getlink=True), h5py.HardLink):
        raise BrokenImage(name, f"its {key} is a link out of the file")
    volume = file[key]
    if not isinstance(volume, h5py.Dataset) or volume.is_virtual or volume.external:
        raise BrokenImage(name, f"its {key} lies in other files, or is no array")
    if volume.ndim not in (3, 4) or volume.dtype.kind not in "iufc":
        raise BrokenImage(name, f"its {key} is no volume of numbers")
    filters = _filter_numbers(volume)
    # Of two unpackers, one would unpack a thousandfold what the other has unpacked.
    has_filter_twice = len(set(filters)) < len(filters)
    if has_filter_twice or not set(filters) <= _FILTER_NAMES.keys():
        packed = ", ".join(_FILTER_NAMES.get(number, f"number {number}") for number in filters)
        raise BrokenImage(
            name, f"its {key} is packed by {packed}; read is {', '.join(_FILTER_NAMES.values())}, each once"
        )
    return volume


def _filter_numbers(volume: Any) -> list[int]:
    """Returns HDF5's numbers of the filters that a volume's chunks are packed with, in their order."""
    packing = volume.id.get_create_plist()
    return [packing.get_filter(number)[0] for number in range(packing.get_nfilters())]


def _verify_chunks(volume: Any, part: int, name: str) -> None:
    """Refuses slice `part` if its chunks unpack to more than they should."""
    if volume.chunks is None:
        return
    chunk_bytes = math.prod(volume.chunks) * volume.dtype.itemsize
    if chunk_bytes > MOST_BYTES:
        raise BrokenImage(name, f"it claims {chunk_bytes:,} bytes a chunk, more than {MOST_BYTES:,}")
    filters = _filter_numbers(volume)
    for chunk in _chunks_of_slice(volume, part):
        if chunk.size > chunk_bytes + chunk_bytes // 8 + 1024:
            raise BrokenImage(name, f"it claims {chunk_bytes:,} bytes a chunk, stored in {chunk.size:,}")
        # A bit of the mask says that the filter of its number was left out for this chunk.
        is_deflated = _DEFLATE_FILTER in filters and not chunk.filter_mask >> filters.index(_DEFLATE_FILTER) & 1
        if is_deflated and chunk.size * _MOST_INFLATION > max(8 * chunk_bytes, _HARMLESS_BYTES):
            _, content = volume.id.read_direct_chunk(chunk.chunk_offset)
            limit = chunk_bytes + _CHECKSUM_BYTES
            _refuse_larger(zlib.decompressobj().decompress(content, limit + 1), limit, name)


def _chunks_of_slice(volume: Any, part: int) -> list[Any]:
    """Returns h5py's facts of the chunks in which slice `part` lies; such chunks may hold other slices too."""
    first_slice = part - part % volume.chunks[0]
    chunks: list[Any] = []

    def take(chunk: Any) -> None:
        if chunk.chunk_offset[0] == first_slice:
            chunks.append(chunk)

    volume.id.chunk_iter(take)
    return chunks
