"""One rank's lines of a check: safe when `write` returns, and readable whatever else is in the file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from check_factory import compute, facts
from vitscale.store import RankLog
from vitscale.store.checks import STAGES, CheckedRank, ComputeLine, StageLine, read_checked_rank, read_checked_ranks
from vitscale.store.records import EndLine


def test_a_ranks_lines_come_back_and_are_there_when_write_returns(tmp_path: Path) -> None:
    log = RankLog(tmp_path, 3, at_once=True)
    log.write(facts(3, 4))
    log.write(compute(1.0, 2.0))
    log.write(StageLine(name="facts", ending="done", seconds=1.0))
    found = read_checked_rank(tmp_path / "rank-3.jsonl")
    assert found == CheckedRank(
        rank=3,
        facts=facts(3, 4),
        compute=compute(1.0, 2.0),
        stages=(StageLine(name="facts", ending="done", seconds=1.0),),
    )
    log.write(EndLine())
    assert read_checked_rank(tmp_path / "rank-3.jsonl").ended
    with pytest.raises(FileExistsError):
        RankLog(tmp_path, 3, at_once=True)


def test_broken_lines_are_named_and_the_others_kept(tmp_path: Path) -> None:
    good = compute(1.0).model_dump_json()
    huge = good.replace("[1.0]", "[1e400]")
    lines = [good, "{", good.replace("compute", "unheard-of"), huge, '{"kind":"end"}', good]
    (tmp_path / "rank-0.jsonl").write_text("\n".join(lines))
    found = read_checked_rank(tmp_path / "rank-0.jsonl")
    assert isinstance(found.compute, ComputeLine)
    assert found.ended
    assert [line.split(":")[1] for line in found.broken] == ["2", "3", "4", "6"]
    assert "cut off" in found.broken[-1]


def test_ranks_beyond_the_world_and_other_files_are_no_ranks_of_it(tmp_path: Path) -> None:
    for name in ("rank-0.jsonl", "rank-1.jsonl", "rank-7.jsonl", "rank-x.jsonl", "request.json"):
        (tmp_path / name).write_text("")
    assert [found.rank for found in read_checked_ranks(tmp_path, 2)] == [0, 1]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=12,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lines=st.lists(
        st.binary(max_size=40)
        | st.builds(
            lambda kind, more: json.dumps({"kind": kind} | (more if isinstance(more, dict) else {})).encode(),
            st.sampled_from(["stage", "facts", "collective", "compute", "disk", "end", *STAGES]),
            JSON,
        ),
        max_size=5,
    )
)
def test_any_lines_can_be_read(tmp_path: Path, lines: list[bytes]) -> None:
    (tmp_path / "rank-0.jsonl").write_bytes(b"\n".join(lines))
    read_checked_rank(tmp_path / "rank-0.jsonl")
