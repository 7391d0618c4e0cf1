"""Precision: in which types values are computed, kept and sent, and the traps of fp16's loss scale."""

from __future__ import annotations

from collections.abc import Iterator

from vitscale.deepspeed_lint.advice import FileChanges, FileFinding, Remedy, remove
from vitscale.deepspeed_lint.view import TYPE_BY_NAME, ConfigurationView, finding
from vitscale.errors import shown

_LARGEST_FP16_NUMBER = 65504
_OPTIMIZER_OFFLOAD_KEY = "zero_optimization.offload_optimizer"
_TF32_DOCS = "https://pytorch.org/docs/stable/notes/cuda.html#tensorfloat-32-tf32-on-ampere-and-later-devices"


def no_reduced_precision(view: ConfigurationView) -> Iterator[FileFinding]:
    """Yield a finding where the file enables neither bf16 nor fp16 nor autocast, so that everything runs in fp32."""
    if view.precision != "fp32":
        return
    parts = [part for part in ("bf16", "fp16", "torch_autocast") if view.release.fact(part) is not None]
    switches_in_file = [f"{part}.enabled" for part in parts if view.has(f"{part}.enabled")]
    switch = '"torch_autocast": {"enabled": true, "dtype": "bfloat16"}'
    changes: FileChanges = {"torch_autocast.enabled": True, "torch_autocast.dtype": "bfloat16"}
    if not view.has_autocast or view.is_on("zero_optimization.zero_quantized_weights"):
        switch = '"bf16": {"enabled": true}'
        changes = {f"{view.bf16_part}.enabled": True}
    text = f"{switch} on GPUs since Ampere; to stay in fp32, call torch.set_float32_matmul_precision('high') for TF32"
    condition = "what the file says of types and buckets then has to change too"
    yield finding(
        "no-reduced-precision",
        "warning",
        key=switches_in_file[0] if switches_in_file else "",
        message=(
            "Nothing enables bf16, fp16 or autocast, so all runs in fp32: twice the memory of activations and "
            "twice the bytes per gradient of bf16, and PyTorch's fp32 matrix products leave the tensor cores "
            "unused (TF32 is off by default)"
        ),
        fix=[Remedy(text, changes), Remedy(f"{text}; {condition}")],
        source=f"{view.source('runtime/precision_config.py')} and {_TF32_DOCS}",
    )


def several_precisions(view: ConfigurationView) -> Iterator[FileFinding]:
    """Yield a finding where fp16 and bf16 are both enabled, or autocast together with one of them."""
    is_bf16 = view.is_on(f"{view.bf16_part}.enabled")
    is_fp16 = view.is_on("fp16.enabled")
    is_autocast = view.has_autocast and view.is_on("torch_autocast.enabled")
    if is_bf16 and is_fp16:
        yield _bf16_and_fp16(view)
    elif is_autocast and is_bf16:
        yield _autocast_of_16_bits(view, part=view.bf16_part, weights="bf16")
    elif is_autocast and is_fp16:
        yield _autocast_of_16_bits(view, part="fp16", weights="fp16")


def _bf16_and_fp16(view: ConfigurationView) -> FileFinding:
    """Return the finding on a file that enables both bf16 and fp16."""
    return finding(
        "several-precisions",
        "error",
        key="fp16.enabled",
        message="bf16 and fp16 are both enabled, which DeepSpeed refuses",
        fix=[
            Remedy("Enable one: bf16 needs no loss scale, so set fp16.enabled to false", {"fp16.enabled": False}),
            Remedy(
                "Enable one: set fp16.enabled and torch_autocast.enabled to false, for bf16",
                {"fp16.enabled": False, "torch_autocast.enabled": False},
            ),
        ],
        source=view.source("runtime/config.py"),
    )


def _autocast_of_16_bits(view: ConfigurationView, *, part: str, weights: str) -> FileFinding:
    """Return the finding on autocast in a file that turns the weights into 16 bits.

    Args:
        view: the file.
        part: the part that does so: "fp16", "bf16" or "bfloat16".
        weights: the type of the weights.
    """
    text = f"Enable one: torch_autocast keeps fp32 weights, {part}.enabled does not; set one to false"
    return finding(
        "several-precisions",
        "warning",
        key="torch_autocast.enabled",
        message=f"{part}.enabled turns the weights into {weights} already; autocast finds little left to cast",
        fix=[Remedy(text, {f"{part}.enabled": False}), Remedy(text, {"torch_autocast.enabled": False})],
        source=view.source("runtime/torch_autocast.py"),
    )


def bf16_is_not_autocast(view: ConfigurationView) -> Iterator[FileFinding]:
    """Yield a finding where bf16 is enabled without autocast, which is not the same as PyTorch's autocast."""
    is_autocast = view.has_autocast and view.is_on("torch_autocast.enabled")
    if view.is_on(f"{view.bf16_part}.enabled") and not is_autocast:
        instead = ", which is torch_autocast here" if view.has_autocast else ""
        yield finding(
            "bf16-is-not-autocast",
            "note",
            key=f"{view.bf16_part}.enabled",
            message=(
                f"{view.bf16_part}.enabled turns weights and gradients into bf16 (the optimizer keeps fp32 copies), so "
                "that every operation computes in bf16: norms and softmax too, which torch.autocast computes in "
                "fp32"
            ),
            fix=f"Do not take its curves for those of autocast{instead}",
            source=view.source("runtime/engine.py"),
        )


def loss_scale(view: ConfigurationView) -> Iterator[FileFinding]:
    """Yield findings on a loss scale for fp16 that is fixed, or that begins or changes so that steps are lost."""
    if not view.is_on("fp16.enabled"):
        return
    key = "fp16.loss_scale"
    value = view.value(key)
    scale = view.number(key, 0)  # 0: DeepSpeed adapts it; None: it is no number
    source = view.source("runtime/fp16/loss_scaler.py")
    is_negative = scale is not None and scale < 0
    if isinstance(value, bool) or is_negative:
        message = f"DeepSpeed refuses a loss scale of {str(value).lower()}: it is a number from 0 on"
        yield finding("fp16-loss-scale", "error", key, message, _advice_to_adapt_scale(), source)
    elif scale == 0:
        yield from _check_first_scale(view, source)
        yield from _check_scale_window(view, source)
        yield from _check_least_scale(view, source)
    elif scale is not None:
        message = (
            f"The loss scale is fixed at {scale:g}: it is never lowered when gradients overflow, and never raised when "
            "they vanish"
        )
        yield finding("fp16-loss-scale", "warning", key, message, _advice_to_adapt_scale(), source)


def _check_first_scale(view: ConfigurationView, source: str) -> Iterator[FileFinding]:
    """Yield a finding where the adapted loss scale begins so high that gradients overflow.

    The first scale is 2^initial_scale_power. Each overflow loses a step and halves the scale, but the first
    `hysteresis` - 1 overflows leave it as it is.
    """
    power = view.number("fp16.initial_scale_power", 16)
    # Both optimizers of stage 0 halve the scale at once (_update_scale in fp16/fused_optimizer.py).
    hysteresis = 1 if view.stage == 0 else view.number("fp16.hysteresis", 2)
    if power is None or hysteresis is None or not 15 < power < 1000:
        return
    largest_gradient = _LARGEST_FP16_NUMBER / 2**power
    overflows_without_halving = max(hysteresis - 1, 0)
    is_high = power > 16
    lost_steps_clause = ""
    if is_high:
        lost_steps = power - 16 + overflows_without_halving
        lost_steps_clause = f": expect some {lost_steps:g} steps lost"
    yield finding(
        "fp16-loss-scale",
        "warning" if is_high else "note",
        key="fp16.initial_scale_power",
        message=(
            f"The scale starts at 2^{power:g}: gradients above {largest_gradient:.2g} overflow (fp16 ends at "
            f"{_LARGEST_FP16_NUMBER}), and each overflow skips a step of training. "
            f"{_halving_in_words(overflows_without_halving)}{lost_steps_clause}"
        ),
        fix=Remedy(
            'Leave the first steps out of timings and of the schedule, or start at 2^12: "initial_scale_power": 12',
            {"fp16.initial_scale_power": 12},
        ),
        source=source,
    )


def _halving_in_words(overflows_without_halving: float) -> str:
    """Return "Each halves the scale", or that only those do which come after the first overflows."""
    if overflows_without_halving < 1:
        return "Each halves the scale"
    count = int(overflows_without_halving)  # the file may have 2.5
    number = "one" if count == 1 else str(count)
    return f"Hysteresis lets the first {number} pass, then each halves the scale"


def _check_scale_window(view: ConfigurationView, source: str) -> Iterator[FileFinding]:
    """Yield a finding where the loss scale is raised after so few steps that many are lost."""
    key = "fp16.loss_scale_window"
    window = view.number(key, 1000)
    if window is None or window >= 100:
        return
    fix = Remedy("1000 is the default", {key: 1000})
    if window <= 0:
        message = f"The window is {window:g}, but must be greater than 0"
        yield finding("fp16-loss-scale", "error", key, message, fix, source)
    else:
        message = (
            f"The scale doubles every {window:g} steps until it overflows: about one step in {window:g} is skipped"
        )
        yield finding("fp16-loss-scale", "warning", key, message, fix, source)


def _check_least_scale(view: ConfigurationView, source: str) -> Iterator[FileFinding]:
    """Yield a finding where the loss scale may fall to 0 or below."""
    key = "fp16.min_loss_scale"
    least = view.number(key, 1)
    if least is not None and least <= 0:
        message = f"It is {least:g}, but must be greater than 0"
        yield finding("fp16-loss-scale", "error", key, message, Remedy("1 is the default", {key: 1}), source)


def _advice_to_adapt_scale() -> list[Remedy]:
    """Return advice to let DeepSpeed adapt the loss scale."""
    text = "Write 0, which adapts it"
    start = {"fp16.loss_scale": 0, "fp16.initial_scale_power": 12, "fp16.loss_scale_window": 1000}
    return [
        Remedy(f"{text}; or use bf16, which needs none", {"fp16.loss_scale": 0}),
        Remedy(f"{text}, from initial_scale_power 12 and with a loss_scale_window of 1000; or use bf16", start),
    ]


def communication_type(view: ConfigurationView) -> Iterator[FileFinding]:
    """Yield a finding where the type for sending gradients is unknown, without effect, wasteful or too narrow."""
    key = "communication_data_type"
    text = view.text(key)
    if text is None:
        return
    kind = text.lower()
    is_known = kind in ("fp32", "fp16", "bf16")
    autocast_type = TYPE_BY_NAME.get(view.text("torch_autocast.dtype") or "bf16")
    is_zero_autocast = view.precision == "autocast" and bool(view.stage)
    is_ignored = is_zero_autocast and kind != autocast_type
    if is_known and is_ignored:
        yield finding(
            "communication-type",
            "warning",
            key=key,
            message=(
                f"Without effect: under torch_autocast stage {view.stage} sends each gradient in the type in which "
                "its weight is used, whatever is written here"
            ),
            fix=remove(key),
            source=f"{view.source('runtime/base_optimizer.py')} (get_param_comm_dtype)",
        )
    elif not is_known:
        yield finding(
            "communication-type",
            "error",
            key=key,
            message=f"DeepSpeed does not know {shown(text)}",
            fix=_advice_to_write_known_type(key),
            source=view.source("runtime/config.py"),
        )
    elif kind == "fp32" and view.precision in ("bf16", "fp16"):
        yield finding(
            "communication-type",
            "note",
            key=key,
            message=f"Gradients are {view.precision} but travel as fp32: twice the bytes, and a sum that rounds less",
            fix=remove(key, f"Leave it out to send {view.precision}"),
            source=view.source("runtime/engine.py"),
        )
    elif kind == "fp16" and view.precision in ("fp32", "bf16", "autocast"):
        yield finding(
            "communication-type",
            "warning",
            key=key,
            message=(
                f"Gradients travel as fp16 without a loss scale: above {_LARGEST_FP16_NUMBER:,} they become infinite, "
                "below 6e-8 zero"
            ),
            fix=Remedy("Write bf16, which has the range of fp32", {key: "bf16"}),
            source=view.source("runtime/engine.py"),
        )


def _advice_to_write_known_type(key: str) -> list[Remedy]:
    """Return advice to write a type that DeepSpeed knows; which of them suits depends on the precision."""
    fixes = [Remedy("Write fp32, fp16 or bf16", {key: name}) for name in ("bf16", "fp32", "fp16")]
    return [*fixes, remove(key, "Leave it out")]


def accumulation_type(view: ConfigurationView) -> Iterator[FileFinding]:
    """Yield a finding where stage 0 accumulates gradients in a type that is unknown, or not the type of the model."""
    key = "data_types.grad_accum_dtype"
    written = view.text(key)
    if written is None or view.stage != 0:
        return
    kind = view.accumulation_type
    computed_type = "fp32" if view.precision == "autocast" else view.precision
    if kind is None:
        yield finding(
            "accumulation-type",
            "error",
            key=key,
            message=f"DeepSpeed does not know {shown(written)}",
            fix=_advice_to_write_known_type(key),
            source=view.source("runtime/config.py"),
        )
    elif computed_type is not None and kind != computed_type:
        yield finding(
            "accumulation-type",
            "error",
            key=key,
            message=f"At stage 0 DeepSpeed refuses to accumulate in {kind} what is computed in {computed_type}",
            fix=Remedy(f"Write {computed_type}, or take stage 1", {key: computed_type}),
            source=f"{view.source('runtime/engine.py')} (_do_optimizer_sanity_check)",
        )


def low_precision_states(view: ConfigurationView) -> Iterator[FileFinding]:
    """Yield a finding for 16-bit master weights or optimizer states without the setting that DeepSpeed demands."""
    for key in (_BF16_MASTERS, _FP16_MASTERS, _BF16_STATES):
        missing = _setting_missing_for(view, key)
        if view.is_on(key) and missing:
            yield finding(
                "low-precision-states",
                "error",
                key=key,
                message=f"DeepSpeed refuses it without {missing}",
                fix=remove(key, f"Remove it, or set {missing}"),
                source=f"{view.source('runtime/config.py')} (_do_error_check)",
            )


_BF16_MASTERS = "bf16.bf16_master_weights_and_grads"
_FP16_MASTERS = "fp16.fp16_master_weights_and_grads"
_BF16_STATES = "bf16.bf16_optimizer_states"


def _setting_missing_for(view: ConfigurationView, key: str) -> str:
    """Return the setting without which DeepSpeed refuses one of these three keys; empty where the file has it."""
    if view.stage == 0:
        return "a ZeRO stage from 1 on"
    if key == _BF16_STATES:
        return "" if view.is_on(_BF16_MASTERS) else _BF16_MASTERS
    names_cpu = view.text(f"{_OPTIMIZER_OFFLOAD_KEY}.device") == "cpu"
    offloads_to_cpu = names_cpu or view.is_on("zero_optimization.cpu_offload")
    has_bf16_states = key == _BF16_MASTERS and view.is_on(_BF16_STATES)
    if offloads_to_cpu or view.leaves_open(_OPTIMIZER_OFFLOAD_KEY) or has_bf16_states:
        return ""
    return f'"device": "cpu" in {_OPTIMIZER_OFFLOAD_KEY}'
