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
    hardly: Literal["confirmed", "refuted", "not decided"]
    """Verdict on the claim that a doubling hardly shortens training: confirmed where the whole interval of `gain` lies
    below 1 + `MARGIN`, refuted where it lies above."""
    left: float | None
    """The gain if a step took its time on N GPUs plus the whole transfer, with no overlap."""
    beyond: Estimate | None
    """Step seconds on twice the GPUs over those on N GPUs plus the whole transfer: above 1 something other than
    transfers slows the step. None, as `left`, where the transfer is not known."""
    transfers: Literal["do not explain it", "are enough", "not decided"] | None


def doubling_test(
    epochs: tuple[Sequence[float], Sequence[float]],
    steps: tuple[Sequence[float], Sequence[float]],
    transfer_seconds: float | None,
    looked: tuple[int, int] = (0, 0),
) -> Doubling:
    """Tests a doubling of the GPUs. Each pair holds the values on N and on 2 N GPUs, one per
    observation.

    Args:
        epochs: epoch seconds; positive and finite.
        steps: seconds of a whole step; positive and finite.
        transfer_seconds: seconds that a ring needs for an optimizer step's transfer on 2 N GPUs; None: not known.
        looked: `looked` of each side, as for `statistics.interval`.
    """
    gain = statistics.compare(epochs[1], epochs[0], (looked[1], looked[0]))
    side = gain.ratio.side_of(1 + MARGIN)
    hardly: Literal["confirmed", "refuted", "not decided"] = (
        "confirmed" if side == "below" else "refuted" if side == "above" else "not decided"
    )
    if transfer_seconds is None or not (steps[0] and steps[1]):
        return Doubling(gain, hardly, None, None, None)
    # The transfer is added in full, although backward would hide most of it and the step on N GPUs already contains its
    # own: transfers cannot explain a step that is slower still.
    beyond = statistics.ratio(steps[1], [seconds + transfer_seconds for seconds in steps[0]], (looked[1], looked[0]))
    told = beyond.side_of(1.0)
    return Doubling(
        gain,
        hardly,
        gain.ratio.value * beyond.value,
        beyond,
        "do not explain it" if told == "above" else "are enough" if told == "below" else "not decided",
    )


def hosts_test(
    one_host: Mapping[int, Sequence[float]], several_hosts: Mapping[int, Sequence[float]], margin: float = MARGIN
) -> HostsTest | None:
    """Tests one host against several, paired by GPU count; None where no count of several GPUs was measured on both.

    Epochs of a run are not repeats: each run gives one value. One run per count says nothing about that count alone,
    but the counts together are repeated measurements of one ratio, if the ratio is the same at each.

    Args:
        one_host: GPU count to the epoch seconds of each run; positive and finite.
        several_hosts: the same, over several hosts.
        margin: a factor of 1 + margin or less, either way, counts as equal.
    """
    counts = tuple(
        CountRatio(
            gpus, statistics.ratio(several_hosts[gpus], one_host[gpus]), len(one_host[gpus]), len(several_hosts[gpus])
        )
        for gpus in sorted(one_host)
        if gpus > 1 and one_host[gpus] and several_hosts.get(gpus)
    )
    if not counts:
        return None
    # Logarithms of the costs, not of the ratios, which may overflow.
    logs = [_mean_log(several_hosts[count.gpus]) - _mean_log(one_host[count.gpus]) for count in counts]
    mean = fmean(logs)
    if len(logs) < 2:
        alone = counts[0].ratio
        return HostsTest(counts, alone, None, margin, None, _cannot_exclude(alone), _of_one(alone, margin))
    freedom, spread = len(logs) - 1, stdev(logs)
    error = spread / math.sqrt(len(logs))
    half = statistics.t_quantile(freedom) * error
    whole = Estimate(statistics.exp_of(mean), statistics.exp_of(mean - half), statistics.exp_of(mean + half))
    p_value = _equivalence(mean, error, freedom, math.log1p(margin))
    verdict = _verdict(whole, p_value) if len(logs) >= statistics.FEWEST_REPEATS else "too few to tell"
    return HostsTest(counts, whole, statistics.exp_of(spread) - 1, margin, p_value, _cannot_exclude(whole), verdict)


def accuracy_difference(
    reference: Sequence[float], other: Sequence[float], images_counted: tuple[int, int] | None = None
) -> AccuracyDifference:
    """How much higher `other` is than `reference`.

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
    means = fmean(reference), fmean(other)
    difference, seeds = means[1] - means[0], (len(reference), len(other))
    counting = None
    if images_counted is not None:
        normal = NormalDist().inv_cdf((1 + statistics.CONFIDENCE) / 2)
        counted = [images * count for images, count in zip(images_counted, seeds, strict=True)]
        variances = (mean * (1 - mean) / images for mean, images in zip(means, counted, strict=True))
        counting = normal * math.sqrt(sum(variances))
    if min(seeds) < 2:
        alone = Estimate(difference, note=statistics.ONE_RUN)
        return AccuracyDifference(alone, counting, seeds, _of_few_runs(difference, counting))
    errors = [statistics.SquaredError(variance(values) / len(values), len(values) - 1) for values in (reference, other)]
    half = statistics.welch_half(errors)
    few = min(seeds) < statistics.FEWEST_REPEATS
    whole = Estimate(difference, difference - half, difference + half, note=statistics.TOO_FEW if few else "")
    if few:
        return AccuracyDifference(whole, counting, seeds, _of_few_runs(difference, counting))
    side = whole.side_of(0.0)
    verdict: AccuracyVerdict = "higher" if side == "above" else "lower" if side == "below" else "no difference shown"
    p = statistics.welch_p(difference, errors)
    return AccuracyDifference(whole, counting, seeds, verdict, p, p)


def _equivalence(mean: float, error: float, freedom: int, bound: float) -> float:
    """The larger p-value of the two one-sided tests that `mean` is not beyond `-bound` or `bound`."""
    if error == 0:
        return 0.0 if abs(mean) < bound else 1.0
    return max(
        statistics.t_below(freedom, -(mean + bound) / error), statistics.t_below(freedom, -(bound - mean) / error)
    )


def _verdict(whole: Estimate, p_value: float) -> HostsVerdict:
    shown = whole.low is not None and whole.high is not None and not whole.low <= 1 <= whole.high
    if shown:
        return "different, but within the margin" if p_value < LEVEL else "different"
    return "equivalent" if p_value < LEVEL else "no difference shown"


def _of_one(alone: Estimate, margin: float) -> HostsVerdict:
    """The verdict of a single GPU count: what its repeated runs say, if it has any."""
    if alone.low is None or alone.high is None or alone.note:
        return "too few to tell"
    if alone.low <= 1 <= alone.high:
        return "no difference shown"
    within = 1 / (1 + margin) < alone.low and alone.high < 1 + margin
    return "different, but within the margin" if within else "different"


def _cannot_exclude(whole: Estimate) -> float | None:
    if whole.low is None or whole.high is None:
        return None
    return max(abs(whole.low - 1), abs(whole.high - 1))


def _of_few_runs(difference: float, counting: float | None) -> AccuracyVerdict:
    if counting is None:
        return "too few runs: no error known"
    return (
        "too few runs: beyond counting error" if abs(difference) > counting else "too few runs: within counting error"
    )


def _mean_log(values: Sequence[float]) -> float:
    return fmean(map(math.log, values))
