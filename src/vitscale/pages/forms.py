"""The forms (formats) of a report, and the form that the end of a file's name stands for.

The module imports little, because it is needed before anything else is.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from vitscale.errors import RequestError, shown, unknown
from vitscale.present.drawing import FIGURE_FORMATS

TABLES = ("csv", "parquet")
"""Forms that make two files: of the trials and of the runs."""
TO_STANDARD_OUTPUT = ("md", "json", "latex", "methods")
"""Forms of text that go to standard output where no file is named."""
NAMES = {
    "html": "report.html",
    "md": "report.md",
    "latex": "report.tex",
    "json": "report.json",
    "methods": "methods.md",
}
"""Forms that are one text -> the name of their file."""
FORMATS = (*NAMES, *TABLES, *FIGURE_FORMATS, "trace")
WITHOUT_PREDICTIONS = (*TABLES, "methods", "trace")
OF_DATA = ("json", *WITHOUT_PREDICTIONS)
"""Forms without advice."""
_FORM_BY_SUFFIX = {"": "html", ".html": "html", ".htm": "html", ".md": "md", ".tex": "latex"} | {
    f".{name}": name for name in ("json", "csv", "parquet", "png", "svg", "pdf")
}
"""End of a file's name -> the form that it means."""


class ReportFiles(NamedTuple):
    """The forms that are asked for, and where they go."""

    formats: tuple[str, ...]
    output: Path | None
    """The file, or the folder for several; None: each form's usual place."""


def report_files(formats: Sequence[str], output: Path | None) -> ReportFiles:
    """Return the requested forms, each once; where none is named, the one that the end of the file's name stands for.

    Raises:
        RequestError: the file's name means no form, it is one file for several forms, or results are read from it.
    """
    suffix = _suffix(output)
    if output is not None and is_record(output):
        message = f"-o {shown(str(output))} is a file that results are read from"
        raise RequestError(message, next_step="Name another file with -o, and it stays as it is")
    requested = [name.strip().lower() for name in formats] or [_form_of_suffix(suffix)]
    distinct = tuple(dict.fromkeys(requested))
    makes_several_files = len(distinct) > 1 or distinct[0] in (*FIGURE_FORMATS, "trace")
    names_one_file = bool(suffix) and suffix in _FORM_BY_SUFFIX
    if names_one_file and makes_several_files:
        message = f"-o {shown(str(output))} names one file, and --format {','.join(distinct)} makes several"
        raise RequestError(message, next_step="Name a folder with -o")
    return ReportFiles(distinct, output)


def check_formats(formats: Sequence[str]) -> None:
    """Refuse forms that a report does not have.

    Raises:
        RequestError: one is unknown.
    """
    for form in formats:
        if form not in FORMATS:
            raise unknown("format", form, FORMATS)


def means_another_form(output: Path | None, form: str) -> bool:
    """Whether the end of a file's name means another form than this one."""
    suffix = _suffix(output)
    return bool(suffix) and _FORM_BY_SUFFIX.get(suffix, form) != form


def is_record(file: Path) -> bool:
    """Whether a report in place of this file would destroy a results folder."""
    file = file.resolve()
    if not file.is_file():
        return False
    return any(_holds_results(folder, file.relative_to(folder).parts[0]) for folder in file.parents[:3])


def _holds_results(folder: Path, name: str) -> bool:
    """Whether a folder is a results folder, and `name` one of the entries that make it one."""
    names_in_results = {"study.json", "lock", "runs", "packs", "checks", "jobs"}
    return name in names_in_results and (folder / "study.json").is_file()


def _suffix(output: Path | None) -> str:
    """Return the end of a file's name in small letters; empty for a folder that exists, or without a file."""
    return "" if output is None or output.is_dir() else output.suffix.lower()


def _form_of_suffix(suffix: str) -> str:
    """Return the form that the end of a file's name stands for; html without an end.

    Raises:
        RequestError: it means none.
    """
    if suffix in _FORM_BY_SUFFIX:
        return _FORM_BY_SUFFIX[suffix]
    if not suffix[1:].isalpha():
        return "html"  # "report-2024.05" has no suffix
    valid = [ending for ending in _FORM_BY_SUFFIX if ending]
    raise RequestError(f"-o ends in {shown(suffix)}", valid=valid, next_step="Or name a --format")
