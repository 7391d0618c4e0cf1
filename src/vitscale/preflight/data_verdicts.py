"""Does the loader keep up with the model, and is the disk fit to hold the results?"""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from vitscale.preflight.verdict import finding, hosts_of, ranks_named
from vitscale.present.document import Finding
from vitscale.present.units import listed, number, seconds, size
from vitscale.store.check_records import CheckRecord

_USUAL_SHARE = 0.3
"""Of the matrix-multiply rate that training reaches at least, as a rule: below it a loader is too slow for certain."""
_LITTLE_ROOM = 1 << 30
_NO_ROOM = 64 << 20
_SLOW_RECORD_SECONDS = 0.1
_LATE_SECONDS = 2.0


def slow_loader(record: CheckRecord) -> Iterable[Finding]:
    """A loader slower than the model."""
    rates = [rank.loader.images_per_second for rank in record.ranks if rank.loader is not None]
    need = record.loader_need
    if not rates or need is None or min(rates) >= need.images_per_second:
        return
    certain = need.source == "run" or min(rates) < _USUAL_SHARE * need.images_per_second
    workers = record.request.trial.data.workers if record.request.trial is not None else 0
    yield finding(
        "loader-slow",
        "warning" if certain else "note",
        f"the loader alone gives a rank {number(min(rates))} images/s, and the model "
        f"{'takes' if need.source == 'run' else 'may take up to'} {number(need.images_per_second)} "
        f"({need.described})" + (": training waits for data" if certain else ""),
        f"Set data.workers higher (it is {workers})" + ("" if certain else " if training shows data wait"),
    )


def full_disk(record: CheckRecord) -> Iterable[Finding]:
    """Little room, or none."""
    free = [rank.disk.free_bytes for rank in record.ranks if rank.disk is not None]
    if free and min(free) < _LITTLE_ROOM:
        yield finding(
            "little-room" if min(free) >= _NO_ROOM else "disk-full",
            "warning" if min(free) >= _NO_ROOM else "error",
            f"the disk of the results has {size(min(free))} left",
            "Free space, or give a folder on another disk with -o",
        )


def slow_disk(record: CheckRecord) -> Iterable[Finding]:
    """Records that take long to be safe."""
    times = [statistics.median(rank.disk.record_seconds) for rank in record.ranks if rank.disk is not None]
    if times and max(times) > _SLOW_RECORD_SECONDS:
        yield finding(
            "slow-disk",
            "note",
            f"a record takes up to {seconds(max(times))} to be safe on the disk of the results",
            "Training does not wait for it; give a folder on a faster disk with -o if the end of runs drags on",
        )


def unshared_folder(record: CheckRecord) -> Iterable[Finding]:
    """Hosts that do not see what another writes, or see it late."""
    blind = [r for r in record.ranks if r.disk and r.disk.seen_seconds is None and "not seen" in r.disk.seen_reason]
    if blind:
        yield finding(
            "folder-not-shared",
            "error",
            f"{ranks_named([rank.rank for rank in blind])} ({listed(hosts_of(blind))}) did not see a file that rank 0 "
            "wrote to the results folder",
            "Give a folder on a file system that all hosts share with -o",
            tuple(rank.rank for rank in blind),
            hosts_of(blind),
        )
    late = [rank for rank in record.ranks if rank.disk and (rank.disk.seen_seconds or 0.0) > _LATE_SECONDS]
    if late:
        longest = max(rank.disk.seen_seconds or 0.0 for rank in late if rank.disk)
        yield finding(
            "late-folder",
            "note",
            f"a file that rank 0 wrote was seen on {listed(hosts_of(late))} only after {seconds(longest)}: the file "
            "system keeps what it knows of a folder for a while",
            "Keep measure.hang_seconds well above that",
            tuple(rank.rank for rank in late),
            hosts_of(late),
        )
