"""Overlap: whether gradients are sent while backward still computes, and how often they are sent."""

from __future__ import annotations

from collections.abc import Iterator

from vitscale.lint.view import View, finding
from vitscale.present.document import Finding

BUCKET_ELEMENTS = 5e8
"""Default of `reduce_bucket_size` and `allgather_bucket_size`, in elements: deepspeed/runtime/zero/config.py, 0.9.5 to
0.19.8."""

_OVERLAP = "zero_optimization.overlap_comm"
_BUCKET = "zero_optimization.reduce_bucket_size"


def overlaps(view: View) -> bool | None:
    """Whether `overlap_comm` is on at this stage, by default only at stage 3; None where that is open."""
    if view.stage is None or view.open(_OVERLAP):
        return None
    return view.flag(_OVERLAP, view.stage == 3)


def sends_by_itself(view: View) -> bool:
    """Whether the optimizer is BF16_Optimizer, which has buckets of its own."""
    offloads = view.text("zero_optimization.offload_optimizer.device") == "cpu"  # with nvme it is this optimizer too
    return (
        view.stage == 1
        and view.precision == "bf16"
        and view.accumulates == "fp32"
        and not (offloads or view.on("zero_optimization.cpu_offload"))
    )


def bucket_elements(view: View) -> float | None:
    """`reduce_bucket_size`, in elements; None where it is open."""
    return None if view.open(_BUCKET) else view.number(_BUCKET, BUCKET_ELEMENTS)


def good_bucket(parameters: int) -> int:
    """A bucket of about a tenth of the model: one significant digit, at least a million elements."""
    tenth = max(parameters // 10, 1_000_000)
    unit = int("1".ljust(len(str(tenth)), "0"))
    return tenth // unit * unit


def nothing_overlaps(view: View) -> Iterator[Finding]:
    """Gradients that are sent only after backward has ended, or while backward waits."""
    stage = view.stage
    if stage is None or view.setting.gpus == 1:
        return
    if stage == 0:
        asked = view.on(_OVERLAP)
        yield finding(
            "no-overlap", "warning", _OVERLAP if asked else "zero_optimization.stage" if view.has("zero_optimization")
            else "",
            ("overlap_comm has no effect at stage 0: the " if asked else "At stage 0 the ")
            + "gradients are all-reduced after backward has ended, so the whole transfer adds to the step",
            "Take stage 1 with overlap_comm true and a reduce_bucket_size well below the model's size; or PyTorch's "
            "DistributedDataParallel, which overlaps by itself",
            f"{view.source('runtime/engine.py')} (allreduce_gradients, buffered_allreduce_fallback)",
        )  # fmt: skip
    elif sends_by_itself(view):
        yield finding(
            "no-overlap", "warning", "data_types.grad_accum_dtype",
            "With bf16 and fp32 accumulation at stage 1 DeepSpeed takes BF16_Optimizer, which knows neither "
            "overlap_comm nor reduce_bucket_size: gradients are sent after backward has ended",
            "Take stage 2, or leave data_types.grad_accum_dtype out",
            f"{view.source('runtime/engine.py')} (_do_optimizer_sanity_check, allreduce_gradients)",
        )  # fmt: skip
    elif overlaps(view) is False:
        default = "" if view.has(_OVERLAP) else " by default"
        then = (
            "gradients are sent after backward has ended" if stage == 1 else "backward waits for each bucket it sends"
        )
        yield finding(
            "no-overlap", "warning", _OVERLAP,
            f"overlap_comm is off{default} at stage {stage}: {then}",
            "Set it to true, with a reduce_bucket_size well below the model's size",
            f"{view.source('runtime/zero/config.py')} (overlap_comm_valid) and "
            + view.source(f"runtime/zero/{'stage3' if stage == 3 else 'stage_1_and_2'}.py"),
        )  # fmt: skip


def one_bucket(view: View) -> Iterator[Finding]:
    """`overlap_comm` with a bucket that holds the whole model, and so is full only when backward has ended."""
    parameters, bucket, stage = view.setting.parameters, bucket_elements(view), view.stage
    if not stage or parameters is None or bucket is None or view.setting.gpus == 1 or sends_by_itself(view):
        return
    if overlaps(view) and bucket >= parameters:
        default = "" if view.has(_BUCKET) else " (the default)"
        yield finding(
            "one-bucket", "warning", _BUCKET,
            f"A bucket of {bucket:,.0f} elements{default} holds all {parameters:,} gradients of the model: it is sent "
            "when backward has ended, and overlap_comm overlaps nothing",
            f"Set it to about a tenth of the model: {good_bucket(parameters):,}",
            f"{view.source('runtime/zero/config.py')} (reduce_bucket_size counts elements, not bytes)",
        )  # fmt: skip


def gradients_sent_every_micro_step(view: View) -> Iterator[Finding]:
    """Accumulation at stages 2 and 3, where it saves no communication."""
    steps, stage = view.number("gradient_accumulation_steps", 1), view.stage
    if stage in (2, 3) and steps is not None and steps > 1 and view.setting.gpus != 1:
        yield finding(
            "gradients-sent-every-micro-step", "note", "gradient_accumulation_steps",
            f"At stage {stage} all gradients are reduced in each of the {steps:g} micro-steps, at stages 0 and 1 once "
            "per step",
            "Take stage 1 where its memory suffices, or a larger micro-batch with fewer micro-steps",
            f"{view.source('runtime/engine.py')} (allreduce_gradients)",
        )  # fmt: skip
