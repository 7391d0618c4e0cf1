"""Facts of the process and of the trained model, taken from torch's modules once the program has imported them."""

from __future__ import annotations

import os
import platform
import re
import socket
import sys
from collections import Counter
from time import monotonic_ns, time_ns
from typing import Any

from .exchange import find_ddp
from .lines import HookedModelLine, HookedRankLine

_MIB = 2**20


def host_name() -> str:
    """Name of the host, with only letters, digits, dots, dashes and underscores, for a file's name."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", socket.gethostname())[:100] or "host"


def rank_line(parameter: Any) -> HookedRankLine:
    """Facts of this process.

    Args:
        parameter: one that is trained; its device is the rank's.
    """
    torch = sys.modules["torch"]
    wall_ns = time_ns()
    return HookedRankLine(
        rank=_from_distributed("get_rank", "RANK", default=0),
        world_size=_from_distributed("get_world_size", "WORLD_SIZE", default=1),
        local_rank=_from_environment("LOCAL_RANK", default=0),
        local_world_size=_from_environment("LOCAL_WORLD_SIZE", default=1),
        host=host_name(),
        pid=os.getpid(),
        program=os.path.basename(sys.argv[0]) if sys.argv else "",
        python=platform.python_version(),
        torch=str(torch.__version__),
        device=_device_name(parameter),
        threads=torch.get_num_threads(),
        cpus=_usable_cores(),
        wall_ns=wall_ns,
        monotonic_ns=monotonic_ns(),
        core_mask=_core_mask(),
    )


def model_line(root: Any, *, compiled_in_place: bool, autocast: str | None) -> HookedModelLine:
    """Facts of the trained model.

    Args:
        root: outermost module that the program calls.
        compiled_in_place: whether `module.compile()` was called on it.
        autocast: dtype name, "none", or None where it could not be seen.
    """
    parameters = list(root.parameters())
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    elements_by_dtype: Counter[str] = Counter()
    for parameter in parameters:
        elements_by_dtype[str(parameter.dtype).replace("torch.", "")] += parameter.numel()
    ddp = find_ddp([root])
    return HookedModelLine(
        class_name=type(_unwrapped(root)).__name__,
        parameters=sum(parameter.numel() for parameter in parameters),
        trainable_parameters=sum(parameter.numel() for parameter in trainable),
        strategy=_strategy(root),
        dtype=elements_by_dtype.most_common(1)[0][0] if elements_by_dtype else None,
        compiled=compiled_in_place or _is_compiled(root),
        autocast=autocast,
        bucket_cap_mb=None if ddp is None else ddp.bucket_bytes_cap / _MIB,
    )


def autocast_dtype(device_type: str) -> str:
    """Autocast's dtype at this moment on this type of device, such as "bfloat16"; "none" without autocast."""
    torch = sys.modules["torch"]
    if hasattr(torch, "get_autocast_dtype"):
        is_on = torch.is_autocast_enabled(device_type)
        dtype = torch.get_autocast_dtype(device_type)
    elif device_type == "cpu":
        is_on = torch.is_autocast_cpu_enabled()
        dtype = torch.get_autocast_cpu_dtype()
    else:
        is_on = torch.is_autocast_enabled()
        dtype = torch.get_autocast_gpu_dtype()
    return str(dtype).replace("torch.", "") if is_on else "none"


def first_leaf(root: Any) -> Any:
    """A module of the root without children that has parameters; None if there is none."""
    for module in root.modules():
        if not list(module.children()) and next(module.parameters(recurse=False), None) is not None:
            return module
    return None


def _from_distributed(function: str, variable: str, *, default: int) -> int:
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(getattr(distributed, function)())
    return _from_environment(variable, default=default)


def _from_environment(variable: str, *, default: int) -> int:
    text = os.environ.get(variable, "")
    return int(text) if text.isdigit() else default


def _device_name(parameter: Any) -> str:
    device = parameter.device
    if device.type != "cuda":
        return str(device.type)
    return str(sys.modules["torch"].cuda.get_device_name(device))


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _core_mask() -> str | None:
    """Bits of the cores that the process may use; None where the system does not say."""
    if not hasattr(os, "sched_getaffinity"):
        return None
    return f"{sum(1 << core for core in os.sched_getaffinity(0)):x}"


def _unwrapped(root: Any) -> Any:
    """The module below DDP, FSDP, DeepSpeed's engine and torch.compile's module."""
    module = root
    for _ in range(6):
        inner = _wrapped_module(module)
        if inner is None:
            return module
        module = inner
    return module


def _wrapped_module(module: Any) -> Any:
    """The module that a wrapper of a known class holds; None for any other module."""
    attribute = _WRAPPERS.get(type(module).__name__)
    return None if attribute is None else getattr(module, attribute, None)


_WRAPPERS = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "FullyShardedDataParallel": "module",
    "DeepSpeedEngine": "module",
    "OptimizedModule": "_orig_mod",
}


def _is_compiled(root: Any) -> bool:
    return any(type(module).__name__ == "OptimizedModule" for module in root.modules())


def _strategy(root: Any) -> str:
    """How the model is spread over ranks, by the classes of its modules."""
    class_names: set[str] = set()
    for module in root.modules():
        class_names.update(base.__name__ for base in type(module).__mro__)
    if "DeepSpeedEngine" in class_names:
        return f"DeepSpeed ZeRO-{root.zero_optimization_stage()}"
    if "FullyShardedDataParallel" in class_names:
        return "FSDP"
    if "FSDPModule" in class_names:
        return "FSDP2"
    if "DistributedDataParallel" in class_names:
        return "DDP"
    return "none"
