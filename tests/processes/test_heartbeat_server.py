"""The driver's end of the lifelines, called by real sockets and real processes: friendly, dying, and hostile ones."""

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

from lifelines import TOKEN, held, line, write_launch
from processes import wait_until
from vitscale.processes import heartbeat_server
from vitscale.processes.heartbeat_server import Listener, Sign


@pytest.fixture
def listener() -> Iterator[Listener]:
    listener = Listener(TOKEN, "127.0.0.1")
    yield listener
    listener.close()


def connected(listener: Listener) -> socket.socket:
    return socket.create_connection(("127.0.0.1", listener.port), timeout=300)


def hello(rank: int | str = 0, **changes: Any) -> bytes:
    return line(**({"token": TOKEN, "role": f"rank {rank}", "host": "node1", "pid": 77} | changes))


def heard(listener: Listener, rank: int = 0) -> Sign:
    wait_until(lambda: rank in listener.signs(), f"rank {rank} is heard")
    return listener.signs()[rank]


def at_step(listener: Listener, rank: int, step: int) -> None:
    wait_until(lambda: listener.signs()[rank].step == step, f"rank {rank} is heard of step {step}")


def let_go(connection: socket.socket) -> bool:
    """Whether the driver closes the connection; waits for it."""
    with contextlib.suppress(ConnectionError):
        while connection.recv(65_536):
            pass
    return True


# --- ranks ---------------------------------------------------------------------------------------------------------


def test_the_last_sign_of_each_rank_is_kept(listener: Listener) -> None:
    with connected(listener) as one, connected(listener) as two, connected(listener) as agent:
        one.sendall(hello(1) + line(step=4, phase="forward"))
        two.sendall(hello(12, host="node2", pid=78))
        agent.sendall(hello().replace(b"rank 0", b"agent"))
        wait_until(lambda: listener.signs().get(1) and listener.signs()[1].step == 4, "step 4 is heard")
        second = heard(listener, 12)
        first = listener.signs()[1]
        assert (first.host, first.pid, first.phase) == ("node1", 77, "forward")
        assert (second.host, second.pid, second.step, second.phase) == ("node2", 78, -1, "start-up")
        assert set(listener.signs()) == {1, 12}, "an agent is no rank"
        assert [(sign.ended_seconds, sign.lost) for sign in (first, second)] == [(None, None)] * 2


def test_a_rank_that_leaves_is_not_lost(tmp_path: Path, listener: Listener) -> None:
    write_launch(tmp_path, listener.port)
    with held(tmp_path, 0) as rank, held(tmp_path, 1):
        assert heard(listener).pid == rank.pid
        assert heard(listener, 1).host == socket.gethostname()
        (tmp_path / "leave-0").touch()
        rank.wait(60.0)
        wait_until(lambda: listener.signs()[0].ended_seconds, "its last word is heard")
        assert listener.signs()[0].lost is None
        assert listener.signs()[1].ended_seconds is None


def test_a_rank_that_is_killed_is_lost_at_once(tmp_path: Path, listener: Listener) -> None:
    write_launch(tmp_path, listener.port)
    with held(tmp_path) as rank:
        heard(listener)
        rank.kill()
        wait_until(lambda: listener.signs()[0].lost, "the driver hears of it")
        sign = listener.signs()[0]
        assert (sign.lost, sign.pid) == ("ended", rank.pid)
        assert sign.ended_seconds is not None
        assert sign.ended_seconds >= sign.heard_seconds


def test_the_last_word_of_a_rank_is_heard_though_its_end_was_noticed_first(listener: Listener) -> None:
    """The driver wants to write to it just when it has left: the word is there, and not read yet."""
    with connected(listener) as rank:
        rank.sendall(hello())
        heard(listener)
        listener._closing = True
        listener._thread.join()
        rank.sendall(line(bye=True))
        rank.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closed by a reset
    (connection,) = listener._buffers
    listener._tell(connection, b"\n")
    sign = listener.signs()[0]
    assert (sign.ended_seconds is not None, sign.lost) == (True, None)


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
    assert heartbeat_server._silent(OSError(number, "")) == (how == "silent")


def test_every_rank_is_asked_for_its_stacks(tmp_path: Path, listener: Listener) -> None:
    write_launch(tmp_path, listener.port)
    with held(tmp_path, 0), held(tmp_path, 1):
        heard(listener, 0)
        heard(listener, 1)
        listener.ask_for_stacks()
        wait_until(lambda: len([*tmp_path.glob("stack-rank-*.txt")]) == 2, "both stacks are written")


def test_closing_lets_go_of_all_and_takes_nobody_in(listener: Listener) -> None:
    with connected(listener) as known, connected(listener) as unknown:
        known.sendall(hello())
        heard(listener)
        listener.close()
        assert let_go(known)
        assert let_go(unknown)
    with pytest.raises(ConnectionRefusedError):
        connected(listener)
    assert listener.signs()[0].lost is None, "who was let go of is not lost"


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
    hello(token="another"),  # noqa: S106
    hello(token=None),
    hello(token=[TOKEN]),
    hello(token=TOKEN + "0"),
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


def test_who_does_not_say_what_a_rank_says_is_let_go_of(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat_server, "_HELLO_SECONDS", 600.0)  # it is what they say that counts
    with connected(listener) as rank:
        rank.sendall(hello(1))
        heard(listener, 1)
        for number, said in enumerate(HOSTILE):
            with connected(listener) as stranger:
                with contextlib.suppress(ConnectionError):
                    stranger.sendall(said)
                assert let_go(stranger)
            rank.sendall(line(step=number))
            at_step(listener, 1, number)
            assert set(listener.signs()) == {1}, said[:100]


def test_a_rank_that_never_ends_a_message_is_let_go_of(listener: Listener) -> None:
    with connected(listener) as rank:
        rank.sendall(hello())
        heard(listener)
        with contextlib.suppress(ConnectionError):
            rank.sendall(b"x" * 1_000_000)
        assert let_go(rank)


def test_a_second_process_that_takes_itself_for_a_rank_is_let_go_of(listener: Listener) -> None:
    """Nothing of it, its end least of all, is told of the first."""
    with connected(listener) as first, connected(listener) as second:
        first.sendall(hello(pid=1))
        heard(listener)
        second.sendall(hello(pid=2) + line(step=9) + line(bye=True))
        assert let_go(second)
        first.sendall(line(step=1))
        at_step(listener, 0, 1)
        sign = listener.signs()[0]
        assert (sign.pid, sign.lost, sign.ended_seconds) == (1, None, None)


@pytest.mark.parametrize("role", ["rank -1", "rank 1000000", "rank 1 ", "rank one", "rank", "", "agent\n"])
def test_a_role_that_is_no_rank_s_is_none(listener: Listener, role: str) -> None:
    with connected(listener) as stranger, connected(listener) as rank:
        stranger.sendall(hello(role=role) + line(step=3) + line(bye=True))
        rank.sendall(hello(1))
        heard(listener, 1)
        stranger.close()
        rank.sendall(line(step=1))
        at_step(listener, 1, 1)
        assert set(listener.signs()) == {1}


KEYS = st.sampled_from(["step", "phase", "bye", "token"]) | st.text(max_size=5)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**80), 2**80) | st.floats() | st.text(max_size=50),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=8,
)  # fmt: skip


@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(JSON, min_size=1, max_size=3))
def test_whatever_a_rank_says_its_sign_can_be_told(listener: Listener, messages: list[Any]) -> None:
    """And the driver goes on to listen."""
    rank = len(listener.signs())
    with connected(listener) as connection:
        connection.sendall(hello(rank))
        heard(listener, rank)
        with contextlib.suppress(ConnectionError):
            connection.sendall(b"".join(json.dumps(message).encode() + b"\n" for message in messages))
            connection.sendall(line(phase="the last word"))
        all_objects = all(isinstance(message, dict) for message in messages)
        if all_objects:
            wait_until(lambda: listener.signs()[rank].phase == "the last word", "the last word is heard")
        else:
            assert let_go(connection)
        sign = listener.signs()[rank]
        assert isinstance(sign.step, int)
        assert abs(sign.step) < 2**62
        assert sign.phase.isprintable()
        assert (sign.host, sign.pid) == ("node1", 77)


def test_five_hundred_that_say_nothing_keep_nobody_out(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat_server, "_HELLO_SECONDS", 0.5)
    with contextlib.ExitStack() as callers:
        idle = [callers.enter_context(connected(listener)) for _ in range(500)]
        rank = callers.enter_context(connected(listener))
        rank.sendall(hello())
        heard(listener)
        assert all(map(let_go, idle)), "they are not kept for ever"
        rank.sendall(line(step=1))
        at_step(listener, 0, 1)


def test_files_are_left_for_the_driver_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat_server, "_connections_allowed", lambda: 2)
    crowded = Listener(TOKEN, "127.0.0.1")
    try:
        with connected(crowded) as first, connected(crowded) as second, connected(crowded) as third:
            first.sendall(hello(0))
            second.sendall(hello(1))
            assert let_go(third)
            assert {heard(crowded, 0).lost, heard(crowded, 1).lost} == {None}
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
