"""The report's answers: how it scales, what to choose, why it is not better, what to do next, whether to trust it.

`terminal_document` is their short form, with which `run` and `report` end on a terminal.
"""

from __future__ import annotations

import itertools
import shlex
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from vitscale.advice import sentences as advised
from vitscale.advice.pipeline import Advice
from vitscale.advice.printing import starts_as_forks
from vitscale.advice.request import Option
from vitscale.analysis import Analysis, CurveComparison, CurveResult, ScalingPoint, TrialResult, Waterfall
from vitscale.analysis.comparisons import AgainstReference, against_references
from vitscale.analysis.quality.steadiness import steady_first
from vitscale.analysis.summaries import NOT_RUN_YET
from vitscale.analysis.time.breakdown import Breakdown
from vitscale.pages import choosing, sentences
from vitscale.pages.charts.axes import capitalised
from vitscale.pages.charts.time import PART_NAMES, known_part_seconds, waterfall_of_trial
from vitscale.pages.choosing import best_measured, label_and_pace
from vitscale.pages.model_lines import model_lines_in_short
from vitscale.pages.statements import (
    BASELINE,
    EXPECTATION,
    FASTEST,
    LENGTH,
    LOSS,
    PAIR,
    SCALING,
    SEVERAL,
    TRUST,
    WORST,
    BaselineLoss,
    Scaling,
    Trust,
    claim,
    worst_loss,
)
from vitscale.pages.tables import interval_cell, mode_tables, speedup_cell, trial_label
from vitscale.prediction.start_up import OF_FORKS
from vitscale.present import document as doc
from vitscale.present import units
from vitscale.present.estimate import Estimate

_MOST_CURVES_NAMED = 5
"""Most curves or trials on which an answer has a sentence each."""
_ENOUGH_RUNS = 3
"""Runs of a trial from which its figures have an interval that decides anything."""
_MOST_PROBLEMS_NAMED = 3
_LEAST_NAMED_SHARE = 0.01
"""Share of a step below which a part of it is not named."""


def how_it_scales(analysis: Analysis, figure: doc.Figure | None) -> doc.Section:
    """Answer with at most five sentences, one for each curve.

    Curves with enough runs for an interval come first, the most efficient first; the others keep their order.

    Args:
        analysis: the results.
        figure: the scaling chart. In traces, of which only steps are known, a table of steps takes its place.
    """
    scalings = [scaling_of(analysis, curve) for curve in analysis.curves]
    claims = [claim(SCALING, scaling) for scaling in scalings if scaling is not None]
    with_interval = [statement for statement in claims if _has_interval(statement.facts.efficiency)]
    without_interval = [statement for statement in claims if not _has_interval(statement.facts.efficiency)]
    with_interval.sort(key=lambda statement: -statement.facts.efficiency.value)
    lines = [] if with_interval else _fastest_measured(analysis)
    lines += [statement.text for statement in (*with_interval, *without_interval)]
    if not claims:
        lines.append(_why_no_scaling(analysis))
    shown_lines = lines[:_MOST_CURVES_NAMED]
    if len(lines) > _MOST_CURVES_NAMED:
        shown_lines.append(f"+{len(lines) - _MOST_CURVES_NAMED} more, in Every configuration")
    blocks: list[doc.Block] = [doc.Bullets(tuple(shown_lines))]
    picture = _steps_table(analysis, "What a step goes into") or figure
    if picture is not None:
        blocks.append(picture)
    return doc.Section("How does it scale?", tuple(blocks))


def _fastest_measured(analysis: Analysis) -> list[str]:
    """Return a sentence on the fastest trial with its runs and rivals; none without a measured trial."""
    fastest = choosing.fastest(analysis)
    if fastest is None:
        return []
    title = f"Fastest measured, {units.counted(len(fastest.trial.run_figures), 'run')}"
    return [claim(FASTEST, fastest.as_best_trial(analysis, title, label_and_pace(analysis, fastest.trial))).text]


def _has_interval(efficiency: Estimate) -> bool:
    """Whether an efficiency has an interval of enough runs."""
    return bool(efficiency.low) and not efficiency.note


def _why_no_scaling(analysis: Analysis) -> str:
    if _has_several_rank_counts(analysis):
        return "Speedups are unknown: no two rank counts of a curve may be compared."
    return "No curve has two measured rank counts, so nothing can be said about scaling."


def scaling_of(analysis: Analysis, curve: CurveResult) -> Scaling | None:
    """Return the facts on a curve at its largest measured rank count; None where only its baseline was measured."""
    compared = [point for point in curve.points if point.speedup and point.efficiency]
    if curve.baseline is None or not compared:
        return None
    point = compared[-1]
    if point.gpus == curve.baseline.gpus or point.speedup is None or point.efficiency is None:
        return None
    has_several_policies = len({other.mode for other in analysis.curves}) > 1
    return Scaling(
        curve=f"{curve.name}, {curve.mode}" if has_several_policies else curve.name,
        base_gpus=curve.baseline.gpus,
        gpus=point.gpus,
        speedup=point.speedup,
        efficiency=point.efficiency,
        is_weak=curve.mode == "weak",
        runs=len(analysis.trials[point.trial_id].run_figures),
    )


def _has_several_rank_counts(analysis: Analysis) -> bool:
    """Whether a curve has runs of two rank counts or more, comparable or not."""
    for curve in analysis.curves:
        measured = [point for point in curve.points if analysis.trials[point.trial_id].run_figures]
        if len(measured) > 1:
            return True
    return False


def what_to_choose(analysis: Analysis) -> doc.Section:
    """Answer with the fastest measured configuration, and with the cheapest where that is another.

    Sentences in between say what time to expect of the fastest, and from how many epochs on it ends first.
    """
    fastest = choosing.fastest(analysis)
    if fastest is None:
        has_runs = any(trial.run_figures for trial in analysis.trials.values())
        reason = "no trial tells an epoch time or images/s" if has_runs else "no trial has completed"
        return doc.Section("What would I choose?", (doc.Paragraph(f"Nothing: {reason}."),))
    trial = fastest.trial
    details = [f"global batch {trial.trial.global_batch:,}"] if trial.batch_known else []
    details.append(units.counted(len(trial.run_figures), "run"))
    best_trial = fastest.as_best_trial(analysis, "Fastest measured", label_and_pace(analysis, trial, *details))
    lines = [
        claim(FASTEST, best_trial).text,
        claim(EXPECTATION, choosing.expectation(analysis, fastest)).text,
        claim(LENGTH, choosing.training_length(analysis, fastest)).text,
    ]
    cheapest = choosing.cheapest(analysis)
    if cheapest is not None and cheapest.trial is not trial:
        text = label_and_pace(analysis, cheapest.trial, choosing.rank_time_text(cheapest.trial))
        cheapest_trial = cheapest.as_best_trial(analysis, "Cheapest measured", text)
        lines.append(claim(FASTEST, replace(cheapest_trial, most_named=1)).text)
    return doc.Section("What would I choose?", (doc.Bullets(tuple(line for line in lines if line)),))


def why_not_better(analysis: Analysis, figure: doc.Figure | None) -> doc.Section:
    """Answer with what the best measured trial loses, and with the largest loss of all; or why these are unknown.

    `figure`: the chart of the waterfalls.
    """
    worst = worst_loss(analysis.waterfalls)
    if worst is None or figure is None:
        texts = sentences.unexplained_sentences(analysis) or _largest_idle_shares(analysis)
        return doc.Section("Why not better?", (doc.Bullets(texts),))
    best = best_measured(analysis)
    best_waterfall = waterfall_of_trial(analysis.waterfalls, best.trial_id) if best is not None else None
    front = best_waterfall or worst.waterfall
    blocks: list[doc.Block] = []
    baseline_text = claim(BASELINE, _baseline_loss(analysis, front)).text
    if baseline_text:
        blocks.append(doc.Paragraph(baseline_text, "strong"))
    blocks.append(doc.Paragraph(claim(LOSS, front).text, "strong"))
    worst_text = claim(WORST, worst).text
    if front is not worst.waterfall and worst_text:
        blocks.append(doc.Paragraph(worst_text))
    return doc.Section("Why not better?", (*blocks, figure))


def _baseline_loss(analysis: Analysis, waterfall: Waterfall) -> BaselineLoss:
    """Return what the baseline of a waterfall loses, and what the waterfall's trial loses."""
    baseline = analysis.trials.get(waterfall.baseline_trial or "")
    idle_parts = _idle_parts(analysis, baseline)
    idle_share = Estimate(idle_parts.share)
    if baseline is not None and baseline.breakdown is not None:
        share_over_runs = baseline.breakdown.over_runs(_idle_share)
        if share_over_runs is not None:
            # The share itself stays that of the typical rank; only its interval is that over runs.
            idle_share = Estimate(
                idle_parts.share, share_over_runs.low, share_over_runs.high, note=share_over_runs.note
            )
    return BaselineLoss(parts=idle_parts.text, idle_share=idle_share, loss=_loss(waterfall))


def _loss(waterfall: Waterfall) -> Estimate:
    """Return 1 - efficiency with its interval, whose ends change places; 1 where the efficiency is unknown."""
    efficiency = waterfall.interval or Estimate(waterfall.efficiency or 0.0)
    if efficiency.low is None or efficiency.high is None:
        return Estimate(1 - efficiency.value, note=efficiency.note)
    return Estimate(1 - efficiency.value, 1 - efficiency.high, 1 - efficiency.low, note=efficiency.note)


def _idle_share(breakdown: Breakdown) -> float | None:
    """Return the share of the typical rank's step in which nothing is computed; None for a step of no length."""
    if breakdown.typical.seconds <= 0:
        return None
    part_seconds = known_part_seconds(breakdown)
    idle_seconds = sum(part_seconds.get(part, 0.0) for part in _IDLE_PART_NAMES)
    return idle_seconds / breakdown.typical.seconds


def _largest_idle_shares(analysis: Analysis) -> tuple[str, ...]:
    """Return a sentence on each of the trials whose steps are idle longest, the largest share first.

    They answer where no baseline gives an efficiency. Where no step is idle, return a sentence on what is missing.
    """
    idle_by_trial = [_idle_parts(analysis, trial) for trial in analysis.trials.values()]
    largest_first = sorted(idle_by_trial, reverse=True)
    texts = tuple(idle_parts.text for idle_parts in largest_first[:_MOST_CURVES_NAMED] if idle_parts.text)
    if texts:
        return texts
    if _has_several_rank_counts(analysis) and not any(curve.baseline for curve in analysis.curves):
        return ("No curve has a baseline, so what is lost is unknown.",)
    return ("No trial on more ranks than its baseline has completed.",)


_IDLE_PART_NAMES = {
    "data_wait": "waiting for data",
    "bubble": "waiting for the stages of other ranks",
    "wait": "waiting for the slowest rank",
    "wire": "the transfer",
    "norm": "the exchange of synchronised norms",
    "communication": "exposed communication",
    "launch_gaps": "launch gaps (an idle device)",
}
"""Parts of a step in which nothing is computed, in words."""


class _IdleParts(NamedTuple):
    """The share of a trial's step in which nothing is computed, and its parts in words. Instances sort by the share."""

    share: float
    text: str
    """Its parts of 1 % and more, the longest first; empty without any."""


def _idle_parts(analysis: Analysis, trial: TrialResult | None) -> _IdleParts:
    """Return the idle share of a trial's step; 0 for a trial without an explained step."""
    if trial is None or trial.breakdown is None or trial.breakdown.typical.seconds <= 0:
        return _IdleParts(0.0, "")
    part_names = dict(_IDLE_PART_NAMES)
    if trial.breakdown.straggler is not None:
        part_names["wait"] = f"waiting for rank {trial.breakdown.straggler.rank}"
    part_seconds = known_part_seconds(trial.breakdown)
    step_seconds = trial.breakdown.typical.seconds
    share_by_name = {
        name: part_seconds[part] / step_seconds for part, name in part_names.items() if part_seconds.get(part)
    }
    longest_first = sorted(share_by_name.items(), key=lambda item: -item[1])
    clauses = [
        f"{units.percent(share)} of a step is {name}" for name, share in longest_first if share >= _LEAST_NAMED_SHARE
    ]
    text = f"{trial_label(analysis, trial)}: {', '.join(clauses)}." if clauses else ""
    return _IdleParts(sum(share_by_name.values()), text)


def what_next(analysis: Analysis, advice: Advice | None, results: Path | None) -> doc.Section:
    """Answer with what to run first, and with the advice in one line; commands follow.

    Args:
        analysis: the results.
        advice: the advice; None leaves it out.
        results: the results folder, for the commands.
    """
    folder = shlex.quote(str(results)) if results is not None else "RESULTS"
    measured = [trial for trial in analysis.trials.values() if trial.run_figures]
    missing_runs = what_to_run(analysis)
    lines = [text for text in (steady_first(measured), capitalised(missing_runs)) if text]
    commands: list[str] = []
    if missing_runs and not _is_imported(analysis):
        commands.append(f"vitscale run STUDY.toml -o {folder}")
    if advice is not None:
        lines += _advice_lines(analysis, advice)
        commands.append(f"vitscale advise {folder} --deadline 1h")
    if not lines:
        lines = [_advice_of_first_warning(analysis) or "Nothing more to measure for what was asked."]
    blocks: list[doc.Block] = [doc.Bullets(tuple(lines))]
    if commands:
        blocks.append(doc.Code(tuple(commands)))
    return doc.Section("What next?", tuple(blocks))


def _advice_of_first_warning(analysis: Analysis) -> str:
    """Return the advice of the first warning that has any; empty where none has."""
    for finding in analysis.findings:
        if finding.severity == "warning" and finding.advice:
            return finding.advice
    return ""


def _advice_lines(analysis: Analysis, advice: Advice) -> list[str]:
    """Return a sentence on the configuration that advice takes, and a note on its start-up; none without one."""
    option = advice.chosen
    if option is None:
        return []
    epochs = units.counted(advice.work.epochs, "epoch")
    configuration = f"{advised.in_short(option)}: {advised.time(option.seconds)}, {option.label}."
    other_batch = _other_batch(analysis, advice, option)
    lines = [f"For {epochs} with start-up, advice takes {configuration}{other_batch}"]
    if starts_as_forks(advice, option):
        lines.append(OF_FORKS)
    return lines


def what_to_run(analysis: Analysis) -> str:
    """Return a clause on the runs that are missing: of the study, on other ranks, or for intervals; empty for none."""
    if any(unread.is_pack for unread in analysis.unread):
        return ""  # `vitscale run` does nothing before a pack is mended; the first paragraph says how
    for finding in analysis.findings:
        if finding.kind == "unfinished":
            return f"{finding.message.removeprefix('unfinished: ')}: the same command does only these."
    for finding in analysis.findings:
        if finding.kind == "some-ranks" and finding.advice:
            return f"{finding.advice[:1].lower()}{finding.advice[1:]}"
    return _missing_repeats(analysis)


def _missing_repeats(analysis: Analysis) -> str:
    """Return "set repeats = 3: 2 of 8 trials have fewer than 3 runs."; empty where all have enough for an interval."""
    measured = [trial for trial in analysis.trials.values() if trial.run_figures]
    few = [trial for trial in measured if len(trial.run_figures) < _ENOUGH_RUNS]
    if not few:
        return ""
    how = "import 3 of each together" if _is_imported(analysis) else "set repeats = 3"
    has = "has" if len(few) == 1 else "have"
    return f"{how}: {len(few):,} of {units.counted(len(analysis.trials), 'trial')} {has} fewer than 3 runs."


def _is_imported(analysis: Analysis) -> bool:
    return any(trial.trial.origin is not None for trial in analysis.trials.values())


def _other_batch(analysis: Analysis, advice: Advice, option: Option) -> str:
    """Return a sentence on why advice takes another global batch than the fastest trial; empty where it does not."""
    fastest = best_measured(analysis)
    if fastest is None or not fastest.batch_known or fastest.trial.global_batch == option.global_batch:
        return ""
    batch = fastest.trial.global_batch
    difference = f" The fastest measured has a global batch of {batch:,}"
    if batch > option.global_batch and advice.large_batch is not None:
        steps = units.counted(max(1, advice.work.images // batch), "step")
        return f"{difference}: only {steps} an epoch (--large-batch allows it)."
    if advice.other_batch is not None:
        return f"{difference} (--any-batch allows it)."
    return f"{difference}."


def can_it_be_trusted(analysis: Analysis) -> doc.Section:
    """Answer in one line; warnings and notes are folded below it."""
    findings = doc.most_severe_first(analysis.findings)
    warnings = tuple(finding.kind for finding in findings if finding.severity == "warning")
    runs = [len(trial.run_figures) for trial in analysis.trials.values() if trial.run_figures]
    trust = Trust(warnings, notes=len(findings) - len(warnings), fewest_runs=min(runs, default=None))
    blocks: list[doc.Block] = [doc.Paragraph(claim(TRUST, trust).text)]
    if findings:
        blocks.append(doc.Section(units.counted(len(findings), "finding"), findings, folded=True))
    return doc.Section("Can I trust it?", tuple(blocks))


def counts(analysis: Analysis) -> str:
    """Return counts of trials and runs: "20 of 23 trials completed, 2 did not complete, 1 not run yet, 46 runs"."""
    trials = list(analysis.trials.values())
    outcomes = Counter(trial.outcome for trial in trials)
    completed = outcomes["completed"]
    waiting = outcomes[None]
    failed = len(trials) - completed - waiting
    parts = [f"{completed} of {units.counted(len(trials), 'trial')} completed"]
    if failed:
        parts.append(f"{failed} did not complete")
    if waiting:
        parts.append(f"{waiting} {NOT_RUN_YET}")
    parts.append(units.counted(sum(trial.runs_done for trial in trials), "run"))
    return ", ".join(parts)


def engine_sentences(analysis: Analysis) -> tuple[str, ...]:
    """Return a sentence on each comparison of curves, at the most ranks that were compared: which one is faster."""
    return tuple(_comparison_in_words(analysis, comparison) for comparison in _largest_comparisons(analysis))


class _ComparedCurves(NamedTuple):
    """The curves that a comparison compares, and the field in which they differ."""

    mode: str
    varies: str
    curves: frozenset[str]

    def overlaps(self, other: _ComparedCurves) -> bool:
        """Whether both comparisons are of one kind, and one has all curves of the other."""
        is_same_kind = (self.mode, self.varies) == (other.mode, other.varies)
        return is_same_kind and (self.curves <= other.curves or other.curves <= self.curves)


def _largest_comparisons(analysis: Analysis) -> list[AgainstReference]:
    """Return the comparisons at the most ranks; of those of two policies with the same trials, only the first."""
    largest_by_curves: dict[_ComparedCurves, AgainstReference] = {}
    for comparison in against_references(analysis.curves, analysis.trials, analysis.comparisons):
        curves = frozenset([comparison.reference, *(other.first for other in comparison.others)])
        key = _ComparedCurves(comparison.mode, comparison.varies, curves)
        overlapping = [other for other in largest_by_curves if key.overlaps(other)]
        if all(largest_by_curves[other].gpus < comparison.gpus for other in overlapping):
            for other in overlapping:
                del largest_by_curves[other]
            largest_by_curves[key] = comparison
    comparison_by_trials: dict[frozenset[str], AgainstReference] = {}
    for comparison in largest_by_curves.values():
        trials = frozenset([comparison.reference_trial, *(other.first_trial for other in comparison.others)])
        comparison_by_trials.setdefault(trials, comparison)
    return list(comparison_by_trials.values())


def _comparison_in_words(analysis: Analysis, comparison: AgainstReference) -> str:
    """Return a sentence on curves against a reference; of two curves, the study's first one stands first."""
    if len(comparison.others) > 1:
        return claim(SEVERAL, comparison).text
    return claim(PAIR, _study_pair(analysis, comparison)).text


def _study_pair(analysis: Analysis, comparison: AgainstReference) -> CurveComparison:
    """Return the study's comparison of the only two trials of a comparison, in the study's order of the two."""
    trials = {comparison.reference_trial, comparison.others[0].first_trial}
    for pair in analysis.comparisons:
        if {pair.first_trial, pair.second_trial} == trials and pair.mode == comparison.mode:
            return pair
    raise LookupError(f"no comparison of {' and '.join(sorted(trials))}")


def bullets(texts: Iterable[str]) -> doc.Bullets | None:
    """Return a list of the texts that are not empty; None where all are."""
    lines = tuple(text for text in texts if text)
    return doc.Bullets(lines) if lines else None


def terminal_document(analysis: Analysis, last: Sequence[str] = ()) -> doc.Document:
    """Return what `run` and `report` end with: what to choose and to do, one table, engine against engine, warnings.

    The paragraph on unread files, which comes before it (`beginning_with_unread`), is not in it.

    Args:
        analysis: the results.
        last: where the report is, and other lines to end with.
    """
    failures = [*_failed_trials(analysis), *_problems(analysis)]
    missing = what_to_run(analysis)
    summary = _summary(analysis, sentences_below=len(failures))
    configurations_title = "each configuration"
    if summary.missing_curves:
        configurations_title += f" ({units.counted(summary.missing_curves, 'more curve')})"
    notes = tuple(finding for finding in analysis.findings if finding.severity != "warning")
    sentences_below = (*_warnings(analysis), *engine_sentences(analysis))
    models = _notes_on_models(analysis)
    # What the models are is no answer: it has a line only where the answers leave room on the screen.
    is_crowded = len(list(summary.table.rows)) + len(failures) + len(sentences_below) > _MOST_SUMMARY_ROWS
    model_bullets = bullets(models if is_crowded else ())
    configurations: tuple[doc.Block, ...] = tuple(mode_tables(analysis).values())
    if model_bullets is not None:
        configurations = (model_bullets, *configurations)
    blocks: list[doc.Block | None] = [
        bullets((_fastest_in_short(analysis), f"Next: {missing}" if missing else "")),
        summary.table if any(summary.table.rows) else doc.Paragraph(summary.table.title, "strong"),
        doc.Bullets(tuple(failures), "bad") if failures else None,
        bullets((*sentences_below, *(() if is_crowded else models))),
        doc.Section(configurations_title, configurations, folded=True),
        doc.Section("what else to know", notes, folded=True) if notes else None,
    ]
    return doc.Document("", tuple(block for block in blocks if block is not None), last=tuple(last))


def _failed_trials(analysis: Analysis) -> list[str]:
    """Return a line on each trial that did not complete.

    Example: "ddp, 8 ranks: oom: rank 0 ran out of memory (runs/.../worker.log)".
    """
    lines = []
    for trial in analysis.trials.values():
        if trial.outcome in ("completed", None):
            continue
        line = f"{trial_label(analysis, trial)}: {trial.outcome}: {trial.reason}"
        if trial.failures and trial.failures[-1].log:
            line += f" ({trial.failures[-1].log})"
        lines.append(line)
    return lines


def _problems(analysis: Analysis) -> list[str]:
    """Return lines on the first few records that were left out, and one on how many more there are.

    The first unread file is left out: the paragraph before everything names it.
    """
    named_above = tuple(unread.reason for unread in analysis.unread[:1])
    problems = [
        problem for problem in analysis.problems if "left out" in problem and not problem.startswith(named_above)
    ]
    lines = [f"problem: {problem}" for problem in problems[:_MOST_PROBLEMS_NAMED]]
    if len(problems) > _MOST_PROBLEMS_NAMED:
        lines.append(f"problem: {len(problems) - _MOST_PROBLEMS_NAMED} more, in the report")
    return lines


_FINDINGS_OF_OTHER_LINES = ("unfinished", "too-few-repeats", "unread")
"""Kinds of findings that are left out of the warnings, because other lines of the terminal say the same."""


def _warnings(analysis: Analysis) -> list[str]:
    """Return a line on each warning that no other line of the terminal says."""
    return [
        f"warning: {finding.message}."
        for finding in analysis.findings
        if finding.severity == "warning" and finding.kind not in _FINDINGS_OF_OTHER_LINES
    ]


def _fastest_in_short(analysis: Analysis) -> str:
    """Return a sentence on the fastest trial, without its interval, which the table has; empty without a trial."""
    fastest = choosing.fastest(analysis)
    if fastest is None:
        return ""
    best = fastest.trial
    pace_of_best = f"{trial_label(analysis, best)}: {choosing.pace_text(best)}"
    text = ", ".join((pace_of_best, *choosing.epoch_of_all_images_text(best)))
    title = f"Fastest ({units.counted(len(best.run_figures), 'run')})"
    return claim(FASTEST, replace(fastest.as_best_trial(analysis, title, text), most_named=1)).text


_MOST_SUMMARY_ROWS = 8
"""Number of rows beyond which curves are left out of the summary, so that what else matters stays on one screen."""
_FEWEST_SUMMARY_ROWS = 4
"""Number of rows that curves have at least, however many sentences on failures stand below them."""


class _SummaryCurve(NamedTuple):
    """A curve with runs, and those of its points (measured rank counts) that the summary shows."""

    result: CurveResult
    baseline: ScalingPoint
    """Its baseline; of a curve without one, its first measured point."""
    most_ranks: ScalingPoint | None
    """Its measured point on the most ranks; None where it has no other measured point."""

    @property
    def is_scaled(self) -> bool:
        """Whether it has runs on several rank counts, and so a row of its own below its baseline's."""
        return self.most_ranks is not None

    @property
    def trial_ids(self) -> frozenset[str]:
        """Identities of the trials in its rows."""
        points = [self.baseline] if self.most_ranks is None else [self.baseline, self.most_ranks]
        return frozenset(point.trial_id for point in points)


class _Summary(NamedTuple):
    """The table of the terminal."""

    table: doc.Table
    missing_curves: int
    """Number of curves that have rows and are left out."""


def _summary(analysis: Analysis, sentences_below: int) -> _Summary:
    """Return the terminal's table: epoch, speedup, efficiency and largest loss of each curve at its most ranks.

    Each curve has a second row, its baseline, which stands once, above the first curve that has it; a baseline of
    several policies stands above them all. Curves of one rank count are left out where others have more; so are, in a
    long table, those that matter least, but never the fastest trial or the baseline of a shown curve.

    Where no trial has an epoch time, images/s take its place. In traces a row is a step and its longest parts.

    Args:
        analysis: the results.
        sentences_below: number of sentences on failures below the table, each of which takes the place of a row.
    """
    steps = _steps_table(analysis, counts(analysis))
    if steps is not None:
        return _Summary(steps, missing_curves=0)
    curves = _curves_in_summary(analysis)
    shown_curves = curves
    if len(list(_points_in_summary(curves))) > _MOST_SUMMARY_ROWS:
        most_rows = max(_FEWEST_SUMMARY_ROWS, _MOST_SUMMARY_ROWS - sentences_below)
        shown_curves = _curves_that_fit(curves, best_measured(analysis), most_rows)
    return _Summary(_table_of_curves(analysis, shown_curves), missing_curves=len(curves) - len(shown_curves))


class _SpeedColumn(NamedTuple):
    """The column of the table that shows how fast training is: by epoch times, or by images per second."""

    heading: doc.Column
    figure: Callable[[TrialResult], Estimate | None]
    """Returns the figure of a trial; None where it is unknown."""
    show: Callable[[float], str]
    """Returns a figure as text."""

    def cell(self, trial: TrialResult) -> doc.Cell:
        """Return the cell of a trial: its figure with the interval over runs."""
        return interval_cell(self.figure(trial), self.show)


def _speed_column(analysis: Analysis) -> _SpeedColumn:
    """Return the column of epoch times; of images per second where no trial has an epoch time."""
    epoch_seconds = [trial.epoch_seconds.value for trial in analysis.trials.values() if trial.epoch_seconds]
    if not epoch_seconds:
        return _SpeedColumn(doc.Column("images/s"), lambda trial: trial.images_per_second, units.number)
    unit = units.time_unit(epoch_seconds)
    return _SpeedColumn(doc.Column("epoch", unit.sign), lambda trial: trial.epoch_seconds, unit.text)


def _table_of_curves(analysis: Analysis, curves: Sequence[_SummaryCurve]) -> doc.Table:
    """Return the table of these curves, with a group of rows for each policy; rows of several policies come first."""
    speed_column = _speed_column(analysis)
    columns = (
        doc.Column("curve", words=True), doc.Column("ranks"), doc.Column("runs"), speed_column.heading,
        doc.Column("speedup"), doc.Column("efficiency", narrow="eff."), doc.Column("largest loss", words=True),
    )  # fmt: skip
    rows_by_policies: dict[tuple[str, ...], list[doc.Row]] = {}
    for policies, curve, point in _points_in_summary(curves):
        rows_by_policies.setdefault(policies, []).append(_summary_row(analysis, curve, point, speed_column))
    all_policies = set(itertools.chain.from_iterable(rows_by_policies))
    groups = [
        doc.RowGroup(_policies_in_words(policies, all_policies), tuple(rows_by_policies[policies]))
        for policies in sorted(rows_by_policies, key=len, reverse=True)
    ]
    title = counts(analysis)
    if len(all_policies) == 1:
        title = f"{title}, {next(iter(all_policies))}"
    return doc.Table(columns, tuple(groups), title=title, label="policy")


def _notes_on_models(analysis: Analysis) -> tuple[str, ...]:
    """Return notes on the number of parameters of the measured models."""
    return tuple(model_lines_in_short(trial for trial in analysis.trials.values() if trial.run_figures))


def _summary_row(analysis: Analysis, curve: _SummaryCurve, point: ScalingPoint, speed_column: _SpeedColumn) -> doc.Row:
    """Return the row of one point: the baseline of a curve, or its point on the most ranks.

    A curve with one point has no speedup, but dashes.
    """
    trial = analysis.trials[point.trial_id]
    speedup = doc.Cell(units.UNKNOWN)
    efficiency = doc.Cell(units.UNKNOWN)
    if curve.is_scaled:
        # The interval of the efficiency is the speedup's over the ranks: there is room for only one.
        speedup = speedup_cell(trial, point)
        efficiency = doc.Cell(units.share(point.efficiency.value if point.efficiency else None))
    return (
        doc.Cell(curve.result.name),
        doc.Cell(f"{point.gpus:,}"),
        doc.Cell(f"{len(trial.run_figures)}"),
        speed_column.cell(trial),
        speedup,
        efficiency,
        doc.Cell(_largest_loss(analysis, curve.result, point)),
    )


def _largest_loss(analysis: Analysis, curve: CurveResult, point: ScalingPoint) -> str:
    """Return the largest loss of a point in a few words; a dash where it has no waterfall, or one without factors."""
    for waterfall in analysis.waterfalls:
        is_of_point = (waterfall.curve, waterfall.mode, waterfall.trial_id) == (curve.name, curve.mode, point.trial_id)
        if is_of_point and waterfall.factors:
            return claim(LOSS, waterfall).cell
    return units.UNKNOWN


def _policies_in_words(policies: tuple[str, ...], all_policies: Collection[str]) -> str:
    """Return the policies of a group of rows: "weak", "both", "all"; empty where the table has only one policy."""
    if len(all_policies) == 1:
        return ""
    if len(policies) == 1 or len(policies) < len(all_policies):
        return ", ".join(policies)
    return "both" if len(policies) == 2 else "all"


def _curves_in_summary(analysis: Analysis) -> list[_SummaryCurve]:
    """Return the curves with runs.

    Where any has several rank counts, those with one are left out, but for plain runs that others are compared with.
    """
    curves = []
    for curve in analysis.curves:
        measured = [point for point in curve.points if analysis.trials[point.trial_id].run_figures]
        if measured:
            most_ranks = measured[-1] if len(measured) > 1 else None
            curves.append(_SummaryCurve(curve, curve.baseline or measured[0], most_ranks))
    if not any(curve.is_scaled for curve in curves):
        return curves
    plain_trials = {curve.plain_trial for curve in analysis.curves}
    return [curve for curve in curves if curve.is_scaled or curve.baseline.trial_id in plain_trials]


def _curves_that_fit(
    curves: Sequence[_SummaryCurve], fastest: TrialResult | None, most_rows: int
) -> list[_SummaryCurve]:
    """Return the most important curves, as many as fit into `most_rows` rows with their baselines.

    The curve of the fastest trial comes first, then those of several rank counts, then the others; of equally important
    ones the study's order stays.
    """

    def importance(curve: _SummaryCurve) -> tuple[bool, bool]:
        is_fastest = fastest is not None and fastest.trial_id in curve.trial_ids
        return (is_fastest, curve.is_scaled)

    selected: list[_SummaryCurve] = []
    for curve in sorted(curves, key=importance, reverse=True):
        if len(list(_points_in_summary([*selected, curve]))) <= most_rows:
            selected.append(curve)
    return selected


class _SummaryPoint(NamedTuple):
    """A row of the summary."""

    policies: tuple[str, ...]
    """The policies of the row: of a baseline those of all curves that have it."""
    curve: _SummaryCurve
    point: ScalingPoint


def _points_in_summary(curves: Sequence[_SummaryCurve]) -> Iterator[_SummaryPoint]:
    """Yield the points of these curves in the order of their rows, each baseline once, before its first curve."""
    policies_by_baseline: dict[str, list[str]] = {}
    for curve in curves:
        policies = policies_by_baseline.setdefault(curve.baseline.trial_id, [])
        if curve.result.mode not in policies:
            policies.append(curve.result.mode)
    yielded_baselines: set[str] = set()
    for curve in curves:
        baseline_id = curve.baseline.trial_id
        if baseline_id not in yielded_baselines:
            yield _SummaryPoint(tuple(policies_by_baseline[baseline_id]), curve, curve.baseline)
            yielded_baselines.add(baseline_id)
        if curve.most_ranks is not None and curve.most_ranks != curve.baseline:
            yield _SummaryPoint((curve.result.mode,), curve, curve.most_ranks)


_MOST_PARTS_NAMED = 4
"""Number of parts of a step that are named, the longest first."""


def _steps_table(analysis: Analysis, title: str) -> doc.Table | None:
    """Return a table of each trial's step and its longest parts, for results of which only steps are known (traces).

    Return None where epochs or speedups are known too, or no parts are.
    """
    trials = [trial for trial in analysis.trials.values() if trial.run_figures]
    has_epochs = any(trial.epoch_seconds for trial in trials)
    has_parts = any(trial.breakdown for trial in trials)
    if has_epochs or not has_parts or _has_speedup(analysis):
        return None
    unit = units.time_unit(trial.step_seconds.value for trial in trials if trial.step_seconds)
    columns = (
        doc.Column("curve", words=True), doc.Column("ranks"), doc.Column("step", unit.sign),
        doc.Column("which goes into", words=True),
    )  # fmt: skip
    rows = []
    for curve, point, trial in analysis.along(analysis.curves):
        if trial.run_figures:
            step = interval_cell(trial.step_seconds, unit.text)
            rows.append((doc.Cell(curve.name), doc.Cell(f"{point.gpus:,}"), step, doc.Cell(_longest_parts(trial))))
    return doc.Table(columns, (doc.RowGroup("", tuple(rows)),), title=title)


def _has_speedup(analysis: Analysis) -> bool:
    """Whether a point other than its curve's baseline has a speedup."""
    for curve in analysis.curves:
        for point in curve.points:
            if point.speedup and point != curve.baseline:
                return True
    return False


def _longest_parts(trial: TrialResult) -> str:
    """Return the longest parts of a step, each 1 % or more: "62 % exposed communication, 25 % backward"."""
    if trial.breakdown is None or not trial.breakdown.typical.seconds:
        return units.UNKNOWN
    names = dict(PART_NAMES)
    if trial.breakdown.straggler is not None:
        names["wait"] += f" (for rank {trial.breakdown.straggler.rank})"
    step_seconds = trial.breakdown.typical.seconds
    named_shares = []
    for part, seconds in known_part_seconds(trial.breakdown).items():
        share = seconds / step_seconds
        if share >= _LEAST_NAMED_SHARE:
            named_shares.append((share, part))
    longest_first = sorted(named_shares, reverse=True)
    return ", ".join(f"{units.percent(share)} {names[part]}" for share, part in longest_first[:_MOST_PARTS_NAMED])
