"""Published studies' figures and tables from imported or own results, with their claims tested on these.

study          what a study is: figures, tables and claims as data
selection      which curves a figure draws, or what it lacks and what would produce it
paper, thesis  the two studies
series         the curves of the results, as these figures see them, and what was published of the same workload
curves         epoch time, speedup and efficiency by GPU count, by the report's charts
learning       loss and accuracy, by epoch and by micro-batch
doublings      what twice the GPUs gain, beside what a ring's transfers would leave
hosts          one host against several
accuracy_claim which accuracies are compared, and what that says
outputs        all figures in order, or what they lack; writes them as page, contract (JSON) and pictures
"""

from vitscale.pages.like.outputs import FORMATS, findings, study_named, terminal_document, write
from vitscale.pages.like.study import MeasuredData

__all__ = ["FORMATS", "MeasuredData", "findings", "study_named", "terminal_document", "write"]
