"""Floating-point operations of matrix products by the shapes that a trace recorded: two for each multiply-add."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

Shapes = Sequence[Sequence[int]]


def product_flops(name: str, shapes: Shapes, concrete: Sequence[object]) -> int | None:
    """The operations of one call; None where its shapes do not tell.

    Args:
        name: of the operator, with its namespace ("aten::addmm").
        shapes: of its inputs, in order; empty of what is no tensor.
        concrete: its inputs as text, which hold the strides and paddings of a convolution.
    """
    rule = FLOPS_OF.get(name)
    try:
        flops = rule(shapes, concrete) if rule else None
    except (IndexError, ValueError, ZeroDivisionError):
        return None
    return flops if flops is not None and 0 < flops < 1 << 62 else None


def _product(first: Sequence[int], second: Sequence[int]) -> int:
    (rows, inner), columns = first[-2:], second[-1]
    return 2 * math.prod(first[:-2]) * rows * inner * columns


def _attention(shapes: Shapes) -> int:
    """Scores and their weighted sum, of queries (..., S, D) and keys (..., T, D)."""
    queries, keys, values = shapes[:3]
    return 2 * math.prod(queries[:-1]) * keys[-2] * (queries[-1] + values[-1])


def _convolution(shapes: Shapes, concrete: Sequence[object]) -> int:
    images, weight = shapes[0], shapes[1]
    stride, padding, dilation = (_numbers(concrete[place]) for place in (3, 4, 5))
    if str(concrete[6]) != "False":
        raise ValueError("transposed")
    steps, pads, widths = (_for_each(some, len(weight) - 2) for some in (stride, padding, dilation))
    out = 1
    for size, kernel, step, pad, wide in zip(images[2:], weight[2:], steps, pads, widths, strict=True):
        out *= (size + 2 * pad - wide * (kernel - 1) - 1) // step + 1
    return 2 * images[0] * math.prod(weight) * out


def _convolution_backward(shapes: Shapes, concrete: Sequence[object]) -> int:
    gradient, weight = shapes[0], shapes[2]
    wanted = str(concrete[-1]).strip("[]").split(",")[:2] if concrete else ["True", "True"]
    products = sum(one.strip() == "True" for one in wanted)
    return products * 2 * gradient[0] * math.prod(gradient[2:]) * math.prod(weight)


def _numbers(text: object) -> list[int]:
    return [int(one) for one in str(text).strip("[]").split(",")]


def _for_each(some: Sequence[int], axes: int) -> list[int]:
    return list(some) * axes if len(some) == 1 else list(some)


_SDPA = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
FLOPS_OF: Mapping[str, Callable[[Shapes, Sequence[object]], int]] = {
    "aten::mm": lambda shapes, _: _product(shapes[0], shapes[1]),
    "aten::bmm": lambda shapes, _: _product(shapes[0], shapes[1]),
    "aten::addmm": lambda shapes, _: _product(shapes[1], shapes[2]),
    "aten::baddbmm": lambda shapes, _: _product(shapes[1], shapes[2]),
    "aten::convolution": _convolution,
    "aten::convolution_backward": _convolution_backward,
    **{f"aten::_scaled_dot_product_{kind}": lambda shapes, _: _attention(shapes) for kind in _SDPA},
    # Scores again, and four products of gradients.
    **{
        f"aten::_scaled_dot_product_{kind}_backward": lambda shapes, _: _attention(shapes[1:]) * 5 // 2
        for kind in _SDPA
    },
}
"""By operator. Others call one of these inside them, as `aten::linear` and `aten::conv2d` do."""
