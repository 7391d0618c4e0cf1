"""The optimizer: its name, its clipping, its schedule, and what DeepSpeed makes of them."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from vitscale.deepspeed_lint.advice import REMOVED, FileFinding, Remedy
from vitscale.deepspeed_lint.behaviours import WARMUP_STEPS_REFUSED
from vitscale.deepspeed_lint.view import ConfigurationView, finding
from vitscale.errors import shown

_TORCH_OPTIMIZERS = (
    *("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "LBFGS", "Muon", "NAdam", "RAdam"),
    *("RMSprop", "Rprop", "SGD", "SparseAdam"),
)
_TORCH_SCHEDULERS = (
    *("LambdaLR", "MultiplicativeLR", "StepLR", "MultiStepLR", "ConstantLR", "LinearLR", "ExponentialLR"),
    *("SequentialLR", "CosineAnnealingLR", "ChainedScheduler", "ReduceLROnPlateau", "CyclicLR", "OneCycleLR"),
    *("CosineAnnealingWarmRestarts", "PolynomialLR"),
)
"""Names in torch.optim and torch.optim.lr_scheduler of torch 2.13, where DeepSpeed looks for names it does not know."""

_WITH_ZERO = ("adam", "adamw", "adagrad", "lion", "muon")
"""ZERO_SUPPORTED_OPTIMIZERS of deepspeed/runtime/zero/utils.py."""
_CLASSES = ("fusedadam", "deepspeedcpuadam", "cpuadam", "zenflowcpuadam")
"""Classes, in small letters, of which DeepSpeed takes one by itself where a file says Adam or AdamW."""
_NEEDED = {
    "WarmupDecayLR": ("total_num_steps",),
    "WarmupCosineLR": ("total_num_steps",),
    "OneCycle": ("cycle_min_lr", "cycle_max_lr"),
}
"""Schedules of DeepSpeed -> the parameters without which they cannot start: deepspeed/runtime/lr_schedules.py."""
_WARMUPS = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
_COMPRESSED = ("onebitadam", "onebitlamb", "zerooneadam")


def clipping_omitted(view: ConfigurationView) -> Iterator[FileFinding]:
    """Clipping left to the default, which was 0.0 and became 1.0: releases train the same file differently."""
    key = "gradient_clipping"
    if view.has(key) or key in view.setting.settled:
        return
    default = view.release.default(key)
    clips = f"clips the gradient's norm at {default}" if default else "does not clip gradients"
    history = ", ".join(f"{value} {view.release.since('defaults', key, value)}" for value in ("0.0", "1.0"))
    text = "Write it out: 1.0 clips, 0.0 does not"
    values = (1.0, 0.0) if default else (0.0, 1.0)  # the first keeps what the release does
    yield finding(
        "clipping-omitted", "warning", key,
        f"Nothing says how to clip: DeepSpeed {view.release.version} {clips}; the default was {history}",
        [Remedy(text, {key: value}) for value in values],
        view.source("runtime/constants.py (GRADIENT_CLIPPING_DEFAULT)"),
    )  # fmt: skip


def clipping_in_the_optimizer(view: ConfigurationView) -> Iterator[FileFinding]:
    """`max_grad_norm`, a parameter of Apex's optimizers that DeepSpeed refuses."""
    key = "optimizer.params.max_grad_norm"
    if view.has(key):
        top = "gradient_clipping"
        fix = Remedy(f"Write {top} at the top level", {key: REMOVED, top: view.value(key)})
        if view.has(top) or top in view.setting.settled:
            fix = Remedy(f"Remove it: {top} says how to clip", {key: REMOVED})
        yield finding(
            "clipping-in-the-optimizer", "error", key,
            "DeepSpeed refuses max_grad_norm among an optimizer's parameters", fix, view.source("runtime/engine.py"),
        )  # fmt: skip


def optimizer_type(view: ConfigurationView) -> Iterator[FileFinding]:
    """Names that DeepSpeed does not find, and optimizers that it refuses under ZeRO."""
    name, key = view.text("optimizer.type"), "optimizer.type"
    if name is None:
        return
    source, known = view.source("runtime/engine.py"), view.release.names("optimizers")
    lower = name.lower()
    if lower not in known and name not in _TORCH_OPTIMIZERS:
        once = view.release.once_named("optimizers", lower)
        if lower in _CLASSES:
            message = f"{shown(name)} is the name of a class: DeepSpeed takes it by itself for AdamW where it suits"
            fix = _write(view, key, "AdamW")
        elif once is not None:
            message = f"DeepSpeed {view.release.version} has no {shown(name)}; other releases have it ({once})"
            fix = Remedy("Run such a release, or take AdamW", {key: "AdamW"})
        else:
            close = difflib.get_close_matches(lower[:80], [n.lower() for n in (*known, *_TORCH_OPTIMIZERS)], n=1)
            spelt = {n.lower(): n for n in (*_TORCH_OPTIMIZERS, *known)}
            message = f"Neither DeepSpeed nor torch.optim has {shown(name)} (of torch.optim the case counts)"
            fix = Remedy(f"One of {', '.join(known)}, or of torch.optim", {key: "adamw"})
            if close:
                fix = _write(view, key, spelt[close[0]])
        yield finding("optimizer-type", "error", key, message, fix, source)
        return
    stage = view.stage
    if not stage:
        return
    if lower in _COMPRESSED:
        message = f"{shown(name)} compresses what it sends itself, and DeepSpeed refuses it at stage {stage}"
        zero = "zero_optimization"
        stage_0 = {f"{zero}.stage": 0, f"{zero}.overlap_comm": REMOVED, f"{zero}.offload_optimizer": REMOVED}
        fixes = [
            Remedy("Take stage 0", {f"{zero}.stage": 0}),
            Remedy("Take stage 0, without overlap_comm and offload_optimizer", stage_0),
            Remedy("Take AdamW, or stage 0 without the keys that are for other stages", {key: "AdamW"}),
        ]
        yield finding("optimizer-type", "error", key, message, fixes, source)
    elif lower not in _WITH_ZERO and not view.on("zero_allow_untested_optimizer"):
        message = f"DeepSpeed refuses {shown(name)} at stage {stage} unless told that this is meant"
        fix = Remedy('"zero_allow_untested_optimizer": true', {"zero_allow_untested_optimizer": True})
        yield finding("optimizer-type", "error", key, message, fix, view.source("runtime/zero/utils.py"))


def compresses(view: ConfigurationView) -> bool:
    """Whether the optimizer is one that sends compressed momentum itself, in place of gradients."""
    return (view.text("optimizer.type") or "").lower() in _COMPRESSED


def _write(view: ConfigurationView, key: str, name: str) -> Remedy:
    """Advice to write an optimizer's name, with the declaration that ZeRO wants of some."""
    untested = "zero_allow_untested_optimizer"
    if view.stage and name.lower() not in _WITH_ZERO and not view.on(untested):
        return Remedy(f'Write {name}, and "{untested}": true at the top level', {key: name, untested: True})
    return Remedy(f"Write {name}", {key: name})


def adam_is_adamw(view: ConfigurationView) -> Iterator[FileFinding]:
    """The name "Adam", which means AdamW unless `adam_w_mode` is false."""
    name, decay = view.text("optimizer.type"), view.number("optimizer.params.weight_decay", 0)
    if name is None or name.lower() != "adam" or decay == 0 or view.has("optimizer.params.adam_w_mode"):
        return
    yield finding(
        "adam-is-adamw", "warning", "optimizer.type",
        "DeepSpeed computes AdamW for the name Adam: the weight decay is decoupled, not added to the gradient as in "
        "torch.optim.Adam",
        Remedy(
            'Write AdamW if that is meant, or "adam_w_mode": false in optimizer.params', {"optimizer.type": "AdamW"}
        ),
        f"{view.source('runtime/config.py')} (ADAM_W_MODE_DEFAULT)",
    )  # fmt: skip


def scheduler_type(view: ConfigurationView) -> Iterator[FileFinding]:
    """Schedules that DeepSpeed does not find, or cannot start."""
    name = view.text("scheduler.type")
    if name is None:
        return
    known, source = view.release.names("schedulers"), f"{view.source('runtime/engine.py')} (_scheduler_from_config)"
    if name not in known and name not in _TORCH_SCHEDULERS:
        close = difflib.get_close_matches(name[:80], [*known, *_TORCH_SCHEDULERS], n=1)
        changes = {"scheduler.type": "WarmupLR", "scheduler.params": {}}
        fixes = [Remedy(f"One of {', '.join(known)}, such as WarmupLR with params {{}}", changes)]
        if close:
            fixes = [
                Remedy(f"Write {close[0]}", {"scheduler.type": close[0]}),
                Remedy(f"Write {close[0]}, with the parameters that it needs"),
            ]
        yield finding(
            "scheduler-type", "error", "scheduler.type",
            f"Neither DeepSpeed {view.release.version} nor torch.optim.lr_scheduler has {shown(name)}", fixes, source,
        )  # fmt: skip
    elif not view.open("scheduler.params") and (
        lacking := [key for key in _NEEDED.get(name, ()) if not view.has(f"scheduler.params.{key}")]
    ):
        yield finding(
            "scheduler-type", "error", "scheduler.params", f"{name} cannot start without {' and '.join(lacking)}",
            f"Give {' and '.join(lacking)}", view.source("runtime/lr_schedules.py"),
        )  # fmt: skip
    elif not view.has("scheduler.params"):
        yield finding(
            "scheduler-type", "error", "scheduler.params", "A scheduler without params ends in a TypeError",
            Remedy('Give its parameters, or "params": {}', {"scheduler.params": {}}), source,
        )  # fmt: skip
    elif name in _WARMUPS and view.release.does(WARMUP_STEPS_REFUSED):
        yield from _warmup_steps(view)


def _warmup_steps(view: ConfigurationView) -> Iterator[FileFinding]:
    """A number of warm-up steps that newer releases refuse, and older ones took for 2."""
    key = "scheduler.params.warmup_num_steps"
    steps = view.value(key)
    is_whole = isinstance(steps, int) and steps > 0
    if view.has(key) and steps != "auto" and not is_whole:
        yield finding(
            "refused-value", "error", key,
            f"DeepSpeed {view.release.wanted} {WARMUP_STEPS_REFUSED.effect}: it is {shown(steps)}",
            Remedy("Write 1 or more", {key: 1}), WARMUP_STEPS_REFUSED.source,
        )  # fmt: skip
