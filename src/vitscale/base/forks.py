"""Work spread over the cores by forks of this process, which already have the items: only results are sent."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

from vitscale.base.processors import usable_cores

Item = TypeVar("Item")
Done = TypeVar("Done")


def spread(work: Callable[[Item], Done], items: Sequence[Item], *, fewest: int) -> list[Done]:
    """Return `[work(item) for item in items]`, computed by this process and a fork for each further core.

    Changes that `work` makes elsewhere are lost. Where a fork fails, its share is done here, so that errors are those
    of `work`.

    Args:
        work: pure, and without threads; its results can be pickled.
        items: items to work on.
        fewest: number of items from which forking is worth its cost.
    """
    processes = 1
    if _may_fork() and len(items) >= max(1, fewest):
        processes = min(len(items), len(usable_cores()))
    # Indices of the items that each process takes: with 2 processes 0, 2, 4, ... and 1, 3, 5, ...
    parent_share, *fork_shares = [range(first, len(items), processes) for first in range(processes)]
    result_by_index: dict[int, Done] = {}
    children: list[_Fork] = []
    try:
        for share in fork_shares:
            child = _start_fork(work, items, share)
            if child is None:
                break
            children.append(child)
        result_by_index |= {index: work(items[index]) for index in parent_share}
        for child in children:
            result_by_index |= _read_results(child)
    finally:
        for child in children:
            os.close(child.results)
            os.kill(child.process_id, signal.SIGKILL)  # it has answered, or nobody wants its answer any more
            os.waitpid(child.process_id, 0)
    for index, item in enumerate(items):
        if index not in result_by_index:  # of a fork that could not be started, or failed
            result_by_index[index] = work(item)
    return [result_by_index[index] for index in range(len(items))]


class _Fork(NamedTuple):
    """A child that works on a share of the items."""

    process_id: int
    results: int
    """Descriptor from which its pickled results are read."""
    share: range
    """Indices of its items."""


def _start_fork(work: Callable[[Item], Done], items: Sequence[Item], share: range) -> _Fork | None:
    """Start a fork that works on the items with the indices in `share`; return None where none can be started."""
    read_end, write_end = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12's on threads, which take no part
        try:
            process_id = os.fork()
        except OSError:  # no memory, or no more processes
            os.close(read_end)
            os.close(write_end)
            return None
    is_fork = process_id == 0
    if is_fork:
        _work_and_exit(write_end, work, [items[index] for index in share])
    os.close(write_end)
    return _Fork(process_id, read_end, share)


def _read_results(child: _Fork) -> dict[int, Any]:
    """Wait for a fork's results, and return them by the indices of its items; none where the fork was ended."""
    # A fork that was ended has written nothing, or only a part.
    with suppress(EOFError, pickle.UnpicklingError), os.fdopen(child.results, "rb", closefd=False) as file:
        results = pickle.load(file)  # noqa: S301 - of a fork of this process
        return dict(zip(child.share, results, strict=True))
    return {}


def has_other_threads() -> bool:
    """Whether this process runs threads beside the calling one, of Python or of a library; True where that is unknown.

    A fork has the calling thread alone. Work that counts on a library's threads, such as polars', waits in it for ever.
    """
    try:
        return len(list(Path("/proc/self/task").iterdir())) > 1
    except OSError:
        return True


def _may_fork() -> bool:
    """Whether a fork may go on without an exec: macOS's own libraries end such a process
    (https://docs.python.org/3/library/multiprocessing.html#contexts-and-start-methods)."""
    return sys.platform != "darwin"


def _work_and_exit(write_end: int, work: Callable[[Item], Done], items: Sequence[Item]) -> NoReturn:
    """Do a fork's work, write its results to a pipe, and end the fork.

    No other code of the process that the fork copies may run in it.

    Args:
        write_end: descriptor of the pipe.
        work: as in `spread`.
        items: the fork's share of the items.
    """
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # its parent ends it
        with os.fdopen(write_end, "wb") as file:
            pickle.dump([work(item) for item in items], file, pickle.HIGHEST_PROTOCOL)
    finally:
        os._exit(0)
