"""Makes this Python, and each that it starts, like one on macOS: without what only Linux has.

Put the folder of this file on PYTHONPATH. Names that CPython has on Linux alone are gone
(https://docs.python.org/3/library/os.html, "Availability"), nothing below /proc and /sys exists, memory cannot be
bounded, and `sys.platform` is "darwin" for all that is imported from now on. What the standard library and psutil
choose by the platform is imported before.
"""

from __future__ import annotations

import asyncio  # noqa: F401
import builtins
import ctypes
import fcntl
import functools
import io
import multiprocessing.pool
import multiprocessing.resource_tracker  # noqa: F401
import os
import platform  # noqa: F401
import resource
import select
import shutil  # noqa: F401
import signal
import socket
import subprocess  # noqa: F401
import sys
import tempfile  # noqa: F401
import time
import urllib.request  # noqa: F401
from typing import Any

import psutil  # noqa: F401

ONLY_ON_LINUX: dict[Any, tuple[str, ...]] = {
    os: (
        *("sched_getaffinity", "sched_setaffinity", "sched_getscheduler", "sched_setscheduler", "sched_getparam"),
        *("sched_setparam", "sched_rr_get_interval", "posix_fallocate", "posix_fadvise", "copy_file_range", "splice"),
        *("memfd_create", "eventfd", "eventfd_read", "eventfd_write", "pidfd_open", "setns", "unshare", "getrandom"),
        *("pipe2", "getxattr", "setxattr", "listxattr", "removexattr", "getresuid", "getresgid", "setresuid"),
        *("setresgid", "fdatasync", "waitid", "timerfd_create", "O_TMPFILE", "O_DIRECT", "O_PATH", "O_NOATIME"),
        *("O_LARGEFILE", "O_RSYNC"),
    ),
    signal: ("sigtimedwait", "sigwaitinfo", "pidfd_send_signal", "SIGRTMIN", "SIGRTMAX", "SIGPWR", "SIGPOLL", "SIGCLD"),
    select: ("epoll", "EPOLLIN", "EPOLLOUT", "EPOLLERR", "EPOLLHUP"),
    resource: ("prlimit", "RUSAGE_THREAD", "RLIMIT_NICE", "RLIMIT_RTPRIO", "RLIMIT_SIGPENDING", "RLIMIT_MSGQUEUE"),
    socket: (
        *("SO_PEERCRED", "SOCK_CLOEXEC", "SOCK_NONBLOCK", "AF_NETLINK", "AF_PACKET", "SO_BINDTODEVICE", "SO_DOMAIN"),
        *("SO_PROTOCOL", "TCP_USER_TIMEOUT", "TCP_CORK", "TCP_DEFER_ACCEPT", "TCP_QUICKACK", "MSG_NOSIGNAL"),
    ),
    time: ("CLOCK_BOOTTIME", "CLOCK_TAI"),
    fcntl: ("F_SETPIPE_SZ", "F_GETPIPE_SZ", "F_OFD_SETLK", "F_OFD_GETLK", "F_OFD_SETLKW", "F_ADD_SEALS", "F_SETSIG"),
}
"""Module -> its names that CPython does not have on macOS."""


def refuse_proc(function: Any) -> Any:
    """The function, which finds nothing below /proc and /sys."""

    @functools.wraps(function)
    def refusing(path: Any = ".", *arguments: Any, **keywords: Any) -> Any:
        if isinstance(path, str | bytes | os.PathLike):
            name = os.fsdecode(path)
            if name in ("/proc", "/sys") or name.startswith(("/proc/", "/sys/")):
                raise FileNotFoundError(2, "No such file or directory", name)
        return function(path, *arguments, **keywords)

    return refusing


def refuse_memory_bounds(which: int, limits: tuple[int, int], _set: Any = resource.setrlimit) -> None:
    """`setrlimit` of macOS, which refuses RLIMIT_AS."""
    if which == resource.RLIMIT_AS:
        raise ValueError("current limit exceeds maximum limit")
    _set(which, limits)


class _Library(ctypes.CDLL):
    """The C library without `prctl` and the like."""

    def __getattr__(self, name: str) -> Any:
        if name in ("prctl", "setns", "unshare", "memfd_create", "gettid", "sched_setaffinity"):
            raise AttributeError(f"dlsym(RTLD_DEFAULT, {name}): symbol not found")
        return super().__getattr__(name)


def become_a_mac() -> None:
    """Takes all of it away."""
    for module, names in ONLY_ON_LINUX.items():
        for name in names:
            if hasattr(module, name):
                delattr(module, name)
    builtins.open = io.open = refuse_proc(builtins.open)
    for name in ("open", "stat", "lstat", "listdir", "scandir", "readlink", "access"):
        setattr(os, name, refuse_proc(getattr(os, name)))
    setattr(resource, "setrlimit", refuse_memory_bounds)  # noqa: B010 - for mypy it is a function
    setattr(ctypes, "CDLL", _Library)  # noqa: B010
    sys.platform = "darwin"


become_a_mac()
