"""The stages of one rank's check, in order: those that need no other rank are done even where ranks do not meet.

Each ends in time, whatever hangs in it: it has a thread of its own, which is abandoned if need be."""

from __future__ import annotations

import hashlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

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
from vitscale.store.checks import CheckRequest, CollectiveLine, Group, LoaderLine, Stage, SweepPlan
from vitscale.trial.trial import Trial
from vitscale.worker import group
from vitscale.worker.environment import environment
from vitscale.worker.rank_process import RankInfo

_LONGEST_REASON = 500


class Stages:
    """Does one stage after the other, and records how each ended."""

    def __init__(
        self,
        limits: dict[Stage, float],
        record: Callable[[checks.StageLine], None],
        begins: Callable[[Stage], None],
        prepare: Callable[[], None],
    ) -> None:
        """Stores what each stage needs.

        Args:
            limits: seconds that each stage may take.
            record: called with how a stage ended.
            begins: called with a stage before it begins.
            prepare: called first in each stage's thread: torch keeps the device of a process by thread.
        """
        self._limits, self._record, self._begins, self._prepare = limits, record, begins, prepare

    def do(self, stage: Stage, work: Callable[[], None]) -> bool:
        """Does `work`; returns whether it was done in time. Records what it raised, or that it did not end."""
        self._begins(stage)
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
        ending: Literal["done", "failed", "timeout"] = "done"
        reason = ""
        if thread.is_alive():
            ending, reason = "timeout", f"not done after {limit:g} s"
        elif failure:
            text = f"{type(failure[0]).__name__}: {failure[0]}".splitlines()[0][:_LONGEST_REASON]
            ending, reason = "failed", text.encode("utf-8", errors="backslashreplace").decode()
        self._record(checks.StageLine(name=stage, ending=ending, seconds=seconds, reason=reason))
        return ending == "done"

    def skip(self, stage: Stage, reason: str) -> None:
        """Records that a stage was not begun."""
        self._record(checks.StageLine(name=stage, ending="skipped", seconds=0.0, reason=reason))


_SEEN_SECONDS = 10.0
_CONNECT_SECONDS = 3.0
_WARM_UP_BATCHES = 3


def measure(request: CheckRequest, own: RankInfo, log: RankLog, folder: Path, host_cores: int) -> None:
    """Does every stage, each within its limit.

    Args:
        request: what is asked for.
        own: this rank.
        log: gets each measurement as soon as it is made.
        folder: folder of the check.
        host_cores: cores this rank could have used before it was pinned.
    """
    torch.set_num_threads(request.world.threads_per_rank)
    device = group.device_of(request.device, own)

    def begins(stage: Stage) -> None:
        PROGRESS.phase = stage

    def prepare() -> None:
        torch.set_num_threads(request.world.threads_per_rank)
        if device.type == "cuda":
            torch.cuda.set_device(device)

    stages = Stages(dict(request.limits), log.write, begins, prepare)
    rank = _Rank(request, own, log, folder, device)
    stages.do("facts", lambda: rank.tell_facts(host_cores))
    several = own.world_size > 1
    if several and own.rank != 0:
        stages.do("network", rank.reach_rank_0)
    together = stages.do("join", rank.join)
    if not several:
        stages.skip("collectives", "there is one rank")
    elif not together:
        stages.skip("collectives", "the ranks did not meet")
    else:
        together = stages.do("collectives", rank.sweep_collectives)
    rank.together = together and several
    stages.do("matmul", rank.measure_matmul)
    stages.do("compute", rank.measure_compute)
    if request.trial is not None:
        stages.do("loader", rank.measure_loader)
    stages.do("disk", rank.measure_disk)


class _Rank:
    """What one rank measures, stage by stage."""

    def __init__(self, request: CheckRequest, own: RankInfo, log: RankLog, folder: Path, device: torch.device) -> None:
        self.request, self.own, self.log, self.folder, self.device = request, own, log, folder, device
        self.together = False
        """Whether collectives can be expected to end."""

    def tell_facts(self, host_cores: int) -> None:
        """Records where this rank runs."""
        backend = "nccl" if self.device.type == "cuda" else "gloo"
        self.log.write(
            checks.FactsLine(
                rank=self.own.rank,
                world_size=self.own.world_size,
                local_rank=self.own.local_rank,
                environment=environment(self.device, backend),
                host_cores=host_cores,
                cpu_throttled_seconds=cpu_throttled_seconds(),
                hostname_addresses=host.hostname_addresses(),
                interfaces=host.interfaces(),
                infiniband=host.infiniband_ports(),
            )
        )

    def reach_rank_0(self) -> None:
        """Connects to where ranks meet, and hangs up. Rank 0 may still be importing, so it tries again and again."""
        address, port = os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", "0"))
        end = time.monotonic() + max(1.0, self.request.limits["network"] - _CONNECT_SECONDS - 1.0)
        while True:
            began = time.perf_counter()
            try:
                socket.create_connection((address, port), timeout=_CONNECT_SECONDS).close()
            except (OSError, UnicodeError) as error:
                reason = f"{type(error).__name__}: {error}"[:300]
                if time.monotonic() > end:
                    self.log.write(checks.ReachLine(address=address, port=port, seconds=None, reason=reason))
                    raise
                time.sleep(0.2)
            else:
                self.log.write(checks.ReachLine(address=address, port=port, seconds=time.perf_counter() - began))
                return

    def join(self) -> None:
        """Meets the other ranks."""
        group.join(self.own, self.device, alone=self.own.world_size == 1)
        group.barrier()

    def sweep_collectives(self) -> None:
        """Sweeps every group of ranks that differs from the others."""
        for line in sweep_groups(self.request.sweep, self.own, self.device):
            self.log.write(line)
        for line in sweep_split(self.request, self.device):
            self.log.write(line)

    def measure_matmul(self) -> None:
        """Measures the matrix-multiply rate of this rank's device."""
        self._meet()
        if (line := measured_matmul(self.device, self.request.precision)) is not None:
            self.log.write(line)

    def measure_compute(self) -> None:
        """Measures this rank's pace while its GPU is watched."""
        # Looked at in each of the pieces of work, which last less than a second in a quick check.
        monitor = gpu_monitor(gpu_uuid(self.device), min(1.0, self.request.compute_seconds))
        try:
            self._meet()
            self.log.write(
                compute_speed(self.device, self.request.compute_repeats, self.request.compute_seconds, monitor)
            )
        finally:
            monitor.close()

    def measure_loader(self) -> None:
        """Measures the study's loader on all ranks at once, as in training."""
        if self.request.trial is not None:
            self._meet()
            pin = self.device.type == "cuda"
            self.log.write(loader_rate(self.request.trial, self.own, self.request.loader_seconds, pin=pin))

    def measure_disk(self) -> None:
        """Writes and flushes as records are written; if the ranks have met, looks for a file of rank 0 too."""
        size, seconds = host.record_seconds(self.folder, self.own.rank)
        seen, reason = None, "the ranks did not meet"
        if self.own.world_size == 1:
            reason = "there is one rank"
        elif self.together:
            seen, reason = self._look_for_rank_0s_file()
        self.log.write(
            checks.DiskLine(
                free_bytes=host.free_bytes(self.folder),
                record_seconds=seconds,
                record_bytes=size,
                seen_seconds=seen,
                seen_reason=reason,
            )
        )

    def _look_for_rank_0s_file(self) -> tuple[float | None, str]:
        group.barrier()
        if self.own.rank == 0:
            host.show(self.folder, "shown")
            return 0.0, ""
        seen = host.seen_after(self.folder, "shown", _SEEN_SECONDS)
        return seen, "" if seen is not None else f"not seen within {_SEEN_SECONDS:g} s"

    def _meet(self) -> None:
        if self.together:
            group.barrier()


def sweep_groups(plan: SweepPlan, own: RankInfo, device: torch.device) -> Iterator[CollectiveLine]:
    """Sweeps each group of ranks that differs from the others, one after the other. Called on all ranks at once.

    The groups inside hosts are swept at the same time, as training uses them.
    """
    hosts = _ranks_by_host(own, device)
    sharing = max(map(len, hosts))
    everybody = sorted(rank for ranks in hosts for rank in ranks)
    first_of_each = [ranks[0] for ranks in hosts]
    # Every rank has to make every group, also those that it is not in.
    inside = [dist.new_group(ranks) if len(ranks) > 1 else None for ranks in hosts]
    across = dist.new_group(first_of_each) if len(hosts) > 1 and first_of_each != everybody else None
    for own_group, ranks in zip(inside, hosts, strict=True):
        if own_group is not None and own.rank in ranks:
            yield from sweep(plan, "inside nodes", own_group, device, sharing)
    group.barrier()
    if across is not None and own.rank in first_of_each:
        yield from sweep(plan, "across nodes", across, device, 1)
    group.barrier()
    if len(hosts) > 1 and dist.group.WORLD is not None:
        name: Group = "across nodes" if first_of_each == everybody else "all ranks"
        yield from sweep(plan, name, dist.group.WORLD, device, sharing)
    group.barrier()


def sweep_split(request: CheckRequest, device: torch.device) -> Iterator[CollectiveLine]:
    """Sweeps what ranks that share the study's model exchange: one axis after the other, all groups of an axis at once,
    as in training. Called on all ranks at once."""
    for name, operations in request.exchanges.items():
        shared_by, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in request.split_groups(name)])
        yield from sweep(request.sweep, name, shared_by, device, request.world.ranks_per_node, operations)
        group.barrier()


def _ranks_by_host(own: RankInfo, device: torch.device) -> list[list[int]]:
    """The ranks of each host, by the hosts' own names, so that no launcher need be asked where it put them."""
    digest = hashlib.sha256(socket.gethostname().encode("utf-8", errors="replace")).digest()
    name = torch.tensor([int.from_bytes(digest[:7])], dtype=torch.int64, device=device)
    names = [torch.zeros_like(name) for _ in range(own.world_size)]
    dist.all_gather(names, name)
    hosts: dict[int, list[int]] = {}
    for rank, other in enumerate(names):
        hosts.setdefault(int(other.item()), []).append(rank)
    return list(hosts.values())


def loader_rate(trial: Trial, own: RankInfo, seconds: float, *, pin: bool) -> LoaderLine:
    """Reads batches for `seconds`, epoch after epoch, as training would. Called on all ranks at once.

    Raises:
        RequestError: the data is not here, or damaged.
    """
    dataset = sources.load(trial.data)
    images, timed, epoch, batches_taken = 0, 0.0, 0, 0
    while timed < seconds:
        order = EpochOrder(
            len(dataset.train),
            seed=trial.train.seed,
            epoch=epoch,
            micro_batches=[trial.train.micro_batch] * own.world_size,
            grad_accum=1,
            fraction=trial.data.fraction,
        )
        with Batches(dataset.train, order, rank=own.rank, workers=trial.data.workers, pin=pin) as batches:
            began = time.perf_counter()
            for batch in batches:
                now = time.perf_counter()
                batches_taken += 1
                if batches_taken > _WARM_UP_BATCHES:  # the first batches may be ready before they are asked for
                    images, timed = images + len(batch.images), timed + now - began
                began = now
                if timed >= seconds:
                    break
        epoch += 1
    return LoaderLine(images_per_second=images / timed, workers=trial.data.workers, batch=trial.train.micro_batch)
