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
from typing import NamedTuple

from vitscale.base import program
from vitscale.base.distribution import install_command
from vitscale.base.interpreter import python_module
from vitscale.base.secret_names import is_secret_name
from vitscale.engines.packages import missing_packages, needed_by
from vitscale.errors import RequestError
from vitscale.launchers import LOCAL, usable_launcher, with_launch_commands
from vitscale.launchers.base import Spawn
from vitscale.machine.hardware import Machine, this_machine
from vitscale.machine.hosts import Host, can_bind, is_this_machine
from vitscale.present.units import counted
from vitscale.processes import launch_file
from vitscale.processes.heartbeat_server import HeartbeatServer
from vitscale.processes.launch_file import LIBRARY_PATH, LIBRARY_SETTINGS, LaunchFile
from vitscale.runner.classify import outcome_of
from vitscale.runner.evidence import RunEvidence
from vitscale.runner.watch import longest_silence_seconds, watch
from vitscale.schedulers import Cause, Job, Placement, Scheduler
from vitscale.schedulers.prepared import PreparedError, PreparedProcesses, Ready, ranks_environment
from vitscale.store import new_run_folder, read_ranks, write_outcome, write_record
from vitscale.store.reading import RunKey
from vitscale.store.results import Outcome, OutcomeKind, RunHeader, StudyRecord
from vitscale.study.sections import LaunchSection, MeasureSection, SlurmSection
from vitscale.trial.trial import DeviceName, Trial, World

_PASSED_ON_PREFIXES = (*LIBRARY_SETTINGS, LIBRARY_PATH, "HF_", "VITSCALE_")
"""Prefixes of the variables that a user sets for all ranks."""
_VARIABLES_NOT_PASSED_ON = ("CUDA_VISIBLE_DEVICES", launch_file.TOKEN_VARIABLE, launch_file.COMPLETE_VARIABLE)
"""Variables that ranks do not inherit: which GPUs are free differs from host to host, and each run has its token."""
_THREADS_VARIABLE = "OMP_NUM_THREADS"
_SEARCH_PATH_VARIABLE = "PYTHONPATH"
_FIRST_PORT = 20_000
"""The first port for rank 0; with `_PORT_COUNT` all are below those that Linux gives to connections (32768 and up)."""
_PORT_COUNT = 12_000
_MOST_PORT_TRIES = 100
"""Ports that are tried on this machine before the first one is taken although it is in use."""


FindPrepared = Callable[[Mapping[str, str], Path, Path], Ready]
"""Finds the process that ranks are forked from, given their variables, working directory and log."""


def launch_plan(
    scheduler: Scheduler,
    section: LaunchSection,
    launcher: str,
    world: World,
    run_folder: Path,
    module: str,
    *,
    device: DeviceName = "cpu",
) -> Spawn:
    """Return the exact commands that start `python -m MODULE RUN_FOLDER` on every rank; nothing is started or written.

    `device`: what the ranks compute on, which a scheduler may have to ask for.

    Raises:
        RequestError: launcher, scheduler and world do not go together, the hosts do not suffice, or the study sets
            another number of threads of the ranks by a variable.
    """
    planned_threads = str(world.threads_per_rank)
    if section.environment.get(_THREADS_VARIABLE, planned_threads) != planned_threads:
        raise RequestError(
            f"[launch.environment] sets {_THREADS_VARIABLE}, which each rank has from the threads that it is planned "
            "with",
            next_step="Set launch.threads_per_rank instead",
        )
    hosts = scheduler.hosts(world)
    launcher_instance = usable_launcher(launcher, world, hosts)
    refusal = scheduler.refuses(launcher, world)
    if refusal is not None:
        raise RequestError(f"launch.launcher = '{launcher}' cannot be used: {refusal}")
    spawn = Spawn(
        commands=(python_module(module, str(run_folder), interpreter=scheduler.python),),
        run_folder=run_folder,
        hosts=hosts,
        master_port=_rank_0_port(run_folder, hosts),
        interface=section.interface,
        gpus_per_node=world.ranks_per_node if device == "cuda" else 0,
    )
    return scheduler.adapt(with_launch_commands(launcher, launcher_instance, world, spawn))


def refuse_elsewhere(scheduler: Scheduler, engines: Iterable[str] = ()) -> None:
    """Refuse, before anything begins, to start ranks on this machine where it lacks what they need.

    It may offer less than was planned with ([node]), or lack packages that the ranks import.

    Args:
        scheduler: where the ranks would run; other hosts, or a job, may have what this machine lacks.
        engines: names of the engines that the ranks train with.

    Raises:
        RequestError: something is missing; for packages the message names the extra that brings them, or
            whose engine needs them. Or the hosts begin only by a manifest.
    """
    if scheduler.needs_manifest:
        raise RequestError(
            f"{scheduler.title} is started by a cluster, and not from here",
            next_step="Print its manifest with `vitscale plan STUDY --commands`, and start it with "
            "`kubectl apply -f FILE`",
        )
    if scheduler.default_launcher != LOCAL:
        return
    _refuse_smaller_machine(scheduler.machine())
    _refuse_missing_packages(tuple(engines))


def _refuse_smaller_machine(planned: Machine) -> None:
    """Raise RequestError where this machine has fewer cores or GPUs than the planned one."""
    here = this_machine()
    if planned.cores <= here.cores and len(planned.gpus) <= len(here.gpus):
        return
    raise RequestError(
        f"[node] describes {_cores_and_gpus(planned)}, and this machine offers {_cores_and_gpus(here)}: it can be "
        "planned here, and not run",
        next_step="Run it on that machine, or name it in launch.hostfile",
    )


def _cores_and_gpus(machine: Machine) -> str:
    """Return "8 cores and 2 GPUs"."""
    return f"{counted(machine.cores, 'core')} and {counted(len(machine.gpus), 'GPU')}"


def _refuse_missing_packages(engines: tuple[str, ...]) -> None:
    """Raise RequestError where packages that ranks import are not installed here.

    Its next step names the extra of vitscale that brings them, and the engines of other distributions that need them.
    """
    missing = missing_packages(engines)
    if not missing:
        return
    steps = []
    needs_train_extra = False
    for package in missing:
        plugin_engine = needed_by(package, engines)
        if plugin_engine is None:  # all ranks need it, whatever the engine
            needs_train_extra = True
        else:
            name, distribution = plugin_engine
            steps.append(f"Install {package}, which engine '{name}' of {distribution} needs")
    if needs_train_extra:
        steps.append(f"Run {install_command('train')}. All verbs but run, train, check and lab do without it")
    verb = "is" if len(missing) == 1 else "are"
    raise RequestError(
        f"ranks on this machine need {' and '.join(missing)}, which {verb} not installed", next_step=". ".join(steps)
    )


def start_ranks(
    spawn: Spawn,
    placement: Placement,
    section: LaunchSection,
    *,
    environment: Mapping[str, str],
    import_folders: Sequence[Path] = (),
    ready: FindPrepared | None = None,
    silence_seconds: float | None = None,
) -> Job:
    """Start a run's ranks. The run's folder exists; launch.json and the launcher's own files are written into it.

    Args:
        spawn: from `launch_plan`.
        placement: the scheduler given to `launch_plan`.
        section: the one given to `launch_plan`.
        environment: variables of every rank, beyond those of the study and the user.
        import_folders: folders in which ranks look for a user's modules, behind all that is installed.
        ready: finds the process to fork from, for launchers whose ranks may be forked; None: ranks are started anew.
        silence_seconds: longest time for which the run goes on without a sign of any rank; None: ranks' collectives
            have torch's own limits.

    Raises:
        OSError: a file cannot be written, or a program cannot be started.
        RequestError: a host has no address, or the prepared process is gone.
    """
    settings = _rank_settings(section, environment)
    complete_spawn = replace(spawn, environment=settings | dict(spawn.environment), token=secrets.token_hex(16))
    prepared = _prepared_process(complete_spawn, ready)
    remote_hosts = _remote_hosts(complete_spawn)
    heartbeats = HeartbeatServer(complete_spawn.token, "" if remote_hosts else "127.0.0.1")
    try:
        for name, text in complete_spawn.files:
            write_record(complete_spawn.run_folder / name, text)
        driver_address = _address_towards(remote_hosts[0]) if remote_hosts else "127.0.0.1"
        lifeline = f"{driver_address}:{heartbeats.port}"
        file = _launch_file(
            complete_spawn, section, settings, import_folders, prepared, lifeline, silence_seconds=silence_seconds
        )
        # It has the token, by which a process speaks for a rank, and the values of [launch.environment].
        write_record(complete_spawn.run_folder / launch_file.NAME, file.model_dump_json(indent=1), private=True)
        return placement.start(complete_spawn, heartbeats, prepared.process)
    except PreparedError as error:
        heartbeats.close()
        raise RequestError(f"the ranks cannot be started: {error}") from None
    except BaseException:
        heartbeats.close()
        raise


def _launch_file(
    spawn: Spawn,
    section: LaunchSection,
    settings: Mapping[str, str],
    import_folders: Sequence[Path],
    prepared: Ready,
    lifeline: str,
    *,
    silence_seconds: float | None,
) -> LaunchFile:
    """Return the launch file of a run that starts now.

    Args:
        spawn: the commands, with the run's token.
        section: the study's section.
        settings: variables of every rank.
        import_folders: folders in which ranks look for a user's modules.
        prepared: how the ranks are started.
        lifeline: ADDRESS:PORT at which the driver listens for the ranks' heartbeats.
        silence_seconds: as of `start_ranks`.
    """
    return LaunchFile(
        token=spawn.token,
        commands=spawn.commands,
        hosts=tuple(host.name for host in spawn.hosts),
        master_address=spawn.hosts[0].name if spawn.hosts else "127.0.0.1",
        master_port=spawn.master_port,
        lifeline=lifeline,
        silence_seconds=silence_seconds,
        environment=dict(settings),
        study_variables=tuple(section.environment),
        import_folders=tuple(map(str, import_folders)),
        prepared_seconds=prepared.waited_seconds,
        cold=prepared.cold,
        driver_pid=os.getpid(),
        host_id=launch_file.host_id(),
        started_ns=time.clock_gettime_ns(time.CLOCK_MONOTONIC),
    )


def _rank_settings(section: LaunchSection, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of every rank.

    These are the user's for libraries, those of the study, which replace the user's, and `environment`, which replaces
    both. Only the search path for modules is joined: the study's part comes before that of `environment`.
    """
    settings = _library_settings(section) | dict(environment)
    search_paths = [variables.get(_SEARCH_PATH_VARIABLE) for variables in (section.environment, environment)]
    non_empty_paths = [path for path in search_paths if path]
    if non_empty_paths:
        settings[_SEARCH_PATH_VARIABLE] = os.pathsep.join(non_empty_paths)
    return settings


def _prepared_process(spawn: Spawn, ready: FindPrepared | None) -> Ready:
    """Return the process that the ranks are forked from. Where there is none, the run's log says why."""
    if not spawn.from_prepared or ready is None:
        return Ready()
    prepared = ready(ranks_environment(spawn.environment, spawn.drop_variables), spawn.cwd, spawn.log)
    if prepared.cold is not None:
        with spawn.log.open("a", encoding="utf-8") as log:
            log.write(f"local: ranks are started anew: {prepared.cold}\n")
    return prepared


def _remote_hosts(spawn: Spawn) -> tuple[str, ...]:
    """Return the names of a run's hosts other than this machine."""
    return tuple(host.name for host in spawn.hosts if not is_this_machine(host.name))


def _library_settings(section: LaunchSection) -> dict[str, str]:
    """Return the user's settings for libraries that are meant for every rank, and those of the study."""
    settings = {name: value for name, value in os.environ.items() if _is_passed_on(name)}
    if section.interface is not None:
        settings["NCCL_SOCKET_IFNAME"] = section.interface
        settings["GLOO_SOCKET_IFNAME"] = section.interface
    return settings | section.environment


def _is_passed_on(name: str) -> bool:
    """Whether ranks get a variable of the user's own: one that libraries read, and whose value may be stored."""
    if not name.startswith(_PASSED_ON_PREFIXES):
        return False
    return name not in _VARIABLES_NOT_PASSED_ON and not is_secret_name(name)


def _rank_0_port(run_folder: Path, hosts: tuple[Host, ...]) -> int:
    """Return a port for rank 0, free where that can be seen from here.

    It differs by run, attempt and results folder: two drivers may do the same study at the same time.
    """
    folder_hash = int.from_bytes(hashlib.sha256(str(run_folder).encode()).digest()[:4])
    first_offset = folder_hash % _PORT_COUNT
    # Any host counts, and not only the first: a launcher may put this machine first (mpirun).
    is_elsewhere = bool(hosts) and not any(is_this_machine(host.name) for host in hosts)
    for tries in range(_MOST_PORT_TRIES):
        port = _FIRST_PORT + (first_offset + tries) % _PORT_COUNT
        if is_elsewhere or can_bind("", port):
            return port
    return _FIRST_PORT + first_offset


_UNKNOWN_HOST_NEXT_STEP = "This machine must know the name: see /etc/hosts, and the hostfile where there is one"


def _address_towards(host: str) -> str:
    """Return this machine's address as `host` sees it. Nothing is sent: the kernel is asked for its route.

    Raises:
        RequestError: no address of the host is known.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except (OSError, UnicodeError) as error:  # UnicodeError: an empty or an overlong part between two dots
        reason = error.strerror if isinstance(error, OSError) else "no such name"
        raise RequestError(
            f"host {host} cannot be found: {reason or error}", next_step=_UNKNOWN_HOST_NEXT_STEP
        ) from None


RANK_MODULE = "vitscale.worker"
"""The module that every rank runs."""


def attempt_number(folder_name: str) -> int:
    """Return the number of the attempt in a run folder's name: 2 in "4f6a01c2-r0-a2"."""
    return int(folder_name.rpartition("-a")[2])


def next_attempt(attempts: Mapping[RunKey, int], task: RunKey) -> int:
    """Return the number of a run's next attempt, 0 for its first. Args: attempts: as in `RunIndex`."""
    return attempts.get(task, -1) + 1


@dataclass(frozen=True)
class RunContext:
    """Values that all runs of a study share."""

    record: StudyRecord
    measure: MeasureSection
    launch: LaunchSection
    slurm: SlurmSection
    folder: Path
    """Folder of the study file: a factory's module may lie beside it."""
    results: Path
    interrupted: threading.Event = field(default_factory=threading.Event, compare=False)
    """When set, runs under way in other threads are to be ended, as by Ctrl-C."""

    def run_folder(self, task: RunKey, attempt: int) -> Path:
        """Return the folder of one attempt at a run."""
        return self.results / "runs" / f"{task.trial_id}-r{task.repeat}-a{attempt}"


def new_attempt(
    context: RunContext, task: RunKey, attempt: int, command: tuple[str, ...] = (), hosts: tuple[str, ...] = ()
) -> Path:
    """Make the folder of one attempt with its trial.json, and return it.

    Args:
        context: values that the study's runs share.
        task: which run.
        attempt: its number, from 0.
        command: the first command that starts its ranks; empty for a run that is not started.
        hosts: names of its hosts.

    Raises:
        OSError: it exists, or there is no room.
    """
    trial = context.record.trials[task.trial_id]
    # The time to an accuracy depends on the seed. The time of a step does not, and there equal work is wanted.
    seed = trial.train.seed
    if trial.train.target_accuracy is not None:
        seed += task.repeat
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


def skip_if_out_of_memory(
    context: RunContext, task: RunKey, attempt: int, outcomes: Mapping[RunKey, Outcome]
) -> Outcome | None:
    """Skip a run whose trial has run out of memory in another repeat, and write down that it was skipped.

    Args:
        context: values that the study's runs share.
        task: the run.
        attempt: number of the attempt that would begin.
        outcomes: those of finished runs.

    Returns:
        The outcome of the skipped run; None where the run is not skipped, and nothing is written.
    """
    other_outcomes = [
        outcome
        for (trial_id, repeat), outcome in outcomes.items()
        if trial_id == task.trial_id and repeat != task.repeat
    ]
    if not any(outcome.kind == "oom" for outcome in other_outcomes):
        return None
    outcome = unstarted("skipped", "another repeat of this trial ran out of memory")
    write_outcome(new_attempt(context, task, attempt), outcome)
    return outcome


def run_task(
    context: RunContext,
    placement: Placement,
    task: RunKey,
    attempt: int,
    on_progress: Callable[[int, str], None],
    prepared: PreparedProcesses | None = None,
    find_lost_cause: Callable[[], Cause | None] = lambda: None,
) -> Outcome:
    """Do one run, and try it again up to `measure.retries` times after transient failures; return the last outcome.

    Each attempt has a folder of its own, with its outcome.

    Args:
        context: values that the study's runs share.
        placement: the hosts.
        task: the run.
        attempt: number of the first attempt.
        on_progress: called with the number of steps that rank 0 has recorded, and with what ranks do before step 1.
        prepared: processes that ranks on this machine are forked from; None: all are started anew.
        find_lost_cause: returns why the hosts are gone, None where they are there (`Placement.lost`). It is called
            after a run that did not complete: what the end of an allocation does to ranks is no failure of theirs.
    """
    last_attempt = attempt + context.measure.retries
    for number in range(attempt, last_attempt + 1):
        outcome = _attempt_outcome(context, placement, task, number, on_progress, prepared)
        lost_cause = find_lost_cause() if outcome.kind != "completed" else None
        if lost_cause is not None:
            outcome = _outcome_of_lost_placement(outcome, lost_cause)
        write_outcome(context.run_folder(task, number), outcome)
        if not outcome.transient:
            break
    return outcome


def _attempt_outcome(
    context: RunContext,
    placement: Placement,
    task: RunKey,
    number: int,
    on_progress: Callable[[int, str], None],
    prepared: PreparedProcesses | None,
) -> Outcome:
    """Make one attempt in a new folder, from its start to its end, and return its outcome, which is not yet written.

    Arguments as of `run_task`; `number` is that of this attempt.
    """
    trial = context.record.trials[task.trial_id]
    is_script = trial.train.script is not None
    # A script has imports of its own, which may do anything: it starts as a new process.
    ready = None if prepared is None or is_script else partial(prepared.ready, task.trial_id, trial)
    import_folders = _import_folders(trial, context.folder)
    folder = context.run_folder(task, number)
    spawn = launch_plan(
        placement, context.launch, trial.launcher, trial.world, folder, RANK_MODULE, device=trial.train.device
    )
    new_attempt(context, task, number, spawn.commands[0], tuple(host.name for host in spawn.hosts))
    try:
        job = start_ranks(
            spawn,
            placement,
            context.launch,
            environment=ranks_variables(trial.world),
            import_folders=import_folders,
            ready=ready,
            silence_seconds=longest_silence_seconds(context.measure.hang_seconds),
        )
        ending = watch(
            job,
            folder,
            hang_seconds=context.measure.hang_seconds,
            timeout_seconds=context.measure.timeout_seconds,
            on_progress=on_progress,
            prints=is_script,
            interrupted=context.interrupted,
        )
    except RequestError as error:
        # A host's name could not be resolved just now: the other runs need not suffer for it.
        return unstarted("failed", str(error), transient=True)
    ranks = read_ranks(folder)
    outcome = outcome_of(RunEvidence(ending, ranks, trial.world.size, folder, trial.layout, _remote_hosts(spawn)))
    if is_script and outcome.kind == "completed":
        from vitscale.importers.left_behind import take_in

        take_in(folder, trial)
    return outcome


def _outcome_of_lost_placement(outcome: Outcome, cause: Cause) -> Outcome:
    """Return the outcome with the loss of the hosts as its cause, which is no failure of the trial."""
    changes = {
        "kind": cause.kind,
        "reason": cause.reason,
        "host": cause.host,
        "rank": None,
        "external": True,
        "transient": False,
    }
    return outcome.model_copy(update=changes)


def _import_folders(trial: Trial, study_folder: Path) -> list[Path]:
    """Return the folders in which a trial's ranks look for a user's modules; empty where the study names none."""
    if trial.train.script is not None:
        return [study_folder]  # its own folder comes first, as Python has it, and the current one has no part
    if trial.model.factory is not None:
        return [Path.cwd(), study_folder]
    return []


def ranks_variables(world: World) -> dict[str, str]:
    """Return the variables of every rank of a world: number of threads, and the user's own search path for modules."""
    variables = {_THREADS_VARIABLE: str(world.threads_per_rank)}
    search_path = os.environ.get(_SEARCH_PATH_VARIABLE, "")
    if search_path:
        variables[_SEARCH_PATH_VARIABLE] = search_path
    return variables


class FolderTimes(NamedTuple):
    """The time in which a run's folder was changed, for a run that has no outcome to say how long it took."""

    first_unix_seconds: float
    """When it was first changed."""
    seconds: float
    """Time from the first change to the last."""


def folder_times(folder: Path) -> FolderTimes:
    """Return when the files of a run's folder were first changed, and how long until the last change."""
    change_times = [path.lstat().st_mtime for path in folder.iterdir()]
    first = min(change_times, default=time.time())
    last = max(change_times, default=first)
    return FolderTimes(first, last - first)


def unstarted(kind: OutcomeKind, reason: str, *, transient: bool = False, external: bool = False) -> Outcome:
    """Return the outcome of a run whose ranks were never started."""
    return Outcome(
        kind=kind,
        reason=reason,
        transient=transient,
        external=external,
        started_unix_seconds=time.time(),
        wall_seconds=0.0,
    )
