"""The command line: each verb is a paragraph that calls one function.

Exit codes: 0 done; 1 some trials failed (they are listed), or `lint` or `check` found errors; 2 the request was wrong
(nothing was started); 130 interrupted.
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


SiteOption = Annotated[
    Path | None,
    typer.Option("--site", metavar="FILE", help="Site file: [launch], [slurm] and [node] put over the study's own."),
]
LauncherOption = Annotated[
    str | None, typer.Option("--launcher", metavar="NAME", help="How ranks are started: torchrun, mpirun, srun, ...")
]
SchedulerOption = Annotated[
    str | None, typer.Option("--scheduler", metavar="NAME", help="Where they run: local, hostfile or slurm.")
]
HostfileOption = Annotated[
    Path | None, typer.Option("--hostfile", metavar="FILE", help="Hosts to run on: one NAME slots=N a line.")
]


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
def plan(
    study: StudyArgument,
    commands: Annotated[
        bool, typer.Option("--commands", help="Print every trial's exact command or batch script, and nothing else.")
    ] = False,
    launcher: LauncherOption = None,
    hostfile: HostfileOption = None,
    scheduler: SchedulerOption = None,
    site: SiteOption = None,
    json: JsonOption = False,
) -> None:
    """What would run: trials, order of magnitude, exact commands. Starts nothing and writes nothing."""
    from vitscale import runner
    from vitscale.runner.command_list import command_list
    from vitscale.runner.preview import preview_json, preview_table
    from vitscale.site import overlay

    over = overlay(site, launcher=launcher, scheduler=scheduler, hostfile=hostfile)
    planned = runner.plan(study, overlay=over)
    if commands and not json:
        sys.stdout.write(command_list(planned, None))
    elif json:
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
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the exact commands or batch scripts of what is not done yet.")
    ] = False,
    launcher: LauncherOption = None,
    hostfile: HostfileOption = None,
    scheduler: SchedulerOption = None,
    site: SiteOption = None,
    json: JsonOption = False,
) -> None:
    """Run what is not done yet. The same command again resumes."""
    from vitscale import analysis, report, runner, store
    from vitscale.preflight.recalled import pace_warnings
    from vitscale.runner.command_list import command_list
    from vitscale.runner.preview import finding_lines
    from vitscale.site import overlay

    over = overlay(site, launcher=launcher, scheduler=scheduler, hostfile=hostfile)
    planned = runner.plan(study, overlay=over)
    results = output or Path("results") / planned.record.name
    if dry_run:
        sys.stdout.write(command_list(planned, results, retry_failed=retry_failed))
        return
    console = _Console(stderr=json)
    notes = [*planned.expansion.notes, *pace_warnings(planned, results)]
    for note in (*(f"note: {note}" for note in notes), *finding_lines(planned)):
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
            f"{len(done.failures)} of {len(done.outcomes)} runs did not complete. After mending the cause: the same "
            "command with --retry-failed; what was cancelled or cut off is done again without it.",
            highlight=False,
            soft_wrap=True,
        )
        raise typer.Exit(1)


@app.command()
def check(
    study: Annotated[
        Path | None, typer.Argument(metavar="[STUDY.toml]", help="For its ranks, data and model.", show_default=False)
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="RESULTS", help="Results folder that it is stored in.")
    ] = None,
    ranks_per_node: Annotated[
        int | None, typer.Option("--ranks-per-node", metavar="M", help="Ranks on each host.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small messages and short measurements.")] = False,
    launcher: LauncherOption = None,
    hostfile: HostfileOption = None,
    scheduler: SchedulerOption = None,
    site: SiteOption = None,
    json: JsonOption = False,
) -> None:
    """Preflight: this machine, a hostfile's hosts or an allocation. Exits with 1 where training would not start."""
    from vitscale import preflight
    from vitscale.preflight.as_json import check_json
    from vitscale.preflight.printing import check_text
    from vitscale.site import overlay

    place = preflight.where(study, overlay(site, launcher=launcher, scheduler=scheduler, hostfile=hostfile))
    wanted = preflight.request(place, ranks_per_node=ranks_per_node, quick=quick)
    console = _Console(stderr=json)
    say = _Console(stderr=True)
    record, path = preflight.run_check(place, wanted, output, lambda line: say.print(line, highlight=False))
    verdicts = preflight.judged(record)
    if json:
        sys.stdout.write(check_json(record, verdicts, path) + "\n")
    else:
        for part in check_text(record, verdicts, path, console.width):
            console.print(part, highlight=False, soft_wrap=isinstance(part, str))
    if any(verdict.severity == "error" for verdict in verdicts):
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


lab_app = typer.Typer(
    help="Several hosts on this machine, to learn and to test with (root, Linux).", no_args_is_help=True
)
app.add_typer(lab_app, name="lab")
LabName = Annotated[str, typer.Option("--name", metavar="NAME", help="Which lab; there may be several at once.")]


@lab_app.command("up")
def lab_up(
    hosts: Annotated[int, typer.Option("--hosts", metavar="N", help="How many.")] = 2,
    bandwidth: Annotated[
        str | None,
        typer.Option("--bandwidth", metavar="RATE", help="Of every host's link: 100mbit, 1gbit.  [default: no limit]"),
    ] = None,
    cores_per_host: Annotated[
        float | None, typer.Option("--cores-per-host", metavar="CORES", help="CPU quota: 0.4.  [default: no limit]")
    ] = None,
    slots: Annotated[int, typer.Option("--slots", metavar="RANKS", help="Ranks per host, in the hostfile.")] = 1,
    name: LabName = "default",
) -> None:
    """Make hosts, and print the hostfile and how to use it. They stay until `lab down`, or a restart of the machine."""
    from vitscale.lab import Laboratory, Plan, parse_bandwidth, up
    from vitscale.lab.printing import up_lines

    bandwidth_mbit = None if bandwidth is None else parse_bandwidth(bandwidth)
    made = Laboratory(up(Plan(name, hosts, bandwidth_mbit, cores_per_host, slots)))
    for line in up_lines(made):
        _Console().print(line, markup=False, highlight=False, soft_wrap=True)


@lab_app.command("down")
def lab_down(name: LabName = "default") -> None:
    """End everything that runs on the hosts, and the hosts. Nothing of them is left."""
    from vitscale.lab import down

    said = f"Lab {name!r} is gone." if down(name) else f"There is no lab {name!r}: nothing to do."
    _Console().print(said, markup=False, highlight=False)


@lab_app.command("exec", context_settings={"ignore_unknown_options": True})
def lab_exec(
    host: Annotated[str, typer.Argument(metavar="HOST", help="Its name: host0.", show_default=False)],
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND...", show_default=False)],
    name: LabName = "default",
) -> None:
    """Run a command on a host, in this folder and environment; its exit code is the command's."""
    from vitscale.lab import command_on

    argv = command_on(name, host, command)
    os.execv(argv[0], argv)  # noqa: S606 - no shell is wanted


@lab_app.command("status")
def lab_status(json: JsonOption = False) -> None:
    """All labs: hosts, limits, and how many processes run on each."""
    from vitscale.lab import laboratories
    from vitscale.lab.printing import status_json, status_table

    labs, wrong = laboratories()
    for error in wrong:
        _Console(stderr=True).print(f"note: {error}", markup=False, highlight=False, soft_wrap=True)
    if json:
        sys.stdout.write(status_json(labs) + "\n")
    elif labs:
        _Console().print(status_table(labs), highlight=False)
    elif not wrong:
        _Console().print("There is no lab. Make one: vitscale lab up", highlight=False)


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
