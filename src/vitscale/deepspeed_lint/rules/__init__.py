"""All rules in one table, and how a configuration, or those of a study's trials, are checked by them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vitscale.deepspeed_lint.advice import Changes, FileFinding, changed
from vitscale.deepspeed_lint.key_lines import lines_of_keys
from vitscale.deepspeed_lint.rules import batch, keys, memory, optimizer, overlap, parts, precision, timing, values
from vitscale.deepspeed_lint.view import Release, Setting, View, installed_version
from vitscale.engines.deepspeed import config as deepspeed_config
from vitscale.engines.deepspeed.config import BATCH_KEYS
from vitscale.present.data import finding_fields
from vitscale.present.document import SEVERITIES, Document, Finding, Paragraph, counts_of, most_severe_first
from vitscale.trial import model_cost
from vitscale.trial.trial import TrainSpec, Trial

Rule = Callable[[View], Iterable[FileFinding]]

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


def lint(config: dict[str, Any], setting: Setting) -> tuple[FileFinding, ...]:
    """The findings of all rules, the most severe first, otherwise in the order of `RULES`.

    Each has the first piece of its rule's advice that, once followed, raises no error or warning of its own beside the
    rest of the file.

    Raises:
        RequestError: `setting.deepspeed` is no version.
    """
    view = View(config, setting, Release(setting.deepspeed))
    findings = _raised(view)
    complaints = _complaints(findings)
    tried = [
        _with_advice_that_holds(found, view, complaints) if position < _MOST_TRIED else found
        for position, found in enumerate(findings)
    ]
    return tuple(sorted(tried, key=lambda found: SEVERITIES.index(found.severity)))


_MOST_TRIED = 40
"""Findings whose advice is tried: a file with more is hardly a configuration."""


def _raised(view: View) -> list[FileFinding]:
    return [found for rule in RULES for found in rule(view)]


def _complaints(findings: Iterable[Finding]) -> set[tuple[str, str]]:
    """(rule, key) of errors and warnings."""
    return {(found.kind, found.about.key) for found in findings if found.severity != "note"}


def _with_advice_that_holds(found: FileFinding, view: View, complaints: set[tuple[str, str]]) -> FileFinding:
    """The finding with its first piece of advice that ends it and raises nothing new; the last one if none does."""
    if len(found.options) == 1:
        return found
    for advice in found.options:
        if advice.changes is None or _holds(advice.changes, found, view, complaints):
            break
    return replace(found, advice=advice.text, changes=advice.changes)


def _holds(changes: Changes, found: FileFinding, view: View, complaints: set[tuple[str, str]]) -> bool:
    after = _raised(replace(view, config=changed(view.config, changes)))
    is_gone = all((other.kind, other.about.key) != (found.kind, found.about.key) for other in after)
    return is_gone and _complaints(after) <= complaints


def lint_file(path: Path, setting: Setting) -> tuple[FileFinding, ...]:
    """Reads a DeepSpeed file and returns the findings on it, each with the line of its key.

    Raises:
        RequestError: the file cannot be read, or `setting.deepspeed` is no version.
    """
    file = deepspeed_config.load(path, next_step="Give the JSON file that deepspeed.initialize gets")
    findings = lint(file.values, setting)
    if not deepspeed_config.is_json(file.text):
        findings = (*findings, keys.not_json())
    lines = lines_of_keys(file.text)
    return tuple(replace(found, about=replace(found.about, line=lines.get(found.about.key))) for found in findings)


def lint_document(file: str, findings: Sequence[Finding], setting: Setting) -> Document:
    """A document with a file's findings, their number, and what the file was judged for."""
    return Document("", (Paragraph(f"{file}: {counts_of(findings)} ({setting.described()})", "strong"), *findings))


def lint_fields(file: str, findings: Sequence[Finding], setting: Setting) -> dict[str, Any]:
    """A file's findings as JSON fields, with what it was judged for."""
    judged = {"file": file, "deepspeed": setting.deepspeed, "parameters": setting.parameters, "gpus": setting.gpus}
    return judged | {"findings": [finding_fields(finding) for finding in findings]}


_ALWAYS_SETTLED = (*BATCH_KEYS, "gradient_clipping", "timers.throughput", "steps_per_print")
"""Keys that vitscale's engine writes into every configuration, so that no file leaves them open."""

_SWITCHES = {"bf16": "torch_autocast", "bf16-params": "bf16", "fp16": "fp16"}
_PRECISIONS = {"fp32": "fp32", "bf16": "autocast", "bf16-params": "bf16", "fp16": "fp16"}
"""A study's precision -> that of `View.precision`."""


def findings_of(trials: Mapping[str, Trial]) -> tuple[Finding, ...]:
    """The findings on all trials' files, the most severe first; each finding once, with the trials that it concerns."""
    concerned: dict[Finding, list[str]] = {}
    for trial_id, trial in trials.items():
        config = trial.train.deepspeed_config
        for finding in lint(config, _setting(trial)) if config is not None else ():
            concerned.setdefault(finding, []).append(trial_id)
    return most_severe_first(
        [replace(finding, about=replace(finding.about, trials=tuple(ids))) for finding, ids in concerned.items()]
    )


def _setting(trial: Trial) -> Setting:
    version = installed_version()
    return Setting(
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
    """The keys of the file that this trial overrides or adds."""
    zero = {
        "overlap_comm": train.overlap_comm is not None,
        "reduce_bucket_size": train.bucket_mib is not None,
        "stage3_prefetch_bucket_size": train.gather_bucket_mib is not None,
        "offload_optimizer": train.offload != "none",
        "offload_param": train.offload == "parameters",
    }
    settled = [*_ALWAYS_SETTLED, *(f"zero_optimization.{name}" for name, given in zero.items() if given)]
    if train.gradient_dtype is not None:
        settled.append("communication_data_type")
    if train.precision in _SWITCHES:
        settled.append(_SWITCHES[train.precision])
    return settled
