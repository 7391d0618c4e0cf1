"""Engines as a study, an analysis and a prediction see them: one entry each. What trains is in `vitscale.engines`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache
from importlib import metadata
from importlib.util import find_spec
from typing import NamedTuple

from vitscale.base import plugins, program
from vitscale.base.distribution import install_command
from vitscale.errors import RequestError, shown
from vitscale.trial import script
from vitscale.trial.facts import fact_of
from vitscale.trial.hints import meant_value
from vitscale.trial.parallel import Axis
from vitscale.trial.rank_batches import in_words
from vitscale.trial.trial import Device, TrainSpec, Trial


class Refusal(NamedTuple):
    """Why an engine cannot do what is asked."""

    what: str
    """What is asked, and what prevents it."""
    next_step: str


@dataclass(frozen=True)
class EngineFacts:
    """All facts of an engine that are needed outside the ranks. References are "module:name", imported when needed;
    what is left out is unknown, or does not apply."""

    engine: str
    """Reference to the class that trains: a `vitscale.engines.base.Engine`."""
    title: str = ""
    """Its name where Accelerate wraps it."""
    packages: tuple[str, ...] = ()
    """Distributions beyond torch that decide its results; their versions are recorded."""
    splits: tuple[Axis, ...] = ()
    """Axes of [parallel] along which several ranks may share a model under it."""
    options: tuple[str, ...] = ()
    """Fields of [train] that it takes, besides those that name the engine themselves (`Fact.taken_by`)."""
    cannot: Mapping[tuple[str, str], Refusal] = field(default_factory=dict)
    """(Field of [train], value) -> why it is refused."""
    refusals: Callable[[TrainSpec], Iterator[Refusal]] = lambda _: iter(())
    """Further refusals of a [train]."""
    unavailable: Callable[[Device], str | None] = lambda _: None
    """Why it cannot run here at all; None where it can."""
    instead: str = "Use another engine"
    """What to do where it cannot."""
    shards: Callable[[TrainSpec], bool] = lambda _: False
    """Whether each rank updates only a part of the parameters: shards or flat groups, not the model's own tensors."""
    keeps_fp32_weights: bool = False
    """Whether it keeps fp32 weights beside those of 16 bits."""
    norms_unknown: Callable[[TrainSpec], str | None] = lambda _: None
    """Why norms of gradients cannot be told; None where they can."""
    checkpoint_unknown: str | None = None
    """Why no checkpoint can be saved and restored."""
    messages: str = ""
    """Reference to what an optimizer step sends: `(trial, shapes) -> tuple[Message, ...]` of `prediction.step`."""
    memory: str = ""
    """Reference to what a rank holds: `(trial, shapes) -> Holding` of `prediction.memory`."""
    advised: tuple[int, ...] = ()
    """ZeRO stages with which `vitscale advise` considers it even if no run used it; (0,) for an engine without."""


_FROM_STAGE_1 = ("offload", "overlap_comm", "bucket_mib")
"""Options that DeepSpeed takes from stage 1 on. At stage 0 it exchanges whole gradients after backward, in buckets of a
fixed 5e8 elements (`allreduce_gradients` in deepspeed/runtime/engine.py, 0.19)."""

_COMPRESSING = ("onebitadam", "onebitlamb", "zerooneadam")
"""Optimizers of a DeepSpeed file, in lower case, that exchange data of their own instead of gradients."""


def check(train: TrainSpec) -> None:
    """Checks what is to be trained against what its engine can do on the trial's device.

    Raises:
        RequestError: it cannot, or an option is set that it does not have; with the reason and the next step.
    """
    known(train.engine)
    for refusal in _refusals(train):
        raise RequestError(refusal.what, next_step=refusal.next_step)


def check_checkpoint(train: TrainSpec) -> None:
    """Checks that a checkpoint of this training can be saved and restored (`measure.checkpoint`).

    Raises:
        RequestError: it cannot, with the reason.
    """
    reason = of_engine(train.wrapper).checkpoint_unknown
    if train.optimizer == "deepspeed_config":
        reason = "the optimizer is that of the DeepSpeed file, whose states may be of any form"
    if reason is not None:
        raise RequestError(
            f"measure.checkpoint cannot be done under {_engine(train)}: {reason}", next_step="Leave it out"
        )


def norms_unknown(trial: Trial) -> str | None:
    """Why the norms of the gradients of a micro-batch and of a step cannot be told; None where they can."""
    train = trial.train
    if trial.parallel.ranks_per_model > 1:
        return "ranks that share a model hold parts of the gradient"
    if trial.model.task == "segmentation":
        return "gradients are means over pixels, of which not every image has as many"
    if train.precision == "fp16":
        return "fp16 scales the gradients by a factor that changes as training goes on"
    return of_engine(train.wrapper).norms_unknown(train)


def _refusals(train: TrainSpec) -> Iterator[Refusal]:
    """The reasons for refusal, in the order in which they should be mended."""
    if train.script is not None or train.arguments or train.engine == script.NAME:
        yield from itertools.starmap(Refusal, script.unfit(train))
        return  # how a script trains is its own affair
    facts = of_engine(train.engine)
    if reason := facts.unavailable(train.device):
        yield Refusal(f"train.engine = {shown(train.engine)} cannot run here: {reason}", facts.instead)
    yield from _idle_options(train)
    yield from _precisions(train)
    yield from _optimizers(train)
    yield from of_engine(train.wrapper).refusals(train)
    yield from _fixed_micro_batch(train)


def _idle_options(train: TrainSpec) -> Iterator[Refusal]:
    """Refuses options that the engine does not have: varying them would vary nothing."""
    if train.accelerate_backend is not None and train.engine != "accelerate":
        what = f"train.accelerate_backend has no meaning under train.engine = {shown(train.engine)}"
        yield Refusal(what, "Remove it, or set engine = 'accelerate'")
    for option, declared in TrainSpec.model_fields.items():
        value = getattr(train, option)
        if value == declared.default:
            continue
        wrappers = takers(option)
        if wrappers and not takes(train.wrapper, option):
            said = "" if option == "deepspeed_config" else f" = {shown(value)}"
            what = f"train.{option}{said} has no meaning under {_engine(train)}"
            yield Refusal(what, f"Remove it, or set engine = {' or '.join(shown(name) for name in wrappers)}")


def _precisions(train: TrainSpec) -> Iterator[Refusal]:
    if train.precision == "fp16" and train.device == "cpu":
        yield Refusal(
            "fp16 training needs a GPU, and this trial computes on the CPU",
            "Use train.precision = 'bf16' or 'fp32' (take fp16 out of a DeepSpeed file), or a machine with a GPU",
        )
    for (name, value), refusal in of_engine(train.wrapper).cannot.items():
        if getattr(train, name) == value:
            yield refusal


def _optimizers(train: TrainSpec) -> Iterator[Refusal]:
    if train.optimizer == "lamb" and of_engine(train.wrapper).shards(train):
        yield Refusal(
            f"train.optimizer = 'lamb' divides by the norm of each whole weight tensor, and {_engine(train)} hands the "
            "optimizer flat pieces of them: it would train something else",
            "Use zero_stage = 0, ddp or none for LAMB, or adamw or sgd here",
        )


def _deepspeed(train: TrainSpec) -> Iterator[Refusal]:
    stage = train.zero_stage
    if stage == 0:
        for option in _FROM_STAGE_1:
            if (value := getattr(train, option)) != TrainSpec.model_fields[option].default:
                what = f"train.{option} = {shown(value)} has no effect under DeepSpeed at zero_stage = 0"
                yield Refusal(what, "Remove it, or set zero_stage = 1, 2 or 3")
    if stage > 0 and train.precision == "bf16" and train.gradient_dtype is not None:
        yield Refusal(
            f"train.gradient_dtype = {shown(train.gradient_dtype)} has no effect under DeepSpeed with precision = "
            f"'bf16' at zero_stage = {stage}: its autocast decides, and sends linear layers in bf16, the rest in fp32",
            "Remove it, or use precision = 'fp32' or 'bf16-params', or zero_stage = 0",
        )
    if train.offload == "parameters" and stage != 3:
        yield Refusal(
            f"train.offload = 'parameters' needs zero_stage = 3, and this is {stage}: below it every rank computes "
            "with whole weights",
            "Set zero_stage = 3, or offload = 'optimizer'",
        )


def _fixed_micro_batch(train: TrainSpec) -> Iterator[Refusal]:
    """Refuses different batches per rank where a DeepSpeed file gives one micro-batch to all."""
    fixed = (train.deepspeed_config or {}).get("train_micro_batch_size_per_gpu")
    if train.micro_batches is not None and isinstance(fixed, int):
        yield Refusal(
            f"train.rank_speeds gives ranks {in_words(train.micro_batches)} images, and the DeepSpeed configuration "
            f"says train_micro_batch_size_per_gpu = {fixed} for all of them",
            'Remove that key from the file (or set it to "auto"), or leave rank_speeds out',
        )


def _ddp(train: TrainSpec) -> Iterator[Refusal]:
    if train.static_graph and train.grad_accum > 1:
        yield Refusal(
            f"train.static_graph does not go with train.grad_accum = {train.grad_accum}: a first micro-step without "
            "exchange breaks DDP's record of the graph (an internal assertion of torch 2.13)",
            "Set grad_accum = 1, or leave static_graph out",
        )
    if train.gradient_dtype == "bf16" and train.device == "cpu" and train.precision != "bf16-params":
        what = "train.gradient_dtype = 'bf16' needs NCCL under DDP (torch's bf16_compress_hook refuses gloo)"
        yield Refusal(what, "Use gradient_dtype = 'fp16', or fsdp2 or deepspeed")
    if train.gradient_dtype == "fp32" and train.precision == "bf16-params":
        yield Refusal(
            f"under DDP gradients travel in the dtype of the weights or in a shorter one; with train.precision = "
            f"{shown(train.precision)} that is not fp32",
            "Leave gradient_dtype out, or use fsdp2 or deepspeed",
        )


def _fsdp2(train: TrainSpec) -> Iterator[Refusal]:
    if train.engine == "accelerate" and train.device == "cpu":
        yield Refusal(
            "train.accelerate_backend = 'fsdp2' cannot run here: on CPU Accelerate drops its FSDP plugin without a "
            "word and trains with DDP (AcceleratorState of Accelerate 1.15)",
            "Use engine = 'fsdp2', or accelerate_backend = 'ddp' or 'deepspeed'",
        )
    if train.engine == "accelerate" and train.master_weights:
        what = "train.master_weights has no meaning under accelerate with FSDP2, which casts no weights here"
        yield Refusal(what, "Remove it, or use engine = 'fsdp2'")
    if train.master_weights and train.precision != "bf16-params":
        what = f"train.master_weights has no meaning with precision = {shown(train.precision)}: its weights are fp32"
        yield Refusal(what, "Set precision = 'bf16-params', or remove it")
    if train.engine == "accelerate" and train.gradient_dtype is not None:
        what = "train.gradient_dtype has no meaning under accelerate with FSDP2: it takes the dtype from its precision"
        yield Refusal(what, "Remove it, or use engine = 'fsdp2'")
    if train.offload == "optimizer":
        yield Refusal(
            "train.offload = 'optimizer' has no meaning under FSDP2, which offloads weights, gradients and optimizer "
            "together",
            "Set offload = 'parameters'",
        )
    if train.offload == "parameters" and train.device == "cpu":
        yield Refusal(
            "train.offload = 'parameters' has no meaning under FSDP2 on the CPU: all lies in the host's memory already",
            "Remove it, or run on a machine with a GPU",
        )


def _engine(train: TrainSpec) -> str:
    """The engine in the study's words."""
    if train.engine == "accelerate":
        return f"train.engine = 'accelerate' with accelerate_backend = {shown(train.wrapper)}"
    if train.engine == "deepspeed":
        return f"train.engine = 'deepspeed' with zero_stage = {train.zero_stage}"
    return f"train.engine = {shown(train.engine)}"


def _deepspeed_norms_unknown(train: TrainSpec) -> str | None:
    if train.engine == "accelerate":
        return "Accelerate takes DeepSpeed's optimizer step, and with it the gradients, inside its backward"
    config = train.deepspeed_config or {}
    optimizer, zero = config.get("optimizer"), config.get("zero_optimization")
    kind = str(optimizer.get("type")).lower() if isinstance(optimizer, dict) else ""
    if kind in _COMPRESSING:
        return "the optimizer exchanges no gradients once it compresses"
    if kind == "muon" and train.zero_stage > 0:
        return "under Muon DeepSpeed takes the norm of the update, not of the gradient"
    if isinstance(zero, dict) and as_flag(zero.get("compute_grad_norm")) is False and train.zero_stage > 0:
        return "the DeepSpeed file sets compute_grad_norm to false"
    return None


_TRUE, _FALSE = ("true", "t", "yes", "y", "on", "1"), ("false", "f", "no", "n", "off", "0")
"""Words of https://docs.pydantic.dev/latest/concepts/conversion_table/"""
_LARGEST_WHOLE = 2**63


def as_flag(value: object) -> bool | None:
    """The boolean that pydantic, and so DeepSpeed's models, makes of `value`; None where it refuses."""
    if isinstance(value, str):
        return True if value.lower() in _TRUE else False if value.lower() in _FALSE else None
    return bool(value) if isinstance(value, bool | int | float) and value in (0, 1) else None


def as_number(value: object, kind: str = "int") -> int | float | None:
    """The number that pydantic makes of `value` for an "int" or a "float"; None where it refuses."""
    if isinstance(value, str):
        whole, _, rest = value.strip().partition(".")
        is_whole = value.isascii() and whole == whole.strip() and not rest.strip("0")
        try:
            value = float(value) if kind == "float" else int(whole) if is_whole else None
        except ValueError:
            return None
    if isinstance(value, float):
        return value if kind == "float" or (value.is_integer() and abs(value) < _LARGEST_WHOLE) else None
    return min(max(value, -_LARGEST_WHOLE), _LARGEST_WHOLE) if isinstance(value, int) else None


def _megatron_unavailable(device: Device) -> str | None:
    if device == "cpu":
        return (
            "Megatron-Core needs a CUDA GPU: it allocates its gradient buffers on the current CUDA device and "
            "takes CUDA tensors alone for weights"
        )
    why = f"megatron-core is not installed ({install_command('megatron')})"
    return why if versions_of(["megatron-core"])["megatron-core"] is None else None


_STEP, _MEMORY = "vitscale.prediction.step", "vitscale.prediction.memory"

ENGINES: Mapping[str, EngineFacts] = {
    "none": EngineFacts(
        engine="vitscale.engines.plain:PlainEngine",
        title="plain (no wrapper)",
        messages=f"{_STEP}.gradients:plain",
        memory=f"{_MEMORY}.holding:plain",
    ),
    "ddp": EngineFacts(
        engine="vitscale.engines.ddp:DdpEngine",
        title="DDP",
        splits=("sequence", "pipeline"),
        refusals=_ddp,
        messages=f"{_STEP}.gradients:ddp",
        memory=f"{_MEMORY}.holding:ddp",
        advised=(0,),
    ),
    "fsdp2": EngineFacts(
        engine="vitscale.engines.fsdp2:Fsdp2Engine",
        title="FSDP2",
        splits=("tensor", "sequence", "pipeline"),
        refusals=_fsdp2,
        shards=lambda _: True,
        # FSDP2 gives autograd weights of its own, so no hook sees the gradient of one micro-batch.
        norms_unknown=lambda _: "FSDP2 scatters gradients before a rank's own can be seen whole",
        messages=f"{_STEP}.gradients:fsdp2",
        memory=f"{_MEMORY}.holding:fsdp2",
        advised=(0,),
    ),
    "deepspeed": EngineFacts(
        engine="vitscale.engines.deepspeed:DeepSpeedEngine",
        title="DeepSpeed",
        splits=("sequence",),
        packages=("deepspeed",),
        refusals=_deepspeed,
        shards=lambda train: train.zero_stage > 0,
        keeps_fp32_weights=True,
        norms_unknown=_deepspeed_norms_unknown,
        messages=f"{_STEP}.zero:deepspeed",
        memory=f"{_MEMORY}.zero:deepspeed",
        advised=(0, 1, 2, 3),
    ),
    "accelerate": EngineFacts(engine="vitscale.engines.accelerate:AccelerateEngine", packages=("accelerate",)),
    "megatron": EngineFacts(
        engine="vitscale.engines.megatron:MegatronEngine",
        splits=("tensor",),
        packages=("megatron-core",),
        cannot={
            ("precision", "fp16"): Refusal(
                "train.engine = 'megatron' keeps fp16 weights where every other engine computes in fp16 over fp32 "
                "weights",
                "Use train.precision = 'bf16', 'bf16-params' or 'fp32'",
            ),
            ("optimizer", "sgd"): Refusal(
                "train.engine = 'megatron' shards the states of Adam alone (DistributedOptimizer of Megatron-Core "
                "0.16)",
                "Use train.optimizer = 'adamw'",
            ),
        },
        unavailable=_megatron_unavailable,
        instead="Use another engine; engine = 'fsdp2' takes [parallel] tensor too, by torch's DTensor",
        shards=lambda _: True,
        keeps_fp32_weights=True,
        norms_unknown=lambda _: "Megatron-Core scatters gradients into buffers of its own",
        messages=f"{_STEP}.gradients:megatron",
    ),
}
"""The engines of vitscale; others register by entry points (`vitscale.engines`), each as an `EngineFacts`."""
_NOTHING_KNOWN = EngineFacts(engine="")
_OF_SCRIPT = EngineFacts(
    engine="",
    title="own script",
    norms_unknown=lambda _: "a script's gradients are its own affair",
    checkpoint_unknown="the model is the script's",
)


def known(engine: str) -> EngineFacts:
    """The facts of an engine that shall train.

    Raises:
        RequestError: nobody has it, or the package that does is broken.
    """
    if engine == script.NAME:
        return _OF_SCRIPT
    next_step = meant_value("train.engine", engine) or "Correct train.engine"
    return plugins.known("engine", engine, ENGINES, of=EngineFacts, next_step=next_step)


@lru_cache
def of_engine(engine: str) -> EngineFacts:
    """The facts of an engine that results name; empty ones where it is unknown here, as an imported log's may be."""
    try:
        return known(engine)
    except RequestError:
        return _NOTHING_KNOWN


def takers(option: str) -> tuple[str, ...]:
    """The engines of vitscale that take an option of [train]; empty for options that all of them take."""
    named = fact_of(TrainSpec, option).taken_by
    return named + tuple(name for name, facts in ENGINES.items() if option in facts.options)


def takes(engine: str, option: str) -> bool:
    """Whether an engine takes an option that not all of them take; `engine` is the one that wraps the model."""
    return engine in takers(option) or option in of_engine(engine).options


def missing_packages(engines: Iterable[str]) -> list[str]:
    """Packages that ranks of these engines import and that are neither installed here nor on Python's path (where a
    cluster's module may have put them); imports nothing."""
    needed = ["torch", *(package for name in engines for package in of_engine(name).packages)]
    unknown = [name for name, version in versions_of(needed).items() if version is None]
    return [name for name in unknown if find_spec(name.replace("-", "_")) is None]


def needed_by(package: str, engines: Iterable[str]) -> tuple[str, str] | None:
    """The first engine of another package that needs `package`, and that package; None where vitscale's own do too."""
    asking = [name for name in engines if package in of_engine(name).packages]
    if not asking or any(name in ENGINES for name in asking):
        return None
    offered = plugins.package("engine", asking[0])
    return None if offered is None else (asking[0], offered)


def installed_versions(engines: Iterable[str] = ()) -> dict[str, str | None]:
    """Versions of the distributions that decide a result: those of vitscale's engines and of the engines named, and the
    digest of vitscale's measuring code where its files can be read. Imports nothing; None: not installed."""
    of_engines = [package for name in (*ENGINES, *engines) for package in of_engine(name).packages]
    names = ("vitscale", "torch", "deepspeed", "transformers", "numpy", *of_engines, "pytorch-optimizer")
    versions = versions_of(names)
    measuring = program.measuring_digest()
    return versions if measuring is None else versions | {program.MEASURING_NAME: measuring}


def versions_of(distributions: Iterable[str]) -> dict[str, str | None]:
    """Versions of distributions, None where one is not installed; imports nothing."""
    versions: dict[str, str | None] = {}
    for name in distributions:
        try:
            versions[name] = _version(name)
        except metadata.PackageNotFoundError:  # which may be installed later: not kept
            versions[name] = None
    return versions


_version = cache(metadata.version)
