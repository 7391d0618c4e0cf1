"""Hosts by name, and how many ranks each takes; hostfiles in DeepSpeed's and Open MPI's form."""

from __future__ import annotations

import functools
import re
import socket
from dataclasses import dataclass
from pathlib import Path

from vitscale.base.files import read_text
from vitscale.errors import RequestError, shown

# Names are passed on other programs' command lines: no leading dash, nothing that a shell would interpret.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,252}")
_MOST_HOSTS = 10_000


@dataclass(frozen=True)
class Host:
    """A machine, by the name under which others reach it."""

    name: str
    slots: int | None = None
    """Ranks it takes; None where the hostfile does not say."""


def read_hostfile(path: Path) -> tuple[Host, ...]:
    """Reads lines `NAME`, `NAME slots=4` or `NAME:4`; `#` begins a comment, other `key=value` words are ignored.

    Raises:
        RequestError: it cannot be read, names no host, too many or one twice, or has another line (with its number).
    """
    text = read_text(path, "hostfile", next_step="Write one line per host: NAME slots=4")
    hosts: dict[str, Host] = {}
    for number, raw in enumerate(text.splitlines(), start=1):
        words = raw.partition("#")[0].split()
        if not words:
            continue
        host = _host(words)
        if host is None or host.name in hosts:
            wrong = "names a host twice" if host is not None else "is no line of a hostfile"
            what = f"hostfile {shown(str(path))}, line {number} {wrong}: {shown(raw.strip())}"
            raise RequestError(what, next_step="Write one line per host: NAME slots=4")
        hosts[host.name] = host
    if not hosts or len(hosts) > _MOST_HOSTS:
        what = "names no host" if not hosts else f"names {len(hosts):,} hosts"
        raise RequestError(f"hostfile {shown(str(path))} {what}", next_step="Write one line per host: NAME slots=4")
    return tuple(hosts.values())


def _host(words: list[str]) -> Host | None:
    name, slots = words[0], None
    if match := re.fullmatch(r"([^:]+):(\d{1,4})", name):  # Open MPI's short form; an IPv6 address has more colons
        name, slots = match[1], int(match[2])
    for word in words[1:]:
        key, equals, value = word.partition("=")
        if not equals:
            return None
        if key.lower() in ("slots", "slot"):
            if not (value.isascii() and value.isdigit() and len(value) <= 4):
                return None
            slots = int(value)
    if not _NAME.fullmatch(name) or slots == 0:
        return None
    return Host(name, slots)


@functools.cache
def is_this_machine(name: str) -> bool:
    """Whether `name` is an address or a name of this machine (or of this process's network namespace)."""
    own = ("localhost", "127.0.0.1", "::1", socket.gethostname())
    return name in own or any(map(can_bind, _addresses(name)))


def address_of(name: str) -> str | None:
    """The first address of a host; None where its name does not resolve here."""
    return next(iter(_addresses(name)), None)


@functools.cache
def _addresses(name: str) -> tuple[str, ...]:
    """The addresses of a host; none where its name does not resolve here.

    Cached: every trial asks, and a name that does not resolve can take seconds.
    """
    try:
        return tuple(str(info[4][0]) for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM))
    except (OSError, UnicodeError):  # UnicodeError: an empty or an overlong part between two dots
        return ()


def can_bind(address: str, port: int = 0) -> bool:
    """Whether `port` (0: any) of an address can be bound here: it is free, and the address is this machine's own."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, port))
        except OSError:
            return False
    return True
