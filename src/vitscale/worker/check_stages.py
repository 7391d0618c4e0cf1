"""The stages of one rank's check, in order: those that need no other rank are done even where ranks do not meet.

Each ends in time, whatever hangs in it: it has a thread of its own, which is abandoned if need be. A GPU does its work
in the order in which it comes, from whatever thread: if a stage hangs there, later ones that need the GPU are left out,
and so those that compute come before the collectives, which hang most often.
"""

from __future__ import annotations

import hashlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from vitscale import sources
from vitscale.datasets.batches import Batches, EpochOrder
from vitscale.machine.hardware import cpu_throttled_seconds
from vitscale.probes import host
from vitscale.probes.collective_sweep import sweep
from vitscale.probes.gpu_monitor import gpu_monitor
from vitscale.probes.matmul import compute_speed, measured_matmul
from vitscale.probes.resources import gpu_uuid
from vitscale.processes.heartbeat import PROGRESS
from vitscale.store import RankLog, checks
from vitscale.store.checks import CheckGroup, CheckRequest, CheckStage, CollectiveLine, LoaderLine, SweepPlan
from vitscale.trial.trial import Trial
from vitscale.worker import group
from vitscale.worker.environment import environment
from vitscale.worker.rank_process import RankInfo

_MOST_LETTERS_OF_REASON = 500
_SIGN_SECONDS = 10.0
"""Longest wait for a file of rank 0."""
_CONNECT_SECONDS = 3.0
"""Longest wait for one connection to rank 0."""
_WARM_UP_BATCHES = 3
"""Batches that are not timed."""


_HANGING_WORK: dict[CheckStage, str] = {"collectives": "a collective"}
"""Stage -> its work in messages, where that is not the stage's name."""
_AFTER_LIMITS_SECONDS = 60.0
"""Time that collectives have beyond the limits of all stages, after which the rank has ended."""


class CheckStages:
    """Does one stage after the other, and records how each ended."""

    def __init__(
        self,
        limits: dict[CheckStage, float],
        record: Callable[[checks.StageLine], None],
        note_begin: Callable[[CheckStage], None],
        prepare: Callable[[], None],
        *,
        on_gpu: bool = False,
    ) -> None:
        """Stores what each stage needs.

        Args:
            limits: seconds that each stage may take.
            record: called with how a stage ended.
            note_begin: called with a stage before it begins.
            prepare: called first in each stage's thread: torch keeps the device of a process by thread.
            on_gpu: whether the device is a GPU, which a stage that hangs keeps to itself.
        """
        self._limits = limits
        self._record = record
        self._note_begin = note_begin
        self._prepare = prepare
        self._on_gpu = on_gpu
        self._hung_on_gpu: CheckStage | None = None
        """The stage that has not given the GPU back."""

    @property
    def has_device(self) -> bool:
        """Whether the device can be computed on: no stage hangs on a GPU."""
        return self._hung_on_gpu is None

    def do(self, stage: CheckStage, work: Callable[[], None], *, uses_device: bool = False) -> bool:
        """Does the work of a stage in a thread, and records how it ended; returns whether it was done in time.

        A thread that does not end in time goes on, as what hangs in it cannot be stopped; nothing waits for it.

        Args:
            stage: the stage.
            work: its work.
            uses_device: whether that runs on the device, so that it is left out where a stage hangs there.
        """
        if uses_device and self._hung_on_gpu is not None:
            self.skip(stage, f"not measured: {_HANGING_WORK.get(self._hung_on_gpu, self._hung_on_gpu)} before it hung")
            return False
        self._note_begin(stage)
        failure: list[BaseException] = []

        def attempt() -> None:
            try:
                self._prepare()
                work()
            except BaseException as error:
                failure.append(error)

        thread = threading.Thread(target=attempt, name=f"stage-{stage}", daemon=True)
        began = time.perf_counter()
        thread.start()
        limit = self._limits[stage]
        thread.join(limit)
        seconds = time.perf_counter() - began
        if thread.is_alive():
            reason = f"not done after {limit:g} s"
            self._record(checks.StageLine(name=stage, ending="timeout", seconds=seconds, reason=reason))
            if uses_device and self._on_gpu:
                self._hung_on_gpu = stage
            return False
        if failure:
            reason = _first_line(failure[0])
            self._record(checks.StageLine(name=stage, ending="failed", seconds=seconds, reason=reason))
            return False
        self._record(checks.StageLine(name=stage, ending="done", seconds=seconds, reason=""))
        return True

    def skip(self, stage: CheckStage, reason: str) -> None:
        """Records that a stage was not begun."""
        self._record(checks.StageLine(name=stage, ending="skipped", seconds=0.0, reason=reason))


def _first_line(error: BaseException) -> str:
    """Returns an error's type and the first line of its message, so that it can be stored as UTF-8."""
    text = f"{type(error).__name__}: {error}".splitlines()[0][:_MOST_LETTERS_OF_REASON]
    return text.encode("utf-8", errors="backslashreplace").decode()


def measure(request: CheckRequest, rank: RankInfo, log: RankLog, folder: Path, host_cores: int) -> None:
    """Does every stage, each within its limit.

    Args:
        request: the check's settings.
        rank: which rank this is.
        log: gets each measurement as soon as it is made.
        folder: folder of the check.
        host_cores: cores this rank could have used before it was pinned.
    """
    torch.set_num_threads(request.world.threads_per_rank)
    device = group.device_of(request.device, rank)

    def note_begin(stage: CheckStage) -> None:
        PROGRESS.phase = stage

    def prepare() -> None:
        torch.set_num_threads(request.world.threads_per_rank)
        if device.type == "cuda":
            torch.cuda.set_device(device)

    stages = CheckStages(dict(request.limits), log.write, note_begin, prepare, on_gpu=device.type == "cuda")
    measurements = _Measurements(request, rank, log, folder, device)
    stages.do("facts", lambda: measurements.record_facts(host_cores))
    is_distributed = rank.world_size > 1
    if is_distributed and rank.rank != 0:
        stages.do("network", measurements.reach_rank_0)
    has_joined = stages.do("join", measurements.join)
    measurements.can_meet = is_distributed and has_joined
    stages.do("matmul", measurements.measure_matmul, uses_device=True)
    stages.do("compute", measurements.measure_compute, uses_device=True)
    if not is_distributed:
        stages.skip("collectives", "there is one rank")
    elif not has_joined:
        stages.skip("collectives", "the ranks did not meet")
    else:
        have_exchanged = stages.do("collectives", measurements.sweep_collectives, uses_device=True)
        measurements.can_meet = measurements.can_meet and have_exchanged
    if request.trial is not None:
        measurements.pins_memory = device.type == "cuda" and stages.has_device
        stages.do("loader", measurements.measure_loader)
    stages.do("disk", measurements.measure_disk)


class _Measurements:
    """Measures one rank, stage by stage, and records each result."""

    def __init__(self, request: CheckRequest, rank: RankInfo, log: RankLog, folder: Path, device: torch.device) -> None:
        self._request = request
        self._rank = rank
        self._log = log
        self._folder = folder
        self._device = device
        self.can_meet = False
        """Whether there are other ranks, and they can be expected to come where this one waits for them."""
        self.pins_memory = False
        """Whether the loader puts batches into memory that a GPU reads, which waits for a GPU that hangs."""

    def record_facts(self, host_cores: int) -> None:
        """Records where this rank runs."""
        backend = "nccl" if self._device.type == "cuda" else "gloo"
        self._log.write(
            checks.FactsLine(
                rank=self._rank.rank,
                world_size=self._rank.world_size,
                local_rank=self._rank.local_rank,
                environment=environment(self._device, backend),
                host_cores=host_cores,
                cpu_throttled_seconds=cpu_throttled_seconds(),
                hostname_addresses=host.hostname_addresses(),
                interfaces=host.interfaces(),
                infiniband=host.infiniband_ports(),
            )
        )

    def reach_rank_0(self) -> None:
        """Connects to rank 0's address and port, and hangs up at once.

        Rank 0 may still be importing, so this tries again until shortly before the stage's limit.
        """
        address = os.environ.get("MASTER_ADDR", "")
        port = int(os.environ.get("MASTER_PORT", "0"))
        patience_seconds = max(1.0, self._request.limits["network"] - _CONNECT_SECONDS - 1.0)
        last_try_at = time.monotonic() + patience_seconds
        while True:
            began = time.perf_counter()
            try:
                socket.create_connection((address, port), timeout=_CONNECT_SECONDS).close()
            except (OSError, UnicodeError) as error:
                reason = f"{type(error).__name__}: {error}"[:300]
                if time.monotonic() > last_try_at:
                    self._log.write(checks.ReachLine(address=address, port=port, seconds=None, reason=reason))
                    raise
                time.sleep(0.2)
            else:
                self._log.write(checks.ReachLine(address=address, port=port, seconds=time.perf_counter() - began))
                return

    def join(self) -> None:
        """Meets the other ranks."""
        silence_seconds = self._request.longest_seconds + _AFTER_LIMITS_SECONDS
        group.join(self._rank, self._device, alone=self._rank.world_size == 1, silence_seconds=silence_seconds)

    def sweep_collectives(self) -> None:
        """Sweeps every group of ranks that differs from the others."""
        group.barrier()
        for line in sweep_groups(self._request.sweep, self._rank, self._device):
            self._log.write(line)
        for line in sweep_split(self._request, self._device):
            self._log.write(line)

    def measure_matmul(self) -> None:
        """Measures the matrix-multiply rate of this rank's device."""
        self._wait_for_other_ranks("matmul")
        line = measured_matmul(self._device, self._request.precision)
        if line is not None:
            self._log.write(line)

    def measure_compute(self) -> None:
        """Measures this rank's pace while its GPU is watched."""
        request = self._request
        # Looked at in each of the pieces of work, which last less than a second in a quick check.
        monitor = gpu_monitor(gpu_uuid(self._device), min(1.0, request.compute_seconds))
        try:
            self._wait_for_other_ranks("compute")
            self._log.write(compute_speed(self._device, request.compute_repeats, request.compute_seconds, monitor))
        finally:
            monitor.close()

    def measure_loader(self) -> None:
        """Measures the study's loader on all ranks at once, as in training."""
        trial = self._request.trial
        if trial is None:
            return
        self._wait_for_other_ranks("loader")
        self._log.write(loader_rate(trial, self._rank, self._request.loader_seconds, pin=self.pins_memory))

    def measure_disk(self) -> None:
        """Writes and flushes as records are written; if the ranks have met, looks for a file of rank 0 too."""
        records = host.time_records(self._folder, self._rank.rank)
        sight = self._wait_for_sign_of_rank_0()
        self._log.write(
            checks.DiskLine(
                free_bytes=host.free_bytes(self._folder),
                record_seconds=records.seconds,
                record_bytes=records.record_bytes,
                seen_seconds=sight.seconds,
                seen_reason=sight.reason,
            )
        )

    def _wait_for_sign_of_rank_0(self) -> _Sight:
        """Returns after how many seconds this rank sees a file that rank 0 creates once all have met."""
        if self._rank.world_size == 1:
            return _Sight(seconds=None, reason="there is one rank")
        self._wait_for_other_ranks("disk")
        if not self.can_meet:
            return _Sight(seconds=None, reason="the ranks did not meet")
        if self._rank.rank == 0:
            host.write_sign(self._folder, "shown")
            return _Sight(seconds=0.0, reason="")
        seconds = host.seconds_until_sign(self._folder, "shown", _SIGN_SECONDS)
        reason = "" if seconds is not None else f"not seen within {_SIGN_SECONDS:g} s"
        return _Sight(seconds, reason)

    def _wait_for_other_ranks(self, stage: CheckStage) -> None:
        """Waits for the other ranks in a stage, if they can be expected to come, for half of the stage's limit.

        If they do not, this rank goes on alone from here.
        """
        if self.can_meet:
            self.can_meet = group.meet_on_host(stage, self._request.limits[stage] / 2)


class _Sight(NamedTuple):
    """How soon a rank saw a file of rank 0."""

    seconds: float | None
    """Seconds from when all had met; None where it did not see the file."""
    reason: str
    """Why `seconds` is None; empty where it is known."""


def sweep_groups(plan: SweepPlan, rank: RankInfo, device: torch.device) -> Iterator[CollectiveLine]:
    """Sweeps the ranks inside of each host, then one rank of each host, then all ranks. All ranks call it at once.

    The groups inside of hosts are swept at the same time, as training uses them. A group of a single rank is left out,
    and so is one that has the same ranks as another.
    """
    ranks_by_host = _ranks_by_host(rank, device)
    most_ranks_per_host = max(len(ranks) for ranks in ranks_by_host)
    has_several_hosts = len(ranks_by_host) > 1
    has_one_rank_per_host = most_ranks_per_host == 1
    first_ranks = [ranks[0] for ranks in ranks_by_host]
    # Every rank has to make every group, also those that it is not in.
    groups_inside = [dist.new_group(ranks) if len(ranks) > 1 else None for ranks in ranks_by_host]
    group_across: dist.ProcessGroup | None = None
    if has_several_hosts and not has_one_rank_per_host:  # else the first ranks are one rank, or all ranks
        group_across = dist.new_group(first_ranks)

    for group_inside, ranks in zip(groups_inside, ranks_by_host, strict=True):
        if group_inside is not None and rank.rank in ranks:
            yield from sweep(plan, "inside nodes", group_inside, device, most_ranks_per_host)
    group.barrier()
    if group_across is not None and rank.rank in first_ranks:
        yield from sweep(plan, "across nodes", group_across, device, ranks_per_memory=1)
    group.barrier()
    if has_several_hosts and dist.group.WORLD is not None:
        name: CheckGroup = "across nodes" if has_one_rank_per_host else "all ranks"
        yield from sweep(plan, name, dist.group.WORLD, device, most_ranks_per_host)
    group.barrier()


def sweep_split(request: CheckRequest, device: torch.device) -> Iterator[CollectiveLine]:
    """Sweeps the operations of ranks that share the study's model. All ranks call it at once.

    One axis of the layout follows the other; all groups of an axis are swept at once, as training uses them.
    """
    for name, operations in request.exchanges.items():
        all_groups = [list(ranks) for ranks in request.split_groups(name)]
        own_group, _ = dist.new_subgroups_by_enumeration(all_groups)
        yield from sweep(request.sweep, name, own_group, device, request.world.ranks_per_node, operations)
        group.barrier()


def _ranks_by_host(rank: RankInfo, device: torch.device) -> list[list[int]]:
    """Returns the ranks of each host: [[0, 1], [2, 3]] for two hosts of two ranks.

    Ranks exchange digests of their hosts' names, so that no launcher need be asked where it put them.
    """
    digest = hashlib.sha256(socket.gethostname().encode("utf-8", errors="replace")).digest()
    own_host = torch.tensor([int.from_bytes(digest[:7])], dtype=torch.int64, device=device)  # 7 bytes fit into int64
    host_by_rank = [torch.zeros_like(own_host) for _ in range(rank.world_size)]
    dist.all_gather(host_by_rank, own_host)
    ranks_by_host: dict[int, list[int]] = {}
    for number, host_digest in enumerate(host_by_rank):
        ranks_by_host.setdefault(int(host_digest.item()), []).append(number)
    return list(ranks_by_host.values())


def loader_rate(trial: Trial, rank: RankInfo, seconds: float, *, pin: bool) -> LoaderLine:
    """Reads batches for `seconds`, epoch after epoch, as training would. All ranks call it at once.

    Raises:
        RequestError: the data is not here, or damaged.
    """
    dataset = sources.load(trial.data)
    images = 0
    timed_seconds = 0.0
    epoch = 0
    batches_taken = 0
    while timed_seconds < seconds:
        order = EpochOrder(
            len(dataset.train),
            seed=trial.train.seed,
            epoch=epoch,
            micro_batches=[trial.train.micro_batch] * rank.world_size,
            grad_accum=1,
            fraction=trial.data.fraction,
        )
        with Batches(dataset.train, order, rank=rank.rank, workers=trial.data.workers, pin=pin) as batches:
            began = time.perf_counter()
            for batch in batches:
                ended = time.perf_counter()
                batches_taken += 1
                if batches_taken > _WARM_UP_BATCHES:  # the first batches may be ready before they are asked for
                    images += len(batch.images)
                    timed_seconds += ended - began
                began = ended
                if timed_seconds >= seconds:
                    break
        epoch += 1
    return LoaderLine(
        images_per_second=images / timed_seconds, workers=trial.data.workers, batch=trial.train.micro_batch
    )
