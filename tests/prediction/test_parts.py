"""Parts of a predicted step: none is shown where together they come to more than the step."""

from __future__ import annotations

import dataclasses

import pytest

from evidence_factory import MEASURED, make_evidence, make_point
from prediction_factory import make_forecast, make_prediction, study
from vitscale.pages import prediction_table
from vitscale.prediction.evidence import Evidence
from vitscale.prediction.fitting import fit
from vitscale.prediction.network.checked import network_of
from vitscale.prediction.network.links import declared_link
from vitscale.prediction.predicting import Question, predict
from vitscale.prediction.results import PART_FIELDS, REST_TOLD
from vitscale.trial.model_spec import ModelSpec


def told_by_a_user() -> Evidence:
    """A table of one rank count whose engine and parameters a user tells: its step is halfway between two models."""
    model = ModelSpec(parameter_count=212_000_000)
    point = make_point(3, 0.4771, model=None, engine="ddp", micro_batch=8, images=None)
    imported = point.trial.model_copy(update={"model": model, "origin": "t.csv"})
    return make_evidence([dataclasses.replace(point, trial=imported)], network_of(None, declared_link("10GbE")))


def test_parts_that_exceed_the_step_are_unavailable_and_the_step_stands() -> None:
    (answered,) = predict(fit(told_by_a_user()), Question((24,), nodes_of=1))
    assert answered.step_seconds.value > 0
    assert "step_seconds" not in answered.reasons
    assert {answered.reasons[field] for field in PART_FIELDS} == {answered.reasons["wire_seconds"]}
    assert "more than the step" in answered.reasons["wire_seconds"]
    fields = prediction_table.prediction(answered)
    assert [fields[field] for field in PART_FIELDS] == [None] * len(PART_FIELDS)
    assert fields["step_seconds"] == answered.step_seconds.value


@pytest.mark.parametrize("per_node", [1, 8])
@pytest.mark.parametrize("engine", ["ddp", "deepspeed", "fsdp2", "unknown"])
def test_parts_that_are_shown_never_exceed_their_step(engine: str, per_node: int) -> None:
    points = [make_point(gpus, seconds, engine=engine) for gpus, seconds in ((1, 0.2), (2, 0.21), (4, 0.22))]
    for evidence in (make_evidence(points), make_evidence(points, MEASURED), told_by_a_user()):
        for answered in predict(fit(evidence), Question((2, 8, 64), nodes_of=per_node)):
            parts = [prediction_table.known(answered, field) for field in PART_FIELDS if field != "rest_seconds"]
            together = sum(part.value for part in parts if part is not None)
            assert together <= (1 + REST_TOLD) * answered.step_seconds.value


def test_parts_of_a_step_that_add_up_stand_in_the_table() -> None:
    forecast = make_forecast(study(), [make_prediction(8)])
    ((table,), _) = prediction_table.prediction_tables(forecast)
    assert "exposed wire" in [column.name for column in table.columns]
