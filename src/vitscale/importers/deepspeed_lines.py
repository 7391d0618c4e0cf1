"""What DeepSpeed's log says, line by line: the run (world size, batch, stage, precision, hosts, versions), and with
`wall_clock_breakdown` the times of steps and of micro-steps.

One global line stands for one optimizer step: its timers are reset whenever they are printed (`reset=True`), once at
each boundary of accumulation, whatever `steps_per_print` says; `fwd`, `bwd` and `step` are sums over its micro-steps.
Source: `step` in deepspeed/runtime/engine.py and `SynchronizedWallClockTimer.log` in deepspeed/utils/timer.py, of
DeepSpeed 0.6 to 0.15, whose releases call the timers forward and backward or fwd and bwd.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from vitscale.importers.contents import MOST_GPUS
from vitscale.trial.trial import Precision

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
_MOST_RATE = 1e9


@dataclass(frozen=True)
class Times:
    """One printed line of timers, in seconds."""

    rank: int | None
    """Null: the line does not tell."""
    unix_seconds: float | None
    """When it was printed, which is when the step ended; only differences of this clock count."""
    micro: bool
    """Whether it is one micro-step; else it is a whole optimizer step."""
    forward: float
    inner: float
    """Backward without the exchange of gradients."""
    allreduce: float | None
    """The exchange of gradients, disjoint from `forward` and `inner`; null where it was not printed."""
    step: float

    @property
    def total(self) -> float:
        """The sum of all parts."""
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


_RATE = re.compile(r"\bglobal_step=(\d{1,9}), RunningAvgSamplesPerSec=[^,]{1,40}, CurrSamplesPerSec=([\d.e+-]{1,30}),")


def rate_of(text: str) -> tuple[int, float] | None:
    """(Optimizer step, samples/s of all ranks in it) of a line of the throughput timer; None where it is none.

    DeepSpeed prints it on rank 0 every `steps_per_print` steps but the first two, without any setting. Source:
    `ThroughputTimer` in deepspeed/utils/timer.py; its batch is `train_batch_size`.
    """
    told = _RATE.search(text) if "CurrSamplesPerSec" in text else None
    try:
        rate = float(told[2]) if told else 0.0
    except ValueError:
        return None
    return (int(told[1]), rate) if told and 1e-6 < rate < _MOST_RATE else None


def _read(text: str, rank: int | None, unix_seconds: float | None) -> Times | Broken | None:
    """The times in one text of timers; None where it has only other timers, which say nothing here."""
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


_MOST_IMAGES = 1_000_000
MOST_MICRO_STEPS = 1_000_000
_DOTS = r"[ .=]+"
_NUMBERS = {
    "world_size": re.compile(rf"\b(?:dist_)?world_size{_DOTS}(\d{{1,7}})\b"),
    "micro_batch": re.compile(rf"\btrain_micro_batch_size_per_gpu{_DOTS}(\d{{1,7}})\b"),
    "grad_accum": re.compile(rf"\bgradient_accumulation_steps{_DOTS}(\d{{1,7}})\b"),
    "train_batch": re.compile(rf"\btrain_batch_size{_DOTS}(\d{{1,9}})\b"),
    "zero_stage": re.compile(rf"\bzero_optimization_stage{_DOTS}([0-3])\b"),
}
_FLAGS = {
    "fp16": re.compile(r"\b(?:fp16_enabled[ .]+|fp16 \.+ |float16_config[ .]+.*?\benabled=)(True|False)\b"),
    "bf16": re.compile(r"\b(?:bfloat16_enabled[ .]+|bf16 \.+ |bfloat16_config[ .]+.*?\benabled=)(True|False)\b"),
    "synchronised": re.compile(r"\btimers_config[ .]+.*?\bsynchronized=(True|False)\b"),
    "breakdown": re.compile(r"\bwall_clock_breakdown[ .]+(True|False)\b"),
}
_RANK_ON_HOST = re.compile(
    r"^(?P<host>[\w.-]{1,100}):\d+:\d+ \[\d+\] NCCL INFO .*\brank (?P<rank>\d{1,7}) nranks (?P<of>\d{1,7})\b"
)
_NODES = re.compile(r"\bnRanks (\d{1,7}) nNodes (\d{1,6})\b")
_VERSION = re.compile(r"DeepSpeed info: version=([\w.+-]{1,40})")
_NCCL = re.compile(r"\bNCCL version ([\w.+-]{1,40})")


@dataclass
class LogFacts:
    """Facts collected line by line: the first telling of each counts, for NCCL that of the largest group.

    A try that ended before its first step told facts too, which another try in the same file may tell anew (`anew`).
    """

    numbers: dict[str, int] = field(default_factory=dict)
    flags: dict[str, bool] = field(default_factory=dict)
    hosts: dict[int, str] = field(default_factory=dict)
    """Rank to its host."""
    nccl_ranks: int | None = None
    nccl_nodes: int | None = None
    versions: dict[str, str | None] = field(default_factory=dict)
    earlier: set[str] = field(default_factory=set)
    """The numbers and flags of an earlier try."""

    def anew(self) -> None:
        """Begins another try."""
        self.earlier = {*self.numbers, *self.flags}

    def take(self, text: str) -> None:
        """Takes what one line tells."""
        if "NCCL" in text:
            self._take_nccl(text)
        if match := _VERSION.search(text):
            self.versions.setdefault("deepspeed", match[1])
        for name, pattern in _NUMBERS.items():
            if self._counts(name, self.numbers) and (told := pattern.search(text)):
                self.numbers[name] = int(told[1])
                self.earlier.discard(name)
        for name, pattern in _FLAGS.items():
            if self._counts(name, self.flags) and (told := pattern.search(text)):
                self.flags[name] = told[1] == "True"
                self.earlier.discard(name)

    def _counts(self, name: str, told: Mapping[str, int]) -> bool:
        return name not in told or name in self.earlier

    def _take_nccl(self, text: str) -> None:
        if match := _NCCL.search(text):
            self.versions.setdefault("nccl", match[1])
        if match := _RANK_ON_HOST.match(text):
            of = int(match["of"])
            if of >= (self.nccl_ranks or 0):
                self.nccl_ranks = of
                self.hosts.setdefault(int(match["rank"]), match["host"])
        if (match := _NODES.search(text)) and int(match[1]) >= (self.nccl_ranks or 0):
            self.nccl_ranks, self.nccl_nodes = int(match[1]), int(match[2])

    def world_sizes(self) -> dict[str, int]:
        """World sizes that the log tells, most trusted first: the engine's configuration, NCCL, the batch sizes."""
        sizes = {}
        if size := self.numbers.get("world_size"):
            sizes["world_size"] = size
        if self.nccl_ranks:
            sizes["NCCL's nranks"] = self.nccl_ranks
        batch, micro, accum = (self.numbers.get(key) for key in ("train_batch", "micro_batch", "grad_accum"))
        if batch and micro and accum and batch % (micro * accum) == 0:
            sizes["train_batch_size"] = batch // (micro * accum)
        return {name: size for name, size in sizes.items() if 1 <= size <= MOST_GPUS}

    def micro_batch(self, gpus: int, grad_accum: int) -> int | None:
        """Images per GPU and micro-step; where they are not told, worked out from the batch of a whole step."""
        told, batch = self.numbers.get("micro_batch"), self.numbers.get("train_batch")
        if not told and batch and batch % (gpus * grad_accum) == 0:
            told = batch // (gpus * grad_accum)
        return told if told and told <= _MOST_IMAGES else None

    def nodes(self, gpus: int) -> int | None:
        """Hosts of `gpus` ranks, where NCCL told; None otherwise."""
        if self.nccl_nodes and self.nccl_ranks == gpus and gpus % self.nccl_nodes == 0:
            return self.nccl_nodes
        each = Counter(self.hosts.values())
        whole = sum(each.values()) == gpus and len(set(each.values())) == 1
        return len(each) if whole else None

    @property
    def precision(self) -> Precision | None:
        """Precision of training; at 16 bits DeepSpeed trains 16-bit weights and keeps 32-bit ones in the optimizer.
        (So does Megatron-LM, whose arguments are `fp16` and `bf16` alone.)"""
        if self.flags.get("fp16"):
            return "fp16"
        if self.flags.get("bf16"):
            return "bf16-params"
        return "fp32" if {"fp16", "bf16"} <= self.flags.keys() else None

    @property
    def synchronised(self) -> bool:
        """Whether the timers wait for the device: they do unless their own configuration says otherwise."""
        return self.flags.get("synchronised", True)
