"""Where each form of the report goes: its file, or standard output for what is read or piped on."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from vitscale.analysis import Analysis
from vitscale.errors import RequestError, explain, shown, unknown
from vitscale.prediction.results import Forecast
from vitscale.report.contract import to_csv, to_json
from vitscale.report.drawing import FIGURE_FORMATS, write_figures
from vitscale.report.markdown import to_markdown
from vitscale.report.page import to_html
from vitscale.store import write_whole

_TEXTS: dict[str, tuple[str, Callable[[Analysis, Forecast | None], str]]] = {
    "html": ("report.html", to_html),
    "csv": ("trials.csv", lambda analysis, _outlook: to_csv(analysis)),
    "md": ("report.md", to_markdown),
    "json": ("report.json", to_json),
}
_TO_STANDARD_OUTPUT = ("md", "json")

FORMATS = (*_TEXTS, *FIGURE_FORMATS)


def write(
    analysis: Analysis,
    results: Path,
    formats: Sequence[str],
    output: Path | None,
    outlook: Forecast | None = None,
) -> list[Path]:
    """Writes the report in each of `formats`.

    Args:
        analysis: what to report.
        results: the results folder, where files go without `output`: report.html, trials.csv, figures/.
        formats: some of html, csv, md, json, png, svg, pdf.
        output: the file, where `formats` is one form of text; else the folder for all of them. Without it md and json
            go to standard output.
        outlook: what is predicted beside it; None leaves that out.

    Returns:
        The files written.

    Raises:
        RequestError: a format is none of ours, or a file cannot be written.
    """
    for wanted in formats:
        if wanted not in FORMATS:
            raise unknown("format", wanted, FORMATS)
    try:
        return _write(analysis, results, formats, output, outlook)
    except BrokenPipeError:
        raise  # nobody reads on: no error
    except OSError as error:
        place = error.filename or output or "standard output"
        raise RequestError(
            explain(
                f"the report cannot be written to {shown(str(place))}: {error.strerror or error}",
                next_step="Name another place with -o",
            )
        ) from error


def _write(
    analysis: Analysis, results: Path, formats: Sequence[str], output: Path | None, outlook: Forecast | None
) -> list[Path]:
    written = []
    folder_asked = output is not None and (len(formats) > 1 or formats[0] in FIGURE_FORMATS or output.is_dir())
    if output is not None:
        (output if folder_asked else output.parent).mkdir(parents=True, exist_ok=True)
    for kind in (one for one in formats if one in _TEXTS):
        name, made = _TEXTS[kind]
        if output is None and kind in _TO_STANDARD_OUTPUT:
            sys.stdout.write(made(analysis, outlook))
            continue
        path = (output or results) / name if output is None or folder_asked else output
        write_whole(path, made(analysis, outlook))
        written.append(path)
    if pictures := [kind for kind in formats if kind in FIGURE_FORMATS]:
        written += write_figures(analysis, output or results / "figures", pictures, outlook)
    return written
