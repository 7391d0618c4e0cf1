"""Several runs under way when something ends a study: what becomes of the others. Runs here are functions of a test."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from runner.test_lineup import study
from vitscale.errors import StoreError
from vitscale.runner import Plan, Report, RunOptions, driver
from vitscale.runner import run as drive
from vitscale.runner.driver import DiskFullError
from vitscale.runner.one_run import RunContext, unstarted
from vitscale.runner.todo import GpuHours
from vitscale.store.reading import RunKey
from vitscale.store.results import Outcome

Body = Callable[[RunContext, RunKey, int], Outcome]
"""Does one run: the context, which run it is, and how many were begun before."""


@pytest.fixture
def drives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Report]:
    """Drives a study whose runs do what a function says; it takes what `study` of test_lineup takes."""
    monkeypatch.setenv("VITSCALE_CACHE", str(tmp_path / "cache"))

    def with_runs(body: Body, plan: Plan) -> Report:
        begun = iter(range(10_000))

        def run_task(context: RunContext, _where: object, task: RunKey, *_: object) -> Outcome:
            return body(context, task, next(begun))

        monkeypatch.setattr(driver, "run_task", run_task)
        return drive(plan, tmp_path / "results", RunOptions(), Console(file=io.StringIO(), width=200))

    return with_runs


def completed(hours: float = 0.001) -> Outcome:
    return unstarted("completed", "").model_copy(update={"wall_seconds": 3600 * hours})


def test_on_a_full_disk_runs_under_way_are_let_end_and_none_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drives: Callable[..., Report]
) -> None:
    told, ended = threading.Event(), list[RunKey]()
    monkeypatch.setattr(GpuHours, "add", lambda *_: told.set())

    def body(_: RunContext, task: RunKey, before: int) -> Outcome:
        if before == 0:
            return unstarted("failed", "disk full", external=True)
        assert told.wait(60)  # until the driver knows
        ended.append(task)
        return completed()

    with pytest.raises(DiskFullError, match="disk full"):
        drives(body, study(tmp_path, 8, [1], hosts=3, repeats=1))
    assert len(ended) == 2


def test_an_error_in_one_run_ends_the_others_in_order(tmp_path: Path, drives: Callable[..., Report]) -> None:
    under_way, ended = threading.Barrier(3), list[RunKey]()

    def body(context: RunContext, task: RunKey, before: int) -> Outcome:
        under_way.wait(60)
        if before == 0:
            raise PermissionError(13, "Permission denied")
        assert context.interrupted.wait(60)
        ended.append(task)
        raise KeyboardInterrupt

    with pytest.raises(StoreError, match="Permission denied"):
        drives(body, study(tmp_path, 8, [1], hosts=3, repeats=1))
    assert len(ended) == 2


def test_the_limit_of_gpu_hours_counts_what_is_under_way(tmp_path: Path, drives: Callable[..., Report]) -> None:
    plan = study(tmp_path, 2, [1], hosts=2, repeats=3, max_gpu_hours=4.5)
    report = drives(lambda *_: completed(hours=1.0), plan)
    # Two runs at a time of an hour each: after four there is half an hour left, not enough for one.
    assert report.done_now == 4
    assert report.ended.startswith("measure.max_gpu_hours = 4.5: 4 GPU-hours are spent, and the next run")


def test_no_run_begins_once_the_lock_was_deleted(tmp_path: Path, drives: Callable[..., Report]) -> None:
    """Another driver may have made a new one, and do the same runs."""
    lock, begun = tmp_path / "results" / "lock", list[int]()

    def body(_: RunContext, task: RunKey, before: int) -> Outcome:
        begun.append(before)
        kept = lock.rename(lock.with_name("kept"))
        lock.write_bytes(kept.read_bytes())
        return completed()

    with pytest.raises(StoreError, match=r"the file 'lock' of .* was deleted: another `vitscale run` may be writing"):
        drives(body, study(tmp_path, 8, [1], hosts=1, repeats=1))
    assert begun == [0]


def test_a_lock_of_the_same_number_on_another_file_system_is_another(
    tmp_path: Path, drives: Callable[..., Report], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So is one that was put in place before the driver looked at it."""
    lock, look = tmp_path / "results" / "lock", os.stat

    def elsewhere(path: Any, **options: Any) -> os.stat_result:
        told = look(path, **options)
        return os.stat_result((*told[:2], told.st_dev + 1, *told[3:])) if path == lock else told

    monkeypatch.setattr(os, "stat", elsewhere)
    with pytest.raises(StoreError, match=r"the file 'lock' of .* was deleted"):
        drives(lambda *_: completed(), study(tmp_path, 8, [1], hosts=1, repeats=1))


def test_where_the_results_folder_is_gone_no_lock_is_said_to_be_deleted(
    tmp_path: Path, drives: Callable[..., Report]
) -> None:
    def body(*_: Any) -> Outcome:
        (tmp_path / "results").rename(tmp_path / "moved")
        return completed()

    with pytest.raises(StoreError, match=r"results folder .* is gone: it was moved or deleted"):
        drives(body, study(tmp_path, 8, [1], hosts=1, repeats=1))
