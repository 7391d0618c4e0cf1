"""Reads a host's network interfaces, and tries the disk that holds the results: its room, how long a record takes to be
safe on it, and whether all hosts see it."""

from __future__ import annotations

import ipaddress
import os
import shutil
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import psutil

from vitscale.store.checks import InfinibandPort, Interface

_RECORD_BYTES = 300
"""Bytes of about one step of one rank."""
_RECORDS = 20
"""Number of records that are timed."""
_PIECE_BYTES = 16 << 20
_MOST_WRITTEN_BYTES = 256 << 20
_WRITING_SECONDS = 1.0
"""A large file is written in pieces of `_PIECE_BYTES`, up to this size and for this long."""


class RecordTimes(NamedTuple):
    """How long records took to be safe on a disk."""

    record_bytes: int
    """Size of each record."""
    seconds: tuple[float, ...]
    """Seconds of each append with fsync."""


def free_bytes(folder: Path) -> int:
    """Returns the bytes free for this user on the disk of `folder`."""
    return shutil.disk_usage(folder).free


def time_records(folder: Path, rank: int) -> RecordTimes:
    """Appends records to a file of this rank, forces each to disk, and returns how long each took. Removes the file.

    Raises:
        OSError: the disk does not take them.
    """
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
    return RecordTimes(_RECORD_BYTES, tuple(seconds))


def write_rate(folder: Path, rank: int) -> float | None:
    """Writes a large file of this rank in pieces that are each forced to disk, and returns its bytes per second.

    The file grows to `_MOST_WRITTEN_BYTES`, or for `_WRITING_SECONDS`, and is removed. Its content is random, so that
    no file system makes it smaller.

    Returns:
        None where the disk has not ten times that much room.

    Raises:
        OSError: the disk does not take it.
    """
    if free_bytes(folder) < 10 * _MOST_WRITTEN_BYTES:
        return None
    path = folder / f".written-{rank}"
    piece = os.urandom(_PIECE_BYTES)
    written_bytes = 0
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        began = time.perf_counter()
        while written_bytes < _MOST_WRITTEN_BYTES and time.perf_counter() - began < _WRITING_SECONDS:
            written_bytes += os.write(file, piece)
            os.fsync(file)
        seconds = time.perf_counter() - began
    finally:
        os.close(file)
        path.unlink(missing_ok=True)
    return written_bytes / seconds


def write_sign(folder: Path, text: str) -> None:
    """Writes a file with `text` that other ranks look for (`seconds_until_sign`); called by rank 0."""
    draft = folder / ".shown.draft"
    draft.write_text(text, encoding="ascii")
    draft.replace(folder / ".shown")


def seconds_until_sign(folder: Path, text: str, limit_seconds: float) -> float | None:
    """Waits until this rank sees the file that rank 0 has written with `text` in it (`write_sign`).

    Returns:
        The seconds that it waited; None where it does not see the file within `limit_seconds`.
    """
    began = time.perf_counter()
    while True:
        waited_seconds = time.perf_counter() - began
        if waited_seconds >= limit_seconds:
            return None
        try:
            if (folder / ".shown").read_text(encoding="ascii") == text:
                return waited_seconds
        except (OSError, UnicodeDecodeError):
            pass
        time.sleep(0.005)


# The kernel's ARPHRD_* numbers (include/uapi/linux/if_arp.h).
_INTERFACE_KINDS: dict[int, Literal["ethernet", "infiniband", "loopback"]] = {
    1: "ethernet",
    32: "infiniband",
    772: "loopback",
}


def interfaces(folder: Path = Path("/sys/class/net")) -> tuple[Interface, ...]:
    """Returns all interfaces, sorted by name; a value is None where the kernel does not report it.

    Args:
        folder: the kernel's folder of interfaces. Where it cannot be read, those with an address are returned.
    """
    addresses = psutil.net_if_addrs()
    try:
        names = sorted(path.name for path in folder.iterdir() if path.is_dir())
    except OSError:
        names = sorted(addresses)
    return tuple(_read_interface(folder / name, _addresses_of_interface(addresses.get(name, []))) for name in names)


def _read_interface(folder: Path, addresses: tuple[str, ...]) -> Interface:
    """Returns one interface, from its folder of the kernel's."""
    return Interface(
        name=folder.name,
        kind=_interface_kind(folder),
        up=_is_up(folder),
        speed_mbit=_speed_mbit(folder),
        addresses=addresses,
    )


def _interface_kind(folder: Path) -> Literal["ethernet", "infiniband", "loopback", "other"]:
    number = kernel_text(folder / "type") or ""
    if not number.isdigit():
        return "other"
    return _INTERFACE_KINDS.get(int(number), "other")


def _is_up(folder: Path) -> bool:
    """Whether an interface is up.

    The kernel says "unknown" of the loopback interface and of many tunnels. For these the flag IFF_UP counts.
    """
    state = kernel_text(folder / "operstate")
    if state == "unknown":
        return _has_up_flag(kernel_text(folder / "flags") or "0")
    return state == "up"


def _speed_mbit(folder: Path) -> int | None:
    """Returns the speed of an interface that has hardware of its own, in Mbit/s; None where it is not known.

    The kernel reports 10 Gbit/s for a veth or a bridge, wherever it leads, and -1 for a link that is down.
    """
    is_real = (folder / "device").exists() or (folder / "bonding").exists()
    text = kernel_text(folder / "speed") or ""
    if not is_real or not text.isdigit():
        return None
    speed = int(text)
    return speed if 0 < speed < 2**31 else None


def _has_up_flag(flags: str) -> bool:
    """Whether hexadecimal flags, as "0x1003", have IFF_UP."""
    try:
        return bool(int(flags, 16) & 1)
    except ValueError:
        return False


def _addresses_of_interface(addresses: Sequence[Any]) -> tuple[str, ...]:
    """Returns the IPv4 addresses with their prefixes ("10.0.0.2/24"), then those of IPv6 without.

    Args:
        addresses: those of one interface, as psutil gives them.
    """
    ipv4 = [_ipv4_with_prefix(address) for address in addresses if address.family == socket.AF_INET]
    ipv6 = [address.address.partition("%")[0] for address in addresses if address.family == socket.AF_INET6]
    return (*ipv4, *ipv6)


def _ipv4_with_prefix(address: Any) -> str:
    netmask = address.netmask or "255.255.255.255"
    try:
        return str(ipaddress.IPv4Interface(f"{address.address}/{netmask}"))
    except ValueError:
        return str(address.address)


def infiniband_ports(folder: Path = Path("/sys/class/infiniband")) -> tuple[InfinibandPort, ...]:
    """Returns the ports of all InfiniBand and RoCE adapters; empty where there is none."""
    return tuple(_infiniband_port(port) for port in sorted(folder.glob("*/ports/*")))


def _infiniband_port(port: Path) -> InfinibandPort:
    """Returns one port, from its folder of the kernel's: mlx5_0/ports/1."""
    adapter = port.parent.parent
    return InfinibandPort(
        name=f"{adapter.name}:{port.name}",
        active="ACTIVE" in (kernel_text(port / "state") or ""),
        rate=kernel_text(port / "rate") or "unavailable",
        link_layer=kernel_text(port / "link_layer"),
        numa_node=_kernel_count(adapter / "device" / "numa_node"),
        pcie_speed=kernel_text(adapter / "device" / "current_link_speed"),
        pcie_width=_kernel_count(adapter / "device" / "current_link_width"),
    )


def _kernel_count(path: Path) -> int | None:
    """Returns the number in a kernel's file; None where there is none, or -1 for "unknown"."""
    text = kernel_text(path) or ""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None


GPU_DIRECT_MODULES = ("nvidia_peermem", "nv_peer_mem")
"""Kernel modules by which an InfiniBand adapter reads and writes the memory of a GPU; the second is the older one."""


def gpu_direct_modules(modules: Path = Path("/proc/modules")) -> tuple[str, ...] | None:
    """Returns those of `GPU_DIRECT_MODULES` that are loaded; None where the kernel's list cannot be read."""
    try:
        text = modules.read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    loaded = {line.split(" ", 1)[0] for line in text.splitlines()}
    return tuple(name for name in GPU_DIRECT_MODULES if name in loaded)


def hostname_addresses() -> tuple[str, ...]:
    """Returns the addresses of the host's own name, in the resolver's order; gloo listens on the first by default."""
    try:
        answers = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return ()
    return tuple(dict.fromkeys(str(answer[4][0]) for answer in answers))


def kernel_text(path: Path) -> str | None:
    """Returns the text of a kernel's file; None where there is none or it is empty."""
    try:
        return path.read_text(encoding="ascii", errors="replace").strip() or None
    except OSError:
        return None
