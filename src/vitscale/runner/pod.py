"""`python -m vitscale.runner.pod RESULTS STUDY...`: the program of each container of a JobSet or a TrainJob.

The first pod runs `vitscale run STUDY... -o RESULTS` as soon as all others answer, and passes its end on to them. The
others run what its driver starts on them (`vitscale.processes.pod_shell`). All end with the driver's exit code: 0 where
all runs completed, 1 where one failed, 2 where the request was wrong. With another code the first pod was cut short. It
is started again, alone or with the others, and `vitscale run` goes on with the runs that have no outcome yet.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from vitscale.base.files import file_lock
from vitscale.base.interpreter import python_module
from vitscale.errors import RequestError, VitscaleError, shown
from vitscale.machine.batch_systems import PODS_VARIABLE
from vitscale.machine.hosts import Host, read_hostfile
from vitscale.processes.pod_shell import PodRequest, PodShellError, PodShellServer, call, make_key
from vitscale.schedulers.pods import KEY_FILE_VARIABLE

INDEX_VARIABLE = "JOB_COMPLETION_INDEX"
"""Variable that Kubernetes sets in each pod of an Indexed Job, as those of JobSets and TrainJobs are: 0, 1, ..."""
_FINAL_CODES = (0, 1, 2)
"""Exit codes of `vitscale run` after which nothing is left to do, or the same command would end the same way."""
_SECONDS_BETWEEN_LOOKS = 1.0
_SECONDS_BETWEEN_NOTES = 60.0
_LOCK_SECONDS = 120.0
"""How long a driver waits for the lock of an earlier one. A file server may keep that for a while after a node is lost:
NFS until the client's lease is over, 90 s by Linux's default."""


def main(arguments: Sequence[str]) -> int:
    """Run the driver or serve it, by this pod's number; returns the container's exit code."""
    if len(arguments) < 2:
        sys.exit("usage: python -m vitscale.runner.pod RESULTS STUDY [OPTION...] [KEY=VALUE...]")
    results = Path(arguments[0]).absolute()
    try:
        pods = _pods_of_set()
        number = _pod_number(len(pods))
        key_file = results.with_name(f".{results.name}.pods-key")
        if number == 0:
            return _drive(results, arguments[1:], pods, key_file)
        return _serve(key_file)
    except VitscaleError as error:
        _say(f"vitscale: {error}")
        return error.exit_code


def _pods_of_set() -> tuple[Host, ...]:
    """Return all pods of the set, the first one first.

    Raises:
        RequestError: the set's hostfile is not named, or cannot be read.
    """
    hostfile = os.environ.get(PODS_VARIABLE)
    if not hostfile:
        raise RequestError(
            f"{PODS_VARIABLE} is not set, so this is no pod of a manifest of vitscale's",
            next_step="Print a manifest with `vitscale plan STUDY --commands`; elsewhere use `vitscale run`",
        )
    return read_hostfile(Path(hostfile))


def _pod_number(pods: int) -> int:
    """Return the number of this pod, from 0. Args: pods: how many there are.

    Raises:
        RequestError: Kubernetes gives it none, or one that the hostfile has no pod for.
    """
    index = os.environ.get(INDEX_VARIABLE, "")
    if index.isascii() and index.isdigit() and len(index) < 8 and int(index) < pods:
        return int(index)
    raise RequestError(
        f"{INDEX_VARIABLE} is {shown(index)}, and the hostfile names {pods} pods",
        valid=[f"0 to {pods - 1}"],
        next_step="Start the manifest as it was printed: its Jobs are Indexed, with a completion for each pod",
    )


def _serve(key_file: Path) -> int:
    """Serve the first pod's driver until it ends, and return its exit code.

    Raises:
        RequestError: the port is in use.
    """
    signal.signal(signal.SIGTERM, _exit_on_signal)  # the first process of a container ignores it otherwise
    try:
        server = PodShellServer(key_file, _say)
    except OSError as error:
        raise RequestError(
            f"this pod cannot serve the first one: {error}", next_step="Give each pod a network of its own"
        ) from None
    _say(f"vitscale: this pod waits for the first one, on port {server.port}")
    return server.serve()


def _exit_on_signal(number: int, _frame: FrameType | None) -> None:
    """End this process as the signal would."""
    sys.exit(128 + number)


def _drive(results: Path, arguments: Sequence[str], pods: Sequence[Host], key_file: Path) -> int:
    """Run the study from this pod, tell the others how it ended, and return the exit code.

    Args:
        results: the results folder.
        arguments: the study and further arguments of `vitscale run`.
        pods: all pods, this one first.
        key_file: file for the key by which pods trust this one.
    """
    driver = _Driver()
    others = pods[1:]
    _wait_for_name(pods[0].name)
    results.parent.mkdir(parents=True, exist_ok=True)
    if others:
        make_key(key_file)
    for pod in others:
        _wait_for(pod.name, key_file)
    _wait_for_lock(results)
    code = driver.run(python_module("vitscale", "run", *arguments, "-o", str(results)), key_file)
    if code in _FINAL_CODES:
        for pod in others:
            _finish(pod.name, key_file, code)
    return code


def _wait_for_name(pod: str) -> None:
    """Wait until the cluster's name service knows a pod, by which this one's driver sees that it is its own."""
    noted_seconds = -_SECONDS_BETWEEN_NOTES
    while not _is_known(pod):
        if time.monotonic() - noted_seconds >= _SECONDS_BETWEEN_NOTES:
            _say(f"vitscale: waiting until the name of this pod, {pod}, is known")
            noted_seconds = time.monotonic()
        time.sleep(_SECONDS_BETWEEN_LOOKS)


def _is_known(name: str) -> bool:
    """Whether a name resolves; unlike `address_of` it asks each time."""
    try:
        return bool(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM))
    except OSError:
        return False


def _wait_for(pod: str, key_file: Path) -> None:
    """Wait until a pod serves; there is no limit, for a cluster may have no room for it yet."""
    noted_seconds = -_SECONDS_BETWEEN_NOTES
    while True:
        try:
            call(key_file, pod, PodRequest(), patience_seconds=0.0)
        except PodShellError as error:
            if time.monotonic() - noted_seconds >= _SECONDS_BETWEEN_NOTES:
                _say(f"vitscale: waiting for another pod: {error}")
                noted_seconds = time.monotonic()
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        else:
            return


def _wait_for_lock(results: Path) -> None:
    """Wait until no earlier driver holds the results folder, for two minutes at most.

    If one still does, `vitscale run` refuses the folder.
    """
    lock = results / "lock"
    if lock.exists():
        with file_lock(lock, _LOCK_SECONDS):
            pass


def _finish(pod: str, key_file: Path, code: int) -> None:
    """Tell a pod that the study is over; one that does not answer is left to Kubernetes."""
    try:
        call(key_file, pod, PodRequest(finish_code=code))
    except PodShellError as error:
        _say(f"vitscale: {error}")


class _Driver:
    """`vitscale run` as a child process, which gets the signals that end a pod.

    A signal that comes before the child is there ends this process.
    """

    def __init__(self) -> None:
        """Take over SIGTERM from now on."""
        self._child: subprocess.Popen[bytes] | None = None
        signal.signal(signal.SIGTERM, self._pass_on)

    def run(self, command: Sequence[str], key_file: Path) -> int:
        """Run a command to its end and return its exit code as a shell does: 128 + N where signal N ended it."""
        self._child = subprocess.Popen(command, env={**os.environ, KEY_FILE_VARIABLE: str(key_file)})
        code = self._child.wait()
        return code if code >= 0 else 128 - code

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        """Send a signal on to the child, or end where there is none."""
        if self._child is None:
            _exit_on_signal(number, frame)
        else:
            self._child.send_signal(number)


def _say(text: str) -> None:
    """Print a line to the pod's log at once."""
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
