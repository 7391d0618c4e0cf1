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

from vitscale.analysis.quality.wording import count, note
from vitscale.analysis.runs.steps import LIGHT
from vitscale.analysis.trials import TrialResult
from vitscale.base.time_spans import length, union
from vitscale.present.document import Finding
from vitscale.store.lines import Steps
from vitscale.store.records import ExplainedLine
from vitscale.store.results import Run, StudyRecord

_MOST_FILES = 3


def imported_results(study: StudyRecord) -> Iterable[Finding]:
    """The files that the results come from, and what had to be assumed."""
    if study.imported is None:
        return
    files = [file.name for file in study.imported.files]
    more = f" and {len(files) - _MOST_FILES} more" if len(files) > _MOST_FILES else ""
    assumed = "".join(f"; {note}" for note in study.imported.notes)
    yield note(
        "imported",
        f"imported as {study.imported.log_format} from {', '.join(files[:_MOST_FILES])}{more}{assumed}",
        "What is assumed can be told: `vitscale import --help` names the options.",
    )


def steps_from_epochs(measured: Sequence[TrialResult]) -> Iterable[Finding]:
    """Trials whose step times are shares of an epoch."""
    shared_out = [
        trial
        for trial in measured
        if any(run.pace.source == "epochs" and run.step_seconds and not run.timed_steps for run in trial.run_figures)
    ]
    if shared_out:
        yield note(
            "steps-from-epochs",
            f"step times from epochs: in {count(shared_out)} a step is the epoch's time shared out over its steps, and "
            "holds all that lies between them",
            "Compare them with each other, not with steps that were timed one by one.",
            shared_out,
        )


def some_ranks(measured: Sequence[TrialResult]) -> Iterable[Finding]:
    """Trials of which the files hold some ranks only."""
    partly = [trial for trial in measured if any(_partly(run) for run in trial.recorded_runs)]
    if partly:
        first = partly[0].recorded_runs[0].ranks_needed
        known = one_rank_bounds(partly[0].recorded_runs[0], partly[0].run_figures[0].steady_from or 0)
        bounds = f"; {_told(known)}" if known is not None else ""
        ranks = ", ".join(map(str, first[:4])) + (", ..." if len(first) > 4 else "")
        yield note(
            "some-ranks",
            f"not all ranks are told of: of {count(partly)} the files hold some ranks alone (rank {ranks} of "
            f"{partly[0].trial.world.size} in {partly[0].name}); each step is theirs, and who was waited for is "
            f"not known{bounds}",
            "Import the logs of all ranks together, where there are any.",
            partly,
        )


def _told(bounds: OneRankBounds) -> str:
    return (
        f"of the {1000 * bounds.exchange_seconds:.1f} ms that a step exchanges gradients there at most "
        f"{1000 * bounds.transfer_high:.1f} ms (the quickest step) are transfer, and at least "
        f"{1000 * bounds.wait_low:.1f} ms waiting"
    )


def _partly(run: Run) -> bool:
    imported = run.header.imported
    return imported is not None and not imported.of_the_run and len(imported.ranks) < run.header.trial.world.size


_FEWEST_STEPS = 20


@dataclass(frozen=True)
class OneRankBounds:
    """Seconds of a step, mean over the steady steps unless said otherwise."""

    rank: int
    steps: int
    step_seconds: float
    exchange_seconds: float
    """Transfer and wait together."""
    exchange_median_seconds: float
    transfer_low: float
    transfer_high: float
    wait_low: float
    wait_high: float
    follows_own_pace: float | None
    """Change of the exchange per change of the rank's own computing, from step to step: -1 where it waits, 0 where it
    does not. Median over the steps whose computing changed most; None where it hardly changes."""

    @property
    def waits(self) -> bool | None:
        """Whether the rank waits in a typical step; None where its pace does not tell."""
        if self.follows_own_pace is None or 0.25 < -self.follows_own_pace < 0.75:
            return None
        return self.follows_own_pace < -0.5


def one_rank_bounds(
    run: Run, steady_from: int = 0, sent_bytes: float | None = None, link_bytes_per_second: float | None = None
) -> OneRankBounds | None:
    """The bounds of a run with only one rank recorded; None for other runs, and for fewer than 20 steps.

    Args:
        run: the record.
        steady_from: the first step after warm-up (`RunFigures.steady_from`).
        sent_bytes: the least that a rank sends and receives over its link in a step.
        link_bytes_per_second: the most that this link can do.
    """
    if run.header.trial.world.size < 2 or len(run.ranks) != 1 or len(run.ranks_needed) != 1:
        return None
    rank = run.ranks[0]
    steps = Steps.of(rank.steps)
    light = set(steps.step[(steps.window == LIGHT) & ~steps.warmup].tolist())
    lines = [line for line in rank.explained if line.step >= steady_from and line.step in light and line.collectives]
    if len(lines) < _FEWEST_STEPS:
        return None
    exchanged = [_exchange(line) for line in lines]
    mean, least = statistics.fmean(exchanged), min(exchanged)
    floor = 0.0
    if sent_bytes is not None and link_bytes_per_second is not None and link_bytes_per_second > 0:
        floor = min(least, sent_bytes / link_bytes_per_second)
    return OneRankBounds(
        rank=rank.rank,
        steps=len(lines),
        step_seconds=statistics.fmean(line.seconds for line in lines),
        exchange_seconds=mean,
        exchange_median_seconds=statistics.median(exchanged),
        transfer_low=floor,
        transfer_high=least,
        wait_low=mean - least,
        wait_high=mean - floor,
        follows_own_pace=_follows(lines, exchanged),
    )


def ring_bytes(tensor_bytes: float, ranks: int) -> float:
    """What each rank sends in an all-reduce of `tensor_bytes` by a ring: 2 (N - 1) / N times that.

    No algorithm sends less from the busiest rank: Patarasuk & Yuan, "Bandwidth optimal all-reduce algorithms for
    clusters of workstations" (JPDC 69, 2009), section 3.
    """
    return 2 * (ranks - 1) / ranks * tensor_bytes


def _exchange(line: ExplainedLine) -> float:
    return length(union((start, end) for _, _, start, end in line.collectives))


def _follows(lines: Sequence[ExplainedLine], exchanged: Sequence[float]) -> float | None:
    """The median ratio of the two changes, over the half of the steps whose computing changed most."""
    own = [
        sum(end - start for name, start, end in line.phases if name in ("forward", "backward")) - exchange
        for line, exchange in zip(lines, exchanged, strict=True)
    ]
    changes = [
        (own[after] - own[before], exchanged[after] - exchanged[before])
        for before, after in zip(range(len(lines)), range(1, len(lines)), strict=False)
        if lines[after].step - lines[before].step <= 2
    ]
    if len(changes) < _FEWEST_STEPS:
        return None
    typical = statistics.median(abs(change) for change, _ in changes)
    # Timers have two decimals of a millisecond: below a tenth of a millisecond nothing can be seen.
    if typical < 1e-4:
        return None
    return statistics.median(other / change for change, other in changes if abs(change) >= typical)
