"""Where buckets are full during backward: by hand, and against a count that knows nothing of layers."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from vitscale.prediction.memory.moments import EMBEDDING, FC1, FC2, HEAD, OUT, QKV, Flush, flushes
from vitscale.trial.model_cost import ParameterShapes, parameter_shapes
from vitscale.trial.model_spec import ModelSpec, resolve

TINY = ModelSpec(name="vit-ti16", image_size=4, patch_size=2, hidden_size=4, heads=2, layers=2, mlp_size=6)
"""In the order of backward, 3 classes: head 3, 12, norm 4, 4; block fc2 4, 24, fc1 6, 24, norm 4, 4, output 4, 16, and
three times 4, 16, norm 4, 4; positions 20, class token 4, patches 48, 4."""


def shapes_of(spec: ModelSpec) -> ParameterShapes:
    shapes = parameter_shapes(resolve(spec, 3))
    assert shapes is not None
    return shapes


def test_the_tiny_model_fills_buckets_of_60() -> None:
    # 23 of the head, 4 + 24 of fc2 and 6 make 57: fc1's 24 do not fit. 24, the norm's 8, 4 + 16 of the output and a
    # bias of 4 make 56: a weight of 16 does not fit. 16 + 20 + 20 + 4 make 60: the norm's last 4 do not fit. These 4,
    # 28 of the next block's fc2 and 6 make 38.
    found = flushes(shapes_of(TINY), 60)
    assert found[:4] == (Flush(2, FC1, 57, 24), Flush(2, QKV, 56, 16), Flush(2, QKV, 60, 4), Flush(1, FC1, 38, 24))
    assert {flush.layer for flush in found} <= {FC2, FC1, OUT, QKV, HEAD, EMBEDDING}


def test_a_bucket_larger_than_the_model_is_never_full() -> None:
    assert flushes(shapes_of(TINY), 407) == ()
    assert flushes(shapes_of(TINY), 406) == (Flush(0, EMBEDDING, 403, 4),)


def test_a_gradient_larger_than_a_bucket_goes_alone() -> None:
    found = flushes(shapes_of(TINY), 10)
    assert Flush(2, FC1, 24, 6) in found  # fc2's weights, sent by the bias of fc1
    assert max(flush.elements for flush in found) == 48


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 40), st.integers(1, 3000))
def test_all_that_is_sent_and_left_is_the_model(heads: int, layers: int, mlp: int, bucket: int) -> None:
    shapes = shapes_of(
        ModelSpec(
            name="vit-ti16", image_size=4, patch_size=2, hidden_size=4 * heads, heads=heads, layers=layers, mlp_size=mlp
        )
    )
    tensors = shapes.tensors()
    largest, everything = max(map(math.prod, tensors)), sum(map(math.prod, tensors))
    found = flushes(shapes, bucket)
    sent = sum(flush.elements for flush in found)
    assert 0 < everything - sent <= max(bucket, largest)
    for flush in found:
        assert flush.elements <= max(bucket, largest)
        assert flush.elements + flush.new > bucket
    assert [flush.left for flush in found] == sorted((flush.left for flush in found), reverse=True)
