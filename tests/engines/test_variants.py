from __future__ import annotations

from typing import Any

import pytest

from results_factory import make_trial
from vitscale.engines import ENGINES
from vitscale.engines.variants import PROPOSED, EngineVariant


@pytest.mark.parametrize(
    ("engine", "fields", "name"),
    [
        ("ddp", {}, "ddp"),
        ("deepspeed", {"zero_stage": 0}, "deepspeed"),
        ("deepspeed", {"zero_stage": 3}, "deepspeed ZeRO-3"),
        ("accelerate", {"accelerate_backend": "ddp"}, "accelerate"),
    ],
)
def test_a_variant_comes_back_from_the_training_that_it_makes(engine: str, fields: dict[str, Any], name: str) -> None:
    variant = EngineVariant.of_fields(engine, fields)
    assert variant.name == name
    train = make_trial("deepspeed", 2, zero_stage=2).train.model_copy(update=variant.changes)
    assert EngineVariant.of_train(train) == variant
    assert (train.engine, {field: getattr(train, field) for field in fields}) == (engine, fields)


def test_backends_of_accelerate_are_variants_of_it() -> None:
    ddp = EngineVariant.of_fields("accelerate", {"accelerate_backend": "ddp"})
    deepspeed = EngineVariant.of_fields("accelerate", {"accelerate_backend": "deepspeed"})
    assert sorted({deepspeed, ddp}) == [ddp, deepspeed]


def test_every_variant_that_an_engine_names_is_proposed_once() -> None:
    assert len(set(PROPOSED)) == sum(len(facts.variants) for facts in ENGINES.values())
    assert {variant.engine for variant in PROPOSED} == {name for name, facts in ENGINES.items() if facts.variants}
