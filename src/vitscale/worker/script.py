"""Runs a user's own training script in this rank, as `python train.py` would, with its arguments filled in.

A script with a Probe is measured step by step (`vitscale.worker.measuring`); one without is timed as a whole.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import runpy
import sys
import threading
import time
from pathlib import Path
from typing import Any

from vitscale.processes.heartbeat import PROGRESS, STARTING
from vitscale.processes.launch_file import RECORDER_RING, TORCH, LaunchFile
from vitscale.store import RankLog
from vitscale.store.records import EpochLine, ModelLine
from vitscale.store.results import RunHeader
from vitscale.trial import script
from vitscale.worker.probe import Current
from vitscale.worker.rank_process import RankInfo


def run_script(header: RunHeader, own: RankInfo, log: RankLog, launch: LaunchFile | None) -> Any:
    """Runs it to its end; returns what must not be taken apart before the process ends.

    Raises:
        RuntimeError: it has changed since the study was planned, or has ended too early.
        SystemExit: it ended with another exit code than 0.
    """
    train = header.trial.train
    path = Path(train.script or "")
    if hashlib.sha256(path.read_bytes()).hexdigest() != header.trial.script_digest:
        raise RuntimeError(f"{path} has changed since the study was started: begin a new results folder with -o")
    output = log.path.parent / script.OUTPUT
    if script.OUTPUT in script.placeholders(train.arguments):
        output.mkdir(exist_ok=True)
    seed = train.seed if header.seed is None else header.seed
    sys.argv = [
        str(path),
        *script.filled(train.arguments, header.trial, seed=seed, repeat=header.repeat, output=output),
    ]
    sys.path[0] = str(path.parent)
    os.environ.setdefault(*RECORDER_RING)
    if own.world_size == 1:
        _tell_the_only_rank(launch)
    # What it prints is a sign of life, and the log a file.
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(line_buffering=True)
    PROGRESS.phase = f"{STARTING}script"
    began = time.perf_counter()

    def start() -> Any:
        from vitscale.worker.measuring import Measuring  # torch with it: the script has it too by now, or wants it

        return Measuring(header, own, log, began)

    Current.start = start
    kept: Any = None
    try:
        kept = runpy.run_path(str(path), run_name="__main__")
    except SystemExit as error:
        if error.code not in (None, 0):
            raise
    if Current.measuring is not None:
        Current.measuring.end()
    _leave_as_python_does()
    if Current.measuring is None:
        _time_as_a_whole(log, header, own, time.perf_counter() - began)
    return kept


def _tell_the_only_rank(launch: LaunchFile | None) -> None:
    """A script meets its group by variables, also where it is alone."""
    port = launch.master_port if launch is not None else None
    alone = {TORCH.rank: "0", TORCH.world_size: "1", TORCH.local_rank: "0", "LOCAL_WORLD_SIZE": "1"}
    for name, value in (alone | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port or 29500)}).items():
        os.environ.setdefault(name, value)


def _leave_as_python_does() -> None:
    """What a script has registered for its end is done: the rank itself is left at once (`run_rank`)."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for its threads and ends its pools
    atexit._run_exitfuncs()


def _time_as_a_whole(log: RankLog, header: RunHeader, own: RankInfo, seconds: float) -> None:
    """Its whole time stands where that of an epoch does; everything else is unknown."""
    nothing = dict.fromkeys(
        ("steps", "images", "train_loss", "train_accuracy", "held_out_loss", "held_out_accuracy", "peak_bytes")
    )
    unknown = dict.fromkeys(
        ("parameters", "gradient_dtype", "synchronised_timing", "train_samples", "held_out_samples")
    )
    if "torch" in sys.modules:
        from vitscale.worker.environment import start_line
        from vitscale.worker.measuring import device_of

        log.write(start_line(header, own, device_of(header), None))
    log.write(ModelLine.model_validate(unknown | {"dataset_fingerprint": header.dataset_fingerprint}))
    log.write(EpochLine.model_validate(nothing | {"epoch": 0, "seconds": seconds, "complete": True}))
