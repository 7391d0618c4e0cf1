"""What a host has besides its processors: the disk that holds the results (its room, how long a record takes to be safe
on it, whether all hosts see it), and the network interfaces that the kernel reports."""

from __future__ import annotations

import ipaddress
import os
import shutil
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import psutil

from vitscale.store.checks import InfinibandPort, Interface

_RECORD_BYTES = 300
"""Bytes of about one step of one rank."""
_RECORDS = 20


def free_bytes(folder: Path) -> int:
    """Bytes free for this user on the disk of `folder`."""
    return shutil.disk_usage(folder).free


def record_seconds(folder: Path, rank: int) -> tuple[int, tuple[float, ...]]:
    """(bytes of a record, seconds of each append with fsync), to a file of this rank that is removed afterwards."""
    path = folder / f".probe-{rank}"
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
    line = b"x" * (_RECORD_BYTES - 1) + b"\n"
    seconds = []
    try:
        for _ in range(_RECORDS):
            began = time.perf_counter()
            os.write(file, line)
            os.fsync(file)
            seconds.append(time.perf_counter() - began)
    finally:
        os.close(file)
        path.unlink(missing_ok=True)
    return _RECORD_BYTES, tuple(seconds)


def show(folder: Path, text: str) -> None:
    """Writes the file that other ranks look for; called by rank 0."""
    draft = folder / ".shown.draft"
    draft.write_text(text, encoding="ascii")
    draft.replace(folder / ".shown")


def seen_after(folder: Path, text: str, seconds: float) -> float | None:
    """Seconds until the file is there with `text` in it; None: not within `seconds`. Called by the other ranks."""
    began = time.perf_counter()
    while (waited := time.perf_counter() - began) < seconds:
        try:
            if (folder / ".shown").read_text(encoding="ascii") == text:
                return waited
        except (OSError, UnicodeDecodeError):
            pass
        time.sleep(0.005)
    return None


# The kernel's ARPHRD_* numbers (include/uapi/linux/if_arp.h).
_KINDS: dict[int, Literal["ethernet", "infiniband", "loopback"]] = {1: "ethernet", 32: "infiniband", 772: "loopback"}


def interfaces(folder: Path = Path("/sys/class/net")) -> tuple[Interface, ...]:
    """All interfaces by name; a value is None where the kernel does not tell it."""
    addresses = psutil.net_if_addrs()
    try:
        names = sorted(path.name for path in folder.iterdir() if path.is_dir())
    except OSError:
        names = sorted(addresses)
    return tuple(_interface(folder / name, _addresses(addresses.get(name, []))) for name in names)


def _interface(folder: Path, addresses: tuple[str, ...]) -> Interface:
    kind = kernel_text(folder / "type") or ""
    # The loopback interface and many tunnels are "unknown" while they work; there the flag IFF_UP counts.
    state, flags = kernel_text(folder / "operstate"), kernel_text(folder / "flags") or "0"
    speed = kernel_text(folder / "speed") or ""
    # The kernel reports 10 Gbit/s for a veth or a bridge, wherever it leads; -1 stands for unknown.
    is_real = (folder / "device").exists() or (folder / "bonding").exists()
    return Interface(
        name=folder.name,
        kind=_KINDS.get(int(kind), "other") if kind.isdigit() else "other",
        up=state == "up" or (state == "unknown" and _is_up(flags)),
        speed_mbit=int(speed) if is_real and speed.isdigit() and 0 < int(speed) < 2**31 else None,
        addresses=addresses,
    )


def _is_up(flags: str) -> bool:
    try:
        return bool(int(flags, 16) & 1)
    except ValueError:
        return False


def _addresses(addresses: Sequence[Any]) -> tuple[str, ...]:
    four = [address for address in addresses if address.family == socket.AF_INET]
    six = [address.address.partition("%")[0] for address in addresses if address.family == socket.AF_INET6]
    with_prefix = []
    for v4 in four:
        try:
            with_prefix.append(str(ipaddress.IPv4Interface(f"{v4.address}/{v4.netmask or '255.255.255.255'}")))
        except ValueError:
            with_prefix.append(v4.address)
    return (*with_prefix, *six)


def infiniband_ports(folder: Path = Path("/sys/class/infiniband")) -> tuple[InfinibandPort, ...]:
    """The ports of all InfiniBand and RoCE adapters; empty where there is none."""
    return tuple(
        InfinibandPort(
            name=f"{port.parent.parent.name}:{port.name}",
            active="ACTIVE" in (kernel_text(port / "state") or ""),
            rate=kernel_text(port / "rate") or "unavailable",
        )
        for port in sorted(folder.glob("*/ports/*"))
    )


def hostname_addresses() -> tuple[str, ...]:
    """Addresses of the host's own name, in the resolver's order; gloo listens on the first by default."""
    try:
        answers = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return ()
    return tuple(dict.fromkeys(str(answer[4][0]) for answer in answers))


def kernel_text(path: Path) -> str | None:
    """Text of a kernel's file; None where there is none or it is empty."""
    try:
        return path.read_text(encoding="ascii", errors="replace").strip() or None
    except OSError:
        return None
