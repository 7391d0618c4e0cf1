"""Runs one rank, whatever it was started for.

Finds out which rank it is, whose death ends it and which cores are its own, does its work, and leaves the true reason
where it fails. Nothing here imports torch, which takes its threads and cores from what is set before.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, Protocol

from vitscale.base.interpreter import append_to_search_path
from vitscale.machine.cores import bound_by_launcher, node_distances, physical_cores, share_of_cores
from vitscale.machine.gpus import GpusUnreadable, host_gpus, visible_gpus
from vitscale.processes import launch_file
from vitscale.processes.heartbeat import PROGRESS, Heartbeat
from vitscale.processes.launch_file import COMPLETE_VARIABLE, FAMILIES, TORCH, LaunchFile
from vitscale.processes.parent_death import end_with_parent
from vitscale.store import DISK_FULL_ERRORS, RankLog, is_full
from vitscale.store.records import EndLine, ErrorLine
from vitscale.trial.trial import DeviceName, World
from vitscale.worker.recorder_dump import write_recorder_dump


@dataclass(frozen=True)
class RankInfo:
    """Which rank of the world this is, from the launcher's environment."""

    rank: int
    world_size: int
    local_rank: int
    launch_seconds: float | None
    """Seconds from the driver's start of the launcher to here; None where the driver runs on another boot or host."""


def restart_with_environment(launch: LaunchFile | None) -> None:
    """Starts this program again with the run's environment, if it does not have it; does not return then.

    A launcher may not have passed it on whole: DeepSpeed's replaces CUDA_VISIBLE_DEVICES, and an image's own variables
    come before those from outside. To set the variables here would come too late: libraries and the interpreter read
    them as they start, and those who look for a run's processes see only what a program began with.

    Args:
        launch: launch.json; None where no driver has started this, and this process goes on as it is.
    """
    if launch is not None and not launch_file.is_complete(launch):
        environment = launch_file.completed_environment(launch) | {COMPLETE_VARIABLE: launch.token}
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)  # noqa: S606 - no shell is wanted


def rank_info(arrived_ns: int, launch: LaunchFile | None) -> RankInfo:
    """Reads the rank from the environment, in any launcher's variables; without a launcher this is the only rank.

    Sets torch's variables of the rank and of rank 0's address where the launcher does not. Ends the process, with a
    message, where the launcher's numbers are invalid.

    Args:
        arrived_ns: when this process began its work, by `now_ns`.
        launch: launch.json; None where no driver has started this.
    """
    launch_seconds = _launch_seconds(arrived_ns, launch)
    family = next((family for family in FAMILIES if family.are_in(os.environ)), None)
    if family is None:
        return RankInfo(rank=0, world_size=1, local_rank=0, launch_seconds=launch_seconds)
    variables = (family.rank, family.world_size, family.local_rank)
    try:
        rank, world_size, local_rank = (int(os.environ.get(variable, "0")) for variable in variables)
    except ValueError:
        values = ", ".join(f"{variable}={os.environ.get(variable, '')!r}" for variable in variables)
        sys.exit(f"vitscale: the launcher's numbers of this rank are none: {values}")
    if family is not TORCH and launch is not None:
        os.environ |= TORCH.variables(rank, world_size, local_rank)
        if launch.master_address is not None and launch.master_port is not None:
            os.environ |= {"MASTER_ADDR": launch.master_address, "MASTER_PORT": str(launch.master_port)}
    return RankInfo(rank, world_size, local_rank, launch_seconds)


def _launch_seconds(arrived_ns: int, launch: LaunchFile | None) -> float | None:
    """Returns the seconds from the driver's start of the launcher to `arrived_ns`; None where the clocks differ."""
    if launch is None or not launch.host_id or launch.host_id != launch_file.host_id():
        return None
    return max(0.0, (arrived_ns - launch.started_ns) / 1e9)


def die_with_parent(launch: LaunchFile | None) -> None:
    """Asks the kernel to end this rank when its launcher dies, whatever it is doing then.

    The launcher is tied to the driver in the same way, so ranks end with their driver even when that is killed by
    SIGKILL. On other hosts than the driver's the heartbeat ends them.
    """
    # The launcher may have died before this call: then nobody would send the signal.
    end_with_parent(os.getppid())
    if launch is None or launch.host_id != launch_file.host_id():
        return
    if not Path(f"/proc/{launch.driver_pid}").exists():
        sys.exit("vitscale: the driver is gone")


def pin(rank: RankInfo, world: World, device: DeviceName) -> None:
    """Pins this rank to cores of its own and sets how many threads it computes with, before any library looks.

    Nothing is pinned where the launcher has bound the rank already (srun --cpu-bind, mpirun --bind-to), and where the
    cores do not suffice (oversubscription).
    """
    os.environ["OMP_NUM_THREADS"] = str(world.threads_per_rank)
    # By default CUDA numbers GPUs by their speed, and NVML by their bus. Where a host's GPUs differ in speed, the same
    # number would then be another GPU.
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    if bound_by_launcher():
        return
    visible_gpu_nodes: list[int | None] = []  # the memory node of each GPU
    host_gpu_nodes: list[int | None] = []
    ranks = world.ranks_per_node
    if device == "cuda":
        with contextlib.suppress(GpusUnreadable):
            visible_gpu_nodes = [gpu.numa_node for gpu in visible_gpus()]
        sees_own_gpu_only = 0 < len(visible_gpu_nodes) < ranks
        if sees_own_gpu_only:
            host_gpu_nodes = [gpu.numa_node for gpu in host_gpus()]
    cores = share_of_cores(
        rank.local_rank,
        ranks,
        world.threads_per_rank,
        physical_cores(),
        visible_gpu_nodes,
        node_distances(),
        host_gpu_nodes,
    )
    if cores is not None:
        os.sched_setaffinity(0, cores)


def now_ns() -> int:
    """Returns the time in ns by the clock that driver and ranks of one host share."""
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC)


class Body(Protocol):
    """What ranks are started for: a run (`Train`) or a check (`Check`), read from its folder."""

    name: str
    """Its name in messages."""
    at_once: bool
    """Whether each line must be on disk before anything else begins."""
    world: World
    """The ranks that it is for."""
    device: DeviceName
    """The device that they compute on."""

    def work(self, rank: RankInfo, log: RankLog, folder: Path, launch: LaunchFile | None) -> object:
        """Does all of the work; what it returns must not be destroyed before the process ends.

        Args:
            rank: which rank this is.
            log: its record.
            folder: folder of the run or check.
            launch: launch.json; None where no driver has started this.
        """


def run_rank(folder: Path, read: Callable[[Path], Body], arrived_ns: int) -> NoReturn:
    """Runs this process's rank and ends the process, with 0 where all its work is recorded.

    The process is left by `os._exit`, never through the interpreter's shutdown. Taking a process group or DDP's reducer
    apart holds the GIL while it waits for threads that want it: with gloo that was seen to hang finished ranks for
    good. And after an error a collective on another thread may wait for a rank that will never come.

    Args:
        folder: folder of the run, with launch.json where a driver has started it.
        read: reads the work from that folder.
        arrived_ns: when this process began its work, on the monotonic clock.
    """
    launch = launch_file.read(folder)
    restart_with_environment(launch)
    die_with_parent(launch)
    # A rank that a user starts by hand finds the user's modules where it is started.
    append_to_search_path([str(Path.cwd())] if launch is None else launch.import_folders)
    rank = rank_info(arrived_ns, launch)
    try:
        body = read(folder)
    except FileNotFoundError:
        sys.exit(f"vitscale: {folder} is not seen on this host: is the results folder shared by all hosts?")
    size = body.world.size
    if rank.world_size != size or not 0 <= rank.rank < size:
        # A launcher that starts another world than asked for must not be measured.
        sys.exit(
            f"vitscale: the launcher made this rank {rank.rank} of {rank.world_size}, and the {body.name} has {size}"
        )
    heartbeat = _begin_heartbeat(launch, rank.rank, folder)
    pin(rank, body.world, body.device)
    log = RankLog(folder, rank.rank, at_once=body.at_once)
    exit_code = 0
    try:
        not_destroyed = body.work(rank, log, folder, launch)  # noqa: F841 - see `Body.work`
        log.write(EndLine())
        log.close()
    except BaseException as error:
        exit_code = 1
        log.end_with(error_line(error, log))
        # On a full disk the log has no room for it, but the record has.
        with contextlib.suppress(OSError):
            traceback.print_exc()
    if heartbeat is not None:
        heartbeat.close()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(exit_code)


def _begin_heartbeat(launch: LaunchFile | None, rank: int, folder: Path) -> Heartbeat | None:
    """Begins to send beats to the driver, and returns the heartbeat; None where no driver listens.

    Ends the process where the driver cannot be reached.
    """
    if launch is None or launch.lifeline is None:
        return None
    stacks = folder / f"stack-rank-{rank}.txt"

    def dump_stacks() -> None:
        with contextlib.suppress(OSError), stacks.open("w") as file:
            faulthandler.dump_traceback(file)
        # On a thread of its own: where torch's recorder does not answer, the heartbeat goes on.
        threading.Thread(target=write_recorder_dump, args=(folder, rank), daemon=True).start()

    try:
        return Heartbeat(launch, f"rank {rank}", PROGRESS, dump_stacks)
    except OSError as error:
        sys.exit(f"vitscale: rank {rank} cannot reach the driver at {launch.lifeline}: {error}")


_MOST_LETTERS_OF_TEXT = 16_000
"""Longest message, and longest traceback, in the record of an error."""
_MEMORY_MESSAGES = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
    "_status_alloc_failed",  # of cuBLAS, cuDNN, cuSOLVER, ...
)
"""Parts of messages that say that memory ran out, in small letters: the kernel, glibc and torch differ in that."""


def error_line(error: BaseException, log: RankLog | None = None) -> ErrorLine:
    """Returns the record of `error` with its traceback, and whether memory or the disk ran out.

    Args:
        error: what ended the rank.
        log: the rank's own log; None: nothing is known of its disk.
    """
    text = "".join(traceback.format_exception(error))
    if len(text) > _MOST_LETTERS_OF_TEXT:
        beginning = text[: _MOST_LETTERS_OF_TEXT // 2]
        end = text[-_MOST_LETTERS_OF_TEXT // 2 :]
        text = f"{beginning}\n...\n{end}"
    return ErrorLine(
        error_type=type(error).__name__,
        message=str(error)[:_MOST_LETTERS_OF_TEXT],
        traceback=text,
        out_of_memory=any(map(_is_out_of_memory, _error_chain(error))),
        disk_full=log is not None and _is_disk_full(error, log),
        unix_seconds=time.time(),
    )


def _error_chain(error: BaseException) -> list[BaseException]:
    """Returns `error`, what it was raised from, what that was raised from, and so on.

    Running out of memory in a user's model arrives wrapped in a message.
    """
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__
    return chain


def _is_disk_full(error: BaseException, log: RankLog) -> bool:
    """Whether the error says that the disk of the run's own records is full.

    A script may fill another disk (with its checkpoints, or /dev/shm), which says nothing about other runs.
    """
    if not isinstance(error, OSError) or error.errno not in DISK_FULL_ERRORS:
        return False
    if error is log.failure:
        return True
    run_folder = log.path.parent
    try:
        # First by the file that could not be written: what took the room may be gone by now, and a quota of the user's
        # is in no count of free blocks.
        if isinstance(error.filename, str):
            folder = _nearest_folder(Path(error.filename).absolute())
            is_same_disk = folder.stat().st_dev == run_folder.stat().st_dev
            if is_same_disk:
                return True
        return is_full(run_folder)
    except OSError:
        return False


def _nearest_folder(path: Path) -> Path:
    """Returns the nearest folder above an absolute path that exists."""
    return next(parent for parent in path.parents if parent.is_dir())


def _is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed; an illegal access or a lost device is no lack of memory."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(message in str(error).lower() for message in _MEMORY_MESSAGES)
