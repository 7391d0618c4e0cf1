from __future__ import annotations

import pytest

from results_factory import make_trial
from vitscale.runner.preview import _batch


@pytest.mark.parametrize(
    ("grad_accum", "shares", "shown"),
    [(1, None, "8"), (3, None, "8 x3"), (1, (10, 10, 4), "2 x 10 + 4"), (3, (10, 10, 4), "(2 x 10 + 4) x3")],
)
def test_the_batch_of_a_rank_or_of_each(grad_accum: int, shares: tuple[int, ...] | None, shown: str) -> None:
    assert _batch(make_trial("ddp", 3, grad_accum=grad_accum, micro_batches=shares).train) == shown
