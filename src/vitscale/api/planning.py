"""plan: what a study would run, and what that takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typing_extensions import override

from vitscale import runner
from vitscale.api.arguments import (
    LaunchOptions,
    StrPath,
    memory_bytes,
    overlay_of,
    path_of,
    path_or_none,
    positive,
)
from vitscale.deepspeed_lint.rules import findings_of
from vitscale.present.document import Document, Finding, most_severe_first
from vitscale.present.units import counted
from vitscale.present.unread import Unread
from vitscale.present.verb_result import VerbResult
from vitscale.runner.expectation import expectations
from vitscale.runner.memory_fits import memory_fits, unfit
from vitscale.runner.plan_estimate import PlanEstimate
from vitscale.runner.preview import command_list, plan_document, plan_fields, runs_to_do
from vitscale.runner.torch_findings import torch_findings
from vitscale.sources.elsewhere import check_or_expect
from vitscale.study.file import StudyFile


@dataclass(frozen=True, repr=False)
class PlanResult(VerbResult):
    """A study ready to run, and what its runs are expected to take."""

    plan: runner.Plan
    """Trials, runs in their order, where they would run."""
    estimate: PlanEstimate
    """Memory, time, GPU-hours and cost of each trial."""
    findings: tuple[Finding, ...]
    """Findings on the trials' DeepSpeed files, as `vitscale.lint` has them, and on what the installed torch lacks."""

    verb = "plan"

    @property
    @override
    def unread(self) -> Sequence[Unread]:
        return self.estimate.expected.unread

    @property
    @override
    def summary(self) -> str:
        trials = counted(len(self.plan.record.trials), "trial")
        to_do = runs_to_do(self.plan, self.estimate)
        return f"{self.plan.record.name}, {trials}, {to_do} of {counted(len(self.plan.tasks), 'run')} to do"

    @override
    def _answer_fields(self) -> Mapping[str, Any]:
        return plan_fields(self.plan, self.estimate, self.findings)

    @override
    def _answer_document(self) -> Document:
        return plan_document(self.plan, self.estimate, self.findings)


def plan(
    study: StrPath,
    overrides: Sequence[str] = (),
    *,
    from_results: StrPath | None = None,
    price: float | None = None,
    gpu_memory: str | int | None = None,
    skip_unfit: bool = False,
    launch: LaunchOptions | None = None,
) -> PlanResult:
    """Plans a study: trials, memory, time and cost, exact commands. Starts nothing and writes nothing.

    Args:
        study: the study file.
        overrides: values put over the study, as `train.micro_batch=16`.
        from_results: results to predict times from; None: the study's own, where there are some.
        price: price of one GPU for an hour, in any currency.
        gpu_memory: memory of one device: bytes, or text such as "80GB"; None: as found here.
        skip_unfit: leave out of the sums what will not fit in memory.
        launch: how ranks are started and where; None: as the study says.

    Returns:
        The plan, with the expected seconds, bytes and cost of each trial; what is unknown is None.

    Raises:
        RequestError: the study, its data or the hosts do not allow it, or an option is out of range.
        StoreError: `from_results` holds no results.

    Example:
        >>> vitscale.plan("study.toml", ["train.micro_batch=16"])
        <plan: documented, 2 trials, 2 of 2 runs to do>
    """
    planned = runner.plan(StudyFile.read(path_of(study), overlay_of(launch), overrides), check_data=check_or_expect)
    price_per_hour = positive(price, "--price")
    fits = memory_fits(planned, memory_bytes(gpu_memory))
    skipped = frozenset(unfit(fits)) if skip_unfit else frozenset()
    done = runner.done_before(planned, default_folder(planned))
    expected = expectations(planned, path_or_none(from_results), price_per_hour)
    estimate = PlanEstimate(fits, expected, skipped, done)
    return PlanResult(planned, estimate, plan_findings(planned))


def plan_findings(planned: runner.Plan) -> tuple[Finding, ...]:
    """Return findings on the trials' DeepSpeed files, and on what the installed torch lacks; the most severe first."""
    return most_severe_first([*findings_of(planned.record.trials), *torch_findings(planned)])


def commands(
    study: StrPath,
    overrides: Sequence[str] = (),
    *,
    skip_unfit: bool = False,
    gpu_memory: str | int | None = None,
    launch: LaunchOptions | None = None,
) -> str:
    """List the exact commands or batch scripts of every trial of a study, for a results folder RESULTS.

    For pods of Kubernetes that is the manifest which starts them.

    Args:
        study: the study file.
        overrides: values put over the study, as `train.micro_batch=16`.
        skip_unfit: leave out trials that will not fit in memory.
        gpu_memory: memory of one device: bytes, or text such as "80GB"; None: as found here.
        launch: how ranks are started and where; None: as the study says.

    Raises:
        RequestError: the study, its data or the hosts do not allow it.
    """
    file = StudyFile.read(path_of(study), overlay_of(launch), overrides)
    # Counts decide nothing but what will not fit; without them no model is traced.
    planned = runner.plan(file, check_data=check_or_expect, counts_models=skip_unfit)
    if planned.scheduler.needs_manifest:
        from vitscale.api.manifests import ManifestOptions, manifest_of

        memory_bytes(gpu_memory)  # refuses what is no size
        options = ManifestOptions(launch or LaunchOptions(), skip_unfit, gpu_memory)
        return manifest_of(planned, file, options)
    return command_list(planned, None, unfit=unfit_trials(planned, gpu_memory, skip_unfit=skip_unfit))


def unfit_trials(planned: runner.Plan, gpu_memory: str | int | None, *, skip_unfit: bool) -> dict[str, str]:
    """Trials to skip because they will not fit in memory -> why not; empty where none is to be skipped."""
    return unfit(memory_fits(planned, memory_bytes(gpu_memory))) if skip_unfit else {}


def default_folder(planned: runner.Plan) -> Path:
    """Return the folder of a study's results where none is named: results/NAME."""
    return Path("results") / planned.record.name
