"""Shares of a step's time that its parts take, as predicted, and the sentence on them."""

from __future__ import annotations

from collections.abc import Mapping

from vitscale.prediction.configurations import Candidate
from vitscale.prediction.evaluating import evaluate
from vitscale.prediction.results import REST_TOLD
from vitscale.prediction.variants import PredictionVariant
from vitscale.present import units

_PART_NAMES = {
    "compute": "compute",
    "wait": "exposed wait",
    "wire": "exposed wire",
    "norm": "synchronised norm",
    "bubble": "bubble",
    "rest": "the rest",
}
_LEAST_NAMED = 0.005
"""Share of a step from which a part is named: 1 % after rounding."""


def step_shares(fitted: PredictionVariant, candidate: Candidate) -> dict[str, float]:
    """Part of a step -> its share of the step, as predicted; of several micro-steps and all ranks together.

    "rest" is what no part has. Empty where the parts come to more than the step, or where the micro-batch of what was
    measured is unknown, as in the answers of `predict`.
    """
    if not all(point.batch_known for point in fitted.fitted.points):
        return {}
    evaluated = evaluate(fitted, [candidate], with_parts=True, with_memory=False)
    step_seconds = evaluated.step.at(0).value
    shares = {part: seconds.at(0).value / step_seconds for part, seconds in evaluated.parts.items()}
    rest = 1 - sum(shares.values())
    if rest < -REST_TOLD:
        return {}
    if rest > REST_TOLD:
        shares["rest"] = rest
    return shares


def shares_in_words(shares: Mapping[str, float], whose: str) -> str:
    """ "In each step of the first answer: 78 % compute, 22 % exposed wire."; empty for none.

    Args:
        shares: those of `step_shares`.
        whose: what the step is one of: "the first answer".
    """
    named = sorted((part for part, share in shares.items() if share >= _LEAST_NAMED), key=lambda part: -shares[part])
    if not named:
        return ""
    clauses = [f"{units.percent(shares[part])} {_PART_NAMES[part]}" for part in named]
    return f"In each step of {whose}: {', '.join(clauses)}."
