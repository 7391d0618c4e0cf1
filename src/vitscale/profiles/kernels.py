"""Kinds of kernels by their names: what a GPU spent its time on."""

from __future__ import annotations

import re
from functools import cache

from vitscale.profiles.collectives import is_collective

COMMUNICATION, UNKNOWN = "communication", "unknown"
_KINDS = (
    ("copy", r"^__amd_rocclr_copy"),  # before ROCm 7.2 copies were kernels
    ("memset", r"^__amd_rocclr_fill"),
    ("attention", r"flash|fmha|mha_|attention|\battn|sdpa"),
    ("norm", r"(layer|batch|group|rms|instance)_?norm|bn_(fw|bw)|batchnorm|bnorm|rowwisemoments|gammabeta|welford"),
    ("optimizer", r"multi_tensor|adam|lamb_|fused_sgd|foreach"),
    (
        "matrix product",
        r"gemm|gemv|cublas|nvjet|cutlass|xmma|hmma|cijk_|tensile|wgrad|dgrad|conv(?!ert)|winograd|implicit|matmul"
        r"|splitk|(?<!sub)tensorop|scudnn|computeoffsets|triton_(mm|bmm|tem)|dot_kernel|naive_conv|igemm|miopensp3|fft|ck::kernel",
    ),
    ("softmax and loss", r"softmax|nll_?loss|cross_entropy|mse_loss"),
    ("pooling", r"pool"),
    ("reduction", r"reduce|reduction|triton_(red|per)|cumsum|scan"),
    (
        "elementwise",
        r"elementwise|vectorized|unrolled|fill|catarray|copy|transpose|permute|nchwtonhwc|nhwctonchw|nchw|tensor_?transform"
        r"|triton_poi|dropout|bernoulli|pad|upsample|interpolate|index|gather|scatter|embedding|where|arange|im2col|col2im"
        r"|batched_transpose|subtensorop|optensor|castkernel|convert|scalepackednd|triu_tril|randperm|distribution|sort",
    ),
    ("memset", r"memset|fillbuffer"),
)  # fmt: skip
"""The first that a name fits. A GEMM that ends in an activation is a matrix product, a softmax inside attention is
attention."""
_PATTERNS = tuple((kind, re.compile(pattern, re.IGNORECASE)) for kind, pattern in _KINDS)
_OTHER_COLLECTIVE = re.compile(r"cross_device_reduce|(one|two)_shot_all_reduce|multimem_|nvshmem", re.IGNORECASE)


@cache
def kind_of(kernel: str) -> str:
    """The kind of a kernel of this name; UNKNOWN of one that none fits."""
    if is_collective(kernel) or _OTHER_COLLECTIVE.search(kernel):
        return COMMUNICATION
    return next((kind for kind, pattern in _PATTERNS if pattern.search(kernel)), UNKNOWN)
