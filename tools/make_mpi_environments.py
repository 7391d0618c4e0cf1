"""Makes an environment each for the mpirun of MPICH and of Intel MPI, beside the machine's own, which stays the first.

    python tools/make_mpi_environments.py .venv-mpi

Tests start ranks with `.venv-mpi/mpich/bin/mpirun` and `.venv-mpi/intel/bin/mpirun`. Exit code 0, and a line that says
why, also where a package cannot be had: its tests are then left out.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
from pathlib import Path

REQUIREMENTS = {"mpich": "mpich==5.0.2", "intel": "impi-rt==2021.18.1"}
"""Name of an environment -> the package that it holds."""
INSTALLED = ".installed"
"""File that says that all has been tried, whatever came of it."""
SECONDS = 110
"""Longest time that an installation may take."""


def make(folder: Path, requirement: str) -> str:
    """Make one environment.

    Returns:
        Why it could not be made; empty where it was.
    """
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=False, symlinks=True)
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install", "--quiet", "--retries", "1"]
    try:
        installed = subprocess.run([*pip, requirement], capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        reason = f"installing {requirement} takes longer than {SECONDS} seconds"
    else:
        lines = installed.stderr.strip().splitlines() or ["pip failed"]
        reason = "" if installed.returncode == 0 else lines[-1]
    if reason:
        shutil.rmtree(folder)
    return reason


def main() -> None:
    """Make all environments in the folder that the command line names."""
    folder = Path(sys.argv[1])
    for name, requirement in REQUIREMENTS.items():
        reason = make(folder / name, requirement)
        if reason:
            print(f"{folder / name} is not made, and its tests are left out: {reason}")
    (folder / INSTALLED).touch()


if __name__ == "__main__":
    main()
