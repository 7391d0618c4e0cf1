"""Finds the cards of a study's models: among those known, in the user's cache, or by tracing the model now.

Only models that no formula counts need a card. A model is traced by a process of its own, since that imports torch and
runs the code of the model's library; it has limits on time and memory (`tracers`).

The card of a factory is traced anew in each process, since nothing tells two states of its modules apart
(`card_cache`).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from contextlib import closing

from vitscale.base.distribution import versions_of
from vitscale.engines.trace_requests import needs_card, trace_request
from vitscale.errors import VitscaleError
from vitscale.study.card_cache import BUILDERS, read_card, write_card
from vitscale.study.tracers import TraceOutcome, trace_side_by_side
from vitscale.trial.known_models import KNOWN_MODELS
from vitscale.trial.model_card import TRACER_VERSION, ModelCard, TraceRequest
from vitscale.trial.trace_messages import TraceRefusal
from vitscale.trial.trial import Trial

_NO_TORCH = TraceRefusal(
    reason="counting this model takes torch, which is not installed here: plan on the machine that trains, or with its "
    "results"
)
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
    uncached = [request for request in not_accepted if not _learn_from_cache(request)]
    _trace_all(uncached, import_folders)
    cards = (_accepted_card(request) for request in requests)
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
    installed_versions = versions_of(library for library in BUILDERS if library in card.versions)
    return all(version in (None, card.versions[library]) for library, version in installed_versions.items())


def _learn_from_cache(request: TraceRequest) -> bool:
    """Make a cached card known; return whether there is one."""
    card = read_card(request)
    if card is None:
        return False
    KNOWN_MODELS.replace(card)
    return True


def _trace_all(requests: Sequence[TraceRequest], import_folders: Sequence[str]) -> None:
    """Trace models, and make their cards known and cache them; or make known why there is none.

    Args:
        requests: models that no cache has.
        import_folders: folders in which ranks look for a user's modules.
    """
    if not _is_torch_installed():
        for request in requests:
            _make_known(TraceOutcome(request, _NO_TORCH))
        return
    with closing(trace_side_by_side(requests, import_folders)) as outcomes:
        for outcome in outcomes:
            _make_known(outcome)


def _make_known(outcome: TraceOutcome) -> None:
    """Make a card known and cache it; or make known why there is none."""
    result = outcome.result
    if isinstance(result, TraceRefusal):
        KNOWN_MODELS.replace_with_reason(outcome.request, result.reason)
        return
    KNOWN_MODELS.replace(result)
    if outcome.request.model.factory is not None:
        _FACTORY_CARDS[outcome.request] = result
    write_card(result)
