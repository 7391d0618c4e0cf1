"""Memory: buckets that are larger than a small model, and offload and partitioning that cannot pay for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from vitscale.deepspeed_lint.advice import REMOVED, FileFinding, Remedy, remove
from vitscale.deepspeed_lint.rules.overlap import bucket_elements, overlaps, sends_by_itself, smaller_bucket
from vitscale.deepspeed_lint.view import ConfigurationView, finding
from vitscale.present.document import Severity
from vitscale.present.units import size

STATE_BYTES = 16
"""Bytes per parameter that training with Adam keeps, for weights, gradients and the optimizer: 2 + 2 + 12 in mixed
precision, where the optimizer has fp32 weights and moments; 4 + 4 + 8 in fp32 (Rajbhandari et al., ZeRO, arXiv
1910.02054, section 3.1)."""

_ZERO_PAPER = "Rajbhandari et al., ZeRO (arXiv 1910.02054), section 3.1: 16 bytes per parameter"
_SMALL_GPU_BYTES = 16 * 2**30
"""The smallest GPU memory that is still common for training (V100 16 GB, T4)."""

_LITTLE = 0.25
_WORTH_A_NOTE = 2**29
"""Bytes of buffers that are named even where the model's size is unknown: a 32nd of that memory."""
_BUCKET = "zero_optimization.reduce_bucket_size"
_DEVICES = ("cpu", "nvme")
_NAMES_OF = {
    "offload_optimizer": ("offload_optimizer", "cpu_offload", "cpu_offload_use_pin_memory"),
    "offload_param": ("offload_param", "cpu_offload_param"),
}
"""Part -> it and the deprecated keys that mean the same."""


def _buffer_bytes(view: ConfigurationView) -> int:
    """Bytes that a buffer takes for each element of a bucket.

    At stages 1 and 2 an element has the type of the weights (which autocast leaves in fp32), whatever is sent, or at
    stage 1 that in which gradients are accumulated. At stage 3 it has the type in which gradients are sent. Under
    autocast there is a buffer for each type in which weights are used: fp32 (norms) and 16 bits. See `setup_buckets` in
    stage_1_and_2.py and `ipg_buckets` in stage3.py of 0.19.8.
    """
    if view.precision == "autocast":
        return 2 + 4 if view.stage == 3 else 4 + 4
    if view.stage == 1 and view.accumulates is not None:
        return 4 if view.accumulates == "fp32" else 2
    if view.stage == 3 and view.text("communication_data_type") is not None:
        return 4 if (view.text("communication_data_type") or "").lower() == "fp32" else 2
    return 4 if view.precision == "fp32" else 2


def bucket_memory(view: ConfigurationView) -> Iterator[FileFinding]:
    """Bucket buffers, which are allocated whole whatever the model's size; without a model only what they take."""
    bucket, stage = bucket_elements(view), view.stage
    if bucket is None or not stage or sends_by_itself(view):
        return
    if view.flag("zero_optimization.contiguous_gradients", True) is not True:
        return
    buffers = 2 if stage < 3 and overlaps(view) else 1
    bytes_taken = buffers * bucket * _buffer_bytes(view)
    judged = _bucket_judged(view.setting.parameters, bucket, bytes_taken)
    if judged is None:
        return
    types = " (fp32 and 16 bits)" if stage == 3 else " (4 for each of the two types sent)"
    default = "" if view.has(_BUCKET) else " (the default)"
    smaller = smaller_bucket(view)
    text = f"Set reduce_bucket_size to about a tenth of the model: {smaller:,}"
    if view.setting.parameters is None:
        text = f"Set reduce_bucket_size to a tenth of the model, such as {smaller:,} (say --model or --parameters)"
    yield finding(
        "bucket-memory", judged.severity, _BUCKET,
        f"{buffers} buffer{'s' * (buffers > 1)} of {bucket:,.0f} elements{default} x {_buffer_bytes(view)} bytes"
        f"{types if view.precision == 'autocast' else ''} take {size(bytes_taken)} on each GPU, "
        f"{judged.comparison}",
        Remedy(text, {_BUCKET: smaller}),
        view.source("runtime/zero/stage3.py (ipg_buckets)" if stage == 3 else
                    "runtime/zero/stage_1_and_2.py (setup_buckets)"),
    )  # fmt: skip


class _Judged(NamedTuple):
    severity: Severity
    comparison: str
    """With what the buffers' bytes are compared, in words."""


def _bucket_judged(parameters: int | None, bucket: float, bytes_taken: float) -> _Judged | None:
    """How bad a bucket's memory is; None: not worth a word."""
    if parameters is None:
        comparison = "whatever the model's size"
        return _Judged("note", comparison) if bytes_taken >= _WORTH_A_NOTE else None
    states = STATE_BYTES * parameters
    if bytes_taken > states:
        comparison = (
            f"more than all states of the model ({STATE_BYTES} bytes x {parameters:,} parameters = {size(states)})"
        )
        return _Judged("warning", comparison)
    if bucket > parameters and bytes_taken >= _WORTH_A_NOTE:
        return _Judged("warning", f"though the model has no more than {parameters:,} gradients: the rest stays unused")
    return None


def _offloads(view: ConfigurationView, part: str) -> str | None:
    """The device that `offload_optimizer` or `offload_param` names; None where nothing is offloaded."""
    device = view.text(f"zero_optimization.{part}.device")
    if device is None and part == "offload_optimizer" and view.on("zero_optimization.cpu_offload"):
        return "cpu"
    return device if device in _DEVICES else None


def offload_that_cannot_pay(view: ConfigurationView) -> Iterator[FileFinding]:
    """Offload that frees little even on a small GPU, and costs time in every step."""
    parameters, stage = view.setting.parameters, view.stage
    if parameters is None or not stage:
        return
    gpus = view.setting.gpus or 1
    shared = f" / {gpus:,} GPUs" if gpus > 1 else ""
    weights = 2 if view.precision in ("bf16", "fp16") else 4
    for part, each, what, cost in (
        ("offload_optimizer", 12, "optimizer states", "the gradients go to the host and the new weights come back in "
         "every step, and the processor computes Adam"),
        ("offload_param", weights, "parameters", "every layer waits for its weights from the host, in forward and "
         "backward"),
    ):  # fmt: skip
        ratio = view.number(f"zero_optimization.{part}.ratio", 1)
        freed = each * parameters / gpus * (1 if ratio is None else min(max(ratio, 0), 1))
        partly = f" x {ratio:g}" if ratio is not None and ratio < 1 else ""
        if _offloads(view, part) and (part == "offload_optimizer" or stage == 3) and freed < _LITTLE * _SMALL_GPU_BYTES:
            yield finding(
                "offload-cannot-pay", "warning", f"zero_optimization.{part}",
                f"It frees {each} bytes x {parameters:,} parameters{shared}{partly} = {size(freed)} of {what} per GPU, "
                f"{100 * freed / _SMALL_GPU_BYTES:.1f} % of even a 16 GiB GPU; for that {cost}",
                Remedy(
                    f"Remove {part}; to save memory checkpoint activations, which need far more in a model of this "
                    "size",
                    {f"zero_optimization.{name}": REMOVED for name in _NAMES_OF[part]},
                ),
                _ZERO_PAPER,
            )  # fmt: skip


_ON_THE_CPU = ("adam", "adamw", "adagrad", "lion")
"""Optimizers, in small letters, of which DeepSpeed has one for the CPU, and takes it where the optimizer is offloaded.
"""


def offload_without_effect(view: ConfigurationView) -> Iterator[FileFinding]:
    """Offload at a stage where it does nothing or is refused."""
    stage, zero = view.stage, "zero_optimization"
    if stage is None:
        return
    source = view.source("runtime/zero/config.py")
    if stage in (1, 2) and _offloads(view, "offload_optimizer") == "nvme":
        then = "nothing is offloaded" if sends_by_itself(view) else "the states go to the host's memory instead"
        message = f"nvme is for stage 3: at stage {stage} {then}, and nothing is written to nvme_path"
        device = f"{zero}.offload_optimizer.device"
        fix = Remedy('Write "device": "cpu" if that is meant, or take stage 3', {device: "cpu"})
        where = view.source("runtime/zero/stage_1_and_2.py")
        yield finding("offload-without-effect", "warning", f"{zero}.offload_optimizer.device", message, fix, where)
    if stage < 3 and _offloads(view, "offload_param"):
        message = f"offload_param is for stage 3 alone: at stage {stage} the parameters stay on the GPU"
        yield finding(
            "offload-without-effect",
            "warning",
            f"{zero}.offload_param",
            message,
            remove(f"{zero}.offload_param"),
            source,
        )
    if stage == 0 and _offloads(view, "offload_optimizer"):
        fix = Remedy(
            "Remove it, or take stage 1 or 2", {f"{zero}.{name}": REMOVED for name in _NAMES_OF["offload_optimizer"]}
        )
        torchs = view.value("optimizer.params.torch_adam") is True
        if (view.text("optimizer.type") or "").lower() in _ON_THE_CPU and not torchs:
            message = (
                "offload_optimizer at stage 0 makes DeepSpeed take its optimizer for the CPU, and no stage moves the "
                "parameters there: the first step fails on a GPU"
            )
            where = f"{view.source('runtime/engine.py')} (zero_use_cpu_optimizer)"
            yield finding("offload-without-effect", "error", f"{zero}.offload_optimizer", message, fix, where)
        else:
            message = "offload_optimizer is for stages 1 to 3: at stage 0 there are no partitions to offload"
            yield finding("offload-without-effect", "warning", f"{zero}.offload_optimizer", message, fix, source)
    ratio = view.number(f"{zero}.offload_optimizer.ratio", 1)
    if stage != 3 and ratio is not None and ratio < 1:
        message = f"DeepSpeed refuses a ratio below 1 at stage {stage}: partial offload is for stage 3"
        key = f"{zero}.offload_optimizer.ratio"
        yield finding("offload-ratio", "error", key, message, remove(key), source)


def stage_that_saves_little(view: ConfigurationView) -> Iterator[FileFinding]:
    """Partitioning of states that are small compared to any GPU's memory."""
    parameters, stage = view.setting.parameters, view.stage
    if parameters is None or stage not in (2, 3) or view.setting.gpus == 1:
        return
    states = STATE_BYTES * parameters
    if states < _LITTLE * _SMALL_GPU_BYTES:
        yield finding(
            "stage-saves-little", "note", "zero_optimization.stage",
            f"All states of the model take 16 bytes x {parameters:,} parameters = {size(states)}, "
            f"{100 * states / _SMALL_GPU_BYTES:.1f} % of even a 16 GiB GPU: stage {stage} cannot save more than that",
            "Take the stage that is fastest: vitscale sweeps train.zero_stage", _ZERO_PAPER,
        )  # fmt: skip


def parameters_gathered_once(view: ConfigurationView) -> Iterator[FileFinding]:
    """Stage 3 on a model so small that each gathered parameter stays until backward has used it.

    Whether it is released is decided by the parameters that are gone through until then, at most twice the model
    (`__params_to_release`); max_live_parameters limits fetching ahead alone.
    """
    parameters = view.setting.parameters
    if parameters is None or view.stage != 3:
        return
    key = view.zero("stage3_max_reuse_distance", "max_reuse_distance")
    distance = view.number(key, 1e9)
    if distance is not None and distance >= 2 * parameters:
        yield finding(
            "parameters-gathered-once", "note", key,
            f"Twice the model's {parameters:,} parameters, the way through forward and back, are no more than "
            "max_reuse_distance: what forward gathers stays until backward has used it. So every GPU holds the whole "
            "model in each step, and stage 3 frees little more than stage 2",
            Remedy(
                "To free parameters at once set max_reuse_distance and prefetch_bucket_size to 0, which gathers them a "
                "second time in backward",
                {key: 0, view.zero("stage3_prefetch_bucket_size", "prefetch_bucket_size"): 0},
            ),
            view.source("runtime/zero/partitioned_param_coordinator.py"),
        )  # fmt: skip
