"""Engines that train otherwise, exchange now and then, or do not say: unavailable everywhere, never a wrong answer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from analysis.test_drift import EQUAL, constant, judge, run_of, statuses
from evidence_factory import UNKNOWN, make_point
from evidence_factory import make_trial as make_gpu_trial
from results_factory import make_curve, make_results, make_trial, steady_run
from vitscale import engines
from vitscale.advice import candidates
from vitscale.advice.comparable_series import comparable_series
from vitscale.analysis import analyse
from vitscale.engines import checks
from vitscale.engines.facts import BLOCK_OPTIONS, EngineFacts
from vitscale.engines.messages import Message
from vitscale.engines.step_schedule import windows
from vitscale.engines.variants import EngineVariant
from vitscale.errors import RequestError
from vitscale.pages.choosing import fastest
from vitscale.prediction.evidence import Evidence, Series
from vitscale.prediction.memory.forecast import unavailable
from vitscale.prediction.step.messages import exposed_seconds, messages
from vitscale.store.records import TrafficLine
from vitscale.trial.model_cost import ParameterShapes, parameters
from vitscale.trial.trial import Trial

EVERY = 8


def averages(trial: Trial, shapes: ParameterShapes) -> tuple[Message, ...]:
    """One average of all parameters, which are fp32."""
    del trial
    elements = sum(block.elements for block in shapes.each())
    return (Message("all_reduce", 4 * elements, 1, "after", None, micro_steps="last"),)


AVERAGED = EngineFacts(
    engine="engines.test_unlike:averages",
    options=BLOCK_OPTIONS,
    trains_like="averaged parameters",
    steps_between_exchanges=lambda _: EVERY,
    messages="engines.test_unlike:averages",
    variants=({},),
)
GOSSIPING = replace(AVERAGED, trains_like="parameters averaged with a neighbour")
SILENT = EngineFacts(engine="engines.test_unlike:averages", messages="engines.test_unlike:averages")
"""It says neither how often it exchanges, nor whom it trains alike with, nor what it holds."""


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(
        engines, "ENGINES", {**engines.ENGINES, "averaged": AVERAGED, "gossiping": GOSSIPING, "silent": SILENT}
    )
    engines.of_engine.cache_clear()
    yield
    engines.of_engine.cache_clear()


@pytest.mark.parametrize(
    ("engine", "reason"),
    [
        ("averaged", "no other trial of the study computes the same"),
        ("silent", "whom silent trains alike with is not known"),
    ],
)
def test_what_trains_otherwise_does_not_drift(engine: str, reason: str) -> None:
    plain, ddp, unlike = (make_trial(name, ranks, micro_batch=16 // ranks) for name, ranks in
                          (("none", 1), ("ddp", 2), (engine, 2)))  # fmt: skip
    held = judge(*((trial, [run_of(trial, EQUAL if trial is not unlike else constant(0.1))])
                   for trial in (plain, ddp, unlike)))  # fmt: skip
    assert [result.drift.status for result in held] == ["reference", "agrees", "unknown"]
    assert held[-1].drift.reason == reason


def test_trials_of_one_algorithm_are_held_against_each_other_where_they_divide_the_batch_alike() -> None:
    one, checkpointed = (make_trial("averaged", 2, activation_checkpointing=again) for again in (False, True))
    elsewhere = make_trial("averaged", 4, micro_batch=4)
    assert {*statuses((one, EQUAL), (checkpointed, constant(0.1)))} == {"reference", "drifts"}
    assert statuses((one, EQUAL), (elsewhere, constant(0.1))) == ["unknown", "unknown"]


def test_trials_of_two_algorithms_are_not_held_against_each_other() -> None:
    pair = make_trial("averaged", 2), make_trial("gossiping", 2)
    assert statuses(*((trial, EQUAL) for trial in pair)) == ["unknown", "unknown"]


@pytest.mark.parametrize(
    ("engine", "reason"),
    [
        ("averaged", "averaged exchanges once in 8 steps, and single steps were counted"),
        ("silent", "how often silent exchanges is not known"),
    ],
)
def test_a_counted_step_without_exchange_is_no_statement_about_others(engine: str, reason: str) -> None:
    trial = make_trial(engine, 2)
    run = run_of(trial)
    empty = TrafficLine(step=9, backend="gloo", collectives=())
    ranks = [rank.model_copy(update={"traffic": (empty,)}) for rank in run.ranks]
    (result,) = judge((trial, [run.model_copy(update={"ranks": tuple(ranks)})]))
    assert result.traffic is not None
    assert (result.traffic.reason, result.traffic.logical_bytes) == (reason, None)


def test_what_is_sent_now_and_then_counts_in_the_mean_over_steps() -> None:
    trial = make_gpu_trial(2, engine="averaged")
    sent = messages(trial)
    assert sent is not None
    (average,) = sent
    assert average.tensor_bytes == 4 * (parameters(trial.model) or 0)
    assert average.times(grad_accum=3) == 1 / EVERY
    assert messages(make_gpu_trial(2, engine="silent")) is None


def seldom(trial: Trial, shapes: ParameterShapes) -> tuple[Message, ...]:
    """The average, and something else in each second exchange."""
    (average,) = averages(trial, shapes)
    return average, replace(average, steps_between=2 * EVERY)


def test_a_message_may_be_sent_more_seldom_than_the_engine_exchanges(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = replace(AVERAGED, messages="engines.test_unlike:seldom")
    monkeypatch.setattr(engines, "ENGINES", {**engines.ENGINES, "averaged": facts})
    engines.of_engine.cache_clear()
    sent = messages(make_gpu_trial(2, engine="averaged"))
    assert sent is not None
    assert [message.steps_between for message in sent] == [EVERY, 2 * EVERY]


def test_a_message_of_every_eighth_step_is_exposed_for_an_eighth_of_its_time() -> None:
    often = Message("all_reduce", 10.0, 1, "after", None, micro_steps="last")
    rare = Message("all_reduce", 80.0, 1, "after", None, micro_steps="last", steps_between=EVERY)
    compute = np.ones((1, 1))
    exposed = partial(
        exposed_seconds, collective=lambda message: np.full((1, 1), message.tensor_bytes),
        forward_seconds=compute, backward_seconds=compute, grad_accum=1,
    )  # fmt: skip
    assert exposed([often]).item() == 10.0
    assert exposed([rare]).item() == 10.0
    assert exposed([often, rare]).item() == 20.0


@pytest.mark.parametrize("engine", ["averaged", "silent"])
def test_no_step_takes_norms_of_a_gradient_that_is_only_a_rank_s_own(engine: str) -> None:
    trial = make_trial(engine, 2)
    assert checks.why_no_gradient_norms(trial) == f"ranks of {engine} are not known to step by one gradient"
    assert "gradients" not in windows(trial, 200, 1000)
    assert "gradients" in windows(make_trial("ddp", 2), 200, 1000)


@pytest.mark.parametrize("engine", ["averaged", "silent"])
def test_what_it_holds_is_unavailable(engine: str) -> None:
    assert unavailable(make_trial(engine, 2)) == f"what {engine} holds is not modelled"


@pytest.mark.parametrize("engine", ["averaged", "silent"])
def test_it_is_not_compared_and_not_the_fastest_measured(engine: str) -> None:
    trials = [make_trial(name, 2) for name in ("ddp", "fsdp2", engine)]
    runs = [
        steady_run(trial, seconds, repeat)
        for trial, seconds in zip(trials, (0.2, 0.3, 0.1), strict=True)
        for repeat in range(3)
    ]
    study = analyse(make_results([(make_curve([trial]), [trial]) for trial in trials], runs))
    compared = {trial_id for pair in study.comparisons for trial_id in (pair.first_trial, pair.second_trial)}
    assert compared == {trials[0].identity(), trials[1].identity()}
    best = fastest(study)
    assert best is not None
    assert best.trial.trial_id == trials[0].identity()
    (note,) = [finding for finding in study.findings if finding.kind == "trains-otherwise"]
    assert note.message.startswith(f"1 trial of {engine} trains otherwise than the others, or nobody knows")
    assert note.about.trials == (trials[2].identity(),)


def series(engine: str, seconds: float, **train: Any) -> Series:
    points = tuple(make_point(gpus, seconds, engine=engine, **train) for gpus in (1, 2, 4))
    return Series(engine, "strong-micro", {}, points)


@pytest.mark.parametrize("engine", ["averaged", "silent"])
def test_what_trains_otherwise_is_not_the_fastest(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    evidence = Evidence((series(engine, 0.1), series("ddp", 0.2)), UNKNOWN)
    comparable = comparable_series(evidence, None)
    assert [own.name for own in comparable.members] == ["ddp"]
    monkeypatch.setattr(candidates, "PROPOSED", [EngineVariant("averaged"), EngineVariant("fsdp2")])
    proposed = candidates.candidates(comparable, ((2, 2),))
    assert {candidate.engine for candidate in proposed.combinations} == {"ddp", "fsdp2"}
    assert proposed.refused == {"averaged": "it trains otherwise than what was measured"}


@pytest.mark.parametrize("engine", ["averaged", "silent"])
def test_asked_for_by_name_it_is_advised_about_by_itself(engine: str) -> None:
    comparable = comparable_series(Evidence((series(engine, 0.1), series("ddp", 0.2)), UNKNOWN), engine)
    assert [own.name for own in comparable.members] == [engine]
    proposed = candidates.candidates(comparable, ((2, 2),))
    assert {candidate.engine for candidate in proposed.combinations} == {engine}


def test_an_option_that_it_does_not_declare_is_refused() -> None:
    checks.check(make_trial("averaged", 2, compile=True).train)
    with pytest.raises(RequestError, match=r"train.compile = True has no meaning under train.engine = 'silent'"):
        checks.check(make_trial("silent", 2, compile=True).train)
