"""The published study of arXiv 2602.21081: which figure is what, and its two claims.

The numbers are the study's own. What each figure draws here is a reading of its subject, not a copy: ideal lines,
intervals, absolute times and the published points are added.
"""

from __future__ import annotations

from functools import partial

from vitscale.published import published
from vitscale.report.like.accuracy_claim import accuracy_claim
from vitscale.report.like.hosts import hosts_claim
from vitscale.report.like.series import published_points
from vitscale.report.like.study import Claim, PublishedStudy, StudyFigure

_figure = partial(StudyFigure, "paper")

FIGURES = (
    _figure(4, "Strong scaling over unlike hosts",
            "epoch time by GPU count, one curve per micro-batch, on hosts whose GPUs are of unlike kinds",
            "scaling", "strong-micro", "several unlike hosts"),
    _figure(5, "Weak scaling over unlike hosts",
            "epoch time by GPU count with equally many images per GPU, on hosts whose GPUs are of unlike kinds",
            "scaling", "weak", "several unlike hosts"),
    _figure(6, "Micro-batch and time split",
            "the parts of an optimizer step (computing, communicating, the rest) by micro-batch and GPU count",
            "time split"),
    _figure(7, "Micro-batch and accuracy",
            "accuracy after equally many images by micro-batch, one curve per GPU count", "accuracy by micro-batch"),
    _figure(8, "Strong scaling in one host, CIFAR-10",
            "epoch time and speedup by GPU count, one curve per micro-batch, all GPUs in one host",
            "scaling", "strong-micro", "one host", "cifar10"),
    _figure(9, "Weak scaling in one host, CIFAR-10",
            "epoch time and efficiency by GPU count with equally many images per GPU, all GPUs in one host",
            "scaling", "weak", "one host", "cifar10"),
    _figure(10, "Accuracy by epoch and GPU count",
            "accuracy by GPU count, one curve per epoch, all images in each epoch", "accuracy by GPUs", "strong-micro"),
    _figure(11, "Loss and accuracy",
            "loss and accuracy by epoch, one curve per GPU count", "loss and accuracy", "strong-micro"),
    _figure(12, "Speedup at micro-batch 16",
            "speedup over one GPU by GPU count, against the ideal", "speedup", "strong-micro", micro_batch=16),
    _figure(13, "Speedup at micro-batch 64",
            "speedup over one GPU by GPU count, against the ideal", "speedup", "strong-micro", micro_batch=64),
    _figure(14, "Strong scaling in one host, CIFAR-100",
            "epoch time and speedup by GPU count, all GPUs in one host",
            "scaling", "strong-micro", "one host", "cifar100"),
    _figure(15, "One host against several",
            "epoch time over several hosts as a multiple of that in one host, at equal GPU counts",
            "hosts", "strong-micro"),
    _figure(16, "Strong scaling over like hosts",
            "epoch time and speedup by GPU count, GPUs of one kind over several hosts",
            "scaling", "strong-micro", "several like hosts"),
    _figure(17, "Weak scaling over like hosts",
            "epoch time and efficiency by GPU count with equally many images per GPU, GPUs of one kind over several "
            "hosts",
            "scaling", "weak", "several like hosts"),
)  # fmt: skip

PAPER = PublishedStudy(
    name="paper",
    short="the published study",
    source=str(published().source),
    reading=f"The numbers of the figures are those of {published().source}. What each draws is a reading of its "
    "subject; ideal lines, intervals, absolute times and published points are added. Published points are means by GPU "
    "count: "
    f"{published().source.workload}; {published().source.raw_data}.",
    figures=FIGURES,
    claims=(
        Claim(
            "Is accuracy at 4 and 8 GPUs that of one?",
            "After equally many images. The micro-batch per GPU is fixed, so that the global batch grows with the "
            "GPUs: fewer, larger steps over the same images. Where two series reach one global batch with unlike "
            "numbers of GPUs, that comparison stands last: it tells the GPUs from the batch. Runs of one seed count "
            "once.",
            accuracy_claim,
            "Not tested: no strong-scaling curve of these results has an accuracy on two GPU counts. Train for an "
            "epoch or more (train.epochs) on 1, 4 and 8 GPUs.",
        ),
        Claim(
            "Is there a difference between one host and several?",
            "Ratio of epoch times at equal GPU counts. Epochs of one run are no repeats: a GPU count is the unit of "
            "the interval (Student's t on logarithms), and equivalence is tested by two one-sided tests at 5 %. What "
            "all runs of one side share, the pace of the one host they ran on for instance, is in every count, and no "
            "interval knows of it.",
            hosts_claim,
            "Not tested: no workload of these results was measured at one GPU count both in one host and over "
            'several. Sweep "scaling.gpus_per_node", or import logs of both.',
        ),
    ),
    published_points=published_points,
)
