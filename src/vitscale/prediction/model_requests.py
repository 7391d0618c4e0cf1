"""Which models options ask for in place of the measured ones. `api.asked_models` finds them, by hub and tracer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from vitscale.prediction.answering import Changes, stated_parameters
from vitscale.prediction.evidence import IMAGE_SIZE, Evidence, MeasuredPoint, Series
from vitscale.trial.model_cost import counted
from vitscale.trial.trial import Trial


class ModelRequest(NamedTuple):
    """A model that options ask for."""

    name: str | None
    """A name here, of timm, torchvision or the hub, or a folder; None: the measured model at another image size."""
    image_size: int
    """Pixels a side."""
    measured: Trial
    """What was measured, with the engine and precision that are asked for: the model is traced as this trains."""
    stated_parameters: int | None = None
    """The number of parameters that the user states; None: none."""


def requests_by_trial(evidence: Evidence, changes: Changes) -> dict[str, ModelRequest]:
    """Return trial identity -> the model that options state for it, of trials whose import left model or size open.

    Raises:
        RequestError: a change cannot be; see `answering.stated_parameters`.
    """
    count = stated_parameters(evidence, changes)
    requests = {}
    for series in evidence.series:
        for point in series.points:
            request = _request_of_point(point, changes, count)
            if request is not None:
                requests[point.trial_id] = request
    return requests


def _request_of_point(point: MeasuredPoint, changes: Changes, count: int | None) -> ModelRequest | None:
    """Return the model that options state for a measured point; None where they leave it as it is recorded.

    Args:
        point: the point.
        changes: what the options say.
        count: the number of parameters that they state, if any.
    """
    model = point.trial.model
    if model.unknown and changes.model is not None:
        return ModelRequest(changes.model, changes.image_size or model.image_size, point.trial, count)
    is_sized_by_count = model.unknown and count is not None
    is_size_open = IMAGE_SIZE in point.assumed and not is_sized_by_count
    if is_size_open and changes.image_size is not None:
        return ModelRequest(None, changes.image_size, point.trial)
    return None


def requests_by_series(series: Iterable[Series], changes: Changes) -> dict[str, ModelRequest]:
    """Return series -> the model that options ask for in place of the measured one; none where they ask for none.

    Raises:
        RequestError: the parameters are no number.
    """
    requests = {}
    for member in series:
        request = _request_of_series(member, changes)
        if request is not None:
            requests[member.name] = request
    return requests


def _request_of_series(series: Series, changes: Changes) -> ModelRequest | None:
    """Return the model that options ask for where this series was measured; None where they ask for none."""
    measured = series.points[-1].trial
    if changes.model is not None:
        count = None if changes.parameters is None else counted(changes.parameters)
        image_size = changes.image_size or measured.model.image_size
        return ModelRequest(changes.model, image_size, _trained_as_asked(measured, changes), count)
    if changes.image_size is not None:
        return ModelRequest(None, changes.image_size, measured)
    return None


def _trained_as_asked(measured: Trial, changes: Changes) -> Trial:
    """Return the trial with the engine and precision that are asked for, which decide what a trace counts."""
    facts = {"engine": changes.engine, "precision": changes.precision}
    stated_facts = {field: value for field, value in facts.items() if value is not None}
    return measured.model_copy(update={"train": measured.train.model_copy(update=stated_facts)})
