"""Schedulers: where a launcher's command runs."""

from __future__ import annotations

import os
from pathlib import Path

from vitscale.base.text_file import beside
from vitscale.errors import RequestError, explain, shown
from vitscale.machine.hardware import Gpu, Machine
from vitscale.machine.hosts import read_hostfile
from vitscale.schedulers.base import Job, Scheduler
from vitscale.schedulers.hostfile import Hostfile
from vitscale.schedulers.local import Local
from vitscale.schedulers.login_node import LoginNode
from vitscale.study.sections import NodeSection, Study


def scheduler_for(study: Study, study_path: Path) -> Scheduler:
    """Where a study runs: what it says, else a hostfile where one is given, else the Slurm allocation around this
    process, else this machine.

    Args:
        study: its [launch], [slurm] and [node].
        study_path: a relative hostfile is looked for beside it.

    Raises:
        RequestError: the hostfile cannot be used, or the study contradicts itself.
    """
    launch, machine = study.launch, described(study.node)
    kind = launch.scheduler
    if kind == "auto":
        kind = "hostfile" if launch.hostfile else "slurm" if "SLURM_JOB_ID" in os.environ else "local"
    if kind != "hostfile" and launch.hostfile is not None:
        raise RequestError(
            explain(
                f"launch.hostfile = {shown(launch.hostfile)} has no meaning under launch.scheduler = '{kind}'",
                next_step="Remove one of the two",
            )
        )
    if kind == "slurm":
        from vitscale.schedulers.slurm import SlurmAllocation

        if SlurmAllocation.here():
            return SlurmAllocation(study.slurm, study.node)
        return LoginNode(machine, study.slurm.python)
    if kind == "local":
        return Local()
    if launch.hostfile is None:
        raise RequestError(
            explain(
                "launch.scheduler = 'hostfile' needs hosts",
                next_step='Give launch.hostfile = "hosts" with one line per host: NAME slots=4',
            )
        )
    hosts = read_hostfile(beside(study_path, launch.hostfile))
    if len(hosts) > 1 and any(host.name in ("localhost", "127.0.0.1", "::1") for host in hosts):
        raise RequestError(
            explain(
                f"hostfile {shown(launch.hostfile)} names localhost beside other hosts, to whom that is another",
                next_step="Write the name that the other hosts know this machine by",
            )
        )
    return Hostfile(hosts, machine)


def described(node: NodeSection | None) -> Machine | None:
    """The machine that [node] describes."""
    if node is None:
        return None
    capability = (8, 0) if node.fast_bf16 else None
    gpus = tuple(Gpu(f"gpu-{n}", "GPU of [node]", None, None, capability) for n in range(node.gpus))
    return Machine(node.cores, None, gpus, node.fast_bf16)


__all__ = ["Hostfile", "Job", "Local", "LoginNode", "Scheduler", "described", "scheduler_for"]
