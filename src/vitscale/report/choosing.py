"""The measured trial that one would choose: what is not told apart from it, what it will take, and from when on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from vitscale.analysis import Analysis, TrialResult
from vitscale.analysis.winners import Winner, winner
from vitscale.prediction.start_up import FORKED_RANKS
from vitscale.present import units
from vitscale.present.estimate import Estimate
from vitscale.report.statements import Choice, Expectation, TrainingLength
from vitscale.report.tables import hours_unit, starts_as_forks, trial_label


def candidates(analysis: Analysis) -> list[TrialResult]:
    """The trials that train the largest share of the images; those that tell no epoch only where none does."""
    with_costs = [trial for trial in analysis.trials.values() if trial.comparable_costs]
    with_epochs = [trial for trial in with_costs if not trial.of_rates] or with_costs
    largest_share = max((trial.trial.data.fraction for trial in with_epochs), default=0.0)
    return [trial for trial in with_epochs if trial.trial.data.fraction == largest_share]


def best_measured(analysis: Analysis) -> TrialResult | None:
    """The candidate that is fastest for all images; None without any."""
    return min(candidates(analysis), key=epoch_seconds, default=None)


def epoch_seconds(trial: TrialResult) -> float:
    """Seconds for all images, those that `drop_last` leaves out too: comparisons and speedups are of these. For one
    image where no run tells an epoch."""
    if trial.of_rates and trial.images_per_second:
        return 1 / trial.images_per_second.value
    return trial.epoch_seconds.value / (1 - trial.images_left_out) if trial.epoch_seconds else math.inf


def rank_hours(trial: TrialResult) -> float:
    """Hours of all ranks together for an epoch of all images."""
    return epoch_seconds(trial) * trial.trial.world.size / 3600


def for_all_images(trial: TrialResult) -> tuple[str, ...]:
    """ "1.28 s with the images that it leaves out", where that is another time than the epoch's."""
    seconds = units.seconds(epoch_seconds(trial))
    differs = trial.epoch_seconds is not None and seconds != units.seconds(trial.epoch_seconds.value)
    return (f"{seconds} with the images that it leaves out",) if differs else ()


def pace(trial: TrialResult) -> str:
    """ "3.25 s an epoch", or "5,800 images/s" where no run tells an epoch."""
    if trial.of_rates and trial.images_per_second:
        return f"{units.number(trial.images_per_second.value)} images/s"
    seconds = units.seconds(trial.epoch_seconds.value if trial.epoch_seconds else None)
    return f"{seconds} {'a run' if trial.timed_as_a_whole else 'an epoch'}"


def in_short(analysis: Analysis, trial: TrialResult, *more: str) -> str:
    """ "ddp, 2 ranks, micro-batch 32: 3.25 s an epoch (3.12 s to 3.39 s, 3 runs)", `more` in the brackets."""
    figure, text = (trial.images_per_second, units.number) if trial.of_rates else (trial.epoch_seconds, units.seconds)
    details = [*for_all_images(trial), *more]
    if figure and figure.low is not None and figure.high is not None and not figure.note:
        details.insert(0, f"{text(figure.low)} to {text(figure.high)}")
    brackets = f" ({', '.join(details)})" if details else ""
    return f"{trial_label(analysis, trial)}: {pace(trial)}{brackets}"


@dataclass(frozen=True)
class Chosen:
    """The best of the candidates by some cost, and what is not told apart from it."""

    trial: TrialResult
    rivals: tuple[TrialResult, ...]
    candidates: int
    winner: Winner

    def choice(self, analysis: Analysis, title: str, text: str) -> Choice:
        """The facts of a statement: `text` is the trial with its figures."""
        rivals = tuple(trial_label(analysis, rival) for rival in self.rivals)
        return Choice(title, text, rivals, self.candidates, self.winner.is_tested)


def fastest(analysis: Analysis) -> Chosen | None:
    """The fastest candidate. Where the study's own comparisons settle a pair, that verdict holds here too."""
    trials = candidates(analysis)
    if not trials:
        return None
    chosen = _chosen(trials, [trial.comparable_costs for trial in trials])
    verdicts = _verdicts(analysis, chosen.trial)
    settled = {trial_id for trial_id, verdict in verdicts.items() if verdict in ("faster", "slower")}
    not_told_apart = {rival.trial_id for rival in chosen.rivals}
    if chosen.winner.is_tested:
        not_told_apart |= verdicts.keys()
    not_told_apart -= settled
    rivals = [trial for trial in sorted(trials, key=epoch_seconds) if trial.trial_id in not_told_apart]
    return Chosen(chosen.trial, tuple(rivals), chosen.candidates, chosen.winner)


def cheapest(analysis: Analysis) -> Chosen | None:
    """The candidate of the fewest rank-hours for an epoch; None where none tells an epoch."""
    trials = [trial for trial in candidates(analysis) if trial.epoch_seconds]
    if not trials:
        return None
    return _chosen(trials, [[cost * trial.trial.world.size for cost in trial.comparable_costs] for trial in trials])


def _chosen(trials: Sequence[TrialResult], costs: Sequence[Sequence[float]]) -> Chosen:
    best = winner(costs, [trial.looked for trial in trials], correct=False)
    rivals = tuple(trials[position] for position in best.rivals)
    return Chosen(trials[best.position], rivals, len(trials), best)


def _verdicts(analysis: Analysis, trial: TrialResult) -> dict[str, str]:
    """Identity of each trial that the study compares with `trial` -> the verdict."""
    verdicts: dict[str, str] = {}
    for pair in analysis.comparisons:
        if pair.first_trial == trial.trial_id:
            verdicts[pair.second_trial] = pair.result.verdict
        elif pair.second_trial == trial.trial_id:
            verdicts[pair.first_trial] = pair.result.verdict
    return verdicts


def expectation(analysis: Analysis, chosen: Chosen) -> Expectation | None:
    """What the fastest trial will take, corrected for having been chosen; None where nothing is corrected."""
    trial, trials = chosen.trial, candidates(analysis)
    corrected = winner([each.comparable_costs for each in trials], [each.looked for each in trials]).corrected
    if corrected is None:
        return None
    measured = _as_told(trial, Estimate(math.exp(_mean_log(trial.comparable_costs))))
    expected = _as_told(trial, corrected)
    form, unit = units.seconds, " a run" if trial.timed_as_a_whole else " an epoch"
    if trial.of_rates:
        form, unit = units.number, " images/s"
    low, high = expected.ends
    return Expectation(
        measured=f"{form(measured.value)}{unit}",
        corrected=f"{form(expected.value)}{unit}",
        low=form(low),
        high=form(high),
        candidates=chosen.candidates,
    )


def _mean_log(costs: Sequence[float]) -> float:
    return math.fsum(map(math.log, costs)) / len(costs)


def _as_told(trial: TrialResult, cost: Estimate) -> Estimate:
    """A cost for all images as the epoch that is told, or as images per second."""
    if trial.of_rates:
        return cost.into(trial.trial.data.fraction)
    return cost.times(1 - trial.images_left_out)


def training_length(analysis: Analysis, chosen: Chosen) -> TrainingLength:
    """Fewest epochs from which on the fastest trial ends first, start-up included."""
    best, trials = chosen.trial, candidates(analysis)
    others = [trial for trial in trials if trial is not best]
    unknown = TrainingLength(None, "", "")
    if best.of_rates or best.timed_as_a_whole or not others:
        return unknown
    if best.startup_seconds is None or any(trial.startup_seconds is None for trial in others):
        return unknown
    epochs = 1
    for other in others:
        saved = epoch_seconds(other) - epoch_seconds(best)
        behind = best.startup_seconds - (other.startup_seconds or 0.0)
        if behind > saved * epochs:
            if saved <= 0:
                return unknown
            epochs = math.ceil(behind / saved)
    ahead = min(others, key=lambda trial: (trial.startup_seconds or 0.0) + (epochs - 1) * epoch_seconds(trial))
    startup = units.seconds(best.startup_seconds)
    if starts_as_forks(best):
        startup = f"{startup} of {FORKED_RANKS}"
    return TrainingLength(epochs, trial_label(analysis, ahead), startup)


def hours(trial: TrialResult) -> str:
    """ "0.25 GPU-hours" of an epoch; "rank-hours" on a CPU."""
    return f"{units.number(rank_hours(trial))} {hours_unit([trial.trial])}"
