"""What a reader must know of imported results: where they come from, and what they do not tell.

One rank's log bounds its waiting and its transfer, and hints at which of the two it is. A rank's exchange of gradients
takes x_i = T + W_i in step i: the transfer, and the wait for the slowest rank. The log holds only their sum. Where
every step sends the same over the same network, T is the same in each:

    T <= min x_i              no step can take less than its transfer
    W >= mean x_i - min x_i   the time above that was not transfer
    T >= sent bytes / link    where both are known; else T >= 0
    W <= mean x_i - that      a rank that is early by the same time in every step waits in every step, the quickest too

so the quickest step bounds the transfer from above, and never from below. The rank's own pace shows whether it was
early. A rank that waits does so until a moment that others set: the longer it computes, the less it waits. The change
of x from one step to the next per change of its own computing is -1 where it waits, and 0 where others wait for it or
nobody waits, as far as ranks do not slow down together.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from vitscale.analysis.quality.wording import counted_trials, note
from vitscale.analysis.runs.figures import RunFigures
from vitscale.analysis.runs.steps import LIGHT
from vitscale.analysis.trials import TrialResult
from vitscale.base.time_spans import length, union
from vitscale.present.document import Finding
from vitscale.store.lines import Steps
from vitscale.store.records import ExplainedLine, RankRecord
from vitscale.store.results import Run, StudyRecord

_MOST_FILES_NAMED = 3
"""Most files that a message names."""
_MOST_RANKS_NAMED = 4
"""Most ranks that a message names."""
_FEWEST_STEPS = 20
"""Fewest steps, and changes from one step to the next, from which bounds are taken."""
_NEIGHBOUR_DISTANCE = 2
"""Steps whose numbers differ by no more than this are neighbours."""
_TIMER_SECONDS = 1e-4
"""Timers have two decimals of a millisecond: below a tenth of a millisecond nothing can be seen."""


def imported_results(study: StudyRecord) -> Iterable[Finding]:
    """Notes the files that the results come from, and what had to be assumed."""
    if study.imported is None:
        return
    names = [file.name for file in study.imported.files]
    first_names = ", ".join(names[:_MOST_FILES_NAMED])
    more = f" and {len(names) - _MOST_FILES_NAMED} more" if len(names) > _MOST_FILES_NAMED else ""
    assumptions = "".join(f"; {assumption}" for assumption in study.imported.notes)
    yield note(
        "imported",
        message=f"imported as {study.imported.log_format} from {first_names}{more}{assumptions}",
        advice="What is assumed can be told: `vitscale import --help` names the options.",
    )


def steps_from_epochs(measured: Sequence[TrialResult]) -> Iterable[Finding]:
    """Notes trials whose step times are shares of an epoch."""
    trials = [trial for trial in measured if any(map(_has_steps_from_epochs, trial.run_figures))]
    if not trials:
        return
    yield note(
        "steps-from-epochs",
        message=f"step times from epochs: in {counted_trials(trials)} a step is the epoch's time shared out over "
        "its steps, and holds all that lies between them",
        advice="Compare them with each other, not with steps that were timed one by one.",
        trials=trials,
    )


def _has_steps_from_epochs(run: RunFigures) -> bool:
    """Whether the run's log has times of whole epochs alone, which were divided by their number of steps."""
    if run.timed_steps > 0 or not run.step_seconds:
        return False
    return run.pace.source == "epochs"


def some_ranks(measured: Sequence[TrialResult]) -> Iterable[Finding]:
    """Notes trials of which the files hold some ranks only."""
    partial_trials = [result for result in measured if any(map(_has_some_ranks_alone, result.recorded_runs))]
    if not partial_trials:
        return
    result = partial_trials[0]
    first_run = result.recorded_runs[0]
    bounds = one_rank_bounds(first_run, steady_from=result.run_figures[0].steady_from or 0)
    bounds_clause = f"; {_bounds_in_words(bounds)}" if bounds is not None else ""
    yield note(
        "some-ranks",
        message=f"not all ranks are told of: of {counted_trials(partial_trials)} the files hold some ranks alone (rank "
        f"{_ranks_in_words(first_run.ranks_needed)} of {result.trial.world.size} in {result.name}); each step is "
        f"theirs, and who was waited for is not known{bounds_clause}",
        advice="Import the logs of all ranks together, where there are any.",
        trials=partial_trials,
    )


def _ranks_in_words(ranks: Sequence[int]) -> str:
    """Return "0, 1, 2, 3, ..."."""
    numbers = ", ".join(map(str, ranks[:_MOST_RANKS_NAMED]))
    return f"{numbers}, ..." if len(ranks) > _MOST_RANKS_NAMED else numbers


def _has_some_ranks_alone(run: Run) -> bool:
    """Whether the run was imported from the files of some of its ranks, and no file has the times of the whole run."""
    imported = run.header.imported
    if imported is None or imported.of_the_run:
        return False
    return len(imported.ranks) < run.header.trial.world.size


def _bounds_in_words(bounds: OneRankBounds) -> str:
    """Return in words how much of a step's exchange is transfer at most, and how much is waiting at least."""
    return (
        f"of the {1000 * bounds.exchange_seconds:.1f} ms that a step exchanges gradients there at most "
        f"{1000 * bounds.transfer_high:.1f} ms (the quickest step) are transfer, and at least "
        f"{1000 * bounds.wait_low:.1f} ms waiting"
    )


@dataclass(frozen=True)
class OneRankBounds:
    """What the log of one rank alone shows of its exchange of gradients; the module's docstring has the inequalities.

    Seconds are those of a step, mean over the steady steps where no other is named.
    """

    rank: int
    steps: int
    """Number of steps behind the means."""
    step_seconds: float
    exchange_seconds: float
    """Transfer and wait together."""
    exchange_median_seconds: float
    transfer_low: float
    """Lower bound of the transfer; `transfer_high` is its upper one, and the other two are those of the wait."""
    transfer_high: float
    wait_low: float
    wait_high: float
    follows_own_pace: float | None
    """Change of the exchange per change of the rank's own computing, from step to step: -1 where it waits, 0 where it
    does not. Median over the steps whose computing changed most; None where it hardly changes."""

    @property
    def waits(self) -> bool | None:
        """Whether the rank waits in a typical step; None where its pace does not show it."""
        if self.follows_own_pace is None:
            return None
        shortening = -self.follows_own_pace  # of the exchange: 1 where the rank waits, 0 where it does not
        is_unclear = 0.25 < shortening < 0.75
        return None if is_unclear else shortening > 0.5


def one_rank_bounds(
    run: Run, steady_from: int = 0, sent_bytes: float | None = None, link_bytes_per_second: float | None = None
) -> OneRankBounds | None:
    """Return the bounds of a run with only one rank recorded; None for other runs, and for fewer than 20 steps.

    The shortest exchange of any step bounds the transfer from above: it may hold a wait, but all steps transfer the
    same. What a step exchanges beyond the transfer is waiting.

    Args:
        run: the record.
        steady_from: the first step after warm-up (`RunFigures.steady_from`).
        sent_bytes: the least that a rank sends and receives over its link in a step.
        link_bytes_per_second: the most that this link can do.
    """
    if run.header.trial.world.size < 2 or len(run.ranks) != 1 or len(run.ranks_needed) != 1:
        return None
    rank = run.ranks[0]
    lines = _steady_exchanges(rank, steady_from)
    if len(lines) < _FEWEST_STEPS:
        return None
    exchanges = [_exchange_seconds(line) for line in lines]
    mean_exchange = statistics.fmean(exchanges)
    shortest_exchange = min(exchanges)
    shortest_transfer = 0.0
    if sent_bytes is not None and link_bytes_per_second is not None and link_bytes_per_second > 0:
        shortest_transfer = min(shortest_exchange, sent_bytes / link_bytes_per_second)
    return OneRankBounds(
        rank=rank.rank,
        steps=len(lines),
        step_seconds=statistics.fmean(line.seconds for line in lines),
        exchange_seconds=mean_exchange,
        exchange_median_seconds=statistics.median(exchanges),
        transfer_low=shortest_transfer,
        transfer_high=shortest_exchange,
        wait_low=mean_exchange - shortest_exchange,
        wait_high=mean_exchange - shortest_transfer,
        follows_own_pace=_exchange_change_per_computing(lines, exchanges),
    )


def _steady_exchanges(rank: RankRecord, steady_from: int) -> list[ExplainedLine]:
    """Return the explained lines of light steps after warm-up in which the rank exchanged anything."""
    steps = Steps.of(rank.steps)
    is_steady = (steps.window == LIGHT) & ~steps.warmup
    steady_steps = set(steps.step[is_steady].tolist())
    lines = [line for line in rank.explained if line.step >= steady_from and line.step in steady_steps]
    return [line for line in lines if line.collectives]


def ring_bytes(tensor_bytes: float, ranks: int) -> float:
    """Return the bytes that each rank sends in an all-reduce of `tensor_bytes` by a ring: 2 (N - 1) / N times these.

    No algorithm sends less from the busiest rank: Patarasuk & Yuan, "Bandwidth optimal all-reduce algorithms for
    clusters of workstations" (JPDC 69, 2009), section 3.
    """
    return 2 * (ranks - 1) / ranks * tensor_bytes


def _exchange_seconds(line: ExplainedLine) -> float:
    """Return the seconds of a step in which a collective of the rank was under way."""
    return length(union((start, end) for _, _, start, end in line.collectives))


def _computing_seconds(line: ExplainedLine, exchange_seconds: float) -> float:
    """Return the seconds of forward and backward without the exchange, which goes on during them."""
    phase_seconds = sum(end - start for name, start, end in line.phases if name in ("forward", "backward"))
    return phase_seconds - exchange_seconds


class _StepChange(NamedTuple):
    """Seconds by which a step differs from the one before it."""

    computing_seconds: float
    exchange_seconds: float


def _exchange_change_per_computing(lines: Sequence[ExplainedLine], exchanges: Sequence[float]) -> float | None:
    """Return by how much the exchange changes from step to step, per change of computing: -1 where the rank waits.

    It is the median over the half of the steps whose computing changed most. None for too few neighbouring steps, and
    where computing changes by less than can be seen.

    Args:
        lines: the steps of one rank, in their order.
        exchanges: seconds of exchange of each line.
    """
    computing = [_computing_seconds(line, exchange) for line, exchange in zip(lines, exchanges, strict=True)]
    changes = []
    for before, after in pairwise(range(len(lines))):
        if lines[after].step - lines[before].step > _NEIGHBOUR_DISTANCE:
            continue
        changes.append(_StepChange(computing[after] - computing[before], exchanges[after] - exchanges[before]))
    if len(changes) < _FEWEST_STEPS:
        return None
    typical_change = statistics.median(abs(change.computing_seconds) for change in changes)
    if typical_change < _TIMER_SECONDS:
        return None
    large_changes = [change for change in changes if abs(change.computing_seconds) >= typical_change]
    return statistics.median(change.exchange_seconds / change.computing_seconds for change in large_changes)
