"""The report as one document: five answers first, and folded below them what they rest on.

Every form of the report (page, Markdown, LaTeX) is made from this document.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from vitscale.advice import sentences as advised
from vitscale.advice.pipeline import Advice
from vitscale.analysis import Analysis, CurveResult, TrialResult, by_mode
from vitscale.analysis.runs.environments import RunEnvironment
from vitscale.analysis.runs.figures import RunFigures
from vitscale.analysis.summaries import NOT_RUN_YET
from vitscale.pages import answers, detail_tables, methods, prediction_words, sentences
from vitscale.pages.answers import bullets, engine_sentences
from vitscale.pages.charts import accuracy, prediction, resources, scaling, time, timeline
from vitscale.pages.charts.advice import advice_chart
from vitscale.pages.choosing import best_measured
from vitscale.pages.detail_tables import traffic_table
from vitscale.pages.model_lines import model_lines
from vitscale.pages.prediction_table import prediction_tables
from vitscale.pages.resolutions import resolution_table
from vitscale.pages.tables import batch_text, comparison_tables, mode_tables, trial_label
from vitscale.prediction.results import Forecast
from vitscale.present import document as doc
from vitscale.present import units
from vitscale.present.unread import beginning_with_unread
from vitscale.store.redaction import NOT_SHOWN, without_secrets
from vitscale.store.results import StudyRecord

_MOST_DETAIL_CHARACTERS = 20_000
"""Characters at the end of a failed run's output that are shown at most, before their lines are counted."""
_MOST_DETAIL_LINES = 40
_MOST_WAITING_NAMED = 5
"""Number of trials that have not run yet beyond which only some are named."""
_MOST_FAILED_UNFOLDED = 5
"""Number of trials with failed runs beyond which their section is folded."""


class ChartInputs(NamedTuple):
    """The results that charts are drawn from."""

    analysis: Analysis
    forecast: Forecast | None
    advice: Advice | None
    measured_curves: list[CurveResult]
    """Curves of which at least one trial has a run."""


CHARTS: Mapping[str, Callable[[ChartInputs], doc.Figure | None]] = {
    "scaling": lambda inputs: scaling.scaling_chart(inputs.analysis, inputs.measured_curves),
    "waterfall": lambda inputs: _waterfall_chart(inputs.analysis),
    "breakdown": lambda inputs: time.breakdown_chart(inputs.analysis, inputs.measured_curves),
    "timeline": lambda inputs: timeline.timeline_chart(inputs.analysis),
    "training": lambda inputs: accuracy.training_chart(inputs.analysis, inputs.measured_curves),
    "accuracy": lambda inputs: accuracy.accuracy_chart(inputs.analysis, inputs.measured_curves),
    "resources": lambda inputs: resources.resource_chart(inputs.analysis, inputs.measured_curves),
    "resolution": lambda inputs: resources.resolution_chart(inputs.analysis),
    "start-up": lambda inputs: resources.startup_chart(inputs.analysis),
    "prediction": lambda inputs: _prediction_chart(inputs.analysis, inputs.forecast),
    "advice": lambda inputs: None if inputs.advice is None else advice_chart(inputs.advice),
}
"""Name of a chart -> the function that draws it, None where it has no data; in the order of the report."""
PICTURES_ALONE: frozenset[str] = frozenset()
"""Names of charts that no section of the report shows: they are written as pictures alone (`--format svg`)."""


def report_document(
    analysis: Analysis,
    forecast: Forecast | None = None,
    advice: Advice | None = None,
    results: Path | None = None,
    package_figures: Sequence[doc.Figure] = (),
) -> doc.Document:
    """Lay out the whole report on a results folder.

    Args:
        analysis: the results.
        forecast: what is predicted from them; None leaves it out.
        advice: what to do; None leaves it out.
        results: the folder, for commands and paths of logs.
        package_figures: charts from other packages.
    """
    figures = charts(analysis, forecast, advice)
    answer_sections = (
        answers.how_it_scales(analysis, figures.get("scaling")),
        answers.what_to_choose(analysis),
        answers.why_not_better(analysis, figures.get("waterfall")),
        answers.what_next(analysis, advice, results),
        answers.can_it_be_trusted(analysis),
    )
    folded_sections = (
        _configurations_section(analysis),
        _failures_section(analysis, results),
        _time_section(analysis, figures),
        _comparisons_section(analysis),
        _accuracy_section(analysis, figures),
        _resources_section(analysis, figures),
        _prediction_and_advice_section(forecast, advice, figures),
        _folded_section("From other packages", package_figures),
        _runs_section(analysis, results),
        _environment_section(analysis),
        _folded_section("Unused records", [bullets(analysis.problems)]),
        _reproduction_section(analysis),
        methods.methods_section(analysis),
    )
    sections = [*answer_sections, *(section for section in folded_sections if section is not None)]
    document = doc.Document(analysis.study.name, tuple(sections))
    return beginning_with_unread(document, analysis.unread)


def charts(analysis: Analysis, forecast: Forecast | None = None, advice: Advice | None = None) -> dict[str, doc.Figure]:
    """Draw all charts (`CHARTS`) that have data, by name."""
    measured_curves = [curve for curve in analysis.curves if _has_run(analysis, curve)]
    inputs = ChartInputs(analysis, forecast, advice, measured_curves)
    figures = {name: draw(inputs) for name, draw in CHARTS.items()}
    return {name: figure for name, figure in figures.items() if figure is not None}


def _has_run(analysis: Analysis, curve: CurveResult) -> bool:
    return any(analysis.trials[point.trial_id].run_figures for point in curve.points)


def _waterfall_chart(analysis: Analysis) -> doc.Figure | None:
    """Draw where efficiency is lost, with the best measured trial in front."""
    best = best_measured(analysis)
    return time.waterfall_chart(analysis.waterfalls, front_trial_id="" if best is None else best.trial_id)


def _prediction_chart(analysis: Analysis, forecast: Forecast | None) -> doc.Figure | None:
    return None if forecast is None else prediction.prediction_chart(analysis, forecast)


def _folded_section(title: str, blocks: Iterable[doc.Block | None]) -> doc.Section | None:
    """Return a folded section with the blocks that are not None; None where all are."""
    present = tuple(block for block in blocks if block is not None)
    return doc.Section(title, present, folded=True) if present else None


def _configurations_section(analysis: Analysis) -> doc.Section | None:
    """Return a section with a table for each batch policy, below a sentence on what the policy means."""
    blocks: list[doc.Block | None] = [bullets(model_lines(analysis.trials.values()))]
    for mode, table in mode_tables(analysis).items():
        blocks += [doc.Paragraph(sentences.MODE_MEANINGS[mode], "quiet"), table]
    return _folded_section("Every configuration", blocks)


def _failures_section(analysis: Analysis, results: Path | None) -> doc.Section | None:
    """Return a section on the trials that have not run yet, and on those that failed; None where there are none."""
    trials = list(analysis.trials.values())
    blocks: list[doc.Block] = []
    waiting = [trial_label(analysis, trial) for trial in trials if trial.outcome is None and not trial.failures]
    if waiting:
        blocks.append(doc.Paragraph(f"{NOT_RUN_YET.capitalize()}: {units.listed(waiting, most=_MOST_WAITING_NAMED)}."))
    for trial in trials:
        blocks += _failure_blocks(trial_label(analysis, trial), trial, results)
    if not blocks:
        return None
    failed = [trial for trial in trials if trial.failures]
    return doc.Section("Trials that did not complete", tuple(blocks), folded=len(failed) > _MOST_FAILED_UNFOLDED)


def _failure_blocks(name: str, trial: TrialResult, results: Path | None) -> list[doc.Block]:
    """Return why each failed run of a trial failed, with its log; nothing for a trial without failures.

    A trial that did not complete, and yet has no failed run, has a line with its outcome.
    """
    if not trial.failures:
        is_well = trial.outcome in ("completed", None)
        return [] if is_well else [doc.Paragraph(f"{name}: {trial.outcome}.", "bad")]
    blocks: list[doc.Block] = []
    for failure in trial.failures:
        reason = f"{name}, repeat {failure.repeat + 1}: {failure.kind}: {failure.reason}"
        blocks.append(doc.Paragraph(reason, "bad"))
        if failure.log:
            blocks.append(doc.Code((_shown_path(results, failure.log),)))
        if failure.detail:
            rank = "" if failure.rank is None else f" of rank {failure.rank}"
            last_lines = failure.detail[-_MOST_DETAIL_CHARACTERS:].splitlines()[-_MOST_DETAIL_LINES:]
            code = doc.Code(tuple(last_lines))
            blocks.append(doc.Section(f"What was said last{rank}", (code,), folded=True))
    return blocks


def _shown_path(results: Path | None, path_in_folder: str) -> str:
    """Return the path of a file of the results folder, without control characters.

    It is relative where the folder is unknown.
    """
    return doc.plain(path_in_folder if results is None else str(results / path_in_folder))


def _time_section(analysis: Analysis, figures: Mapping[str, doc.Figure]) -> doc.Section | None:
    """Return a section on the parts of a step and of start-up; None without a run."""
    trials = analysis.trials.values()
    if not any(trial.run_figures for trial in trials):
        return None
    meaning = None
    remarks = sentences.unexplained_sentences(analysis)
    if any(trial.breakdown for trial in trials):
        text = (
            "Of explained steps, on a GPU without what explaining adds: the parts never overlap and add up to the "
            "step. Exposed communication is time in which a "
            "rank computes nothing because a collective is not done: waiting for the slowest rank, and the transfer "
            "(wire)."
        )
        meaning = doc.Paragraph(text, "quiet")
    else:
        remarks = ("No step was explained, so its parts are unknown.", *remarks)
    return _folded_section(
        "Where the time goes",
        (
            meaning,
            bullets([*remarks, sentences.explaining_cost_sentence(analysis)]),
            figures.get("breakdown"),
            figures.get("timeline"),
            figures.get("start-up"),
            detail_tables.four_figures(analysis),
            detail_tables.parts_table(analysis),
        ),
    )


def _accuracy_section(analysis: Analysis, figures: Mapping[str, doc.Figure]) -> doc.Section | None:
    """Return a section on loss and accuracy: charts, and a table for each batch policy; None where none is known."""
    tables = [detail_tables.accuracy_table(analysis, curves) for curves in by_mode(analysis.curves).values()]
    blocks = [figures.get("training"), figures.get("accuracy"), *tables]
    if not any(blocks):
        return None
    meaning = (
        "A larger global batch takes fewer steps an epoch, and beyond the gradient noise scale each of them teaches "
        "less: throughput alone says nothing of the time to an accuracy."
    )
    return _folded_section("Accuracy", (doc.Paragraph(meaning, "quiet"), *blocks))


def _resources_section(analysis: Analysis, figures: Mapping[str, doc.Figure]) -> doc.Section | None:
    """Return a section on what trials used; None where nothing of it is known."""
    return _folded_section(
        "Resources",
        (
            figures.get("resolution"),
            figures.get("resources"),
            resolution_table(analysis),
            detail_tables.resource_table(analysis),
        ),
    )


def _comparisons_section(analysis: Analysis) -> doc.Section | None:
    """Return a section on curves that differ in one thing, and on the bytes that each engine sends."""
    tables = comparison_tables(analysis)
    meaning = (
        "How many times as fast an epoch is as that of one curve, at equal rank count, of curves that differ in one "
        "thing: a swept field, or an engine with its options. An interval that holds 1 shows no difference. Every pair "
        "stands in the JSON."
    )
    texts = [
        *engine_sentences(analysis),
        sentences.equality_sentence(analysis),
        sentences.multiplicity_sentence(analysis),
        sentences.scope_sentence(analysis),
    ]
    blocks = (
        bullets(texts),
        doc.Paragraph(meaning, "quiet") if tables else None,
        *tables,
        traffic_table(analysis),
    )
    return _folded_section("Engine against engine", blocks)


def _prediction_and_advice_section(
    forecast: Forecast | None, advice: Advice | None, figures: Mapping[str, doc.Figure]
) -> doc.Section | None:
    """Return a section on predictions and advice; None where there are neither."""
    blocks: list[doc.Block | None] = []
    if forecast is not None:
        blocks += _prediction_blocks(forecast, figures.get("prediction"))
    if advice is not None:
        blocks += [figures.get("advice"), bullets((*_advice_sentences(advice), *advised.notes(advice)))]
    return _folded_section("Prediction and advice", blocks)


def _prediction_blocks(forecast: Forecast, figure: doc.Figure | None) -> list[doc.Block | None]:
    """Return the blocks on predictions: how well such predictions did, the chart, tables, and what they rest on."""
    tables, notes = prediction_tables(forecast)
    basis = (
        *notes,
        prediction_words.network_sentence(forecast.evidence),
        *prediction_words.label_sentences(forecast.predictions),
        prediction_words.ASK_FOR_MORE,
    )
    return [
        doc.Paragraph(prediction_words.INTERVALS_MEANING, "quiet"),
        bullets(prediction_words.score_sentences(forecast)),
        figure,
        *tables,
        bullets(basis),
    ]


def _advice_sentences(advice: Advice) -> list[str]:
    """Return a sentence on each answer of the advice: "Fastest: ddp on 8 ranks: 3.2 h, predicted."."""
    texts = []
    for answer in advice.answers:
        question = advised.question(advice, answer).capitalize()
        option = answer.option
        texts.append(f"{question}: {advised.in_short(option)}: {advised.time(option.seconds)}, {option.label}.")
    return texts


def _runs_section(analysis: Analysis, results: Path | None) -> doc.Section | None:
    """Return a section with a row for each run, grouped by trial; None without a run."""
    measured = [trial for trial in analysis.trials.values() if trial.run_figures]
    if not measured:
        return None
    all_runs: list[RunFigures] = []
    for trial in measured:
        all_runs += trial.run_figures
    step_unit = units.time_unit(run.step_seconds for run in all_runs)
    epoch_unit = units.time_unit(run.epoch_seconds for run in all_runs)
    columns = [
        doc.Column("repeat"), doc.Column("timed steps"), doc.Column("step", step_unit.sign),
        doc.Column("epoch", epoch_unit.sign), doc.Column("images/s"), doc.Column("start-up", "s"),
        doc.Column("memory"), doc.Column("log", words=True),
    ]  # fmt: skip
    rows_by_trial: dict[str, list[Sequence[str]]] = {}
    for trial in measured:
        label = f"{trial_label(analysis, trial)}, batch {batch_text(trial)}"
        rows = rows_by_trial.setdefault(label, [])
        for run, start_up, record in zip(trial.run_figures, trial.start_ups, trial.recorded_runs, strict=True):
            row = (
                str(record.header.repeat + 1),
                f"{run.timed_steps:,}",
                step_unit.text(run.step_seconds),
                epoch_unit.text(run.epoch_seconds),
                units.number(run.images_per_second),
                units.number(start_up.seconds),
                units.size(run.peak_bytes),
                _shown_path(results, record.header.log),
            )
            rows.append(row)
    return _folded_section("Every run", (doc.table(columns, rows_by_trial, label="trial"),))


def _environment_section(analysis: Analysis) -> doc.Section | None:
    """Return a section with a table for each environment in which trials ran, with the number of its trials."""
    environments = [trial.environment.without_clock for trial in analysis.trials.values() if trial.environment]
    tables = [_environment_table(environment, trials) for environment, trials in Counter(environments).items()]
    return _folded_section("Environment", tables or [doc.Paragraph("No completed run has recorded its environment.")])


def _environment_table(environment: RunEnvironment, trials: int) -> doc.Table:
    """Return a table of one environment. `trials`: number of trials that ran in it."""
    columns = (doc.Column("", words=True), doc.Column(units.counted(trials, "trial"), words=True))
    quotas = ", ".join(f"{quota:g} cores" for quota in environment.quotas)
    versions = ", ".join(f"{name} {version}" for name, version in environment.versions)
    settings = ", ".join(f"{name}={value}" for name, value in environment.settings)
    rows = [
        ("device", ", ".join(environment.devices)),
        ("host", ", ".join(environment.hosts)),
        ("driver", ", ".join(environment.drivers) or "none recorded"),
        *((name, ", ".join(values)) for name, values in environment.hardware),
        ("CPU quota", quotas or "none"),
        ("git revision", environment.git_revision or "none recorded"),
        ("versions", versions),
        ("transport settings", settings or "none"),
    ]
    return doc.table(columns, rows)


def _reproduction_section(analysis: Analysis) -> doc.Section | None:
    """Return a section on how to reproduce the results: the study's text without secrets, the command, versions."""
    study = without_secrets(analysis.study)
    versions = ", ".join(f"{name} {version or 'not installed'}" for name, version in study.versions.items())
    blocks: list[doc.Block] = [doc.Paragraph(_how_to_reproduce(study)), doc.Code(tuple(study.text.splitlines()))]
    if versions:
        blocks.append(doc.Paragraph(f"Measured with {versions}.", "quiet"))
    return _folded_section("Reproduce", blocks)


def _how_to_reproduce(study: StudyRecord) -> str:
    """Return the steps by which one gets these results again."""
    if study.imported is not None:
        return "Import the same files, with what was told of them: vitscale import FILES; vitscale report RESULTS."
    command = shlex.join(["vitscale", "run", f"{study.name}.toml", *study.overrides])
    how = f"Save this as {study.name}.toml, then: {command}; vitscale report RESULTS."
    if NOT_SHOWN in f"{study.text} {study.overrides}":
        how += f" Put in what is {NOT_SHOWN}: secrets, which stand in study.json."
    return how
