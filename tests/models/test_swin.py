"""Swin V2 as transformers builds it: trains, drops nothing, and is built by its name; rows of it on sequence ranks."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import transformers

from vitscale.engines.shared.swin_split import _RowSplit
from vitscale.errors import RequestError
from vitscale.models import build, logits_of
from vitscale.models.named import swin_configuration
from vitscale.trial.model_cost import parameters
from vitscale.trial.model_counts import SwinShape, rows_of_ranks
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


@pytest.mark.parametrize("stages", [1, 5, 8])
def test_any_number_of_stages_is_built_and_counted(stages: int) -> None:
    """Of eight, the last has one token of 128 x 128."""
    spec = resolve(TINY.model_copy(update={"depths": (1,) * stages, "image_size": 128, "patch_size": 1}), 10)
    spec = spec.model_copy(update={"hidden_size": 2, "heads": 1})
    with torch.device("meta"):
        model = build(spec)
    assert sum(p.numel() for p in model.parameters()) == parameters(spec)


def test_rows_of_sequence_ranks_become_whole_rows_of_the_last_map() -> None:
    """Of 56, 28, 14 and 7 rows; of 50, 25, 13 and 7, where the last row is made of fewer."""
    assert [rows_of_ranks(56, stage, 4, 2) for stage in range(4)] == [[32, 24], [16, 12], [8, 6], [4, 3]]
    assert [rows_of_ranks(50, stage, 4, 3) for stage in range(4)] == [[24, 16, 10], [12, 8, 5], [6, 4, 3], [3, 2, 2]]
    for side, ranks in product(range(1, 70), range(1, 9)):
        assert sum(rows_of_ranks(side, 0, 4, ranks)) == side


def test_an_image_without_rows_for_every_rank_is_refused() -> None:
    """Of 9 rows of pixels, 5 of tokens and 3 of the last map: three ranks share them, four do not."""
    shape = SwinShape(32, 3, 2, 32, 4, (2, 1), 4)
    for ranks in (3, 4):
        rows = _RowSplit(shape, cast(Any, SimpleNamespace(size=lambda ranks=ranks: ranks, rank=lambda: 2)))
        if ranks == 3:
            assert rows.cut_images(torch.nn.Identity(), (torch.zeros(1, 3, 9, 32),))[0].shape == (1, 3, 1, 32)
            continue
        with pytest.raises(RequestError, match="image of 9 rows of pixels has too few for 4 sequence ranks"):
            rows.cut_images(torch.nn.Identity(), (torch.zeros(1, 3, 9, 32),))


@pytest.mark.parametrize("kind", ["sdpa", "flex_attention"])
def test_the_library_takes_no_other_attention_for_it(kind: str) -> None:
    """Its attention computes scores as they come: once this fails, `build_swin` can ask for fused attention."""
    configuration = swin_configuration(resolve(TINY, 10), num_labels=10)
    configuration._attn_implementation = kind
    with pytest.raises(ValueError, match="does not support an attention implementation"):
        transformers.Swinv2ForImageClassification(configuration)
