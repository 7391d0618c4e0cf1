"""What a check is to measure, and where: from a study, a hostfile, an allocation, or nothing but this machine."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from vitscale import sources
from vitscale.base.files import beside
from vitscale.errors import RequestError
from vitscale.machine.hardware import Machine
from vitscale.machine.hosts import Host, read_hostfile
from vitscale.schedulers import Hostfile, Placement, Submitter, described, scheduler_for
from vitscale.store.check_records import CheckRequest, Stage, SweepPlan
from vitscale.study.expand import expand
from vitscale.study.file import StudyFile
from vitscale.study.resolve import device_of
from vitscale.study.sections import AUTO, Study
from vitscale.study.site import Overlay
from vitscale.trial.trial import Device, Precision, Trial, World

_NO_STUDY = 'name = "check"\n[model]\nname = "vit-b16"\n[data]\nname = "digits"\n'
"""Stands in where no study is given: its model and data are not used."""
_SIZES = (*(1024 * 4**power for power in range(10)), 512 << 20)
_QUICK_SIZES = _SIZES[:7]
_MOST_RANKS_PER_NODE = 4096

_LIMITS: dict[Stage, float] = {
    "facts": 60.0, "network": 90.0, "join": 120.0, "collectives": 400.0,
    "matmul": 60.0, "compute": 90.0, "loader": 180.0, "disk": 90.0,
}  # fmt: skip
_QUICK_LIMITS = _LIMITS | {"collectives": 90.0}


@dataclass(frozen=True)
class Where:
    """The hosts that a check is about."""

    study: Study
    scheduler: Placement
    hosts: tuple[Host, ...]
    """All of a hostfile; empty: this machine, or the allocation's own."""
    nodes: int
    trial: Trial | None
    """The largest of the study; None without one."""
    dataset_fingerprint: str | None = None

    @property
    def launcher(self) -> str:
        """What starts the ranks."""
        named = self.study.launch.launcher
        return self.scheduler.default_launcher if named == AUTO else named

    def without(self, gone: set[str]) -> Where:
        """The same with these hosts left out of a hostfile."""
        left = tuple(host for host in self.hosts if host.name not in gone)
        scheduler = Hostfile(left, described(self.study.node))
        return Where(self.study, scheduler, left, len(left), self.trial, self.dataset_fingerprint)


def where(path: Path | None, overlay: Overlay) -> Where:
    """Reads the study, if there is one, and finds the hosts and the study's images. Nothing is written.

    Raises:
        RequestError: study, site file, hostfile or data cannot be used; or this is a cluster's login node.
    """
    read_from = path or Path("(no study file)")
    file = StudyFile.read(path, overlay) if path is not None else StudyFile(read_from, _NO_STUDY, overlay)
    study = file.study
    scheduler = scheduler_for(study, read_from)
    if isinstance(scheduler, Submitter):
        raise RequestError(
            f"this is a login node: {scheduler.title} names the hosts once a job runs",
            next_step="Check inside an allocation: salloc --nodes=2 vitscale check, or a job that runs it",
        )
    hosts: tuple[Host, ...] = ()
    nodes = 1
    if isinstance(scheduler, Hostfile):
        hosts = read_hostfile(beside(read_from, study.launch.hostfile or ""))
        nodes = len(hosts)
    elif "SLURM_JOB_ID" in os.environ and study.launch.scheduler != "local":
        nodes = max(1, _count(os.environ.get("SLURM_JOB_NUM_NODES") or os.environ.get("SLURM_NNODES")))
    if path is None:
        return Where(study, scheduler, hosts, nodes, None)
    expansion = expand(file, scheduler.machine(), sources.check, scheduler.slots(), scheduler.default_launcher)
    trial_id, trial = max(expansion.trials.items(), key=lambda item: item[1].world.size)
    return Where(study, scheduler, hosts, nodes, trial, expansion.fingerprints[trial_id])


def request(place: Where, *, ranks_per_node: int | None, quick: bool) -> CheckRequest:
    """What every rank is to do.

    Raises:
        RequestError: `ranks_per_node` is none.
    """
    if ranks_per_node is not None and not 1 <= ranks_per_node <= _MOST_RANKS_PER_NODE:
        raise RequestError(f"--ranks-per-node is {ranks_per_node}", valid=[f"1 to {_MOST_RANKS_PER_NODE:,}"])
    machine = place.scheduler.machine()
    trial = place.trial
    on_each = ranks_per_node or (trial.world.ranks_per_node if trial else None) or _usual_ranks(place, machine)
    same_shape = trial is not None and trial.world.ranks_per_node == on_each
    device: Device = trial.train.device if trial else device_of(place.study, machine)
    threads = trial.world.threads_per_rank if trial and same_shape else machine.threads_for(on_each, device)
    precision: Precision = trial.train.precision if trial else "bf16" if machine.fast_bf16(device) else "fp32"
    return CheckRequest(
        world=World(nodes=place.nodes, ranks_per_node=on_each, threads_per_rank=threads),
        device=device,
        precision=precision,
        sweep=SweepPlan(
            sizes_bytes=_QUICK_SIZES if quick else _SIZES,
            longest_seconds=0.2 if quick else 2.0,
            seconds_per_size=0.1 if quick else 0.5,
        ),
        compute_repeats=3 if quick else 5,
        compute_seconds=0.3 if quick else 1.0,
        loader_seconds=0.5 if quick else 2.0,
        limits=_QUICK_LIMITS if quick else _LIMITS,
        trial=trial,
        dataset_fingerprint=place.dataset_fingerprint,
    )


def _usual_ranks(place: Where, machine: Machine) -> int:
    """A rank on each GPU. Without GPUs as many as the hostfile says; else one on each of several hosts, and two on a
    lone one, so that there is something to exchange."""
    slots = place.scheduler.slots()
    if machine.gpus:
        return min(len(machine.gpus), slots or len(machine.gpus))
    return slots or (1 if place.nodes > 1 else min(2, machine.cores))


def _count(text: str | None) -> int:
    return int(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 7 else 1
