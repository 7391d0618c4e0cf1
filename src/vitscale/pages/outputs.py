"""Writes each form of the report to its file, or to standard output if it is read or piped on; notebooks get polars
frames (`vitscale.load("RESULTS")`)."""

from __future__ import annotations

import gzip
import sys
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vitscale import store
from vitscale.advice.pipeline import Advice
from vitscale.analysis import Analysis, TrialResult, analyse
from vitscale.analysis.time.exposure import clocks_ahead, explained_steps, lanes
from vitscale.base.files import told_if_unwritable
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
from vitscale.present.document import Document, Figure
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
    """All that a report is made of."""

    analysis: Analysis
    forecast: Forecast | None = None
    """What is predicted from it; None leaves predictions out."""
    advice: Advice | None = None
    results: Path | None = None
    """The results folder, for commands and paths of logs."""
    brought: tuple[Figure, ...] = ()
    """Charts from other packages."""

    def text(self, kind: str) -> str:
        """The report as html, md, latex or json; or its methods alone, as Markdown."""
        if kind == "json":
            return to_json(self.analysis, self.forecast)
        if kind == "methods":
            methods = Document(self.analysis.study.name, (methods_section(self.analysis, folded=False),))
            document = beginning_with_unread(methods, self.analysis.unread)
        else:
            document = report_document(self.analysis, self.forecast, self.advice, self.results, self.brought)
        if kind == "html":
            return to_html(document, brand="vitscale scaling report", subtitle=counts(self.analysis))
        if kind == "latex":
            from vitscale.present.latex import to_latex

            return to_latex(document)
        from vitscale.present.markdown import to_markdown

        return to_markdown(document)


def brought(names: Sequence[str], reported: Reported) -> tuple[Figure, ...]:
    """The figures that charts of other packages (`vitscale.charts`) draw of these results.

    Raises:
        RequestError: no package offers one of the charts, one is broken, or its figure or a view of it has the name of
            another: of two such pictures one would take the other's place.
    """
    if not names:
        return ()
    own: dict[str, Callable[[Analysis], Figure | None]] = {}
    figures = []
    ours = charts(reported.analysis, reported.forecast, reported.advice).values()
    taken = {name: "vitscale" for figure in ours for name in _names_of(figure)}
    for chart in dict.fromkeys(names):
        drawn = partial(known("chart", chart, own, "__call__"), reported.analysis)
        figure = answer("chart", chart, own, drawn, Figure, type(None))
        if figure is None:
            continue
        package = f"chart {shown(chart)} ({target('chart', chart)})"
        for name in sorted(_names_of(figure)):
            if name in taken:
                what = f"{package} draws {shown(name)}, which is the name of a picture of {taken[name]} too"
                raise RequestError(what, next_step="Leave it out of --chart; its package has to name it otherwise")
        taken |= dict.fromkeys(_names_of(figure), package)
        figures.append(figure)
    return tuple(figures)


def _names_of(figure: Figure) -> set[str]:
    return {figure.name, *(view.name for view in figure.views)}


def write(
    reported: Reported,
    results: Path,
    formats: Sequence[str],
    output: Path | None,
    *,
    to_standard_output: bool = True,
) -> list[Path]:
    """Writes the report in each of `formats`.

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
    for wanted in formats:
        if wanted not in FORMATS:
            raise unknown("format", wanted, FORMATS)
    with told_if_unwritable("the report", output or "standard output", "Name another file or folder with -o"):
        return _write(reported, results, formats, output, printed=TO_STANDARD_OUTPUT if to_standard_output else ())


def _write(
    reported: Reported, results: Path, formats: Sequence[str], output: Path | None, printed: Collection[str]
) -> list[Path]:
    written = []
    many_files = len(formats) > 1 or formats[0] in (*FIGURE_FORMATS, "trace")
    folder_asked = output is not None and (many_files or output.is_dir())
    if output is not None:
        (output if folder_asked else output.parent).mkdir(parents=True, exist_ok=True)
    folder, file = (output or results, None) if folder_asked or output is None else (output.parent, output)
    for kind in formats:
        if kind in TABLES:
            rows = {"trials": trial_rows(reported.analysis), "runs": run_rows(reported.analysis)}
            columns = run_columns(reported.analysis)
            if file is not None and store.is_stream(file):
                raise RequestError(
                    f"{shown(str(file))} is no folder, and {kind} makes two files",
                    next_step="Name a file or a folder with -o",
                )
            for name, own in rows.items():
                path = folder / f"{name}.{kind}"
                if file is not None:
                    path = file if name == "trials" else file.with_name(f"{file.stem}-runs{file.suffix}")
                store.write_whole(path, to_table(own, kind, columns if name == "runs" else {}), make_folder=True)
                written.append(path)
        elif kind in NAMES:
            text = reported.text(kind)
            if output is None and kind in printed:
                sys.stdout.write(text)
                continue
            written.append(file or folder / NAMES[kind])
            store.write_whole(written[-1], text, make_folder=True)
    if drawn_as := [kind for kind in formats if kind in FIGURE_FORMATS]:
        drawn = (*charts(reported.analysis, reported.forecast, reported.advice).values(), *reported.brought)
        views = [view for figure in drawn for view in figure.views]
        for name, content in pictures(views, drawn_as):
            written.append((output or results / "figures") / name)
            store.write_whole(written[-1], content, make_folder=True)
    if "trace" in formats:
        written += _write_traces(reported.analysis, output or results / "traces")
    return written


def _write_traces(analysis: Analysis, folder: Path) -> list[Path]:
    """A trace of each trial's first run that explained steps (`profiles.step_trace`).

    Raises:
        RequestError: no run explained a step.
    """
    from vitscale.profiles.step_trace import step_trace

    written = []
    for result in analysis.trials.values():
        for run, figures in zip(result.recorded_runs, result.run_figures, strict=True):
            if steps := [step for step in explained_steps(run) if step >= (figures.steady_from or 0)]:
                folder.mkdir(parents=True, exist_ok=True)
                written.append(folder / f"{result.trial_id}-r{run.header.repeat}.trace.json.gz")
                text = step_trace(_about(analysis, result, run), (_rank_steps(run, step) for step in steps))
                store.write_whole(written[-1], gzip.compress(text, mtime=0), make_folder=True)
                break
    if not written:
        what = "no run of these results explained a step, so there is none to draw"
        raise RequestError(what, next_step="Run the study with measure.explain = true, or import traces")
    return written


def _rank_steps(run: Run, step: int) -> list[RankStep]:
    from vitscale.profiles.step_trace import RankStep

    lines = {rank.rank: line for rank in run.ranks for line in rank.explained if line.step == step}
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
        "device_names": names,
        **attributes(train, "device", "engine", "zero_stage", "precision", "grad_accum"),
        "micro_batch": train.micro_batch if result.batch_known and not train.micro_batches else None,
        "steps_known": any(rank.steps for rank in run.ranks),
    }


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
    """Charts by name; for a wrong name the error has the nearest."""

    def __missing__(self, name: object) -> Chart:
        raise KeyError(str(unknown("chart", name, self)))


class Frames:
    """A results folder, read at once; each frame is worked out when it is first asked for."""

    def __init__(self, results: Results, *, combine_unlike: bool = False) -> None:
        """`combine_unlike`: as for `vitscale report`."""
        self._results, self._combine_unlike = results, combine_unlike

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
        """A row for each optimizer step of each rank of each run, warm-up and profiled steps included: `trial`,
        `repeat`, `rank`, `step`, `epoch`, `seconds`, `images`, `loss` (null: not told), `warmup`, `window`."""
        import polars  # starts threads, which a process must not have when it is forked

        columns = {
            "trial": polars.String, "repeat": polars.Int64, "rank": polars.Int64, "step": polars.Int64,
            "epoch": polars.Int64, "seconds": polars.Float64, "images": polars.Int64, "loss": polars.Float64,
            "warmup": polars.Boolean, "window": polars.String,
        }  # fmt: skip
        windows = np.array(WINDOWS)
        frames = [
            polars.DataFrame(
                {
                    "step": steps.step,
                    "epoch": steps.epoch,
                    "seconds": steps.seconds,
                    "images": steps.images,
                    "loss": polars.Series(steps.loss).fill_nan(None),
                    "warmup": steps.warmup,
                    "window": windows[steps.window],
                }
            ).select(
                polars.lit(run.header.trial_id).alias("trial"),
                polars.lit(run.header.repeat, polars.Int64).alias("repeat"),
                polars.lit(rank.rank, polars.Int64).alias("rank"),
                polars.all(),
            )
            for run in self._results.runs
            for rank in run.ranks
            if len(steps := Steps.of(rank.steps))
        ]
        return polars.concat(frames).lazy() if frames else polars.LazyFrame(schema=columns)

    @cached_property
    def charts(self) -> Charts:
        """Name ("scaling", "breakdown", ...) to each chart of the report that has data; a notebook shows one."""
        return Charts({name: Chart(figure) for name, figure in charts(self._analysis).items()})

    def __repr__(self) -> str:
        return f"<results of {self._results.study.name}: {counts(self._analysis)}>"

    def _repr_markdown_(self) -> str:
        """What a notebook shows: the tables that `vitscale report` prints."""
        from vitscale.present.markdown import to_markdown

        return to_markdown(beginning_with_unread(terminal_document(self._analysis), self._analysis.unread))


class UnreadWarning(UserWarning):
    """Finished runs are missing from the frames, for they cannot be read."""


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
