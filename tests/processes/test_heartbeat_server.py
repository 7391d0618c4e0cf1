"""The driver's end of the heartbeats, called by real sockets and real processes: friendly, dying, and hostile ones."""

from __future__ import annotations

import contextlib
import errno
import json
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from heartbeats import TOKEN, held, line, write_launch
from processes import wait_until
from vitscale.processes import heartbeat_server
from vitscale.processes.heartbeat_server import HeartbeatServer, RankStatus


@pytest.fixture
def heartbeats() -> Iterator[HeartbeatServer]:
    heartbeats = HeartbeatServer(TOKEN, "127.0.0.1")
    yield heartbeats
    heartbeats.close()


def connected(heartbeats: HeartbeatServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", heartbeats.port), timeout=300)


def hello(rank: int | str = 0, **changes: Any) -> bytes:
    return line(**({"token": TOKEN, "role": f"rank {rank}", "host": "node1", "pid": 77} | changes))


def heard(heartbeats: HeartbeatServer, rank: int = 0) -> RankStatus:
    wait_until(lambda: rank in heartbeats.statuses(), f"rank {rank} is heard")
    return heartbeats.statuses()[rank]


def at_step(heartbeats: HeartbeatServer, rank: int, step: int) -> None:
    wait_until(lambda: heartbeats.statuses()[rank].step == step, f"rank {rank} is heard of step {step}")


def let_go(connection: socket.socket) -> bool:
    """Whether the driver closes the connection; waits for it."""
    with contextlib.suppress(ConnectionError):
        while connection.recv(65_536):
            pass
    return True


# --- ranks ---------------------------------------------------------------------------------------------------------


def test_the_last_sign_of_each_rank_is_kept(heartbeats: HeartbeatServer) -> None:
    with connected(heartbeats) as one, connected(heartbeats) as two, connected(heartbeats) as agent:
        one.sendall(hello(1) + line(step=4, phase="forward"))
        two.sendall(hello(12, host="node2", pid=78))
        agent.sendall(hello().replace(b"rank 0", b"agent"))
        wait_until(lambda: heartbeats.statuses().get(1) and heartbeats.statuses()[1].step == 4, "step 4 is heard")
        second = heard(heartbeats, 12)
        first = heartbeats.statuses()[1]
        assert (first.host, first.pid, first.phase) == ("node1", 77, "forward")
        assert (second.host, second.pid, second.step, second.phase) == ("node2", 78, -1, "start-up")
        assert set(heartbeats.statuses()) == {1, 12}, "an agent is no rank"
        assert [(status.ended_seconds, status.disconnection) for status in (first, second)] == [(None, None)] * 2


def test_a_rank_that_leaves_is_not_lost(tmp_path: Path, heartbeats: HeartbeatServer) -> None:
    write_launch(tmp_path, heartbeats.port)
    with held(tmp_path, 0) as rank, held(tmp_path, 1):
        assert heard(heartbeats).pid == rank.pid
        assert heard(heartbeats, 1).host == socket.gethostname()
        (tmp_path / "leave-0").touch()
        rank.wait(60.0)
        wait_until(lambda: heartbeats.statuses()[0].ended_seconds, "its last word is heard")
        assert heartbeats.statuses()[0].disconnection is None
        assert heartbeats.statuses()[1].ended_seconds is None


def test_a_rank_that_is_killed_is_lost_at_once(tmp_path: Path, heartbeats: HeartbeatServer) -> None:
    write_launch(tmp_path, heartbeats.port)
    with held(tmp_path) as rank:
        heard(heartbeats)
        rank.kill()
        wait_until(lambda: heartbeats.statuses()[0].disconnection, "the driver hears of it")
        status = heartbeats.statuses()[0]
        assert (status.disconnection, status.pid) == ("ended", rank.pid)
        assert status.ended_seconds is not None
        assert status.ended_seconds >= status.heard_seconds


def test_the_last_word_of_a_rank_is_heard_though_its_end_was_noticed_first(heartbeats: HeartbeatServer) -> None:
    """The driver wants to write to it just when it has left: the word is there, and not read yet."""
    with connected(heartbeats) as rank:
        rank.sendall(hello())
        heard(heartbeats)
        heartbeats._closing = True
        heartbeats._thread.join()
        rank.sendall(line(bye=True))
        rank.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closed by a reset
    (connection,) = heartbeats._buffers
    heartbeats._send_to(connection, b"\n")
    status = heartbeats.statuses()[0]
    assert (status.ended_seconds is not None, status.disconnection) == (True, None)


@pytest.mark.parametrize(
    ("number", "how"),
    [
        (errno.ETIMEDOUT, "silent"),
        (errno.EHOSTUNREACH, "silent"),
        (errno.ENETUNREACH, "silent"),
        (errno.ECONNRESET, "ended"),
        (errno.EPIPE, "ended"),
    ],
)
def test_how_the_kernel_tells_a_dead_process_from_a_dead_host(number: int, how: str) -> None:
    """OSError makes the class that belongs to the number; tests/lab cuts real links."""
    assert heartbeat_server._is_silence(OSError(number, "")) == (how == "silent")


def test_every_rank_is_asked_for_its_stacks(tmp_path: Path, heartbeats: HeartbeatServer) -> None:
    write_launch(tmp_path, heartbeats.port)
    with held(tmp_path, 0), held(tmp_path, 1):
        heard(heartbeats, 0)
        heard(heartbeats, 1)
        heartbeats.ask_for_stacks()
        wait_until(lambda: len([*tmp_path.glob("stack-rank-*.txt")]) == 2, "both stacks are written")


def test_closing_lets_go_of_all_and_takes_nobody_in(heartbeats: HeartbeatServer) -> None:
    with connected(heartbeats) as known, connected(heartbeats) as unknown:
        known.sendall(hello())
        heard(heartbeats)
        heartbeats.close()
        assert let_go(known)
        assert let_go(unknown)
    with pytest.raises(ConnectionRefusedError):
        connected(heartbeats)
    assert heartbeats.statuses()[0].disconnection is None, "who was let go of is not lost"


# --- hostile callers -----------------------------------------------------------------------------------------------


HOSTILE = (
    b"GET / HTTP/1.1\r\nHost: node1\r\n\r\n",
    b"\x00\xff\xfe\n",
    b"{\n",
    b"[]\n",
    b"null\n",
    b"[" * 100_000 + b"\n",
    b'{"a":' * 50_000 + b"\n",
    b"1" * 5_000 + b"\n",
    b"x" * 1_000_000,
    b'{"token": "' + b"x" * 60_000,
    hello(token="another"),  # noqa: S106 - of no run
    hello(token=None),
    hello(token=[TOKEN]),
    hello(token=TOKEN + "0"),
    hello(token=TOKEN[:-1]),
    hello(token="\ud800é"),  # noqa: S106 - of no run
    hello(role=None),
    hello(pid="77"),
    hello(pid=-1),
    hello(pid=0),
    hello(pid=2**70),
    hello(pid=True),
    hello(pid=7.5),
    hello(host=7),
    hello(host="node1\x1b[2J"),
    hello(host="x" * 300),
    line(),
)


def test_who_does_not_say_what_a_rank_says_is_let_go_of(
    heartbeats: HeartbeatServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat_server, "_HELLO_SECONDS", 600.0)  # it is what they say that counts
    with connected(heartbeats) as rank:
        rank.sendall(hello(1))
        heard(heartbeats, 1)
        for number, said in enumerate(HOSTILE):
            with connected(heartbeats) as stranger:
                with contextlib.suppress(ConnectionError):
                    stranger.sendall(said)
                assert let_go(stranger)
            rank.sendall(line(step=number))
            at_step(heartbeats, 1, number)
            assert set(heartbeats.statuses()) == {1}, said[:100]


def test_a_rank_that_never_ends_a_message_is_let_go_of(heartbeats: HeartbeatServer) -> None:
    with connected(heartbeats) as rank:
        rank.sendall(hello())
        heard(heartbeats)
        with contextlib.suppress(ConnectionError):
            rank.sendall(b"x" * 1_000_000)
        assert let_go(rank)


def test_a_second_process_that_takes_itself_for_a_rank_is_let_go_of(heartbeats: HeartbeatServer) -> None:
    """Nothing of it, its end least of all, is told of the first."""
    with connected(heartbeats) as first, connected(heartbeats) as second:
        first.sendall(hello(pid=1))
        heard(heartbeats)
        second.sendall(hello(pid=2) + line(step=9) + line(bye=True))
        assert let_go(second)
        first.sendall(line(step=1))
        at_step(heartbeats, 0, 1)
        status = heartbeats.statuses()[0]
        assert (status.pid, status.disconnection, status.ended_seconds) == (1, None, None)


@pytest.mark.parametrize("role", ["rank -1", "rank 1000000", "rank 1 ", "rank one", "rank", "", "agent\n"])
def test_a_role_that_is_no_rank_s_is_none(heartbeats: HeartbeatServer, role: str) -> None:
    with connected(heartbeats) as stranger, connected(heartbeats) as rank:
        stranger.sendall(hello(role=role) + line(step=3) + line(bye=True))
        rank.sendall(hello(1))
        heard(heartbeats, 1)
        stranger.close()
        rank.sendall(line(step=1))
        at_step(heartbeats, 1, 1)
        assert set(heartbeats.statuses()) == {1}


KEYS = st.sampled_from(["step", "phase", "bye", "token"]) | st.text(max_size=5)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**80), 2**80) | st.floats() | st.text(max_size=50),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=8,
)  # fmt: skip


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(JSON, min_size=1, max_size=3))
def test_whatever_a_rank_says_its_sign_can_be_told(heartbeats: HeartbeatServer, messages: list[Any]) -> None:
    """And the driver goes on to listen."""
    rank = len(heartbeats.statuses())
    with connected(heartbeats) as connection:
        connection.sendall(hello(rank))
        heard(heartbeats, rank)
        with contextlib.suppress(ConnectionError):
            connection.sendall(b"".join(json.dumps(message).encode() + b"\n" for message in messages))
            connection.sendall(line(phase="the last word"))
        all_objects = all(isinstance(message, dict) for message in messages)
        if all_objects:
            wait_until(lambda: heartbeats.statuses()[rank].phase == "the last word", "the last word is heard")
        else:
            assert let_go(connection)
        status = heartbeats.statuses()[rank]
        assert isinstance(status.step, int)
        assert abs(status.step) < 2**62
        assert status.phase.isprintable()
        assert (status.host, status.pid) == ("node1", 77)


def test_five_hundred_that_say_nothing_keep_nobody_out(
    heartbeats: HeartbeatServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat_server, "_HELLO_SECONDS", 0.5)
    with contextlib.ExitStack() as callers:
        idle = [callers.enter_context(connected(heartbeats)) for _ in range(500)]
        rank = callers.enter_context(connected(heartbeats))
        rank.sendall(hello())
        heard(heartbeats)
        assert all(map(let_go, idle)), "they are not kept for ever"
        rank.sendall(line(step=1))
        at_step(heartbeats, 0, 1)


def test_ranks_are_let_in_behind_more_that_say_nothing_than_there_are_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a process may open 256 files, and another user holds 200 connections."""
    monkeypatch.setattr(heartbeat_server, "_connections_allowed", lambda: 128)
    crowded = HeartbeatServer(TOKEN, "127.0.0.1")
    try:
        with contextlib.ExitStack() as callers:
            first = callers.enter_context(connected(crowded))
            first.sendall(hello(0))
            heard(crowded, 0)
            silent = [callers.enter_context(connected(crowded)) for _ in range(200)]
            ranks = [callers.enter_context(connected(crowded)) for _ in range(3)]
            for number, rank in enumerate(ranks, start=1):
                rank.sendall(hello(number))
            assert [heard(crowded, number).disconnection for number in (1, 2, 3)] == [None] * 3
            assert let_go(silent[0]), "who says nothing makes room"
            first.sendall(line(step=1))
            at_step(crowded, 0, 1)
            assert crowded.statuses()[0].disconnection is None, "those inside notice nothing"
    finally:
        crowded.close()


def test_who_says_nothing_has_few_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others wait in the kernel's queue, and take no files of the driver's."""
    monkeypatch.setattr(heartbeat_server, "_connections_allowed", lambda: 128)
    monkeypatch.setattr(heartbeat_server, "_CROWDED_HELLO_SECONDS", 600.0)
    crowded = HeartbeatServer(TOKEN, "127.0.0.1")
    try:
        with contextlib.ExitStack() as callers:
            silent = [callers.enter_context(connected(crowded)) for _ in range(40)]
            wait_until(lambda: not crowded._accepting, "all places are taken")
            assert len(crowded._buffers) == 16
            silent[0].sendall(hello(0))
            heard(crowded, 0)
            wait_until(lambda: len(crowded._buffers) == 17, "the place of one that has said hello is free again")
    finally:
        crowded.close()


def test_files_are_left_for_the_driver_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat_server, "_connections_allowed", lambda: 2)
    crowded = HeartbeatServer(TOKEN, "127.0.0.1")
    try:
        with connected(crowded) as first, connected(crowded) as second, connected(crowded) as third:
            first.sendall(hello(0))
            second.sendall(hello(1))
            assert let_go(third)
            assert {heard(crowded, 0).disconnection, heard(crowded, 1).disconnection} == {None}
    finally:
        crowded.close()


LIMITED = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (256, {hard}))
from vitscale.processes.heartbeat_server import _connections_allowed
print(_connections_allowed(), resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(("hard", "said"), [(2048, "1024 (2048, 2048)"), (256, "128 (256, 256)")])
def test_a_limit_on_open_files_is_raised_as_far_as_it_may_be(hard: int, said: str) -> None:
    program = LIMITED.format(hard=hard)
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout.strip() == said
