"""The published study's figures (arXiv 2602.21081), drawn from imported or own results, and its two claims tested.

catalogue     which figure is what, and what it needs
series        the curves of the results, as these figures see them
selection     which of them a figure draws, or what it lacks
beside        the published measurements, where they are of the same workload
points        measured, ideal and published points of scaling figures; panels puts them into charts
scaling_pair  epoch time, with speedup or efficiency
speedups      speedup at one micro-batch
hosts         one host against several; host_pairs finds what may be compared
accuracies    accuracy and loss: by epoch, by GPU count, by micro-batch
time_split    micro-batch against the parts of a step
missing       a figure that cannot be drawn says what it lacks
drawn         all figures in order
accuracy_tests  which accuracies are held against each other
claims        the two claims, tested, in words
outputs       where all of it goes: page, contract (JSON), pictures
"""

from vitscale.report.like_paper.outputs import FORMATS, findings, write

__all__ = ["FORMATS", "findings", "write"]
