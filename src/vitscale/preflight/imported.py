"""A check of the network made from other tools' measurements (`importers.links`); `predict` uses it like any other."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from vitscale.base import program
from vitscale.errors import StoreError, shown
from vitscale.importers.contents import LinkFormat
from vitscale.importers.links import MeasuredLink, read_nccl_tests, read_perftest
from vitscale.preflight.fit import fits
from vitscale.store import checks, refuse_links
from vitscale.store.checks import (
    CheckedRank,
    CheckGroup,
    CheckRecord,
    CheckRequest,
    CollectiveLine,
    HostAnswer,
    SweepPlan,
)
from vitscale.trial.trial import World, world_of_hosts

_READERS = {"nccl-tests": read_nccl_tests, "perftest": read_perftest}
_LONGEST_DESCRIPTION = 200
_ALONE = World(ranks_per_node=1, threads_per_rank=1)


def import_links(
    paths: Sequence[Path], log_format: LinkFormat, results: Path
) -> tuple[CheckRecord, Path, tuple[str, ...]]:
    """(the check, its file in the results folder, what could not be used); all files together make one check.

    Raises:
        RequestError: a file lacks what only it can tell.
        StoreError: a file cannot be read, nothing in them can be used, or the folder cannot be written.
    """
    refuse_links(results)
    links, problems = _READERS[log_format](paths)
    record, left_out = _record(links, log_format)
    if not record.fits:
        why = f": {'; '.join(problems)}" if problems else ""
        what = f"nothing in {shown(', '.join(path.name for path in paths))} can be used as {log_format}{why}"
        raise StoreError(what, next_step="Import the whole output of the test, its table of sizes and times included")
    return record, checks.write_check(checks.check_folder(results), record), (*problems, *left_out)


def _record(links: Sequence[MeasuredLink], log_format: LinkFormat) -> tuple[CheckRecord, list[str]]:
    worlds = [(_world(link), link) for link in links]
    largest = max((world for world, _ in worlds), key=lambda own: (own.nodes > 1, own.size), default=_ALONE)
    merged: dict[tuple[CheckGroup, str, int, int], CollectiveLine] = {}
    left_out = []
    for world, link in worlds:
        group = _group(world)
        if group == "all ranks" and world != largest:
            left_out.append(
                f"{link.file.name}: {link.operation} on {world.size} ranks is left out beside {largest.size}"
            )
            continue
        for size, seconds in link.seconds.items():
            merged[group, link.operation, world.size, size] = CollectiveLine(
                group=group,
                operation=link.operation,
                ranks=world.size,
                size_bytes=size,
                calls=1,
                seconds=tuple(seconds),
            )
    ranks = (CheckedRank(rank=0, collectives=tuple(merged.values()), ended=True),)
    now = time.time()
    digest = hashlib.sha256("".join(link.file.sha256 for link in links).encode()).hexdigest()[:6]
    names = ", ".join(dict.fromkeys(link.file.name for link in links))
    record = CheckRecord(
        id=f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime(now))}-{digest}",
        started_unix_seconds=now,
        wall_seconds=0.0,
        request=CheckRequest(
            world=largest,
            device="cuda",
            precision="fp32",
            sweep=SweepPlan(sizes_bytes=(), longest_seconds=1.0, seconds_per_size=1.0),
            compute_repeats=1,
            compute_seconds=1.0,
            loader_seconds=1.0,
            limits={},
        ),
        launcher=log_format,
        scheduler="unknown",
        hosts=tuple(
            HostAnswer(name=name, address=None, seconds=None)
            for name in dict.fromkeys(host for link in links for host in link.hosts)
        ),
        ranks=ranks,
        fits=fits(ranks),
        loader_need=None,
        ending="ended",
        imported=f"{log_format} in {names}"[:_LONGEST_DESCRIPTION],
        vitscale=program.identity(),
    )
    return record, left_out


def _world(link: MeasuredLink) -> World:
    """The world of a link's ranks; the host with most ranks decides on the ranks per node."""
    counts = Counter(link.hosts)
    most = max(counts.values())
    return world_of_hosts(len(link.hosts), most, 1)


def _group(world: World) -> CheckGroup:
    if world.nodes == 1:
        return "inside nodes"
    return "across nodes" if world.ranks_per_node == 1 else "all ranks"
