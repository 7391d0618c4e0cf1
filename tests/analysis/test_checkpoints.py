from __future__ import annotations

from results_factory import make_rank, make_run, make_trial
from vitscale.analysis.trials import CheckpointCost, checkpoint_cost
from vitscale.store.records import CheckpointLine
from vitscale.store.results import Run


def run(*saved: float | None) -> Run:
    """One rank per value, which is what saving took; restoring took a tenth; a rank of None recorded nothing."""
    trial = make_trial("ddp", len(saved))
    ranks = []
    for rank, seconds in enumerate(saved):
        line = None
        if seconds is not None:
            line = CheckpointLine(save_seconds=seconds, load_seconds=seconds / 10, bytes=1000 + int(saved[0] or 0))
        ranks.append(make_rank(trial, rank, [0.1]).model_copy(update={"checkpoint": line}))
    return make_run(trial, ranks)


def test_the_slowest_rank_counts_and_the_median_run() -> None:
    found = checkpoint_cost([run(1.0, 3.0), run(2.0, 1.0), run(10.0, 20.0)])
    assert found == CheckpointCost(save_seconds=3.0, load_seconds=0.3, bytes=1002.0)


def test_runs_that_did_not_measure_it_do_not_count() -> None:
    assert checkpoint_cost([run(None, None)]) is None
    assert checkpoint_cost([]) is None
    found = checkpoint_cost([run(None, None), run(4.0, None)])
    assert found == CheckpointCost(save_seconds=4.0, load_seconds=0.4, bytes=1004.0)
