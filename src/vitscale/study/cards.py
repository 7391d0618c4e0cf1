"""Finds the cards of a study's models: among those known, in the user's cache, or by tracing the model now.

Only models that no formula counts need a card. A model is traced by a process of its own, since that imports torch and
runs the code of the model's library; it has limits on time and memory. A card is cached in a file named by all that it
depends on: the request, and the versions of the libraries that build and trace the model.

The card of a factory is not cached, and is traced anew in each process: a factory's model depends on all modules that
its module imports, of which nobody knows a digest.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import math
import os
import select
import signal
import subprocess
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple, cast

from vitscale.base.distribution import versions_of
from vitscale.base.files import open_regular, whole_file
from vitscale.base.interpreter import python_module
from vitscale.engines.trace_requests import needs_card, trace_request
from vitscale.errors import VitscaleError, printable, shown
from vitscale.trial.known_models import KNOWN_MODELS
from vitscale.trial.model_card import TRACER_VERSION, ModelCard, TraceRequest
from vitscale.trial.trial import Trial

_TRACER_MODULE = "vitscale.models.tracing"
_BUILDERS = ("torch", "transformers", "timm", "torchvision")
"""Libraries whose versions may change what a model is."""
_LONGEST_TRACE_SECONDS = 120
"""Limit of a trace, of a core's time and by the clock."""
_LONGEST_IMPORT_SECONDS = 120
"""Time by the clock that a process has, beyond that of its first trace, to import torch."""
_SECONDS_BETWEEN_LOOKS = 0.1
"""Time from one look at the clock, and whether a tracer has ended, to the next; answers are seen as they come."""
_MOST_TRACE_MEMORY_BYTES = 8 << 30
_SHARE_OF_MEMORY = 0.5
"""Share of the machine's memory that all traces may take together."""
_LARGEST_CARD_BYTES = 16 << 20
_PROCESSES = 2
"""Processes that trace side by side; each takes one core."""
_NO_TORCH = (
    "counting this model takes torch, which is not installed here: plan on the machine that trains, or with its results"
)
_NO_CARD = "the process that counts models gave no card"
_OUT_OF_TIME = "counting the model took longer than"
"""How the tracer's own answer begins where its CPU time was over (`vitscale.models.tracing.__main__`)."""
_LONGEST_REASON = 300
_LONGEST_LAST_WORDS = 4096
"""Bytes of standard error that are kept of a tracer."""
_PIPE_BYTES = 1 << 16
_READS_OF_A_PIPE = 16
_FACTORY_CARDS: dict[TraceRequest, ModelCard] = {}
"""Cards of factories that this process has traced."""


def find_cards(
    trials: Mapping[str, Trial], factory_digests: Mapping[str, str], import_folders: Sequence[str]
) -> tuple[ModelCard, ...]:
    """Return the cards of all models that need one, with activations kept and computed again.

    They are known to this process afterwards (`known_models`). Why a model has none is known there too.

    Args:
        trials: the study's trials by identity.
        factory_digests: trial identity -> digest of the file of its model's factory, where it has one.
        import_folders: folders in which ranks look for a user's modules.
    """
    requests: dict[TraceRequest, None] = {}  # each once, in order
    for trial_id, trial in trials.items():
        if _needs_card(trial):
            requests |= dict.fromkeys(_requests(trial, factory_digests.get(trial_id)))
    not_accepted = [request for request in requests if _accepted_card(request) is None]
    uncached = [request for request in not_accepted if not _take_from_cache(request)]
    _trace_all(uncached, import_folders)
    cards = (_accepted_card(request) for request in requests)
    return tuple(card for card in cards if card is not None)


def _accepted_card(request: TraceRequest) -> ModelCard | None:
    """Return the card that is known for a request, if a trace of now would count the same.

    A known card may come from results that somebody else made, with other versions of the tracer and of libraries.
    Where torch is not installed nothing can be traced, and the card is accepted as it is.
    """
    card = KNOWN_MODELS.card(request)
    if card is None or not _is_torch_installed():
        return card
    if request.model.factory is not None:
        return card if _FACTORY_CARDS.get(request) == card else None
    return card if _is_of_these_versions(card) else None


def _is_torch_installed() -> bool:
    return importlib.util.find_spec("torch") is not None


def _is_of_these_versions(card: ModelCard) -> bool:
    """Whether a card is of this tracer, and of the versions of its libraries that are installed here."""
    if card.versions.get("tracer") != TRACER_VERSION:
        return False
    installed_versions = versions_of(library for library in _BUILDERS if library in card.versions)
    return all(version in (None, card.versions[library]) for library, version in installed_versions.items())


def _needs_card(trial: Trial) -> bool:
    """Whether a trial's model is to be traced."""
    try:
        return needs_card(trial)
    except (ValueError, VitscaleError):  # the model was never resolved, or its configuration is gone
        return False


def _requests(trial: Trial, factory_digest: str | None) -> list[TraceRequest]:
    """Return the requests for a trial with activations kept and with activation checkpointing: `plan` compares them."""
    request = trace_request(trial, model_digest=factory_digest)
    return [request.model_copy(update={"checkpointing": checkpointing}) for checkpointing in (False, True)]


def _take_from_cache(request: TraceRequest) -> bool:
    """Make a cached card known; return whether there is one."""
    card = _read_card(request)
    if card is None:
        return False
    KNOWN_MODELS.replace(card)
    return True


def _cached_path(request: TraceRequest) -> Path | None:
    """Return where a request's card is cached; the name covers everything that the card depends on.

    None for a factory's card, which is not cached, and for a user without a folder for caches.
    """
    cache = _cache_folder()
    if request.model.factory is not None or cache is None:
        return None
    versions = versions_of(_BUILDERS) | {"tracer": TRACER_VERSION}
    identity = json.dumps({"request": request.model_dump(mode="json"), "versions": versions}, sort_keys=True)
    digest = hashlib.sha256(identity.encode()).hexdigest()
    return cache / "vitscale" / "cards" / f"{digest[:32]}.json"


def _cache_folder() -> Path | None:
    """Return the user's folder for caches (XDG Base Directory Specification, which ignores relative paths)."""
    folder = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if folder.is_absolute():
        return folder
    try:
        return Path.home() / ".cache"
    except RuntimeError:  # HOME is not set, and the user has no entry in the system's table of users
        return None


def _read_card(request: TraceRequest) -> ModelCard | None:
    """Return a cached card; None where there is none, or where the file is no card of this request."""
    path = _cached_path(request)
    if path is None:
        return None
    try:
        with open_regular(path, largest_bytes=_LARGEST_CARD_BYTES) as file:
            card = ModelCard.model_validate_json(file.read())
    except (OSError, ValueError):
        return None
    return card if card.request == request else None


def _trace_all(requests: Sequence[TraceRequest], import_folders: Sequence[str]) -> None:
    """Trace models, and make their cards known and cache them; or make known why there is none.

    Args:
        requests: models that no cache has.
        import_folders: folders in which ranks look for a user's modules.
    """
    if not _is_torch_installed():
        for request in requests:
            KNOWN_MODELS.put_reason(request, _NO_TORCH)
        return
    tracers = [_Tracer(import_folders) for _ in range(min(_PROCESSES, len(requests)))]
    try:
        _trace_side_by_side(_Queue(requests), tracers)
    finally:  # after Ctrl-C too
        for tracer in tracers:
            tracer.end_process()


class _Queue:
    """Requests that wait for a tracer. A model of which one request took too long is not tried again."""

    def __init__(self, requests: Sequence[TraceRequest]) -> None:
        self._waiting = deque(requests)
        self._reasons: dict[_ModelName, str] = {}

    def next_request(self) -> TraceRequest | None:
        """Take the next request; None where there are no more."""
        while self._waiting:
            request = self._waiting.popleft()
            reason = self._reasons.get(_model_name(request))
            if reason is None:
                return request
            KNOWN_MODELS.put_reason(request, reason)
        return None

    def refuse(self, request: TraceRequest, reason: str) -> None:
        """Make known why a request, and all that wait and are of its model, have no card."""
        KNOWN_MODELS.put_reason(request, reason)
        self._reasons[_model_name(request)] = reason


class _ModelName(NamedTuple):
    """The names by which a model's code is found."""

    factory: str | None
    configuration: str | None
    name: str | None


def _model_name(request: TraceRequest) -> _ModelName:
    return _ModelName(factory=request.model.factory, configuration=request.model.hf, name=request.model.name)


def _trace_side_by_side(queue: _Queue, tracers: Sequence[_Tracer]) -> None:
    """Trace all requests of the queue. No thread takes part, so that an interrupt ends this at once."""
    for tracer in tracers:
        tracer.ask_next(queue)
    while busy := [tracer for tracer in tracers if tracer.is_busy]:
        descriptors = [descriptor for tracer in busy for descriptor in tracer.descriptors()]
        select.select(descriptors, [], [], _SECONDS_BETWEEN_LOOKS)
        for tracer in busy:
            if tracer.take_outcome(queue):
                tracer.ask_next(queue)


class _Tracer:
    """Traces one request after the other, in a process that starts with the first one, and again after its end."""

    def __init__(self, import_folders: Sequence[str]) -> None:
        self._import_folders = import_folders
        self._request: TraceRequest | None = None
        self._process: _TracerProcess | None = None

    @property
    def is_busy(self) -> bool:
        """Whether it is at a request."""
        return self._request is not None

    def descriptors(self) -> list[int]:
        """Return the descriptors at which something may come."""
        return [] if self._process is None else self._process.descriptors()

    def ask_next(self, queue: _Queue) -> None:
        """Begin with the next request, if there is one."""
        self._request = None
        while (request := queue.next_request()) is not None:
            try:
                self._process = self._process or _TracerProcess(self._import_folders)
            except OSError as error:
                reason = f"the process that counts models cannot be started: {error.strerror}"
                KNOWN_MODELS.put_reason(request, reason)
                continue
            self._request = request
            self._process.ask(request)
            return

    def take_outcome(self, queue: _Queue) -> bool:
        """Make the answer known, or why there will be none; return whether there is one of these by now."""
        if self._request is None or self._process is None:
            return False
        try:
            line = self._process.answer()
        except _TooSlowError as error:
            self.end_process()
            queue.refuse(self._request, str(error))
            return True
        except _TracerEndedError as error:
            self.end_process()
            KNOWN_MODELS.put_reason(self._request, str(error))
            return True
        if line is None:
            return False
        reason = _take_answer(self._request, line)
        if reason.startswith(_OUT_OF_TIME):
            queue.refuse(self._request, reason)
        elif reason:
            KNOWN_MODELS.put_reason(self._request, reason)
        return True

    def end_process(self) -> None:
        """End the process, if there is one."""
        if self._process is not None:
            self._process.end()
            self._process = None


class _TooSlowError(Exception):
    """A tracer gave no answer in time."""


class _TracerEndedError(Exception):
    """A tracer ended, or went wrong, before its answer."""


class _TracerProcess:
    """A process that traces models.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, import_folders: Sequence[str]) -> None:
        argv = python_module(
            _TRACER_MODULE,
            f"--memory-bytes={_memory_limit_bytes()}",
            f"--cpu-seconds={_LONGEST_TRACE_SECONDS}",
            f"--parent={os.getpid()}",
            *(f"--import-folder={folder}" for folder in import_folders),
        )
        # A session of its own makes it a process group, which ends as a whole: a model's code may start processes.
        self._process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
        self._input = cast("IO[bytes]", self._process.stdin)
        self._output = _Pipe(cast("IO[bytes]", self._process.stdout))
        self._errors = _Pipe(cast("IO[bytes]", self._process.stderr))
        self._import_seconds = _LONGEST_IMPORT_SECONDS
        self._deadline = math.inf

    def ask(self, request: TraceRequest) -> None:
        """Begin with a request."""
        self._deadline = time.monotonic() + self._import_seconds + _LONGEST_TRACE_SECONDS
        self._import_seconds = 0
        with contextlib.suppress(BrokenPipeError):  # the process has ended, as `answer` finds
            self._input.write(f"{request.model_dump_json()}\n".encode())
            self._input.flush()

    def descriptors(self) -> list[int]:
        """Return the descriptors at which something may come."""
        return [pipe.descriptor for pipe in (self._output, self._errors) if pipe.is_open]

    def answer(self) -> bytes | None:
        """Return the answer to the request, a line without its newline; None where it is not there yet.

        Raises:
            _TooSlowError: its time is over.
            _TracerEndedError: there will be no answer.
        """
        has_ended = self._has_ended()  # asked before reading: what it printed is in the pipe by then
        self._output.read()
        self._errors.read()
        del self._errors.content[:-_LONGEST_LAST_WORDS]
        line, newline, rest = self._output.content.partition(b"\n")
        if newline:
            self._output.content = rest
            return bytes(line)
        if has_ended:
            raise _TracerEndedError(f"the process that counts models ended: {self._last_words()}")
        if len(line) > _LARGEST_CARD_BYTES:
            raise _TracerEndedError(_NO_CARD)
        if time.monotonic() > self._deadline:
            raise _TooSlowError(f"counting this model took longer than {_LONGEST_TRACE_SECONDS} s")
        return None

    def _has_ended(self) -> bool:
        """Whether the process has ended; on Linux it stays a zombie, so that nothing else gets its number."""
        if not hasattr(os, "waitid"):
            return self._process.poll() is not None
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def _last_words(self) -> str:
        """Return the last line that the ended process printed on standard error, or its exit code."""
        lines = self._errors.content.decode(errors="replace").strip().splitlines()
        if lines:
            return shown(printable(lines[-1])[:_LONGEST_REASON])
        self._kill_group()  # as long as the process is a zombie
        return shown(f"exit code {self._process.wait()}")

    def end(self) -> None:
        """Kill the process, and those that its models' code has started."""
        if self._process.returncode is None:
            self._kill_group()
            self._process.wait()
        for file in (self._input, self._process.stdout, self._process.stderr):
            with contextlib.suppress(BrokenPipeError):
                cast("IO[bytes]", file).close()

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


class _Pipe:
    """What a process prints, read without waiting."""

    def __init__(self, file: IO[bytes]) -> None:
        self.descriptor = file.fileno()
        os.set_blocking(self.descriptor, False)
        self.content = bytearray()
        """What was read, and not yet taken."""
        self.is_open = True

    def read(self) -> None:
        """Add what is there now; of a process that prints without end, no more than a full pipe."""
        for _ in range(_READS_OF_A_PIPE):
            if not self.is_open:
                return
            try:
                chunk = os.read(self.descriptor, _PIPE_BYTES)
            except BlockingIOError:
                return
            self.content += chunk
            self.is_open = bool(chunk)


def _memory_limit_bytes() -> int:
    """Return how much memory a trace may take."""
    machine_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(_MOST_TRACE_MEMORY_BYTES, int(machine_bytes * _SHARE_OF_MEMORY / _PROCESSES))


def _take_answer(request: TraceRequest, line: bytes) -> str:
    """Make the card that answers a request known, and cache it; return why the answer is none, "" where it is one."""
    try:
        content = json.loads(line)
        if isinstance(content, dict) and isinstance(content.get("error"), str):
            return printable(content["error"])[:_LONGEST_REASON] or _NO_CARD  # "" would say that there is a card
        card = ModelCard.model_validate(content)
    except (ValueError, RecursionError):  # no JSON, or no card
        return _NO_CARD
    if card.request != request:
        return "the process that counts models answered another request"
    KNOWN_MODELS.replace(card)
    if request.model.factory is not None:
        _FACTORY_CARDS[request] = card
    _write_card(request, line)
    return ""


def _write_card(request: TraceRequest, card_json: bytes) -> None:
    """Cache a card, where there is a place for it."""
    path = _cached_path(request)
    if path is None:
        return
    with contextlib.suppress(OSError), whole_file(path, make_folder=True) as file:
        file.write(card_json)
