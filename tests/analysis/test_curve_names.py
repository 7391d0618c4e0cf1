"""Curves are named shortly, and no two that were swept apart are named alike."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from results_factory import make_trial
from vitscale.analysis.scaling import curve_name, trial_name
from vitscale.engines.names import engine_name
from vitscale.study.sections import TrainSection
from vitscale.trial.trial import AccelerateBackend, CompileMode, GradientDtype, Offload


@pytest.mark.parametrize(
    ("labels", "name"),
    [
        ({"engine": "none"}, "plain (no wrapper)"),
        ({"engine": "ddp"}, "ddp"),
        ({"engine": "fsdp2", "reshard_after_forward": False}, "fsdp2, no reshard"),
        ({"engine": "fsdp2", "master_weights": True}, "fsdp2, fp32 master weights"),
        ({"engine": "deepspeed"}, "deepspeed"),
        ({"engine": "deepspeed", "zero_stage": 2}, "deepspeed ZeRO-2"),
        ({"engine": "deepspeed", "zero_stage": 2, "offload": "optimizer"}, "deepspeed ZeRO-2, optimizer offloaded"),
        ({"engine": "accelerate", "accelerate_backend": "ddp"}, "accelerate (DDP)"),
        ({"engine": "accelerate", "accelerate_backend": "fsdp2"}, "accelerate (FSDP2)"),
        ({"engine": "accelerate", "accelerate_backend": "deepspeed", "zero_stage": 1}, "accelerate (DeepSpeed ZeRO-1)"),
        ({"engine": "ddp", "compile": True, "gradient_dtype": "bf16"}, "ddp, compile, bf16 gradients"),
        ({"compile": False, "bucket_mib": 4}, "ddp, no compile, 4 MiB buckets"),
        ({"precision": "bf16", "optimizer": "sgd", "micro_batch": 16}, "ddp, bf16, sgd, micro_batch 16"),
        ({"rank_speeds": [1.0, 1, 0.31]}, "ddp, shares 2 x 1 : 0.31"),
        ({"rank_speeds": [1.0, 1.0]}, "ddp, equal shares 2 x 1"),
        ({"rank_speeds": None}, "ddp, rank_speeds None"),
    ],
)
def test_names(labels: dict[str, Any], name: str) -> None:
    assert curve_name({f"train.{field}": value for field, value in labels.items()}, make_trial()) == name


def test_a_name_tells_of_the_engine_though_it_was_not_swept() -> None:
    assert curve_name({"train.micro_batch": 8}, make_trial("deepspeed", zero_stage=3)) == (
        "deepspeed ZeRO-3, micro_batch 8"
    )
    assert curve_name({}, None) == "unknown engine"


def test_a_field_of_two_sections_is_named_in_full() -> None:
    labels = {"model.name": "vit-b16", "data.name": "digits"}
    assert curve_name(labels, make_trial()) == "ddp, model.name vit-b16, data.name digits"
    assert curve_name({"model.name": "vit-b16"}, make_trial()) == "ddp, vit-b16"


def test_local_norms_of_segmentation_are_said_in_every_name() -> None:
    classifies = make_trial("ddp", 2)
    segments = classifies.model_copy(update={"model": classifies.model.model_copy(update={"task": "segmentation"})})
    synchronised = segments.model_copy(
        update={"train": segments.train.model_copy(update={"batch_norm": "synchronised"})}
    )
    assert [trial_name(trial) for trial in (classifies, segments, synchronised)] == [
        "ddp on 2 ranks", "ddp on 2 ranks, local norm", "ddp on 2 ranks",
    ]  # fmt: skip
    assert curve_name({}, segments) == curve_name({"train.batch_norm": "local"}, segments) == "ddp, local norm"
    assert curve_name({"train.batch_norm": "synchronised"}, synchronised) == "ddp, synchronised norm"
    assert curve_name({}, classifies) == curve_name({}, synchronised) == "ddp"


def test_unequal_shares_are_named_once() -> None:
    unequal = make_trial("ddp", 2, grad_accum=3, micro_batches=(11, 5))
    assert curve_name({"train.engine": "ddp"}, unequal) == "ddp, unequal shares"
    assert curve_name({"train.rank_speeds": [1.0, 0.5]}, unequal) == "ddp, shares 1 : 0.5"
    assert trial_name(unequal) == "ddp on 2 ranks, accumulation 3, shares 11 + 5"


def test_a_trial_is_named_by_what_distributes_it() -> None:
    assert trial_name(make_trial("deepspeed", 2, zero_stage=1, grad_accum=3)) == (
        "deepspeed ZeRO-1 on 2 ranks, accumulation 3"
    )
    assert trial_name(make_trial("none")) == "plain (no wrapper) on 1 rank"
    accelerate = make_trial("accelerate", accelerate_backend="deepspeed").train
    assert engine_name(accelerate) == "accelerate (DeepSpeed ZeRO-0)"


VALUES: dict[str, st.SearchStrategy[Any]] = {
    "engine": st.sampled_from(["none", "ddp", "fsdp2", "deepspeed", "accelerate"]),
    "accelerate_backend": st.sampled_from(get_args(AccelerateBackend)),
    "zero_stage": st.integers(0, 3),
    "offload": st.sampled_from(get_args(Offload)),
    "gradient_dtype": st.sampled_from(get_args(GradientDtype)),
    "precision": st.sampled_from(["fp32", "bf16", "bf16-params", "fp16"]),
    "optimizer": st.sampled_from(get_args(TrainSection.model_fields["optimizer"].annotation)),
    "micro_batch": st.integers(1, 1000),
    "bucket_mib": st.integers(1, 1000),
    "gather_bucket_mib": st.integers(1, 1000),
    "hpz": st.integers(1, 1000),
    "learning_rate": st.floats(1e-6, 1.0),
    "compile_mode": st.sampled_from(get_args(CompileMode)),
    "rank_speeds": st.lists(st.floats(1e-6, 1000.0), min_size=1, max_size=5),
    **dict.fromkeys(
        ["compile", "overlap_comm", "activation_checkpointing", "reshard_after_forward", "gradient_as_bucket_view",
         "static_graph", "drop_last", "master_weights"],
        st.booleans(),
    ),
}  # fmt: skip
LABELS = st.fixed_dictionaries({}, optional={f"train.{field}": values for field, values in VALUES.items()})


@given(LABELS, LABELS)
def test_labels_that_differ_have_names_that_differ(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Field by field too: one that only one of two curves names still tells them apart."""
    for other in (theirs, ours | theirs):
        trial = make_trial("megatron")
        ordered = [dict(sorted(labels.items())) for labels in (ours, other)]
        assert (ordered[0] == ordered[1]) == (curve_name(ordered[0], trial) == curve_name(ordered[1], trial))
