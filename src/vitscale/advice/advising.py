"""From a fitted results folder and a user's limits to advice."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from vitscale.advice.answers import Answer, Choosing, answers, closest, each_alone, measured_first
from vitscale.advice.candidates import candidates, rented
from vitscale.advice.counts import counts
from vitscale.advice.family import Family, family
from vitscale.advice.judging import best, front, limits
from vitscale.advice.landscape import MOST_OOM_CHANCE, Forecaster, Landscape, landscape
from vitscale.advice.narrowing import Measurement
from vitscale.advice.option import Option
from vitscale.advice.request import NoiseScale, Request, Work
from vitscale.analysis import Analysis
from vitscale.errors import RequestError, explain
from vitscale.prediction.evidence import Evidence
from vitscale.prediction.finishing import Interruptions
from vitscale.prediction.results import Assumption
from vitscale.trial.trial import Trial


@dataclass(frozen=True)
class Advice:
    """All that `vitscale advise` says."""

    asked: Request
    work: Work
    reference: str
    """The series that advice is about."""
    origins: tuple[str, ...]
    """The series that the answers are from."""
    trial: Trial
    """Of that series at its largest measured rank count."""
    trials: Mapping[str, Trial]
    """The same of every series that a candidate was worked out from."""
    study_batches: tuple[int, ...]
    """Global batches that the series was measured with, in rising order."""
    noise: NoiseScale
    answers: tuple[Answer, ...]
    """The one for the first limit first; the knee last. Without the knee, empty where nothing meets the limits."""
    closest: Option | None
    """Where limits were given and nothing meets them: what comes nearest."""
    alone: Mapping[str, Option]
    """Where nothing meets all limits: limit -> what answers it by itself."""
    never: tuple[str, ...]
    """Limits that nothing meets even by themselves."""
    front: tuple[Option, ...]
    """Of the engines that were measured, by rising time: nothing else is both faster and cheaper."""
    by_count: tuple[Option, ...]
    """The fastest of each engine at each rank count, measured engines first."""
    other_batch: Option | None
    """The fastest that trains with another global batch than the study, where that is faster than all that keep it."""
    large_batch: Option | None
    """The fastest of all, where only large-batch training is so fast and it was not asked for."""
    looked_at: int
    dropped: Mapping[str, int]
    """Why candidates were left out -> how many."""
    refused: Mapping[str, str]
    """Engine -> why it cannot train this."""
    indivisible: tuple[int, ...]
    """Rank counts over which the study's global batch does not divide."""
    memory_known: bool
    interruptions_known: bool
    """Whether failures and checkpoints are in the time."""
    assumptions: tuple[Assumption, ...] = ()
    """What `chosen` rests on that nothing measured."""
    measurements: tuple[Measurement, ...] = ()
    """What would narrow `chosen` most for what it costs, best first."""

    @property
    def met(self) -> bool:
        """Whether the limits, if any, are met by something."""
        return self.closest is None

    @property
    def chosen(self) -> Option | None:
        """What is written out as a study: the first answer; where nothing meets the limits, what comes nearest."""
        if self.closest is not None:
            return self.closest
        return self.answers[0].option if self.answers else None


def advise(
    evidence: Evidence,
    asked: Request,
    noise: NoiseScale,
    forecaster: Forecaster,
    interrupted: Mapping[str, Interruptions] | None = None,
) -> Advice:
    """Looks at every candidate and answers.

    Args:
        evidence: the measured series.
        asked: limits and choices.
        noise: the gradient noise scale, where it is known.
        forecaster: what candidates of a series are expected to take.
        interrupted: series -> failures and checkpoints of its training; left out of the time where they are missing.

    Raises:
        RequestError: what is asked cannot be answered from these results: no such series, no epochs, uneven counts.
    """
    kin = family(evidence, asked.series)
    work = work_of(kin, asked)
    places = counts(
        kin.members, gpus=asked.gpus, max_gpus=asked.max_gpus, ranks_per_node=asked.ranks_per_node
    )  # fmt: skip
    found = candidates(kin, places, hosts_given=asked.ranks_per_node is not None)
    if asked.instances:
        other = rented(kin, asked.instances, asked.max_gpus)
        found = found.beside(other) if asked.price_per_gpu_hour is not None else other
    batches = tuple(sorted({point.trial.global_batch for one in kin.of_the_policy for point in one.points}))
    view = landscape(kin, found, forecaster, work, noise, batches[0], interrupted, asked.price_per_gpu_hour)
    to_same_loss = asked.any_batch and noise.images is not None
    choosing = Choosing(view, asked, limits(view, asked), view.same_loss_seconds if to_same_loss else view.seconds)
    answered = answers(choosing)
    nearest = closest(choosing) if asked.limited and all(answer.kind == "knee" for answer in answered) else None
    single = each_alone(choosing) if nearest is not None else {}
    told = [answer.option for answer in answered] + ([nearest] if nearest is not None else [])
    return Advice(
        asked=asked,
        work=work,
        reference=kin.reference.name,
        origins=tuple(dict.fromkeys(option.series for option in told)),
        trial=kin.trial,
        trials={series.name: series.points[-1].trial for series in kin.members},
        study_batches=batches,
        noise=noise,
        answers=answered,
        closest=nearest,
        alone=single,
        never=tuple(limit for limit in choosing.found if limit not in single) if nearest is not None else (),
        front=tuple(
            choosing.option(place)
            for place in front(measured_first(view, choosing.shown), choosing.seconds, choosing.spent)
        ),
        by_count=_by_count(choosing),
        other_batch=_other_batch(choosing),
        large_batch=_large_batch(choosing),
        looked_at=len(found.found),
        dropped=_dropped(view, choosing),
        refused=found.refused,
        indivisible=found.indivisible,
        memory_known=view.memory_known,
        interruptions_known=all(option.series in (interrupted or {}) for option in told),
    )


def work_of(kin: Family, asked: Request) -> Work:
    """What is to be done: the dataset as the study's largest trial uses it, for as many epochs as asked.

    Raises:
        RequestError: the results do not say how many images or epochs.
    """
    points = kin.reference.points
    known = [point.images for point in points if point.images is not None]
    images = asked.images or max(known, default=None)
    if images is None:
        raise RequestError(
            explain("these results do not say how many images an epoch has", next_step="Give them with --images")
        )
    epochs = asked.epochs or kin.trial.train.epochs
    if epochs is None:
        raise RequestError(
            explain(
                "the study measured some steps and does not say for how many epochs to train",
                next_step="Give --epochs",
            )
        )
    return Work(images, epochs, kin.trial.train.drop_last)


def noise_of(analysis: Analysis, evidence: Evidence, name: str | None) -> NoiseScale:
    """The median over the trials of a series and its kin whose gradient noise scale is known; else why it is not.

    Raises:
        RequestError: there is no such series.
    """
    members = family(evidence, name).members
    ids = [point.trial_id for series in members for point in series.points]
    found = [result.convergence for trial_id in ids if (result := analysis.trials.get(trial_id)) is not None]
    known = [one.noise_scale_images.centre for one in found if one is not None and one.noise_scale_images is not None]
    if known:
        return NoiseScale(statistics.median(known), min(known), max(known))
    # The reference comes first, its points in rising order: its largest trial could have measured it best.
    largest = analysis.trials.get(members[0].points[-1].trial_id)
    why = largest.convergence.noise_reason if largest is not None and largest.convergence is not None else ""
    return NoiseScale.unknown(why or "no trial measured it")


def _by_count(choosing: Choosing) -> tuple[Option, ...]:
    fastest: dict[tuple[bool, str, str, int, int], int] = {}
    for place in np.flatnonzero(choosing.shown):
        one = choosing.view.candidates[place]
        rented = "" if one.instance is None else one.instance.name
        key = (not choosing.view.measured[place], rented, one.engine, one.zero_stage, one.gpus)
        if key not in fastest or choosing.seconds[place] < choosing.seconds[fastest[key]]:
            fastest[key] = int(place)
    return tuple(choosing.option(fastest[key]) for key in sorted(fastest))


def _other_batch(choosing: Choosing) -> Option | None:
    """What a larger or smaller global batch would gain, where the answers must keep the study's."""
    view = choosing.view
    if choosing.asked.any_batch:
        return None
    measured = view.contends & view.measured & (choosing.asked.large_batch | ~view.large_batch)
    kept, changed = (np.flatnonzero(measured & mask) for mask in (view.keeps_batch, ~view.keeps_batch))
    if not len(changed) or not len(kept):
        return None
    fastest = changed[np.argmin(view.seconds[changed])]
    return choosing.option(int(fastest)) if view.seconds[fastest] < view.seconds[kept].min() else None


def _large_batch(choosing: Choosing) -> Option | None:
    """What only large-batch training would gain."""
    fastest = best(measured_first(choosing.view, choosing.shown), choosing.seconds)
    kept = best(choosing.preferred, choosing.seconds)
    if fastest is None or kept is None or not choosing.seconds[fastest] < choosing.seconds[kept]:
        return None
    return choosing.option(fastest)


def _dropped(view: Landscape, choosing: Choosing) -> dict[str, int]:
    """Of those that would have been looked at, by reason."""
    asked = ~view.needless & (view.keeps_batch | choosing.asked.any_batch)
    counted = {
        f"more than a {100 * MOST_OOM_CHANCE:.0f} % chance that it will not fit in memory": view.known & ~view.fits,
        "its time cannot be predicted": ~view.known,
    }
    return {why: count for why, mask in counted.items() if (count := int((mask & asked).sum()))}
