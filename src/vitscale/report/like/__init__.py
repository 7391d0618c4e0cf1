"""Published studies' figures and tables from imported or own results, and their claims tested on them.

study          what a study is: figures, tables and claims as data
paper, thesis  the two studies
series         the curves of the results, as these figures see them
selection      which of them a figure draws, or what it lacks
beside         the published measurements, where they are of the same workload
points         measured, ideal and published points of scaling figures; panels puts them into charts
scaling        epoch time, speedup, efficiency
doublings      what twice the GPUs gain, beside what a ring's transfers would leave
hosts          one host against several
accuracies     accuracy and loss: by epoch, by GPU count, by micro-batch
accuracy_claim which accuracies are held against each other, and what that says
run_tables     training time, utilisation and the parts of a whole run by GPU count
figures        all figures in order, or what they lack
outputs        where all of it goes: page, contract (JSON), pictures
"""

from vitscale.report.like.outputs import FORMATS, NAMES, findings, study_named, write
from vitscale.report.like.study import Material

__all__ = ["FORMATS", "NAMES", "Material", "findings", "study_named", "write"]
