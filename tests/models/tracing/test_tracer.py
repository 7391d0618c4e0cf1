"""Cards of traced models against the arithmetic of named models, and against what real steps on the CPU keep."""

from __future__ import annotations

import math
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch

from models.tracing.real_steps import (
    CLASSES,
    HF_CONFIGURATIONS,
    PYRAMID,
    SWIN,
    UPERNET,
    VIT,
    card_of,
    configured,
    named,
    real_peak_bytes,
    real_step,
)
from vitscale import models
from vitscale.models.blocks import blocks_of
from vitscale.models.tracing import TraceError
from vitscale.trial import model_cost
from vitscale.trial.model_card import ModelCard, PerImage
from vitscale.trial.model_spec import ModelSpec

IMAGES = 3
"""Neither of the two traced batches."""


def kept_bytes(card: ModelCard, images: int = IMAGES) -> int:
    return sum(part.kept.of(images) for part in card.parts)


@pytest.mark.parametrize("shape", [VIT, SWIN, PYRAMID, UPERNET], ids=["vit", "swin", "pyramid", "upernet"])
def test_tensors_and_blocks_are_those_of_the_arithmetic(shape: dict[str, Any]) -> None:
    spec = named(shape)
    card = card_of(spec)
    shapes = model_cost.parameter_shapes(spec)
    assert shapes is not None
    assert card.parameters == card.trainable_parameters == model_cost.parameters(spec)
    counted = [[module.tensors for module in block.in_forward] for block in shapes.each()]
    traced = [[module.shapes for module in part.modules] for part in card.parts if part.modules]
    assert [sorted(block) for block in traced] == [sorted(block) for block in counted]
    blocks = [part for part in card.parts if part.block > 0]
    assert [part.block for part in blocks] == list(range(1, len(blocks) + 1))
    model = models.build(spec)
    assert [model.get_submodule(part.name) for part in blocks] == list(blocks_of(model))


def test_a_vision_transformer_s_modules_are_in_the_order_of_forward() -> None:
    spec = named(VIT)
    card, shapes = card_of(spec), model_cost.parameter_shapes(spec)
    assert shapes is not None
    counted = [module.tensors for block in shapes.each() for module in block.in_forward]
    assert [module.shapes for module in card.modules()] == counted


@pytest.mark.parametrize("shape", [VIT, SWIN, PYRAMID, UPERNET], ids=["vit", "swin", "pyramid", "upernet"])
def test_flops_are_those_of_the_arithmetic(shape: dict[str, Any]) -> None:
    spec = named(shape)
    card = card_of(spec)
    forward = card.flops("forward")
    assert forward.of(1) == model_cost.forward_flops(spec)
    assert sum(part.forward_flops.of(IMAGES) for part in card.parts) == forward.of(IMAGES)
    assert card.recomputed_flops == PerImage()


@pytest.mark.parametrize("checkpointing", [False, True], ids=["all", "checkpointing"])
@pytest.mark.parametrize("shape", [VIT, SWIN, PYRAMID, UPERNET], ids=["vit", "swin", "pyramid", "upernet"])
def test_named_models_keep_what_a_real_step_keeps(shape: dict[str, Any], checkpointing: bool) -> None:
    spec = named(shape)
    card = card_of(spec, checkpointing=checkpointing)
    assert kept_bytes(card) == real_step(spec, IMAGES, checkpointing=checkpointing).kept_bytes


@pytest.mark.parametrize("name", HF_CONFIGURATIONS)
def test_configurations_keep_what_a_real_step_keeps(name: str, tmp_path: Path) -> None:
    spec = configured(name, tmp_path)
    card = card_of(spec)
    real = models.build(spec)
    assert kept_bytes(card) == real_step(spec, IMAGES).kept_bytes
    assert card.parameters == sum(parameter.numel() for parameter in real.parameters())
    assert card.buffer_bytes == sum(buffer.numel() * buffer.element_size() for buffer in real.buffers())
    assert card.versions.keys() == {"torch", "transformers", "tracer"}


@pytest.mark.parametrize("shape", [VIT, SWIN, UPERNET], ids=["vit", "swin", "upernet"])
def test_under_autocast_a_model_keeps_what_a_real_step_keeps(shape: dict[str, Any]) -> None:
    spec = named(shape)
    card = card_of(spec, autocast_dtype="bf16")
    assert kept_bytes(card) == real_step(spec, IMAGES, autocast=torch.bfloat16).kept_bytes


def test_in_16_bits_a_model_keeps_half() -> None:
    """But for the logits and the loss, which are fp32."""
    spec = named(VIT)
    whole, half = (card_of(spec, device="cuda", weight_dtype=dtype) for dtype in ("fp32", "bf16"))
    blocks = [[part.kept.per_image for part in card.parts if part.block > 0] for card in (whole, half)]
    assert [2 * kept for kept in blocks[1]] == pytest.approx(blocks[0], rel=0.02)  # statistics of norms stay fp32
    assert half.logits.per_image * 2 == whole.logits.per_image == 4 * CLASSES


def test_checkpointing_keeps_only_the_inputs_of_blocks() -> None:
    spec = named(VIT)
    card = card_of(spec, checkpointing=True)
    tokens = (32 // 8) ** 2 + 1
    hidden = PerImage(0, tokens * 64 * 4)
    before, *blocks, _, _ = card.parts
    assert [part.kept for part in (before, *blocks)] == [hidden] * 4  # a part's output is the input of the next one


def test_checkpointing_computes_blocks_again_and_counts_that_apart() -> None:
    spec = named(VIT)
    plain, card = (card_of(spec, checkpointing=value) for value in (False, True))
    assert (card.forward_flops, card.backward_flops) == (plain.forward_flops, plain.backward_flops)
    blocks = sum(part.forward_flops.per_image for part in card.parts if part.block > 0)
    # torch stops as soon as all that backward needs is there: the second layer of each MLP is not repeated.
    tokens, width = (32 // 8) ** 2 + 1, 64
    not_repeated = 3 * 2 * tokens * width * 4 * width
    assert card.recomputed_flops == PerImage(0, blocks - not_repeated)


def test_checkpointing_repeats_under_autocast_what_forward_did() -> None:
    """torch compares the dtypes of both; the memory of a repetition is that of a block that is not checkpointed."""
    spec = named(VIT)
    plain = card_of(spec, device="cuda", autocast_dtype="bf16")
    card = card_of(spec, device="cuda", autocast_dtype="bf16", checkpointing=True)
    highest = [max(line.per_image for line in each.parts[2].backward) for each in (plain, card)]
    kept = plain.parts[2].kept.per_image - card.parts[2].kept.per_image
    assert highest[1] == pytest.approx(highest[0] + kept, rel=0.15)


def traced_peak_bytes(card: ModelCard, images: int) -> int:
    """The peak of a step that begins without gradients, as a forecast adds it up: no gradient is given back."""
    kept = accumulate(part.kept.of(images) for part in card.parts)
    gradients = accumulate(4 * sum(math.prod(s) for m in part.modules for s in m.shapes) for part in card.parts)
    total_gradients = 4 * card.trainable_parameters
    peak = 0
    for part, kept_so_far, gradients_so_far in zip(card.parts, kept, gradients, strict=True):
        forward = kept_so_far + max(line.of(images) for line in part.forward)
        backward = kept_so_far + max(line.of(images) for line in part.backward)
        peak = max(peak, forward, backward + total_gradients - gradients_so_far)
    return peak


@pytest.mark.parametrize("checkpointing", [False, True], ids=["all", "checkpointing"])
def test_the_peak_is_that_of_a_real_step(checkpointing: bool) -> None:
    spec = named(SWIN)
    card = card_of(spec, checkpointing=checkpointing)
    real = real_peak_bytes(spec, 8, checkpointing=checkpointing)
    assert traced_peak_bytes(card, 8) == pytest.approx(real, rel=0.005)


def test_the_highest_memory_of_a_part_is_live_storages_beside_what_is_kept() -> None:
    """By hand, for a classifier: its logits in forward, the gradient of logits in backward, and nothing else."""
    spec = ModelSpec(factory="models.tracing.factories:linear", image_size=8, num_classes=CLASSES)
    card = card_of(spec)
    before, loss = card.parts
    logits = 4 * CLASSES
    assert card.logits == before.kept == PerImage(0, logits)
    assert before.forward == (PerImage(0, 0),)  # the logits are kept, and there is nothing beside them
    assert loss.kept == PerImage(4 + 4, logits)  # log-softmax; the loss, and the number of labels behind it
    highest = max(line.of(IMAGES) for line in loss.backward)
    assert highest == 2 * logits * IMAGES  # a gradient of log-softmax and one of the logits
    # The gradient of the logits, the loss, and the number of labels; log-softmax has gone.
    assert [line.of(IMAGES) for line in before.backward] == [logits * IMAGES + 8]


def test_what_lies_between_blocks_is_a_part() -> None:
    spec = ModelSpec(factory="models.tracing.factories:apart", image_size=8, num_classes=CLASSES)
    parts = [(part.name, part.block, [module.name for module in part.modules]) for part in card_of(spec).parts]
    assert parts == [
        ("before the blocks", 0, []),
        ("blocks.0", 1, ["blocks.0"]),
        ("between blocks", 0, ["widen"]),
        ("blocks.1", 2, ["blocks.1"]),
        ("after the blocks", -1, ["head"]),
        ("loss", -1, []),
    ]


def test_unused_parameters_are_frozen() -> None:
    spec = ModelSpec(factory="models.tracing.factories:with_an_unused_layer", image_size=8, num_classes=CLASSES)
    card = card_of(spec)
    assert card.frozen_elements == 5 * 5 + 5
    assert [module.name for module in card.modules()] == ["head"]


def test_tied_weights_count_once() -> None:
    spec = ModelSpec(factory="models.tracing.factories:tied", image_size=8, num_classes=CLASSES)
    card = card_of(spec)
    assert [module.name for module in card.modules()] == ["first", "second", "head"]
    assert card.parameters == sum(parameter.numel() for parameter in models.build(spec).parameters())


def test_batch_norms_are_listed_in_the_order_of_forward() -> None:
    spec = named(UPERNET)
    assert sorted(card_of(spec).batch_norm_channels) == sorted(model_cost.batch_norms(spec) or ())
    spec = ModelSpec(factory="models.tracing.factories:norms", image_size=8, num_classes=CLASSES)
    assert card_of(spec).batch_norm_channels == (3, 4)  # registered the other way round


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("branching", r"the operation _local_scalar_dense \(factories.py, line \d+\)"),
        ("selecting", r"the operation nonzero \(factories.py"),
        ("through_numpy", r"factories.py, line \d+: TypeError: can't convert meta device type tensor to numpy"),
        (
            "changing_with_the_batch",
            "different operations for different numbers of images: view at .* and sqrt",
        ),
        ("without_classes", r"gives \(2, 9\) for 2 images, and 7 classes are trained"),
    ],
)
def test_models_that_cannot_be_traced_name_the_operation(factory: str, message: str) -> None:
    spec = ModelSpec(factory=f"models.tracing.factories:{factory}", image_size=8, num_classes=CLASSES)
    with pytest.raises(TraceError, match=message):
        card_of(spec)


def test_a_model_whose_building_reads_values_is_built_on_the_cpu() -> None:
    spec = ModelSpec(factory="models.tracing.factories:built_from_values", image_size=8, num_classes=CLASSES)
    assert card_of(spec).parameters == 3 * 64 * CLASSES + CLASSES
