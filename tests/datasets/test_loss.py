"""Averaged as engines average, slot losses give the mean gradient over the real images, whatever the slots."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

from vitscale.datasets.loss import slot_loss
from vitscale.datasets.order import EpochOrder

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
                losses = cross_entropy(images[ids] @ weight.T, labels[ids], reduction="none")
                loss = slot_loss(losses, torch.from_numpy(slot.weights), slot.step_real, world_size, grad_accum)
                (own,) = torch.autograd.grad(loss / grad_accum, weight)  # an engine divides by A ...
                gradient += own / world_size  # ... and averages over ranks
                loss_sum += loss.item() / grad_accum / world_size
                real += slot.ids[slot.weights == 1].tolist()
        ids = torch.tensor(real)
        mean = cross_entropy(images[ids] @ weight.T, labels[ids])
        (expected,) = torch.autograd.grad(mean, weight)
        torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(loss_sum, mean.item(), rtol=1e-12)


def test_by_hand() -> None:
    losses, weights = torch.tensor([2.0, 4.0, 100.0]), torch.tensor([1.0, 1.0, 0.0])
    # 5 real images over 2 ranks x 3 micro-steps: (2 + 4) * 6 / 5
    loss = slot_loss(losses, weights, step_real=5, world_size=2, grad_accum=3)
    assert loss.item() == pytest.approx(7.2, rel=1e-6)
