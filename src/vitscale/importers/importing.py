"""Imports log files: guesses their format, reads them, makes trials and curves, writes the results folder, sums up."""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from vitscale.base import program
from vitscale.base.plugins import answer, known
from vitscale.errors import RequestError, StoreError, printable, shown
from vitscale.importers import contents, deepspeed, epochs, links, plain_csv, traces, train_logs, trainer_state
from vitscale.importers.contents import ImportOptions, LinkFormat, LogContents, LogFormat, TrialSetting
from vitscale.importers.curves import curves_of
from vitscale.importers.deepspeed_lines import without_colours
from vitscale.importers.drawn_tables import refusal
from vitscale.importers.headings import CELLS_OF, SPEEDS, Heading
from vitscale.importers.records import (
    TrialRun,
    assumed_fields,
    fingerprint,
    micro_batch_of,
    notes_on,
    train_samples,
    trial_of,
    write,
)
from vitscale.importers.tables import headers, tells_steps
from vitscale.profiles.trace_json import is_trace
from vitscale.store.results import Curve, Imported, RunHeader, StudyImport, StudyRecord
from vitscale.trial.trial import Trial

_READERS: Mapping[str, Callable[[Sequence[Path], ImportOptions], LogContents]] = {
    "epochs": epochs.read,
    "deepspeed": deepspeed.read,
    "trainer-state": trainer_state.read,
    "train-log": train_logs.read,
    "csv": plain_csv.read,
    "trace": traces.read,
}
_MAY_LACK_GPU_COUNT = ("epochs", "csv", "deepspeed", "trainer-state", "train-log")
"""Formats whose files may not say on how many GPUs they ran; one count is then of a whole file."""
_MOST_FILES = 10_000


@dataclass(frozen=True)
class WrittenImport:
    """An import whose folder is written."""

    study: StudyRecord
    runs: tuple[TrialRun, ...]
    written: bool
    """False: the folder held this import already."""
    data: dict[str, list[Any]] = field(default_factory=dict)
    """What the format tells beyond its runs."""


def import_logs(paths: Sequence[Path], log_format: str, options: ImportOptions, results: Path) -> WrittenImport:
    """Reads files of one format and writes what they hold as a results folder; importing them again changes nothing.

    Args:
        paths: the files; together they are one study.
        log_format: how they are to be read.
        options: what the user says of them.
        results: the folder to write.

    Raises:
        RequestError: an option is wrong, the files lack what nobody else can tell, or there is nothing to use in them.
        StoreError: a file cannot be read, or the folder cannot be written or holds something else.
    """
    contents.check(options)
    if not 1 <= len(paths) <= _MOST_FILES:
        raise RequestError(f"{len(paths)} files are given", valid=[f"1 to {_MOST_FILES:,}"])
    if twice := [path for path, times in Counter(path.absolute() for path in paths).items() if times > 1]:
        # Its runs would be taken for repeats, whose spread is what figures are unsure by.
        raise RequestError(f"{shown(twice[0].name)} is given twice", next_step="Give each file once")
    if options.each_gpus and log_format not in _MAY_LACK_GPU_COUNT:
        what = f"--gpus has {len(options.each_gpus)} numbers, and {log_format} tells them itself"
        raise RequestError(what, valid=_MAY_LACK_GPU_COUNT, next_step="Leave --gpus out")
    reader = known("importer", log_format, _READERS, "__call__")
    log_contents = answer("importer", log_format, _READERS, lambda: reader(paths, options), LogContents)
    if not log_contents.runs:
        is_table = log_format in ("csv", "epochs")
        no_rows = "no row stands below the names of the columns" if is_table else ""
        why = "; ".join(log_contents.problems) or no_rows
        why = f": {why}" if why else ""
        what = f"nothing in {shown(', '.join(path.name for path in paths))} can be used as {log_format}{why}"
        raise StoreError(
            what, next_step=f"See docs/importing.md for what each format needs: {', '.join(contents.FORMATS)}"
        )
    runs = _trial_runs(log_format, log_contents, options)
    if not options.as_repeats:
        _refuse_unlike_files(runs)
    study = _study(paths, log_format, options, log_contents, runs)
    return WrittenImport(study, runs, write(results, study, runs), log_contents.data)


_UNLIKE_FILES = 1.15
"""Ratio of two files' median steps above which they are not taken for repeats of one trial unasked. Runs of one
configuration on several nodes differ by up to 5 % (arXiv 2602.21081), and by some times that where machines are shared.
"""
_FEWEST_TIMES = 2
"""Times of a file that tell how far its own steps lie apart."""


@dataclass(frozen=True)
class _FileTimes:
    """Seconds of the steps, else of the epochs, that a file has of one trial."""

    name: str
    seconds: Sequence[float]

    @property
    def quartiles(self) -> tuple[float, float]:
        """The middle half of them, which a slow beginning leaves as it is."""
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return low, high

    def is_unlike(self, other: _FileTimes) -> bool:
        """Whether the two differ by more than `_UNLIKE_FILES` and by more than either's own spread."""
        first, second = sorted((self, other), key=lambda times: statistics.median(times.seconds))
        ratio = statistics.median(second.seconds) / statistics.median(first.seconds)
        return ratio > _UNLIKE_FILES and first.quartiles[1] < second.quartiles[0]


def _refuse_unlike_files(runs: Sequence[TrialRun]) -> None:
    """Refuses files that would be repeats of one trial, and of which something else was measured by their times.

    Raises:
        RequestError: it names two of them, and how to import them apart or as repeats.
    """
    for files in _times_of_files(runs):
        for other in files[1:]:
            if files[0].is_unlike(other):
                spreads = [f"{low:.3g} to {high:.3g} s" for low, high in (files[0].quartiles, other.quartiles)]
                raise RequestError(
                    f"{shown(files[0].name)} and {shown(other.name)} would be repeats of one trial, and they differ by "
                    f"more than their own spread (half of the times are {spreads[0]}, and {spreads[1]})",
                    next_step="If they are two versions or settings, import each into a folder of its own with -o, and "
                    "compare the folders; if they are repeats all the same, add --as-repeats",
                )


def _times_of_files(runs: Sequence[TrialRun]) -> Iterable[list[_FileTimes]]:
    """The times of each file with several, for each trial that several files have."""
    by_trial: dict[str, dict[str, list[float]]] = {}
    for run in runs:
        rank = run.run.ranks[0]
        seconds = [line.seconds for line in rank.steps if not line.warmup] or [line.seconds for line in rank.epochs]
        if len(run.run.files) == 1:
            times = by_trial.setdefault(run.header.trial_id, {})
            times.setdefault(run.run.files[0].name, []).extend(seconds)
    for times in by_trial.values():
        files = [_FileTimes(name, seconds) for name, seconds in times.items() if len(seconds) >= _FEWEST_TIMES]
        if len(files) > 1:
            yield files


def _trial_runs(log_format: str, log_contents: LogContents, options: ImportOptions) -> tuple[TrialRun, ...]:
    repeats: dict[str, int] = {}
    runs = []
    for run in log_contents.runs:
        trial = trial_of(run, options)
        identity = trial.identity()
        repeat = repeats.get(identity, 0)
        repeats[identity] = repeat + 1
        # An epoch's steps follow from batch and dataset size: an assumed batch must not give a number of them.
        batch_told = micro_batch_of(run, options) is not None
        samples = train_samples(run.setting, options) if batch_told or run.of_images else None
        header = RunHeader(
            trial_id=identity,
            repeat=repeat,
            attempt=0,
            trial=trial,
            command=(),
            dataset_fingerprint=fingerprint(trial),
            imported=Imported(
                log_format=log_format,
                files=run.files,
                ranks=tuple(rank.rank for rank in run.ranks),
                of_the_run=run.of_the_run,
                batch_told=batch_told,
                assumed=assumed_fields(run, options),
            ),
            vitscale=program.identity(),
        )
        runs.append(TrialRun(run, header, samples))
    return tuple(runs)


def _named_for(paths: Sequence[Path]) -> str:
    more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    stem = printable(paths[0].stem)[:100]
    return f"{stem}{more}" if stem else ""


def _study(
    paths: Sequence[Path], log_format: str, options: ImportOptions, log_contents: LogContents, runs: Sequence[TrialRun]
) -> StudyRecord:
    trials: dict[str, tuple[TrialSetting, Trial]] = {}
    for run in runs:
        trials.setdefault(run.header.trial_id, (run.run.setting, run.header.trial))
    files = tuple(dict.fromkeys(file for run in runs for file in run.run.files))
    curves = curves_of(list(trials.values()))
    notes = (*_questions(curves, runs), *log_contents.notes, *notes_on([run.run for run in runs], options))
    given = "".join(f"\n{name} = {value}" for name, value in options.given().items())
    return StudyRecord(
        name=options.name or _named_for(paths) or log_format,
        text=f"Imported as {log_format} from {', '.join(run.name for run in files)}.{given}\n",
        repeats=1,
        curves=curves,
        trials={identity: trial for identity, (_, trial) in trials.items()},
        versions={},
        dataset_fingerprints={identity: fingerprint(trial) for identity, (_, trial) in trials.items()},
        imported=StudyImport(
            log_format=log_format,
            files=files,
            options=options.given(),
            notes=tuple(dict.fromkeys(notes)),
            problems=log_contents.problems,
        ),
        vitscale=program.identity(),
    )


_FALL = 0.5
"""Steps that fall by this power of 1/N or faster mean a batch that was shared out: more ranks alone shorten no step."""


def _questions(curves: Iterable[Curve], runs: Iterable[TrialRun]) -> Iterable[str]:
    """Doubts about curves of one micro-batch whose steps get shorter with more ranks, and what is most likely meant."""
    seconds: dict[str, list[float]] = {}
    batches: dict[str, int | None] = {}
    for run in runs:
        identity = run.header.trial_id
        seconds.setdefault(identity, []).extend(line.seconds for line in run.run.ranks[0].steps)
        batches[identity] = run.run.setting.micro_batch
    for curve in curves:
        (least, first), (most, last) = ((point.gpus, point.trial_id) for point in (curve.points[0], curve.points[-1]))
        if curve.mode == "strong-global" or least == most or not (seconds[first] and seconds[last]):
            continue
        steps = statistics.median(seconds[first]), statistics.median(seconds[last])
        if math.log(steps[0] / steps[1]) < _FALL * math.log(most / least):
            continue
        told = batches[last]
        batch = f"has the same micro-batch ({told})" if told else "has the same micro-batch, which is not told"
        likely = f"{told} is" if told else "each time was of"
        name = ", ".join(map(str, curve.labels.values()))
        example = f" ({-(-told // least)} on {least}, {-(-told // most)} on {most})" if told else ""
        yield (
            f"check {shown(name or 'the curve')}: steps fall as 1/N ({steps[0]:.4g} s on {least}, "
            f"{steps[1]:.4g} s on {most} GPUs), though each GPU {batch}. Most likely {likely} the batch of all GPUs "
            f"together: say micro_batch = that batch / gpus in each row{example}. As it stands, predictions are wrong"
        )


_LOOKED_AT = 20_000
"""Lines to look at: at most some thousands come before the first timed step of a DeepSpeed log."""
_STATE = re.compile(r'^\s*\{?\s*"(log_history|best_metric|best_model_checkpoint|best_global_step|epoch|global_step)"')
_TIMERS = re.compile(r"time \(ms\) \|(?! model-and-optimizer-setup)|, CurrSamplesPerSec=")
"""What DeepSpeed prints of its timers; Megatron-LM has some of setting up, before its first line of steps."""


def guess(paths: Sequence[Path], cells: str | None = None, gpus: Sequence[int] = ()) -> LogFormat | LinkFormat:
    """The format that all these files have. `cells` is as in `ImportOptions`; `gpus`: those of all files, or of each.

    Raises:
        RequestError: a file is none of them, or the files are of different ones.
        StoreError: a file cannot be read.
    """
    formats = {path: _of(path, cells) or _of_table(path, cells, *gpus[:1]) for path in paths}
    for path, taken in formats.items():
        if taken is None:
            head, *_ = headers(path, ImportOptions(cells=cells))
            if head.drawn is not None:
                raise refusal(path, head.drawn)
            if any(own.column.startswith(CELLS_OF) for own in head.headings):
                raise RequestError(
                    f"the table in {shown(path.name)} has a column for each GPU count and does not say what they hold",
                    valid=[f"--cells {speed}" for speed in SPEEDS],
                    next_step="Say it so, or in the table's caption",
                )
            if head.tells and len(head.headings) > 1:
                what = "no column of times" if head.counts_gpus else "no column gpus, which counts them (or --gpus)"
                told = ", ".join(own.text for own in head.headings)
                raise RequestError(
                    f"the table in {shown(path.name)} has {what}; it has {shown(told)}{head.unit_lacking}",
                    valid=("gpus", *SPEEDS),
                    next_step="Name its columns so; docs/importing.md says which other names are understood",
                )
            raise RequestError(
                f"nothing in {shown(path.name)} tells its format{_likely(path)}",
                valid=(*contents.FORMATS, *contents.OF_LINKS),
                next_step="Name it with --format, or write a table of gpus, micro_batch and step_seconds: "
                "docs/importing.md says what each format needs",
            )
    kinds = {taken for taken in formats.values() if taken is not None}
    if len(kinds) != 1:
        each = ", ".join(f"{path.name} is {taken}" for path, taken in list(formats.items())[:4])
        raise RequestError(f"the files are of different formats: {each}", next_step="Import them one by one")
    return kinds.pop()


def _likely(path: Path) -> str:
    """A clause on why nothing in a file is understood, as far as its first lines tell."""
    texts = [text for _, (_, text, _) in zip(range(20), contents.lines(path), strict=False) if text.strip()]
    if any("\0" in text for text in texts):
        return ": it is no UTF-8 (UTF-16 needs its mark at the beginning)"
    barred = [text for text in texts if "|" in text]
    ruled = any(not text.strip(" |:-") for text in barred)
    if not ruled and any(Heading.of(cell).column in ("gpus", *SPEEDS) for text in barred for cell in text.split("|")):
        return ": a table with bars and no rule (--- | ---) under its names"
    cells = [re.split(r" {2,}|\t", text.strip()) for text in texts]
    told = [
        {Heading.of(cell).column for cell in text.split()} for text in texts if "|" not in text
    ]  # copied from a PDF
    copied = any("gpus" in columns and columns & {*SPEEDS} for columns in told)
    if copied or any(Heading.of(cell).column in ("gpus", *SPEEDS) for row in cells if len(row) > 1 for cell in row):
        return ": spaces stand between its columns; use commas, tabs or bars"
    return f": it begins with {shown(texts[0][:80])}" if texts else ": it is empty"


def _of_table(path: Path, cells: str | None, gpus: int | None = None) -> Literal["epochs", "csv"] | None:
    head, *_ = headers(path, ImportOptions(cells=cells, gpus=gpus))
    if head.tells < 2:
        return None
    of_epochs = "epoch_seconds" in head.columns and {"epoch", "rank", "run"} & {*head.columns}
    return "epochs" if of_epochs and not tells_steps(path, head) else "csv"


def _of(path: Path, cells: str | None) -> LogFormat | LinkFormat | None:
    if is_trace(path):
        return "trace"
    if (of_table := _of_table(path, cells)) is not None:
        return of_table
    for number, raw, _ in islice(contents.lines(path), _LOOKED_AT):
        text = without_colours(raw)
        if (of_link := links.guessed(text)) is not None:
            return of_link
        if number == 1 and text.lstrip().startswith("{") and '"nccl_version"' in text:
            return "nccl-tests"
        if _TIMERS.search(text):
            return "deepspeed"
        if train_logs.is_line(text):
            return "train-log"
        if number <= 3 and _STATE.match(text):
            return "trainer-state"
    return None
