"""Starts the ranks of one run: launcher and scheduler put together, and what every rank must know written down."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from vitscale.errors import RequestError
from vitscale.launchers import LOCAL, launcher_named
from vitscale.launchers.base import Spawn
from vitscale.machine.hosts import Host, is_this_machine
from vitscale.processes import launch_file
from vitscale.processes.heartbeat_server import HeartbeatServer
from vitscale.processes.launch_file import LIBRARY_SETTINGS, LaunchFile
from vitscale.schedulers import Job, Placement, Scheduler
from vitscale.schedulers.prepared import PreparedError, Ready, ranks_environment
from vitscale.store import write_whole
from vitscale.study.sections import LaunchSection
from vitscale.trial.engines import missing_packages
from vitscale.trial.trial import World

_PASSED_ON = (*LIBRARY_SETTINGS, "HF_", "VITSCALE_")
"""Beginnings of the names of settings that a user makes for all ranks."""
_NOT_PASSED_ON = ("CUDA_VISIBLE_DEVICES", launch_file.TOKEN_VARIABLE)
"""Which GPUs are free differs from host to host."""
_SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|_KEY$|_AUTH")
"""In the names of variables whose values must not be left in a results folder: HF_TOKEN."""
_FIRST_PORT, _PORTS = 20_000, 12_000
"""Below the range from which Linux takes ports for connections (32768 and up)."""


FindPrepared = Callable[[Mapping[str, str], Path, Path], Ready]
"""Finds what ranks are forked from, given their variables, their working directory and their log."""


def launch_plan(
    scheduler: Scheduler, section: LaunchSection, launcher: str, world: World, run_folder: Path, module: str
) -> Spawn:
    """The exact commands that start `python -m MODULE RUN_FOLDER` on every rank; nothing is started or written.

    Raises:
        RequestError: launcher, scheduler and world do not go together, or the hosts do not suffice.
    """
    hosts = scheduler.hosts(world)
    chosen = launcher_named(launcher, world, hosts)
    if (reason := scheduler.refuses(launcher, world)) is not None:
        raise RequestError(f"launch.launcher = '{launcher}' cannot be used: {reason}")
    spawn = Spawn(
        commands=((scheduler.python, "-m", module, str(run_folder)),),
        run_folder=run_folder,
        hosts=hosts,
        master_port=_port(run_folder, hosts),
        interface=section.interface,
    )
    return scheduler.adapt(chosen.launch(world, spawn))


def refuse_without_torch(scheduler: Scheduler, engines: Iterable[str] = ()) -> None:
    """Refuses what would start ranks on this machine where what they import is not installed: nothing has begun yet.

    Raises:
        RequestError: something is missing; the message names the extra that brings it.
    """
    if scheduler.default_launcher != LOCAL:
        return  # on other hosts, or inside a job, there may be what is not here
    if missing := missing_packages(engines):
        are = "is" if len(missing) == 1 else "are"
        raise RequestError(
            f"ranks on this machine need {' and '.join(missing)}, which {are} not installed",
            next_step="Run pip install 'vitscale[train]'. All verbs but run, check and lab do without it",
        )


def start_ranks(
    spawn: Spawn,
    placement: Placement,
    section: LaunchSection,
    *,
    environment: Mapping[str, str],
    ready: FindPrepared | None = None,
) -> Job:
    """Starts them. The run's folder exists; launch.json and the launcher's own files are written into it.

    Args:
        spawn: from `launch_plan`.
        placement: the same.
        section: the same.
        environment: of every rank, beyond what the study says and what the user has set.
        ready: for launchers whose ranks may be forked; None: they are started anew.

    Raises:
        OSError: a file cannot be written, or a program cannot be started.
        RequestError: a host has no address, or the prepared process is gone.
    """
    settings = _settings(section) | dict(environment)
    spawn = replace(spawn, environment=settings | dict(spawn.environment), token=secrets.token_hex(16))
    prepared = Ready()
    if spawn.from_prepared and ready is not None:
        prepared = ready(ranks_environment(spawn.environment, spawn.drop_variables), spawn.cwd, spawn.log)
        if prepared.cold is not None:
            with spawn.log.open("a", encoding="utf-8") as said:
                said.write(f"local: ranks are started anew: {prepared.cold}\n")
    remote = [host.name for host in spawn.hosts if not is_this_machine(host.name)]
    heartbeats = HeartbeatServer(spawn.token, "" if remote else "127.0.0.1")
    try:
        for name, text in spawn.files:
            write_whole(spawn.run_folder / name, text)
        own = _address_towards(remote[0]) if remote else "127.0.0.1"
        file = LaunchFile(
            token=spawn.token,
            commands=spawn.commands,
            hosts=tuple(host.name for host in spawn.hosts),
            master_address=spawn.hosts[0].name if spawn.hosts else "127.0.0.1",
            master_port=spawn.master_port,
            lifeline=f"{own}:{heartbeats.port}",
            environment=settings,
            prepared_seconds=prepared.waited_seconds,
            cold=prepared.cold,
            mpi_discovery=section.mpi_discovery,
            driver_pid=os.getpid(),
            host_id=launch_file.host_id(),
            started_ns=time.clock_gettime_ns(time.CLOCK_MONOTONIC),
        )
        write_whole(spawn.run_folder / launch_file.NAME, file.model_dump_json(indent=1))
        return placement.start(spawn, heartbeats, prepared.process)
    except PreparedError as error:
        heartbeats.close()
        raise RequestError(f"the ranks cannot be started: {error}") from None
    except BaseException:
        heartbeats.close()
        raise


def _settings(section: LaunchSection) -> dict[str, str]:
    """The user's own settings for libraries, as far as they are for every rank, and those of the study."""
    passed_on = {
        key: value
        for key, value in os.environ.items()
        if key.startswith(_PASSED_ON) and key not in _NOT_PASSED_ON and not _SECRET.search(key)
    }
    names = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
    interface = dict.fromkeys(names, section.interface) if section.interface is not None else {}
    return passed_on | interface | section.environment


def _port(run_folder: Path, hosts: tuple[Host, ...]) -> int:
    """A port for rank 0: another one for each run and try of each results folder (two drivers may do the same study at
    the same time), and free where that can be seen from here."""
    first = int.from_bytes(hashlib.sha256(str(run_folder).encode()).digest()[:4]) % _PORTS
    candidates = [_FIRST_PORT + (first + n) % _PORTS for n in range(100)]
    if hosts and not is_this_machine(hosts[0].name):
        return candidates[0]
    return next((port for port in candidates if _is_free(port)), candidates[0])


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def _address_towards(host: str) -> str:
    """This machine's address as `host` sees it. Nothing is sent: the kernel is asked for its route."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except (OSError, UnicodeError) as error:  # UnicodeError: an empty or an overlong part between two dots
        why = error.strerror if isinstance(error, OSError) else "no such name"
        raise RequestError(f"host {host} cannot be found: {why or error}", next_step="Correct the hostfile") from None
