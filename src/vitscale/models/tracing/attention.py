"""Attention as the target device computes it, on meta tensors.

`scaled_dot_product_attention` is a composite operation: it asks the device which operator computes it. On meta it takes
the math path, which keeps every score; a GPU or a CPU keeps none of them. `attention_of` replaces the composite at the
dispatcher while a model is traced, so that recomputation and C++ code see it too. Only 4-D queries are redirected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

aten = torch.ops.aten

_SIXTEEN_BITS = (torch.float16, torch.bfloat16)
_LARGEST_FLASH_HEAD = 256
_MASK_ALIGNMENT = 16


class AttentionCall(NamedTuple):
    """The arguments of one call of `scaled_dot_product_attention`."""

    query: Tensor
    """[b, heads, queries, d]"""
    key: Tensor
    value: Tensor
    mask: Tensor | None
    dropout: float
    is_causal: bool
    scale: float | None
    enable_gqa: bool

    @property
    def inputs(self) -> list[Tensor]:
        """Query, key and value."""
        return [self.query, self.key, self.value]

    @property
    def softmax_scale(self) -> float:
        """The factor of the scores: 1 / sqrt(d) unless the call names another."""
        return self.query.shape[-1] ** -0.5 if self.scale is None else self.scale


@contextmanager
def attention_of(device: Literal["cpu", "cuda"]) -> Iterator[None]:
    """The context in which attention over meta tensors goes to the operator that computes it on `device`."""
    compute = _on_cuda if device == "cuda" else _on_cpu

    def attend(  # the names and defaults are those of torch's schema
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        call = AttentionCall(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        is_four_dimensional = all(tensor.ndim == 4 for tensor in call.inputs)
        return compute(call) if is_four_dimensional else _math(call)

    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl("scaled_dot_product_attention", attend, "AutogradMeta")
        yield
    finally:
        library._destroy()


def _on_cuda(call: AttentionCall) -> Tensor:
    """Compute attention as a GPU of compute capability 8 or later does, by the operator that torch tries first.

    The rules are those of `select_sdp_backend` (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp): flash, then
    memory-efficient attention, then math. Where cuDNN's attention comes first (H100 and B200 with cuDNN 9.15.1 or
    later), it keeps what flash keeps.
    """
    if _flash_takes(call):
        return _flash(call)
    if _efficient_takes(call):
        return _efficient(call)
    return _math(call)


def _flash_takes(call: AttentionCall) -> bool:
    """Whether `can_use_flash_attention` is true: no mask, 16 bits, one width of heads of at most 256."""
    if call.mask is not None:
        return False
    head_widths = {tensor.shape[-1] for tensor in call.inputs}
    if len(head_widths) > 1 or max(head_widths) > _LARGEST_FLASH_HEAD:
        return False
    dtypes = {tensor.dtype for tensor in call.inputs}
    if len(dtypes) > 1 or call.query.dtype not in _SIXTEEN_BITS:
        return False
    has_as_many_queries_as_keys = call.query.shape[-2] == call.key.shape[-2]
    if call.is_causal and not has_as_many_queries_as_keys:
        return False
    return _is_dense(call) and _heads_fit(call)


def _efficient_takes(call: AttentionCall) -> bool:
    """Whether `can_use_mem_efficient_attention` is true: heads of a width that its kernels can load at once."""
    dtype = call.query.dtype
    has_one_dtype = all(tensor.dtype == dtype for tensor in call.inputs)
    if dtype not in (*_SIXTEEN_BITS, torch.float32) or not has_one_dtype:
        return False
    query_width, key_width, value_width = (tensor.shape[-1] for tensor in call.inputs)
    alignment = 8 if dtype in _SIXTEEN_BITS else 4  # `minimum_gemm_alignment` from compute capability 8 on
    has_aligned_heads = query_width % alignment == 0 and value_width % alignment == 0
    if not has_aligned_heads or query_width != key_width:
        return False
    has_dense_mask = call.mask is None or call.mask.stride(-1) == 1
    return has_dense_mask and _is_dense(call) and _heads_fit(call)


def _on_cpu(call: AttentionCall) -> Tensor:
    """Compute attention as a CPU does, by the rules of `use_flash_attention_cpp`.

    They are in aten/src/ATen/native/transformers/sdp_utils_cpp.cpp: flash without dropout and with a mask that takes
    no gradient, else math.
    """
    if not _cpu_flash_takes(call):
        return _math(call)
    output: Tensor = aten._scaled_dot_product_flash_attention_for_cpu(
        *call.inputs, call.dropout, call.is_causal, attn_mask=_additive_mask(call), scale=call.scale
    )[0]
    return output


def _cpu_flash_takes(call: AttentionCall) -> bool:
    """Whether `use_flash_attention_cpp` is true."""
    if call.dropout > 0:
        return False
    mask = call.mask
    if mask is not None and (mask.requires_grad or mask.ndim not in (2, 4)):
        return False
    head_widths = {tensor.shape[-1] for tensor in call.inputs}
    return len(head_widths) == 1 and _is_dense(call) and _heads_fit(call)


def _is_dense(call: AttentionCall) -> bool:
    """Whether all sequences have tokens, and the numbers of each head lie side by side."""
    has_tokens = call.query.shape[-2] > 0 and call.key.shape[-2] > 0
    return has_tokens and all(tensor.stride(-1) == 1 for tensor in call.inputs)


def _heads_fit(call: AttentionCall) -> bool:
    """Whether query, key and value have the same images and heads; with `enable_gqa` several queries share a key."""
    image_counts = {tensor.shape[0] for tensor in call.inputs}
    heads, key_heads, value_heads = (tensor.shape[1] for tensor in call.inputs)
    if len(image_counts) > 1:
        return False
    if call.enable_gqa:
        return heads % key_heads == 0 and heads % value_heads == 0
    return heads == key_heads == value_heads


def _flash(call: AttentionCall) -> Tensor:
    """Compute by flash attention; widths of heads are filled up to a multiple of 8, as `pad_last_dim<8>` does.

    Example: heads of width 60 are padded by 4 to 64, and the output is cut to 60 again.
    """
    width = call.query.shape[-1]
    padding = -width % 8
    inputs = call.inputs
    if padding:
        inputs = [pad(tensor, (0, padding)) for tensor in call.inputs]
    output: Tensor = aten._scaled_dot_product_flash_attention(
        *inputs, call.dropout, call.is_causal, scale=call.softmax_scale
    )[0]
    return output[..., :width] if padding else output


def _efficient(call: AttentionCall) -> Tensor:
    """Compute by memory-efficient attention, which takes a mask in full size."""
    mask = _additive_mask(call)
    if mask is not None:
        mask = _full_mask(mask, call)
    computes_gradient = any(tensor.requires_grad for tensor in call.inputs)
    output: Tensor = aten._scaled_dot_product_efficient_attention(
        *call.inputs, mask, computes_gradient, call.dropout, call.is_causal, scale=call.scale
    )[0]
    return output


def _full_mask(mask: Tensor, call: AttentionCall) -> Tensor:
    """Return a mask [b, heads, queries, keys] whose rows are aligned, as `preprocess_mask` (attention.cpp) makes it."""
    images, heads, queries = call.query.shape[:3]
    keys = call.key.shape[-2]
    expanded = mask.expand(images, heads, queries, keys)
    padding = -keys % _MASK_ALIGNMENT
    if padding:
        return pad(expanded, (0, padding))[..., :keys]  # a view of longer rows
    has_aligned_strides = all(stride % _MASK_ALIGNMENT == 0 for stride in expanded.stride()[:3])
    return expanded if has_aligned_strides else expanded.contiguous()


def _additive_mask(call: AttentionCall) -> Tensor | None:
    """Return the mask as numbers that are added to the scores, as `convert_boolean_attn_mask` in attention.cpp does."""
    mask = call.mask
    if mask is None or mask.dtype is not torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=call.query.dtype).masked_fill_(mask.logical_not(), -torch.inf)


def _math(call: AttentionCall) -> Tensor:
    """Compute by two products and a softmax, which keep every score."""
    math: Callable[..., tuple[Tensor, Tensor]] = aten._scaled_dot_product_attention_math
    output, _ = math(
        *call.inputs,
        _additive_mask(call),
        call.dropout,
        call.is_causal,
        scale=call.scale,
        enable_gqa=call.enable_gqa,
    )
    return output
