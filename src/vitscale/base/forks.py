"""Work spread over the cores by forks of this process: what is worked on is there already, and results alone travel."""

from __future__ import annotations

import os
import pickle
import signal
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

Item = TypeVar("Item")
Done = TypeVar("Done")


def spread(work: Callable[[Item], Done], items: Sequence[Item], *, fewest: int) -> list[Done]:
    """`[work(item) for item in items]`, the items dealt out to this process and a fork of it for each further core.

    What `work` changes elsewhere is lost. Where a fork fails, its share is done here, so that errors are those of
    `work`.

    Args:
        work: pure, and without threads; what it returns can be pickled.
        items: to work on.
        fewest: items below which none is worth a fork.
    """
    forks = min(len(items), len(os.sched_getaffinity(0))) if len(items) >= max(1, fewest) else 1
    shares = [range(first, len(items), forks) for first in range(forks)]
    done: dict[int, Done] = {}
    children: list[tuple[int, int, range]] = []
    try:
        for share in shares[1:]:
            answer, write = os.pipe()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12's, of threads: none takes part
                try:
                    child = os.fork()
                except OSError:  # no memory, or no process more
                    os.close(answer)
                    os.close(write)
                    break
            if not child:
                _answer(write, work, [items[index] for index in share])
            os.close(write)
            children.append((child, answer, share))
        done |= {index: work(items[index]) for index in shares[0]}
        for _, answer, share in children:
            # Without an answer, or with a part of one where the fork was ended.
            with suppress(EOFError, pickle.UnpicklingError), os.fdopen(answer, "rb", closefd=False) as file:
                done |= zip(share, pickle.load(file), strict=True)  # noqa: S301 - of a fork of this process
    finally:
        for child, answer, _ in children:
            os.close(answer)
            os.kill(child, signal.SIGKILL)  # it has answered, or nobody wants its answer any more
            os.waitpid(child, 0)
    return [done[index] if index in done else work(items[index]) for index in range(len(items))]


def _answer(write: int, work: Callable[[Item], Done], items: Sequence[Item]) -> None:
    """What a fork does, to its end: nothing of the process that it is a copy of may run in it."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # its parent ends it
        with os.fdopen(write, "wb") as file:
            pickle.dump([work(item) for item in items], file, pickle.HIGHEST_PROTOCOL)
    finally:
        os._exit(0)
