from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from results_factory import make_trial
from vitscale import engines
from vitscale.engines.base import optimizer_of
from vitscale.engines.facts import EngineFacts
from vitscale.engines.plain.wrap import PlainEngine


def model() -> nn.Linear:
    linear = nn.Linear(2, 1)
    with torch.no_grad():
        linear.weight.copy_(torch.tensor([[3.0, 4.0]]))
        linear.bias.fill_(2.0)
    linear.weight.grad = torch.tensor([[0.5, -0.25]])
    linear.bias.grad = torch.tensor([1.0])
    return linear


def stepped(**train: Any) -> tuple[list[float], float]:
    """Weights and bias after one step."""
    linear = model()
    optimizer_of(linear, make_trial("none", 1, **train)).step()
    return linear.weight.detach().flatten().tolist(), linear.bias.item()


def test_adamw_by_hand() -> None:
    """The first step of Adam is the sign of the gradient; the bias takes no weight decay."""
    weights, bias = stepped(optimizer="adamw", learning_rate=0.1, weight_decay=0.5)
    assert weights == pytest.approx([3.0 * 0.95 - 0.1, 4.0 * 0.95 + 0.1], rel=1e-5)
    assert bias == pytest.approx(1.9, rel=1e-5)


def test_sgd_by_hand() -> None:
    weights, bias = stepped(optimizer="sgd", learning_rate=0.1, weight_decay=0.5, momentum=0.9)
    assert weights == pytest.approx([3.0 - 0.1 * (0.5 + 1.5), 4.0 - 0.1 * (-0.25 + 2.0)])
    assert bias == pytest.approx(1.9)


def test_lamb_by_hand() -> None:
    """Algorithm 2 of arXiv 1904.00962, moments not corrected for their bias: u = m / (sqrt(v) + eps) + decay * w, and
    w -= rate * |w| / |u| * u, tensor by tensor."""
    rate, decay, eps = 0.1, 0.5, 1e-6
    gradients, before = [0.5, -0.25], [3.0, 4.0]
    adam = [0.1 * g / (math.sqrt(0.001 * g * g) + eps) for g in gradients]
    update = [a + decay * w for a, w in zip(adam, before, strict=True)]
    trust = math.hypot(*before) / math.hypot(*update)
    weights, bias = stepped(optimizer="lamb", learning_rate=rate, weight_decay=decay)
    assert weights == pytest.approx([w - rate * trust * u for w, u in zip(before, update, strict=True)], rel=1e-5)
    assert bias == pytest.approx(2.0 - rate * 2.0, rel=1e-5)  # |w| / |u| * u is w's own size where there is one value


def test_the_learning_rate_is_that_of_the_global_batch() -> None:
    trial = make_trial("none", 1, learning_rate=0.1, learning_rate_scaling="linear", learning_rate_base_batch=1)
    engine = PlainEngine(model(), trial, torch.device("cpu"))
    assert {group["lr"] for group in engine.optimizer.param_groups} == {0.1 * trial.global_batch}
    engine.set_learning_rate(0.25)
    assert {group["lr"] for group in engine.optimizer.param_groups} == {0.25}


def test_a_skipped_first_step_must_not_leave_momentum_as_the_memory_was() -> None:
    """torch's fused SGD does, and fp16 often overflows in its first step, which GradScaler then skips like this."""
    after_overflow, at_once = model(), model()
    sgd: dict[str, Any] = {"optimizer": "sgd", "learning_rate": 0.1, "weight_decay": 0.5, "momentum": 0.9}
    scaled: Any = optimizer_of(after_overflow, make_trial("none", 1, precision="fp16", **sgd))
    before = [parameter.detach().clone() for parameter in after_overflow.parameters()]
    scaled.grad_scale, scaled.found_inf = torch.tensor(1.0), torch.tensor(1.0)
    scaled.step()
    assert all(map(torch.equal, before, after_overflow.parameters()))
    scaled.found_inf = torch.tensor(0.0)
    plain = optimizer_of(at_once, make_trial("none", 1, precision="fp32", **sgd))
    for _ in range(2):
        scaled.step()
        plain.step()
    assert all(map(torch.equal, at_once.parameters(), after_overflow.parameters()))


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_whole_tensors_are_updated_by_one_fused_kernel(optimizer: str, precision: str) -> None:
    """GradScaler waits for the device in each step of an optimizer that is not fused."""
    found: Any = optimizer_of(model(), make_trial("none", 1, optimizer=optimizer, precision=precision))
    assert found.defaults["fused"] is True
    assert found._step_supports_amp_scaling is True


@pytest.mark.parametrize("engine", [{"engine": "fsdp2"}, {"engine": "accelerate", "accelerate_backend": "fsdp2"}])
def test_torch_has_no_fused_sgd_over_shards(engine: dict[str, Any]) -> None:
    """Through Accelerate the parameters are whole as yet."""
    assert optimizer_of(model(), make_trial(gpus=2, optimizer="sgd", **engine)).defaults["fused"] is False


@pytest.fixture
def facts_of_a_package(monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineFacts]:
    """Those of the engine "averaged", which is none of vitscale's own; it says nothing of its optimizer."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "example_package"))
    facts: EngineFacts = import_module("vitscale_example.averaged.facts").FACTS
    yield facts
    engines.of_engine.cache_clear()


def sgd_of(facts: EngineFacts, monkeypatch: pytest.MonkeyPatch) -> torch.optim.Optimizer:
    """SGD with momentum, in fp16, of the engine "averaged" with these facts."""
    monkeypatch.setattr(engines, "ENGINES", {**engines.ENGINES, "averaged": facts})
    engines.of_engine.cache_clear()
    return optimizer_of(model(), make_trial("averaged", 2, optimizer="sgd", momentum=0.9, precision="fp16"))


def test_an_engine_of_a_package_has_what_torchs_gradscaler_needs_of_sgd(
    facts_of_a_package: EngineFacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    sgd = sgd_of(facts_of_a_package, monkeypatch)
    assert sgd.defaults["fused"] is True
    assert [state["momentum_buffer"].count_nonzero().item() for state in sgd.state.values()] == [0, 0]


@pytest.mark.parametrize(("fact", "is_fused"), [("updates_dtensors", False), ("own_loss_scaling", True)])
def test_an_engine_of_a_package_says_that_its_sgd_is_another(
    fact: str, is_fused: bool, facts_of_a_package: EngineFacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes: dict[str, Any] = {fact: True}
    facts = replace(facts_of_a_package, **changes)
    sgd = sgd_of(facts, monkeypatch)
    assert sgd.defaults["fused"] is is_fused
    assert not sgd.state
