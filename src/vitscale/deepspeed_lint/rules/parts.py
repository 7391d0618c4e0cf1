"""Whole parts: without effect at this stage, in an old form, or only for a program that uses them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from vitscale.deepspeed_lint.advice import REMOVED, FileFinding, Remedy, remove
from vitscale.deepspeed_lint.view import ConfigurationView, finding

_KEYS_OF_STAGE_3 = (
    *("sub_group_size", "zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_gradients"),
    *("prefetch_bucket_size", "param_persistence_threshold", "max_live_parameters", "max_reuse_distance"),
)
_KEYS_OF_STAGES_1_AND_2 = ("allgather_bucket_size", "allgather_partitions", "round_robin_gradients")
_KEYS_WITH_OTHER_RULES = (
    *("offload_optimizer", "offload_param", "cpu_offload", "cpu_offload_param", "overlap_comm", "compute_grad_norm"),
    "zenflow",
)
"""Keys of zero_optimization that other rules check."""
_TAG_VALIDATION_WORDS = ("Warn", "Ignore", "Fail")


class _ProgramPart(NamedTuple):
    """A part of the configuration that only a program with certain calls uses."""

    message: str
    fix: str
    file: str
    """The file of DeepSpeed that shows it."""


_PARTS_FOR_PROGRAMS = {
    "activation_checkpointing": _ProgramPart(
        "This part checkpoints nothing by itself: it sets up deepspeed.checkpointing, which only models that call "
        "deepspeed.checkpointing.checkpoint use",
        "For other models switch it on in the program, such as model.gradient_checkpointing_enable() in transformers",
        "runtime/activation_checkpointing/config.py",
    ),
    "pipeline": _ProgramPart(
        "Only a model built as a deepspeed.pipe.PipelineModule reads this part",
        "Remove it unless the model is one",
        "runtime/pipe/engine.py",
    ),
}


def scaling_before_reduction(view: ConfigurationView) -> Iterator[FileFinding]:
    """Yield a finding for each way of scaling gradients that DeepSpeed refuses together with reduce-scatter."""
    if view.stage not in (2, 3) or view.flag("zero_optimization.reduce_scatter", default=True) is not True:
        return
    refused_keys = []
    if view.is_on("prescale_gradients"):
        refused_keys.append("prescale_gradients")
    factor = view.number("gradient_predivide_factor", 1)
    if factor is not None and factor != 1:
        refused_keys.append("gradient_predivide_factor")
    file = "runtime/zero/stage3.py" if view.stage == 3 else "runtime/zero/stage_1_and_2.py"
    for key in refused_keys:
        message = f"DeepSpeed refuses it at stage {view.stage} while reduce_scatter is on, as it is by default"
        fix = remove(key, "Remove it: the mean is taken either way")
        yield finding("scaling-before-reduction", "error", key, message, fix, view.source(file))


class _Refusal(NamedTuple):
    """A value that DeepSpeed refuses."""

    key: str
    message: str
    fix: Remedy
    file: str


def refused_values(view: ConfigurationView) -> Iterator[FileFinding]:
    """Yield a finding for each value that DeepSpeed refuses, at the latest in the first step."""
    for refusal in (*_refused_in_zero(view), *_refused_at_the_top(view)):
        is_read = view.release.fact(refusal.key) is not None
        if is_read and refusal.key not in view.target.settled:
            source = view.source(refusal.file)
            yield finding("refused-value", "error", refusal.key, refusal.message, refusal.fix, source)


def _refused_in_zero(view: ConfigurationView) -> Iterator[_Refusal]:
    """Yield refused values in zero_optimization."""
    stage = view.stage
    yield from _refused_without_norm(view)
    zenflow = "zero_optimization.zenflow"
    if stage == 0 and view.part(zenflow):
        removal = remove(zenflow, "Remove it, or take the stage that it is for")
        yield _Refusal(zenflow, "The first step fails with it at stage 0", removal, "runtime/engine.py")
    legacy_stage_1 = "zero_optimization.legacy_stage1"
    if stage and view.is_on(legacy_stage_1):
        yield _Refusal(legacy_stage_1, "Refused since 0.5.9", remove(legacy_stage_1), "runtime/engine.py")
    if stage in (1, 2):
        yield from _refused_odd_bucket(view)
    if stage == 3:
        yield from _refused_without_nvme_path(view)


def _refused_odd_bucket(view: ConfigurationView) -> Iterator[_Refusal]:
    """Yield a refusal of a bucket for all-gathers with an odd number of elements."""
    key = "zero_optimization.allgather_bucket_size"
    elements = view.number(key)
    if elements is not None and elements % 2 == 1:
        even = int(elements) + 1
        fix = Remedy(f"Write an even number, such as {even:,}", {key: even})
        yield _Refusal(key, "An odd number is refused", fix, "runtime/zero/stage_1_and_2.py")


def _refused_without_nvme_path(view: ConfigurationView) -> Iterator[_Refusal]:
    """Yield a refusal for each offload to nvme that names no folder on the drive."""
    for part in ("zero_optimization.offload_optimizer", "zero_optimization.offload_param"):
        path_key = f"{part}.nvme_path"
        if view.text(f"{part}.device") == "nvme" and view.value(path_key) is None:
            fix = Remedy("Name a folder on the drive")
            yield _Refusal(path_key, "Needed where the device is nvme", fix, "runtime/zero/offload_config.py")


def _refused_without_norm(view: ConfigurationView) -> Iterator[_Refusal]:
    """Yield a refusal where compute_grad_norm is false and the stage needs the norm."""
    key = "zero_optimization.compute_grad_norm"
    if view.flag(key, default=True) is not False:
        return
    if view.stage in (0, 3):
        yield _Refusal(key, f"false is refused at stage {view.stage}", remove(key), "runtime/zero/config.py")
    clips = view.number("gradient_clipping", view.release.default("gradient_clipping"))
    if view.stage in (1, 2) and clips:
        fix = remove(key, "Remove it, or set gradient_clipping to 0.0")
        yield _Refusal(key, "false is refused where gradients are clipped", fix, "runtime/zero/stage_1_and_2.py")


def _refused_at_the_top(view: ConfigurationView) -> Iterator[_Refusal]:
    """Yield refused values outside zero_optimization."""
    reduction = "gradient_allreduce_op"
    if view.stage == 3 and view.text(reduction) == "sum":
        removal = remove(reduction, "Remove it: the mean is taken then")
        yield _Refusal(reduction, "A sum is refused at stage 3", removal, "runtime/config.py")
    tag_validation = "checkpoint.tag_validation"
    word = view.text(tag_validation)
    if word is not None and word.capitalize() not in _TAG_VALIDATION_WORDS:
        valid_word = Remedy("Write Warn, Ignore or Fail", {tag_validation: "Warn"})
        yield _Refusal(tag_validation, "Any other word is refused", valid_word, "runtime/config.py")
    clipping = "gradient_clipping"
    if view.has(clipping) and view.value(clipping) is None:
        no_clipping = Remedy("Write 0.0 for no clipping", {clipping: 0.0})
        yield _Refusal(clipping, "The first step fails on null", no_clipping, "runtime/engine.py")
    print_interval = "steps_per_print"
    if view.number(print_interval) == 0:
        no_prints = Remedy("Write null to print nothing", {print_interval: None})
        yield _Refusal(print_interval, "The first step fails on 0 (a division)", no_prints, "runtime/engine.py")


def keys_without_effect_at_this_stage(view: ConfigurationView) -> Iterator[FileFinding]:
    """Yield one finding on all keys of `zero_optimization` that have no effect at the file's ZeRO stage.

    Keys that the release does not read at all, or that have a rule of their own, are left to other rules.
    """
    names_to_check = [name for name in view.part("zero_optimization") if name not in _KEYS_WITH_OTHER_RULES]
    read_names = [name for name in names_to_check if _is_read_by_release(view, name)]
    names_without_effect = [name for name in read_names if not _has_effect_at_stage(name, view.stage)]
    if not names_without_effect:
        return
    listed_names = ", ".join(names_without_effect[:_MOST_NAMES_LISTED])
    more = len(names_without_effect) - _MOST_NAMES_LISTED
    if more > 0:
        listed_names += f" and {more} more"
    is_single_key = len(names_without_effect) == 1
    yield finding(
        "no-effect-at-this-stage",
        "note",
        key=f"zero_optimization.{names_without_effect[0]}" if is_single_key else "zero_optimization",
        message=f"Without effect at stage {view.stage}: {listed_names}",
        fix=Remedy(
            "Remove what does nothing, or take the stage that it is for",
            {f"zero_optimization.{name}": REMOVED for name in names_without_effect},
        ),
        source=f"{view.source('runtime/engine.py')} (_configure_zero_optimizer)",
    )


_MOST_NAMES_LISTED = 4
"""Most keys that the message names."""


def _is_read_by_release(view: ConfigurationView, name: str) -> bool:
    """Whether the release reads a key of zero_optimization: it neither lacks the key nor refuses it."""
    fact = view.release.fact(f"zero_optimization.{name}")
    return fact is not None and fact != "refused"


def _has_effect_at_stage(name: str, stage: int | None) -> bool:
    """Whether a ZeRO stage uses a key of zero_optimization; True where the stage is open."""
    if stage == 0:
        return name == "stage"
    if stage in (1, 2):
        is_for_stage_3 = name.startswith("stage3_") or name in _KEYS_OF_STAGE_3
        return not is_for_stage_3
    if stage == 3:
        return name not in _KEYS_OF_STAGES_1_AND_2
    return True


def old_form_of_zero(view: ConfigurationView) -> Iterator[FileFinding]:
    """Yield a finding where `zero_optimization` is a switch, as it was in an old form of the file."""
    key = "zero_optimization"
    if isinstance(view.value(key), bool):
        message = f"The old form: DeepSpeed warns, and takes it for stage {view.stage}"
        fix = Remedy(f'"{key}": {{"stage": {view.stage}}}', {key: {"stage": view.stage}})
        source = f"{view.source('runtime/zero/config.py')} (read_zero_config_deprecated)"
        yield finding("old-form", "warning", key, message, fix, source)


def parts_that_need_the_program(view: ConfigurationView) -> Iterator[FileFinding]:
    """Yield a finding for each part that does nothing unless the model or the program asks for it."""
    for key, part in _PARTS_FOR_PROGRAMS.items():
        if view.part(key):
            advice = remove(key, part.fix) if part.fix.startswith("Remove") else Remedy(part.fix)
            yield finding("needs-the-program", "note", key, part.message, advice, view.source(part.file))
