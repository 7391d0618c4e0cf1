"""A model of which nothing is known has no counts, and breaks nothing."""

from __future__ import annotations

from vitscale.trial.model_cost import activation_bytes, forward_flops, parameters, training_flops
from vitscale.trial.model_spec import ModelSpec


def test_every_count_is_unknown() -> None:
    spec = ModelSpec()
    assert spec.unknown
    assert parameters(spec) is None
    assert forward_flops(spec) is None
    assert training_flops(spec) is None
    assert activation_bytes(spec, 8, "fp32") is None


def test_a_named_model_is_known() -> None:
    assert not ModelSpec(name="vit-b16").unknown
