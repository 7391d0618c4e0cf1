"""Reads what common training loops of vision models print: timm's, MMEngine's and MMCV's, Swin's, those of
torchvision's references, which DeiT, MAE and DINO took over, Megatron-LM's, and those of DeepSpeed's pipelines. A file
is one run, as one rank told it.

A line has the seconds of one step (timm, Swin), the mean of the last 20 (torchvision's), or the mean of the last 10 or
of all since the previous line (MMEngine, MMCV, Megatron-LM). Starting up weighs more in every 50th step than in an
epoch: the first line of a file counts as warm-up, and so do an epoch's lines whose mean includes its first step.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from vitscale.errors import RequestError, shown
from vitscale.importers import contents
from vitscale.importers.contents import BrokenLines, ImportOptions, LogContents, LogRank, LogRun, TrialSetting
from vitscale.importers.deepspeed_lines import LogFacts, without_colours
from vitscale.importers.records import step_line
from vitscale.importers.tables import text_of
from vitscale.present.units import percent
from vitscale.store.lines import Steps
from vitscale.store.records import StepLine
from vitscale.trial import model_cost, model_spec

SINCE_THE_LAST = -1
"""A line's time is the mean of all steps since the line before."""


class _Loop(NamedTuple):
    """A program's form of line."""

    name: str
    mean_of: int
    """Steps below this number have a printed time that includes the epoch's first step; or `SINCE_THE_LAST`."""
    line: re.Pattern[str]

    @property
    def of_micro_steps(self) -> bool:
        """Whether it prints one for micro-steps; those that tell images print it for optimizer steps."""
        return not {"rate", "batch"} & self.line.groupindex.keys()


_AT, _SECONDS = r"\[\s*(?P<step>\d+)/(?P<of>\d+)", r"(?P<seconds>\d+\.\d+)"
_NUMBER = r"\d+\.\d+"
_LOOPS = tuple(
    _Loop(name, mean_of, re.compile(line))
    for name, mean_of, line in (
        (
            "timm",
            1,
            rf"\bTrain: (?P<epoch>\d+) {_AT} .*? Time: {_SECONDS}s, +(?P<rate>{_NUMBER})/s"
            rf"(?:.* Data: (?P<data>{_NUMBER}))?",
        ),
        ("Swin", 1, rf"\bTrain: \[(?P<epoch>\d+)/\d+\]{_AT}\]\s.*?\btime {_SECONDS} \("),
        (
            "torchvision's references",
            20,
            rf"\bEpoch: \[(?P<epoch>\d+)(?:/\d+)?\]\s+{_AT}\]\s.*?\btime: {_SECONDS}\s+data: (?P<data>{_NUMBER})",
        ),
        (
            "DINOv2",
            20,
            rf"\bTraining  {_AT}\]\s(?:.*? current_batch_size: (?P<batch>\d+)\.)?"
            rf".*?\btime: {_SECONDS}\s+data: (?P<data>{_NUMBER})",
        ),
        (
            "MMEngine",
            11,
            rf"\b(?:Epoch\(train\)\s*\[\s*(?P<epoch>\d+)\]|Iter\(train\))\s*{_AT}\]\s.*?"
            rf"\btime: {_SECONDS},?\s+data_time: (?P<data>{_NUMBER})",
        ),
        (
            "MMCV",
            SINCE_THE_LAST,
            rf"\b(?:Epoch\s*\[\s*(?P<epoch>\d+)\]|Iter)\s*{_AT}\]\s.*?"
            rf"\btime: {_SECONDS},?\s+data_time: (?P<data>{_NUMBER})",
        ),
        (
            "Megatron-LM",
            0,
            rf"\biteration\s+(?P<step>\d+)/\s*(?P<of>\d+) \|.*? elapsed time per iteration "
            rf"(?:\(ms\): (?P<ms>{_NUMBER})|\(s\): {_SECONDS})"
            r"(?:.* global batch size: +(?P<batch>\d+))?",
        ),
        (
            "DeepSpeed's pipelines",  # `train_batch` in deepspeed/runtime/pipe/engine.py
            0,
            rf"\bsteps: (?P<step>\d+) loss: .{{1,400}}?iter time \(s\): {_SECONDS} samples/sec: (?P<rate>{_NUMBER})",
        ),
    )
)
_ALIKE = 1.05
"""Ratio up to which two image counts are taken for the same dataset."""
_MOST_IN_BATCH, _MOST_PARAMETERS = 1_000_000, 10**15
_ARGUMENT = r"^(?:\[[\d:.]{5,20}\] )?(?:Namespace\(.*\b)?"
"""Before an argument's name; MAE prints the time before a message, and each argument on a line of its own."""
_COUNTS = {
    "gpus": (
        contents.MOST_GPUS,
        r"\bProcess \d+, total (\d+)|^\s*GPU number: (\d+)|WORLD_SIZE in environ: \d+/(\d+)"
        rf"|{_ARGUMENT}world_size=(\d+)[,)]|^using world size: (\d+)|^world_size: (\d+)",
    ),
    "micro_batch": (
        _MOST_IN_BATCH,
        rf"\bsamples_per_gpu=(\d+)|{_ARGUMENT}batch_size(?:_per_gpu)?=(\d+)[,)]|^\s*batch_size_per_gpu: (\d+)"
        r"|^\s+BATCH_SIZE: (\d+)|^train_dataloader = dict\(\s*batch_size=(\d+)"
        r"|\b(?:train_micro_batch_size_per_gpu|micro_batch_size) \.* *(\d+)",
    ),
    "grad_accum": (
        _MOST_IN_BATCH,
        rf"{_ARGUMENT}(?:accum_iter|update_freq)=(\d+)[,)]|^\s+ACCUMULATION_STEPS: (\d+)"
        r"|\bgradient_accumulation_steps \.* *(\d+)|\b(?:accumulative_counts|cumulative_iters)=(\d+)",
    ),
    # DeepSpeed's configuration has the data-parallel size as world_size (`DeepSpeedConfig` in runtime/config.py).
    "copies": (contents.MOST_GPUS, r"\bprint\] +world_size \.* *(\d+)|\bdata-parallel[- ]size: (\d+)"),
    "parameters": (_MOST_PARAMETERS, r"\bModel \S+ created, param count: ?(\d+)|\bnumber of params: (\d+)"),
}
_TOLD = {count: (most, re.compile(pattern)) for count, (most, pattern) in _COUNTS.items()}
"""Facts told before the first step -> the largest value that is believed, and the pattern that tells it."""
_ALONE = re.compile(r"Training with a single process|^Not using distributed mode|Distributed training: False")
_MODEL = re.compile(r"\bModel (\S+) created, param count")
_RANK = re.compile(r"^(?:\[default\d+\]:|\s*\d+: )")
"""What `torchrun --tee` and `srun -l` put before a rank's lines."""


class _Step(NamedTuple):
    of_epoch: int
    """Its place in the epoch, or in a run without epochs."""
    first_line: bool
    """Whether the line before is of another epoch."""
    seconds: float
    images_per_second: float | None
    data_seconds: float | None
    """The part of the seconds spent waiting for data."""


@dataclass
class _Log:
    """What one file says."""

    loop: _Loop = _LOOPS[0]
    counts: dict[str, int] = field(default_factory=dict)
    earlier: set[str] = field(default_factory=set)
    """The counts that were told before the GPUs were told again: another try may tell others."""
    model: str | None = None
    facts: LogFacts = field(default_factory=LogFacts)
    """What DeepSpeed's own configuration or Megatron-LM's arguments say."""
    steps: list[_Step] = field(default_factory=list)
    steps_of_epoch: int | None = None
    epoch: str | None = None
    """The last line's."""
    goes_on: str = ""
    """What follows in the file and is left out."""
    told_steps: set[tuple[str | None, int]] = field(default_factory=set)
    """(Epoch, step) of the lines taken so far."""
    again: int = 0
    """Lines of a step that an earlier line told already."""
    other_epochs: str | None = None
    """How epochs are of other lengths from here on."""


def is_line(text: str) -> bool:
    """Whether one of these loops prints such a line."""
    return any(loop.line.search(text) for loop in _LOOPS)


def read(paths: Sequence[Path], options: ImportOptions) -> LogContents:
    """One run per file.

    Raises:
        RequestError: a file does not tell its GPUs, and --gpus is missing.
        StoreError: a file cannot be read.
    """
    runs: list[LogRun] = []
    problems: list[str] = []
    notes: list[str] = []
    for number, path in enumerate(paths):
        told = BrokenLines(path.name)
        log = _read(path, told)
        if log.steps:
            run, said = _run(path, log, options.of_file(number), contents.how_to_tell(paths))
            runs.append(run)
            notes += [f"{path.name}: {note}" for note in said]
        problems += told.told()
        problems += [f"{path.name}: {log.goes_on}"] if log.goes_on else []
    if options.train_samples is None and (samples := {run.setting.train_samples or 0 for run in runs} - {0}):
        alike = max(samples) <= _ALIKE * min(samples)  # they differ only by batches that were not full
        runs = [
            replace(run, setting=replace(run.setting, train_samples=max(samples)))
            if alike and run.setting.train_samples
            else run
            for run in runs
        ]
        counts = " or ".join(f"{count:,}" for count in ([max(samples)] if alike else sorted(samples)))
        notes.append(f"about {counts} training images, from the steps of an epoch (--train-samples says it exactly)")
        if options.gpus is not None and not alike:
            notes.append(f"if these are of one dataset, --gpus {options.gpus} is not of all: say {contents.EACH_GPUS}")
    return LogContents(tuple(runs), tuple(notes), tuple(problems))


def _read(path: Path, told: BrokenLines) -> _Log:
    log, before = _Log(), ""
    for number, raw, _ in contents.lines(path):
        text = without_colours(raw)
        for loop in (log.loop,) if log.steps else _LOOPS:
            if (match := loop.line.search(text)) is not None:
                log.loop = loop
                _take(match.groupdict(), log, number, told)
                break
        text = _RANK.sub("", text)
        # Of MMEngine's configuration, only two lines together tell whose batch it is.
        facts = before + text if before.startswith("train_dataloader = dict(") else text
        before = text
        if not log.steps:
            _look_for_facts(facts, log)
            log.facts.take(text)
        elif (other := log.other_epochs or _other_setting(facts, log)) is not None:
            log.goes_on = (
                f"from line {number:,} on it is another run ({other}), which is left out: give it a file of its own"
            )
            break
    return log


def _other_setting(text: str, log: _Log) -> str | None:
    """What a line tells of GPUs, model or (beside its GPUs) batch where the log has told another before: a training
    that was resumed otherwise. (Batches alone are told again of evaluation.)"""
    again = _Log()
    _look_for_facts(text, again)
    for name, what in (("gpus", "GPUs"), ("micro_batch", "images on each"), ("grad_accum", "micro-steps")):
        before, now = log.counts.get(name), again.counts.get(name)
        if "gpus" in again.counts and before and now and before != now:
            return f"{now:,} {what} where it had {before:,}"
    return f"{again.model} where it had {log.model}" if again.model and log.model not in (None, again.model) else None


def _look_for_facts(text: str, log: _Log) -> None:
    for name, (most, pattern) in _TOLD.items():
        if (match := pattern.search(text)) is not None:
            if name == "gpus" and name in log.counts:  # by another rank, or in another try
                log.earlier = {*log.counts, "model"}
                log.facts.anew()
            if name not in log.counts or name in log.earlier:
                with suppress(ValueError):  # a value that no run can have is ignored
                    log.counts[name] = contents.parse_whole(next(filter(None, match.groups())), 1, most)
                    log.earlier.discard(name)
    if text.startswith("Using topology: {ProcessCoord(") and text.endswith("}"):  # of all ranks of a pipeline
        log.counts.setdefault("gpus", text.count("ProcessCoord("))
    if _ALONE.search(text):
        log.counts.setdefault("gpus", 1)
    if (log.model is None or "model" in log.earlier) and (match := _MODEL.search(text)) is not None:
        log.model = text_of(match[1])
        log.earlier.discard("model")


def _take(told: dict[str, str | None], log: _Log, number: int, problems: BrokenLines) -> None:
    try:
        step, of = (contents.parse_whole(told.get(name) or told["step"] or "", 0, 10**12) for name in ("step", "of"))
        seconds = (
            contents.parse_seconds(told.get("seconds") or "")
            if told.get("ms") is None
            else contents.parse_seconds(told["ms"] or "") / 1000
        )
        rate, data, batch = (contents.parse_finite(told.get(name) or "") for name in ("rate", "data", "batch"))
    except ValueError as error:
        problems.line(number, str(error))
        return
    if told.get("epoch") is not None and log.steps_of_epoch not in (None, of):
        log.other_epochs = f"epochs of {of:,} steps where it had {log.steps_of_epoch:,}"
        return
    if (key := (told.get("epoch"), step)) in log.told_steps:
        log.again += 1  # from the first rank of another host, or from a run that was started again
        return
    log.told_steps.add(key)
    first, log.epoch = told.get("epoch") != log.epoch, told.get("epoch")
    log.steps.append(_Step(step, first, seconds, rate if batch is None else batch / seconds, data))
    if told.get("epoch") is not None:
        log.steps_of_epoch = of


def _run(path: Path, log: _Log, options: ImportOptions, how_to_tell: str) -> tuple[LogRun, list[str]]:
    """The run of one file, and notes on it."""
    counted, copies = log.counts.get("gpus"), log.counts.get("copies")
    if counted == 1 and copies is not None:
        counted = None  # "Not using distributed mode", in a rank of DeepSpeed's
    told = counted or options.gpus
    gpus = told or copies
    if gpus is None:
        raise RequestError(f"{shown(path.name)} does not tell the GPUs", next_step=f"Give them: {how_to_tell}")
    if options.each_gpus and gpus != options.gpus:
        what = f"--gpus has {options.gpus} for {shown(path.name)}, which is of {gpus}"
        raise RequestError(what, next_step=f"Say {contents.EACH_GPUS}")
    if gpus % (copies or 1):
        what = f"{shown(path.name)} tells {copies} copies of the model, which {gpus} GPUs cannot hold in equal parts"
        more = f"Give the GPUs of all ranks together: --gpus {2 * (copies or 1)}, for 2 each"
        raise RequestError(what, next_step="Give each training a file of its own" if counted else more)
    split = gpus // (copies or gpus)
    micro_steps = log.counts.get("grad_accum", 1) if log.loop.of_micro_steps else 1
    what = f"one of the {micro_steps} micro-steps of a step" if micro_steps > 1 else "a step"
    notes = [f"{len(log.steps):,} lines of {log.loop.name}, each taken for {what}"]
    if options.gpus not in (None, gpus):
        notes.append(f"it tells {gpus} GPUs itself: --gpus {options.gpus} is not taken for it")
    if told is None:
        notes.append(
            f"its world_size {gpus} counts copies of the model, taken for GPUs: --gpus says how many have them"
        )
    if log.again:
        notes.append(
            f"{log.again:,} more of steps that were told already, by other ranks or another try, are left aside"
        )
    micro_batch, accum = options.micro_batch or log.counts.get("micro_batch"), log.counts.get("grad_accum", 1)
    images = [step.images_per_second * step.seconds for step in log.steps if step.images_per_second]
    batch = round(min(1e12, statistics.median(images))) if images else 0
    if micro_batch and batch and copies and "grad_accum" not in log.counts:  # Megatron-LM does not print it
        accum = batch // (micro_batch * copies)
        if accum > _MOST_IN_BATCH or accum * micro_batch * copies != batch:  # the batch grew meanwhile
            micro_batch, accum = None, 1
    if micro_batch is None and batch:
        micro_batch = round(min(_MOST_IN_BATCH, batch / gpus / accum)) or None
        notes.append(f"about {micro_batch} images on each GPU, from its images/s (--micro-batch says it exactly)")
    elif micro_batch is not None and split > 1:
        micro_batch, accum = _shared(micro_batch, accum, split)
    samples = None
    if micro_batch and log.steps_of_epoch:
        samples = log.steps_of_epoch * gpus * micro_batch
    if split > 1:
        notes.append(
            f"{split} GPUs share each copy of the model, and are counted with their part of its images; speedups and "
            f"predictions take the {gpus} GPUs for data parallel: compare only logs that split it alike"
        )
    if waits := [step.data_seconds / step.seconds for step in log.steps if step.data_seconds is not None]:
        notes.append(f"its loop waited for data in {percent(statistics.median(waits))} of a step (median)")
    parameters, model = log.counts.get("parameters"), log.model
    if (known := _with_so_many(parameters)) is not None:
        model = known
        notes.append(f"{log.model or 'its model'} has {parameters:,} parameters, as {known} has (--model says it)")
    setting = TrialSetting(
        gpus,
        micro_batch=micro_batch,
        grad_accum=accum,
        series=f"{split} GPUs a model" if split > 1 else None,
        engine="deepspeed" if log.loop.name.startswith("DeepSpeed") else None,
        zero_stage=log.facts.numbers.get("zero_stage"),
        precision=log.facts.precision,
        model=model,
        parameters=parameters,
        train_samples=samples,
    )
    rank = LogRank(0, steps=Steps.streamed(_steps(log, (micro_batch or 0) * accum, micro_steps)))
    return LogRun(setting, path.name, (contents.identified(path),), (rank,), of_the_run=True), notes


def _shared(micro_batch: int, accum: int, ranks: int) -> tuple[int | None, int]:
    """(Micro-batch, accumulation) that count a copy's images once where these ranks share it; None: no whole number."""
    parts = math.gcd(micro_batch, ranks)
    accum, rest = divmod(accum, ranks // parts)
    return (None, 1) if rest else (micro_batch // parts, accum)


def _with_so_many(parameters: int | None) -> str | None:
    """The named model with exactly this many parameters, given the number of classes that an import assumes."""
    names = model_spec.NAMED_MODELS
    counts = {
        model_cost.parameters(contents.model_of(ImportOptions(model=name), TrialSetting(1))): name for name in names
    }
    return None if parameters is None else counts.get(parameters)


def _steps(log: _Log, images: int, micro_steps: int) -> Iterator[StepLine]:
    """The steps; lines whose time holds their epoch's beginning are warm-up, but only the first if all lines' does."""
    beginnings = [
        step.of_epoch < log.loop.mean_of or (step.first_line and log.loop.mean_of == SINCE_THE_LAST)
        for step in log.steps
    ]
    all_alike = all(beginnings)
    for number, (step, begins) in enumerate(zip(log.steps, beginnings, strict=True)):
        yield step_line(number, micro_steps * step.seconds, images, warmup=number == 0 or (begins and not all_alike))
