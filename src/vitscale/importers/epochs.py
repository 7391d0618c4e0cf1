"""Reads a table of epochs: one row per run, epoch and rank, with the seconds that rank took."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from vitscale.errors import RequestError, StoreError
from vitscale.importers import contents
from vitscale.importers.contents import LogContents, LogRank, LogRun, Options, Problems, Setting
from vitscale.importers.headings import OF_A_SETTING
from vitscale.importers.records import an_epoch, epoch_line, unknown_layouts
from vitscale.importers.tables import Header, Row, readable_headers, rows, setting_of, text_of
from vitscale.present.units import listed
from vitscale.store.results import ImportedFile

REQUIRED = ("gpus", "epoch_seconds")
_KNOWN = (*OF_A_SETTING, "run", "epoch", "rank", "epoch_seconds", "loss", "accuracy")
_MOST_ROWS = 5_000_000
_PARTS = {"host", "hostname", "node", "gpu", "device", "worker", "process", "rank"}
"""Words of columns by which the rows of one epoch may be of one run."""


class _Row(NamedTuple):
    """One row's own values."""

    seconds: float
    loss: float | None
    accuracy: float | None
    device: str | None


@dataclass
class _Run:
    """One run while it is read; `rows` maps (rank, epoch) to a row."""

    setting: Setting
    name: str
    by_rank: bool
    """Whether its file says which rank each row is of."""
    rows: dict[tuple[int, int], _Row] = field(default_factory=dict)
    devices: dict[int, str] = field(default_factory=dict)
    """Rank to its GPU, as the rank's first row tells it."""
    next_epoch: Counter[int] = field(default_factory=Counter)


def read(paths: Sequence[Path], options: Options) -> LogContents:
    """The runs of one or several tables; a run may continue in another file.

    Raises:
        RequestError: a required column is missing.
        StoreError: a file cannot be read, or has too many rows.
    """
    runs: dict[tuple[Setting, str], _Run] = {}
    problems: list[str] = []
    notes: dict[str, None] = {}
    number_of: Counter[Setting] = Counter()
    begins: dict[tuple[Setting, int], int] = {}
    kept = 0
    for number, path in enumerate(paths):
        told = Problems(path.name)
        before: Mapping[str, str] = {}
        for head in readable_headers(path, options.of_file(number)):
            unknown = [own.text.lower().replace("_", " ") for own in head.headings if own.column not in _KNOWN]
            alone = _PARTS.isdisjoint(" ".join(unknown).split())
            for row in rows(path, head, REQUIRED, told):
                try:
                    setting, values = setting_of(row, options), _values(row)
                    rank = contents.parse_whole(row["rank"] or "0", 0, setting.gpus - 1)
                    epoch = contents.parse_whole(row["epoch"], 0, 10_000_000) if row["epoch"] else None
                except (ValueError, RequestError) as error:
                    told.line(row.line, str(error))
                    continue
                name = text_of(row["run"])
                if name is None and epoch is not None and alone:
                    if row.cells == before:
                        told.line(row.line, "the same as the line before", "duplicate")
                        continue
                    before = row.cells
                    held = runs.get((setting, str(number_of[setting] + 1)))
                    # The setting's first epoch again begins another run; any other again contradicts this one.
                    if begins.setdefault((setting, rank), epoch) == epoch and held and (rank, epoch) in held.rows:
                        number_of[setting] += 1
                name = name or str(number_of[setting] + 1)
                run = _home(runs, _Run(setting, name, "rank" in head.columns), rank, values.device)
                _add(run, rank, epoch, values, row.line, told)
                kept += 1
                if kept > _MOST_ROWS:
                    raise StoreError(f"more than {_MOST_ROWS:,} rows", next_step="Import fewer files at a time")
            notes |= dict.fromkeys(_notes_on(head))
        problems += told.told()
    files = tuple(contents.identified(path) for path in paths)
    first = 0 if any(epoch == 0 for run in runs.values() for _, epoch in run.rows) else 1
    found_runs = tuple(_found(run, first, options, files) for run in runs.values())
    notes |= dict.fromkeys(unknown_layouts(found_runs))
    return LogContents(found_runs, tuple(notes), (*problems, *_gaps(found_runs, first)))


def _values(row: Row) -> _Row:
    accuracy = contents.parse_finite(row["accuracy"])
    if accuracy is not None and not 0 <= accuracy <= 1:
        raise ValueError(f"an accuracy of {accuracy:g} is no share from 0 to 1")
    return _Row(
        contents.parse_duration(row["epoch_seconds"]), contents.parse_finite(row["loss"]), accuracy, text_of(row["gpu"])
    )


def _home(runs: dict[tuple[Setting, str], _Run], own: _Run, rank: int, device: str | None) -> _Run:
    """The run that a row belongs to: that of its setting and name, unless this rank had another GPU there."""
    run = runs.setdefault((own.setting, own.name), own)
    if device is None or run.devices.setdefault(rank, device) == device:
        return run
    name = f"{own.name} on {device}"
    return runs.setdefault((own.setting, name), _Run(own.setting, name, own.by_rank))


def _add(run: _Run, rank: int, epoch: int | None, values: _Row, line: int, told: Problems) -> None:
    if epoch is None:  # without a column of epochs each row of a rank is its next epoch
        run.next_epoch[rank] += 1
        epoch = run.next_epoch[rank]
    before = run.rows.setdefault((rank, epoch), values)
    if before is values:
        return
    if before == values:
        told.line(line, f"epoch {epoch} of rank {rank} again", "duplicate")
    else:
        told.line(line, f"epoch {epoch} of rank {rank} again, with other values: the first count", "contradicting")


def _found(run: _Run, first: int, options: Options, files: tuple[ImportedFile, ...]) -> LogRun:
    sizes = an_epoch(run.setting, options)
    # Loss and accuracy are the run's: if only one rank tells them, they hold for all.
    said: dict[int, tuple[float | None, float | None]] = {}
    by_rank: dict[int, list[int]] = {}
    for rank, epoch in sorted(run.rows):
        by_rank.setdefault(rank, []).append(epoch)
        row = run.rows[rank, epoch]
        loss, accuracy = said.get(epoch, (None, None))
        said[epoch] = (row.loss if loss is None else loss, row.accuracy if accuracy is None else accuracy)
    ranks = tuple(
        LogRank(
            rank,
            device=next((run.rows[rank, e].device for e in epochs if run.rows[rank, e].device), None),
            epochs=tuple(
                epoch_line(
                    epoch - first,
                    run.rows[rank, epoch].seconds,
                    sizes,
                    train_loss=said[epoch][0],
                    train_accuracy=said[epoch][1],
                )
                for epoch in epochs
            ),
        )
        for rank, epochs in by_rank.items()
    )
    devices = tuple(sorted({rank.device for rank in ranks if rank.device}))
    return LogRun(replace(run.setting, devices=devices), run.name, files, ranks, of_the_run=not run.by_rank)


def _notes_on(head: Header) -> Iterable[str]:
    yield from head.notes(_KNOWN)
    if "rank" not in head.columns:
        yield "there is no column rank: each row is taken for the run's own time, that of its slowest rank"
    if "fraction" not in head.columns:
        yield "there is no column fraction: every epoch is taken for one of the whole dataset"


def _named(run: LogRun) -> str:
    setting = run.setting
    where = ", ".join(part for part in (setting.cluster, setting.layout, setting.dataset) if part)
    batch = f", micro-batch {setting.micro_batch}" if setting.micro_batch else ""
    return f"run {run.name} on {setting.gpus} GPUs ({where}{batch}, fraction {setting.fraction:g})"


def _gaps(runs: Iterable[LogRun], first: int) -> Iterable[str]:
    """Sentences on epochs missing between others, epochs that a rank lacks, and ranks without any row."""
    lacking, partial, absent = [], [], []
    for run in runs:
        name = _named(run)
        there = {line.epoch for rank in run.ranks for line in rank.epochs}
        if gaps := sorted(set(range(max(there))) - there):
            lacking.append(f"{name} (epoch {listed([gap + first for gap in gaps])})")
        for rank in run.ranks:
            if fewer := sorted(there - {line.epoch for line in rank.epochs}):
                partial.append(f"rank {rank.rank} of {name} (epoch {listed([epoch + first for epoch in fewer])})")
        if 1 < len(run.ranks) < run.setting.gpus:
            present = {rank.rank for rank in run.ranks}
            missing = [rank for rank in range(min(run.setting.gpus, 10_000)) if rank not in present]
            absent.append(f"{name} (rank {listed(missing)})")
    if lacking:
        yield f"epochs are missing in {listed(lacking)}"
    if partial:
        yield f"epochs that not every rank tells of are in no time: {listed(partial)}"
    if absent:
        yield f"ranks are missing in {listed(absent)}: their times, and perhaps the slowest, are not in these runs"
