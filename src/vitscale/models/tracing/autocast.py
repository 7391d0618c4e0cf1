"""Autocast of the target device, on meta tensors.

torch casts only tensors of the device for which autocast is on, and meta is none. So `EmulatedAutocast` puts kernels of
its own at an autocast key that this torch has none at (that of HPU), and switches that key on for all tensors. The
kernels follow the target device's lists (`autocast_lists`). As in torch, the cast of a weight is kept and shared until
the outermost context ends, and a kernel's inner operations are not cast again.

Models ask torch whether autocast is on, and switch it off for a while, by the name of their tensors' device. So torch's
own switch for the target device is set too, the kernels heed it, and "meta" stands for that device (`named_as_meta`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import Tensor

from vitscale.models.autocast import on_meta
from vitscale.models.tracing.autocast_lists import CAST_CLASSES, CastClass
from vitscale.models.tracing.errors import TraceError

_KEY = "AutocastHPU"
_KEY_DEVICE = "hpu"
_DEVICE_KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}
_NORM_OVERLOADS = {"norm.Scalar": "ScalarOpt_dtype", "norm.ScalarOpt_dim": "ScalarOpt_dim_dtype"}

CopyHook = Callable[[Tensor, Tensor], None]
"""Called with a weight and its cast."""


class EmulatedAutocast:
    """Autocast as a device of kind `device` does it, for meta tensors; see `installed` and `active`."""

    def __init__(self, device: Literal["cpu", "cuda"], dtype: torch.dtype, on_copy: CopyHook) -> None:
        """`on_copy` is called whenever a weight is cast, once in each outermost `active` context."""
        self._device: Literal["cpu", "cuda"] = device
        self._dtype = dtype
        self._on_copy = on_copy
        self._depth = 0
        """Number of `active` contexts that have begun and not ended."""
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}
        """Identity of a weight -> the weight and its cast, which later operations share."""

    @contextmanager
    def installed(self) -> Iterator[None]:
        """The context in which the kernels are there; they do nothing unless `active`."""
        fallback = torch.library.Library("_", "IMPL")
        library = torch.library.Library("aten", "IMPL")
        try:
            fallback.fallback(torch.library.fallthrough_kernel, _KEY)
            for name, cast_class in CAST_CLASSES[self._device].items():
                if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", _DEVICE_KEYS[self._device]):
                    library.impl(name, self._kernel(name, cast_class), _KEY)
            yield
        finally:
            library._destroy()
            fallback._destroy()

    @contextmanager
    def active(self) -> Iterator[None]:
        """The context of a forward, or of a part of it that is computed again in backward."""
        self._depth += 1
        try:
            with ExitStack() as stack:
                stack.enter_context(_switched_on(_KEY_DEVICE, self._dtype))
                stack.enter_context(_switched_on(self._device, self._dtype))
                stack.enter_context(torch._C._IncludeDispatchKeyGuard(_dispatch_key()))
                stack.enter_context(on_meta(self._dtype))
                yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._copies.clear()

    def _kernel(self, name: str, cast_class: CastClass) -> Callable[..., Any]:
        """Return the kernel of an operation: it casts the arguments, and calls the operation without autocast."""
        operation = _operation(name)
        cast_arguments = self._argument_caster(operation, cast_class)
        autocast_keys = torch._C.DispatchKeySet(_dispatch_key())

        def kernel(*arguments: Any, **options: Any) -> Any:
            target = operation
            is_off = not torch.is_autocast_enabled(self._device)
            with torch._C._ExcludeDispatchKeyGuard(autocast_keys):
                if is_off:
                    return operation(*arguments, **options)
                if cast_class == "banned":
                    raise TraceError(f"aten::{name} is unsafe to autocast, and torch refuses it there")
                if cast_class == "fp32_norm" and _is_castable(arguments[0]):
                    target = getattr(torch.ops.aten.norm, _NORM_OVERLOADS[name])
                    options["dtype"] = torch.float32
                else:
                    arguments, options = cast_arguments(arguments, options)
                return target(*arguments, **options)

        return kernel

    def _argument_caster(
        self, operation: Any, cast_class: CastClass
    ) -> Callable[[tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]:
        """Return the function that casts positional and named arguments as a class of operations wants them."""

        def to_one_dtype(arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
            dtype = self._common_dtype(cast_class, arguments)
            cast_options = {name: self._cast(value, dtype) for name, value in options.items()}
            return tuple(self._cast(value, dtype) for value in arguments), cast_options

        def with_fp32_result(arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
            return _with_fp32_result(operation, arguments, options)

        return with_fp32_result if cast_class == "fp32_dtype" else to_one_dtype

    def _common_dtype(self, cast_class: CastClass, arguments: Sequence[Any]) -> torch.dtype:
        """Return the dtype to which all of an operation's arguments are cast."""
        if cast_class == "lower":
            return self._dtype
        if cast_class == "promote":
            has_fp32 = any(tensor.dtype == torch.float32 for tensor in _castable_tensors(arguments))
            return torch.float32 if has_fp32 else self._dtype
        return torch.float32

    def _cast(self, value: Any, dtype: torch.dtype) -> Any:
        """Return an argument, cast where it is a floating-point tensor on meta, or a list of such."""
        if isinstance(value, list | tuple):
            return [self._cast(item, dtype) for item in value]
        if not _is_castable(value) or value.dtype == dtype:
            return value
        is_shared = dtype == self._dtype and _is_weight(value)
        return self._weight_copy(value) if is_shared else value.to(dtype)

    def _weight_copy(self, weight: Tensor) -> Tensor:
        """Return the cast of a weight, made at its first use in this context."""
        pair = self._copies.get(id(weight))
        if pair is None:
            pair = (weight, weight.to(self._dtype))
            self._copies[id(weight)] = pair
            self._on_copy(*pair)
        return pair[1]


@contextmanager
def _switched_on(device: str, dtype: torch.dtype) -> Iterator[None]:
    """The context in which torch's own switch for autocast on a device is on."""
    was_enabled = torch.is_autocast_enabled(device)
    dtype_before = torch.get_autocast_dtype(device)
    torch.set_autocast_enabled(device, True)
    torch.set_autocast_dtype(device, dtype)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device, was_enabled)
        torch.set_autocast_dtype(device, dtype_before)


@contextmanager
def named_as_meta(device: Literal["cpu", "cuda"]) -> Iterator[None]:
    """The context in which torch's questions about autocast on "meta", which it refuses, are about `device`."""
    begin_autocast = torch.autocast.__init__

    def begin(autocast: torch.autocast, device_type: str, *arguments: Any, **options: Any) -> None:
        begin_autocast(autocast, _target(device_type), *arguments, **options)

    def _target(device_type: str) -> str:
        return device if device_type == "meta" else device_type

    with ExitStack() as stack:
        stack.enter_context(patch.object(torch.autocast, "__init__", begin))
        for name in ("is_autocast_enabled", "get_autocast_dtype"):
            stack.enter_context(patch.object(torch, name, _asking_about(getattr(torch, name), _target)))
        yield


def _asking_about(question: Callable[..., Any], target: Callable[[str], str]) -> Callable[..., Any]:
    """Return a function of torch that takes a device's type, asked about the device that `target` names."""

    def ask(*device_types: str) -> Any:  # `is_autocast_enabled` also takes none
        return question(*map(target, device_types))

    return ask


def _dispatch_key() -> torch._C.DispatchKey:
    """Return the autocast key that the kernels are at; torch's type stubs leave it out."""
    key: torch._C.DispatchKey = getattr(torch._C.DispatchKey, _KEY)
    return key


def _operation(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _is_castable(value: Any) -> bool:
    """Whether autocast casts it: `is_eligible` in autocast_mode.h leaves double out."""
    if not isinstance(value, Tensor):
        return False
    return value.device.type == "meta" and value.is_floating_point() and value.dtype is not torch.float64


def _is_weight(tensor: Tensor) -> bool:
    """Whether its cast is kept and shared, by the rule of `cached_cast` in autocast_mode.cpp."""
    is_trained_leaf = tensor.requires_grad and tensor.is_leaf
    return is_trained_leaf and tensor.dtype is torch.float32 and not tensor._is_view()


def _castable_tensors(arguments: Sequence[Any]) -> Iterator[Tensor]:
    """Yield the tensors among arguments, and in lists among them, that autocast casts."""
    for value in arguments:
        if isinstance(value, list | tuple):
            yield from _castable_tensors(value)
        elif _is_castable(value):
            yield value


def _with_fp32_result(
    operation: Any, arguments: tuple[Any, ...], options: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with `dtype` fp32, where they leave it open and the first tensor is one to cast."""
    if not _is_castable(arguments[0]):
        return arguments, dict(options)
    position = [argument.name for argument in operation._schema.arguments].index("dtype")
    is_set_by_position = position < len(arguments) and arguments[position] is not None
    if is_set_by_position or options.get("dtype") is not None:
        return arguments, dict(options)
    return arguments[:position], {**options, "dtype": torch.float32}
