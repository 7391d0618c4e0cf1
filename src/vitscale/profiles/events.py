"""The events of a profile as plain values, whoever recorded them."""

from __future__ import annotations

from typing import Literal, NamedTuple

Kind = Literal["operator", "annotation", "collective", "kernel", "copy", "launch"]
KIND_OF_ACTIVITY: dict[str, Kind] = {
    "cpu_op": "operator",
    "user_annotation": "annotation",
    "kernel": "kernel",
    "gpu_memcpy": "copy",
    "gpu_memset": "kernel",
    "cuda_runtime": "launch",
    "cuda_driver": "launch",
}
"""By Kineto's name of an activity, which in a trace file is the category."""
GLOO = "gloo:"
COMMUNICATION_CALL = "record_param_comms"
"""torch's own name for a call of NCCL: what it launches is linked to it."""


class Event(NamedTuple):
    """One interval of the profile, in nanoseconds of the profile's clock."""

    kind: Kind
    name: str
    start_ns: int
    end_ns: int
    lane: int
    """The thread of what ran on the host, the stream of what ran on the device."""
    correlation: int = 0
    """Joins a kernel or copy to the call that launched it."""
    communicator: str = ""
    """Of an NCCL kernel, with `operation`, in c10d's names; empty where the profiler does not link it to its call."""
    operation: str = ""
