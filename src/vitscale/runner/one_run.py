"""One run, from its folder to its outcome; tried again where a failure's cause was transient.

Combines launcher and scheduler to start the run's ranks, and writes down what every rank must know.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from vitscale.base import program
from vitscale.base.distribution import install_command
from vitscale.base.interpreter import python_module
from vitscale.base.secret_names import is_secret_name
from vitscale.engines.packages import missing_packages, needed_by
from vitscale.errors import RequestError
from vitscale.launchers import LOCAL, launched, launcher_named
from vitscale.launchers.base import Spawn
from vitscale.machine.hardware import this_machine
from vitscale.machine.hosts import Host, can_bind, is_this_machine
from vitscale.present.units import counted
from vitscale.processes import launch_file
from vitscale.processes.heartbeat_server import HeartbeatServer
from vitscale.processes.launch_file import LIBRARY_SETTINGS, LaunchFile
from vitscale.runner.classify import outcome_of
from vitscale.runner.evidence import Evidence
from vitscale.runner.watch import watch
from vitscale.schedulers import Cause, Job, Placement, Scheduler
from vitscale.schedulers.prepared import PreparedError, PreparedProcesses, Ready, ranks_environment
from vitscale.store import new_run_folder, read_ranks, write_outcome, write_record
from vitscale.store.results import Outcome, OutcomeKind, RunHeader, StudyRecord
from vitscale.study.sections import LaunchSection, MeasureSection, SlurmSection
from vitscale.trial.trial import Trial, World

_PASSED_ON = (*LIBRARY_SETTINGS, "HF_", "VITSCALE_")
"""Prefixes of the variables that a user sets for all ranks."""
_NOT_PASSED_ON = ("CUDA_VISIBLE_DEVICES", launch_file.TOKEN_VARIABLE, launch_file.COMPLETE_VARIABLE)
"""Variables that ranks do not inherit: which GPUs are free differs from host to host, and each run has its token."""
_THREADS, _SEARCH_PATH = "OMP_NUM_THREADS", "PYTHONPATH"
_FIRST_PORT, _PORTS = 20_000, 12_000
"""First port and number of ports for rank 0: below those that Linux gives to connections (32768 and up)."""


FindPrepared = Callable[[Mapping[str, str], Path, Path], Ready]
"""Finds the process that ranks are forked from, given their variables, working directory and log."""


def launch_plan(
    scheduler: Scheduler, section: LaunchSection, launcher: str, world: World, run_folder: Path, module: str
) -> Spawn:
    """The exact commands that start `python -m MODULE RUN_FOLDER` on every rank; nothing is started or written.

    Raises:
        RequestError: launcher, scheduler and world do not go together, the hosts do not suffice, or the study sets
            another number of threads of the ranks by a variable.
    """
    if section.environment.get(_THREADS, str(world.threads_per_rank)) != str(world.threads_per_rank):
        raise RequestError(
            f"[launch.environment] sets {_THREADS}, which each rank has from the threads that it is planned with",
            next_step="Set launch.threads_per_rank instead",
        )
    hosts = scheduler.hosts(world)
    chosen = launcher_named(launcher, world, hosts)
    if (reason := scheduler.refuses(launcher, world)) is not None:
        raise RequestError(f"launch.launcher = '{launcher}' cannot be used: {reason}")
    spawn = Spawn(
        commands=(python_module(module, str(run_folder), interpreter=scheduler.python),),
        run_folder=run_folder,
        hosts=hosts,
        master_port=_port(run_folder, hosts),
        interface=section.interface,
    )
    return scheduler.adapt(launched(launcher, chosen, world, spawn))


def refuse_elsewhere(scheduler: Scheduler, engines: Iterable[str] = ()) -> None:
    """Refuses, before anything begins, to start ranks on this machine where it lacks what they need.

    It may offer less than was planned with ([node]), or lack packages that the ranks import.

    Raises:
        RequestError: something is missing; for packages the message names the extra that brings them, or
            whose engine needs them.
    """
    if scheduler.default_launcher != LOCAL:
        return  # other hosts, or a job, may have what this machine lacks
    planned, here = scheduler.machine(), this_machine()
    if planned.cores > here.cores or len(planned.gpus) > len(here.gpus):
        told, offered = (
            f"{counted(each.cores, 'core')} and {counted(len(each.gpus), 'GPU')}" for each in (planned, here)
        )
        raise RequestError(
            f"[node] describes {told}, and this machine offers {offered}: it can be planned here, and not run",
            next_step="Run it on that machine, or name it in launch.hostfile",
        )
    engines = tuple(engines)
    if missing := missing_packages(engines):
        are = "is" if len(missing) == 1 else "are"
        theirs = {package: needed_by(package, engines) for package in missing}
        steps = [f"Install {package}, which engine '{by[0]}' of {by[1]} needs" for package, by in theirs.items() if by]
        if None in theirs.values():
            steps.append(f"Run {install_command('train')}. All verbs but run, train, check and lab do without it")
        raise RequestError(
            f"ranks on this machine need {' and '.join(missing)}, which {are} not installed",
            next_step=". ".join(steps),
        )


def start_ranks(
    spawn: Spawn,
    placement: Placement,
    section: LaunchSection,
    *,
    environment: Mapping[str, str],
    import_folders: Sequence[Path] = (),
    ready: FindPrepared | None = None,
) -> Job:
    """Starts a run's ranks. The run's folder exists; launch.json and the launcher's own files are written into it.

    Args:
        spawn: from `launch_plan`.
        placement: the scheduler given to `launch_plan`.
        section: the one given to `launch_plan`.
        environment: variables of every rank, beyond those of the study and the user.
        import_folders: folders in which ranks look for a user's modules, behind all that is installed.
        ready: finds the process to fork from, for launchers whose ranks may be forked; None: ranks are started anew.

    Raises:
        OSError: a file cannot be written, or a program cannot be started.
        RequestError: a host has no address, or the prepared process is gone.
    """
    settings = _settings(section) | dict(environment)
    # The study's search path comes before the user's, and not in place of it.
    if paths := [each[_SEARCH_PATH] for each in (section.environment, environment) if each.get(_SEARCH_PATH)]:
        settings[_SEARCH_PATH] = os.pathsep.join(paths)
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
            write_record(spawn.run_folder / name, text)
        own = _address_towards(remote[0]) if remote else "127.0.0.1"
        file = LaunchFile(
            token=spawn.token,
            commands=spawn.commands,
            hosts=tuple(host.name for host in spawn.hosts),
            master_address=spawn.hosts[0].name if spawn.hosts else "127.0.0.1",
            master_port=spawn.master_port,
            lifeline=f"{own}:{heartbeats.port}",
            environment=settings,
            study_variables=tuple(section.environment),
            import_folders=tuple(map(str, import_folders)),
            prepared_seconds=prepared.waited_seconds,
            cold=prepared.cold,
            driver_pid=os.getpid(),
            host_id=launch_file.host_id(),
            started_ns=time.clock_gettime_ns(time.CLOCK_MONOTONIC),
        )
        # It has the token, by which a process speaks for a rank, and the values of [launch.environment].
        write_record(spawn.run_folder / launch_file.NAME, file.model_dump_json(indent=1), private=True)
        return placement.start(spawn, heartbeats, prepared.process)
    except PreparedError as error:
        heartbeats.close()
        raise RequestError(f"the ranks cannot be started: {error}") from None
    except BaseException:
        heartbeats.close()
        raise


def _settings(section: LaunchSection) -> dict[str, str]:
    """The user's settings for libraries that are meant for every rank, and those of the study."""
    passed_on = {name: value for name, value in os.environ.items() if _is_passed_on(name)}
    names = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
    interface = dict.fromkeys(names, section.interface) if section.interface is not None else {}
    return passed_on | interface | section.environment


def _is_passed_on(name: str) -> bool:
    """Whether ranks get a variable of the user's own: one that libraries read, and whose value may be stored."""
    if not name.startswith(_PASSED_ON):
        return False
    return name not in _NOT_PASSED_ON and not is_secret_name(name)


def _port(run_folder: Path, hosts: tuple[Host, ...]) -> int:
    """A port for rank 0, free where that can be seen from here.

    It differs by run, attempt and results folder: two drivers may do the same study at the same time.
    """
    first = int.from_bytes(hashlib.sha256(str(run_folder).encode()).digest()[:4]) % _PORTS
    # A launcher may put this machine first (mpirun).
    is_elsewhere = bool(hosts) and not any(is_this_machine(host.name) for host in hosts)
    for n in range(100):
        port = _FIRST_PORT + (first + n) % _PORTS
        if is_elsewhere or can_bind("", port):
            return port
    return _FIRST_PORT + first


_UNKNOWN_NAME = "This machine must know the name: see /etc/hosts, and the hostfile where there is one"


def _address_towards(host: str) -> str:
    """This machine's address as `host` sees it. Nothing is sent: the kernel is asked for its route."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except (OSError, UnicodeError) as error:  # UnicodeError: an empty or an overlong part between two dots
        why = error.strerror if isinstance(error, OSError) else "no such name"
        raise RequestError(f"host {host} cannot be found: {why or error}", next_step=_UNKNOWN_NAME) from None


RANK_MODULE = "vitscale.worker"
"""What every rank runs."""


@dataclass(frozen=True)
class Task:
    """One run that is to be done."""

    trial_id: str
    repeat: int


@dataclass(frozen=True)
class RunContext:
    """What all runs of a study share."""

    record: StudyRecord
    measure: MeasureSection
    launch: LaunchSection
    slurm: SlurmSection
    folder: Path
    """Folder of the study file: a factory's module may lie beside it."""
    results: Path
    interrupted: threading.Event = field(default_factory=threading.Event, compare=False)
    """When set, runs under way in other threads are to be ended, as by Ctrl-C."""

    def run_folder(self, task: Task, attempt: int) -> Path:
        """The folder of one attempt at a run."""
        return self.results / "runs" / f"{task.trial_id}-r{task.repeat}-a{attempt}"


def new_attempt(
    context: RunContext, task: Task, attempt: int, command: tuple[str, ...] = (), hosts: tuple[str, ...] = ()
) -> Path:
    """Makes the folder of one attempt, with what its trial.json says.

    Raises:
        OSError: it exists, or there is no room.
    """
    trial = context.record.trials[task.trial_id]
    # The time to an accuracy depends on the seed. The time of a step does not, and there equal work is wanted.
    seed = trial.train.seed + (task.repeat if trial.train.target_accuracy is not None else 0)
    header = RunHeader(
        trial_id=task.trial_id,
        repeat=task.repeat,
        attempt=attempt,
        trial=trial,
        seed=seed,
        command=command,
        hosts=hosts,
        dataset_fingerprint=context.record.dataset_fingerprints[task.trial_id],
        vitscale=program.identity(),
    )
    return new_run_folder(context.results, header)


def skip_reason(
    context: RunContext, task: Task, attempt: int, outcomes: Mapping[tuple[str, int], Outcome]
) -> Outcome | None:
    """Skips and records a run whose trial has run out of memory in another repeat; None where it has not."""
    earlier = [o for (trial_id, repeat), o in outcomes.items() if trial_id == task.trial_id and repeat != task.repeat]
    if not any(outcome.kind == "oom" for outcome in earlier):
        return None
    outcome = unstarted("skipped", "another repeat of this trial ran out of memory")
    write_outcome(new_attempt(context, task, attempt), outcome)
    return outcome


def run_task(
    context: RunContext,
    placement: Placement,
    task: Task,
    attempt: int,
    on_progress: Callable[[int, str], None],
    prepared: PreparedProcesses | None = None,
    lost: Callable[[], Cause | None] = lambda: None,
) -> Outcome:
    """Does one run, and repeats it up to `measure.retries` times after transient failures.

    Every attempt keeps its folder.

    Args:
        context: what the study's runs share.
        placement: where it runs.
        task: which run.
        attempt: number of the first attempt.
        on_progress: called with the number of steps that rank 0 has recorded, and with what ranks do before step 1.
        prepared: processes that ranks on this machine are forked from; None: all are started anew.
        lost: asks `Placement.lost` of a run that did not complete, until there is an answer: what the end of an
            allocation does to ranks is no failure of theirs.
    """
    trial = context.record.trials[task.trial_id]
    variables = ranks_variables(trial.world)
    beside = _import_folders(trial, context.folder)
    # A script has imports of its own, which may do anything: it starts as a new process.
    ready = None if prepared is None or trial.train.script else partial(prepared.ready, task.trial_id, trial)
    for number in range(attempt, attempt + context.measure.retries + 1):
        folder = context.run_folder(task, number)
        spawn = launch_plan(placement, context.launch, trial.launcher, trial.world, folder, RANK_MODULE)
        new_attempt(context, task, number, spawn.commands[0], tuple(host.name for host in spawn.hosts))
        try:
            ending = watch(
                start_ranks(
                    spawn, placement, context.launch, environment=variables, import_folders=beside, ready=ready
                ),
                folder,
                hang_seconds=context.measure.hang_seconds,
                timeout_seconds=context.measure.timeout_seconds,
                on_progress=on_progress,
                prints=trial.train.script is not None,
                interrupted=context.interrupted,
            )
        except RequestError as error:
            # A host's name could not be resolved just now: the other runs need not suffer for it.
            outcome = unstarted("failed", str(error), transient=True)
        else:
            away = tuple(host.name for host in spawn.hosts if not is_this_machine(host.name))
            outcome = outcome_of(Evidence(ending, read_ranks(folder), trial.world.size, folder, trial.layout, away))
            if trial.train.script is not None and outcome.kind == "completed":
                from vitscale.importers.left_behind import take_in

                take_in(folder, trial)
        if outcome.kind != "completed" and (cause := lost()) is not None:
            told = {"kind": cause.kind, "reason": cause.reason, "host": cause.host}
            outcome = outcome.model_copy(update=told | {"rank": None, "external": True, "transient": False})
        write_outcome(folder, outcome)
        if not outcome.transient:
            break
    return outcome


def _import_folders(trial: Trial, study_folder: Path) -> list[Path]:
    """Folders in which a trial's ranks look for a user's modules: none where the study names no code of the user's."""
    if trial.train.script is not None:
        return [study_folder]  # its own folder comes first, as Python has it, and the current one has no part
    return [Path.cwd(), study_folder] if trial.model.factory is not None else []


def ranks_variables(world: World) -> dict[str, str]:
    """The variables of every rank of a world: number of threads, and the user's own search path for modules."""
    variables = {_THREADS: str(world.threads_per_rank), _SEARCH_PATH: os.environ.get(_SEARCH_PATH, "")}
    return {name: value for name, value in variables.items() if value}


def touched(folder: Path) -> tuple[float, float]:
    """When a run's folder was first and last changed, as (seconds since 1970, seconds from then to the last)."""
    changes = [path.lstat().st_mtime for path in folder.iterdir()]
    began = min(changes, default=time.time())
    return began, max(changes, default=began) - began


def unstarted(kind: OutcomeKind, reason: str, *, transient: bool = False, external: bool = False) -> Outcome:
    """The outcome of a run whose ranks were never started."""
    return Outcome(
        kind=kind,
        reason=reason,
        transient=transient,
        external=external,
        started_unix_seconds=time.time(),
        wall_seconds=0.0,
    )
