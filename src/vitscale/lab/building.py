"""Makes a laboratory, step by step; every process is written down as soon as it runs."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

from vitscale.errors import RequestError, explain
from vitscale.lab import entering, host_files, namespaces, network, programs, quota, secure_shell, state
from vitscale.lab.own_cores import hold_to_own
from vitscale.lab.plan import Plan
from vitscale.lab.processes import Process, pid_namespace
from vitscale.lab.state import Holder, State, folder_of


def make_folder(name: str) -> None:
    """Makes the lab's folder, which is also the claim to its name.

    Raises:
        RequestError: a lab of this name exists.
    """
    try:
        folder_of(name).mkdir(0o700)
    except FileExistsError:
        raise RequestError(
            explain(
                f"a lab {name!r} exists already",
                next_step="Use it ('vitscale lab status' shows it), end it "
                f"('vitscale lab down --name {name}'), or give the new one another --name",
            )
        ) from None


def build(plan: Plan, started: list[subprocess.Popen[str]]) -> State:
    """Makes what was planned, in its folder; puts the processes that were started into `started`, to be waited for.

    Raises:
        RequestError: this machine cannot; what was made so far is left to `take_down`.
    """
    building = _Building(plan, started)
    with_ssh = not building.state.missing_for_ssh
    names = tuple(f"host{number}" for number in range(plan.hosts))
    known = [(name, network.address(number)) for number, name in enumerate(names)]
    folder = building.state.folder
    switch = building.hold_switch()
    network.start_switch(switch)
    _make_quotas(plan, building.state.cgroup, names)
    host_files.write_hosts_file(folder, known)
    if with_ssh:
        secure_shell.write_keys(folder, known)
    firsts = [building.hold_host(name) for name in names]
    hold_to_own(plan, firsts)
    for number, ((name, address), first) in enumerate(zip(known, firsts, strict=True)):
        own = folder / name
        own.mkdir()
        network.link(switch, first, number, plan.bandwidth_mbit)
        host_files.mount_files(first, folder, own, with_ssh=with_ssh)
        if with_ssh:
            secure_shell.write_daemon_configuration(folder, own, address)
            programs.call(*entering.command(building.state, number, secure_shell.daemon_command(own)))
    for name in names if with_ssh else ():
        secure_shell.wait_for_daemon(folder / name)
    building.state.hostfile.write_text("".join(f"{name} slots={plan.slots}\n" for name in names), encoding="ascii")
    return building.state


class _Building:
    """A lab that grows."""

    def __init__(self, plan: Plan, started: list[subprocess.Popen[str]]) -> None:
        self._started = started
        self.state = State(
            name=plan.name,
            pid_namespace=pid_namespace("self"),
            slots=plan.slots,
            bandwidth_mbit=plan.bandwidth_mbit,
            missing_for_ssh=programs.missing_for_ssh(),
        )

    def hold_switch(self) -> Process:
        """Starts what holds the switch's namespaces; its first process."""
        return self._hold("switch", lambda holder: {"switch": holder})

    def hold_host(self, name: str) -> Process:
        """Starts what holds the next host's namespaces; its first process."""
        return self._hold(name, lambda holder: {"hosts": (*self.state.hosts, holder)})

    def _hold(self, name: str, added: Callable[[Holder], dict[str, object]]) -> Process:
        def write_down(outside: Process, first: Process) -> None:
            self.state = self.state.model_copy(update=added(Holder(name=name, outside=outside, first=first)))
            state.write(self.state)

        process, first = namespaces.hold(name, write_down)
        self._started.append(process)
        return first


def _make_quotas(plan: Plan, lab: str, hosts: tuple[str, ...]) -> None:
    """Every host gets a cgroup where that can be; only a limit that was asked for must be possible."""
    controller = quota.find_controller()
    try:
        if controller is None:
            raise FileNotFoundError("there is no CPU controller")
        controller.create(lab, hosts)
        if plan.cores_per_host is not None:
            for host in hosts:
                controller.limit(lab, host, plan.cores_per_host)
    except OSError as error:
        if plan.cores_per_host is not None:
            raise quota.refused(str(error)) from None
