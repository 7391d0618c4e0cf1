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
    """Read lines `NAME`, `NAME slots=4` or `NAME:4`; `#` begins a comment, other `key=value` words are ignored.

    Raises:
        RequestError: it cannot be read, names no host, too many or one twice, or has another line (with its number).
    """
    text = read_text(path, "hostfile", next_step="Write one line per host: NAME slots=4")
    hosts: dict[str, Host] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        host = _parse_host(words)
        if host is None:
            raise _wrong_hostfile(path, f", line {number} is no line of a hostfile: {shown(line.strip())}")
        if host.name in hosts:
            raise _wrong_hostfile(path, f", line {number} names a host twice: {shown(line.strip())}")
        hosts[host.name] = host
    if not hosts:
        raise _wrong_hostfile(path, " names no host")
    if len(hosts) > _MOST_HOSTS:
        raise _wrong_hostfile(path, f" names {len(hosts):,} hosts")
    return tuple(hosts.values())


def _wrong_hostfile(path: Path, fault: str) -> RequestError:
    """Return the error of a hostfile. Args: fault: the rest of the sentence, as " names no host"."""
    return RequestError(f"hostfile {shown(str(path))}{fault}", next_step="Write one line per host: NAME slots=4")


def _parse_host(words: list[str]) -> Host | None:
    """Return the host that the words of a line name; None where they are no line of a hostfile.

    The first word is the host's name, or NAME:SLOTS. The others are `key=value`. `slots=4` and `slot=4` give the slots,
    and the last of several counts. Other keys are ignored. No line of a hostfile has a word without "=", slots that are
    no number from 1 to 9999, or a name with other characters than a host's.
    """
    name = words[0]
    slots = None
    match = re.fullmatch(r"([^:]+):(\d{1,4})", name)  # Open MPI's short form; an IPv6 address has more colons
    if match is not None:
        name = match[1]
        slots = int(match[2])
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
    if name in ("localhost", "127.0.0.1", "::1", socket.gethostname()):
        return True
    if name.endswith(".invalid"):  # it leads nowhere by RFC 6761, and asking for it may take seconds
        return False
    return any(can_bind(address) for address in _resolved_addresses(name))


def address_of(name: str) -> str | None:
    """Return the first address of a host; None where its name does not resolve here."""
    addresses = _resolved_addresses(name)
    return addresses[0] if addresses else None


@functools.cache
def _resolved_addresses(name: str) -> tuple[str, ...]:
    """Return the addresses of a host; none where its name does not resolve here.

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
