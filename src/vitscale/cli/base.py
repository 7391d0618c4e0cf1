"""The program, and what its verbs share: arguments, options, the console.

Reads options' values as users write them: "16,32,1024", "1-8", "80GB", "1.5d".
"""

from __future__ import annotations

import gc
import math
import os
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self, TextIO

import typer
from rich.console import Console
from typer.core import TyperGroup
from typing_extensions import override

from vitscale.api.arguments import MOST_COUNTS, check_rank_count, too_many_counts
from vitscale.errors import RequestError, shown
from vitscale.present.terminal import show
from vitscale.present.verb_result import VerbResult

VERBS = {
    "init": "starting", "plan": "studies", "run": "studies", "explain": "explaining", "watch": "sharing",
    "report": "reporting", "compare": "comparing", "predict": "predicting", "advise": "predicting",
    "import": "importing", "check": "studies", "export": "sharing", "lint": "studies", "lab": "laboratory",
    "train": "starting", "schema": "starting", "completion": "starting",
}  # fmt: skip
"""Verbs in the order in which `--help` lists them -> the module of `cli/` that has each."""
COMPLETE = "_VITSCALE_COMPLETE"
"""Variable that a shell's completion script sets when it calls the program for what may come next."""


class _Program(TyperGroup):
    """The group of all verbs."""

    @override
    def list_commands(self, ctx: Any) -> list[str]:
        """Return the verbs in the order of `VERBS`, for `--help`."""
        return sorted(super().list_commands(ctx), key=list(VERBS).index)

    @override
    def invoke(self, ctx: Any) -> Any:
        """Invoke a verb; where an unknown option names a study's field (--lr), suggest the KEY=VALUE to write.

        Raises:
            RequestError: an unknown option names a field of the study, or an option's text is no number.
        """
        try:
            return super().invoke(ctx)
        except Exception as error:  # typer has no public name for the error of an unknown option
            refusal = _refusal_of_field(error) or _refusal_of_text(error)
            if refusal is not None:
                raise refusal from None
            raise


def _refusal_of_field(error: Exception) -> RequestError | None:
    """Return the refusal of an unknown option that names a study's field, where the verb takes KEY=VALUE; else None.

    Example: of `vitscale run study.toml --lr 0.1` it says to write `train.lr=...`.
    """
    option_name = str(getattr(error, "option_name", ""))
    context = getattr(error, "ctx", None)
    parameters = getattr(getattr(context, "command", None), "params", ())
    takes_overrides = any(parameter.name == "overrides" for parameter in parameters)
    if not option_name or not takes_overrides:
        return None
    from vitscale.study.file import likely_overrides

    likely = likely_overrides(option_name.lstrip("-").replace("-", "_").lower())
    if not likely:
        return None
    message = f"no such option: {shown(option_name)}; what a study says is given as KEY=VALUE"
    return RequestError(message, next_step=f"Write {' or '.join(likely)}")


_NUMBER_KINDS = {"int_": "whole number", "float_": "number"}
"""Beginning of the kind of a conversion error -> what the text should have been."""


def _refusal_of_text(error: Exception) -> RequestError | None:
    """Return the refusal of an option's text that is no number; None where an error is about something else.

    The library that converts options has a message of its own, which lacks the text.
    """
    list_details = getattr(error.__cause__, "errors", None)
    option_names = getattr(getattr(error, "param", None), "opts", ())
    if list_details is None or not option_names:
        return None
    longest_name = max(option_names, key=len)
    for detail in list_details():
        for beginning, kind in _NUMBER_KINDS.items():
            if str(detail["type"]).startswith(beginning):
                return RequestError(f"{longest_name}: {shown(str(detail['input']))} is no {kind}")
    return None


def _completed_keys(incomplete: str) -> list[str]:
    """Return the study's fields that begin with what is typed, each with an equals sign: "train.engine="."""
    from vitscale.study.sections import SECTIONS, SWEEPABLE

    keys: list[str] = []
    for section, model in SECTIONS.items():
        keys += [f"{section}.{key}" for key in model.model_fields]
    keys += [f"sweep.{field}" for field in SWEEPABLE]
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
    """Return an option for typer.

    Args:
        names: its names, the longest last: "-o --output".
        metavar: a word for its value; empty: it is a switch.
        words: its help.
        parse: a function of the text and the option's longest name that returns the value; None: typer converts the
            text by the option's type.
    """
    *_, longest_name = names.split()
    parser = None if parse is None else partial(_parse_value, parse, longest_name)
    return typer.Option(*names.split(), metavar=metavar or None, help=words, callback=_check_path, parser=parser)


def _parse_value(parse: Callable[[str, str], Any], option_name: str, text: str) -> Any:
    return parse(text, option_name)


def _check_path(value: Any) -> Any:
    """Return an option's value, after a check of those that are paths.

    Raises:
        RequestError: the system cannot look the path up: a name is too long, or a folder may not be entered.
    """
    if isinstance(value, Path):
        try:
            value.exists()
        except OSError as error:
            raise RequestError(f"{shown(str(value))} cannot be used: {error.strerror or error}") from None
    return value


def seconds(text: str, option: str) -> float:
    """Return the seconds of "12" or "12s", of "2m" or "1.5h"; see `seconds_of`."""
    number = _plain_number(text)
    return seconds_of(text, option) if number is None else number


def hours(text: str, option: str) -> float:
    """Return the hours of "1000" or "1000h", of "30d" or "90m"; see `seconds_of`."""
    number = _plain_number(text)
    return seconds_of(text, option) / _SECONDS_BY_UNIT["h"] if number is None else number


class Money(float):
    """An amount of money."""

    currency: str
    """The sign or code beside the amount ("$", "EUR"); empty where none stands there."""

    def __new__(cls, amount: float, currency: str = "") -> Self:
        """An amount of this currency."""
        money = super().__new__(cls, amount)
        money.currency = currency
        return money


_AMOUNT = r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:e[+-]?\d+)?|nan|[+-]?inf"
_CURRENCY = r"[$\u20ac\u00a3\u00a5\u20b9]|[A-Za-z]{3}"
"""A currency: one of the signs $, euro, pound, yen and rupee, or a code of three letters."""
_MONEY_TEXT = re.compile(rf"(?:(?P<before>{_CURRENCY}) ?)?(?P<amount>{_AMOUNT})(?: ?(?P<behind>{_CURRENCY}))?")
"""An amount with its currency before or behind it, or none: "$300", "USD 2.50", "300 EUR", "300"."""
_THOUSANDS_COMMA = re.compile(r",(?=\d{3}(?:,|\.|$))")
"""The comma of "1,500", which is 1500; that of "2,5" is a point."""


def money(text: str, option: str) -> Money:
    """Return the amount in "300", "$300", "300 EUR" or "USD 2.50", in whatever currency.

    Raises:
        RequestError: it is no amount. What it must be is checked where it is used.
    """
    match = None if text in ("nan", "inf") else _MONEY_TEXT.fullmatch(text.strip())
    if match is not None:
        return Money(float(match["amount"]), match["before"] or match["behind"] or "")
    number = _plain_number(text)
    if number is not None:
        return Money(number)
    without_commas = re.sub(_THOUSANDS_COMMA, "", text.strip()).replace(",", ".")
    example = without_commas if _MONEY_TEXT.fullmatch(without_commas) else "300, $300 or 300 EUR"
    raise RequestError(f"{option}: {shown(text)} is no amount", next_step=f"Write {example}")


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
SchedulerOption = Annotated[
    str | None, option("--scheduler", "NAME", "Where ranks run: local, hostfile, slurm, pbs, lsf, flux or kubernetes.")
]
HostfileOption = Annotated[Path | None, option("--hostfile", "FILE", "Hosts to run on: one NAME slots=N a line.")]


def compute_on_one_core() -> None:
    """Make OpenBLAS use one thread and the garbage collector run less often, for verbs that start no ranks.

    Only time depends on either. A fit's matrix products are so small that OpenBLAS's threads spend more processor time
    on waiting for each other than the fit takes. Only a variable keeps OpenBLAS from starting them, and only before
    numpy is loaded; ranks would inherit it. The collector looks for cycles of objects after every 100,000 new ones,
    and answers need none.
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
    """Redirect a stream that can no longer be written to /dev/null, so that exiting does not fail on it again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def show_result(result: VerbResult, *, json: bool, verbose: bool) -> None:
    """Print what a verb returned: as JSON where --json asks for it, else its document for a terminal."""
    if json:
        sys.stdout.write(result.to_json())
    else:
        show(ProgramConsole(), result.document(), verbose)


_COUNT_RANGE = re.compile(r"\s*(?P<first>\d{1,9})\s*(?:-\s*(?P<last>\d{1,9})\s*)?")
"""A count, "8", or a range of counts, "1-8", with blanks anywhere."""
_COUNTS_EXAMPLE = 'Write "16,32,1024" or "1-8"'
_SECONDS_BY_UNIT = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_DURATION_TEXT = re.compile(r"(?P<number>\d{1,9}(?:\.\d{1,9})?|\.\d{1,9})(?P<unit>[smhd])")
"""A number with a unit of `_SECONDS_BY_UNIT`: "90s", "1.5h", ".5d"."""


def rank_counts(text: str, option: str = "--gpus") -> tuple[int, ...]:
    """Return the counts in a list of numbers and ranges, each once, in rising order: 1, 2, 3 and 8 of "1-3,8".

    Raises:
        RequestError: a part is no count, a range runs backwards, a count is 0 or too large, or there are too many.
    """
    counts: set[int] = set()
    for part in text.split(","):
        part_counts = _count_range(part, option)
        if len(counts) + len(part_counts) > MOST_COUNTS:
            raise too_many_counts(option)
        counts.update(part_counts)
    return tuple(sorted(counts))


def _count_range(part: str, option: str) -> range:
    """Return the counts of "8" or "1-3".

    Raises:
        RequestError: it is no count, runs backwards, or a count is 0 or too large.
    """
    match = _COUNT_RANGE.fullmatch(part)
    if match is None:
        raise RequestError(f"{option}: {shown(part.strip())} is no rank count", next_step=_COUNTS_EXAMPLE)
    first = int(match["first"])
    last = int(match["last"]) if match["last"] is not None else first
    for count in (first, last):
        check_rank_count(count, option)
    if last < first:
        raise RequestError(f"{option}: {shown(part.strip())} runs backwards", next_step=f'Write "{last}-{first}"')
    return range(first, last + 1)


def seconds_of(text: str, option: str) -> float:
    """Return the seconds of "90s", "30m", "2h" or "1.5d".

    Args:
        text: the value as the user gave it.
        option: the option's name, for the message.

    Raises:
        RequestError: it is no duration, or not above 0.
    """
    match = _DURATION_TEXT.fullmatch(text.strip())
    seconds = float(match["number"]) * _SECONDS_BY_UNIT[match["unit"]] if match else 0.0
    if seconds <= 0.0:
        raise RequestError(f"{option}: {shown(text)} is no duration", next_step='Write "90s", "30m", "2h" or "1.5d"')
    return seconds


_SHARE_TEXT = re.compile(r"(?P<number>\d{0,3}(?:\.\d{1,9})?)\s*(?P<percent>%?)")
"""A share: "5%", "0.05", ".05". It also fits texts without a digit, "%" and "", which are refused afterwards."""


class _WrittenShare(NamedTuple):
    """A share as a user wrote it."""

    number: float
    """NaN for a text that is no share."""
    is_percent: bool

    @property
    def share(self) -> float:
        """The share as a part of 1."""
        return self.number / 100 if self.is_percent else self.number


def _written_share(text: str) -> _WrittenShare:
    """Take a share apart, such as "80%" or "0.8"."""
    match = _SHARE_TEXT.fullmatch(text.strip())
    if match is None:
        return _WrittenShare(math.nan, is_percent=False)
    has_digits = match["number"] not in ("", ".")
    number = float(match["number"]) if has_digits else math.nan
    return _WrittenShare(number, is_percent=match["percent"] == "%")


def share_of(text: str, option: str, most: float = 10.0) -> float:
    """Return the share in "5%" or "0.05": 0.05.

    A share of more than the whole must be written in percent ("150%"): "5" may stand for "5%", and is refused.

    Args:
        text: the value as the user gave it.
        option: the option's name, for the message.
        most: the largest share that is allowed.

    Raises:
        RequestError: it is no share above 0 and up to `most`.
    """
    written = _written_share(text)
    looks_like_percent = written.number > 1 or (written.number == 1 and most > 1)
    lacks_percent_sign = looks_like_percent and not written.is_percent
    if 0 < written.share <= most and not lacks_percent_sign:
        return written.share
    next_step = ""
    if lacks_percent_sign and written.number <= 100 * most:
        next_step = f"Write {text.strip()}% if percent are meant"
    if most <= 1:
        valid = [f"numbers above 0 and at most {most:g}", "80%"]
        raise RequestError(f"{option}: {shown(text)} cannot be", valid=valid, next_step=next_step)
    raise RequestError(f"{option} is {shown(text)}", valid=["5%", "0.05"], next_step=next_step)


def share_of_whole(text: str, option: str) -> float:
    """Return the share in "80%" or "0.8", which is at most the whole; see `share_of`."""
    return share_of(text, option, most=1.0)
