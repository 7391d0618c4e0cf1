from __future__ import annotations

from typing import Any

import pytest

from results_factory import make_trial
from vitscale.engines.deepspeed import _norm_unknown


@pytest.mark.parametrize(
    ("train", "exchanged", "reason"),
    [
        ({}, True, None),
        ({"zero_stage": 3, "precision": "bf16-params"}, True, None),
        ({"precision": "fp16"}, True, "fp16 scales the gradients by a factor that changes as training goes on"),
        ({}, False, "the optimizer of the DeepSpeed file exchanges no gradients"),
        (
            {"zero_stage": 1, "deepspeed_config": {"optimizer": {"type": "Muon"}}},
            True,
            "under Muon DeepSpeed takes the norm of the update, not of the gradient",
        ),
        ({"zero_stage": 0, "deepspeed_config": {"optimizer": {"type": "Muon"}}}, True, None),
        (
            {"zero_stage": 2, "deepspeed_config": {"zero_optimization": {"compute_grad_norm": False}}},
            True,
            "the DeepSpeed file sets compute_grad_norm to false",
        ),
        ({"zero_stage": 2, "deepspeed_config": {"zero_optimization": {"compute_grad_norm": True}}}, True, None),
        ({"zero_stage": 2, "deepspeed_config": {"optimizer": "adam", "zero_optimization": []}}, True, None),
    ],
)
def test_where_the_gradients_norms_are_unknown_it_says_why(
    train: dict[str, Any], exchanged: bool, reason: str | None
) -> None:
    assert _norm_unknown(make_trial("deepspeed", 2, **train).train, exchanged=exchanged) == reason
