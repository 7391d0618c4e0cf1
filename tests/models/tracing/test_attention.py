"""Attention on meta goes to the operator that the target device takes, with the bytes that this one keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from vitscale.models.tracing.attention import attention_of

attention: Any = functional.scaled_dot_product_attention
FLASH = "_scaled_dot_product_flash_attention"
EFFICIENT = "_scaled_dot_product_efficient_attention"
ON_CPU = "_scaled_dot_product_flash_attention_for_cpu"
MATH = "_safe_softmax"
"""An operation of the math path."""


class Names(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no types
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta", requires_grad=dtype.is_floating_point)


def operations(device: Any, *inputs: Tensor, **options: Any) -> list[str]:
    """The operations of attention in forward and backward."""
    names = Names()
    with attention_of(device), names:
        output = attention(*inputs, **options)
        output.float().sum().backward()
    assert output.shape == (*inputs[0].shape[:-1], inputs[2].shape[-1])
    return names.names


def heads(width: int = 16, dtype: torch.dtype = torch.bfloat16, queries: int = 9) -> list[Tensor]:
    return [tensor(2, 4, count, width, dtype=dtype) for count in (queries, 9, 9)]


def test_a_gpu_takes_flash_in_16_bits_without_a_mask() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        names = operations("cuda", *heads(dtype=dtype), dropout_p=0.1)
        assert FLASH in names
        assert f"{FLASH}_backward" in names
        assert MATH not in names


@pytest.mark.parametrize("width", [12, 20])
def test_flash_fills_heads_up_to_a_multiple_of_8(width: int) -> None:
    assert "constant_pad_nd" in operations("cuda", *heads(width))
    assert "constant_pad_nd" not in operations("cuda", *heads(16))


@pytest.mark.parametrize(
    "mask",
    [
        tensor(9, 9),
        tensor(2, 1, 9, 9),
        torch.empty(9, 9, dtype=torch.bool, device="meta"),
        torch.empty(2, 4, 9, 9, dtype=torch.bool, device="meta"),
    ],
    ids=["matrix", "by image", "bool", "full bool"],
)
def test_a_gpu_takes_the_efficient_operator_with_a_mask(mask: Tensor) -> None:
    names = operations("cuda", *heads(), attn_mask=mask)
    assert EFFICIENT in names
    assert f"{EFFICIENT}_backward" in names


def test_a_gpu_takes_the_efficient_operator_in_fp32() -> None:
    assert EFFICIENT in operations("cuda", *heads(dtype=torch.float32))


@pytest.mark.parametrize(
    ("inputs", "options"),
    [
        (heads(12), {"attn_mask": tensor(9, 9)}),  # heads that the efficient operator cannot load
        (heads(6, dtype=torch.float32), {}),
        (heads(dtype=torch.float64), {}),
        ([tensor(4, 9, 16) for _ in range(3)], {}),  # three dimensions
        ([tensor(2, 4, 16, 9).transpose(-1, -2), *heads()[1:]], {}),  # numbers of a head that lie apart
    ],
    ids=["width", "fp32 width", "fp64", "3-D", "strides"],
)
def test_a_gpu_takes_the_math_path_where_both_refuse(inputs: list[Tensor], options: dict[str, Any]) -> None:
    names = operations("cuda", *inputs, **options)
    assert MATH in names or "_softmax" in names
    assert not {FLASH, EFFICIENT} & {*names}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("masked", [False, True])
def test_a_cpu_takes_its_flash_operator_and_so_does_a_real_one(dtype: torch.dtype, masked: bool) -> None:
    mask = torch.zeros(9, 9, dtype=dtype, device="meta") if masked else None
    assert ON_CPU in operations("cpu", *heads(dtype=dtype), attn_mask=mask)
    names = Names()
    real = [torch.zeros(each.shape, dtype=dtype, requires_grad=True) for each in heads(dtype=dtype)]
    with names:
        attention(*real, attn_mask=None if mask is None else torch.zeros(9, 9, dtype=dtype))
    assert ON_CPU in names.names


@pytest.mark.parametrize("options", [{"dropout_p": 0.1}, {"attn_mask": "learnt"}], ids=["dropout", "learnt mask"])
def test_a_cpu_takes_the_math_path_where_a_real_one_does(options: dict[str, Any]) -> None:
    shape = (2, 4, 9, 9)
    on_meta, on_cpu = options, options
    if "attn_mask" in options:
        on_meta = {"attn_mask": tensor(*shape, dtype=torch.float32)}
        on_cpu = {"attn_mask": torch.zeros(shape, requires_grad=True)}
    assert ON_CPU not in operations("cpu", *heads(dtype=torch.float32), **on_meta)
    names = Names()
    real = [torch.zeros(each.shape, requires_grad=True) for each in heads()]
    with names:
        attention(*real, **on_cpu)
    assert ON_CPU not in names.names


def test_outside_the_context_torch_is_as_before() -> None:
    with attention_of("cuda"):
        pass
    names = Names()
    with names:
        attention(*heads())
    assert FLASH not in names.names
