"""A process and its driver, each real: sockets, signals, exit codes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from heartbeats import TOKEN, held, said, write_launch
from processes import pid_in, wait_until
from vitscale.processes.heartbeat import LOST_DRIVER_EXIT_CODE, Heartbeat
from vitscale.processes.heartbeat_server import HeartbeatServer

GONE = "vitscale: the driver of this run is gone, or its host cannot be reached: ending\n"


@pytest.fixture
def server() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(60.0)
        yield server


def port_of(server: socket.socket) -> int:
    return int(server.getsockname()[1])


def accepted(server: socket.socket) -> tuple[socket.socket, list[dict[str, Any]]]:
    """The connection of one process, with its first two messages."""
    connection, _ = server.accept()
    connection.settimeout(60.0)
    heard = b""
    while heard.count(b"\n") < 2:
        heard += connection.recv(4096)
    return connection, [json.loads(line) for line in heard.splitlines()[:2]]


def test_it_says_who_it_is_and_then_how_far_it_has_come(tmp_path: Path, server: socket.socket) -> None:
    write_launch(tmp_path, port_of(server))
    with held(tmp_path, rank=3) as rank:
        connection, (first, second) = accepted(server)
        assert first == {"token": TOKEN, "role": "rank 3", "host": socket.gethostname(), "pid": rank.pid}
        assert (second["phase"], second["step"] >= -1) == ("start-up", True)
        connection.close()


def test_it_ends_at_once_when_the_driver_lets_go_wherever_its_main_thread_is(
    tmp_path: Path, server: socket.socket
) -> None:
    write_launch(tmp_path, port_of(server))
    with held(tmp_path) as rank:
        connection, _ = accepted(server)
        connection.close()
        assert rank.wait(60.0) == LOST_DRIVER_EXIT_CODE
        assert said(rank) == GONE
    assert (tmp_path / "lost-0").exists()


def test_what_is_to_be_done_then_is_done_though_nobody_reads_its_messages_any_more(
    tmp_path: Path, server: socket.socket
) -> None:
    """The other end of a remote shell is gone with the driver."""
    write_launch(tmp_path, port_of(server))
    with held(tmp_path) as rank:
        connection, _ = accepted(server)
        assert rank.stderr is not None
        rank.stderr.close()
        connection.close()
        assert rank.wait(60.0) == LOST_DRIVER_EXIT_CODE
    assert (tmp_path / "lost-0").exists()


def test_it_writes_down_where_it_stands_when_asked_and_goes_on(tmp_path: Path, server: socket.socket) -> None:
    write_launch(tmp_path, port_of(server))
    stacks = tmp_path / "stack-rank-0.txt"
    with held(tmp_path) as rank:
        connection, _ = accepted(server)
        connection.sendall(b"\n\ns")
        wait_until(lambda: stacks.exists() and stacks.read_text().count("hread 0x") >= 2, "both threads are written")
        assert "heartbeat.py" in stacks.read_text()
        assert rank.poll() is None
        connection.close()


def test_one_that_has_done_its_work_says_so_and_leaves_as_it_likes(tmp_path: Path, server: socket.socket) -> None:
    write_launch(tmp_path, port_of(server))
    with held(tmp_path) as rank:
        connection, _ = accepted(server)
        (tmp_path / "leave-0").touch()
        heard = b""
        while more := connection.recv(4096):
            heard += more
        assert rank.wait(60.0) == 0
        assert said(rank) == ""
    assert json.loads(heard.splitlines()[-1]) == {"bye": True}
    assert not (tmp_path / "lost-0").exists()


# A driver that a test can stop and kill.
DRIVER = """
import sys, time
from pathlib import Path
from heartbeats import TOKEN
from vitscale.processes.heartbeat_server import HeartbeatServer
heartbeats = HeartbeatServer(TOKEN, "127.0.0.1")
folder = Path(sys.argv[1])
(folder / "port").write_text(f"{heartbeats.port}\\n")
while True:
    if 0 in heartbeats.statuses():
        (folder / "heard").touch()
    time.sleep(0.01)
"""


def test_a_driver_that_is_only_stopped_keeps_it_and_one_that_is_killed_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent.parent))
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, str(tmp_path)])
    try:
        write_launch(tmp_path, pid_in(tmp_path / "port"))
        with held(tmp_path) as rank:
            wait_until(lambda: (tmp_path / "heard").exists(), "the driver hears of the rank")
            driver.send_signal(signal.SIGSTOP)
            with pytest.raises(subprocess.TimeoutExpired):
                rank.wait(1.5)  # three times as long as silence is taken for a cut link
            driver.kill()
            assert rank.wait(60.0) == LOST_DRIVER_EXIT_CODE
    finally:
        driver.kill()
        driver.wait()


def test_one_of_another_run_is_not_kept(tmp_path: Path) -> None:
    heartbeats = HeartbeatServer("of another run", "127.0.0.1")
    try:
        write_launch(tmp_path, heartbeats.port)
        with held(tmp_path) as rank:
            assert rank.wait(60.0) == LOST_DRIVER_EXIT_CODE
        assert not heartbeats.statuses()
    finally:
        heartbeats.close()


def test_a_driver_that_is_not_there_is_an_error_at_once(
    tmp_path: Path, server: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = write_launch(tmp_path, port_of(server))
    server.close()
    tried = []
    connect = socket.create_connection

    def counted(*arguments: Any, **options: Any) -> socket.socket:
        tried.append(arguments)
        return connect(*arguments, **options)

    monkeypatch.setattr(socket, "create_connection", counted)
    with pytest.raises(ConnectionRefusedError):
        Heartbeat(launch, "agent")
    assert len(tried) == 1
    with pytest.raises(ValueError, match="no heartbeat"):
        Heartbeat(launch.model_copy(update={"lifeline": None}), "agent")


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_driver_for_other_hosts_is_reached_by_either_protocol(tmp_path: Path, address: str) -> None:
    if not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    heartbeats = HeartbeatServer(TOKEN, "")
    try:
        launch = write_launch(tmp_path, heartbeats.port, lifeline=f"{address}:{heartbeats.port}")
        line = Heartbeat(launch, "rank 0")
        wait_until(lambda: 0 in heartbeats.statuses(), "it is heard")
        line.close()
        assert heartbeats.statuses()[0].pid == os.getpid()
    finally:
        heartbeats.close()
