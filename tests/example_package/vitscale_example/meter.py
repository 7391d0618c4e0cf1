"""How often the kernel took a rank's processor away, and who had started the rank."""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping

import torch


class Switches:
    """Involuntary context switches of the whole process."""

    def begin(self, device: torch.device) -> None:
        self._before = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw

    def end(self) -> Mapping[str, float]:
        return {
            "switches": resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw - self._before,
            "niceness": os.getpriority(os.PRIO_PROCESS, 0),
            "noted": float(os.environ.get("STARTED_BY") == "vitscale-example"),
        }
