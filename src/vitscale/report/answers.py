"""What a reader asks, in this order: how it scales, what to choose, why not better, what next, whether to trust it. And
the short form of it all, in which `run` and `report` end on a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from vitscale.advice import sentences as advised
from vitscale.advice.option import Option
from vitscale.advice.pipeline import Advice
from vitscale.analysis import Analysis, Factor, TrialResult
from vitscale.analysis.summaries import NOT_RUN_YET
from vitscale.present import units
from vitscale.present.document import (
    Block,
    Bullets,
    Cell,
    Code,
    Column,
    Document,
    Figure,
    Group,
    Paragraph,
    Row,
    Section,
    Table,
    most_severe_first,
)
from vitscale.present.units import counted
from vitscale.report import sentences
from vitscale.report.charts.time import largest_loss
from vitscale.report.tables import interval_cell, mode_tables, speedup_cell, trial_label

_MOST_SERIES = 5
_ENOUGH_RUNS = 3


def how_it_scales(analysis: Analysis, figure: Figure | None) -> Section:
    """A sentence for each series, five at most, best first; of fewer than three runs in no order."""
    told = [
        (curve, point.efficiency, text)
        for curve in analysis.curves
        if (text := sentences.curve_sentence(analysis, curve))
        for point in [[point for point in curve.points if point.efficiency][-1]]
    ]
    sure = [(curve, reached, text) for curve, reached, text in told if reached and not reached.note and reached.low]
    ordered = sorted(sure, key=lambda each: -each[1].value) + [each for each in told if each not in sure]
    lines = [text for _, _, text in ordered]
    if not sure and (fastest := best_measured(analysis)) is not None:
        runs = counted(len(fastest.runs), "run")
        lines.insert(0, f"Fastest measured, {runs}: {in_short(analysis, fastest)}. Too few to say who is ahead.")
    if not lines:
        lines = ["No curve has two measured rank counts yet, so nothing can be said about scaling."]
    more = len(lines) - _MOST_SERIES
    blocks = [Bullets((*lines[:_MOST_SERIES], *([f"+{more} more, in Every configuration"] if more > 0 else [])))]
    return Section("How does it scale?", (*blocks, *([figure] if figure else [])))


def best_measured(analysis: Analysis) -> TrialResult | None:
    """The trial with the shortest epoch, of those that train all images that any of them does; None of none."""
    known = [trial for trial in analysis.trials.values() if trial.epoch_seconds is not None and not trial.drifts]
    most = max((trial.trial.data.fraction for trial in known), default=0.0)
    whole = [trial for trial in known if trial.trial.data.fraction == most]
    return min(whole, key=_epoch_seconds, default=None)


def _epoch_seconds(trial: TrialResult) -> float:
    return trial.epoch_seconds.value if trial.epoch_seconds else float("inf")


def _gpu_hours(trial: TrialResult) -> float:
    return _epoch_seconds(trial) * trial.trial.world.size / 3600


def in_short(analysis: Analysis, trial: TrialResult) -> str:
    """ "ddp, 2 ranks, micro-batch 32: 3.25 s an epoch"."""
    epoch = trial.epoch_seconds
    within = ""
    if epoch and epoch.low is not None and epoch.high is not None and not epoch.note:
        within = f" ({units.seconds(epoch.low)} to {units.seconds(epoch.high)})"
    return f"{trial_label(analysis, trial)}: {units.seconds(epoch.value if epoch else None)} an epoch{within}"


def what_to_choose(analysis: Analysis) -> Section:
    """The best measured configuration, and the cheapest where that is another."""
    fastest = best_measured(analysis)
    if fastest is None:
        completed = any(trial.runs for trial in analysis.trials.values())
        why = "no trial tells an epoch time" if completed else "no trial has completed"
        return Section("What would I choose?", (Paragraph(f"Nothing: {why}."),))
    alike = [
        trial
        for trial in analysis.trials.values()
        if trial.epoch_seconds and not trial.drifts and trial.trial.data.fraction == fastest.trial.data.fraction
    ]
    cheapest = min(alike, key=_gpu_hours)
    batch = f"global batch {fastest.trial.global_batch:,}, " if fastest.batch_known else ""
    runs = counted(len(fastest.runs), "run")
    lines = [f"Fastest measured: {in_short(analysis, fastest)} ({batch}{runs})."]
    if cheapest is not fastest:
        hours = units.number(_gpu_hours(cheapest))
        lines.append(f"Cheapest measured: {in_short(analysis, cheapest)}, {hours} GPU-hours.")
    return Section("What would I choose?", (Bullets(tuple(lines)),))


def why_not_better(analysis: Analysis, figure: Figure | None) -> Section:
    """The largest loss and the waterfall of its trial, or why no efficiency could be taken apart."""
    worst = largest_loss(analysis.waterfalls)
    if worst is None or figure is None:
        told = sentences.unexplained(analysis) or _losses(analysis)
        return Section("Why not better?", (Bullets(told),))
    return Section("Why not better?", (Paragraph(sentences.largest_loss(worst), "strong"), figure))


def _losses(analysis: Analysis) -> tuple[str, ...]:
    """What of a step computes nothing, where no baseline makes it an efficiency: in the trials that lose most."""
    lost = []
    for trial in analysis.trials.values():
        if trial.breakdown is not None and (typical := trial.breakdown.typical).seconds > 0:
            parts = {"exposed communication": typical.exposed_seconds} | {
                words: typical.parts[part]
                for part, words in (("data_wait", "waiting for data"), ("launch_gaps", "an idle device"))
            }
            shares = {words: seconds / typical.seconds for words, seconds in parts.items() if seconds}
            told = [f"{units.percent(share)} of a step is {words}" for words, share in shares.items() if share >= 0.01]
            lost.append((sum(shares.values()), f"{trial_label(analysis, trial)}: {', '.join(told)}.", bool(told)))
    lines = [line for _, line, told in sorted(lost, reverse=True) if told][:_MOST_SERIES]
    return tuple(lines) or ("No trial on more ranks than its baseline has completed.",)


def what_next(analysis: Analysis, advice: Advice | None, results: Path | None) -> Section:
    """The advice in one line, with the command; too few runs come first."""
    lines, commands = [], []
    few = [trial for trial in analysis.trials.values() if trial.runs and len(trial.runs) < _ENOUGH_RUNS]
    if few:
        more = "set repeats = 3" if all(trial.trial.origin is None for trial in few) else "import 3 of each together"
        lines.append(f"{counted(len(few), 'trial')} of {len(analysis.trials)} with fewer than 3 runs: {more}.")
    if advice is not None and (option := advice.chosen) is not None:
        lines.append(
            f"Fastest for {counted(advice.work.epochs, 'epoch')} with start-up: {advised.in_short(option)}: "
            f"{advised.time(option.seconds)}, {option.label}.{_other_batch(analysis, advice, option)}"
        )
    where = str(results) if results is not None else "RESULTS"
    if advice is not None:
        commands.append(f"vitscale advise {where} --deadline 1h")
    warned = [verdict for verdict in analysis.findings if verdict.severity == "warning" and verdict.advice]
    if not lines and warned:
        lines.append(warned[0].advice)
    if not lines:
        lines.append("Nothing more to measure for what was asked.")
    return Section("What next?", (Bullets(tuple(lines)), *([Code(tuple(commands))] if commands else [])))


def _other_batch(analysis: Analysis, advice: Advice, option: Option) -> str:
    """Why advice trains with another global batch than the fastest measured trial; empty where it does not."""
    fastest = best_measured(analysis)
    if fastest is None or not fastest.batch_known or fastest.trial.global_batch == option.global_batch:
        return ""
    batch = fastest.trial.global_batch
    told = f" The fastest measured has a global batch of {batch:,}"
    if batch > option.global_batch and advice.large_batch is not None:
        steps = counted(max(1, advice.work.images // batch), "step")
        return f"{told}: only {steps} an epoch (--large-batch allows it)."
    return f"{told} (--any-batch allows it)." if advice.other_batch is not None else f"{told}."


def can_it_be_trusted(analysis: Analysis) -> Section:
    """One line; warnings and notes folded under it."""
    found = most_severe_first(analysis.findings)
    warnings = sum(finding.severity == "warning" for finding in found)
    runs = [len(trial.runs) for trial in analysis.trials.values() if trial.runs]
    few = f"intervals need 3 runs of a trial, the fewest here are {min(runs)}" if runs and min(runs) < 3 else ""
    line = "; ".join(filter(None, (
        f"{counted(warnings, 'warning')}, {counted(len(found) - warnings, 'note')}" if found else "No warning", few,
    )))  # fmt: skip
    blocks = [Paragraph(f"{line}.")]
    if found:
        blocks.append(Section(f"{counted(len(found), 'finding')}", found, folded=True))  # type: ignore[arg-type]  # findings are blocks
    return Section("Can I trust it?", tuple(blocks))


def counts(analysis: Analysis) -> str:
    """ "20 of 23 trials completed, 2 did not complete, 1 not run yet, 46 runs"."""
    trials = list(analysis.trials.values())
    completed = sum(1 for trial in trials if trial.outcome == "completed")
    waiting = sum(1 for trial in trials if trial.outcome is None)
    parts = [f"{completed} of {units.counted(len(trials), 'trial')} completed"]
    if failed := len(trials) - completed - waiting:
        parts.append(f"{failed} did not complete")
    if waiting:
        parts.append(f"{waiting} {NOT_RUN_YET}")
    return ", ".join([*parts, units.counted(sum(trial.runs_done for trial in trials), "run")])


def engine_sentences(analysis: Analysis) -> tuple[str, ...]:
    """Who is faster, at the most ranks that were compared, a sentence for each comparison."""
    return tuple(sentences.against(analysis, one) for one in sentences.largest_comparisons(analysis))


def bullets(texts: Iterable[str]) -> Bullets | None:
    """Those that say something; None where none does."""
    known = tuple(text for text in texts if text)
    return Bullets(known) if known else None


def terminal_document(analysis: Analysis, last: Sequence[str] = ()) -> Document:
    """What `run` and `report` end in: one table, engine against engine, warnings; the rest is folded.

    Args:
        analysis: the results.
        last: where the report is, and other lines to end with.
    """
    failed = [
        f"{trial_label(analysis, trial)}: {trial.outcome}: {trial.reason}"
        for trial in analysis.trials.values()
        if trial.outcome not in ("completed", None)
    ]
    warnings = [finding for finding in analysis.findings if finding.severity == "warning"]
    notes = [finding for finding in analysis.findings if finding.severity != "warning"]
    blocks: list[Block | None] = [
        summary_table(analysis),
        Bullets(tuple(failed), "bad") if failed else None,
        bullets((*engine_sentences(analysis), *(f"warning: {finding.message}." for finding in warnings))),
        Section("each configuration", tuple(mode_tables(analysis).values()), folded=True),
        Section("what else to know", tuple(notes), folded=True) if notes else None,
    ]
    return Document("", tuple(block for block in blocks if block is not None), last=tuple(last))


def summary_table(analysis: Analysis) -> Table:
    """A row per curve under each policy, at its most ranks: epoch, speedup, efficiency and the largest loss.

    Curves of one rank count are left out where others have more: the table of each configuration has them.
    """
    epochs = units.time_unit(trial.epoch_seconds.value for trial in analysis.trials.values() if trial.epoch_seconds)
    losses = {(one.curve, one.mode, one.trial_id): one for one in analysis.waterfalls if one.factors}
    measured = {
        place: [point for point in curve.points if analysis.trials[point.trial_id].runs]
        for place, curve in enumerate(analysis.curves)
    }
    several = any(len(points) > 1 for points in measured.values())
    groups: dict[str, list[Row]] = {}
    for place, curve in enumerate(analysis.curves):
        points = measured[place]
        if not points or (several and len(points) < 2):
            continue
        last = points[-1]
        trial = analysis.trials[last.trial_id]
        loss = losses.get((curve.name, curve.mode, last.trial_id))
        epoch = trial.epoch_seconds.times(epochs.factor) if trial.epoch_seconds else None
        cells = [Cell(curve.name), Cell(f"{last.gpus:,}"), Cell(f"{len(trial.runs)}")]
        cells.append(interval_cell(epoch, units.number))
        unknown = Cell(units.UNKNOWN)
        cells.append(unknown if len(points) < 2 else speedup_cell(trial, last))
        # Its interval is the speedup's own over the ranks: there is room for one.
        cells.append(
            unknown if len(points) < 2 else Cell(units.share(last.efficiency.value if last.efficiency else None))
        )
        cells.append(Cell(_loss(loss.factors) if loss else units.UNKNOWN))
        groups.setdefault(curve.mode, []).append(tuple(cells))
    columns = (
        Column("curve", words=True), Column("ranks"), Column("runs"), Column("epoch", epochs.sign), Column("speedup"),
        Column("efficiency", narrow="eff."), Column("largest loss", words=True),
    )  # fmt: skip
    return Table(
        columns,
        tuple(Group(mode, tuple(rows)) for mode, rows in groups.items()),
        title=counts(analysis),
        label="policy",
    )


def _loss(factors: Sequence[Factor]) -> str:
    worst = max(factors, key=lambda factor: factor.points)
    return f"{100 * worst.points:.0f} % {worst.name}" if worst.points >= 0.01 else units.UNKNOWN
