"""What stands beside times and costs of advice: no GPU-hours of a CPU, and whose start-up is in a time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from advice_factory import ASKED, advised
from prediction_factory import resolved_study
from vitscale.advice.pipeline import Advice, advised_from
from vitscale.advice.printing import advice_document, advice_fields
from vitscale.advice.request import Request
from vitscale.advice.study_text import study_text
from vitscale.analysis import Analysis, analyse
from vitscale.pages.answers import what_next
from vitscale.pages.predicted import predict_document
from vitscale.prediction import finishing
from vitscale.prediction.evidence import evidence_of
from vitscale.prediction.fitting import fit
from vitscale.prediction.predicting import Question, predict
from vitscale.prediction.results import Forecast
from vitscale.prediction.start_up import OF_FORKS
from vitscale.present import units
from vitscale.present.document import Bullets, Document
from vitscale.present.terminal import lines
from vitscale.store.results import Results

STEPS = {1: [0.1, 0.1, 0.1], 2: [0.104, 0.104, 0.104]}


def shown(document: Document, *, verbose: bool = False) -> str:
    """What a terminal shows, with single spaces."""
    return " ".join(" ".join(line.plain for line in lines(document, 80, verbose)).split())


def started_by(launcher: str) -> Analysis:
    """A study on CPUs whose ranks this launcher started."""
    results: Results = resolved_study(STEPS)
    renamed = {
        identity: trial.model_copy(update={"launcher": launcher}) for identity, trial in results.study.trials.items()
    }
    runs = tuple(
        run.model_copy(update={"header": run.header.model_copy(update={"trial": renamed[run.header.trial_id]})})
        for run in results.runs
    )
    study = results.study.model_copy(update={"trials": renamed})
    return analyse(results.model_copy(update={"study": study, "runs": runs}))


def advice_on(analysis: Analysis, folder: Path) -> Advice:
    return advised_from(
        fit(evidence_of(folder, analysis)), analysis, Request(max_gpus=2, budget=10.0, min_efficiency=0.5)
    )


@pytest.mark.parametrize(("device", "hours"), [("cuda", "GPU-hours"), ("cpu", "rank-hours")])
def test_what_ranks_time_is_counted_in(device: str, hours: str) -> None:
    assert units.ranks_time(device) == hours
    assert units.ranks_time(device, "h") == hours.removesuffix("ours")


@pytest.mark.parametrize(
    ("hours", "words"),
    [
        (7.47e-05, "0.269 rank-seconds"),
        (0.0, "0 rank-seconds"),
        (0.16, "576 rank-seconds"),
        (1 / 6, "10.0 rank-minutes"),
        (1.99, "119 rank-minutes"),
        (2.0, "2.00 rank-hours"),
        (1234.5, "1,234 rank-hours"),
    ],
)
def test_a_small_time_of_ranks_is_in_seconds_or_minutes(hours: float, words: str) -> None:
    assert units.rank_time(hours, "cpu") == words
    assert units.rank_time(hours, "cuda") == words.replace("rank", "GPU")


def test_a_column_of_ranks_time_has_the_unit_of_the_largest() -> None:
    unit = units.rank_time_unit([0.001, None, 0.5], "cuda", short=True)
    assert (unit.sign, unit.text(0.001), unit.text(0.5)) == ("GPU-min", "0.0600", "30.0")


def test_advice_on_a_cpu_has_no_gpu_hours(tmp_path: Path) -> None:
    advice = advice_on(started_by("torchrun"), tmp_path)
    text = shown(advice_document(advice, [], None), verbose=True)
    assert "rank-s" in text
    assert "at most 10.0 rank-hours" in text
    assert "GPU-" not in text
    assert advice_fields(advice, None)["limits"]["budget_unit"] == "rank-hours"
    option = advice.chosen
    assert option is not None
    assert "rank-seconds" in study_text("advised", option, advice.trials[option.series], advice.work)


def test_advice_on_gpus_has_them() -> None:
    text = shown(advice_document(advised(replace(ASKED, budget=10.0)), [], None), verbose=True)
    assert "GPU-h" in text
    assert "rank-h" not in text


@pytest.mark.parametrize(("launcher", "is_said"), [("local", True), ("torchrun", False)])
def test_start_up_of_forks_is_said_wherever_it_is_in_a_time(launcher: str, is_said: bool, tmp_path: Path) -> None:
    analysis = started_by(launcher)
    advice = advice_on(analysis, tmp_path)
    in_advice = shown(advice_document(advice, [], None))
    assert (OF_FORKS in in_advice) == is_said
    next_steps = [
        item for block in what_next(analysis, advice, None).blocks if isinstance(block, Bullets) for item in block.items
    ]
    assert (OF_FORKS in next_steps) == is_said
    evidence = evidence_of(tmp_path, analysis)
    predictions = predict(fit(evidence), Question((4,)))
    horizon = finishing.Horizon.of(3, 1.0, None)
    ends = finishing.finish(horizon, predictions, evidence, analysis)
    in_prediction = shown(predict_document(Forecast(evidence, predictions, ()), ends), verbose=True)
    assert (OF_FORKS in in_prediction) == is_said
