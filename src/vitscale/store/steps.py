"""The steps of a rank in columns: 42 bytes a step, not half a kilobyte, and arithmetic runs over all at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, overload

import msgspec
import numpy as np

from vitscale.store.lines import Count, RankLine, Seconds
from vitscale.trial.step_schedule import StepWindow

WINDOWS: tuple[StepWindow, ...] = get_args(StepWindow)
"""A step's window is stored as its place here."""
_WINDOW_CODES = {name: code for code, name in enumerate(WINDOWS)}
_MOST = 2**63 - 1
_Count = Annotated[int, msgspec.Meta(ge=0, le=_MOST)]


class StepLine(RankLine):
    """One optimizer step as one rank saw it: from the end of the step before to its own end."""

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
    """The step lines of one rank, in their order: columns of equal length; an item is the line itself."""

    step: np.ndarray[Any, np.dtype[np.int64]]
    epoch: np.ndarray[Any, np.dtype[np.int64]]
    seconds: np.ndarray[Any, np.dtype[np.float64]]
    images: np.ndarray[Any, np.dtype[np.int64]]
    loss: np.ndarray[Any, np.dtype[np.float64]]
    """NaN where a line has null."""
    warmup: np.ndarray[Any, np.dtype[np.bool_]]
    window: np.ndarray[Any, np.dtype[np.uint8]]
    """Places in `WINDOWS`."""

    @classmethod
    def of(cls, lines: Iterable[StepLine]) -> Steps:
        """The columns of `lines`; these themselves where they are columns.

        Raises:
            ValueError: a count is beyond 63 bits.
        """
        if isinstance(lines, Steps):
            return lines
        return cls._of_rows(tuple(lines))

    @classmethod
    def _of_rows(cls, rows: Sequence[StepLine] | Sequence[_Row]) -> Steps:
        try:
            return cls(
                np.array([row.step for row in rows], dtype=np.int64),
                np.array([row.epoch for row in rows], dtype=np.int64),
                np.array([row.seconds for row in rows], dtype=np.float64),
                np.array([row.images for row in rows], dtype=np.int64),
                np.array([row.loss for row in rows], dtype=np.float64),  # None: NaN
                np.array([row.warmup for row in rows], dtype=np.bool_),
                np.array([_WINDOW_CODES[row.window] for row in rows], dtype=np.uint8),
            )
        except OverflowError:
            raise ValueError("a step, an epoch or a number of images is beyond 63 bits") from None

    def columns(self) -> dict[str, np.ndarray[Any, Any]]:
        """Name to column."""
        return {name: getattr(self, name) for name in COLUMNS}

    def at(self, places: slice | np.ndarray[Any, Any]) -> Steps:
        """The steps at some places alone, in the order of these."""
        return Steps(**{name: column[places] for name, column in self.columns().items()})

    def __len__(self) -> int:
        return len(self.step)

    @overload
    def __getitem__(self, place: int) -> StepLine: ...
    @overload
    def __getitem__(self, place: slice) -> Steps: ...
    def __getitem__(self, place: int | slice) -> StepLine | Steps:
        if isinstance(place, slice):
            return self.at(place)
        return self._line([column[place].item() for column in self.columns().values()])

    def __iter__(self) -> Iterator[StepLine]:
        return map(self._line, zip(*(column.tolist() for column in self.columns().values()), strict=True))

    @staticmethod
    def _line(row: Sequence[Any]) -> StepLine:
        step, epoch, seconds, images, loss, warmup, window = row
        # They were checked as they were read or made.
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
        if isinstance(other, Steps):
            theirs = other.columns()
            return all(
                np.array_equal(own, theirs[name], equal_nan=name == "loss") for name, own in self.columns().items()
            )
        return tuple(self) == other

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
"""Of `Steps`: name and type."""


class _Row(msgspec.Struct, tag_field="kind", tag="step", forbid_unknown_fields=True, frozen=True, gc=False):
    """A step's line as `StepLine` has it, without what pydantic takes besides ("3" for 3)."""

    step: _Count
    epoch: _Count
    seconds: Annotated[float, msgspec.Meta(ge=0.0)]
    images: _Count
    loss: float | None
    warmup: bool
    window: Literal["light", "explained", "settling", "gradients", "attached"] = "light"


_ROWS = msgspec.json.Decoder(_Row)
STEP_PREFIX = b'{"kind":"step",'
"""How a rank writes the line of a step."""


def parse_steps(text: bytes) -> Steps | None:
    """Whole step lines at once; None where one is not plainly such a line, and has to be looked at by itself."""
    try:
        steps = Steps._of_rows(_ROWS.decode_lines(text))
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    known = np.isfinite(steps.loss) | np.isnan(steps.loss)
    return steps if np.isfinite(steps.seconds).all() and known.all() else None
