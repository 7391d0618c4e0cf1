"""Asks every host of a hostfile whether it is there, within a bounded time, by ssh as ranks are started on it."""

from __future__ import annotations

import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from vitscale.errors import printable
from vitscale.machine.hosts import Host, is_this_machine
from vitscale.schedulers.hostfile import on_host
from vitscale.store.check_records import HostAnswer

RESOLVE_SECONDS = 10.0
ANSWER_SECONDS = 30.0
_AT_ONCE = 64
_SSH_FAILED = 255

Answer = TypeVar("Answer")


def ask(hosts: Sequence[Host], file: Path) -> tuple[HostAnswer, ...]:
    """What each host answers when it is asked to read `file`, in the order of `hosts`."""
    if not hosts:
        return ()
    with ThreadPoolExecutor(min(_AT_ONCE, len(hosts)), "vitscale-reach") as pool:
        return tuple(pool.map(lambda host: _answer(host.name, file), hosts))


def _answer(name: str, file: Path) -> HostAnswer:
    began = time.monotonic()
    address = _within(RESOLVE_SECONDS, lambda: _resolved(name))
    if address is None:
        reason = f"its name is not resolved within {RESOLVE_SECONDS:g} s"
        return HostAnswer(name=name, address=None, seconds=None, reason=reason)
    if address.startswith("!"):
        reason = f"its name is not resolved: {address[1:]}"
        return HostAnswer(name=name, address=None, seconds=None, reason=reason)
    if _within(RESOLVE_SECONDS, lambda: is_this_machine(name)):
        return HostAnswer(name=name, address=address, seconds=time.monotonic() - began, sees_folder=file.exists())
    try:
        done = subprocess.run(
            on_host(name, ["test", "-r", str(file)]),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=ANSWER_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        reason = f"no answer to ssh within {ANSWER_SECONDS:g} s"
        return HostAnswer(name=name, address=address, seconds=None, reason=reason)
    except OSError as error:
        return HostAnswer(name=name, address=address, seconds=None, reason=f"ssh cannot be run here: {error.strerror}")
    if done.returncode == _SSH_FAILED or done.returncode < 0:
        said = printable(done.stderr).strip().splitlines()
        return HostAnswer(name=name, address=address, seconds=None, reason=(said[-1][:300] if said else "ssh failed"))
    return HostAnswer(name=name, address=address, seconds=time.monotonic() - began, sees_folder=done.returncode == 0)


def _resolved(name: str) -> str:
    """The first address of a name; after an exclamation mark, why there is none."""
    try:
        return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError) as error:
        return f"!{getattr(error, 'strerror', None) or error}"


def _within(seconds: float, ask: Callable[[], Answer]) -> Answer | None:
    """What `ask` returns, or None where it takes longer: the resolver cannot be told when to give up."""
    answer: list[Answer] = []
    thread = threading.Thread(target=lambda: answer.append(ask()), daemon=True)
    thread.start()
    thread.join(seconds)
    return answer[0] if answer else None
