"""The scaling tables, one per batch policy, as text: what Markdown, the terminal and the page lay out alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vitscale.analysis import Analysis, CurveResult, Interval, Point
from vitscale.analysis.runs.steps import DEVIATIONS, ONE_IN, SLOWER_TIMES
from vitscale.analysis.summaries import NOT_RUN_YET
from vitscale.analysis.trials import TrialResult
from vitscale.report import words
from vitscale.report.words import UNKNOWN, number
from vitscale.trial.rank_batches import in_words
from vitscale.trial.trial import Mode


@dataclass(frozen=True)
class Cell:
    """A figure as text, and its interval as text or nothing."""

    text: str
    bounds: str = ""

    def __str__(self) -> str:
        return f"{self.text} ({self.bounds})" if self.bounds else self.text


@dataclass(frozen=True)
class Row:
    """One trial on a curve."""

    curve: str
    curve_place: int
    """Which curve of the table: names are for readers, and need not differ."""
    gpus: int
    trial_id: str
    outcome: str
    """Empty where it completed."""
    is_baseline: bool
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class ModeTable:
    """All curves of one batch policy."""

    mode: Mode
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    baselines: tuple[str, ...]
    """Sentences with each curve's baseline in absolute terms; the last one says what slow steps were set aside."""


def mode_tables(analysis: Analysis) -> tuple[ModeTable, ...]:
    """The tables of a study, in the order of its curves."""
    modes = dict.fromkeys(curve.mode for curve in analysis.curves)
    return tuple(_mode_table(analysis, mode) for mode in modes)


def _mode_table(analysis: Analysis, mode: Mode) -> ModeTable:
    curves = [curve for curve in analysis.curves if curve.mode == mode]
    trials = [analysis.trials[point.trial_id] for curve in curves for point in curve.points]

    def unit(figure: Callable[[TrialResult], Interval | None]) -> words.Unit:
        return words.time_unit(i.centre for trial in trials if (i := figure(trial)) is not None)

    step, epoch = unit(lambda trial: trial.step_seconds), unit(lambda trial: trial.epoch_seconds)
    with_plain = any(curve.plain_trial is not None for curve in curves)
    with_tails = any(_p95(trial) is not None for trial in trials)
    columns = [
        "ranks", "global batch", "runs x steps", f"step ({step.sign})", *(["p95"] if with_tails else []),
        f"epoch ({epoch.sign})", "elapsed (epochs)", "images/s", "speedup", "efficiency",
        *(["eff. over plain"] if with_plain else []), "start-up (s)", "memory", "held-out accuracy",
    ]  # fmt: skip
    rows = []
    for place, curve in enumerate(curves):
        for point in curve.points:
            trial = analysis.trials[point.trial_id]
            accuracy = trial.epochs[-1].held_out_accuracy if trial.epochs else None
            cells = [
                Cell(words.ranks_on_hosts(trial.trial.world)),
                Cell(batch_text(trial)),
                Cell(_runs_and_steps(trial)),
                _time_cell(trial.step_seconds, step),
                *([Cell(number(_times(_p95(trial), step)))] if with_tails else []),
                _time_cell(trial.epoch_seconds, epoch),
                _elapsed_cell(trial, epoch),
                interval_cell(trial.images_per_second, number),
                _speedup_cell(trial, point),
                interval_cell(point.efficiency, words.share),
                *([interval_cell(point.efficiency_over_plain, words.share)] if with_plain else []),
                Cell(number(trial.startup_seconds)),
                Cell(words.bytes_text(trial.peak_bytes)),
                Cell(UNKNOWN if accuracy is None else f"{accuracy:.1%}"),
            ]
            outcome = "" if trial.outcome == "completed" else trial.outcome or NOT_RUN_YET
            base = curve.baseline is not None and curve.baseline.gpus == point.gpus
            rows.append(Row(curve.name, place, point.gpus, point.trial_id, outcome, base, tuple(cells)))
    sentences = [*(_baseline(analysis, curve) for curve in curves), *slow_steps_told(trials)]
    return ModeTable(mode, tuple(columns), tuple(rows), tuple(sentences))


def _time_cell(interval: Interval | None, unit: words.Unit) -> Cell:
    return interval_cell(interval.times(unit.per_second) if interval else None, number)


def _times(seconds: float | None, unit: words.Unit) -> float | None:
    return None if seconds is None else seconds * unit.per_second


def _p95(trial: TrialResult) -> float | None:
    return trial.median_of(lambda run: run.step_seconds_p95)


def _runs_and_steps(trial: TrialResult) -> str:
    """ "3 x 60": runs, and the timed steps of the shortest; of logs of whole epochs the runs alone."""
    steps = min((run.timed_steps for run in trial.runs), default=0)
    return f"{len(trial.runs)} x {steps}" if steps else str(len(trial.runs))


def _elapsed_cell(trial: TrialResult, unit: words.Unit) -> Cell:
    """The epoch from barrier to barrier, and how many epochs of all runs are behind it."""
    if trial.elapsed_epoch_seconds is None:
        return Cell(UNKNOWN)
    return Cell(number(trial.elapsed_epoch_seconds.centre * unit.per_second), str(trial.elapsed_epochs))


def _speedup_cell(trial: TrialResult, point: Point) -> Cell:
    """Of a trial that drifts what it does instead: its time is that of other work."""
    if trial.drifts:
        off = words.relative(trial.drift.difference)
        return Cell("drifts", off if off == words.NOT_FINITE else f"{off} off")
    return interval_cell(point.speedup, words.share)


def interval_cell(interval: Interval | None, text: Callable[[float], str]) -> Cell:
    """A figure with its interval, if it has one; a dash for the unknown."""
    if interval is None:
        return Cell(UNKNOWN)
    if interval.low is None or interval.high is None or interval.low == interval.high:
        return Cell(text(interval.centre))
    return Cell(text(interval.centre), f"{text(interval.low)}{words.DASH}{text(interval.high)}")


def batch_text(result: TrialResult) -> str:
    """ "64 = 2 x 16 x 2": the global batch, as ranks x micro-batch x accumulation; or "48 = (20 + 4) x 2"."""
    trial, train = result.trial, result.trial.train
    accumulated = f" x {train.grad_accum}" if train.grad_accum > 1 else ""
    at_once = f"{trial.world.size} x {train.micro_batch}"
    if train.micro_batches:
        at_once = f"({in_words(train.micro_batches)})" if accumulated else in_words(train.micro_batches)
    return f"{trial.global_batch:,} = {at_once}{accumulated}"


def _baseline(analysis: Analysis, curve: CurveResult) -> str:
    base: Point | None = curve.baseline
    if base is None:
        drifts = any(analysis.trials[point.trial_id].drifts for point in curve.points)
        if any(analysis.trials[point.trial_id].runs for point in curve.points) and not drifts:
            return f"{curve.name}: no baseline, for no trial of it tells an epoch time."
        return f"{curve.name}: no baseline, for no trial of it has completed{' without drifting' if drifts else ''}."
    trial = analysis.trials[base.trial_id]
    epoch = trial.epoch_seconds
    seconds = words.seconds(epoch.centre if epoch else None)
    text = f"{curve.name}: the baseline is {words.ranks(base.gpus)}, {seconds} an epoch"
    if epoch and epoch.low is not None:
        text += f" (95 % interval {words.seconds(epoch.low)} to {words.seconds(epoch.high)})"
    text += ", from whole epochs" if trial.epoch_seconds_source == "epochs" else ""
    plain = analysis.trials[curve.plain_trial].epoch_seconds if curve.plain_trial else None
    if plain and curve.plain_trial != base.trial_id:
        text += f"; without a distributed wrapper {words.seconds(plain.centre)}"
    return text + "."


def slow_steps_told(trials: Sequence[TrialResult]) -> list[str]:
    """The rule by which slow steps are set aside, how many were, and their largest share of a trial's time."""
    each = {trial.trial_id: trial for trial in trials}.values()
    runs = [run for trial in each for run in trial.runs if run.slow_share is not None]
    if not runs:
        return []
    aside, timed = sum(len(run.slow.set_aside) for run in runs), sum(run.timed_steps for run in runs)
    text = (
        f"A step slow on any rank (over {SLOWER_TIMES:g} times the median, and {DEVIATIONS:g} deviations) is set aside "
        f"on all, at most one in {ONE_IN}: {aside} of {aside + timed:,}"
    )
    share, most = max(((trial.slow_share or 0.0, trial.trial_id) for trial in each), default=(0.0, ""))
    return [f"{text}, up to {words.percent(share)} of the time ({most})." if aside else f"{text}."]


def failure_lines(analysis: Analysis) -> list[str]:
    """One line for each trial that has a run that did not complete, or no run."""
    return [
        f"{trial_title(analysis, trial)}: {trial.outcome or 'unfinished'}: {trial.reason}"
        for trial in analysis.trials.values()
        if trial.outcome != "completed" or trial.failures
    ]


def trial_label(analysis: Analysis, result: TrialResult) -> str:
    """A trial in a few words: its curve, ranks and batch."""
    trial = result.trial
    curve, _ = analysis.curve_of(result.trial_id) or (None, None)
    batch = f"micro-batch {trial.train.micro_batch}"
    if trial.train.micro_batches:
        batch = f"micro-batches ({in_words(trial.train.micro_batches)})"
    batch += f" x {trial.train.grad_accum}" if trial.train.grad_accum > 1 else ""
    fraction = f", {trial.data.fraction:.4g} of the images" if trial.data.fraction < 1 else ""
    return f"{curve.name if curve else trial.train.engine}, {words.ranks(trial.world.size)}, {batch}{fraction}"


def trial_title(analysis: Analysis, result: TrialResult) -> str:
    """A trial in a few words, with its identity."""
    return f"{trial_label(analysis, result)} ({result.trial_id})"
