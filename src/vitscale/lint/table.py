"""All rules in one table, and a configuration's way through them"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from vitscale.lint.releases import Release
from vitscale.lint.rules import batch, keys, memory, optimizer, overlap, parts, precision, timing, values
from vitscale.lint.setting import Setting
from vitscale.lint.view import View
from vitscale.present.document import Document, Finding, Paragraph, counts_of, most_severe_first

Rule = Callable[[View], Iterable[Finding]]

RULES: tuple[Rule, ...] = (
    keys.release_not_in_the_table,
    keys.unknown_and_removed_keys,
    values.wrong_types,
    values.values_left_to_an_integration,
    batch.batch_arithmetic,
    precision.no_reduced_precision,
    precision.several_precisions,
    precision.bf16_is_not_autocast,
    precision.loss_scale,
    precision.communication_type,
    precision.accumulation_type,
    precision.low_precision_states,
    timing.wall_clock_breakdown,
    timing.throughput_timer,
    timing.flops_profiler,
    timing.comms_logger,
    timing.memory_breakdown,
    timing.autotuning,
    overlap.nothing_overlaps,
    overlap.one_bucket,
    overlap.gradients_sent_every_micro_step,
    memory.bucket_memory,
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
    parts.keys_without_effect_at_this_stage,
    parts.old_form_of_zero,
    parts.parts_that_need_the_program,
)


def lint(config: dict[str, Any], setting: Setting) -> tuple[Finding, ...]:
    """Every finding of every rule, most severe first, otherwise in the order of `RULES`.

    Raises:
        RequestError: `setting.deepspeed` is no version.
    """
    view = View(config, setting, Release(setting.deepspeed))
    return most_severe_first([finding for rule in RULES for finding in rule(view)])


def lint_document(file: str, findings: Sequence[Finding], setting: Setting) -> Document:
    """How much was found in a file, judged for what, and each finding."""
    return Document("", (Paragraph(f"{file}: {counts_of(findings)} ({setting.described()})", "strong"), *findings))
