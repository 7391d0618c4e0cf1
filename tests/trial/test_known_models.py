"""Cards are found by what they are of; two that differ under one name make a count unknown, never wrong."""

from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from card_factory import CLASSES, FACTORY, PARAMETERS, make_card
from vitscale.trial import known_models, model_cost
from vitscale.trial.known_models import KnownModels
from vitscale.trial.model_card import ModelCard, PerImage
from vitscale.trial.model_spec import ModelSpec, resolve

OTHER_DIGEST = "b" * 64


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> KnownModels:
    """What this test alone knows."""
    own = KnownModels()
    monkeypatch.setattr(model_cost, "KNOWN_MODELS", own)
    return own


def _larger(card: ModelCard) -> ModelCard:
    return card.model_copy(update={"frozen_elements": 1000})


def test_an_amount_is_a_straight_line() -> None:
    assert PerImage(100, 20).of(8) == 260


def test_a_card_is_found_under_its_own_conditions_alone(known: KnownModels) -> None:
    card = make_card(device="cuda", autocast_dtype="bf16")
    known.put(card)
    assert known.card(card.request) == card
    assert known.card(card.request.model_copy(update={"checkpointing": True})) is None
    assert known.card(card.request.model_copy(update={"device": "cpu"})) is None


def test_weights_that_a_model_starts_from_change_no_count(known: KnownModels) -> None:
    card = make_card()
    known.put(card)
    pretrained = card.request.model.model_copy(update={"weights": "/models/trained"})
    assert known.card(card.request.model_copy(update={"model": pretrained})) == card


def test_the_same_card_from_other_versions_is_no_second_one(known: KnownModels) -> None:
    card = make_card()
    known.put_all([card, card.model_copy(update={"versions": {"tracer": "1", "torch": "9.9"}})])
    assert known.card(card.request) == card


def test_two_configurations_of_one_name_are_told_apart_by_digest_or_not_at_all(known: KnownModels) -> None:
    first, second = make_card(model_digest="a" * 64), _larger(make_card(model_digest=OTHER_DIGEST))
    known.put_all([first, second])
    assert known.card(first.request) == first
    assert known.card(second.request) == second
    assert known.card(first.request.model_copy(update={"model_digest": None})) is None
    assert known.counts(first.request.model) is None


def test_two_versions_of_a_library_s_model_are_one_only_if_they_count_alike(known: KnownModels) -> None:
    card = make_card()
    newer = card.model_copy(update={"versions": {"timm": "2.0"}})
    known.put_all([card, newer])
    assert known.counts(card.request.model) == card
    known.put(_larger(newer))
    assert known.counts(card.request.model) is None
    assert known.card(card.request) is None


def test_other_flops_under_one_name_are_as_ambiguous_as_other_parameters(known: KnownModels) -> None:
    card = make_card(model_digest="a" * 64)
    slower = make_card(model_digest=OTHER_DIGEST).model_copy(update={"forward_flops": {"matmul": PerImage(0, 9)}})
    known.put_all([card, slower])
    assert known.counts(card.request.model) is None


def test_a_configuration_that_counts_the_same_is_answered_by_the_same_card(known: KnownModels) -> None:
    card, same = make_card(model_digest="a" * 64), make_card(model_digest=OTHER_DIGEST)
    known.put_all([card, same])
    assert known.card(same.request) == card
    assert known.card(card.request.model_copy(update={"model_digest": None})) == card


def test_what_is_traced_now_takes_the_place_of_what_was_known(known: KnownModels) -> None:
    """As where a factory was changed after its first run."""
    old, new = make_card(model_digest="a" * 64), _larger(make_card(model_digest=OTHER_DIGEST))
    known.put(old)
    known.replace(new)
    assert known.card(new.request.model_copy(update={"model_digest": None})) == new
    assert known.counts(new.request.model) == new


def test_why_there_is_no_card_is_remembered(known: KnownModels) -> None:
    request = make_card().request
    assert known.reason(request) == ""
    known.replace_with_reason(request, "aten::nonzero needs values")
    assert known.reason(request.model_copy(update={"model_digest": OTHER_DIGEST})) == "aten::nonzero needs values"


def test_a_card_ends_the_reason_why_there_was_none(known: KnownModels) -> None:
    card = make_card()
    known.replace_with_reason(card.request, "aten::nonzero needs values")
    known.put(card)
    assert known.reason(card.request) == ""


def test_counts_of_a_model_that_no_formula_has_are_its_cards(known: KnownModels) -> None:
    model = resolve(FACTORY, CLASSES)
    assert model_cost.parameters(model) is None
    assert model_cost.training_flops(model) is None
    known.put(make_card())
    assert model_cost.counted_parameters(model) == (PARAMETERS + 3, "traced")
    # Forward 10 + 680 an image, backward 20 + 960 an image; in a micro-batch of 10 each has a tenth of the 30.
    assert model_cost.forward_flops(model) == 690
    assert model_cost.training_flops(model) == 690 + 980
    assert model_cost.training_flops(model, images=10) == 680 + 960 + 3


@pytest.mark.parametrize("model", [ModelSpec(), ModelSpec(hf="google/vit-x"), resolve(FACTORY, CLASSES)])
def test_a_count_in_a_spec_was_told_also_where_the_model_has_a_name(known: KnownModels, model: ModelSpec) -> None:
    stated = model.model_copy(update={"parameter_count": 86_600_000})
    assert model_cost.counted_parameters(stated) == (86_600_000, "told")


def test_a_cards_shapes_are_in_the_order_of_forward_with_blocks_marked(known: KnownModels) -> None:
    known.put(make_card())
    shapes = model_cost.parameter_shapes(resolve(FACTORY, CLASSES))
    assert shapes is not None
    assert shapes.tensors() == [(4, 3, 2, 2), (4,), (4, 4), (4, 4), (3, 4), (3,)]
    assert [block.wrapped for block in shapes.blocks] == [False, True, True, False]
    # FLOPs 400, 128, 128, 24: half as many multiply-adds.
    assert [sum(module.macs for module in block.modules) for block in shapes.blocks] == [200, 64, 64, 12]


def test_a_formula_comes_before_a_card(known: KnownModels) -> None:
    vit = resolve(ModelSpec(name="vit-ti16", image_size=32), 10)
    count = model_cost.counted_parameters(vit)
    assert count is not None
    assert count.source == "by formula"


def test_the_process_has_one_collection() -> None:
    assert vars(model_cost)["KNOWN_MODELS"] is known_models.KNOWN_MODELS


@pytest.mark.parametrize(
    "change",
    [
        {"parts": []},
        {"frozen_elements": -1},
        {"buffer_bytes": 2**60},
        {"logits": [10**400, 0]},
        {"batch_norm_channels": [0]},
        {"parts": [{"name": "x", "block": 3 * 10**7}]},
        {"parts": [{"name": "x", "block": 0, "forward": []}]},
        {"parts": [{"name": "x", "block": 0, "modules": [{"name": "m", "shapes": []}]}]},
        {"parts": [{"name": "x", "block": 0, "modules": [{"name": "m", "shapes": [[0]]}]}]},
        {"parts": [{"name": "x", "block": 0, "modules": [{"name": "m", "shapes": [[2] * 20_000]}]}]},
    ],
)
def test_a_card_that_cannot_be_is_refused(change: dict[str, object]) -> None:
    """A card is input: it may come with a stranger's results."""
    content = make_card().model_dump(mode="json") | change
    with pytest.raises(ValidationError):
        ModelCard.model_validate_json(json.dumps(content))
