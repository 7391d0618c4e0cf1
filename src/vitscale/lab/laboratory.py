"""A laboratory in use: commands on its hosts, and faults on demand.

`python -m vitscale.lab.laboratory NAME` ends the lab when the process that makes or uses it dies. It notices through
its standard input, a pipe that the kernel closes however that process dies.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

from vitscale.base.interpreter import python_module
from vitscale.errors import RequestError, VitscaleError, unknown
from vitscale.lab import building, processes, quota
from vitscale.lab.building import INTERFACE, address, set_link
from vitscale.lab.processes import Process
from vitscale.lab.state import PREFIX, Holder, LabPlan, State, existing, folder_of, names, read


class Laboratory:
    """A lab in use; hosts are numbered from 0."""

    interface = INTERFACE
    """The name of every host's network interface."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.hostfile = state.hostfile
        """One line per host: `host0 slots=1`."""
        self.names = tuple(host.name for host in state.hosts)
        self.addresses = tuple(address(number) for number in range(len(state.hosts)))

    def command(self, host: int, argv: Sequence[str]) -> list[str]:
        """Return the argv that runs `argv` on a host, in the same folder and environment, with the same exit code.

        Signals are passed on to `argv`, and it is killed when the returned command is.
        """
        holder = self.state.hosts[host]
        return processes.enter_command(holder.first, argv, cgroup=self.state.cgroup, host=holder.name)

    def cut(self, host: int) -> None:
        """Pull the host's cable."""
        set_link(self.state.switch_process, host, "down")

    def mend(self, host: int) -> None:
        """Plug the host's cable in again."""
        set_link(self.state.switch_process, host, "up")

    def kill(self, host: int) -> None:
        """End the host and everything that runs on it, and return when it is gone."""
        end_holders([self.state.hosts[host]])

    def slow(self, host: int, cores: float) -> None:
        """Limit all processes of the host together to `cores` CPU seconds per second from now on.

        Raises:
            RequestError: this machine cannot limit them, or `cores` is out of range.
        """
        LabPlan(cores_per_host=cores)  # checks the number
        controller = quota.find_controller()
        if controller is None:
            raise quota.refused("there is no CPU controller")
        try:
            controller.limit(self.state.cgroup, self.names[host], cores)
        except OSError as error:
            raise quota.refused(str(error)) from None

    def cores(self, host: int) -> float | None:
        """Return the most CPU seconds per second for all of the host's processes together; None: no limit."""
        controller = quota.find_controller()
        if controller is None:
            return None
        return controller.cores(self.state.cgroup, self.names[host])

    def processes(self, host: int) -> list[int]:
        """Return the ids, as seen outside the lab, of a host's processes other than its first one and its sshd."""
        first = self.state.hosts[host].first
        if not first.alive:
            return []
        daemon_pid_inside = building.daemon_pid(self.state.folder / self.names[host])
        later_pids = [pid for pid in processes.in_same_namespace(first.pid) if pid != first.pid]
        return [pid for pid in later_pids if processes.innermost_id(pid) != daemon_pid_inside]


@contextmanager
def laboratory(
    hosts: int = 2,
    bandwidth_mbit: float | None = None,
    cores_per_host: float | None = None,
    slots: int = 1,
    name: str | None = None,
) -> Iterator[Laboratory]:
    """Make hosts for the length of a block. They are gone after it, even when this process is killed.

    Each host sends, and receives, `bandwidth_mbit` megabits per second at most; all its processes together get
    `cores_per_host` CPU seconds per second. Without `name` the lab gets a name of its own.

    Raises:
        VitscaleError: a value is wrong, a lab of this name exists, or this machine cannot make hosts.
    """
    name = name or f"{os.getpid()}-{secrets.token_hex(4)}"
    with _new_lab(LabPlan(name, hosts, bandwidth_mbit, cores_per_host, slots)) as state:
        yield Laboratory(state)


def up(plan: LabPlan) -> State:
    """Make hosts that outlive this process, until `down`.

    Raises:
        VitscaleError: a lab of this name exists, or this machine cannot make hosts; nothing is left then.
    """
    with _new_lab(plan, outlives_block=True) as state:
        return state


def down(name: str) -> bool:
    """End the lab called `name` with all that runs on it; False where there was none.

    Raises:
        VitscaleError: something was not gone after 10 s.
    """
    processes.require()
    return take_down(name)


class Laboratories(NamedTuple):
    """All labs of this machine."""

    labs: list[Laboratory]
    """In the order of their names."""
    errors: list[VitscaleError]
    """Why the others cannot be read."""


def laboratories() -> Laboratories:
    """Return all labs that have a folder."""
    processes.require()
    labs = []
    errors = []
    for name in names():
        try:
            state = read(name)
        except VitscaleError as error:
            errors.append(error)
        else:
            if state is not None:
                labs.append(Laboratory(state))
    return Laboratories(labs, errors)


def command_on(name: str, host: str, argv: Sequence[str]) -> list[str]:
    """Return the argv that runs `argv` on a host of the lab called `name`.

    Raises:
        RequestError: there is no such lab or host, or the host is gone.
    """
    processes.require()
    lab = Laboratory(existing(name))
    if host not in lab.names:
        raise unknown("host", host, lab.names)
    number = lab.names.index(host)
    if not lab.state.hosts[number].first.alive:
        raise RequestError(
            f"{host} of the lab {name!r} is gone",
            next_step=f"End the lab, and make it anew: vitscale lab down --name {name}",
        )
    return lab.command(number, argv)


@contextmanager
def _new_lab(plan: LabPlan, *, outlives_block: bool = False) -> Iterator[State]:
    """Make a lab, and end it with the block or with this process, whichever ends first.

    With `outlives_block` the lab outlives both, once the block has ended without an error.

    Raises:
        VitscaleError: a lab of this name exists, or this machine cannot make hosts; nothing is left then.
    """
    processes.require()
    building.make_folder(plan.name)
    guard = _Guard(plan.name)
    holding_processes: list[subprocess.Popen[str]] = []
    try:
        yield _build(plan, holding_processes)
    except BaseException:
        _end_new_lab(plan.name, holding_processes, guard)
        raise
    if outlives_block:
        guard.leave_lab()
    else:
        _end_new_lab(plan.name, holding_processes, guard)


def _build(plan: LabPlan, holding_processes: list[subprocess.Popen[str]]) -> State:
    """Make the hosts of a lab. The processes that hold their namespaces are added to `holding_processes`."""
    try:
        return building.build(plan, holding_processes)
    except OSError as error:
        raise VitscaleError(f"the lab {plan.name!r} cannot be made: {error}") from None


def _end_new_lab(name: str, holding_processes: Iterable[subprocess.Popen[str]], guard: _Guard) -> None:
    """End a lab that this process has made, with its guard, however much of the lab is there."""
    try:
        take_down(name)
        for process in holding_processes:
            process.wait()
    finally:
        guard.end_lab()  # also where `take_down` has failed: the guard tries once more


class _Guard:
    """A process that ends a lab when this process dies.

    It waits for a line on a pipe from this process. Where this process dies, the kernel closes the pipe, and the guard
    ends the lab. It outlives Ctrl-C, for it has a session of its own.
    """

    def __init__(self, lab_name: str) -> None:
        self._process = subprocess.Popen(
            python_module("vitscale.lab.laboratory", lab_name),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd="/",
            start_new_session=True,
        )

    def leave_lab(self) -> None:
        """End the guard and leave the lab as it is."""
        self._process.communicate(_LEAVE_LAB)

    def end_lab(self) -> None:
        """Let the guard end whatever is left of the lab, and wait until it has done so."""
        self._process.communicate()


_LEAVE_LAB = "keep\n"
"""The line that lets a guard end without ending its lab."""


def main(name: str) -> None:
    """Be the guard of a lab: wait for a line or the end of standard input; end the lab unless the line says not to."""
    if sys.stdin.readline() != _LEAVE_LAB:
        take_down(name)


def take_down(name: str) -> bool:
    """End the lab called `name`, however much of it is left; False where there was nothing.

    Raises:
        VitscaleError: a process or a cgroup was not gone after 10 s; the folder is kept, to try again.
    """
    folder = folder_of(name)
    state = read(name)
    if state is not None:
        end_holders(state.holders)
    controller = quota.find_controller()
    if controller is not None:
        controller.remove(PREFIX + name)
    if not folder.exists():
        return False
    with suppress(FileNotFoundError):  # another process is ending it too
        shutil.rmtree(folder)
    return True


def end_holders(holders: Iterable[Holder]) -> None:
    """End the holders with everything in their namespaces, and return when all are gone.

    Raises:
        VitscaleError: a process was not gone after 10 s.
    """
    all_processes: list[Process] = []
    for holder in holders:
        all_processes += [holder.first, holder.outside, *processes.waiting_for_commands(holder.first)]
    processes.kill(all_processes)


if __name__ == "__main__":
    main(sys.argv[1])
