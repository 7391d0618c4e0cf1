"""ssh between the hosts of one lab: its own keys and configuration, and an sshd on every host."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from vitscale.errors import VitscaleError, shown
from vitscale.lab import processes

CLIENT_KEY, HOST_KEY = "client_key", "host_key"
CLIENT_CONFIGURATION, KNOWN_HOSTS = "ssh_config", "known_hosts"
_START_SECONDS = 30.0


def write_keys(folder: Path, hosts: Sequence[tuple[str, str]]) -> None:
    """Makes the keys, and what clients on every host read. `hosts` are names and addresses."""
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
    """Writes what a host's sshd reads. It listens on the host's own address alone."""
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
    """Starts a host's sshd, which goes on in the background."""
    return [processes.find("sshd") or "sshd", "-f", str(host / "sshd_config"), "-E", str(host / "sshd.log")]


def wait_for_daemon(host: Path) -> None:
    """Returns once a host's sshd takes connections.

    Raises:
        VitscaleError: it does not.
    """
    end = time.monotonic() + _START_SECONDS
    while daemon_pid(host) is None:  # written when it listens
        if time.monotonic() > end:
            log = host / "sshd.log"
            said = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
            raise VitscaleError(f"sshd does not start on {host.name}: {shown(said.strip() or 'it says nothing')}")
        time.sleep(0.01)


def daemon_pid(host: Path) -> int | None:
    """The id of a host's sshd, as seen inside the host; None where it has none."""
    try:
        return int((host / "sshd.pid").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _public(folder: Path, key: str) -> str:
    return (folder / f"{key}.pub").read_text(encoding="ascii")
