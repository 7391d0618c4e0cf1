"""Makes a laboratory, step by step; every process is written down in the lab's state as soon as it runs.

The network is a switch in a namespace of its own, with a link of known bandwidth B to every host. Both ends of a link
are shaped where they send, so that a host sends at most at the rate and receives at most at it, as over a full-duplex
cable. In a ring each host sends 2(N-1)/N*S bytes to one neighbour and gets as many from the other, so a ring all-reduce
of S bytes takes 2(N-1)/N*S/B. If links were shaped on the host's side alone, N-1 hosts that send to one would reach it
at N-1 times the rate.

For ssh the hosts have their own keys and configuration, and each runs an sshd.
"""

from __future__ import annotations

import os
import pwd
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from vitscale.errors import RequestError, VitscaleError, shown
from vitscale.lab import processes, quota, state
from vitscale.lab.processes import Process, call, call_inside, pid_namespace
from vitscale.lab.state import Holder, LabPlan, State, folder_of

INTERFACE = "eth0"
_BRIDGE = "bridge0"
_LINK_BURST = "128kb"
"""Bytes that a link sends at once, as tc(8) takes them. A larger burst lets small messages pass at several times the
rate."""
_LONGEST_LINK_QUEUE = "50ms"
"""Time after which a packet that waits to be sent is dropped."""


class HostAddress(NamedTuple):
    """A host's name, and its address in the lab's network."""

    name: str
    address: str


def address(number: int) -> str:
    """Return the address of host `number`, from 0."""
    return f"10.77.0.{number + 1}"


def start_switch(switch: Process) -> None:
    """Make the bridge, to which hosts are linked, in the switch's namespace."""
    call_inside(switch, "ip", "link", "add", _BRIDGE, "type", "bridge")
    call_inside(switch, "ip", "link", "set", _BRIDGE, "up")


def link(switch: Process, host: Process, number: int, bandwidth_mbit: float | None) -> None:
    """Link a host to the switch.

    Args:
        switch: the process that holds the switch's namespace.
        host: the host's first process.
        number: of the host, from 0.
        bandwidth_mbit: megabits per second in each direction; None: as fast as the machine is.
    """
    port = _port(number)
    # Both ends are made inside, so that no interface is ever seen outside the lab.
    switch_end = ("peer", "name", port, "netns", str(switch.pid))
    call("ip", "link", "add", INTERFACE, "netns", str(host.pid), "type", "veth", *switch_end)
    call_inside(switch, "ip", "link", "set", port, "master", _BRIDGE, "up")
    call_inside(host, "ip", "address", "add", f"{address(number)}/24", "dev", INTERFACE)
    for device in ("lo", INTERFACE):
        call_inside(host, "ip", "link", "set", device, "up")
    if bandwidth_mbit is not None:
        shape = ("tbf", "rate", f"{bandwidth_mbit:f}mbit", "burst", _LINK_BURST, "latency", _LONGEST_LINK_QUEUE)
        call_inside(host, "tc", "qdisc", "add", "dev", INTERFACE, "root", *shape)
        call_inside(switch, "tc", "qdisc", "add", "dev", port, "root", *shape)


def set_link(switch: Process, number: int, state: str) -> None:
    """Set the switch's end of a host's link "down", as if its cable were pulled, or "up"."""
    call_inside(switch, "ip", "link", "set", _port(number), state)


def _port(number: int) -> str:
    """Return the name of the switch's end of a host's link."""
    return f"port{number}"


def make_folder(name: str) -> None:
    """Make the lab's folder in /run, which only its user may enter. This also claims the lab's name.

    Raises:
        RequestError: a lab of this name exists.
    """
    try:
        folder_of(name).mkdir(0o700)
    except FileExistsError:
        raise RequestError(
            f"a lab {name!r} exists already",
            next_step="Use it ('vitscale lab status' shows it), end it "
            f"('vitscale lab down --name {name}'), or give the new one another --name",
        ) from None


def build(plan: LabPlan, started: list[subprocess.Popen[str]]) -> State:
    """Make the planned lab in its folder.

    Args:
        plan: the hosts to make.
        started: gets the processes that are started, which must be waited for.

    Raises:
        RequestError: this machine cannot; what was made so far is left to `take_down`.
    """
    builder = _Builder(plan, started)
    lab = builder.lab  # without processes: `builder.lab` is replaced as they start
    hosts = [HostAddress(f"host{number}", address(number)) for number in range(plan.hosts)]
    names = tuple(host.name for host in hosts)
    with_ssh = not lab.missing_for_ssh
    switch = builder.start_switch_process()
    start_switch(switch)
    _make_quotas(plan, lab.cgroup, names)
    write_hosts_file(lab.folder, hosts)
    if with_ssh:
        write_keys(lab.folder, hosts)
    first_processes = [builder.start_host_process(name) for name in names]
    pin_to_own_cores(plan, first_processes)
    for number, (host, first) in enumerate(zip(hosts, first_processes, strict=True)):
        host_folder = lab.folder / host.name
        host_folder.mkdir()
        link(switch, first, number, plan.bandwidth_mbit)
        mount_files(first, lab.folder, host_folder, with_ssh=with_ssh)
        if with_ssh:
            _start_daemon(lab, host, first)
    if with_ssh:
        for name in names:
            wait_for_daemon(lab.folder / name)
    lab.hostfile.write_text("".join(f"{name} slots={plan.slots}\n" for name in names), encoding="ascii")
    return builder.lab


def _start_daemon(lab: State, host: HostAddress, first: Process) -> None:
    """Configure and start a host's sshd. Args: first: the host's first process."""
    host_folder = lab.folder / host.name
    write_daemon_configuration(lab.folder, host_folder, host.address)
    command = processes.enter_command(first, daemon_command(host_folder), cgroup=lab.cgroup, host=host.name)
    processes.call(*command)


class _Builder:
    """Starts the processes of a lab, and writes each into the lab's state before it may outlive this process."""

    def __init__(self, plan: LabPlan, started: list[subprocess.Popen[str]]) -> None:
        self.lab = State(
            name=plan.name,
            pid_namespace=pid_namespace("self"),
            slots=plan.slots,
            bandwidth_mbit=plan.bandwidth_mbit,
            missing_for_ssh=processes.missing_for_ssh(),
        )
        """As much of the lab as was made so far."""
        self._started_processes = started

    def start_switch_process(self) -> Process:
        """Start the process that holds the switch's namespaces; returns the first process inside."""

        def with_switch(holder: Holder) -> State:
            return self.lab.model_copy(update={"switch": holder})

        return self._start_holder("switch", with_switch)

    def start_host_process(self, name: str) -> Process:
        """Start the process that holds a host's namespaces; returns the first process inside."""

        def with_host(holder: Holder) -> State:
            return self.lab.model_copy(update={"hosts": (*self.lab.hosts, holder)})

        return self._start_holder(name, with_host)

    def _start_holder(self, name: str, lab_with: Callable[[Holder], State]) -> Process:
        """Start a process that holds namespaces, and write the lab's new state before it can outlive this process.

        Args:
            name: host name in the namespaces.
            lab_with: returns the lab's state with the new holder.
        """

        def write_down(outside: Process, first: Process) -> None:
            self.lab = lab_with(Holder(name=name, outside=outside, first=first))
            state.write(self.lab)

        namespaces = processes.start_namespaces(name, write_down)
        self._started_processes.append(namespaces.outside)
        return namespaces.first


def _make_quotas(plan: LabPlan, lab: str, hosts: tuple[str, ...]) -> None:
    """Make a cgroup for every host, where possible.

    Raises:
        RequestError: it is not possible, and a limit was asked for.
    """
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


def own_cores(plan: LabPlan, cores: Sequence[int]) -> list[frozenset[int]] | None:
    """Return the cores that each host has for itself.

    Ranks pin themselves to the first cores of their host: ranks of two hosts that see the same cores would all use
    these. So each host gets an equal share of `cores`; where hosts outnumber cores, one core each in turn.

    Returns None, and all hosts see all cores, where a share would be too small for the plan's ranks or quota.

    Example: cores 0 to 8 for two hosts are {0, 1, 2, 3} and {4, 5, 6, 7}, and core 8 is nobody's.
    """
    share_size = max(1, len(cores) // plan.hosts)
    if share_size < max(plan.slots, plan.cores_per_host or 0):
        return None
    if plan.hosts > len(cores):
        return [frozenset({cores[number % len(cores)]}) for number in range(plan.hosts)]
    first_cores = range(0, plan.hosts * share_size, share_size)
    return [frozenset(cores[first : first + share_size]) for first in first_cores]


def pin_to_own_cores(plan: LabPlan, first_processes: Sequence[Process]) -> None:
    """Pin each host's first process to the host's own cores; commands on the host take them over (`enter.py`)."""
    cores_by_host = own_cores(plan, sorted(os.sched_getaffinity(0)))
    if cores_by_host is not None:
        for first, cores in zip(first_processes, cores_by_host, strict=True):
            os.sched_setaffinity(first.pid, cores)


HOSTS_FILE = "hosts"
_OPEN_MPI_SETTINGS = Path("/etc/openmpi/openmpi-mca-params.conf")
_OPEN_MPI_FOLDER_SETTING = "orte_tmpdir_base = /run"
"""A setting that keeps Open MPI's files of a job out of /tmp, which all hosts share. There they are named by the host
and a process id, which may be the same in two labs; then the job that ends first removes the other's files."""


def write_hosts_file(folder: Path, hosts: Sequence[HostAddress]) -> None:
    """Write the hosts' /etc/hosts."""
    lines = ["127.0.0.1 localhost", "::1 localhost", *(f"{host.address} {host.name}" for host in hosts)]
    (folder / HOSTS_FILE).write_text("".join(f"{line}\n" for line in lines), encoding="ascii")


def mount_files(first: Process, folder: Path, host: Path, *, with_ssh: bool) -> None:
    """Mount a host's own files, in its mount namespace alone.

    Args:
        first: the host's first process.
        folder: the lab's.
        host: the host's folder in it.
        with_ssh: also mount the configuration of ssh.
    """
    _mount_run(first, folder, host)
    _mount(first, "-t", "tmpfs", "-o", "mode=1777", "tmpfs", "/dev/shm")  # noqa: S108 - the host's own
    _mount_sys(first)
    _mount(first, "--bind", str(folder / HOSTS_FILE), "/etc/hosts")
    if _OPEN_MPI_SETTINGS.is_file():
        machine_settings = _OPEN_MPI_SETTINGS.read_text(encoding="utf-8")
        host_settings = host / _OPEN_MPI_SETTINGS.name
        host_settings.write_text(f"{machine_settings}\n{_OPEN_MPI_FOLDER_SETTING}\n", encoding="utf-8")
        _mount(first, "--bind", str(host_settings), str(_OPEN_MPI_SETTINGS))
    if with_ssh:
        _mount_ssh(first, folder, host)


def _mount_run(first: Process, folder: Path, host: Path) -> None:
    """Mount a /run of the host's own, in which the lab's folder stays visible."""
    run = host / "run"
    run.mkdir()
    _mount(first, "-t", "tmpfs", "-o", "mode=0755", "tmpfs", str(run))
    call_inside(first, "mkdir", str(run / "sshd"), str(run / folder.name), str(run / "sys"))
    _mount(first, "--bind", str(folder), str(run / folder.name))
    _mount(first, "--move", str(run), "/run")


def _mount_sys(first: Process) -> None:
    """Mount a sysfs, which shows the interfaces of the namespace it is mounted in; cgroups stay visible."""
    _mount(first, "-t", "sysfs", "sysfs", "/run/sys")
    _mount(first, "--rbind", "/sys/fs/cgroup", "/run/sys/fs/cgroup")
    _mount(first, "--move", "/run/sys", "/sys")
    call_inside(first, "rmdir", "/run/sys")


def _mount_ssh(first: Process, folder: Path, host: Path) -> None:
    """Mount the configuration of ssh clients, a user whom sshd lets in, and an empty ~/.ssh."""
    user = pwd.getpwuid(os.geteuid())
    _mount(first, "--bind", str(folder / CLIENT_CONFIGURATION), "/etc/ssh/ssh_config")
    # Without PAM, sshd refuses users whose password is locked, as root's is on Ubuntu.
    shadow = host / "shadow"
    shadow.write_text(f"{user.pw_name}:*:::::::\n", encoding="utf-8")
    shadow.chmod(0o600)
    _mount(first, "--bind", str(shadow), "/etc/shadow")
    user_folder = Path(user.pw_dir) / ".ssh"
    if user_folder.is_dir():  # the user's keys and known hosts are neither used nor written
        _mount(first, "-t", "tmpfs", "-o", "mode=0700", "tmpfs", str(user_folder))


def _mount(first: Process, *arguments: str) -> None:
    call_inside(first, "mount", "--no-mtab", *arguments)  # else it writes to /run, outside the lab


CLIENT_KEY = "client_key"
HOST_KEY = "host_key"
CLIENT_CONFIGURATION = "ssh_config"
KNOWN_HOSTS = "known_hosts"
_START_SECONDS = 30.0
"""Time in which an sshd starts."""


def write_keys(folder: Path, hosts: Sequence[HostAddress]) -> None:
    """Make the keys, and the configuration of ssh clients on every host."""
    for key in (CLIENT_KEY, HOST_KEY):
        processes.call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "vitscale-lab", "-f", str(folder / key))
    (folder / "authorized_keys").write_text(_public_key(folder, CLIENT_KEY), encoding="ascii")
    names_and_addresses = ",".join(f"{host.name},{host.address}" for host in hosts)
    (folder / KNOWN_HOSTS).write_text(f"{names_and_addresses} {_public_key(folder, HOST_KEY)}", encoding="ascii")
    (folder / CLIENT_CONFIGURATION).write_text(
        f"""\
Host *
  IdentityFile {folder / CLIENT_KEY}
  IdentitiesOnly yes
  IdentityAgent none
  UserKnownHostsFile {folder / KNOWN_HOSTS}
  GlobalKnownHostsFile none
  StrictHostKeyChecking yes
  UpdateHostKeys no
  BatchMode yes
  GSSAPIAuthentication no
""",
        encoding="ascii",
    )


def write_daemon_configuration(folder: Path, host: Path, address: str) -> None:
    """Write the configuration of a host's sshd, which listens on the host's own address alone."""
    (host / "sshd_config").write_text(
        f"""\
ListenAddress {address}
Port 22
HostKey {folder / HOST_KEY}
AuthorizedKeysFile {folder / "authorized_keys"}
PidFile {host / "sshd.pid"}
PermitRootLogin prohibit-password
PubkeyAuthentication yes
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
X11Forwarding no
PrintMotd no
PrintLastLog no
MaxStartups 100
MaxSessions 100
ClientAliveInterval 5
ClientAliveCountMax 3
""",
        encoding="ascii",
    )


def daemon_command(host: Path) -> list[str]:
    """Return the command that starts a host's sshd in the background."""
    return [processes.find("sshd") or "sshd", "-f", str(host / "sshd_config"), "-E", str(host / "sshd.log")]


def wait_for_daemon(host: Path) -> None:
    """Return once a host's sshd takes connections.

    Raises:
        VitscaleError: it does not start in time.
    """
    end = time.monotonic() + _START_SECONDS
    while daemon_pid(host) is None:  # written when it listens
        if time.monotonic() > end:
            log = host / "sshd.log"
            log_text = log.read_text(encoding="utf-8", errors="replace").strip() if log.exists() else ""
            raise VitscaleError(f"sshd does not start on {host.name}: {shown(log_text or 'it says nothing')}")
        time.sleep(0.01)


def daemon_pid(host: Path) -> int | None:
    """Return the process id of a host's sshd, as seen inside the host; None where it has none."""
    try:
        return int((host / "sshd.pid").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _public_key(folder: Path, key: str) -> str:
    return (folder / f"{key}.pub").read_text(encoding="ascii")
