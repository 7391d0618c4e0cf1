"""Runs a check: asks the hosts, starts ranks as for training, waits within limits, and reads what they left."""

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
from vitscale.errors import RequestError, StoreError, VitscaleError, printable, shown
from vitscale.preflight.asking import Where
from vitscale.preflight.fit import fits
from vitscale.preflight.reach import ask
from vitscale.runner.classify import outcome_of
from vitscale.runner.evidence import Evidence, log_tail
from vitscale.runner.one_run import ranks_variables, run_ranks
from vitscale.runner.starting import launch_plan, refuse_without_torch
from vitscale.schedulers.prepared import PreparedProcesses
from vitscale.store import write_whole
from vitscale.store.check_records import CheckedRank, CheckRecord, CheckRequest, LoaderNeed
from vitscale.store.checks import check_folder, read_checked_ranks, write_check
from vitscale.trial.trial import Trial

_START_SECONDS = 180.0
"""For ssh, and imports from a slow file server on many hosts at once."""
_LOG_CHARACTERS = 4000
_MODULE = "vitscale.worker.check"
_ANY_FOLDER = Path("/RESULTS/checks/CHECK")
"""Stands for a check's folder where only the form of a command matters."""

_STOPPED = {
    "hang": "no rank recorded anything for {limit:g} s",
    "timeout": "the ranks were not done after {limit:g} s",
}


class CheckInterrupted(VitscaleError):
    """Ctrl-C: all ranks are ended, nothing is stored."""

    exit_code = 130


def run_check(
    place: Where, wanted: CheckRequest, results: Path | None, say: Callable[[str], None]
) -> tuple[CheckRecord, Path]:
    """Measures, stores, and returns what was measured and where it is stored.

    Args:
        place: the hosts.
        wanted: what every rank is to do.
        results: the results folder; None: the user's own folder of checks.
        say: takes a line for whoever waits.

    Raises:
        RequestError: the ranks cannot be started like this, or the study's images are damaged.
        StoreError: the folder cannot be written.
        CheckInterrupted: on Ctrl-C; no process is left.
    """
    refuse_without_torch(place.scheduler)
    if place.trial is not None:
        # Decoded once and here: damage shows before anything starts.
        sources.prepare(place.trial.data.model_copy(update={"fraction": 1.0}))
    launch = place.study.launch
    # Refused, if at all, before anything is written.
    launch_plan(place.scheduler, launch, place.launcher, wanted.world, _ANY_FOLDER, _MODULE)
    started_unix_seconds = time.time()
    check_id = f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime(started_unix_seconds))}-{secrets.token_hex(3)}"
    checks = check_folder(results).absolute()
    folder = checks / check_id
    began = time.monotonic()
    try:
        folder.mkdir(parents=True)
        write_whole(folder / "request.json", wanted.model_dump_json())
    except OSError as error:
        raise StoreError(
            f"{shown(str(checks))} cannot be written: {error.strerror or error}",
            next_step="Give a folder you may write to with -o",
        ) from None
    try:
        answers = ask(place.hosts, folder / "request.json")
        gone = {answer.name for answer in answers if answer.seconds is None or answer.sees_folder is False}
        if gone:
            place = place.without(gone)
            wanted = wanted.model_copy(update={"world": wanted.world.model_copy(update={"nodes": max(1, place.nodes)})})
            write_whole(folder / "request.json", wanted.model_dump_json())
        end = _End("not started", "no host is left to start one on")
        if not (place.hosts == () and gone):
            say(f"Checking {_whom(wanted)}; this takes a minute or more.")
            end = _measure(place, wanted, folder)
        ranks = read_checked_ranks(folder, wanted.world.size)
        whole = len(ranks) == wanted.world.size and all(rank.ended for rank in ranks)
        record = CheckRecord.model_validate(
            {
                "id": check_id,
                "started_unix_seconds": max(0.0, started_unix_seconds),
                "wall_seconds": time.monotonic() - began,
                "request": wanted,
                "launcher": place.launcher,
                "scheduler": type(place.scheduler).__name__,
                "hosts": answers,
                "ranks": ranks,
                "fits": fits(ranks),
                "loader_need": None if place.trial is None else loader_need(place.trial, ranks, results),
                "ending": end.how,
                "ending_reason": "" if whole else end.reason,
                "guilty_rank": None if whole else end.rank,
                "log": "" if whole else printable(log_tail(folder / "log.txt"))[-_LOG_CHARACTERS:],
            }
        )
        return record, write_check(checks, record)
    except KeyboardInterrupt:
        raise CheckInterrupted("interrupted: all ranks are ended, and nothing is stored") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True)
class _End:
    """How the ranks' processes ended, and why where not all of them came to their end."""

    how: str
    reason: str = ""
    rank: int | None = None


def _measure(place: Where, wanted: CheckRequest, folder: Path) -> _End:
    """Starts the ranks, as forks where their launcher allows it, and waits for their end."""
    launch = place.study.launch
    spawn = launch_plan(place.scheduler, launch, place.launcher, wanted.world, folder, _MODULE)
    try:
        with PreparedProcesses() as prepared:
            ending = run_ranks(
                spawn,
                place.scheduler,
                launch,
                ranks_variables(wanted.world),
                hang_seconds=max(_START_SECONDS, *wanted.limits.values()) + 30.0,
                timeout_seconds=wanted.longest_seconds + _START_SECONDS,
                ready=partial(prepared.ready, "check", None),
            )
    except OSError as error:
        raise RequestError(f"the ranks cannot be started: {error.strerror or error}") from None
    how = "ended" if ending.stopped is None else "stopped"
    if ending.stopped in _STOPPED:
        return _End(how, _STOPPED[ending.stopped].format(limit=ending.limit_seconds or 0.0))
    # As of a run: launchers and heartbeats tell who was lost first, and how.
    ranks = read_checked_ranks(folder, wanted.world.size)
    outcome = outcome_of(Evidence(ending, ranks, wanted.world.size, folder))
    return _End(how, outcome.reason, outcome.rank)


def _whom(wanted: CheckRequest) -> str:
    world = wanted.world
    hosts = f"{world.nodes} hosts, " if world.nodes > 1 else ""
    return f"{hosts}{world.size} rank{'s' if world.size > 1 else ''}"


def loader_need(trial: Trial, ranks: Sequence[CheckedRank], results: Path | None) -> LoaderNeed | None:
    """Images per second of one rank; None where neither a run nor the model's FLOPs tell."""
    return (_of_a_run(trial, results) if results is not None else None) or _by_arithmetic(trial, ranks)


def _of_a_run(trial: Trial, results: Path) -> LoaderNeed | None:
    """The fastest completed run of the same model, precision and micro-batch on the same kind of device."""
    try:
        found = store.load(results)
    except StoreError:
        return None  # nothing has been run there yet
    best = 0.0
    for run in found.runs:
        other = run.header.trial
        alike = other.model == trial.model and all(
            getattr(other.train, name) == getattr(trial.train, name) for name in ("precision", "device", "micro_batch")
        )
        if alike and run.outcome.kind == "completed" and (reached := run_figures(run).images_per_second):
            best = max(best, reached / other.world.size)
    if best <= 0.0:
        return None
    return LoaderNeed(images_per_second=best, source="run", described=f"as a stored run in {results} did")


def _by_arithmetic(trial: Trial, ranks: Sequence[CheckedRank]) -> LoaderNeed | None:
    rates = [rank.matmul.flops_per_second for rank in ranks if rank.matmul is not None]
    flops = flops_per_image(trial)
    if not rates or isinstance(flops, str) or flops <= 0:
        return None
    return LoaderNeed(
        images_per_second=statistics.median(rates) / flops,
        source="arithmetic",
        described="the matrix-multiply rate measured here / the model's FLOPs, which no training quite reaches",
    )
