"""Do a run's clocks agree? Each rank times its steps and its epochs apart, and the epochs are those of all ranks."""

from __future__ import annotations

from vitscale.store.records import EpochLine, RankRecord, Run, StepLine

_SHARE = 0.01
_BARRIER_SECONDS = 0.01
"""What the barrier that ends an epoch may take besides: in an epoch of a few short steps it is more than 1 %."""


def clock_anomalies(run: Run) -> tuple[str, ...]:
    """What cannot be right in a run's times, a phrase for each kind; empty where the clocks agree.

    Every rank counts an epoch between the same two barriers, so the ranks' epochs take equally long. In an epoch of
    light steps alone nothing lies between the steps, so that a rank's steps add up to its epoch. Both within 1 %, and
    10 ms for the closing barrier. Who timed an imported run, and between which barriers, is not known: of it nothing is
    said.
    """
    if run.header.imported is not None:
        return ()
    return tuple(filter(None, (_without_length(run), _steps_against_epochs(run), _ranks_against_ranks(run))))


def _without_length(run: Run) -> str:
    zero = sum(1 for rank in run.ranks for line in rank.steps if line.seconds <= 0)
    return f"{zero} step{'s' if zero != 1 else ''} of no length" if zero else ""


def _steps_against_epochs(run: Run) -> str:
    off: list[tuple[float, str]] = []
    for rank in run.ranks:
        by_epoch: dict[int, list[StepLine]] = {}
        for line in rank.steps:
            by_epoch.setdefault(line.epoch, []).append(line)
        for epoch in rank.epochs:
            lines = by_epoch.get(epoch.epoch, [])
            if len(lines) != epoch.steps or any(line.window != "light" for line in lines):
                continue  # a line was lost, or the epoch holds the pauses between windows
            difference = sum(line.seconds for line in lines) - epoch.seconds
            if _too_far(difference, epoch.seconds):
                off.append((abs(difference) / epoch.seconds, _said(difference, epoch, rank)))
    return max(off, key=lambda pair: pair[0])[1] if off else ""


def _said(difference: float, epoch: EpochLine, rank: RankRecord) -> str:
    how = f"{100 * abs(difference) / epoch.seconds:.1f} % {'more' if difference > 0 else 'less'}"
    return f"the steps of epoch {epoch.epoch} on rank {rank.rank} add up to {how} than the epoch took"


def _ranks_against_ranks(run: Run) -> str:
    by_epoch: dict[int, list[float]] = {}
    for rank in run.ranks:
        for epoch in rank.epochs:
            by_epoch.setdefault(epoch.epoch, []).append(epoch.seconds)
    off: list[tuple[float, str]] = []
    for number, seconds in by_epoch.items():
        difference = max(seconds) - min(seconds)
        if _too_far(difference, min(seconds)):
            share = difference / min(seconds)
            off.append((share, f"epoch {number} took {100 * share:.1f} % longer on one rank than on another"))
    return max(off, key=lambda pair: pair[0])[1] if off else ""


def _too_far(difference: float, seconds: float) -> bool:
    """An epoch without length is no measure: it is left to the steps."""
    return seconds > 0 and abs(difference) > _SHARE * seconds + _BARRIER_SECONDS
