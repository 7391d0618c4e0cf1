"""Decodes many images into one array: by threads in a rank, by processes in the driver, which may use all cores."""

from __future__ import annotations

import multiprocessing
import os
import signal
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np

from vitscale.errors import RequestError, shown
from vitscale.processes.parent_death import end_with_parent
from vitscale.sources.arrays import ARRAY_EXTENSIONS, ArrayShape, decode_array, verify_array
from vitscale.sources.base import Encoded, Images, OnProgress, spending
from vitscale.sources.cache import Room, Unfinished, chunk_samples, in_threads
from vitscale.sources.pictures import BrokenImage, decode_square, verify_picture
from vitscale.sources.scenes import ScenePairs

FEWEST_FOR_PROCESSES = 2048
"""Fewest images for which processes are started; fewer would be decoded before they had started."""
_MOST_NAMED = 50
_MOST_PENDING = 4
"""Most chunks that wait for each process."""

UndecodedFiles = dict[int, tuple[str, str]]
"""Number of a broken image -> its name, and what is wrong with it."""


def decode_image(encoded: Encoded, number: int, shape: ArrayShape) -> Images:
    """One image as `[side, side, channels]`; raises `RequestError` naming the file."""
    if isinstance(encoded, ScenePairs):
        return encoded.decode(number, shape)
    name = encoded.name(number)
    with spending("reading"):
        content = encoded.content(number)
    if _is_array(name, shape):
        with spending("both"):
            return decode_array(content, shape, encoded.part(number), name)
    _refuse_channels(name, shape)
    pixels = decode_square(content, shape.side, shape.channels, name, deep=shape.dtype != "uint8")
    return (np.rint(pixels) if shape.dtype == "uint16" else pixels).astype(shape.dtype, copy=False)


def problems_of(encoded: Encoded, shape: ArrayShape, *, wholly: bool) -> UndecodedFiles:
    """Every broken image: as far as is cheap to tell, or with `wholly` by decoding each."""

    def judge(number: int) -> tuple[str, str] | None:
        try:
            if wholly:
                decode_image(encoded, number, shape)
                return None
            if isinstance(encoded, ScenePairs):
                encoded.verify(number)
                return None
            name, content = encoded.name(number), encoded.content(number)
            if _is_array(name, shape):
                verify_array(content, shape, name)
            else:
                _refuse_channels(name, shape)
                verify_picture(content, name)
        except BrokenImage as broken:
            return broken.name, broken.what
        return None

    judged = in_threads(judge, range(len(encoded)))
    return {number: problem for number, problem in enumerate(judged) if problem is not None}


def refuse_broken(problems: Sequence[tuple[str, str]], skipped_at_most: int = 0) -> None:
    """Refuses broken images, naming all of them at once, unless there are few enough to leave out.

    Raises:
        RequestError: there are more.
    """
    if len(problems) <= skipped_at_most:
        return
    files = Counter(problems)
    if len(problems) == 1:
        raise BrokenImage(*problems[0])
    named = "; ".join(
        f"{shown(name)} ({what}{f'; {images:,} of its images' if images > 1 else ''})"
        for (name, what), images in files.most_common(_MOST_NAMED)
    )
    more = f"; and {len(files) - _MOST_NAMED:,} more" if len(files) > _MOST_NAMED else ""
    raise RequestError(
        f"{len(problems):,} images are broken: {named}{more}",
        next_step=f"Repair or remove the files, or set data.skip_broken = {len(problems)} to leave them out",
    )


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
    """Decodes into `images` what the room does not have yet, and notes each finished chunk.

    Args:
        room: where `images` lie.
        split: one of `SPLITS`.
        images: `[len(encoded), side, side, channels]`.
        encoded: the images.
        shape: what they are stored as.
        processes: number of decoding processes, which need `images` to lie in a file; 0: threads of this one.
        progress: called with the images done and all images of this split.

    Raises:
        RequestError: some are broken; all of them are named.
    """
    size = chunk_samples(images.shape[1:], shape.dtype)
    every = np.arange(len(encoded))
    left = [n for n in range(-(-len(encoded) // size)) if n not in room.done[split]]
    parts = ((n, encoded.some(every[n * size : (n + 1) * size])) for n in left)
    done = len(encoded) - sum(min(size, len(encoded) - n * size) for n in left)
    problems: list[tuple[str, str]] = []
    spread = processes and isinstance(images, np.memmap) and len(left) * size >= FEWEST_FOR_PROCESSES
    for chunk, checksum, wrong in (
        _by_processes(processes, Path(str(images.filename)), shape, size, parts)  # type: ignore[union-attr]  # a memory map has a file
        if spread
        else ((n, *_fill(images[n * size : (n + 1) * size], part, shape, threads=True)) for n, part in parts)
    ):
        problems += wrong
        if not wrong:
            room.finish(split, chunk, checksum)
        done += min(size, len(encoded) - chunk * size)
        if progress is not None:
            progress(done, len(encoded))
    refuse_broken(problems)


def _fill(images: Images, encoded: Encoded, shape: ArrayShape, *, threads: bool) -> tuple[int, list[tuple[str, str]]]:
    """Decodes a chunk; returns its checksum, and which of its images are broken."""

    def decode(number: int) -> tuple[str, str] | None:
        try:
            images[number] = decode_image(encoded, number, shape)
        except BrokenImage as broken:
            return broken.name, broken.what
        return None

    numbers = range(len(encoded))
    judged = in_threads(decode, numbers) if threads else map(decode, numbers)
    wrong = [problem for problem in judged if problem is not None]
    return zlib.crc32(images.data), wrong


def _by_processes(
    processes: int, path: Path, shape: ArrayShape, size: int, parts: Iterator[tuple[int, Encoded]]
) -> Iterator[tuple[int, int, list[tuple[str, str]]]]:
    # Spawned, not forked: the driver has threads. Whatever is unpickled in them comes from here.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(processes, context, _tied, (os.getpid(),))
    pending: dict[Future[tuple[int, list[tuple[str, str]]]], int] = {}
    try:
        while True:
            while len(pending) < processes * _MOST_PENDING and (item := next(parts, None)) is not None:
                chunk, encoded = item
                pending[pool.submit(partial(_fill_file, path, chunk * size, encoded, shape))] = chunk
            if not pending:
                break
            for future in wait(pending, return_when=FIRST_COMPLETED).done:
                yield pending.pop(future), *future.result()
    except BrokenProcessPool:
        raise Unfinished(
            "a process that decodes images was ended from outside", next_step="Run again: what is done is kept"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _tied(driver: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the driver
    if not end_with_parent(driver):
        os._exit(1)


def _fill_file(path: Path, first: int, encoded: Encoded, shape: ArrayShape) -> tuple[int, list[tuple[str, str]]]:
    _read_ahead(encoded)
    images = np.lib.format.open_memmap(path, mode="r+")
    return _fill(images[first : first + len(encoded)], encoded, shape, threads=False)


def _read_ahead(encoded: Encoded) -> None:
    """Asks for files before their turn, so that the disk reads while others are decoded: files on disk take a fifth of
    the time. What cannot be opened is named when it is decoded."""
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


def _is_array(name: str, shape: ArrayShape) -> bool:
    suffix = Path(name).suffix.lower()
    as_picture = suffix in (".tif", ".tiff") and (shape.channels, shape.dtype) == (3, "uint8")
    return suffix in ARRAY_EXTENSIONS and not as_picture


def _refuse_channels(name: str, shape: ArrayShape) -> None:
    if shape.channels not in (1, 3):
        raise BrokenImage(name, f"a picture has 1 or 3 channels, and data.channels is {shape.channels}")
