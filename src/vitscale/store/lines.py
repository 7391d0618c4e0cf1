"""The lines that a rank writes: the base of all records, and how lines are sorted by kind and read back.

Steps are kept as columns: 42 bytes a step, not half a kilobyte, and arithmetic runs over all at once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeVar, Union, cast, get_args, get_origin, overload

import msgspec
import numpy as np
from pydantic import BaseModel, ConfigDict, Field, PlainValidator, TypeAdapter, ValidationError

from vitscale.base.files import open_regular
from vitscale.errors import printable, shown
from vitscale.present.units import counted
from vitscale.trial.trial import StepWindow

Seconds = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class Record(BaseModel):
    """Base of everything stored. Unknown keys are refused: a record is read as it was meant, or not at all."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class RankLine(Record):
    """One line in a rank's file."""

    kind: str


@dataclass(frozen=True)
class IfThere:
    """Annotation of a bool field of `RankLines`: whether there is a line of a kind."""

    kind: type[RankLine]


class RankLines(Record):
    """All that one rank wrote, sorted by kind.

    A subclass has a field for each kind of line that a rank may write, and its annotation says what becomes of them:

        phases: tuple[PhaseLine, ...]             all lines of the kind, in order
        start: StartLine | None                   the last one; None where there is none
        ended: Annotated[bool, IfThere(EndLine)]  whether there is one
    """

    @classmethod
    def parse(cls, line: bytes) -> RankLine:
        """Parse one line, of a kind that this class has a field for.

        Raises:
            ValidationError: it is of no such kind, or not as the kind is written.
        """
        return _line_parsers(cls).line.validate_json(line)

    @classmethod
    def parse_all(cls, array: bytes) -> list[RankLine]:
        """Parse a JSON array of lines, as `parse` does one."""
        return _line_parsers(cls).array.validate_json(array)

    @classmethod
    def of(cls, lines: Iterable[RankLine], **known: Any) -> Self:
        """Return the record of lines, sorted by kind. They are not validated again: `parse` has done so.

        Args:
            lines: lines of any kinds, in the order in which the rank wrote them.
            known: values of fields that do not come from lines.
        """
        lines_by_kind: dict[type[RankLine], list[RankLine]] = {}
        for line in lines:
            lines_by_kind.setdefault(type(line), []).append(line)
        values = dict(known)
        for name, field in _line_table(cls).items():
            if field.kind in lines_by_kind and name not in known:
                values[name] = field.value_of(lines_by_kind[field.kind])
        # A copy takes half as long as `model_construct`.
        return cast("Self", _without_lines(cls).model_copy(update=values))


def kinds_of(record: type[RankLines]) -> tuple[type[RankLine], ...]:
    """Return the kinds of lines that a subclass of `RankLines` has fields for."""
    return tuple(field.kind for field in _line_table(record).values())


class _LineField(NamedTuple):
    """A field of a subclass of `RankLines` that is made of lines."""

    kind: type[RankLine]
    value_of: Callable[[list[RankLine]], object]
    """Makes the field's value of all lines of the kind, in order."""


@cache
def _line_table(record: type[RankLines]) -> Mapping[str, _LineField]:
    """Return name -> field, for those fields of a subclass of `RankLines` that are made of lines."""
    table: dict[str, _LineField] = {}
    for name, field in record.model_fields.items():
        holds_all = get_origin(field.annotation) in (tuple, Sequence)
        for kind in get_args(field.annotation):
            if isinstance(kind, type) and issubclass(kind, RankLine):
                table[name] = _LineField(kind, tuple if holds_all else _last_line)
        for annotation in field.metadata:
            if isinstance(annotation, IfThere):
                table[name] = _LineField(annotation.kind, bool)
            elif isinstance(annotation, PlainValidator):  # a function that makes the value of lines: `Steps.of`
                value_of = cast("Callable[[list[RankLine]], object]", annotation.func)
                table[name] = table[name]._replace(value_of=value_of)
    return table


@cache
def _without_lines(record: type[RankLines]) -> RankLines:
    """Return a record of no line; fields that are of no kind of line have their defaults, or are missing."""
    no_lines: dict[str, Any] = {name: field.value_of([]) for name, field in _line_table(record).items()}
    return record.model_construct(**no_lines)


def _last_line(lines: list[RankLine]) -> RankLine | None:
    return lines[-1] if lines else None


def refuse_unwritable_numbers(line: RankLine) -> None:
    """Refuse what this program never writes: NaN and infinity, which are no JSON, and integers beyond 64 bits.

    Raises:
        ValueError: a field of the line is one.
    """
    for key, value in line.__dict__.items():
        is_not_finite = isinstance(value, float) and not math.isfinite(value)
        if is_not_finite or is_beyond_64_bits(value):
            raise ValueError(f"{key}: {shown(value)} is no number of vitscale's")


def is_beyond_64_bits(value: object) -> bool:
    """Whether a value is an integer that needs more than 64 bits with its sign."""
    return isinstance(value, int) and value.bit_length() > 63


class _Parsers(NamedTuple):
    line: TypeAdapter[RankLine]
    array: TypeAdapter[list[RankLine]]


@cache
def _line_parsers(record: type[RankLines]) -> _Parsers:
    """Return the parsers of one line and of an array of lines of a subclass of `RankLines`."""
    union: Any = Union[kinds_of(record)]  # noqa: UP007 - of a table
    line = Annotated[union, Field(discriminator="kind")]
    return _Parsers(TypeAdapter(line), TypeAdapter(list[line]))


_MOST_BROKEN_LINES_NAMED = 1000
"""Broken lines of a file that are named; the others are counted. The reason of one takes more room than the line."""
_RANK_FILE = re.compile(r"rank-(\d{1,6})\.jsonl")
Kinds = TypeVar("Kinds", bound=RankLines)


def rank_files(folder: Path) -> dict[int, Path]:
    """Return rank -> its file, in the order of ranks."""
    files = {}
    for path in folder.iterdir():
        rank = _rank_of_file(path)
        if rank is not None:
            files[rank] = path
    return dict(sorted(files.items()))


def _rank_of_file(path: Path) -> int | None:
    """Return 3 for "rank-3.jsonl", None for any other name."""
    match = _RANK_FILE.fullmatch(path.name)
    return int(match[1]) if match is not None else None


def read_lines(path: Path, record: type[Kinds], refuse: Callable[[bytes, RankLine], object]) -> Kinds:
    """Read one rank's lines. A line that is broken, or cut off by a crash, is named in `broken` and left out.

    Args:
        path: the rank's file, whose name has its number.
        record: the table of the kinds of lines.
        refuse: raises ValueError for a line, as text and as parsed, that holds what this program never writes.
    """
    with open_regular(path) as file:
        return parse_lines(path, enumerate(file, start=1), record, refuse)


def parse_lines(
    path: Path,
    numbered: Iterable[tuple[int, bytes]],
    record: type[Kinds],
    refuse: Callable[[bytes, RankLine], object],
    **known: object,
) -> Kinds:
    """Read one rank's lines as `read_lines` does, from (number, text) of each.

    Args:
        path: the rank's file, whose name has its number.
        numbered: the number of each line in the file, from 1, and its text with the line break.
        record: the table of the kinds of lines.
        refuse: raises ValueError for a line, as text and as parsed, that holds what this program never writes.
        known: fields of the record that were read separately.
    """
    lines: list[RankLine] = []
    broken: list[str] = []
    unnamed_count = 0
    for number, raw in numbered:
        if raw.endswith(b"\n") and not raw.strip():
            continue  # a line break after a line that a full disk had cut off
        try:
            if not raw.endswith(b"\n"):
                raise ValueError("cut off")
            line = record.parse(raw)
            refuse(raw, line)
            lines.append(line)
        except (RecursionError, ValueError) as error:
            if len(broken) < _MOST_BROKEN_LINES_NAMED:
                broken.append(f"{path.name}:{number}: {first_reason(error)}")
            else:
                unnamed_count += 1
    if unnamed_count:
        broken.append(f"{path.name}: {counted(unnamed_count, 'more broken line')}")
    return record.of(lines, rank=_rank_of_file(path) or 0, broken=tuple(broken), **known)


def first_reason(error: BaseException) -> str:
    """Return what is wrong with a line or a file, on one line of at most 300 characters."""
    if isinstance(error, ValidationError):
        problem = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(str(part) for part in problem["loc"]) or "content"
        return printable(f"{field[:80]}: {problem['msg']}")[:300]
    if isinstance(error, OSError) and error.strerror:
        return error.strerror  # without the file's name, which the caller's message has
    if not str(error):
        return type(error).__name__
    return printable(str(error)).splitlines()[0][:200]


WINDOWS: tuple[StepWindow, ...] = get_args(StepWindow)
"""A step's window is stored as its index here."""
_WINDOW_CODES = {name: code for code, name in enumerate(WINDOWS)}
_LARGEST_INT64 = 2**63 - 1
_Count = Annotated[int, msgspec.Meta(ge=0, le=_LARGEST_INT64)]


_CHUNK_STEPS = 1000


class StepLine(RankLine):
    """One optimizer step as one rank saw it, from the end of the step before to its own end."""

    kind: Literal["step"] = "step"
    step: Count
    epoch: Count
    seconds: Seconds
    images: Count
    """Real images of this rank; padding is not counted."""
    loss: float | None
    """This rank's share of the loss; the mean over ranks is the mean over the step's real images. Null: not finite."""
    warmup: bool
    window: StepWindow = "light"


@dataclass(frozen=True, eq=False, repr=False)
class Steps(Sequence[StepLine]):
    """The step lines of one rank in order, as columns of equal length; an item is a `StepLine`."""

    step: np.ndarray[Any, np.dtype[np.int64]]
    epoch: np.ndarray[Any, np.dtype[np.int64]]
    seconds: np.ndarray[Any, np.dtype[np.float64]]
    images: np.ndarray[Any, np.dtype[np.int64]]
    loss: np.ndarray[Any, np.dtype[np.float64]]
    """NaN where a line has null."""
    warmup: np.ndarray[Any, np.dtype[np.bool_]]
    window: np.ndarray[Any, np.dtype[np.uint8]]
    """Indices into `WINDOWS`."""

    @classmethod
    def of(cls, lines: Iterable[StepLine | _Row]) -> Steps:
        """Return the steps that these lines record, as columns; `lines` itself where it is such columns already.

        Raises:
            ValueError: a count is beyond 63 bits.
        """
        if isinstance(lines, Steps):
            return lines
        rows = tuple(lines)
        columns = {name: list(map(attrgetter(name), rows)) for name in COLUMNS}
        columns["window"] = [_WINDOW_CODES[window] for window in columns["window"]]
        try:
            # A loss of None becomes NaN.
            return cls(**{name: np.array(columns[name], dtype=kind) for name, kind in COLUMNS.items()})
        except OverflowError:
            raise ValueError("a step, an epoch or a number of images is beyond 63 bits") from None

    @classmethod
    def streamed(cls, lines: Iterable[StepLine]) -> Steps:
        """Return the columns of many lines, of which no more than `_CHUNK_STEPS` are in memory at a time.

        Raises:
            ValueError: a count is beyond 63 bits.
        """
        remaining = iter(lines)
        chunks: list[Steps] = []
        is_exhausted = False
        while not is_exhausted:
            chunk = cls.of(islice(remaining, _CHUNK_STEPS))  # takes the next lines out of `remaining`
            chunks.append(chunk)
            is_exhausted = len(chunk) < _CHUNK_STEPS
        if len(chunks) == 1:
            return chunks[0]
        columns = {}
        for name in COLUMNS:
            columns[name] = np.concatenate([chunk.columns()[name] for chunk in chunks])
        return cls(**columns)

    def columns(self) -> dict[str, np.ndarray[Any, Any]]:
        """Return the columns by name, in the order of `COLUMNS`."""
        return {name: getattr(self, name) for name in COLUMNS}

    def at(self, positions: slice | np.ndarray[Any, Any]) -> Steps:
        """Return the steps at some positions only: a slice, or an array of indices or of booleans."""
        return Steps(**{name: column[positions] for name, column in self.columns().items()})

    def __len__(self) -> int:
        return len(self.step)

    @overload
    def __getitem__(self, index: int) -> StepLine: ...
    @overload
    def __getitem__(self, index: slice) -> Steps: ...
    def __getitem__(self, index: int | slice) -> StepLine | Steps:
        if isinstance(index, slice):
            return self.at(index)
        return self._line_of_row([column[index].item() for column in self.columns().values()])

    def __iter__(self) -> Iterator[StepLine]:
        return map(self._line_of_row, zip(*(column.tolist() for column in self.columns().values()), strict=True))

    @staticmethod
    def _line_of_row(row: Sequence[Any]) -> StepLine:
        step, epoch, seconds, images, loss, warmup, window = row
        # The values were checked when they were read or made.
        return StepLine.model_construct(
            step=step,
            epoch=epoch,
            seconds=seconds,
            images=images,
            loss=None if loss != loss else loss,
            warmup=warmup,
            window=WINDOWS[window],
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Steps):
            return tuple(self) == other
        for name, column in self.columns().items():
            if not np.array_equal(column, other.columns()[name], equal_nan=name == "loss"):
                return False
        return True

    def __hash__(self) -> int:
        return hash((len(self), self.seconds.tobytes()))

    def __repr__(self) -> str:
        return repr(tuple(self))


COLUMNS: Mapping[str, type[np.generic]] = {
    "step": np.int64,
    "epoch": np.int64,
    "seconds": np.float64,
    "images": np.int64,
    "loss": np.float64,
    "warmup": np.bool_,
    "window": np.uint8,
}
"""Columns of `Steps`: name -> type."""


class _Row(msgspec.Struct, tag_field="kind", tag="step", forbid_unknown_fields=True, frozen=True, gc=False):
    """A step's line as in `StepLine`, without what pydantic also accepts ("3" for 3).

    A line takes a sixth of the time that pydantic takes for one. Where the two differ, `parse_steps` gives None, and
    pydantic decides.
    """

    step: _Count
    epoch: _Count
    seconds: Annotated[float, msgspec.Meta(ge=0.0)]
    images: _Count
    loss: float | None
    warmup: bool
    window: Literal["light", "explained", "settling", "gradients", "attached"] = "light"


_ROWS = msgspec.json.Decoder(_Row)
STEP_PREFIX = b'{"kind":"step",'
"""How a rank begins the line of a step."""


def parse_steps(text: bytes) -> Steps | None:
    """Parse whole step lines at once; None where one is not plainly such a line and has to be parsed by itself."""
    try:
        # The decoder takes no NaN, no infinity and no number that becomes one.
        return Steps.of(_ROWS.decode_lines(text))
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
