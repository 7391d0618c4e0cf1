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

_SUPPORTED_BY_ZERO = ("adam", "adamw", "adagrad", "lion", "muon")
"""ZERO_SUPPORTED_OPTIMIZERS of deepspeed/runtime/zero/utils.py."""
_CLASS_NAMES = ("fusedadam", "deepspeedcpuadam", "cpuadam", "zenflowcpuadam")
"""Classes, in small letters, of which DeepSpeed takes one by itself where a file says Adam or AdamW."""
_REQUIRED_PARAMETERS = {
    "WarmupDecayLR": ("total_num_steps",),
    "WarmupCosineLR": ("total_num_steps",),
    "OneCycle": ("cycle_min_lr", "cycle_max_lr"),
}
"""Schedules of DeepSpeed -> the parameters without which they cannot start: deepspeed/runtime/lr_schedules.py."""
_WARMUP_SCHEDULES = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
_COMPRESSING_OPTIMIZERS = ("onebitadam", "onebitlamb", "zerooneadam")
"""Optimizers of DeepSpeed, in small letters, that exchange compressed momentum in place of gradients."""


def clipping_omitted(view: ConfigurationView) -> Iterator[FileFinding]:
    """Yield a finding where clipping is left to the default, with which releases train the same file differently.

    The default was 0.0, and became 1.0.
    """
    key = "gradient_clipping"
    if view.has(key) or key in view.target.settled:
        return
    default = view.release.default(key)
    effect = f"clips the gradient's norm at {default}" if default else "does not clip gradients"
    # "0.0 from 0.9.5 to 0.19.2, 1.0 since 0.19.3"
    defaults = (f"{value} {view.release.releases_with_fact('defaults', key, value)}" for value in ("0.0", "1.0"))
    history = ", ".join(defaults)
    text = "Write it out: 1.0 clips, 0.0 does not"
    values = (1.0, 0.0) if default else (0.0, 1.0)  # the first keeps what the release does
    yield finding(
        "clipping-omitted",
        "warning",
        key=key,
        message=f"Nothing says how to clip: DeepSpeed {view.release.version} {effect}; the default was {history}",
        fix=[Remedy(text, {key: value}) for value in values],
        source=view.source("runtime/constants.py (GRADIENT_CLIPPING_DEFAULT)"),
    )


def clipping_in_the_optimizer(view: ConfigurationView) -> Iterator[FileFinding]:
    """Yield a finding on `max_grad_norm`, a parameter of Apex's optimizers that DeepSpeed refuses."""
    key = "optimizer.params.max_grad_norm"
    if view.has(key):
        top_key = "gradient_clipping"
        fix = Remedy(f"Write {top_key} at the top level", {key: REMOVED, top_key: view.value(key)})
        if view.has(top_key) or top_key in view.target.settled:
            fix = Remedy(f"Remove it: {top_key} says how to clip", {key: REMOVED})
        yield finding(
            "clipping-in-the-optimizer",
            "error",
            key=key,
            message="DeepSpeed refuses max_grad_norm among an optimizer's parameters",
            fix=fix,
            source=view.source("runtime/engine.py"),
        )


def optimizer_type(view: ConfigurationView) -> Iterator[FileFinding]:
    """Yield a finding where DeepSpeed does not find an optimizer of this name, or refuses it under ZeRO."""
    name = view.text(_TYPE_KEY)
    if name is None:
        return
    is_of_deepspeed = name.lower() in view.release.names("optimizers")
    if not is_of_deepspeed and name not in _TORCH_OPTIMIZERS:
        yield _unknown_optimizer(view, name)
    elif view.stage:
        yield from _refused_under_zero(view, name, view.stage)


_TYPE_KEY = "optimizer.type"


def _unknown_optimizer(view: ConfigurationView, name: str) -> FileFinding:
    """Return the finding on an optimizer that neither DeepSpeed nor torch.optim has, whatever the capitals."""
    known_names = view.release.names("optimizers")
    other_releases = view.release.releases_naming("optimizers", name.lower())
    if name.lower() in _CLASS_NAMES:
        message = f"{shown(name)} is the name of a class: DeepSpeed takes it by itself for AdamW where it suits"
        fix = _advice_to_write_name(view, _TYPE_KEY, "AdamW")
    elif other_releases is not None:
        message = f"DeepSpeed {view.release.version} has no {shown(name)}; other releases have it ({other_releases})"
        fix = Remedy("Run such a release, or take AdamW", {_TYPE_KEY: "AdamW"})
    else:
        message = f"Neither DeepSpeed nor torch.optim has {shown(name)} (of torch.optim the case counts)"
        similar_name = _similar_optimizer(name, known_names)
        fix = Remedy(f"One of {', '.join(known_names)}, or of torch.optim", {_TYPE_KEY: "adamw"})
        if similar_name is not None:
            fix = _advice_to_write_name(view, _TYPE_KEY, similar_name)
    return finding("optimizer-type", "error", _TYPE_KEY, message, fix, view.source("runtime/engine.py"))


def _similar_optimizer(name: str, known_names: list[str]) -> str | None:
    """Return the optimizer of DeepSpeed or torch.optim whose name resembles a misspelt one; None where none does.

    Where only capitals distinguish two names, DeepSpeed's comes before torch's.

    Args:
        name: the misspelt name.
        known_names: names of DeepSpeed's optimizers.
    """
    valid_names = (*known_names, *_TORCH_OPTIMIZERS)
    matches = difflib.get_close_matches(name.lower()[:80], [valid.lower() for valid in valid_names], n=1)
    if not matches:
        return None
    for valid in (*known_names, *reversed(_TORCH_OPTIMIZERS)):
        if valid.lower() == matches[0]:
            return valid
    return None


def _refused_under_zero(view: ConfigurationView, name: str, stage: int) -> Iterator[FileFinding]:
    """Yield a finding where ZeRO, at a stage from 1 on, refuses an optimizer."""
    if name.lower() in _COMPRESSING_OPTIMIZERS:
        message = f"{shown(name)} compresses what it sends itself, and DeepSpeed refuses it at stage {stage}"
        zero = "zero_optimization"
        to_bare_stage_0 = {f"{zero}.stage": 0, f"{zero}.overlap_comm": REMOVED, f"{zero}.offload_optimizer": REMOVED}
        fixes = [
            Remedy("Take stage 0", {f"{zero}.stage": 0}),
            Remedy("Take stage 0, without overlap_comm and offload_optimizer", to_bare_stage_0),
            Remedy("Take AdamW, or stage 0 without the keys that are for other stages", {_TYPE_KEY: "AdamW"}),
        ]
        yield finding("optimizer-type", "error", _TYPE_KEY, message, fixes, view.source("runtime/engine.py"))
    elif name.lower() not in _SUPPORTED_BY_ZERO and not view.is_on("zero_allow_untested_optimizer"):
        message = f"DeepSpeed refuses {shown(name)} at stage {stage} unless told that this is meant"
        fix = Remedy('"zero_allow_untested_optimizer": true', {"zero_allow_untested_optimizer": True})
        yield finding("optimizer-type", "error", _TYPE_KEY, message, fix, view.source("runtime/zero/utils.py"))


def compresses(view: ConfigurationView) -> bool:
    """Whether the optimizer is one that sends compressed momentum itself, in place of gradients."""
    return (view.text("optimizer.type") or "").lower() in _COMPRESSING_OPTIMIZERS


def _advice_to_write_name(view: ConfigurationView, key: str, name: str) -> Remedy:
    """Return advice to write an optimizer's name, with the declaration that some optimizers need under ZeRO."""
    declaration = "zero_allow_untested_optimizer"
    is_untested = bool(view.stage) and name.lower() not in _SUPPORTED_BY_ZERO
    if is_untested and not view.is_on(declaration):
        return Remedy(f'Write {name}, and "{declaration}": true at the top level', {key: name, declaration: True})
    return Remedy(f"Write {name}", {key: name})


def adam_is_adamw(view: ConfigurationView) -> Iterator[FileFinding]:
    """Yield a finding on the name "Adam" with weight decay, which means AdamW unless `adam_w_mode` is false."""
    is_adam = (view.text("optimizer.type") or "").lower() == "adam"
    has_decay = view.number("optimizer.params.weight_decay", 0) != 0
    if not is_adam or not has_decay or view.has("optimizer.params.adam_w_mode"):
        return
    yield finding(
        "adam-is-adamw",
        "warning",
        key="optimizer.type",
        message=(
            "DeepSpeed computes AdamW for the name Adam: the weight decay is decoupled, not added to the gradient "
            "as in torch.optim.Adam"
        ),
        fix=Remedy(
            'Write AdamW if that is meant, or "adam_w_mode": false in optimizer.params', {"optimizer.type": "AdamW"}
        ),
        source=f"{view.source('runtime/config.py')} (ADAM_W_MODE_DEFAULT)",
    )


def scheduler_type(view: ConfigurationView) -> Iterator[FileFinding]:
    """Yield a finding where DeepSpeed does not find a schedule of this name, or cannot start it."""
    name = view.text("scheduler.type")
    if name is None:
        return
    if name not in view.release.names("schedulers") and name not in _TORCH_SCHEDULERS:
        yield _unknown_scheduler(view, name)
        return
    key = "scheduler.params"
    lacking_parameters = []
    if not view.leaves_open(key):
        required_parameters = _REQUIRED_PARAMETERS.get(name, ())
        lacking_parameters = [parameter for parameter in required_parameters if not view.has(f"{key}.{parameter}")]
    if lacking_parameters:
        message = f"{name} cannot start without {' and '.join(lacking_parameters)}"
        advice = f"Give {' and '.join(lacking_parameters)}"
        yield finding("scheduler-type", "error", key, message, advice, view.source("runtime/lr_schedules.py"))
    elif not view.has(key):
        message = "A scheduler without params ends in a TypeError"
        fix = Remedy('Give its parameters, or "params": {}', {key: {}})
        yield finding("scheduler-type", "error", key, message, fix, _scheduler_source(view))
    elif name in _WARMUP_SCHEDULES and view.release.does(WARMUP_STEPS_REFUSED):
        yield from _check_warmup_steps(view)


def _scheduler_source(view: ConfigurationView) -> str:
    return f"{view.source('runtime/engine.py')} (_scheduler_from_config)"


def _unknown_scheduler(view: ConfigurationView, name: str) -> FileFinding:
    """Return the finding on a schedule that neither DeepSpeed nor torch.optim.lr_scheduler has."""
    schedules = view.release.names("schedulers")
    similar_names = difflib.get_close_matches(name[:80], [*schedules, *_TORCH_SCHEDULERS], n=1)
    if similar_names:
        similar_name = similar_names[0]
        fixes = [
            Remedy(f"Write {similar_name}", {"scheduler.type": similar_name}),
            Remedy(f"Write {similar_name}, with the parameters that it needs"),
        ]
    else:
        changes = {"scheduler.type": "WarmupLR", "scheduler.params": {}}
        fixes = [Remedy(f"One of {', '.join(schedules)}, such as WarmupLR with params {{}}", changes)]
    message = f"Neither DeepSpeed {view.release.version} nor torch.optim.lr_scheduler has {shown(name)}"
    return finding("scheduler-type", "error", "scheduler.type", message, fixes, _scheduler_source(view))


def _check_warmup_steps(view: ConfigurationView) -> Iterator[FileFinding]:
    """Yield a finding where the file has a number of warm-up steps that this release refuses; older ones took it for 2.

    A file without the key is fine: the schedule has a default.
    """
    key = "scheduler.params.warmup_num_steps"
    if not view.has(key):
        return
    steps = view.value(key)
    # In Python, as in DeepSpeed's own check, true is an int and counts as 1.
    is_positive_whole_number = isinstance(steps, int) and steps > 0
    if steps != "auto" and not is_positive_whole_number:
        yield finding(
            "refused-value",
            "error",
            key=key,
            message=f"DeepSpeed {view.release.target_version} {WARMUP_STEPS_REFUSED.effect}: it is {shown(steps)}",
            fix=Remedy("Write 1 or more", {key: 1}),
            source=WARMUP_STEPS_REFUSED.source,
        )
