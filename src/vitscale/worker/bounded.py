"""Stages of work that end in time, whatever hangs in them: each in a thread of its own, which is left if need be."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from vitscale.store.check_records import Stage, StageLine

_LONGEST_REASON = 500


class Stages:
    """Does one stage after the other, and records how each ended."""

    def __init__(
        self,
        limits: dict[Stage, float],
        record: Callable[[StageLine], None],
        begins: Callable[[Stage], None],
        prepare: Callable[[], None],
    ) -> None:
        """Nothing is done yet.

        Args:
            limits: seconds that each stage may take.
            record: takes how a stage ended.
            begins: is told of a stage before it begins.
            prepare: called in each stage's thread first: torch keeps the device of a process by thread.
        """
        self._limits, self._record, self._begins, self._prepare = limits, record, begins, prepare

    def do(self, stage: Stage, work: Callable[[], None]) -> bool:
        """Does `work`; True where it was done in time. What it raised, or that it did not end, is recorded."""
        self._begins(stage)
        failure: list[BaseException] = []

        def attempt() -> None:
            try:
                self._prepare()
                work()
            except BaseException as error:
                failure.append(error)

        thread = threading.Thread(target=attempt, name=f"stage-{stage}", daemon=True)
        began = time.perf_counter()
        thread.start()
        limit = self._limits[stage]
        thread.join(limit)
        seconds = time.perf_counter() - began
        if thread.is_alive():
            self._record(StageLine(name=stage, ending="timeout", seconds=seconds, reason=f"not done after {limit:g} s"))
            return False
        if failure:
            reason = f"{type(failure[0]).__name__}: {failure[0]}".splitlines()[0][:_LONGEST_REASON]
            reason = reason.encode("utf-8", errors="backslashreplace").decode()
            self._record(StageLine(name=stage, ending="failed", seconds=seconds, reason=reason))
            return False
        self._record(StageLine(name=stage, ending="done", seconds=seconds))
        return True

    def skip(self, stage: Stage, reason: str) -> None:
        """Records that a stage was not begun."""
        self._record(StageLine(name=stage, ending="skipped", seconds=0.0, reason=reason))
