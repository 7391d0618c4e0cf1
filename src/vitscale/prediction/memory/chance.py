"""The chance that a rank does not fit: its forecast, how far forecasts are off, and what they leave out."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import TYPE_CHECKING, NamedTuple, overload

from vitscale.trial.trial import Device

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.float64]


class _LeftOut(NamedTuple):
    """What a device takes beyond tensors; lognormal, so that its logarithm has a mean and a standard deviation."""

    factor: float
    """Median of what is reserved over what tensors take."""
    factor_spread: float
    fixed_bytes: float
    """Median of what is there whatever the tensors."""
    fixed_spread: float


FORECAST_SPREAD = 0.02
"""Standard deviation of a forecast's logarithm: more than twice what `benchmarks/memory.py` finds, found on small
models and one version of each library."""

LEFT_OUT: dict[Device, _LeftOut] = {
    # 90 % of factors between 1.02 and 1.15: blocks of the caching allocator that no tensor fits into. 1.11 is reported
    # in pytorch/pytorch issue 40989; where memory is short it gives back what is wholly free before it gives up.
    # 90 % of the rest between 0.5 and 1.6 GB: a context with kernels loaded as they are used (0.29 GB of it at start:
    # pytorch/pytorch pull request 86509), NCCL's buffers, linear in channels (NVIDIA/nccl issue 986; 1.06 GB with the
    # context on 8 H100: issue 1685), cuBLAS workspaces of 8 to 32 MiB (NVIDIA's cublasSetWorkspace).
    "cuda": _LeftOut(1.083, 0.036, 0.9e9, 0.35),
    # malloc hands large tensors out page by page and back when they are freed. 0.35 to 0.75 GB: Python and the
    # libraries that a rank has loaded, less where ranks of a host share their pages; gloo's buffers.
    "cpu": _LeftOut(1.02, 0.015, 0.5e9, 0.23),
}


def _normal_below(values: Array) -> Array:
    import numpy as np

    below: Array = np.frompyfunc(lambda value: 0.5 * math.erfc(-value / math.sqrt(2)), 1, 1)(values).astype(float)
    return below


_NODES = tuple(NormalDist().inv_cdf((i + 0.5) / 15) for i in range(15))
"""Standard normal at the middles of 15 equal chances."""


@overload
def oom_chance(forecast_bytes: float, capacity_bytes: float, device: Device) -> float: ...
@overload
def oom_chance(forecast_bytes: Array, capacity_bytes: float, device: Device) -> Array: ...
def oom_chance(forecast_bytes: float | Array, capacity_bytes: float, device: Device) -> float | Array:
    """That tensors of `forecast_bytes` and all that is beside them take more than `capacity_bytes`; in [0, 1].

    What is needed is `forecast x F + R`: F, lognormal, how far forecasts are off times what is reserved over what is
    used; R, lognormal, what is there whatever the tensors (`LEFT_OUT`). Rises with the forecast and falls with the
    capacity. NaN, where a forecast is unknown, stays NaN.

    Args:
        forecast_bytes: peak of a rank's tensors, at least 0.
        capacity_bytes: of the device that the rank has for itself; on a CPU its share of the host's memory.
        device: where it runs.
    """
    import numpy as np

    left_out = LEFT_OUT[device]
    spread = math.hypot(FORECAST_SPREAD, left_out.factor_spread)
    rest = left_out.fixed_bytes * np.exp(left_out.fixed_spread * np.array(_NODES))
    room = capacity_bytes - rest
    needed = np.asarray(forecast_bytes, dtype=float)[..., None] * left_out.factor
    with np.errstate(divide="ignore"):
        # No tensors need nothing: the logarithm is minus infinity, and the chance is that the rest does not fit.
        above = (np.log(needed) - np.log(np.maximum(room, 1.0))) / spread
    chance: Array = np.where(room > 0, _normal_below(above), np.where(np.isnan(needed), np.nan, 1.0)).mean(axis=-1)
    return chance if isinstance(forecast_bytes, np.ndarray) else float(chance)
