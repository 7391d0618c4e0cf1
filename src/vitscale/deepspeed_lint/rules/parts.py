"""Whole parts: without effect at this stage, in an old form, or only for a program that uses them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from vitscale.deepspeed_lint.advice import REMOVED, FileFinding, Remedy, remove
from vitscale.deepspeed_lint.view import ConfigurationView, finding

_OF_STAGE_3 = (
    *("sub_group_size", "zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_gradients"),
    *("prefetch_bucket_size", "param_persistence_threshold", "max_live_parameters", "max_reuse_distance"),
)
_OF_STAGES_1_AND_2 = ("allgather_bucket_size", "allgather_partitions", "round_robin_gradients")
_OFFLOAD = (
    *("offload_optimizer", "offload_param", "cpu_offload", "cpu_offload_param", "overlap_comm", "compute_grad_norm"),
    "zenflow",
)
"""Keys that have rules of their own."""
_TAG_VALIDATION = ("Warn", "Ignore", "Fail")

_NEEDS_THE_PROGRAM = {
    "activation_checkpointing": (
        "This part checkpoints nothing by itself: it sets up deepspeed.checkpointing, which only models that call "
        "deepspeed.checkpointing.checkpoint use",
        "For other models switch it on in the program, such as model.gradient_checkpointing_enable() in transformers",
        "runtime/activation_checkpointing/config.py",
    ),
    "pipeline": (
        "Only a model built as a deepspeed.pipe.PipelineModule reads this part",
        "Remove it unless the model is one",
        "runtime/pipe/engine.py",
    ),
}


def scaling_before_reduction(view: ConfigurationView) -> Iterator[FileFinding]:
    """Gradient scaling that DeepSpeed refuses with reduce-scatter."""
    if view.stage not in (2, 3) or view.flag("zero_optimization.reduce_scatter", True) is not True:
        return
    file = "runtime/zero/stage3.py" if view.stage == 3 else "runtime/zero/stage_1_and_2.py"
    factor = view.number("gradient_predivide_factor", 1)
    for key, wrong in (
        ("prescale_gradients", view.on("prescale_gradients")),
        ("gradient_predivide_factor", factor is not None and factor != 1),
    ):
        if wrong:
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
    """Values that DeepSpeed refuses when it reads the file, makes the engine or takes the first step."""
    for refusal in (*_refused_in_zero(view), *_refused_at_the_top(view)):
        is_read = view.release.fact(refusal.key) is not None or refusal.key in ("gradient_clipping", "steps_per_print")
        if is_read and refusal.key not in view.setting.settled:
            source = view.source(refusal.file)
            yield finding("refused-value", "error", refusal.key, refusal.message, refusal.fix, source)


def _refused_in_zero(view: ConfigurationView) -> Iterator[_Refusal]:
    zero, stage = "zero_optimization", view.stage
    norm, zenflow, legacy = f"{zero}.compute_grad_norm", f"{zero}.zenflow", f"{zero}.legacy_stage1"
    has_no_norm = view.flag(norm, True) is False
    clips = view.number("gradient_clipping", view.release.default("gradient_clipping"))
    if has_no_norm and stage in (0, 3):
        yield _Refusal(norm, f"false is refused at stage {stage}", remove(norm), "runtime/zero/config.py")
    if has_no_norm and stage in (1, 2) and clips:
        fix = remove(norm, "Remove it, or set gradient_clipping to 0.0")
        yield _Refusal(norm, "false is refused where gradients are clipped", fix, "runtime/zero/stage_1_and_2.py")
    if stage == 0 and view.part(zenflow):
        fix = remove(zenflow, "Remove it, or take the stage that it is for")
        yield _Refusal(zenflow, "The first step fails with it at stage 0", fix, "runtime/engine.py")
    if stage and view.on(legacy):
        yield _Refusal(legacy, "Refused since 0.5.9", remove(legacy), "runtime/engine.py")
    gathers = view.number(f"{zero}.allgather_bucket_size")
    if stage in (1, 2) and gathers is not None and gathers % 2 == 1:
        key, even = f"{zero}.allgather_bucket_size", int(gathers) + 1
        fix = Remedy(f"Write an even number, such as {even:,}", {key: even})
        yield _Refusal(key, "An odd number is refused", fix, "runtime/zero/stage_1_and_2.py")
    for part in (f"{zero}.offload_optimizer", f"{zero}.offload_param"):
        lacks_path = view.text(f"{part}.device") == "nvme" and view.value(f"{part}.nvme_path") is None
        if stage == 3 and lacks_path:
            key, fix = f"{part}.nvme_path", Remedy("Name a folder on the drive")
            yield _Refusal(key, "Needed where the device is nvme", fix, "runtime/zero/offload_config.py")


def _refused_at_the_top(view: ConfigurationView) -> Iterator[_Refusal]:
    key = "gradient_allreduce_op"
    if view.stage == 3 and view.text(key) == "sum":
        fix = remove(key, "Remove it: the mean is taken then")
        yield _Refusal(key, "A sum is refused at stage 3", fix, "runtime/config.py")
    key, tag = "checkpoint.tag_validation", view.text("checkpoint.tag_validation")
    if tag is not None and tag.capitalize() not in _TAG_VALIDATION:
        fix = Remedy("Write Warn, Ignore or Fail", {key: "Warn"})
        yield _Refusal(key, "Any other word is refused", fix, "runtime/config.py")
    key = "gradient_clipping"
    if view.has(key) and view.value(key) is None:
        fix = Remedy("Write 0.0 for no clipping", {key: 0.0})
        yield _Refusal(key, "The first step fails on null", fix, "runtime/engine.py")
    key = "steps_per_print"
    if view.number(key) == 0:
        fix = Remedy("Write null to print nothing", {key: None})
        yield _Refusal(key, "The first step fails on 0 (a division)", fix, "runtime/engine.py")


def keys_without_effect_at_this_stage(view: ConfigurationView) -> Iterator[FileFinding]:
    """Keys of `zero_optimization` that the stage does not use; one finding names them all."""
    stage = view.stage
    names = [name for name in view.part("zero_optimization") if name not in _OFFLOAD]
    names = [name for name in names if view.release.fact(f"zero_optimization.{name}") not in (None, "refused")]
    if stage == 0:
        idle = [name for name in names if name != "stage"]
    elif stage in (1, 2):
        idle = [name for name in names if name.startswith("stage3_") or name in _OF_STAGE_3]
    elif stage == 3:
        idle = [name for name in names if name in _OF_STAGES_1_AND_2]
    else:
        idle = []
    if idle:
        several = ", ".join(idle[:4]) + (f" and {len(idle) - 4} more" if len(idle) > 4 else "")
        yield finding(
            "no-effect-at-this-stage", "note",
            f"zero_optimization.{idle[0]}" if len(idle) == 1 else "zero_optimization",
            f"Without effect at stage {stage}: {several}",
            Remedy(
                "Remove what does nothing, or take the stage that it is for",
                {f"zero_optimization.{name}": REMOVED for name in idle},
            ),
            f"{view.source('runtime/engine.py')} (_configure_zero_optimizer)",
        )  # fmt: skip


def old_form_of_zero(view: ConfigurationView) -> Iterator[FileFinding]:
    """The old form `"zero_optimization": true`."""
    if isinstance(view.value("zero_optimization"), bool):
        yield finding(
            "old-form", "warning", "zero_optimization",
            f"The old form: DeepSpeed warns, and takes it for stage {view.stage}",
            Remedy(f'"zero_optimization": {{"stage": {view.stage}}}', {"zero_optimization": {"stage": view.stage}}),
            f"{view.source('runtime/zero/config.py')} (read_zero_config_deprecated)",
        )  # fmt: skip


def parts_that_need_the_program(view: ConfigurationView) -> Iterator[FileFinding]:
    """Parts that do nothing unless the model or the program asks for them."""
    for part, (message, fix, file) in _NEEDS_THE_PROGRAM.items():
        if view.part(part):
            advice = remove(part, fix) if fix.startswith("Remove") else Remedy(fix)
            yield finding("needs-the-program", "note", part, message, advice, view.source(file))
