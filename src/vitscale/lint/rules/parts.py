"""Whole parts: without effect at this stage, in an old form, or only for a program that uses them."""

from __future__ import annotations

from collections.abc import Iterator

from vitscale.lint.view import View, finding
from vitscale.present.document import Finding

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


def scaling_before_reduction(view: View) -> Iterator[Finding]:
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
            fix = "Remove it: the mean is taken either way"
            yield finding("scaling-before-reduction", "error", key, message, fix, view.source(file))


def refused_values(view: View) -> Iterator[Finding]:
    """Values that DeepSpeed refuses when it reads the file, makes the engine or takes the first step."""
    zero, stage = "zero_optimization", view.stage
    norm, tag = f"{zero}.compute_grad_norm", view.text("checkpoint.tag_validation")
    gathers = view.number(f"{zero}.allgather_bucket_size")
    clips = view.number("gradient_clipping", view.release.default("gradient_clipping"))
    nvme = [
        f"{zero}.{part}" for part in ("offload_optimizer", "offload_param")
        if view.text(f"{zero}.{part}.device") == "nvme" and view.value(f"{zero}.{part}.nvme_path") is None
    ]  # fmt: skip
    no_norm = view.flag(norm, True) is False
    for key, refused, why, fix, file in (
        (norm, no_norm and stage in (0, 3), f"false is refused at stage {stage}", "Remove it",
         "runtime/zero/config.py"),
        (norm, no_norm and stage in (1, 2) and bool(clips), "false is refused where gradients are clipped",
         "Remove it, or set gradient_clipping to 0.0", "runtime/zero/stage_1_and_2.py"),
        (f"{zero}.zenflow", stage == 0 and bool(view.part(f"{zero}.zenflow")), "The first step fails with it at stage "
         "0", "Remove it, or take the stage that it is for", "runtime/engine.py"),
        (f"{zero}.legacy_stage1", bool(stage) and view.on(f"{zero}.legacy_stage1"), "Refused since 0.5.9", "Remove it",
         "runtime/engine.py"),
        ("gradient_allreduce_op", stage == 3 and view.text("gradient_allreduce_op") == "sum",
         "A sum is refused at stage 3", "Remove it: the mean is taken then", "runtime/config.py"),
        (f"{zero}.allgather_bucket_size", stage in (1, 2) and gathers is not None and gathers % 2 == 1,
         "An odd number is refused", "Write an even number", "runtime/zero/stage_1_and_2.py"),
        ("checkpoint.tag_validation", tag is not None and tag.capitalize() not in _TAG_VALIDATION,
         "Any other word is refused", f"Write {', '.join(_TAG_VALIDATION[:2])} or {_TAG_VALIDATION[2]}",
         "runtime/config.py"),
        ("gradient_clipping", view.has("gradient_clipping") and view.value("gradient_clipping") is None,
         "The first step fails on null", "Write 0.0 for no clipping", "runtime/engine.py"),
        ("steps_per_print", view.number("steps_per_print") == 0, "The first step fails on 0 (a division)",
         "Write null to print nothing", "runtime/engine.py"),
        *((f"{part}.nvme_path", stage == 3, "Needed where the device is nvme", "Name a folder on the drive",
           "runtime/zero/offload_config.py") for part in nvme),
    ):  # fmt: skip
        known = view.release.fact(key) is not None or key in ("gradient_clipping", "steps_per_print")
        if refused and known and key not in view.setting.settled:
            yield finding("refused-value", "error", key, why, fix, view.source(file))


def keys_without_effect_at_this_stage(view: View) -> Iterator[Finding]:
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
            f"Without effect at stage {stage}: {several}", "Remove what does nothing, or take the stage that it is for",
            f"{view.source('runtime/engine.py')} (_configure_zero_optimizer)",
        )  # fmt: skip


def old_form_of_zero(view: View) -> Iterator[Finding]:
    """The old form `"zero_optimization": true`."""
    if isinstance(view.value("zero_optimization"), bool):
        yield finding(
            "old-form", "warning", "zero_optimization",
            f"The old form: DeepSpeed warns, and takes it for stage {view.stage}",
            f'"zero_optimization": {{"stage": {view.stage}}}',
            f"{view.source('runtime/zero/config.py')} (read_zero_config_deprecated)",
        )  # fmt: skip


def parts_that_need_the_program(view: View) -> Iterator[Finding]:
    """Parts that do nothing unless the model or the program asks for them."""
    for part, (message, fix, file) in _NEEDS_THE_PROGRAM.items():
        if view.part(part):
            yield finding("needs-the-program", "note", part, message, fix, view.source(file))
