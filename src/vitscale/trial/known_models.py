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

    def answers(self, request: TraceRequest) -> bool:
        """Whether it is of the request's configuration; a request without a digest means any."""
        return request.model_digest is None or request.model_digest in self.digests


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
        self._known_by_key: dict[TraceRequest, list[_Known]] = {}
        """`_key` of a request -> the cards that count differently."""
        self._keys_by_model: dict[ModelSpec, dict[TraceRequest, None]] = {}
        self._reason_by_key: dict[TraceRequest, str] = {}

    def put(self, card: ModelCard) -> None:
        """Add a card beside others of the same name; one that counts the same as a known one adds its digest alone."""
        key = _key(card.request)
        self._reason_by_key.pop(key, None)
        self._keys_by_model.setdefault(key.model, {})[key] = None
        known_cards = self._known_by_key.setdefault(key, [])
        for known in known_cards:
            if _count_the_same(card, known.card):
                known.digests.add(card.request.model_digest)
                return
        if len(known_cards) < _MOST_CARDS_OF_A_REQUEST:
            known_cards.append(_Known(card, {card.request.model_digest}))

    def put_all(self, cards: Iterable[ModelCard]) -> None:
        """Add several cards."""
        for card in cards:
            self.put(card)

    def replace(self, card: ModelCard) -> None:
        """Put a card in place of all others of the same request, whatever their digests."""
        self._known_by_key.pop(_key(card.request), None)
        self.put(card)

    def replace_with_reason(self, request: TraceRequest, reason: str) -> None:
        """Put the reason why there is no card in place of all cards of a request, whatever their digests."""
        key = _key(request)
        self._known_by_key.pop(key, None)
        self._reason_by_key[key] = reason

    def card(self, request: TraceRequest) -> ModelCard | None:
        """Return the card for a request; None where there is none, or where several differ.

        A request without a digest is answered by a card of any configuration, if there is only one.
        """
        known_cards = self._known_by_key.get(_key(request), [])
        matches = [known.card for known in known_cards if known.answers(request)]
        return matches[0] if len(matches) == 1 else None

    def reason(self, request: TraceRequest) -> str:
        """Return why there is no card for a request; empty where that is not known."""
        return self._reason_by_key.get(_key(request), "")

    def counts(self, model: ModelSpec) -> ModelCard | None:
        """Return any card of a model, for what all its cards have alike: parameters and FLOPs.

        None where there is none, or where two cards of one request have different parameters or FLOPs.
        """
        first_card: ModelCard | None = None
        for key in self._keys_by_model.get(counted_part(model), {}):
            known_cards = self._known_by_key.get(key, [])
            if len({_counts(known.card) for known in known_cards}) > 1:
                return None
            if known_cards and first_card is None:
                first_card = known_cards[0].card
        return first_card


KNOWN_MODELS = KnownModels()
"""The cards of this process."""


@lru_cache(maxsize=4096)
def counted_part(model: ModelSpec) -> ModelSpec:
    """Return the model without what changes no count: where its pretrained weights lie."""
    return model.model_copy(update={"weights": None, "parameter_count": None})


def _key(request: TraceRequest) -> TraceRequest:
    """Return the request by which cards are looked up: without the digest, in which cards of one name may differ."""
    return request.model_copy(update={"model": counted_part(request.model), "model_digest": None})


def _counts(card: ModelCard) -> _Counts:
    return _Counts(card.parameters, card.flops("forward"), card.flops("backward"))


def _count_the_same(card: ModelCard, other: ModelCard) -> bool:
    """Whether two cards differ at most in the versions of the libraries, and in the digest of the configuration."""
    return _without_origin(card) == _without_origin(other)


def _without_origin(card: ModelCard) -> ModelCard:
    return card.model_copy(update={"versions": {}, "request": _key(card.request)})
