"""Finds the cards of a study's models: among those known, in the user's cache, or by tracing the model now.

Only models that no formula counts need a card. A model is traced by a process of its own, since that imports torch and
runs the code of the model's library; it has limits on time and memory. A card is kept in a file named by all that it
depends on: the request, and the versions of the libraries that build and trace the model.
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
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from vitscale.base.distribution import install_command, versions_of
from vitscale.base.files import read_text, whole_file
from vitscale.base.interpreter import python_module
from vitscale.engines.trace_requests import needs_card, trace_request
from vitscale.errors import RequestError, VitscaleError, printable, shown
from vitscale.trial.known_models import KNOWN_MODELS
from vitscale.trial.model_card import ModelCard, TraceRequest
from vitscale.trial.trial import Trial

_TRACER_MODULE = "vitscale.models.tracing"
_BUILDERS = ("torch", "transformers", "timm", "torchvision")
"""Libraries whose versions may change what a model is."""
_TRACER_VERSION = "1"
"""Raised when a card of an earlier tracer must not be used any more."""
_LONGEST_TRACE_SECONDS = 120.0
_MOST_TRACE_MEMORY_BYTES = 8 << 30
_AT_ONCE = 2
"""Models that are traced side by side; a trace takes one core."""
_LONGEST_REASON = 300


@dataclass(frozen=True)
class TracedModel:
    """A model to be traced, and where its factory's module lies."""

    request: TraceRequest
    import_folders: tuple[str, ...]
    """Folders that are searched for modules behind all that is installed."""


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
    models: dict[TraceRequest, TracedModel] = {}
    for trial_id, trial in trials.items():
        if _needs_card(trial):
            for request in _requests(trial, factory_digests.get(trial_id)):
                models[request] = TracedModel(request, tuple(import_folders))
    unknown = [model for model in models.values() if KNOWN_MODELS.card(model.request) is None]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for _ in pool.map(_make_known, unknown):
            pass
    cards = (KNOWN_MODELS.card(request) for request in models)
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


def _make_known(model: TracedModel) -> None:
    """Put a model's card, from the cache or traced now, among those known; or why there is none."""
    path = _cached_path(model.request)
    card = _read_card(path, model.request)
    if card is None:
        try:
            card = _trace(model)
        except RequestError as error:
            KNOWN_MODELS.put_reason(model.request, str(error))
            return
        with contextlib.suppress(OSError), whole_file(path, make_folder=True) as file:
            file.write(card.model_dump_json().encode())
    KNOWN_MODELS.put(card)


def _cached_path(request: TraceRequest) -> Path:
    """Return where a request's card is cached; the name covers everything that the card depends on."""
    versions = versions_of(_BUILDERS) | {"tracer": _TRACER_VERSION}
    identity = json.dumps({"request": request.model_dump(mode="json"), "versions": versions}, sort_keys=True)
    digest = hashlib.sha256(identity.encode()).hexdigest()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "vitscale" / "cards" / f"{digest[:32]}.json"


def _read_card(path: Path, request: TraceRequest) -> ModelCard | None:
    """Return a cached card; None where there is none, or where the file is no card of this request."""
    try:
        card = ModelCard.model_validate_json(read_text(path, "a cached card", next_step="Delete it"))
    except (RequestError, ValidationError):
        return None
    return card if card.request == request else None


def _trace(model: TracedModel) -> ModelCard:
    """Trace a model in a process of its own.

    Raises:
        RequestError: it cannot be traced; the message says why, in one sentence.
    """
    if importlib.util.find_spec("torch") is None:
        raise RequestError(
            "counting this model takes torch, which is not installed here",
            next_step=f"Run {install_command('train')}, or plan on the machine that trains",
        )
    argv = python_module(
        _TRACER_MODULE,
        f"--memory-bytes={_MOST_TRACE_MEMORY_BYTES}",
        f"--cpu-seconds={int(_LONGEST_TRACE_SECONDS)}",
        *(f"--import-folder={folder}" for folder in model.import_folders),
    )
    try:
        answer = subprocess.run(
            argv,
            input=model.request.model_dump_json(),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_LONGEST_TRACE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        what = f"counting this model took longer than {_LONGEST_TRACE_SECONDS:g} s"
        raise RequestError(what) from None
    except OSError as error:
        raise RequestError(f"the process that counts models cannot be started: {error.strerror}") from None
    return _card_in(answer, model.request)


def _card_in(answer: subprocess.CompletedProcess[str], request: TraceRequest) -> ModelCard:
    """Return the card that the tracing process printed on its last line.

    Raises:
        RequestError: it printed an error, or ended without either.
    """
    last_line = _last_line(answer.stdout)
    try:
        content = json.loads(last_line)
        if isinstance(content, dict) and isinstance(content.get("error"), str):
            raise RequestError(printable(content["error"])[:_LONGEST_REASON])
        card = ModelCard.model_validate_json(last_line)
    except (ValueError, RecursionError):  # no JSON, or no card
        reason = _last_line(answer.stderr) or f"exit code {answer.returncode}"
        what = f"the process that counts models ended without an answer: {shown(printable(reason)[:_LONGEST_REASON])}"
        raise RequestError(what) from None
    if card.request != request:
        raise RequestError("the process that counts models answered another request")
    return card


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else ""
