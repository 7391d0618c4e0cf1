"""Lines, plan and settings that a hooked rank and its driver exchange: the contract of `vitscale explain`.

A rank writes one JSON object a line into `RESULTS/ranks/<host>-<pid>.jsonl`; its key `type` names the class below that
reads it. The driver writes `RESULTS/hook/settings.json` before the command starts and replaces `RESULTS/hook/plan.json`
while it runs. Fields that end in `_ns` are nanoseconds of `time.monotonic_ns` of that host, except `wall_ns`, which is
`time.time_ns`; fields that end in `_seconds` are seconds. None (null) means unknown, never zero.

This module runs in the user's process and in the control plane: standard library only, Python 3.9 and later.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

RANKS_FOLDER = "ranks"
"""In the results folder: one file of lines per rank."""
TRACES_FOLDER = "traces"
"""In the results folder: traces of profiled steps, `*.json.gz`."""
HOOK_FOLDER = "hook"
"""In the results folder: sitecustomize.py, the package `vitscale_hook`, settings and plan."""
PLAN_FILE = "plan.json"
SETTINGS_FILE = "settings.json"

STRATEGIES = (
    "none",
    "DDP",
    "FSDP",
    "FSDP2",
    "DeepSpeed ZeRO-0",
    "DeepSpeed ZeRO-1",
    "DeepSpeed ZeRO-2",
    "DeepSpeed ZeRO-3",
)
PARTS = ("data", "forward", "backward", "optimizer", "other")
"""Parts of a step, whose seconds add up to the step's."""
SAMPLED_PARTS = (*PARTS, "break")
BREAK_KINDS = ("evaluation", "checkpoint", "other")

_ENCODER = json.JSONEncoder(separators=(",", ":"), default=vars)
"""Made once, and rows in a line turn into their fields without copies: lines are written beside the user's steps."""
_Record = TypeVar("_Record", bound="HookRecord")


class HookRecord:
    """A dataclass with fields of JSON's simple types, which turns into a dict and back."""

    def to_dict(self) -> dict[str, Any]:
        """Field name -> value, ready for json.dumps."""
        return dataclasses.asdict(self)  # type: ignore[call-overload, no-any-return]

    @classmethod
    def from_dict(cls: type[_Record], values: Mapping[str, Any]) -> _Record:
        """Record with these values; keys that it does not have are ignored, so that a newer hook can be read.

        Raises:
            ValueError: a field is missing without a default, or its value has another type, is NaN or infinite.
        """
        arguments = {}
        for field in dataclasses.fields(cls):  # type: ignore[arg-type]
            if field.name in values:
                arguments[field.name] = _checked(field, values[field.name])
            elif field.default is dataclasses.MISSING:
                raise ValueError(f"{cls.__name__} has no {field.name}")
        return cls(**arguments)


@dataclass(frozen=True)
class HookSettings(HookRecord):
    """What the driver decides before the command starts (`settings.json`)."""

    results: str
    """Absolute path of the results folder; the rank writes only below it."""
    sample_seconds: float = 0.02
    """Time between two looks at the training thread's stack."""
    profile_shapes: bool = False
    """Whether traces of profiled steps record the shapes of operators' inputs."""


@dataclass(frozen=True)
class HookPlan(HookRecord):
    """What the driver asks of all ranks (`plan.json`, replaced atomically); step numbers begin at 1."""

    profile_from: int | None = None
    """First profiled step; None: no step is profiled."""
    profile_steps: int = 3
    stop_after: int | None = None
    """Last step: the rank ends itself after it, or after its next step if it is already past it."""


@dataclass(frozen=True)
class Line(HookRecord):
    """One line of a rank's file."""

    type: ClassVar[str]

    def to_json(self) -> str:
        """The line as it stands in the file, without its line break."""
        return _ENCODER.encode({"type": self.type, **vars(self)})


@dataclass(frozen=True)
class HookedRankLine(Line):
    """Who the rank is: the first line of a file, written when the process takes its first optimizer step."""

    type: ClassVar[str] = "rank"
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    host: str
    pid: int
    program: str
    """Name of the script, without the words behind it, which may hold secrets."""
    python: str
    torch: str
    device: str
    """ "cpu", or the name of the GPU that holds the trained parameters."""
    threads: int
    """Threads of one operator on the CPU (torch.get_num_threads)."""
    cpus: int
    """Cores that the process may use."""
    wall_ns: int
    monotonic_ns: int
    """Both clocks at the same moment."""
    core_mask: str | None = None
    """Cores that the process may use as hexadecimal bits, core 0 the lowest."""


@dataclass(frozen=True)
class HookedModelLine(Line):
    """The trained model: its outermost module that is called. The last such line counts."""

    type: ClassVar[str] = "model"
    class_name: str
    """Class below DDP, FSDP and torch.compile's wrappers."""
    parameters: int
    """Elements of this rank's module: under FSDP and ZeRO-3 the shard alone."""
    trainable_parameters: int
    strategy: str
    """One of STRATEGIES, or one that this module does not know."""
    dtype: str | None
    """Type of most parameters, such as "float32"."""
    compiled: bool
    autocast: str | None
    """Autocast's dtype in the forward, such as "bfloat16"; "none" without autocast; None where it could not be seen."""
    bucket_cap_mb: float | None = None
    """MiB of DDP's gradient buckets; None without DDP."""


@dataclass(frozen=True)
class HookedLoaderLine(Line):
    """The training loader. The last such line counts."""

    type: ClassVar[str] = "loader"
    workers: int
    batch_size: int | None
    prefetch_factor: int | None
    persistent_workers: bool
    pin_memory: bool
    dataset: str
    """Class name."""
    sampler: str | None
    """Class name."""


@dataclass(frozen=True)
class HookedOptimizerLine(Line):
    """One optimizer that takes part in the steps."""

    type: ClassVar[str] = "optimizer"
    class_name: str
    groups: int
    fused: bool | None
    """As the optimizer's groups state it; None: left to torch, or not an option of this optimizer."""
    foreach: bool | None


@dataclass(frozen=True)
class HookedStepLine(Line):
    """One training step, from the end of the step before (or of the break between them) to its last optimizer call.

    `seconds` = data + forward + backward + optimizer + other seconds, where a None counts as nothing and its time is in
    `other_seconds`. On a GPU these are the host's times, which say little: there the parts come from profiled steps.
    """

    type: ClassVar[str] = "step"
    number: int
    """1 for the first."""
    began_ns: int
    seconds: float
    images: int | None
    micro_steps: int
    data_seconds: float | None
    copy_seconds: float | None
    """Always None here: only profiles show copies."""
    forward_seconds: float | None
    backward_seconds: float | None
    own_backward_seconds: float | None
    """Backward until this rank's last gradient is ready: without waiting for other ranks."""
    first_bucket_seconds: float | None
    """Backward's begin until the first collective is created."""
    optimizer_seconds: float | None
    other_seconds: float
    profiled: bool = False
    tried: str | None = None


@dataclass(frozen=True)
class HookedBreakLine(Line):
    """Time between two steps that belongs to neither: evaluation, a checkpoint, or another long pause."""

    type: ClassVar[str] = "break"
    after_step: int
    began_ns: int
    seconds: float
    kind: str
    """One of BREAK_KINDS."""
    evaluated_batches: int | None = None
    line: str | None = None
    """The user's line in which most samples of the break lie, "FILE:LINE in FUNCTION"."""


@dataclass(frozen=True)
class SampleRow(HookRecord):
    """Samples of one part whose innermost frame of the user's code is this line."""

    file: str
    line: int
    function: str
    count: int
    of_all: int
    """Samples of the part in total, rows that are left out included."""


@dataclass(frozen=True)
class HookedSamplesLine(Line):
    """Where the training thread was in one part of the steps, most frequent line first; the last such line counts.

    Samples are taken from step 2 on, so that start-up and compilation are not among them.
    """

    type: ClassVar[str] = "samples"
    part: str
    """One of SAMPLED_PARTS."""
    rows: list[SampleRow]


@dataclass(frozen=True)
class HookedProfileLine(Line):
    """A trace of profiled steps, whose times are never used as step times."""

    type: ClassVar[str] = "profile"
    first_step: int
    steps: int
    trace: str
    """File name in TRACES_FOLDER."""


@dataclass(frozen=True)
class HookedAliveLine(Line):
    """Heartbeat: the rank is in the step after `step`."""

    type: ClassVar[str] = "alive"
    step: int


@dataclass(frozen=True)
class HookedEndLine(Line):
    """The rank's last line; a file without it was cut off (a signal, a crash, os._exit by the program)."""

    type: ClassVar[str] = "end"
    step: int
    """Last finished step."""
    reason: str
    """ "agreed step", "exit", or "exception: TypeName"."""
    cleaned: list[str]
    """What was ended before, such as "4 loader workers"."""


@dataclass(frozen=True)
class HookedNoteLine(Line):
    """A hook that could not be installed, a version that is not known, or an error of the hook that turned it off."""

    type: ClassVar[str] = "note"
    text: str


LINE_TYPES: dict[str, type[Line]] = {
    line_type.type: line_type
    for line_type in (
        HookedRankLine,
        HookedModelLine,
        HookedLoaderLine,
        HookedOptimizerLine,
        HookedStepLine,
        HookedBreakLine,
        HookedSamplesLine,
        HookedProfileLine,
        HookedAliveLine,
        HookedEndLine,
        HookedNoteLine,
    )
}


def parse_line(text: str) -> Line | None:
    """The line in this JSON text; None for a type that this version does not know.

    Raises:
        ValueError: no JSON object (a torn last line), or a field that is missing or has a wrong value.
    """
    try:
        values = json.loads(text)
    except RecursionError:
        raise ValueError("a line is nested too deeply") from None
    if not isinstance(values, dict):
        raise ValueError("a line is no JSON object")
    name = values.get("type")
    if not isinstance(name, str):
        raise ValueError("a line has no type")
    line_type = LINE_TYPES.get(name)
    return None if line_type is None else line_type.from_dict(values)


def _checked(field: dataclasses.Field[Any], value: object) -> Any:
    """The value, if it has the field's type.

    Raises:
        ValueError: it has not.
    """
    annotation = str(field.type)
    is_optional = annotation.endswith(" | None")
    if value is None and is_optional:
        return None
    read = _READERS[annotation[: -len(" | None")] if is_optional else annotation]
    try:
        return read(value)
    except ValueError as error:
        raise ValueError(f"{field.name} {error}") from None


def _int(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError("is no whole number")
    return value


def _float(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError("is no number")
    try:
        number = float(value)
    except OverflowError:
        raise ValueError("is too large") from None
    if not math.isfinite(number):
        raise ValueError("is not finite")
    return number


def _bool(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError("is neither true nor false")
    return value


def _str(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("is no text")
    return value


def _strings(value: object) -> list[str]:
    if not isinstance(value, list):
        raise ValueError("is no list")
    return [_str(item) for item in value]


def _sample_rows(value: object) -> list[SampleRow]:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ValueError("is no list of objects")
    return [SampleRow.from_dict(item) for item in value]


_READERS: dict[str, Callable[[object], Any]] = {
    "int": _int,
    "float": _float,
    "bool": _bool,
    "str": _str,
    "list[str]": _strings,
    "list[SampleRow]": _sample_rows,
}
