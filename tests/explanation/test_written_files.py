"""Files that a command wrote in its folder are listed; others are not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from vitscale.explanation import written_files
from vitscale.explanation.written_files import WrittenFile, files_written_since

START_NS = 1_700_000_000 * 10**9


def make(path: Path, size: int, written_ns: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(size))
    os.utime(path, ns=(written_ns, written_ns))


def test_files_written_since_the_start_are_listed_the_largest_first(tmp_path: Path) -> None:
    make(tmp_path / "train.py", 10, START_NS - 1)
    make(tmp_path / "log.txt", 20, START_NS + 1)
    make(tmp_path / "checkpoints/last.pt", 3000, START_NS + 10**9)
    make(tmp_path / "results/ranks/a.jsonl", 50, START_NS + 1)
    make(tmp_path / "__pycache__/train.pyc", 50, START_NS + 1)
    (tmp_path / "elsewhere").symlink_to(tmp_path)
    written = files_written_since(tmp_path, START_NS, besides=tmp_path / "results")
    assert written.files == (WrittenFile("checkpoints/last.pt", 3000), WrittenFile("log.txt", 20))
    assert (written.number, written.is_complete) == (2, True)


def test_a_folder_with_too_many_files_is_searched_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(written_files, "_MOST_ENTRIES", 5)
    for number in range(8):
        make(tmp_path / f"{number}.txt", 1, START_NS + 1)
    written = files_written_since(tmp_path, START_NS, besides=tmp_path / "results")
    assert (written.number, written.is_complete) == (5, False)


def test_more_files_than_are_listed_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(written_files, "_MOST_LISTED", 2)
    for number in range(4):
        make(tmp_path / f"{number}.txt", number, START_NS + 1)
    written = files_written_since(tmp_path, START_NS, besides=tmp_path / "results")
    assert [file.path for file in written.files] == ["3.txt", "2.txt"]
    assert written.number == 4
