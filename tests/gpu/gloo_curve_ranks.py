"""One rank of `engines/curve_ranks.py` on a GPU that ranks share: they meet by gloo, for NCCL takes one each."""

from __future__ import annotations

import sys
from pathlib import Path

from engines import curve_ranks
from vitscale.worker import group


def gloo_alone(device: str, *, gradients_on_host: bool) -> str:
    """Stands in for `group.backends`: gloo takes tensors of both."""
    del device, gradients_on_host
    return "gloo"


if __name__ == "__main__":
    group.backends = gloo_alone
    curve_ranks.main(Path(sys.argv[1]))
