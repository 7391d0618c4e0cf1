"""Memory: buckets that are larger than a small model, and offload and partitioning that cannot pay for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from vitscale.deepspeed_lint.advice import REMOVED, FileChanges, FileFinding, Remedy, remove
from vitscale.deepspeed_lint.rules.overlap import bucket_elements, overlaps, sends_by_itself, smaller_bucket
from vitscale.deepspeed_lint.view import ConfigurationView, finding
from vitscale.present.document import Severity
from vitscale.present.units import counted, size

STATE_BYTES = 16
"""Bytes per parameter that training with Adam keeps, for weights, gradients and the optimizer: 2 + 2 + 12 in mixed
precision, where the optimizer has fp32 weights and moments; 4 + 4 + 8 in fp32 (Rajbhandari et al., ZeRO, arXiv
1910.02054, section 3.1)."""

_ZERO_PAPER = "Rajbhandari et al., ZeRO (arXiv 1910.02054), section 3.1: 16 bytes per parameter"
_SMALL_GPU_BYTES = 16 * 2**30
"""The smallest GPU memory that is still common for training (V100 16 GB, T4)."""

_SMALL_SHARE_OF_GPU = 0.25
"""Share of `_SMALL_GPU_BYTES` below which it is not worth a slower step to free memory."""
_LARGE_BUFFERS_BYTES = 2**29
"""Bytes of buffers that are reported even where the model's size is unknown: a 32nd of `_SMALL_GPU_BYTES`."""
_BUCKET_KEY = "zero_optimization.reduce_bucket_size"
_OFFLOAD_DEVICES = ("cpu", "nvme")
_KEYS_BY_OFFLOAD = {
    "offload_optimizer": ("offload_optimizer", "cpu_offload", "cpu_offload_use_pin_memory"),
    "offload_param": ("offload_param", "cpu_offload_param"),
}
"""Part of zero_optimization -> its key, and the deprecated keys that mean the same."""


def _bytes_per_bucket_element(view: ConfigurationView) -> int:
    """Return the bytes that DeepSpeed's buffers take for each element of a bucket.

    Stages 1 and 2: an element has the type of the weights, whatever type is sent; at stage 1 with a type for
    accumulation it has that one. Stage 3: it has the type in which gradients are sent.

    Under autocast there are two buffers, because weights, which stay fp32, are used in fp32 (norms) and in 16 bits. At
    stage 3 their elements have these two types, at stages 1 and 2 both have fp32.

    See `setup_buckets` in stage_1_and_2.py and `ipg_buckets` in stage3.py of 0.19.8.
    """
    if view.precision == "autocast":
        return 2 + 4 if view.stage == 3 else 4 + 4
    element_type = view.precision
    if view.stage == 1 and view.accumulation_type is not None:
        element_type = view.accumulation_type
    sent_type = view.text("communication_data_type")
    if view.stage == 3 and sent_type is not None:
        element_type = sent_type.lower()
    return 4 if element_type == "fp32" else 2


def bucket_memory(view: ConfigurationView) -> Iterator[FileFinding]:
    """Yield a finding where the buffers of buckets take much memory compared to the model.

    They are allocated in full, however small the model is. Where its size is not known, large buffers are reported.
    """
    elements = bucket_elements(view)
    stage = view.stage
    if elements is None or not stage or sends_by_itself(view):
        return
    if view.flag("zero_optimization.contiguous_gradients", default=True) is not True:
        return
    buffers = 2 if stage < 3 and overlaps(view) else 1
    element_bytes = _bytes_per_bucket_element(view)
    all_buffers_bytes = buffers * elements * element_bytes
    verdict = _judge_buffers(view.target.parameters, elements, all_buffers_bytes)
    if verdict is None:
        return
    default = "" if view.has(_BUCKET_KEY) else " (the default)"
    types = ""
    if view.precision == "autocast":
        types = " (fp32 and 16 bits)" if stage == 3 else " (4 for each of the two types sent)"
    file = "runtime/zero/stage3.py (ipg_buckets)" if stage == 3 else "runtime/zero/stage_1_and_2.py (setup_buckets)"
    yield finding(
        "bucket-memory",
        verdict.severity,
        key=_BUCKET_KEY,
        message=(
            f"{counted(buffers, 'buffer')} of {elements:,.0f} elements{default} x {element_bytes} bytes{types} take "
            f"{size(all_buffers_bytes)} on each GPU, {verdict.comparison}"
        ),
        fix=_advice_for_smaller_bucket(view),
        source=view.source(file),
    )


def _advice_for_smaller_bucket(view: ConfigurationView) -> Remedy:
    """Return advice to set the bucket to a tenth of the model; to an example where its size is not known."""
    elements = smaller_bucket(view)
    text = f"Set reduce_bucket_size to about a tenth of the model: {elements:,}"
    if view.target.parameters is None:
        text = f"Set reduce_bucket_size to a tenth of the model, such as {elements:,} (say --model or --parameters)"
    return Remedy(text, {_BUCKET_KEY: elements})


class _BufferVerdict(NamedTuple):
    """How bad it is that buffers take so much memory."""

    severity: Severity
    comparison: str
    """The size that the buffers' bytes are compared with, in words."""


def _judge_buffers(parameters: int | None, elements: float, buffer_bytes: float) -> _BufferVerdict | None:
    """Judge the memory that all buffers take; None where it is not worth a finding.

    Args:
        parameters: the model's number of parameters; None where it is not known.
        elements: elements of a bucket.
        buffer_bytes: bytes of all buffers.
    """
    are_large = buffer_bytes >= _LARGE_BUFFERS_BYTES
    if parameters is None:
        return _BufferVerdict("note", "whatever the model's size") if are_large else None
    state_bytes = STATE_BYTES * parameters
    if buffer_bytes > state_bytes:
        states = f"{STATE_BYTES} bytes x {parameters:,} parameters = {size(state_bytes)}"
        return _BufferVerdict("warning", f"more than all states of the model ({states})")
    if elements > parameters and are_large:
        comparison = f"though the model has no more than {parameters:,} gradients: the rest stays unused"
        return _BufferVerdict("warning", comparison)
    return None


def _offload_device(view: ConfigurationView, part: str) -> str | None:
    """Return the device, "cpu" or "nvme", that a part of zero_optimization offloads to; None where it offloads nothing.

    Args:
        view: the file.
        part: "offload_optimizer" or "offload_param".
    """
    device = view.text(f"zero_optimization.{part}.device")
    if device is None and part == "offload_optimizer" and view.is_on("zero_optimization.cpu_offload"):
        return "cpu"
    return device if device in _OFFLOAD_DEVICES else None


def offload_that_cannot_pay(view: ConfigurationView) -> Iterator[FileFinding]:
    """Yield a finding for each offload that frees little memory even on a small GPU, while it slows every step."""
    parameters = view.target.parameters
    stage = view.stage
    if parameters is None or not stage:
        return
    if _offload_device(view, "offload_optimizer"):
        yield from _small_offload(view, parameters, _OPTIMIZER_OFFLOAD)
    if stage == 3 and _offload_device(view, "offload_param"):
        weight_bytes = 2 if view.precision in ("bf16", "fp16") else 4
        yield from _small_offload(view, parameters, _PARAMETER_OFFLOAD._replace(bytes_per_parameter=weight_bytes))


class _Offload(NamedTuple):
    """Something that is kept on the host instead of the GPU."""

    part: str
    """Part of zero_optimization."""
    bytes_per_parameter: int
    """Bytes of GPU memory that it frees for each parameter of the model."""
    noun: str
    """Name of what is offloaded."""
    cost: str
    """A clause on what every step does for it."""


_OPTIMIZER_OFFLOAD = _Offload(
    "offload_optimizer",
    12,
    "optimizer states",
    "the gradients go to the host and the new weights come back in every step, and the processor computes Adam",
)
_PARAMETER_OFFLOAD = _Offload(
    "offload_param",
    4,
    "parameters",
    "every layer waits for its weights from the host, in forward and backward",
)


def _small_offload(view: ConfigurationView, parameters: int, offload: _Offload) -> Iterator[FileFinding]:
    """Yield a finding where an offload frees little even on a small GPU."""
    gpus = view.target.gpus or 1
    ratio = view.number(f"zero_optimization.{offload.part}.ratio", 1)  # the share that is offloaded
    offloaded_share = 1 if ratio is None else min(max(ratio, 0), 1)
    freed_bytes = offload.bytes_per_parameter * parameters / gpus * offloaded_share
    if freed_bytes >= _SMALL_SHARE_OF_GPU * _SMALL_GPU_BYTES:
        return
    product = f"{offload.bytes_per_parameter} bytes x {parameters:,} parameters"
    if gpus > 1:
        product += f" / {gpus:,} GPUs"
    if ratio is not None and ratio < 1:
        product += f" x {ratio:g}"
    yield finding(
        "offload-cannot-pay",
        "warning",
        key=f"zero_optimization.{offload.part}",
        message=f"It frees {product} = {size(freed_bytes)} of {offload.noun} per GPU, "
        f"{100 * freed_bytes / _SMALL_GPU_BYTES:.1f} % of even a 16 GiB GPU; for that {offload.cost}",
        fix=Remedy(
            f"Remove {offload.part}; to save memory checkpoint activations, which need far more in a model of this "
            "size",
            _without_offload(offload.part),
        ),
        source=_ZERO_PAPER,
    )


def _without_offload(part: str) -> FileChanges:
    """Return changes of the file that remove an offload, its deprecated keys included."""
    return {f"zero_optimization.{name}": REMOVED for name in _KEYS_BY_OFFLOAD[part]}


_OPTIMIZERS_WITH_CPU_FORM = ("adam", "adamw", "adagrad", "lion")
"""Optimizers, in small letters, of which DeepSpeed has one for the CPU, and takes it where the optimizer is offloaded.
"""


def offload_without_effect(view: ConfigurationView) -> Iterator[FileFinding]:
    """Yield a finding for each offload that does nothing at the file's stage, or that DeepSpeed refuses there."""
    stage = view.stage
    if stage is None:
        return
    source = view.source("runtime/zero/config.py")
    optimizer_device = _offload_device(view, "offload_optimizer")
    if stage in (1, 2) and optimizer_device == "nvme":
        yield _nvme_below_stage_3(view)
    if stage < 3 and _offload_device(view, "offload_param"):
        message = f"offload_param is for stage 3 alone: at stage {stage} the parameters stay on the GPU"
        key = "zero_optimization.offload_param"
        yield finding("offload-without-effect", "warning", key, message, remove(key), source)
    if stage == 0 and optimizer_device is not None:
        yield _optimizer_offload_at_stage_0(view)
    ratio_key = "zero_optimization.offload_optimizer.ratio"
    ratio = view.number(ratio_key, 1)
    if stage != 3 and ratio is not None and ratio < 1:
        message = f"DeepSpeed refuses a ratio below 1 at stage {stage}: partial offload is for stage 3"
        yield finding("offload-ratio", "error", ratio_key, message, remove(ratio_key), source)


def _nvme_below_stage_3(view: ConfigurationView) -> FileFinding:
    """Return the finding on an optimizer that is to be offloaded to nvme at stage 1 or 2."""
    effect = "nothing is offloaded" if sends_by_itself(view) else "the states go to the host's memory instead"
    message = f"nvme is for stage 3: at stage {view.stage} {effect}, and nothing is written to nvme_path"
    key = "zero_optimization.offload_optimizer.device"
    fix = Remedy('Write "device": "cpu" if that is meant, or take stage 3', {key: "cpu"})
    source = view.source("runtime/zero/stage_1_and_2.py")
    return finding("offload-without-effect", "warning", key, message, fix, source)


def _optimizer_offload_at_stage_0(view: ConfigurationView) -> FileFinding:
    """Return the finding on an offloaded optimizer at stage 0, where some optimizers fail and others do not move."""
    key = "zero_optimization.offload_optimizer"
    fix = Remedy("Remove it, or take stage 1 or 2", _without_offload("offload_optimizer"))
    optimizer = (view.text("optimizer.type") or "").lower()
    takes_torch_adam = view.value("optimizer.params.torch_adam") is True
    if optimizer in _OPTIMIZERS_WITH_CPU_FORM and not takes_torch_adam:
        message = (
            "offload_optimizer at stage 0 makes DeepSpeed take its optimizer for the CPU, and no stage moves the "
            "parameters there: the first step fails on a GPU"
        )
        source = f"{view.source('runtime/engine.py')} (zero_use_cpu_optimizer)"
        return finding("offload-without-effect", "error", key, message, fix, source)
    message = "offload_optimizer is for stages 1 to 3: at stage 0 there are no partitions to offload"
    return finding("offload-without-effect", "warning", key, message, fix, view.source("runtime/zero/config.py"))


def stage_that_saves_little(view: ConfigurationView) -> Iterator[FileFinding]:
    """Yield a finding where stage 2 or 3 partitions states that are small compared to any GPU's memory."""
    parameters = view.target.parameters
    stage = view.stage
    if parameters is None or stage not in (2, 3) or view.target.gpus == 1:
        return
    state_bytes = STATE_BYTES * parameters
    if state_bytes < _SMALL_SHARE_OF_GPU * _SMALL_GPU_BYTES:
        percent = 100 * state_bytes / _SMALL_GPU_BYTES
        yield finding(
            "stage-saves-little",
            "note",
            key="zero_optimization.stage",
            message=f"All states of the model take 16 bytes x {parameters:,} parameters = {size(state_bytes)}, "
            f"{percent:.1f} % of even a 16 GiB GPU: stage {stage} cannot save more than that",
            fix="Take the stage that is fastest: vitscale sweeps train.zero_stage",
            source=_ZERO_PAPER,
        )


_DEFAULT_REUSE_DISTANCE = 1e9
"""Default of `max_reuse_distance`, in parameters."""


def parameters_gathered_once(view: ConfigurationView) -> Iterator[FileFinding]:
    """Yield a finding where stage 3 frees no parameter between forward and backward, because the model is small.

    After a use in forward, DeepSpeed releases a gathered parameter unless its next use, in backward, lies within
    `max_reuse_distance` (`__params_to_release`). The distance of two uses is the number of parameters that are used
    from one to the other, at most twice those of the model. `max_live_parameters` does not matter here: it only limits
    how many are fetched ahead.
    """
    parameters = view.target.parameters
    if parameters is None or view.stage != 3:
        return
    key = view.zero_key("stage3_max_reuse_distance", "max_reuse_distance")
    prefetch_key = view.zero_key("stage3_prefetch_bucket_size", "prefetch_bucket_size")
    max_reuse_distance = view.number(key, _DEFAULT_REUSE_DISTANCE)
    longest_reuse_distance = 2 * parameters
    if max_reuse_distance is None or max_reuse_distance < longest_reuse_distance:
        return
    yield finding(
        "parameters-gathered-once",
        "note",
        key=key,
        message=f"Twice the model's {parameters:,} parameters, the way through forward and back, are no more than "
        "max_reuse_distance: what forward gathers stays until backward has used it. So every GPU holds the whole "
        "model in each step, and stage 3 frees little more than stage 2",
        fix=Remedy(
            "To free parameters at once set max_reuse_distance and prefetch_bucket_size to 0, which gathers them a "
            "second time in backward",
            {key: 0, prefetch_key: 0},
        ),
        source=view.source("runtime/zero/partitioned_param_coordinator.py"),
    )
