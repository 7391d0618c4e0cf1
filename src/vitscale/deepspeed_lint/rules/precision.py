"""Precision: in which types values are computed, kept and sent, and the traps of fp16's loss scale."""

from __future__ import annotations

from collections.abc import Iterator

from vitscale.deepspeed_lint.advice import FileChanges, FileFinding, Remedy, remove
from vitscale.deepspeed_lint.view import DTYPES, ConfigurationView, finding
from vitscale.errors import shown

_FP16_LARGEST = 65504
_OFFLOADED = "zero_optimization.offload_optimizer"
_TF32 = "https://pytorch.org/docs/stable/notes/cuda.html#tensorfloat-32-tf32-on-ampere-and-later-devices"


def no_reduced_precision(view: ConfigurationView) -> Iterator[FileFinding]:
    """Files that enable neither bf16 nor fp16 nor autocast, so that everything runs in fp32."""
    if view.precision != "fp32":
        return
    parts = [part for part in ("bf16", "fp16", "torch_autocast") if view.release.fact(part) is not None]
    said = next((f"{part}.enabled" for part in parts if view.has(f"{part}.enabled")), "")
    switch = '"torch_autocast": {"enabled": true, "dtype": "bfloat16"}'
    changes: FileChanges = {"torch_autocast.enabled": True, "torch_autocast.dtype": "bfloat16"}
    if not view.has_autocast or view.on("zero_optimization.zero_quantized_weights"):
        switch = '"bf16": {"enabled": true}'
        changes = {f"{view.bf16}.enabled": True}
    text = f"{switch} on GPUs since Ampere; to stay in fp32, call torch.set_float32_matmul_precision('high') for TF32"
    beside = "what the file says of types and buckets then has to change too"
    yield finding(
        "no-reduced-precision", "warning", said,
        "Nothing enables bf16, fp16 or autocast, so all runs in fp32: twice the memory of activations and twice the "
        "bytes per gradient of bf16, and PyTorch's fp32 matrix products leave the tensor cores unused (TF32 is off "
        "by default)",
        [Remedy(text, changes), Remedy(f"{text}; {beside}")],
        f"{view.source('runtime/precision_config.py')} and {_TF32}",
    )  # fmt: skip


def several_precisions(view: ConfigurationView) -> Iterator[FileFinding]:
    """fp16 and bf16 at once, or autocast on top of one of them."""
    bf16 = view.on(f"{view.bf16}.enabled")
    fp16, autocast = view.on("fp16.enabled"), view.has_autocast and view.on("torch_autocast.enabled")
    if bf16 and fp16:
        yield finding(
            "several-precisions", "error", "fp16.enabled", "bf16 and fp16 are both enabled, which DeepSpeed refuses",
            [
                Remedy("Enable one: bf16 needs no loss scale, so set fp16.enabled to false", {"fp16.enabled": False}),
                Remedy(
                    "Enable one: set fp16.enabled and torch_autocast.enabled to false, for bf16",
                    {"fp16.enabled": False, "torch_autocast.enabled": False},
                ),
            ],
            view.source("runtime/config.py"),
        )  # fmt: skip
    elif autocast and (bf16 or fp16):
        kept = "bf16" if bf16 else "fp16"
        part = view.bf16 if bf16 else "fp16"
        yield finding(
            "several-precisions", "warning", "torch_autocast.enabled",
            f"{part}.enabled turns the weights into {kept} already; autocast finds little left to cast",
            [
                Remedy(
                    f"Enable one: torch_autocast keeps fp32 weights, {part}.enabled does not; set one to false",
                    {switch: False},
                )
                for switch in (f"{part}.enabled", "torch_autocast.enabled")
            ],
            view.source("runtime/torch_autocast.py"),
        )  # fmt: skip


def bf16_is_not_autocast(view: ConfigurationView) -> Iterator[FileFinding]:
    """`bf16.enabled`, which is not the same as PyTorch's autocast."""
    autocasts = view.has_autocast and view.on("torch_autocast.enabled")
    if view.on(f"{view.bf16}.enabled") and not autocasts:
        instead = ", which is torch_autocast here" if view.has_autocast else ""
        yield finding(
            "bf16-is-not-autocast", "note", f"{view.bf16}.enabled",
            f"{view.bf16}.enabled turns weights and gradients into bf16 (the optimizer keeps fp32 copies), so that "
            "every operation computes in bf16: norms and softmax too, which torch.autocast computes in fp32",
            f"Do not take its curves for those of autocast{instead}", view.source("runtime/engine.py"),
        )  # fmt: skip


def loss_scale(view: ConfigurationView) -> Iterator[FileFinding]:
    """A loss scale for fp16 that is fixed, or begins or changes so that steps are lost."""
    if not view.on("fp16.enabled"):
        return
    source = view.source("runtime/fp16/loss_scaler.py")
    fixed, power = view.number("fp16.loss_scale", 0), view.number("fp16.initial_scale_power", 16)
    # Both optimizers of stage 0 halve the scale at once (_update_scale in fp16/fused_optimizer.py).
    hysteresis, window = (
        1 if view.stage == 0 else view.number("fp16.hysteresis", 2),
        view.number("fp16.loss_scale_window", 1000),
    )
    if isinstance(view.value("fp16.loss_scale"), bool) or (fixed is not None and fixed < 0):
        yield finding(
            "fp16-loss-scale", "error", "fp16.loss_scale",
            f"DeepSpeed refuses a loss scale of {str(view.value('fp16.loss_scale')).lower()}: it is a number from 0 on",
            _adapted(), view.source("runtime/fp16/loss_scaler.py"),
        )  # fmt: skip
    elif fixed is not None and fixed != 0:
        yield finding(
            "fp16-loss-scale", "warning", "fp16.loss_scale",
            f"The loss scale is fixed at {fixed:g}: it is never lowered when gradients overflow, and never raised when "
            "they vanish",
            _adapted(), source,
        )  # fmt: skip
    elif fixed == 0 and power is not None and hysteresis is not None and 15 < power < 1000:
        largest = _FP16_LARGEST / 2**power
        spared, lost = int(max(hysteresis - 1, 0)), power - 16 + max(hysteresis - 1, 0)
        yield finding(
            "fp16-loss-scale", "warning" if power > 16 else "note", "fp16.initial_scale_power",
            f"The scale starts at 2^{power:g}: gradients above {largest:.2g} overflow (fp16 ends at {_FP16_LARGEST}), "
            f"and each overflow skips a step of training. "
            + (f"Hysteresis lets the first {spared if spared > 1 else 'one'} pass, then each" if spared else "Each")
            + " halves the scale"
            + (f": expect some {lost:g} steps lost" if power > 16 else ""),
            Remedy(
                'Leave the first steps out of timings and of the schedule, or start at 2^12: "initial_scale_power": 12',
                {"fp16.initial_scale_power": 12},
            ),
            source,
        )  # fmt: skip
    if fixed == 0 and window is not None and window < 100:
        wrong = window <= 0
        yield finding(
            "fp16-loss-scale", "error" if wrong else "warning", "fp16.loss_scale_window",
            f"The window is {window:g}, but must be greater than 0" if wrong else
            f"The scale doubles every {window:g} steps until it overflows: about one step in {window:g} is skipped",
            Remedy("1000 is the default", {"fp16.loss_scale_window": 1000}), source,
        )  # fmt: skip
    floor = view.number("fp16.min_loss_scale", 1)
    if fixed == 0 and floor is not None and floor <= 0:
        yield finding(
            "fp16-loss-scale", "error", "fp16.min_loss_scale", f"It is {floor:g}, but must be greater than 0",
            Remedy("1 is the default", {"fp16.min_loss_scale": 1}), source,
        )  # fmt: skip


def _adapted() -> list[Remedy]:
    """Advice to let DeepSpeed adapt the loss scale."""
    text = "Write 0, which adapts it"
    start = {"fp16.loss_scale": 0, "fp16.initial_scale_power": 12, "fp16.loss_scale_window": 1000}
    return [
        Remedy(f"{text}; or use bf16, which needs none", {"fp16.loss_scale": 0}),
        Remedy(f"{text}, from initial_scale_power 12 and with a loss_scale_window of 1000; or use bf16", start),
    ]


def communication_type(view: ConfigurationView) -> Iterator[FileFinding]:
    """A type for sending gradients that is unknown, wasteful or too narrow."""
    key = "communication_data_type"
    sent = view.text(key)
    if sent is None:
        return
    kind = sent.lower()
    cast = DTYPES.get(view.text("torch_autocast.dtype") or "bf16")
    if view.precision == "autocast" and view.stage and kind in ("fp32", "fp16", "bf16") and kind != cast:
        yield finding(
            "communication-type", "warning", key,
            f"Without effect: under torch_autocast stage {view.stage} sends each gradient in the type in which its "
            "weight is used, whatever is written here",
            remove(key), f"{view.source('runtime/base_optimizer.py')} (get_param_comm_dtype)",
        )  # fmt: skip
    elif kind not in ("fp32", "fp16", "bf16"):
        yield finding(
            "communication-type", "error", key, f"DeepSpeed does not know {shown(sent)}", _known_type(key),
            view.source("runtime/config.py"),
        )  # fmt: skip
    elif kind == "fp32" and view.precision in ("bf16", "fp16"):
        yield finding(
            "communication-type", "note", key,
            f"Gradients are {view.precision} but travel as fp32: twice the bytes, and a sum that rounds less",
            remove(key, f"Leave it out to send {view.precision}"), view.source("runtime/engine.py"),
        )  # fmt: skip
    elif kind == "fp16" and view.precision in ("fp32", "bf16", "autocast"):
        yield finding(
            "communication-type", "warning", key,
            f"Gradients travel as fp16 without a loss scale: above {_FP16_LARGEST:,} they become infinite, below "
            "6e-8 zero",
            Remedy("Write bf16, which has the range of fp32", {key: "bf16"}), view.source("runtime/engine.py"),
        )  # fmt: skip


def _known_type(key: str) -> list[Remedy]:
    """Advice to name a type that DeepSpeed knows; which one is not the same in all precisions."""
    named = [Remedy("Write fp32, fp16 or bf16", {key: name}) for name in ("bf16", "fp32", "fp16")]
    return [*named, remove(key, "Leave it out")]


def accumulation_type(view: ConfigurationView) -> Iterator[FileFinding]:
    """A type for accumulating gradients that is not the model's, which DeepSpeed allows only with ZeRO."""
    key = "data_types.grad_accum_dtype"
    written = view.text(key)
    if written is None or view.stage != 0:
        return
    kind = view.accumulates
    model = "fp32" if view.precision == "autocast" else view.precision
    if kind is None:
        yield finding(
            "accumulation-type", "error", key, f"DeepSpeed does not know {shown(written)}", _known_type(key),
            view.source("runtime/config.py"),
        )  # fmt: skip
    elif model is not None and kind != model:
        yield finding(
            "accumulation-type", "error", key,
            f"At stage 0 DeepSpeed refuses to accumulate in {kind} what is computed in {model}",
            Remedy(f"Write {model}, or take stage 1", {key: model}),
            f"{view.source('runtime/engine.py')} (_do_optimizer_sanity_check)",
        )  # fmt: skip


def low_precision_states(view: ConfigurationView) -> Iterator[FileFinding]:
    """Master weights and optimizer states in 16 bits without the settings that they need."""
    masters = ("bf16.bf16_master_weights_and_grads", "fp16.fp16_master_weights_and_grads")
    states = "bf16.bf16_optimizer_states"
    on_the_cpu = view.text(f"{_OFFLOADED}.device") == "cpu" or view.on("zero_optimization.cpu_offload")
    for key in (*masters, states):
        missing = ""
        if view.stage == 0:
            missing = "a ZeRO stage from 1 on"
        elif key not in masters and not view.on(masters[0]):
            missing = masters[0]
        elif key in masters and not (on_the_cpu or view.open(_OFFLOADED) or (key == masters[0] and view.on(states))):
            missing = f'"device": "cpu" in {_OFFLOADED}'
        if view.on(key) and missing:
            yield finding(
                "low-precision-states", "error", key, f"DeepSpeed refuses it without {missing}",
                remove(key, f"Remove it, or set {missing}"), f"{view.source('runtime/config.py')} (_do_error_check)",
            )  # fmt: skip
