"""Verbs that start from a study or a configuration: plan, run, check, lint."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from vitscale.cli import base
from vitscale.cli.base import app, option
from vitscale.errors import RequestError, shown
from vitscale.present.terminal import show

if TYPE_CHECKING:
    from vitscale.runner import Options, Plan
    from vitscale.runner.plan_estimate import PlanEstimate
    from vitscale.runner.planning import Report
    from vitscale.study.file import Overlay


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
    from vitscale import runner
    from vitscale.runner.preview import command_list, plan_document, plan_fields
    from vitscale.study.file import StudyFile, overlay

    over = overlay(site, launcher=launcher, scheduler=scheduler, hostfile=hostfile)
    planned = runner.plan(StudyFile.read(study, over, overrides or ()))
    if commands and not json:
        skipped = _unfit(planned, gpu_memory) if skip_unfit else {}
        sys.stdout.write(command_list(planned, None, unfit=skipped))
        return
    estimate = _estimate(planned, predict_from, price, gpu_memory, skip_unfit=skip_unfit)
    fields, document = partial(plan_fields, planned, estimate), partial(plan_document, planned, estimate)
    base.answer("plan", fields, document, unread=estimate.expected.unread, json=json, verbose=verbose)


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
    from vitscale import runner
    from vitscale.runner.preview import command_list
    from vitscale.study.file import StudyFile, overlay

    over = overlay(site, launcher=launcher, scheduler=scheduler, hostfile=hostfile)
    planned = runner.plan(StudyFile.read(study, over, overrides or ()), results=output)
    results = output or Path("results") / planned.record.name
    skipped = _unfit(planned, gpu_memory) if skip_unfit else {}
    if dry_run:
        sys.stdout.write(command_list(planned, results, retry_failed=retry_failed, unfit=skipped))
        return
    options = runner.Options(retry_failed=retry_failed, allow_version_change=allow_version_change, unfit=skipped)
    carry_out(planned, results, options, verbose=verbose, json=json)


def carry_out(
    planned: Plan, results: Path, options: Options, *, verbose: bool, json: bool, verb: Literal["run", "train"] = "run"
) -> None:
    """Does the runs that are not done yet, and prints the results as `verb` does; exits with 1 where a run failed."""
    from vitscale import runner
    from vitscale.preflight import pace_warnings
    from vitscale.runner.preview import finding_lines

    console = base.ProgramConsole(stderr=json)

    def say(lines: list[str]) -> None:
        for line in lines:
            console.print(line, markup=False, highlight=False, soft_wrap=True)

    notes = [*planned.expansion.notes, *pace_warnings(planned, results)]
    say([*(f"note: {note}" for note in notes), *finding_lines(planned)])
    done = runner.run(planned, results, options, console)
    # The report's modules are imported only when there is one to show: the first run need not wait for them.
    from vitscale import analysis
    from vitscale.pages.answers import terminal_document
    from vitscale.pages.contract import to_json

    analysed = analysis.analyse_folder(results)
    if json:
        say(_told(done))
        sys.stdout.write(to_json(analysed, verb=verb, ended_early=done.ended or None))
    else:
        show(console, terminal_document(analysed, [*_told(done), f"Report: vitscale report {results}"]), verbose)
    if done.failures:
        raise typer.Exit(1)


def _told(done: Report) -> list[str]:
    """Sentences on what became of the runs."""
    runs = len(done.outcomes)
    told = [] if done.done_now or done.ended else ["Nothing to do: every run of this study has its outcome."]
    if done.ended:
        told.append(f"Ended early: {done.ended}. Raise it, and the same command goes on; what is done is kept.")
    if done.skipped:
        told.append(
            f"{len(done.skipped)} of {runs} runs skipped: they will not fit in memory. The same command without "
            "--skip-unfit does them."
        )
    if done.failures:
        told.append(
            f"{len(done.failures)} of {runs} runs did not complete. After mending the cause: the same command with "
            "--retry-failed; what was cancelled or cut off is done again without it."
        )
    return told


def _estimate(
    planned: Plan, predict_from: Path | None, price: float | None, gpu_memory: str | None, *, skip_unfit: bool
) -> PlanEstimate:
    from vitscale import runner
    from vitscale.runner.expectation import expectations
    from vitscale.runner.plan_estimate import PlanEstimate, memory_fits, unfit

    per_hour = base.positive(price, "--price")
    fits = memory_fits(planned, _bytes(gpu_memory))
    skipped = frozenset(unfit(fits)) if skip_unfit else frozenset()
    done = runner.done_before(planned, Path("results") / planned.record.name)
    return PlanEstimate(fits, expectations(planned, predict_from, per_hour), skipped, done)


def _unfit(planned: Plan, gpu_memory: str | None) -> dict[str, str]:
    from vitscale.runner.plan_estimate import memory_fits, unfit

    return unfit(memory_fits(planned, _bytes(gpu_memory)))


def _bytes(gpu_memory: str | None) -> int | None:
    return None if gpu_memory is None else base.size_bytes(gpu_memory, "--gpu-memory")


@app.command()
def check(
    study: Annotated[
        Path | None, typer.Argument(metavar="[STUDY.toml]", help="For its ranks, data and model.", show_default=False)
    ] = None,
    overrides: base.OverridesArgument = None,
    output: Annotated[Path | None, option("-o --output", "RESULTS", "Results folder that it is stored in.")] = None,
    ranks_per_node: Annotated[int | None, option("--ranks-per-node", "M", "Ranks on each host.")] = None,
    quick: Annotated[bool, option("--quick", "", "Small messages and short measurements.")] = False,
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
    from vitscale import preflight
    from vitscale.preflight.judging import check_document, check_fields
    from vitscale.study.file import overlay

    over = overlay(site, launcher=launcher, scheduler=scheduler, hostfile=hostfile)
    if training:
        if quick:
            what = "--training brings runs of its own, and --quick is of the other check"
            raise RequestError(what, next_step="Leave one of them out")
        _check_training(study, over, ranks_per_node, output, verbose=verbose, json=json)
        return
    target = preflight.check_target(study, over, overrides or ())
    wanted = preflight.request(target, ranks_per_node=ranks_per_node, quick=quick)
    say = base.ProgramConsole(stderr=True)
    record, path = preflight.run_check(target, wanted, output, lambda line: say.print(line, highlight=False))
    findings = preflight.judged(record)
    told = (record, findings, path)
    base.answer(
        "check", lambda: check_fields(*told), lambda: check_document(*told), unread=None, json=json, verbose=verbose
    )
    if any(finding.severity == "error" for finding in findings):
        raise typer.Exit(1)


def _check_training(
    study: Path | None, over: Overlay, ranks: int | None, output: Path | None, *, verbose: bool, json: bool
) -> None:
    from vitscale.preflight import training
    from vitscale.store.bundles import write_bundle

    if study is not None:
        raise RequestError("--training brings runs of its own, and a study is given", next_step="Leave one of them out")
    results, proved, missing = training.check_training(over, ranks, output, base.ProgramConsole(stderr=True))
    findings = training.training_findings(proved)
    fields = training.training_fields(results, proved, missing, findings)
    bundle = results / "bundle.tar.gz"
    write_bundle(results, bundle, redact=True, beside=fields)
    document = partial(training.training_document, results, bundle, proved, missing, findings)
    base.answer("check", lambda: fields | {"bundle": str(bundle)}, document, unread=None, json=json, verbose=verbose)
    if findings:
        raise typer.Exit(1)


@app.command()
def lint(
    config: Annotated[Path, typer.Argument(metavar="DS.json", help="A DeepSpeed configuration.", show_default=False)],
    model: base.ModelOption = None,
    parameters: base.ParametersOption = None,
    gpus: Annotated[int | None, option("--gpus", "N", "Ranks in all.")] = None,
    deepspeed: Annotated[
        str | None, option("--deepspeed", "VERSION", "Judge for this version.  [default: installed]")
    ] = None,
    verbose: base.VerboseOption = False,
    json: base.JsonOption = False,
) -> None:
    """What a DeepSpeed configuration will really do. Exits with 1 where DeepSpeed refuses it or does otherwise."""
    from vitscale import deepspeed_lint as linter

    if gpus is not None and gpus < 1:
        raise RequestError(f"--gpus is {gpus}", valid=["1 or more"])
    if config.suffix == ".toml":
        what = f"{shown(str(config))} is a study's form, and no DeepSpeed configuration"
        raise RequestError(
            what, next_step="Give the JSON file that deepspeed.initialize gets; a study is looked at by vitscale plan"
        )
    setting = linter.setting_of(model, parameters, gpus, deepspeed)
    findings = linter.lint_file(config, setting)
    file = str(config)
    base.answer(
        "lint",
        lambda: linter.lint_fields(file, findings, setting),
        lambda: linter.lint_document(file, findings, setting),
        unread=None,
        json=json,
        verbose=verbose,
    )
    if any(finding.severity == "error" for finding in findings):
        raise typer.Exit(1)
