"""Profiles a few steps with torch's profiler and leaves the trace in the results folder."""

from __future__ import annotations

import gzip
import os
import shutil
import sys
from typing import Any

from .lines import HookedProfileLine


class StepProfiler:
    """A profile of consecutive steps; each is a `ProfilerStep` range of the trace."""

    def __init__(self, folder: str, name: str, *, record_shapes: bool) -> None:
        """Prepare a profile.

        Args:
            folder: of the traces.
            name: of the trace, without its ending.
        """
        self._folder = folder
        self._name = name
        self._record_shapes = record_shapes
        self._profile: Any = None
        self._first_step = 0
        self._remaining = 0
        self._steps = 0
        self.was_started = False

    @property
    def is_running(self) -> bool:
        """Whether steps are being profiled."""
        return self._profile is not None

    def start(self, first_step: int, steps: int) -> str | None:
        """Profile these steps from now on; a reason if that is impossible."""
        self.was_started = True
        profiler = sys.modules.get("torch.profiler")
        if profiler is None:
            return "no step is profiled: torch.profiler is not loaded"
        if sys.modules["torch"].autograd._profiler_enabled():
            return "no step is profiled: the program profiles itself"
        activities = [profiler.ProfilerActivity.CPU]
        if sys.modules["torch"].cuda.is_initialized():
            activities.append(profiler.ProfilerActivity.CUDA)
        record = profiler.ProfilerAction.RECORD
        profile = profiler.profile(
            activities=activities,
            schedule=lambda _step: record,  # without a schedule the trace has no ranges of steps
            record_shapes=self._record_shapes,
        )
        profile.start()
        self._profile = profile
        self._first_step = first_step
        self._remaining = steps
        self._steps = 0
        return None

    def end_step(self) -> HookedProfileLine | None:
        """End one profiled step; the trace's line if it was the last one."""
        self._steps += 1
        self._remaining -= 1
        if self._remaining <= 0:
            return self.finish()
        self._profile.step()
        return None

    def finish(self) -> HookedProfileLine | None:
        """End the profile and write the trace; None if nothing was profiled."""
        profile = self._profile
        self._profile = None
        if profile is None:
            return None
        profile.stop()
        if not self._steps:
            return None
        json_path = os.path.join(self._folder, self._name + ".json")
        profile.export_chrome_trace(json_path)
        with open(json_path, "rb") as trace, gzip.open(json_path + ".gz", "wb", compresslevel=3) as compressed:
            shutil.copyfileobj(trace, compressed)
        os.unlink(json_path)
        return HookedProfileLine(first_step=self._first_step, steps=self._steps, trace=self._name + ".json.gz")
