"""Programs that a laboratory is made with: which are missing, and running them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence

from vitscale.errors import RequestError, shown

_NEEDED = {"unshare": "util-linux", "nsenter": "util-linux", "mount": "mount", "ip": "iproute2", "tc": "iproute2"}
"""Programs, and the Debian packages they come in."""
_SSH = {"ssh": "openssh-client", "ssh-keygen": "openssh-client", "sshd": "openssh-server"}
_SYSTEM_FOLDERS = ("/usr/local/sbin", "/usr/sbin", "/sbin")
"""Where Debian has them, and where the PATH of root (after `su`, say) may not look."""


def find(program: str) -> str | None:
    """Its absolute path; None where it is not installed."""
    return shutil.which(program) or shutil.which(program, path=os.pathsep.join(_SYSTEM_FOLDERS))


def missing_for_ssh() -> tuple[str, ...]:
    """Packages without which hosts have no ssh."""
    return tuple(dict.fromkeys(package for program, package in _SSH.items() if find(program) is None))


def require() -> None:
    """Returns where hosts can be made.

    Raises:
        RequestError: not Linux, not root, or a program is not installed.
    """
    if sys.platform != "linux":
        raise RequestError(f"vitscale lab needs Linux, and this is {sys.platform}")
    if os.geteuid() != 0:
        raise RequestError("vitscale lab needs root: it makes namespaces", next_step=f"Use: sudo {sys.argv[0]} lab ...")
    if missing := [program for program in _NEEDED if find(program) is None]:
        packages = " ".join(dict.fromkeys(_NEEDED[program] for program in missing))
        raise RequestError(
            f"vitscale lab needs {', '.join(missing)}", next_step=f"Install it: apt-get install {packages}"
        )


def call(program: str, *arguments: str) -> str:
    """Runs a program to its end and returns what it printed.

    Raises:
        RequestError: it failed, with what it said.
    """
    argv = [find(program) or program, *arguments]
    answer = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if answer.returncode != 0:
        raise failed([program, *arguments], answer.stderr or answer.stdout)
    return answer.stdout


def failed(argv: Sequence[str], said: str) -> RequestError:
    """What to raise when a program refused."""
    return RequestError(
        f"this machine cannot make hosts: {shown(' '.join(argv))} said: {shown(said.strip() or 'nothing')}",
        next_step="In a container, hosts can be made only if it was started with --privileged",
    )
