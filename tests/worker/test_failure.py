from __future__ import annotations

import errno

import pytest
import torch

from vitscale.errors import RequestError
from vitscale.worker.rank_process import error_line


def too_much() -> RuntimeError:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60)
    return caught.value


@pytest.mark.parametrize(
    ("error", "out_of_memory"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (too_much(), True),
        # An illegal access is not a lack of memory, whatever others call it.
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_running_out_of_memory_is_told_apart(error: BaseException, out_of_memory: bool) -> None:
    assert error_line(error).out_of_memory is out_of_memory


def test_it_is_told_also_where_the_models_builder_wraps_it() -> None:
    wrapped = RequestError("model.factory 'mine:build' raised RuntimeError")
    wrapped.__cause__ = too_much()
    assert error_line(wrapped).out_of_memory
    unrelated = RequestError("no")
    unrelated.__context__ = too_much()
    assert not error_line(unrelated).out_of_memory, "what was being handled is not what it was raised from"


@pytest.mark.parametrize(("number", "full"), [(errno.ENOSPC, True), (errno.EDQUOT, True), (errno.EACCES, False)])
def test_a_full_disk_is_told_apart(number: int, full: bool) -> None:
    assert error_line(OSError(number, "no")).disk_full is full


def test_a_long_traceback_keeps_both_ends() -> None:
    line = error_line(ValueError("x" * 100_000))
    assert len(line.traceback) < 20_000
    assert line.traceback.startswith("ValueError: xxx")
    assert line.traceback.endswith("x\n")
