"""The cards that this process knows: of the study that is planned, and of results that were read.

Counts of a model that no formula has are looked up here. Where two cards of one name differ (the hub changed the
configuration between two studies, or a library its model), the count is unknown unless the question says which one it
means. What a plan traces takes the place of what was known of the same name.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from vitscale.trial.model_card import ModelCard, TraceRequest
from vitscale.trial.model_spec import ModelSpec

_MOST_CARDS_OF_A_REQUEST = 16
"""Cards of one request that are told apart by digest; more only make it more ambiguous."""


class _Known(NamedTuple):
    """A card, and the configurations that have the same counts."""

    card: ModelCard
    digests: set[str | None]


class _Counts(NamedTuple):
    """What all cards of a model have alike, whatever the device and the precision."""

    parameters: int
    forward_flops: tuple[int, int]
    backward_flops: tuple[int, int]


class KnownModels:
    """Cards by what they are of, and why other models have none.

    Example:
        >>> known = KnownModels()
        >>> known.put(card)
        >>> known.card(card.request) == card
        True
    """

    def __init__(self) -> None:
        self._known_by_conditions: dict[TraceRequest, list[_Known]] = {}
        """Request without its digest -> the cards that count differently."""
        self._conditions_by_model: dict[ModelSpec, dict[TraceRequest, None]] = {}
        self._reasons: dict[TraceRequest, str] = {}

    def put(self, card: ModelCard) -> None:
        """Add a card beside others of the same name; one that counts the same as a known one adds its digest alone."""
        conditions = _without_digest(card.request)
        self._reasons.pop(conditions, None)
        known = self._known_by_conditions.setdefault(conditions, [])
        self._conditions_by_model.setdefault(conditions.model, {})[conditions] = None
        for other in known:
            if _count_the_same(card, other.card):
                other.digests.add(card.request.model_digest)
                return
        if len(known) < _MOST_CARDS_OF_A_REQUEST:
            known.append(_Known(card, {card.request.model_digest}))

    def put_all(self, cards: Iterable[ModelCard]) -> None:
        """Add several cards."""
        for card in cards:
            self.put(card)

    def replace(self, card: ModelCard) -> None:
        """Put a card in place of all others of the same request, whatever their digests."""
        self._known_by_conditions.pop(_without_digest(card.request), None)
        self.put(card)

    def put_reason(self, request: TraceRequest, reason: str) -> None:
        """Remember why there is no card for a request, and forget those that were known."""
        conditions = _without_digest(request)
        self._known_by_conditions.pop(conditions, None)
        self._reasons[conditions] = reason

    def card(self, request: TraceRequest) -> ModelCard | None:
        """Return the card for a request; None where there is none, or where several differ.

        A request without a digest is answered by a card of any configuration, if there is only one.
        """
        known = self._known_by_conditions.get(_without_digest(request), [])
        digest = request.model_digest
        cards = [other.card for other in known if digest is None or digest in other.digests]
        return cards[0] if len(cards) == 1 else None

    def reason(self, request: TraceRequest) -> str:
        """Return why there is no card for a request; empty where that is not known."""
        return self._reasons.get(_without_digest(request), "")

    def counts(self, model: ModelSpec) -> ModelCard | None:
        """Return any card of a model, for what all its cards have alike: parameters and FLOPs.

        None where there is none, or where two cards of one request have different parameters or FLOPs.
        """
        found: ModelCard | None = None
        for conditions in self._conditions_by_model.get(counted_part(model), {}):
            known = self._known_by_conditions.get(conditions, [])
            if len({_counts(other.card) for other in known}) > 1:
                return None
            if known and found is None:
                found = known[0].card
        return found


KNOWN_MODELS = KnownModels()
"""The cards of this process."""


@lru_cache(maxsize=4096)
def counted_part(model: ModelSpec) -> ModelSpec:
    """Return the model without what changes no count: where its pretrained weights lie."""
    return model.model_copy(update={"weights": None, "parameter_count": None})


def _without_digest(request: TraceRequest) -> TraceRequest:
    return request.model_copy(update={"model": counted_part(request.model), "model_digest": None})


def _counts(card: ModelCard) -> _Counts:
    return _Counts(card.parameters, card.flops("forward"), card.flops("backward"))


def _count_the_same(card: ModelCard, other: ModelCard) -> bool:
    """Whether two cards differ at most in the versions of the libraries, and in the digest of the configuration."""
    return _without_origin(card) == _without_origin(other)


def _without_origin(card: ModelCard) -> ModelCard:
    return card.model_copy(update={"versions": {}, "request": _without_digest(card.request)})
