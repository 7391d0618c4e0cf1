"""What the runs of a trial counted of its model; before a run, what is known of it."""

from __future__ import annotations

from vitscale.analysis.trials import TrialFigures
from vitscale.errors import VitscaleError
from vitscale.store.records import ModelLine
from vitscale.trial import model_cost
from vitscale.trial.model_cost import ParameterCount
from vitscale.trial.model_spec import ModelSpec


def model_of_runs(result: TrialFigures) -> ModelLine | None:
    """Return the model as the first run recorded it that did; None where none did."""
    for run in result.run_figures:
        if run.model is not None:
            return run.model
    return None


def parameters_of(result: TrialFigures) -> ParameterCount | None:
    """Return a trial's number of parameters, and how it is known; None where it is unavailable.

    What the runs recorded comes first.
    """
    return recorded_parameters(result) or known_parameters(result.trial.model)


def recorded_parameters(result: TrialFigures) -> ParameterCount | None:
    """Return the number of parameters as the ranks counted it; None where no run did, and of imports.

    Of a user's own script it is what the script counted or states; its older records do not say which of the two.
    """
    model = model_of_runs(result)
    is_imported = result.trial.origin is not None
    if model is None or not model.parameters or is_imported:
        return None
    if result.trial.train.script is None:
        return ParameterCount(model.parameters, "measured")
    return ParameterCount(model.parameters, model.parameters_source or "unknown")


def known_parameters(model: ModelSpec) -> ParameterCount | None:
    """Return the number of parameters by formula, by trace or as a user gave it; None where it is unavailable."""
    try:
        return model_cost.counted_parameters(model)
    except (ValueError, VitscaleError):  # the model was never resolved, or its configuration is gone
        return None
