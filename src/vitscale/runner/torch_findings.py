"""Findings of `plan` on what a study uses of torch, and the installed torch lacks. Imports no torch."""

from __future__ import annotations

from vitscale.engines.checks import unmet_torch_needs
from vitscale.engines.torch_needs import TorchNeed
from vitscale.present.document import About, Finding
from vitscale.runner.planning import Plan


def torch_findings(plan: Plan) -> tuple[Finding, ...]:
    """Return a finding for each need that the installed torch does not meet, with the trials that have it.

    An error where ranks refuse to train, a warning where they train and lack something. None where no torch is
    installed here, or where ranks run with another Python than this one, so that their torch is unknown.
    """
    version = plan.record.versions.get("torch")
    if version is None or _has_other_python(plan):
        return ()
    trials_by_need: dict[TorchNeed, list[str]] = {}
    for trial_id, trial in plan.record.trials.items():
        for need in unmet_torch_needs(trial.train, version):
            trials_by_need.setdefault(need, []).append(trial_id)
    return tuple(_torch_finding(need, version, trial_ids) for need, trial_ids in trials_by_need.items())


def _has_other_python(plan: Plan) -> bool:
    """Whether ranks run in a container, or with an interpreter of their own (`slurm.python`)."""
    batch_section = plan.context.slurm
    return batch_section.container is not None or batch_section.python is not None


def _torch_finding(need: TorchNeed, version: str, trial_ids: list[str]) -> Finding:
    """Return the finding on a need that the installed version of torch does not meet."""
    return Finding(
        kind="torch-release",
        severity="error" if need.is_refused else "warning",
        message=f"{need.what} {need.under_older} under torch {version}, which is installed here",
        advice=f"Install torch {need.release} or later, or {need.remedy}",
        about=About(trials=tuple(trial_ids), source="docs/versions.md"),
    )
