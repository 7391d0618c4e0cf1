"""Words that statements share: what a waterfall's parts are, what intervals cover, what explaining cost."""

from __future__ import annotations

import math
from collections.abc import Sequence

from vitscale.analysis import Analysis, Factor, Waterfall
from vitscale.analysis.comparisons import pairs_tested
from vitscale.analysis.learning.drift import STEPS
from vitscale.analysis.runs.environments import environments
from vitscale.analysis.statistics import CONFIDENCE, ONE_RUN
from vitscale.analysis.time.run_waterfall import CHECKPOINT, EVALUATION, START_UP
from vitscale.analysis.time.waterfall import STEP_ROUNDING
from vitscale.present.estimate import Estimate
from vitscale.present.units import counted, number, percent, ranks, ratio_end, relative
from vitscale.store.records import COMMUNICATION
from vitscale.trial.trial import Mode, World

MODE_TITLES: dict[Mode, str] = {
    "strong-micro": "Strong scaling, micro-batch per rank fixed (strong-micro)",
    "strong-global": "Strong scaling, global batch fixed (strong-global)",
    "weak": "Weak scaling, samples per rank fixed (weak)",
}
MODE_MEANINGS: dict[Mode, str] = {
    "strong-micro": "The same images on more ranks; the global batch grows with the ranks.",
    "strong-global": "The same images on more ranks; micro-batch or accumulation shrinks with the ranks.",
    "weak": "Each rank keeps its number of images, so the ideal epoch time is constant. Speedup is efficiency x ranks.",
}

_WIDEST_UNSAID = 0.1
"""Width of an efficiency's interval beyond which the interval stands beside it."""


def ranks_on_hosts(world: World) -> str:
    """ "8", or "8 = 2 x 4" on two hosts, "7 = 1 x 4 + 3" on unequal ones."""
    if world.nodes == 1:
        return f"{world.size:,}"
    full, rest = divmod(world.size, world.ranks_per_node)
    return f"{world.size:,} = {full:,} x {world.ranks_per_node:,}" + (f" + {rest:,}" if rest else "")


def certainty(interval: Estimate) -> str:
    """ "95 % interval 0.88 to 0.95", or why there is none that decides anything."""
    if interval.low is None or interval.high is None or interval.note:
        return interval.note or ONE_RUN
    return f"95 % interval {ratio_interval(interval)}"


def ratio_interval(interval: Estimate) -> str:
    """ "0.88 to 0.95": the ends of a ratio's interval, with digits enough to show their side of 1."""
    return f"{ratio_end(interval.low)} to {ratio_end(interval.high)}"


def reached_of_ideal(split: Waterfall) -> str:
    """ "8 ranks reach 72 % of ideal", or "measured at" where runs are too few, with why it may be another figure."""
    verb = "measured at" if split.interval is None or split.interval.low is None or split.interval.note else "reach"
    return f"{ranks(split.gpus)} {verb} {100 * (split.efficiency or 0.0):.0f} % of ideal{_doubt(split.interval)}"


def _doubt(interval: Estimate | None) -> str:
    """Why a figure is not to be relied on, in brackets; empty where nothing speaks against it."""
    if interval is None or interval.low is None or interval.high is None:
        return " (one run: too few to tell)"
    wide = interval.high - interval.low > _WIDEST_UNSAID
    return f" ({certainty(interval)})" if wide or interval.note else ""


def unexplained(analysis: Analysis) -> tuple[str, ...]:
    """Why efficiencies were not taken apart: each reason once."""
    known = [waterfall for waterfall in analysis.waterfalls if waterfall.efficiency is not None]
    reasons = [waterfall.reason for waterfall in known if not waterfall.factors]
    return tuple(
        f"Where the efficiency goes is unknown at {reasons.count(reason)} of {len(known)} points: {reason}."
        for reason in dict.fromkeys(reasons)
    )


def explaining_cost(analysis: Analysis) -> str:
    """What explaining cost, in a sentence; empty where no step was explained, or none has a light step beside it."""
    overheads = [trial.breakdown.overhead for trial in analysis.trials.values() if trial.breakdown is not None]
    slower = [max(0, round(100 * overhead)) for overhead in overheads if overhead is not None]
    if not slower:
        return ""
    least, most = min(slower), max(slower)
    how_much = "less than 1 %" if most == 0 else f"{most} %" if least == most else f"{least} to {most} %"
    return f"Explaining slowed its steps by {how_much} (those steps are in no reported time).{_attached(analysis)}"


def _attached(analysis: Analysis) -> str:
    """What the profiler left behind on GPUs; empty where nothing was timed after it."""
    overheads = [trial.breakdown.attached_overhead for trial in analysis.trials.values() if trial.breakdown is not None]
    slower = [overhead for overhead in overheads if overhead is not None]
    if not slower:
        return ""
    return f" Steps after the profiler stopped took up to {max(0, round(100 * max(slower)))} % longer (in none either)."


def equality(analysis: Analysis) -> str:
    """How far trials that compute the same show the same loss; empty where no trial agrees with another."""
    agreeing = [trial.drift for trial in analysis.trials.values() if trial.drift.status == "agrees"]
    if not agreeing:
        return ""
    most = max(drift.difference or 0.0 for drift in agreeing)
    drifting = sum(trial.drifts for trial in analysis.trials.values())
    but = f"; {drifting} drift{'s' if drifting == 1 else ''}" if drifting else ""
    losses = f"the losses of {len(agreeing)} trials are those" if len(agreeing) > 1 else "the loss of 1 trial is that"
    how = f"within {relative(most)}" if most else "exactly"
    compared = [len(run.loss_by_step.step) for trial in analysis.trials.values() for run in trial.run_figures]
    steps = counted(min(STEPS, max(compared, default=STEPS)), "step")
    return f"Equality: over the first {steps} {losses} of a trial that must compute the same, {how}{but}."


def scope(analysis: Analysis) -> str:
    """What intervals over runs do not cover, in a sentence; empty where no trial was repeated, or this is unknown."""
    repeated = [
        trial for trial in analysis.trials.values() if len(trial.run_figures) > 1 and trial.environment is not None
    ]
    if not repeated:
        return ""
    kind = "allocation" if any(own.allocation for t in repeated for own in environments(t.recorded_runs[0])) else "host"
    apart = [(trial.components.between, trial) for trial in repeated if trial.components and trial.components.clustered]
    if apart:
        between, worst = max(apart, key=lambda pair: pair[0])
        within = worst.components.within if worst.components else 0.0
        return (
            f"Epoch times differ from {kind} to {kind} in {len(apart)} of {len(repeated)} repeated trials (up to "
            f"{percent(between, 1)} between them, {percent(within, 1)} inside; {worst.name}): of these an {kind} "
            "with all its runs counts as one observation."
        ).replace("an host", "a host")
    if all(len(trial.allocations) == 1 for trial in repeated):
        return (
            f"The runs of each trial shared {'one allocation' if kind == 'allocation' else 'their hosts'}: intervals "
            f"do not cover how {kind}s differ."
        )
    return ""


def multiplicity(analysis: Analysis) -> str:
    """How many comparisons were made, in a sentence; empty where there are fewer than 2."""
    count = pairs_tested(analysis.comparisons)
    if count < 2:
        return ""
    by_chance = number(count * (1 - CONFIDENCE), 2)
    return (
        f"{count} pairs of trials were compared, each interval at 95 %: of {count} equal pairs about {by_chance} would "
        "exclude 1 by chance. Faster and slower are said after Holm's correction for all of them."
    )


def corrected_p(value: float | None) -> str:
    """ "p = 0.08 after correction"; empty where there is no test."""
    return f"p = {value:.2g} after correction" if value is not None else ""


_IN_WORDS = {
    STEP_ROUNDING: ("step rounding", "step rounding"),
    "data wait": ("waiting for data", "less waiting for data"),
    "loading": ("waiting for images to be read", "less waiting for images to be read"),
    "decoding": ("waiting for images to be decoded", "less waiting for images to be decoded"),
    START_UP: ("start-up", "a shorter start-up"),
    EVALUATION: ("evaluation", "a shorter evaluation"),
    CHECKPOINT: ("saving a checkpoint", "a checkpoint that is saved sooner"),
    "pipeline bubble": ("waiting for the stages of other ranks", "less waiting for the stages of other ranks"),
    "straggler wait": ("waiting for the slowest rank", "less waiting for the slowest rank"),
    "wire": ("the transfer", "a shorter transfer"),
    "synchronised norm": ("what synchronised norms exchange", "a shorter exchange of synchronised norms"),
    COMMUNICATION: (
        "waiting for ranks and the transfer, which could not be told apart",
        "less waiting for ranks and transfer, which could not be told apart",
    ),
    "optimizer": ("the optimizer", "a faster optimizer"),
    "launch gaps": ("gaps between kernels", "shorter gaps between kernels"),
}
"""Factor to what takes points of efficiency by it, and to what gains some."""
_OTHER = "other things"
_MOST_NAMED = 4


def contributions(waterfall: Waterfall) -> tuple[str, ...]:
    """The largest contributions of at least a point, at most four and the rest in one, largest first.

    Their numbers and the efficiency, all in whole percent, add up to 100.
    """
    if waterfall.efficiency is None:
        return ()
    by_size = sorted(waterfall.factors, key=lambda factor: -abs(factor.points))
    named = [factor for factor in by_size if abs(factor.points) >= 0.01 and factor.name != "other"][:_MOST_NAMED]
    rest = sum(factor.points for factor in waterfall.factors if factor not in named)
    exact = [100 * points for points in (*(factor.points for factor in named), rest)]
    rounded = whole(exact, 100 - round(100 * waterfall.efficiency))
    told = [
        (points, _what(waterfall, factor.name, points), _bounds(factor, points))
        for factor, points in zip(named, rounded, strict=False)
    ]
    said = [each for each in (*told, (rounded[-1], _OTHER, "")) if each[0]]
    return tuple(_clause(*each, first=index == 0) for index, each in enumerate(said))


def loss_in_words(waterfall: Waterfall, factor: Factor) -> str:
    """What a factor that takes points stands for: "the transfer"."""
    return _OTHER if factor.name == "other" else _what(waterfall, factor.name, 1)


def points_interval(factor: Factor) -> str:
    """ "12 to 21", the interval of the points that a factor takes; empty where it is narrower than a point."""
    return _bounds(factor, 1).strip(" ()")


def _bounds(factor: Factor, points: int) -> str:
    """ " (12 to 21)", the 95 % interval with the sign that is told; empty where it is narrower than a point."""
    if factor.interval is None or factor.interval.low is None or factor.interval.high is None:
        return ""
    ends = (100 * factor.interval.low, 100 * factor.interval.high)
    low, high = ends if points > 0 else (-ends[1], -ends[0])
    return f" ({low:z.0f} to {high:z.0f})" if high - low >= 1 else ""


def whole(values: Sequence[float], total: int) -> list[int]:
    """Whole numbers that add up to `total`, each within 1 of its own value: the largest remainders are rounded up.

    Args:
        values: at least one, their sum within 0.5 of `total`.
        total: the sum of the result.
    """
    rounded = [math.floor(value) for value in values]
    by_remainder = sorted(range(len(values)), key=lambda index: rounded[index] - values[index])
    for index in by_remainder[: total - sum(rounded)]:
        rounded[index] += 1
    return rounded


def _clause(points: int, what: str, bounds: str, *, first: bool) -> str:
    """ "17 points (12 to 21) are the transfer", "8 are the transfer", "1 is gained by step rounding"."""
    unit = f" point{'s' if abs(points) != 1 else ''}" if first else ""
    verb = "are" if abs(points) != 1 else "is"
    return f"{abs(points)}{unit}{bounds} {verb} {what if points > 0 else f'gained by {what}'}"


def _what(waterfall: Waterfall, name: str, points: int) -> str:
    if name == "compute scaling":
        if waterfall.work_per_rank is not None and waterfall.work_per_rank < 1:
            return "smaller per-rank work"
        return "slower computing" if points > 0 else "faster computing"
    if name == "straggler wait" and points > 0:
        return _waiting(waterfall)
    if name == STEP_ROUNDING and points < 0 and waterfall.images_left_out >= 0.005:
        return f"step rounding, which leaves {100 * waterfall.images_left_out:.0f} % of the images out"
    return _IN_WORDS[name][points <= 0]


def _waiting(waterfall: Waterfall) -> str:
    """ "waiting for rank 3, which computes 21 % slower and comes last in 80 % of steps"."""
    if waterfall.straggler is None:
        return "waiting for the slowest rank"
    slower, often = waterfall.straggler.slower_by, waterfall.straggler.share_of_steps
    known = [f"computes {100 * slower:.0f} % slower"] if slower is not None and slower >= 0.005 else []
    known += [f"comes last in {100 * often:.0f} % of steps"] if often < 0.995 else []
    return f"waiting for rank {waterfall.straggler.rank}" + (f", which {' and '.join(known)}" if known else "")
