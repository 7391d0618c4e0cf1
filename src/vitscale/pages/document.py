"""The report as one document: five answers first, what they rest on folded below; each form lays out the same."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from vitscale.advice import sentences as advised
from vitscale.advice.pipeline import Advice
from vitscale.analysis import Analysis, by_mode
from vitscale.analysis.summaries import NOT_RUN_YET
from vitscale.pages import answers, detail_tables, methods, prediction_words, sentences
from vitscale.pages.answers import bullets, engine_sentences
from vitscale.pages.charts import accuracy, prediction, resources, scaling, time, timeline
from vitscale.pages.charts.advice import advice_chart
from vitscale.pages.choosing import best_measured
from vitscale.pages.detail_tables import traffic_table
from vitscale.pages.prediction_table import prediction_tables
from vitscale.pages.resolutions import resolution_table
from vitscale.pages.tables import batch_text, comparison_tables, mode_tables, trial_label
from vitscale.prediction.results import Forecast
from vitscale.present import document as doc
from vitscale.present import units
from vitscale.present.unread import beginning_with_unread
from vitscale.store.redaction import NOT_SHOWN, without_secrets

_LONGEST_DETAIL = 20_000
_MOST_DETAIL_LINES = 40
_MOST_WAITING = 5
_MOST_FAILED = 5
"""Number of trials with failed runs beyond which their section is folded."""


def report_document(
    analysis: Analysis,
    forecast: Forecast | None = None,
    advice: Advice | None = None,
    results: Path | None = None,
    brought: Sequence[doc.Figure] = (),
) -> doc.Document:
    """The whole report on a results folder.

    Args:
        analysis: the results.
        forecast: what is predicted from them; None leaves it out.
        advice: what to do; None leaves it out.
        results: the folder, for commands and paths of logs.
        brought: charts from other packages.
    """
    drawn = charts(analysis, forecast, advice)
    first = (
        answers.how_it_scales(analysis, drawn.get("scaling")),
        answers.what_to_choose(analysis),
        answers.why_not_better(analysis, drawn.get("waterfall")),
        answers.what_next(analysis, advice, results),
        answers.can_it_be_trusted(analysis),
    )
    rest = (
        _every_configuration(analysis),
        _not_completed(analysis, results),
        _time(analysis, drawn),
        _engines(analysis),
        _accuracy(analysis, drawn),
        _resources(analysis, drawn),
        _ahead(forecast, advice, drawn),
        _section("From other packages", brought),
        _runs(analysis, results),
        _environment(analysis),
        _section("Unused records", [bullets(analysis.problems)]),
        _reproduce(analysis),
        methods.methods_section(analysis),
    )
    document = doc.Document(analysis.study.name, (*first, *(section for section in rest if section is not None)))
    return beginning_with_unread(document, analysis.unread)


def charts(analysis: Analysis, forecast: Forecast | None = None, advice: Advice | None = None) -> dict[str, doc.Figure]:
    """Name to chart, for all that have data, in the order of the report."""
    measured = [c for c in analysis.curves if any(analysis.trials[point.trial_id].run_figures for point in c.points)]
    best = best_measured(analysis)
    figures = (
        scaling.scaling_chart(analysis, measured),
        time.waterfall_chart(analysis.waterfalls, chosen=best.trial_id if best else ""),
        time.breakdown_chart(analysis, measured),
        timeline.timeline_chart(analysis),
        accuracy.training_chart(analysis, measured),
        accuracy.accuracy_chart(analysis, measured),
        resources.resource_chart(analysis, measured),
        resources.resolution_chart(analysis),
        resources.startup_chart(analysis),
        prediction.prediction_chart(analysis, forecast) if forecast is not None else None,
        advice_chart(advice) if advice is not None else None,
    )
    return {chart.name: chart for chart in figures if chart is not None}


def _section(title: str, blocks: Iterable[doc.Block | None]) -> doc.Section | None:
    known = tuple(block for block in blocks if block is not None)
    return doc.Section(title, known, folded=True) if known else None


def _every_configuration(analysis: Analysis) -> doc.Section | None:
    blocks: list[doc.Block] = []
    for mode, own in mode_tables(analysis).items():
        blocks += [doc.Paragraph(sentences.MODE_MEANINGS[mode], "quiet"), own]
    return _section("Every configuration", blocks)


def _not_completed(analysis: Analysis, results: Path | None) -> doc.Section | None:
    blocks: list[doc.Block] = []
    waiting = [trial_label(analysis, t) for t in analysis.trials.values() if t.outcome is None and not t.failures]
    if waiting:
        blocks.append(doc.Paragraph(f"{NOT_RUN_YET.capitalize()}: {units.listed(waiting, most=_MOST_WAITING)}."))
    for trial in analysis.trials.values():
        if trial.outcome in ("completed", None) and not trial.failures:
            continue
        name = trial_label(analysis, trial)
        if not trial.failures:
            blocks.append(doc.Paragraph(f"{name}: {trial.outcome}.", "bad"))
        for failure in trial.failures:
            blocks.append(
                doc.Paragraph(f"{name}, repeat {failure.repeat + 1}: {failure.kind}: {failure.reason}", "bad")
            )
            if failure.log:
                blocks.append(doc.Code((_path(results, failure.log),)))
            if failure.detail:
                lines = tuple(failure.detail[-_LONGEST_DETAIL:].splitlines()[-_MOST_DETAIL_LINES:])
                rank = "" if failure.rank is None else f" of rank {failure.rank}"
                blocks.append(doc.Section(f"What was said last{rank}", (doc.Code(lines),), folded=True))
    many = sum(bool(trial.failures) for trial in analysis.trials.values()) > _MOST_FAILED
    return doc.Section("Trials that did not complete", tuple(blocks), folded=many) if blocks else None


def _path(results: Path | None, inside: str) -> str:
    return doc.plain(inside if results is None else str(results / inside))


def _time(analysis: Analysis, drawn: dict[str, doc.Figure]) -> doc.Section | None:
    if not any(trial.run_figures for trial in analysis.trials.values()):
        return None
    explained = any(trial.breakdown for trial in analysis.trials.values())
    remarks = [
        "" if explained else "No step was explained, so its parts are unknown.",
        *sentences.unexplained(analysis),
    ]
    meaning = (
        "Of explained steps, on a GPU without what explaining adds: the parts never overlap and add up to the step. "
        "Exposed communication is time in which a "
        "rank computes nothing because a collective is not done: waiting for the slowest rank, and the transfer (wire)."
    )
    return _section(
        "Where the time goes",
        (
            doc.Paragraph(meaning, "quiet") if explained else None,
            bullets([*remarks, sentences.explaining_cost(analysis)]),
            drawn.get("breakdown"),
            drawn.get("timeline"),
            drawn.get("start-up"),
            detail_tables.four_figures(analysis),
            detail_tables.parts_table(analysis),
        ),
    )


def _accuracy(analysis: Analysis, drawn: dict[str, doc.Figure]) -> doc.Section | None:
    figures = [
        drawn.get("training"),
        drawn.get("accuracy"),
        *(detail_tables.accuracy_table(analysis, own) for own in by_mode(analysis.curves).values()),
    ]
    meaning = (
        "A larger global batch takes fewer steps an epoch, and beyond the gradient noise scale each of them teaches "
        "less: throughput alone says nothing of the time to an accuracy."
    )
    return _section("Accuracy", (doc.Paragraph(meaning, "quiet"), *figures)) if any(figures) else None


def _resources(analysis: Analysis, drawn: dict[str, doc.Figure]) -> doc.Section | None:
    figures = (drawn.get("resolution"), drawn.get("resources"))
    return _section("Resources", (*figures, resolution_table(analysis), detail_tables.resource_table(analysis)))


def _engines(analysis: Analysis) -> doc.Section | None:
    compared = comparison_tables(analysis)
    meaning = (
        "How many times as fast an epoch is as that of one curve, at equal rank count, of curves that differ in one "
        "thing: a swept field, or an engine with its options. An interval that holds 1 shows no difference. Every pair "
        "stands in the JSON."
    )
    told = [*engine_sentences(analysis), sentences.equality(analysis)]
    told += [sentences.multiplicity(analysis), sentences.scope(analysis)]
    return _section(
        "Engine against engine",
        (bullets(told), doc.Paragraph(meaning, "quiet") if compared else None, *compared, traffic_table(analysis)),
    )


def _ahead(forecast: Forecast | None, advice: Advice | None, drawn: dict[str, doc.Figure]) -> doc.Section | None:
    blocks: list[doc.Block | None] = []
    if forecast is not None:
        tables, alike = prediction_tables(forecast)
        blocks += [
            doc.Paragraph(prediction_words.INTERVALS_MEANING, "quiet"),
            bullets(prediction_words.scores(forecast)),
            drawn.get("prediction"),
            *tables,
            bullets(
                (
                    *alike,
                    prediction_words.network(forecast.evidence),
                    *prediction_words.labels(forecast.predictions),
                    prediction_words.ASK_FOR_MORE,
                )
            ),
        ]
    if advice is not None:
        chosen = [
            f"{advised.question(advice, answer).capitalize()}: {advised.in_short(answer.option)}: "
            f"{advised.time(answer.option.seconds)}, {answer.option.label}."
            for answer in advice.answers
        ]
        blocks += [drawn.get("advice"), bullets((*chosen, *advised.notes(advice)))]
    return _section("Prediction and advice", blocks)


def _runs(analysis: Analysis, results: Path | None) -> doc.Section | None:
    measured = [trial for trial in analysis.trials.values() if trial.run_figures]
    if not measured:
        return None
    step = units.time_unit(run.step_seconds for trial in measured for run in trial.run_figures)
    epoch = units.time_unit(run.epoch_seconds for trial in measured for run in trial.run_figures)
    columns = [
        doc.Column("repeat"), doc.Column("timed steps"), doc.Column("step", step.sign), doc.Column("epoch", epoch.sign),
        doc.Column("images/s"), doc.Column("start-up", "s"), doc.Column("memory"), doc.Column("log", words=True),
    ]  # fmt: skip
    rows: dict[str, list[Sequence[str]]] = {}
    for trial in measured:
        rows.setdefault(f"{trial_label(analysis, trial)}, batch {batch_text(trial)}", []).extend(
            (
                str(record.header.repeat + 1), f"{run.timed_steps:,}", step.text(run.step_seconds),
                epoch.text(run.epoch_seconds), units.number(run.images_per_second),
                units.number(start_up.seconds), units.size(run.peak_bytes), _path(results, record.header.log),
            )
            for run, start_up, record in zip(trial.run_figures, trial.start_ups, trial.recorded_runs, strict=True)
        )  # fmt: skip
    return _section("Every run", (doc.table(columns, rows, label="trial"),))


def _environment(analysis: Analysis) -> doc.Section | None:
    """The different surroundings of the study's runs, each with the number of its trials."""
    around = Counter(trial.environment.without_clock for trial in analysis.trials.values() if trial.environment)
    tables = [
        doc.table(
            (doc.Column("", words=True), doc.Column(units.counted(trials, "trial"), words=True)),
            [
                ("device", ", ".join(environment.devices)),
                ("host", ", ".join(environment.hosts)),
                ("driver", ", ".join(environment.drivers) or "none recorded"),
                *((name, ", ".join(values)) for name, values in environment.hardware),
                ("CPU quota", ", ".join(f"{quota:g} cores" for quota in environment.quotas) or "none"),
                ("git revision", environment.git_revision or "none recorded"),
                ("versions", ", ".join(f"{name} {version}" for name, version in environment.versions)),
                ("transport settings", ", ".join(f"{name}={value}" for name, value in environment.settings) or "none"),
            ],
        )
        for environment, trials in around.items()
    ]
    return _section("Environment", [*tables] or [doc.Paragraph("No completed run has recorded its environment.")])


def _reproduce(analysis: Analysis) -> doc.Section | None:
    study = without_secrets(analysis.study)
    versions = ", ".join(f"{name} {version or 'not installed'}" for name, version in study.versions.items())
    again = ["vitscale", "run", f"{study.name}.toml", *study.overrides]
    how = f"Save this as {study.name}.toml, then: {shlex.join(again)}; vitscale report RESULTS."
    if NOT_SHOWN in f"{study.text} {study.overrides}":
        how += f" Put in what is {NOT_SHOWN}: secrets, which stand in study.json."
    if study.imported is not None:
        how = "Import the same files, with what was told of them: vitscale import FILES; vitscale report RESULTS."
    return _section(
        "Reproduce",
        (
            doc.Paragraph(how),
            doc.Code(tuple(study.text.splitlines())),
            doc.Paragraph(f"Measured with {versions}.", "quiet") if versions else None,
        ),
    )
