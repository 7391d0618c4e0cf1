"""FLOPs of an operation by its arguments: 1 multiply-add is 2 FLOP, and element-wise work is none.

Attention is two products in forward, and four in backward: the gradients of the probabilities, of value, of query and
of key. Fused operators keep no scores and compute query x key again (Dao et al., "FlashAttention", NeurIPS 2022,
algorithm 4); what is computed again is not the model's own work, so that MFU leaves it out (Chowdhery et al., "PaLM",
2022, appendix B). This holds for flash, cuDNN's and memory-efficient attention on a GPU, and for flash attention on a
CPU. A causal mask halves nothing. Attention by the math path is matrix products, and counted as such.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from torch import Tensor

Kind = Literal["matmul", "convolution", "attention"]


class OperationFlops(NamedTuple):
    """FLOPs of one operation."""

    kind: Kind
    flops: int


def operation_flops(name: str, arguments: tuple[Any, ...], output: Any) -> OperationFlops | None:
    """Return the FLOPs of an operation such as "addmm"; None where it multiplies no matrices."""
    formula = _FORMULAS.get(name)
    if formula is None:
        return None
    return OperationFlops(formula.kind, formula.flops(arguments, output))


def _product(rows: Tensor, columns: Tensor) -> int:
    """Return the FLOPs of `rows` [..., n, k] x `columns` [..., k, m], or of a matrix and a vector [k]."""
    outputs = columns.shape[-1] if columns.ndim > 1 else 1
    return 2 * rows.numel() * outputs


def _mm(arguments: tuple[Any, ...], output: Any) -> int:
    del output
    return _product(arguments[0], arguments[1])


def _addmm(arguments: tuple[Any, ...], output: Any) -> int:
    del output
    return _product(arguments[1], arguments[2])


def _convolution(arguments: tuple[Any, ...], output: Tensor) -> int:
    """Return the FLOPs of `convolution(input, weight, bias, stride, padding, dilation, transposed, ...)`."""
    images, weight = arguments[:2]
    is_transposed = arguments[6]
    return _kernel_flops(weight, images if is_transposed else output)


def _convolution_backward(arguments: tuple[Any, ...], output: Any) -> int:
    """Return the FLOPs of `convolution_backward`: one forward for each of the input's and the weight's gradient."""
    del output
    output_gradient, images, weight = arguments[:3]
    is_transposed = arguments[7]
    needs_input, needs_weight, _ = arguments[10]
    gradients = int(needs_input) + int(needs_weight)
    return gradients * _kernel_flops(weight, images if is_transposed else output_gradient)


def _kernel_flops(weight: Tensor, positions: Tensor) -> int:
    """Return the FLOPs of kernels at every element of `positions`.

    Args:
        weight: [outputs, inputs / groups, ...], or transposed [inputs, outputs / groups, ...]: of either, each element
            of `positions` takes one row.
        positions: the output of a convolution, or the input of a transposed one.
    """
    return 2 * positions.numel() * math.prod(weight.shape[1:])


def _attention(arguments: tuple[Any, ...], output: Any) -> int:
    del output
    query, key, value = arguments[:3]
    products: int = query.shape[-1] + value.shape[-1]
    return _scores(query, key) * products


def _attention_backward(arguments: tuple[Any, ...], output: Any) -> int:
    del output
    _, query, key, value = arguments[:4]
    products: int = 2 * (query.shape[-1] + value.shape[-1])
    return _scores(query, key) * products


def _scores(query: Tensor, key: Tensor) -> int:
    """Return twice the number of scores: the FLOPs of attention for each element of a head's width."""
    images, heads, queries, _ = query.shape
    return 2 * images * heads * queries * key.shape[-2]


class _Formula(NamedTuple):
    kind: Kind
    flops: Callable[[tuple[Any, ...], Any], int]


_ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)
_FORMULAS: Mapping[str, _Formula] = {
    "mm": _Formula("matmul", _mm),
    "bmm": _Formula("matmul", _mm),
    "mv": _Formula("matmul", _mm),
    "dot": _Formula("matmul", _mm),
    "addmm": _Formula("matmul", _addmm),
    "addmv": _Formula("matmul", _addmm),
    "addbmm": _Formula("matmul", _addmm),
    "baddbmm": _Formula("matmul", _addmm),
    "convolution": _Formula("convolution", _convolution),
    "convolution_backward": _Formula("convolution", _convolution_backward),
    **{name: _Formula("attention", _attention) for name in _ATTENTION},
    **{f"{name}_backward": _Formula("attention", _attention_backward) for name in _ATTENTION},
}
