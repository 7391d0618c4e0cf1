"""The command's output: every byte is passed on, the log has its two ends, and no secret."""

from __future__ import annotations

import fcntl
import os
import struct
import subprocess
import sys
import termios
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitscale.explanation import command_output
from vitscale.explanation.command_output import CommandOutput, OutputLog, OutputTargets, SecretMask, secret_values

SECRET = b"hf_abcdefgh12"


def run(argv: Sequence[str], targets: OutputTargets, log: OutputLog) -> None:
    """Runs a program to its end with its output passed on."""
    output = CommandOutput(targets, log)
    process = subprocess.Popen(argv, stdout=output.stdout, stderr=output.stderr, start_new_session=True)
    output.start()
    process.wait()
    output.close(seconds=60.0)


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_both_streams_are_passed_on_and_logged(tmp_path: Path) -> None:
    with (tmp_path / "out").open("wb") as out, (tmp_path / "err").open("wb") as err:
        log = OutputLog(tmp_path / "log")
        code = "import os; os.write(1, bytes(range(256))); os.write(2, b'second')"
        run(python(code), OutputTargets(out.fileno(), err.fileno()), log)
    assert (tmp_path / "out").read_bytes() == bytes(range(256))
    assert (tmp_path / "err").read_bytes() == b"second"
    logged = (tmp_path / "log").read_bytes()
    assert sorted(logged) == sorted(bytes(range(256)) + b"second")
    assert log.total_bytes == 262


def test_one_target_keeps_the_order_of_both_streams(tmp_path: Path) -> None:
    code = "import os\nfor number in range(500): os.write(1 + number % 2, b'%d\\n' % number)"
    with (tmp_path / "both").open("wb") as both:
        run(python(code), OutputTargets(both.fileno(), both.fileno()), OutputLog(tmp_path / "log"))
    expected = b"".join(b"%d\n" % number for number in range(500))
    assert (tmp_path / "both").read_bytes() == expected
    assert (tmp_path / "log").read_bytes() == expected


def test_a_command_on_a_terminal_prints_to_a_terminal_of_its_size(tmp_path: Path) -> None:
    master, terminal = os.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 77, 0, 0))
    code = "import os, sys; print(sys.stdout.isatty(), sys.stderr.isatty(), *os.get_terminal_size())"
    log = OutputLog(tmp_path / "log")
    run(python(code), OutputTargets(terminal, terminal), log)
    assert (tmp_path / "log").read_bytes() == b"True True 77 33\n"
    assert os.read(master, 100) == b"True True 77 33\r\n"  # the terminal's own work, done once
    os.close(master)
    os.close(terminal)


def test_long_output_is_kept_at_both_ends_and_passed_on_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_output, "HEAD_BYTES", 1000)
    monkeypatch.setattr(command_output, "TAIL_BYTES", 500)
    code = "import os\nfor number in range(10_000): os.write(1, b'%07d\\n' % number)"
    with (tmp_path / "out").open("wb") as out:
        log = OutputLog(tmp_path / "log")
        run(python(code), OutputTargets(out.fileno(), out.fileno()), log)
    whole = b"".join(b"%07d\n" % number for number in range(10_000))
    assert (tmp_path / "out").read_bytes() == whole
    marker = b"\n... 78,500 bytes are left out here ...\n"
    assert (tmp_path / "log").read_bytes() == whole[:1000] + marker + whole[-500:]
    assert log.last_lines(2) == ["0009998", "0009999"]


def test_a_log_a_little_longer_than_its_head_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_output, "HEAD_BYTES", 10)
    monkeypatch.setattr(command_output, "TAIL_BYTES", 10)
    log = OutputLog(tmp_path / "log")
    log.write(b"0123456789abcde")
    log.close()
    assert (tmp_path / "log").read_bytes() == b"0123456789abcde"


def test_a_reader_that_has_gone_stops_nothing(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    code = "print('x' * 1_000_000); print('done')"
    log = OutputLog(tmp_path / "log")
    run(python(code), OutputTargets(writer, writer), log)
    os.close(writer)
    assert log.last_lines(1) == ["done"]


def test_a_process_that_holds_the_output_open_is_not_waited_for(tmp_path: Path) -> None:
    log = OutputLog(tmp_path / "log")
    output = CommandOutput(OutputTargets(), log)
    holder = subprocess.Popen(python("print('said', flush=True); input()"), stdin=subprocess.PIPE, stdout=output.stdout)
    output.start()
    try:
        while not log.total_bytes:
            pass
        output.close(seconds=0.1)
        assert (tmp_path / "log").read_bytes() == b"said\n"
        assert holder.poll() is None
    finally:
        holder.kill()
        holder.communicate()


def test_secrets_of_the_environment_are_masked_in_the_log_alone(tmp_path: Path) -> None:
    log = OutputLog(tmp_path / "log", secret_values({"HF_TOKEN": SECRET.decode(), "HOME": "/home/somebody"}))
    code = "import os; os.write(1, b'token hf_abc'); os.write(1, b'defgh12 at /home/somebody')"
    with (tmp_path / "out").open("wb") as out:
        run(python(code), OutputTargets(out.fileno(), out.fileno()), log)
    assert (tmp_path / "out").read_bytes() == b"token hf_abcdefgh12 at /home/somebody"
    assert (tmp_path / "log").read_bytes() == b"token (not shown) at /home/somebody"
    assert log.last_lines(1) == ["token (not shown) at /home/somebody"]


def test_short_and_plain_values_are_no_secrets_to_mask() -> None:
    assert secret_values({"TOKEN": "abc", "API_KEY": "disabled", "MY_TOKEN": "k3y-0123456789"}) == [b"k3y-0123456789"]


@given(st.lists(st.sampled_from([b"a", b"hf_", b"abcdefgh", b"12", SECRET, b"\n"]), max_size=30), st.data())
def test_a_secret_is_masked_wherever_the_stream_is_cut(pieces: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(pieces)
    mask = SecretMask([SECRET])
    masked = b""
    begin = 0
    while begin < len(stream):
        end = data.draw(st.integers(begin + 1, len(stream)))
        masked += mask.feed(stream[begin:end])
        begin = end
    masked += mask.finish()
    assert masked == stream.replace(SECRET, b"(not shown)")
