"""The results folder, the hook in it, and the only variable that changes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from vitscale import hook
from vitscale.errors import RequestError
from vitscale.explanation.results_folder import (
    check_nameable,
    environment_with_hook,
    make_results_folder,
    place_hook,
    write_plan,
)
from vitscale.hook.lines import HookPlan


def test_the_default_is_the_next_free_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "vitscale-explain-2").mkdir()
    assert [make_results_folder(None).root.name for _ in range(2)] == ["vitscale-explain-1", "vitscale-explain-3"]


def test_a_folder_that_is_new_or_empty_is_taken(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert make_results_folder(tmp_path / "empty").root == tmp_path / "empty"
    assert make_results_folder(tmp_path / "deep/new").ranks.is_dir()


def test_a_folder_with_something_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(RequestError, match="has something in it"):
        make_results_folder(tmp_path)
    with pytest.raises(RequestError, match="cannot be made"):
        make_results_folder(tmp_path / "mine.txt")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.txt"]


def test_a_path_that_pythonpath_would_split_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="separates paths in PYTHONPATH"):
        check_nameable(tmp_path / "a:b")
    check_nameable(tmp_path / "a b")


def test_the_hook_is_placed_whole(tmp_path: Path) -> None:
    folder = make_results_folder(tmp_path / "results")
    place_hook(folder)
    sources = {path.name: path.read_bytes() for path in Path(hook.__file__).parent.glob("*.py")}
    entry = {"sitecustomize.py"} & sources.keys()
    placed = {path.name: path.read_bytes() for path in folder.hook.rglob("*.py")}
    assert placed == sources
    assert {path.name for path in folder.hook.glob("*.py")} == entry
    assert json.loads(folder.settings.read_text())["results"] == str(tmp_path / "results")
    assert HookPlan.from_dict(json.loads(folder.plan.read_text())) == HookPlan()


def test_a_plan_replaces_the_last_one(tmp_path: Path) -> None:
    folder = make_results_folder(tmp_path / "results")
    place_hook(folder)
    earlier = folder.plan.stat()
    write_plan(folder, HookPlan(profile_from=7, stop_after=10))
    assert json.loads(folder.plan.read_text()) == {"profile_from": 7, "profile_steps": 3, "stop_after": 10}
    assert folder.plan.stat().st_ino != earlier.st_ino
    assert {path.name for path in folder.hook.iterdir() if path.suffix == ".draft"} == set()


@pytest.mark.parametrize(("before", "after"), [(None, "/r/hook"), ("", "/r/hook"), ("/a:/b", "/r/hook:/a:/b")])
def test_only_the_search_path_changes(before: str | None, after: str) -> None:
    environment = {"HOME": "/home/me"} if before is None else {"HOME": "/home/me", "PYTHONPATH": before}
    changed = environment_with_hook(environment, Path("/r/hook"))
    assert changed == {"HOME": "/home/me", "PYTHONPATH": after}
    assert os.pathsep == ":"
