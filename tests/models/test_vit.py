"""The named models against transformers' ViT: the same names, weights, logits and gradients, to the bit; under autocast
gradients up to its rounding."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from vitscale.models import build, logits_of
from vitscale.trial.model_spec import ModelSpec, resolve

SHAPES: list[dict[str, Any]] = [
    {"image_size": 32, "patch_size": 8, "hidden_size": 48, "layers": 2},
    {"image_size": 24, "patch_size": 4, "hidden_size": 40, "layers": 1, "heads": 5, "mlp_size": 36},
]


def reference(spec: ModelSpec) -> nn.Module:
    config = transformers.ViTConfig(
        image_size=spec.image_size,
        patch_size=spec.patch_size,
        hidden_size=spec.hidden_size,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        intermediate_size=spec.mlp_size,
        num_labels=spec.num_classes,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        layer_norm_eps=1e-6,
        attn_implementation="sdpa",
    )
    model: nn.Module = transformers.ViTForImageClassification(config).train()
    return model


@pytest.fixture(params=SHAPES, ids=["vit", "another shape"])
def both(request: pytest.FixtureRequest) -> tuple[nn.Module, nn.Module, ModelSpec]:
    """Ours and transformers' from the same seed; and both leave torch's generator in the same state."""
    spec = resolve(ModelSpec(name="vit-ti16", **request.param), 7)
    torch.manual_seed(3)
    ours = build(spec)
    drawn = torch.rand(4)
    torch.manual_seed(3)
    theirs = reference(spec)
    assert torch.equal(drawn, torch.rand(4))
    return ours, theirs, spec


def test_the_same_seed_gives_the_same_weights_under_the_same_names(
    both: tuple[nn.Module, nn.Module, ModelSpec],
) -> None:
    ours, theirs, _ = both
    mine, other = ours.state_dict(), theirs.state_dict()
    # In the same order too: buckets are filled and shards are cut in it.
    assert list(mine) == list(other)
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in theirs.named_parameters()]
    for name, tensor in mine.items():
        assert torch.equal(tensor, other[name]), name


def trained(model: nn.Module, spec: ModelSpec, precision: str) -> list[Tensor]:
    """Logits, and the gradients of all parameters."""
    dtype = torch.bfloat16 if precision == "bf16-params" else torch.float32
    torch.manual_seed(4)
    images = torch.randn(3, 3, spec.image_size, spec.image_size).to(dtype)
    model.to(dtype)
    model.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
        logits = logits_of(model(images)).float()
    torch.autograd.backward(logits.square().sum())
    return [logits, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("precision", ["fp32", "bf16-params"])
def test_logits_and_gradients_are_equal_to_the_bit(
    both: tuple[nn.Module, nn.Module, ModelSpec], precision: str
) -> None:
    ours, theirs, spec = both
    for mine, other in zip(trained(ours, spec, precision), trained(theirs, spec, precision), strict=True):
        assert torch.equal(mine, other)


def test_under_autocast_logits_are_equal_to_the_bit_and_gradients_as_near_to_those_of_fp32(
    both: tuple[nn.Module, nn.Module, ModelSpec],
) -> None:
    ours, theirs, spec = both
    mine, other = trained(ours, spec, "bf16"), trained(theirs, spec, "bf16")
    assert torch.equal(mine[0], other[0])
    exact = trained(theirs, spec, "fp32")[1:]
    error, their_error = (
        sum(float((rounded - true).square().sum()) for rounded, true in zip(gradients[1:], exact, strict=True))
        for gradients in (mine, other)
    )
    assert error <= 1.1**2 * their_error


def bytes_kept(model: nn.Module, spec: ModelSpec) -> int:
    """Bytes of the 16-bit tensors that autocast's forward pass over three images keeps for backward."""
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.dtype == torch.bfloat16:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", dtype=torch.bfloat16),
    ):
        logits = logits_of(model(torch.zeros(3, 3, spec.image_size, spec.image_size)))
    assert logits.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def test_under_autocast_what_attention_reads_is_cast_and_kept_once(
    both: tuple[nn.Module, nn.Module, ModelSpec],
) -> None:
    ours, theirs, spec = both
    tokens = (spec.image_size // (spec.patch_size or 1)) ** 2 + 1
    output_of_norm = 2 * 3 * tokens * (spec.hidden_size or 0)
    assert bytes_kept(theirs, spec) - bytes_kept(ours, spec) == 2 * output_of_norm * (spec.layers or 0)


def test_it_is_built_without_transformers() -> None:
    code = (
        "import sys; from vitscale import models; from vitscale.trial.model_spec import ModelSpec, resolve;"
        "spec = resolve(ModelSpec(name='vit-ti16', layers=1), 10); models.preload(spec); models.build(spec);"
        "sys.exit('transformers.modeling_utils' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
