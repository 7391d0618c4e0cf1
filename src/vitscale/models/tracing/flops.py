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
    """Return the FLOPs of one call of an operation such as "addmm"; None where it multiplies no matrices.

    Args:
        name: the operation of aten, without its overload.
        arguments: its positional arguments, in the order of its schema.
        output: what it returned.
    """
    formula = _FORMULAS.get(name)
    if formula is None:
        return None
    return OperationFlops(formula.kind, formula.flops(arguments, output))


def _product_flops(left: Tensor, right: Tensor) -> int:
    """Return the FLOPs of `left` [..., n, k] x `right` [..., k, m], or of `left` [..., k] x a vector [k]."""
    columns = right.shape[-1] if right.ndim > 1 else 1
    return 2 * left.numel() * columns


def _mm(arguments: tuple[Any, ...], output: Any) -> int:
    """Return the FLOPs of `mm(left, right)` and of operations with the same arguments."""
    del output
    return _product_flops(arguments[0], arguments[1])


def _addmm(arguments: tuple[Any, ...], output: Any) -> int:
    """Return the FLOPs of `addmm(bias, left, right)` and of operations with the same arguments."""
    del output
    return _product_flops(arguments[1], arguments[2])


def _convolution(arguments: tuple[Any, ...], output: Tensor) -> int:
    """Return the FLOPs of `convolution(input, weight, bias, stride, padding, dilation, transposed, ...)`."""
    inputs, weight = arguments[:2]
    is_transposed = arguments[6]
    return _kernel_flops(weight, positions=inputs if is_transposed else output)


def _convolution_backward(arguments: tuple[Any, ...], output: Any) -> int:
    """Return the FLOPs of `convolution_backward(output_gradient, input, weight, ..., output_mask)`.

    The gradient of the input and that of the weight each take as much as the forward; the bias's takes no products.
    """
    del output
    output_gradient, inputs, weight = arguments[:3]
    is_transposed = arguments[7]
    computes_input_gradient, computes_weight_gradient, _ = arguments[10]
    gradients = int(computes_input_gradient) + int(computes_weight_gradient)
    return gradients * _kernel_flops(weight, positions=inputs if is_transposed else output_gradient)


def _kernel_flops(weight: Tensor, positions: Tensor) -> int:
    """Return the FLOPs of kernels at every element of `positions`, each of which takes one row of the weight.

    Args:
        weight: [outputs, inputs / groups, height, width], or of a transposed convolution
            [inputs, outputs / groups, height, width]; also with one or three axes behind the first two.
        positions: the output of a convolution, or the input of a transposed one.
    """
    row_elements = math.prod(weight.shape[1:])
    return 2 * positions.numel() * row_elements


def _attention(arguments: tuple[Any, ...], output: Any) -> int:
    """Return the FLOPs of attention's `forward(query, key, value, ...)`: query x key, and probabilities x value."""
    del output
    query, key, value = arguments[:3]
    width_of_products: int = query.shape[-1] + value.shape[-1]
    return 2 * _score_count(query, key) * width_of_products


def _attention_backward(arguments: tuple[Any, ...], output: Any) -> int:
    """Return the FLOPs of attention's `backward(output_gradient, query, key, value, ...)`: four products."""
    del output
    _, query, key, value = arguments[:4]
    query_and_key_gradients = 2 * query.shape[-1]
    value_and_probability_gradients = 2 * value.shape[-1]
    width_of_products: int = query_and_key_gradients + value_and_probability_gradients
    return 2 * _score_count(query, key) * width_of_products


def _score_count(query: Tensor, key: Tensor) -> int:
    """Return the number of scores of `query` [b, heads, queries, d] and `key` [b, heads, keys, d]."""
    images, heads, queries, _ = query.shape
    return images * heads * queries * key.shape[-2]


class _Formula(NamedTuple):
    """How the FLOPs of an operation are counted, from its arguments and its output."""

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
