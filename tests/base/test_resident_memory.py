"""Resident memory: what is touched counts, and a fork counts what its parent had mapped."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from vitscale.base import resident_memory as module
from vitscale.base.resident_memory import ResidentMemory, resident_memory

KIB = 1024
STATUS = "Name:\tpython\nVmHWM:\t  523412 kB\nVmRSS:\t  410000 kB\nRssFile:\t  150000 kB\nThreads:\t7\n"


def test_what_is_touched_is_resident_and_stays_in_the_peak() -> None:
    before = resident_memory()
    assert before.now_bytes is not None
    assert before.peak_bytes is not None
    assert before.peak_bytes >= before.now_bytes
    touched = np.ones(before.peak_bytes - before.now_bytes + 64 * 2**20, dtype=np.uint8)
    after = resident_memory()
    assert after.now_bytes is not None
    assert after.peak_bytes is not None
    assert after.now_bytes - before.now_bytes >= 0.95 * touched.nbytes
    assert after.peak_bytes >= before.peak_bytes + 0.95 * 64 * 2**20
    del touched
    assert resident_memory().peak_bytes == pytest.approx(after.peak_bytes, rel=0.01)


@pytest.mark.parametrize(
    ("parent_file_kib", "untouched_kib"),
    [(0, 0), (150_000, 0), (149_999, 0), (216_000, 66_000)],
)
def test_pages_of_files_that_a_fork_has_not_touched_are_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parent_file_kib: int, untouched_kib: int
) -> None:
    (tmp_path / "status").write_text(STATUS)
    monkeypatch.setattr(module, "_file_bytes_of_parent", parent_file_kib * KIB)
    assert resident_memory(tmp_path / "status") == ResidentMemory(
        now_bytes=(410_000 + untouched_kib) * KIB,
        peak_bytes=(523_412 + untouched_kib) * KIB,
        file_bytes=(150_000 + untouched_kib) * KIB,
    )


@pytest.mark.parametrize("text", ["", "VmRSS:\n", "VmRSS: many kB\n", "VmRSS: 5 MB\nVmHWM: -1 kB\n", "junk"])
def test_a_kernel_that_does_not_tell_leaves_memory_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr(module, "_file_bytes_of_parent", 5 * KIB)
    (tmp_path / "status").write_text(text)
    assert resident_memory(tmp_path / "status") == ResidentMemory(None, None, None)
    assert resident_memory(tmp_path / "none") == ResidentMemory(None, None, None)


FORKS = """
import mmap, os, sys
from vitscale.base.resident_memory import count_file_pages_of_parent, resident_memory
with open(sys.argv[1], "rb") as file:
    mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    for page in range(0, len(mapped), mmap.PAGESIZE):
        mapped[page]
parent = resident_memory()
if os.fork() == 0:
    as_the_kernel_counts = resident_memory()
    count_file_pages_of_parent(parent.file_bytes)
    counted = resident_memory()
    print(parent.now_bytes, as_the_kernel_counts.now_bytes, counted.now_bytes, flush=True)
    os._exit(0)
os.wait()
"""


def test_a_real_fork_counts_as_its_parent_does(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(1 << 25))
    printed = subprocess.run(
        [sys.executable, "-c", FORKS, str(tmp_path / "file")],
        env=os.environ,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    parent, as_the_kernel_counts, counted = map(int, printed.split())
    assert as_the_kernel_counts < parent - (1 << 24), "a fork has the file's pages by itself: nothing to count"
    assert counted == pytest.approx(parent, rel=0.02)
