"""What sharding engines hold around parts that are not alike, by hand on a Swin of two stages of one block each."""

from __future__ import annotations

from typing import Any

import pytest

from prediction.memory.test_forecast import trial
from vitscale.base.plugins import referred
from vitscale.engines import wrapper_facts
from vitscale.engines.parts import Around
from vitscale.engines.states import Parts
from vitscale.prediction.memory.around import around
from vitscale.prediction.memory.in_parts import pieces
from vitscale.trial.model_cost import parameter_shapes, parameters
from vitscale.trial.model_spec import ModelSpec
from vitscale.trial.parallel import ParallelSpec
from vitscale.trial.trial import Trial

TINY = ModelSpec(name="swinv2-t", image_size=8, patch_size=2, hidden_size=4, heads=1, depths=(1, 1), window_size=2)
"""3 classes. A block of width c and h heads has 12 c^2 + 12 c + 513 h + 1,536: 2,289 and 3,426; merging 8 c^2 + 4 c.
Before the two stages 3*2*2*4 + 4 + 8, behind them 2*8 + 8*3 + 3."""
FIRST, SECOND = 2_289 + 144, 3_426
BEHIND = 43
ROOT = 60 + BEHIND
PARTS = 5
"""Patches, block, merging, block, head."""
LARGEST = 1_024
"""Of a block: 512 x 2 of its biases' network, and in the second 2 x 512 too."""


def held(wanted: Trial) -> Around:
    shapes = parameter_shapes(wanted.model)
    assert shapes is not None
    holding = referred(wrapper_facts(wanted.train).states)(wanted, shapes)
    parts = pieces(wanted.model, wanted.train).parts
    assert len(parts) == PARTS
    assert sum(part.elements for part in parts) == parameters(wanted.model) == ROOT + FIRST + SECOND
    return around(wanted, holding, parts)


def column(rows: Any, part: str) -> list[int]:
    return [row.get(part, 0) // 4 for row in rows]


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_fsdp2_holds_one_stage_and_what_is_on_its_way(device: Any) -> None:
    found = held(trial(2, TINY, device, engine="fsdp2"))
    # Each stage twice, in the buffer and out of it; behind the last its buffer is still there.
    first, second = ROOT + 2 * FIRST, ROOT + 2 * SECOND
    assert column(found.forward, "gathered weights") == [2 * ROOT, first, first, second, ROOT + SECOND]
    # In backward the stage before is on its way.
    assert column(found.backward, "gathered weights") == [
        ROOT,
        ROOT + FIRST,
        ROOT + FIRST,
        second - SECOND + FIRST,
        ROOT + SECOND,
    ]
    # What the stage behind has scattered waits for its own.
    assert column(found.backward, "buckets") == [FIRST, SECOND, SECOND, 0, 0]
    # Of the root gradients stay whole; of a stage until all of it is there, and then half on each of two ranks.
    in_first = BEHIND + 144 + LARGEST + SECOND // 2
    assert column(found.backward, "gradients")[1] == in_first
    assert column(found.exchange and [found.exchange], "buckets") == [ROOT]
    assert column([found.exchange], "gathered weights") == [0], "they are let go of before"
    # Let go of while a stage's first part is under way.
    on_cpu = [FIRST, 0, SECOND] if device == "cpu" else [0, 0, 0]
    assert column(found.forward, "gloo's copies")[1:4] == on_cpu
    # As a stage's backward begins, gloo has a copy of what the stage behind scattered and of what is fetched ahead.
    copies = {
        number: [own["gloo's copies"] // 4 for at, _, own, _ in found.between if at == number] for number in (2, 3)
    }
    in_backward = [max(copies[3]), max(copies[2])]
    assert in_backward == ([FIRST, SECOND] if device == "cpu" else [0, 0])


def test_fsdp2_keeps_stages_gathered_where_it_is_told_to() -> None:
    found = held(trial(2, TINY, engine="fsdp2", reshard_after_forward=False))
    assert column(found.forward, "gathered weights")[3:] == [ROOT + FIRST + 2 * SECOND, ROOT + FIRST + 2 * SECOND]
    assert column(found.backward, "gathered weights") == [
        ROOT, ROOT + FIRST, ROOT + FIRST, ROOT + FIRST + SECOND, ROOT + FIRST + SECOND,
    ]  # fmt: skip


def zero(stage: int, bucket: int) -> Around:
    settings = {
        "reduce_bucket_size": bucket, "stage3_prefetch_bucket_size": 10, "stage3_param_persistence_threshold": 1_000,
    }  # fmt: skip
    config = {"zero_optimization": settings}
    return held(trial(2, TINY, engine="deepspeed", zero_stage=stage, deepspeed_config=config))


def test_a_bucket_is_full_where_the_order_of_backward_fills_it() -> None:
    """Head 43, norm 16, MLP 264 and 288, norm 16, output 72, biases' network 1,024 and 512 are 2,235: 1,024 do not fit
    into 3,000. These, 2 and 72 + 64 + 72 of attention, merging 144, norm 8, MLP 68 and 80, norm 8, output 20, 512 and
    512 are 2,586 before the next 1,024."""
    found = zero(2, 3_000)
    assert [(number, own["temporaries"] // 4) for number, _, own, _ in found.between] == [(3, 2_235), (1, 2_586)]
    assert [gone for _, gone, _, _ in found.between] == [
        (2_235 - BEHIND) / SECOND,
        (68 + 80 + 8 + 8 + 20 + 1_024) / 2_289,
    ]
    part = found.between[1][2]["gradients"] // 4 - LARGEST
    assert part >= (ROOT + FIRST + SECOND) // 2
    assert column(found.backward, "gradients")[3] == LARGEST, "this rank's part is there from the first exchange on"
    assert column(found.backward, "gradients")[2] == part + 128


def test_zero_3_keeps_large_weights_from_forward_to_their_backward() -> None:
    found = zero(3, 10_000)
    small = ROOT + FIRST + SECOND - 3 * LARGEST
    ahead = 10 + LARGEST
    gathered = column(found.forward, "gathered weights")
    # What fetching ahead has not copied out of its buffer yet is there twice, until the last large weight is used.
    assert gathered == [small + 3 * LARGEST + ahead] * 3 + [small + 3 * LARGEST] * 2
    assert column(found.backward, "gathered weights") == [small + n * LARGEST for n in (0, 1, 1, 3, 3)]


# --- replicas ---------------------------------------------------------------------------------------------------------


def replicated(device: Any, **train: Any) -> Around:
    """Four ranks in two replicas of two: a rank has half of each gradient."""
    parallel = ParallelSpec(replicate=2)
    return held(trial(4, TINY, device, engine="fsdp2", **train).model_copy(update={"parallel": parallel}))


def at_first_gradient(found: Around, number: int) -> Parts:
    """What lies there when the backward of a stage begins, whose last part has this number."""
    # What lies there when the stage that follows has been computed, and is scattered, comes after it.
    return next(parts for at, _, parts, _ in found.between if at == number)


def test_among_replicas_gloo_has_a_late_copy_of_the_last_block_alone() -> None:
    """The last stage and the one before it are gathered at once. As the first stage's backward begins, gloo has let go
    of what the second scattered, while the shards of that were all-reduced; and nothing is fetched ahead of the first.
    """
    on_cpu = replicated("cpu")
    assert at_first_gradient(on_cpu, 3)["gloo's copies"] == 4 * (FIRST + SECOND)
    assert at_first_gradient(on_cpu, 2)["gloo's copies"] == 0
    assert at_first_gradient(replicated("cuda"), 3)["gloo's copies"] == 0


def test_replicas_whose_stages_stay_gathered_have_no_late_copy() -> None:
    assert at_first_gradient(replicated("cpu", reshard_after_forward=False), 3)["gloo's copies"] == 0


@pytest.mark.parametrize(
    ("train", "gradient_bytes", "buffer_bytes"),
    [
        ({}, 4, 0),  # the gradients lie in the buffers
        ({"grad_accum": 2}, 4, 4),
        ({"gradient_dtype": "bf16"}, 4, 2),
        ({"precision": "bf16-params", "master_weights": True}, 4, 2),
    ],
)
def test_replicas_hold_the_buffers_of_other_gradients_until_the_exchange(
    train: dict[str, Any], gradient_bytes: int, buffer_bytes: int
) -> None:
    """Half of all gradients, beside the root's, which are about to be scattered, in the dtype that travels."""
    found = replicated("cpu", **train)
    half = (ROOT + FIRST + SECOND + 1) // 2
    root_bytes = 2 if train.get("precision") == "bf16-params" else 4
    sent_bytes = 2 if buffer_bytes == 2 else 4
    assert found.exchange["gradients"] == gradient_bytes * half + root_bytes * ROOT
    assert found.exchange["buckets"] == sent_bytes * ROOT + buffer_bytes * half
