"""`python -m vitscale.tie PID -- ARGV...`: becomes ARGV, which the kernel ends when process PID, its parent, dies.

The driver starts launchers through it, so that SIGKILL of the driver ends the launcher too, and with it the ranks
(`vitscale.worker.place.die_with_parent`). It imports nothing heavy: it stands before every launch.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """Ties this process to its parent and becomes the command after `--`."""
    match arguments:
        case [parent, "--", *command] if parent.isdecimal() and command:
            pass
        case _:
            sys.exit("usage: python -m vitscale.tie PID -- COMMAND...")
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # The parent may have died before the call: then nobody is left to send the signal.
    if os.getppid() != int(parent):
        sys.exit("vitscale: the driver is gone")
    try:
        os.execvp(command[0], command)  # noqa: S606 - no shell is wanted
    except OSError as error:
        sys.exit(f"vitscale: {command[0]} cannot be run: {error.strerror}")


if __name__ == "__main__":
    main(sys.argv[1:])
