"""Makes a laboratory, step by step; every process is written down as soon as it runs.

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

from vitscale.errors import RequestError, VitscaleError, shown
from vitscale.lab import processes, quota, state
from vitscale.lab.processes import Process, call, call_inside, pid_namespace
from vitscale.lab.state import Holder, LabPlan, State, folder_of

INTERFACE = "eth0"
_BRIDGE = "bridge0"
# A larger burst lets small messages pass at several times the rate.
_BURST = "128kb"
_LONGEST_QUEUE = "50ms"


def address(number: int) -> str:
    """The address of host `number`, from 0."""
    return f"10.77.0.{number + 1}"


def start_switch(switch: Process) -> None:
    """Makes the bridge, to which hosts are linked, in the switch's namespace."""
    call_inside(switch, "ip", "link", "add", _BRIDGE, "type", "bridge")
    call_inside(switch, "ip", "link", "set", _BRIDGE, "up")


def link(switch: Process, host: Process, number: int, bandwidth_mbit: float | None) -> None:
    """Links a host to the switch; a bandwidth of None leaves the link as fast as it is."""
    port = _port(number)
    # Both ends are made inside, so that no interface is ever seen outside the lab.
    peer = ("peer", "name", port, "netns", str(switch.pid))
    call("ip", "link", "add", INTERFACE, "netns", str(host.pid), "type", "veth", *peer)
    call_inside(switch, "ip", "link", "set", port, "master", _BRIDGE, "up")
    call_inside(host, "ip", "address", "add", f"{address(number)}/24", "dev", INTERFACE)
    for device in ("lo", INTERFACE):
        call_inside(host, "ip", "link", "set", device, "up")
    if bandwidth_mbit is not None:
        shape = ("tbf", "rate", f"{bandwidth_mbit:f}mbit", "burst", _BURST, "latency", _LONGEST_QUEUE)
        for end, device in ((host, INTERFACE), (switch, port)):
            call_inside(end, "tc", "qdisc", "add", "dev", device, "root", *shape)


def set_link(switch: Process, number: int, state: str) -> None:
    """Sets the switch's end of a host's link "down", as if its cable were pulled, or "up"."""
    call_inside(switch, "ip", "link", "set", _port(number), state)


def _port(number: int) -> str:
    return f"port{number}"


def make_folder(name: str) -> None:
    """Makes the lab's folder, which also claims its name.

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
    """Makes the planned lab in its folder; adds the processes that it starts, which must be waited for, to `started`.

    Raises:
        RequestError: this machine cannot; what was made so far is left to `take_down`.
    """
    lab = State(
        name=plan.name,
        pid_namespace=pid_namespace("self"),
        slots=plan.slots,
        bandwidth_mbit=plan.bandwidth_mbit,
        missing_for_ssh=processes.missing_for_ssh(),
    )

    def hold(name: str, added: Callable[[Holder], dict[str, object]]) -> Process:
        """Starts the process that holds a host's namespaces, or the switch's; returns the first process inside."""

        def write_down(outside: Process, first: Process) -> None:
            nonlocal lab
            lab = lab.model_copy(update=added(Holder(name=name, outside=outside, first=first)))
            state.write(lab)

        process, first = processes.hold(name, write_down)
        started.append(process)
        return first

    with_ssh = not lab.missing_for_ssh
    names = tuple(f"host{number}" for number in range(plan.hosts))
    known = [(name, address(number)) for number, name in enumerate(names)]
    folder = lab.folder
    switch = hold("switch", lambda holder: {"switch": holder})
    start_switch(switch)
    _make_quotas(plan, lab.cgroup, names)
    write_hosts_file(folder, known)
    if with_ssh:
        write_keys(folder, known)
    firsts = [hold(name, lambda holder: {"hosts": (*lab.hosts, holder)}) for name in names]
    hold_to_own(plan, firsts)
    for number, ((name, own_address), first) in enumerate(zip(known, firsts, strict=True)):
        own = folder / name
        own.mkdir()
        link(switch, first, number, plan.bandwidth_mbit)
        mount_files(first, folder, own, with_ssh=with_ssh)
        if with_ssh:
            write_daemon_configuration(folder, own, own_address)
            daemon = processes.enter_command(first, daemon_command(own), cgroup=lab.cgroup, host=name)
            processes.call(*daemon)
    for name in names if with_ssh else ():
        wait_for_daemon(folder / name)
    lab.hostfile.write_text("".join(f"{name} slots={plan.slots}\n" for name in names), encoding="ascii")
    return lab


def _make_quotas(plan: LabPlan, lab: str, hosts: tuple[str, ...]) -> None:
    """Makes a cgroup for every host, where possible; fails only where a limit was asked for."""
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
    """Each host's own cores: equal shares of `cores`, or one each in turn where there are more hosts than cores.

    They matter because ranks pin themselves to a host's first cores: ranks of two hosts that see the same cores would
    all use these. None, and no host is held to any cores, where a share would be too small.
    """
    share = max(1, len(cores) // plan.hosts)
    if share < max(plan.slots, plan.cores_per_host or 0):
        return None
    if plan.hosts > len(cores):
        return [frozenset({cores[number % len(cores)]}) for number in range(plan.hosts)]
    return [frozenset(cores[number * share : (number + 1) * share]) for number in range(plan.hosts)]


def hold_to_own(plan: LabPlan, firsts: Sequence[Process]) -> None:
    """Pins each host's first process to the host's own cores; commands on the host take them over (`enter.py`)."""
    shares = own_cores(plan, sorted(os.sched_getaffinity(0)))
    for first, cores in zip(firsts, shares or (), strict=False):
        os.sched_setaffinity(first.pid, cores)


HOSTS_FILE = "hosts"
_OPEN_MPI = Path("/etc/openmpi/openmpi-mca-params.conf")
_OWN_SESSIONS = "orte_tmpdir_base = /run"
"""A setting that keeps Open MPI's files of a job out of /tmp, which all hosts share. There they are named by the host
and a process id, which may be the same in two labs; then the job that ends first removes the other's files."""


def write_hosts_file(folder: Path, hosts: Sequence[tuple[str, str]]) -> None:
    """Writes the hosts' /etc/hosts. `hosts` are (name, address)."""
    lines = ["127.0.0.1 localhost", "::1 localhost", *(f"{address} {name}" for name, address in hosts)]
    (folder / HOSTS_FILE).write_text("".join(f"{line}\n" for line in lines), encoding="ascii")


def mount_files(first: Process, folder: Path, host: Path, *, with_ssh: bool) -> None:
    """Mounts a host's own files, in its mount namespace alone. `folder` is the lab's, `host` the host's in it."""
    _own_run(first, folder, host)
    _mount(first, "-t", "tmpfs", "-o", "mode=1777", "tmpfs", "/dev/shm")  # noqa: S108 - the host's own
    _own_sys(first)
    _mount(first, "--bind", str(folder / HOSTS_FILE), "/etc/hosts")
    if _OPEN_MPI.is_file():
        own = host / _OPEN_MPI.name
        own.write_text(f"{_OPEN_MPI.read_text(encoding='utf-8')}\n{_OWN_SESSIONS}\n", encoding="utf-8")
        _mount(first, "--bind", str(own), str(_OPEN_MPI))
    if with_ssh:
        _mount(first, "--bind", str(folder / CLIENT_CONFIGURATION), "/etc/ssh/ssh_config")
        # Without PAM, sshd refuses users whose password is locked, as root's is on Ubuntu.
        shadow = host / "shadow"
        shadow.write_text(f"{pwd.getpwuid(os.geteuid()).pw_name}:*:::::::\n", encoding="utf-8")
        shadow.chmod(0o600)
        _mount(first, "--bind", str(shadow), "/etc/shadow")
        own = Path(pwd.getpwuid(os.geteuid()).pw_dir) / ".ssh"
        if own.is_dir():  # the user's keys and known hosts are neither used nor written
            _mount(first, "-t", "tmpfs", "-o", "mode=0700", "tmpfs", str(own))


def _own_run(first: Process, folder: Path, host: Path) -> None:
    run = host / "run"
    run.mkdir()
    _mount(first, "-t", "tmpfs", "-o", "mode=0755", "tmpfs", str(run))
    call_inside(first, "mkdir", str(run / "sshd"), str(run / folder.name), str(run / "sys"))
    _mount(first, "--bind", str(folder), str(run / folder.name))
    _mount(first, "--move", str(run), "/run")


def _own_sys(first: Process) -> None:
    """Mounts a sysfs, which shows the interfaces of the namespace it is mounted in; cgroups stay visible."""
    _mount(first, "-t", "sysfs", "sysfs", "/run/sys")
    _mount(first, "--rbind", "/sys/fs/cgroup", "/run/sys/fs/cgroup")
    _mount(first, "--move", "/run/sys", "/sys")
    call_inside(first, "rmdir", "/run/sys")


def _mount(first: Process, *arguments: str) -> None:
    call_inside(first, "mount", "--no-mtab", *arguments)  # else it writes to /run, outside the lab


CLIENT_KEY, HOST_KEY = "client_key", "host_key"
CLIENT_CONFIGURATION, KNOWN_HOSTS = "ssh_config", "known_hosts"
_START_SECONDS = 30.0


def write_keys(folder: Path, hosts: Sequence[tuple[str, str]]) -> None:
    """Makes the keys, and the configuration of ssh clients on every host. `hosts` are (name, address)."""
    for key in (CLIENT_KEY, HOST_KEY):
        processes.call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "vitscale-lab", "-f", str(folder / key))
    (folder / "authorized_keys").write_text(_public(folder, CLIENT_KEY), encoding="ascii")
    names = ",".join(name for host in hosts for name in host)
    (folder / KNOWN_HOSTS).write_text(f"{names} {_public(folder, HOST_KEY)}", encoding="ascii")
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
    """Writes the configuration of a host's sshd, which listens on the host's own address alone."""
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
    """The command that starts a host's sshd in the background."""
    return [processes.find("sshd") or "sshd", "-f", str(host / "sshd_config"), "-E", str(host / "sshd.log")]


def wait_for_daemon(host: Path) -> None:
    """Returns once a host's sshd takes connections.

    Raises:
        VitscaleError: it does not start in time.
    """
    end = time.monotonic() + _START_SECONDS
    while daemon_pid(host) is None:  # written when it listens
        if time.monotonic() > end:
            log = host / "sshd.log"
            said = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
            raise VitscaleError(f"sshd does not start on {host.name}: {shown(said.strip() or 'it says nothing')}")
        time.sleep(0.01)


def daemon_pid(host: Path) -> int | None:
    """The process id of a host's sshd, as seen inside the host; None where it has none."""
    try:
        return int((host / "sshd.pid").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _public(folder: Path, key: str) -> str:
    return (folder / f"{key}.pub").read_text(encoding="ascii")
