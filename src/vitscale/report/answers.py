"""Answers to a reader's questions, in this order: how it scales, what to choose, why not better, what next, whether to
trust it. And their short form, with which `run` and `report` end on a terminal."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

from vitscale.advice import sentences as advised
from vitscale.advice.pipeline import Advice
from vitscale.advice.printing import starts_as_forks
from vitscale.advice.request import Option
from vitscale.analysis import Analysis, TrialResult, Waterfall
from vitscale.analysis.quality.steadiness import steady_first
from vitscale.analysis.summaries import NOT_RUN_YET
from vitscale.prediction.start_up import OF_FORKS
from vitscale.present import document as doc
from vitscale.present import units
from vitscale.report import sentences
from vitscale.report.charts.time import PART_NAMES, largest_loss, of_trial, parts_of
from vitscale.report.tables import interval_cell, mode_tables, speedup_cell, trial_label
from vitscale.store.reading import RUNS_LEFT_OUT

_MOST_SERIES = 5
_ENOUGH_RUNS = 3
_MOST_PROBLEMS = 3
_MUCH_IDLE = 0.1
"""Share of the baseline's step in which nothing is computed, from which its efficiency of 1 is not left unsaid."""


def how_it_scales(analysis: Analysis, figure: doc.Figure | None) -> doc.Section:
    """A sentence for each series, five at most: the best first, then those of too few runs in no order."""
    told = [
        ([point.efficiency for point in curve.points if point.efficiency][-1], text)
        for curve in analysis.curves
        if (text := sentences.curve_sentence(analysis, curve))
    ]
    sure = [each for each in told if each[0].low and not each[0].note]
    ordered = sorted(sure, key=lambda each: -each[0].value) + [each for each in told if each not in sure]
    lines = [text for _, text in ordered]
    if not sure and (fastest := best_measured(analysis)) is not None:
        runs = [len(trial.runs) for trial in analysis.trials.values() if trial.runs]
        unsure = " Too few to say who is ahead." if len(runs) > 1 and min(runs) < _ENOUGH_RUNS else ""
        lines.insert(
            0, f"Fastest measured, {units.counted(len(fastest.runs), 'run')}: {in_short(analysis, fastest)}{unsure}"
        )
    if not told:
        lines.append(
            "Speedups are unknown: no two rank counts of a curve may be compared."
            if _several_counts(analysis)
            else "No curve has two measured rank counts, so nothing can be said about scaling."
        )
    more = len(lines) - _MOST_SERIES
    blocks = [doc.Bullets((*lines[:_MOST_SERIES], *([f"+{more} more, in Every configuration"] if more > 0 else [])))]
    shown = _steps_table(analysis, "What a step goes into") or figure
    return doc.Section("How does it scale?", (*blocks, *([shown] if shown else [])))


def _several_counts(analysis: Analysis) -> bool:
    """Whether a curve has runs of two rank counts or more, comparable or not."""
    return any(
        sum(bool(analysis.trials[point.trial_id].runs) for point in curve.points) > 1 for curve in analysis.curves
    )


def best_measured(analysis: Analysis) -> TrialResult | None:
    """The trial that is fastest for all images, of those that train the largest share of them; None without any. Where
    no trial tells an epoch, it is the one of most images/s."""
    told = [trial for trial in analysis.trials.values() if trial.comparable_costs]
    known = [trial for trial in told if not trial.of_rates] or told
    most = max((trial.trial.data.fraction for trial in known), default=0.0)
    whole = [trial for trial in known if trial.trial.data.fraction == most]
    return min(whole, key=_epoch_seconds, default=None)


def _epoch_seconds(trial: TrialResult) -> float:
    """Seconds for all images, those that `drop_last` leaves out too: comparisons and speedups are of these. For one
    image where no run tells an epoch."""
    if trial.of_rates and trial.images_per_second:
        return 1 / trial.images_per_second.value
    return trial.epoch_seconds.value / (1 - trial.images_left_out) if trial.epoch_seconds else float("inf")


def _for_all_images(trial: TrialResult) -> tuple[str, ...]:
    """ "1.28 s with the images that it leaves out", where that is another time than the epoch's."""
    of_all = units.seconds(_epoch_seconds(trial))
    differs = trial.epoch_seconds is not None and of_all != units.seconds(trial.epoch_seconds.value)
    return (f"{of_all} with the images that it leaves out",) if differs else ()


def _gpu_hours(trial: TrialResult) -> float:
    return _epoch_seconds(trial) * trial.trial.world.size / 3600


def in_short(analysis: Analysis, trial: TrialResult, *more: str) -> str:
    """ "ddp, 2 ranks, micro-batch 32: 3.25 s an epoch (3.12 s to 3.39 s, 3 runs).", `more` in the brackets."""
    figure, text = (trial.images_per_second, units.number) if trial.of_rates else (trial.epoch_seconds, units.seconds)
    more = (*_for_all_images(trial), *more)
    if figure and figure.low is not None and figure.high is not None and not figure.note:
        more = (f"{text(figure.low)} to {text(figure.high)}", *more)
    told = f" ({', '.join(more)})" if more else ""
    return f"{trial_label(analysis, trial)}: {_pace(trial)}{told}."


def _pace(trial: TrialResult) -> str:
    """ "3.25 s an epoch", or "5,800 images/s" where no run tells an epoch."""
    if trial.of_rates and trial.images_per_second:
        return f"{units.number(trial.images_per_second.value)} images/s"
    seconds = units.seconds(trial.epoch_seconds.value if trial.epoch_seconds else None)
    return f"{seconds} {'a run' if trial.timed_as_a_whole else 'an epoch'}"


def what_to_choose(analysis: Analysis) -> doc.Section:
    """The best measured configuration, and the cheapest where that is another."""
    fastest = best_measured(analysis)
    if fastest is None:
        completed = any(trial.runs for trial in analysis.trials.values())
        why = "no trial tells an epoch time or images/s" if completed else "no trial has completed"
        return doc.Section("What would I choose?", (doc.Paragraph(f"Nothing: {why}."),))
    alike = [
        trial
        for trial in analysis.trials.values()
        if trial.epoch_seconds and not trial.drifts and trial.trial.data.fraction == fastest.trial.data.fraction
    ]
    cheapest = min(alike, key=_gpu_hours, default=fastest)
    batch = [f"global batch {fastest.trial.global_batch:,}"] if fastest.batch_known else []
    runs = units.counted(len(fastest.runs), "run")
    lines = [f"Fastest measured: {in_short(analysis, fastest, *batch, runs)}"]
    if cheapest is not fastest:
        hours = f"{units.number(_gpu_hours(cheapest))} GPU-hours"
        lines.append(f"Cheapest measured: {in_short(analysis, cheapest, hours)}")
    return doc.Section("What would I choose?", (doc.Bullets(tuple(lines)),))


def why_not_better(analysis: Analysis, figure: doc.Figure | None) -> doc.Section:
    """What the best measured trial loses, with its waterfall, and the largest loss; or why these are unknown."""
    best = best_measured(analysis)
    worst = largest_loss(analysis.waterfalls)
    if worst is None or figure is None:
        return doc.Section("Why not better?", (doc.Bullets(sentences.unexplained(analysis) or _losses(analysis)),))
    front = (of_trial(analysis.waterfalls, best.trial_id) if best else None) or worst
    told = [doc.Paragraph(sentences.largest_loss(front), "strong")]
    if front is not worst:
        told.append(doc.Paragraph(f"Largest loss at the most ranks: {sentences.largest_loss(worst)}"))
    idle, line = _idle(analysis, analysis.trials.get(front.baseline_trial or ""))
    if idle >= _MUCH_IDLE and idle > max(factor.points for factor in front.factors):
        told.insert(0, doc.Paragraph(f"Most is lost on the baseline already: {line}", "strong"))
    return doc.Section("Why not better?", (*told, figure))


def _losses(analysis: Analysis) -> tuple[str, ...]:
    """What steps lose where no baseline gives an efficiency: of the trials that lose most, the most first."""
    lost = sorted((_idle(analysis, trial) for trial in analysis.trials.values()), reverse=True)
    unknown = "No trial on more ranks than its baseline has completed."
    if _several_counts(analysis) and not any(curve.baseline for curve in analysis.curves):
        unknown = "No curve has a baseline, so what is lost is unknown."
    return tuple(line for _, line in lost[:_MOST_SERIES] if line) or (unknown,)


_IDLE = {
    "data_wait": "waiting for data",
    "bubble": "waiting for the stages of other ranks",
    "wait": "waiting for the slowest rank",
    "wire": "the transfer",
    "norm": "the exchange of synchronised norms",
    "communication": "exposed communication",
    "launch_gaps": "launch gaps (an idle device)",
}
"""Parts of a step in which nothing is computed, in words."""


def _idle(analysis: Analysis, trial: TrialResult | None) -> tuple[float, str]:
    """The share of a step in which nothing is computed, and its parts of 1 % and more in words; empty without any."""
    if trial is None or trial.breakdown is None or trial.breakdown.typical.seconds <= 0:
        return 0.0, ""
    known, slow = parts_of(trial.breakdown), trial.breakdown.straggler
    words_of = _IDLE | ({"wait": f"waiting for rank {slow.rank}"} if slow is not None else {})
    shares = {
        words: known[part] / trial.breakdown.typical.seconds for part, words in words_of.items() if known.get(part)
    }
    told = [
        f"{units.percent(share)} of a step is {words}"
        for words, share in sorted(shares.items(), key=lambda item: -item[1])
        if share >= 0.01
    ]
    return sum(shares.values()), f"{trial_label(analysis, trial)}: {', '.join(told)}." if told else ""


def what_next(analysis: Analysis, advice: Advice | None, results: Path | None) -> doc.Section:
    """What to run first, then the advice in one line, each with its command."""
    where = shlex.quote(str(results)) if results is not None else "RESULTS"
    to_run = what_to_run(analysis)
    unsteady = steady_first([trial for trial in analysis.trials.values() if trial.runs])
    lines = [unsteady] if unsteady else []
    lines += [f"{to_run[:1].upper()}{to_run[1:]}"] if to_run else []
    commands = [f"vitscale run STUDY.toml -o {where}"] if to_run and not _imported(analysis) else []
    if advice is not None and (option := advice.chosen) is not None:
        lines.append(
            f"Fastest for {units.counted(advice.work.epochs, 'epoch')} with start-up: {advised.in_short(option)}: "
            f"{advised.time(option.seconds)}, {option.label}.{_other_batch(analysis, advice, option)}"
        )
        lines += [OF_FORKS] if starts_as_forks(advice, option) else []
    if advice is not None:
        commands.append(f"vitscale advise {where} --deadline 1h")
    warned = [verdict for verdict in analysis.findings if verdict.severity == "warning" and verdict.advice]
    if not lines and warned:
        lines.append(warned[0].advice)
    if not lines:
        lines.append("Nothing more to measure for what was asked.")
    return doc.Section("What next?", (doc.Bullets(tuple(lines)), *([doc.Code(tuple(commands))] if commands else [])))


def what_to_run(analysis: Analysis) -> str:
    """Which runs are missing: those that cannot be read, of the study, of other ranks, or for intervals; empty where
    none are."""
    if damaged := next((problem for problem in analysis.problems if problem.endswith(RUNS_LEFT_OUT)), ""):
        return f"put a file back from a copy, or delete it, and `vitscale run` does its runs again: {damaged}."
    missing = [finding for finding in analysis.findings if finding.kind == "unfinished"]
    if missing:
        return f"{missing[0].message.removeprefix('unfinished: ')}: the same command does only these."
    if some := next((finding.advice for finding in analysis.findings if finding.kind == "some-ranks"), ""):
        return f"{some[:1].lower()}{some[1:]}"
    few = [trial for trial in analysis.trials.values() if trial.runs and len(trial.runs) < _ENOUGH_RUNS]
    more = "import 3 of each together" if _imported(analysis) else "set repeats = 3"
    has = "has" if len(few) == 1 else "have"
    return (
        f"{more}: {len(few):,} of {units.counted(len(analysis.trials), 'trial')} {has} fewer than 3 runs."
        if few
        else ""
    )


def _imported(analysis: Analysis) -> bool:
    return any(trial.trial.origin is not None for trial in analysis.trials.values())


def _other_batch(analysis: Analysis, advice: Advice, option: Option) -> str:
    """Why advice trains with another global batch than the fastest measured trial; empty where it does not."""
    fastest = best_measured(analysis)
    if fastest is None or not fastest.batch_known or fastest.trial.global_batch == option.global_batch:
        return ""
    batch = fastest.trial.global_batch
    told = f" The fastest measured has a global batch of {batch:,}"
    if batch > option.global_batch and advice.large_batch is not None:
        steps = units.counted(max(1, advice.work.images // batch), "step")
        return f"{told}: only {steps} an epoch (--large-batch allows it)."
    return f"{told} (--any-batch allows it)." if advice.other_batch is not None else f"{told}."


def can_it_be_trusted(analysis: Analysis) -> doc.Section:
    """One line, with warnings and notes folded under it."""
    findings = doc.most_severe_first(analysis.findings)
    warnings = sum(finding.severity == "warning" for finding in findings)
    runs = [len(trial.runs) for trial in analysis.trials.values() if trial.runs]
    few = f"intervals need 3 runs of a trial, the fewest here are {min(runs)}" if runs and min(runs) < 3 else ""
    said = (
        f"{units.counted(warnings, 'warning')}, {units.counted(len(findings) - warnings, 'note')}"
        if findings
        else "No warning"
    )
    line = "; ".join(filter(None, (said, few)))
    blocks = [doc.Paragraph(f"{line}.")]
    if findings:
        blocks.append(doc.Section(f"{units.counted(len(findings), 'finding')}", findings, folded=True))  # type: ignore[arg-type]  # findings are blocks
    return doc.Section("Can I trust it?", tuple(blocks))


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
    return tuple(sentences.against(analysis, comparison) for comparison in sentences.largest_comparisons(analysis))


def bullets(texts: Iterable[str]) -> doc.Bullets | None:
    """A list of the texts that are not empty; None where all are."""
    known = tuple(text for text in texts if text)
    return doc.Bullets(known) if known else None


def terminal_document(analysis: Analysis, last: Sequence[str] = ()) -> doc.Document:
    """What `run` and `report` end with: what to choose and to do, one table, engine against engine, warnings.

    Args:
        analysis: the results.
        last: where the report is, and other lines to end with.
    """
    failed = [
        f"{trial_label(analysis, trial)}: {trial.outcome}: {trial.reason}"
        + "".join(f" ({failure.log})" for failure in trial.failures[-1:] if failure.log)
        for trial in analysis.trials.values()
        if trial.outcome not in ("completed", None)
    ]
    warned = [finding for finding in analysis.findings if finding.severity == "warning"]
    warnings = [f for f in warned if f.kind not in ("unfinished", "too-few-repeats")]  # "Next" says these
    notes = [finding for finding in analysis.findings if finding.severity != "warning"]
    best, missing = best_measured(analysis), what_to_run(analysis)
    lost = [problem for problem in analysis.problems if "left out" in problem and problem not in missing]
    unread = [f"problem: {problem}" for problem in lost[:_MOST_PROBLEMS]]
    unread += [f"problem: {len(lost) - _MOST_PROBLEMS} more, in the report"] if len(lost) > _MOST_PROBLEMS else []
    fastest = ""
    if best is not None:  # its interval stands in the table
        name = f"Fastest ({units.counted(len(best.runs), 'run')}): {trial_label(analysis, best)}"
        of_all = "".join(f", {told}" for told in _for_all_images(best))
        fastest = f"{name}: {_pace(best)}{of_all}."
    table = summary_table(analysis)
    blocks: list[doc.Block | None] = [
        bullets((fastest, f"Next: {missing}" if missing else "")),
        table if any(table.rows) else doc.Paragraph(table.title, "strong"),
        doc.Bullets((*failed, *unread), "bad") if failed or unread else None,
        bullets((*engine_sentences(analysis), *(f"warning: {finding.message}." for finding in warnings))),
        doc.Section("each configuration", tuple(mode_tables(analysis).values()), folded=True),
        doc.Section("what else to know", tuple(notes), folded=True) if notes else None,
    ]
    return doc.Document("", tuple(block for block in blocks if block is not None), last=tuple(last))


def summary_table(analysis: Analysis) -> doc.Table:
    """A row per curve under each policy, at its most ranks: epoch, speedup, efficiency and the largest loss.

    Curves of one rank count are left out where others have more: the table of each configuration has them. Where no
    trial tells an epoch, images/s stand in its place; in traces a row is a step and what it goes into.
    """
    if steps := _steps_table(analysis, counts(analysis)):
        return steps
    epochs = units.time_unit(trial.epoch_seconds.value for trial in analysis.trials.values() if trial.epoch_seconds)
    of_rates = not any(trial.epoch_seconds for trial in analysis.trials.values())
    losses = {
        (waterfall.curve, waterfall.mode, waterfall.trial_id): waterfall
        for waterfall in analysis.waterfalls
        if waterfall.factors
    }
    measured = [[point for point in c.points if analysis.trials[point.trial_id].runs] for c in analysis.curves]
    several = any(len(points) > 1 for points in measured)
    groups: dict[str, list[doc.Row]] = {}
    for curve, points in zip(analysis.curves, measured, strict=True):
        if not points or (several and len(points) < 2):
            continue
        last = points[-1]
        trial = analysis.trials[last.trial_id]
        loss = losses.get((curve.name, curve.mode, last.trial_id))
        pace = (trial.images_per_second, units.number) if of_rates else (trial.epoch_seconds, epochs.text)
        # Its interval is the speedup's over the ranks: there is room for only one.
        efficiency = doc.Cell(units.share(last.efficiency.value if last.efficiency else None))
        told = (speedup_cell(trial, last), efficiency) if len(points) > 1 else (doc.Cell(units.UNKNOWN),) * 2
        head = (doc.Cell(curve.name), doc.Cell(f"{last.gpus:,}"), doc.Cell(f"{len(trial.runs)}"), interval_cell(*pace))
        groups.setdefault(curve.mode, []).append((*head, *told, doc.Cell(_loss(loss) if loss else units.UNKNOWN)))
    columns = (
        doc.Column("curve", words=True), doc.Column("ranks"), doc.Column("runs"),
        doc.Column("images/s") if of_rates else doc.Column("epoch", epochs.sign), doc.Column("speedup"),
        doc.Column("efficiency", narrow="eff."), doc.Column("largest loss", words=True),
    )  # fmt: skip
    (only,) = groups if len(groups) == 1 else ("",)
    return doc.Table(
        columns,
        tuple(doc.Group("" if only else mode, tuple(rows)) for mode, rows in groups.items()),
        title=", ".join(filter(None, (counts(analysis), only))),
        label="policy",
    )


_NAMED_PARTS = 4
"""Number of parts of a step that are named, the longest first."""


def _steps_table(analysis: Analysis, title: str) -> doc.Table | None:
    """Each trial's step and its longest parts; None where some tell an epoch or speedup, or none tells its parts."""
    trials = [trial for trial in analysis.trials.values() if trial.runs]
    scaled = any(point.speedup for curve in analysis.curves for point in curve.points if point != curve.baseline)
    if scaled or any(trial.epoch_seconds for trial in trials) or not any(trial.breakdown for trial in trials):
        return None
    steps = units.time_unit(trial.step_seconds.value for trial in trials if trial.step_seconds)
    rows = []
    for curve, point, trial in analysis.along(analysis.curves):
        if trial.runs:
            cells = (doc.Cell(curve.name), doc.Cell(f"{point.gpus:,}"), interval_cell(trial.step_seconds, steps.text))
            rows.append((*cells, doc.Cell(_longest_parts(trial))))
    columns = (
        doc.Column("curve", words=True), doc.Column("ranks"), doc.Column("step", steps.sign),
        doc.Column("which goes into", words=True),
    )  # fmt: skip
    return doc.Table(columns, (doc.Group("", tuple(rows)),), title=title)


def _longest_parts(trial: TrialResult) -> str:
    """ "62 % exposed communication, 25 % backward": the longest parts of a step, each 1 % or more."""
    if trial.breakdown is None or not trial.breakdown.typical.seconds:
        return units.UNKNOWN
    shares = {part: seconds / trial.breakdown.typical.seconds for part, seconds in parts_of(trial.breakdown).items()}
    longest = sorted(((share, part) for part, share in shares.items() if share >= 0.01), reverse=True)[:_NAMED_PARTS]
    slow = trial.breakdown.straggler
    waited = {"wait": f" (for rank {slow.rank})"} if slow is not None else {}
    return ", ".join(f"{units.percent(share)} {PART_NAMES[part]}{waited.get(part, '')}" for share, part in longest)


def _loss(waterfall: Waterfall) -> str:
    worst, slow = max(waterfall.factors, key=lambda factor: factor.points), waterfall.straggler
    waited = f" (for rank {slow.rank})" if slow is not None and worst.name == "straggler wait" else ""
    return f"{100 * worst.points:.0f} % {worst.name}{waited}" if worst.points >= 0.01 else units.UNKNOWN
