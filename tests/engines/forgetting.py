"""What engines keep for the life of a process, taken back: tests build many of them in one."""

from __future__ import annotations

import os
import sys


def forget_engines() -> None:
    """Accelerate keeps what it is, and would refuse the next engine or mix it up with the last one.

    DeepSpeed keeps that autocast was ever on: from then on its stages 1 to 3 no longer ask in which dtype gradients are
    to travel. It also keeps the group that shares hpZ's second shard: every later stage 3 would gather in it.
    """
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        del os.environ[name]
    autocast = sys.modules.get("deepspeed.runtime.torch_autocast")
    if autocast is not None:
        vars(autocast)["TORCH_AUTOCAST_INITIALIZED"] = False
    groups = sys.modules.get("deepspeed.utils.groups")
    if groups is not None:
        vars(groups)["_ZERO_PARAM_INTRA_PARALLEL_GROUP"] = None
