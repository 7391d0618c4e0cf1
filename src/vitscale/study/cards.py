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
import os
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

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
_MOST_TRACE_MEMORY_BYTES = 8 << 30
_LARGEST_CARD_BYTES = 16 << 20
_PROCESSES = 2
"""Processes that trace side by side; each takes one core."""
_NO_TORCH = (
    "counting this model takes torch, which is not installed here: plan on the machine that trains, or with its results"
)
_LONGEST_REASON = 300


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
    unknown = [request for request in requests if KNOWN_MODELS.card(request) is None]
    uncached = [request for request in unknown if not _take_from_cache(request)]
    _trace_all(uncached, import_folders)
    cards = (KNOWN_MODELS.card(request) for request in requests)
    return tuple(card for card in cards if card is not None)


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
    KNOWN_MODELS.put(card)
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
    if importlib.util.find_spec("torch") is None:
        for request in requests:
            KNOWN_MODELS.put_reason(request, _NO_TORCH)
        return
    # The first of each share is where most of the time goes: a process imports its libraries once.
    shares = [requests[first::_PROCESSES] for first in range(min(_PROCESSES, len(requests)))]
    with ThreadPoolExecutor(_PROCESSES) as pool:
        for _ in pool.map(lambda share: _trace_in_turn(share, import_folders), shares):
            pass


def _trace_in_turn(requests: Sequence[TraceRequest], import_folders: Sequence[str]) -> None:
    """Trace models one after the other in one process; in another one from where it ends before its time."""
    remaining = list(requests)
    while remaining:
        answers = _answers(remaining, import_folders)
        for request, line in zip(remaining, answers.lines, strict=False):
            _take_answer(request, line)
        if len(answers.lines) < len(remaining):
            KNOWN_MODELS.put_reason(remaining[len(answers.lines)], answers.end_reason)
        remaining = remaining[len(answers.lines) + 1 :]


class _Answers(NamedTuple):
    """What a tracing process printed."""

    lines: list[str]
    """An answer for each request, in order; fewer where the process ended before its time."""
    end_reason: str
    """Why the first request without an answer has none."""


def _answers(requests: Sequence[TraceRequest], import_folders: Sequence[str]) -> _Answers:
    """Ask a process of its own for the cards of some requests."""
    argv = python_module(
        _TRACER_MODULE,
        f"--memory-bytes={_MOST_TRACE_MEMORY_BYTES}",
        f"--cpu-seconds={_LONGEST_TRACE_SECONDS}",
        *(f"--import-folder={folder}" for folder in import_folders),
    )
    lines = "".join(f"{request.model_dump_json()}\n" for request in requests)
    seconds = _LONGEST_TRACE_SECONDS * len(requests)
    try:
        process = subprocess.run(
            argv, input=lines.encode(), capture_output=True, timeout=seconds, check=False, start_new_session=True
        )
    except subprocess.TimeoutExpired as error:
        return _Answers(_whole_lines(error.stdout), f"counting this model took longer than {_LONGEST_TRACE_SECONDS} s")
    except OSError as error:
        return _Answers([], f"the process that counts models cannot be started: {error.strerror}")
    error_lines = process.stderr.decode(errors="replace").strip().splitlines()
    last_words = error_lines[-1] if error_lines else f"exit code {process.returncode}"
    end_reason = f"the process that counts models ended: {shown(printable(last_words)[:_LONGEST_REASON])}"
    return _Answers(_whole_lines(process.stdout), end_reason)


def _whole_lines(output: bytes | None) -> list[str]:
    """Return the lines of a process's output that are ended by a newline."""
    whole, _, _ = (output or b"").rpartition(b"\n")
    return whole.decode(errors="replace").splitlines()


def _take_answer(request: TraceRequest, line: str) -> None:
    """Make the answer to a request known, and cache it if it is a card."""
    try:
        content = json.loads(line)
        if isinstance(content, dict) and isinstance(content.get("error"), str):
            KNOWN_MODELS.put_reason(request, printable(content["error"])[:_LONGEST_REASON])
            return
        card = ModelCard.model_validate(content)
    except (ValueError, RecursionError):  # no JSON, or no card
        KNOWN_MODELS.put_reason(request, "the process that counts models gave no card")
        return
    if card.request != request:
        KNOWN_MODELS.put_reason(request, "the process that counts models answered another request")
        return
    KNOWN_MODELS.put(card)
    _write_card(request, line)


def _write_card(request: TraceRequest, card_json: str) -> None:
    """Cache a card, where there is a place for it."""
    path = _cached_path(request)
    if path is None:
        return
    with contextlib.suppress(OSError), whole_file(path, make_folder=True) as file:
        file.write(card_json.encode())
