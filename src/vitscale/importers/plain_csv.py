"""Reads a plain table of measured times: one row per measurement, a GPU count and a time or a rate in it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vitscale.errors import RequestError, explain, shown
from vitscale.importers import numbers
from vitscale.importers.dataset_sizes import an_epoch
from vitscale.importers.epochs import text_of
from vitscale.importers.files import identified
from vitscale.importers.findings import Findings, FoundRank, FoundRun, Problems, Setting, listed
from vitscale.importers.layouts import nodes_of
from vitscale.importers.options import MOST_GPUS, Options, precision
from vitscale.importers.tables import Row, header, rows
from vitscale.record import EpochLine, ImportedFile, StepLine

TIMES = ("step_seconds", "epoch_seconds", "images_per_second")
_KNOWN = (
    *("gpus", "nodes", "layout", "micro_batch", "grad_accum", "fraction", "dataset", "cluster", "gpu", "run", "series"),
    *("engine", "zero_stage", "precision", *TIMES),
)
_MOST_ROWS = 5_000_000


@dataclass
class _Run:
    setting: Setting
    name: str
    steps: list[tuple[float, int]] = field(default_factory=list)
    """Seconds, and images of one rank; 0: unknown."""
    epochs: list[float] = field(default_factory=list)


def read(paths: Sequence[Path], options: Options) -> Findings:
    """The runs of one or several tables. Rows of one `run` are its steps or epochs; without that column each is a run.

    Raises:
        RequestError: a file has no GPU count, or no time.
        StoreError: a file cannot be read.
    """
    runs: dict[tuple[Setting, str], _Run] = {}
    problems: list[str] = []
    notes: dict[str, None] = {}
    for path in paths:
        columns = header(path)
        if not set(columns) & set(TIMES):
            raise RequestError(explain(f"{shown(path.name)} has no column of times", valid=TIMES))
        told = Problems(path.name)
        for row in rows(path, ("gpus",), told):
            try:
                setting = _setting(row, options)
                step, epoch = _times(row, setting)
            except (ValueError, RequestError) as error:
                told.line(row.line, str(error))
                continue
            name = text_of(row["run"]) or f"{path.name}:{row.line}"
            if len(runs) >= _MOST_ROWS:
                raise RequestError(explain(f"more than {_MOST_ROWS:,} runs", next_step="Import fewer at a time"))
            run = runs.setdefault((setting, name), _Run(setting, name))
            run.steps += [] if step is None else [step]
            run.epochs += [] if epoch is None else [epoch]
        if ignored := [column for column in columns if column and column not in _KNOWN]:
            notes[f"columns that mean nothing here are ignored: {listed([text_of(one) for one in ignored])}"] = None
        problems += told.told()
    files = tuple(identified(path) for path in paths)
    return Findings(tuple(_found(run, options, files) for run in runs.values()), tuple(notes), tuple(problems))


def _setting(row: Row, options: Options) -> Setting:
    gpus = numbers.whole(row["gpus"], 1, MOST_GPUS)
    layout, batch, device = text_of(row["layout"]), row["micro_batch"], text_of(row["gpu"])
    nodes = numbers.whole(row["nodes"], 1, gpus) if row["nodes"] else nodes_of(layout, gpus) or 1
    if gpus % nodes:
        raise ValueError(f"{gpus} GPUs do not share out over {nodes} nodes")
    return Setting(
        gpus=gpus,
        nodes=nodes,
        micro_batch=numbers.whole(batch, 1, 1_000_000) if batch else options.micro_batch,
        grad_accum=numbers.whole(row["grad_accum"] or "1", 1, 1_000_000),
        fraction=numbers.share(row["fraction"] or "1.0"),
        cluster=text_of(row["cluster"]),
        layout=layout,
        dataset=text_of(row["dataset"]),
        series=text_of(row["series"]),
        engine=text_of(row["engine"]),
        zero_stage=numbers.whole(row["zero_stage"], 0, 3) if row["zero_stage"] else None,
        precision=precision(row["precision"].lower()) if row["precision"] else None,
        devices=() if device is None else (device,),
    )


def _times(row: Row, setting: Setting) -> tuple[tuple[float, int] | None, float | None]:
    """Seconds and images of a step, and seconds of an epoch, as far as the row tells; at least one."""
    images = (setting.micro_batch or 0) * setting.grad_accum
    step = (numbers.seconds(row["step_seconds"]), images) if row["step_seconds"] else None
    epoch = numbers.seconds(row["epoch_seconds"]) if row["epoch_seconds"] else None
    if step is None and row["images_per_second"]:
        rate = numbers.seconds(row["images_per_second"])  # positive and finite, as a time
        # Where the batch is not told, a step stands for one image on each GPU: the rate is right whatever it was.
        step = (setting.gpus * max(1, images) / rate, max(1, images))
    if step is None and epoch is None:
        raise ValueError(f"none of {', '.join(TIMES)} in it")
    return step, epoch


def _found(run: _Run, options: Options, files: tuple[ImportedFile, ...]) -> FoundRun:
    setting = run.setting
    rank = FoundRank(
        0,
        device=setting.devices[0] if setting.devices else None,
        steps=tuple(_steps(run)),
        epochs=tuple(_epochs(run, options)),
    )
    return FoundRun(setting, run.name, files, (rank,), of_the_run=True)


def _steps(run: _Run) -> Iterable[StepLine]:
    for number, (seconds, images) in enumerate(run.steps):
        yield StepLine(step=number, epoch=0, seconds=seconds, images=images, loss=None, warmup=False)


def _epochs(run: _Run, options: Options) -> Iterable[EpochLine]:
    steps, images = an_epoch(run.setting, options)
    for number, seconds in enumerate(run.epochs):
        yield EpochLine(
            epoch=number,
            steps=steps,
            images=images,
            seconds=seconds,
            complete=True,
            train_loss=None,
            train_accuracy=None,
            held_out_loss=None,
            held_out_accuracy=None,
            peak_bytes=None,
        )
