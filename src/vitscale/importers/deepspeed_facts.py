"""What DeepSpeed's log says of the run itself: world size, batch, stage, precision, hosts, versions."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

from vitscale.importers.options import MOST_GPUS
from vitscale.trial.trial import Precision

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
    "fp16": re.compile(r"\b(?:fp16_enabled[ .]+|float16_config[ .]+.*?\benabled=)(True|False)\b"),
    "bf16": re.compile(r"\b(?:bfloat16_enabled[ .]+|bfloat16_config[ .]+.*?\benabled=)(True|False)\b"),
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
class Facts:
    """Collected line by line; the first telling of each counts, of NCCL's groups the largest."""

    numbers: dict[str, int] = field(default_factory=dict)
    flags: dict[str, bool] = field(default_factory=dict)
    hosts: dict[int, str] = field(default_factory=dict)
    """Rank to host."""
    nccl_ranks: int | None = None
    nccl_nodes: int | None = None
    versions: dict[str, str | None] = field(default_factory=dict)

    def take(self, text: str) -> None:
        """Looks at one line."""
        if "NCCL" in text:
            self._take_nccl(text)
        if match := _VERSION.search(text):
            self.versions.setdefault("deepspeed", match[1])
        for name, pattern in _NUMBERS.items():
            if name not in self.numbers and (told := pattern.search(text)):
                self.numbers[name] = int(told[1])
        for name, pattern in _FLAGS.items():
            if name not in self.flags and (told := pattern.search(text)):
                self.flags[name] = told[1] == "True"

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
        """Every telling of the world size, in order of trust: the engine's configuration, NCCL, the batch sizes."""
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
        """Images per GPU and micro-step; where it is not told, from the batch of a whole step."""
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
        """DeepSpeed keeps 16-bit weights in training, with 32-bit ones beside them in the optimizer."""
        if self.flags.get("fp16"):
            return "fp16"
        if self.flags.get("bf16"):
            return "bf16-params"
        return "fp32" if {"fp16", "bf16"} <= self.flags.keys() else None

    @property
    def synchronised(self) -> bool:
        """Whether the timers wait for the device: they do unless their own configuration says otherwise."""
        return self.flags.get("synchronised", True)
