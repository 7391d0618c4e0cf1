"""FLOPs of a module that a user's own script trains, from a copy of it on meta tensors.

The copy is made when the script describes its model, before anything shards it, and shares no memory with it. What the
module takes is known from its first call; the copy is called with meta tensors of the same shapes.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from typing_extensions import override

from vitscale.models.tracing.flops import operation_flops


class _Call(NamedTuple):
    """The arguments of a call, with meta tensors in place of tensors."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def images(self) -> int | None:
        """Length of the first tensor's first dimension; None without a tensor of one or more dimensions."""
        for value in tree_leaves((self.args, self.kwargs)):
            if isinstance(value, Tensor) and value.ndim > 0:
                return len(value)
        return None


class UserModule:
    """A module whose FLOPs are counted once it has been called.

    Example:
        >>> module = UserModule(model)  # before it is wrapped or sharded
        >>> loss = model(images).sum()
        >>> module.training_flops_per_image()
        6912
    """

    def __init__(self, module: nn.Module) -> None:
        """Copy the module to meta, and watch its first call.

        Raises:
            Exception: it cannot be copied; of any type, from the module's own code.
        """
        self._copy = _copy_on_meta(module)
        self._call: _Call | None = None
        self._hook = module.register_forward_pre_hook(self._take_call, with_kwargs=True)

    def _take_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep the shapes of the module's first call, and watch it no further."""
        del module
        self._hook.remove()
        # This runs inside the user's own step, which must not end because arguments of some kind have no stand-in.
        with contextlib.suppress(Exception):
            self._call = _Call(_on_meta(args), _on_meta(kwargs))

    def training_flops_per_image(self) -> int | None:
        """Return the FLOPs of one image's forward and backward; None where the module was not called with images.

        Raises:
            Exception: it cannot run on meta tensors; of any type, from the module's own code.
        """
        call = self._call
        if call is None or not call.images:
            return None
        counter = _FlopsCounter()
        with torch.enable_grad(), counter:
            outputs = self._copy(*call.args, **call.kwargs)
            sums = [value.sum() for value in tree_leaves(_values(outputs)) if _is_trained(value)]
            if sums:
                torch.autograd.backward(sums)
        return counter.flops // call.images


def _copy_on_meta(module: nn.Module) -> nn.Module:
    """Return a copy of a module whose parameters and buffers are meta tensors; nothing is copied on the device."""
    stand_ins: dict[int, Any] = {}
    for parameter in module.parameters():
        meta = torch.empty_like(parameter, device="meta")
        stand_ins[id(parameter)] = nn.Parameter(meta, requires_grad=parameter.requires_grad)
    for buffer in module.buffers():
        stand_ins[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(module, stand_ins)


def _on_meta(arguments: Any) -> Any:
    """Return the arguments with a meta tensor of the same shape and dtype in place of each tensor."""
    return tree_map_only(Tensor, lambda tensor: torch.empty_like(tensor, device="meta"), arguments)


def _is_trained(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _values(outputs: Any) -> Any:
    """Return the values of an output that is a mapping, as transformers' are; any other output as it is."""
    return list(outputs.values()) if isinstance(outputs, Mapping) else outputs


class _FlopsCounter(TorchDispatchMode):
    """Adds up the FLOPs of all operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no types
        self.flops = 0

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        counted = operation_flops(func.overloadpacket.__name__, args, output)
        if counted is not None:
            self.flops += counted.flops
        return output
