"""Published studies' figures and tables from imported or own results, with their claims tested on these.

study          what a study is: figures, tables and claims as data; which curves a figure draws, or what it lacks
paper, thesis  the two studies
series         the curves of the results, as these figures see them, and what was published of the same workload
curves         epoch time, speedup, efficiency, accuracy and loss, by the report's charts
doublings      what twice the GPUs gain, beside what a ring's transfers would leave
hosts          one host against several
accuracy_claim which accuracies are compared, and what that says
outputs        all figures in order, or what they lack; writes them as page, contract (JSON) and pictures
"""

from vitscale.report.like.outputs import FORMATS, findings, study_named, terminal_document, write
from vitscale.report.like.study import Material

__all__ = ["FORMATS", "Material", "findings", "study_named", "terminal_document", "write"]
