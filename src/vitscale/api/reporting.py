"""report, report_like: results as tables, figures, one page, or data; and as a published study drew its own."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from typing_extensions import override

from vitscale import analysis
from vitscale.advice.pipeline import Advice, advised_from
from vitscale.advice.request import Request
from vitscale.analysis import Analysis
from vitscale.api.arguments import StrPath, path_of, path_or_none
from vitscale.errors import RequestError, unknown
from vitscale.pages import outputs
from vitscale.pages.answers import counts, terminal_document
from vitscale.pages.contract import report_fields
from vitscale.pages.forms import NAMES, OF_DATA, WITHOUT_PREDICTIONS, report_files
from vitscale.prediction import answering, fitting
from vitscale.prediction.evidence import evidence_of
from vitscale.prediction.fitting import Fitted
from vitscale.prediction.results import Forecast
from vitscale.present.document import Document
from vitscale.present.unread import Unread
from vitscale.present.verb_result import VerbResult
from vitscale.store.reading import without_collection


@dataclass(frozen=True, repr=False)
class ReportResult(VerbResult):
    """A report: predictions and advice are worked out when a form that has them is first asked for."""

    results: Path
    """The results folder, or the bundle of it."""
    analysis: Analysis
    """All figures, findings and problems."""
    charts: tuple[str, ...] = ()
    """Names of charts of other packages, beside those of vitscale."""
    written: tuple[Path, ...] = ()
    """The files that were written, named at the end of its document."""

    verb = "report"

    @cached_property
    def _fitted(self) -> Fitted:
        return fitting.fit(evidence_of(self.results, self.analysis))

    @cached_property
    def forecast(self) -> Forecast | None:
        """Predictions beyond the measured rank counts; None where nothing was measured or lies beyond."""
        return answering.forecast(self._fitted)

    @cached_property
    def advice(self) -> Advice | None:
        """Advice without any limits; None where these results allow none."""
        try:
            return advised_from(self._fitted, self.analysis, Request())
        except RequestError:
            return None

    @property
    @override
    def unread(self) -> Sequence[Unread]:
        return self.analysis.unread

    @property
    @override
    def summary(self) -> str:
        return f"{self.analysis.study.name}, {counts(self.analysis)}"

    @override
    def _answer_fields(self) -> Mapping[str, Any]:
        return report_fields(self.analysis, self.forecast)

    @override
    def _answer_document(self) -> Document:
        return terminal_document(self.analysis, [f"Report: {path}" for path in self.written])

    def text(self, form: str) -> str:
        """Return the report as "html", "md", "latex", "json", or its "methods" alone.

        Raises:
            RequestError: the form is none of these.
        """
        if form not in NAMES:
            raise unknown("form of text", form, NAMES)
        return self._contents([form]).text(form)

    def write(
        self, formats: Sequence[str] = (), output: StrPath | None = None, *, to_standard_output: bool = False
    ) -> list[Path]:
        """Write the report; return the files.

        Args:
            formats: html, md, latex, json, csv, parquet, png, svg, pdf, methods or trace; none: as the name of `output`
                ends, else html.
            output: the file; for several forms or pictures a folder. None: the results folder.
            to_standard_output: whether forms of text other than html are printed, and not written into files, where
                `output` is None. Without effect otherwise.

        Raises:
            RequestError: a form is unknown, or a file cannot be written.
        """
        files = report_files(formats, path_or_none(output))
        return outputs.write(
            self._contents(files.formats),
            default_output_folder(self.results),
            files.formats,
            files.output,
            to_standard_output=to_standard_output,
        )

    def _contents(self, formats: Collection[str]) -> outputs.Reported:
        """Return the contents of a report in these forms, with the charts of other packages.

        Predictions and advice are only worked out where a form has them: advice takes as long as all predictions.
        """
        has_predictions = bool(set(formats) - {*WITHOUT_PREDICTIONS})
        has_advice = bool(set(formats) - {*OF_DATA})
        forecast = self.forecast if has_predictions else None
        advice = self.advice if has_advice else None
        reported = outputs.Reported(self.analysis, forecast, advice, self.results)
        return replace(reported, package_figures=outputs.package_figures(self.charts, reported))


def report(results: StrPath, *, combine_unlike: bool = False, charts: Sequence[str] = ()) -> ReportResult:
    """Reports results: shown as tables; `write` makes a page, figures and data of them.

    Args:
        results: a results folder, or a bundle of it.
        combine_unlike: combine runs although they ran on unlike hardware or under other library versions.
        charts: names of charts of other packages, beside those of vitscale.

    Returns:
        The report. Nothing is written before its `write` is called.

    Raises:
        StoreError: the folder holds no results, or they cannot be read.

    Example:
        >>> reported = vitscale.report("results")
        >>> reported
        <report: documented, 3 of 3 trials completed, 9 runs>
        >>> [str(path) for path in reported.write(["html", "csv"], "pages")]
        ['pages/report.html', 'pages/trials.csv', 'pages/runs.csv']
    """
    folder = path_of(results)
    with without_collection():  # or it would begin between reading and analysing
        analysed = analysis.analyse_folder(folder, combine_unlike=combine_unlike)
    return ReportResult(folder, analysed, tuple(charts))


@dataclass(frozen=True)
class LikeResult:
    """Figures, tables and claims of a published study, made from other results."""

    written: tuple[Path, ...]
    """The files."""
    document: Document
    """The study's claims tested on these results, and where the files are."""


def report_like(
    results: StrPath,
    study: str,
    *,
    formats: Sequence[str] = (),
    output: StrPath | None = None,
    combine_unlike: bool = False,
    to_standard_output: bool = False,
) -> LikeResult:
    """Draws a published study's figures from these results, and tests its claims on them.

    Args:
        results: a results folder, or a bundle of it.
        study: "paper" (arXiv 2602.21081) or "thesis" (Garrett, Pittsburgh 2023).
        formats: html, json, png, svg or pdf; none: as the name of `output` ends, else html.
        output: the folder; for html alone or json alone also a file. None: like-NAME in the results folder.
        combine_unlike: combine runs although they ran on unlike hardware or under other library versions.
        to_standard_output: whether JSON is printed, and no file written, where it is the only format and `output` is
            None. Without effect otherwise.

    Raises:
        RequestError: the study or a form is unknown, or a file cannot be written.
        StoreError: the folder holds no results, or they cannot be read.
    """
    from vitscale.pages import like

    published = like.study_named(study)
    files = report_files(formats, path_or_none(output))
    for form in files.formats:
        if form not in like.FORMATS:
            raise unknown("format of --like", form, like.FORMATS)
    folder = path_of(results)
    analysed = analysis.analyse_folder(folder, combine_unlike=combine_unlike)
    measured = like.MeasuredData.of(analysed, evidence_of(folder, analysed).network)
    written = like.write(
        published,
        measured,
        default_output_folder(folder),
        files.formats,
        files.output,
        to_standard_output=to_standard_output,
    )
    return LikeResult(tuple(written), like.terminal_document(published, measured, written))


def default_output_folder(results: Path) -> Path:
    """Return the folder to write to where no output is named: the results folder; for a bundle, a folder beside it.

    Example: the folder of "lab/bundle.tar.gz" is "lab/bundle". It is "lab/bundle-report" where "lab/bundle" holds
    results of its own, or is the bundle itself, which has no suffix then.
    """
    if not results.is_file():
        return results
    name = results.name.removesuffix(".tgz").removesuffix(".tar.gz")
    is_bundle_itself = name == results.name
    holds_results = (results.with_name(name) / "study.json").exists()
    return results.with_name(f"{name}-report" if is_bundle_itself or holds_results else name)
