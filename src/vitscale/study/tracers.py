"""Traces several models side by side, in processes of their own."""

from __future__ import annotations

import select
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from typing import NamedTuple

from vitscale.study.tracer_process import (
    PROCESSES,
    NoAnswerError,
    TracerError,
    TracerProcess,
    TracerTooSlowError,
)
from vitscale.trial.model_card import ModelCard, TraceRequest
from vitscale.trial.trace_messages import CardAnswer, TraceRefusal

_SECONDS_BETWEEN_LOOKS = 0.1
"""Time from one look at the clock, and whether a tracer has ended, to the next; answers are seen as they come."""


class TraceOutcome(NamedTuple):
    """A request, and what came of it."""

    request: TraceRequest
    result: ModelCard | TraceRefusal

    @property
    def is_out_of_time(self) -> bool:
        """Whether its trace took too long."""
        return isinstance(self.result, TraceRefusal) and self.result.is_out_of_time


def trace_side_by_side(
    requests: Sequence[TraceRequest], import_folders: Sequence[str]
) -> Generator[TraceOutcome, None, None]:
    """Trace models; yield each one's card, or why it has none, as soon as that is known.

    A model of which one request took too long is not tried again. No thread takes part, so that an interrupt ends this
    at once. Closing the iterator ends the processes.

    Args:
        requests: models to trace.
        import_folders: folders in which ranks look for a user's modules.
    """
    waiting = deque(requests)
    tracers = [_Tracer(import_folders) for _ in range(min(PROCESSES, len(requests)))]
    try:
        for tracer in tracers:
            yield from _begin_next(tracer, waiting)
        while busy_tracers := [tracer for tracer in tracers if tracer.is_busy]:
            _wait_for_output(busy_tracers)
            for tracer in busy_tracers:
                outcome = tracer.take_outcome()
                if outcome is None:
                    continue
                yield outcome
                if outcome.is_out_of_time:
                    yield from _refuse_same_model(outcome, waiting)
                yield from _begin_next(tracer, waiting)
    finally:  # after Ctrl-C too
        for tracer in tracers:
            tracer.end_process()


def _wait_for_output(tracers: Sequence[_Tracer]) -> None:
    """Wait until a tracer prints something, or until it is time to look at the clock."""
    descriptors: list[int] = []
    for tracer in tracers:
        descriptors += tracer.open_descriptors()
    select.select(descriptors, [], [], _SECONDS_BETWEEN_LOOKS)


def _begin_next(tracer: _Tracer, waiting: deque[TraceRequest]) -> Iterator[TraceOutcome]:
    """Let a tracer begin with the next request, if there is one; yield the outcomes of those that cannot begin.

    Requests are taken out of `waiting`.
    """
    while waiting:
        request = waiting.popleft()
        try:
            tracer.begin(request)
        except OSError as error:
            yield TraceOutcome(request, _cannot_start(error))
        else:
            return


def _cannot_start(error: OSError) -> TraceRefusal:
    return TraceRefusal(reason=f"the process that counts models cannot be started: {error.strerror}")


def _refuse_same_model(slow: TraceOutcome, waiting: deque[TraceRequest]) -> Iterator[TraceOutcome]:
    """Yield an outcome for each waiting request of the model that took too long, and take it out of `waiting`."""
    model_name = _model_name(slow.request)
    for request in tuple(waiting):
        if _model_name(request) == model_name:
            waiting.remove(request)
            yield TraceOutcome(request, slow.result)


class _ModelName(NamedTuple):
    """The names by which a model's code is found."""

    factory: str | None
    configuration: str | None
    name: str | None


def _model_name(request: TraceRequest) -> _ModelName:
    return _ModelName(factory=request.model.factory, configuration=request.model.hf, name=request.model.name)


class _Tracer:
    """Traces one request after the other, in a process that starts with the first one, and again after its end."""

    def __init__(self, import_folders: Sequence[str]) -> None:
        self._import_folders = import_folders
        self._request: TraceRequest | None = None
        self._process: TracerProcess | None = None

    @property
    def is_busy(self) -> bool:
        """Whether it is at a request."""
        return self._request is not None

    def open_descriptors(self) -> list[int]:
        """Return the descriptors at which something may come."""
        return [] if self._process is None else self._process.open_descriptors()

    def begin(self, request: TraceRequest) -> None:
        """Begin with a request.

        Raises:
            OSError: no process can be started.
        """
        if self._process is None:
            self._process = TracerProcess(self._import_folders)
        self._request = request
        self._process.ask(request)

    def take_outcome(self) -> TraceOutcome | None:
        """Return what came of the request, which is over then; None where that is not known yet."""
        if self._request is None:
            return None
        result = self._result(self._request)
        if result is None:
            return None
        outcome = TraceOutcome(self._request, result)
        self._request = None
        return outcome

    def _result(self, request: TraceRequest) -> ModelCard | TraceRefusal | None:
        """Return the request's card, or why it has none; None where that is not known yet."""
        process = self._process
        if process is None:
            return None
        try:
            answer = process.answer()
        except NoAnswerError as error:
            self.end_process()
            if process.answer_count > 0:  # a model of before may have left what prints
                return self._begin_anew(request)
            return TraceRefusal(reason=str(error))
        except TracerError as error:
            self.end_process()
            return TraceRefusal(reason=str(error), is_out_of_time=isinstance(error, TracerTooSlowError))
        if answer is None:
            return None
        return answer.card if isinstance(answer, CardAnswer) else answer.error

    def _begin_anew(self, request: TraceRequest) -> TraceRefusal | None:
        """Ask a new process for the same request; return why there is none."""
        try:
            self.begin(request)
        except OSError as error:
            return _cannot_start(error)
        return None

    def end_process(self) -> None:
        """End the process, if there is one."""
        if self._process is not None:
            self._process.end()
            self._process = None
