"""What each part leaves open of a future run's step: the variance of its logarithm, and the assumptions behind it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from vitscale.prediction.configurations import Candidate
from vitscale.prediction.evaluating import slower_added_hosts, worlds_of
from vitscale.prediction.fitting import DRAWS
from vitscale.prediction.labels import ACROSS, FIT, FURTHER_HOSTS, HOST_SIZE, INSIDE, MODEL
from vitscale.prediction.parameters import PARTS
from vitscale.prediction.results import Assumption
from vitscale.prediction.sampling import spread_out_normals
from vitscale.prediction.step import of_series
from vitscale.prediction.step.model import Array, Worlds
from vitscale.prediction.variants import Variant


def variance_by_part(asked: Variant, candidates: Sequence[Candidate], hosts_assumed: bool = False) -> dict[str, Array]:
    """Variance of the logarithm of a future run's step time that each part's uncertainty makes, by configuration.

    Each part's parameters vary as drawn while all others stay at their means. "job-to-job" is what runs differ by.
    Hosts of an assumed size have half as many ranks, as many or twice as many.
    """
    fitted, worlds = asked.fitted, worlds_of(asked.fitted, candidates)
    rows = {name: column[:: DRAWS // _FOR_VARIANCE] for name, column in asked.draws.items()}
    still = {name: np.full_like(column, column.mean()) for name, column in rows.items()}

    measured = of_series.worlds_of(fitted.points)

    def logs(draws: Mapping[str, Array], where: Worlds) -> Array:
        return np.log(asked.model.times(draws, where).total * asked.model.left_out(draws, where, measured))

    variances = {
        part: logs(still | {name: rows[name] for name in names}, worlds).var(axis=0) for part, names in PARTS.items()
    }
    variances["job-to-job"] = np.full(len(candidates), float((fitted.job_spread**2).mean()))
    normals = spread_out_normals(np.random.default_rng(11), _FOR_VARIANCE)
    variances[FURTHER_HOSTS] = np.log(slower_added_hosts(fitted, worlds, normals)).var(axis=0)
    if hosts_assumed:
        middle = {name: column[:1] for name, column in still.items()}
        sizes = [replace(worlds, ranks_per_node=np.maximum(1.0, worlds.ranks_per_node * n)) for n in (0.5, 1.0, 2.0)]
        variances[HOST_SIZE] = np.concatenate([logs(middle, size) for size in sizes]).var(axis=0)
    return variances


_FOR_VARIANCE = 128
"""Draws that tell a variance to a tenth."""


def spread_by_part(asked: Variant, at: Candidate) -> dict[str, float]:
    """Each part's share of the variance, by `variance_by_part`.

    The shares add up to 1; what parts trade off against each other is counted in each.
    """
    variances = variance_by_part(asked, [at])
    whole = sum(float(variance[0]) for variance in variances.values())
    return {part: float(variance[0]) / whole for part, variance in variances.items()}


OPENED_BY: Mapping[str, tuple[str, ...]] = {
    ACROSS: ("network between hosts",),
    INSIDE: ("network inside hosts",),
    "network inside its hosts": ("network inside hosts",),
    "what is sent": ("overlap", "network between hosts"),
    "job-to-job variation": ("job-to-job",),
    "the mixture of devices": ("stragglers",),
    "compute of another model": ("compute",),
    "another precision": ("compute",),
    "another GPU": ("compute",),
    "activation checkpointing": ("compute",),
    "an engine that was not measured": ("overlap",),
    FURTHER_HOSTS: (FURTHER_HOSTS,),
    HOST_SIZE: (HOST_SIZE,),
}
"""An assumption (up to a bracket) -> what it leaves open (`variance_by_part`)."""


def widest_first(assumed: Sequence[Assumption], variance: Mapping[str, float]) -> tuple[Assumption, ...]:
    """Assumptions in falling order of the variance of a step's logarithm that they leave open."""

    def opened(assumption: Assumption) -> float:
        if assumption.part in (MODEL, FIT):  # all others are small beside it
            return math.inf
        return sum(variance.get(part, 0.0) for part in OPENED_BY.get(assumption.part.partition(" (")[0], ()))

    return tuple(sorted(assumed, key=opened, reverse=True))
