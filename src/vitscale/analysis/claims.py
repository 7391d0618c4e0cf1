"""Published claims as tests: is training over several hosts as fast as in one, and as accurate on N GPUs as on fewer?
Does doubling the GPUs still shorten it, and by less than transfers explain?

Finding no difference does not show that there is none. Each answer says what difference it can exclude.

Sources: Schuirmann, "A comparison of the two one-sided tests procedure and the power approach for assessing the
equivalence of average bioavailability" (Journal of Pharmacokinetics and Biopharmaceutics 15, 1987, 657-680); Welch,
"The generalization of 'Student's' problem" (Biometrika 34, 1947, 28-35).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev, variance
from typing import Literal

from vitscale.analysis import statistics
from vitscale.present.estimate import Estimate

MARGIN = 0.05
"""Epoch times within a factor of 1 + this count as equal: repeated whole runs vary by as much."""
LEVEL = 0.05
"""Significance level of each of the two one-sided tests for equivalence."""

HostsVerdict = Literal[
    "too few to tell", "equivalent", "no difference shown", "different", "different, but within the margin"
]
AccuracyVerdict = Literal[
    "higher", "lower", "no difference shown", "not significant among all comparisons",
    "too few runs: beyond counting error", "too few runs: within counting error", "too few runs: no error known",
]  # fmt: skip
GainVerdict = Literal["confirmed", "refuted", "not decided"]
TransferVerdict = Literal["do not explain it", "are enough", "not decided"]


@dataclass(frozen=True)
class CountRatio:
    """Epoch seconds over several hosts, as a multiple of those in one host, at one GPU count."""

    gpus: int
    ratio: Estimate
    """Ratio of the epoch seconds; it has an interval where both sides have repeated runs."""
    one_host_runs: int
    several_hosts_runs: int


@dataclass(frozen=True)
class HostsTest:
    """One host against several over all GPU counts. `ratio` above 1: several hosts are slower."""

    counts: tuple[CountRatio, ...]
    ratio: Estimate
    """Geometric mean over the counts, with a 95 % interval: Student's t on the logarithms, one value per count."""
    scatter: float | None
    """Standard deviation of the counts' ratios, as a factor less 1."""
    margin: float
    p_equivalence: float | None
    """P of two one-sided tests: below 0.05, ratios outside 1/(1+margin) to 1+margin are excluded. None: one count."""
    cannot_exclude: float | None
    """Largest difference within the 95 % interval, as a share: 0.03 is 3 %, in either direction."""
    verdict: HostsVerdict


@dataclass(frozen=True)
class AccuracyDifference:
    """Accuracy at one rank count less that at another, after equally many images. All as shares in [0, 1]."""

    difference: Estimate
    """Difference with its 95 % interval over seeds (Welch); no interval where a side has one seed."""
    counting_error: float | None
    """Half the 95 % interval from counting right and wrong images alone: the least uncertainty of a difference. The
    effect of another seed is not included. None where the numbers of images are unknown."""
    seeds: tuple[int, int]
    """Number of seeds of the reference and of the other side."""
    verdict: AccuracyVerdict
    p: float | None = None
    """Two-sided p-value of no difference (Welch); None from fewer than 3 seeds on a side."""
    p_adjusted: float | None = None
    """`p` after Holm's correction for all accuracies that were compared."""


@dataclass(frozen=True)
class Doubling:
    """N GPUs against twice as many, with equally many images per GPU and step: the same work in half the steps."""

    gain: statistics.Comparison
    """How many times as fast an epoch is on twice the GPUs: 2 is ideal."""
    hardly: GainVerdict
    """Verdict on the claim that a doubling hardly shortens training: confirmed where the whole interval of `gain` lies
    below 1 + `MARGIN`, refuted where it lies above."""
    left: float | None
    """The gain if a step took its time on N GPUs plus the whole transfer, with no overlap."""
    beyond: Estimate | None
    """Step seconds on twice the GPUs over those on N GPUs plus the whole transfer: above 1 something other than
    transfers slows the step. None, as `left`, where the transfer is not known."""
    transfers: TransferVerdict | None


def doubling_test(
    epochs: tuple[Sequence[float], Sequence[float]],
    steps: tuple[Sequence[float], Sequence[float]],
    transfer_seconds: float | None,
    deciding_runs: tuple[int, int] = (0, 0),
) -> Doubling:
    """Test whether twice the GPUs shorten training, and whether transfers explain what is missing.

    Each pair holds the values on N GPUs and on 2 N GPUs, one per observation.

    Args:
        epochs: epoch seconds; positive and finite.
        steps: seconds of a whole step; positive and finite.
        transfer_seconds: seconds that a ring needs for an optimizer step's transfer on 2 N GPUs; None: not known.
        deciding_runs: `deciding_runs` of each side, as for `statistics.interval`.
    """
    base_epochs, doubled_epochs = epochs
    base_steps, doubled_steps = steps
    base_deciding_runs, doubled_deciding_runs = deciding_runs  # base: on N GPUs; doubled: on 2 N
    gain = statistics.compare(doubled_epochs, base_epochs, (doubled_deciding_runs, base_deciding_runs))
    hardly = _verdict_on_gain(gain.ratio)
    if transfer_seconds is None or not base_steps or not doubled_steps:
        return Doubling(gain, hardly, left=None, beyond=None, transfers=None)
    # The transfer is added in full, although backward would hide most of it and the step on N GPUs already contains its
    # own: transfers cannot explain a step that is slower still.
    base_with_transfer = [seconds + transfer_seconds for seconds in base_steps]
    beyond = statistics.ratio(doubled_steps, base_with_transfer, (doubled_deciding_runs, base_deciding_runs))
    gain_without_overlap = gain.ratio.value * beyond.value
    return Doubling(gain, hardly, left=gain_without_overlap, beyond=beyond, transfers=_verdict_on_transfers(beyond))


def _verdict_on_gain(gain: Estimate) -> GainVerdict:
    """Return whether twice the GPUs hardly shorten training; `gain`: how many times as fast an epoch is."""
    match gain.side_of(1 + MARGIN):
        case "below":
            return "confirmed"
        case "above":
            return "refuted"
        case None:
            return "not decided"


def _verdict_on_transfers(beyond: Estimate) -> TransferVerdict:
    """Return whether transfers explain what a doubling lacks; `beyond`: `Doubling.beyond`."""
    match beyond.side_of(1.0):
        case "above":
            return "do not explain it"
        case "below":
            return "are enough"
        case None:
            return "not decided"


def hosts_test(
    one_host: Mapping[int, Sequence[float]], several_hosts: Mapping[int, Sequence[float]], margin: float = MARGIN
) -> HostsTest | None:
    """Test one host against several, paired by GPU count; None where no count of several GPUs was measured on both.

    Epochs of a run are not repeats: each run gives one value. One run per count says nothing about that count alone,
    but the counts together are repeated measurements of one ratio, if the ratio is the same at each.

    Args:
        one_host: GPU count to the epoch seconds of each run; positive and finite.
        several_hosts: the same, over several hosts.
        margin: a factor of 1 + margin or less, either way, counts as equal.
    """
    counts = _count_ratios(one_host, several_hosts)
    if not counts:
        return None
    # Logarithms of the costs, not of the ratios, which may overflow.
    logs = [_mean_log(several_hosts[count.gpus]) - _mean_log(one_host[count.gpus]) for count in counts]
    if len(logs) == 1:
        ratio = counts[0].ratio
        return HostsTest(
            counts,
            ratio,
            scatter=None,
            margin=margin,
            p_equivalence=None,
            cannot_exclude=_largest_difference(ratio),
            verdict=_one_count_verdict(ratio, margin),
        )
    mean = fmean(logs)
    spread = stdev(logs)
    freedom = len(logs) - 1
    error = spread / math.sqrt(len(logs))
    half_width = statistics.t_quantile(freedom) * error
    low = statistics.exp_of(mean - half_width)
    high = statistics.exp_of(mean + half_width)
    ratio = Estimate(statistics.exp_of(mean), low, high)
    p_value = _equivalence_p(mean, error, freedom, math.log1p(margin))
    has_enough_counts = len(logs) >= statistics.FEWEST_REPEATS
    return HostsTest(
        counts,
        ratio,
        scatter=statistics.exp_of(spread) - 1,
        margin=margin,
        p_equivalence=p_value,
        cannot_exclude=_largest_difference(ratio),
        verdict=_hosts_verdict(ratio, p_value) if has_enough_counts else "too few to tell",
    )


def _count_ratios(
    one_host: Mapping[int, Sequence[float]], several_hosts: Mapping[int, Sequence[float]]
) -> tuple[CountRatio, ...]:
    """Return the ratio at each count of several GPUs that was measured on both sides."""
    counts = []
    for gpus in sorted(one_host):
        one_host_costs = one_host[gpus]
        several_hosts_costs = several_hosts.get(gpus)
        if gpus > 1 and one_host_costs and several_hosts_costs:
            ratio = statistics.ratio(several_hosts_costs, one_host_costs)
            counts.append(CountRatio(gpus, ratio, len(one_host_costs), len(several_hosts_costs)))
    return tuple(counts)


def accuracy_difference(
    reference: Sequence[float], other: Sequence[float], images_counted: tuple[int, int] | None = None
) -> AccuracyDifference:
    """Return how much higher `other` is than `reference`.

    An observation is a seed, not a run: runs of one seed learn the same, and their spread is not that of training.

    Args:
        reference: accuracy of each seed, in [0, 1].
        other: accuracy of each seed on the other side.
        images_counted: images from which a run of either side counted its accuracy; None where unknown.

    Raises:
        ValueError: a side is empty, or holds a value that is not a share.
    """
    if not reference or not other or not all(0 <= value <= 1 for value in (*reference, *other)):
        raise ValueError(f"accuracies must be shares, at least one on each side: {list(reference)}, {list(other)}")
    reference_mean = fmean(reference)
    other_mean = fmean(other)
    difference = other_mean - reference_mean
    seeds = (len(reference), len(other))
    counting_error = None
    if images_counted is not None:
        images_of_all_seeds = [images * runs for images, runs in zip(images_counted, seeds, strict=True)]
        counting_error = _counting_error((reference_mean, other_mean), images_of_all_seeds)
    if min(seeds) < 2:
        estimate = Estimate(difference, note=statistics.ONE_RUN)
        return AccuracyDifference(estimate, counting_error, seeds, _few_runs_verdict(difference, counting_error))
    errors = [_error_of_mean(reference), _error_of_mean(other)]
    half_width = statistics.welch_half(errors)
    low = difference - half_width
    high = difference + half_width
    if min(seeds) < statistics.FEWEST_REPEATS:
        estimate = Estimate(difference, low, high, note=statistics.TOO_FEW)
        return AccuracyDifference(estimate, counting_error, seeds, _few_runs_verdict(difference, counting_error))
    estimate = Estimate(difference, low, high)
    p = statistics.welch_p(difference, errors)
    return AccuracyDifference(estimate, counting_error, seeds, _accuracy_verdict(estimate), p=p, p_adjusted=p)


def _error_of_mean(values: Sequence[float]) -> statistics.SquaredError:
    """Return the squared error of the mean of two values or more."""
    return statistics.SquaredError(variance(values) / len(values), len(values) - 1)


def _counting_error(means: Sequence[float], images: Sequence[int]) -> float:
    """Return half the 95 % interval of a difference from counting right and wrong images alone.

    Args:
        means: the accuracy of each side.
        images: the images from which each side counted it, all seeds together.
    """
    normal = NormalDist().inv_cdf((1 + statistics.CONFIDENCE) / 2)
    variances = [mean * (1 - mean) / count for mean, count in zip(means, images, strict=True)]
    return normal * math.sqrt(sum(variances))


def _accuracy_verdict(difference: Estimate) -> AccuracyVerdict:
    """Return the verdict by the interval of a difference: does it hold 0?"""
    match difference.side_of(0.0):
        case "above":
            return "higher"
        case "below":
            return "lower"
        case None:
            return "no difference shown"


def _equivalence_p(mean: float, error: float, freedom: int, bound: float) -> float:
    """Return the larger p-value of two one-sided tests: that the truth is -bound or less, and that it is bound or more.

    Args:
        mean: the mean of logarithms.
        error: its standard error.
        freedom: degrees of freedom of the error.
        bound: logarithm of the largest ratio that counts as equal.
    """
    if error == 0:
        return 0.0 if abs(mean) < bound else 1.0
    p_below_lower = statistics.t_below(freedom, -(mean + bound) / error)
    p_above_upper = statistics.t_below(freedom, -(bound - mean) / error)
    return max(p_below_lower, p_above_upper)


def _hosts_verdict(ratio: Estimate, p_value: float) -> HostsVerdict:
    """Return the verdict of several GPU counts.

    Args:
        ratio: the mean ratio with its interval.
        p_value: of their equivalence.
    """
    is_equivalent = p_value < LEVEL
    holds_equality = ratio.low is None or ratio.high is None or ratio.low <= 1 <= ratio.high
    if not holds_equality:
        return "different, but within the margin" if is_equivalent else "different"
    return "equivalent" if is_equivalent else "no difference shown"


def _one_count_verdict(ratio: Estimate, margin: float) -> HostsVerdict:
    """Return the verdict of a single GPU count, from its repeated runs, if it has any."""
    if ratio.low is None or ratio.high is None or ratio.note:
        return "too few to tell"
    if ratio.low <= 1 <= ratio.high:
        return "no difference shown"
    is_within = 1 / (1 + margin) < ratio.low and ratio.high < 1 + margin
    return "different, but within the margin" if is_within else "different"


def _largest_difference(ratio: Estimate) -> float | None:
    """Return the largest difference within the interval, as a share, in either direction."""
    if ratio.low is None or ratio.high is None:
        return None
    return max(abs(ratio.low - 1), abs(ratio.high - 1))


def _few_runs_verdict(difference: float, counting_error: float | None) -> AccuracyVerdict:
    """Return the verdict on a difference between too few seeds: is it larger than counting alone explains?"""
    if counting_error is None:
        return "too few runs: no error known"
    if abs(difference) > counting_error:
        return "too few runs: beyond counting error"
    return "too few runs: within counting error"


def _mean_log(values: Sequence[float]) -> float:
    """Return the mean of the logarithms of positive values."""
    return fmean(map(math.log, values))
