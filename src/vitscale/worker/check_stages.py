"""The stages of one rank's check, in order: those that need no other rank are done even where ranks do not meet."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import torch

from vitscale.machine.hardware import cpu_throttled_seconds
from vitscale.probes import disk_speed, interfaces
from vitscale.probes.compute_speed import compute_speed
from vitscale.probes.gpu_monitor import gpu_monitor
from vitscale.probes.matmul import measured_matmul
from vitscale.store.check_records import CheckRequest, DiskLine, FactsLine, ReachLine, Stage
from vitscale.store.checks import CheckLog
from vitscale.worker import group
from vitscale.worker.bounded import Stages
from vitscale.worker.check_groups import sweep_groups
from vitscale.worker.environment import environment
from vitscale.worker.loader_rate import loader_rate
from vitscale.worker.place import Place

_SEEN_SECONDS = 10.0
_CONNECT_SECONDS = 3.0


def measure(
    request: CheckRequest, own: Place, log: CheckLog, folder: Path, host_cores: int, begins: Callable[[Stage], None]
) -> None:
    """Does every stage, each within its limit.

    Args:
        request: what is asked for.
        own: this rank.
        log: takes each measurement as soon as it is made.
        folder: of the check.
        host_cores: cores this rank could have used before it was pinned.
        begins: is told of each stage.
    """
    torch.set_num_threads(request.world.threads_per_rank)
    device = group.device_of(request.device, own)

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

    def __init__(self, request: CheckRequest, own: Place, log: CheckLog, folder: Path, device: torch.device) -> None:
        self.request, self.own, self.log, self.folder, self.device = request, own, log, folder, device
        self.together = False
        """Whether collectives can be trusted to end."""

    def tell_facts(self, host_cores: int) -> None:
        """Where this rank runs."""
        backend = "nccl" if self.device.type == "cuda" else "gloo"
        self.log.write(
            FactsLine(
                rank=self.own.rank,
                world_size=self.own.world_size,
                local_rank=self.own.local_rank,
                environment=environment(self.device, backend),
                host_cores=host_cores,
                cpu_throttled_seconds=cpu_throttled_seconds(),
                hostname_addresses=interfaces.hostname_addresses(),
                interfaces=interfaces.interfaces(),
                infiniband=interfaces.infiniband_ports(),
            )
        )

    def reach_rank_0(self) -> None:
        """Connects to where ranks meet, and hangs up. Rank 0 may still be importing: it is tried again and again."""
        address, port = os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", "0"))
        end = time.monotonic() + max(1.0, self.request.limits["network"] - _CONNECT_SECONDS - 1.0)
        while True:
            began = time.perf_counter()
            try:
                socket.create_connection((address, port), timeout=_CONNECT_SECONDS).close()
            except (OSError, UnicodeError) as error:
                reason = f"{type(error).__name__}: {error}"
                if time.monotonic() > end:
                    self.log.write(ReachLine(address=address, port=port, seconds=None, reason=reason[:300]))
                    raise
                time.sleep(0.2)
            else:
                self.log.write(ReachLine(address=address, port=port, seconds=time.perf_counter() - began))
                return

    def join(self) -> None:
        """Meets the other ranks."""
        group.join("none" if self.own.world_size == 1 else "ddp", self.own, self.device)
        group.barrier()

    def sweep_collectives(self) -> None:
        """Every group of ranks that is another one."""
        for line in sweep_groups(self.request.sweep, self.own, self.device):
            self.log.write(line)

    def measure_matmul(self) -> None:
        """Of this rank's device."""
        self._meet()
        if (line := measured_matmul(self.device, self.request.precision)) is not None:
            self.log.write(line)

    def measure_compute(self) -> None:
        """The pace of this rank, with its GPU watched meanwhile."""
        uuid = f"GPU-{torch.cuda.get_device_properties(self.device).uuid}" if self.device.type == "cuda" else None
        monitor = gpu_monitor(uuid)
        try:
            self._meet()
            self.log.write(
                compute_speed(self.device, self.request.compute_repeats, self.request.compute_seconds, monitor)
            )
        finally:
            monitor.close()

    def measure_loader(self) -> None:
        """The study's loader on all ranks at once, as in training."""
        if self.request.trial is not None:
            self._meet()
            pin = self.device.type == "cuda"
            self.log.write(loader_rate(self.request.trial, self.own, self.request.loader_seconds, pin=pin))

    def measure_disk(self) -> None:
        """Writes and flushes as records are; and looks for a file of rank 0 where ranks can be told of it."""
        size, seconds = disk_speed.record_seconds(self.folder, self.own.rank)
        seen, reason = None, "the ranks did not meet"
        if self.own.world_size == 1:
            reason = "there is one rank"
        elif self.together:
            seen, reason = self._look_for_rank_0s_file()
        self.log.write(
            DiskLine(
                free_bytes=disk_speed.free_bytes(self.folder),
                record_seconds=seconds,
                record_bytes=size,
                seen_seconds=seen,
                seen_reason=reason,
            )
        )

    def _look_for_rank_0s_file(self) -> tuple[float | None, str]:
        group.barrier()
        if self.own.rank == 0:
            disk_speed.show(self.folder, "shown")
            return 0.0, ""
        seen = disk_speed.seen_after(self.folder, "shown", _SEEN_SECONDS)
        return seen, "" if seen is not None else f"not seen within {_SEEN_SECONDS:g} s"

    def _meet(self) -> None:
        if self.together:
            group.barrier()
