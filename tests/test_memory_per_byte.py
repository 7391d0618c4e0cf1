"""Memory grows with a file by a small multiple of its bytes, whatever stands in it: allocations are counted."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from vitscale.importers import train_logs
from vitscale.importers.contents import ImportOptions
from vitscale.store import lines
from vitscale.store.lines import StepLine, Steps
from vitscale.store.reading import read_rank

STEP = '{"kind":"step","step":%d,"epoch":0,"seconds":0.1,"images":8,"loss":null,"warmup":false,"window":"light"}\n'
TIMM = (
    "Train: %d [%4d/1000 ( 10%%)]  Loss: 6.9 (6.9)  Time: 0.1%02ds, 1234.56/s  (0.1s, 1234.56/s)  "
    "LR: 1e-05  Data: 0.01 (0.01)\n"
)


def peak_bytes(work: Callable[[], object]) -> int:
    """Most bytes that were allocated at a time."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def bytes_per_byte(path: Path, text_of: Callable[[int], str], few: int, read: Callable[[Path], object]) -> float:
    """How much more memory each further byte of a file takes, from `few` lines of it and three times as many."""
    measured = []
    for count in (few, few, 3 * few):  # the first fills caches
        path.write_text(text_of(count))
        measured.append((path.stat().st_size, peak_bytes(lambda: read(path))))
    (_, (size, peak), (larger_size, larger_peak)) = measured
    return (larger_peak - peak) / (larger_size - size)


@pytest.mark.parametrize(
    ("line", "most"),
    [("\n", 1), ("x\n", 10), ('{"kind":"step"\n', 10), (STEP % 7, 10)],
    ids=["empty", "x", "cut", "step"],
)
def test_a_rank_s_lines(tmp_path: Path, line: str, most: float) -> None:
    """4,000,000 newlines took 467 MB, in a bundle of 11 kB."""
    ratio = bytes_per_byte(tmp_path / "rank-0.jsonl", lambda count: line * count, 10_000, read_rank)
    assert ratio < most


def test_a_training_log(tmp_path: Path) -> None:
    """1,400,000 steps, 200 MB, took 2.1 GB."""

    def text(count: int) -> str:
        return "".join(TIMM % (n // 1000, n % 1000, n % 97) for n in range(count))

    def read(path: Path) -> object:
        return train_logs.read([path], ImportOptions(gpus=8, micro_batch=32))

    assert bytes_per_byte(tmp_path / "log.txt", text, 3_000, read) < 5


def test_broken_lines_beyond_a_thousand_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "run" / "rank-0.jsonl"
    path.parent.mkdir()
    path.write_text("\n" + "x\n" * 1002 + STEP % 1)
    record = read_rank(path)
    assert [step.step for step in record.steps] == [1]
    assert len(record.broken) == 1001
    assert record.broken[0].startswith("run/rank-0.jsonl:2: ")
    assert record.broken[-1] == "run/rank-0.jsonl: 2 more broken lines"


def test_steps_that_are_made_one_by_one_are_the_same_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "_CHUNK_STEPS", 3)
    for count in (0, 1, 3, 7):
        made = [
            StepLine(step=n, epoch=0, seconds=0.5, images=n, loss=None if n % 2 else 1.0, warmup=n == 0, window="light")
            for n in range(count)
        ]
        assert Steps.streamed(iter(made)) == Steps.of(made)
