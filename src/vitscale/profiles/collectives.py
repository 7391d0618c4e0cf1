"""The field's names of collectives and their dtypes, from those of backends, recorders and kernels."""

from __future__ import annotations

import re

from vitscale.store.records import UNKNOWN_OPERATION

_OPERATIONS = {
    "barrier": re.compile(r"(all_?reduce_)?barrier"),
    "all_reduce": re.compile(r"_?all_?reduce"),
    "all_gather": re.compile(r"_?all_?gather"),
    "reduce_scatter": re.compile(r"_?reduce_?scatter"),
    "broadcast": re.compile(r"_?broadcast"),
    "reduce": re.compile(r"_?reduce"),
    "all_to_all": re.compile(r"all_?to_?all"),
    "gather": re.compile(r"gather"),
    "scatter": re.compile(r"scatter"),
    "send": re.compile(r"send\b"),
    "recv": re.compile(r"recv\b"),
}
"""How backends' names of an operation begin, the first that fits: `nccl:_all_gather_base` is an all_gather."""
_DTYPES = {
    "float": "float32", "double": "float64", "half": "float16", "byte": "uint8", "char": "int8", "short": "int16",
    "int": "int32", "long": "int64",
}  # fmt: skip
"""The recorder's names where they are not torch's in capitals."""
_NCCL = re.compile(r"(void )?(nccl|rccl|msccl)", re.IGNORECASE)
"""How the kernels of NCCL and of AMD's RCCL begin; which operation they carry out, not all of them tell."""
_KERNEL_OPERATION = re.compile("AllReduce|AllGather|ReduceScatter|AllToAll|Broadcast|Reduce|SendRecv")


def operation(name: str) -> str:
    """The field's name for what a backend calls `name`; its own where it is none of them.

    Args:
        name: without the backend: `_all_gather_base`, `reduce_scatter_tensor_coalesced`, `send 0->1`.
    """
    return next((known for known, pattern in _OPERATIONS.items() if pattern.match(name)), name)


def dtype_name(name: str) -> str:
    """torch's name of a dtype: of "Float", "c10::BFloat16" and "float32" alike."""
    plain = name.lower().removeprefix("c10::")
    return _DTYPES.get(plain, plain)


def is_collective(kernel: str) -> bool:
    """Whether a kernel of this name is one of NCCL or RCCL."""
    return _NCCL.match(kernel) is not None


def operation_of_kernel(name: str) -> str:
    """ "ncclDevKernel_AllReduce_Sum_f32_RING_LL" is an "all_reduce", as gloo names it; a "Generic" one may be any."""
    match = _KERNEL_OPERATION.search(name)
    return re.sub(r"(?<!^)(?=[A-Z])", "_", match[0]).lower() if match else UNKNOWN_OPERATION
