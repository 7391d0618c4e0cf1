from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from vitscale.errors import RequestError
from vitscale.store import RankLog
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
        (RuntimeError("unable to mmap 8 bytes from file </torch_1_2>: Cannot allocate memory (12)"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate`"), True),
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
def test_a_full_disk_is_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, full: bool) -> None:
    """By the rank's own log, or because there is no room beside it; a script's other disks are not meant."""
    log = RankLog(tmp_path, 0)
    error = OSError(number, "no")
    assert not error_line(error, log).disk_full
    free = os.statvfs_result((4096, 4096, 1000, 900, 16, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _: free)
    assert error_line(error, log).disk_full is full
    monkeypatch.undo()
    log.failure = error
    assert error_line(error, log).disk_full is full
    log.end_with(error_line(error, log))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_what_was_being_written_tells_the_disk_that_is_full(tmp_path: Path, number: int) -> None:
    """A checkpoint's draft is gone when its error is recorded, and there is room again; no count has a quota."""
    log = RankLog(tmp_path, 0)
    for path, full in ((tmp_path / "checkpoint" / "draft" / "weights.safetensors", True), (Path("/dev/full"), False)):
        assert error_line(OSError(number, "no", str(path)), log).disk_full is full
    log.close()


def test_a_full_disk_elsewhere_is_a_failure_like_any_other(tmp_path: Path) -> None:
    log = RankLog(tmp_path, 0)
    with pytest.raises(OSError, match="No space left") as caught:
        Path("/dev/full").write_text("x")
    assert not error_line(caught.value, log).disk_full
    log.close()


def test_a_long_traceback_keeps_both_ends() -> None:
    line = error_line(ValueError("x" * 100_000))
    assert len(line.traceback) < 20_000
    assert line.traceback.startswith("ValueError: xxx")
    assert line.traceback.endswith("x\n")
