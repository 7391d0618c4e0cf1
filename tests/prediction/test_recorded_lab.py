"""Three and four hosts of a lab are foretold from recorded runs on one and two and a check, for every engine.

The bar of benchmarks/lab_prediction.py, on what it recorded once: figures here are measurements, not expectations.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from prediction.recorded_lab import ENGINES, FITS, TRUTH, evidence
from vitscale.prediction.fitting import fit
from vitscale.prediction.predicting import Question, predict
from vitscale.prediction.results import Prediction


@pytest.fixture(scope="module")
def predictions() -> Mapping[tuple[str, str, int], Prediction]:
    """By link, engine and hosts."""
    return {
        (link, one.series, one.gpus): one for link in FITS for one in predict(fit(evidence(link)), Question((3, 4)))
    }


@pytest.mark.parametrize("hosts", [3, 4])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("link", FITS)
def test_the_step_is_within_a_tenth(
    predictions: Mapping[tuple[str, str, int], Prediction], link: str, engine: str, hosts: int
) -> None:
    found = predictions[link, engine, hosts]
    assert found.step_seconds.value == pytest.approx(TRUTH[link][engine][hosts], rel=0.10)
    assert (found.label, found.nodes) == ("extrapolated", hosts)


def test_the_intervals_hold_most_runs(predictions: Mapping[tuple[str, str, int], Prediction]) -> None:
    """Of 90 % each. All of a link rest on one check, and all engines on one set of hosts, so that they err together."""
    held = [
        one.step_seconds.future_ends[0] <= TRUTH[link][engine][hosts] <= one.step_seconds.future_ends[1]
        for (link, engine, hosts), one in predictions.items()
    ]
    assert sum(held) >= 16
