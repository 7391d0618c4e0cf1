"""lint: what a configuration of DeepSpeed or Accelerate will really do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typing_extensions import override

from vitscale import deepspeed_lint
from vitscale.api.arguments import StrPath, path_of
from vitscale.deepspeed_lint.accelerate_file import accelerate_document, accelerate_findings
from vitscale.engines.accelerate.config import SUFFIXES
from vitscale.errors import RequestError, shown
from vitscale.present.document import Document, Finding, counts_of
from vitscale.present.verb_result import VerbResult

_NO_FILE = "(a dictionary)"


@dataclass(frozen=True, repr=False)
class LintResult(VerbResult):
    """The findings on one configuration."""

    file: str
    """Name of the file, for messages."""
    findings: tuple[Finding, ...]
    """Findings, the most severe first."""
    setting: deepspeed_lint.LintTarget
    """The model, ranks and version of DeepSpeed that the configuration was judged for."""

    verb = "lint"
    unread = None

    @property
    def has_errors(self) -> bool:
        """Whether DeepSpeed or Accelerate refuses the configuration, or does otherwise than it says."""
        return any(finding.severity == "error" for finding in self.findings)

    @property
    @override
    def summary(self) -> str:
        return f"{self.file}, {counts_of(self.findings)}"

    @override
    def _answer_fields(self) -> Mapping[str, Any]:
        return deepspeed_lint.lint_fields(self.file, self.findings, self.setting)

    @override
    def _answer_document(self) -> Document:
        if _is_accelerate_file(self.file):
            return accelerate_document(self.file, self.findings)
        return deepspeed_lint.lint_document(self.file, self.findings, self.setting)


def lint(
    config: StrPath | Mapping[str, Any],
    *,
    model: str | None = None,
    parameters: str | None = None,
    gpus: int | None = None,
    deepspeed: str | None = None,
) -> LintResult:
    """Finds what a DeepSpeed configuration, or Accelerate's YAML, will really do; starts nothing and needs neither.

    Args:
        config: the JSON file that `deepspeed.initialize` gets, or what it holds; or the YAML file of `accelerate
            launch`, for which the other arguments have no effect.
        model: a named model (`vit-b16`), or the folder of a Hugging Face model: for its number of parameters.
        parameters: the number of parameters of a model that has no name here, as text: "110M".
        gpus: ranks in all.
        deepspeed: the version to judge for; None: the installed one.

    Returns:
        The findings, each with what to do about it.

    Raises:
        RequestError: the file cannot be read, the model or version is unknown, or `gpus` is below 1.

    Example:
        >>> vitscale.lint({"train_batch_size": 32, "gradient_acumulation_steps": 2}, gpus=8).findings[0].kind
        'unknown-key'
    """
    if gpus is not None and gpus < 1:
        raise RequestError(f"--gpus is {gpus}", valid=["1 or more"])
    if isinstance(config, Mapping):
        setting = deepspeed_lint.lint_target(model, parameters, gpus, deepspeed)
        return LintResult(_NO_FILE, deepspeed_lint.lint(dict(config), setting), setting)
    file = path_of(config)
    _refuse_study(file)
    setting = deepspeed_lint.lint_target(model, parameters, gpus, deepspeed)
    if _is_accelerate_file(file.name):
        return LintResult(str(file), accelerate_findings(file), setting)
    return LintResult(str(file), deepspeed_lint.lint_file(file, setting), setting)


def _is_accelerate_file(name: str) -> bool:
    """Whether a file is taken for Accelerate's by its name."""
    return name.lower().endswith(SUFFIXES)


def _refuse_study(file: Path) -> None:
    """Refuse a study file, which is no configuration of DeepSpeed.

    Raises:
        RequestError: the file is one.
    """
    if file.suffix == ".toml":
        raise RequestError(
            f"{shown(str(file))} is a study's form, and no DeepSpeed configuration",
            next_step="Give DeepSpeed's JSON file or Accelerate's YAML; a study is looked at by vitscale plan",
        )
