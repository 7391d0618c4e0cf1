"""The published study of arXiv 2602.21081: which figure is what, and its two claims.

Numbers and captions are the study's own, captions in our words. Ideal lines, intervals, absolute times, speedups beside
them and the published points are added.
"""

from __future__ import annotations

from functools import partial

from vitscale.pages.like.accuracy_claim import accuracy_claim
from vitscale.pages.like.hosts import hosts_claim
from vitscale.pages.like.series import published_points
from vitscale.pages.like.study import PublishedStudy, StudyClaim, StudyFigure
from vitscale.published import published

_figure = partial(StudyFigure, study="paper")
_on_vector = partial(_figure, cluster="Vector")

# What the figures of a pair, of strong and of weak scaling, or of two batch sizes, have in common.
_tesla_epochs = partial(
    _figure, cluster="Tesla", hosts=("several unlike hosts",), quantity="epoch time", gpus=(1, 2, 3, 4, 5)
)
_cifar10_epochs = partial(_on_vector, hosts=("one host",), datasets=("cifar10",), micro_batch=64, quantity="epoch time")
_cifar100_epochs = partial(
    _on_vector, hosts=("one host",), datasets=("cifar100",), micro_batch=64, quantity="epoch time"
)
_cifar10_speedup = partial(
    _on_vector,
    caption="CIFAR-10 strong scaling speedup",
    hosts=("one host",),
    datasets=("cifar10",),
    mode="strong-micro",
    quantity="speedup",
    draws="speedup over one GPU by GPU count, against the ideal, all GPUs in one host",
)

FIGURES = (
    _tesla_epochs(
        number=4,
        caption="Tesla strong scaling",
        mode="strong-micro",
        draws="epoch time and speedup by GPU count, one curve per micro-batch, over several hosts",
    ),
    _tesla_epochs(
        number=5,
        caption="Tesla weak scaling",
        mode="weak",
        draws="epoch time and efficiency by GPU count with equally many images per GPU, over several hosts",
    ),
    _figure(
        number=6,
        caption="Nebula strong scaling by batch size",
        cluster="Nebula",
        mode="strong-micro",
        quantity="epoch time by micro-batch",
        draws="epoch time and speedup by GPU count, one curve per micro-batch; where steps were explained, their parts "
        "(computing, communicating, the rest)",
    ),
    _figure(
        number=7,
        caption="Nebula accuracy by batch size",
        cluster="Nebula",
        mode="strong-micro",
        quantity="accuracy by micro-batch",
        draws="accuracy after equally many images by micro-batch, one curve per GPU count",
    ),
    _cifar10_epochs(
        number=8,
        caption="CIFAR-10 strong scaling",
        mode="strong-micro",
        draws="epoch time and speedup by GPU count, all GPUs in one host",
    ),
    _cifar10_epochs(
        number=9,
        caption="CIFAR-10 weak scaling",
        mode="weak",
        draws="epoch time and efficiency by GPU count with equally many images per GPU, all GPUs in one host",
    ),
    _on_vector(
        number=10,
        caption="CIFAR-10 and CIFAR-100 accuracies",
        hosts=("one host",),
        datasets=("cifar10", "cifar100"),
        mode="strong-micro",
        quantity="accuracy of datasets",
        draws="accuracy by epoch of both datasets in one picture, on 1, 4 and 8 GPUs of one host",
        gpus=(1, 4, 8),
    ),
    _on_vector(
        number=11,
        caption="Loss and accuracy of strong scaling",
        hosts=("one host",),
        micro_batch=64,
        mode="strong-micro",
        quantity="loss and accuracy",
        draws="loss and accuracy by epoch, one curve per GPU count, all GPUs in one host",
    ),
    _cifar10_speedup(number=12, micro_batch=16),
    _cifar10_speedup(number=13, micro_batch=64),
    _on_vector(
        number=14,
        caption="Multi-node single-GPU strong scaling on CIFAR-100",
        hosts=("one GPU a host",),
        datasets=("cifar100",),
        micro_batch=64,
        mode="strong-micro",
        quantity="epoch time",
        draws="epoch time and speedup by GPU count, one GPU in each host",
        gpus=(1, 2, 4, 8, 16, 32),
    ),
    _on_vector(
        number=15,
        caption="Multi-node single-GPU against single-node on CIFAR-100",
        hosts=("one host", "one GPU a host"),
        datasets=("cifar100",),
        micro_batch=64,
        mode="strong-micro",
        quantity="one host against several",
        draws="epoch time with one GPU in each host as a multiple of that with as many GPUs in one host, and both "
        "epoch times",
    ),
    _cifar100_epochs(
        number=16,
        caption="CIFAR-100 strong scaling",
        mode="strong-micro",
        draws="epoch time and speedup by GPU count, all GPUs in one host",
    ),
    _cifar100_epochs(
        number=17,
        caption="CIFAR-100 weak scaling",
        mode="weak",
        draws="epoch time and efficiency by GPU count with equally many images per GPU, all GPUs in one host",
    ),
)

PAPER = PublishedStudy(
    name="paper",
    title_name="the published study",
    source=str(published().source),
    reading_note=f"The numbers and subjects of the figures are those of {published().source}. Ideal lines, intervals, "
    "speedups and efficiencies beside epoch times, and published points are added. Published points are means by GPU "
    "count: "
    f"{published().source.workload}; {published().source.raw_data}.",
    figures=FIGURES,
    claims=(
        StudyClaim(
            "Is accuracy at 4 and 8 GPUs that of one?",
            "After equally many images. The micro-batch per GPU is fixed, so that the global batch grows with the "
            "GPUs: fewer, larger steps over the same images. Where two series reach one global batch with unlike "
            "numbers of GPUs, that comparison stands last: it tells the GPUs from the batch. Runs of one seed count "
            "once.",
            accuracy_claim,
            "Not tested: no strong-scaling curve of these results has an accuracy on two GPU counts. Train for an "
            "epoch or more (train.epochs) on 1, 4 and 8 GPUs.",
        ),
        StudyClaim(
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
