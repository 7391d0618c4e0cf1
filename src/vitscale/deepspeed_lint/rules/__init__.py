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

    A rule names several pieces of advice, the best first. A finding gets the first of them that solves the problem in
    this file: with the advice followed, the rules find neither it nor a new error or warning. To know that, each piece
    is tried on a copy of the file.

    Args:
        config: a DeepSpeed configuration.
        target: model, GPUs and release of DeepSpeed that it is judged for.

    Raises:
        RequestError: `target.deepspeed` is no version.
    """
    view = ConfigurationView(config, target, Release(target.deepspeed))
    findings = _findings_of_all_rules(view)
    problems = _problems(findings)
    to_try = findings[:_MOST_FINDINGS_TRIED]
    with_tried_advice = [_with_first_solution(finding, view, problems) for finding in to_try]
    with_untried_advice = findings[_MOST_FINDINGS_TRIED:]
    return tuple(sorted([*with_tried_advice, *with_untried_advice], key=_severity_rank))


_MOST_FINDINGS_TRIED = 40
"""Most findings of a file whose advice is tried: a file with more is hardly a configuration."""


def _severity_rank(finding: Finding) -> int:
    """Key by which findings are sorted: 0 for the most severe ones."""
    return SEVERITIES.index(finding.severity)


def _findings_of_all_rules(view: ConfigurationView) -> list[FileFinding]:
    """Return the findings of all rules, in the order of `RULES`."""
    findings: list[FileFinding] = []
    for rule in RULES:
        findings += rule(view)
    return findings


class _Problem(NamedTuple):
    """The subject of a finding. A rule's findings on two values of one key are the same problem."""

    rule: str
    key: str


def _problem(finding: Finding) -> _Problem:
    """Return the problem that a finding is about."""
    return _Problem(finding.kind, finding.about.key)


def _problems(findings: Iterable[Finding]) -> set[_Problem]:
    """Return the problems that errors and warnings are about."""
    return {_problem(finding) for finding in findings if finding.severity != "note"}


def _with_first_solution(finding: FileFinding, view: ConfigurationView, problems: set[_Problem]) -> FileFinding:
    """Return the finding with its first piece of advice that solves it; with the last one where none does.

    Advice that changes nothing in the file cannot be tried, and counts as a solution.

    Args:
        finding: the finding.
        view: the file that it is on.
        problems: the problems of that file.
    """
    if len(finding.options) == 1:
        return finding
    for advice in finding.options:
        if advice.changes is None or _is_solved_by(advice.changes, finding, view, problems):
            break
    return replace(finding, advice=advice.text, changes=advice.changes)


def _is_solved_by(changes: FileChanges, finding: FileFinding, view: ConfigurationView, problems: set[_Problem]) -> bool:
    """Whether the file has a finding no more after some changes, and no problem that is not among `problems`."""
    findings_after = _findings_of_all_rules(replace(view, config=changed(view.config, changes)))
    is_gone = all(_problem(remaining) != _problem(finding) for remaining in findings_after)
    brings_no_problem = _problems(findings_after) <= problems
    return is_gone and brings_no_problem


def lint_file(path: Path, target: LintTarget) -> tuple[FileFinding, ...]:
    """Read a DeepSpeed file and return the findings on it, each with the line of its key.

    Args:
        path: a JSON or Hjson file.
        target: model, GPUs and release of DeepSpeed that it is judged for.

    Raises:
        RequestError: the file cannot be read, or `target.deepspeed` is no version.
    """
    file = deepspeed_config.load(path, next_step="Give the JSON file that deepspeed.initialize gets")
    findings = lint(file.values, target)
    if not deepspeed_config.is_json(file.text):
        findings = (*findings, keys.not_json())
    line_by_key = lines_of_keys(file.text)
    return tuple(_at_line(finding, line_by_key.get(finding.about.key)) for finding in findings)


def _at_line(finding: FileFinding, line: int | None) -> FileFinding:
    """Return the finding with the line of the file that it is about; None where that is not known."""
    return replace(finding, about=replace(finding.about, line=line))


def lint_document(file: str, findings: Sequence[Finding], target: LintTarget) -> Document:
    """Return a document with a file's findings, their number, and what the file was judged for."""
    return Document("", (Paragraph(f"{file}: {counts_of(findings)} ({target.described()})", "strong"), *findings))


def lint_fields(file: str, findings: Sequence[Finding], target: LintTarget) -> dict[str, Any]:
    """Return a file's findings as JSON fields, with what it was judged for."""
    judged = {"file": file, "deepspeed": target.deepspeed, "parameters": target.parameters, "gpus": target.gpus}
    return judged | {"findings": [finding_fields(finding) for finding in findings]}


_KEYS_ALWAYS_SETTLED = (*BATCH_KEYS, "gradient_clipping", "timers.throughput", "steps_per_print")
"""Keys that vitscale's engine writes into every configuration, so that no file leaves them open."""

_PART_BY_PRECISION = {"bf16": "torch_autocast", "bf16-params": "bf16", "fp16": "fp16"}
"""A study's precision -> the part of the file that switches it on; fp32 needs none."""
_LINT_PRECISION = {"fp32": "fp32", "bf16": "autocast", "bf16-params": "bf16", "fp16": "fp16"}
"""A study's precision -> that of `ConfigurationView.precision`."""


def findings_of(trials: Mapping[str, Trial]) -> tuple[Finding, ...]:
    """Return the findings on the DeepSpeed files of trials, the most severe first.

    A finding on several trials' files is returned once, and names these trials.

    Args:
        trials: trial identity -> trial; those without a DeepSpeed file are left out.
    """
    trial_ids_by_finding: dict[Finding, list[str]] = {}
    for trial_id, trial in trials.items():
        config = trial.train.deepspeed_config
        if config is None:
            continue
        for finding in lint(config, _target(trial)):
            trial_ids_by_finding.setdefault(finding, []).append(trial_id)
    return most_severe_first([_on_trials(finding, trial_ids) for finding, trial_ids in trial_ids_by_finding.items()])


def _on_trials(finding: Finding, trial_ids: Sequence[str]) -> Finding:
    """Return the finding with the trials that it concerns."""
    return replace(finding, about=replace(finding.about, trials=tuple(trial_ids)))


def _target(trial: Trial) -> LintTarget:
    """Return what a trial's file is judged for: model, GPUs, release, and what the study decides in its stead."""
    version = installed_version()
    return LintTarget(
        model=trial.model.name,
        parameters=model_cost.parameters(trial.model),
        gpus=trial.world.size,
        deepspeed=version,
        installed=version is not None,
        stage=trial.train.zero_stage,
        precision=_LINT_PRECISION[trial.train.precision],
        settled=frozenset(_settled_keys(trial.train)),
        in_a_study=True,
    )


def _settled_keys(train: TrainSpec) -> list[str]:
    """Return the dotted keys of a trial's file that vitscale's engine overrides or adds."""
    settled_by_study = {
        "zero_optimization.overlap_comm": train.overlap_comm is not None,
        "zero_optimization.reduce_bucket_size": train.bucket_mib is not None,
        "zero_optimization.stage3_prefetch_bucket_size": train.gather_bucket_mib is not None,
        "zero_optimization.zero_hpz_partition_size": train.hpz > 1,
        "zero_optimization.offload_optimizer": train.offload != "none",
        "zero_optimization.offload_param": train.offload == "parameters",
        "communication_data_type": train.gradient_dtype is not None,
    }
    settled = [*_KEYS_ALWAYS_SETTLED]
    settled += [key for key, is_set_by_study in settled_by_study.items() if is_set_by_study]
    if train.precision in _PART_BY_PRECISION:
        settled.append(_PART_BY_PRECISION[train.precision])
    return settled
