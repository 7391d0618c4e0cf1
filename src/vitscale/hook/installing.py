"""Installs the hook in a module of torch or DeepSpeed that has just been imported."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

from .calls import time_backward, time_checkpoints
from .guarding import describe_error
from .hooking import Hook
from .loaders import time_fetches
from .optimizers import time_deepspeed_engine, time_optimizers

_INSTALLERS: dict[str, Callable[[ModuleType, Hook], None]] = {
    "torch.autograd": time_backward,
    "torch.optim.optimizer": time_optimizers,
    "torch.serialization": time_checkpoints,
    "torch.utils.data.dataloader": time_fetches,
    "deepspeed.runtime.engine": time_deepspeed_engine,
}
_hooks: list[Hook] = []
"""The process's hook, once there is one."""


def install(module: ModuleType, folder: str) -> None:
    """Install the hook in a module; what this release of it lacks becomes a note.

    Args:
        folder: of the hook, with its settings.
    """
    if not _hooks:
        _hooks.append(Hook(folder))
    hook = _hooks[0]
    try:
        _INSTALLERS[module.__name__](module, hook)
    except Exception as error:
        hook.switch.notes.append(f"no hook in {module.__name__}: {describe_error(error)}")
