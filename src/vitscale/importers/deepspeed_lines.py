"""What DeepSpeed prints with `wall_clock_breakdown`, line by line: the times of steps and of micro-steps.

One global line stands for one optimizer step: its timers are reset whenever they are printed (`reset=True`), once at
each boundary of accumulation, whatever `steps_per_print` says; `fwd`, `bwd` and `step` are sums over its micro-steps.
Source: `step` in deepspeed/runtime/engine.py and `SynchronizedWallClockTimer.log` in deepspeed/utils/timer.py, of
DeepSpeed 0.6 to 0.15, whose releases call the timers forward and backward or fwd and bwd.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_BEGIN = re.compile(r"(?:\[Rank (?P<log>\d{1,7})\]\s*|rank=(?P<print>\d{1,7})\s*)?time \(ms\)")
_STAMP = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)[,.](\d{3})\]")
_VALUE = re.compile(r"\s*(?P<name>[a-z_]+)\s*:\s*(?P<ms>\d{1,12}\.\d\d)(?!\d)")
"""Always two decimals: a number with fewer was cut off."""
_PARTS = {
    "fwd": "forward",
    "forward": "forward",
    "bwd": "backward",
    "backward": "backward",
    "bwd_inner": "inner",
    "backward_inner": "inner",
    "bwd_allreduce": "allreduce",
    "backward_allreduce": "allreduce",
    "step": "step",
}
_MICRO = "_microstep"
_LONGEST_MS = 1e9


@dataclass(frozen=True)
class Times:
    """One printed line of timers, in seconds."""

    rank: int | None
    """Null: the line does not tell."""
    unix_seconds: float | None
    """When it was printed, which is when the step was over; in a clock of which only differences count."""
    micro: bool
    """Of one micro-step; else of a whole optimizer step."""
    forward: float
    inner: float
    """Backward without the exchange of gradients."""
    allreduce: float | None
    """Of which `forward`, `inner` and this are disjoint; null where it was not printed."""
    step: float

    @property
    def total(self) -> float:
        """All parts together."""
        return self.forward + self.inner + (self.allreduce or 0.0) + self.step


@dataclass(frozen=True)
class Broken:
    """A line of timers that cannot be used."""

    rank: int | None
    unix_seconds: float | None
    micro: bool
    why: str


def without_colours(text: str) -> str:
    """`text` without escape sequences of terminals."""
    return _ANSI.sub("", text) if "\x1b" in text else text


def timers(text: str) -> Iterator[Times | Broken]:
    """The timers printed on one line: none, one, or several where ranks wrote into one another's lines."""
    if "time (ms)" not in text:
        return
    begins = list(_BEGIN.finditer(text))
    before = 0
    for at, begin in enumerate(begins):
        end = begins[at + 1].start() if at + 1 < len(begins) else len(text)
        rank = begin["log"] or begin["print"]
        stamps = list(_STAMP.finditer(text, before, begin.start()))
        before = begin.end()
        line = _read(text[begin.end() : end], int(rank) if rank else None, _unix(stamps[-1]) if stamps else None)
        if line is not None:
            yield line


def _read(text: str, rank: int | None, unix_seconds: float | None) -> Times | Broken | None:
    """None: timers of other parts, which say nothing here."""
    names = re.findall(r"\|\s*([a-z_]+)", text)
    micro = any(name.endswith(_MICRO) for name in names)
    ours = [name for name in names if name.removesuffix(_MICRO) in _PARTS]
    if not ours:
        return Broken(rank, unix_seconds, False, "no timers in it") if not names else None
    values: dict[str, float] = {}
    for piece in text.split("|")[1:]:
        match = _VALUE.match(piece)
        if match is None:
            break  # cut off, or another rank's text begins
        milliseconds = float(match["ms"])
        if milliseconds > _LONGEST_MS:
            return Broken(rank, unix_seconds, micro, f"{match['ms']} ms is no time of a step")
        if part := _PARTS.get(match["name"].removesuffix(_MICRO)):
            values[part] = milliseconds / 1000
    missing = [part for part in ("forward", "backward", "step") if part not in values]
    if missing:
        return Broken(rank, unix_seconds, micro, f"it lacks {' and '.join(missing)}")
    if sum(values.values()) <= 0:
        return Broken(rank, unix_seconds, micro, "all its times are 0")
    return _times(rank, unix_seconds, micro, values)


def _times(rank: int | None, unix_seconds: float | None, micro: bool, values: Mapping[str, float]) -> Times:
    backward, allreduce = values["backward"], values.get("allreduce")
    inner = max(0.0, backward - (allreduce or 0.0))
    return Times(rank, unix_seconds, micro, values["forward"], inner, allreduce, values["step"])


def _unix(stamp: re.Match[str]) -> float | None:
    try:
        moment = datetime.strptime(stamp[1], "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC)
        return moment.timestamp() + int(stamp[2]) / 1000
    except (ValueError, OverflowError):
        return None
