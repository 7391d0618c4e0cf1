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
_OFFLOAD = ("offload_optimizer", "offload_param", "cpu_offload", "cpu_offload_param", "overlap_comm")
"""Keys that have rules of their own."""

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
