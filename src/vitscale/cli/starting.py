"""The verbs of the first hour: init, train, schema, completion."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

import vitscale
from vitscale.api.new_files import write_new
from vitscale.cli import base
from vitscale.cli.base import app, option
from vitscale.errors import unknown

FirstModelOption = Annotated[str | None, option("--model", "NAME", "vit-ti16 ... vit-h14, swinv2-t ... swinv2-l.")]
DataOption = Annotated[str | None, option("--data", "NAME", "digits, synthetic, cifar10, folder, ...")]
RootOption = Annotated[str | None, option("--root", "PATH", "Folder of these images.")]

SHELLS = ("bash", "zsh", "fish")


@app.command()
def init(
    output: Annotated[Path, option("-o --output", "STUDY.toml", "The study file to write.")] = Path("study.toml"),
    model: FirstModelOption = None,
    data: DataOption = None,
    root: RootOption = None,
    engine: base.EngineOption = None,
    gpus: Annotated[str | None, option("--gpus", "LIST", "Rank counts: 1,2,4.  [default: doublings]")] = None,
    hostfile: base.HostfileOption = None,
    from_file: Annotated[
        Path | None, option("--from", "FILE", "DeepSpeed's JSON or Accelerate's YAML, to take over.")
    ] = None,
) -> None:
    """Look at this machine, its hostfile or its Slurm, and write a first study for it. On a terminal it asks."""
    base.compute_on_one_core()  # before the import, which loads numpy
    from vitscale.api import starting

    machines = starting.machines_for(output, hostfile)
    sys.stdout.write(f"Found {machines.description}.\n")
    if sys.stdin.isatty():
        model = model or typer.prompt("Model", "vit-b16" if machines.gpus else "vit-ti16")
        data = data or typer.prompt("Images (digits, synthetic, cifar10, folder, ...)", "folder" if root else "digits")
        if root is None and data not in ("digits", "synthetic"):
            root = typer.prompt("Where they lie", "~/data")
        if from_file is None:
            gpus = gpus or typer.prompt("Rank counts", ",".join(map(str, starting.usual_counts(machines))))
    written = vitscale.init(
        output,
        model=model,
        data=data,
        root=root,
        engine=engine,
        gpus=base.rank_counts(gpus) if gpus else None,
        from_file=from_file,
        where=machines,
    )
    for setting in written.uncarried:
        sys.stdout.write(f"Not taken over: {setting}\n")
    sys.stdout.write(f"Wrote {output}: {written.runs} runs. Next: vitscale plan {output}, then vitscale run {output}\n")


@app.command()
def train(
    overrides: base.OverridesArgument = None,
    model: FirstModelOption = None,
    data: DataOption = None,
    root: RootOption = None,
    engine: base.EngineOption = None,
    gpus: Annotated[
        int | None, option("--gpus", "N", "Ranks in all.  [default: all there are; on CPU up to 4]")
    ] = None,
    output: base.OutputOption = None,
    launcher: base.LauncherOption = None,
    hostfile: base.HostfileOption = None,
    scheduler: base.SchedulerOption = None,
    site: base.SiteOption = None,
    verbose: base.VerboseOption = False,
    json: base.JsonOption = False,
) -> None:
    """One trial without a study file: a study of one, which run and report take. The same command again resumes."""
    from vitscale.cli.studies import show_runs

    console = base.ProgramConsole(stderr=json)
    result = vitscale.train(
        overrides or (),
        model=model,
        data=data,
        root=root,
        engine=engine,
        gpus=gpus,
        output=output,
        launch=vitscale.LaunchOptions(launcher, scheduler, hostfile, site),
        console=console,
    )
    show_runs(result, console, json=json, verbose=verbose)


@app.command()
def schema(
    output: Annotated[Path | None, option("-o --output", "FILE", "A file to write instead: study.schema.json.")] = None,
) -> None:
    """JSON schema of the study file, for editors that complete and check it."""
    from vitscale.study.schema import study_schema

    text = json.dumps(study_schema(), indent=1) + "\n"
    if output is None:
        sys.stdout.write(text)
        return
    write_new(output, text)
    sys.stdout.write(f"{output}: begin the study with the line #:schema {output.name}\n")


@app.command()
def completion(shell: Annotated[str, typer.Argument(metavar="SHELL", help="bash, zsh or fish.")]) -> None:
    """A script by which the shell completes verbs, options and files: source <(vitscale completion bash)."""
    from typer import completion as scripts

    if shell not in SHELLS:
        raise unknown("shell", shell, SHELLS)
    script = scripts.get_completion_script(  # type: ignore[attr-defined]  # typer does not say what it offers
        prog_name="vitscale", complete_var=base.COMPLETE, shell=shell
    )
    sys.stdout.write(f"{script}\n")
