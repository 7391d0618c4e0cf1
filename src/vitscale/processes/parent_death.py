"""`python -m vitscale.processes.parent_death PID -- ARGV...`: becomes ARGV, which ends with its parent PID.

The driver starts launchers through it, so that SIGKILL of the driver ends the launcher too, and with it the ranks
(`vitscale.worker.rank_process.die_with_parent`). It imports nothing heavy, for it runs before every launch.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15


def end_with_parent(parent: int) -> bool:
    """Ask the kernel to SIGKILL this process when the thread that started it ends; children do not inherit this.

    Returns:
        Whether `parent` is still this process's parent. If it died before the call, nobody sends the signal.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    return os.getppid() == parent


def name_process(name: str) -> None:
    """Give this process the name that `top` and `ps -o comm` show, of which the kernel keeps 15 bytes."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def main(arguments: list[str]) -> None:
    """Tie this process to its parent, and become the command after `--`."""
    match arguments:
        case [parent, "--", *command] if parent.isdecimal() and command:
            pass
        case _:
            sys.exit("usage: python -m vitscale.processes.parent_death PID -- COMMAND...")
    if not end_with_parent(int(parent)):
        sys.exit("vitscale: the driver is gone")
    try:
        os.execvp(command[0], command)  # noqa: S606 - no shell is wanted
    except OSError as error:
        sys.exit(f"vitscale: {command[0]} cannot be run: {error.strerror}")


if __name__ == "__main__":
    main(sys.argv[1:])
