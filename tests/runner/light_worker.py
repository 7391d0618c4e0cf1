"""A rank without torch: everything of the product but the training, and one fault in the middle of it.

As a rank: `python -m light_worker RUN_FOLDER`. As the command line, whose ranks are these: `light_worker.py cli ...`.
As the host agent on another host: `python -m light_worker host_agent ...`.
Ranks step together as training does: each waits for all others at the end of a step, in its "backward". On all ends
silence is taken for a cut link sooner than by the product.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from vitscale.processes import heartbeat, host_agent
from vitscale.processes.heartbeat import PROGRESS, Heartbeat

if TYPE_CHECKING:
    from vitscale.processes.launch_file import LaunchFile
    from vitscale.worker import rank_process

FAULTS = ("well", "killed", "stopped", "raises", "exits_early", "stuck", "endless")
"""By the trial's seed. All but `well` and `endless` befall rank 1."""
STEPS, FAULTY_STEP = 12, 4
GO = "go"
"""Where a file of this name lies beside the results, a rank that starts is not endless."""
SILENCE_SECONDS = 5.0


class Together:
    """Lets no rank leave before all have come; rank 0 keeps the door."""

    def __init__(self, own: rank_process.RankInfo, launch: LaunchFile) -> None:
        self.rank = own.rank
        # A launcher that tells ranks of their master is asked as torch would.
        address = os.environ.get("MASTER_ADDR") or launch.master_address or ""
        port = (launch.master_port or 0) + 1
        self.others: list[socket.socket] = []
        if own.rank == 0:
            with socket.create_server(("", port)) as server:
                server.settimeout(60)
                self.others = [server.accept()[0] for _ in range(own.world_size - 1)]
        else:
            self.others = [_reach(address, port)]

    def wait(self) -> None:
        if self.rank == 0:
            for other in self.others:
                _hear(other)
            for other in self.others:
                other.sendall(b"g")
        else:
            self.others[0].sendall(b"a")
            _hear(self.others[0])


def _hear(other: socket.socket) -> None:
    if not other.recv(1):
        raise RuntimeError("Connection closed by peer")


def _reach(address: str, port: int) -> socket.socket:
    for _ in range(600):
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection((address, port), timeout=300)
        time.sleep(0.05)
    raise TimeoutError(f"rank 0 does not listen at {address}:{port}")


def befall(fault: str) -> None:
    if fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "raises":
        raise ValueError("the sensor on rank 1 reads nonsense")
    if fault == "exits_early":
        os._exit(0)
    if fault == "stuck":
        time.sleep(3600)


def main(run_folder: Path) -> NoReturn:
    # Not above: host agents, of which each run has several, need none of it.
    from vitscale.processes import launch_file
    from vitscale.store import RankLog
    from vitscale.store.records import EndLine, StepLine
    from vitscale.store.results import RunHeader
    from vitscale.worker import rank_process

    launch = launch_file.read(run_folder)
    assert launch is not None
    rank_process.restart_with_environment(launch)
    rank_process.die_with_parent(launch)
    own = rank_process.rank_info(rank_process.now_ns(), launch)
    header = RunHeader.model_validate_json((run_folder / "trial.json").read_text())
    stacks = run_folder / f"stack-rank-{own.rank}.txt"

    def dump_stacks() -> None:
        with stacks.open("w") as file:
            faulthandler.dump_traceback(file)

    line = Heartbeat(launch, f"rank {own.rank}", PROGRESS, dump_stacks)
    log = RankLog(run_folder, own.rank)
    fault = FAULTS[header.trial.train.seed % len(FAULTS)]
    code = 0
    endless = fault == "endless" and not (run_folder.parents[2] / GO).exists()
    try:
        together = Together(own, launch)
        for step in range(10**6 if endless else STEPS):
            PROGRESS.step, PROGRESS.phase = step, "forward"
            if step == FAULTY_STEP and own.rank == 1:
                befall(fault)
            PROGRESS.phase = "backward"
            together.wait()
            log.write(StepLine(step=step, epoch=0, seconds=0.01, images=own.rank + 1, loss=1.0, warmup=False))
            time.sleep(0.1 if endless else 0.01)  # those that go on until they are ended leave the cores to the others
        together.wait()
        log.write(EndLine())
        log.close()
    except BaseException as error:
        code = 1
        log.end_with(rank_process.error_line(error, log))
        if fault == "killed" and header.trial.launcher == "mpirun":
            # It tells of the process that it hears of first, and ends the others: let that be the one that was killed.
            time.sleep(60)
    line.close()
    os._exit(code)


def python_that_finds_this_module(folder: Path) -> Path:
    """Writes a Python that searches this file's folder, as no Python of a run does by itself; on every host."""
    program = folder / "python"
    search_path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    program.write_text(f'#!/bin/sh\nPYTHONPATH="{search_path}" exec {sys.executable} "$@"\n')
    program.chmod(0o755)
    return program


def drive(arguments: list[str]) -> None:
    """`vitscale ARGUMENTS`, whose ranks and host agents are of this module."""
    from vitscale import cli
    from vitscale.runner import one_run
    from vitscale.schedulers import hostfile

    one_run.RANK_MODULE = "light_worker"
    in_folder = hostfile._in_folder
    agent = {"vitscale.processes.host_agent": ("light_worker", "host_agent")}
    hostfile._in_folder = lambda argv: in_folder([word for each in argv for word in agent.get(each, (each,))])
    sys.executable = str(python_that_finds_this_module(Path(arguments[arguments.index("-o") + 1]).parent))
    hostfile.Hostfile.python = sys.executable
    sys.argv = ["vitscale", *arguments]
    cli.main()


if __name__ == "__main__":
    heartbeat.SILENCE_SECONDS = SILENCE_SECONDS  # before the driver's end takes it from there
    match sys.argv[1:]:
        case ["cli", *arguments]:
            drive(arguments)
        case ["host_agent", *arguments]:
            sys.exit(host_agent.main(arguments))
        case [folder]:
            main(Path(folder))
