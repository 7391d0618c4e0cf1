"""The order of tensors and the share of the work at each, by hand on a model of two blocks; and buckets."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitscale.engines.gradients import Filled, closed_when_full, flushed_before_full, of_backward, tensors
from vitscale.trial.model_cost import parameter_shapes, parameters
from vitscale.trial.model_spec import ModelSpec, resolve

SPEC = resolve(ModelSpec(name="vit-ti16", image_size=32, layers=2), 10)
SHAPES = parameter_shapes(SPEC)

HIDDEN, TOKENS = 192, 5
ATTENTION, MLP, QKV = 2 * TOKENS * HIDDEN, 192 * 768, 192 * 192
BLOCK = 4 * QKV + ATTENTION + 2 * MLP
PATCHES, CLASSIFIER = 3 * 16 * 16 * 192 * 4 / TOKENS, 10 * 192 / TOKENS
"""Four patches, and the class token alone, of five tokens."""
TOTAL = PATCHES + 2 * BLOCK + CLASSIFIER


def test_a_gradient_is_there_when_all_after_it_and_its_own_is_computed() -> None:
    assert SHAPES is not None
    found = tensors(SHAPES)
    assert sum(one.elements for one in found) == parameters(SPEC)
    ready = {one.shape: gradient.ready for one, gradient in zip(reversed(found), of_backward(found), strict=True)}
    # What stands last under a shape is that of the first block.
    assert ready[10, HIDDEN] == pytest.approx(CLASSIFIER / TOTAL)
    assert ready[HIDDEN, 768] == pytest.approx((CLASSIFIER + BLOCK + MLP) / TOTAL)
    assert ready[768, HIDDEN] == pytest.approx((CLASSIFIER + BLOCK + 2 * MLP) / TOTAL)
    assert ready[HIDDEN, HIDDEN] == pytest.approx((CLASSIFIER + 2 * BLOCK) / TOTAL)
    assert ready[HIDDEN, 3, 16, 16] == pytest.approx(1.0)


def test_attention_comes_before_the_projections_into_it_in_backward() -> None:
    assert SHAPES is not None
    found = [one for one in tensors(SHAPES) if one.shape == (HIDDEN, HIDDEN)][4:]  # q, k, v and out of the last block
    after = CLASSIFIER + 2 * MLP
    ready = [1.0 - one.begins for one in reversed(found)]
    expected = [after + QKV, after + 2 * QKV + ATTENTION, after + 3 * QKV + ATTENTION, after + 4 * QKV + ATTENTION]
    assert ready == pytest.approx([work / TOTAL for work in expected])


def test_without_a_bias_on_q_k_and_v(tmp_path: Path) -> None:
    """Three tensors less in a block; attention still before the projections into it."""
    config = {"model_type": "vit", "hidden_size": 192, "intermediate_size": 768, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_attention_heads": 3, "qkv_bias": False}))
    bare = parameter_shapes(resolve(ModelSpec(hf=str(tmp_path), image_size=32), 10))
    assert bare is not None
    assert len(bare.tensors()) == len((SHAPES or bare).tensors()) - 2 * 3
    found = [one for one in tensors(bare) if one.shape == (HIDDEN, HIDDEN)][4:]
    assert 1.0 - found[3].begins == pytest.approx((CLASSIFIER + 2 * MLP + QKV) / TOTAL)
    assert 1.0 - found[2].begins == pytest.approx((CLASSIFIER + 2 * MLP + 2 * QKV + ATTENTION) / TOTAL)


def test_norms_tokens_and_positions_are_what_autocast_leaves_alone() -> None:
    assert SHAPES is not None
    alone = [one for one in tensors(SHAPES) if not one.cast]
    assert sum(one.elements for one in alone) == (2 * 2 + 1) * 2 * HIDDEN + HIDDEN + TOKENS * HIDDEN


GRADIENTS = [Filled(4, 0.1), Filled(4, 0.2), Filled(9, 0.5), Filled(1, 1.0)]


def test_buckets_by_hand() -> None:
    """DDP's close when they have reached their size; DeepSpeed's leave when the next gradient would not fit."""
    assert closed_when_full(GRADIENTS, (4, 12)) == [Filled(4, 0.1), Filled(13, 0.5), Filled(1, 1.0)]
    assert flushed_before_full(GRADIENTS, 8) == [Filled(8, 0.5), Filled(9, 1.0), Filled(1, 1.0)]
    assert flushed_before_full(GRADIENTS, 100) == [Filled(18, 1.0)]


@given(st.lists(st.integers(1, 1000), max_size=50), st.integers(1, 5000), st.integers(1, 5000))
def test_buckets_hold_every_gradient_once(sizes: list[int], first: int, limit: int) -> None:
    gradients = [Filled(size, (place + 1) / len(sizes)) for place, size in enumerate(sizes)]
    for found in (closed_when_full(gradients, (first, limit)), flushed_before_full(gradients, limit)):
        assert math.fsum(one.elements for one in found) == sum(sizes)
        assert [one.ready for one in found] == sorted(one.ready for one in found)
        assert not found or found[-1].ready == 1.0
