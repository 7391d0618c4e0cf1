"""Schedulers: the hosts on which a launcher's commands run. `SCHEDULERS` lists all of vitscale's own."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from vitscale.base import plugins
from vitscale.base.files import path_named_in
from vitscale.errors import RequestError, shown
from vitscale.machine.batch_systems import FLUX, KUBERNETES, LSF, PBS, PODS_VARIABLE, SLURM, system_of_job
from vitscale.machine.hosts import read_hostfile
from vitscale.schedulers.base import Cause, LocalHost, Placement, Scheduler, Submitter, described
from vitscale.schedulers.hostfile import Hostfile
from vitscale.schedulers.prepared import Job
from vitscale.study.sections import SCHEDULERS_WITHOUT_HOSTFILE, LaunchSection, NodeSection, SlurmSection, Study

Factory = Callable[[LaunchSection, SlurmSection, NodeSection | None, Path], Placement | Submitter]
"""Makes a scheduler from a study's sections and the study file's path, beside which relative paths are looked for."""


def _make_local_host(
    launch: LaunchSection, slurm: SlurmSection, node: NodeSection | None, study_path: Path
) -> Placement:
    """Return this machine, or the one that [node] describes."""
    del launch, slurm, study_path
    return LocalHost(described(node))


def _make_hostfile(launch: LaunchSection, slurm: SlurmSection, node: NodeSection | None, study_path: Path) -> Placement:
    """Return the hosts of the study's hostfile.

    Raises:
        RequestError: there is none, or it names localhost beside other hosts.
    """
    del slurm
    if launch.hostfile is None:
        raise RequestError(
            "launch.scheduler = 'hostfile' needs hosts",
            next_step='Give launch.hostfile = "hosts" with one line per host: NAME slots=4',
        )
    hosts = read_hostfile(path_named_in(study_path, launch.hostfile))
    names_localhost = any(host.name in ("localhost", "127.0.0.1", "::1") for host in hosts)
    if len(hosts) > 1 and names_localhost:
        raise RequestError(
            f"hostfile {shown(launch.hostfile)} names localhost beside other hosts, to whom that is another",
            next_step="Write the name that the other hosts know this machine by",
        )
    return Hostfile(hosts, described(node))


def _make_slurm_cluster(
    launch: LaunchSection, slurm: SlurmSection, node: NodeSection | None, study_path: Path
) -> Submitter:
    """Return the Slurm cluster, to which runs are submitted as jobs."""
    del launch, study_path
    from vitscale.schedulers.slurm_cluster import SlurmCluster

    return SlurmCluster(slurm, node)


def _make_pbs(launch: LaunchSection, slurm: SlurmSection, node: NodeSection | None, study_path: Path) -> Submitter:
    """Return PBS Pro, to which runs are submitted as jobs.

    Raises:
        RequestError: a key of [slurm] has no meaning there.
    """
    del launch, study_path
    from vitscale.schedulers.pbs import Pbs

    return Pbs(slurm, node)


def _make_lsf(launch: LaunchSection, slurm: SlurmSection, node: NodeSection | None, study_path: Path) -> Submitter:
    """Return LSF, to which runs are submitted as jobs.

    Raises:
        RequestError: a key of [slurm] has no meaning there.
    """
    del launch, study_path
    from vitscale.schedulers.lsf import Lsf

    return Lsf(slurm, node)


def _make_flux(launch: LaunchSection, slurm: SlurmSection, node: NodeSection | None, study_path: Path) -> Submitter:
    """Return Flux, to which runs are submitted as jobs.

    Raises:
        RequestError: a key of [slurm] has no meaning there.
    """
    del launch, study_path
    from vitscale.schedulers.flux import Flux

    return Flux(slurm, node)


def _make_kubernetes(
    launch: LaunchSection, slurm: SlurmSection, node: NodeSection | None, study_path: Path
) -> Placement:
    """Return the pods of the JobSet or TrainJob around this process; outside any, pods to plan for.

    Raises:
        RequestError: the set's hostfile cannot be read.
    """
    del launch, slurm, study_path
    from vitscale.schedulers.pods import make_pods

    return make_pods(node)


SCHEDULERS: dict[str, Factory] = {
    "local": _make_local_host,
    "hostfile": _make_hostfile,
    SLURM.name: _make_slurm_cluster,
    PBS.name: _make_pbs,
    LSF.name: _make_lsf,
    FLUX.name: _make_flux,
    KUBERNETES: _make_kubernetes,
}


def scheduler_for(study: Study, study_path: Path) -> Placement | Submitter:
    """Return the scheduler that runs a study.

    That is the one that the study names, else a hostfile where one is given, else the job of Slurm, PBS or LSF, or the
    pods, around this process, else this machine. Inside a job of the batch system it is that job's placement.

    Args:
        study: its [launch], [slurm] and [node].
        study_path: the study file; a relative hostfile is looked for beside it.

    Raises:
        RequestError: the scheduler is unknown, the hostfile cannot be used, or the study contradicts itself.
    """
    launch = study.launch
    name = _scheduler_name(launch)
    if launch.hostfile is not None and name in SCHEDULERS_WITHOUT_HOSTFILE:
        raise RequestError(
            f"launch.hostfile = {shown(launch.hostfile)} has no meaning under launch.scheduler = '{name}'",
            next_step="Remove one of the two",
        )
    scheduler = make_scheduler(name, launch, study.slurm, study.node, study_path)
    own_job = scheduler.own_job()
    return scheduler if own_job is None else own_job.placement


def _scheduler_name(launch: LaunchSection) -> str:
    """Return the name that the study gives; for "auto" what fits the hostfile and the process around."""
    if launch.scheduler != "auto":
        return launch.scheduler
    if launch.hostfile:
        return "hostfile"
    system = system_of_job(os.environ)
    if system is not None:
        return system.name
    return KUBERNETES if PODS_VARIABLE in os.environ else "local"


def make_scheduler(
    name: str, launch: LaunchSection, slurm: SlurmSection, node: NodeSection | None, study_path: Path
) -> Placement | Submitter:
    """Return the scheduler called `name`, from vitscale or an installed package.

    Raises:
        RequestError: there is none, or it cannot be made from what the study says.
    """
    factory = plugins.known("scheduler", name, SCHEDULERS, "__call__")
    return plugins.answer(
        "scheduler", name, SCHEDULERS, lambda: factory(launch, slurm, node, study_path), Placement, Submitter
    )


__all__ = [
    "SCHEDULERS",
    "Cause",
    "Hostfile",
    "Job",
    "LocalHost",
    "Placement",
    "Scheduler",
    "Submitter",
    "described",
    "make_scheduler",
    "scheduler_for",
]
