"""run, train: do the runs of a study that are not done yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from rich.console import Console
from typing_extensions import override

from vitscale import runner
from vitscale.api.arguments import LaunchOptions, StrPath, overlay_of, path_of, path_or_none, progress_console
from vitscale.api.planning import default_folder, plan_findings, unfit_trials
from vitscale.errors import RequestError
from vitscale.preflight import pace_warnings
from vitscale.present.document import Document
from vitscale.present.units import counted
from vitscale.present.unread import Unread
from vitscale.present.verb_result import VerbResult
from vitscale.runner.planning import Report
from vitscale.runner.preview import command_list, finding_lines
from vitscale.study.file import StudyFile

if TYPE_CHECKING:  # with readers of results, for which the first run need not wait
    from vitscale.analysis import Analysis
    from vitscale.study.file import Overlay


@dataclass(frozen=True, repr=False)
class RunResult(VerbResult):
    """The outcome of a study's runs, and its results so far."""

    results: Path
    """The results folder."""
    report: Report
    """The work of this call, and the outcome of every run."""
    analysis: Analysis
    """The results, analysed."""
    verb_name: Literal["run", "train"] = "run"
    """Which of the two did it."""

    @property
    @override
    def verb(self) -> str:
        return self.verb_name

    @property
    def has_failures(self) -> bool:
        """Whether a run did not complete, other than those skipped on request."""
        return bool(self.report.failures)

    @property
    def sentences(self) -> list[str]:
        """The outcome of the runs in words."""
        return _sentences(self.report)

    @property
    @override
    def unread(self) -> Sequence[Unread]:
        return self.analysis.unread

    @property
    @override
    def summary(self) -> str:
        runs = len(self.report.outcomes)
        completed = sum(outcome.kind == "completed" for outcome in self.report.outcomes.values())
        return f"{self.analysis.study.name}, {completed} of {counted(runs, 'run')} completed, in {self.results}"

    @override
    def _answer_fields(self) -> Mapping[str, Any]:
        from vitscale.pages.contract import report_fields

        return report_fields(self.analysis, ended_early=self.report.ended or None)

    @override
    def _answer_document(self) -> Document:
        from vitscale.pages.answers import terminal_document

        return terminal_document(self.analysis, [*self.sentences, f"Report: vitscale report {self.results}"])


def run(
    study: StrPath,
    overrides: Sequence[str] = (),
    *,
    output: StrPath | None = None,
    retry_failed: bool = False,
    allow_version_change: bool = False,
    skip_unfit: bool = False,
    gpu_memory: str | int | None = None,
    launch: LaunchOptions | None = None,
    console: Console | None = None,
) -> RunResult:
    """Runs what is not done yet of a study; the same call again resumes.

    Args:
        study: the study file.
        overrides: values put over the study, as `train.micro_batch=16`.
        output: the results folder; None: results/NAME.
        retry_failed: do runs again that did not complete.
        allow_version_change: go on under other library versions than before.
        skip_unfit: skip trials that will not fit in memory.
        gpu_memory: memory of one device: bytes, or text such as "80GB"; None: as found here.
        launch: how ranks are started and where; None: as the study says.
        console: where notes and progress go; None: standard error.

    Returns:
        The outcome of every run, and the results so far. A run that fails raises nothing: see `has_failures`.

    Raises:
        RequestError: the study, its data or the hosts do not allow it; nothing was started.
        StoreError: the folder cannot be used; nothing was started.
        VitscaleError: interrupted, the disk is full, or the allocation is over; what is done is kept.

    Example:
        >>> done = vitscale.run("study.toml", ["measure.steps=2"], output="own")
        >>> done
        <run: documented, 2 of 2 runs completed, in own>
        >>> done.has_failures
        False
    """
    planned = _planned(study, overrides, output, launch)
    options = runner.RunOptions(
        retry_failed=retry_failed,
        allow_version_change=allow_version_change,
        unfit=unfit_trials(planned.plan, gpu_memory, skip_unfit=skip_unfit),
    )
    return carry_out(planned.plan, planned.results, options, progress_console(console))


def commands_to_do(
    study: StrPath,
    overrides: Sequence[str] = (),
    *,
    output: StrPath | None = None,
    retry_failed: bool = False,
    skip_unfit: bool = False,
    gpu_memory: str | int | None = None,
    launch: LaunchOptions | None = None,
) -> str:
    """List the exact commands or batch scripts of what `run` would do with the same arguments; start nothing.

    Raises:
        RequestError: the study, its data or the hosts do not allow it.
        StoreError: the folder holds something else.
    """
    planned = _planned(study, overrides, output, launch)
    if planned.plan.scheduler.needs_manifest:
        raise RequestError(
            "the runs of a set of pods are known in the pods alone, which have the results",
            next_step="Print the manifest, which does what is not done yet: vitscale plan STUDY --commands",
        )
    skipped = unfit_trials(planned.plan, gpu_memory, skip_unfit=skip_unfit)
    return command_list(planned.plan, planned.results, retry_failed=retry_failed, unfit=skipped)


def train(
    overrides: Sequence[str] = (),
    *,
    model: str | None = None,
    data: str | None = None,
    root: str | None = None,
    engine: str | None = None,
    gpus: int | None = None,
    output: StrPath | None = None,
    launch: LaunchOptions | None = None,
    console: Console | None = None,
) -> RunResult:
    """Trains one trial without a study file; the same call again resumes.

    Args:
        overrides: values put over the trial, as `train.micro_batch=16`.
        model: a named model: vit-ti16 ... vit-h14, swinv2-t ... swinv2-l; None: by what this machine has.
        data: digits, synthetic, cifar10, folder, ...; None: digits.
        root: the folder of these images.
        engine: ddp, fsdp2, deepspeed, ...; None: by what this machine has.
        gpus: ranks in all; None: all there are, on CPU up to 4.
        output: the results folder; None: results/NAME, where the name is a digest of these arguments.
        launch: how ranks are started and where; None: as the study says.
        console: where notes and progress go; None: standard error.

    Returns:
        The outcome of the run, and its results.

    Raises:
        RequestError: an option is wrong, or there is more than one run; nothing was started.
        StoreError: the folder cannot be used; nothing was started.
        VitscaleError: interrupted, the disk is full, or the allocation is over; what is done is kept.

    Example:
        >>> small = ["model.layers=1", "measure.steps=2", "measure.warmup_steps=1", "train.device=cpu"]
        >>> done = vitscale.train(small, gpus=1, output="one")
        >>> len(done.report.outcomes)
        1
    """
    from vitscale.preflight.first_study import Wishes, check_images, first_study, look_around, rank_counts_for

    if gpus is not None and gpus < 1:
        raise RequestError(f"--gpus is {gpus}", valid=["1 or more"])
    hostfile = path_or_none(launch.hostfile) if launch is not None else None
    machines = look_around(hostfile, Path.cwd())
    *_, all_ranks = rank_counts_for(machines)
    wishes = Wishes(model, data, root, engine, (all_ranks if gpus is None else gpus,))
    check_images(wishes)
    overlay = overlay_of(launch)
    nameless_study = first_study("", machines, wishes, repeats=1)
    name = _name_by_request(nameless_study, overlay, overrides)
    study_text = first_study(name, machines, wishes, repeats=1)
    results = path_or_none(output)
    planned = runner.plan(StudyFile.checked(Path("train.toml"), study_text, overlay, overrides), results=results)
    if planned.most_runs != 1:
        message = f"train does one run, and this makes {planned.most_runs}"
        raise RequestError(message, next_step="Write a study of them: vitscale init, then vitscale run")
    folder = results or default_folder(planned)
    return carry_out(planned, folder, runner.RunOptions(), progress_console(console), verb="train")


def _name_by_request(nameless_study: str, overlay: Overlay, overrides: Sequence[str]) -> str:
    """Return a study's name by a digest of what is asked for, such as "train-1f0c9a3e".

    So the same call finds its results folder again, and another call has its own.

    Args:
        nameless_study: the text of the study, with an empty name.
        overlay: sections that are put over it.
        overrides: values that are put over it.
    """
    import hashlib

    request = repr((nameless_study, overlay, [*overrides] or None))
    return f"train-{hashlib.sha256(request.encode()).hexdigest()[:8]}"


def carry_out(
    planned: runner.Plan,
    results: Path,
    options: runner.RunOptions,
    console: Console,
    verb: Literal["run", "train"] = "run",
) -> RunResult:
    """Do the runs of a plan that are not done yet, and read the results; notes and progress go to the console.

    Raises:
        VitscaleError: as `run` does.
    """
    notes = [*planned.expansion.notes, *pace_warnings(planned, results)]
    note_lines = [f"note: {note}" for note in notes]
    for line in (*note_lines, *finding_lines(planned, plan_findings(planned))):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    report = runner.run(planned, results, options, console)
    # The modules that read results are imported only when there are some: the first run need not wait for them.
    from vitscale import analysis

    return RunResult(results, report, analysis.analyse_folder(results), verb)


class _PlannedStudy(NamedTuple):
    """A study ready to run."""

    plan: runner.Plan
    results: Path
    """The folder of its results."""


def _planned(
    study: StrPath, overrides: Sequence[str], output: StrPath | None, launch: LaunchOptions | None
) -> _PlannedStudy:
    """Read and plan a study."""
    results = path_or_none(output)
    plan = runner.plan(StudyFile.read(path_of(study), overlay_of(launch), overrides), results=results)
    return _PlannedStudy(plan, results or default_folder(plan))


def _sentences(report: Report) -> list[str]:
    """Return sentences on runs that did not complete, and what to do; empty where all that was to do has completed."""
    runs = len(report.outcomes)
    sentences = []
    has_nothing_to_do = not report.done_now and not report.ended and not report.skipped
    if has_nothing_to_do:
        sentences.append("Nothing to do: every run of this study has its outcome.")
    if report.ended:
        sentences.append(f"Ended early: {report.ended}. Raise it, and the same command goes on; what is done is kept.")
    if report.skipped:
        sentences.append(
            f"{len(report.skipped)} of {runs} runs skipped: they will not fit in memory. The same command without "
            "--skip-unfit does them."
        )
    if report.failures:
        sentences.append(
            f"{len(report.failures)} of {runs} runs did not complete. After mending the cause: the same command with "
            "--retry-failed; what was cancelled or cut off is done again without it."
        )
    return sentences
