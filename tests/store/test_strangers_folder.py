"""A results folder may be anybody's: nothing is written through its links, and what is no file is never waited for."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from check_factory import record
from driving import tree, vitscale
from results_factory import one_curve, write_results
from study_factory import write_study
from vitscale.base.files import draft_of, file_lock, whole_file
from vitscale.errors import StoreError
from vitscale.preflight.imported import import_links
from vitscale.store import (
    free_reserves,
    load,
    locked,
    packs,
    reading,
    refuse_links,
    write_outcome,
    write_record,
    write_whole,
)
from vitscale.store.bundles import write_bundle
from vitscale.store.checks import read_check, write_check
from vitscale.store.packs import finish_removing
from vitscale.store.reading import pack_finished
from vitscale.store.results import Outcome

PRECIOUS = "of the user's own"
OUTCOME = Outcome(kind="failed", reason="because", started_unix_seconds=1.0, wall_seconds=2.0)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("written")
    write_results(one_curve({1: [0.4] * 4, 2: [0.2] * 4}, repeats=4), folder)
    return folder


@pytest.fixture
def results(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "results"))


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    """A file that links lead to."""
    file = tmp_path / "precious"
    file.write_text(PRECIOUS)
    return file


# --- links ---------------------------------------------------------------------------------------------------------


def test_a_lock_that_is_a_link_empties_nothing(tmp_path: Path, precious: Path) -> None:
    (tmp_path / "lock").symlink_to(precious)
    with pytest.raises(OSError, match="a lock must not be a link"), file_lock(tmp_path / "lock"):
        pass
    (tmp_path / "dangling").symlink_to(tmp_path / "made")
    with pytest.raises(OSError, match="a lock must not be a link"), file_lock(tmp_path / "dangling"):
        pass
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="a lock must be a file"), file_lock(tmp_path / "pipe"):
        pass
    assert precious.read_text() == PRECIOUS
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("name", ["lock", "study.json", "runs", "packs", "jobs", "checks"])
def test_what_writes_refuses_a_folder_with_links_in_it(results: Path, tmp_path: Path, name: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    if (results / name).exists():
        (results / name).rename(elsewhere)
    elif name == "lock":
        elsewhere.write_text(PRECIOUS)
    else:
        elsewhere.mkdir()
    (results / name).symlink_to(elsewhere)
    before = tree(tmp_path)
    with (
        pytest.raises(StoreError, match=f"'{name}' in .* is a link, and nothing is written through links"),
        locked(results),
    ):
        pass
    with pytest.raises(StoreError, match="is a link"):
        import_links([], "nccl-tests", results)
    assert tree(tmp_path) == before


def test_run_leaves_alone_what_the_lock_leads_to(tmp_path: Path, precious: Path) -> None:
    write_study(tmp_path)
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "lock").symlink_to(precious)
    said = vitscale("run", "study.toml", "-o", "results", cwd=tmp_path)
    assert (said.returncode, precious.read_text()) == (2, PRECIOUS)
    assert "'lock' in" in said.stderr
    assert "Traceback" not in said.stderr


def test_a_folder_that_is_itself_a_link_is_written_to(results: Path, tmp_path: Path) -> None:
    """Results often lie on another disk."""
    (tmp_path / "link").symlink_to(results)
    refuse_links(tmp_path / "link")
    with locked(tmp_path / "link"):
        assert (results / "lock").read_text() == str(os.getpid())


def test_below_a_run_that_is_a_link_nothing_is_removed_or_written(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packs, "PACK_RUNS", 5)
    monkeypatch.setattr(reading, "PACK_RUNS", 5)
    pack_finished(results)
    pack = packs.pack_files(results)[0]
    run = results / "runs" / next(iter(packs.read_outcomes(pack)))
    elsewhere = tmp_path / "elsewhere"
    run.rename(elsewhere)
    run.symlink_to(elsewhere)
    for name in ("outcome.json", "trial.json", "rank-0.jsonl", ".reserve"):
        (elsewhere / name).write_text(PRECIOUS)
    before = tree(elsewhere)
    pack.with_suffix(".removing").touch()
    finish_removing(results)
    free_reserves(run)
    with pytest.raises(OSError, match="a run's folder must not be a link"):
        write_outcome(run, OUTCOME)
    assert tree(elsewhere) == before


def test_a_record_takes_the_place_of_a_link_and_a_user_s_file_stays_one(tmp_path: Path, precious: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(precious)
    write_record(link, "a record")
    assert (link.is_symlink(), link.read_text(), precious.read_text()) == (False, "a record", PRECIOUS)
    link.unlink()
    link.symlink_to(precious)
    write_whole(link, "a page")
    assert (link.is_symlink(), precious.read_text()) == (True, "a page")


# --- drafts --------------------------------------------------------------------------------------------------------


def test_nobody_can_guess_a_draft_s_name(tmp_path: Path) -> None:
    path = tmp_path / ("é" * 120 + ".json")
    assert draft_of(path) != draft_of(path)
    write_whole(path, "a name as long as names may be")
    assert str(os.getpid()) not in draft_of(tmp_path / "page.html").name.split(".")


def test_a_link_in_the_place_of_a_draft_is_not_written_through(
    tmp_path: Path, precious: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guessed = tmp_path / "guessed"
    guessed.symlink_to(precious)
    monkeypatch.setattr("vitscale.base.files.draft_of", lambda _: guessed)
    with pytest.raises(FileExistsError, match=r"page\.html"), whole_file(tmp_path / "page.html") as file:
        file.write(b"over it")
    assert precious.read_text() == PRECIOUS
    assert guessed.is_symlink()


# --- what is no file -----------------------------------------------------------------------------------------------


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def too_large(path: Path) -> None:
    os.truncate(path, 5 << 30)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("change", [pipe, endless, too_large])
@pytest.mark.parametrize("name", ["trial.json", "outcome.json", "rank-0.jsonl"])
def test_a_run_without_readable_files_is_left_out_with_a_reason(
    results: Path, tmp_path: Path, name: str, change: Callable[[Path], None]
) -> None:
    run = min(path for path in (results / "runs").iterdir() if (path / "rank-0.jsonl").exists())
    whole = len(load(results).runs)
    change(run / name)
    loaded = load(results)
    assert len(loaded.runs) == whole - 1
    assert any("left out" in problem and f"{name}" in problem for problem in loaded.problems), loaded.problems
    if change is not too_large:
        write_bundle(results, tmp_path / "bundle.tar.gz", redact=True)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("change", [pipe, endless, too_large])
def test_a_study_that_is_no_file_is_one_message(results: Path, change: Callable[[Path], None]) -> None:
    change(results / "study.json")
    with pytest.raises(StoreError, match=r"study.json cannot be read: it is (a pipe or a device|larger than 256 MiB)"):
        load(results)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("change", [pipe, endless, too_large])
def test_a_check_that_is_no_file_is_one_message(tmp_path: Path, change: Callable[[Path], None]) -> None:
    path = write_check(tmp_path / "checks", record())
    assert json.loads(path.read_text())
    change(path)
    with pytest.raises(StoreError, match=r"cannot be read: it is (a pipe or a device|larger than 256 MiB)"):
        read_check(path)
