"""An answer with all it rests on: predictions, how well such predictions did where it is known, the evidence."""

from __future__ import annotations

from dataclasses import dataclass

from vitscale.prediction.evidence import Evidence
from vitscale.prediction.results import Prediction, Score


@dataclass(frozen=True)
class Outlook:
    """What is said of rank counts nobody has measured."""

    evidence: Evidence
    predictions: tuple[Prediction, ...]
    """Series by series, in rising order of ranks."""
    scores: tuple[Score, ...]
    """Of the series that allow one: predicted from the smaller counts and compared with the larger."""
    left_out: tuple[str, ...] = ()
    """What was asked and cannot be, and why."""
