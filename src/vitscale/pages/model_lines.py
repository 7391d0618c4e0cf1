"""Lines on the models of measured trials: their number of parameters, and how it is known."""

from __future__ import annotations

from collections.abc import Iterable

from vitscale.analysis import TrialResult
from vitscale.analysis.model_counts import parameters_of
from vitscale.present.units import counted
from vitscale.trial.model_words import CountedModel, parameter_lines

_MOST_LINES_IN_SHORT = 2


def model_lines(trials: Iterable[TrialResult]) -> list[str]:
    """Return lines such as "vit-b16: 85,806,346 parameters (measured)", one for all models with the same number.

    A model of which an import says neither the name nor the size has none.
    """
    models: dict[CountedModel, None] = {}
    for trial in trials:
        count = parameters_of(trial)
        if count is not None or not trial.trial.model.unknown:
            models[CountedModel(trial.model_name, count)] = None
    return parameter_lines(models)


def model_lines_in_short(trials: Iterable[TrialResult]) -> list[str]:
    """Return the first of `model_lines`; in place of the others the number of them."""
    lines = model_lines(trials)
    left_out = len(lines) - _MOST_LINES_IN_SHORT
    if left_out <= 0:
        return lines
    more = f"+{counted(left_out, 'more number')} of parameters, in the report"
    return [*lines[:_MOST_LINES_IN_SHORT], more]
