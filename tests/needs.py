"""What a test needs and a machine may lack: skipped with one line that says what to install, or failed where all is
meant to be there."""

from __future__ import annotations

import os
import shutil
from typing import NoReturn

import pytest

PACKAGES = {
    "cc": "gcc libc6-dev",
    "chromium": "chromium",
    "ip": "iproute2",
    "make": "make",
    "mpirun": "openmpi-bin",
    "munged": "munge",
    "nsenter": "util-linux",
    "pdsh": "pdsh",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "srun": "slurm-client",
    "ssh": "openssh-client",
    "sshd": "openssh-server",
    "taskset": "util-linux",
    "tc": "iproute2",
    "unshare": "util-linux",
}
"""A program, and Debian's packages that bring it."""


def skip_or_fail(reason: str) -> NoReturn:
    """Skips the test; fails it where `VITSCALE_TESTS_MUST_RUN` is set, for `.ci/run` has installed all there is."""
    if os.environ.get("VITSCALE_TESTS_MUST_RUN"):
        pytest.fail(reason)
    pytest.skip(reason)


def programs(*names: str) -> None:
    """Returns where all programs are installed."""
    missing = [name for name in names if shutil.which(name) is None]
    if missing:
        packages = sorted({package for name in missing for package in PACKAGES[name].split()})
        skip_or_fail(f"not installed: {', '.join(missing)}; apt-get install {' '.join(packages)}")


def root_and(*names: str) -> None:
    """Returns where this is root and all programs are installed."""
    programs(*names)
    if os.geteuid() != 0:
        skip_or_fail("needs root")
