"""Lets Megatron-Core, which asks for CUDA by name, compute on the CPU: for tests of what it computes.

As a program this is a rank of `curve_ranks` with that. The product redirects no library's device.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from engines import curve_ranks


class _OnCpu(TorchFunctionMode):
    """Makes tensors that are asked for on CUDA on the CPU, and calls what lies there CUDA's."""

    @override
    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if "cuda" in str(given.get("device")):
            given["device"] = "cpu"
        made = function(*args, **given)
        if function is torch.Tensor.type and isinstance(made, str):
            return made.replace("torch.", "torch.cuda.")  # an optimizer looks for "torch.cuda.FloatTensor"
        return made


def redirect() -> None:
    """For the rest of this process; before Megatron-Core is imported, which keeps what autocast's decorators make."""
    warnings.filterwarnings("ignore", message="Transformer Engine and Apex are not installed")
    vars(torch.cuda)["current_device"] = lambda: "cpu"
    for name in ("custom_fwd", "custom_bwd"):
        given = getattr(torch.amp, name)

        def on_cpu(function: Any = None, *, device_type: str, given: Any = given, **options: Any) -> Any:
            del device_type
            return functools.partial(given, device_type="cpu", **options)(function)

        vars(torch.amp)[name] = on_cpu
    _OnCpu().__enter__()  # type: ignore[no-untyped-call]  # it stays until the process ends


if __name__ == "__main__":
    redirect()
    curve_ranks.main(Path(sys.argv[1]))
