"""Reads a plain table of measured times: one row per measurement, a GPU count and a time or a rate in it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from vitscale.errors import RequestError, shown
from vitscale.importers import contents
from vitscale.importers.contents import LogContents, LogRank, LogRun, Options, Problems, Setting
from vitscale.importers.headings import OF_A_RUN, OF_A_SETTING, OWN, SPEEDS, Heading
from vitscale.importers.records import an_epoch, epoch_line
from vitscale.importers.tables import Header, Row, headers, rows, setting_of, text_of
from vitscale.store.records import EpochLine, StepLine
from vitscale.store.results import ImportedFile

_KNOWN = (*OF_A_SETTING, "run", "step", *SPEEDS)
_MOST_ROWS = 5_000_000


_ONE_HOST = "on how many hosts the GPUs were is not told (a column nodes): one is assumed"


@dataclass
class _Run:
    setting: Setting
    name: str
    steps: list[tuple[float, int]] = field(default_factory=list)
    """(Seconds, images of one rank) of each step; 0 images: unknown."""
    epochs: list[float] = field(default_factory=list)


def read(paths: Sequence[Path], options: Options) -> LogContents:
    """The runs of one or several tables. Rows of one `run` are its steps or epochs; without that column each is a run.

    Raises:
        RequestError: a file has no GPU count, or no time.
        StoreError: a file cannot be read.
    """
    runs: dict[tuple[Setting, str], _Run] = {}
    problems: list[str] = []
    notes: dict[str, None] = {}
    for path in paths:
        told = Problems(path.name)
        seen: dict[tuple[str, ...], int] = {}
        for head in headers(path, options.cells):
            if not set(head.columns) & set(SPEEDS):
                raise RequestError(f"{shown(path.name)} has no column of times", valid=SPEEDS)
            naming = _Naming(path.name, head)
            for row in rows(path, head, ("gpus",), told):
                try:
                    setting = setting_of(row, options)
                    if device := text_of(row["gpu"]):
                        setting = replace(setting, devices=(device,))
                    step, epoch = _times(row, setting)
                except (ValueError, RequestError) as error:
                    told.line(row.line, str(error))
                    continue
                if not row["run"] and (first := seen.setdefault(tuple(row.cells.values()), row.line)) != row.line:
                    told.line(row.line, f"the same as line {first}; a column run tells repeats apart", "duplicate")
                    continue
                if setting.gpus > 1 and not (row["nodes"] or row["gpus_per_node"] or setting.layout):
                    notes[_ONE_HOST] = None
                name = text_of(row["run"]) or naming.name(row, setting)
                if len(runs) >= _MOST_ROWS:
                    raise RequestError(f"more than {_MOST_ROWS:,} runs", next_step="Import fewer at a time")
                run = runs.setdefault((setting, name), _Run(setting, name))
                run.steps += [] if step is None else [step]
                run.epochs += [] if epoch is None else [epoch]
            notes |= dict.fromkeys((*head.notes(_KNOWN), *naming.notes()))
        problems += told.told()
    files = tuple(contents.identified(path) for path in paths)
    return LogContents(tuple(_found(run, options, files) for run in runs.values()), tuple(notes), tuple(problems))


class _Naming:
    """Tells the runs of a table without a column `run` apart: each row is one, unless a column counts its parts."""

    def __init__(self, file: str, head: Header) -> None:
        self._file, self._head = file, head
        self._parts = [column for column in OF_A_RUN if column in head.columns]
        self._times: dict[tuple[Setting, tuple[str, ...]], int] = {}
        self._first: dict[Setting, Row] = {}
        self._unknown = [own for own in head.headings if own.column and own.column not in OWN]
        self._differ: dict[Heading, None] = {}

    def name(self, row: Row, setting: Setting) -> str:
        """The name of a row's run: the same step of a setting again is of another one."""
        if self._parts:
            part = setting, tuple([row[column] for column in self._parts])
            self._times[part] = self._times.get(part, 0) + 1
            return f"{self._file}:{self._times[part]}"
        first = self._first.setdefault(setting, row)
        self._differ |= dict.fromkeys(own for own in self._unknown if row[own.column] != first[own.column])
        return f"{self._file}:{row.line}"

    def notes(self) -> Iterable[str]:
        """What rows of one setting differ in that may be no repeats."""
        return self._head.doubts(tuple(self._differ))


def _times(row: Row, setting: Setting) -> tuple[tuple[float, int] | None, float | None]:
    """(Seconds and images of a step, seconds of an epoch), each None where the row does not tell; it must tell one."""
    images = (setting.micro_batch or 0) * setting.grad_accum
    step = (contents.parse_duration(row["step_seconds"]), images) if row["step_seconds"] else None
    epoch = contents.parse_duration(row["epoch_seconds"]) if row["epoch_seconds"] else None
    if step is None and (all_of := row["images_per_second"] or row["images_per_second_per_gpu"]):
        rate = contents.parse_seconds(all_of)  # positive and finite, as a time
        rate *= 1 if row["images_per_second"] else setting.gpus
        # If the batch is not told, a step stands for one image per GPU: the rate is right whatever the batch was.
        step = (setting.gpus * max(1, images) / rate, max(1, images))
    if step is None and epoch is None:
        raise ValueError(f"none of {', '.join(SPEEDS)} in it")
    return step, epoch


def _found(run: _Run, options: Options, files: tuple[ImportedFile, ...]) -> LogRun:
    setting = run.setting
    rank = LogRank(
        0,
        device=setting.devices[0] if setting.devices else None,
        steps=tuple(_steps(run)),
        epochs=tuple(_epochs(run, options)),
    )
    return LogRun(setting, run.name, files, (rank,), of_the_run=True)


def _steps(run: _Run) -> Iterable[StepLine]:
    for number, (seconds, images) in enumerate(run.steps):
        yield StepLine(step=number, epoch=0, seconds=seconds, images=images, loss=None, warmup=False)


def _epochs(run: _Run, options: Options) -> Iterable[EpochLine]:
    sizes = an_epoch(run.setting, options)
    for number, seconds in enumerate(run.epochs):
        yield epoch_line(number, seconds, sizes)
