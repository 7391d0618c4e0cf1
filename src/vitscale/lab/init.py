"""`python init.py NAME`: the first process of a host. Everything inside ends with it.

It holds the host's namespaces, sets its name, and reaps processes whose parents are gone. It imports nothing heavy.
"""

import os
import signal
import socket
import sys


def main(name: str) -> None:
    """Run until it is killed, or until the process that started it dies before it has said `stay`."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    socket.sethostname(name)
    print("ready", flush=True)
    # It may outlive the process that started it only once its process id is written down.
    if sys.stdin.readline() != "stay\n":
        sys.exit(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    while True:
        signal.sigwait({signal.SIGCHLD})
        _reap()


def _reap() -> None:
    """Take the exit codes of all children that have ended."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return


if __name__ == "__main__":
    main(sys.argv[1])
