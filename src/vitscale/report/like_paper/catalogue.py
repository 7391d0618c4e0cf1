"""Which figure of the published study is what, in words, and what it needs.

The numbers are the study's own (arXiv 2602.21081). What each figure draws here is a reading of its subject, not a copy:
ideal lines, intervals, absolute times and the published points are added.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vitscale.trial import Mode

Kind = Literal[
    "scaling", "speedup", "hosts", "accuracy by GPUs", "loss and accuracy", "time split", "accuracy by micro-batch"
]
Place = Literal["one host", "several like hosts", "several unlike hosts"]
PAPER_DATASETS = ("cifar10", "cifar100")


@dataclass(frozen=True)
class PaperFigure:
    """One figure of the study."""

    number: int
    title: str
    draws: str
    """In words."""
    kind: Kind
    mode: Mode | None = None
    """strong-micro is what the study calls strong scaling. None: any."""
    place: Place | None = None
    """Where the GPUs are. None: anywhere."""
    dataset: str | None = None
    """None: each one separately. Results that hold no dataset of the study show their own in its place."""
    micro_batch: int | None = None
    """Images per GPU. None: each one separately."""

    @property
    def name(self) -> str:
        """Also the file's name, without its ending."""
        return f"figure-{self.number:02d}-{self.title.lower().replace(',', '').replace(' ', '-')}"


FIGURES = (
    PaperFigure(
        4,
        "Strong scaling over unlike hosts",
        "epoch time by GPU count, one curve per micro-batch, on hosts whose GPUs are of unlike kinds",
        "scaling",
        "strong-micro",
        "several unlike hosts",
    ),
    PaperFigure(
        5,
        "Weak scaling over unlike hosts",
        "epoch time by GPU count with equally many images per GPU, on hosts whose GPUs are of unlike kinds",
        "scaling",
        "weak",
        "several unlike hosts",
    ),
    PaperFigure(
        6,
        "Micro-batch and time split",
        "the parts of an optimizer step (computing, communicating, the rest) by micro-batch and GPU count",
        "time split",
    ),
    PaperFigure(
        7,
        "Micro-batch and accuracy",
        "accuracy after equally many images by micro-batch, one curve per GPU count",
        "accuracy by micro-batch",
    ),
    PaperFigure(
        8,
        "Strong scaling in one host, CIFAR-10",
        "epoch time and speedup by GPU count, one curve per micro-batch, all GPUs in one host",
        "scaling",
        "strong-micro",
        "one host",
        "cifar10",
    ),
    PaperFigure(
        9,
        "Weak scaling in one host, CIFAR-10",
        "epoch time and efficiency by GPU count with equally many images per GPU, all GPUs in one host",
        "scaling",
        "weak",
        "one host",
        "cifar10",
    ),
    PaperFigure(
        10,
        "Accuracy by epoch and GPU count",
        "accuracy by GPU count, one curve per epoch, all images in each epoch",
        "accuracy by GPUs",
        "strong-micro",
    ),
    PaperFigure(
        11,
        "Loss and accuracy",
        "loss and accuracy by epoch, one curve per GPU count",
        "loss and accuracy",
        "strong-micro",
    ),
    PaperFigure(
        12,
        "Speedup at micro-batch 16",
        "speedup over one GPU by GPU count, against the ideal",
        "speedup",
        "strong-micro",
        micro_batch=16,
    ),
    PaperFigure(
        13,
        "Speedup at micro-batch 64",
        "speedup over one GPU by GPU count, against the ideal",
        "speedup",
        "strong-micro",
        micro_batch=64,
    ),
    PaperFigure(
        14,
        "Strong scaling in one host, CIFAR-100",
        "epoch time and speedup by GPU count, all GPUs in one host",
        "scaling",
        "strong-micro",
        "one host",
        "cifar100",
    ),
    PaperFigure(
        15,
        "One host against several",
        "epoch time over several hosts as a multiple of that in one host, at equal GPU counts",
        "hosts",
        "strong-micro",
    ),
    PaperFigure(
        16,
        "Strong scaling over like hosts",
        "epoch time and speedup by GPU count, GPUs of one kind over several hosts",
        "scaling",
        "strong-micro",
        "several like hosts",
    ),
    PaperFigure(
        17,
        "Weak scaling over like hosts",
        "epoch time and efficiency by GPU count with equally many images per GPU, GPUs of one kind over several hosts",
        "scaling",
        "weak",
        "several like hosts",
    ),
)
