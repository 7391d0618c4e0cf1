"""Kinds of kernels and collectives by name: what a GPU spent its time on, in the field's words."""

from __future__ import annotations

import re
from functools import cache

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
"""Beginnings of backends' names for an operation; the first that fits counts: `nccl:_all_gather_base` is all_gather."""
_DTYPES = {
    "float": "float32", "double": "float64", "half": "float16", "byte": "uint8", "char": "int8", "short": "int16",
    "int": "int32", "long": "int64",
}  # fmt: skip
"""The recorder's names of dtypes that are not torch's in capitals."""
_NCCL = re.compile(r"(void )?(nccl|rccl|msccl)", re.IGNORECASE)
"""How names of NCCL's and AMD's RCCL's kernels begin; not all of them tell which operation they carry out."""
_OTHER_COLLECTIVE = re.compile(
    r"(?!triton_(poi|red|per|for)_).*?"  # torch.compile names its own after all that they are made of
    r"(cross_device_reduce|(one|two)_?shot_?all_?reduce|hybrid_?cube_?mesh|all_?reduce_(proto|fusion)"
    r"|multimem_|nvshmem|userbuffers_|\b(one|h)ccl|\bccl(::|_)\w*(all_?(reduce|gather|to)|reduce_?scatter|broadcast))",
    re.IGNORECASE | re.DOTALL,
)
"""Kernels of torch's symmetric memory and its exchange within a host, vLLM, TensorRT-LLM, FlashInfer, QuickReduce,
Transformer Engine, oneCCL and HCCL."""
_KERNEL_OPERATION = re.compile("AllReduce|AllGather|ReduceScatter|AllToAll|Broadcast|Reduce|SendRecv")


def operation(name: str) -> str:
    """The field's name for what a backend calls `name`; `name` itself where no known one fits.

    Args:
        name: without the backend: `_all_gather_base`, `reduce_scatter_tensor_coalesced`, `send 0->1`.
    """
    for field_name, pattern in _OPERATIONS.items():
        if pattern.match(name):
            return field_name
    return name


def dtype_name(name: str) -> str:
    """torch's name of a dtype, from "Float", "c10::BFloat16" or "float32"."""
    plain = name.lower().removeprefix("c10::")
    return _DTYPES.get(plain, plain)


@cache
def is_collective(kernel: str) -> bool:
    """Whether a kernel of this name is one of NCCL, RCCL or another library of collectives."""
    return (_NCCL.match(kernel) or _OTHER_COLLECTIVE.match(kernel)) is not None


def operation_of_kernel(name: str) -> str:
    """The operation of a collective's kernel, by gloo's name for it.

    Example: "ncclDevKernel_AllReduce_Sum_f32_RING_LL" gives "all_reduce". A "Generic" kernel may be any.
    """
    match = _KERNEL_OPERATION.search(name)
    if match is None:
        return UNKNOWN_OPERATION
    return re.sub(r"(?<!^)(?=[A-Z])", "_", match[0]).lower()


COMMUNICATION = "communication"
COPY = "copy"
UNKNOWN = "unknown"
_NO_PRODUCT = r"^(?!triton_(?:poi|red|per|for)_).*"
"""torch.compile's names tell all that a kernel is made of, but one of these kinds holds no product or attention."""
_KINDS = (
    (COPY, r"^__amd_rocclr_copy"),  # before ROCm 7.2 copies were kernels
    ("memset", r"^__amd_rocclr_fill"),
    (
        "attention",
        _NO_PRODUCT + r"(flash(?!infer)|flashinfer\W.*(prefill|decode)|fmha|mha_|attention|(?<![a-z])attn|sdpa)",
    ),
    (
        "norm",
        r"(layer|batch|group|rms|instance)_?norm|bn_(fw|bw)|bnorm|normalization|\bln_(fwd|bwd)|rowwisemoments"
        r"|gammabeta|welford",
    ),
    ("optimizer", r"multi_tensor|adam|lamb_|fused_sgd|foreach"),
    (
        "matrix product",
        _NO_PRODUCT
        + r"(gemm|gemv|cublas|nvjet|cutlass|xmma|hmma|cijk_|tensile|wgrad|dgrad|conv(?!ert)|winograd|implicit|matmul"
        r"|splitk|fprop|(?<!sub)tensorop|scudnn|computeoffsets|triton_(mm|bmm|tem)|dot_kernel|naive_conv|igemm|miopensp3|fft|ck::kernel)",
    ),
    ("softmax and loss", r"softmax|nll_?loss|cross_entropy|mse_loss"),
    ("pooling", r"pool"),
    ("reduction", r"reduce|reduction|triton_(red|per)|cumsum|scan"),
    (
        "elementwise",
        r"elementwise|vectorized|unrolled|fill|catarray|copy|transpose|permute|nchwtonhwc|nhwctonchw|nchw|tensor_?transform"
        r"|triton_poi|dropout|bernoulli|pad|upsample|interpolate|index|gather|scatter|embedding|where|arange|im2col|col2im"
        r"|batched_transpose|subtensorop|optensor|castkernel|convert|scalepackednd|triu_tril|randperm|distribution|sort"
        r"|chunk_cat|rope_|rotary|silu|gelu|swiglu|relu|gated_act|cast_fp8|compute_grad_weight|partials_per_segment",
    ),
    ("memset", r"memset|fillbuffer"),
)  # fmt: skip
"""Patterns of kernel names and their kinds; the first that fits counts. A GEMM that ends in an activation is a matrix
product, a softmax inside attention is attention."""
_PATTERNS = tuple((kind, re.compile(pattern, re.IGNORECASE)) for kind, pattern in _KINDS)


@cache
def kind_of(kernel: str) -> str:
    """The kind of a kernel of this name; UNKNOWN where no pattern fits."""
    if is_collective(kernel):
        return COMMUNICATION
    for kind, pattern in _PATTERNS:
        if pattern.search(kernel):
            return kind
    return UNKNOWN
