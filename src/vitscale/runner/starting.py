"""Starts the ranks of one run: launcher and scheduler put together, and what every rank must know written down."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from vitscale.errors import RequestError, explain
from vitscale.launchers import launcher_named
from vitscale.launchers.base import Launch, Start
from vitscale.machine.hosts import Host, is_this_machine
from vitscale.processes import launch_file
from vitscale.processes.heartbeat_server import HeartbeatServer
from vitscale.processes.launch_file import LaunchFile
from vitscale.processes.rank_variables import LIBRARY_SETTINGS
from vitscale.schedulers import Job, Scheduler
from vitscale.schedulers.local import LocalJob
from vitscale.schedulers.prepared import Prepared, PreparedError, Ready, ranks_environment
from vitscale.store import write_whole
from vitscale.study.sections import LaunchSection
from vitscale.trial.trial import World

_PASSED_ON = (*LIBRARY_SETTINGS, "HF_", "VITSCALE_")
"""Beginnings of the names of settings that a user makes for all ranks."""
_NOT_PASSED_ON = ("CUDA_VISIBLE_DEVICES", launch_file.TOKEN_VARIABLE)
"""Which GPUs are free differs from host to host."""
_SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|_KEY$|_AUTH")
"""In the names of variables whose values must not be left in a results folder: HF_TOKEN."""
_FIRST_PORT, _PORTS = 20_000, 12_000
"""Below the range from which Linux takes ports for connections (32768 and up)."""


@dataclass(frozen=True)
class Ranks:
    """How the ranks of one run are started: worked out, nothing begun."""

    world: World
    hosts: tuple[Host, ...]
    launch: Launch
    commands: list[list[str]]
    """What the driver starts, one or one for each host."""
    port: int


def worked_out(
    scheduler: Scheduler, section: LaunchSection, launcher: str, world: World, run_folder: Path, module: str
) -> Ranks:
    """The exact commands that start `python -m MODULE RUN_FOLDER` on every rank; nothing is started or written.

    Raises:
        RequestError: launcher, scheduler and world do not go together, or the hosts do not suffice.
    """
    hosts = scheduler.hosts(world)
    chosen = launcher_named(launcher, world, hosts)
    if (reason := scheduler.refuses(launcher, world)) is not None:
        raise RequestError(explain(f"launch.launcher = '{launcher}' cannot be used: {reason}"))
    port = _port(run_folder, hosts)
    start = Start(
        rank_command=(scheduler.python, "-m", module, str(run_folder)),
        run_folder=run_folder,
        hosts=hosts,
        master_port=port,
        interface=section.interface,
    )
    launch = chosen.launch(world, start)
    return Ranks(world, hosts, launch, scheduler.commands(launch, world, hosts, run_folder), port)


@dataclass(frozen=True)
class Started:
    """A run under way."""

    job: Job
    heartbeats: HeartbeatServer

    def end(self) -> tuple[str, ...]:
        """Ends all that is left, and hears no more; returns the hosts that did not answer."""
        try:
            return self.job.end()
        finally:
            # Last: what cannot be reached ends when the line to the driver is closed.
            self.heartbeats.close()


def start_ranks(
    ranks: Ranks,
    scheduler: Scheduler,
    section: LaunchSection,
    run_folder: Path,
    *,
    environment: Mapping[str, str],
    ready: Callable[[Mapping[str, str], Path], Ready] | None = None,
) -> Started:
    """Starts them. `run_folder` exists; launch.json and the launcher's own files are written into it.

    Args:
        ranks: from `worked_out`.
        scheduler: the same.
        section: the same.
        run_folder: the same.
        environment: of every rank, beyond what the study says and what the user has set.
        ready: finds what ranks of a launcher that allows it are forked from, given their environment and their log.

    Raises:
        OSError: a file cannot be written, or a program cannot be started.
    """
    log = run_folder / "log.txt"
    settings = _settings(section) | dict(environment)
    variables = settings | dict(ranks.launch.environment)
    prepared = Ready()
    if ranks.launch.from_prepared and ready is not None:
        prepared = ready(ranks_environment(variables, ranks.launch.without_variables), log)
        if prepared.cold is not None:
            with log.open("a", encoding="utf-8") as said:
                said.write(f"local: ranks are started anew: {prepared.cold}\n")
    token = secrets.token_hex(16)
    remote = [host for host in ranks.hosts if not is_this_machine(host.name)]
    heartbeats = HeartbeatServer(token, "" if remote else "127.0.0.1")
    try:
        for name, text in ranks.launch.files:
            write_whole(run_folder / name, text)
        own = _address_towards(remote[0].name) if remote else "127.0.0.1"
        file = LaunchFile(
            token=token,
            commands=tuple(tuple(command) for command in ranks.commands),
            hosts=tuple(host.name for host in ranks.hosts),
            master_address=ranks.hosts[0].name if ranks.hosts else "127.0.0.1",
            master_port=ranks.port,
            lifeline=f"{own}:{heartbeats.port}",
            environment=settings,
            prepared_seconds=prepared.waited_seconds,
            cold=prepared.cold,
            mpi_discovery=section.mpi_discovery,
            driver_pid=os.getpid(),
            host_id=launch_file.host_id(),
            started_ns=time.clock_gettime_ns(time.CLOCK_MONOTONIC),
        )
        write_whole(run_folder / launch_file.NAME, file.model_dump_json(indent=1))
        job = _job(scheduler, ranks, prepared.process, token, log, variables)
    except BaseException:
        heartbeats.close()
        raise
    return Started(job, heartbeats)


def _job(
    scheduler: Scheduler, ranks: Ranks, prepared: Prepared | None, token: str, log: Path, variables: Mapping[str, str]
) -> Job:
    launch, cwd = ranks.launch, Path.cwd()
    if prepared is not None:
        try:
            return LocalJob(ranks.commands, token=token, log=log, cwd=cwd, environment=variables, prepared=prepared)
        except PreparedError as error:
            raise RequestError(explain(f"the ranks cannot be started: {error}")) from None
    return scheduler.start(
        ranks.commands,
        ranks.hosts,
        token=token,
        log=log,
        cwd=cwd,
        environment=variables,
        without=launch.without_variables,
        ended_by_kill=launch.ended_by_kill,
    )


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
        raise RequestError(
            explain(f"host {host} cannot be found: {why or error}", next_step="Correct the hostfile")
        ) from None
