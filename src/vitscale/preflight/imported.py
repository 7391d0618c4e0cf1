"""A check of the network made from other tools' measurements (`importers.links`); `predict` uses it like any other."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

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

_READER_BY_FORMAT = {"nccl-tests": read_nccl_tests, "perftest": read_perftest}
_LONGEST_DESCRIPTION = 200
_NO_WORLD = World(ranks_per_node=1, threads_per_rank=1)


class ImportedCheck(NamedTuple):
    """A check made from other tools' measurements."""

    record: CheckRecord
    path: Path
    """Its file in the results folder."""
    problems: tuple[str, ...]
    """Sentences on what could not be used of the files."""


def import_links(paths: Sequence[Path], log_format: LinkFormat, results: Path) -> ImportedCheck:
    """Read other tools' measurements of links; all files together make one check, which is stored.

    Raises:
        RequestError: a file lacks a value that nothing else gives.
        StoreError: a file cannot be read, nothing in them can be used, or the folder cannot be written.
    """
    refuse_links(results)
    links, problems = _READER_BY_FORMAT[log_format](paths)
    selection = _selected_measurements(links)
    record = _check_record(selection, links, log_format)
    if not record.fits:
        reasons = f": {'; '.join(problems)}" if problems else ""
        raise StoreError(
            f"nothing in {shown(', '.join(path.name for path in paths))} can be used as {log_format}{reasons}",
            next_step="Import the whole output of the test, its table of sizes and times included",
        )
    path = checks.write_check(checks.check_folder(results), record)
    return ImportedCheck(record, path, (*problems, *selection.skipped))


class _Measurement(NamedTuple):
    """The subject of a measurement; of several with the same subject the last one counts."""

    group: CheckGroup
    operation: str
    ranks: int
    size_bytes: int


class _Selection(NamedTuple):
    """The measurements that make one check."""

    world: World
    """The largest of the measured worlds, which the check is of."""
    lines: tuple[CollectiveLine, ...]
    skipped: tuple[str, ...]
    """Sentences on the measurements that are left out."""


def _selected_measurements(links: Sequence[MeasuredLink]) -> _Selection:
    """Choose the measurements that make one check.

    Those among all ranks of smaller worlds are left out: a check has one number of ranks.
    """
    worlds = [_world_of_link(link) for link in links]
    largest_world = max(worlds, key=lambda world: (world.nodes > 1, world.size), default=_NO_WORLD)
    lines: dict[_Measurement, CollectiveLine] = {}
    skipped = []
    for world, link in zip(worlds, links, strict=True):
        group = _group_of_world(world)
        if group == "all ranks" and world != largest_world:
            skipped.append(
                f"{link.file.name}: {link.operation} on {world.size} ranks is left out beside {largest_world.size}"
            )
            continue
        for size_bytes, seconds in link.seconds.items():
            lines[_Measurement(group, link.operation, world.size, size_bytes)] = CollectiveLine(
                group=group,
                operation=link.operation,
                ranks=world.size,
                size_bytes=size_bytes,
                calls=1,
                seconds=tuple(seconds),
            )
    return _Selection(largest_world, tuple(lines.values()), tuple(skipped))


def _check_record(selection: _Selection, links: Sequence[MeasuredLink], log_format: LinkFormat) -> CheckRecord:
    """Return the check that the selected measurements of these links make."""
    ranks = (CheckedRank(rank=0, collectives=selection.lines, ended=True),)
    now = time.time()
    digest = hashlib.sha256("".join(link.file.sha256 for link in links).encode()).hexdigest()[:6]
    file_names = ", ".join(dict.fromkeys(link.file.name for link in links))
    hosts = dict.fromkeys(chain.from_iterable(link.hosts for link in links))
    return CheckRecord(
        id=f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime(now))}-{digest}",
        started_unix_seconds=now,
        wall_seconds=0.0,
        request=CheckRequest(
            world=selection.world,
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
        hosts=tuple(HostAnswer(name=name, address=None, seconds=None) for name in hosts),
        ranks=ranks,
        fits=fits(ranks),
        loader_need=None,
        ending="ended",
        imported=f"{log_format} in {file_names}"[:_LONGEST_DESCRIPTION],
        vitscale=program.identity(),
    )


def _world_of_link(link: MeasuredLink) -> World:
    """Return the world of a link's ranks; the host with most ranks decides on the ranks per node."""
    ranks_by_host = Counter(link.hosts)
    most_ranks = max(ranks_by_host.values())
    return world_of_hosts(len(link.hosts), most_ranks, 1)


def _group_of_world(world: World) -> CheckGroup:
    """Return the kind of group that the ranks of a measured world are."""
    if world.nodes == 1:
        return "inside nodes"
    return "across nodes" if world.ranks_per_node == 1 else "all ranks"
