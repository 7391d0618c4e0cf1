"""Whether fp32 products may be computed in TF32, by torch's present settings (`fp32_precision`) or its earlier ones.

Once a program has used the present ones, torch's getters of the earlier ones raise RuntimeError (torch 2.9 and later).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


def forbid_tf32() -> None:
    """Makes torch multiply fp32 matrices, and convolve, in fp32, however a program has set it before.

    The present settings are touched only where a program's own still allow it: else libraries that ask for the earlier
    ones would be refused.
    """
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    for place in (torch.backends.cuda.matmul, *map(_of_cudnn, ("conv", "rnn"))):
        if getattr(place, "fp32_precision", "none") == "tf32":
            place.fp32_precision = "ieee"


def tf32_allowed(override: str | None) -> bool | None:
    """Whether matrix products or convolutions may use TF32; None where torch does not tell.

    Args:
        override: NVIDIA_TF32_OVERRIDE: "0" forbids it, any other number demands it, whatever a program sets.
    """
    if override and override.strip():
        return override.strip() != "0"
    cudnn = torch.backends.cudnn
    convolutions = _allowed([_of_cudnn("conv"), cudnn], lambda: cudnn.allow_tf32)
    told = (products_in_tf32(None), convolutions)
    return True if True in told else None if None in told else False


def products_in_tf32(override: str | None) -> bool | None:
    """The same of matrix products alone."""
    if override and override.strip():
        return override.strip() != "0"
    matmul = torch.backends.cuda.matmul
    return _allowed([matmul], lambda: matmul.allow_tf32)


def _of_cudnn(part: str) -> Any:
    return getattr(torch.backends.cudnn, part, None)


def _allowed(places: Sequence[Any], earlier: Callable[[], bool]) -> bool | None:
    """By the first of these places, or torch as a whole, that names a precision; else by the earlier setting."""
    named = (getattr(place, "fp32_precision", "none") for place in (*places, torch.backends))
    precision = next((name for name in named if name != "none"), None)
    if precision is not None:
        return str(precision) == "tf32"
    try:
        return earlier()
    except RuntimeError:
        return None
