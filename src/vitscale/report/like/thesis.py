"""The thesis on Swin Transformer V2 (Garrett, Pittsburgh 2023): its quantities, and its claim that it scales poorly.

Only what its abstract says is used. It fine-tunes for semantic segmentation on ADE20K with 8 images for each GPU and
iteration, and scales the iterations down: here strong-micro, whatever it is called.
"""

from __future__ import annotations

from functools import partial

from vitscale.report.like.doublings import doublings_claim
from vitscale.report.like.run_tables import tables
from vitscale.report.like.study import Claim, PublishedStudy, StudyFigure

_SOURCE = (
    "Evaluation of Scalability for Distributed Data-Parallel Training of Swin Transformer V2 (Garrett, University of "
    "Pittsburgh 2023, d-scholarship.pitt.edu/44738)"
)
_figure = partial(StudyFigure, "thesis", None)

THESIS = PublishedStudy(
    name="thesis",
    short="the thesis",
    source=_SOURCE,
    reading=f"The quantities and the published figures are those of the abstract of {_SOURCE}: no other figure of it "
    "is used. Its hardware is A100 SXM, A100 PCIe and V100 PCIe; it trains Swin V2 on ADE20K, so compare shapes, not "
    'heights. "26 % faster" is read as 1.26 times as fast; read as 26 % less time it would be 1.35 times.',
    figures=(
        _figure(
            "Training time and speedup",
            "epoch time and speedup by GPU count, one curve per kind of GPU and setting",
            "scaling",
            "strong-micro",
        ),
        _figure("Parallel efficiency", "speedup for each GPU, by GPU count", "efficiency", "strong-micro"),
        _figure(
            "What a doubling gains",
            "how many times as fast training is on twice the GPUs, beside what was "
            "published and what a ring's transfers would leave",
            "doublings",
            "strong-micro",
        ),
        _figure("Utilisation", "GPU and CPU utilisation by GPU count", "utilisation", "strong-micro"),
        _figure(
            "Where a whole run loses its time",
            "from ideal to measured for whole runs: start-up, loading, "
            "decoding, computing, synchronised norm, waiting, transfer, evaluation, checkpoint",
            "run waterfall",
            "strong-micro",
        ),
    ),
    claims=(
        Claim(
            "Does a doubling of the GPUs still shorten training, and by less than transfers would leave?",
            "Published, as 26 % faster from 1 to 2 GPUs and 1.9 % and 2.9 % from 2 to 4 and 4 to 8: it scales poorly. "
            "Epoch seconds on N GPUs over those on 2 N, of light steps, with Welch's 95 % interval over runs and "
            "Holm's correction for all doublings. What transfers would leave is a bound: a step as on N GPUs, and all "
            "of a ring's transfer on 2 N on top of it, nothing hidden under computing.",
            doublings_claim,
            "Not tested: no strong-micro curve of these results has two GPU counts of which one is twice the other. "
            'Set scaling.mode = "strong-micro" and gpus = [1, 2, 4, 8].',
        ),
    ),
    tables=tables,
)
