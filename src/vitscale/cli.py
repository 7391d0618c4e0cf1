"""The command line: each verb is a paragraph that calls one function.

Exit codes: 0 done; 1 some trials failed (they are listed), or `lint` found errors; 2 the request was wrong (nothing was
started); 130 interrupted.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, TextIO

import typer
from rich.console import Console
from typing_extensions import override

from vitscale import __version__
from vitscale.errors import RequestError, VitscaleError, explain, unknown

app = typer.Typer(
    name="vitscale",
    help="How will my vision transformer scale, where does the time go, and what should I rent?",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    add_completion=False,
)

StudyArgument = Annotated[Path, typer.Argument(metavar="STUDY.toml", help="The study file.", show_default=False)]
ResultsArgument = Annotated[Path, typer.Argument(metavar="RESULTS", help="A results folder.", show_default=False)]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


class _Console(Console):
    """A study goes on when nobody listens any more (`vitscale run ... | head`): what is left to say is dropped."""

    @override
    def on_broken_pipe(self) -> None:
        self.quiet = True
        _silence(sys.stdout)


def _silence(stream: TextIO) -> None:
    """Points a stream that can no longer be written at nothing, so that leaving does not fail on it once more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@app.command()
def plan(study: StudyArgument, json: JsonOption = False) -> None:
    """What would run: trials, order of magnitude, exact commands. Starts nothing and writes nothing."""
    from vitscale import runner
    from vitscale.runner.preview import preview_json, preview_table

    planned = runner.plan(study)
    if json:
        sys.stdout.write(preview_json(planned) + "\n")
    else:
        for part in preview_table(planned):
            _Console().print(part, highlight=False, soft_wrap=isinstance(part, str))


@app.command()
def run(
    study: StudyArgument,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="RESULTS", help="Results folder.  [default: results/NAME]")
    ] = None,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Do runs again that did not complete.")] = False,
    allow_version_change: Annotated[
        bool, typer.Option("--allow-version-change", help="Go on under other library versions than before.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Run what is not done yet. The same command again resumes."""
    from vitscale import analysis, report, runner, store
    from vitscale.runner.preview import finding_lines

    planned = runner.plan(study)
    results = output or Path("results") / planned.record.name
    console = _Console(stderr=json)
    for note in (*(f"note: {note}" for note in planned.expansion.notes), *finding_lines(planned)):
        console.print(note, markup=False, highlight=False, soft_wrap=True)
    options = runner.Options(retry_failed=retry_failed, allow_version_change=allow_version_change)
    done = runner.run(planned, results, options, console)
    found = analysis.analyse(store.load(results))
    if json:
        sys.stdout.write(report.to_json(found))
    else:
        console.print(report.terminal_table(found))
        if not done.done_now:
            console.print("Nothing to do: every run of this study has its outcome.", highlight=False)
        console.print(f"Report: vitscale report {results}", markup=False, highlight=False, soft_wrap=True)
    if done.failures:
        console.print(
            f"{len(done.failures)} of {len(done.outcomes)} runs did not complete. After mending the cause: "
            "the same command with --retry-failed.",
            highlight=False,
            soft_wrap=True,
        )
        raise typer.Exit(1)


@app.command()
def lint(
    config: Annotated[Path, typer.Argument(metavar="DS.json", help="A DeepSpeed configuration.", show_default=False)],
    model: Annotated[
        str | None, typer.Option("--model", metavar="NAME", help="A named model (vit-b16), or a Hugging Face folder.")
    ] = None,
    gpus: Annotated[int | None, typer.Option("--gpus", metavar="N", help="Ranks in all.")] = None,
    deepspeed: Annotated[
        str | None, typer.Option("--deepspeed", metavar="VERSION", help="Judge for this version.  [default: installed]")
    ] = None,
    json: JsonOption = False,
) -> None:
    """What a DeepSpeed configuration will really do. Exits with 1 where DeepSpeed refuses it or does otherwise."""
    from vitscale import deepspeed_config
    from vitscale import lint as linter
    from vitscale.lint.printing import findings_json, findings_text

    if gpus is not None and gpus < 1:
        raise RequestError(explain(f"--gpus is {gpus}", valid=["1 or more"]))
    setting = linter.setting_of(model, gpus, deepspeed)
    content = deepspeed_config.read_json(config, next_step="Give the JSON file that deepspeed.initialize gets")
    findings = linter.lint(content, setting)
    if json:
        sys.stdout.write(findings_json(findings) + "\n")
    else:
        console = _Console()
        for line in findings_text(findings, setting.described(), console.width):
            console.print(line, highlight=False, soft_wrap=True)
    if any(finding.severity == "error" for finding in findings):
        raise typer.Exit(1)


@app.command()
def report(
    results: ResultsArgument,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", metavar="PATH", help="File to write; for several formats or pictures, a folder."
        ),
    ] = None,
    formats: Annotated[
        str | None,
        typer.Option(
            "--format", metavar="LIST", help="Comma-separated: html, png, svg, pdf, csv, md, json.  [default: html]"
        ),
    ] = None,
    combine_unlike: Annotated[
        bool, typer.Option("--combine-unlike", help="Compare runs of unlike hardware or library versions all the same.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Tables, figures and one self-contained HTML page."""
    from vitscale import analysis, report, store

    if json and formats is not None:
        raise RequestError(explain("--json and --format are both given", next_step="Use --format, with json among it"))
    listed = "json" if json else formats or "html"
    wanted = list(dict.fromkeys(part.strip().lower() for part in listed.split(",")))
    for name in wanted:
        if name not in report.FORMATS:
            raise unknown("format", name, report.FORMATS)
    found = analysis.analyse(store.load(results), combine_unlike=combine_unlike)
    console = _Console(stderr=bool({"md", "json"} & set(wanted)) and output is None)
    if wanted == ["html"] and output is None:
        console.print(report.terminal_table(found))
    for path in report.write(found, results, wanted, output):
        console.print(str(path), markup=False, highlight=False, soft_wrap=True)


@app.callback(invoke_without_command=True)
def _version(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    if version:
        sys.stdout.write(f"vitscale {__version__}\n")
        raise typer.Exit


def main() -> None:
    """Entry point: a user's mistake is one message and an exit code, never a traceback."""
    try:
        try:
            app()
        finally:
            sys.stdout.flush()  # here, where a full disk behind it can still be told
    except VitscaleError as error:
        _Console(stderr=True).print(f"vitscale: {error}", markup=False, highlight=False, soft_wrap=True)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        _silence(sys.stdout)
    except OSError as error:
        # What reads or writes files has its own messages; what is left is standard output itself.
        sys.stderr.write(f"vitscale: standard output cannot be written: {error.strerror or error}\n")
        _silence(sys.stdout)
        sys.exit(1)


if __name__ == "__main__":
    main()
