"""Verbs that start from a study or a configuration: plan, run, check, lint."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import vitscale
from vitscale.cli import base
from vitscale.cli.base import app, option
from vitscale.errors import RequestError
from vitscale.present.terminal import show

if TYPE_CHECKING:
    from vitscale.api.running import RunResult


@app.command()
def plan(
    study: base.StudyArgument,
    overrides: base.OverridesArgument = None,
    commands: Annotated[
        bool, option("--commands", "", "Print every trial's exact command or batch script, and nothing else.")
    ] = False,
    predict_from: Annotated[
        Path | None, option("--from", "RESULTS", "Results to predict times from.  [default: the study's own]")
    ] = None,
    price: base.PriceOption = None,
    gpu_memory: base.GpuMemoryOption = None,
    skip_unfit: Annotated[
        bool, option("--skip-unfit", "", "Leave out of the sums what will not fit in memory, as run does.")
    ] = False,
    launcher: base.LauncherOption = None,
    hostfile: base.HostfileOption = None,
    scheduler: base.SchedulerOption = None,
    site: base.SiteOption = None,
    verbose: base.VerboseOption = False,
    json: base.JsonOption = False,
) -> None:
    """What would run: trials, memory, time and cost, exact commands. Starts nothing and writes nothing."""
    base.compute_on_one_core()
    launch = vitscale.LaunchOptions(launcher, scheduler, hostfile, site)
    if commands and not json:
        from vitscale.api import planning

        text = planning.commands(study, overrides or (), skip_unfit=skip_unfit, gpu_memory=gpu_memory, launch=launch)
        sys.stdout.write(text)
        return
    result = vitscale.plan(
        study,
        overrides or (),
        from_results=predict_from,
        price=price,
        gpu_memory=gpu_memory,
        skip_unfit=skip_unfit,
        launch=launch,
    )
    base.show_result(result, json=json, verbose=verbose)


@app.command()
def run(
    study: base.StudyArgument,
    overrides: base.OverridesArgument = None,
    output: base.OutputOption = None,
    retry_failed: Annotated[bool, option("--retry-failed", "", "Do runs again that did not complete.")] = False,
    allow_version_change: Annotated[
        bool, option("--allow-version-change", "", "Go on under other library versions than before.")
    ] = False,
    dry_run: Annotated[
        bool, option("--dry-run", "", "Print the exact commands or batch scripts of what is not done yet.")
    ] = False,
    skip_unfit: Annotated[
        bool, option("--skip-unfit", "", "Skip trials that will not fit in memory; without it they are done.")
    ] = False,
    gpu_memory: base.GpuMemoryOption = None,
    launcher: base.LauncherOption = None,
    hostfile: base.HostfileOption = None,
    scheduler: base.SchedulerOption = None,
    site: base.SiteOption = None,
    verbose: base.VerboseOption = False,
    json: base.JsonOption = False,
) -> None:
    """Run what is not done yet. The same command again resumes."""
    launch = vitscale.LaunchOptions(launcher, scheduler, hostfile, site)
    if dry_run:
        from vitscale.api import running

        text = running.commands_to_do(
            study,
            overrides or (),
            output=output,
            retry_failed=retry_failed,
            skip_unfit=skip_unfit,
            gpu_memory=gpu_memory,
            launch=launch,
        )
        sys.stdout.write(text)
        return
    console = base.ProgramConsole(stderr=json)
    result = vitscale.run(
        study,
        overrides or (),
        output=output,
        retry_failed=retry_failed,
        allow_version_change=allow_version_change,
        skip_unfit=skip_unfit,
        gpu_memory=gpu_memory,
        launch=launch,
        console=console,
    )
    show_runs(result, console, json=json, verbose=verbose)


def show_runs(result: RunResult, console: base.ProgramConsole, *, json: bool, verbose: bool) -> None:
    """Print the outcome of the runs, and the results, on the console of the progress; exit with 1 after a failure."""
    if json:
        for sentence in result.sentences:
            console.print(sentence, markup=False, highlight=False, soft_wrap=True)
        sys.stdout.write(result.to_json())
    else:
        show(console, result.document(), verbose)
    if result.has_failures:
        raise typer.Exit(1)


@app.command()
def check(
    study: Annotated[
        Path | None, typer.Argument(metavar="[STUDY.toml]", help="For its ranks, data and model.", show_default=False)
    ] = None,
    overrides: base.OverridesArgument = None,
    output: Annotated[Path | None, option("-o --output", "RESULTS", "Results folder that it is stored in.")] = None,
    ranks_per_node: Annotated[int | None, option("--ranks-per-node", "M", "Ranks on each host.")] = None,
    quick: Annotated[bool, option("--quick", "", "Small messages and short measurements.")] = False,
    expect: Annotated[
        Path | None, option("--expect", "FILE", "What was promised of the machine; exits with 1 where it is not kept.")
    ] = None,
    save_expect: Annotated[
        Path | None, option("--save-expect", "FILE", "Write what is measured as such a file, which must be new.")
    ] = None,
    training: Annotated[
        bool, option("--training", "", "Train a tiny run of each engine instead, and prove what is measured.")
    ] = False,
    launcher: base.LauncherOption = None,
    hostfile: base.HostfileOption = None,
    scheduler: base.SchedulerOption = None,
    site: base.SiteOption = None,
    verbose: base.VerboseOption = False,
    json: base.JsonOption = False,
) -> None:
    """Preflight: this machine, a hostfile's hosts or an allocation. Exits with 1 where training would not start."""
    launch = vitscale.LaunchOptions(launcher, scheduler, hostfile, site)
    console = base.ProgramConsole(stderr=True)
    if training:
        _refuse_options_beside_training(study, quick=quick, expects=expect is not None or save_expect is not None)
        proved = vitscale.check_training(output=output, ranks_per_node=ranks_per_node, launch=launch, console=console)
        base.show_result(proved, json=json, verbose=verbose)
        raise typer.Exit(int(proved.has_errors))
    checked = vitscale.check(
        study,
        overrides or (),
        output=output,
        ranks_per_node=ranks_per_node,
        quick=quick,
        expect=expect,
        save_expect=save_expect,
        launch=launch,
        console=console,
    )
    base.show_result(checked, json=json, verbose=verbose)
    if checked.has_errors:
        raise typer.Exit(1)


def _refuse_options_beside_training(study: Path | None, *, quick: bool, expects: bool) -> None:
    """Refuse options beside --training that are for the check without it.

    Raises:
        RequestError: one is given.
    """
    if quick:
        message = "--training brings runs of its own, and --quick is of the other check"
        raise RequestError(message, next_step="Leave one of them out")
    if expects:
        message = "--training proves records, and --expect and --save-expect are of the other check"
        raise RequestError(message, next_step="Leave one of them out")
    if study is not None:
        raise RequestError("--training brings runs of its own, and a study is given", next_step="Leave one of them out")


@app.command()
def lint(
    config: Annotated[
        Path, typer.Argument(metavar="FILE", help="DeepSpeed's JSON or Accelerate's YAML.", show_default=False)
    ],
    model: base.ModelOption = None,
    parameters: base.ParametersOption = None,
    gpus: Annotated[int | None, option("--gpus", "N", "Ranks in all.")] = None,
    deepspeed: Annotated[
        str | None, option("--deepspeed", "VERSION", "Judge for this version.  [default: installed]")
    ] = None,
    verbose: base.VerboseOption = False,
    json: base.JsonOption = False,
) -> None:
    """What a file of DeepSpeed or Accelerate will really do. Exits with 1 where it is refused or does otherwise."""
    result = vitscale.lint(config, model=model, parameters=parameters, gpus=gpus, deepspeed=deepspeed)
    base.show_result(result, json=json, verbose=verbose)
    if result.has_errors:
        raise typer.Exit(1)
