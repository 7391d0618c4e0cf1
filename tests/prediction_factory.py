"""Predictions made by hand, for tests of what prints and draws them: whatever a test does not name is plausible."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from results_factory import make_curve, make_results, make_trial, one_curve, steady_run
from vitscale.analysis import Analysis, analyse
from vitscale.api.asked_models import ModelFinder
from vitscale.prediction.answering import Changes, StatedFacts, askable_series, questions, with_stated_facts
from vitscale.prediction.evidence import Evidence, MeasuredPoint, Series
from vitscale.prediction.model_requests import requests_by_series, requests_by_trial
from vitscale.prediction.network.links import Link, Network
from vitscale.prediction.predicting import Question
from vitscale.prediction.results import Assumption, Forecast, Label, Prediction, Score, predicted
from vitscale.present.estimate import Estimate
from vitscale.store.results import Results
from vitscale.trial.model_spec import resolve
from vitscale.trial.trial import Mode, World

IMAGES = 1024
NO_ENERGY = "no run recorded it"
NO_PRICE = "no price was given"
NETWORK = Assumption(
    "network between hosts", "about 3 GB/s, within a factor of 4 either way", "vitscale check --hostfile HOSTS"
)


def stated_facts(evidence: Evidence, changes: Changes, nodes_of: int | None = None) -> StatedFacts:
    """As `predict` takes facts that options state: with the models that they name found."""
    models = ModelFinder().find_all(requests_by_trial(evidence, changes))
    return with_stated_facts(evidence, changes, nodes_of, models)


def asked_questions(
    evidence: Evidence, gpus: tuple[int, ...], changes: Changes, series: str | None = None, **options: Any
) -> tuple[Question, ...]:
    """As `predict` asks: with the models that options name found."""
    askable = askable_series(evidence, gpus, changes, series=series)
    models = ModelFinder().find_all(requests_by_series(askable, changes))
    return questions(evidence, gpus, changes, series=series, models=models, **options)


def estimate(value: float, mean: float = 0.04, run: float = 0.1) -> Estimate:
    """With intervals of that share to either side."""
    return predicted(value, value * (1 - mean), value * (1 + mean), value * (1 - run), value * (1 + run))


def make_prediction(
    gpus: int,
    label: Label = "extrapolated",
    *,
    series: str = "ddp",
    mode: Mode = "strong-micro",
    ranks_per_node: int | None = None,
    **changes: Any,
) -> Prediction:
    """Micro-batch 8 of 1,024 images; a step takes 100 ms and 2 ms more for each rank, 20 more across hosts."""
    per_node = min(gpus, 4) if ranks_per_node is None else ranks_per_node
    world = World(nodes=gpus // per_node, ranks_per_node=per_node, threads_per_rank=1)
    trial = make_trial("ddp", gpus).model_copy(update={"world": world})
    steps = -(-IMAGES // (8 * gpus))
    step = 0.1 + 0.002 * gpus + (0.02 if world.nodes > 1 else 0.0)
    epoch, first = steps * step, 128 * 0.102
    found = Prediction(
        series=series,
        mode=mode,
        labels={"train.engine": "ddp"},
        trial=trial,
        gpus=gpus,
        nodes=world.nodes,
        label=label,
        images=IMAGES,
        steps_per_epoch=steps,
        step_seconds=estimate(step),
        epoch_seconds=estimate(epoch),
        images_per_second=estimate(IMAGES / epoch),
        speedup=estimate(first / epoch),
        efficiency=estimate(first / epoch / gpus),
        compute_seconds=estimate(0.09),
        wait_seconds=estimate(0.001 * gpus),
        wire_seconds=estimate(0.01 + 0.001 * gpus),
        norm_seconds=estimate(0.0),
        bubble_seconds=estimate(0.0),
        rest_seconds=estimate(0.0),
        memory_bytes=600_000_000,
        memory_capacity_bytes=None,
        oom_chance=None,
        joules_per_epoch=None,
        cost_per_epoch=None,
        startup_seconds=estimate(6.0),
        effective_draws=1000.0,
        assumptions=(NETWORK,) if label == "prior-driven" else (),
        reasons={
            "memory_capacity_bytes": "the device's memory was not recorded",
            "oom_chance": "the device's memory was not recorded",
            "joules_per_epoch": NO_ENERGY,
            "cost_per_epoch": NO_PRICE,
        },
    )
    return dataclasses.replace(found, **changes)


def make_score(**changes: Any) -> Score:
    """Four runs on 8 ranks, predicted from fewer."""
    found = Score(
        series="ddp",
        fitted_gpus=(1, 2, 4),
        held_out_gpus=(8,),
        runs=4,
        mean_absolute_percentage_error=0.021,
        worst_error=0.034,
        held=3,
        interval_score=0.2,
        baseline_error=0.027,
        baseline_interval_score=0.3,
    )
    return dataclasses.replace(found, **changes)


def make_network() -> Network:
    """Measured inside hosts, assumed between them."""
    inside = Link(1e9, 1e-5, 0.1, 0.1, "check", "check of 2026-11-20, all_reduce over 4 ranks")
    across = Link(3e9, 2e-5, 0.7, 0.7, "assumed", "nothing measured between hosts")
    return Network(inside, across)


def study(step_seconds: Mapping[int, Sequence[float]] | None = None, mode: Mode = "strong-micro") -> Analysis:
    """One DDP curve, by default on 1, 2 and 4 ranks as the predictions have it."""
    return analyse(one_curve(step_seconds or {1: [0.1, 0.102, 0.104], 2: [0.104] * 2, 4: [0.108]}, mode=mode))


def series_of(analysis: Analysis, name: str = "ddp") -> Series:
    """The first curve of a study as evidence, all on one host."""
    curve = analysis.curves[0]
    points = []
    for place in curve.points:
        result = analysis.trials[place.trial_id]
        trial = result.trial
        steps = -(-round(IMAGES * trial.data.fraction) // trial.global_batch)
        seconds = tuple(run.step_seconds for run in result.run_figures if run.step_seconds is not None)
        points.append(MeasuredPoint(place.trial_id, trial, 1, round(IMAGES * trial.data.fraction), steps, seconds))
    return Series(name, curve.mode, curve.labels, tuple(points))


def make_forecast(
    analysis: Analysis, predictions: Sequence[Prediction] | None = None, scores: Sequence[Score] = ()
) -> Forecast:
    """Of a study's first curve: 1, 2 and 4 ranks interpolated, 8 and 16 beyond."""
    if predictions is None:
        predictions = [make_prediction(gpus, "interpolated") for gpus in (1, 2, 4)]
        predictions += [make_prediction(8), make_prediction(16, "prior-driven")]
    return Forecast(Evidence((series_of(analysis),), make_network()), tuple(predictions), tuple(scores))


def resolved_study(step_seconds: Mapping[int, Sequence[float]], mode: Mode = "strong-micro") -> Results:
    """One DDP curve as `vitscale run` leaves it: nothing of the model is open."""
    trials = [make_trial("ddp", gpus, fraction=gpus / 16 if mode == "weak" else 1.0) for gpus in step_seconds]
    trials = [trial.model_copy(update={"model": resolve(trial.model, 10)}) for trial in trials]
    runs = [
        steady_run(trial, seconds, repeat)
        for trial in trials
        for repeat, seconds in enumerate(step_seconds[trial.world.size])
    ]
    return make_results([(make_curve(trials, mode), trials)], runs)
