"""Swin V2 as transformers builds it: trains, drops nothing, and is built by its name."""

from __future__ import annotations

import torch

from vitscale.models import build, logits_of
from vitscale.trial.model_spec import ModelSpec, resolve

TINY = ModelSpec(name="swinv2-t", image_size=32, hidden_size=16, heads=2, depths=(1, 2), window_size=4)


def test_a_named_swin_trains_and_the_seed_decides_its_weights() -> None:
    models = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        models.append(build(resolve(TINY, 10)))
    images = torch.randn(2, 3, 32, 32)
    logits = logits_of(models[0](images))
    assert logits.shape == (2, 10)
    torch.autograd.backward(logits.sum())
    assert all(p.grad is not None and p.dtype == torch.float32 for p in models[0].parameters())
    first, again, other = (torch.cat([p.detach().flatten() for p in m.parameters()]) for m in models)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    # What is dropped out would differ from rank to rank.
    assert models[0].training
    assert torch.equal(logits_of(models[0](images)), logits_of(models[0](images)))
