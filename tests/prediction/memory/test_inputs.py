"""What a forecast of memory reads of a trial: trials that are equal in it share one forecast, and others do not."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from results_factory import make_trial
from vitscale.prediction.memory.forecast import _TAKES_NO_MEMORY, forecast_bytes, memory_inputs, totals, unavailable
from vitscale.trial.model_spec import resolve
from vitscale.trial.trial import TrainSpec, Trial

ZERO_FILE = {"zero_optimization": {"stage": 1, "reduce_bucket_size": 1000}}
ENGINES: tuple[dict[str, Any], ...] = (
    {"engine": "none"},
    {"engine": "ddp"},
    {"engine": "fsdp2"},
    *({"engine": "deepspeed", "zero_stage": stage} for stage in range(4)),
    {"engine": "deepspeed", "zero_stage": 1, "deepspeed_config": ZERO_FILE},
    {"engine": "accelerate", "accelerate_backend": "ddp"},
)
OTHER_VALUES: dict[str, tuple[Any, ...]] = {
    "learning_rate": (0.5,),
    "learning_rate_scaling": ("linear", "sqrt"),
    "learning_rate_base_batch": (7,),
    "learning_rate_warmup_steps": (5,),
    "weight_decay": (0.0,),
    "epochs": (9,),
    "target_accuracy": (0.5,),
    "seed": (3,),
}
OF_WEIGHT: dict[str, tuple[Any, ...]] = {
    "micro_batch": (1, 8),
    "grad_accum": (1, 2),
    "optimizer": ("adamw", "sgd"),
    "momentum": (0.0, 0.9),
    "activation_checkpointing": (False, True),
    "precision": ("fp32", "bf16"),
    "gradient_as_bucket_view": (False, True),
    "bucket_mib": (None, 1),
}


def _trial(**train: Any) -> Trial:
    trial = make_trial(gpus=1 if train["engine"] == "none" else 2)
    fields = trial.train.model_dump() | train
    return trial.model_copy(update={"model": resolve(trial.model, 10), "train": TrainSpec(**fields)})


@pytest.mark.parametrize("engine", ENGINES, ids=str)
@pytest.mark.parametrize("field", OTHER_VALUES)
def test_what_is_no_input_changes_no_moment(engine: dict[str, Any], field: str) -> None:
    """`totals` reads the trial itself, of which no field has been replaced."""
    for optimizer in ({"optimizer": "adamw"}, {"optimizer": "sgd", "momentum": 0.0}):
        trial = _trial(**engine, **optimizer)
        for value in OTHER_VALUES[field]:
            changed = _trial(**engine, **optimizer, **{field: value})
            assert changed != trial
            assert totals(changed) == totals(trial)
            assert memory_inputs(changed) == memory_inputs(trial)


def test_a_value_is_tried_of_every_field_that_is_no_input() -> None:
    assert OTHER_VALUES.keys() == set(_TAKES_NO_MEMORY)


_FIELDS = st.fixed_dictionaries(
    {field: st.sampled_from(values) for field, values in {**OF_WEIGHT, **OTHER_VALUES}.items()}
)


@given(st.sampled_from(ENGINES), _FIELDS)
def test_a_forecast_is_the_highest_of_all_moments(engine: dict[str, Any], fields: dict[str, Any]) -> None:
    trial = _trial(**engine, **fields)
    assert unavailable(trial) == ""
    assert forecast_bytes(trial) == max(totals(trial))
