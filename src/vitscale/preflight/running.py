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
from vitscale.base.files import beside
from vitscale.engines import of_engine
from vitscale.errors import RequestError, StoreError, VitscaleError, printable, shown
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

_NO_STUDY = 'name = "check"\n[model]\nname = "vit-b16"\n[data]\nname = "digits"\n'
"""Used where no study is given; its model and data are not used."""
_SIZES = (*(1024 * 4**power for power in range(10)), 512 << 20)
"""Bytes of messages: from 1 KiB to 256 MiB in steps of 4, and 512 MiB."""
_QUICK_SIZES = _SIZES[:7]
"""Bytes of messages in a quick check: from 1 KiB to 4 MiB."""
_MOST_RANKS_PER_NODE = 4096

_LIMITS: dict[checks.CheckStage, float] = {
    "facts": 60.0, "network": 90.0, "join": 120.0, "collectives": 400.0,
    "matmul": 60.0, "compute": 90.0, "loader": 180.0, "disk": 90.0,
}  # fmt: skip
"""Longest time of each stage, in seconds."""
_QUICK_LIMITS = _LIMITS | {"collectives": 90.0}


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
    """Read the study, if there is one, and find its hosts and images. Nothing is written.

    Raises:
        RequestError: study, site file, hostfile or data cannot be used; or this is a cluster's login node.
    """
    shown_path = path or Path("(no study file)")
    file = StudyFile.read(path, overlay, overrides) if path else StudyFile(shown_path, _NO_STUDY, overlay)
    study = file.study
    scheduler = scheduler_for(study, shown_path)
    if isinstance(scheduler, Submitter):
        raise RequestError(
            f"this is a login node: {scheduler.title} names the hosts once a job runs",
            next_step="Check inside an allocation: salloc --nodes=2 vitscale check, or a job that runs it",
        )
    # A hostfile's `pool` refuses two names of one host, on which ranks may well start together.
    is_hostfile = isinstance(scheduler, Hostfile)
    hosts = read_hostfile(beside(shown_path, study.launch.hostfile or "")) if is_hostfile else ()
    nodes = len(hosts or scheduler.pool()) or 1
    if path is None:
        return CheckTarget(study, scheduler, hosts, nodes, trial=None)
    expansion = expand(file, scheduler.machine(), sources.check, scheduler.slots(), scheduler.default_launcher)
    trial_id = max(expansion.trials, key=lambda trial_id: _ranks_then_shared(expansion.trials[trial_id]))
    return CheckTarget(study, scheduler, hosts, nodes, expansion.trials[trial_id], expansion.fingerprints[trial_id])


def _ranks_then_shared(trial: Trial) -> tuple[int, int]:
    """Return the key by which the largest trial is found: its ranks, then the ranks that share its model."""
    return trial.world.size, trial.parallel.ranks_per_model


def request(target: CheckTarget, *, ranks_per_node: int | None, quick: bool) -> checks.CheckRequest:
    """Return the work of every rank.

    Args:
        target: the hosts, and the trial for whose training they are checked.
        ranks_per_node: None: as many as the trial has, or as is usual.
        quick: measure less, and for less time.

    Raises:
        RequestError: `ranks_per_node` is out of range.
    """
    if ranks_per_node is not None and not 1 <= ranks_per_node <= _MOST_RANKS_PER_NODE:
        raise RequestError(f"--ranks-per-node is {ranks_per_node}", valid=[f"1 to {_MOST_RANKS_PER_NODE:,}"])
    machine = target.scheduler.machine()
    trial = target.trial
    if not ranks_per_node:
        ranks_per_node = trial.world.ranks_per_node if trial is not None else _usual_ranks(target, machine)
    device: DeviceName = trial.train.device if trial is not None else device_of(target.study, machine)
    world = World(
        nodes=target.nodes,
        ranks_per_node=ranks_per_node,
        threads_per_rank=_threads_per_rank(target, machine, ranks_per_node, device),
    )
    group_exchanges = exchanges(trial, world.size) if trial is not None else {}
    limits = _QUICK_LIMITS if quick else _LIMITS
    if group_exchanges:
        limits = limits | {"collectives": 2 * limits["collectives"]}
    return checks.CheckRequest(
        world=world,
        device=device,
        precision=_precision(trial, machine, device),
        sweep=checks.SweepPlan(
            sizes_bytes=_QUICK_SIZES if quick else _SIZES,
            longest_seconds=0.2 if quick else 1.0,
            seconds_per_size=0.1 if quick else 0.5,
        ),
        compute_repeats=3 if quick else 5,
        compute_seconds=0.3 if quick else 1.0,
        loader_seconds=0.5 if quick else 2.0,
        limits=limits,
        trial=trial,
        dataset_fingerprint=target.dataset_fingerprint,
        exchanges=group_exchanges,
    )


def _threads_per_rank(target: CheckTarget, machine: Machine, ranks_per_node: int, device: DeviceName) -> int:
    """Return the trial's threads where its ranks lie as in training, else the study's, else a share of the cores."""
    trial = target.trial
    threads = target.study.launch.threads_per_rank
    if trial is not None and trial.world.ranks_per_node == ranks_per_node:
        threads = trial.world.threads_per_rank
    return threads or machine.threads_for(ranks_per_node, device)


def _precision(trial: Trial | None, machine: Machine, device: DeviceName) -> Precision:
    """Return the trial's precision; without one what the device is fast at."""
    if trial is not None:
        return trial.train.precision
    return "bf16" if machine.fast_bf16(device) else "fp32"


def exchanges(trial: Trial, ranks: int) -> dict[checks.SplitGroup, tuple[checks.Operation, ...]]:
    """Return the operations in each kind of group when this many ranks train a trial whose model they share.

    They are those of `engines.shared.splits` and `engines.shared.stages`; empty where ranks share no model, or cannot.
    """
    parallel = trial.parallel
    if parallel.ranks_per_model == 1 or ranks % parallel.ranks_per_model:
        return {}
    halves: tuple[checks.Operation, ...] = ("all_gather", "reduce_scatter")
    whole: tuple[checks.Operation, ...] = ("all_reduce",)
    operations_by_group: dict[checks.SplitGroup, tuple[checks.Operation, ...]] = {
        "replicas": halves if of_engine(trial.train.engine).shards(trial.train) else whole,
        "sequence": ("all_to_all",),
        "tensor": halves if parallel.shard_norms else whole,
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
    """Return the ranks per host where nothing says how many: one on each GPU, within the hostfile's slots.

    Without GPUs as many as the slots, else one on each of several hosts, and two on a single one, so that there is
    something to exchange.
    """
    slots = target.scheduler.slots()
    if machine.gpus:
        return min(len(machine.gpus), slots or len(machine.gpus))
    if slots:
        return slots
    return 1 if target.nodes > 1 else min(2, machine.cores)


_START_SECONDS = 180.0
"""Time for ssh, and for imports from a slow file server on many hosts at once."""
_LOG_CHARACTERS = 4000
_ANY_FOLDER = Path("/RESULTS/checks/CHECK")
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
    launch_plan(target.scheduler, target.study.launch, target.launcher, request.world, _ANY_FOLDER, RANK_MODULE)
    started_unix_seconds = time.time()
    check_id = f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime(started_unix_seconds))}-{secrets.token_hex(3)}"
    checks_folder = checks.check_folder(results).absolute()
    folder = checks_folder / check_id
    began = time.monotonic()
    try:
        folder.mkdir(parents=True)
        write_record(folder / "request.json", request.model_dump_json())
    except OSError as error:
        raise StoreError(
            f"{shown(str(checks_folder))} cannot be written: {error.strerror or error}",
            next_step="Give a folder you may write to with -o",
        ) from None
    try:
        answers = ask(target.hosts, folder / "request.json")
        unusable = {answer.name for answer in answers if answer.seconds is None or answer.sees_folder is False}
        if unusable:
            target = target.without(unusable)
            request = _request_for_fewer_nodes(request, target.nodes)
            write_record(folder / "request.json", request.model_dump_json())
        if unusable and not target.hosts:
            end = _End("not started", "no host is left to start one on")
        else:
            duration = "some seconds" if request.sweep.sizes_bytes == _QUICK_SIZES else "a minute or more"
            say(f"Checking {_hosts_and_ranks(request)}; this takes {duration}.")
            end = _measure(target, request, folder)
        ranks = checks.read_checked_ranks(folder, request.world.size)
        is_complete = len(ranks) == request.world.size and all(rank.ended for rank in ranks)
        record = checks.CheckRecord.model_validate(
            {
                "id": check_id,
                "started_unix_seconds": max(0.0, started_unix_seconds),
                "wall_seconds": time.monotonic() - began,
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
                "log": "" if is_complete else printable(log_tail(folder / "log.txt"))[-_LOG_CHARACTERS:],
                "vitscale": program.identity(),
            }
        )
        return StoredCheck(record, checks.write_check(checks_folder, record))
    except KeyboardInterrupt:
        raise CheckInterrupted("interrupted: all ranks are ended, and nothing is stored") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _request_for_fewer_nodes(request: checks.CheckRequest, nodes: int) -> checks.CheckRequest:
    """Return the request for the hosts that are left, whose ranks make other groups, or none."""
    world = request.world.model_copy(update={"nodes": max(1, nodes)})
    group_exchanges = exchanges(request.trial, world.size) if request.trial is not None else {}
    return request.model_copy(update={"world": world, "exchanges": group_exchanges})


@dataclass(frozen=True)
class _End:
    """The end of the ranks' processes."""

    ending: str
    """not started, ended or stopped."""
    reason: str = ""
    """Why not all of the ranks finished."""
    rank: int | None = None
    """The rank that was the cause."""


def _measure(target: CheckTarget, request: checks.CheckRequest, folder: Path) -> _End:
    """Start the ranks, as forks where their launcher allows it, and wait for their end."""
    launch = target.study.launch
    spawn = launch_plan(target.scheduler, launch, target.launcher, request.world, folder, RANK_MODULE)
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
        return _End(ending_word, _STOP_REASONS[ending.stopped].format(limit=ending.limit_seconds or 0.0))
    # As for a run, launchers and heartbeats show which rank was lost first, and how.
    ranks = checks.read_checked_ranks(folder, request.world.size)
    remote_hosts = tuple(host.name for host in target.hosts if not is_this_machine(host.name))
    outcome = outcome_of(RunEvidence(ending, ranks, request.world.size, folder, elsewhere=remote_hosts))
    return _End(ending_word, outcome.reason, outcome.rank)


def _hosts_and_ranks(request: checks.CheckRequest) -> str:
    """Return "2 hosts, 8 ranks", or "1 rank" on a single host."""
    world = request.world
    hosts = f"{world.nodes} hosts, " if world.nodes > 1 else ""
    noun = "ranks" if world.size > 1 else "rank"
    return f"{hosts}{world.size} {noun}"


def loader_need(trial: Trial, ranks: Sequence[checks.CheckedRank], results: Path | None) -> checks.LoaderNeed | None:
    """Return the images per second that one rank needs; None where neither a run nor the model's FLOPs say."""
    measured = _need_of_runs(trial, results) if results is not None else None
    return measured or _need_by_arithmetic(trial, ranks)


def _need_of_runs(trial: Trial, results: Path) -> checks.LoaderNeed | None:
    """Return the rate of the fastest completed run with the same model, precision, micro-batch and kind of device."""
    try:
        stored = store.load(results)
    except StoreError:
        return None  # nothing has been run there yet
    fastest = 0.0
    for run in stored.runs:
        if run.outcome.kind != "completed" or not _loads_alike(run.header.trial, trial):
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


def _loads_alike(stored: Trial, trial: Trial) -> bool:
    """Whether a rank of the stored trial needs images as fast as one of this trial."""
    if stored.model != trial.model:
        return False
    names = ("precision", "device", "micro_batch")
    return all(getattr(stored.train, name) == getattr(trial.train, name) for name in names)


def _need_by_arithmetic(trial: Trial, ranks: Sequence[checks.CheckedRank]) -> checks.LoaderNeed | None:
    rates = [rank.matmul.flops_per_second for rank in ranks if rank.matmul is not None]
    flops = flops_per_image(trial)
    if not rates or isinstance(flops, str) or flops <= 0:
        return None
    return checks.LoaderNeed(
        images_per_second=statistics.median(rates) / flops,
        source="arithmetic",
        described="the matrix-multiply rate measured here / the model's FLOPs, which no training quite reaches",
    )
