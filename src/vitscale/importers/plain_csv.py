"""Reads a plain table of measured times: one row per measurement, a GPU count and a time or a rate in it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean

from vitscale.errors import RequestError, shown
from vitscale.importers import contents
from vitscale.importers.contents import LogContents, LogRank, LogRun, Options, Problems, Setting
from vitscale.importers.headings import OF_A_RUN, OF_A_SETTING, OWN, RATES, SPEEDS, Heading
from vitscale.importers.records import an_epoch, epoch_line, nodes_of, step_line, unknown_layouts
from vitscale.importers.tables import Header, Row, readable_headers, rows, setting_of, text_of
from vitscale.present.units import counted
from vitscale.store.results import ImportedFile

_KNOWN = (*OF_A_SETTING, "run", "step", *SPEEDS)
_MOST_ROWS = 5_000_000


_MEANS_DIFFER = 0.05
"""Share by which a mean of rates may differ from what the mean step gives."""
_LEAST_OF_AN_EPOCH, _MOST_OF_AN_EPOCH = 0.8, 2.0
"""Share of an epoch's images that its time at the rate beside it must tell of."""
_ONE_HOST = "on how many hosts the GPUs{} were is not told (a column nodes): one is assumed"


@dataclass
class _Run:
    setting: Setting
    name: str
    steps: list[tuple[float, int]] = field(default_factory=list)
    """(Seconds, images of one rank) of each step; 0 images: unknown."""
    epochs: list[float] = field(default_factory=list)
    hosts_told: bool = False
    """Whether a row says on how many hosts it ran."""
    batches: list[float | None] = field(default_factory=list)
    """Images of one rank's step as the rate beside its time gives them, for each row; None: nothing gives them."""
    rates: list[tuple[float, float]] = field(default_factory=list)
    """(Images/s of all GPUs, seconds of an epoch) of each row whose steps follow from its rate."""


@dataclass(frozen=True)
class _Told:
    """The times of one row."""

    step: tuple[float, int] | None
    epoch: float | None
    batch: float | None
    """As in `_Run.batches`."""
    unlike: str = ""
    """How the rate contradicts the step's time and images."""
    micro: bool | None = None
    """Whether the rate fits a time of one micro-step alone; None: there is none beside a time, or no micro-steps."""
    rate: float | None = None
    """Images/s of all GPUs that the step follows from."""


def read(paths: Sequence[Path], options: Options) -> LogContents:
    """The runs of one or several tables. Rows of one `run` are its steps or epochs; without that column each is a run.

    Raises:
        RequestError: a file has no GPU count, or no time.
        StoreError: a file cannot be read.
    """
    runs: dict[tuple[Setting, str], _Run] = {}
    problems: list[str] = []
    notes: dict[str, None] = {}
    for number, path in enumerate(paths):
        told = Problems(path.name)
        seen: dict[tuple[str, ...], int] = {}
        unlike: list[tuple[int, str]] = []
        micro: list[tuple[int, str, _Run, int]] = []
        whole, hosts_told = False, set[bool]()
        for head in readable_headers(path, options.of_file(number)):
            if not set(head.columns) & set(SPEEDS):
                raise RequestError(f"{shown(path.name)} has no column of times{head.unit_lacking}", valid=SPEEDS)
            naming, falling = _Naming(path.name, head), _Rates(head, options)
            for row in rows(path, head, ("gpus",), told):
                try:
                    setting = setting_of(row, options)
                    if device := text_of(row["gpu"]):
                        setting = replace(setting, devices=(device,))
                    times = _times(row, setting)
                except (ValueError, RequestError) as error:
                    told.line(row.line, str(error))
                    continue
                if not row["run"] and (first := seen.setdefault(tuple(row.cells.values()), row.line)) != row.line:
                    told.line(row.line, f"the same as line {first}; a column run tells repeats apart", "duplicate")
                    continue
                if setting.gpus > 1:
                    hosts_told.add(bool(row["nodes"] or row["gpus_per_node"] or setting.layout))
                name = text_of(row["run"]) or naming.name(row, setting)
                if len(runs) >= _MOST_ROWS:
                    raise RequestError(f"more than {_MOST_ROWS:,} runs", next_step="Import fewer at a time")
                falling.add(setting, row)
                run = runs.setdefault((setting, name), _Run(setting, name))
                run.hosts_told = run.hosts_told or bool(row["nodes"] or row["gpus_per_node"])
                run.steps += [] if times.step is None else [times.step]
                run.epochs += [] if times.epoch is None else [times.epoch]
                run.batches.append(times.batch)
                run.rates += [] if times.rate is None or times.epoch is None else [(times.rate, times.epoch)]
                whole = whole or times.micro is False
                if times.micro:
                    micro.append((row.line, times.unlike, run, len(run.steps) - 1))
                elif times.unlike:
                    unlike.append((row.line, times.unlike))
            falling.refuse_unclear(path)
            notes |= dict.fromkeys((*head.notes(_KNOWN), *naming.notes()))
        problems += told.told()
        if False in hosts_told:
            rows_without_host = " of some rows" if True in hosts_told else ""
            notes[_ONE_HOST.format(rows_without_host)] = None
        # At as many GPUs as micro-steps it may as well be the rate of each GPU.
        if whole or all(run.setting.gpus == run.setting.grad_accum for *_, run, _ in micro):
            unlike = sorted([*unlike, *((line, but) for line, but, *_ in micro)])
        else:
            for *_, run, at in micro:
                seconds, images = run.steps[at]
                run.steps[at] = seconds * run.setting.grad_accum, images
            notes["images/s x step time is the batch of one micro-step: the time is taken x grad_accum"] = None
        if unlike:
            line, but = unlike[0]
            rows_of = f"{counted(len(unlike), 'row')} (line {line}: {but})"
            notes[f"images/s and step time contradict each other in {rows_of}: images/s is ignored"] = None
    files = tuple(contents.identified(path) for path in paths)
    if contradiction := _unlike_epochs(runs.values(), options):
        notes[contradiction] = None
    batches = _batches(runs.values())
    if batches:
        each = " or ".join(f"{batch:,}" for batch in sorted({*batches.values()}))
        notes[f"the micro-batch is not told and follows from images/s x step time: {each}"] = None
    completed = tuple(_log_run(run, batches.get(run.setting), options, files) for run in runs.values())
    notes |= dict.fromkeys(unknown_layouts(completed))
    return LogContents(completed, tuple(notes), tuple(problems))


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


_OF_ALL = re.compile(r"\b(?:global|aggregated?|total|all|overall|cluster|system)\b")


class _Rates:
    """Rates of a table that does not say whether they are each GPU's or those of all, by GPU count."""

    def __init__(self, head: Header, options: Options) -> None:
        headings = [heading for heading in head.headings if heading.column in RATES]
        own = headings[0] if len(headings) == 1 else None
        is_unclear = (
            own is not None
            and own.column == "images_per_second"
            and own.text.strip().lower() != own.column
            and not _OF_ALL.search(own.text.lower())
            and options.cells not in RATES
            and not {"step_seconds", "epoch_seconds"} & {*head.columns}  # which tell the batch of a step
        )
        self._heading = own if is_unclear else None
        self._rates: dict[Setting, dict[int, list[float]]] = {}

    def add(self, setting: Setting, row: Row) -> None:
        """Takes the rate of a row."""
        if self._heading is None or not row[self._heading.column]:
            return
        series = Setting(
            gpus=1,
            series=setting.series,
            engine=setting.engine,
            zero_stage=setting.zero_stage,
            precision=setting.precision,
            model=setting.model,
            cluster=setting.cluster,
            dataset=setting.dataset,
            devices=setting.devices,
        )
        rates = self._rates.setdefault(series, {})
        rates.setdefault(setting.gpus, []).append(contents.parse_seconds(row[self._heading.column]))

    def refuse_unclear(self, path: Path) -> None:
        """Refuses rates that fall in every series.

        Raises:
            RequestError: it says both readings, and the option for each.
        """
        curves = [rates for rates in self._rates.values() if len(rates) > 1]
        if self._heading is None or not curves or not all(map(_falls, curves)):
            return
        fewest, most = min(curves[0]), max(curves[0])
        first, last = fmean(curves[0][fewest]), fmean(curves[0][most])
        raise RequestError(
            f"{shown(self._heading.text)} of {shown(path.name)} falls as GPUs grow ({first:g} on {fewest}, {last:g} on "
            f"{most}), and it does not say whose it is: each GPU's (then {most} GPUs make {most * last:g} "
            f"together), or that of all (then each of {most} makes {last / most:g})",
            next_step="Say --cells images_per_second_per_gpu if it is each GPU's, or --cells images_per_second if it "
            "is that of all",
        )


_NO_MORE = 1.1
"""Ratio to the rate on the fewest GPUs that the rate of one GPU does not exceed on more; that of all soon does."""


def _falls(rates: Mapping[int, Sequence[float]]) -> bool:
    """Whether a rate is lower on the most GPUs than on the fewest, and nowhere between as that of all GPUs would be."""
    by_count = [fmean(rates[gpus]) for gpus in sorted(rates)]
    return by_count[-1] < by_count[0] and max(by_count) <= _NO_MORE * by_count[0]


def _times(row: Row, setting: Setting) -> _Told:
    """What a row tells of times; it must tell one."""
    images = (setting.micro_batch or 0) * setting.grad_accum
    seconds = contents.parse_duration(row["step_seconds"]) if row["step_seconds"] else None
    epoch = contents.parse_duration(row["epoch_seconds"]) if row["epoch_seconds"] else None
    rate = _rate(row, setting)
    if seconds is None and rate is None and epoch is None:
        raise ValueError(f"none of {', '.join(SPEEDS)} in it")
    if rate is None:
        return _Told(None if seconds is None else (seconds, images), epoch, None)
    if seconds is None:
        # If the batch is not told, a step stands for one image per GPU: the rate is right whatever the batch was.
        return _Told((setting.gpus * max(1, images) / rate, max(1, images)), epoch, None, rate=rate)
    batch = rate * seconds / setting.gpus
    whole, most = images or round(batch), batch * (_MEANS_DIFFER + _rounding(row["step_seconds"]))
    micro = abs(batch - images / setting.grad_accum) <= most if images and setting.grad_accum > 1 else None
    if abs(batch - whole) <= most:
        return _Told((seconds, whole), epoch, None if images else batch, micro=micro and False)
    but = f"and the batch is {images}" if images else "and that is no whole number"
    but = f"{rate:.6g}/s x {seconds:.6g} s are {batch:.4g} images a GPU, {but}"
    return _Told((seconds, images), epoch, None, but, micro)


def _rate(row: Row, setting: Setting) -> float | None:
    """Images/s of all GPUs; None where the row tells none."""
    told = next((name for name in SPEEDS if name.startswith("images") and row[name]), None)
    if told is None:
        return None
    rate = contents.parse_seconds(row[told])  # positive and finite, as a time
    if told == "images_per_second_per_node":
        if setting.gpus > 1 and not _tells_hosts(row, setting):
            raise ValueError("images/s of a node, and on how many nodes it ran is not told")
        return rate * setting.nodes
    return rate * setting.gpus if told == "images_per_second_per_gpu" else rate


def _tells_hosts(row: Row, setting: Setting) -> bool:
    told = setting.layout is not None and nodes_of(setting.layout, setting.gpus) is not None
    return bool(row["nodes"] or row["gpus_per_node"] or told)


def _rounding(seconds: str) -> float:
    """Largest share by which a time may be off for the digits it lacks; 0 for h:mm:ss and the like."""
    whole, _, decimals = seconds.partition(".")
    return 0.5 * 10 ** -len(decimals) / float(seconds) if f"{whole}{decimals}".isdecimal() else 0.0


def _batches(runs: Iterable[_Run]) -> dict[Setting, int]:
    """Micro-batches that nobody told and that follow from the rates, where all rows of a setting agree, on all GPU
    counts: on the images of each GPU, or on those of all together."""
    groups: dict[Setting, list[_Run]] = {}
    for run in runs:
        groups.setdefault(replace(run.setting, gpus=1, nodes=1, devices=()), []).append(run)
    told: dict[Setting, int] = {}
    for group in groups.values():
        rows_of = [(run.setting, batch) for run in group for batch in run.batches]
        known = [(setting, batch) for setting, batch in rows_of if batch is not None]
        of_each = {round(batch) for _, batch in known}
        of_all = {round(batch * setting.gpus) for setting, batch in known}
        if len(known) < len(rows_of) or min(len(of_each), len(of_all)) != 1:
            continue
        for setting, _ in known:
            whole, gpus = (of_each, 1) if len(of_each) == 1 else (of_all, setting.gpus)
            micro_batch, over = divmod(min(whole), gpus * setting.grad_accum)
            if micro_batch and not over:
                told[setting] = micro_batch
    return told


def _unlike_epochs(runs: Iterable[_Run], options: Options) -> str:
    """Takes the steps from runs whose rate contradicts the time of their epochs, from all if most do, and says so.

    An epoch's time may hold an evaluation, so that the rate tells of up to twice its images.
    """
    of_rates = [run for run in runs if run.rates]
    told = [
        (rate * seconds / images, run, rate, seconds, images)
        for run in of_rates
        if (images := an_epoch(run.setting, options)[1]) is not None
        for rate, seconds in run.rates
    ]
    unlike = [row for row in told if not _LEAST_OF_AN_EPOCH <= row[0] < _MOST_OF_AN_EPOCH]
    if not unlike:
        return ""
    each = all(_LEAST_OF_AN_EPOCH <= ratio * run.setting.gpus < _MOST_OF_AN_EPOCH for ratio, run, *_ in told)
    most = each or 2 * len(unlike) > len(told)
    for run in of_rates if most else [run for _, run, *_ in unlike]:
        run.steps.clear()
    _, run, rate, seconds, images = unlike[-1]
    gpus = run.setting.gpus
    note = (
        f"images/s and epoch time contradict each other in {counted(len(unlike), 'row')} (on {gpus} "
        f"GPUs {rate:.6g}/s x {seconds:.6g} s are {rate * seconds:,.0f} images, and an epoch has {images:,}): images/s "
        "is ignored"
    )
    if most:
        note += " in every row"
    if each:
        note += "; it is each GPU's, it seems: name its column images_per_second_per_gpu"
    return note


def _log_run(run: _Run, micro_batch: int | None, options: Options, files: tuple[ImportedFile, ...]) -> LogRun:
    """The run of some rows; `micro_batch`: what follows from the rates where the rows do not tell it."""
    setting, steps = run.setting, run.steps
    if micro_batch is not None:
        setting = replace(setting, micro_batch=micro_batch)
        steps = [(seconds, micro_batch * setting.grad_accum) for seconds, _ in steps]
    sizes = an_epoch(setting, options)
    rank = LogRank(
        0,
        device=setting.devices[0] if setting.devices else None,
        steps=tuple(step_line(number, *step) for number, step in enumerate(steps)),
        epochs=tuple(epoch_line(number, seconds, sizes) for number, seconds in enumerate(run.epochs)),
    )
    return LogRun(setting, run.name, files, (rank,), of_the_run=True, one_host_told=run.hosts_told)
