"""For a paper and its reviewers: how this was measured, and what a reviewer would miss, judged by the records alone.

The checklist is the twelve rules of T. Hoefler and R. Belli, "Scientific Benchmarking of Parallel Computing Systems"
(SC'15, doi 10.1145/2807591.2807644), in our words.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from vitscale.analysis import Analysis, TrialResult
from vitscale.analysis.runs.figures import FEWEST_FOR_TAILS
from vitscale.base import program
from vitscale.pages import sentences
from vitscale.present import units
from vitscale.present.document import Column, Paragraph, Section, table
from vitscale.present.units import counted, listed
from vitscale.trial import script
from vitscale.trial.trial import Trial

Kept = Literal["yes", "in part", "no", "does not apply"]
_FEWEST_TO_TEST = 8
"""Fewest runs of a trial with which a test of their distribution finds anything."""


@dataclass(frozen=True)
class MethodRule:
    """One rule, and how far these records keep it."""

    number: int
    asks: str
    kept: Kept
    told: str
    """What the records say."""
    missing: str = ""
    """What the records lack, and what would bring it."""


def methods_section(analysis: Analysis, *, folded: bool = True) -> Section:
    """The paragraph and the checklist."""
    checked = checklist(analysis)
    count = Counter(rule.kept for rule in checked)
    kept = f"{count['yes']} of {len(checked) - count['does not apply']} rules kept, {count['in part']} in part."
    columns = (Column(""), *(Column(name, words=True) for name in ("rule", "kept", "what the records say", "missing")))
    rows = [(str(rule.number), rule.asks, rule.kept, rule.told, rule.missing) for rule in checked]
    source = "Rules after T. Hoefler and R. Belli, SC'15 (doi 10.1145/2807591.2807644), in short."
    title = f"A reviewer's checklist: {kept}"
    blocks = (Paragraph(paragraph(analysis)), table(columns, rows, title=title, notes=(source,), always=("missing",)))
    return Section("How it was measured", blocks, folded=folded)


def checklist(analysis: Analysis) -> tuple[MethodRule, ...]:
    """The twelve rules, in their order."""
    measured = _measured(analysis)
    return tuple(
        MethodRule(number, asks, *(judge(analysis, measured) if measured else ("no", "No run has completed.", "")))
        for number, (asks, judge) in enumerate(_RULES, start=1)
    )


def paragraph(analysis: Analysis) -> str:
    """What was run, on what, how often, and how figures come of it; what is unknown is said to be unknown."""
    measured = _measured(analysis)
    if not measured:
        return f"No run of {analysis.study.name} has completed, so there is nothing to describe."
    trials = [result.trial for result in measured]
    models = dict.fromkeys(map(_model, trials))
    data = dict.fromkeys(map(_data, trials))
    engines = dict.fromkeys(curve.name for curve in analysis.curves)
    precisions = dict.fromkeys(t.train.precision for t in trials)
    ranks = sorted({t.world.size for t in trials})
    hosts = sorted({t.world.nodes for t in trials})
    around = [result.environment for result in measured if result.environment is not None]
    devices = dict.fromkeys(device for environment in around for device in environment.devices)
    modes = dict.fromkeys(curve.mode for curve in analysis.curves)
    steps = [run.timed_steps for result in measured for run in result.run_figures]
    warmup = sorted({t.window.warmup_steps for t in trials})
    versions = dict.fromkeys(f"{name} {version}" for environment in around for name, version in environment.versions)
    imported = analysis.study.imported
    told = "; ".join(("Times come from logs of others", *imported.notes)) if imported else "Each run is new processes"
    left_out = f"The first {_range(warmup)} steps of a run are warm-up and in no figure"
    timing = left_out if any(warmup) else "No step is left out as warm-up"
    timing += f"; timed steps of a run: {_range(steps)}. A run counts as one observation, by its mean step;"
    if not any(steps):
        what = "only whole epochs" if any(result.epoch_costs for result in measured) else "nor a whole epoch"
        timing = f"No step was timed, {what}. A run counts as one observation;"
    elif all(result.of_rates for result in measured):
        timing = "Runs tell images/s alone. A run counts as one observation, by its rate;"
    return " ".join(
        (
            f"{listed(models)} on {listed(data)} in {listed(precisions)}: {listed(engines, 12)};",
            f"{listed(ranks, 20)} rank{'s' * (ranks != [1])} on {listed(hosts)} host{'s' * (hosts != [1])};",
            f"devices: {listed(devices) if devices else 'not recorded'}; batch policy: {listed(modes)}.",
            f"{told}. Runs of a trial: {_range(len(result.run_figures) for result in measured)}.",
            f"{timing} over runs it is the geometric mean with {_intervals(measured)}.",
            f"Software: {listed(versions, 30) if versions else 'not recorded'};",
            f"figures by vitscale {program.identity()}.",
        )
    )


def _model(trial: Trial) -> str:
    name = trial.model_name or "a model that is not named"
    return f"the model of {name}" if trial.model.unknown and trial.train.script is not None else name


def _data(trial: Trial) -> str:
    """The data in words; nobody tells how large images of a script or of an unknown model are."""
    if trial.data.name == script.NAME:
        return "images of its own"
    size = "" if trial.model.unknown or trial.train.script else f" ({counted(trial.model.image_size, 'pixel')} a side)"
    return f"{trial.data.name if trial.data.name != 'unknown' else 'images that are not named'}{size}"


def _measured(analysis: Analysis) -> list[TrialResult]:
    return [result for result in analysis.trials.values() if result.run_figures]


def _range(counts: Iterable[int]) -> str:
    known = sorted(counts)
    return f"{known[0]:,}" if known[0] == known[-1] else f"{known[0]:,} to {known[-1]:,}"


def _intervals(measured: Sequence[TrialResult]) -> str:
    repeated = sum(len(result.run_figures) > 1 for result in measured)
    if not repeated:
        return "no interval, for no trial was repeated"
    of = "" if repeated == len(measured) else f", for the {repeated} of {len(measured)} trials that were repeated"
    return f"its 95 % interval (Student's t on logarithms of the runs){of}"


Judged = tuple[Kept, str, str]


def _base_case(analysis: Analysis, _: Sequence[TrialResult]) -> Judged:
    curves = [curve for curve in analysis.curves if len(curve.points) > 1]
    if not curves:
        return "does not apply", "No speedup is reported.", ""
    told, one_rank, plain = [], True, True
    for curve in curves:
        if curve.baseline is None:
            told.append(f"{curve.name} ({curve.mode}): no base case")
            one_rank = plain = False
            continue
        base = analysis.trials[curve.baseline.trial_id]
        epoch, rate = base.epoch_seconds, base.images_per_second
        absolute = f"{units.seconds(epoch.value if epoch else None)} an epoch"
        if epoch and epoch.bounds():
            absolute = f"{units.seconds(epoch.value)} ({epoch.bounds(units.seconds)}) an epoch"
        elif epoch is None and rate is not None:
            absolute = f"{units.number(rate.value)} images/s"
        told.append(f"{curve.name} ({curve.mode}): {units.ranks(curve.baseline.gpus)}, {absolute}")
        one_rank, plain = one_rank and curve.baseline.gpus == 1, plain and curve.plain_trial is not None
    missing = [] if one_rank else ["a base case on one rank"]
    missing += [] if plain else ['the run without a distributed wrapper (engine = "none")']
    return "yes" if not missing else "in part", f"{listed(told, 12)}.", listed(missing) if missing else ""


def _subsets(analysis: Analysis, measured: Sequence[TrialResult]) -> Judged:
    every = list(analysis.trials.values())
    ended = Counter(result.outcome or "not run yet" for result in every if not result.run_figures)
    left_out = sum(len(result.left_out) for result in every)
    told = f"{len(measured)} of {counted(len(every), 'trial')} measured"
    told += "".join(f", {count} {kind}" for kind, count in ended.items())
    told += f"; {counted(left_out, 'completed run')} not combined, each with its reason." if left_out else "."
    fractions = sorted({result.trial.data.fraction for result in measured if result.trial.data.fraction < 1})
    told += f" Shares of the images: {listed(units.percent(share) for share in fractions)}." if fractions else ""
    waiting = ended["not run yet"]
    missing = f"{counted(waiting, 'trial')} not run yet" if waiting else ""
    return "in part" if missing else "yes", told, missing


def _means(_: Analysis, measured: Sequence[TrialResult]) -> Judged:
    if all(result.of_rates for result in measured):
        return "in part", "Rates were told as they are, without the times that they come from.", "the times of steps"
    told = "Step times are averaged arithmetically; a rate is images over that time, never a mean of rates."
    if any(len(result.run_figures) > 1 for result in measured):
        told += " Times and rates are averaged geometrically over runs, for times are skewed to the right."
        return (
            "in part",
            told,
            "arithmetic means over runs: they lie above by about half the variance of the logarithms",
        )
    return "yes", told, ""


def _ratios(analysis: Analysis, _: Sequence[TrialResult]) -> Judged:
    count = sum(
        point.speedup is not None and point != curve.baseline for curve in analysis.curves for point in curve.points
    )
    if not count:
        return "does not apply", "No speedup is reported.", ""
    return "yes", f"{counted(count, 'speedup')}, each a ratio of mean times; none is averaged.", ""


def _variation(_: Analysis, measured: Sequence[TrialResult]) -> Judged:
    single = sum(len(result.run_figures) < 2 for result in measured)
    few = sum(2 <= len(result.run_figures) < 3 for result in measured)
    runs = _range(len(result.run_figures) for result in measured)
    told = f"{runs} run{'s' * (runs != '1')} of a trial; {_intervals(measured)}."
    missing = [f"an interval of {counted(single, 'trial')} run once"] if single else []
    missing += [f"a third run of {counted(few, 'trial')}"] if few else []
    kept: Kept = "no" if single == len(measured) else "in part" if missing else "yes"
    return kept, told, f"{listed(missing)} (measure.repeats)" if missing else ""


def _normality(_: Analysis, measured: Sequence[TrialResult]) -> Judged:
    enough = [result for result in measured if len(result.run_figures) >= _FEWEST_TO_TEST]
    if not enough:
        most = max(len(result.run_figures) for result in measured)
        why = f"at most {counted(most, 'run')} of a trial, and a test takes {_FEWEST_TO_TEST} to find anything"
        return "no", "Intervals take logarithms of times to be normal.", f"a test of that: {why}"
    import numpy as np
    from scipy.stats import shapiro

    tested = {}
    for result in enough:
        times = [run.epoch_seconds for run in result.run_figures if run.epoch_seconds]
        if len(times) >= _FEWEST_TO_TEST and statistics.pstdev(times) > 0:
            tested[result.name] = float(shapiro(np.log(times)).pvalue)
    if not tested:
        return "no", "Intervals take logarithms of times to be normal.", "runs with epoch times that differ"
    name, least = min(tested.items(), key=lambda item: item[1])
    corrected = min(1.0, least * len(tested))
    told = (
        f"Shapiro and Wilk's test on logarithms of {counted(len(tested), 'trial')}: least p = {corrected:.2g} ({name})."
    )
    if corrected < 0.05:
        return "no", told, "an interval that does not take runs to be normal: that trial's is not to be relied on"
    missing = f"a test of {len(measured) - len(tested)} trials with fewer runs" if len(tested) < len(measured) else ""
    return "in part" if missing else "yes", told, missing


def _compared(analysis: Analysis, _: Sequence[TrialResult]) -> Judged:
    if not analysis.comparisons:
        return "does not apply", "No configuration is compared with another.", ""
    untold = sum(pair.result.verdict == "too few repeats to tell" for pair in analysis.comparisons)
    count = len(analysis.comparisons)
    told = (
        f"{counted(count, 'pair')} by the ratio of mean times and its 95 % interval. {sentences.multiplicity(analysis)}"
    )
    missing = f"repeats: {untold} of {counted(count, 'pair')} cannot be told apart or alike" if untold else ""
    return "no" if untold == count else "in part" if untold else "yes", told.strip(), missing


def _centre(_: Analysis, measured: Sequence[TrialResult]) -> Judged:
    runs = [run for result in measured for run in result.run_figures]
    tails = sum(run.step_seconds_p99 is not None for run in runs)
    slow = sum(len(run.slow.set_aside) for run in runs)
    told = (
        f"p95 and p99 of step times of {tails} of {counted(len(runs), 'run')}; {counted(slow, 'slow step')} set aside,"
    )
    told += " in these tails and in elapsed epochs all the same."
    missing = f"{FEWEST_FOR_TAILS} timed steps in {counted(len(runs) - tails, 'run')}" if tails < len(runs) else ""
    return "yes" if not missing else "in part" if tails else "no", told, missing


def _setup(analysis: Analysis, measured: Sequence[TrialResult]) -> Judged:
    levels: dict[str, dict[object, None]] = {}
    for curve in analysis.curves:
        for field, value in curve.labels.items():
            levels.setdefault(field, {})[str(value)] = None
    levels["ranks"] = dict.fromkeys(sorted({result.trial.world.size for result in measured}))
    told = f"Varied: {'; '.join(f'{field} = {listed(values, 20)}' for field, values in levels.items())}."
    lacks = {
        "the environment": lambda r: r.environment is None,
        "library versions": lambda r: r.environment is not None and not r.environment.versions,
        "the driver of the GPUs": lambda r: (
            r.environment is not None and r.trial.train.device == "cuda" and not r.environment.drivers
        ),
        "the revision of the code (git)": lambda r: r.environment is not None and r.environment.git_revision is None,
    }
    missing = [
        f"{what} of {counted(count, 'trial')}"
        for what, lacking in lacks.items()
        if (count := sum(map(lacking, measured)))
    ]
    around = {result.environment.without_clock for result in measured if result.environment is not None}
    told += f" {counted(len(around), 'environment')}, in full under Environment"
    told += "; the study file is part of the report." if analysis.study.imported is None else "."
    kept: Kept = "yes" if not missing else "in part" if around else "no"
    return kept, told, listed(missing) if missing else ""


def _technique(analysis: Analysis, measured: Sequence[TrialResult]) -> Judged:
    models = [run.model for result in measured for run in result.run_figures if run.model is not None]
    synchronised = Counter(model.synchronised_timing for model in models)
    steps = [run.timed_steps for result in measured for run in result.run_figures]
    sources = dict.fromkeys(result.epoch_seconds_source for result in measured if result.epoch_seconds_source)
    told = f"{_range(steps)} timed steps a run after warm-up; epoch times from {listed(sources)}; timing synchronises"
    if all(result.of_rates for result in measured):
        told = "Runs tell images/s alone, and not over how many steps; timing synchronises"
    told += f" the device in {synchronised[True]} of {counted(len(models), 'run')}."
    if analysis.study.imported is None and not any(result.trial.train.script for result in measured):
        told += " An epoch ends in a barrier, which is in its time; what ranks wait is told without comparing clocks."
    untold = synchronised[None] + sum(len(result.run_figures) for result in measured) - len(models)
    missing = [f"whether timing synchronises, of {counted(untold, 'run')}"] if untold else []
    missing += ["times of steps"] if "epochs" in sources else []
    return "in part" if missing else "yes", told, listed(missing) if missing else ""


def _bounds(analysis: Analysis, measured: Sequence[TrialResult]) -> Judged:
    curves = [curve for curve in analysis.curves if curve.baseline is not None and len(curve.points) > 1]
    rates = sum(r.resources is not None and r.resources.matmul_flops_per_second is not None for r in measured)
    achieved = sum(r.resources is not None and r.resources.achieved_flops_per_second is not None for r in measured)
    told = f"Ideal scaling of {counted(len(curves), 'curve')}; the device's own matrix-multiply rate of {rates} and the"
    told += f" achieved rate of {achieved} of {counted(len(measured), 'trial')}."
    missing = "the matrix-multiply rate, measured after training" if rates < len(measured) else ""
    return "yes" if not missing else "in part" if curves or rates else "no", told, missing


def _plots(analysis: Analysis, _: Sequence[TrialResult]) -> Judged:
    drawn = [
        [point.speedup for point in curve.points if point.speedup is not None]
        for curve in analysis.curves
        if sum(point.speedup is not None for point in curve.points) > 1
    ]
    known = sum(any(speedup.low is not None for speedup in speedups) for speedups in drawn)
    told = (
        f"{counted(len(drawn), 'curve')}, {known} with intervals; lines join rank counts of one curve alone, and what "
        "is predicted is drawn apart from what is measured."
    )
    if known == len(drawn):
        return "yes", told, ""
    return "in part", told, f"intervals of {counted(len(drawn) - known, 'curve')}, whose trials were not repeated"


_RULES: tuple[tuple[str, Callable[[Analysis, Sequence[TrialResult]], Judged]], ...] = (
    ("With a speedup say what its base case is, and what that takes in absolute terms", _base_case),
    ("Say why, where only a part of the cases or of the machine is reported", _subsets),
    ("Average costs arithmetically, rates harmonically", _means),
    ("Average no ratios, but the costs that they are of", _ratios),
    ("Say whether values vary, and give intervals where they do", _variation),
    ("Take nothing to be normal that was not tested", _normality),
    ("Compare by intervals or tests, not by single figures", _compared),
    ("Ask whether a mean or median is what matters, or the tails", _centre),
    ("Write down what was varied over which levels, and all of the setup", _setup),
    ("Say how times were taken, synchronised and summarised", _technique),
    ("Show upper bounds beside what was measured", _bounds),
    ("Plot what it takes to understand, and join points only where what lies between has a meaning", _plots),
)
