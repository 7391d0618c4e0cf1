"""A model of which nothing is known has no counts, and breaks nothing."""

from __future__ import annotations

from vitscale.trial.model_cost import forward_flops, parameters, training_flops, vit_shape
from vitscale.trial.model_spec import ModelSpec


def test_every_count_is_unknown() -> None:
    spec = ModelSpec()
    assert spec.unknown
    assert parameters(spec) is None
    assert forward_flops(spec) is None
    assert training_flops(spec) is None
    assert vit_shape(spec) is None


def test_a_named_model_is_known() -> None:
    assert not ModelSpec(name="vit-b16").unknown
