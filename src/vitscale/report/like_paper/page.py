"""One self-contained page with every figure of the study, and its two claims tested."""

from __future__ import annotations

from collections.abc import Sequence

from vitscale.analysis import Analysis
from vitscale.published import published
from vitscale.report.like_paper.claims import Claims, accuracy_sentences, hosts_sentence
from vitscale.report.like_paper.drawn import Drawn
from vitscale.report.page import rendered

_NO_ACCURACY = (
    "Not tested: no strong-scaling curve of these results has an accuracy on two GPU counts. Train for an epoch or "
    "more (train.epochs) on 1, 4 and 8 GPUs."
)
_NO_HOSTS = (
    "Not tested: no workload of these results was measured at one GPU count both in one host and over several. Sweep "
    '"scaling.gpus_per_node", or import logs of both.'
)


def to_html(analysis: Analysis, drawn: Sequence[Drawn], tested: Claims) -> str:
    """The page as text."""
    missing = sum(one.lack is not None for one in drawn)
    return rendered(
        "like_paper.html",
        [one.figure for one in drawn],
        study=analysis.study,
        counts=f"{len(drawn) - missing} of {len(drawn)} figures drawn"
        + (f"; {missing} say what data they lack" if missing else ""),
        shown=drawn,
        accuracy=accuracy_sentences(tested) or [_NO_ACCURACY],
        hosts=[f"{pair.name}: {hosts_sentence(pair.test)}" for pair in tested.hosts] or [_NO_HOSTS],
        problems=analysis.problems,
        source=published().source,
    )
