"""How a study was measured, in words for the methods section of a paper, and as a reviewer's checklist.

Both are made from the records alone: they describe what these hold, and name what they lack. The checklist is the
twelve rules of T. Hoefler and R. Belli, "Scientific Benchmarking of Parallel Computing Systems" (SC'15,
doi 10.1145/2807591.2807644), in our words.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from vitscale.analysis import Analysis, CurveResult, TrialResult
from vitscale.analysis.runs.figures import FEWEST_FOR_TAILS, RunFigures
from vitscale.base import program
from vitscale.pages import sentences
from vitscale.present import units
from vitscale.present.document import Column, Paragraph, Section, table
from vitscale.present.units import counted, listed
from vitscale.trial import script
from vitscale.trial.trial import Trial

Kept = Literal["yes", "in part", "no", "does not apply"]
_FEWEST_TO_TEST = 8
"""Fewest runs of a trial for which a test of their distribution has any power."""
_MOST_CURVES_LISTED = 12
_MOST_LEVELS_LISTED = 20
_MOST_VERSIONS_LISTED = 30


@dataclass(frozen=True)
class MethodRule:
    """One rule, and whether the records of the study keep it."""

    number: int
    """1 to 12, as in the paper."""
    asks: str
    kept: Kept
    evidence: str
    """A sentence on what the records hold."""
    missing: str = ""
    """What the records lack, and what would bring it; empty for nothing."""


class _Verdict(NamedTuple):
    """The answer to one rule: the fields of a `MethodRule` that depend on the records."""

    kept: Kept
    evidence: str
    missing: str = ""


_NO_SPEEDUP = _Verdict("does not apply", "No speedup is reported.")


def methods_section(analysis: Analysis, *, folded: bool = True) -> Section:
    """Return the paragraph and the checklist under a heading."""
    rules = checklist(analysis)
    rules_by_kept = Counter(rule.kept for rule in rules)
    applying = len(rules) - rules_by_kept["does not apply"]
    summary = f"{rules_by_kept['yes']} of {applying} rules kept, {rules_by_kept['in part']} in part."
    headings = ("rule", "kept", "what the records say", "missing")
    checklist_table = table(
        columns=(Column(""), *(Column(heading, words=True) for heading in headings)),
        rows=[(str(rule.number), rule.asks, rule.kept, rule.evidence, rule.missing) for rule in rules],
        title=f"A reviewer's checklist: {summary}",
        notes=("Rules after T. Hoefler and R. Belli, SC'15 (doi 10.1145/2807591.2807644), in short.",),
        always=("missing",),
    )
    return Section("How it was measured", (Paragraph(paragraph(analysis)), checklist_table), folded=folded)


def checklist(analysis: Analysis) -> tuple[MethodRule, ...]:
    """Judge the twelve rules, in their order; without a completed run none of them is kept."""
    measured = _measured_trials(analysis)
    rules = []
    for number, (asks, judge) in enumerate(_RULES, start=1):
        verdict = judge(analysis, measured) if measured else _Verdict("no", "No run has completed.")
        rules.append(MethodRule(number, asks, verdict.kept, verdict.evidence, verdict.missing))
    return tuple(rules)


def _measured_trials(analysis: Analysis) -> list[TrialResult]:
    """Return the trials with a completed run: all others are left out of this section."""
    return [result for result in analysis.trials.values() if result.run_figures]


# --- the paragraph ----------------------------------------------------------------------------------------------------


def paragraph(analysis: Analysis) -> str:
    """Return sentences on what was run, on which hardware, how often, and how the figures were made.

    Facts that no record holds are "not recorded".
    """
    measured = _measured_trials(analysis)
    if not measured:
        return f"No run of {analysis.study.name} has completed, so there is nothing to describe."
    runs = _range_text(len(result.run_figures) for result in measured)
    return " ".join(
        (
            _configurations_clause(analysis, measured),
            _hardware_sentence(analysis, measured),
            f"{_origin_clause(analysis)}. Runs of a trial: {runs}.",
            f"{_timing_sentences(measured)} over runs it is the geometric mean with {_interval_clause(measured)}.",
            f"Software: {_versions_text(measured)};",
            f"figures by vitscale {program.identity()}.",
        )
    )


def _configurations_clause(analysis: Analysis, measured: Sequence[TrialResult]) -> str:
    """Return models, data, precisions and engines: "vit-ti16 on synthetic (32 pixels a side) in fp32: ddp;"."""
    models = dict.fromkeys(_model_name(result.trial) for result in measured)
    data = dict.fromkeys(_data_name(result.trial) for result in measured)
    precisions = dict.fromkeys(result.trial.train.precision for result in measured)
    engines = dict.fromkeys(curve.name for curve in analysis.curves)
    return f"{listed(models)} on {listed(data)} in {listed(precisions)}: {listed(engines, _MOST_CURVES_LISTED)};"


def _hardware_sentence(analysis: Analysis, measured: Sequence[TrialResult]) -> str:
    """Return "1 and 2 ranks on 1 host; devices: Example CPU; batch policy: weak."."""
    ranks = sorted({result.trial.world.size for result in measured})
    rank_noun = "rank" if ranks == [1] else "ranks"
    hosts = sorted({result.trial.world.nodes for result in measured})
    host_noun = "host" if hosts == [1] else "hosts"
    environments = [result.environment for result in measured if result.environment is not None]
    devices: dict[str, None] = {}
    for environment in environments:
        devices |= dict.fromkeys(environment.devices)
    modes = dict.fromkeys(curve.mode for curve in analysis.curves)
    return (
        f"{listed(ranks, _MOST_LEVELS_LISTED)} {rank_noun} on {listed(hosts)} {host_noun}; "
        f"devices: {listed(devices) if devices else 'not recorded'}; batch policy: {listed(modes)}."
    )


def _origin_clause(analysis: Analysis) -> str:
    imported = analysis.study.imported
    if imported is None:
        return "Each run is new processes"
    return "; ".join(("Times come from logs of others", *imported.notes))


def _timing_sentences(measured: Sequence[TrialResult]) -> str:
    """Return sentences on which steps were timed, and by which figure a run counts as one observation."""
    steps = [run.timed_steps for result in measured for run in result.run_figures]
    if not any(steps):
        has_epochs = any(result.epoch_costs for result in measured)
        instead = "only whole epochs" if has_epochs else "nor a whole epoch"
        return f"No step was timed, {instead}. A run counts as one observation;"
    if all(result.has_rates_alone for result in measured):
        return "Runs tell images/s alone. A run counts as one observation, by its rate;"
    warmup = sorted({result.trial.window.warmup_steps for result in measured})
    if any(warmup):
        left_out = f"The first {_range_text(warmup)} steps of a run are warm-up and in no figure"
    else:
        left_out = "No step is left out as warm-up"
    return f"{left_out}; timed steps of a run: {_range_text(steps)}. A run counts as one observation, by its mean step;"


def _versions_text(measured: Sequence[TrialResult]) -> str:
    versions: dict[str, None] = {}
    for result in measured:
        if result.environment is not None:
            versions |= dict.fromkeys(f"{name} {version}" for name, version in result.environment.versions)
    return listed(versions, _MOST_VERSIONS_LISTED) if versions else "not recorded"


def _model_name(trial: Trial) -> str:
    name = trial.model_name or "a model that is not named"
    is_of_script = trial.model.unknown and trial.train.script is not None
    return f"the model of {name}" if is_of_script else name


def _data_name(trial: Trial) -> str:
    """Return the name of the data with the size of its images, which is unknown for a script or an unknown model."""
    if trial.data.name == script.NAME:
        return "images of its own"
    name = "images that are not named" if trial.data.name == "unknown" else trial.data.name
    if trial.model.unknown or trial.train.script:
        return name
    return f"{name} ({counted(trial.model.image_size, 'pixel')} a side)"


def _range_text(counts: Iterable[int]) -> str:
    """Return the range of one or more counts: "1 to 6", or "3" where all are equal."""
    rising = sorted(counts)
    if rising[0] == rising[-1]:
        return f"{rising[0]:,}"
    return f"{rising[0]:,} to {rising[-1]:,}"


def _interval_clause(measured: Sequence[TrialResult]) -> str:
    """Return a clause on the interval over runs, and on how many trials have one."""
    repeated = sum(len(result.run_figures) > 1 for result in measured)
    if not repeated:
        return "no interval, for no trial was repeated"
    interval = "its 95 % interval (Student's t on logarithms of the runs)"
    if repeated == len(measured):
        return interval
    return f"{interval}, for the {repeated} of {len(measured)} trials that were repeated"


# --- the rules --------------------------------------------------------------------------------------------------------
# Each function judges one rule; `measured` is never empty.


def _yes_or_in_part(missing: str) -> Kept:
    return "in part" if missing else "yes"


def _listed_or_empty(texts: Sequence[str]) -> str:
    return listed(texts) if texts else ""


def _judge_base_case(analysis: Analysis, _: Sequence[TrialResult]) -> _Verdict:
    """Judge rule 1. The base case is the baseline, on one rank, with a run without a distributed wrapper beside it."""
    curves = [curve for curve in analysis.curves if len(curve.points) > 1]
    if not curves:
        return _NO_SPEEDUP
    base_cases = [_base_case_of_curve(analysis, curve) for curve in curves]
    missing = []
    if not all(curve.baseline is not None and curve.baseline.gpus == 1 for curve in curves):
        missing.append("a base case on one rank")
    if not all(curve.baseline is not None and curve.plain_trial is not None for curve in curves):
        missing.append('the run without a distributed wrapper (engine = "none")')
    kept: Kept = "in part" if missing else "yes"
    return _Verdict(kept, f"{listed(base_cases, _MOST_CURVES_LISTED)}.", _listed_or_empty(missing))


def _base_case_of_curve(analysis: Analysis, curve: CurveResult) -> str:
    """Return the baseline of a curve: "ddp (weak): 1 rank, 12.8 s an epoch"."""
    name = f"{curve.name} ({curve.mode})"
    if curve.baseline is None:
        return f"{name}: no base case"
    time_or_rate = _time_or_rate(analysis.trials[curve.baseline.trial_id])
    return f"{name}: {units.ranks(curve.baseline.gpus)}, {time_or_rate}"


def _time_or_rate(result: TrialResult) -> str:
    """Return the seconds of an epoch with their interval; images/s where no epoch was timed."""
    epoch = result.epoch_seconds
    rate = result.images_per_second
    if epoch is not None:
        bounds = epoch.bounds(units.seconds)
        interval = f" ({bounds})" if bounds else ""
        return f"{units.seconds(epoch.value)}{interval} an epoch"
    if rate is not None:
        return f"{units.number(rate.value)} images/s"
    return f"{units.seconds(None)} an epoch"


def _judge_subsets(analysis: Analysis, measured: Sequence[TrialResult]) -> _Verdict:
    """Judge rule 2 by the trials and runs that are in no figure, each of which has a recorded reason."""
    results = list(analysis.trials.values())
    outcomes = Counter(result.outcome or "not run yet" for result in results if not result.run_figures)
    evidence = f"{len(measured)} of {counted(len(results), 'trial')} measured"
    for outcome, count in outcomes.items():
        evidence += f", {count} {outcome}"
    left_out = sum(len(result.left_out) for result in results)
    if left_out:
        evidence += f"; {counted(left_out, 'completed run')} not combined, each with its reason."
    else:
        evidence += "."
    fractions = sorted({result.trial.data.fraction for result in measured if result.trial.data.fraction < 1})
    if fractions:
        evidence += f" Shares of the images: {listed(units.percent(share) for share in fractions)}."
    waiting = outcomes["not run yet"]
    missing = f"{counted(waiting, 'trial')} not run yet" if waiting else ""
    return _Verdict(_yes_or_in_part(missing), evidence, missing)


def _judge_means(_: Analysis, measured: Sequence[TrialResult]) -> _Verdict:
    """Judge rule 3. Means over runs are geometric here, which keeps the rule in part only."""
    if all(result.has_rates_alone for result in measured):
        evidence = "Rates were told as they are, without the times that they come from."
        return _Verdict("in part", evidence, "the times of steps")
    evidence = "Step times are averaged arithmetically; a rate is images over that time, never a mean of rates."
    if not any(len(result.run_figures) > 1 for result in measured):
        return _Verdict("yes", evidence)
    evidence += " Times and rates are averaged geometrically over runs, for times are skewed to the right."
    missing = "arithmetic means over runs: they lie above by about half the variance of the logarithms"
    return _Verdict("in part", evidence, missing)


def _judge_ratios(analysis: Analysis, _: Sequence[TrialResult]) -> _Verdict:
    """Judge rule 4. A speedup is a ratio of mean times, so that the rule is kept wherever there is a speedup."""
    count = sum(_speedups_beside_baseline(curve) for curve in analysis.curves)
    if not count:
        return _NO_SPEEDUP
    return _Verdict("yes", f"{counted(count, 'speedup')}, each a ratio of mean times; none is averaged.")


def _speedups_beside_baseline(curve: CurveResult) -> int:
    """Return the number of speedups of a curve, without that of its baseline, which is 1."""
    return sum(point.speedup is not None and point != curve.baseline for point in curve.points)


def _judge_variation(_: Analysis, measured: Sequence[TrialResult]) -> _Verdict:
    """Judge rule 5 by the number of runs of a trial: three or more give an interval."""
    runs = _range_text(len(result.run_figures) for result in measured)
    run_noun = "run" if runs == "1" else "runs"
    evidence = f"{runs} {run_noun} of a trial; {_interval_clause(measured)}."
    run_once = sum(len(result.run_figures) < 2 for result in measured)
    run_twice = sum(len(result.run_figures) == 2 for result in measured)
    missing = []
    if run_once:
        missing.append(f"an interval of {counted(run_once, 'trial')} run once")
    if run_twice:
        missing.append(f"a third run of {counted(run_twice, 'trial')}")
    if not missing:
        return _Verdict("yes", evidence)
    kept: Kept = "no" if run_once == len(measured) else "in part"
    return _Verdict(kept, evidence, f"{listed(missing)} (measure.repeats)")


def _judge_normality(_: Analysis, measured: Sequence[TrialResult]) -> _Verdict:
    """Judge rule 6 by a test of the normality that the intervals take for granted."""
    untested = "Intervals take logarithms of times to be normal."
    repeated = [result for result in measured if len(result.run_figures) >= _FEWEST_TO_TEST]
    if not repeated:
        most = max(len(result.run_figures) for result in measured)
        why = f"at most {counted(most, 'run')} of a trial, and a test takes {_FEWEST_TO_TEST} to find anything"
        return _Verdict("no", untested, f"a test of that: {why}")
    p_by_trial = _p_of_normal_logarithms(repeated)
    if not p_by_trial:
        return _Verdict("no", untested, "runs with epoch times that differ")
    tested = len(p_by_trial)
    name, smallest_p = min(p_by_trial.items(), key=lambda item: item[1])
    corrected_p = min(1.0, smallest_p * tested)  # Bonferroni
    evidence = (
        f"Shapiro and Wilk's test on logarithms of {counted(tested, 'trial')}: least p = {corrected_p:.2g} ({name})."
    )
    if corrected_p < 0.05:
        missing = "an interval that does not take runs to be normal: that trial's is not to be relied on"
        return _Verdict("no", evidence, missing)
    fewer = len(measured) - tested
    missing = f"a test of {fewer} trials with fewer runs" if fewer else ""
    return _Verdict(_yes_or_in_part(missing), evidence, missing)


def _p_of_normal_logarithms(results: Iterable[TrialResult]) -> dict[str, float]:
    """Return trial's name -> p of Shapiro and Wilk's test that logarithms of its runs' epoch times are normal.

    Trials with fewer than `_FEWEST_TO_TEST` epoch times, or with equal ones only, are left out.
    """
    import numpy as np
    from scipy.stats import shapiro

    p_by_trial = {}
    for result in results:
        seconds = [run.epoch_seconds for run in result.run_figures if run.epoch_seconds]
        if len(seconds) >= _FEWEST_TO_TEST and statistics.pstdev(seconds) > 0:
            p_by_trial[result.name] = float(shapiro(np.log(seconds)).pvalue)
    return p_by_trial


def _judge_comparisons(analysis: Analysis, _: Sequence[TrialResult]) -> _Verdict:
    """Judge rule 7 by the pairs of trials that the study compares."""
    if not analysis.comparisons:
        return _Verdict("does not apply", "No configuration is compared with another.")
    count = len(analysis.comparisons)
    pairs = counted(count, "pair")
    evidence = (
        f"{pairs} by the ratio of mean times and its 95 % interval. {sentences.multiplicity_sentence(analysis)}".strip()
    )
    undecided = sum(pair.result.verdict == "too few repeats to tell" for pair in analysis.comparisons)
    if not undecided:
        return _Verdict("yes", evidence)
    kept: Kept = "no" if undecided == count else "in part"
    return _Verdict(kept, evidence, f"repeats: {undecided} of {pairs} cannot be told apart or alike")


def _judge_tails(_: Analysis, measured: Sequence[TrialResult]) -> _Verdict:
    """Judge rule 8 by the runs that have enough timed steps for p95 and p99."""
    runs = _all_runs(measured)
    with_tails = sum(run.step_seconds_p99 is not None for run in runs)
    slow_steps = sum(len(run.slow.set_aside) for run in runs)
    evidence = (
        f"p95 and p99 of step times of {with_tails} of {counted(len(runs), 'run')}; "
        f"{counted(slow_steps, 'slow step')} set aside, in these tails and in elapsed epochs all the same."
    )
    without_tails = len(runs) - with_tails
    if not without_tails:
        return _Verdict("yes", evidence)
    kept: Kept = "in part" if with_tails else "no"
    return _Verdict(kept, evidence, f"{FEWEST_FOR_TAILS} timed steps in {counted(without_tails, 'run')}")


def _all_runs(measured: Sequence[TrialResult]) -> list[RunFigures]:
    runs: list[RunFigures] = []
    for result in measured:
        runs += result.run_figures
    return runs


def _judge_setup(analysis: Analysis, measured: Sequence[TrialResult]) -> _Verdict:
    """Judge rule 9 by the parts of the setup that the records of some trials lack."""
    levels = "; ".join(
        f"{field} = {listed(values, _MOST_LEVELS_LISTED)}" for field, values in _swept_levels(analysis, measured)
    )
    environments = {result.environment.without_clock for result in measured if result.environment is not None}
    evidence = f"Varied: {levels}. {counted(len(environments), 'environment')}, in full under Environment"
    evidence += "; the study file is part of the report." if analysis.study.imported is None else "."
    missing = []
    for part, is_lacking in _SETUP_GAPS.items():
        count = sum(is_lacking(result) for result in measured)
        if count:
            missing.append(f"{part} of {counted(count, 'trial')}")
    if not missing:
        return _Verdict("yes", evidence)
    kept: Kept = "in part" if environments else "no"
    return _Verdict(kept, evidence, listed(missing))


def _swept_levels(analysis: Analysis, measured: Sequence[TrialResult]) -> list[tuple[str, list[str]]]:
    """Return pairs of a swept field and its distinct values in order of first use; the last is that of rank counts."""
    values_by_field: dict[str, dict[str, None]] = {}
    for curve in analysis.curves:
        for field, value in curve.labels.items():
            values_by_field.setdefault(field, {})[str(value)] = None
    ranks = sorted({result.trial.world.size for result in measured})
    values_by_field["ranks"] = dict.fromkeys(map(str, ranks))
    return [(field, list(values)) for field, values in values_by_field.items()]


def _lacks_environment(result: TrialResult) -> bool:
    return result.environment is None


def _lacks_versions(result: TrialResult) -> bool:
    return result.environment is not None and not result.environment.versions


def _lacks_driver(result: TrialResult) -> bool:
    if result.environment is None or result.trial.train.device != "cuda":
        return False
    return not result.environment.drivers


def _lacks_revision(result: TrialResult) -> bool:
    return result.environment is not None and result.environment.git_revision is None


_SETUP_GAPS: dict[str, Callable[[TrialResult], bool]] = {
    "the environment": _lacks_environment,
    "library versions": _lacks_versions,
    "the driver of the GPUs": _lacks_driver,
    "the revision of the code (git)": _lacks_revision,
}
"""Part of the setup -> whether a trial's records lack it. Without an environment, only the environment is missing."""


def _judge_timing(analysis: Analysis, measured: Sequence[TrialResult]) -> _Verdict:
    """Judge rule 10 by the records on how times were taken, which are incomplete in imported results."""
    runs = _all_runs(measured)
    models = [run.model for run in runs if run.model is not None]
    runs_by_synchronised = Counter(model.synchronised_timing for model in models)
    sources = dict.fromkeys(result.epoch_seconds_source for result in measured if result.epoch_seconds_source)
    if all(result.has_rates_alone for result in measured):
        evidence = "Runs tell images/s alone, and not over how many steps; timing synchronises"
    else:
        steps = _range_text(run.timed_steps for run in runs)
        evidence = f"{steps} timed steps a run after warm-up; epoch times from {listed(sources)}; timing synchronises"
    evidence += f" the device in {runs_by_synchronised[True]} of {counted(len(models), 'run')}."
    has_script = any(result.trial.train.script for result in measured)
    if analysis.study.imported is None and not has_script:
        evidence += (
            " An epoch ends in a barrier, which is in its time; what ranks wait is told without comparing clocks."
        )
    missing = []
    unknown = runs_by_synchronised[None] + len(runs) - len(models)
    if unknown:
        missing.append(f"whether timing synchronises, of {counted(unknown, 'run')}")
    if "epochs" in sources:
        missing.append("times of steps")
    return _Verdict("in part" if missing else "yes", evidence, _listed_or_empty(missing))


def _judge_upper_bounds(analysis: Analysis, measured: Sequence[TrialResult]) -> _Verdict:
    """Judge rule 11 by the trials with a measured matrix-multiply rate, an upper bound of what they reach."""
    curves = [curve for curve in analysis.curves if curve.baseline is not None and len(curve.points) > 1]
    resources = [result.resources for result in measured if result.resources is not None]
    with_matmul = sum(record.matmul_flops_per_second is not None for record in resources)
    with_achieved = sum(record.achieved_flops_per_second is not None for record in resources)
    evidence = (
        f"Ideal scaling of {counted(len(curves), 'curve')}; the device's own matrix-multiply rate of {with_matmul} and "
        f"the achieved rate of {with_achieved} of {counted(len(measured), 'trial')}."
    )
    if with_matmul == len(measured):
        return _Verdict("yes", evidence)
    kept: Kept = "in part" if curves or with_matmul else "no"
    return _Verdict(kept, evidence, "the matrix-multiply rate, measured after training")


def _judge_plots(analysis: Analysis, _: Sequence[TrialResult]) -> _Verdict:
    """Judge rule 12 by the curves with speedups, which are drawn, and those of them with intervals."""
    speedups_by_curve = []
    for curve in analysis.curves:
        speedups = [point.speedup for point in curve.points if point.speedup is not None]
        if len(speedups) > 1:
            speedups_by_curve.append(speedups)
    drawn = len(speedups_by_curve)
    with_intervals = sum(any(speedup.low is not None for speedup in speedups) for speedups in speedups_by_curve)
    evidence = (
        f"{counted(drawn, 'curve')}, {with_intervals} with intervals; lines join rank counts of one curve alone, and "
        "what is predicted is drawn apart from what is measured."
    )
    if with_intervals == drawn:
        return _Verdict("yes", evidence)
    missing = f"intervals of {counted(drawn - with_intervals, 'curve')}, whose trials were not repeated"
    return _Verdict("in part", evidence, missing)


_RULES: tuple[tuple[str, Callable[[Analysis, Sequence[TrialResult]], _Verdict]], ...] = (
    ("With a speedup say what its base case is, and what that takes in absolute terms", _judge_base_case),
    ("Say why, where only a part of the cases or of the machine is reported", _judge_subsets),
    ("Average costs arithmetically, rates harmonically", _judge_means),
    ("Average no ratios, but the costs that they are of", _judge_ratios),
    ("Say whether values vary, and give intervals where they do", _judge_variation),
    ("Take nothing to be normal that was not tested", _judge_normality),
    ("Compare by intervals or tests, not by single figures", _judge_comparisons),
    ("Ask whether a mean or median is what matters, or the tails", _judge_tails),
    ("Write down what was varied over which levels, and all of the setup", _judge_setup),
    ("Say how times were taken, synchronised and summarised", _judge_timing),
    ("Show upper bounds beside what was measured", _judge_upper_bounds),
    ("Plot what it takes to understand, and join points only where what lies between has a meaning", _judge_plots),
)
