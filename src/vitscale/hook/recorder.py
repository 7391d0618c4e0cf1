"""The hook's thread: samples the training thread's stack, divides closed steps and writes all lines.

The training thread only appends what it saw to a queue. The thread is a daemon and is ended before the interpreter is.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import deque
from time import monotonic_ns
from typing import TYPE_CHECKING

from .guarding import Switch
from .line_file import LineFile
from .lines import HookedAliveLine, HookedLoaderLine, HookedNoteLine, Line
from .sampling import Spot, StackSamples
from .steps import ClosedStep, DividedStep, divide
from .training_loaders import TrainingLoaders

if TYPE_CHECKING:
    from .loaders import Loaders
    from .marks import StepMarks

_FLUSH_NS = 200_000_000
_ALIVE_NS = 1_000_000_000
_SAMPLES_NS = 10_000_000_000
_FIRST_SAMPLED_STEP = 2


class RankRecorder:
    """Writes the file of one rank."""

    def __init__(
        self, file: LineFile, marks: StepMarks, loaders: Loaders, switch: Switch, sample_seconds: float
    ) -> None:
        self._file = file
        self._marks = marks
        self._loaders = loaders
        self._training_loaders = TrainingLoaders()
        self._loader_line: HookedLoaderLine | None = None
        self._switch = switch
        self._sample_seconds = sample_seconds
        self._queue: deque[Line | ClosedStep] = deque()
        self._samples = StackSamples()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="vitscale-hook", daemon=True)
        self._last_step = 0
        self._last_step_ns = monotonic_ns()
        self._flushed_ns = 0
        self._sampled_ns = monotonic_ns()

    def start(self) -> None:
        """Begin to sample and to write."""
        self._thread.start()

    def put(self, item: Line | ClosedStep) -> None:
        """Have a line written, or a closed step divided and written, in the order of the calls."""
        self._queue.append(item)

    def finish(self, last_lines: list[Line]) -> None:
        """End the thread and write all that is left, samples included."""
        self._is_over.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()
        self._file.write([*self._queued_lines(), *self._samples.lines(), *last_lines])
        self._file.close()

    def _run(self) -> None:
        while not self._is_over.wait(self._sample_seconds):
            try:
                self._look()
            except Exception as error:
                self._switch.turn_off(error)
                return

    def _look(self) -> None:
        """Take one sample, and write what is due."""
        now_ns = monotonic_ns()
        self._samples.take(self._marks.thread_id, self._marks.part, now_ns)
        if now_ns - self._flushed_ns < _FLUSH_NS:
            return
        self._flushed_ns = now_ns
        lines = self._queued_lines()
        if now_ns - self._last_step_ns > _ALIVE_NS:
            self._last_step_ns = now_ns
            lines.append(HookedAliveLine(step=self._last_step))
        if now_ns - self._sampled_ns > _SAMPLES_NS:
            self._sampled_ns = now_ns
            lines += self._samples.lines()
        self._file.write(lines)

    def _queued_lines(self) -> list[Line]:
        lines: list[Line] = []
        while self._switch.notes:
            lines.append(HookedNoteLine(text=self._switch.notes.pop(0)))
        while self._queue:
            item = self._queue.popleft()
            if isinstance(item, ClosedStep):
                lines += self._step_lines(item)
            else:
                lines.append(item)
        return lines

    def _step_lines(self, closed: ClosedStep) -> list[Line]:
        self._last_step = closed.number
        self._last_step_ns = monotonic_ns()
        self._training_loaders.learn(closed.marks)
        divided = divide(closed, self._training_loaders.numbers)
        lines = self._new_loader_lines()
        if closed.number < _FIRST_SAMPLED_STEP or closed.profiled:
            self._samples.skip_step(closed.end_ns)
            return [*lines, *divided.break_lines, divided.step]
        return [*lines, *self._break_lines(closed, divided), divided.step]

    def _new_loader_lines(self) -> list[Line]:
        """The line of the training loader, if it is another one than in the step before."""
        loader_line = self._loaders.lines.get(self._training_loaders.last)
        if loader_line is None or loader_line == self._loader_line:
            return []
        self._loader_line = loader_line
        return [loader_line]

    def _break_lines(self, closed: ClosedStep, divided: DividedStep) -> list[Line]:
        """The step's breaks, each with its most frequent line of code."""
        spots = self._samples.count_step(closed.end_ns, divided.breaks)
        lines: list[Line] = []
        for position, break_line in enumerate(divided.break_lines):
            lines.append(dataclasses.replace(break_line, line=_spot_text(spots[position])))
        return lines


def _spot_text(spot: Spot | None) -> str | None:
    return None if spot is None else f"{spot.file}:{spot.line} in {spot.function}"
