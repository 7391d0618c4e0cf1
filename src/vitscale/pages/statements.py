"""The statements of the first screen, in tables: each has a sentence, and the condition under which it is made.

A table answers one question about one subject, such as how a curve scales. Its rows are tried from the top, and the
first one whose condition holds makes its statement. So a condition need not exclude those of the rows above. The page,
the terminal, Markdown, LaTeX and JSON take these sentences from here.

Conditions are about figures with 95 % intervals over runs (`Estimate`); a figure of fewer than 3 runs decides nothing.
A statement contains the interval that it rests on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from vitscale.analysis import CurveComparison, Factor, Waterfall
from vitscale.analysis.comparisons import AgainstReference
from vitscale.analysis.statistics import ComparisonVerdict
from vitscale.pages import sentences
from vitscale.pages.sentences import certainty, ratio_interval
from vitscale.present import units
from vitscale.present.estimate import Estimate

Facts = TypeVar("Facts")
_SMALLEST_NAMED_LOSS = 0.01
"""Loss of efficiency below which no sentence is made."""
_MOST_NAMED = 3
"""Most things without a significant difference that are each named; the others are counted."""


@dataclass(frozen=True)
class Statement(Generic[Facts]):
    """A row of a table: a sentence about facts of one kind, and the condition under which it is made."""

    name: str
    needs: str
    """The condition in words."""
    holds: Callable[[Facts], bool]
    """Whether the condition holds, given that those of the rows above do not."""
    words: Callable[[Facts], str]
    """Returns the sentence; empty where none is needed."""
    cell: Callable[[Facts], str] = lambda _: units.UNKNOWN
    """Returns a few words in its place, for a cell of the terminal's table."""


@dataclass(frozen=True)
class Claim(Generic[Facts]):
    """A statement about facts for which it holds."""

    statement: Statement[Facts]
    facts: Facts

    @property
    def text(self) -> str:
        """The sentence; empty where there is nothing to say."""
        return self.statement.words(self.facts)

    @property
    def cell(self) -> str:
        """The statement as a cell; a dash where it says nothing."""
        return self.statement.cell(self.facts)


def claim(table: Sequence[Statement[Facts]], facts: Facts) -> Claim[Facts]:
    """Return the claim of the first row of a table whose condition holds; that of the last row always does."""
    return next(Claim(statement, facts) for statement in table if statement.holds(facts))


def _holds_always(_: object) -> bool:
    return True


def _no_words(_: object) -> str:
    return ""


# --- How does a curve scale? ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scaling:
    """A curve at its most ranks against its baseline."""

    curve: str
    """Its name, with the batch policy where there are several."""
    base_gpus: int
    """Ranks of the baseline."""
    gpus: int
    """The most ranks of the curve."""
    speedup: Estimate
    efficiency: Estimate
    is_weak: bool
    runs: int

    @property
    def figures(self) -> str:
        """The speedup's interval, on which "faster" rests, and the efficiency.

        Example: "95 % interval 1.19 to 2.17; efficiency 0.80, 0.60 to 1.08".
        """
        efficiency = units.share(self.efficiency.value)
        return f"{certainty(self.speedup)}; efficiency {efficiency}, {ratio_interval(self.efficiency)}"


def _has_few_runs(figure: Estimate) -> bool:
    """Whether a figure has no interval over 3 runs or more, and so decides nothing."""
    return figure.low is None or figure.high is None or bool(figure.note)


def _few_runs_sentence(scaling: Scaling) -> str:
    """Return a sentence on a speedup of too few runs: "ddp: 1.6x on 2 ranks against 1 (efficiency 0.80; 1 run)."."""
    speedup = f"{units.share(scaling.speedup.value)}x"
    ranks = f"{units.ranks(scaling.gpus)} against {scaling.base_gpus}"
    efficiency = units.share(scaling.efficiency.value)
    runs = units.counted(scaling.runs, "run")
    return f"{scaling.curve}: {speedup} on {ranks} (efficiency {efficiency}; {runs})."


def _weak_scaling_sentence(scaling: Scaling) -> str:
    times = f"{units.share(1 / scaling.efficiency.value)}x the time of {scaling.base_gpus}"
    work = f"{scaling.gpus / scaling.base_gpus:,.6g}x the images in {times}"
    trust = f"efficiency {units.share(scaling.efficiency.value)}; {certainty(scaling.efficiency)}"
    return f"{scaling.curve}: {units.ranks(scaling.gpus)} train {work} ({trust})."


def _pace_sentence(pattern: str) -> Callable[[Scaling], str]:
    """Return a function that makes the sentence of a row of `SCALING`.

    Example: "{times} as fast as {base}" gives "ddp: 2 ranks are 1.6x as fast as 1 (...)."

    Args:
        pattern: the pace, with {times} for the speedup and {base} for the ranks of the baseline.
    """

    def words(scaling: Scaling) -> str:
        times = f"{units.share(scaling.speedup.value)}x"
        pace = pattern.format(times=times, base=scaling.base_gpus)
        return f"{scaling.curve}: {units.ranks(scaling.gpus)} are {pace} ({scaling.figures})."

    return words


SCALING: tuple[Statement[Scaling], ...] = (
    Statement(
        "scaling of few runs",
        "fewer than 3 runs on a side",
        lambda scaling: _has_few_runs(scaling.speedup),
        _few_runs_sentence,
    ),
    Statement("weak scaling", "samples per rank are fixed", lambda scaling: scaling.is_weak, _weak_scaling_sentence),
    Statement(
        "as fast",
        "the speedup's interval lies above 1",
        lambda scaling: scaling.speedup.side_of(1.0) == "above",
        _pace_sentence("{times} as fast as {base}"),
    ),
    Statement(
        "slower",
        "the speedup's interval lies below 1",
        lambda scaling: scaling.speedup.side_of(1.0) == "below",
        _pace_sentence("slower than {base}: {times}"),
    ),
    Statement(
        "no different pace",
        "the speedup's interval holds 1",
        _holds_always,
        _pace_sentence("not significantly faster or slower than {base}: {times}"),
    ),
)


# --- Why not better? ------------------------------------------------------------------------------------------------


def _trial_of_waterfall(waterfall: Waterfall) -> str:
    """Return "ddp on 8 ranks (weak)"."""
    return f"{waterfall.curve} on {units.ranks(waterfall.gpus)} ({waterfall.mode})"


def _percent_of_ideal(waterfall: Waterfall) -> str:
    efficiency = waterfall.efficiency or 0.0
    return f"{100 * efficiency:.0f} % of ideal"


def _reached_of_ideal(waterfall: Waterfall) -> str:
    """Return "ddp on 8 ranks (weak) is at 72 % of ideal (95 % interval 68 to 77 %)"."""
    measured = f"{_trial_of_waterfall(waterfall)} is at {_percent_of_ideal(waterfall)}"
    interval = waterfall.interval
    if interval is None or interval.low is None or interval.high is None:
        return measured
    if interval.high - interval.low < _SMALLEST_NAMED_LOSS:
        return measured  # both ends would read the same
    return f"{measured} (95 % interval {100 * interval.low:.0f} to {100 * interval.high:.0f} %)"


def largest_part(waterfall: Waterfall) -> Factor:
    """Return the factor that takes the most points of the efficiency."""
    return max(waterfall.factors, key=lambda factor: factor.points)


def loses_nothing_named(waterfall: Waterfall) -> bool:
    """Whether no single factor takes a point or more."""
    return largest_part(waterfall).points < _SMALLEST_NAMED_LOSS


def is_loss_established(waterfall: Waterfall) -> bool:
    """Whether the whole interval of the efficiency lies below 1, from 3 runs or more on both sides."""
    return waterfall.interval is not None and waterfall.interval.side_of(1.0) == "below"


def takes_most(waterfall: Waterfall) -> bool:
    """Whether the largest part is significantly larger than the sum of all other parts that lose something."""
    largest = largest_part(waterfall)
    other_losses = [factor for factor in waterfall.factors if factor.points > 0 and factor is not largest]
    excess = largest.less(other_losses)
    return excess is not None and excess.side_of(0.0) == "above"


def parts_as_large(waterfall: Waterfall) -> tuple[Factor, ...]:
    """Return the largest part, and the parts of a point or more that are not significantly smaller, largest first."""
    largest = largest_part(waterfall)
    as_large = [largest]
    for factor in sorted(waterfall.factors, key=lambda factor: -factor.points):
        if factor is largest or factor.points < _SMALLEST_NAMED_LOSS:
            continue
        difference = largest.less([factor])
        if difference is None or difference.side_of(0.0) != "above":
            as_large.append(factor)
    return tuple(as_large)


def _part_in_words(waterfall: Waterfall, factor: Factor) -> str:
    """Return "waiting for rank 3 (straggler wait: 17 points, 12 to 21)"."""
    bounds = sentences.points_interval(factor)
    within = f", {bounds}" if bounds else ""
    return f"{sentences.loss_in_words(waterfall, factor)} ({factor.name}: {100 * factor.points:.0f} points{within})"


def _largest_part_in_words(waterfall: Waterfall) -> str:
    return _part_in_words(waterfall, largest_part(waterfall))


def _parts_in_words(waterfall: Waterfall) -> str:
    """Return the parts that are as large as the largest: "A, B or C", "A, B, C or 2 more". They are two or more."""
    as_large = parts_as_large(waterfall)
    words = [_part_in_words(waterfall, factor) for factor in as_large[:_MOST_NAMED]]
    if len(as_large) > _MOST_NAMED:
        words.append(f"{len(as_large) - _MOST_NAMED} more")
    return f"{', '.join(words[:-1])} or {words[-1]}"


def _loss_cell(waterfall: Waterfall) -> str:
    """Return the largest part: "16 % wire", "21 % straggler wait (for rank 1)"."""
    largest = largest_part(waterfall)
    loss = f"{100 * largest.points:.0f} % {largest.name}"
    if largest.name == "straggler wait" and waterfall.straggler is not None:
        return f"{loss} (for rank {waterfall.straggler.rank})"
    return loss


def _loss_of_few_runs(waterfall: Waterfall) -> str:
    trial = _trial_of_waterfall(waterfall)
    measured = f"{trial} was measured at {_percent_of_ideal(waterfall)}, in too few runs to establish a loss"
    return f"{measured}; the largest part measured is {_largest_part_in_words(waterfall)}."


LOSS: tuple[Statement[Waterfall], ...] = (
    Statement(
        "loss unexplained",
        "where the efficiency goes is unknown",
        lambda waterfall: not waterfall.factors,
        lambda waterfall: f"{_reached_of_ideal(waterfall)}; where the rest goes is unknown: {waterfall.reason}.",
    ),
    Statement(
        "no part of a point",
        "no single part takes a point of 100 or more",
        loses_nothing_named,
        lambda waterfall: f"{_reached_of_ideal(waterfall)}: no single loss of a point or more.",
    ),
    Statement(
        "loss of few runs",
        "fewer than 3 runs on a side",
        lambda waterfall: waterfall.interval is None or _has_few_runs(waterfall.interval),
        _loss_of_few_runs,
    ),
    Statement(
        "no loss",
        "the efficiency's interval reaches 1 or more",
        lambda waterfall: not is_loss_established(waterfall),
        lambda waterfall: f"{_reached_of_ideal(waterfall)}: no loss is established, and so none is explained.",
        cell=lambda _: "unsure",
    ),
    Statement(
        "parts of few runs",
        "fewer than 3 runs on a side were explained",
        lambda waterfall: not largest_part(waterfall).without,
        lambda waterfall: (
            f"{_reached_of_ideal(waterfall)}: too few explained runs to say what most goes to; the largest part "
            f"measured is {_largest_part_in_words(waterfall)}."
        ),
    ),
    Statement(
        "most",
        "the largest part is significantly more than half of all losses: more than the others together",
        takes_most,
        lambda waterfall: f"{_reached_of_ideal(waterfall)}: most goes to {_largest_part_in_words(waterfall)}.",
        cell=_loss_cell,
    ),
    Statement(
        "largest part",
        "the largest part is significantly larger than each other part of a point or more",
        lambda waterfall: len(parts_as_large(waterfall)) == 1,
        lambda waterfall: (
            f"{_reached_of_ideal(waterfall)}: the largest part goes to {_largest_part_in_words(waterfall)}."
        ),
        cell=_loss_cell,
    ),
    Statement(
        "parts not told apart",
        "the parts that are named are not significantly smaller than the largest",
        _holds_always,
        lambda waterfall: (
            f"{_reached_of_ideal(waterfall)}: the largest part goes to {_parts_in_words(waterfall)}, not told apart."
        ),
        cell=lambda _: "unsure",
    ),
)


def _is_undecided(figure: Estimate | None) -> bool:
    """Whether a ratio of enough runs may as well be 1: its interval holds 1, and has a width."""
    if figure is None or _has_few_runs(figure):
        return False
    return figure.low != figure.high and figure.side_of(1.0) is None


def _all_parts_in_words(waterfall: Waterfall) -> str:
    """Return "8 ranks reach 72 % of ideal: 20 points are the transfer; 8 are waiting for data.".

    Without a contribution of a point or more it is the first clause alone.
    """
    reached = sentences.reached_of_ideal(waterfall)
    contributions = "; ".join(sentences.contribution_clauses(waterfall))
    return f"{reached}: {contributions}." if contributions else f"{reached}."


WATERFALL: tuple[Statement[Waterfall], ...] = (
    Statement(
        "efficiency unknown",
        "the efficiency is unknown",
        lambda waterfall: waterfall.efficiency is None,
        lambda waterfall: f"What {units.ranks(waterfall.gpus)} reach of ideal is unknown: {waterfall.reason}.",
    ),
    Statement(
        "parts unknown",
        "where the efficiency goes is unknown",
        lambda waterfall: not waterfall.factors,
        lambda waterfall: (
            f"{sentences.reached_of_ideal(waterfall)}; where the rest goes is unknown: {waterfall.reason}."
        ),
    ),
    Statement(
        "undecided",
        "the efficiency's interval holds 1",
        lambda waterfall: _is_undecided(waterfall.interval),
        lambda waterfall: f"{sentences.reached_of_ideal(waterfall)}: no loss is established, and so none is explained.",
    ),
    Statement(
        "parts",
        "the efficiency's interval does not hold 1; of fewer than 3 runs the sentence says that they are too few",
        _holds_always,
        _all_parts_in_words,
    ),
)
"""The statement on all parts of one waterfall, below its picture and in JSON."""


@dataclass(frozen=True)
class WorstLoss:
    """The trial of the lowest efficiency among those on the most ranks."""

    waterfall: Waterfall
    rivals: tuple[Waterfall, ...]
    """The other waterfalls on as many ranks whose efficiency is not significantly higher."""

    @property
    def loss(self) -> str:
        """The sentence on the loss of this waterfall."""
        return claim(LOSS, self.waterfall).text


def is_lower(first: Estimate, second: Estimate) -> bool:
    """Whether one ratio is significantly below another, from their intervals alone.

    It is where log(second / first) exceeds the root of the sum of two squares, on logarithms: of the distance from
    `first` to its upper end, and of that from `second` to its lower end. This is the method of variance estimates
    recovery (Zou & Donner, "Construction of confidence limits about effect measures", Statistics in Medicine 27, 2008,
    1693-1702). Where both ratios have the same baseline, it finds fewer differences than there are.
    """
    if _has_few_runs(first) or _has_few_runs(second):
        return False
    first_high = first.ends.high
    second_low = second.ends.low
    if min(first.value, second.value, second_low) <= 0:
        return False
    reach = math.hypot(math.log(first_high / first.value), math.log(second.value / second_low))
    return math.log(second.value / first.value) > reach


def worst_loss(waterfalls: Sequence[Waterfall]) -> WorstLoss | None:
    """Return the waterfall of the lowest efficiency at the most ranks; None where no efficiency is known."""
    with_efficiency = [waterfall for waterfall in waterfalls if waterfall.efficiency is not None]
    if not with_efficiency:
        return None
    most_gpus = max(waterfall.gpus for waterfall in with_efficiency)
    on_most_gpus = [waterfall for waterfall in with_efficiency if waterfall.gpus == most_gpus]
    worst = min(on_most_gpus, key=lambda waterfall: waterfall.efficiency or 0.0)
    other_waterfalls = [waterfall for waterfall in on_most_gpus if waterfall is not worst]
    rivals = [other for other in other_waterfalls if not _loses_less(other, worst)]
    return WorstLoss(worst, tuple(rivals))


def _loses_less(other: Waterfall, worst: Waterfall) -> bool:
    """Whether the efficiency of `other` is significantly higher; False where a side has no interval."""
    if other.interval is None or worst.interval is None:
        return False
    return is_lower(worst.interval, other.interval)


def _rivals_in_words(worst: WorstLoss) -> str:
    return units.listed((f"{rival.curve} ({rival.mode})" for rival in worst.rivals), most=_MOST_NAMED)


WORST: tuple[Statement[WorstLoss], ...] = (
    Statement(
        "largest loss of few runs",
        "its efficiency is the lowest measured there, from fewer than 3 runs on a side",
        lambda worst: worst.waterfall.interval is None or _has_few_runs(worst.waterfall.interval),
        lambda worst: f"Largest loss measured at the most ranks: {worst.loss}",
    ),
    Statement(
        "no largest loss",
        "no loss is established there",
        lambda worst: not is_loss_established(worst.waterfall),
        _no_words,
    ),
    Statement(
        "largest loss",
        "its efficiency is significantly lower than each other one at the most ranks",
        lambda worst: not worst.rivals,
        lambda worst: f"Largest loss at the most ranks: {worst.loss}",
    ),
    Statement(
        "largest losses not told apart",
        "its efficiency is the lowest measured there",
        _holds_always,
        lambda worst: (
            f"Largest loss measured at the most ranks, not told apart from {_rivals_in_words(worst)}: {worst.loss}"
        ),
    ),
)


@dataclass(frozen=True)
class BaselineLoss:
    """The loss of a trial's baseline, and that of the trial itself."""

    parts: str
    """ "ddp, 1 rank: 80 % of a step is waiting for data."; empty where it loses nothing."""
    idle_share: Estimate
    """Share of the baseline's step in which nothing is computed."""
    loss: Estimate
    """1 - efficiency of the trial."""

    @property
    def is_more(self) -> bool:
        """Whether the baseline loses significantly more than the trial does on top: the intervals do not overlap."""
        if _has_few_runs(self.idle_share) or _has_few_runs(self.loss):
            return False
        return self.idle_share.ends.low > self.loss.ends.high


_NOTABLE_IDLE_SHARE = 0.1
"""Share of the baseline's step in which nothing is computed, from which its own loss is stated.

(Efficiencies are relative to the baseline, so that its own is 1 whatever it loses.)
"""

BASELINE: tuple[Statement[BaselineLoss], ...] = (
    Statement(
        "baseline computes",
        "the baseline computes nothing in less than 10 % of its step, or in less than the trial loses",
        lambda loss: not loss.parts or loss.idle_share.value < max(_NOTABLE_IDLE_SHARE, loss.loss.value),
        _no_words,
    ),
    Statement(
        "most is lost on the baseline",
        "the share of the baseline's step in which nothing is computed is significantly above what the trial loses",
        lambda loss: loss.is_more,
        lambda loss: f"Most is lost on the baseline already: {loss.parts}",
    ),
    Statement(
        "lost on the baseline",
        "that share is above what the trial loses, as measured",
        _holds_always,
        lambda loss: f"Lost on the baseline already: {loss.parts}",
    ),
)


# --- What would I choose? -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BestTrial:
    """The best measured trial of several, by its time or by its cost."""

    title: str
    """ "Fastest measured", "Fastest (3 runs)"."""
    trial: str
    """The trial with its figure: "ddp, 2 ranks: 236 ms an epoch (214 ms to 261 ms, 3 runs)"."""
    rivals: tuple[str, ...]
    """Trials not significantly worse, the best first."""
    candidates: int
    """Number of trials it was chosen from, itself among them."""
    is_tested: bool
    """Whether it has 3 runs or more."""
    most_named: int = _MOST_NAMED
    """Number of rivals of which each is named."""

    @property
    def named_rivals(self) -> str:
        """The rivals with semicolons, because their names have commas: "ddp, 1 rank; deepspeed, 2 ranks; 3 more"."""
        names = [*self.rivals[: self.most_named]]
        if len(self.rivals) > self.most_named:
            names.append(f"{len(self.rivals) - self.most_named} more")
        return "; ".join(names)


FASTEST: tuple[Statement[BestTrial], ...] = (
    Statement(
        "fastest of one",
        "it is the only trial of its kind",
        lambda choice: choice.candidates == 1,
        lambda choice: f"{choice.title}: {choice.trial}.",
    ),
    Statement(
        "fastest of few runs",
        "it has the shortest time, and fewer than 3 runs",
        lambda choice: not choice.is_tested,
        lambda choice: f"{choice.title}: {choice.trial}. Too few to say who is ahead.",
    ),
    Statement(
        "fastest",
        "it has the shortest time, and every other trial is significantly slower",
        lambda choice: not choice.rivals,
        lambda choice: f"{choice.title}: {choice.trial}.",
    ),
    Statement(
        "fastest, not told apart",
        "it has the shortest time, and the trials named are not significantly slower",
        _holds_always,
        lambda choice: f"{choice.title}: {choice.trial}. Not told apart from it: {choice.named_rivals}.",
    ),
)
"""They hold for costs too, with "cheapest" for "fastest"."""


@dataclass(frozen=True)
class Expectation:
    """The time of the chosen trial as measured, and as it is to be expected, as texts in one unit."""

    measured: str
    corrected: str
    low: str
    high: str
    candidates: int


def _expectation_sentence(expected: Expectation | None) -> str:
    """Return a sentence on the time to expect; empty where it is unknown."""
    if expected is None:
        return ""
    return (
        f"Expect {expected.corrected} ({expected.low} to {expected.high}): the fastest of {expected.candidates} is "
        "partly so by luck, and this is corrected for it."
    )


EXPECTATION: tuple[Statement[Expectation | None], ...] = (
    Statement(
        "nothing to correct",
        "it is the only trial, has fewer than 3 runs, or is so far ahead that choosing it changed nothing",
        lambda expected: expected is None or expected.corrected == expected.measured,
        _no_words,
    ),
    Statement(
        "corrected",
        "it was chosen from several trials as the fastest, and others came close",
        _holds_always,
        _expectation_sentence,
    ),
)


@dataclass(frozen=True)
class TrainingLength:
    """The epochs from which on the trial of the shortest epoch ends first, start-up included."""

    epochs: int | None
    """Fewest whole epochs from which on it ends first; None where a start-up is unknown."""
    other: str
    """The trial that ends first before that."""
    startup: str
    """Its start-up, "113 ms"; where its ranks are forks, which start sooner, words that say so follow."""


LENGTH: tuple[Statement[TrainingLength], ...] = (
    Statement("start-up unknown", "a start-up is unknown", lambda length: length.epochs is None, _no_words),
    Statement(
        "any length",
        "start-up and one epoch together are the shortest measured",
        lambda length: length.epochs == 1,
        lambda length: f"With start-up ({length.startup}) it ends first in trainings of any length, as measured.",
    ),
    Statement(
        "from some epochs on",
        "with start-up it ends first, as measured, from that many epochs on and not for one epoch less",
        _holds_always,
        lambda length: (
            f"With start-up ({length.startup}) it ends first in trainings of {length.epochs:,} epochs and more, as "
            f"measured; in shorter ones {length.other} does."
        ),
    ),
)


# --- Engine against engine ------------------------------------------------------------------------------------------


def _with_policy_and_ranks(words: Callable[[CurveComparison], str]) -> Callable[[CurveComparison], str]:
    """Return a function that puts batch policy and ranks before the words on a pair: "strong-micro, 2 ranks: ..."."""
    return lambda compared: f"{compared.mode}, {units.ranks(compared.gpus)}: {words(compared)}."


def _times_as_fast(compared: CurveComparison) -> str:
    return f"{units.share(compared.result.ratio.value)}x"


def _no_difference_clause(compared: CurveComparison) -> str:
    return f"no significant difference between {compared.first} and {compared.second}"


def _verdict_is(verdict: ComparisonVerdict) -> Callable[[CurveComparison], bool]:
    """Return the condition that the comparison of a pair has this verdict."""
    return lambda compared: compared.result.verdict == verdict


PAIR: tuple[Statement[CurveComparison], ...] = (
    Statement(
        "pair of few runs",
        "fewer than 3 runs on a side",
        _verdict_is("too few repeats to tell"),
        _with_policy_and_ranks(
            lambda pair: f"too few repeats to tell {pair.first} from {pair.second} ({_times_as_fast(pair)})"
        ),
    ),
    Statement(
        "no different pair",
        "the interval of the ratio holds 1",
        _verdict_is("no significant difference"),
        _with_policy_and_ranks(
            lambda pair: f"{_no_difference_clause(pair)} ({_times_as_fast(pair)}; {certainty(pair.result.ratio)})"
        ),
    ),
    Statement(
        "no different pair among so many",
        "the interval of the ratio lies on one side of 1, and the p-value after Holm's correction is 0.05 or more",
        _verdict_is("not significant among all comparisons"),
        _with_policy_and_ranks(
            lambda pair: (
                f"{_no_difference_clause(pair)} among so many comparisons ({_times_as_fast(pair)}; "
                f"{certainty(pair.result.ratio)}; {sentences.corrected_p(pair.result.p_adjusted)})"
            )
        ),
    ),
    Statement(
        "different pair",
        "the interval of the ratio lies on one side of 1, and the p-value after Holm's correction is below 0.05",
        _holds_always,
        _with_policy_and_ranks(
            lambda pair: (
                f"{pair.first} is {_times_as_fast(pair)} as fast as {pair.second} ({certainty(pair.result.ratio)})"
            )
        ),
    ),
)


def _several_pairs_sentence(against: AgainstReference) -> str:
    """Return a sentence on several curves against a reference, grouped by verdict.

    Example: "weak, 8 ranks, against ddp: faster: deepspeed (1.12x, 1.05 to 1.20) / no significant difference: ...".
    """
    by_verdict: dict[ComparisonVerdict, list[str]] = {}
    for other in against.others:
        result = other.result
        interval = "" if _has_few_runs(result.ratio) else f", {ratio_interval(result.ratio)}"
        by_verdict.setdefault(result.verdict, []).append(f"{other.first} ({_times_as_fast(other)}{interval})")
    verdicts = " / ".join(f"{verdict}: {'; '.join(names)}" for verdict, names in by_verdict.items())
    return f"{against.mode}, {units.ranks(against.gpus)}, against {against.reference}: {verdicts}."


SEVERAL: tuple[Statement[AgainstReference], ...] = (
    Statement(
        "several pairs",
        "each curve stands under the verdict of its pair, as above",
        _holds_always,
        _several_pairs_sentence,
    ),
)


# --- Can I trust it? ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trust:
    """Findings of a study, and the fewest runs of a trial."""

    warnings: tuple[str, ...]
    """Kind of each."""
    notes: int
    fewest_runs: int | None
    """None: nothing has run."""

    @property
    def counts(self) -> str:
        """Warnings and notes in words: "2 warnings (unstable, drift), 4 notes"."""
        kinds = units.listed(kind.replace("-", " ") for kind in dict.fromkeys(self.warnings))
        warnings = units.counted(len(self.warnings), "warning")
        if self.warnings:
            warnings = f"{warnings} ({kinds})"
        return f"{warnings}, {units.counted(self.notes, 'note')}"

    @property
    def few_runs(self) -> str:
        """A clause that intervals need 3 runs; empty where every trial has them."""
        if self.fewest_runs is None or self.fewest_runs >= 3:
            return ""
        return f"; intervals need 3 runs of a trial, the fewest here are {self.fewest_runs}"


TRUST: tuple[Statement[Trust], ...] = (
    Statement(
        "warned",
        "there is a warning",
        lambda trust: bool(trust.warnings),
        lambda trust: f"Not without looking: {trust.counts}{trust.few_runs}.",
    ),
    Statement(
        "only noted",
        "there are notes and no warning",
        lambda trust: trust.notes > 0,
        lambda trust: f"No warning, {units.counted(trust.notes, 'note')}{trust.few_runs}.",
    ),
    Statement("nothing found", "there is no finding", _holds_always, lambda trust: f"No warning{trust.few_runs}."),
)

TABLES: dict[str, tuple[tuple[Statement[Any], ...], ...]] = {
    "How does it scale?": (SCALING,),
    "What would I choose?": (FASTEST, EXPECTATION, LENGTH),
    "Why not better?": (LOSS, WATERFALL, WORST, BASELINE),
    "Can I trust it?": (TRUST,),
    "Engine against engine": (PAIR, SEVERAL),
}
"""Section of the report -> its tables of statements."""
