"""The view of a study that runs: what it says is what lies in the folder, and it leaves nothing there."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from driving import tree
from prediction_factory import resolved_study
from results_factory import write_results
from vitscale import cli, store
from vitscale.cli import sharing
from vitscale.errors import StoreError
from vitscale.present.terminal import lines
from vitscale.processes import launch_file
from vitscale.runner.live import StudyView, pace, study_view, view_document
from vitscale.store.results import Results
from vitscale.store.writing import locked

OLD = 1_700_000_000.0


def twice(step_seconds: dict[int, list[float]]) -> Results:
    """A study that asks for two runs of each trial."""
    whole = resolved_study(step_seconds)
    return whole.model_copy(update={"study": whole.study.model_copy(update={"repeats": 2})})


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Four runs done of six: of the last trial one was cut off in its 192nd step, and one never began."""
    folder = tmp_path / "results"
    whole = twice({1: [0.1, 0.1], 2: [0.1, 0.1], 4: [0.1, 0.1]})
    last = list(whole.study.trials)[-1]
    kept = [run for run in whole.runs if (run.header.trial_id, run.header.repeat) != (last, 1)]
    write_results(whole.model_copy(update={"runs": tuple(kept)}), folder)
    open_run = folder / "runs" / f"{last}-r0-a0"
    (open_run / "outcome.json").unlink()
    rank = open_run / "rank-0.jsonl"
    raw = [line for line in rank.read_bytes().splitlines(keepends=True) if b'"kind":"e' not in line]
    steps = [line for line in raw if line.startswith(b'{"kind":"step"')]
    rank.write_bytes(b"".join(line for line in raw if line not in steps) + b"".join(steps[:41]) + steps[41][:20])
    touch(folder, OLD)
    return folder


def touch(folder: Path, seconds: float) -> None:
    for path in (*folder.rglob("*"), folder):
        os.utime(path, (seconds, seconds))


def text(view: StudyView) -> str:
    return "\n".join(line.plain for line in lines(view_document(view, Path("RESULTS")), 200, verbose=True))


def test_a_driver_of_this_host_is_known_by_its_lock(results: Path) -> None:
    with locked(results):
        view = study_view(results, OLD + 90)
        assert (view.driver, view.driver_process) == ("runs", os.getpid())
        (run,) = view.running
        # 1,024 images in batches of 4 x 8 are 32 steps an epoch, and there are three.
        assert (run.step, run.steps) == (41, 96)
        assert run.steps_per_second == pytest.approx(10.0)
        assert run.hosts == ("node1",)
    assert (view.done, view.runs, view.outcomes) == (4, 6, {"completed": 4})
    assert view.left_seconds == pytest.approx(40.0)
    assert f"Driver: process {os.getpid()} of this host" in text(view)
    assert "4 ranks, batch 8, repeat 1 on node1: step 41 of 96, 10 steps/s; no sign for 90.0 s" in text(view)


def test_a_driver_that_died_is_said_to_be_gone(results: Path) -> None:
    view = study_view(results, OLD + 90)
    assert (view.driver, view.driver_process, view.running, view.interrupted) == ("gone", None, (), 1)
    assert "4 of 6 runs done; about 40.0 s left" in text(view)
    assert "The driver is gone: no process of this host holds RESULTS" in text(view)


def test_runs_of_another_host_are_known_by_their_files(results: Path) -> None:
    view = study_view(results, OLD + 5)
    assert view.driver == "runs elsewhere"
    assert len(view.running) == 1


@pytest.mark.parametrize(("here", "driver"), [(True, "gone"), (False, "runs elsewhere")])
def test_a_driver_of_this_host_that_holds_no_lock_is_gone_however_fresh_its_files(
    results: Path, here: bool, driver: str
) -> None:
    (run,) = study_view(results, OLD + 5).running
    token = "0" * 32
    launch = launch_file.LaunchFile(
        token=token,
        commands=(("a",),),
        driver_pid=2**22 + 1,
        host_id=launch_file.host_id() if here else "another",
        started_ns=1,
    )
    path = results / "runs" / run.run / launch_file.NAME
    path.write_text(launch.model_dump_json())
    os.utime(path, (OLD, OLD))
    assert study_view(results, OLD + 5).driver == driver
    (results / "jobs").mkdir()  # jobs of a batch system hold no lock
    assert study_view(results, OLD + 5).driver == "runs elsewhere"


def test_of_a_study_that_is_done(tmp_path: Path) -> None:
    write_results(twice({1: [0.1, 0.1]}), tmp_path / "results")
    # Each run took 20 s, and the second began 100 s after the first.
    view = study_view(tmp_path / "results", OLD + 150)
    assert (view.driver, view.done, view.left_seconds) == ("none left to do", 2, 0.0)
    assert view.last_seconds_ago == pytest.approx(30.0)
    assert view.last == "completed in 20.0 s: vit-ti16 ddp, 1 rank, batch 8, repeat 2"


def test_a_look_writes_nothing_and_takes_no_lock(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fcntl.flock", lambda *_: pytest.fail("a lock was tried"))
    before = tree(results)
    study_view(results, OLD)
    assert tree(results) == before


@pytest.mark.parametrize(
    ("steps", "rate", "trend"),
    [
        ([], None, None),
        ([0.1] * 20, 10.0, None),
        ([0.1] * 40, 10.0, 0.0),
        ([0.1] * 20 + [0.12] * 20, 1 / 0.12, 0.2),
        ([0.0] * 40, None, None),
    ],
)
def test_the_pace_of_steps(steps: list[float], rate: float | None, trend: float | None) -> None:
    told = pace(steps)
    assert told == (pytest.approx(rate) if rate else None, pytest.approx(trend) if trend is not None else None)


def test_of_a_long_run_the_ends_alone_are_read(results: Path) -> None:
    (folder,) = [path for path in (results / "runs").iterdir() if not (path / "outcome.json").exists()]
    rank = folder / "rank-0.jsonl"
    line = next(line for line in rank.read_text().splitlines() if '"kind":"step"' in line)
    with rank.open("a") as file:
        file.write("\n")
        file.writelines(line.replace('"step":0', f'"step":{step}', 1) + "\n" for step in range(42, 8000))
    assert rank.stat().st_size > 600_000
    touch(results, OLD)
    (run,) = study_view(results, OLD).running
    assert (run.step, run.steps, run.hosts) == (8000, 96, ("node1",))


@pytest.mark.parametrize("spoil", ["rank-0.jsonl", "link", "pipe"])
def test_a_hostile_run_is_one_that_tells_nothing(results: Path, spoil: str) -> None:
    (folder,) = [path for path in (results / "runs").iterdir() if not (path / "outcome.json").exists()]
    rank = folder / "rank-0.jsonl"
    rank.unlink()
    if spoil == "link":
        rank.symlink_to("/dev/zero")
    elif spoil == "pipe":
        os.mkfifo(rank)
    else:
        rank.write_bytes(b'{"kind":"step","step":1e400\n\xff\xfe\n{"kind":"start"}\n' + b"[" * 100_000 + b"\n")
    (run,) = study_view(results, OLD).running
    assert (run.step, run.steps_per_second) == (None, None)


def test_once_prints_one_view(
    results: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["vitscale", "watch", str(results), "--once"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0
    assert "4 of 6 runs done" in capsys.readouterr().out


def test_the_live_view_goes_on_until_ctrl_c(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []

    class Terminal(Console):
        def __init__(self, **_: Any) -> None:
            super().__init__(force_terminal=True, width=120, record=True, _environ={"TERM": "xterm"})

    def rest(_: float) -> None:
        shown.append(json.dumps(study_view(results, time.time()).driver))
        if len(shown) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(sharing, "ProgramConsole", Terminal)
    monkeypatch.setattr(time, "sleep", rest)
    sharing.watch(results)
    assert shown == ['"gone"'] * 3


def test_a_folder_without_results_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"holds no results of vitscale \(study\.json is missing\)"):
        study_view(tmp_path, time.time())
    assert store.read_study(tmp_path) is None
