"""Runs one rank of a run, which trains and records, or of `vitscale check`, which measures host, network and speed.

A user's own training script runs as `python train.py` would, with its arguments filled in: with a Probe it is measured
step by step (`vitscale.worker.script_steps`), without one it is timed as a whole.
"""

from __future__ import annotations

import atexit
import gc
import hashlib
import os
import runpy
import sys
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

from vitscale.base.interpreter import forget_safe_path
from vitscale.processes.heartbeat import PROGRESS, STARTING
from vitscale.processes.launch_file import RECORDER_RING, TORCH, LaunchFile
from vitscale.store import RankLog
from vitscale.store.records import EpochLine, ModelLine, PhaseLine
from vitscale.store.results import RunHeader
from vitscale.trial import script
from vitscale.worker.probe import Current
from vitscale.worker.rank_process import RankInfo, now_ns, run_rank

_ARRIVED_NS = now_ns()
_GRACE_SECONDS = 30.0
"""Time that a check has beyond the limits of all its stages."""
_REQUEST = "request.json"


class Train:
    """The work of a run's rank (`Body`): trains as trial.json says, by vitscale's own loop or by the user's script."""

    name = "trial"
    at_once = False

    def __init__(self, folder: Path) -> None:
        self._header = RunHeader.model_validate_json((folder / "trial.json").read_text(encoding="utf-8"))
        self.world = self._header.trial.world
        self.device = self._header.trial.train.device

    def work(self, rank: RankInfo, log: RankLog, folder: Path, launch: LaunchFile | None) -> object:
        """Trains, from the first import of torch to the last step; or runs the user's own script."""
        del folder
        if launch is not None and launch.prepared_seconds is not None:
            log.write(PhaseLine(name="prepare", seconds=launch.prepared_seconds))
        if rank.launch_seconds is not None:
            log.write(PhaseLine(name="launch", seconds=rank.launch_seconds))
        if self._header.trial.train.script is not None:
            return run_script(self._header, rank, log, launch)
        began = time.perf_counter()
        gc.disable()  # until all is imported: it stays, and searching it for garbage takes a seventh of the time
        # Imported only now: torch takes its threads and cores from how the rank is pinned.
        from vitscale.worker.session import train

        silence_seconds = launch.silence_seconds if launch is not None else None
        return train(self._header, rank, log, began, silence_seconds=silence_seconds)


class Check:
    """The work of a check's rank (`Body`): measures what request.json asks for.

    A stage that fails or hangs is part of the result, and the next one begins all the same; so each line is on disk
    first. A timer, which begins with the body, ends the process in the end.
    """

    name = "check"
    at_once = True

    def __init__(self, folder: Path) -> None:
        from vitscale.store.checks import CheckRequest

        self._request = CheckRequest.model_validate_json((folder / _REQUEST).read_text(encoding="utf-8"))
        self.world = self._request.world
        self.device = self._request.device
        # Ends this process if stages overrun their limits: a thread may hold Python's lock.
        timer = threading.Timer(self._request.longest_seconds + _GRACE_SECONDS, os._exit, (1,))
        timer.daemon = True
        timer.start()
        self._host_cores = len(os.sched_getaffinity(0))

    def work(self, rank: RankInfo, log: RankLog, folder: Path, launch: LaunchFile | None) -> None:
        """Does every stage."""
        del launch
        gc.disable()
        # Imported only now: torch takes its threads and cores from how the rank is pinned.
        from vitscale.worker.check_stages import measure

        gc.freeze()
        gc.enable()
        measure(self._request, rank, log, folder, self._host_cores)


def run_script(header: RunHeader, rank: RankInfo, log: RankLog, launch: LaunchFile | None) -> Any:
    """Runs the user's script to its end; returns objects that must not be destroyed before the process ends.

    Raises:
        RuntimeError: it has changed since the study was planned, or has ended too early.
        SystemExit: it ended with another exit code than 0.
    """
    path = Path(header.trial.train.script or "")
    if hashlib.sha256(path.read_bytes()).hexdigest() != header.trial.script_digest:
        raise RuntimeError(f"{path} has changed since the study was started: begin a new results folder with -o")
    _set_up_as_python_does(path, _script_arguments(header, run_folder=log.path.parent))
    os.environ.setdefault(*RECORDER_RING)
    if rank.world_size == 1:
        _set_variables_of_only_rank(launch)
    # What the script prints is a sign of life, though the log is a file.
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(line_buffering=True)
    PROGRESS.phase = f"{STARTING}script"
    began = time.perf_counter()

    def start() -> Any:
        from vitscale.worker.script_steps import ScriptSteps  # imports torch: the script has done so, or wants it

        return ScriptSteps(header, rank, log, began)

    Current.start = start  # the script's first Probe calls it
    script_globals: Any = None
    try:
        script_globals = runpy.run_path(str(path), run_name="__main__")
    except SystemExit as error:
        if error.code not in (None, 0):
            raise
    if Current.script_steps is not None:
        Current.script_steps.end()
    _leave_as_python_does()
    if Current.script_steps is None:
        _record_whole_time(log, header, rank, time.perf_counter() - began)
    return script_globals


def _set_up_as_python_does(script_path: Path, arguments: list[str]) -> None:
    """Gives this process the arguments and the search path that `python SCRIPT ARGUMENTS` would have.

    The script's own folder comes first, here and in the processes that it starts.
    """
    sys.argv = [str(script_path), *arguments]
    sys.path.insert(0, str(script_path.parent))
    forget_safe_path(os.environ)


def _script_arguments(header: RunHeader, run_folder: Path) -> list[str]:
    """Returns the script's arguments, filled in; makes the folder for its output if they name it."""
    train = header.trial.train
    output = run_folder / script.OUTPUT
    if script.OUTPUT in script.placeholders(train.arguments):
        output.mkdir(exist_ok=True)
    seed = train.seed if header.seed is None else header.seed
    return script.filled(train.arguments, header.trial, seed=seed, repeat=header.repeat, output=output)


def _set_variables_of_only_rank(launch: LaunchFile | None) -> None:
    """Sets torch's variables for a group of one: a script finds its group by variables even where it is alone."""
    port = launch.master_port if launch is not None else None
    address = {"LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port or 29500)}
    for name, value in (TORCH.variables(0, 1, 0) | address).items():
        os.environ.setdefault(name, value)


def _leave_as_python_does() -> None:
    """Runs what the script has registered for its end, because the rank itself is left at once (`run_rank`)."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for its threads and ends its pools
    atexit._run_exitfuncs()


def _record_whole_time(log: RankLog, header: RunHeader, rank: RankInfo, seconds: float) -> None:
    """Records the time of a script without a Probe as one epoch of which nothing else is known."""
    unknown_of_epoch = dict.fromkeys(
        ("steps", "images", "train_loss", "train_accuracy", "held_out_loss", "held_out_accuracy", "peak_bytes")
    )
    unknown_of_model = dict.fromkeys(
        ("parameters", "gradient_dtype", "synchronised_timing", "train_samples", "held_out_samples")
    )
    if "torch" in sys.modules:
        from vitscale.worker.environment import start_line
        from vitscale.worker.script_steps import device_of

        log.write(start_line(header, rank, device_of(header), None))
    log.write(ModelLine.model_validate(unknown_of_model | {"dataset_fingerprint": header.dataset_fingerprint}))
    log.write(EpochLine.model_validate(unknown_of_epoch | {"epoch": 0, "seconds": seconds, "complete": True}))


def main(folder: Path, arrived_ns: int = _ARRIVED_NS) -> NoReturn:
    """Does this rank's part of the run, or of the check, in `folder`; see `run_rank`."""
    run_rank(folder, _read_body, arrived_ns)


def _read_body(folder: Path) -> Check | Train:
    """Reads a folder's work: a check has a request."""
    is_check = (folder / _REQUEST).exists()
    return Check(folder) if is_check else Train(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
