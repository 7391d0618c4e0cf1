"""*extrapolated* says that each part was measured or declared: it is never the label of what nobody ran."""

from __future__ import annotations

from typing import Any

import pytest

from evidence_factory import MEASURED, make_evidence, make_point
from vitscale.engines.variants import EngineVariant
from vitscale.prediction.configurations import Candidate
from vitscale.prediction.fitting import fit
from vitscale.prediction.predicting import Question, predict
from vitscale.prediction.workloads import evaluate_all
from vitscale.trial.model_spec import ModelSpec, resolve

FITTED = fit(make_evidence([make_point(gpus, 0.2 + 0.001 * gpus) for gpus in (1, 2, 4)], MEASURED))


@pytest.mark.parametrize("gpus", [1, 2, 8])
@pytest.mark.parametrize(
    "changes",
    [
        {"engine": "deepspeed", "zero_stage": 1},
        {"engine": "fsdp2"},
        {"precision": "fp32"},
        {"model": resolve(ModelSpec(name="vit-l16"), 10)},
        {"activation_checkpointing": True},
    ],
)
def test_what_nobody_ran_is_prior_driven_on_any_number_of_ranks(changes: dict[str, Any], gpus: int) -> None:
    (answered,) = predict(FITTED, Question((gpus,), nodes_of=8, changes=changes))
    assert answered.label == "prior-driven"


def test_what_was_run_is_extrapolated_beyond_its_ranks_and_batches() -> None:
    (answered,) = predict(FITTED, Question((16,), nodes_of=8, changes={"micro_batch": 32}))
    assert answered.label == "extrapolated"


@pytest.mark.parametrize(("engine", "stage"), [("deepspeed", 1), ("deepspeed", 3), ("fsdp2", 0)])
def test_candidates_of_advice_have_the_same_label(engine: str, stage: int) -> None:
    ddp = Candidate(8, 8, EngineVariant("ddp"), 64, 1)
    other = Candidate(8, 8, EngineVariant.of_fields(engine, {"zero_stage": stage}), 64, 1)
    assert evaluate_all(FITTED, "ddp", [ddp, other]).labels == ("extrapolated", "prior-driven")
