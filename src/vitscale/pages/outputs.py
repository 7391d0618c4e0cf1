"""Writes each form of the report to its file, or to standard output.

Notebooks get polars frames and charts instead (`vitscale.load("RESULTS")`).
"""

from __future__ import annotations

import gzip
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from vitscale import store
from vitscale.advice.pipeline import Advice
from vitscale.analysis import Analysis, TrialResult, analyse
from vitscale.analysis.time.exposure import clocks_ahead, explained_steps, lanes
from vitscale.base.files import unwritable_as_request_error
from vitscale.base.plugins import answer, known, target
from vitscale.errors import RequestError, shown, unknown
from vitscale.pages.answers import counts, terminal_document
from vitscale.pages.contract import frame, run_columns, run_rows, to_json, to_table, trial_rows
from vitscale.pages.document import charts, report_document
from vitscale.pages.forms import FORMATS, NAMES, TABLES, TO_STANDARD_OUTPUT
from vitscale.pages.methods import methods_section
from vitscale.pages.tables import trial_label
from vitscale.prediction.results import Forecast
from vitscale.present.data import attributes
from vitscale.present.document import Document, Figure, FigureView
from vitscale.present.drawing import FIGURE_FORMATS, picture, pictures
from vitscale.present.html import to_html
from vitscale.present.unread import beginning_with_unread, unread_sentence
from vitscale.store.lines import WINDOWS, Steps
from vitscale.store.results import Results, Run

if TYPE_CHECKING:
    import polars

    from vitscale.profiles.step_trace import RankStep


@dataclass(frozen=True)
class Reported:
    """The parts from which every form of a report is made."""

    analysis: Analysis
    forecast: Forecast | None = None
    """What is predicted from it; None leaves predictions out."""
    advice: Advice | None = None
    results: Path | None = None
    """The results folder, for commands and paths of logs."""
    package_figures: tuple[Figure, ...] = ()
    """Charts from other packages."""

    def text(self, form: str) -> str:
        """Return the report as html, md, latex or json; or its methods alone, as Markdown (methods)."""
        if form == "json":
            return to_json(self.analysis, self.forecast)
        if form == "methods":
            methods = Document(self.analysis.study.name, (methods_section(self.analysis, folded=False),))
            document = beginning_with_unread(methods, self.analysis.unread)
        else:
            document = report_document(self.analysis, self.forecast, self.advice, self.results, self.package_figures)
        if form == "html":
            return to_html(document, brand="vitscale scaling report", subtitle=counts(self.analysis))
        if form == "latex":
            from vitscale.present.latex import to_latex

            return to_latex(document)
        from vitscale.present.markdown import to_markdown

        return to_markdown(document)


def package_figures(chart_names: Sequence[str], reported: Reported) -> tuple[Figure, ...]:
    """Return the figures that charts of other packages (`vitscale.charts`) draw of these results.

    A picture is a file with the name of its figure or view, so that no two figures may have a picture of one name.

    Raises:
        RequestError: no package offers one of the charts, one is broken, or two charts draw pictures of the same name,
            one of which would take the other's place.
    """
    if not chart_names:
        return ()
    owner_by_picture_name: dict[str, str] = {}
    for figure in charts(reported.analysis, reported.forecast, reported.advice).values():
        for picture_name in _picture_names(figure):
            owner_by_picture_name[picture_name] = "vitscale"
    figures = []
    for chart_name in dict.fromkeys(chart_names):
        package_figure = _figure_of_package(chart_name, reported.analysis)
        if package_figure is None:
            continue
        owner = f"chart {shown(chart_name)} ({target('chart', chart_name)})"
        _refuse_taken_names(package_figure, owner, owner_by_picture_name)
        for picture_name in _picture_names(package_figure):
            owner_by_picture_name[picture_name] = owner
        figures.append(package_figure)
    return tuple(figures)


def _refuse_taken_names(figure: Figure, owner: str, owner_by_picture_name: Mapping[str, str]) -> None:
    """Refuse a figure with a picture whose name a picture of an earlier figure has.

    Args:
        figure: the figure.
        owner: who draws it: "chart flux (package.module:function)".
        owner_by_picture_name: name of each picture of earlier figures -> who draws it.

    Raises:
        RequestError: there is such a picture.
    """
    for name in sorted(_picture_names(figure)):
        if name in owner_by_picture_name:
            other_owner = owner_by_picture_name[name]
            message = f"{owner} draws {shown(name)}, which is the name of a picture of {other_owner} too"
            raise RequestError(message, next_step="Leave it out of --chart; its package has to name it otherwise")


def _figure_of_package(chart_name: str, analysis: Analysis) -> Figure | None:
    """Return the figure of another package's chart; None where it has nothing to draw."""
    own_charts: dict[str, Callable[[Analysis], Figure | None]] = {}  # vitscale's have no names that --chart takes
    draw = known("chart", chart_name, own_charts, "__call__")
    return answer("chart", chart_name, own_charts, partial(draw, analysis), Figure, type(None))


def _picture_names(figure: Figure) -> set[str]:
    """Return the names of a figure and of its views, by which pictures of them are called."""
    return {figure.name, *(view.name for view in figure.views)}


def write(
    reported: Reported,
    results: Path,
    formats: Sequence[str],
    output: Path | None,
    *,
    to_standard_output: bool = True,
) -> list[Path]:
    """Write the report in each of `formats`.

    Args:
        reported: what to write.
        results: the results folder, where files go without `output`: report.html, trials.csv, runs.csv, figures/,
            traces/.
        formats: some of `FORMATS`.
        output: the file, where `formats` is one form of text; for a table the file of the trials, with that of the runs
            beside it (`NAME-runs.csv`). Else the folder for all files.
        to_standard_output: whether forms in `TO_STANDARD_OUTPUT` go there without `output`, and not into a file.

    Returns:
        The files written.

    Raises:
        RequestError: a format is unknown, or a file cannot be written.
    """
    for form in formats:
        if form not in FORMATS:
            raise unknown("format", form, FORMATS)
    with unwritable_as_request_error("the report", output or "standard output", "Name another file or folder with -o"):
        return _write(reported, results, formats, output, to_standard_output=to_standard_output)


def _write(
    reported: Reported, results: Path, formats: Sequence[str], output: Path | None, *, to_standard_output: bool
) -> list[Path]:
    """Write formats that exist: first tables and texts in the order of `formats`, then pictures, then traces."""
    targets = _output_targets(results, formats, output)
    written = []
    for form in formats:
        if form in TABLES:
            written += _write_tables(reported.analysis, form, targets)
        elif form in NAMES:
            text = reported.text(form)
            if output is None and to_standard_output and form in TO_STANDARD_OUTPUT:
                sys.stdout.write(text)
            else:
                path = targets.file or targets.folder / NAMES[form]
                store.write_whole(path, text, make_folder=True)
                written.append(path)
    picture_formats = [form for form in formats if form in FIGURE_FORMATS]
    if picture_formats:
        written += _write_pictures(reported, picture_formats, targets.picture_folder)
    if "trace" in formats:
        written += _write_traces(reported.analysis, targets.trace_folder)
    return written


class _OutputTargets(NamedTuple):
    """Where the files of a report go."""

    folder: Path
    """Folder of texts and tables."""
    file: Path | None
    """The one file that the user named; None: files have their usual names in `folder`."""
    picture_folder: Path
    trace_folder: Path


def _output_targets(results: Path, formats: Sequence[str], output: Path | None) -> _OutputTargets:
    """Return where files go: into the results folder, or where `output` says. The folder of `output` is made."""
    if output is None:
        return _OutputTargets(results, file=None, picture_folder=results / "figures", trace_folder=results / "traces")
    makes_many_files = len(formats) > 1 or formats[0] in (*FIGURE_FORMATS, "trace")
    is_folder = makes_many_files or output.is_dir()
    folder = output if is_folder else output.parent
    folder.mkdir(parents=True, exist_ok=True)
    return _OutputTargets(folder, file=None if is_folder else output, picture_folder=output, trace_folder=output)


def _write_tables(analysis: Analysis, form: str, targets: _OutputTargets) -> list[Path]:
    """Write the table of the trials and the table of the runs, as csv or parquet.

    Raises:
        RequestError: the file that the user named is a stream, which takes no two files.
    """
    file = targets.file
    if file is not None and store.is_stream(file):
        raise RequestError(
            f"{shown(str(file))} is no folder, and {form} makes two files",
            next_step="Name a file or a folder with -o",
        )
    trials_path = targets.folder / f"trials.{form}"
    runs_path = targets.folder / f"runs.{form}"
    if file is not None:
        trials_path = file
        runs_path = file.with_name(f"{file.stem}-runs{file.suffix}")
    store.write_whole(trials_path, to_table(trial_rows(analysis), form, {}), make_folder=True)
    store.write_whole(runs_path, to_table(run_rows(analysis), form, run_columns(analysis)), make_folder=True)
    return [trials_path, runs_path]


def _write_pictures(reported: Reported, formats: Sequence[str], folder: Path) -> list[Path]:
    """Write each view of each figure in each of these picture formats."""
    figures = (*charts(reported.analysis, reported.forecast, reported.advice).values(), *reported.package_figures)
    views: list[FigureView] = []
    for figure in figures:
        views += figure.views
    written = []
    for name, content in pictures(views, formats):
        store.write_whole(folder / name, content, make_folder=True)
        written.append(folder / name)
    return written


def _write_traces(analysis: Analysis, folder: Path) -> list[Path]:
    """Write a trace of each trial's first run that explained steps (`profiles.step_trace`).

    Raises:
        RequestError: no run explained a step.
    """
    written = []
    for result in analysis.trials.values():
        explained = _first_explained_run(result)
        if explained is not None:
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"{result.trial_id}-r{explained.run.header.repeat}.trace.json.gz"
            content = gzip.compress(_step_trace(analysis, result, explained), mtime=0)
            store.write_whole(path, content, make_folder=True)
            written.append(path)
    if not written:
        message = "no run of these results explained a step, so there is none to draw"
        raise RequestError(message, next_step="Run the study with measure.explain = true, or import traces")
    return written


class _ExplainedRun(NamedTuple):
    """A run, and its explained steps that count in its figures."""

    run: Run
    steps: list[int]


def _first_explained_run(result: TrialResult) -> _ExplainedRun | None:
    """Return the first run of a trial with explained steps after its slow beginning; None where no run has any."""
    for run, figures in zip(result.recorded_runs, result.run_figures, strict=True):
        steady_from = figures.steady_from or 0
        steps = [step for step in explained_steps(run) if step >= steady_from]
        if steps:
            return _ExplainedRun(run, steps)
    return None


def _step_trace(analysis: Analysis, result: TrialResult, explained: _ExplainedRun) -> bytes:
    """Return the trace of a run's explained steps, made one step at a time."""
    from vitscale.profiles.step_trace import step_trace

    run_facts = _run_facts(analysis, result, explained.run)
    return step_trace(run_facts, (_rank_steps(explained.run, step) for step in explained.steps))


def _rank_steps(run: Run, step: int) -> list[RankStep]:
    """Return one explained step on all ranks, in the order of the ranks."""
    from vitscale.profiles.step_trace import RankStep

    line_by_rank = {}
    for rank_record in run.ranks:
        for line in rank_record.explained:
            if line.step == step:
                line_by_rank[rank_record.rank] = line
    clock_seconds_ahead = clocks_ahead(list(line_by_rank.values()))
    seconds_ahead_by_rank = dict(zip(line_by_rank, clock_seconds_ahead, strict=True))
    parts_by_rank = lanes(run, step)
    rank_steps = []
    for rank, line in sorted(line_by_rank.items()):
        rank_steps.append(RankStep(rank, line, parts_by_rank[rank], seconds_ahead_by_rank[rank]))
    return rank_steps


def _run_facts(analysis: Analysis, result: TrialResult, run: Run) -> dict[str, Any]:
    """Return the head of a trace: the facts on its run, which an import of the trace reads again."""
    trial = result.trial
    train = trial.train
    is_batch_of_all_ranks = result.batch_known and not train.micro_batches
    device_names = {rank.rank: rank.start.environment.device.name for rank in run.ranks if rank.start is not None}
    return {
        "trial": result.trial_id,
        "repeat": run.header.repeat,
        "label": trial_label(analysis, result),
        "series": _series_name(analysis, result),
        "gpus": trial.world.size,
        "nodes": trial.world.nodes,
        "device_names": device_names,
        **attributes(train, "device", "engine", "zero_stage", "precision", "grad_accum"),
        "micro_batch": train.micro_batch if is_batch_of_all_ranks else None,
        "steps_known": any(rank.steps for rank in run.ranks),
    }


def _series_name(analysis: Analysis, result: TrialResult) -> str | None:
    """Return the origin of an imported trial, else the name of its curve where there are several curves; else None."""
    if result.trial.origin:
        return result.trial.origin
    curve, _ = analysis.curve_of(result.trial_id) or (None, None)
    return curve.name if curve is not None and len(analysis.curves) > 1 else None


@dataclass(frozen=True)
class Chart:
    """A chart of the report; a notebook shows its first view, and `spec` is Vega-Lite for altair or a page."""

    figure: Figure

    @property
    def spec(self) -> dict[str, Any]:
        """The Vega-Lite spec with its title: `altair.Chart.from_dict(chart.spec)`."""
        return dict(self.figure.views[0].titled)

    def __repr__(self) -> str:
        return f"<chart {self.figure.name}: {self.figure.views[0].summary}>"

    def _repr_svg_(self) -> str:
        return picture(self.figure.views[0], "svg").decode()


class Charts(dict[str, Chart]):
    """Name -> chart. The error for a wrong name has the most similar right one."""

    def __missing__(self, name: object) -> Chart:
        raise KeyError(str(unknown("chart", name, self)))


class Frames:
    """A results folder that was read; each frame is worked out when it is first asked for."""

    def __init__(self, results: Results, *, combine_unlike: bool = False) -> None:
        """`combine_unlike`: as for `vitscale report`."""
        self._results = results
        self._combine_unlike = combine_unlike

    @cached_property
    def _analysis(self) -> Analysis:
        return analyse(self._results, combine_unlike=self._combine_unlike)

    @cached_property
    def trials(self) -> polars.LazyFrame:
        """A row for each trial: the columns of `vitscale report --format parquet`."""
        return frame(trial_rows(self._analysis), {}).lazy()

    @cached_property
    def runs(self) -> polars.LazyFrame:
        """A row for each completed run, the swept fields among its columns."""
        return frame(run_rows(self._analysis), run_columns(self._analysis)).lazy()

    @cached_property
    def steps(self) -> polars.LazyFrame:
        """A row for each optimizer step of each rank of each run, warm-up and profiled steps included.

        Its columns are `trial`, `repeat`, `rank`, `step`, `epoch`, `seconds`, `images`, `loss` (null: not recorded),
        `warmup` and `window`.
        """
        import polars  # starts threads, which a process must not have when it is forked

        columns = {
            "trial": polars.String, "repeat": polars.Int64, "rank": polars.Int64, "step": polars.Int64,
            "epoch": polars.Int64, "seconds": polars.Float64, "images": polars.Int64, "loss": polars.Float64,
            "warmup": polars.Boolean, "window": polars.String,
        }  # fmt: skip
        frames = []
        for run in self._results.runs:
            for rank in run.ranks:
                steps = Steps.of(rank.steps)
                if len(steps):
                    frames.append(_steps_frame(run, rank.rank, steps))
        return polars.concat(frames).lazy() if frames else polars.LazyFrame(schema=columns)

    @cached_property
    def charts(self) -> Charts:
        """Name ("scaling", "breakdown", ...) -> each chart of the report that has data; a notebook shows one."""
        return Charts({name: Chart(figure) for name, figure in charts(self._analysis).items()})

    def __repr__(self) -> str:
        return f"<results of {self._results.study.name}: {counts(self._analysis)}>"

    def _repr_markdown_(self) -> str:
        """Return the tables that `vitscale report` prints, for a notebook."""
        from vitscale.present.markdown import to_markdown

        return to_markdown(beginning_with_unread(terminal_document(self._analysis), self._analysis.unread))


def _steps_frame(run: Run, rank: int, steps: Steps) -> polars.DataFrame:
    """Return the rows of one rank in `Frames.steps`."""
    import polars

    of_steps = polars.DataFrame(
        {
            "step": steps.step,
            "epoch": steps.epoch,
            "seconds": steps.seconds,
            "images": steps.images,
            "loss": polars.Series(steps.loss).fill_nan(None),
            "warmup": steps.warmup,
            "window": np.array(WINDOWS)[steps.window],
        }
    )
    return of_steps.select(
        polars.lit(run.header.trial_id).alias("trial"),
        polars.lit(run.header.repeat, polars.Int64).alias("repeat"),
        polars.lit(rank, polars.Int64).alias("rank"),
        polars.all(),
    )


class UnreadWarning(UserWarning):
    """Finished runs are missing from the frames, because they cannot be read."""


def load(results: str | Path, *, combine_unlike: bool = False) -> Frames:
    """Loads results as frames and charts, each worked out when it is first asked for.

    Args:
        results: a results folder, or a bundle of it; `~` is the home folder.
        combine_unlike: combine runs although they ran on unlike hardware or under other library versions.

    Returns:
        Lazy polars frames (`trials`, `runs`, `steps`; times in seconds, memory in bytes, null where unavailable) and
        `charts`; a notebook shows the tables of the report.

    Raises:
        StoreError: the folder holds no results, or results of a newer format.

    Warns:
        UnreadWarning: finished runs cannot be read, and are in no frame.

    Example:
        >>> loaded = vitscale.load("results")
        >>> loaded.trials.collect()["gpus"].to_list()
        [1, 2, 4]
    """
    read = store.load(Path(results).expanduser())
    if read.unread:
        warnings.warn(unread_sentence(read.unread), UnreadWarning, stacklevel=2)
    return Frames(read, combine_unlike=combine_unlike)
