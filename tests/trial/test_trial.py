from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import types
import typing
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from vitscale.trial.model_spec import ModelSpec
from vitscale.trial.trial import (
    LOCATION_FIELDS,
    ArgumentWord,
    DataSpec,
    TrainSpec,
    Trial,
    WindowSpec,
    World,
    exact,
    samples_used,
    steps_per_epoch,
    world_of_hosts,
)


def trial() -> Trial:
    return Trial(
        model=ModelSpec(name="vit-ti16", image_size=32, patch_size=8, num_classes=10),
        data=DataSpec(name="digits"),
        train=TrainSpec(engine="ddp", precision="fp32", device="cpu", micro_batch=8, grad_accum=3, epochs=2),
        world=World(nodes=2, ranks_per_node=4, threads_per_rank=1),
        window=WindowSpec(),
        launcher="torchrun",
    )


def test_global_batch_is_ranks_x_micro_batch_x_accumulation() -> None:
    assert trial().world.size == 8
    assert trial().global_batch == 8 * 8 * 3


@pytest.mark.parametrize(
    ("scaling", "base", "peak"),
    [("none", 256, 0.1), ("linear", 256, 0.1 * 192 / 256), ("sqrt", 48, 0.2), ("linear", 48, 0.4)],
)
def test_the_learning_rate_follows_the_global_batch_as_asked(scaling: str, base: int, peak: float) -> None:
    train = trial().train.model_copy(
        update={"learning_rate": 0.1, "learning_rate_scaling": scaling, "learning_rate_base_batch": base}
    )
    scaled = trial().model_copy(update={"train": train})
    assert scaled.global_batch == 192
    assert scaled.peak_learning_rate == pytest.approx(peak)
    assert scaled.learning_rate_at(0) == scaled.learning_rate_at(10**6) == scaled.peak_learning_rate


def test_the_learning_rate_warms_up_linearly_and_stays() -> None:
    train = trial().train.model_copy(update={"learning_rate": 0.4, "learning_rate_warmup_steps": 4})
    warm = trial().model_copy(update={"train": train})
    assert [warm.learning_rate_at(step) for step in range(6)] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.4])


# --- identity ------------------------------------------------------------------------------------------------------

GOLDEN = "eb70ca5715ee"


def test_the_identity_is_what_it_was() -> None:
    """A change here makes every results folder in the world one of another study: it must be meant."""
    assert trial().identity() == GOLDEN


@pytest.mark.parametrize(
    ("section", "change"),
    [
        ("train", {"bucket_mib": 25}),
        ("train", {"target_accuracy": 0.9}),
        ("train", {"micro_batches": (1, 15, 8, 8, 8, 8, 8, 8)}),
        ("window", {"explain": False}),
        ("window", {"traces": True}),
        ("data", {"source": "cache"}),
        ("data", {"channels": 12}),
        ("model", {"channels": 12}),
        ("data", {"dtype": "uint16"}),
        ("data", {"hf": "some/images"}),
    ],
)
def test_a_field_that_came_later_counts_as_soon_as_it_is_set(section: str, change: dict[str, object]) -> None:
    """Left alone, it keeps the identity of results that were written before it."""
    before = trial()
    changed = before.model_copy(update={section: getattr(before, section).model_copy(update=change)})
    assert changed.identity() != before.identity()


def test_the_identity_does_not_depend_on_the_process() -> None:
    """String hashing is seeded per process; nothing of it may enter."""
    of = f"Trial.model_validate_json({trial().model_dump_json()!r})"
    program = f"from vitscale.trial.trial import Trial; print({of}.identity())"
    for seed in ("1", "2"):
        answer = subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert answer.stdout.strip() == GOLDEN


def other_value(field: FieldInfo, value: Any) -> Any:
    """A valid value of the field that is not `value`."""
    annotation = field.annotation
    kind: Any = annotation
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        kind = next(option for option in typing.get_args(kind) if option is not type(None))
    if typing.get_origin(kind) is typing.Annotated:
        kind = typing.get_args(kind)[0]
    if typing.get_origin(kind) is Literal:
        return next(option for option in typing.get_args(kind) if option != value)
    if kind is bool:
        return not value
    if kind is int:
        return (value or 0) + 1 if value != 3 else 2
    if kind is float:
        return value / 2 if value else 0.5
    if kind is str:
        return f"{value}-other"
    if typing.get_origin(kind) is tuple:
        words = typing.get_args(kind)[0] in (str, ArgumentWord)
        return ("image", "label") if words else (1, 15, 8, 8, 8, 8, 8, 8)  # of `trial`'s ranks
    if typing.get_origin(kind) is dict:
        return {"zero_optimization": {"stage": 0}}
    raise AssertionError(f"no other value known for {annotation}: extend this test")


def changed_in_one_field(spec: BaseModel, path: str = "") -> Iterator[tuple[str, BaseModel]]:
    """`spec` once for every field at any depth, with that field alone changed."""
    for key, field in type(spec).model_fields.items():
        value = getattr(spec, key)
        if isinstance(value, BaseModel):
            for name, inner in changed_in_one_field(value, f"{path}{key}."):
                yield name, spec.model_copy(update={key: inner})
        else:
            yield f"{path}{key}", spec.model_copy(update={key: other_value(field, value)})


CHANGED = dict(changed_in_one_field(trial()))
CHANGED["world.ranks"] = trial().model_copy(update={"world": world_of_hosts(7, 4, 1)})
CHANGED["train.script"] = trial().model_copy(
    update={"script_digest": "0", "train": trial().train.model_copy(update={"script": "train.py"})}
)
NEUTRAL = {f"data.{key}" for key in LOCATION_FIELDS}

ENGINES: dict[str, dict[str, Any]] = {
    "none": {},
    "ddp": {"bucket_mib": 25, "gradient_as_bucket_view": True, "gradient_dtype": "fp16"},
    "fsdp2": {"reshard_after_forward": False, "precision": "bf16-params", "master_weights": True},
    "deepspeed": {"zero_stage": 3, "offload": "parameters", "overlap_comm": False, "gather_bucket_mib": 8},
    "accelerate": {"accelerate_backend": "deepspeed", "zero_stage": 2, "compile": True},
    "megatron": {"device": "cuda", "overlap_comm": True, "bucket_mib": 8},
    "unknown": {},
}
"""An engine -> options of its own."""
MORE: dict[str, dict[str, Any]] = {
    "an import": {"origin": "cluster A, 8 x V100"},
    "a digest of the model": {"model_digest": "0123456789abcdef", "model": ModelSpec(hf="./swin")},
    "a digest of the weights": {"weights_digest": "0123456789abcdef", "model": ModelSpec(hf="./s", weights="./w")},
}


def golden_trials() -> Iterator[tuple[str, Trial]]:
    """A trial of each engine, plain and with options; each field changed alone; what else an identity is made of."""
    before = trial()
    for engine, options in ENGINES.items():
        for name, update in ((engine, {}), (f"{engine} with options", options)):
            yield name, before.model_copy(update={"train": before.train.model_copy(update={"engine": engine} | update)})
    for field, changed in CHANGED.items():
        assert isinstance(changed, Trial)
        yield field, changed
    for name, update in MORE.items():
        yield name, before.model_copy(update=update)


def test_identities_are_what_they_were() -> None:
    """`identities.json` was written as the first fields came to records that existed. None of it may change; fields
    and engines to come may be added."""
    golden = json.loads((Path(__file__).parent / "identities.json").read_text())
    made = {name: made.identity() for name, made in golden_trials()}
    assert {name: made[name] for name in golden} == golden


def test_a_record_with_a_field_that_was_removed_reads_as_the_same_trial() -> None:
    stored = trial().model_dump(mode="json")
    stored["train"]["onebit_freeze_steps"] = 7
    assert Trial.model_validate(stored) == trial()


@pytest.mark.parametrize("field", sorted(CHANGED.keys() - NEUTRAL))
def test_every_field_that_affects_the_result_changes_the_identity(field: str) -> None:
    other = CHANGED[field]
    assert isinstance(other, Trial)
    Trial.model_validate(other.model_dump())  # the value put in is a valid one
    assert other.identity() != trial().identity()


@pytest.mark.parametrize("field", sorted(NEUTRAL))
def test_where_the_images_are_found_does_not_change_the_identity(field: str) -> None:
    other = CHANGED[field]
    assert isinstance(other, Trial)
    assert other != trial()
    assert other.identity() == trial().identity()


def test_the_identity_survives_storing() -> None:
    config = {"fp16": {"enabled": False}, "gradient_clipping": 0.1, "list": [1, 2.5, "x", None]}
    stored = trial().model_copy(update={"train": trial().train.model_copy(update={"deepspeed_config": config})})
    assert Trial.model_validate_json(stored.model_dump_json()).identity() == stored.identity()


@pytest.mark.parametrize("shares", [(8,) * 7, (8,) * 7 + (9,), ()])
def test_shares_that_are_not_those_of_the_ranks_are_refused(shares: tuple[int, ...]) -> None:
    content = trial().model_dump()
    content["train"]["micro_batches"] = shares
    with pytest.raises(ValidationError, match="not the shares of 8 ranks with 8 images in the mean"):
        Trial.model_validate(content)


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, 0.0])
def test_numbers_that_are_none_are_refused(value: float) -> None:
    with pytest.raises(ValidationError):
        DataSpec(name="digits", fraction=value)


# --- arithmetic ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("samples", "fraction", "used"),
    [
        (50_000, 1.0, 50_000),
        (50_000, 0.3, 15_000),
        (50_000, 0.1 * 3, 15_000),  # 0.30000000000000004
        (7_000, 5 / 7, 5_000),
        (7_000, 0.7142857142857143, 5_000),
        (10, 0.25, 3),  # 2.5 rounds up
        (1_281_167, 1 / 1024, 1_252),  # 1251.14
        (1_024_000, 0.001 / 1024, 1),
        (50_000, 1e-7, 1),
    ],
)
def test_images_used_by_hand(samples: int, fraction: float, used: int) -> None:
    assert samples_used(samples, fraction) == used


@given(st.integers(1, 100_000), st.data())
def test_a_quotient_of_whole_numbers_is_recovered_from_its_float(denominator: int, data: st.DataObject) -> None:
    numerator = data.draw(st.integers(1, denominator))
    assert exact(numerator / denominator) == Fraction(numerator, denominator)


@given(st.floats(min_value=1e-300, max_value=1.0), st.integers(1, 10_000_000))
def test_images_used_are_never_none_and_never_more_than_there_are(fraction: float, samples: int) -> None:
    assert 1 <= samples_used(samples, fraction) <= samples


@pytest.mark.parametrize(
    ("samples", "world_size", "micro_batch", "grad_accum", "steps", "dropping"),
    [
        (1437, 1, 32, 1, 45, 44),  # 44.9
        (1437, 2, 32, 1, 23, 22),  # 22.45
        (1437, 2, 16, 2, 23, 22),
        (1024, 4, 32, 2, 4, 4),
        (1025, 4, 32, 2, 5, 4),
        (50_000, 8, 64, 1, 98, 97),  # 97.66
        (5, 2, 4, 1, 1, 0),
    ],
)
def test_steps_per_epoch_by_hand(
    samples: int, world_size: int, micro_batch: int, grad_accum: int, steps: int, dropping: int
) -> None:
    assert steps_per_epoch(samples, world_size, micro_batch, grad_accum, False) == steps
    assert steps_per_epoch(samples, world_size, micro_batch, grad_accum, True) == dropping


@given(
    st.integers(1, 2_000_000), st.fractions(min_value=0, max_value=1, max_denominator=1000).filter(bool),
    st.integers(1, 2048), st.integers(1, 512),
)  # fmt: skip
def test_steps_per_epoch_is_the_design_s_formula(dataset: int, share: Fraction, ranks: int, micro_batch: int) -> None:
    """`ceil(ceil(D * fraction / N) / b)` for one micro-step per step."""
    expected = math.ceil(Fraction(math.ceil(dataset * share / ranks), micro_batch))
    assert steps_per_epoch(samples_used(dataset, float(share)), ranks, micro_batch, 1, False) == expected


@given(st.integers(0, 10**7), st.integers(1, 64), st.integers(1, 64), st.integers(1, 8))
def test_with_accumulation_the_micro_steps_of_the_formula_are_grouped(
    samples: int, ranks: int, micro_batch: int, grad_accum: int
) -> None:
    micro_steps = math.ceil(Fraction(math.ceil(Fraction(samples, ranks)), micro_batch))
    assert steps_per_epoch(samples, ranks, micro_batch, grad_accum, False) == math.ceil(
        Fraction(micro_steps, grad_accum)
    )
    assert steps_per_epoch(samples, ranks, micro_batch, grad_accum, True) * ranks * micro_batch * grad_accum <= samples
