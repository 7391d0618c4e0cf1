"""Times fetches of torch's DataLoader, and says which loader it was.

Beginning to iterate counts as fetching too: that is where workers start.
"""

from __future__ import annotations

import functools
import weakref
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .lines import HookedLoaderLine

if TYPE_CHECKING:
    from .hooking import ProcessHook


class Loaders:
    """Numbers and facts of the loaders that the program iterates over.

    Iterators change with each epoch; the sampler that they draw from is the loader's as long as it lives.
    """

    def __init__(self) -> None:
        self.lines: dict[int, HookedLoaderLine] = {}
        """Number of a loader, from 1 -> its line."""
        self._numbers: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._iterators: weakref.WeakSet[Any] = weakref.WeakSet()

    def number_of(self, iterator: Any) -> int:
        """Number of the loader that made this iterator."""
        sampler = iterator._index_sampler
        numbered = self._numbers.get(id(sampler))
        if numbered is not None and numbered[0]() is sampler:
            return numbered[1]
        number = len(self.lines) + 1
        self._numbers[id(sampler)] = (weakref.ref(sampler), number)
        self.lines[number] = loader_line(iterator)
        return number

    def remember(self, iterator: Any) -> None:
        """Keep an iterator with workers, to end them."""
        if getattr(iterator, "_workers", None):
            self._iterators.add(iterator)

    def end_workers(self) -> int:
        """End the workers of all iterators as their loaders do it; the number of workers that ran."""
        ended = 0
        for iterator in list(self._iterators):
            workers = [worker for worker in iterator._workers if worker.is_alive()]
            ended += len(workers)
            iterator._shutdown_workers()
        return ended


def loader_line(iterator: Any) -> HookedLoaderLine:
    """Facts of the loader that made this iterator."""
    batches = iterator._index_sampler
    is_batched = bool(iterator._auto_collation)
    batch_size = getattr(batches, "batch_size", None) if is_batched else None
    workers = int(iterator._num_workers)
    return HookedLoaderLine(
        workers=workers,
        batch_size=batch_size if isinstance(batch_size, int) else None,
        prefetch_factor=getattr(iterator, "_prefetch_factor", None) if workers else None,
        persistent_workers=bool(getattr(iterator, "_persistent_workers", False)),
        pin_memory=bool(iterator._pin_memory),
        dataset=type(iterator._dataset).__name__,
        sampler=_sampler_name(batches),
    )


def _sampler_name(batches: Any) -> str:
    """Class of the sampler below batch samplers; Accelerate has one around another."""
    sampler = batches
    for _ in range(4):
        inner = getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)
        if inner is None:
            break
        sampler = inner
    return type(sampler).__name__


def time_fetches(dataloader: ModuleType, hook: ProcessHook) -> None:
    """Time `next` of all iterators of torch's loaders, and the begin of each iteration."""
    iterator_class = dataloader._BaseDataLoaderIter
    fetch_next = iterator_class.__next__
    begin_iteration = dataloader.DataLoader.__iter__

    @functools.wraps(fetch_next)
    def timed_next(iterator: Any) -> Any:
        opening = hook.enter_fetch()
        if opening is None:
            return fetch_next(iterator)
        is_batch = False
        try:
            batch = fetch_next(iterator)
            is_batch = True
            return batch
        finally:
            hook.leave_fetch(opening, iterator, is_batch)

    @functools.wraps(begin_iteration)
    def timed_iter(loader: Any) -> Any:
        opening = hook.enter_fetch()
        if opening is None:
            return begin_iteration(loader)
        iterator = None
        try:
            iterator = begin_iteration(loader)
            return iterator
        finally:
            hook.leave_iteration_begin(opening, iterator)

    iterator_class.__next__ = timed_next
    dataloader.DataLoader.__iter__ = timed_iter
