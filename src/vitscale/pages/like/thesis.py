"""The thesis on Swin Transformer V2 (Garrett, Pittsburgh 2023): its quantities, and its claim of poor scaling.

Only the abstract is used. The thesis fine-tunes for semantic segmentation on ADE20K with 8 images for each
GPU and iteration, and scales the iterations down; here this is strong-micro, whatever it is called there.

Tables by GPU count and kind of GPU hold training time, speedup and utilisation, and the seconds of a whole run by part.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from vitscale.analysis import TrialResult
from vitscale.analysis.statistics import interval
from vitscale.analysis.time.breakdown import COMPUTE
from vitscale.analysis.time.run_waterfall import CHECKPOINT, EVALUATION, START_UP, epochs_of, run_breakdown, run_seconds
from vitscale.analysis.time.waterfall import FACTORS, Unexplained
from vitscale.pages.like.doublings import doublings_claim
from vitscale.pages.like.series import FigureSeries, Member, distinct_series_names, strong_micro_series
from vitscale.pages.like.study import MeasuredData, PublishedStudy, StudyClaim, StudyFigure
from vitscale.pages.tables import batch_text, interval_cell
from vitscale.present import units
from vitscale.present.document import Cell, Column, RowGroup, Table
from vitscale.present.estimate import Estimate

_SOURCE = (
    "Evaluation of Scalability for Distributed Data-Parallel Training of Swin Transformer V2 (Garrett, University of "
    "Pittsburgh 2023, d-scholarship.pitt.edu/44738)"
)
_figure = partial(StudyFigure, study="thesis", mode="strong-micro")


_PART_NAMES = {"h2d": "copy to device", "straggler wait": "waiting for ranks", "wire": "transfer"}
"""Part of a run -> its heading, where that is not the part's own name."""
_PARTS_IN_ORDER = (START_UP, *COMPUTE, *FACTORS, EVALUATION, CHECKPOINT)
"""The parts of a run, in the order of their columns."""
_COPY_TO_DEVICE = "h2d"
_DECODING = "decoding"
"""Names of two parts of a run, as the analysis names them. Decoding is a share of the wait for data."""


def training_table(measured: MeasuredData) -> Table:
    """Return the table of the quantities of the thesis: time, speedup, efficiency, utilisation of GPUs and CPUs."""
    columns = ("GPUs", "device", "global batch", "epoch", "whole run", "speedup", "efficiency", "GPU utilisation",
               "CPU utilisation")  # fmt: skip
    notes = [
        "A whole run: start-up, the epochs that its trial trains (one where it measures some steps alone), an "
        "evaluation after each, and a checkpoint where one was measured.",
        "GPU utilisation: share of time in which a kernel ran. CPU utilisation: of the threads of the ranks.",
    ]
    reasons = _reasons_without_gpu_utilisation(_members(measured))
    if reasons:
        notes.append(f"GPU utilisation is unavailable: {'; '.join(sorted(reasons))}.")
    return _table(measured, "Training time and utilisation", columns, _training_cells, notes)


def _reasons_without_gpu_utilisation(members: Sequence[Member]) -> set[str]:
    """Return the different reasons why members have no GPU utilisation."""
    reasons = set()
    for member in members:
        used = member.trial.resources
        if used is not None and used.gpu_utilisation is None and used.gpu_reason:
            reasons.add(used.gpu_reason)
    return reasons


def parts_table(measured: MeasuredData) -> Table:
    """Return the table of the seconds of each part of a whole run."""
    members = _members(measured)
    breakdown_by_trial = {id(member.trial): _breakdown(member.trial) for member in members}
    breakdowns = list(breakdown_by_trial.values())
    parts = _recorded_parts(breakdowns)

    def cells(member: Member) -> tuple[Cell, ...]:
        seconds = breakdown_by_trial[id(member.trial)].seconds
        run_seconds = sum(seconds.values()) if seconds else None
        part_cells = [Cell(units.seconds(seconds.get(part))) for part in parts]
        return (Cell(f"{member.gpus:,}"), Cell(units.seconds(run_seconds)), *part_cells)

    part_headings = [_PART_NAMES.get(part, part) for part in parts]
    columns = ("GPUs", "whole run", *part_headings)
    notes = _parts_notes(members, breakdowns)
    return _table(measured, "Where the time of a whole run goes", columns, cells, notes)


def _recorded_parts(breakdowns: Sequence[_RunBreakdown]) -> list[str]:
    """Return the parts that any breakdown has, in the order of their columns.

    Copies to the device are left out where all take no time, for then the device is the host itself.
    """
    recorded: set[str] = set()
    for breakdown in breakdowns:
        recorded.update(breakdown.seconds)
    has_copies = any(breakdown.seconds.get(_COPY_TO_DEVICE) for breakdown in breakdowns)
    if not has_copies:
        recorded.discard(_COPY_TO_DEVICE)
    return [part for part in _PARTS_IN_ORDER if part in recorded]


_SUM_NOTE = (
    "Its parts add up to it: of epochs the geometric mean over runs, else medians. (In the other table it is the mean "
    "of whole runs.)"
)
"""How the whole run of `parts_table` comes about, and why that of `training_table` may differ from it."""
_UNDECODED_NOTE = "Data wait is not split: nothing was decoded while training, or no record tells how long it took."


def _parts_notes(members: Sequence[Member], breakdowns: Sequence[_RunBreakdown]) -> list[str]:
    """Return the notes below `parts_table`, each only where it applies.

    They say why parts of some runs are unavailable, how many epochs a run has, how the whole run comes about where any
    is known, and that no run's wait for data is split into decoding and loading.
    """
    reasons = {breakdown.reason for breakdown in breakdowns if not breakdown.is_known}
    epoch_counts = _epoch_counts(members)
    is_any_known = any(breakdown.is_known for breakdown in breakdowns)
    is_decoding_known = any(_DECODING in breakdown.seconds for breakdown in breakdowns)
    notes = []
    if reasons:
        notes.append(f"Parts of a run are unavailable: {'; '.join(sorted(reasons))}.")
    if epoch_counts:
        plural = "" if epoch_counts == [1] else "s"
        notes.append(f"Of a run of {' or '.join(map(str, epoch_counts))} epoch{plural}.")
    if is_any_known:
        notes.append(_SUM_NOTE)
    if not is_decoding_known:
        notes.append(_UNDECODED_NOTE)
    return notes


def _epoch_counts(members: Sequence[Member]) -> list[int]:
    """Return the different numbers of epochs that the members' trials train, sorted; unknown ones are left out."""
    epoch_counts = set()
    for member in members:
        epochs = epochs_of(member.trial)
        if epochs is not None:
            epoch_counts.add(epochs)
    return sorted(epoch_counts)


def tables(measured: MeasuredData) -> list[Table]:
    """Return both tables; none where the results have no strong-micro series."""
    return [training_table(measured), parts_table(measured)] if _strong_series(measured) else []


def _table(
    measured: MeasuredData,
    title: str,
    columns: tuple[str, ...],
    cells: Callable[[Member], tuple[Cell, ...]],
    notes: list[str],
) -> Table:
    """Return a table with a row for each member, grouped by series. `cells`: returns the row of a member."""
    series_list = _strong_series(measured)
    groups = []
    for series, name in zip(series_list, distinct_series_names(series_list), strict=True):
        rows = [cells(member) for member in series.members]
        groups.append(RowGroup(name, tuple(rows)))
    return Table(tuple(map(Column, columns)), tuple(groups), tuple(notes), title=title, label="series")


def _strong_series(measured: MeasuredData) -> list[FigureSeries]:
    """Return one series for each strong-micro curve.

    A curve that goes on over several hosts is two series, of which that with the most members is returned.
    """
    strong = strong_micro_series(measured.series)
    longest_last = sorted(strong, key=lambda series: len(series.members))
    longest_by_curve = {id(series.curve): series for series in longest_last}
    return [series for series in strong if longest_by_curve[id(series.curve)] is series]


def _members(measured: MeasuredData) -> list[Member]:
    """Return the members of all series of the tables."""
    return list(itertools.chain.from_iterable(series.members for series in _strong_series(measured)))


def _training_cells(member: Member) -> tuple[Cell, ...]:
    """Return the row of a member in `training_table`."""
    trial = member.trial
    speedup = member.speedup_over_base
    efficiency = None
    if speedup is not None and member.base_gpus:
        efficiency = speedup.times(member.base_gpus / member.gpus)
    whole_runs = run_seconds(trial)
    devices = ", ".join(dict.fromkeys(member.devices))
    used = trial.resources
    return (
        Cell(f"{member.gpus:,}"),
        Cell(devices or units.UNAVAILABLE),
        Cell(batch_text(trial)),
        _seconds(trial.epoch_seconds),
        _seconds(interval(whole_runs) if whole_runs else None),
        interval_cell(speedup, units.share),
        interval_cell(efficiency, units.share),
        Cell(_percent(used.gpu_utilisation if used else None)),
        Cell(_percent(used.cpu_utilisation if used else None)),
    )


class _RunBreakdown(NamedTuple):
    """The seconds of each part of a whole run, or why they are unknown."""

    seconds: Mapping[str, float]
    """Part -> seconds; empty where they are unknown."""
    reason: str = ""
    is_known: bool = True


def _breakdown(trial: TrialResult) -> _RunBreakdown:
    try:
        return _RunBreakdown(dict(run_breakdown(trial)))
    except Unexplained as error:
        return _RunBreakdown({}, reason=str(error), is_known=False)


def _seconds(value: Estimate | None) -> Cell:
    return interval_cell(value, units.seconds) if value is not None else Cell(units.UNAVAILABLE)


def _percent(value: float | None) -> str:
    return units.UNAVAILABLE if value is None else units.percent(value)


THESIS = PublishedStudy(
    name="thesis",
    title_name="the thesis",
    source=_SOURCE,
    reading_note=f"The quantities and the published figures are those of the abstract of {_SOURCE}: no other figure of "
    "it is used. Its hardware is A100 SXM, A100 PCIe and V100 PCIe; it trains Swin V2 on ADE20K, so compare shapes, "
    'not heights. "26 % faster" is read as 1.26 times as fast; read as 26 % less time it would be 1.35 times.',
    figures=(
        _figure(
            caption="Training time and speedup",
            quantity="epoch time",
            draws="epoch time and speedup by GPU count, one curve per kind of GPU and setting",
        ),
        _figure(
            caption="Parallel efficiency",
            quantity="efficiency",
            draws="speedup for each GPU, by GPU count",
        ),
        _figure(
            caption="What a doubling gains",
            quantity="doublings",
            draws="how many times as fast training is on twice the GPUs, beside what was published and what a ring's "
            "transfers would leave",
        ),
        _figure(
            caption="Utilisation",
            quantity="utilisation",
            draws="GPU and CPU utilisation by GPU count",
        ),
        _figure(
            caption="Where a whole run loses its time",
            quantity="run waterfall",
            draws="from ideal to measured for whole runs: start-up, loading, decoding, computing, synchronised norm, "
            "waiting, transfer, evaluation, checkpoint",
        ),
    ),
    claims=(
        StudyClaim(
            "Does a doubling of the GPUs still shorten training, and by less than transfers would leave?",
            "Published, as 26 % faster from 1 to 2 GPUs and 1.9 % and 2.9 % from 2 to 4 and 4 to 8: it scales poorly. "
            "Epoch seconds on N GPUs over those on 2 N, of light steps, with Welch's 95 % interval over runs and "
            "Holm's correction for all doublings. What transfers would leave is a bound: a step as on N GPUs, and all "
            "of a ring's transfer on 2 N on top of it, nothing hidden under computing.",
            doublings_claim,
            "Not tested: no strong-micro curve of these results has two GPU counts of which one is twice the other. "
            'Set scaling.mode = "strong-micro" and gpus = [1, 2, 4, 8].',
        ),
    ),
    tables=tables,
)
