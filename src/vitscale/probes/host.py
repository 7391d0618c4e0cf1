"""What a host has beside its processors: the disk that holds the results (room, how long a record takes to be safe on
it, whether all hosts see it), and its network interfaces, as the kernel tells of them."""

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
"""About one step of one rank."""
_RECORDS = 20


def free_bytes(folder: Path) -> int:
    """Room on the disk of `folder`, for this user."""
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
    """Rank 0's part: writes the file that the others look for."""
    draft = folder / ".shown.draft"
    draft.write_text(text, encoding="ascii")
    draft.replace(folder / ".shown")


def seen_after(folder: Path, text: str, seconds: float) -> float | None:
    """The others' part: how long until the file is there with `text` in it; None: not within `seconds`."""
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
    """All interfaces by name; what the kernel does not tell of one is None."""
    addresses = psutil.net_if_addrs()
    try:
        names = sorted(path.name for path in folder.iterdir() if path.is_dir())
    except OSError:
        names = sorted(addresses)
    return tuple(_interface(folder / name, _addresses(addresses.get(name, []))) for name in names)


def _interface(folder: Path, addresses: tuple[str, ...]) -> Interface:
    kind = kernel_text(folder / "type") or ""
    # The loopback interface and many tunnels say "unknown" while they work; the flag IFF_UP is what counts there.
    state, flags = kernel_text(folder / "operstate"), kernel_text(folder / "flags") or "0"
    speed = kernel_text(folder / "speed") or ""
    # Of a veth or a bridge the kernel says 10 Gbit/s, whatever it leads to; -1 is its word for unknown.
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
    """The addresses of the host's own name, in the resolver's order: what gloo listens on by default is the first."""
    try:
        answers = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return ()
    return tuple(dict.fromkeys(str(answer[4][0]) for answer in answers))


def kernel_text(path: Path) -> str | None:
    """What a file of the kernel's says; None where it is not there or says nothing."""
    try:
        return path.read_text(encoding="ascii", errors="replace").strip() or None
    except OSError:
        return None
