"""Answers to a reader's questions, in this order: how it scales, what to choose, why not better, what next, whether to
trust it. And their short form, with which `run` and `report` end on a terminal."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from vitscale.advice import sentences as advised
from vitscale.advice.pipeline import Advice
from vitscale.advice.printing import starts_as_forks
from vitscale.advice.request import Option
from vitscale.analysis import Analysis, CurveResult, ScalingPoint, TrialResult, Waterfall
from vitscale.analysis.comparisons import AgainstReference, against_references
from vitscale.analysis.quality.steadiness import steady_first
from vitscale.analysis.summaries import NOT_RUN_YET
from vitscale.analysis.time.breakdown import Breakdown
from vitscale.pages import choosing, sentences
from vitscale.pages.charts.time import PART_NAMES, parts_of, waterfall_of_trial
from vitscale.pages.choosing import best_measured, in_short
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

_MOST_SERIES = 5
_ENOUGH_RUNS = 3
_MOST_PROBLEMS = 3


def how_it_scales(analysis: Analysis, figure: doc.Figure | None) -> doc.Section:
    """A sentence for each series, five at most: the best first, then those of too few runs in no order."""
    claims = [claim(SCALING, facts) for curve in analysis.curves if (facts := scaling_of(analysis, curve)) is not None]
    sure = [each for each in claims if each.facts.efficiency.low and not each.facts.efficiency.note]
    ordered = sorted(sure, key=lambda each: -each.facts.efficiency.value)
    lines = [each.text for each in (*ordered, *(each for each in claims if each not in sure))]
    if not sure and (chosen := choosing.fastest(analysis)) is not None:
        title = f"Fastest measured, {units.counted(len(chosen.trial.run_figures), 'run')}"
        facts_of_choice = chosen.choice(analysis, title, in_short(analysis, chosen.trial))
        lines.insert(0, claim(FASTEST, facts_of_choice).text)
    if not claims:
        lines.append(
            "Speedups are unknown: no two rank counts of a curve may be compared."
            if _several_counts(analysis)
            else "No curve has two measured rank counts, so nothing can be said about scaling."
        )
    more = len(lines) - _MOST_SERIES
    blocks = [doc.Bullets((*lines[:_MOST_SERIES], *([f"+{more} more, in Every configuration"] if more > 0 else [])))]
    shown = _steps_table(analysis, "What a step goes into") or figure
    return doc.Section("How does it scale?", (*blocks, *([shown] if shown else [])))


def scaling_of(analysis: Analysis, curve: CurveResult) -> Scaling | None:
    """A curve at its largest measured rank count; None where it has no other count than its baseline's."""
    reached = [point for point in curve.points if point.speedup and point.efficiency]
    if curve.baseline is None or not reached or reached[-1].gpus == curve.baseline.gpus:
        return None
    point = reached[-1]
    if point.speedup is None or point.efficiency is None:
        return None
    has_several_policies = len({each.mode for each in analysis.curves}) > 1
    return Scaling(
        curve=f"{curve.name}, {curve.mode}" if has_several_policies else curve.name,
        base_gpus=curve.baseline.gpus,
        gpus=point.gpus,
        speedup=point.speedup,
        efficiency=point.efficiency,
        is_weak=curve.mode == "weak",
        runs=len(analysis.trials[point.trial_id].run_figures),
    )


def _several_counts(analysis: Analysis) -> bool:
    """Whether a curve has runs of two rank counts or more, comparable or not."""
    return any(
        sum(bool(analysis.trials[point.trial_id].run_figures) for point in curve.points) > 1
        for curve in analysis.curves
    )


def what_to_choose(analysis: Analysis) -> doc.Section:
    """The best measured configuration, for how long a training, and the cheapest where that is another."""
    chosen = choosing.fastest(analysis)
    if chosen is None:
        completed = any(trial.run_figures for trial in analysis.trials.values())
        why = "no trial tells an epoch time or images/s" if completed else "no trial has completed"
        return doc.Section("What would I choose?", (doc.Paragraph(f"Nothing: {why}."),))
    fastest = chosen.trial
    batch = [f"global batch {fastest.trial.global_batch:,}"] if fastest.batch_known else []
    text = in_short(analysis, fastest, *batch, units.counted(len(fastest.run_figures), "run"))
    lines = [
        claim(FASTEST, chosen.choice(analysis, "Fastest measured", text)).text,
        claim(EXPECTATION, choosing.expectation(analysis, chosen)).text,
        claim(LENGTH, choosing.training_length(analysis, chosen)).text,
    ]
    cheapest = choosing.cheapest(analysis)
    if cheapest is not None and cheapest.trial is not fastest:
        text = in_short(analysis, cheapest.trial, choosing.hours(cheapest.trial))
        lines.append(claim(FASTEST, replace(cheapest.choice(analysis, "Cheapest measured", text), most_named=1)).text)
    return doc.Section("What would I choose?", (doc.Bullets(tuple(line for line in lines if line)),))


def why_not_better(analysis: Analysis, figure: doc.Figure | None) -> doc.Section:
    """What the best measured trial loses, with its waterfall, and the largest loss; or why these are unknown."""
    best = best_measured(analysis)
    worst = worst_loss(analysis.waterfalls)
    if worst is None or figure is None:
        return doc.Section("Why not better?", (doc.Bullets(sentences.unexplained(analysis) or _losses(analysis)),))
    front = (waterfall_of_trial(analysis.waterfalls, best.trial_id) if best else None) or worst.waterfall
    blocks = [doc.Paragraph(claim(LOSS, front).text, "strong")]
    largest = claim(WORST, worst).text
    if front is not worst.waterfall and largest:
        blocks.append(doc.Paragraph(largest))
    baseline = claim(BASELINE, _baseline_loss(analysis, front)).text
    if baseline:
        blocks.insert(0, doc.Paragraph(baseline, "strong"))
    return doc.Section("Why not better?", (*blocks, figure))


def _baseline_loss(analysis: Analysis, waterfall: Waterfall) -> BaselineLoss:
    """What the baseline of a waterfall loses, beside what the waterfall's own trial loses."""
    baseline = analysis.trials.get(waterfall.baseline_trial or "")
    share, line = _idle(analysis, baseline)
    idle = Estimate(share)
    if baseline is not None and baseline.breakdown is not None:
        over_runs = baseline.breakdown.over_runs(_idle_share)
        if over_runs is not None:
            idle = Estimate(share, over_runs.low, over_runs.high, note=over_runs.note)
    efficiency = waterfall.interval or Estimate(waterfall.efficiency or 0.0)
    loss = Estimate(1 - efficiency.value, note=efficiency.note)
    if efficiency.low is not None and efficiency.high is not None:
        loss = Estimate(loss.value, 1 - efficiency.high, 1 - efficiency.low, note=efficiency.note)
    return BaselineLoss(parts=line, idle_share=idle, loss=loss)


def _idle_share(breakdown: Breakdown) -> float | None:
    """Share of the typical rank's step in which nothing is computed; None of a step without a length."""
    if breakdown.typical.seconds <= 0:
        return None
    known = parts_of(breakdown)
    return sum(known.get(part, 0.0) for part in _IDLE) / breakdown.typical.seconds


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
    unsteady = steady_first([trial for trial in analysis.trials.values() if trial.run_figures])
    lines = [unsteady] if unsteady else []
    lines += [f"{to_run[:1].upper()}{to_run[1:]}"] if to_run else []
    commands = [f"vitscale run STUDY.toml -o {where}"] if to_run and not _imported(analysis) else []
    if advice is not None and (option := advice.chosen) is not None:
        lines.append(
            f"For {units.counted(advice.work.epochs, 'epoch')} with start-up, advice takes {advised.in_short(option)}: "
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
    """Which runs are missing: of the study, of other ranks, or for intervals; empty where none are."""
    if any(one.is_pack for one in analysis.unread):
        return ""  # what to do with it, before `vitscale run` does anything, is said before all else
    missing = [finding for finding in analysis.findings if finding.kind == "unfinished"]
    if missing:
        return f"{missing[0].message.removeprefix('unfinished: ')}: the same command does only these."
    if some := next((finding.advice for finding in analysis.findings if finding.kind == "some-ranks"), ""):
        return f"{some[:1].lower()}{some[1:]}"
    few = [trial for trial in analysis.trials.values() if trial.run_figures and len(trial.run_figures) < _ENOUGH_RUNS]
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
    warnings = tuple(finding.kind for finding in findings if finding.severity == "warning")
    runs = [len(trial.run_figures) for trial in analysis.trials.values() if trial.run_figures]
    trust = Trust(warnings, notes=len(findings) - len(warnings), fewest_runs=min(runs, default=None))
    blocks: list[doc.Block] = [doc.Paragraph(claim(TRUST, trust).text)]
    if findings:
        blocks.append(doc.Section(f"{units.counted(len(findings), 'finding')}", findings, folded=True))
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
    return tuple(_against(analysis, comparison) for comparison in _largest_comparisons(analysis))


def _largest_comparisons(analysis: Analysis) -> list[AgainstReference]:
    """The comparisons at the most ranks; where two modes share all trials, only one of them."""
    largest: dict[tuple[str, str, frozenset[str]], AgainstReference] = {}
    for against in against_references(analysis.curves, analysis.trials, analysis.comparisons):
        key = (against.mode, against.varies, frozenset([against.reference, *(other.first for other in against.others)]))
        covered = [k for k in largest if k[:2] == key[:2] and (k[2] <= key[2] or key[2] <= k[2])]
        if all(largest[k].gpus < against.gpus for k in covered):
            for k in covered:
                del largest[k]
            largest[key] = against
    by_trials: dict[frozenset[str], AgainstReference] = {}
    for against in largest.values():
        trials = frozenset([against.reference_trial, *(other.first_trial for other in against.others)])
        by_trials.setdefault(trials, against)
    return list(by_trials.values())


def _against(analysis: Analysis, against: AgainstReference) -> str:
    """All curves against one of them, as a sentence; two curves stand in the order of the study."""
    if len(against.others) > 1:
        return claim(SEVERAL, against).text
    trials = {against.reference_trial, against.others[0].first_trial}
    pairs = [pair for pair in analysis.comparisons if {pair.first_trial, pair.second_trial} == trials]
    return claim(PAIR, next(pair for pair in pairs if pair.mode == against.mode)).text


def bullets(texts: Iterable[str]) -> doc.Bullets | None:
    """A list of the texts that are not empty; None where all are."""
    known = tuple(text for text in texts if text)
    return doc.Bullets(known) if known else None


def terminal_document(analysis: Analysis, last: Sequence[str] = ()) -> doc.Document:
    """What `run` and `report` end with: what to choose and to do, one table, engine against engine, warnings.

    What is unread, which comes before it (`beginning_with_unread`), is not in it.

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
    warnings = [f for f in warned if f.kind not in ("unfinished", "too-few-repeats", "unread")]  # said elsewhere
    notes = [finding for finding in analysis.findings if finding.severity != "warning"]
    chosen, missing = choosing.fastest(analysis), what_to_run(analysis)
    told_first = tuple(one.reason for one in analysis.unread[:1])
    lost = [problem for problem in analysis.problems if "left out" in problem and not problem.startswith(told_first)]
    unread = [f"problem: {problem}" for problem in lost[:_MOST_PROBLEMS]]
    unread += [f"problem: {len(lost) - _MOST_PROBLEMS} more, in the report"] if len(lost) > _MOST_PROBLEMS else []
    fastest = ""
    if chosen is not None:  # its interval stands in the table
        best = chosen.trial
        short = ", ".join((f"{trial_label(analysis, best)}: {choosing.pace(best)}", *choosing.for_all_images(best)))
        facts = chosen.choice(analysis, f"Fastest ({units.counted(len(best.run_figures), 'run')})", short)
        fastest = claim(FASTEST, replace(facts, most_named=1)).text
    table, missing_curves = _summary(analysis, len(failed) + len(unread))
    all_curves = "each configuration"
    if missing_curves:
        all_curves = f"{all_curves} ({units.counted(missing_curves, 'more curve')})"
    blocks: list[doc.Block | None] = [
        bullets((fastest, f"Next: {missing}" if missing else "")),
        table if any(table.rows) else doc.Paragraph(table.title, "strong"),
        doc.Bullets((*failed, *unread), "bad") if failed or unread else None,
        bullets((*(f"warning: {finding.message}." for finding in warnings), *engine_sentences(analysis))),
        doc.Section(all_curves, tuple(mode_tables(analysis).values()), folded=True),
        doc.Section("what else to know", tuple(notes), folded=True) if notes else None,
    ]
    return doc.Document("", tuple(block for block in blocks if block is not None), last=tuple(last))


_MOST_SUMMARY_ROWS = 8
"""Number of rows beyond which curves are left out of the summary, so that what else matters stays on one screen."""
_FEWEST_SUMMARY_ROWS = 4
"""Number of rows that are there for curves, however many sentences on failures are to stand below them."""


class _SummaryCurve(NamedTuple):
    """A curve with runs, as the summary shows it."""

    curve: CurveResult
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
    """A row per curve and policy at its most ranks, and one for its baseline: epoch, speedup, efficiency, largest loss.

    A baseline stands once, above the first curve that it belongs to; that of several policies stands above them all.
    Curves of one rank count are left out where others have more, and in long tables those that matter least. The
    baseline of a curve that is shown never is, nor is the fastest trial. Where no trial tells an epoch, images/s stand
    in its place; in traces a row is a step and what it goes into.

    Args:
        analysis: the results.
        sentences_below: number of sentences on failures that stand below it, each in the place of a row.
    """
    if steps := _steps_table(analysis, counts(analysis)):
        return _Summary(steps, missing_curves=0)
    curves = _curves_in_summary(analysis)
    shown = curves
    if len(list(_points_in_summary(curves))) > _MOST_SUMMARY_ROWS:
        most_rows = max(_FEWEST_SUMMARY_ROWS, _MOST_SUMMARY_ROWS - sentences_below)
        shown = _curves_that_fit(curves, best_measured(analysis), most_rows)
    return _Summary(_table_of_curves(analysis, shown), missing_curves=len(curves) - len(shown))


def _table_of_curves(analysis: Analysis, curves: Sequence[_SummaryCurve]) -> doc.Table:
    """The rows of these curves, in a group for each policy; those of several policies stand first."""
    of_rates = not any(trial.epoch_seconds for trial in analysis.trials.values())
    epochs = units.time_unit(trial.epoch_seconds.value for trial in analysis.trials.values() if trial.epoch_seconds)
    pace = units.number if of_rates else epochs.text
    columns = (
        doc.Column("curve", words=True), doc.Column("ranks"), doc.Column("runs"),
        doc.Column("images/s") if of_rates else doc.Column("epoch", epochs.sign), doc.Column("speedup"),
        doc.Column("efficiency", narrow="eff."), doc.Column("largest loss", words=True),
    )  # fmt: skip
    rows_by_policies: dict[tuple[str, ...], list[doc.Row]] = {}
    for policies, curve, point in _points_in_summary(curves):
        row = _summary_row(analysis, curve, point, of_rates=of_rates, pace=pace)
        rows_by_policies.setdefault(policies, []).append(row)
    all_policies = {policy for policies in rows_by_policies for policy in policies}
    groups = [
        doc.RowGroup(_policies_in_words(policies, all_policies), tuple(rows_by_policies[policies]))
        for policies in sorted(rows_by_policies, key=len, reverse=True)
    ]
    title = [counts(analysis), *(all_policies if len(all_policies) == 1 else ())]
    return doc.Table(columns, tuple(groups), title=", ".join(title), label="policy")


def _summary_row(
    analysis: Analysis, curve: _SummaryCurve, point: ScalingPoint, *, of_rates: bool, pace: Callable[[float], str]
) -> doc.Row:
    """The cells of one point.

    Args:
        analysis: the results.
        curve: the curve of the point.
        point: its baseline, or its point on the most ranks.
        of_rates: whether images/s stand in place of the epoch.
        pace: the text of an epoch in seconds, or of images/s.
    """
    trial = analysis.trials[point.trial_id]
    scaling = (doc.Cell(units.UNKNOWN), doc.Cell(units.UNKNOWN))
    if curve.is_scaled:
        # The interval of the efficiency is the speedup's over the ranks: there is room for only one.
        efficiency = units.share(point.efficiency.value if point.efficiency else None)
        scaling = (speedup_cell(trial, point), doc.Cell(efficiency))
    return (
        doc.Cell(curve.curve.name),
        doc.Cell(f"{point.gpus:,}"),
        doc.Cell(f"{len(trial.run_figures)}"),
        interval_cell(trial.images_per_second if of_rates else trial.epoch_seconds, pace),
        *scaling,
        doc.Cell(_largest_loss(analysis, curve.curve, point)),
    )


def _largest_loss(analysis: Analysis, curve: CurveResult, point: ScalingPoint) -> str:
    """The largest loss of a point of a curve in a few words; a dash where it has no waterfall, or one without parts."""
    for waterfall in analysis.waterfalls:
        is_of_point = (waterfall.curve, waterfall.mode, waterfall.trial_id) == (curve.name, curve.mode, point.trial_id)
        if is_of_point and waterfall.factors:
            return claim(LOSS, waterfall).cell
    return units.UNKNOWN


def _policies_in_words(policies: tuple[str, ...], all_policies: Collection[str]) -> str:
    """ "both", "all", "strong-micro, weak": the policies of a group of rows; empty where a table has only one."""
    if len(all_policies) == 1:
        return ""
    if len(policies) == 1 or len(policies) < len(all_policies):
        return ", ".join(policies)
    return "both" if len(policies) == 2 else "all"


def _curves_in_summary(analysis: Analysis) -> list[_SummaryCurve]:
    """The curves with runs; of one rank count only where no curve has more, or as the plain run that others are held
    against."""
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
    """The curves that matter most, as many as stand in `most_rows` rows with their baselines.

    First comes the fastest trial's curve, then those of several rank counts, then the others; else their order stays.
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
    """The policies that it belongs to: of a baseline all those of which it is the baseline."""
    curve: _SummaryCurve
    point: ScalingPoint


def _points_in_summary(curves: Sequence[_SummaryCurve]) -> Iterator[_SummaryPoint]:
    """The points of these curves in the order of their rows, each baseline once, before the first curve it is of."""
    policies_by_baseline: dict[str, list[str]] = {}
    for curve in curves:
        policies = policies_by_baseline.setdefault(curve.baseline.trial_id, [])
        if curve.curve.mode not in policies:
            policies.append(curve.curve.mode)
    listed: set[str] = set()
    for curve in curves:
        baseline = curve.baseline.trial_id
        if baseline not in listed:
            yield _SummaryPoint(tuple(policies_by_baseline[baseline]), curve, curve.baseline)
            listed.add(baseline)
        if curve.most_ranks is not None and curve.most_ranks != curve.baseline:
            yield _SummaryPoint((curve.curve.mode,), curve, curve.most_ranks)


_NAMED_PARTS = 4
"""Number of parts of a step that are named, the longest first."""


def _steps_table(analysis: Analysis, title: str) -> doc.Table | None:
    """Each trial's step and its longest parts; None where some tell an epoch or speedup, or none tells its parts."""
    trials = [trial for trial in analysis.trials.values() if trial.run_figures]
    scaled = any(point.speedup for curve in analysis.curves for point in curve.points if point != curve.baseline)
    if scaled or any(trial.epoch_seconds for trial in trials) or not any(trial.breakdown for trial in trials):
        return None
    steps = units.time_unit(trial.step_seconds.value for trial in trials if trial.step_seconds)
    rows = []
    for curve, point, trial in analysis.along(analysis.curves):
        if trial.run_figures:
            cells = (doc.Cell(curve.name), doc.Cell(f"{point.gpus:,}"), interval_cell(trial.step_seconds, steps.text))
            rows.append((*cells, doc.Cell(_longest_parts(trial))))
    columns = (
        doc.Column("curve", words=True), doc.Column("ranks"), doc.Column("step", steps.sign),
        doc.Column("which goes into", words=True),
    )  # fmt: skip
    return doc.Table(columns, (doc.RowGroup("", tuple(rows)),), title=title)


def _longest_parts(trial: TrialResult) -> str:
    """ "62 % exposed communication, 25 % backward": the longest parts of a step, each 1 % or more."""
    if trial.breakdown is None or not trial.breakdown.typical.seconds:
        return units.UNKNOWN
    shares = {part: seconds / trial.breakdown.typical.seconds for part, seconds in parts_of(trial.breakdown).items()}
    longest = sorted(((share, part) for part, share in shares.items() if share >= 0.01), reverse=True)[:_NAMED_PARTS]
    slow = trial.breakdown.straggler
    waited = {"wait": f" (for rank {slow.rank})"} if slow is not None else {}
    return ", ".join(f"{units.percent(share)} {PART_NAMES[part]}{waited.get(part, '')}" for share, part in longest)
