"""The report's tables: scaling by batch policy, curve against curve, and a row per trial in groups by curve."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

from vitscale.analysis import Analysis, CurveComparison, CurveResult, ScalingPoint, by_mode
from vitscale.analysis.comparisons import AgainstReference, against_references
from vitscale.analysis.runs.figures import RunFigures
from vitscale.analysis.runs.steps import DEVIATIONS, SLOWER_TIMES
from vitscale.analysis.summaries import NOT_RUN_YET
from vitscale.analysis.trials import TrialResult
from vitscale.engines.names import engine_label
from vitscale.pages import sentences
from vitscale.prediction.start_up import FORKED_RANKS, started_as_forks
from vitscale.present import units
from vitscale.present.document import Cell, Column, Row, RowGroup, Table, table
from vitscale.present.estimate import Estimate
from vitscale.trial.rank_batches import in_words
from vitscale.trial.trial import Mode

TrialColumn = tuple[str, Callable[[TrialResult], Cell]]
"""A column's heading, and its cell for a trial."""
_LONGEST_UNFOLDED_TABLE = 16
"""Number of rows beyond which a table is folded."""
_SHORT_VERDICTS = {
    "no significant difference": "no difference",
    "not significant among all comparisons": "no difference among so many",
    "too few repeats to tell": "too few repeats",
}


class _PointColumn(NamedTuple):
    """A column of a scaling table."""

    column: Column
    cell: Callable[[TrialResult, ScalingPoint], Cell]
    """The cell of a trial with figures, which is this point of a curve."""
    is_shown: bool = True


def mode_tables(analysis: Analysis) -> dict[Mode, Table]:
    """Return the scaling table of each batch policy, in the order of the study's curves."""
    return {mode: _mode_table(analysis, mode, curves) for mode, curves in by_mode(analysis.curves).items()}


def _mode_table(analysis: Analysis, mode: Mode, curves: Sequence[CurveResult]) -> Table:
    """Return the scaling table of one batch policy: a group for each curve, a row for each rank count."""
    trials = [analysis.trials[point.trial_id] for curve in curves for point in curve.points]
    figures = [figure for figure in _point_columns(curves, trials) if figure.is_shown]
    groups = []
    for curve in curves:
        rows = [_point_row(analysis.trials[point.trial_id], curve, point, figures) for point in curve.points]
        groups.append(RowGroup(curve.name, tuple(rows)))
    notes = []
    for curve in curves:
        if curve.baseline is None:
            notes.append(_note_without_baseline(analysis, curve))
    if any(map(_has_masks, trials)):
        notes.append("Held-out accuracy of segmentation is that of pixels.")
    notes += start_up_notes(trials)
    notes.append("In brackets or small: 95 % intervals over three runs or more; of elapsed epochs how many.")
    notes += slow_step_notes(trials)
    return Table(
        columns=(Column("ranks"), Column("global batch"), *(figure.column for figure in figures)),
        groups=tuple(groups),
        notes=tuple(notes),
        title=sentences.MODE_TITLES[mode],
        label="curve",
    )


def _point_columns(curves: Sequence[CurveResult], trials: Sequence[TrialResult]) -> list[_PointColumn]:
    """Return the columns of a scaling table after ranks and batch; `trials` are those of the curves."""
    step = _time_unit(trial.step_seconds for trial in trials)
    epoch = _time_unit(trial.epoch_seconds for trial in trials)
    has_p95 = any(_step_seconds_p95(trial) is not None for trial in trials)
    has_plain = any(curve.plain_trial is not None for curve in curves)
    has_masks = any(map(_has_masks, trials))
    return [
        _PointColumn(Column("runs x steps", narrow="runs"), lambda trial, _: Cell(_runs_and_steps(trial))),
        _PointColumn(Column("step", step.sign), lambda trial, _: interval_cell(trial.step_seconds, step.text)),
        _PointColumn(
            Column("p95", step.sign), lambda trial, _: Cell(step.text(_step_seconds_p95(trial))), is_shown=has_p95
        ),
        _PointColumn(Column("epoch", epoch.sign), lambda trial, _: interval_cell(trial.epoch_seconds, epoch.text)),
        _PointColumn(Column("elapsed (epochs)"), lambda trial, _: _elapsed_cell(trial, epoch)),
        _PointColumn(Column("images/s"), lambda trial, _: interval_cell(trial.images_per_second, units.number)),
        _PointColumn(Column("speedup"), speedup_cell),
        _PointColumn(
            Column("efficiency", narrow="eff."), lambda _, point: interval_cell(point.efficiency, units.share)
        ),
        _PointColumn(
            Column("eff. over plain"),
            lambda _, point: interval_cell(point.efficiency_over_plain, units.share),
            is_shown=has_plain,
        ),
        _PointColumn(Column("start-up", "s"), lambda trial, _: Cell(units.number(trial.startup_seconds))),
        _PointColumn(Column("memory"), lambda trial, _: Cell(units.size(trial.peak_bytes))),
        _PointColumn(Column("held-out accuracy"), lambda trial, _: _score_cell(trial, "held_out_accuracy")),
        _PointColumn(Column("mean IoU"), lambda trial, _: _score_cell(trial, "mean_iou"), is_shown=has_masks),
    ]


def _time_unit(intervals: Iterable[Estimate | None]) -> units.Unit:
    return units.time_unit(interval.value for interval in intervals if interval is not None)


def _has_masks(trial: TrialResult) -> bool:
    return trial.trial.model.task == "segmentation"


def _point_row(trial: TrialResult, curve: CurveResult, point: ScalingPoint, figures: Sequence[_PointColumn]) -> Row:
    """Return the row of one point of a curve; a trial without figures has its outcome in place of them."""
    ranks = Cell(sentences.ranks_on_hosts(trial.trial.world))
    batch = Cell(batch_text(trial))
    if not trial.run_figures:
        outcome = Cell(trial.outcome or NOT_RUN_YET, state="failed" if trial.outcome else "missing", spans=len(figures))
        return (ranks, batch, outcome)
    cells = (ranks, batch, *(figure.cell(trial, point) for figure in figures))
    is_baseline = curve.baseline is not None and curve.baseline.gpus == point.gpus
    return tuple(Cell(cell.text, cell.bounds, "baseline") for cell in cells) if is_baseline else cells


def _note_without_baseline(analysis: Analysis, curve: CurveResult) -> str:
    """Return a note on why a curve has no baseline."""
    trials = [analysis.trials[point.trial_id] for point in curve.points]
    if any(trial.drifts for trial in trials):
        return f"{curve.name}: no baseline, for no trial of it has completed without drifting."
    if any(trial.run_figures for trial in trials):
        return f"{curve.name}: no baseline, for no trial of it tells an epoch time or images/s."
    return f"{curve.name}: no baseline, for no trial of it has completed."


def _score_cell(trial: TrialResult, score: str) -> Cell:
    share = getattr(trial.last_epoch, score, None)
    return Cell(units.UNKNOWN if share is None else f"{share:.1%}")


def _step_seconds_p95(trial: TrialResult) -> float | None:
    return trial.median_of(lambda run: run.step_seconds_p95)


def _runs_and_steps(trial: TrialResult) -> str:
    """Return the number of runs and the timed steps of the shortest: "3 x 60"; "3" where only epochs were recorded."""
    steps = min((run.timed_steps for run in trial.run_figures), default=0)
    return f"{len(trial.run_figures)} x {steps}" if steps else str(len(trial.run_figures))


def _elapsed_cell(trial: TrialResult, unit: units.Unit) -> Cell:
    """Return the epoch time from barrier to barrier, and the number of epochs that it is the mean of."""
    if trial.elapsed_epoch_seconds is None:
        return Cell(units.UNKNOWN)
    return Cell(unit.text(trial.elapsed_epoch_seconds.value), str(trial.elapsed_epochs))


def speedup_cell(trial: TrialResult, point: ScalingPoint) -> Cell:
    """Return the speedup; for a trial that drifts its drift instead, because its time is that of other work."""
    if trial.drifts:
        difference = units.relative(trial.drift.difference)
        return Cell("drifts", difference if difference == units.NOT_FINITE else f"{difference} off")
    return interval_cell(point.speedup, units.share)


def interval_cell(interval: Estimate | None, text: Callable[[float], str]) -> Cell:
    """Return a cell with a figure and its interval, or with a dash for None.

    An interval of too few runs, which has a note, is left out.
    """
    if interval is None:
        return Cell(units.UNKNOWN)
    return Cell(text(interval.value), "" if interval.note else interval.bounds(text))


def batch_text(result: TrialResult) -> str:
    """Return the global batch as ranks x micro-batch x accumulation: "64 = 2 x 16 x 2".

    Where ranks have unequal micro-batches, these are added: "48 = (20 + 4) x 2".
    """
    if not result.batch_known:
        return units.UNKNOWN
    train = result.trial.train
    micro_step = f"{result.trial.layout.data} x {train.micro_batch}"
    if train.micro_batches:
        micro_step = in_words(train.micro_batches)
    if train.micro_batches and train.grad_accum > 1:
        micro_step = f"({micro_step})"
    accumulated = f" x {train.grad_accum}" if train.grad_accum > 1 else ""
    return f"{result.trial.global_batch:,} = {micro_step}{accumulated}"


def slow_step_notes(trials: Sequence[TrialResult]) -> list[str]:
    """Return a note on the rule by which slow steps are set aside, how many were, and their largest share of the time.

    No note where no run was searched for slow steps. A trial that lies on several curves counts once.
    """
    distinct_trials = {trial.trial_id: trial for trial in trials}.values()
    searched: list[RunFigures] = []
    for trial in distinct_trials:
        searched += [run for run in trial.run_figures if run.slow_share is not None]
    if not searched:
        return []
    slow_steps = sum(len(run.slow.set_aside) for run in searched)
    timed_steps = sum(run.timed_steps for run in searched)
    rule = (
        f"A step slow on any rank (over {SLOWER_TIMES:g} times the median, and {DEVIATIONS:g} deviations) is set aside "
        f"on all where it is the only one in its trial's runs: {slow_steps} of {slow_steps + timed_steps:,}"
    )
    if not slow_steps:
        return [f"{rule}."]
    largest_share = max(trial.slow_share or 0.0 for trial in distinct_trials)
    return [f"{rule}, up to {units.percent(largest_share)} of the time."]


_FORK_IMPORTS_SECONDS = 0.5
"""Imports of a rank take longer than this unless it is a fork of a process that has imported everything."""


def starts_as_forks(trial: TrialResult) -> bool:
    """Whether a trial's ranks started as forks of a process that had imported everything.

    The local launcher forks where it can, and else starts new processes, whose imports take longer.
    """
    imports = trial.startup.get("imports")
    return started_as_forks(trial.trial) and imports is not None and imports < _FORK_IMPORTS_SECONDS


def start_up_notes(trials: Sequence[TrialResult]) -> list[str]:
    """Return a note that start-ups are those of forks; an empty list where no trial's is."""
    return [f"Start-up is that of {FORKED_RANKS}."] if any(map(starts_as_forks, trials)) else []


def trial_label(analysis: Analysis, result: TrialResult) -> str:
    """Name a trial by its curve, ranks, batch and share of the images: "ddp, 2 ranks, micro-batch 16 x 2"."""
    trial = result.trial
    curve, _ = analysis.curve_of(result.trial_id) or (None, None)
    name = curve.name if curve is not None else engine_label(trial.train.engine)
    fraction = f", {trial.data.fraction:.4g} of the images" if trial.data.fraction < 1 else ""
    return f"{name}, {units.ranks(trial.world.size)}{_batch_label(result, curve)}{fraction}"


def _batch_label(result: TrialResult, curve: CurveResult | None) -> str:
    """Return the batch of a rank as the end of a trial's name: ", micro-batch 16 x 2"; "" where the curve names it."""
    train = result.trial.train
    accumulated = f" x {train.grad_accum}" if train.grad_accum > 1 else ""
    if train.micro_batches:
        return f", micro-batches ({in_words(train.micro_batches)}){accumulated}"
    if not accumulated and curve is not None and "train.micro_batch" in curve.labels:
        return ""
    return f", micro-batch {train.micro_batch if result.batch_known else 'not told'}{accumulated}"


class _ReferenceKey(NamedTuple):
    """The fields that all comparisons of one table have in common."""

    mode: Mode
    varies: str
    """The field in which the compared curves differ."""
    reference: str
    """Name of the curve that the others are compared with."""


def comparison_tables(analysis: Analysis) -> tuple[Table, ...]:
    """Return tables of how many times as fast as a reference curve the other curves train an epoch.

    There is one for each batch policy and each field in which curves differ.
    """
    by_reference: dict[_ReferenceKey, list[AgainstReference]] = {}
    for against in against_references(analysis.curves, analysis.trials, analysis.comparisons):
        key = _ReferenceKey(against.mode, against.varies, against.reference)
        by_reference.setdefault(key, []).append(against)
    return tuple(_comparison_table(key, members) for key, members in by_reference.items())


def _comparison_table(key: _ReferenceKey, members: Sequence[AgainstReference]) -> Table:
    """Return a table with a row for each curve and a column for each rank count.

    The curves are in the order of the comparisons at the most ranks, the fastest first.
    """
    rank_counts = sorted({member.gpus for member in members})
    comparisons_by_curve: dict[str, dict[int, CurveComparison]] = {}
    most_ranks_first = sorted(members, key=lambda member: -member.gpus)
    for member in most_ranks_first:
        for comparison in member.others:
            comparisons_by_curve.setdefault(comparison.first, {})[member.gpus] = comparison
    rows = []
    for curve, comparison_by_ranks in comparisons_by_curve.items():
        cells = [_comparison_cell(comparison_by_ranks.get(count)) for count in rank_counts]
        rows.append((Cell(curve), *cells))
    columns = (Column("curve", words=True), *(Column(units.ranks(count)) for count in rank_counts))
    return Table(columns, (RowGroup("", tuple(rows)),), title=f"{key.mode}: times as fast as {key.reference}")


def _comparison_cell(comparison: CurveComparison | None) -> Cell:
    """Return a ratio of speeds with its verdict and interval: "1.12x", "faster, 1.05-1.20"."""
    if comparison is None:
        return Cell(units.UNKNOWN)
    result = comparison.result
    times = f"{units.share(result.ratio.value)}x"
    if result.ratio.low is None:
        return Cell(times, "one run")
    verdict = _SHORT_VERDICTS.get(result.verdict, result.verdict)
    if result.verdict == "too few repeats to tell":
        return Cell(times, verdict)
    return Cell(times, f"{verdict}, {result.ratio.bounds(units.share)}")


def grouped_table(
    analysis: Analysis,
    title: str,
    columns: Sequence[TrialColumn],
    is_shown: Callable[[TrialResult], object],
    *,
    curves: Sequence[CurveResult] | None = None,
    always: Collection[str] = (),
    notes: Sequence[str] = (),
) -> Table | None:
    """Return a table with a row for each trial, grouped by curve; each row begins with ranks and batch.

    Return None where it would have no row, or no column but ranks and batch.

    Args:
        analysis: the trials.
        title: title of the table.
        columns: the columns. One without a single known cell is left out, unless it is in `always`.
        is_shown: returns a true value for a trial that has a row: usually the record that the table shows.
        curves: curves whose trials are shown; all by default. A trial of several curves has its row under the first.
        always: headings of columns that stay even if nothing is known. A table with any is never folded.
        notes: sentences below the table.
    """
    shown_curves = analysis.curves if curves is None else curves
    rows_by_group = _rows_by_group(analysis, shown_curves, columns, is_shown)
    if not rows_by_group:
        return None
    leading_headings = ("ranks", "batch")
    headings = [*leading_headings, *(heading for heading, _ in columns)]
    is_long = sum(len(rows) for rows in rows_by_group.values()) > _LONGEST_UNFOLDED_TABLE
    grouped = table(
        columns=[Column(heading) for heading in headings],
        rows=rows_by_group,
        title=title,
        notes=notes,
        folded=is_long and not always,
        always=(*leading_headings, *always),
        label="curve",
    )
    has_figures = len(grouped.columns) > len(leading_headings)
    return grouped if has_figures else None


def _rows_by_group(
    analysis: Analysis,
    curves: Sequence[CurveResult],
    columns: Sequence[TrialColumn],
    is_shown: Callable[[TrialResult], object],
) -> dict[str, list[Row]]:
    """Return the label of each curve with a row -> its rows, as `grouped_table` shows them."""
    rows_by_group: dict[str, list[Row]] = {}
    earlier_trials: set[str] = set()
    for number, curve in enumerate(curves, start=1):
        rows: list[Row] = []
        for point in curve.points:
            trial = analysis.trials[point.trial_id]
            if point.trial_id not in earlier_trials and is_shown(trial):
                cells = [cell_of(trial) for _, cell_of in columns]
                rows.append((Cell(f"{point.gpus:,}"), Cell(batch_text(trial)), *cells))
        earlier_trials |= {point.trial_id for point in curve.points}
        if rows:
            name = _group_name(curve, curves)
            label = f"{name} ({number})" if name in rows_by_group else name
            rows_by_group[label] = rows
    return rows_by_group


def _group_name(curve: CurveResult, curves: Sequence[CurveResult]) -> str:
    """Name a curve, with its batch policy where the curves have several."""
    has_several_modes = len({curve.mode for curve in curves}) > 1
    return f"{curve.name} ({curve.mode})" if has_several_modes else curve.name
