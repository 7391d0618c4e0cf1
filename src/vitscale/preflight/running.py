"""Runs a check: asks the hosts, starts ranks as for training, waits within limits, and reads what they left.

What a check measures, and where, comes from a study, a hostfile, an allocation, or this machine alone.
"""

from __future__ import annotations

import secrets
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

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
_QUICK_SIZES = _SIZES[:7]
_MOST_RANKS_PER_NODE = 4096

_LIMITS: dict[checks.CheckStage, float] = {
    "facts": 60.0, "network": 90.0, "join": 120.0, "collectives": 400.0,
    "matmul": 60.0, "compute": 90.0, "loader": 180.0, "disk": 90.0,
}  # fmt: skip
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
        named = self.study.launch.launcher
        return self.scheduler.default_launcher if named == AUTO else named

    def without(self, gone: set[str]) -> CheckTarget:
        """The same target without these hosts of the hostfile."""
        left = tuple(host for host in self.hosts if host.name not in gone)
        scheduler = Hostfile(left, described(self.study.node))
        return CheckTarget(self.study, scheduler, left, len(left), self.trial, self.dataset_fingerprint)


def check_target(path: Path | None, overlay: Overlay, overrides: Sequence[str] = ()) -> CheckTarget:
    """Reads the study, if there is one, and finds its hosts and images. Nothing is written.

    Raises:
        RequestError: study, site file, hostfile or data cannot be used; or this is a cluster's login node.
    """
    read_from = path or Path("(no study file)")
    file = StudyFile.read(path, overlay, overrides) if path else StudyFile(read_from, _NO_STUDY, overlay)
    study = file.study
    scheduler = scheduler_for(study, read_from)
    if isinstance(scheduler, Submitter):
        raise RequestError(
            f"this is a login node: {scheduler.title} names the hosts once a job runs",
            next_step="Check inside an allocation: salloc --nodes=2 vitscale check, or a job that runs it",
        )
    # A hostfile's `pool` refuses two names of one host, on which ranks may well start together.
    named = isinstance(scheduler, Hostfile)
    hosts = read_hostfile(beside(read_from, study.launch.hostfile or "")) if named else ()
    nodes = len(hosts or scheduler.pool()) or 1
    if path is None:
        return CheckTarget(study, scheduler, hosts, nodes, None)
    expansion = expand(file, scheduler.machine(), sources.check, scheduler.slots(), scheduler.default_launcher)
    trial_id, trial = max(
        expansion.trials.items(), key=lambda item: (item[1].world.size, item[1].parallel.ranks_per_model)
    )
    return CheckTarget(study, scheduler, hosts, nodes, trial, expansion.fingerprints[trial_id])


def request(target: CheckTarget, *, ranks_per_node: int | None, quick: bool) -> checks.CheckRequest:
    """What every rank is to do.

    Raises:
        RequestError: `ranks_per_node` is out of range.
    """
    if ranks_per_node is not None and not 1 <= ranks_per_node <= _MOST_RANKS_PER_NODE:
        raise RequestError(f"--ranks-per-node is {ranks_per_node}", valid=[f"1 to {_MOST_RANKS_PER_NODE:,}"])
    machine = target.scheduler.machine()
    trial = target.trial
    on_each = ranks_per_node or (trial.world.ranks_per_node if trial else None) or _usual_ranks(target, machine)
    same_shape = trial is not None and trial.world.ranks_per_node == on_each
    device: DeviceName = trial.train.device if trial else device_of(target.study, machine)
    threads = trial.world.threads_per_rank if trial and same_shape else target.study.launch.threads_per_rank
    threads = threads or machine.threads_for(on_each, device)
    precision: Precision = trial.train.precision if trial else "bf16" if machine.fast_bf16(device) else "fp32"
    limits = _QUICK_LIMITS if quick else _LIMITS
    shared = exchanges(trial, target.nodes * on_each) if trial else {}
    if shared:
        limits = limits | {"collectives": 2 * limits["collectives"]}
    return checks.CheckRequest(
        world=World(nodes=target.nodes, ranks_per_node=on_each, threads_per_rank=threads),
        device=device,
        precision=precision,
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
        exchanges=shared,
    )


def exchanges(trial: Trial, ranks: int) -> dict[checks.SplitGroup, tuple[checks.Operation, ...]]:
    """Operations in each kind of group when this many ranks train a trial whose model they share.

    They are those of `engines.shared.splits` and `engines.shared.stages`; empty where ranks share no model, or cannot.
    """
    parallel = trial.parallel
    if parallel.ranks_per_model == 1 or ranks % parallel.ranks_per_model:
        return {}
    halves: tuple[checks.Operation, ...] = ("all_gather", "reduce_scatter")
    of_groups: dict[checks.SplitGroup, tuple[checks.Operation, ...]] = {
        "replicas": halves if of_engine(trial.train.engine).shards(trial.train) else ("all_reduce",),
        "sequence": ("all_to_all",),
        "tensor": halves if parallel.shard_norms else ("all_reduce",),
        "pipeline": ("send_recv",),
    }
    replicas = RankLayout.of(ranks, parallel).replicas
    sizes = {"replicas": replicas} | {axis: getattr(parallel, axis) for axis in ("sequence", "tensor", "pipeline")}
    return {name: operations for name, operations in of_groups.items() if sizes[name] > 1}


def _usual_ranks(target: CheckTarget, machine: Machine) -> int:
    """Ranks per host where nothing says how many: one on each GPU, within the hostfile's slots.

    Without GPUs as many as the slots, else one on each of several hosts, and two on a single one, so that there is
    something to exchange.
    """
    slots = target.scheduler.slots()
    if machine.gpus:
        return min(len(machine.gpus), slots or len(machine.gpus))
    return slots or (1 if target.nodes > 1 else min(2, machine.cores))


_START_SECONDS = 180.0
"""Time for ssh, and for imports from a slow file server on many hosts at once."""
_LOG_CHARACTERS = 4000
_ANY_FOLDER = Path("/RESULTS/checks/CHECK")
"""Stands for a check's folder where only the form of a command matters."""

_STOPPED = {"hang": "no rank recorded anything for {limit:g} s", "timeout": "the ranks were not done after {limit:g} s"}


class CheckInterrupted(VitscaleError):
    """Ctrl-C: all ranks are ended, and nothing is stored."""

    exit_code = 130


def run_check(
    target: CheckTarget, wanted: checks.CheckRequest, results: Path | None, say: Callable[[str], None]
) -> tuple[checks.CheckRecord, Path]:
    """Does a check; returns its record and the file where it is stored.

    Args:
        target: the hosts.
        wanted: what every rank is to do.
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
    launch = target.study.launch
    # Any refusal comes before anything is written.
    launch_plan(target.scheduler, launch, target.launcher, wanted.world, _ANY_FOLDER, RANK_MODULE)
    started_unix_seconds = time.time()
    check_id = f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime(started_unix_seconds))}-{secrets.token_hex(3)}"
    stored = checks.check_folder(results).absolute()
    folder = stored / check_id
    began = time.monotonic()
    try:
        folder.mkdir(parents=True)
        write_record(folder / "request.json", wanted.model_dump_json())
    except OSError as error:
        what = f"{shown(str(stored))} cannot be written: {error.strerror or error}"
        raise StoreError(what, next_step="Give a folder you may write to with -o") from None
    try:
        answers = ask(target.hosts, folder / "request.json")
        gone = {answer.name for answer in answers if answer.seconds is None or answer.sees_folder is False}
        if gone:
            target = target.without(gone)
            world = wanted.world.model_copy(update={"nodes": max(1, target.nodes)})
            # The ranks that are left make other groups, or none.
            shared = exchanges(wanted.trial, world.size) if wanted.trial is not None else {}
            wanted = wanted.model_copy(update={"world": world, "exchanges": shared})
            write_record(folder / "request.json", wanted.model_dump_json())
        end = _End("not started", "no host is left to start one on")
        if not (target.hosts == () and gone):
            long = "some seconds" if wanted.sweep.sizes_bytes == _QUICK_SIZES else "a minute or more"
            say(f"Checking {_whom(wanted)}; this takes {long}.")
            end = _measure(target, wanted, folder)
        ranks = checks.read_checked_ranks(folder, wanted.world.size)
        whole = len(ranks) == wanted.world.size and all(rank.ended for rank in ranks)
        record = checks.CheckRecord.model_validate(
            {
                "id": check_id,
                "started_unix_seconds": max(0.0, started_unix_seconds),
                "wall_seconds": time.monotonic() - began,
                "request": wanted,
                "launcher": target.launcher,
                "scheduler": type(target.scheduler).__name__,
                "hosts": answers,
                "ranks": ranks,
                "fits": fits(ranks),
                "loader_need": None if target.trial is None else loader_need(target.trial, ranks, results),
                "ending": end.how,
                "ending_reason": "" if whole else end.reason,
                "guilty_rank": None if whole else end.rank,
                "log": "" if whole else printable(log_tail(folder / "log.txt"))[-_LOG_CHARACTERS:],
                "vitscale": program.identity(),
            }
        )
        return record, checks.write_check(stored, record)
    except KeyboardInterrupt:
        raise CheckInterrupted("interrupted: all ranks are ended, and nothing is stored") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True)
class _End:
    """How the ranks' processes ended, and why where not all of them finished."""

    how: str
    reason: str = ""
    rank: int | None = None


def _measure(target: CheckTarget, wanted: checks.CheckRequest, folder: Path) -> _End:
    """Starts the ranks, as forks where their launcher allows it, and waits for their end."""
    launch = target.study.launch
    spawn = launch_plan(target.scheduler, launch, target.launcher, wanted.world, folder, RANK_MODULE)
    try:
        with PreparedProcesses() as prepared:
            variables, ready = ranks_variables(wanted.world), partial(prepared.ready, "check", None)
            ending = watch(
                start_ranks(spawn, target.scheduler, launch, environment=variables, ready=ready),
                folder,
                hang_seconds=max(_START_SECONDS, *wanted.limits.values()) + 30.0,
                timeout_seconds=wanted.longest_seconds + _START_SECONDS,
            )
    except OSError as error:
        raise RequestError(f"the ranks cannot be started: {error.strerror or error}") from None
    how = "ended" if ending.stopped is None else "stopped"
    if ending.stopped in _STOPPED:
        return _End(how, _STOPPED[ending.stopped].format(limit=ending.limit_seconds or 0.0))
    # As for a run, launchers and heartbeats tell which rank was lost first, and how.
    ranks = checks.read_checked_ranks(folder, wanted.world.size)
    away = tuple(host.name for host in target.hosts if not is_this_machine(host.name))
    outcome = outcome_of(RunEvidence(ending, ranks, wanted.world.size, folder, elsewhere=away))
    return _End(how, outcome.reason, outcome.rank)


def _whom(wanted: checks.CheckRequest) -> str:
    world = wanted.world
    hosts = f"{world.nodes} hosts, " if world.nodes > 1 else ""
    return f"{hosts}{world.size} rank{'s' if world.size > 1 else ''}"


def loader_need(trial: Trial, ranks: Sequence[checks.CheckedRank], results: Path | None) -> checks.LoaderNeed | None:
    """Images per second that one rank needs; None where neither a run nor the model's FLOPs tell."""
    return (_of_a_run(trial, results) if results is not None else None) or _by_arithmetic(trial, ranks)


def _of_a_run(trial: Trial, results: Path) -> checks.LoaderNeed | None:
    """The rate of the fastest completed run with the same model, precision, micro-batch and kind of device."""
    try:
        stored = store.load(results)
    except StoreError:
        return None  # nothing has been run there yet
    best = 0.0
    for run in stored.runs:
        other = run.header.trial
        alike = other.model == trial.model and all(
            getattr(other.train, name) == getattr(trial.train, name) for name in ("precision", "device", "micro_batch")
        )
        if alike and run.outcome.kind == "completed" and (reached := run_figures(run).images_per_second):
            best = max(best, reached / other.world.size)
    if best <= 0.0:
        return None
    described = f"as a stored run in {results} did"
    if stored.unread:
        described += f"; other finished runs are missing there: {stored.unread[0].reason}"
    return checks.LoaderNeed(images_per_second=best, source="run", described=described)


def _by_arithmetic(trial: Trial, ranks: Sequence[checks.CheckedRank]) -> checks.LoaderNeed | None:
    rates = [rank.matmul.flops_per_second for rank in ranks if rank.matmul is not None]
    flops = flops_per_image(trial)
    if not rates or isinstance(flops, str) or flops <= 0:
        return None
    return checks.LoaderNeed(
        images_per_second=statistics.median(rates) / flops,
        source="arithmetic",
        described="the matrix-multiply rate measured here / the model's FLOPs, which no training quite reaches",
    )
