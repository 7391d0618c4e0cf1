from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from results_factory import make_trial
from vitscale.engines.plain.wrap import PlainEngine
from vitscale.models.losses import slot_loss
from vitscale.probes.gradient_norms import MicroBatchNorms, gradient_line, squared_norm

GRAD_ACCUM = 2
MICRO_BATCH = 4
CLIPPING = 0.01
"""Far below the norms met here: a norm taken after clipping would be 0.0001."""


class SmallModel(nn.Module):
    """A nonlinear one, with a weight used twice, one that is frozen and one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.head = nn.Linear(12, 12), nn.Linear(12, 3)
        self.frozen, self.unused = nn.Linear(12, 12), nn.Parameter(torch.ones(5))
        self.frozen.requires_grad_(False)

    def forward(self, images: Tensor) -> Tensor:
        hidden = torch.tanh(self.shared(images.flatten(1)))
        logits: Tensor = self.head(torch.tanh(self.shared(self.frozen(hidden))))
        return logits


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        (
            torch.randn(MICRO_BATCH, 3, 2, 2, generator=generator),
            torch.randint(0, 3, (MICRO_BATCH,), generator=generator),
        )
        for _ in range(GRAD_ACCUM)
    ]


def mean_gradient(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """The gradient of the mean loss over some images, as one vector; worked out without an engine or hooks."""
    used = [p for p in model.parameters() if p.requires_grad and p.shape != (5,)]
    loss = nn.functional.cross_entropy(model(images), labels)
    return torch.cat([gradient.flatten() for gradient in torch.autograd.grad(loss, used)])


def engine_of(model: nn.Module) -> PlainEngine:
    trial = make_trial(
        "none", 1, micro_batch=MICRO_BATCH, grad_accum=GRAD_ACCUM, gradient_clipping=CLIPPING, optimizer="sgd"
    )
    return PlainEngine(model, trial, torch.device("cpu"))


def micro_steps(engine: PlainEngine) -> None:
    """The micro-steps of one step, scaled as training scales them."""
    for number, (images, labels) in enumerate(batches()):

        def loss_of(logits: Tensor, labels: Tensor = labels) -> Tensor:
            losses = nn.functional.cross_entropy(logits, labels, reduction="none")
            return slot_loss(losses, MICRO_BATCH * GRAD_ACCUM, 1, GRAD_ACCUM)

        engine.micro_step(images, loss_of, last=number == GRAD_ACCUM - 1)


@pytest.fixture
def model() -> SmallModel:
    torch.manual_seed(0)
    return SmallModel()


def test_both_norms_of_a_step_are_those_of_gradients_worked_out_by_hand(model: SmallModel) -> None:
    by_hand = [mean_gradient(model, *batch) for batch in batches()]
    engine = engine_of(model)
    with MicroBatchNorms(engine.module) as norms:
        micro_steps(engine)
    in_grad = sum(float((p.grad**2).sum()) for p in model.parameters() if p.grad is not None)
    reduced = engine.step_with_norm()
    line = gradient_line(7, images=8, own_images=[4, 4], world_size=1, unreduced=norms.total(), reduced=reduced)
    assert (line.step, line.small_images, line.big_images, line.reason) == (7, 4, 8, None)
    small = sum(float(gradient @ gradient) for gradient in by_hand) / GRAD_ACCUM
    big = torch.stack(by_hand).mean(dim=0)
    assert line.small_squared_norm == pytest.approx(small, rel=1e-5)
    assert line.big_squared_norm == pytest.approx(float(big @ big), rel=1e-5)
    assert line.big_squared_norm == pytest.approx(in_grad, rel=1e-5)
    assert reduced > 2 * CLIPPING**2  # so that the test would see clipping


def test_a_step_with_its_norm_trains_as_any_other(model: SmallModel) -> None:
    torch.manual_seed(0)
    other = SmallModel()
    watched, light = engine_of(model), engine_of(other)
    for _ in range(2):
        with MicroBatchNorms(watched.module):
            micro_steps(watched)
        watched.step_with_norm()
        micro_steps(light)
        light.step()
    for one, same in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, same)
        assert one.grad is None


def hook_tables(model: nn.Module) -> list[Any]:
    return [parameter._backward_hooks for parameter in model.parameters()]


def test_nothing_is_left_behind(model: SmallModel) -> None:
    engine = engine_of(model)
    with MicroBatchNorms(engine.module) as norms:
        assert any(hook_tables(model))
        micro_steps(engine)
    seen = norms.total()
    assert hook_tables(model) == [None] * len(hook_tables(model))
    micro_steps(engine)
    assert norms.total() == seen


def test_nothing_is_left_behind_by_a_step_that_fails(model: SmallModel) -> None:
    with pytest.raises(RuntimeError, match="on purpose"), MicroBatchNorms(model):
        raise RuntimeError("on purpose")
    assert hook_tables(model) == [None] * len(hook_tables(model))


def test_hooks_of_the_models_own_stay(model: SmallModel) -> None:
    calls: list[int] = []
    model.head.weight.register_hook(lambda _: calls.append(1))
    engine = engine_of(model)
    with MicroBatchNorms(engine.module):
        micro_steps(engine)
    micro_steps(engine)
    assert len(calls) == 2 * GRAD_ACCUM


def test_each_step_counts_for_itself(model: SmallModel) -> None:
    norms = MicroBatchNorms(model)
    totals = []
    for _ in range(2):
        with norms:
            nn.functional.cross_entropy(model(batches()[0][0]), batches()[0][1]).backward()
        totals.append(norms.total())
    assert totals[0] == totals[1]  # nor is what p.grad has gathered by then in it


def test_small_gradients_in_bfloat16_do_not_vanish() -> None:
    """1e-25 squared is no float32: a norm of 0 would be a lie."""
    gradient = torch.full((100,), 1e-25, dtype=torch.bfloat16)
    assert squared_norm([gradient, None]) == pytest.approx(100 * float(gradient[0]) ** 2, rel=1e-6, abs=0)


def test_where_no_gradient_is_there_is_no_norm(model: SmallModel) -> None:
    assert math.isnan(squared_norm([]))
    assert math.isnan(squared_norm([None, None]))
    with MicroBatchNorms(model) as norms:
        pass
    assert math.isnan(norms.total())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"own_images": [4, 3]}, "the step holds padding: its gradients are not of equally many images"),
        ({"own_images": [0]}, "the step holds padding: its gradients are not of equally many images"),
        ({"reduced": math.inf}, "the gradient was not finite"),
        ({"unreduced": math.nan}, "the gradient was not finite"),
    ],
)
def test_what_is_unknown_is_null_with_its_reason(changes: dict[str, Any], reason: str) -> None:
    fields: dict[str, Any] = {
        "images": 8, "own_images": [4, 4], "world_size": 1, "unreduced": 3.0, "reduced": 2.0,
    }  # fmt: skip
    line = gradient_line(0, **(fields | changes))
    assert (line.small_squared_norm, line.big_squared_norm, line.reason) == (None, None, reason)


def test_a_step_that_is_not_full_but_evenly_shared_out_counts() -> None:
    fields: dict[str, Any] = {"unreduced": 3.0, "reduced": 2.0}
    line = gradient_line(0, images=6, own_images=[3, 3], world_size=1, **fields)
    assert (line.small_images, line.big_images, line.small_squared_norm) == (3, 6, 6.0)


def test_norms_of_unequal_shares_are_those_of_each_ranks_own_mean(model: SmallModel) -> None:
    """Two ranks take 3 and 5 of 8 images: each hook sees its share of the whole gradient, and the line its mean."""
    (images, labels), (more_images, more_labels) = batches()
    images, labels = torch.cat([images, more_images]), torch.cat([labels, more_labels])
    for own in (slice(0, 3), slice(3, 8)):
        by_hand = mean_gradient(model, images[own], labels[own])
        model.zero_grad()
        with MicroBatchNorms(model) as norms:
            losses = nn.functional.cross_entropy(model(images[own]), labels[own], reduction="none")
            slot_loss(losses, 8, 2, 1).backward()
        line = gradient_line(0, images=8, own_images=[len(losses)], world_size=2, unreduced=norms.total(), reduced=1.0)
        assert (line.small_images, line.big_images, line.reason) == (len(losses), 8, None)
        assert line.small_squared_norm == pytest.approx(float(by_hand @ by_hand), rel=1e-5)
