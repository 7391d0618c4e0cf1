"""Scripts run as forks of a process that has imported what ranks need: each starts in tenths of a second.

For tests whose subject is what ranks compute. As a program this is the prepared process: of every line of its input it
makes a fork that runs a script as if it had been started anew.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol

from processes import wait_until

_TESTS = str(Path(__file__).parent)
_PREPARED = (
    "torch.distributed.tensor", "torch._dynamo", "torch._inductor.compile_fx", "deepspeed", "pytorch_optimizer",
    "accelerate", "transformers.integrations.deepspeed", "vitscale.worker.session",
)  # fmt: skip
"""What engines import, some of it only in their first step: once here, and not in every fork."""
_PR_SET_PDEATHSIG = 1


class Started(Protocol):
    """A script under way."""

    def wait(self, timeout: float) -> int:
        """Its exit code, negative where a signal ended it."""


class Starts(Protocol):
    """Starts scripts."""

    def start(
        self, script: Path, *arguments: Path, log: Path, environment: Mapping[str, object], core: int | None = None
    ) -> Started:
        """Runs a script on one core, or on any, with both its outputs in `log`."""

    def close(self) -> None:
        """Ends all that still run."""


class Cold:
    """Starts every script anew, as it must be where a GPU is used."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(
        self, script: Path, *arguments: Path, log: Path, environment: Mapping[str, object], core: int | None = None
    ) -> Started:
        argv = [sys.executable, str(script), *map(str, arguments)]
        if core is not None:
            argv = ["taskset", "-c", str(core), *argv]
        given = {name: str(value) for name, value in environment.items()}
        with log.open("w") as output:
            process = subprocess.Popen(
                argv, env=os.environ | given | {"PYTHONPATH": _TESTS}, stdout=output, stderr=subprocess.STDOUT
            )
        self._processes.append(process)
        return process

    def close(self) -> None:
        for process in self._processes:
            process.kill()


class Prepared:
    """A process that has imported torch, the engines and the worker, and nothing else; its forks die with it."""

    def __init__(self, within: Callable[[Sequence[str]], Sequence[str]] = list) -> None:
        """`within`: argv to the argv that runs it elsewhere, as on a host of a laboratory."""
        # What is imported may start threads unless told, and a process that has some must not be forked.
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        self._asking = threading.Lock()
        self._process = subprocess.Popen(
            within([sys.executable, __file__]),
            stdin=subprocess.PIPE,
            text=True,
            env=os.environ | threads | {"PYTHONPATH": _TESTS},
        )

    def start(
        self, script: Path, *arguments: Path, log: Path, environment: Mapping[str, object], core: int | None = None
    ) -> Started:
        given = {name: str(value) for name, value in environment.items()}
        asked = {
            "argv": [str(script), *map(str, arguments)],
            "log": str(log),
            "environment": os.environ | given | {"PYTHONPATH": _TESTS},
            "core": core,
        }
        assert self._process.stdin is not None
        with self._asking:
            self._process.stdin.write(json.dumps(asked) + "\n")
            self._process.stdin.flush()
        return _Fork(_exit_file(log), self._process)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@functools.cache
def prepared_here() -> Prepared:
    """One for all tests of this process, with which it ends."""
    return Prepared()


class _Fork:
    def __init__(self, exit_file: Path, prepared: subprocess.Popen[str]) -> None:
        self._exit_file = exit_file
        self._prepared = prepared

    def wait(self, timeout: float) -> int:
        wait_until(lambda: self._exit_file.exists() or self._prepared.poll() is not None, "a fork ends", timeout)
        assert self._exit_file.exists(), "the prepared process ended"
        return int(self._exit_file.read_text())


def _exit_file(log: Path) -> Path:
    """What tells the exit code of the script that writes to `log`."""
    return log.with_suffix(".exit")


def _die_with(parent: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _watch(asked: dict[str, Any]) -> NoReturn:
    """Runs the script in a child, and leaves its exit code."""
    own = os.getpid()
    child = os.fork()
    if child == 0:
        _die_with(own)
        _run(asked)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    log = Path(asked["log"])
    log.with_suffix(".draft").write_text(str(code))
    log.with_suffix(".draft").rename(_exit_file(log))
    os._exit(0)


def _run(asked: dict[str, Any]) -> NoReturn:
    """As if the script had been started anew."""
    code = 1
    try:
        log = os.open(asked["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        for descriptor, file in ((0, os.open(os.devnull, os.O_RDONLY)), (1, log), (2, log)):
            os.dup2(file, descriptor)
        os.environ.clear()
        os.environ.update(asked["environment"])
        if asked["core"] is not None:
            os.sched_setaffinity(0, {asked["core"]})
        sys.argv = asked["argv"]
        runpy.run_path(asked["argv"][0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # those that watch are waited for by nobody
    for name in _PREPARED:
        __import__(name)
    threads = [int(task.name) for task in Path("/proc/self/task").iterdir()]
    assert threads == [os.getpid()], f"importing started threads: {len(threads)}"
    # DeepSpeed looks for garbage when it builds an engine: never among what is imported, which takes half a second.
    gc.collect()
    gc.freeze()
    own = os.getpid()
    while line := sys.stdin.readline():
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _die_with(own)
            _watch(json.loads(line))


if __name__ == "__main__":
    main()
