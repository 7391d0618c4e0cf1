"""The program, and what its verbs share: arguments, options, the console.

Reads options' values as users write them: "16,32,1024", "1-8", "80GB", "1.5d".
"""

from __future__ import annotations

import gc
import math
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self, TextIO

import typer
from rich.console import Console
from typer.core import TyperGroup
from typing_extensions import override

from vitscale.errors import RequestError, shown
from vitscale.present.document import Document
from vitscale.present.terminal import show

if TYPE_CHECKING:
    from vitscale.store.results import Unread

VERBS = {
    "init": "starting", "plan": "studies", "run": "studies", "watch": "sharing", "report": "reporting",
    "compare": "comparing", "predict": "predicting", "advise": "predicting", "import": "importing", "check": "studies",
    "export": "sharing", "lint": "studies", "lab": "laboratory", "train": "starting", "schema": "starting",
    "completion": "starting",
}  # fmt: skip
"""Verbs in the order in which `--help` lists them -> the module of `cli/` that has each."""
COMPLETE = "_VITSCALE_COMPLETE"
"""Variable that a shell's completion script sets when it calls the program for what may come next."""


class _Program(TyperGroup):
    @override
    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(super().list_commands(ctx), key=list(VERBS).index)

    @override
    def invoke(self, ctx: Any) -> Any:
        """Invokes a verb; where an unknown option names a study's field (--lr), suggests the KEY=VALUE to write.

        Raises:
            RequestError: an unknown option names a field of the study, or an option's text is no number.
        """
        try:
            return super().invoke(ctx)
        except Exception as error:  # typer has no public name for the error of an unknown option
            unknown = str(getattr(error, "option_name", ""))
            command = getattr(getattr(error, "ctx", None), "command", None)
            if unknown and any(parameter.name == "overrides" for parameter in getattr(command, "params", ())):
                from vitscale.study.file import likely_overrides

                if likely := likely_overrides(unknown.lstrip("-").replace("-", "_").lower()):
                    what = f"no such option: {shown(unknown)}; what a study says is given as KEY=VALUE"
                    raise RequestError(what, next_step=f"Write {' or '.join(likely)}") from None
            if (refusal := _no_number(error)) is not None:
                raise refusal from None
            raise


def _completed_keys(incomplete: str) -> list[str]:
    """The study's fields that begin with what is typed, each with an equals sign."""
    from vitscale.study.sections import SECTIONS, SWEEPABLE

    fields = [f"{section}.{key}" for section, model in SECTIONS.items() for key in model.model_fields]
    keys = [*fields, *(f"sweep.{field}" for field in SWEEPABLE)]
    return [f"{key}=" for key in keys if key.startswith(incomplete)]


app = typer.Typer(
    name="vitscale",
    cls=_Program,
    help="How will my vision transformer scale, where does the time go, and what should I rent?",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    add_completion=False,
)


def option(names: str, metavar: str, words: str, parse: Callable[[str, str], Any] | None = None) -> Any:
    """An option from its names ("-o --output"), a word for its value (empty: a switch), and its help.

    `parse` makes the value of its text and its name, where the type alone does not say how it may be written.
    """
    *_, longest = names.split()
    parser = None if parse is None else partial(_parsed, parse, longest)
    return typer.Option(*names.split(), metavar=metavar or None, help=words, callback=_usable, parser=parser)


def _parsed(parse: Callable[[str, str], Any], option_name: str, text: str) -> Any:
    return parse(text, option_name)


def _no_number(error: Exception) -> RequestError | None:
    """The refusal of an option's text that is no number; None where an error is about something else.

    The library that converts options says it in words of its own, without the text.
    """
    details = getattr(error.__cause__, "errors", None)
    option_names = getattr(getattr(error, "param", None), "opts", ())
    if details is None or not option_names:
        return None
    for detail in details():
        kind = {"int_": "whole number", "float_": "number"}
        of_kind = [words for beginning, words in kind.items() if str(detail["type"]).startswith(beginning)]
        if of_kind:
            return RequestError(f"{max(option_names, key=len)}: {shown(str(detail['input']))} is no {of_kind[0]}")
    return None


def _usable(value: Any) -> Any:
    """An option's value; a path is one that the system takes (no name too long, no folder that may not be entered).

    Raises:
        RequestError: it does not.
    """
    if isinstance(value, Path):
        try:
            value.exists()
        except OSError as error:
            raise RequestError(f"{shown(str(value))} cannot be used: {error.strerror or error}") from None
    return value


def seconds(text: str, option: str) -> float:
    """The seconds of "12" or "12s", of "2m" or "1.5h"; see `seconds_of`."""
    number = _plain_number(text)
    return seconds_of(text, option) if number is None else number


def hours(text: str, option: str) -> float:
    """The hours of "1000" or "1000h", of "30d" or "90m"; see `seconds_of`."""
    number = _plain_number(text)
    return seconds_of(text, option) / _SECONDS["h"] if number is None else number


class Money(float):
    """An amount, with the currency that stood beside it; empty: none did."""

    currency: str

    def __new__(cls, amount: float, currency: str = "") -> Self:
        """An amount of this currency."""
        money = super().__new__(cls, amount)
        money.currency = currency
        return money


_AMOUNT = r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:e[+-]?\d+)?|nan|[+-]?inf"
_CURRENCY = r"[$\u20ac\u00a3\u00a5\u20b9]|[A-Za-z]{3}"
_MONEY = re.compile(rf"(?:({_CURRENCY}) ?)?({_AMOUNT})(?: ?({_CURRENCY}))?")


def money(text: str, option: str) -> Money:
    """The amount in "300", "$300", "300 EUR" or "USD 2.50", in whatever currency.

    Raises:
        RequestError: it is no amount. What it must be is checked where it is used.
    """
    match = None if text in ("nan", "inf") else _MONEY.fullmatch(text.strip())
    if match is None and (value := _plain_number(text)) is not None:
        return Money(value)
    if match is None:
        plain = re.sub(r",(?=\d{3}(?:,|\.|$))", "", text.strip()).replace(",", ".")  # "1,500" is 1500, "2,5" is 2.5
        example = plain if _MONEY.fullmatch(plain) else "300, $300 or 300 EUR"
        raise RequestError(f"{option}: {shown(text)} is no amount", next_step=f"Write {example}")
    return Money(float(match[2]), match[1] or match[3] or "")


def _plain_number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


StudyArgument = Annotated[Path, typer.Argument(metavar="STUDY.toml", help="The study file.", show_default=False)]
OverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Put over the study: train.micro_batch=16.",
        show_default=False,
        autocompletion=_completed_keys,
    ),
]
ResultsArgument = Annotated[
    Path, typer.Argument(metavar="RESULTS", help="A results folder, or a bundle of it.", show_default=False)
]
JsonOption = Annotated[bool, option("--json", "", "Print JSON instead of a table.")]
OutputOption = Annotated[Path | None, option("-o --output", "RESULTS", "Results folder.  [default: results/NAME]")]
EngineOption = Annotated[str | None, option("--engine", "NAME", "ddp, fsdp2, deepspeed, ...")]
PrecisionOption = Annotated[str | None, option("--precision", "NAME", "fp32, bf16, bf16-params or fp16.")]
MicroBatchOption = Annotated[int | None, option("--micro-batch", "IMAGES", "Images per rank and micro-step.")]
ModelOption = Annotated[str | None, option("--model", "NAME", "A named model (vit-b16), or a Hugging Face folder.")]
ParametersOption = Annotated[
    str | None, option("--parameters", "N", "Size of a model that has no name here: 110M, 1.3B.")
]
PriceOption = Annotated[
    float | None, option("--price", "PRICE", "Price of one GPU for an hour, in any currency: 2.5.", money)
]
GpuMemoryOption = Annotated[
    str | None, option("--gpu-memory", "SIZE", "Memory of one device: 80GB.  [default: as recorded, or found here]")
]
CombineOption = Annotated[
    bool, option("--combine-unlike", "", "Combine runs of unlike hardware or library versions all the same.")
]
CheckpointOption = Annotated[
    float | None, option("--checkpoint-seconds", "SECONDS", "To save one checkpoint.  [default: as recorded]", seconds)
]
NodeMtbfOption = Annotated[
    float | None, option("--node-mtbf", "HOURS", "Mean time between failures of a host.  [default: a prior]", hours)
]
VerboseOption = Annotated[bool, option("-v --verbose", "", "Print everything, not the first 25 lines.")]
SiteOption = Annotated[
    Path | None, option("--site", "FILE", "Site file: [launch], [slurm] and [node] put over the study's own.")
]
LauncherOption = Annotated[
    str | None, option("--launcher", "NAME", "How ranks are started: local, torchrun, mpirun, ...")
]
SchedulerOption = Annotated[str | None, option("--scheduler", "NAME", "Where ranks run: local, hostfile or slurm.")]
HostfileOption = Annotated[Path | None, option("--hostfile", "FILE", "Hosts to run on: one NAME slots=N a line.")]


def compute_on_one_core() -> None:
    """Makes numpy use one thread and the garbage collector run less often, for verbs that start no ranks.

    Called before numpy is imported. A fit's matrix products are so small that OpenBLAS's threads would spend as much
    processor time on waiting for each other as the fit takes. Cycles of objects are looked for only after every 100,000
    new ones, for an answer needs none.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    gc.set_threshold(100_000)


class ProgramConsole(Console):
    """A console that drops its output when nobody reads it any more (`vitscale run ... | head`): the study goes on.

    It prints what it is given: `:b:` in a file's name or an address is no emoji.
    """

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, emoji=False)

    @override
    def on_broken_pipe(self) -> None:
        self.quiet = True
        silence(sys.stdout)


def silence(stream: TextIO) -> None:
    """Redirects a stream that can no longer be written to /dev/null, so that exiting does not fail on it again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def answer(
    verb: str,
    fields: Callable[[], Mapping[str, Any]],
    document: Callable[[], Document],
    *,
    unread: Sequence[Unread] | None,
    json: bool,
    verbose: bool,
) -> None:
    """Prints what a verb has found: as JSON where --json asks for it, else for a terminal.

    Args:
        verb: the verb.
        fields: makes the fields of the JSON.
        document: makes what a terminal shows.
        unread: what cannot be read of the results that the answer rests on, with which either form begins; None: it
            rests on none.
        json: whether --json is given.
        verbose: whether to show folded parts.
    """
    from vitscale.store.unread import (
        beginning_with_unread,
        unread_fields,
    )  # with pydantic, which help need not wait for

    if json:
        from vitscale.present.data import envelope  # with msgspec

        of_results = {} if unread is None else {"unread": unread_fields(unread)}
        sys.stdout.write(envelope(verb, {**of_results, **fields()}))
    else:
        show(ProgramConsole(), beginning_with_unread(document(), unread or ()), verbose)


def write_new(path: Path, text: str) -> None:
    """Writes a file that does not exist yet, and makes its folder where that is missing.

    Raises:
        RequestError: it exists, cannot be written, or is `-`.
    """
    if str(path) == "-":
        raise RequestError("-o - names no file", next_step="Name one with -o, or leave -o out")
    try:
        if not path.parent.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise RequestError(f"{shown(str(path))} is there already", next_step="Name another file with -o") from None
    except (OSError, ValueError) as error:  # a NUL in the name
        reason = getattr(error, "strerror", None) or error
        raise RequestError(f"{shown(str(path))} cannot be written: {reason}") from None


_MOST_RANKS = 100_000
MOST_COUNTS = 1000
"""Most rank counts in one question."""

_COUNT = re.compile(r"\s*(\d{1,9})\s*(?:-\s*(\d{1,9})\s*)?")
_SIZE = re.compile(r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*([KMGT]i?)B\s*", re.IGNORECASE)
_EXAMPLE = 'Write "16,32,1024" or "1-8"'
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_DURATION = re.compile(r"(\d{1,9}(?:\.\d{1,9})?|\.\d{1,9})([smhd])")


def rank_counts(text: str, option: str = "--gpus") -> tuple[int, ...]:
    """The counts in a list of numbers and ranges, each once, in rising order.

    Raises:
        RequestError: a part is no count, a range runs backwards, a count is 0 or too large, or there are too many.
    """
    counts: set[int] = set()
    for part in text.split(","):
        match = _COUNT.fullmatch(part)
        if match is None:
            raise RequestError(f"{option}: {shown(part.strip())} is no rank count", next_step=_EXAMPLE)
        first = int(match[1])
        last = int(match[2]) if match[2] is not None else first
        for count in (first, last):
            if not 1 <= count <= _MOST_RANKS:
                raise RequestError(f"{option}: {count} ranks cannot be", valid=[f"1 to {_MOST_RANKS:,}"])
        if last < first:
            raise RequestError(f"{option}: {shown(part.strip())} runs backwards", next_step=f'Write "{last}-{first}"')
        if len(counts) + last - first + 1 > MOST_COUNTS:
            raise RequestError(
                f"{option}: more than {MOST_COUNTS:,} rank counts", next_step="Ask for fewer, such as 8,16,32"
            )
        counts.update(range(first, last + 1))
    return tuple(sorted(counts))


def size_bytes(text: str, option: str) -> int:
    """Bytes of "80GB" (10^9 bytes) or "80GiB" (2^30).

    Raises:
        RequestError: it is no size, or less than a byte.
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise RequestError(f"{option}: {shown(text)} is no size", next_step='Write "80GB" or "75.5GiB"')
    base = 1024 if match[2].lower().endswith("i") else 1000
    power = "KMGT".index(match[2][0].upper()) + 1
    size = int(float(match[1]) * base**power)
    if size < 1:
        raise RequestError(f"{option}: {shown(text)} is nothing", next_step='Write "80GB" or "75.5GiB"')
    return size


def seconds_of(text: str, option: str) -> float:
    """The seconds of "90s", "30m", "2h" or "1.5d".

    Args:
        text: the value as the user gave it.
        option: the option's name, for the message.

    Raises:
        RequestError: it is no duration, or not above 0.
    """
    match = _DURATION.fullmatch(text.strip())
    seconds = float(match[1]) * _SECONDS[match[2]] if match else 0.0
    if seconds <= 0.0:
        raise RequestError(f"{option}: {shown(text)} is no duration", next_step='Write "90s", "30m", "2h" or "1.5d"')
    return seconds


def positive(value: float | None, option: str, most: float = math.inf) -> float | None:
    """`value`, checked to be above 0 and at most `most`, or not given.

    Raises:
        RequestError: it is given and out of range.
    """
    if value is not None and not (0 < value <= most and math.isfinite(value)):
        upper = "" if math.isinf(most) else f" and at most {most:g}"
        raise RequestError(f"{option}: {value:g} cannot be", valid=[f"numbers above 0{upper}"])
    return value


_SHARE = re.compile(r"(\d{0,3}(?:\.\d{1,9})?)\s*(%?)")


def share_of(text: str, option: str, most: float = 10.0) -> float:
    """The share in "5%" or "0.05": 0.05. Where it may be more than the whole, that is told in percent: "5" may be "5%".

    Raises:
        RequestError: it is no share above 0 and up to `most`.
    """
    match = _SHARE.fullmatch(text.strip())
    in_percent = match is not None and match[2] == "%"
    number = float(match[1]) if match is not None and match[1] not in ("", ".") else math.nan
    share = number / 100 if in_percent else number
    may_be_percent = not in_percent and (number > 1 or (number == 1 and most > 1))
    if 0 < share <= most and not may_be_percent:
        return share
    percent = f"Write {text.strip()}% if percent are meant" if may_be_percent and number <= 100 * most else ""
    if most <= 1:
        valid = [f"numbers above 0 and at most {most:g}", "80%"]
        raise RequestError(f"{option}: {shown(text)} cannot be", valid=valid, next_step=percent)
    raise RequestError(f"{option} is {shown(text)}", valid=["5%", "0.05"], next_step=percent)


def share_of_whole(text: str, option: str) -> float:
    """The share in "80%" or "0.8", which is at most the whole; see `share_of`."""
    return share_of(text, option, most=1.0)
