"""Work on many images at once, in a thread per core."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

_BLOCK = 4096
"""Items handed to the threads at once: a future for each of a million would cost a gigabyte."""


def in_threads(function: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """Results in order, from a thread per core that this process may use; the first failure ends the rest.

    Pillow releases the interpreter lock while it decodes.
    """
    remaining = iter(items)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        while block := list(islice(remaining, _BLOCK)):
            yield from pool.map(function, block)
