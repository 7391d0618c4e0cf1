"""The report's tables: scaling by batch policy, curve against curve, and a row per trial in groups by curve."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from vitscale.analysis import Analysis, CurveComparison, CurveResult, ScalingPoint, by_mode
from vitscale.analysis.comparisons import AgainstReference, against_references
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
_LONG = 16
"""Number of rows beyond which a table is folded."""
_SHORT_VERDICTS = {
    "no significant difference": "no difference",
    "not significant among all comparisons": "no difference among so many",
    "too few repeats to tell": "too few repeats",
}


def mode_tables(analysis: Analysis) -> dict[Mode, Table]:
    """The scaling table of each batch policy, in the order of the study's curves."""
    return {mode: _mode_table(analysis, mode, curves) for mode, curves in by_mode(analysis.curves).items()}


def _mode_table(analysis: Analysis, mode: Mode, curves: Sequence[CurveResult]) -> Table:
    trials = [analysis.trials[point.trial_id] for curve in curves for point in curve.points]

    def unit(figure: Callable[[TrialResult], Estimate | None]) -> units.Unit:
        return units.time_unit(i.value for trial in trials if (i := figure(trial)) is not None)

    step, epoch = unit(lambda trial: trial.step_seconds), unit(lambda trial: trial.epoch_seconds)
    with_masks = any(trial.trial.model.task == "segmentation" for trial in trials)
    figures: list[tuple[Column, Callable[[TrialResult, ScalingPoint], Cell]]] = [
        (Column("runs x steps", narrow="runs"), lambda trial, _: Cell(_runs_and_steps(trial))),
        (Column("step", step.sign), lambda trial, _: interval_cell(trial.step_seconds, step.text)),
        (Column("p95", step.sign), lambda trial, _: Cell(step.text(_p95(trial)))),
        (Column("epoch", epoch.sign), lambda trial, _: interval_cell(trial.epoch_seconds, epoch.text)),
        (Column("elapsed (epochs)"), lambda trial, _: _elapsed_cell(trial, epoch)),
        (Column("images/s"), lambda trial, _: interval_cell(trial.images_per_second, units.number)),
        (Column("speedup"), speedup_cell),
        (Column("efficiency", narrow="eff."), lambda _, point: interval_cell(point.efficiency, units.share)),
        (Column("eff. over plain"), lambda _, point: interval_cell(point.efficiency_over_plain, units.share)),
        (Column("start-up", "s"), lambda trial, _: Cell(units.number(trial.startup_seconds))),
        (Column("memory"), lambda trial, _: Cell(units.size(trial.peak_bytes))),
        (Column("held-out accuracy"), lambda trial, _: _score_cell(trial, "held_out_accuracy")),
        (Column("mean IoU"), lambda trial, _: _score_cell(trial, "mean_iou")),
    ]
    left_out = {
        "p95": all(_p95(trial) is None for trial in trials),
        "eff. over plain": all(curve.plain_trial is None for curve in curves),
        "mean IoU": not with_masks,
    }
    figures = [(column, cell) for column, cell in figures if not left_out.get(column.name)]
    groups = []
    for curve in curves:
        rows: list[Row] = []
        for point in curve.points:
            trial = analysis.trials[point.trial_id]
            first = (Cell(sentences.ranks_on_hosts(trial.trial.world)), Cell(batch_text(trial)))
            if not trial.run_figures:
                outcome = trial.outcome or NOT_RUN_YET
                state = "failed" if trial.outcome else "missing"
                rows.append((*first, Cell(outcome, state=state, spans=len(figures))))  # type: ignore[arg-type]  # the states are those of cells
                continue
            cells = (*first, *(cell(trial, point) for _, cell in figures))
            base = curve.baseline is not None and curve.baseline.gpus == point.gpus
            rows.append(tuple(Cell(c.text, c.bounds, "baseline") for c in cells) if base else cells)
        groups.append(RowGroup(curve.name, tuple(rows)))
    columns = (Column("ranks"), Column("global batch"), *(column for column, _ in figures))
    notes = [note for curve in curves if (note := _without_baseline(analysis, curve))]
    told = "In brackets or small: 95 % intervals over three runs or more; of elapsed epochs how many."
    notes += ["Held-out accuracy of segmentation is that of pixels."] if with_masks else []
    notes += start_up_notes(trials)
    return Table(columns, tuple(groups), (*notes, told, *slow_steps_told(trials)), title=sentences.MODE_TITLES[mode],
                 label="curve")  # fmt: skip


def _without_baseline(analysis: Analysis, curve: CurveResult) -> str:
    """Why a curve has no baseline; empty where it has one."""
    if curve.baseline is not None:
        return ""
    drifts = any(analysis.trials[point.trial_id].drifts for point in curve.points)
    if any(analysis.trials[point.trial_id].run_figures for point in curve.points) and not drifts:
        return f"{curve.name}: no baseline, for no trial of it tells an epoch time or images/s."
    return f"{curve.name}: no baseline, for no trial of it has completed{' without drifting' if drifts else ''}."


def _score_cell(trial: TrialResult, score: str) -> Cell:
    share = getattr(trial.last_epoch, score, None)
    return Cell(units.UNKNOWN if share is None else f"{share:.1%}")


def _p95(trial: TrialResult) -> float | None:
    return trial.median_of(lambda run: run.step_seconds_p95)


def _runs_and_steps(trial: TrialResult) -> str:
    """ "3 x 60": runs, and the timed steps of the shortest; for logs of whole epochs the runs alone."""
    steps = min((run.timed_steps for run in trial.run_figures), default=0)
    return f"{len(trial.run_figures)} x {steps}" if steps else str(len(trial.run_figures))


def _elapsed_cell(trial: TrialResult, unit: units.Unit) -> Cell:
    """The epoch from barrier to barrier, and how many epochs of all runs are behind it."""
    if trial.elapsed_epoch_seconds is None:
        return Cell(units.UNKNOWN)
    return Cell(unit.text(trial.elapsed_epoch_seconds.value), str(trial.elapsed_epochs))


def speedup_cell(trial: TrialResult, point: ScalingPoint) -> Cell:
    """The speedup; for a trial that drifts its drift instead, because its time is that of other work."""
    if trial.drifts:
        off = units.relative(trial.drift.difference)
        return Cell("drifts", off if off == units.NOT_FINITE else f"{off} off")
    return interval_cell(point.speedup, units.share)


def interval_cell(interval: Estimate | None, text: Callable[[float], str]) -> Cell:
    """A figure with its interval, if it has one of enough runs; a dash for the unknown."""
    if interval is None:
        return Cell(units.UNKNOWN)
    return Cell(text(interval.value), "" if interval.note else interval.bounds(text))


def batch_text(result: TrialResult) -> str:
    """ "64 = 2 x 16 x 2": the global batch, as ranks x micro-batch x accumulation; or "48 = (20 + 4) x 2"."""
    if not result.batch_known:
        return units.UNKNOWN
    trial, train = result.trial, result.trial.train
    accumulated = f" x {train.grad_accum}" if train.grad_accum > 1 else ""
    at_once = f"{trial.layout.data} x {train.micro_batch}"
    if train.micro_batches:
        at_once = f"({in_words(train.micro_batches)})" if accumulated else in_words(train.micro_batches)
    return f"{trial.global_batch:,} = {at_once}{accumulated}"


def slow_steps_told(trials: Sequence[TrialResult]) -> list[str]:
    """The rule by which slow steps are set aside, how many were, and their largest share of a trial's time."""
    each = {trial.trial_id: trial for trial in trials}.values()
    runs = [run for trial in each for run in trial.run_figures if run.slow_share is not None]
    if not runs:
        return []
    aside, timed = sum(len(run.slow.set_aside) for run in runs), sum(run.timed_steps for run in runs)
    text = (
        f"A step slow on any rank (over {SLOWER_TIMES:g} times the median, and {DEVIATIONS:g} deviations) is set aside "
        f"on all where it is the only one in its trial's runs: {aside} of {aside + timed:,}"
    )
    share = max((trial.slow_share or 0.0 for trial in each), default=0.0)
    return [f"{text}, up to {units.percent(share)} of the time." if aside else f"{text}."]


_FORK_IMPORTS_SECONDS = 0.5
"""Imports of a rank take longer than this unless it is a fork of a process that has imported everything."""


def starts_as_forks(trial: TrialResult) -> bool:
    """Whether its start-up was measured of forks: the local launcher starts new processes where it cannot fork."""
    imports = trial.startup.get("imports")
    return started_as_forks(trial.trial) and imports is not None and imports < _FORK_IMPORTS_SECONDS


def start_up_notes(trials: Sequence[TrialResult]) -> list[str]:
    """A note on start-ups that are those of forks; none where there are none."""
    return [f"Start-up is that of {FORKED_RANKS}."] if any(map(starts_as_forks, trials)) else []


def trial_label(analysis: Analysis, result: TrialResult) -> str:
    """A trial in a few words: its curve, ranks and batch."""
    trial = result.trial
    curve, _ = analysis.curve_of(result.trial_id) or (None, None)
    batch = f", micro-batch {trial.train.micro_batch if result.batch_known else 'not told'}"
    if trial.train.micro_batches:
        batch = f", micro-batches ({in_words(trial.train.micro_batches)})"
    if trial.train.grad_accum > 1:
        batch += f" x {trial.train.grad_accum}"
    elif curve and not trial.train.micro_batches and "train.micro_batch" in curve.labels:
        batch = ""  # the curve's name has it
    fraction = f", {trial.data.fraction:.4g} of the images" if trial.data.fraction < 1 else ""
    return (
        f"{curve.name if curve else engine_label(trial.train.engine)}, {units.ranks(trial.world.size)}{batch}{fraction}"
    )


def comparison_tables(analysis: Analysis) -> tuple[Table, ...]:
    """How many times as fast as one reference each curve trains an epoch: a table per batch policy and what varies."""
    by_reference: dict[tuple[Mode, str, str], list[AgainstReference]] = {}
    for line in against_references(analysis.curves, analysis.trials, analysis.comparisons):
        by_reference.setdefault((line.mode, line.varies, line.reference), []).append(line)
    return tuple(_comparison_table(mode, reference, members) for (mode, _, reference), members in by_reference.items())


def _comparison_table(mode: Mode, reference: str, members: list[AgainstReference]) -> Table:
    counts = sorted({member.gpus for member in members})
    by_curve: dict[str, dict[int, CurveComparison]] = {}
    for member in sorted(members, key=lambda against: -against.gpus):  # the fastest at the most ranks first
        for other in member.others:
            by_curve.setdefault(other.first, {})[member.gpus] = other
    rows = tuple(
        (Cell(curve), *(_comparison_cell(at.get(count)) for count in counts)) for curve, at in by_curve.items()
    )
    columns = (Column("curve", words=True), *(Column(units.ranks(count)) for count in counts))
    return Table(columns, (RowGroup("", rows),), title=f"{mode}: times as fast as {reference}")


def _comparison_cell(comparison: CurveComparison | None) -> Cell:
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
    wanted: Callable[[TrialResult], object],
    *,
    curves: Sequence[CurveResult] | None = None,
    always: Collection[str] = (),
    notes: Sequence[str] = (),
) -> Table | None:
    """One row per wanted trial, ranks and batch first, grouped by curve; None where no trial is wanted.

    Args:
        analysis: the trials.
        title: what the table tells.
        columns: columns; those without a single known cell are left out, unless they are in `always`.
        wanted: whether a trial is in the table, or what of it the table shows: None leaves it out.
        curves: curves whose trials are shown, all by default; a trial that lies on several stands with the first.
        always: headings that stay even if nothing is known; a table with any is never folded.
        notes: what a reader must know, shown below the table.
    """
    curves = analysis.curves if curves is None else curves
    several_modes = len({curve.mode for curve in curves}) > 1
    rows: dict[str, list[Row]] = {}
    seen: set[str] = set()
    for index, curve in enumerate(curves):
        trials = [(point.gpus, analysis.trials[point.trial_id]) for point in curve.points if point.trial_id not in seen]
        own = [
            (Cell(f"{gpus:,}"), Cell(batch_text(trial)), *(cell(trial) for _, cell in columns))
            for gpus, trial in trials
            if wanted(trial)
        ]
        seen |= {trial.trial_id for _, trial in trials}
        if own:
            name = f"{curve.name} ({curve.mode})" if several_modes else curve.name
            rows[name if name not in rows else f"{name} ({index + 1})"] = own
    if not rows:
        return None
    first = ("ranks", "batch")
    named = [*map(Column, (*first, *(heading for heading, _ in columns)))]
    folded = not always and sum(map(len, rows.values())) > _LONG
    made = table(named, rows, title=title, notes=notes, folded=folded, always=(*first, *always), label="curve")
    return made if len(made.columns) > len(first) else None
