"""What the product says of rank counts from a table of measurements, by the commands that a user has."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vitscale.errors import RequestError

Row = Mapping[str, str]
Answer = dict[str, Any]
"""A series at a rank count, as `vitscale predict --json` has it."""
Command = Callable[[Sequence[str]], str]
"""Arguments of `vitscale` -> what it prints. RequestError: it refuses."""


def in_process(arguments: Sequence[str]) -> str:
    """The command line's own functions, without a process."""
    from typer.testing import CliRunner

    from vitscale.cli import app
    from vitscale.errors import VitscaleError

    told = CliRunner().invoke(app, list(arguments))
    if told.exception is not None and not isinstance(told.exception, SystemExit | VitscaleError):
        raise told.exception
    if told.exit_code != 0:
        raise RequestError(str(told.exception) if isinstance(told.exception, VitscaleError) else told.output)
    return told.stdout


def as_command(arguments: Sequence[str]) -> str:
    """The real command, in a process of its own."""
    argv = [sys.executable, "-m", "vitscale", *arguments]
    told = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=300)
    if told.returncode != 0:
        raise RequestError(told.stderr)
    return told.stdout


def predicted(
    rows: Sequence[Row],
    counts: Sequence[int],
    *,
    import_options: Sequence[str] = (),
    predict_options: Sequence[str] = (),
    command: Command = in_process,
) -> list[Answer]:
    """What `vitscale predict` says of `counts` when `rows` alone were imported: an answer per count and series.

    Raises:
        RequestError: a command refuses.
    """
    with tempfile.TemporaryDirectory() as folder:
        results = str(imported(rows, Path(folder), import_options, command))
        asked = ["predict", results, "--gpus", ",".join(map(str, counts)), "--json", *predict_options]
        answers: list[Answer] = json.loads(command(asked))["predictions"]
    return answers


def imported(rows: Sequence[Row], folder: Path, options: Sequence[str] = (), command: Command = in_process) -> Path:
    """The results folder, inside `folder`, of an import of `rows` alone.

    Raises:
        RequestError: the command refuses.
    """
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    table, results = folder / "measured.csv", folder / "results"
    table.write_text(text.getvalue(), encoding="utf-8")
    command(["import", str(table), "-o", str(results), *options])
    return results
