"""Runs a check: asks the hosts, starts ranks as for training, waits within limits, and reads their records.

The work and the hosts of a check come from a study, a hostfile, an allocation, or this machine alone.
"""

from __future__ import annotations

import secrets
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from vitscale import sources, store
from vitscale.analysis.runs.compute import flops_per_image
from vitscale.analysis.runs.figures import run_figures
from vitscale.base import program
from vitscale.base.files import path_named_in
from vitscale.engines import of_engine
from vitscale.errors import RequestError, StoreError, VitscaleError, printable, shown
from vitscale.launchers.base import Spawn
from vitscale.machine.hardware import Machine
from vitscale.machine.hosts import Host, is_this_machine, read_hostfile
from vitscale.preflight.fit import fits
from vitscale.preflight.reach_verdicts import ask
from vitscale.runner.classify import outcome_of
from vitscale.runner.evidence import RunEvidence, log_tail
from vitscale.runner.one_run import RANK_MODULE, launch_plan, ranks_variables, refuse_elsewhere, start_ranks
from vitscale.runner.watch import watch
from vitscale.schedulers import Hostfile, Placement, Submitter, described, scheduler_for
from vitscale.schedulers.prepared import PreparedProcesses
from vitscale.store import checks, refuse_links, write_record
from vitscale.study.expand import expand
from vitscale.study.file import Overlay, StudyFile
from vitscale.study.resolve import device_of
from vitscale.study.sections import AUTO, Study
from vitscale.trial.parallel import RankLayout
from vitscale.trial.trial import DeviceName, Precision, Trial, World

_PLACEHOLDER_STUDY = 'name = "check"\n[model]\nname = "vit-b16"\n[data]\nname = "digits"\n'
"""Used where no study is given; its model and data are not used."""
_MESSAGE_SIZES = (*(1024 * 4**power for power in range(10)), 512 << 20)
"""Bytes of messages: from 1 KiB to 256 MiB in steps of 4, and 512 MiB."""
_QUICK_MESSAGE_SIZES = tuple(size for size in _MESSAGE_SIZES if size <= 4 << 20)
"""Bytes of messages in a quick check: from 1 KiB to 4 MiB."""
_MOST_RANKS_PER_NODE = 4096

_STAGE_LIMITS: dict[checks.CheckStage, float] = {
    "facts": 60.0, "network": 90.0, "join": 120.0, "collectives": 400.0,
    "matmul": 60.0, "compute": 90.0, "loader": 180.0, "disk": 90.0,
}  # fmt: skip
"""Longest time of each stage, in seconds."""


class _Effort(NamedTuple):
    """How much a check measures, and for how long."""

    sweep: checks.SweepPlan
    """The messages of each collective operation."""
    compute_repeats: int
    compute_seconds: float
    """Seconds of training steps without transfers, in each repeat."""
    loader_seconds: float
    """Seconds for which batches are loaded."""
    limits: dict[checks.CheckStage, float]
    """Longest time of each stage, in seconds."""


_FULL_EFFORT = _Effort(
    checks.SweepPlan(sizes_bytes=_MESSAGE_SIZES, longest_seconds=1.0, seconds_per_size=0.5),
    compute_repeats=5,
    compute_seconds=1.0,
    loader_seconds=2.0,
    limits=_STAGE_LIMITS,
)
_QUICK_EFFORT = _Effort(
    checks.SweepPlan(sizes_bytes=_QUICK_MESSAGE_SIZES, longest_seconds=0.2, seconds_per_size=0.1),
    compute_repeats=3,
    compute_seconds=0.3,
    loader_seconds=0.5,
    limits=_STAGE_LIMITS | {"collectives": 90.0},
)


@dataclass(frozen=True)
class CheckTarget:
    """The hosts that are to be checked."""

    study: Study
    scheduler: Placement
    hosts: tuple[Host, ...]
    """All hosts of a hostfile; empty: this machine, or the allocation's nodes."""
    nodes: int
    trial: Trial | None
    """The study's largest trial, and among several the one whose model most ranks share; None without a study."""
    dataset_fingerprint: str | None = None

    @property
    def launcher(self) -> str:
        """Name of the launcher that starts the ranks."""
        launcher = self.study.launch.launcher
        return self.scheduler.default_launcher if launcher == AUTO else launcher

    def without(self, names: set[str]) -> CheckTarget:
        """Return the same target without these hosts of the hostfile."""
        hosts = tuple(host for host in self.hosts if host.name not in names)
        scheduler = Hostfile(hosts, described(self.study.node))
        return replace(self, scheduler=scheduler, hosts=hosts, nodes=len(hosts))


def check_target(path: Path | None, overlay: Overlay, overrides: Sequence[str] = ()) -> CheckTarget:
    """Return the hosts to check, and the largest trial of the study, for whose training they are checked.

    The hosts are those of a hostfile, those of the allocation that this runs in, or this machine alone. Without a study
    only the overlay may name a hostfile, and there is no trial. Nothing is written.

    Args:
        path: the study file; None: there is none.
        overlay: sections of the site file and of command-line options, which replace values of the study.
        overrides: "section.key=value", which replace values of both.

    Raises:
        RequestError: study, site file, hostfile or data cannot be used; or this is a cluster's login node.
    """
    file = _study_or_placeholder(path, overlay, overrides)
    scheduler = _scheduler_with_hosts(file)
    hosts = _hosts_of_hostfile(file, scheduler)
    target = CheckTarget(file.study, scheduler, hosts, nodes=_node_count(hosts, scheduler), trial=None)
    has_study = path is not None
    return _with_largest_trial(target, file) if has_study else target


def _study_or_placeholder(path: Path | None, overlay: Overlay, overrides: Sequence[str]) -> StudyFile:
    """Return the study in a file; without a file a placeholder, of which only the overlay's values are used."""
    if path is None:
        return StudyFile(Path("(no study file)"), _PLACEHOLDER_STUDY, overlay)
    return StudyFile.read(path, overlay, overrides)


def _scheduler_with_hosts(file: StudyFile) -> Placement:
    """Return the scheduler of a study, which knows its hosts now.

    Raises:
        RequestError: it gets to know them only when a job runs.
    """
    scheduler = scheduler_for(file.study, file.path)
    if isinstance(scheduler, Submitter):
        raise RequestError(
            f"this is a login node: {scheduler.title} names the hosts once a job runs",
            next_step=f"Run vitscale check in one of its jobs: {scheduler.facts.allocation_command}, and there "
            "vitscale check",
        )
    return scheduler


def _hosts_of_hostfile(file: StudyFile, scheduler: Placement) -> tuple[Host, ...]:
    """Return all hosts of the study's hostfile; empty where it has none.

    The file is read here, since the scheduler's `pool` refuses two names of one host, which a check allows: ranks may
    well start together there.
    """
    if not isinstance(scheduler, Hostfile):
        return ()
    return read_hostfile(path_named_in(file.path, file.study.launch.hostfile or ""))


def _node_count(hosts_of_hostfile: Sequence[Host], scheduler: Placement) -> int:
    """Return the number of hosts: those of the hostfile, else the allocation's, else this machine alone."""
    if hosts_of_hostfile:
        return len(hosts_of_hostfile)
    allocated_hosts = scheduler.pool()
    return len(allocated_hosts) or 1


def _with_largest_trial(target: CheckTarget, file: StudyFile) -> CheckTarget:
    """Return the target with the study's largest trial, and the fingerprint of its dataset.

    Raises:
        RequestError: the study cannot be planned, or its data cannot be used.
    """
    scheduler = target.scheduler
    expansion = expand(
        file, scheduler.machine(), sources.check, slots=scheduler.slots(), launcher=scheduler.default_launcher
    )
    largest_id = max(expansion.trials, key=lambda trial_id: _trial_size(expansion.trials[trial_id]))
    return replace(target, trial=expansion.trials[largest_id], dataset_fingerprint=expansion.fingerprints[largest_id])


class _TrialSize(NamedTuple):
    """Orders trials by size: by all of their ranks first."""

    ranks: int
    ranks_per_model: int
    """Ranks that share one model."""


def _trial_size(trial: Trial) -> _TrialSize:
    return _TrialSize(trial.world.size, trial.parallel.ranks_per_model)


def request(target: CheckTarget, *, ranks_per_node: int | None, quick: bool) -> checks.CheckRequest:
    """Return what every rank of a check does.

    Args:
        target: the hosts, and the trial for whose training they are checked.
        ranks_per_node: None: as many as the trial has, or as is usual.
        quick: measure less, and for less time.

    Raises:
        RequestError: `ranks_per_node` is out of range.
    """
    if ranks_per_node is not None and not 1 <= ranks_per_node <= _MOST_RANKS_PER_NODE:
        raise RequestError(f"--ranks-per-node is {ranks_per_node}", valid=[f"1 to {_MOST_RANKS_PER_NODE:,}"])
    trial = target.trial
    machine = target.scheduler.machine()
    device: DeviceName = trial.train.device if trial is not None else device_of(target.study, machine)
    world = _checked_world(target, machine, device, ranks_per_node)
    group_exchanges = exchanges(trial, world.size) if trial is not None else {}
    effort = _QUICK_EFFORT if quick else _FULL_EFFORT
    limits = effort.limits
    if group_exchanges:  # these groups are measured after those of all ranks, in the same stage
        limits = limits | {"collectives": 2 * limits["collectives"]}
    return checks.CheckRequest(
        world=world,
        device=device,
        precision=_check_precision(trial, machine, device),
        sweep=effort.sweep,
        compute_repeats=effort.compute_repeats,
        compute_seconds=effort.compute_seconds,
        loader_seconds=effort.loader_seconds,
        limits=limits,
        trial=trial,
        dataset_fingerprint=target.dataset_fingerprint,
        exchanges=group_exchanges,
    )


def _checked_world(target: CheckTarget, machine: Machine, device: DeviceName, ranks_per_node: int | None) -> World:
    """Return the ranks of a check. Args: ranks_per_node: None: as many as the trial has, or as is usual."""
    if ranks_per_node is None:
        trial = target.trial
        ranks_per_node = trial.world.ranks_per_node if trial is not None else _usual_ranks(target, machine)
    return World(
        nodes=target.nodes,
        ranks_per_node=ranks_per_node,
        threads_per_rank=_threads_per_rank(target, machine, ranks_per_node, device),
    )


def _threads_per_rank(target: CheckTarget, machine: Machine, ranks_per_node: int, device: DeviceName) -> int:
    """Return the CPU threads of each rank.

    They are the trial's where a host gets as many ranks as in training, else what the study says, else the rank's share
    of the host's cores.
    """
    trial = target.trial
    if trial is not None and trial.world.ranks_per_node == ranks_per_node:
        threads: int | None = trial.world.threads_per_rank
    else:
        threads = target.study.launch.threads_per_rank
    return threads or machine.threads_for(ranks_per_node, device)


def _check_precision(trial: Trial | None, machine: Machine, device: DeviceName) -> Precision:
    """Return the trial's precision; without one what the device is fast at."""
    if trial is not None:
        return trial.train.precision
    return "bf16" if machine.fast_bf16(device) else "fp32"


def exchanges(trial: Trial, ranks: int) -> dict[checks.SplitGroup, tuple[checks.Operation, ...]]:
    """Return the operations in each kind of group when this many ranks train a trial whose model they share.

    A group is the ranks along one axis: replicas (copies of the model), and the ranks that share one model by its
    sequence, its tensors or its layers (pipeline). The operations are those of `engines.shared.splits` and
    `engines.shared.stages`. The result is empty where ranks share no model, or cannot be divided into such groups.
    """
    parallel = trial.parallel
    if parallel.ranks_per_model == 1 or ranks % parallel.ranks_per_model:
        return {}
    shard_operations: tuple[checks.Operation, ...] = ("all_gather", "reduce_scatter")
    whole_tensor_operations: tuple[checks.Operation, ...] = ("all_reduce",)
    replicas_have_shards = of_engine(trial.train.engine).shards(trial.train)
    operations_by_group: dict[checks.SplitGroup, tuple[checks.Operation, ...]] = {
        "replicas": shard_operations if replicas_have_shards else whole_tensor_operations,
        "sequence": ("all_to_all",),
        "tensor": shard_operations if parallel.shard_norms else whole_tensor_operations,
        "pipeline": ("send_recv",),
    }
    group_sizes: dict[checks.SplitGroup, int] = {
        "replicas": RankLayout.of(ranks, parallel).replicas,
        "sequence": parallel.sequence,
        "tensor": parallel.tensor,
        "pipeline": parallel.pipeline,
    }
    return {group: operations for group, operations in operations_by_group.items() if group_sizes[group] > 1}


def _usual_ranks(target: CheckTarget, machine: Machine) -> int:
    """Return the ranks per host where nothing says how many.

    Hosts with GPUs get one rank on each GPU, within the hostfile's slots. Others get as many ranks as slots. Without
    slots each of several hosts gets one, and a single host two, so that there is something to exchange.
    """
    slots = target.scheduler.slots()
    if machine.gpus:
        return min(len(machine.gpus), slots or len(machine.gpus))
    if slots:
        return slots
    return 1 if target.nodes > 1 else min(2, machine.cores)


_START_SECONDS = 180.0
"""Time for ssh, and for imports from a slow file server on many hosts at once."""
_MOST_LOG_CHARACTERS = 4000
_PLACEHOLDER_FOLDER = Path("/RESULTS/checks/CHECK")
"""Stands for a check's folder where only the form of a command matters."""

_STOP_REASONS = {
    "hang": "no rank recorded anything for {limit:g} s",
    "timeout": "the ranks were not done after {limit:g} s",
}


class CheckInterrupted(VitscaleError):
    """Ctrl-C: all ranks are ended, and nothing is stored."""

    exit_code = 130


class StoredCheck(NamedTuple):
    """A check, and the file where it is stored."""

    record: checks.CheckRecord
    path: Path


def run_check(
    target: CheckTarget, request: checks.CheckRequest, results: Path | None, say: Callable[[str], None]
) -> StoredCheck:
    """Do a check and store its record.

    Args:
        target: the hosts.
        request: the work of every rank.
        results: the results folder; None: the user's own folder of checks.
        say: called with a line for the user who waits.

    Raises:
        RequestError: the ranks cannot be started like this, or the study's images are damaged.
        StoreError: the folder cannot be written.
        CheckInterrupted: on Ctrl-C; no process is left.
    """
    if results is not None:
        refuse_links(results)
    refuse_elsewhere(target.scheduler)
    if target.trial is not None:
        # Decode the images once, here, so that damage shows before anything starts.
        sources.prepare(target.trial.data.model_copy(update={"fraction": 1.0}))
    # Any refusal comes before anything is written.
    _ranks_spawn(target, request, _PLACEHOLDER_FOLDER)
    checks_folder = checks.check_folder(results).absolute()
    run = _CheckRun.begin(checks_folder)
    try:
        run.folder.mkdir(parents=True)
        run.write_request(request)
    except OSError as error:
        raise StoreError(
            f"{shown(str(checks_folder))} cannot be written: {error.strerror or error}",
            next_step="Give a folder you may write to with -o",
        ) from None
    try:
        record = _check_usable_hosts(run, target, request, results, say)
        return StoredCheck(record, checks.write_check(checks_folder, record))
    except KeyboardInterrupt:
        raise CheckInterrupted("interrupted: all ranks are ended, and nothing is stored") from None
    finally:
        shutil.rmtree(run.folder, ignore_errors=True)


def _check_usable_hosts(
    run: _CheckRun,
    target: CheckTarget,
    request: checks.CheckRequest,
    results: Path | None,
    say: Callable[[str], None],
) -> checks.CheckRecord:
    """Ask the hosts, measure on those that answer and see the check's folder, and return the record."""
    answers = ask(target.hosts, run.request_file)
    unusable = {answer.name for answer in answers if not _is_usable(answer)}
    if not unusable:
        end = _measure_on_ranks(target, request, run.folder, say)
        return _check_record(run, target, request, answers, end, results)
    usable_target = target.without(unusable)
    smaller_request = _request_for_fewer_nodes(request, usable_target.nodes)
    run.write_request(smaller_request)
    if usable_target.hosts:
        end = _measure_on_ranks(usable_target, smaller_request, run.folder, say)
    else:
        end = _RanksEnd("not started", "no host is left to start one on")
    return _check_record(run, usable_target, smaller_request, answers, end, results)


def _is_usable(answer: checks.HostAnswer) -> bool:
    """Whether a host answered, and sees the check's folder, as far as that is known."""
    return answer.seconds is not None and answer.sees_folder is not False


@dataclass(frozen=True)
class _CheckRun:
    """A check under way."""

    id: str
    """Its time and six digits: "20261128T024056-a1b2c3"."""
    folder: Path
    """The folder of its ranks' records, which is removed in the end."""
    started_unix_seconds: float
    started_monotonic_seconds: float
    """The same time on the monotonic clock."""

    @classmethod
    def begin(cls, checks_folder: Path) -> _CheckRun:
        """Return a check that begins now; nothing is written."""
        started = time.time()
        check_id = f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime(started))}-{secrets.token_hex(3)}"
        return cls(check_id, checks_folder / check_id, started, time.monotonic())

    @property
    def request_file(self) -> Path:
        """The file from which ranks read what to do."""
        return self.folder / "request.json"

    def write_request(self, request: checks.CheckRequest) -> None:
        """Write, or replace, the request for the ranks."""
        write_record(self.request_file, request.model_dump_json())


def _check_record(
    run: _CheckRun,
    target: CheckTarget,
    request: checks.CheckRequest,
    answers: Sequence[checks.HostAnswer],
    end: _RanksEnd,
    results: Path | None,
) -> checks.CheckRecord:
    """Read what the ranks have recorded, and return the record of the check."""
    ranks = checks.read_checked_ranks(run.folder, request.world.size)
    is_complete = len(ranks) == request.world.size and all(rank.ended for rank in ranks)
    log = "" if is_complete else printable(log_tail(run.folder / "log.txt"))
    return checks.CheckRecord.model_validate(
        {
            "id": run.id,
            "started_unix_seconds": max(0.0, run.started_unix_seconds),
            "wall_seconds": time.monotonic() - run.started_monotonic_seconds,
            "request": request,
            "launcher": target.launcher,
            "scheduler": type(target.scheduler).__name__,
            "hosts": answers,
            "ranks": ranks,
            "fits": fits(ranks),
            "loader_need": None if target.trial is None else loader_need(target.trial, ranks, results),
            "ending": end.ending,
            "ending_reason": "" if is_complete else end.reason,
            "guilty_rank": None if is_complete else end.rank,
            "log": log[-_MOST_LOG_CHARACTERS:],
            "vitscale": program.identity(),
        }
    )


def _request_for_fewer_nodes(request: checks.CheckRequest, nodes: int) -> checks.CheckRequest:
    """Return the request for the hosts that are left, whose ranks make other groups, or none."""
    world = request.world.model_copy(update={"nodes": max(1, nodes)})
    group_exchanges = exchanges(request.trial, world.size) if request.trial is not None else {}
    return request.model_copy(update={"world": world, "exchanges": group_exchanges})


@dataclass(frozen=True)
class _RanksEnd:
    """The end of the ranks' processes."""

    ending: str
    """not started, ended or stopped."""
    reason: str = ""
    """Why not all of the ranks finished."""
    rank: int | None = None
    """The rank that was the cause."""


def _measure_on_ranks(
    target: CheckTarget, request: checks.CheckRequest, folder: Path, say: Callable[[str], None]
) -> _RanksEnd:
    """Start the ranks, as forks where their launcher allows it, and wait for their end.

    Args:
        target: the hosts.
        request: the work of every rank.
        folder: the folder of the ranks' records.
        say: called with a line on what is checked, and how long that takes.
    """
    duration = "some seconds" if request.sweep.sizes_bytes == _QUICK_MESSAGE_SIZES else "a minute or more"
    say(f"Checking {_hosts_and_ranks(request)}; this takes {duration}.")
    launch = target.study.launch
    spawn = _ranks_spawn(target, request, folder)
    try:
        with PreparedProcesses() as prepared:
            job = start_ranks(
                spawn,
                target.scheduler,
                launch,
                environment=ranks_variables(request.world),
                ready=partial(prepared.ready, "check", None),
            )
            ending = watch(
                job,
                folder,
                hang_seconds=max(_START_SECONDS, *request.limits.values()) + 30.0,
                timeout_seconds=request.longest_seconds + _START_SECONDS,
            )
    except OSError as error:
        raise RequestError(f"the ranks cannot be started: {error.strerror or error}") from None
    ending_word = "ended" if ending.stopped is None else "stopped"
    if ending.stopped in _STOP_REASONS:
        return _RanksEnd(ending_word, _STOP_REASONS[ending.stopped].format(limit=ending.limit_seconds or 0.0))
    # As for a run, launchers and heartbeats show which rank was lost first, and how.
    ranks = checks.read_checked_ranks(folder, request.world.size)
    remote_hosts = tuple(host.name for host in target.hosts if not is_this_machine(host.name))
    outcome = outcome_of(RunEvidence(ending, ranks, request.world.size, folder, elsewhere=remote_hosts))
    return _RanksEnd(ending_word, outcome.reason, outcome.rank)


def _ranks_spawn(target: CheckTarget, request: checks.CheckRequest, folder: Path) -> Spawn:
    """Return the exact commands that start the ranks of a check; nothing is started or written.

    Raises:
        RequestError: the ranks cannot be started like this.
    """
    return launch_plan(
        target.scheduler,
        target.study.launch,
        target.launcher,
        request.world,
        folder,
        RANK_MODULE,
        device=request.device,
    )


def _hosts_and_ranks(request: checks.CheckRequest) -> str:
    """Return "2 hosts, 8 ranks", or "1 rank" on a single host."""
    world = request.world
    hosts = f"{world.nodes} hosts, " if world.nodes > 1 else ""
    noun = "ranks" if world.size > 1 else "rank"
    return f"{hosts}{world.size} {noun}"


def loader_need(trial: Trial, ranks: Sequence[checks.CheckedRank], results: Path | None) -> checks.LoaderNeed | None:
    """Return the images per second that one rank needs; None where neither a run nor the model's FLOPs say."""
    need = _need_by_stored_runs(trial, results) if results is not None else None
    return need if need is not None else _need_by_arithmetic(trial, ranks)


def _need_by_stored_runs(trial: Trial, results: Path) -> checks.LoaderNeed | None:
    """Return the rate of the fastest completed run with the same model, precision, micro-batch and kind of device."""
    try:
        stored = store.load(results)
    except StoreError:
        return None  # nothing has been run there yet
    fastest = 0.0
    for run in stored.runs:
        if run.outcome.kind != "completed" or not _needs_images_as_fast(run.header.trial, trial):
            continue
        images_per_second = run_figures(run).images_per_second
        if images_per_second:
            fastest = max(fastest, images_per_second / run.header.trial.world.size)
    if fastest <= 0.0:
        return None
    described = f"as a stored run in {results} did"
    if stored.unread:
        described += f"; other finished runs are missing there: {stored.unread[0].reason}"
    return checks.LoaderNeed(images_per_second=fastest, source="run", described=described)


def _needs_images_as_fast(stored: Trial, trial: Trial) -> bool:
    """Whether a rank of the stored trial needs images as fast as one of this trial."""
    if stored.model != trial.model:
        return False
    names = ("precision", "device", "micro_batch")
    return all(getattr(stored.train, name) == getattr(trial.train, name) for name in names)


def _need_by_arithmetic(trial: Trial, ranks: Sequence[checks.CheckedRank]) -> checks.LoaderNeed | None:
    """Return the rate at which a rank would train if it did nothing but multiply matrices as fast as measured.

    Returns None where no rate was measured, or the model's FLOPs are unknown.
    """
    rates = [rank.matmul.flops_per_second for rank in ranks if rank.matmul is not None]
    flops = flops_per_image(trial)
    if not rates or isinstance(flops, str) or flops <= 0:
        return None
    return checks.LoaderNeed(
        images_per_second=statistics.median(rates) / flops,
        source="arithmetic",
        described="the matrix-multiply rate measured here / the model's FLOPs, which no training quite reaches",
    )
