from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import BinaryIO

import pytest

from vitscale.base.forks import spread


@pytest.fixture
def three_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1, 2})


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 8])
def test_each_item_is_worked_on_once_and_its_result_stands_in_its_place(three_cores: None, count: int) -> None:
    done = spread(lambda item: (item * item, os.getpid()), range(count), fewest=2)
    assert [square for square, _ in done] == [item * item for item in range(count)]
    assert len({process for _, process in done}) == min(count, 3)


_A_THREAD_OF_PYTHON = "ends = threading.Event(); threading.Thread(target=ends.wait, daemon=True).start()"


@pytest.mark.parametrize(
    ("statement", "expected"), [("pass", False), (_A_THREAD_OF_PYTHON, True), ("import polars", True)]
)
def test_other_threads_are_python_s_and_those_that_a_library_starts(statement: str, expected: bool) -> None:
    code = (
        f"import threading; from vitscale.base.forks import has_other_threads; {statement}; print(has_other_threads())"
    )
    answer = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert answer.stdout == f"{expected}\n"


def test_below_the_fewest_nothing_is_forked(three_cores: None) -> None:
    assert set(spread(lambda _: os.getpid(), range(3), fewest=4)) == {os.getpid()}


def test_an_error_is_that_of_the_work_and_no_fork_is_left(three_cores: None, tmp_path: Path) -> None:
    def work(item: int) -> int:
        (tmp_path / str(os.getpid())).touch()
        if item == 1:  # of a fork
            raise ValueError("the second")
        return item

    with pytest.raises(ValueError, match="the second"):
        spread(work, range(6), fewest=2)
    forks = {int(path.name) for path in tmp_path.iterdir()} - {os.getpid()}
    assert forks
    for process in forks:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


def test_the_share_of_a_fork_that_dies_is_done_here(three_cores: None) -> None:
    here = os.getpid()

    def work(item: int) -> int:
        if item == 2 and os.getpid() != here:
            os._exit(3)
        return item

    assert spread(work, range(6), fewest=2) == list(range(6))


def test_the_share_of_a_fork_that_ends_within_its_answer_is_done_here(
    three_cores: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dump_a_part(value: object, file: BinaryIO, protocol: int) -> None:
        file.write(pickle.dumps(value, protocol)[:-5])

    monkeypatch.setattr(pickle, "dump", dump_a_part)
    assert spread(str, range(6), fewest=2) == list("012345")


def test_where_nothing_can_be_forked_all_is_done_here(three_cores: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", refuse)
    open_before = len(list(Path("/proc/self/fd").iterdir()))
    assert spread(lambda item: item * item, range(6), fewest=2) == [0, 1, 4, 9, 16, 25]
    assert len(list(Path("/proc/self/fd").iterdir())) == open_before
