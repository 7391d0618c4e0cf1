"""What torch is told of TF32, in its present words and its earlier ones, which do not go together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from vitscale.probes.matmul import arithmetic, forbid_tf32, products_in_tf32, tf32_allowed

BACKENDS: Any = torch.backends  # torch has no types for some of it
CUDA, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.fixture(autouse=True)
def as_by_default() -> Iterator[None]:
    _reset()
    yield
    _reset()


def _reset() -> None:
    """Makes all settings what they are in a new process, in which earlier words may be asked for."""
    torch.set_float32_matmul_precision("highest")
    BACKENDS.cudnn.allow_tf32 = True
    for backend, precision in ((BACKENDS, "none"), (BACKENDS.cuda.matmul, "none"), (BACKENDS.cudnn.conv, "tf32"),
                               (BACKENDS.cudnn.rnn, "tf32")):  # fmt: skip
        backend.fp32_precision = precision
    assert (BACKENDS.cudnn.allow_tf32, BACKENDS.cuda.matmul.allow_tf32) == (True, False)


def present(place: object, value: str) -> Callable[[], None]:
    return lambda: setattr(place, "fp32_precision", value)


SETTINGS = [
    (present(BACKENDS, "tf32"), True),
    (present(BACKENDS.cuda.matmul, "tf32"), True),
    (lambda: torch.set_float32_matmul_precision("high"), True),
    (present(BACKENDS.cuda.matmul, "ieee"), False),
    (present(BACKENDS.cudnn.conv, "ieee"), False),
]


@pytest.mark.parametrize(("program", "products"), SETTINGS)
def test_whichever_words_a_program_uses_it_is_known_and_can_be_forbidden(
    program: Callable[[], None], products: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's getters of the earlier settings raise after some of the present ones."""
    monkeypatch.delenv("NVIDIA_TF32_OVERRIDE", raising=False)
    program()
    assert products_in_tf32(None) is products
    assert arithmetic(CUDA, "fp32") == ("tf32" if products else "fp32")
    assert arithmetic(CPU, "fp32") == "fp32"
    assert arithmetic(CUDA, "bf16-params") == "bf16"
    forbid_tf32()
    assert tf32_allowed(None) is False


def test_convolutions_count_too() -> None:
    forbid_tf32()
    BACKENDS.cudnn.conv.fp32_precision = "tf32"
    assert (products_in_tf32(None), tf32_allowed(None)) == (False, True)


def test_who_asks_in_earlier_words_is_answered_after_an_engine_was_built() -> None:
    """As libraries do, torch's compiler among them."""
    BACKENDS.cudnn.allow_tf32 = True
    forbid_tf32()
    assert not BACKENDS.cuda.matmul.allow_tf32
    assert not BACKENDS.cudnn.allow_tf32


@pytest.mark.parametrize(("override", "allowed"), [("0", False), ("1", True), ("", False), (" ", False), (None, False)])
def test_nvidias_variable_has_the_last_word(override: str | None, allowed: bool) -> None:
    forbid_tf32()
    assert tf32_allowed(override) is allowed
