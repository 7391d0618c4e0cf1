"""Where each form of the report goes: its file, or standard output for what is read or piped on."""

from __future__ import annotations

import gzip
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitscale.advice.pipeline import Advice
from vitscale.analysis import Analysis, TrialResult
from vitscale.analysis.time.exposure import clocks_ahead, explained_steps, lanes
from vitscale.base.plugins import known
from vitscale.errors import RequestError, shown, unknown
from vitscale.prediction.results import Forecast
from vitscale.present.document import Figure
from vitscale.present.drawing import FIGURE_FORMATS, draw, write_bytes
from vitscale.present.html import to_html
from vitscale.present.latex import to_latex
from vitscale.present.markdown import to_markdown
from vitscale.profiles.step_trace import RankStep, step_trace
from vitscale.report.contract import run_rows, to_json, to_table, trial_rows
from vitscale.report.document import charts, counts, report_document
from vitscale.report.tables import trial_label
from vitscale.store.results import Run

_TABLES = ("csv", "parquet")
_TO_STANDARD_OUTPUT = ("md", "json", "latex")
_NAMES = {"html": "report.html", "md": "report.md", "latex": "report.tex", "json": "report.json"}

FORMATS = (*_NAMES, *_TABLES, *FIGURE_FORMATS, "trace")
WITHOUT_PREDICTIONS = (*_TABLES, "trace")
OF_DATA = ("json", *WITHOUT_PREDICTIONS)
"""Without advice."""


@dataclass(frozen=True)
class Reported:
    """All that a report is made of."""

    analysis: Analysis
    outlook: Forecast | None = None
    """What is predicted beside it; None leaves that out."""
    advice: Advice | None = None
    results: Path | None = None
    """The folder, for commands and paths of logs."""
    brought: tuple[Figure, ...] = ()
    """Charts of other packages."""

    def text(self, kind: str) -> str:
        """The report as html, md, latex or json."""
        if kind == "json":
            return to_json(self.analysis, self.outlook)
        document = report_document(self.analysis, self.outlook, self.advice, self.results, self.brought)
        if kind == "html":
            return to_html(document, brand="vitscale scaling report", subtitle=counts(self.analysis))
        return to_latex(document) if kind == "latex" else to_markdown(document)


def brought(names: Sequence[str], analysis: Analysis) -> tuple[Figure, ...]:
    """What charts of other packages (`vitscale.charts`) draw of these results.

    Raises:
        RequestError: no package offers one of them, or it is broken.
    """
    own: dict[str, Callable[[Analysis], Figure | None]] = {}
    drawn = [known("chart", name, own, "__call__")(analysis) for name in dict.fromkeys(names)]
    return tuple(figure for figure in drawn if figure is not None)


def write(reported: Reported, results: Path, formats: Sequence[str], output: Path | None) -> list[Path]:
    """Writes the report in each of `formats`.

    Args:
        reported: what to write.
        results: the results folder, where files go without `output`: report.html, trials.csv, runs.csv, figures/,
            traces/.
        formats: some of html, md, latex, json, csv, parquet, png, svg, pdf, trace.
        output: the file, where `formats` is one form of text; of a table that of the trials, the runs' beside it
            (`NAME-runs.csv`). Else the folder for all of them. Without it md, latex and json go to standard output.

    Returns:
        The files written.

    Raises:
        RequestError: a format is none of ours, or a file cannot be written.
    """
    for wanted in formats:
        if wanted not in FORMATS:
            raise unknown("format", wanted, FORMATS)
    try:
        return _write(reported, results, formats, output)
    except BrokenPipeError:
        raise  # nobody reads on: no error
    except OSError as error:
        where = error.filename or output or "standard output"
        raise RequestError(
            f"the report cannot be written to {shown(str(where))}: {error.strerror or error}",
            next_step="Name another file or folder with -o",
        ) from error


def _write(reported: Reported, results: Path, formats: Sequence[str], output: Path | None) -> list[Path]:
    written = []
    many_files = len(formats) > 1 or formats[0] in (*FIGURE_FORMATS, "trace")
    folder_asked = output is not None and (many_files or output.is_dir())
    if output is not None:
        (output if folder_asked else output.parent).mkdir(parents=True, exist_ok=True)
    folder, file = (output or results, None) if folder_asked or output is None else (output.parent, output)
    for kind in formats:
        if kind in _TABLES:
            rows = {"trials": trial_rows(reported.analysis), "runs": run_rows(reported.analysis)}
            for name, own in rows.items():
                path = folder / f"{name}.{kind}"
                if file is not None:
                    path = file if name == "trials" else file.with_name(f"{file.stem}-runs{file.suffix}")
                write_bytes(path, to_table(own, kind))
                written.append(path)
        elif kind in _NAMES:
            text = reported.text(kind)
            if output is None and kind in _TO_STANDARD_OUTPUT:
                sys.stdout.write(text)
                continue
            written.append(file or folder / _NAMES[kind])
            write_bytes(written[-1], text.encode())
    if pictures := [kind for kind in formats if kind in FIGURE_FORMATS]:
        drawn = (*charts(reported.analysis, reported.outlook, reported.advice).values(), *reported.brought)
        views = [view for figure in drawn for view in figure.views]
        written += draw(views, output or results / "figures", pictures)
    if "trace" in formats:
        written += _write_traces(reported.analysis, output or results / "traces")
    return written


def _write_traces(analysis: Analysis, folder: Path) -> list[Path]:
    """A trace of each trial's first run that explained steps (`profiles.step_trace`).

    Raises:
        RequestError: no run did.
    """
    written = []
    for result in analysis.trials.values():
        for run, figures in zip(result.records, result.runs, strict=True):
            if steps := [step for step in explained_steps(run) if step >= (figures.steady_from or 0)]:
                folder.mkdir(parents=True, exist_ok=True)
                written.append(folder / f"{result.trial_id}-r{run.header.repeat}.trace.json.gz")
                text = step_trace(_about(analysis, result, run), (_rank_steps(run, step) for step in steps))
                write_bytes(written[-1], gzip.compress(text, mtime=0))
                break
    if not written:
        raise RequestError(
            "no run of these results explained a step, so there is none to draw",
            next_step="Run the study with measure.explain = true, or import traces",
        )
    return written


def _rank_steps(run: Run, step: int) -> list[RankStep]:
    lines = {rank.rank: next(line for line in rank.explained if line.step == step) for rank in run.ranks}
    ahead = dict(zip(lines, clocks_ahead(list(lines.values())), strict=True))
    parts = lanes(run, step)
    return [RankStep(rank, line, parts[rank], ahead[rank]) for rank, line in sorted(lines.items())]


def _about(analysis: Analysis, result: TrialResult, run: Run) -> dict[str, Any]:
    trial, train = result.trial, result.trial.train
    curve, _ = analysis.curve_of(result.trial_id) or (None, None)
    names = {rank.rank: rank.start.environment.device.name for rank in run.ranks if rank.start is not None}
    return {
        "trial": result.trial_id,
        "repeat": run.header.repeat,
        "label": trial_label(analysis, result),
        "series": trial.origin or (curve.name if curve and len(analysis.curves) > 1 else None),
        "gpus": trial.world.size,
        "nodes": trial.world.nodes,
        "device": train.device,
        "device_names": names,
        "engine": train.engine,
        "zero_stage": train.zero_stage,
        "precision": train.precision,
        "micro_batch": train.micro_batch if result.batch_known and not train.micro_batches else None,
        "grad_accum": train.grad_accum,
        "steps_known": any(rank.steps for rank in run.ranks),
    }
