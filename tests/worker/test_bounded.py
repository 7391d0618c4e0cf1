"""Stages end in time, and say how."""

from __future__ import annotations

import threading

from vitscale.store.checks import STAGES, CheckStage, StageLine
from vitscale.worker.check_stages import CheckStages


class Recorded:
    def __init__(self, limits: dict[CheckStage, float] | None = None) -> None:
        self.lines: list[StageLine] = []
        self.begun: list[CheckStage] = []
        self.prepared: list[str] = []
        self.stages = CheckStages(
            dict.fromkeys(STAGES, 60.0) | (limits or {}),
            self.lines.append,
            self.begun.append,
            lambda: self.prepared.append(threading.current_thread().name),
        )


def test_a_stage_that_is_done() -> None:
    found = Recorded()
    done: list[str] = []
    assert found.stages.do("matmul", lambda: done.append(threading.current_thread().name))
    assert done == found.prepared == ["stage-matmul"]
    assert found.begun == ["matmul"]
    assert [(line.name, line.ending, line.reason) for line in found.lines] == [("matmul", "done", "")]


def test_a_stage_that_hangs_is_left_and_the_next_one_begins() -> None:
    found = Recorded({"join": 0.2})
    for_ever = threading.Event()

    def hang() -> None:
        for_ever.wait()

    assert not found.stages.do("join", hang)
    assert found.stages.do("disk", lambda: None)
    for_ever.set()
    assert [(line.name, line.ending) for line in found.lines] == [("join", "timeout"), ("disk", "done")]
    assert found.lines[0].reason == "not done after 0.2 s"


def test_a_stage_that_raises_tells_its_reason_on_one_line() -> None:
    found = Recorded()

    def fail() -> None:
        raise RuntimeError("no such thing\nand a long story \udcff")

    assert not found.stages.do("loader", fail)
    (line,) = found.lines
    assert (line.ending, line.reason) == ("failed", "RuntimeError: no such thing")
    line.model_dump_json()


def test_what_cannot_be_written_as_utf8_is_escaped() -> None:
    found = Recorded()

    def fail() -> None:
        raise OSError("a path with \udcff")

    found.stages.do("disk", fail)
    assert found.lines[0].model_dump_json()


def test_a_stage_that_is_not_begun() -> None:
    found = Recorded()
    found.stages.skip("collectives", "there is one rank")
    assert found.begun == []
    assert [(line.ending, line.reason) for line in found.lines] == [("skipped", "there is one rank")]
