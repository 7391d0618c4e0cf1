"""Each part fitted from what measured it; what nothing measured stays at its prior."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vitscale.prediction.evidence import Evidence, Series


@dataclass(frozen=True)
class FittedSeries:
    """The parts of one series' step, as draws from what the evidence leaves open."""

    series: Series


@dataclass(frozen=True)
class Fitted:
    """All series of a results folder."""

    evidence: Evidence
    series: Mapping[str, FittedSeries]
    """By name."""


def fit(evidence: Evidence) -> Fitted:
    """Fits every series of the evidence."""
    raise AssertionError
