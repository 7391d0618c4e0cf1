"""The cards that this process knows: of the study that is planned, and of results that were read.

Counts of a model that no formula has are looked up here. A card says itself what it is of, so that putting one in can
only make a count known, never change it. Where two cards of one name differ (the hub changed the configuration between
two studies), the count is unknown unless the question says which one it means.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache

from vitscale.trial.model_card import ModelCard, TraceRequest
from vitscale.trial.model_spec import ModelSpec


class KnownModels:
    """Cards by what they are of, and why other models have none.

    Example:
        >>> known = KnownModels()
        >>> known.put(card)
        >>> known.card(card.request) == card
        True
    """

    def __init__(self) -> None:
        self._cards_by_model: dict[ModelSpec, list[ModelCard]] = {}
        self._reasons: dict[TraceRequest, str] = {}

    def put(self, card: ModelCard) -> None:
        """Add a card; one of the same request that counts the same is there already."""
        cards = self._cards_by_model.setdefault(counted_part(card.request.model), [])
        if not any(_count_the_same(card, other) for other in cards):
            cards.append(card)

    def put_all(self, cards: Iterable[ModelCard]) -> None:
        """Add several cards."""
        for card in cards:
            self.put(card)

    def replace(self, card: ModelCard) -> None:
        """Put a card in place of any other of the same request."""
        wanted = _without_digest(card.request)
        model_cards = self._cards_by_model.setdefault(counted_part(card.request.model), [])
        is_same = [
            _without_digest(other.request) == wanted and other.request.model_digest == card.request.model_digest
            for other in model_cards
        ]
        model_cards[:] = [other for other, same in zip(model_cards, is_same, strict=True) if not same] + [card]

    def put_reason(self, request: TraceRequest, reason: str) -> None:
        """Remember why there is no card for a request."""
        self._reasons[_without_digest(request)] = reason

    def card(self, request: TraceRequest) -> ModelCard | None:
        """Return the card for a request; None where there is none, or where several differ.

        A request without a digest is answered by a card of any configuration, if there is only one.
        """
        wanted = _without_digest(request)
        matching = [card for card in self._of_model(request) if _without_digest(card.request) == wanted]
        return matching[0] if len(matching) == 1 else None

    def reason(self, request: TraceRequest) -> str:
        """Return why there is no card for a request; empty where that is not known."""
        return self._reasons.get(_without_digest(request), "")

    def counts(self, model: ModelSpec) -> ModelCard | None:
        """Return any card of a model, for what all its cards have alike: parameters and FLOPs.

        None where there is none, or where two cards have different parameters: they are of two configurations.
        """
        cards = self._cards_by_model.get(counted_part(model), [])
        if not cards:
            return None
        digests = {card.request.model_digest for card in cards}
        parameter_counts = {card.parameters for card in cards}
        is_ambiguous = len(digests) > 1 and len(parameter_counts) > 1
        return None if is_ambiguous else cards[0]

    def _of_model(self, request: TraceRequest) -> Iterator[ModelCard]:
        """Yield the model's cards, those of another configuration left out where the request names its own."""
        for card in self._cards_by_model.get(counted_part(request.model), []):
            if request.model_digest in (None, card.request.model_digest):
                yield card


KNOWN_MODELS = KnownModels()
"""The cards of this process."""


@lru_cache(maxsize=4096)
def counted_part(model: ModelSpec) -> ModelSpec:
    """Return the model without what changes no count: where its pretrained weights lie."""
    return model.model_copy(update={"weights": None, "parameter_count": None})


def _without_digest(request: TraceRequest) -> TraceRequest:
    return request.model_copy(update={"model": counted_part(request.model), "model_digest": None})


def _count_the_same(card: ModelCard, other: ModelCard) -> bool:
    """Whether two cards differ at most in the versions of the libraries that they were traced with."""
    return card.model_copy(update={"versions": {}}) == other.model_copy(update={"versions": {}})
