"""Decodes many images into one array: by threads in a rank, by processes in the driver, which may use all cores."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitscale.errors import RequestError, shown
from vitscale.processes.parent_death import end_with_parent
from vitscale.sources.arrays import ARRAY_EXTENSIONS, ArrayShape, decode_array, verify_array
from vitscale.sources.base import Encoded, Images, OnProgress, spending
from vitscale.sources.cache import Room, Unfinished, chunk_samples, map_in_threads
from vitscale.sources.pictures import BrokenImage, decode_square, verify_picture
from vitscale.sources.scenes import ScenePairs

FEWEST_FOR_PROCESSES = 2048
"""Fewest images for which processes are started; fewer would be decoded before they had started."""
_MOST_IMAGES_NAMED = 50
_MOST_PENDING_CHUNKS = 4
"""Most chunks that wait for each process."""


class ImageProblem(NamedTuple):
    """A broken image."""

    name: str
    what: str
    """What is wrong with it."""


UndecodedFiles = dict[int, ImageProblem]
"""Number of a broken image -> its problem."""


def decode_image(encoded: Encoded, number: int, shape: ArrayShape) -> Images:
    """Decodes one image as `[side, side, channels]` of the set's dtype.

    Raises:
        RequestError: it is broken; the message names its file.
    """
    if isinstance(encoded, ScenePairs):
        return encoded.decode(number, shape)
    name = encoded.name(number)
    with spending("reading"):
        content = encoded.content(number)
    if _is_read_as_array(name, shape):
        with spending("both"):
            return decode_array(content, shape, encoded.part(number), name)
    _refuse_picture_channels(name, shape)
    pixels = decode_square(content, shape.side, shape.channels, name, deep=shape.dtype != "uint8")
    if shape.dtype == "uint16":
        pixels = np.rint(pixels)
    return pixels.astype(shape.dtype, copy=False)


def problems_of(encoded: Encoded, shape: ArrayShape, *, decode: bool) -> UndecodedFiles:
    """Returns the broken images of a split, by their numbers.

    Args:
        encoded: the images.
        shape: what each is to be stored as.
        decode: whether to decode each image; else only what is cheap is checked, which finds fewer.
    """
    examine = decode_image if decode else _verify_image

    def problem_of(number: int) -> ImageProblem | None:
        try:
            examine(encoded, number, shape)
        except BrokenImage as broken:
            return ImageProblem(broken.name, broken.what)
        return None

    problems = map_in_threads(problem_of, range(len(encoded)))
    return {number: problem for number, problem in enumerate(problems) if problem is not None}


def _verify_image(encoded: Encoded, number: int, shape: ArrayShape) -> None:
    """Checks an image as far as is cheap.

    Raises:
        BrokenImage: it is broken, or cannot be stored as `shape`.
    """
    if isinstance(encoded, ScenePairs):
        encoded.verify(number)
        return
    name = encoded.name(number)
    content = encoded.content(number)
    if _is_read_as_array(name, shape):
        verify_array(content, shape, name)
    else:
        _refuse_picture_channels(name, shape)
        verify_picture(content, name)


def refuse_broken(problems: Sequence[ImageProblem], skipped_at_most: int = 0) -> None:
    """Refuses broken images, naming all of them at once, unless there are few enough to leave out.

    Raises:
        RequestError: there are more.
    """
    if len(problems) <= skipped_at_most:
        return
    if len(problems) == 1:
        raise BrokenImage(problems[0].name, problems[0].what)
    images_by_problem = Counter(problems)  # a file of several images may be broken in each
    clauses = [
        _problem_clause(problem, images) for problem, images in images_by_problem.most_common(_MOST_IMAGES_NAMED)
    ]
    more = (
        f"; and {len(images_by_problem) - _MOST_IMAGES_NAMED:,} more"
        if len(images_by_problem) > _MOST_IMAGES_NAMED
        else ""
    )
    raise RequestError(
        f"{len(problems):,} images are broken: {'; '.join(clauses)}{more}",
        next_step=f"Repair or remove the files, or set data.skip_broken = {len(problems)} to leave them out",
    )


def _problem_clause(problem: ImageProblem, images: int) -> str:
    """Returns a file's name and problem, as "a.npz (it is empty; 3 of its images)"."""
    count = f"; {images:,} of its images" if images > 1 else ""
    return f"{shown(problem.name)} ({problem.what}{count})"


def decode_split(
    room: Room,
    split: str,
    images: Images,
    encoded: Encoded,
    shape: ArrayShape,
    *,
    processes: int = 0,
    progress: OnProgress | None = None,
) -> None:
    """Decodes the chunks of a split that are not finished, and notes in the room each that then is.

    Args:
        room: made `images`, and knows the finished chunks.
        split: one of `SPLITS`.
        images: is filled, `[len(encoded), side, side, channels]`.
        encoded: the images.
        shape: what they are stored as.
        processes: number of decoding processes, which need `images` to lie in a file; 0: threads of this one.
        progress: called with the images done and all images of this split.

    Raises:
        RequestError: some are broken; all of them are named.
    """
    chunks = _Chunks(images=len(encoded), size=chunk_samples(images.shape[1:], shape.dtype))
    remaining = [chunk for chunk in range(chunks.chunk_count) if chunk not in room.done[split]]
    # One by one: all parts of a large set are too many to hold.
    parts = (_ChunkImages(chunk, encoded.some(chunks.image_numbers(chunk))) for chunk in remaining)
    images_done = len(encoded) - sum(len(chunks.image_numbers(chunk)) for chunk in remaining)
    has_enough_for_processes = len(remaining) * chunks.size >= FEWEST_FOR_PROCESSES
    if processes and isinstance(images, np.memmap) and has_enough_for_processes:
        decoded_chunks = _fill_by_processes(processes, Path(str(images.filename)), shape, chunks.size, parts)
    else:
        decoded_chunks = _fill_by_threads(images, shape, chunks.size, parts)
    problems: list[ImageProblem] = []
    for decoded in decoded_chunks:
        problems += decoded.result.problems
        if not decoded.result.problems:
            room.finish(split, decoded.chunk, decoded.result.checksum)
        images_done += len(chunks.image_numbers(decoded.chunk))
        if progress is not None:
            progress(images_done, len(encoded))
    refuse_broken(problems)


class _Chunks(NamedTuple):
    """Divides the images of a split into chunks, each of which is decoded at once."""

    images: int
    size: int
    """Images of a chunk; the last one may have fewer."""

    @property
    def chunk_count(self) -> int:
        """Number of chunks."""
        return math.ceil(self.images / self.size)

    def image_numbers(self, chunk: int) -> NDArray[np.int64]:
        """Returns the numbers of the images in a chunk."""
        return np.arange(chunk * self.size, min((chunk + 1) * self.size, self.images))


class _ChunkImages(NamedTuple):
    """The images of one chunk."""

    chunk: int
    encoded: Encoded


class _ChunkResult(NamedTuple):
    """What is known of a chunk once its images are decoded."""

    checksum: int
    problems: list[ImageProblem]
    """Problems of its broken images, which are not filled."""


class _DecodedChunk(NamedTuple):
    """A chunk that has been decoded."""

    chunk: int
    result: _ChunkResult


def _fill_by_threads(
    images: Images, shape: ArrayShape, images_per_chunk: int, parts: Iterator[_ChunkImages]
) -> Iterator[_DecodedChunk]:
    """Decodes chunks one after the other, each by this process's threads."""
    for part in parts:
        first = part.chunk * images_per_chunk
        images_of_chunk = images[first : first + images_per_chunk]
        yield _DecodedChunk(part.chunk, _fill_chunk(images_of_chunk, part.encoded, shape, threads=True))


def _fill_chunk(images: Images, encoded: Encoded, shape: ArrayShape, *, threads: bool) -> _ChunkResult:
    """Decodes all images of a chunk into `images`, in this thread or, with `threads`, by one for each core."""

    def decode(number: int) -> ImageProblem | None:
        try:
            images[number] = decode_image(encoded, number, shape)
        except BrokenImage as broken:
            return ImageProblem(broken.name, broken.what)
        return None

    numbers = range(len(encoded))
    results = map_in_threads(decode, numbers) if threads else map(decode, numbers)
    problems = [problem for problem in results if problem is not None]
    return _ChunkResult(zlib.crc32(images.data), problems)


def _fill_by_processes(
    processes: int, path: Path, shape: ArrayShape, images_per_chunk: int, parts: Iterator[_ChunkImages]
) -> Iterator[_DecodedChunk]:
    """Decodes chunks by processes, and yields them as they are done, in any order.

    A few chunks are pending for each process; another one is taken from `parts` only when one of these is done.

    Args:
        processes: their number.
        path: the file of the array that they fill.
        shape: what images are stored as.
        images_per_chunk: images of each chunk but the last, which may have fewer.
        parts: the images of each chunk that is to be decoded.

    Raises:
        Unfinished: such a process was ended from outside.
    """
    most_pending = processes * _MOST_PENDING_CHUNKS
    # Spawned, not forked: the driver has threads. Whatever is unpickled in them comes from here.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(processes, context, initializer=_end_with_driver, initargs=(os.getpid(),))
    chunk_by_future: dict[Future[_ChunkResult], int] = {}
    try:
        while True:
            free_places = most_pending - len(chunk_by_future)
            for part in islice(parts, free_places):  # takes these out of the iterator
                first_image = part.chunk * images_per_chunk
                future = pool.submit(_fill_chunk_of_file, path, first_image, part.encoded, shape)
                chunk_by_future[future] = part.chunk
            if not chunk_by_future:
                return
            done_futures = wait(chunk_by_future, return_when=FIRST_COMPLETED).done
            for future in done_futures:
                chunk = chunk_by_future.pop(future)
                yield _DecodedChunk(chunk, future.result())
    except BrokenProcessPool:
        raise Unfinished(
            "a process that decodes images was ended from outside", next_step="Run again: what is done is kept"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _end_with_driver(driver: int) -> None:
    """Prepares a decoding process to end when the driver, whose process id is `driver`, ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the driver
    if not end_with_parent(driver):
        os._exit(1)


def _fill_chunk_of_file(path: Path, first: int, encoded: Encoded, shape: ArrayShape) -> _ChunkResult:
    """Decodes a chunk in a decoding process, into the array in file `path` from image `first` on."""
    _prefetch_files(encoded)
    images = np.lib.format.open_memmap(path, mode="r+")
    return _fill_chunk(images[first : first + len(encoded)], encoded, shape, threads=False)


def _prefetch_files(encoded: Encoded) -> None:
    """Asks for files before their turn, so that the disk reads while others are decoded.

    Files on disk then take a fifth of the time. What cannot be opened is named when it is decoded.
    """
    for number in range(len(encoded)):
        with suppress(OSError, RequestError):
            content = encoded.content(number)
            if not isinstance(content, str):
                break  # asking for it has read it
            file = os.open(content, os.O_RDONLY | os.O_NONBLOCK)
            try:
                if hasattr(os, "posix_fadvise"):  # not on macOS
                    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(file)


def _is_read_as_array(name: str, shape: ArrayShape) -> bool:
    """Whether a file is read as an array; TIFF is a picture where pictures are asked for."""
    suffix = Path(name).suffix.lower()
    as_picture = suffix in (".tif", ".tiff") and (shape.channels, shape.dtype) == (3, "uint8")
    return suffix in ARRAY_EXTENSIONS and not as_picture


def _refuse_picture_channels(name: str, shape: ArrayShape) -> None:
    """Refuses a picture where the set has other channels than pictures can have."""
    if shape.channels not in (1, 3):
        raise BrokenImage(name, f"a picture has 1 or 3 channels, and data.channels is {shape.channels}")
