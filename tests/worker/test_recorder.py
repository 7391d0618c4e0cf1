"""The recorder of a rank's steps, without anybody who trains."""

from __future__ import annotations

import ast
import graphlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from results_factory import make_trial
from vitscale.probes import steps as step_clock
from vitscale.store import RankLog, read_rank
from vitscale.store.records import RankRecord
from vitscale.trial.trial import StepWindow
from vitscale.worker import recorder as recorder_module
from vitscale.worker.rank_process import RankInfo
from vitscale.worker.recorder import StepRecorder, TimedStretch

CPU = torch.device("cpu")
PLACE = RankInfo(rank=0, world_size=1, local_rank=0, launch_seconds=None)
LOSS = torch.tensor(2.5)


class Recording:
    """A recorder, its clock, and what it has written."""

    def __init__(self, folder: Path, planned_windows: list[StepWindow], now: list[float]) -> None:
        self.log = RankLog(folder, 0)
        trial = make_trial("ddp", 1)
        trial = trial.model_copy(update={"window": trial.window.model_copy(update={"warmup_steps": 1})})
        self.recorder = StepRecorder(trial, PLACE, CPU, self.log, planned_windows)
        self.now = now

    def take_step(self, seconds: float = 0.25) -> None:
        self.recorder.begin_step()
        self.now[0] += seconds
        self.recorder.end_step(images=8, loss=LOSS)

    def record(self) -> RankRecord:
        self.recorder.close()
        self.log.close()
        return read_rank(self.log.path)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that goes on where a test says, for steps and for epochs."""
    moment = [0.0]
    clock = SimpleNamespace(perf_counter=lambda: moment[0], monotonic=time.monotonic, sleep=time.sleep)
    monkeypatch.setattr(step_clock, "time", clock)
    monkeypatch.setattr(recorder_module, "time", clock)
    return moment


def test_a_step_takes_from_the_end_of_the_one_before_and_an_epoch_to_the_end_of_its_last(
    tmp_path: Path, now: list[float]
) -> None:
    recording = Recording(tmp_path, ["light"] * 6, now)
    now[0] += 50.0  # start-up
    for epoch in (0, 1):
        recording.recorder.begin_epoch(epoch, range(3 * epoch, 3 * epoch + 3))
        for _ in range(3):
            now[0] += 0.5  # the wait for a batch
            recording.take_step()
        measures = recording.recorder.end_epoch()
        assert measures.wall_seconds == 3 * 0.75
        now[0] += 100.0  # an evaluation
    record = recording.record()
    assert [(s.step, s.epoch, s.images, s.loss, s.warmup) for s in record.steps] == [
        (0, 0, 8, 2.5, True),
        *((step, step // 3, 8, 2.5, False) for step in range(1, 6)),
    ]
    assert {s.seconds for s in record.steps} == {0.75}
    assert recording.recorder.step_seconds == 6 * 0.75
    assert [(phase.name, phase.seconds) for phase in record.phases] == [("first_step", 0.25)]


def test_a_dropped_step_is_begun_again_and_is_nowhere_in_the_record(tmp_path: Path, now: list[float]) -> None:
    recording = Recording(tmp_path, ["light"] * 3, now)
    recorder = recording.recorder
    recorder.begin_epoch(0, range(3))
    for step in range(3):
        recorder.begin_step()
        now[0] += 100.0
        recorder.drop_step()
        assert (recorder.step, recorder.is_in_step) == (step, False)
        recording.take_step()
    recorder.end_epoch()
    record = recording.record()
    assert [(s.step, s.seconds) for s in record.steps] == [(step, 0.25) for step in range(3)]
    assert [phase.seconds for phase in record.phases] == [0.25], "the first step is the one that was not dropped"


def test_a_profile_that_a_pause_cuts_is_taken_of_the_same_steps_again(tmp_path: Path, now: list[float]) -> None:
    windows: list[StepWindow] = ["light", "light", "explained", "explained", "settling", "light"]
    recording = Recording(tmp_path, windows, now)
    recorder = recording.recorder
    recorder.begin_epoch(0, range(6))
    has_paused = False
    while recorder.step < 6:
        recorder.begin_step()
        with recorder.phase("forward"):
            torch.ones(3).sum()
        if recorder.step == 2 and not has_paused:
            has_paused = True
            recorder.pause()
            recorder.resume()
            continue
        recorder.end_step(images=8, loss=LOSS)
        if recorder.has_profile:
            assert recorder.named_phases == {"forward"}
            recorder.write_profile(lambda unknown: {**unknown, "other": "a reason"})
    recorder.end_epoch()
    record = recording.record()
    assert [s.window for s in record.steps] == windows
    assert [(line.step, line.unknown["other"]) for line in record.explained] == [(2, "a reason"), (3, "a reason")]


def test_counters_are_asked_before_ranks_meet_and_their_clocks_start_after(
    tmp_path: Path, now: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver that is slow to answer one rank would else let the others wait in a step, also after a pause."""
    events: list[str] = []
    recording = Recording(tmp_path, ["light"] * 6, now)
    probe: Any = recording.recorder.resources
    monkeypatch.setattr(probe, "begin", lambda: events.append("begin"))
    monkeypatch.setattr(probe, "start_clocks", lambda: events.append("start_clocks"))
    monkeypatch.setattr(recorder_module, "barrier", lambda: events.append("met"))
    recording.recorder.begin_epoch(0, range(6))
    for _ in range(3):
        recording.take_step()
    events.clear()
    recording.recorder.pause()
    recording.recorder.resume()
    assert events == ["begin", "met", "start_clocks"]


class CountedProbe:
    """Stands for the resources' probe: the record of a stretch is its steps."""

    def begin(self) -> None: ...

    def end(self, _epoch: int, steps: range) -> range:
        return steps


@pytest.mark.parametrize(
    ("pauses", "longest"), [([], range(2, 10)), ([4], range(4, 10)), ([7], range(2, 7)), ([6], range(6, 10))]
)
def test_the_longest_stretch_between_pauses_is_kept_and_of_equal_ones_the_last(
    pauses: list[int], longest: range
) -> None:
    probe: Any = CountedProbe()
    stretch: Any = TimedStretch(probe, epoch=0, planned=range(2, 10))
    stretch.begin_if_planned(2)
    for step in pauses:
        stretch.end(step)
        stretch.begin_if_planned(step)
    stretch.end(10)
    stretch.begin_if_planned(10)  # beyond the plan
    assert not stretch.is_sampled
    assert stretch.line() == longest


def test_an_error_in_the_first_step_leaves_nothing_that_watches_the_compiler(
    tmp_path: Path, now: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    watching: list[bool] = []

    @contextmanager
    def watched() -> Iterator[list[str]]:
        watching.append(True)
        yield []
        watching.pop()

    monkeypatch.setattr("vitscale.worker.extensions.watched", watched)
    recording = Recording(tmp_path, ["light"] * 3, now)
    recording.recorder.begin_epoch(0, range(3))
    recording.recorder.begin_step()
    assert watching
    recording.recorder.abort()
    assert not watching
    recording.record()


def worker_imports(file: Path) -> set[str]:
    """Files of the worker that a file imports, in functions and for types too."""
    modules: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module == "vitscale.worker":
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and str(node.module).startswith("vitscale.worker."):
            modules.add(str(node.module).removeprefix("vitscale.worker."))
    return modules


def test_no_two_files_of_the_worker_import_each_other_even_for_types_alone() -> None:
    files = Path(recorder_module.__file__).parent.glob("*.py")
    graph = {file.stem: worker_imports(file) for file in files}
    assert "script_steps" in graph["probe"], "which is for types alone"
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle
