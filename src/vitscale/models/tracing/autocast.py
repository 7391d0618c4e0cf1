"""Autocast of the target device, on meta tensors.

torch casts only tensors of the device for which autocast is on, and meta is none. So `EmulatedAutocast` puts kernels of
its own at an autocast key that this torch has none at (that of HPU), and switches that key on for all tensors. The
kernels follow the target device's lists (`autocast_lists`). As in torch, the cast of a weight is kept and shared until
the outermost context ends, and a kernel's inner operations are not cast again.

Models ask whether autocast is on, and switch it off for a while, by the name of their tensors' device. So torch's own
switch for the target device is set too, the kernels heed it, and "meta" stands for that device (`meta_stands_for`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any, Literal, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from vitscale.models.autocast import meta_as
from vitscale.models.tracing.autocast_lists import CAST_CLASSES, CastClass
from vitscale.models.tracing.errors import TraceError

_KEY = "AutocastHPU"
_KEY_DEVICE = "hpu"
_DEVICE_KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}
_NORM_OVERLOADS = {"norm.Scalar": "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype"}
"""Overload of a norm -> the one that also takes the result's dtype."""

CopyHook = Callable[[Tensor, Tensor], None]
"""Called with a weight and its cast."""


class EmulatedAutocast:
    """Autocast as a device of kind `device` does it, for meta tensors; see `installed` and `active`."""

    def __init__(self, device: Literal["cpu", "cuda"], dtype: torch.dtype, on_copy: CopyHook) -> None:
        """`on_copy` is called whenever a weight is cast, once in each outermost `active` context."""
        self._device: Literal["cpu", "cuda"] = device
        self._dtype = dtype
        self._caster = _Caster(dtype, on_copy)
        self._depth = 0
        """Number of `active` contexts that have begun and not ended."""

    @contextmanager
    def installed(self) -> Iterator[None]:
        """The context in which the kernels are there; they do nothing unless `active`."""
        fallback = torch.library.Library("_", "IMPL")
        library = torch.library.Library("aten", "IMPL")
        try:
            fallback.fallback(torch.library.fallthrough_kernel, _KEY)
            for name, cast_class in CAST_CLASSES[self._device].items():
                if self._is_cast_by_torch(name):
                    kernel = _Kernel(name, cast_class=cast_class, device=self._device, caster=self._caster)
                    library.impl(name, kernel.call, _KEY)
            yield
        finally:
            library._destroy()
            fallback._destroy()

    def _is_cast_by_torch(self, name: str) -> bool:
        """Whether the torch at hand has an autocast kernel of the operation for this device."""
        return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", _DEVICE_KEYS[self._device])

    @contextmanager
    def active(self) -> Iterator[None]:
        """The context of a forward, or of a part of it that is computed again in backward.

        Such contexts may lie in each other; casts of weights are shared until the outermost ends.
        """
        self._depth += 1
        try:
            with (
                _switched_on(_KEY_DEVICE, self._dtype),  # until then torch leaves the kernels' key out
                torch._C._IncludeDispatchKeyGuard(_dispatch_key()),  # meta tensors have the key from here on
                _switched_on(self._device, self._dtype),  # models and the kernels ask for this one
                meta_as(self._device),
            ):
                yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._caster.forget_copies()


class _Caster:
    """Casts the arguments of operations; the cast of a weight is shared until `forget_copies`."""

    def __init__(self, autocast_dtype: torch.dtype, on_copy: CopyHook) -> None:
        """`on_copy` is called for each cast of a weight that is made to be shared."""
        self.autocast_dtype = autocast_dtype
        self._on_copy = on_copy
        self._shared: dict[int, _WeightCopy] = {}
        """Copies by the identity of their weight."""

    def cast(self, value: Any, dtype: torch.dtype) -> Any:
        """Return an argument, cast to a dtype where it is a tensor that autocast casts, or a list of such."""
        if isinstance(value, list | tuple):
            return [self.cast(item, dtype) for item in value]
        if not _is_castable(value) or value.dtype == dtype:
            return value
        if dtype == self.autocast_dtype and _is_weight(value):
            return self._weight_copy(value)
        return value.to(dtype)

    def _weight_copy(self, weight: Tensor) -> Tensor:
        """Return the cast of a weight, which is made at its first use."""
        shared = self._shared.get(id(weight))
        if shared is None:
            shared = _WeightCopy(weight, weight.to(self.autocast_dtype))
            self._shared[id(weight)] = shared
            self._on_copy(shared.weight, shared.copy)
        return shared.copy

    def forget_copies(self) -> None:
        """Let go of all shared casts."""
        self._shared.clear()


class _WeightCopy(NamedTuple):
    """A weight and its cast. The weight is held so that its identity is not given to another tensor."""

    weight: Tensor
    copy: Tensor


class _Kernel:
    """What torch calls in place of one operation, at the autocast key: it casts, then calls the operation itself."""

    def __init__(self, name: str, *, cast_class: CastClass, device: Literal["cpu", "cuda"], caster: _Caster) -> None:
        """`name` is that of an operation of aten, with its overload behind a dot: "softmax.int"."""
        self._name = name
        self._operation = _operation(name)
        self._cast_class: CastClass = cast_class
        self._device = device
        self._caster = caster
        self._autocast_keys = torch._C.DispatchKeySet(_dispatch_key())

    def call(self, *arguments: Any, **options: Any) -> Any:
        """Return what the operation gives under autocast; what it calls inside is not cast again.

        Raises:
            TraceError: torch refuses this operation under autocast.
        """
        is_switched_off = not torch.is_autocast_enabled(self._device)  # by the model itself, for a while
        with torch._C._ExcludeDispatchKeyGuard(self._autocast_keys):
            if is_switched_off:
                return self._operation(*arguments, **options)
            return self._cast_and_call(arguments, options)

    def _cast_and_call(self, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Call the operation as its class has it; `CastClass` describes the classes."""
        match self._cast_class:
            case "lower":
                return self._call_in(self._caster.autocast_dtype, arguments, options)
            case "fp32":
                return self._call_in(torch.float32, arguments, options)
            case "promote":
                return self._call_in(self._widest_dtype(arguments), arguments, options)
            case "fp32_dtype":
                return self._call_with_fp32_result(arguments, options)
            case "fp32_norm":
                return self._call_norm_with_fp32_result(arguments, options)
            case "banned":
                raise TraceError(f"aten::{self._name} is unsafe to autocast, and torch refuses it there")

    def _call_in(self, dtype: torch.dtype, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Call the operation with all its tensors cast to one dtype."""
        cast_arguments = [self._caster.cast(value, dtype) for value in arguments]
        cast_options = {name: self._caster.cast(value, dtype) for name, value in options.items()}
        return self._operation(*cast_arguments, **cast_options)

    def _widest_dtype(self, arguments: tuple[Any, ...]) -> torch.dtype:
        """Return fp32 where one of the tensors is in fp32, else autocast's dtype."""
        dtypes = {tensor.dtype for tensor in _castable_tensors(arguments)}
        return torch.float32 if torch.float32 in dtypes else self._caster.autocast_dtype

    def _call_with_fp32_result(self, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Call the operation with its argument `dtype` set to fp32, unless the model has set it."""
        if not _is_castable(arguments[0]):
            return self._operation(*arguments, **options)
        position = _argument_names(self._operation).index("dtype")
        is_set_by_position = position < len(arguments) and arguments[position] is not None
        is_set_by_name = options.get("dtype") is not None
        if is_set_by_position or is_set_by_name:
            return self._operation(*arguments, **options)
        return self._operation(*arguments[:position], **{**options, "dtype": torch.float32})

    def _call_norm_with_fp32_result(self, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Call the overload of a norm that takes `dtype`, with fp32: the overload that the model calls has none."""
        if not _is_castable(arguments[0]):
            return self._operation(*arguments, **options)
        norm_with_dtype = _operation(_NORM_OVERLOADS[self._name])
        return norm_with_dtype(*arguments, **{**options, "dtype": torch.float32})


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
def meta_stands_for(device: Literal["cpu", "cuda"]) -> Iterator[None]:
    """The context in which models may ask about autocast on "meta", and switch it there.

    Inside, these calls are about `device`, whether or not this machine has one: `torch.is_autocast_enabled("meta")`,
    `torch.get_autocast_dtype("meta")`, `torch.autocast("meta", ...)` and transformers' `maybe_autocast("meta", ...)`.
    Outside, torch refuses "meta" as a device of autocast, and transformers changes nothing there.
    """
    is_enabled_on = torch.is_autocast_enabled
    dtype_on = torch.get_autocast_dtype
    begin_on = torch.autocast.__init__

    def target_type(device_type: str) -> str:
        return device if device_type == "meta" else device_type

    def is_autocast_enabled(*device_types: str) -> bool:  # torch's own also takes none
        return is_enabled_on(*map(target_type, device_types))

    def get_autocast_dtype(device_type: str) -> torch.dtype:
        return dtype_on(target_type(device_type))

    def begin(autocast: torch.autocast, device_type: str, *arguments: Any, **options: Any) -> None:
        _begin_region(autocast, begin_on, target_type(device_type), *arguments, **options)

    with ExitStack() as replaced:
        replaced.enter_context(patch.object(torch, "is_autocast_enabled", is_autocast_enabled))
        replaced.enter_context(patch.object(torch, "get_autocast_dtype", get_autocast_dtype))
        replaced.enter_context(patch.object(torch.autocast, "__init__", begin))
        replaced.enter_context(_maybe_autocast_replaced(target_type))
        yield


def _begin_region(
    autocast: torch.autocast,
    begin_on: Callable[..., None],
    device: str,
    dtype: torch.dtype | None = None,
    enabled: bool = True,
    cache_enabled: bool | None = None,
) -> None:
    """Initialise a region of autocast, as torch's own initialiser `begin_on` would on a machine that has the device.

    torch leaves a region off, with a warning, where it finds no such device.
    """
    begin_on(autocast, device, dtype=dtype, enabled=False, cache_enabled=cache_enabled)
    autocast._enabled = enabled


_TRANSFORMERS_MODULE = "transformers.utils.generic"
_MAYBE_AUTOCAST = "maybe_autocast"


@contextmanager
def _maybe_autocast_replaced(target_type: Callable[[str], str]) -> Iterator[None]:
    """The context in which transformers' `maybe_autocast` goes to the device that `target_type` returns for "meta".

    Transformers 5 gives back a context that does nothing for "meta". Models have the function by its name in their own
    modules, so it is replaced in each of them.
    """
    maybe_autocast_on = getattr(sys.modules.get(_TRANSFORMERS_MODULE), _MAYBE_AUTOCAST, None)
    if maybe_autocast_on is None:  # no model of transformers, or one of an older version without it
        yield
        return

    def maybe_autocast(device_type: str, *arguments: Any, **options: Any) -> Any:
        return maybe_autocast_on(target_type(device_type), *arguments, **options)

    with ExitStack() as replaced:
        for module in _modules_with(_MAYBE_AUTOCAST, maybe_autocast_on):
            replaced.enter_context(patch.object(module, _MAYBE_AUTOCAST, maybe_autocast))
        yield


def _modules_with(name: str, function: object) -> list[ModuleType]:
    """Return the imported modules in which a name is this function; none of them imports anything for it."""
    return [module for module in tuple(sys.modules.values()) if getattr(module, "__dict__", {}).get(name) is function]


def _dispatch_key() -> torch._C.DispatchKey:
    """Return the autocast key that the kernels are at; torch's type stubs leave it out."""
    key: torch._C.DispatchKey = getattr(torch._C.DispatchKey, _KEY)
    return key


def _operation(name: str) -> Any:
    """Return an operation of aten by its name: "softmax.int" with its overload, or "mm" for the default one."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _argument_names(operation: Any) -> list[str]:
    """Return the names of an operation's arguments, in the order of its schema."""
    return [argument.name for argument in operation._schema.arguments]


def _is_castable(value: Any) -> bool:
    """Whether autocast casts it: `is_eligible` in autocast_mode.h leaves double out."""
    if not isinstance(value, Tensor):
        return False
    return value.device.type == "meta" and value.is_floating_point() and value.dtype is not torch.float64


def _is_weight(tensor: Tensor) -> bool:
    """Whether its cast is kept and shared, by the rule of `cached_cast` in autocast_mode.cpp."""
    is_trained_leaf = tensor.requires_grad and tensor.is_leaf
    return is_trained_leaf and tensor.dtype is torch.float32 and not tensor._is_view()


def _castable_tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    """Yield the tensors among values, and in lists among them, that autocast casts."""
    for value in values:
        if isinstance(value, list | tuple):
            yield from _castable_tensors(value)
        elif _is_castable(value):
            yield value
