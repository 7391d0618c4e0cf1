"""The measured trial to choose, its rivals, the time to expect of it, and from how many epochs on it ends first.

Candidates are the measured trials that may be compared. A rival is a candidate that is not significantly worse than
the chosen one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from vitscale.analysis import Analysis, TrialResult
from vitscale.analysis.winners import Winner, winner
from vitscale.engines.checks import computation
from vitscale.engines.facts import ONE_PROCESS
from vitscale.pages.statements import BestTrial, Expectation, TrainingLength
from vitscale.pages.tables import starts_as_forks, trial_label
from vitscale.prediction.start_up import FORKED_RANKS
from vitscale.present import units
from vitscale.present.estimate import Estimate


def candidates(analysis: Analysis) -> list[TrialResult]:
    """Return the measured trials to choose from.

    Three rules apply in turn; a rule that no trial meets is left out. A trial computes what one process would compute.
    Its costs are of epochs, not of images per second. It trains the largest share of the images.
    """
    measured = [trial for trial in analysis.trials.values() if trial.comparable_costs]
    as_one_process = [trial for trial in measured if computation(trial.trial) == ONE_PROCESS]
    equally_trained = as_one_process or measured
    with_epochs = [trial for trial in equally_trained if not trial.has_rates_alone]
    comparable = with_epochs or equally_trained
    largest_share = max((trial.trial.data.fraction for trial in comparable), default=0.0)
    return [trial for trial in comparable if trial.trial.data.fraction == largest_share]


def best_measured(analysis: Analysis) -> TrialResult | None:
    """Return the candidate that is fastest for all images; None without any."""
    return min(candidates(analysis), key=epoch_seconds, default=None)


def epoch_seconds(trial: TrialResult) -> float:
    """Return the seconds of an epoch of all images, also those that `drop_last` leaves out.

    Comparisons and speedups are of these seconds. Where the trial has only images per second, return the seconds for
    one image; where it has neither, infinity.
    """
    if trial.has_rates_alone and trial.images_per_second:
        return 1 / trial.images_per_second.value
    if trial.epoch_seconds is None:
        return math.inf
    return trial.epoch_seconds.value / (1 - trial.images_left_out)


def rank_hours(trial: TrialResult) -> float:
    """Return the hours of all ranks together for an epoch of all images."""
    return epoch_seconds(trial) * trial.trial.world.size / 3600


def epoch_of_all_images_text(trial: TrialResult) -> tuple[str, ...]:
    """Return "1.28 s with the images that it leaves out" alone; nothing where that is the epoch's time as printed."""
    if trial.epoch_seconds is None:
        return ()
    seconds_for_all = units.seconds(epoch_seconds(trial))
    if seconds_for_all == units.seconds(trial.epoch_seconds.value):
        return ()
    return (f"{seconds_for_all} with the images that it leaves out",)


def pace_text(trial: TrialResult) -> str:
    """Return "3.25 s an epoch", or "5,800 images/s" where no run recorded an epoch."""
    if trial.has_rates_alone and trial.images_per_second:
        return f"{units.number(trial.images_per_second.value)} images/s"
    seconds = units.seconds(trial.epoch_seconds.value if trial.epoch_seconds else None)
    return f"{seconds} {'a run' if trial.timed_as_a_whole else 'an epoch'}"


def label_and_pace(analysis: Analysis, trial: TrialResult, *further_details: str) -> str:
    """Return "ddp, 2 ranks, micro-batch 32: 3.25 s an epoch (3.12 s to 3.39 s, 3 runs)".

    `further_details`: further texts at the end of the brackets, such as "3 runs".
    """
    details = [*_interval_of_pace(trial), *epoch_of_all_images_text(trial), *further_details]
    brackets = f" ({', '.join(details)})" if details else ""
    return f"{trial_label(analysis, trial)}: {pace_text(trial)}{brackets}"


def _interval_of_pace(trial: TrialResult) -> tuple[str, ...]:
    """Return "3.12 s to 3.39 s" alone; nothing where the pace has no interval, or one of too few runs."""
    figure = trial.images_per_second if trial.has_rates_alone else trial.epoch_seconds
    if figure is None or figure.low is None or figure.high is None or figure.note:
        return ()
    form = units.number if trial.has_rates_alone else units.seconds
    return (f"{form(figure.low)} to {form(figure.high)}",)


@dataclass(frozen=True)
class BestCandidate:
    """The candidate of the smallest mean time or rank-hours, and its rivals."""

    trial: TrialResult
    rivals: tuple[TrialResult, ...]
    """Candidates that are not significantly worse, the best first."""
    candidates: int
    """Number of candidates, the chosen trial among them."""
    winner: Winner

    def as_best_trial(self, analysis: Analysis, title: str, text: str) -> BestTrial:
        """Return the facts of a statement on the chosen trial.

        Args:
            analysis: the study, in which trials have short names.
            title: "Fastest measured".
            text: the trial with its figures (`label_and_pace`).
        """
        return BestTrial(
            title=title,
            trial=text,
            rivals=tuple(trial_label(analysis, rival) for rival in self.rivals),
            candidates=self.candidates,
            is_tested=self.winner.is_tested,
        )


def fastest(analysis: Analysis) -> BestCandidate | None:
    """Return the fastest candidate with its rivals; None without any candidate.

    Where the study compares it with another trial, the verdict of that comparison decides whether the two are rivals.
    """
    trials = candidates(analysis)
    if not trials:
        return None
    best = _chosen_by_cost(trials, [trial.comparable_costs for trial in trials])
    verdict_by_trial = _verdict_by_trial_id(analysis, best.trial)
    rivals = []
    for trial in sorted(trials, key=epoch_seconds):
        if trial is not best.trial and _is_rival(trial, best, verdict_by_trial.get(trial.trial_id)):
            rivals.append(trial)
    return replace(best, rivals=tuple(rivals))


def _is_rival(trial: TrialResult, best: BestCandidate, verdict: str | None) -> bool:
    """Whether a trial is not significantly slower than the best one.

    Args:
        trial: another candidate.
        best: the chosen trial, with the rivals that its own test leaves.
        verdict: that of the study's comparison of the two; None where it does not compare them.
    """
    if verdict is None or not best.winner.is_tested:
        return any(rival is trial for rival in best.rivals)
    return verdict not in ("faster", "slower")


def cheapest(analysis: Analysis) -> BestCandidate | None:
    """Return the candidate of the fewest rank-hours for an epoch; None where no candidate has an epoch time."""
    trials = [trial for trial in candidates(analysis) if trial.epoch_seconds]
    if not trials:
        return None
    return _chosen_by_cost(trials, [_rank_costs(trial) for trial in trials])


def _rank_costs(trial: TrialResult) -> list[float]:
    """Return the cost of each run times the number of ranks."""
    return [cost * trial.trial.world.size for cost in trial.comparable_costs]


def _chosen_by_cost(trials: Sequence[TrialResult], costs: Sequence[Sequence[float]]) -> BestCandidate:
    """Return the trial of the smallest mean cost. `costs`: for each trial the costs of its runs."""
    best = winner(costs, [trial.deciding_runs for trial in trials], correct=False)
    rivals = tuple(trials[position] for position in best.rivals)
    return BestCandidate(trials[best.position], rivals, candidates=len(trials), winner=best)


def _verdict_by_trial_id(analysis: Analysis, trial: TrialResult) -> dict[str, str]:
    """Return identity of each trial that the study compares with `trial` -> the verdict, whichever stands first."""
    verdicts: dict[str, str] = {}
    for pair in analysis.comparisons:
        if pair.first_trial == trial.trial_id:
            verdicts[pair.second_trial] = pair.result.verdict
        elif pair.second_trial == trial.trial_id:
            verdicts[pair.first_trial] = pair.result.verdict
    return verdicts


def expectation(analysis: Analysis, fastest_trial: BestCandidate) -> Expectation | None:
    """Return the time to expect of the fastest trial, which is longer than measured because the fastest was chosen.

    Return None where the correction is unknown.
    """
    trial = fastest_trial.trial
    trials = candidates(analysis)
    costs = [candidate.comparable_costs for candidate in trials]
    corrected_cost = winner(costs, [candidate.deciding_runs for candidate in trials]).corrected
    if corrected_cost is None:
        return None
    measured = _cost_as_pace(trial, Estimate(_geometric_mean(trial.comparable_costs)))
    corrected = _cost_as_pace(trial, corrected_cost)
    low, high = corrected.ends
    form = units.number if trial.has_rates_alone else units.seconds
    unit = _pace_unit(trial)
    return Expectation(
        measured=f"{form(measured.value)}{unit}",
        corrected=f"{form(corrected.value)}{unit}",
        low=form(low),
        high=form(high),
        candidates=fastest_trial.candidates,
    )


def _geometric_mean(costs: Sequence[float]) -> float:
    return math.exp(math.fsum(map(math.log, costs)) / len(costs))


def _cost_as_pace(trial: TrialResult, cost: Estimate) -> Estimate:
    """Return a comparable cost as `pace_text` shows it.

    It is in images per second, or in seconds of an epoch without the images that are left out.
    """
    if trial.has_rates_alone:
        return cost.into(trial.trial.data.fraction)
    return cost.times(1 - trial.images_left_out)


def _pace_unit(trial: TrialResult) -> str:
    if trial.has_rates_alone:
        return " images/s"
    return " a run" if trial.timed_as_a_whole else " an epoch"


def training_length(analysis: Analysis, fastest_trial: BestCandidate) -> TrainingLength:
    """Return the fewest epochs from which on the fastest trial ends first, start-up included.

    Another trial that starts up sooner is caught up after (difference of start-up) / (seconds saved in each epoch)
    epochs. The trial that is caught up last decides. The result has no epochs where one is never caught up, where times
    are not of epochs, or where a start-up is unknown.
    """
    best = fastest_trial.trial
    other_trials = [trial for trial in candidates(analysis) if trial is not best]
    unknown = TrainingLength(None, other="", startup="")
    if best.has_rates_alone or best.timed_as_a_whole or not other_trials:
        return unknown
    if best.startup_seconds is None or any(trial.startup_seconds is None for trial in other_trials):
        return unknown
    epochs = _epochs_to_catch_up(best, other_trials)
    if epochs is None:
        return unknown
    first_before = min(other_trials, key=lambda trial: _startup_seconds(trial) + (epochs - 1) * epoch_seconds(trial))
    startup = units.seconds(best.startup_seconds)
    if starts_as_forks(best):
        startup = f"{startup} of {FORKED_RANKS}"
    return TrainingLength(epochs, trial_label(analysis, first_before), startup)


def _epochs_to_catch_up(best: TrialResult, other_trials: Sequence[TrialResult]) -> int | None:
    """Return the fewest epochs after which `best` ends no later than any of the others, start-up included.

    Return None where another trial starts up sooner, and its epochs are as short, so that it is never caught up.
    """
    epochs = 1
    for other in other_trials:
        startup_lag = _startup_seconds(best) - _startup_seconds(other)
        saved_per_epoch = epoch_seconds(other) - epoch_seconds(best)
        is_caught_up = startup_lag <= saved_per_epoch * epochs
        if is_caught_up:
            continue
        if saved_per_epoch <= 0:
            return None
        epochs = math.ceil(startup_lag / saved_per_epoch)
    return epochs


def _startup_seconds(trial: TrialResult) -> float:
    return trial.startup_seconds or 0.0


def rank_time_text(trial: TrialResult) -> str:
    """Return the time of all ranks together for an epoch: "25.0 GPU-minutes", or "25.0 rank-minutes" on a CPU."""
    return units.rank_time(rank_hours(trial), trial.trial.train.device)
