"""What a model needs of its loader: what a stored run of it reached, else what arithmetic allows at most."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from vitscale import store
from vitscale.analysis.runs.compute import flops_per_image
from vitscale.analysis.runs.figures import run_figures
from vitscale.errors import StoreError
from vitscale.store.check_records import CheckedRank, LoaderNeed
from vitscale.trial.trial import Trial


def loader_need(trial: Trial, ranks: Sequence[CheckedRank], results: Path | None) -> LoaderNeed | None:
    """Images per second of one rank; None where neither a run nor the model's FLOPs tell."""
    return (_of_a_run(trial, results) if results is not None else None) or _by_arithmetic(trial, ranks)


def _of_a_run(trial: Trial, results: Path) -> LoaderNeed | None:
    """The fastest completed run of the same model, precision and micro-batch on the same kind of device."""
    try:
        found = store.load(results)
    except StoreError:
        return None  # nothing has been run there yet
    best = 0.0
    for run in found.runs:
        other = run.header.trial
        alike = other.model == trial.model and all(
            getattr(other.train, name) == getattr(trial.train, name) for name in ("precision", "device", "micro_batch")
        )
        if alike and run.outcome.kind == "completed" and (reached := run_figures(run).images_per_second):
            best = max(best, reached / other.world.size)
    if best <= 0.0:
        return None
    return LoaderNeed(images_per_second=best, source="run", described=f"as a stored run in {results} did")


def _by_arithmetic(trial: Trial, ranks: Sequence[CheckedRank]) -> LoaderNeed | None:
    rates = [rank.matmul.flops_per_second for rank in ranks if rank.matmul is not None]
    flops = flops_per_image(trial)
    if not rates or isinstance(flops, str) or flops <= 0:
        return None
    return LoaderNeed(
        images_per_second=statistics.median(rates) / flops,
        source="arithmetic",
        described="the matrix-multiply rate measured here / the model's FLOPs, which no training quite reaches",
    )
