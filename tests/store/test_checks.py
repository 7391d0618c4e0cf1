"""Checks on disk: whole, strict, and never a traceback, whatever lies there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from check_factory import checked, record
from vitscale.errors import StoreError
from vitscale.store.checks import FORMAT, check_folder, latest, load_checks, read_check, write_check


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    whole = record(checked(0), checked(1, pace=31.0))
    path = write_check(tmp_path / "checks", whole)
    assert path == tmp_path / "checks" / f"{whole.id}.json"
    assert read_check(path) == whole


def test_the_newest_is_the_latest_and_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "checks"
    for second in (1, 3, 2):
        write_check(folder, record(id=f"20260102T03040{second}-abcdef", started_unix_seconds=1.7e9 + second))
    (folder / "20260102T030409-abcdef.json").write_text("{")
    (folder / "notes.json").write_text("{}")
    found = load_checks(folder)
    assert [one.started_unix_seconds - 1.7e9 for one in found.records] == [3, 2, 1]
    assert len(found.problems) == 1
    assert "20260102T030409" in found.problems[0]
    newest = latest(tmp_path)
    assert newest is not None
    assert newest.id == "20260102T030403-abcdef"


def test_the_latest_of_certain_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "own"))
    write_check(tmp_path / "checks", record(checked(0), checked(1), id="20260102T030401-abcdef"))
    write_check(tmp_path / "checks", record(checked(0), id="20260102T030402-abcdef", started_unix_seconds=1.8e9))
    found = latest(tmp_path, hosts=("host1", "host0"))
    assert found is not None
    assert found.id == "20260102T030401-abcdef"
    assert latest(tmp_path, hosts=("elsewhere",)) is None


def test_without_a_results_folder_checks_are_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert check_folder(None) == tmp_path / "vitscale" / "checks"
    write_check(check_folder(None), record())
    assert latest(None) is not None
    # A results folder without a check of its own falls back to them.
    assert latest(tmp_path / "results") is not None
    monkeypatch.setenv("XDG_DATA_HOME", "relative/is/ignored")
    assert check_folder(None) == Path.home() / ".local" / "share" / "vitscale" / "checks"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"format": FORMAT + 1}, "newer than this vitscale's"),
        ({"more": 1}, "more"),
        ({"format": FORMAT + 1, "trials": {}}, "is the record of a study, and of no check"),
        ({"wall_seconds": -1}, "wall_seconds"),
        ({"wall_seconds": 10**400}, "no number of vitscale's"),
        ({"ranks": [{"rank": 2**70}]}, "no number of vitscale's"),
        ({"ranks": [{"rank": -1}]}, "rank"),
    ],
)
def test_a_file_of_another_form_is_refused_by_name(tmp_path: Path, change: dict[str, Any], told: str) -> None:
    path = write_check(tmp_path, record())
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(StoreError) as refused:
        read_check(path)
    assert path.name in str(refused.value)
    assert told in str(refused.value)


@pytest.mark.parametrize(
    "content", [b"", b"null", b"[" * 100_000, b"\xff\xfe", b'{"format": NaN}', b'{"format": 1e999}', b"1" * 5000]
)
def test_no_content_gets_past_as_a_traceback(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "20260102T030405-abcdef.json"
    path.write_bytes(content)
    with pytest.raises(StoreError):
        read_check(path)


def test_a_folder_that_cannot_be_written_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be written"):
        write_check(tmp_path / "file" / "checks", record())
