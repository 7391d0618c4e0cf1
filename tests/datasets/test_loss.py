"""Averaged as engines average, slot losses give the mean gradient over the real images, whatever the slots."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

from vitscale.datasets.batches import EpochOrder
from vitscale.models.losses import NOT_COUNTED, label_losses, slot_loss, tally
from vitscale.worker.passes import confusion, counted_labels, means, scores

FEATURES, CLASSES = 5, 3


@settings(deadline=None)
@given(
    samples=st.integers(1, 30),
    micro_batches=st.lists(st.integers(1, 5), min_size=1, max_size=5),
    grad_accum=st.integers(1, 4),
    seed=st.integers(0, 1000),
)
def test_ranks_together_have_the_gradient_of_one_process(
    samples: int, micro_batches: list[int], grad_accum: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(samples, FEATURES, dtype=torch.float64, generator=generator)
    labels = torch.randint(CLASSES, (samples,), generator=generator)
    weight = torch.randn(CLASSES, FEATURES, dtype=torch.float64, generator=generator, requires_grad=True)
    world_size = len(micro_batches)
    order = EpochOrder(samples, seed=seed, epoch=0, micro_batches=micro_batches, grad_accum=grad_accum)
    for step in range(order.steps):
        gradient = torch.zeros_like(weight)
        loss_sum = 0.0
        real: list[int] = []
        for rank in range(world_size):
            for micro_step in range(grad_accum):
                slot = order.slot(step, micro_step, rank)
                ids = torch.from_numpy(slot.ids)
                counted = counted_labels(labels[ids], slot.real)
                loss = slot_loss(label_losses(images[ids] @ weight.T, counted), slot.step_real, world_size, grad_accum)
                (own,) = torch.autograd.grad(loss / grad_accum, weight)  # an engine divides by A ...
                gradient += own / world_size  # ... and averages over ranks
                loss_sum += loss.item() / grad_accum / world_size
                real += slot.ids[: slot.real].tolist()
        ids = torch.tensor(real)
        mean = cross_entropy(images[ids] @ weight.T, labels[ids])
        (expected,) = torch.autograd.grad(mean, weight)
        torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(loss_sum, mean.item(), rtol=1e-12)


@settings(deadline=None, max_examples=30)
@given(
    samples=st.integers(1, 12),
    micro_batches=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    grad_accum=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
def test_ranks_together_have_the_gradient_of_the_mean_over_all_pixels(
    samples: int, micro_batches: list[int], grad_accum: int, seed: int
) -> None:
    """Of which every image has another number, some none at all."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(samples, FEATURES, 4, 3, dtype=torch.float64, generator=generator)
    masks = torch.randint(CLASSES, (samples, 4, 3), generator=generator).to(torch.uint8)
    for number in range(samples):
        masks[number, : number % 5] = 255
    weight = torch.randn(CLASSES, FEATURES, dtype=torch.float64, generator=generator, requires_grad=True)
    order = EpochOrder(samples, seed=seed, epoch=0, micro_batches=micro_batches, grad_accum=grad_accum)
    for step in range(order.steps):
        slots = [order.slot(step, micro, rank) for rank in range(len(micro_batches)) for micro in range(grad_accum)]
        labels = [counted_labels(masks[slot.ids], slot.real) for slot in slots]
        count = torch.stack([(one >= 0).sum() for one in labels]).sum()
        gradient = torch.zeros_like(weight)
        for slot, own in zip(slots, labels, strict=True):
            logits = torch.einsum("kf,nfhw->nkhw", weight, images[slot.ids])
            loss = slot_loss(label_losses(logits, own), count, len(micro_batches), grad_accum)
            (part,) = torch.autograd.grad(loss / grad_accum, weight)
            gradient += part / len(micro_batches)
        real = torch.tensor([number for slot in slots for number in slot.ids[: slot.real]])
        logits = torch.einsum("kf,nfhw->nkhw", weight, images[real])
        losses = cross_entropy(logits, masks[real].long(), ignore_index=255, reduction="sum") / max(1, int(count))
        (expected,) = torch.autograd.grad(losses, weight)
        torch.testing.assert_close(gradient, expected if count else gradient, rtol=1e-12, atol=1e-14)


def test_by_hand() -> None:
    # 5 real images over 2 ranks x 3 micro-steps: (2 + 4) * 6 / 5
    loss = slot_loss(torch.tensor([2.0, 4.0, 0.0]), 5, world_size=2, grad_accum=3)
    assert loss.item() == pytest.approx(7.2, rel=1e-6)


def test_padding_and_ignored_pixels_count_for_nothing() -> None:
    assert counted_labels(torch.tensor([4, 255, 7]), real=2).tolist() == [4, 255, NOT_COUNTED]
    masks = torch.tensor([[[3, 255]], [[0, 1]], [[2, 2]]], dtype=torch.uint8)
    labels = counted_labels(masks, real=2)
    assert labels.tolist() == [[[3, NOT_COUNTED]], [[0, 1]], [[NOT_COUNTED, NOT_COUNTED]]]
    logits = torch.zeros(3, 4, 1, 2)
    each = float(np.log(4))
    expected = torch.tensor([[[each, 0.0]], [[each, each]], [[0.0, 0.0]]])
    torch.testing.assert_close(label_losses(logits, labels), expected)
    sums = tally(label_losses(logits, labels), logits, labels)
    loss, accuracy = means(sums)
    assert loss == pytest.approx(np.log(4))
    assert accuracy is None
    assert means(torch.zeros(3)) == (None, None)


def test_logits_of_another_size_are_resized_to_the_labels() -> None:
    """As `UperNetForSemanticSegmentation` does it."""
    torch.manual_seed(0)
    logits, labels = torch.randn(2, CLASSES, 4, 4), torch.randint(CLASSES, (2, 16, 16))
    resized = torch.nn.functional.interpolate(logits, size=(16, 16), mode="bilinear", align_corners=False)
    assert torch.equal(label_losses(logits, labels), cross_entropy(resized, labels, reduction="none"))
    assert torch.equal(confusion(logits, labels, CLASSES), confusion(resized, labels, CLASSES))


def test_scores_by_hand() -> None:
    """Of classes 0, 1 and 3; 2 is neither in a label nor in an answer, and the pixels of label 255 are nowhere."""
    labels = torch.tensor([[[0, 0, 1, 1, NOT_COUNTED, 3]]])
    answers = torch.tensor([[[0, 1, 1, 1, 2, 0]]])
    logits = torch.nn.functional.one_hot(answers, 4).permute(0, 3, 1, 2).float()
    confused = confusion(logits, labels, 4)
    assert confused.tolist() == [[1, 1, 0, 0], [0, 2, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0]]
    mean_iou, accuracy = scores(confused)
    assert mean_iou == pytest.approx((1 / 3 + 2 / 3 + 0) / 3)
    assert accuracy == pytest.approx(3 / 5)
    assert scores(torch.zeros(4, 4, dtype=torch.int64)) == (None, None)
