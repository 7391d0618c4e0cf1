"""What the threads of this process spent on stored images: on reading them, and on making pixels of what was read."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple

_lock = threading.Lock()
_seconds = {"reading": 0.0, "decoding": 0.0, "both": 0.0}


class Spent(NamedTuple):
    """Seconds of threads, added up."""

    reading: float
    """From files, a decoded cache or memory."""
    decoding: float


@contextmanager
def spending(on: Literal["reading", "decoding", "both"]) -> Iterator[None]:
    """Counts the time inside it. "both": by a library that reads as it decodes, so that they cannot be told apart."""
    began = time.perf_counter()
    try:
        yield
    finally:
        seconds = time.perf_counter() - began
        with _lock:
            _seconds[on] += seconds


class Meter:
    """What is spent from now on."""

    def __init__(self) -> None:
        self._before = dict(_seconds)

    def read(self) -> Spent | None:
        """None where nothing was spent, as with images that are made, or where the two cannot be told apart."""
        reading, decoding, both = (_seconds[on] - self._before[on] for on in ("reading", "decoding", "both"))
        return Spent(reading, decoding) if reading + decoding > 0 and both == 0 else None
