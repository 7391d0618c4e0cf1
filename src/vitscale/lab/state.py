"""The plan of a lab, checked before anything is made; and its state, kept in its folder for later commands."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from vitscale.errors import RequestError, VitscaleError, shown
from vitscale.lab.processes import Process, pid_namespace
from vitscale.lab.quota import LEAST_CORES

DEFAULT_NAME = "default"
MOST_HOSTS = 64
LEAST_MBIT = 1.0
MOST_MBIT = 100_000.0
MOST_SLOTS = 1024
_LAB_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,30}")
_BANDWIDTH = re.compile(r"(?P<number>[0-9]{1,6}(?:\.[0-9]{1,6})?)(?P<unit>mbit|gbit)")
_MBIT_BY_UNIT = {"mbit": 1.0, "gbit": 1000.0}


@dataclass(frozen=True)
class LabPlan:
    """The hosts to make, and what each of them has.

    Raises:
        RequestError: a value is out of range.
    """

    name: str = DEFAULT_NAME
    hosts: int = 2
    bandwidth_mbit: float | None = None
    """Most megabits per second that a host sends, and that it receives; None: no limit."""
    cores_per_host: float | None = None
    """Most CPU seconds per second for all of a host's processes together; None: no limit."""
    slots: int = 1
    """Ranks per host, as the hostfile says."""

    def __post_init__(self) -> None:
        check_name(self.name)
        _check_range("hosts", self.hosts, least=1, most=MOST_HOSTS)
        _check_range("slots", self.slots, least=1, most=MOST_SLOTS)
        if self.bandwidth_mbit is not None:
            _check_range("bandwidth in Mbit/s", self.bandwidth_mbit, least=LEAST_MBIT, most=MOST_MBIT)
        if self.cores_per_host is not None:
            _check_range("cores per host", self.cores_per_host, least=LEAST_CORES, most=os.cpu_count() or 1)


def check_name(name: str) -> str:
    """Return `name`, checked to be a possible name of a lab: it becomes part of paths.

    Raises:
        RequestError: a lab cannot have this name.
    """
    if not _LAB_NAME.fullmatch(name):
        raise RequestError(
            f"{shown(name)} cannot be the name of a lab", valid=["at most 31 of a-z, 0-9 and -, and no - in front"]
        )
    return name


def parse_bandwidth(text: str) -> float:
    """Return the megabits per second of "100mbit" or "1gbit".

    Raises:
        RequestError: it is written otherwise, or out of range.
    """
    match = _BANDWIDTH.fullmatch(text)
    megabits = float(match["number"]) * _MBIT_BY_UNIT[match["unit"]] if match else math.nan
    if not LEAST_MBIT <= megabits <= MOST_MBIT:
        raise RequestError(f"{shown(text)} is no bandwidth", valid=["a number and mbit or gbit, from 1mbit to 100gbit"])
    return megabits


def _check_range(quantity: str, value: float, *, least: float, most: float) -> None:
    """Refuse a value out of range.

    Raises:
        RequestError: it is.
    """
    if not least <= value <= most:  # false for nan too
        raise RequestError(f"{quantity}: {shown(value)}", valid=[f"{least:g} to {most:g}"])


RUN = Path("/run")
"""Folder of labs' folders: like a lab, it belongs to root and is gone after a reboot."""
PREFIX = "vitscale-lab-"
_STATE_FILE = "lab.json"


class Holder(BaseModel):
    """Two processes that hold the namespaces of a host, or of the switch."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: str
    outside: Process
    """`unshare`, which waits for `first`."""
    first: Process
    """The first process inside; everything inside ends with it."""


class State(BaseModel):
    """A laboratory, or as much of it as was made so far."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: str
    pid_namespace: str | None
    """PID namespace in which the ids of its processes are valid."""
    slots: int
    bandwidth_mbit: float | None
    switch: Holder | None = None
    hosts: tuple[Holder, ...] = ()
    missing_for_ssh: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        """Folder of everything that the lab has on disk."""
        return folder_of(self.name)

    @property
    def hostfile(self) -> Path:
        """The hostfile, with one line per host."""
        return self.folder / "hostfile"

    @property
    def cgroup(self) -> str:
        """The name of the lab's cgroup."""
        return PREFIX + self.name

    @property
    def switch_process(self) -> Process:
        """The process that holds the switch's network namespace.

        Raises:
            RequestError: the lab was never finished.
        """
        if self.switch is None:
            raise RequestError(
                f"lab {self.name!r} was never finished", next_step=f"vitscale lab down --name {self.name}"
            )
        return self.switch.first

    @property
    def holders(self) -> tuple[Holder, ...]:
        """The holders of all namespaces: the switch's and the hosts'."""
        if self.switch is None:
            return self.hosts
        return (self.switch, *self.hosts)


def folder_of(name: str) -> Path:
    """Return the folder of the lab called `name`."""
    return RUN / f"{PREFIX}{check_name(name)}"


def names() -> list[str]:
    """Return the names of all labs that have a folder."""
    return sorted(folder.name.removeprefix(PREFIX) for folder in RUN.glob(f"{PREFIX}*") if folder.is_dir())


def write(state: State) -> None:
    """Write a lab's state, whole or not at all."""
    temporary = state.folder / f"{_STATE_FILE}.new"
    temporary.write_text(state.model_dump_json(indent=1), encoding="utf-8")
    temporary.replace(state.folder / _STATE_FILE)


def read(name: str) -> State | None:
    """Read the state of the lab called `name`; None where there is no such lab, or only its folder.

    Raises:
        VitscaleError: its folder cannot be trusted or read, or the lab was made in another PID namespace.
    """
    folder = folder_of(name)
    try:
        # The file names processes that will be killed: nobody else may have written it.
        status = folder.stat()
        is_others_folder = status.st_uid != os.geteuid()
        others_may_use_it = bool(status.st_mode & 0o077)
        if is_others_folder or others_may_use_it:
            raise _untrusted_folder(folder, "others may write to it")
        state = State.model_validate_json((folder / _STATE_FILE).read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        raise _untrusted_folder(folder, "lab.json cannot be read") from error
    if state.pid_namespace != pid_namespace("self"):
        raise RequestError(
            f"lab {name!r} was made elsewhere: this is one of its hosts, or another container",
            next_step="Give the command where 'vitscale lab up' was given",
        )
    return state


def existing(name: str) -> State:
    """Read the state of the lab called `name`, which must exist.

    Raises:
        RequestError: there is no such lab.
    """
    state = read(name)
    if state is None:
        raise RequestError(
            f"there is no lab {name!r}", valid=names(), next_step=f"Make it: vitscale lab up --name {name}"
        )
    return state


def _untrusted_folder(folder: Path, reason: str) -> VitscaleError:
    return VitscaleError(
        f"{folder} is no lab's folder: {reason}", next_step="Look at it, and remove it if nothing of a lab runs"
    )
