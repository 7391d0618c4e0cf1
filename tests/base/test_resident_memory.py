"""Resident memory: what is touched counts, pages of files do not, and so a fork counts as its parent does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

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


def test_pages_of_files_are_left_out_of_what_the_kernel_writes(tmp_path: Path) -> None:
    (tmp_path / "status").write_text(STATUS)
    assert resident_memory(tmp_path / "status") == ResidentMemory(now_bytes=260_000 * KIB, peak_bytes=373_412 * KIB)


NOTHING_OF_FILES = "VmHWM: 523412 kB\nVmRSS: 410000 kB\n"


@pytest.mark.parametrize(
    "text", [NOTHING_OF_FILES, "", "VmRSS:\n", "VmRSS: many kB\n", "VmRSS: 5 MB\nVmHWM: -1 kB\n", "junk"]
)
def test_a_kernel_that_does_not_tell_leaves_memory_unknown(tmp_path: Path, text: str) -> None:
    (tmp_path / "status").write_text(text)
    assert resident_memory(tmp_path / "status") == ResidentMemory(None, None)
    assert resident_memory(tmp_path / "none") == ResidentMemory(None, None)


FORKS = """
import mmap, os, sys
from pathlib import Path
from vitscale.base.resident_memory import resident_memory
def as_the_kernel_counts(): return int(Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0]) * 1024
with open(sys.argv[1], "rb") as file:
    mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    for page in range(0, len(mapped), mmap.PAGESIZE):
        mapped[page]
print(as_the_kernel_counts(), resident_memory().now_bytes, flush=True)
if os.fork() == 0:
    print(as_the_kernel_counts(), resident_memory().now_bytes, flush=True)
    os._exit(0)
os.wait()
"""


def test_a_real_fork_counts_as_its_parent_does(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(1 << 25))
    printed = subprocess.run(
        [sys.executable, "-c", FORKS, str(tmp_path / "file")], capture_output=True, text=True, check=True
    ).stdout
    (parent_resident, parent), (fork_resident, fork) = (map(int, line.split()) for line in printed.splitlines())
    assert fork_resident < parent_resident - (1 << 24), "the kernel counts files in forks too: nothing to leave out"
    assert fork == pytest.approx(parent, abs=1 << 20)
