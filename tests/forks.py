"""Scripts and commands run as forks of processes that have imported what they need: each starts in tenths of a second.

For tests whose subject is not how a process starts. As a program this is such a process: of everyone who connects to
its socket it makes a fork that runs a script, the command line, or a prepared process of the product's, as if it had
been started anew.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib
import json
import multiprocessing.process
import os
import pkgutil
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol, Self

from processes import wait_until

_TESTS = str(Path(__file__).parent)
FOLDER = "VITSCALE_TESTS_FORKS"
"""The variable that names the folder with what all processes of these tests share."""
BRIEF = "VITSCALE_TESTS_BRIEF"
"""The variable by which ranks take milliseconds for their device's matrix rate: otherwise a quarter of a short run."""
_IMPORTED = {
    # What engines import, some of it only in their first step: once here, and not in every fork.
    "ranks": (
        "torch.distributed.tensor", "torch._dynamo", "torch._inductor.compile_fx", "deepspeed", "pytorch_optimizer",
        "accelerate", "transformers.integrations.deepspeed", "vitscale.worker.__main__", "vitscale.worker.session",
        "vitscale.lab.enter",
        # DeepSpeed when it builds an engine.
        "setuptools", "deepspeed.module_inject.auto_ep_layer", "deepspeed.runtime.zero.muon.original_muon",
        # What models of transformers import when they are built.
        "transformers.models.swinv2.modeling_swinv2", "transformers.models.upernet.modeling_upernet",
        # Those of examples of own scripts too.
        "transformers.models.vit.modeling_vit",
    ),
    "commands": ("vitscale.cli", "vitscale.lab.enter"),
}  # fmt: skip
_WORKER_PLANE = (
    "vitscale.worker", "vitscale.models", "vitscale.datasets", "vitscale.probes",
    "vitscale.engines.base", "vitscale.engines.building", "vitscale.engines.shared",
)  # fmt: skip
WARM_POOL = "TORCH_WARM_POOL"
"""The variable by which older releases of torch start no processes that compile, with a thread, when imported."""
_PR_SET_PDEATHSIG = 1
_popen = subprocess.Popen
AT_FIRST = dict(os.environ)
"""Before a test sets variables for itself."""


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


class Fork:
    """A fork under way: as much of `subprocess.Popen` as is asked of it. It ends where nobody holds this any more."""

    def __init__(self, server: socket.socket) -> None:
        self._server = server
        self._heard = b""
        self.args: tuple[str, ...] = ()
        self.returncode: int | None = None
        pid = self._told(None)
        assert pid is not None
        self.pid = pid

    def _told(self, timeout: float | None) -> int | None:
        """The next number, or None where there is none in time."""
        while b"\n" not in self._heard:
            if not select.select([self._server], [], [], timeout)[0]:
                return None
            chunk = self._server.recv(64)
            assert chunk, "the process that forks has ended"
            self._heard += chunk
        line, _, self._heard = self._heard.partition(b"\n")
        return int(line)

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._told(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self.returncode = self._told(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("a fork", timeout or 0.0)
        self._server.close()
        return self.returncode

    def kill(self) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended, and that is still to be told
                os.kill(self.pid, signal.SIGKILL)

    def communicate(self, *_: object, timeout: float | None = None) -> tuple[None, None]:
        self.wait(timeout)
        return None, None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()


class Prepared:
    """A process that has imported torch, the engines and the worker, or the command line, and nothing else."""

    def __init__(self, path: str, host: Sequence[str] = ()) -> None:
        """One that listens at `path`; `host`: the arguments of the laboratory's `enter.py`, for forks on a host."""
        self._path, self._host = path, [*host]

    def on(self, host: Sequence[str]) -> Prepared:
        """The same, whose forks are on a host."""
        return Prepared(self._path, host)

    @classmethod
    def of_all(cls, kind: str) -> Prepared:
        """That of all processes of these tests, by what it has imported; the first who asks starts it."""
        folder = os.environ[FOLDER]
        path = f"{folder}/{kind}"
        with Path(folder, "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not Path(path).exists():
                with Path(folder, "alive").open("rb") as alive:
                    _start_server(path, kind, alive)
        return cls(path)

    def ask(self, request: Mapping[str, object], descriptors: Sequence[int]) -> Fork:
        """A fork that does what is asked; its standard output and error are the first two of the descriptors."""
        # A host holds what runs on it to its own cores.
        cores = [] if self._host else sorted(os.sched_getaffinity(0))
        here = {"cwd": str(Path.cwd()), "cores": cores, "host": self._host}
        server = socket.socket(socket.AF_UNIX)
        server.connect(self._path)
        text = json.dumps(here | dict(request)).encode() + b"\n"
        sent = socket.send_fds(server, [text], list(descriptors))
        server.sendall(text[sent:])
        return Fork(server)

    def start(
        self, script: Path, *arguments: Path, log: Path, environment: Mapping[str, object], core: int | None = None
    ) -> Started:
        given = {name: str(value) for name, value in environment.items()}
        request = {
            "kind": "script",
            "argv": [str(script), *map(str, arguments)],
            "environment": os.environ | given | {"PYTHONPATH": _TESTS},
        }
        with log.open("w") as output:
            return self.ask(request if core is None else request | {"cores": [core]}, [output.fileno()] * 2)

    def run(
        self, request: Mapping[str, Any], timeout: float, *, together: bool = False
    ) -> subprocess.CompletedProcess[str]:
        """A fork from its start to its end; `together`: its standard error in its standard output."""
        with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
            code = self.ask(request, [output.fileno(), (output if together else errors).fileno()]).wait(timeout)
            output.seek(0)
            errors.seek(0)
            return subprocess.CompletedProcess(request["argv"], code, output.read(), errors.read())

    def close(self) -> None:
        """Forks end where nobody holds them any more."""


@functools.cache
def prepared_here() -> Prepared:
    """For ranks; one for all tests."""
    return Prepared.of_all("ranks")


def share_forks() -> Callable[[], None]:
    """Makes the folder by which all processes of these tests share theirs, which end with this process.

    Returns:
        What ends them sooner.
    """
    if FOLDER in os.environ:
        return lambda: None
    folder = tempfile.mkdtemp(prefix="vitscale-forks-")
    os.environ[FOLDER] = AT_FIRST[FOLDER] = folder
    os.mkfifo(f"{folder}/alive")
    held = os.open(f"{folder}/alive", os.O_RDWR)

    def end() -> None:
        os.close(held)
        shutil.rmtree(folder)

    return end


def _start_server(path: str, kind: str, stdin: Any) -> None:
    """Returns when it has imported all and listens; it ends when its standard input does."""
    # What is imported may start threads unless told, and a process that has some must not be forked.
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    threads[WARM_POOL] = "0"
    errors = Path(f"{path}-errors")
    with errors.open("wb") as error_file:
        process = subprocess.Popen(
            [sys.executable, __file__, path, kind],
            stdin=stdin,
            stderr=error_file,
            env=AT_FIRST | threads | {"PYTHONPATH": _TESTS},
            start_new_session=True,
        )
    wait_until(lambda: Path(path).exists() or process.poll() is not None, "all is imported")
    assert process.poll() is None, f"what was to be imported is not: {errors.read_text().strip().splitlines()[-1:]}"


# --- the process that forks ------------------------------------------------------------------------------------------


def _die_with(parent: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _watch(asker: socket.socket, set_by_imports: Mapping[str, str]) -> NoReturn:
    """Makes a child of what is asked, tells its number and its exit code; ends it where the asker goes away."""
    heard, descriptors, _, _ = socket.recv_fds(asker, 1 << 16, 8)
    while not heard.endswith(b"\n"):
        heard += asker.recv(1 << 16)
    own = os.getpid()
    child = os.fork()
    if child == 0:
        _die_with(own)
        asker.close()
        _run(json.loads(heard), descriptors, set_by_imports)
    for descriptor in descriptors:
        os.close(descriptor)
    ending = os.pidfd_open(child)
    ends: list[Any] = [asker, ending]
    asker.sendall(f"{child}\n".encode())
    if ending not in select.select(ends, [], [])[0]:
        os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with contextlib.suppress(OSError):
        asker.sendall(f"{code}\n".encode())
    os._exit(0)


def _run(asked: dict[str, Any], descriptors: list[int], set_by_imports: Mapping[str, str]) -> NoReturn:
    """As if it had been started anew."""
    code = 1
    try:
        output, errors, *others = descriptors
        nothing = os.open(os.devnull, os.O_RDONLY)
        for descriptor, file in ((0, nothing), (1, output), (2, errors)):
            os.dup2(file, descriptor)
        for file in {nothing, output, errors}:
            os.close(file)
        os.environ.clear()
        os.environ.update(asked["environment"])
        os.chdir(asked["cwd"])
        # Where it finds a script with a relative path again.
        vars(multiprocessing.process)["ORIGINAL_DIR"] = asked["cwd"]
        if asked["host"]:
            _enter(asked["host"])
        if asked["cores"]:
            os.sched_setaffinity(0, asked["cores"])
        match asked["kind"]:
            case "script":
                subprocess.Popen = _fork_scripts  # type: ignore[assignment, misc]  # takes what it is asked with
                sys.argv = asked["argv"]
                sys.path.insert(0, str(Path(asked["argv"][0]).parent))  # as Python does of a script
                runpy.run_path(asked["argv"][0], run_name="__main__")
            case "command":
                _as_module()
                subprocess.Popen = fork_what_is_prepared  # type: ignore[assignment, misc]  # takes what it is asked with
                sys.argv[1:] = asked["argv"]
                runpy.run_module("vitscale", run_name="__main__", alter_sys=True)
            case "prepared":
                _as_module()
                _be_prepared(others[0], set_by_imports)
            case "ranks":
                _as_module()
                code = _run_ranks(asked["argv"], set_by_imports)
                os._exit(code)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class _EnteredError(Exception):
    """This process is on the host."""


def _enter(arguments: list[str]) -> None:
    """Goes on in a fork on a host, as what enters hosts would run a command there; what waits outside leaves as it
    left."""

    from vitscale.lab import enter

    def go_on(command: list[str], parent_pipe: int) -> NoReturn:
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        raise _EnteredError

    enter._become = go_on
    with contextlib.suppress(_EnteredError):
        enter.main(arguments)


def _as_module() -> None:
    """Modules are found as by `python -P -m`."""
    given = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [*given, *(path for path in sys.path if path != _TESTS)]


def _fork_scripts(argv: Any, **keywords: Any) -> Any:
    """In place of `subprocess.Popen` in a script: what runs a script by this interpreter is a fork too."""
    if argv[0] != sys.executable or not argv[1].endswith(".py"):
        return _popen(argv, **keywords)
    request = {"kind": "script", "argv": argv[1:], "environment": keywords["env"]}
    return prepared_here().ask(request, [keywords["stdout"].fileno(), keywords["stderr"].fileno()])


_GPUS = [*Path("/dev").glob("nvidia[0-9]*")]


def fork_what_is_prepared(argv: Any, **keywords: Any) -> Any:
    """In place of `subprocess.Popen` in a command: the product's prepared process, and ranks that the product starts
    anew on this machine, need not import what another of the same environment has."""
    command = [*argv][argv.index("--") + 1 :] if "--" in argv else []
    module = command[command.index("-m") + 1] if "-m" in command else ""
    kind = {"vitscale.worker.prepared": "prepared", "vitscale.processes.local_ranks": "ranks"}.get(module)
    if kind is None or _of_libraries(keywords["env"]) != _of_libraries(AT_FIRST) or _GPUS:
        return _popen(argv, **keywords)  # on a GPU, too, ranks start as the product starts them
    output = keywords["stdout"].fileno()
    request = {"kind": kind, "argv": command, "environment": keywords["env"], "cwd": str(keywords["cwd"])}
    return Prepared.of_all("ranks").ask(request, [output, output, *keywords.get("pass_fds", ())])


def _of_libraries(environment: Mapping[str, str]) -> dict[str, str]:
    """What libraries may read when they are loaded, but for the number of threads, which a fork sets, and for what
    torch and DeepSpeed set where a test has imported them in its own process."""
    own = (
        "VITSCALE_", "PYTEST_", "COLUMNS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "PYTHONPATH",
        "TORCHINDUCTOR_CACHE_DIR", "PYTORCH_NVML_BASED_CUDA_CHECK", "KMP_DUPLICATE_LIB_OK",
    )  # fmt: skip
    return {name: value for name, value in environment.items() if not name.startswith(own)}


def _be_prepared(driver: int, set_by_imports: Mapping[str, str]) -> None:
    """What `vitscale.worker.prepared` is; of its imports nothing is left to be done but what they set."""
    import torch

    from vitscale.worker import prepared, session

    def preload(*arguments: Any) -> None:
        os.environ.update(set_by_imports)
        really(*arguments)

    really = session.preload
    vars(session)["preload"] = preload
    os.setsid()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    prepared.main([str(driver)])


def _run_ranks(command: list[str], set_by_imports: Mapping[str, str]) -> int:
    """`python -m vitscale.processes.local_ranks ...`, by the product's own way to run it in a fork."""
    from vitscale.worker import prepared

    driver, _ = socket.socketpair()
    server = prepared._Server(driver)
    server._variables_of_imports = dict(set_by_imports)
    return server._run(os.getppid(), command, dict(os.environ), Path("/proc/self/fd/1"))


def main(path: str, kind: str) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # those that watch are waited for by nobody
    if (niceness := os.nice(0)) < 0:  # a session of its own is a group of its own: see `conftest.pytest_configure`
        with contextlib.suppress(OSError):
            Path("/proc/self/autogroup").write_text(str(niceness))
    before = dict(os.environ)
    for name in _IMPORTED[kind]:
        importlib.import_module(name)
    if kind == "commands":
        for module in pkgutil.walk_packages(importlib.import_module("vitscale").__path__, "vitscale."):
            if not module.name.startswith(_WORKER_PLANE) and not module.name.endswith(("__main__", ".wrap")):
                with contextlib.suppress(ImportError):  # whoever needs what is not installed is told by the command
                    importlib.import_module(module.name)
    if kind == "ranks" and BRIEF in before:
        from vitscale.engines.packages import installed_versions
        from vitscale.probes import matmul
        from vitscale.worker.session import _thread_pools

        installed_versions()
        _thread_pools()
        vars(matmul)["_SECONDS"], matmul._LONG_ENOUGH_SECONDS["cpu"] = 0.01, 1e-4
    set_by_imports = {name: value for name, value in os.environ.items() if before.get(name) != value}
    threads = [int(task.name) for task in Path("/proc/self/task").iterdir()]
    assert threads == [os.getpid()], f"importing started threads: {len(threads)}"
    # DeepSpeed looks for garbage when it builds an engine: never among what is imported, which takes half a second.
    gc.collect()
    gc.freeze()
    own = os.getpid()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{path}-soon")
    listener.listen(64)
    Path(f"{path}-soon").rename(path)
    ends: list[Any] = [0, listener]
    while True:
        if 0 in select.select(ends, [], [])[0]:
            os._exit(0)
        asker, _ = listener.accept()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _die_with(own)
            listener.close()
            _watch(asker, set_by_imports)
        asker.close()


if __name__ == "__main__":
    sys.modules["forks"] = sys.modules["__main__"]
    main(*sys.argv[1:3])
