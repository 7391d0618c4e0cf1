from __future__ import annotations

import signal
import socket
import subprocess
import sys
from typing import Any

import psutil
import pytest

from processes import wait_until
from vitscale.processes.heartbeat_server import RankStatus
from vitscale.runner.watch import (
    is_stopped,
    position_in_words,
    ranks_waited_for,
    silence_limit_seconds,
    start_up_phase,
    starved_ranks,
)


def status(step: int = 4, phase: str = "backward", **changes: Any) -> RankStatus:
    fields: dict[str, Any] = {"host": "node0", "pid": 77, "heard_seconds": 100.0, "step": step, "phase": phase}
    return RankStatus(**(fields | changes))


def statuses(*each: RankStatus) -> dict[int, RankStatus]:
    return dict(enumerate(each))


@pytest.mark.parametrize(
    ("places", "behind"),
    [
        ([], []),
        ([(4, "backward")], []),
        ([(4, "backward"), (4, "backward")], []),
        ([(4, "backward"), (4, "forward")], [1]),
        ([(4, "forward"), (3, "optimizer")], [1]),
        ([(-1, "start-up"), (0, "data")], [0]),
        ([(4, "data"), (4, "h2d"), (4, "forward"), (4, "backward"), (4, "optimizer")], [0]),
        ([(4, "backward"), (3, "data"), (3, "data")], [1, 2]),
        ([(0, "a phase of a later version"), (0, "data")], [0]),
    ],
)
def test_ranks_that_are_behind_are_waited_for(places: list[tuple[int, str]], behind: list[int]) -> None:
    assert ranks_waited_for(statuses(*(status(step, phase) for step, phase in places))) == behind


def test_a_rank_that_has_left_waits_for_nobody_and_nobody_for_it() -> None:
    left = status(3, ended_seconds=90.0)
    assert ranks_waited_for(statuses(status(4), left)) == [0]
    assert ranks_waited_for(statuses(left, left)) == []
    assert starved_ranks(statuses(status(heard_seconds=100.0), left), 100.0) == []


def test_a_rank_that_gives_no_sign_while_others_do_is_starved() -> None:
    beating, silent = status(heard_seconds=99.5), status(heard_seconds=90.0)
    assert starved_ranks(statuses(beating, silent, beating, silent), 100.0) == [1, 3]
    assert starved_ranks(statuses(beating, beating), 100.0) == []
    assert starved_ranks(statuses(silent, silent), 100.0) == [], "the driver itself may not have listened"


def test_a_place_in_words() -> None:
    assert position_in_words(status(4, "forward")) == "forward of step 4"
    assert position_in_words(status(-1, "start-up")) == "start-up"


def test_a_stopped_process_of_this_host_is_told_from_one_that_waits() -> None:
    here = socket.gethostname()
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        assert not is_stopped(process.pid, here)
        process.send_signal(signal.SIGSTOP)
        wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED, "it is stopped")
        assert is_stopped(process.pid, here)
        assert not is_stopped(process.pid, "node1"), "there the number is another process's"
    finally:
        process.kill()
        process.wait()
    assert not is_stopped(process.pid, here)
    assert not is_stopped(2**31 - 1, here)


@pytest.mark.parametrize(
    ("places", "told"),
    [
        ([], ""),
        ([(-1, "start-up")], ""),
        ([(-1, "start-up: model"), (-1, "start-up: engine")], "model"),
        ([(-1, "start-up: engine"), (-1, "compiling fused_adam")], "compiling fused_adam"),
        ([(0, "forward"), (-1, "start-up: first step")], "first step"),
        ([(0, "forward"), (0, "compiling blocks")], "compiling blocks"),
        ([(3, "forward"), (3, "backward")], ""),
    ],
)
def test_what_ranks_do_before_their_first_step(places: list[tuple[int, str]], told: str) -> None:
    assert start_up_phase(statuses(*(status(step, phase) for step, phase in places))) == told


def test_a_compiler_may_be_silent_for_longer_than_a_rank() -> None:
    compiling = status(-1, "compiling fused_adam")
    assert silence_limit_seconds(statuses(status(), compiling), 300.0) == 1800.0
    assert silence_limit_seconds(statuses(status(), compiling), 3600.0) == 3600.0
    assert silence_limit_seconds(statuses(status(), status()), 300.0) == 300.0
    ended = status(-1, "compiling fused_adam", ended_seconds=9.0)
    assert silence_limit_seconds(statuses(status(), ended), 300.0) == 300.0
