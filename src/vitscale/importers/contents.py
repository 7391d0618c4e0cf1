"""What others' files hold before it becomes a study: their lines, whatever their bytes, line lengths and size; numbers
in untrusted text; runs, notes, and what could not be used. And what the user says that files do not tell themselves.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

from vitscale.errors import RequestError, StoreError, check_within, printable, shown, unknown
from vitscale.importers.headings import SPEEDS
from vitscale.store.records import EpochLine, ExplainedLine, StepLine, TrafficLine
from vitscale.store.results import ImportedFile
from vitscale.trial.model_cost import counted, parameters
from vitscale.trial.model_spec import NAMED_MODELS, ModelSpec, fields_named, resolve
from vitscale.trial.trial import DeviceName, Precision

LONGEST_LINE = 64 * 1024
"""Characters of a line that are read; the rest of a longer one is skipped."""
MOST_LINES = 20_000_000


def identified(path: Path) -> ImportedFile:
    """The name of a file and what it holds.

    Raises:
        StoreError: it cannot be read.
    """
    _check(path)
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except (OSError, ValueError) as error:  # ValueError: a NUL in its name
        raise cannot_read(path, error) from None
    return ImportedFile(name=printable(path.name)[:200], sha256=digest)


def lines(path: Path) -> Iterator[tuple[int, str, bool]]:
    """Yields (number from 1, text without its end, whether it is whole) for each line.

    Whole: it ends with a line break and is no longer than `LONGEST_LINE`. What is no UTF-8 (or UTF-16, where the file
    begins as that) becomes a replacement character. Carriage returns end lines where nothing else does.

    Raises:
        StoreError: the file cannot be read, or has more than `MOST_LINES` lines.
    """
    _check(path)
    try:
        with path.open("rb") as file:
            start = file.read(LONGEST_LINE)
            blocks = iter(lambda: file.read(1 << 20), b"")
            returns = b"\r" in start and not (b"\n" in start or any(b"\n" in block for block in blocks))
        encoding = "utf-16" if start.startswith((b"\xff\xfe", b"\xfe\xff")) else "utf-8"
        end = "\r" if returns else "\n"  # a log may begin with a progress bar, which ends no line
        with path.open(encoding=encoding, errors="replace", newline=end) as file:
            number = 0
            while text := file.readline(LONGEST_LINE):
                number += 1
                if number > MOST_LINES:
                    raise StoreError(
                        f"{shown(path.name)} has more than {MOST_LINES:,} lines", next_step="Cut it into parts"
                    )
                whole = text.endswith(end)
                if not whole and len(text) == LONGEST_LINE:
                    while (rest := file.readline(LONGEST_LINE)) and not rest.endswith(end):
                        pass
                yield number, (text.removeprefix("\ufeff") if number == 1 else text).rstrip("\r\n"), whole
    except (OSError, ValueError) as error:
        raise cannot_read(path, error) from None


def _check(path: Path) -> None:
    """Refuses devices and pipes, which may never end or never begin."""
    try:
        other = path.exists() and not path.is_file()
    except (OSError, ValueError) as error:
        raise cannot_read(path, error) from None
    if other:
        raise StoreError(f"{shown(str(path))} cannot be read: it is no file", next_step="Give the file of a log")


def cannot_read(path: Path, error: Exception) -> StoreError:
    """The error for a file that cannot be read."""
    why = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
    return StoreError(f"{shown(str(path))} cannot be read: {why}", next_step="Give the file of a log")


SHORTEST_SECONDS, LONGEST_SECONDS = 1e-9, 1e9
"""The resolution of a clock, and thirty years."""
_LONGEST_TEXT = 40


def parse_seconds(text: str) -> float:
    """The time in seconds that `text` states.

    Raises:
        ValueError: it is none, and why.
    """
    value = _number(text)
    if not SHORTEST_SECONDS <= value <= LONGEST_SECONDS:
        raise ValueError(f"{_short(text)} is no time")
    return value


def parse_duration(text: str) -> float:
    """A time in seconds, or one that tells its units (`spelled_seconds`).

    Raises:
        ValueError: it is none, and why.
    """
    if re.fullmatch(r"[0-5]?\d:[0-5]\d", text.strip()):
        raise ValueError(f"{text.strip()} may be minutes or hours: write 0:{text.strip().zfill(5)}")
    spelled = spelled_seconds(text.strip()[:_LONGEST_TEXT])
    return parse_seconds(text if spelled is None else f"{spelled}")


def spelled_seconds(text: str) -> float | None:
    """The seconds of a duration that tells its units: "0:05:12", "5m12s", "1 h 20 min", "85 ms". None: it does not."""
    match = CLOCK.fullmatch(text) or _SPELLED.fullmatch(text.lower())
    if match is None or not any(match.groups()):
        return None
    return sum(float(part or 0) * unit for part, unit in zip(match.groups(), (3600, 60, 1, 1e-3), strict=False))


def parse_whole(text: str, least: int, most: int) -> int:
    """An integer within bounds; "4.0" is one.

    Raises:
        ValueError: it is none, and why.
    """
    value = _number(text)
    if value != int(value) or not least <= value <= most:
        raise ValueError(f"{_short(text)} is no whole number from {least:,} to {most:,}")
    return int(value)


def parse_share(text: str) -> float:
    """A number above 0 and at most 1.

    Raises:
        ValueError: it is none, and why.
    """
    value = _number(text)
    if not 0 < value <= 1:
        raise ValueError(f"{_short(text)} is no share above 0 and up to 1")
    return value


def parse_finite(text: str) -> float | None:
    """A finite number, or None for an empty text and for what stands for "not finite".

    Raises:
        ValueError: it is no number.
    """
    if not text.strip():
        return None
    value = float(text) if len(text) <= _LONGEST_TEXT else math.nan
    return value if math.isfinite(value) else None


CLOCK = re.compile(r"(\d{1,6}):([0-5]?\d):([0-5]?\d(?:\.\d{1,9})?)")
"""h:mm:ss; with one colon alone nobody knows whether hours or minutes are meant."""
_HOURS, _MINUTES, _SECONDS, _MILLISECONDS = (
    rf"(?:(\d+(?:\.\d+)?) ?{unit})?"
    for unit in (r"h(?:(?:ou)?rs?)?", r"m(?:in(?:ute)?s?)?", r"s(?:ec(?:ond)?s?)?", "ms")
)
_SPELLED = re.compile(f"{_HOURS}(?:, ?| )?{_MINUTES}(?:, ?| )?{_SECONDS}{_MILLISECONDS}", re.ASCII)
_COMMA = re.compile(r"-?\d+,\d+")


def _number(text: str) -> float:
    try:
        value = float(text) if len(text) <= _LONGEST_TEXT else math.nan
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        comma = _COMMA.fullmatch(text.strip()[:_LONGEST_TEXT]) is not None
        hint = ": write it without the comma, or with a point before decimals" if comma else ""
        raise ValueError(f"{_short(text)} is no number{hint}")
    return value


def _short(text: str) -> str:
    return repr(text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}...")


MOST_NAMED = 5
"""Number of broken lines that are named; of the others only their count is told."""


@dataclass(frozen=True)
class TrialSetting:
    """What a file says of one run's trial. None: it does not tell."""

    gpus: int
    nodes: int = 1
    micro_batch: int | None = None
    grad_accum: int = 1
    fraction: float = 1.0
    cluster: str | None = None
    layout: str | None = None
    """The layout in the file's own words."""
    dataset: str | None = None
    series: str | None = None
    """The name that a plain CSV gives to rows that belong together."""
    engine: str | None = None
    zero_stage: int | None = None
    precision: Precision | None = None
    model: str | None = None
    """The model's name, which need not be known here."""
    parameters: int | None = None
    train_samples: int | None = None
    """Training images of the whole dataset, where the file itself tells them."""
    devices: tuple[str, ...] = ()
    """Different GPU types of the ranks, by name."""
    device: DeviceName = "cuda"


@dataclass(frozen=True)
class LogRank:
    """One rank's lines."""

    rank: int
    device: str | None = None
    host: str | None = None
    steps: Sequence[StepLine] = ()
    epochs: tuple[EpochLine, ...] = ()
    explained: tuple[ExplainedLine, ...] = ()
    traffic: tuple[TrafficLine, ...] = ()


@dataclass(frozen=True)
class LogRun:
    """One run of one setting."""

    setting: TrialSetting
    name: str
    """Name that tells this run from others of its setting: the value of `run`, or the file."""
    files: tuple[ImportedFile, ...]
    ranks: tuple[LogRank, ...]
    versions: dict[str, str | None] = field(default_factory=dict)
    synchronised: bool | None = None
    """Whether something waited for the device inside each step."""
    of_the_run: bool = False
    """The times are the run's own, not those of one rank."""
    started_unix_seconds: float = 0.0
    warmup_steps: int = 0
    one_host_told: bool = False
    """Whether its file says that all ranks were on one host; else that is assumed where no layout or count tells."""

    @property
    def of_images(self) -> bool:
        """Whether each of its steps has one image per GPU, as where rates alone are told and nobody tells the batch."""
        images = {line.images for rank in self.ranks for line in rank.steps}
        return images == {1}


@dataclass(frozen=True)
class LogContents:
    """All that the files of one import hold."""

    runs: tuple[LogRun, ...]
    notes: tuple[str, ...]
    """What was assumed or left aside and does not stop the import."""
    problems: tuple[str, ...]
    """What could not be used."""
    data: dict[str, list[Any]] = field(default_factory=dict)
    """What a format tells beyond runs, for the JSON of the import."""


class BrokenLines:
    """Broken lines of one file: a few by number, then a count."""

    def __init__(self, file: str) -> None:
        self._file = printable(file)[:100]
        self._named: dict[str, list[str]] = {}
        self._counts: dict[str, int] = {}

    def line(self, number: int, what: str, kind: str = "broken") -> None:
        """Counts one line that cannot be used, and names it if it is among the first of its kind.

        Args:
            number: counted from 1.
            what: why, in a few words.
            kind: what such lines are called in the count: broken, duplicate, cut off.
        """
        self._counts[kind] = self._counts.get(kind, 0) + 1
        named = self._named.setdefault(kind, [])
        if len(named) < MOST_NAMED:
            named.append(f"line {number} ({printable(what)[:120]})")

    def told(self) -> tuple[str, ...]:
        """One sentence for each kind."""
        return tuple(self._sentence(kind, count) for kind, count in self._counts.items())

    def _sentence(self, kind: str, count: int) -> str:
        named = self._named[kind]
        more = f" and {count - len(named):,} more" if count > len(named) else ""
        lines = f"{count:,} {kind} line{'s' if count != 1 else ''}"
        return f"{self._file}: {lines} left out: {', '.join(named)}{more}"


LogFormat = Literal["epochs", "deepspeed", "trainer-state", "train-log", "csv", "trace"]
LinkFormat = Literal["nccl-tests", "perftest"]
"""Formats that tell of a network, and of no training."""
FORMATS: tuple[LogFormat, ...] = get_args(LogFormat)
OF_LINKS: tuple[LinkFormat, ...] = get_args(LinkFormat)
MOST_GPUS = 100_000
_MOST_IMAGES = 10_000_000_000
_CLASSES = {"cifar10": 10, "cifar100": 100, "digits": 10}
_CLASSES_ELSE = 1000
_LONGEST_NAME = 100


@dataclass(frozen=True)
class ImportOptions:
    """What the user says of the files. None: the files tell it themselves, or it is unknown."""

    model: str | None = None
    image_size: int | None = None
    engine: str | None = None
    zero_stage: int | None = None
    precision: str | None = None
    micro_batch: int | None = None
    train_samples: int | None = None
    gpus: int | None = None
    name: str | None = None
    parameters: str | None = None
    """Parameter count of a model that has no name here: "110M"."""
    cells: str | None = None
    """What cells are, where a table does not say it: the name of a speed. For a table with a column or row for each GPU
    count, and for rates that may be each GPU's or those of all."""
    each_gpus: tuple[int, ...] | None = None
    """The GPUs of each file, in the order of the files; in place of `gpus`."""
    as_repeats: bool | None = None
    """True: runs of one trial in several files are its repeats, however much they differ."""

    def of_file(self, number: int) -> ImportOptions:
        """The options for the file of that number, from 0."""
        return self if self.each_gpus is None else replace(self, gpus=self.each_gpus[number])

    def given(self) -> dict[str, str]:
        """The options that were given, as text."""
        values = {option.name: getattr(self, option.name) for option in fields(self)}
        texts = {name: str(value) for name, value in values.items() if value is not None}
        return texts | ({"each_gpus": ",".join(map(str, self.each_gpus))} if self.each_gpus else {})


EACH_GPUS = "--gpus 1,8 (one for each file in their order)"


def how_to_tell(paths: Sequence[Path]) -> str:
    """How the GPUs of these files are told: the next step of an error."""
    return f"{EACH_GPUS}, or --gpus 8 for all" if len(paths) > 1 else "--gpus 8, of all ranks together"


def gpus_of(text: str, files: int) -> tuple[int, ...]:
    """The numbers in the text of --gpus: one, or as many as there are files.

    Raises:
        RequestError: it has others.
    """
    try:
        counts = tuple(parse_whole(part, 1, MOST_GPUS) for part in text.split(","))
        why = "" if len(counts) in (1, files) else f"{len(counts):,} numbers for {files:,} file{'s' * (files > 1)}"
    except ValueError as error:
        why = str(error)
    if why:
        raise RequestError(f"--gpus is {shown(text)}: {why}", valid=[EACH_GPUS, "--gpus 8 (of all ranks together)"])
    return counts


def check(options: ImportOptions) -> None:
    """Refuses values that no run can have.

    Raises:
        RequestError: names the option, the value and the valid ones.
    """
    for count in (options.gpus, *(options.each_gpus or ())):
        check_within("--gpus", count, 1, MOST_GPUS)
    check_within("--micro-batch", options.micro_batch, 1, 1_000_000)
    check_within("--train-samples", options.train_samples, 1, _MOST_IMAGES)
    check_within("--image-size", options.image_size, 1, 8192)
    check_within("--zero-stage", options.zero_stage, 0, 3)
    if options.cells is not None and options.cells not in SPEEDS:
        raise unknown("kind of cells", options.cells, SPEEDS)
    if options.precision is not None:
        precision(options.precision)
    for option, value in (("--engine", options.engine), ("--name", options.name)):
        if value is not None and not (value.strip() and value.isprintable() and len(value) <= _LONGEST_NAME):
            raise RequestError(f"{option} is {shown(value)}", valid=[f"1 to {_LONGEST_NAME} printable characters"])
    if options.image_size is not None and options.model is None:
        raise RequestError("--image-size is given without --model", next_step="Name the model too: --model vit-b16")
    spec = model_of(options, TrialSetting(1))
    if options.model is not None and options.parameters is not None:
        known = parameters(spec)
        raise RequestError(
            f"--parameters {shown(options.parameters)} is for a model that has no name here",
            next_step=f"Leave it out: {options.model} has {known:,}" if known else "Give one of the two",
        )


def precision(text: str) -> Precision:
    """The precision of that name.

    Raises:
        RequestError: there is none.
    """
    known: tuple[Precision, ...] = get_args(Precision)
    for name in known:
        if text == name:
            return name
    raise unknown("precision", text, known)


_SAME = {
    **dict.fromkeys(("float32", "32", "32-true", "no"), "fp32"),
    **dict.fromkeys(("bfloat16", "bf16-mixed", "amp_bf16"), "bf16"),
    **dict.fromkeys(("float16", "half", "16", "16-mixed", "amp_fp16"), "fp16"), "bf16-true": "bf16-params",
}  # fmt: skip
"""Names of numpy, Lightning, Composer and Accelerate."""
_LOOSE: dict[str, tuple[Precision | None, str]] = {
    "tf32": ("fp32", "TF32"), "fp8": (None, "FP8"), **dict.fromkeys(("amp", "mixed", "mixed precision"), (None, "AMP"))
}  # fmt: skip
"""Names that say how is computed, and what is sent not at all or not alone; they tell series apart."""


def precision_of(text: str) -> tuple[Precision | None, str]:
    """(What a cell says of the precision, a name that tells rows of it apart where that is less than all it says)."""
    lower = text.lower()
    if lower in _LOOSE:
        return _LOOSE[lower]
    return (precision(_SAME.get(lower, lower)) if lower else None), ""


def model_of(options: ImportOptions, setting: TrialSetting) -> ModelSpec:
    """The resolved model. If none was named that is known here, at most its parameters are known.

    Raises:
        RequestError: it cannot be built.
    """
    classes = _CLASSES.get(setting.dataset or "", _CLASSES_ELSE)
    name = options.model or (setting.model if setting.model in NAMED_MODELS else None)
    if name is None:
        told = counted(options.parameters) if options.parameters else setting.parameters
        return ModelSpec(parameter_count=told)
    named = fields_named(name, "Name one of these, a Hugging Face folder, or say --parameters 110M")
    # The constructor sets it: a size that is left out is the configuration's.
    if options.image_size is not None:
        named["image_size"] = options.image_size
    return resolve(ModelSpec(**named), classes)
