"""All rules in one table, and how a configuration, or those of a study's trials, are checked by them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from vitscale.deepspeed_lint.advice import FileChanges, FileFinding, changed
from vitscale.deepspeed_lint.key_lines import lines_of_keys
from vitscale.deepspeed_lint.rules import batch, keys, memory, optimizer, overlap, parts, precision, timing, values
from vitscale.deepspeed_lint.view import ConfigurationView, LintTarget, Release, installed_version
from vitscale.engines.deepspeed import config as deepspeed_config
from vitscale.engines.deepspeed.config import BATCH_KEYS
from vitscale.present.data import finding_fields
from vitscale.present.document import SEVERITIES, Document, Finding, Paragraph, counts_of, most_severe_first
from vitscale.trial import model_cost
from vitscale.trial.trial import TrainSpec, Trial

Rule = Callable[[ConfigurationView], Iterable[FileFinding]]

RULES: tuple[Rule, ...] = (
    keys.release_not_in_the_table,
    keys.unknown_and_removed_keys,
    values.wrong_types,
    values.values_left_to_an_integration,
    batch.batch_arithmetic,
    memory.bucket_memory,  # of the notes the first, for it may be why a run is out of memory
    precision.no_reduced_precision,
    precision.several_precisions,
    precision.bf16_is_not_autocast,
    precision.loss_scale,
    precision.communication_type,
    precision.accumulation_type,
    precision.low_precision_states,
    timing.costly_switches,
    timing.throughput_timer,
    overlap.nothing_overlaps,
    overlap.overlap_of_the_release,
    overlap.one_bucket,
    overlap.gradients_sent_every_micro_step,
    memory.offload_that_cannot_pay,
    memory.offload_without_effect,
    memory.stage_that_saves_little,
    memory.parameters_gathered_once,
    optimizer.clipping_omitted,
    optimizer.optimizer_type,
    optimizer.clipping_in_the_optimizer,
    optimizer.adam_is_adamw,
    optimizer.scheduler_type,
    parts.scaling_before_reduction,
    parts.refused_values,
    parts.keys_without_effect_at_this_stage,
    parts.old_form_of_zero,
    parts.parts_that_need_the_program,
)


def lint(config: dict[str, Any], target: LintTarget) -> tuple[FileFinding, ...]:
    """Return the findings of all rules, the most severe first, otherwise in the order of `RULES`.

    Each has the first piece of its rule's advice that, once followed, raises no error or warning of its own beside the
    rest of the file.

    Raises:
        RequestError: `target.deepspeed` is no version.
    """
    view = ConfigurationView(config, target, Release(target.deepspeed))
    findings = _findings_of_all_rules(view)
    complaints = _complaints(findings)
    tried = [_with_advice_that_holds(finding, view, complaints) for finding in findings[:_MOST_TRIED]]
    untried = findings[_MOST_TRIED:]
    return tuple(sorted([*tried, *untried], key=lambda finding: SEVERITIES.index(finding.severity)))


_MOST_TRIED = 40
"""Findings whose advice is tried: a file with more is hardly a configuration."""


def _findings_of_all_rules(view: ConfigurationView) -> list[FileFinding]:
    findings: list[FileFinding] = []
    for rule in RULES:
        findings += rule(view)
    return findings


class _Complaint(NamedTuple):
    """The rule of a finding and the key that it is about; the same finding on another value has the same ones."""

    rule: str
    key: str


def _complaint(finding: Finding) -> _Complaint:
    return _Complaint(finding.kind, finding.about.key)


def _complaints(findings: Iterable[Finding]) -> set[_Complaint]:
    """Return rule and key of all errors and warnings."""
    return {_complaint(finding) for finding in findings if finding.severity != "note"}


def _with_advice_that_holds(finding: FileFinding, view: ConfigurationView, complaints: set[_Complaint]) -> FileFinding:
    """Return the finding with its first piece of advice that ends it and raises nothing new; the last one if none does.

    Args:
        finding: the finding.
        view: the file that it is on.
        complaints: errors and warnings on that file.
    """
    if len(finding.options) == 1:
        return finding
    for advice in finding.options:
        if advice.changes is None or _holds(advice.changes, finding, view, complaints):
            break
    return replace(finding, advice=advice.text, changes=advice.changes)


def _holds(changes: FileChanges, finding: FileFinding, view: ConfigurationView, complaints: set[_Complaint]) -> bool:
    """Whether the changes end a finding, and raise no error or warning that is not among `complaints`."""
    findings = _findings_of_all_rules(replace(view, config=changed(view.config, changes)))
    is_gone = _complaint(finding) not in map(_complaint, findings)
    return is_gone and _complaints(findings) <= complaints


def lint_file(path: Path, target: LintTarget) -> tuple[FileFinding, ...]:
    """Read a DeepSpeed file and return the findings on it, each with the line of its key.

    Raises:
        RequestError: the file cannot be read, or `target.deepspeed` is no version.
    """
    file = deepspeed_config.load(path, next_step="Give the JSON file that deepspeed.initialize gets")
    findings = lint(file.values, target)
    if not deepspeed_config.is_json(file.text):
        findings = (*findings, keys.not_json())
    lines = lines_of_keys(file.text)
    return tuple(
        replace(finding, about=replace(finding.about, line=lines.get(finding.about.key))) for finding in findings
    )


def lint_document(file: str, findings: Sequence[Finding], target: LintTarget) -> Document:
    """Return a document with a file's findings, their number, and what the file was judged for."""
    return Document("", (Paragraph(f"{file}: {counts_of(findings)} ({target.described()})", "strong"), *findings))


def lint_fields(file: str, findings: Sequence[Finding], target: LintTarget) -> dict[str, Any]:
    """Return a file's findings as JSON fields, with what it was judged for."""
    judged = {"file": file, "deepspeed": target.deepspeed, "parameters": target.parameters, "gpus": target.gpus}
    return judged | {"findings": [finding_fields(finding) for finding in findings]}


_ALWAYS_SETTLED = (*BATCH_KEYS, "gradient_clipping", "timers.throughput", "steps_per_print")
"""Keys that vitscale's engine writes into every configuration, so that no file leaves them open."""

_SWITCHES = {"bf16": "torch_autocast", "bf16-params": "bf16", "fp16": "fp16"}
_PRECISIONS = {"fp32": "fp32", "bf16": "autocast", "bf16-params": "bf16", "fp16": "fp16"}
"""A study's precision -> that of `View.precision`."""


def findings_of(trials: Mapping[str, Trial]) -> tuple[Finding, ...]:
    """Return the findings on all trials' files, the most severe first; each once, with the trials that it concerns."""
    trials_by_finding: dict[Finding, list[str]] = {}
    for trial_id, trial in trials.items():
        config = trial.train.deepspeed_config
        if config is None:
            continue
        for finding in lint(config, _target(trial)):
            trials_by_finding.setdefault(finding, []).append(trial_id)
    return most_severe_first(
        [
            replace(finding, about=replace(finding.about, trials=tuple(trial_ids)))
            for finding, trial_ids in trials_by_finding.items()
        ]
    )


def _target(trial: Trial) -> LintTarget:
    """Return what a trial's file is judged for."""
    version = installed_version()
    return LintTarget(
        model=trial.model.name,
        parameters=model_cost.parameters(trial.model),
        gpus=trial.world.size,
        deepspeed=version,
        installed=version is not None,
        stage=trial.train.zero_stage,
        precision=_PRECISIONS[trial.train.precision],
        settled=frozenset(_settled(trial.train)),
        in_a_study=True,
    )


def _settled(train: TrainSpec) -> list[str]:
    """Return the keys of the file that this trial overrides or adds."""
    is_settled = {
        "zero_optimization.overlap_comm": train.overlap_comm is not None,
        "zero_optimization.reduce_bucket_size": train.bucket_mib is not None,
        "zero_optimization.stage3_prefetch_bucket_size": train.gather_bucket_mib is not None,
        "zero_optimization.offload_optimizer": train.offload != "none",
        "zero_optimization.offload_param": train.offload == "parameters",
    }
    settled = [*_ALWAYS_SETTLED, *(key for key in is_settled if is_settled[key])]
    if train.gradient_dtype is not None:
        settled.append("communication_data_type")
    if train.precision in _SWITCHES:
        settled.append(_SWITCHES[train.precision])
    return settled
