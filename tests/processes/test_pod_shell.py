"""The shell between pods, over real connections: what it runs, what comes back, and whom it refuses."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from vitscale.processes import pod_shell
from vitscale.processes.pod_shell import PodRequest, PodShellError, PodShellServer, call, make_key


class Served:
    """A server with its key, and what it says."""

    def __init__(self, folder: Path) -> None:
        self.key_file = folder / "key"
        make_key(self.key_file)
        self.lines: list[str] = []
        self.server = PodShellServer(self.key_file, self.lines.append, port=0)
        self.codes: list[int] = []
        self.thread = threading.Thread(target=lambda: self.codes.append(self.server.serve()))
        self.thread.start()

    def ask(self, request: PodRequest, key_file: Path | None = None) -> tuple[int, bytes]:
        """Exit code and output of a request."""
        output = io.BytesIO()
        code = call(
            key_file or self.key_file, "127.0.0.1", request, output, patience_seconds=0.0, port=self.server.port
        )
        return code, output.getvalue()

    def end(self) -> None:
        if self.thread.is_alive():
            self.ask(PodRequest(finish_code=0))
        self.thread.join()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    served = Served(tmp_path)
    yield served
    served.end()


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-S", "-c", code)


def test_a_command_runs_in_the_callers_folder_and_its_output_and_exit_code_come_back(
    served: Served, tmp_path: Path
) -> None:
    code = "import os, sys; print(os.getcwd(), flush=True); print('wrong', file=sys.stderr); sys.exit(7)"
    assert served.ask(PodRequest(python(code), str(tmp_path))) == (7, f"{tmp_path}\nwrong\n".encode())


def test_more_output_than_a_frame_comes_whole(served: Served) -> None:
    code, output = served.ask(PodRequest(python("print('x' * 300_000)")))
    assert (code, output) == (0, b"x" * 300_000 + b"\n")


@pytest.mark.parametrize(
    ("argv", "exit_code"),
    [
        (python(f"import os; os.kill(os.getpid(), {int(signal.SIGKILL)})"), 128 + int(signal.SIGKILL)),
        (("/no/such/program",), 127),
        (("nul\0",), 127),
    ],
)
def test_an_end_that_is_no_exit_is_a_shells_code(served: Served, argv: tuple[str, ...], exit_code: int) -> None:
    assert served.ask(PodRequest(argv))[0] == exit_code


def test_what_kubeflow_sets_for_torchrun_stays_in_the_pod(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_NNODES", "8")
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    code = "import os; print(os.environ.get('PET_NNODES'), os.environ.get('NCCL_DEBUG'))"
    assert served.ask(PodRequest(python(code))) == (0, b"None WARN\n")


def test_it_ends_with_the_code_that_it_is_told(served: Served) -> None:
    assert served.ask(PodRequest()) == (0, b"")
    assert served.thread.is_alive()
    assert served.ask(PodRequest(finish_code=1)) == (0, b"")
    served.thread.join()
    assert served.codes == [1]


def test_another_key_starts_nothing(served: Served, tmp_path: Path) -> None:
    other_key = tmp_path / "other"
    make_key(other_key)
    mark = tmp_path / "ran"
    with pytest.raises(PodShellError, match="closed the connection"):
        served.ask(PodRequest(("touch", str(mark))), other_key)
    served.end()
    assert not mark.exists()
    assert "wrong proof" in served.lines[0]


def test_an_overheard_request_starts_nothing(served: Served, tmp_path: Path) -> None:
    """The proof is of one connection's challenge, and each connection has its own."""
    text = PodRequest(("touch", str(tmp_path / "ran"))).to_json()
    overheard = {"request": text, "proof": pod_shell._proof(served.key_file, "an earlier challenge", text)}
    assert _answer(served, json.dumps(overheard).encode() + b"\n") == b""
    served.end()
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "sent",
    [
        b"\n", b"{}\n", b"[]\n", b"\xff\n", b"[" * 5000 + b"\n", b'{"request": 1, "proof": 2}\n',
        '{"request": "", "proof": "\u00e9"}\n'.encode(),
    ],
)  # fmt: skip
def test_whoever_proves_nothing_gets_no_answer_and_the_server_goes_on(served: Served, sent: bytes) -> None:
    assert _answer(served, sent) == b""
    assert served.ask(PodRequest()) == (0, b"")


def _answer(served: Served, sent: bytes) -> bytes:
    """What comes after the challenge."""
    with socket.create_connection(("127.0.0.1", served.server.port)) as connection:
        challenge = b""
        while not challenge.endswith(b"\n"):
            challenge += connection.recv(1)
        connection.sendall(sent)
        try:
            return connection.recv(100)
        except ConnectionResetError:  # closed with bytes unread
            return b""


@pytest.mark.parametrize(
    "text",
    [
        "[]", "{}", '{"argv": "ls", "cwd": "/", "finish_code": null}', '{"argv": [1], "cwd": "/", "finish_code": null}',
        '{"argv": [], "cwd": 1, "finish_code": null}', '{"argv": [], "cwd": "/", "finish_code": 256}', "nonsense",
    ],
)  # fmt: skip
def test_a_proved_text_that_is_no_request_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"no request|Expecting"):
        PodRequest.from_json(text)


def test_a_request_survives_its_line() -> None:
    request = PodRequest(("a b", "'", "é\n"), "/x", 2)
    assert PodRequest.from_json(request.to_json()) == request


def test_a_key_is_its_owners_alone_and_stays(tmp_path: Path) -> None:
    key_file = tmp_path / "key"
    make_key(key_file)
    first = key_file.read_text()
    make_key(key_file)
    assert key_file.read_text() == first
    assert len(first) == 64
    assert key_file.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


def test_the_program_ends_as_the_command_does(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pod_shell, "call", _with_port(served.server.port))
    argv = [str(served.key_file), "127.0.0.1", "--", *python("import sys; sys.exit(9)")]
    assert pod_shell.main(argv) == 9


def _with_port(port: int):  # type: ignore[no-untyped-def]
    def ask(key_file: Path, host: str, request: PodRequest, output: object) -> int:
        del output
        return call(key_file, host, request, patience_seconds=0.0, port=port)

    return ask


def test_a_pod_that_is_not_there_is_said(tmp_path: Path) -> None:
    make_key(tmp_path / "key")
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(PodShellError, match=f"pod 127.0.0.1 is not reached on port {port}"):
        call(tmp_path / "key", "127.0.0.1", PodRequest(), patience_seconds=0.0, port=port)


def test_wrong_arguments_get_the_usage() -> None:
    argv = [sys.executable, "-P", "-m", "vitscale.processes.pod_shell", "key", "host"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, env=dict(os.environ))
    assert (done.returncode, done.stderr) == (
        1,
        "usage: python -m vitscale.processes.pod_shell KEY_FILE HOST -- COMMAND...\n",
    )
