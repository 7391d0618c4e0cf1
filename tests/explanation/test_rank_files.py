"""Files of ranks: what is in them comes out, and nothing in them can do harm."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vitscale.explanation import rank_files
from vitscale.explanation.rank_files import read_rank_files, trace_path
from vitscale.explanation.results_folder import ExplainFolder
from vitscale.hook import lines


@pytest.fixture
def folder(tmp_path: Path) -> ExplainFolder:
    made = ExplainFolder(tmp_path)
    made.ranks.mkdir()
    made.traces.mkdir()
    return made


def rank_line(rank: int = 0, world_size: int = 1, **changes: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "rank": rank, "world_size": world_size, "local_rank": rank, "local_world_size": world_size, "host": "n1",
        "pid": 7, "program": "train.py", "python": "3.11.2", "torch": "2.13.0", "device": "cpu", "threads": 1,
        "cpus": 2, "wall_ns": 5, "monotonic_ns": 3,
    }  # fmt: skip
    return {"type": "rank", **fields, **changes}


def step_line(number: int, **changes: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "number": number, "began_ns": number, "seconds": 0.5, "images": 8, "micro_steps": 1, "data_seconds": 0.1,
        "copy_seconds": None, "forward_seconds": 0.1, "backward_seconds": 0.1, "own_backward_seconds": None,
        "first_bucket_seconds": None, "optimizer_seconds": 0.1, "other_seconds": 0.1,
    }  # fmt: skip
    return {"type": "step", **fields, **changes}


def write(folder: ExplainFolder, name: str, *rows: dict[str, Any] | str) -> None:
    texts = [row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows]
    (folder.ranks / name).write_text("".join(texts))


def test_what_a_rank_wrote_comes_out(folder: ExplainFolder) -> None:
    (folder.traces / "rank-0.json.gz").write_bytes(b"trace")
    sampled = {"file": "train.py", "line": 12, "function": "load", "count": 3, "of_all": 4}
    write(
        folder,
        "n1-7.jsonl",
        rank_line(),
        {"type": "note", "text": "no such thing"},
        step_line(1),
        {"type": "samples", "part": "data", "rows": []},
        {"type": "break", "after_step": 1, "began_ns": 2, "seconds": 3.0, "kind": "evaluation"},
        step_line(2, seconds=0.25),
        {"type": "samples", "part": "data", "rows": [sampled]},
        {"type": "a kind of tomorrow"},
        {"type": "profile", "first_step": 3, "steps": 3, "trace": "rank-0.json.gz"},
        {"type": "end", "step": 2, "reason": "agreed step", "cleaned": ["2 loader workers"]},
    )
    files = read_rank_files(folder)
    (rank,) = files.ranks
    assert files.problems == ()
    assert [(step.number, step.seconds) for step in rank.steps] == [(1, 0.5), (2, 0.25)]
    assert [pause.kind for pause in rank.breaks] == ["evaluation"]
    assert rank.rows_of("data") == [lines.SampleRow("train.py", 12, "load", 3, 4)]
    assert rank.profile is not None
    assert trace_path(folder, rank.profile) == folder.traces / "rank-0.json.gz"
    assert rank.end is not None
    assert rank.end.reason == "agreed step"
    assert rank.notes == ("no such thing",)


def test_damaged_lines_are_counted_and_a_torn_last_one_is_not(folder: ExplainFolder) -> None:
    write(
        folder,
        "n1-7.jsonl",
        rank_line(),
        step_line(1),
        "\x00\x01 garbage\n",
        "[1, 2]\n",
        "[" * 100_000 + "\n",
        step_line(2, seconds=-1.0),
        step_line(3, seconds="0.5"),
        '{"type": "step", "number": 4, "seconds": NaN}\n',
        step_line(5),
        json.dumps(step_line(6))[:40],
    )
    files = read_rank_files(folder)
    assert [step.number for step in files.ranks[0].steps] == [1, 5]
    assert files.problems == ("'n1-7.jsonl': 6 lines cannot be read.",)


def test_ranks_come_in_order_and_missing_ones_are_counted(folder: ExplainFolder) -> None:
    write(folder, "b.jsonl", rank_line(2, 4), step_line(1))
    write(folder, "c.jsonl", rank_line(0, 4), step_line(1))
    files = read_rank_files(folder)
    assert [rank.rank.rank for rank in files.ranks] == [0, 2]
    assert files.missing_ranks == 2
    assert files.problems == ("2 ranks wrote nothing: the hook did not reach them, or they took no step.",)


def test_a_rank_that_was_started_again_counts_once(folder: ExplainFolder) -> None:
    write(folder, "a.jsonl", rank_line(pid=1), step_line(1))
    write(folder, "b.jsonl", rank_line(pid=2), step_line(1), step_line(2))
    files = read_rank_files(folder)
    assert [rank.rank.pid for rank in files.ranks] == [2]
    assert files.problems == ("1 file of ranks that were started again: the longest of each is used.",)


def test_a_file_of_nobody_is_named(folder: ExplainFolder) -> None:
    write(folder, "a.jsonl", step_line(1))
    write(folder, "b.jsonl", rank_line(rank=3, world_size=2), step_line(1))
    files = read_rank_files(folder)
    assert files.ranks == ()
    assert not files.has_steps
    assert files.problems == (
        "'a.jsonl' does not say which rank wrote it.",
        "'b.jsonl' does not say which rank wrote it.",
    )


def test_links_and_pipes_are_not_read(folder: ExplainFolder, tmp_path: Path) -> None:
    (tmp_path / "elsewhere.jsonl").write_text(json.dumps(rank_line()) + "\n")
    (folder.ranks / "a.jsonl").symlink_to(tmp_path / "elsewhere.jsonl")
    os.mkfifo(folder.ranks / "b.jsonl")
    assert read_rank_files(folder).ranks == ()


@pytest.mark.parametrize(
    "name", ["../secret.json", "/etc/passwd", "a/b.json", "", ".json", "..", "x.json\n", "missing.json", "link.json"]
)
def test_a_trace_outside_its_folder_is_refused(folder: ExplainFolder, tmp_path: Path, name: str) -> None:
    (tmp_path / "secret.json").write_text("{}")
    (folder.traces / "link.json").symlink_to(tmp_path / "secret.json")
    write(folder, "a.jsonl", rank_line(), {"type": "profile", "first_step": 3, "steps": 3, "trace": name})
    (rank,) = read_rank_files(folder).ranks
    assert rank.profile is None
    assert len(rank.notes) == 1


def test_of_a_long_file_the_beginning_and_the_end_are_read(
    folder: ExplainFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_files, "HEAD_BYTES", 1000)
    monkeypatch.setattr(rank_files, "TAIL_BYTES", 3000)
    write(folder, "a.jsonl", rank_line(), *map(step_line, range(1, 101)))
    (rank,) = read_rank_files(folder).ranks
    numbers = [step.number for step in rank.steps]
    first_gap = next(number for number in range(1, 101) if number not in numbers)
    last_gap = max(number for number in range(1, 101) if number not in numbers)
    assert 1 < first_gap < last_gap < 100
    assert numbers == [*range(1, first_gap), *range(last_gap + 1, 101)]


def test_a_file_between_the_two_sizes_is_read_whole(folder: ExplainFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_files, "HEAD_BYTES", 1000)
    write(folder, "a.jsonl", rank_line(), *map(step_line, range(1, 101)))
    assert [step.number for step in read_rank_files(folder).ranks[0].steps] == [*range(1, 101)]


def test_a_line_without_an_end_is_left_out(folder: ExplainFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_files, "LONGEST_LINE_BYTES", 1000)
    write(folder, "a.jsonl", rank_line(), "x" * 5000 + "\n", step_line(1), "y" * 5000)
    files = read_rank_files(folder)
    assert [step.number for step in files.ranks[0].steps] == [1]
    assert files.problems == ("'a.jsonl': 1 line cannot be read.",)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=300))
def test_any_bytes_are_read_without_an_error(folder: ExplainFolder, content: bytes) -> None:
    line = json.dumps(rank_line()).encode() + b"\n"
    (folder.ranks / "a.jsonl").write_bytes(line + content)
    assert len(read_rank_files(folder).ranks) == 1
