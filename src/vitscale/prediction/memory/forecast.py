"""How much memory a rank of a trial will take at its peak, part by part, and the chance that it does not fit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from statistics import NormalDist
from typing import NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from vitscale.base.arrays import FloatArray
from vitscale.base.plugins import referred
from vitscale.engines import wrapper_facts
from vitscale.engines.states import STATE_BYTES, Parts, RankStates, optimizer_of_states
from vitscale.engines.trace_requests import needs_card, trace_request
from vitscale.errors import shown
from vitscale.prediction.memory.activations import is_autocast
from vitscale.prediction.memory.allocations import LinearMemory, StepMemory, highest_of_turns, step_memory
from vitscale.prediction.memory.from_card import card_of, card_pieces, why_card_does_not_suffice
from vitscale.prediction.memory.in_parts import of_parts, pieces
from vitscale.prediction.memory.in_stages import in_turns, that_may_take_most
from vitscale.trial.fields import fields_where
from vitscale.trial.known_models import KNOWN_MODELS
from vitscale.trial.model_cost import (
    ParameterShapes,
    parameter_shapes,
    recorded_shapes,
    vit_shape,
)
from vitscale.trial.trial import DeviceName, TrainSpec, Trial, World, world_of_hosts

NOT_COVERED: Mapping[str, str] = {
    "libraries": "a CUDA context, kernels, workspaces of cuBLAS or oneDNN; NCCL's or gloo's buffers; Python itself",
    "fragmentation": "what the caching allocator reserves beyond what tensors take",
    "data": "images that threads have prepared ahead",
    "start-up": "what building the engine takes for a moment, before the first step",
}
"""What no forecast counts though it is not 0: name -> what it is."""


@dataclass(frozen=True)
class MemoryForecast:
    """Bytes of one rank's tensors; where ranks differ, of the rank that takes most."""

    moments: Mapping[str, Parts]
    """Moment of a step -> bytes by part; a part that is not listed takes none."""
    not_covered: Mapping[str, str]
    """What is left out -> why, or what it is."""
    host: Parts = field(default_factory=dict)
    """Bytes in the host's memory by part, of what is offloaded from a GPU; they are none of `moments`."""

    @property
    def peak_moment(self) -> str:
        """The moment that takes most."""
        return max(self.moments, key=lambda moment: sum(self.moments[moment].values()))

    @property
    def parts(self) -> Parts:
        """Bytes by part at the peak."""
        return self.moments[self.peak_moment]

    @property
    def peak_bytes(self) -> int:
        """Bytes of all parts together at the peak."""
        return sum(self.parts.values())


_TAKES_NO_MEMORY = (
    *fields_where(TrainSpec, lambda traits: traits.role in ("rate", "duration")),
    "learning_rate_warmup_steps",
    "weight_decay",
    "seed",
)
"""Fields of `TrainSpec` that change no rank's memory. `momentum` is none of them: without it SGD holds no buffer."""
_DEFAULTS = {field: TrainSpec.model_fields[field].default for field in _TAKES_NO_MEMORY}


def memory_inputs(trial: Trial) -> Trial:
    """All of a trial that a forecast reads, with defaults in place of the rest; equal inputs have equal forecasts."""
    return trial.model_copy(update={"train": trial.train.model_copy(update=_DEFAULTS)})


def forecast(trial: Trial) -> MemoryForecast | None:
    """The memory that a rank of a resolved trial takes at its peak; None where `unavailable` has a reason."""
    trial = memory_inputs(trial)
    if unavailable(trial):
        return None
    missing = dict(NOT_COVERED)
    if trial.train.compile:
        missing["compile"] = "compiled blocks keep and fuse other activations than these, mostly fewer"
    if trial.train.compile_mode == "reduce-overhead":
        missing["cuda-graphs"] = "CUDA graphs keep their activations and gradients from step to step"
    is_plain_vit = vit_shape(trial.model) is not None and trial.model.task == "classification"
    if not is_plain_vit:
        missing["convolutions"] = "what a convolution's backward takes for copies in another order of the axes"
    host = host_parts(trial)
    of_ranks = (MemoryForecast(highest_of_turns(turns), missing, host) for turns in _turns_of_ranks(trial))
    return max(of_ranks, key=lambda rank: rank.peak_bytes)


def host_parts(trial: Trial) -> Parts:
    """Return the bytes by part that a rank on a GPU offloads to the host; `unavailable` must have no reason.

    Ranks that share weights offload nothing (`study.model_checks`), so the whole model's shapes are every rank's.
    """
    return _wrapped(trial, _shapes(trial)).host


def totals(trial: Trial) -> list[int]:
    """Bytes at every moment of a trial whose memory is not `unavailable`; the order does not depend on the batch."""
    every_turn = chain.from_iterable(_turns_of_ranks(trial))
    return list(chain.from_iterable(turn.own_totals() for turn in every_turn))


def unavailable(trial: Trial) -> str:
    """Why arithmetic does not tell a trial's memory; empty where it does.

    Reasons are a model that only building it could count, an engine or an optimizer whose states are not modelled here,
    and settings of a user's own DeepSpeed file with which it holds other states (`EngineFacts.states_unknown`).
    """
    train = trial.train
    facts = wrapper_facts(train)
    if not facts.states:
        return f"what {train.wrapper} holds is not modelled"
    optimizer = optimizer_of_states(train)
    if optimizer not in STATE_BYTES:
        return f"the states of {optimizer if optimizer == train.optimizer else shown(optimizer)} are not modelled"
    if reason := facts.states_unknown(train):
        return reason
    shapes = recorded_shapes(trial.model)
    if shapes is None or needs_card(trial):
        card = card_of(trial)
        return _why_no_card(trial) if card is None else why_card_does_not_suffice(trial, card)
    is_plain_vit = vit_shape(trial.model) is not None and trial.model.task == "classification"
    if not is_plain_vit and train.device == "cuda" and is_autocast(train):
        return "what autocast keeps of this model on a GPU is not modelled where ranks share it"
    return ""


def _why_no_card(trial: Trial) -> str:
    """Return why the model's activations are not known under the trial's conditions."""
    reason = KNOWN_MODELS.reason(trace_request(trial))
    if reason:
        return reason
    if KNOWN_MODELS.counts(trial.model) is not None or recorded_shapes(trial.model) is not None:
        return f"this model was not traced for {trial.train.precision} on {trial.train.device}"
    return "no formula and no card counts this model"


def forecast_bytes(trial: Trial) -> int | None:
    """`forecast(trial).peak_bytes`; None where unknown."""
    expected = forecast(trial)
    return None if expected is None else expected.peak_bytes


def peak_bytes_of_many(
    template: Trial,
    gpus: NDArray[np.int_],
    ranks_per_node: NDArray[np.int_],
    grad_accum: int,
    micro_batches: NDArray[np.int_],
) -> FloatArray:
    """Return the peak bytes of a rank of `template` in each configuration of hosts and micro-batch, (configurations,).

    The result is that of `forecast_bytes` for each such trial (but for a byte or two an image, which the share of a
    block's activations is rounded to where a bucket is full), some hundred times as fast: every moment of a step takes
    a fixed number of bytes and a number of bytes for each image, and the peak is the highest of these lines. Where
    sequence ranks label images, each image that the first of them labels adds a number of bytes too.

    Args:
        template: the trial; its world and batch are ignored.
        gpus: ranks of each configuration.
        ranks_per_node: ranks of a full host in each configuration; more than `gpus` are one host.
        grad_accum: micro-steps of a step; for a model without stages two stand for any larger number.
        micro_batches: images of every rank in each configuration.

    Returns:
        Bytes; NaN where they are unknown.
    """
    peaks: FloatArray = np.full(len(gpus), np.nan)
    labelling = template.parallel.sequence if template.model.task == "segmentation" else 1
    counts = (1, labelling, 2 * labelling) if labelling > 1 else (1, 2)
    of_one, *of_more = (_with_batch(template, grad_accum, micro_batch) for micro_batch in counts)
    if not len(gpus) or unavailable(of_one):
        return peaks
    whole = _shapes(of_one)
    linear = None
    has_whole_model = of_one.parallel.ranks_per_model == 1  # replicas of sharded models are whole models too
    if has_whole_model and not needs_card(of_one):
        linear = LinearMemory([pieces(trial.model, trial.train) for trial in (of_one, *of_more)])
    for world, here in configurations_by_world(template, gpus, ranks_per_node):
        there = of_one.model_copy(update={"world": world})
        if linear is not None:
            totals_by_batch = linear.totals(there, _wrapped(there, whole))
            at_one, *more = (line.astype(float) for line in totals_by_batch)
        else:
            every = there, *(trial.model_copy(update={"world": world}) for trial in of_more)
            at_one, *more = (np.array(totals(trial), dtype=float) for trial in every)
        images = micro_batches[here, None]
        each = (more[0] - at_one) / (max(2, labelling) - 1)
        of_labelled = more[-1] - more[0] - labelling * each if labelling > 1 else 0.0
        peaks[here] = (at_one + each * (images - 1) + of_labelled * (-(-images // labelling) - 1)).max(axis=1)
    return peaks


class _Hosts(NamedTuple):
    """How many ranks a configuration has, and how they lie on hosts."""

    ranks: int
    ranks_of_full_host: int


def configurations_by_world(
    template: Trial, gpus: NDArray[np.int_], ranks_per_node: NDArray[np.int_]
) -> Iterator[tuple[World, NDArray[np.intp]]]:
    """Yield each different world of some configurations, and the positions of the configurations that have it.

    Args:
        template: the trial, which has the threads of a rank.
        gpus: ranks of each configuration.
        ranks_per_node: ranks of a full host in each configuration; more than `gpus` are one host.
    """
    positions_by_hosts: dict[_Hosts, list[int]] = {}
    pairs = zip(gpus.tolist(), np.minimum(gpus, ranks_per_node).tolist(), strict=True)
    for position, (ranks, ranks_of_full_host) in enumerate(pairs):
        positions_by_hosts.setdefault(_Hosts(ranks, ranks_of_full_host), []).append(position)
    threads = template.world.threads_per_rank
    for hosts in sorted(positions_by_hosts):
        world = world_of_hosts(hosts.ranks, hosts.ranks_of_full_host, threads)
        yield world, np.array(positions_by_hosts[hosts])


def _with_batch(template: Trial, grad_accum: int, micro_batch: int) -> Trial:
    """The template with these fields, without validating it again: that would take longer than all the rest."""
    changed = {"grad_accum": grad_accum, "micro_batch": micro_batch, "micro_batches": None}
    return template.model_copy(update={"train": template.train.model_copy(update=changed)})


def _shapes(trial: Trial) -> ParameterShapes:
    """The shapes of the model's tensors."""
    shapes = parameter_shapes(trial.model)
    if shapes is None:
        raise ValueError("ask `unavailable` first")
    return shapes


def _wrapped(trial: Trial, shapes: ParameterShapes) -> RankStates:
    """What the wrapper holds whatever the micro-batch."""
    held: RankStates = referred(wrapper_facts(trial.train).states)(trial, shapes)
    return held


def _turns_of_ranks(trial: Trial) -> Iterator[list[StepMemory]]:
    """Yield, for each rank that may take most, its turns: a step is one, but for a rank of a pipeline."""
    whole = _shapes(trial)
    card = card_of(trial) if needs_card(trial) else None
    if card is not None:
        yield [step_memory(card_pieces(trial, card), trial, _wrapped(trial, whole))]
        return
    for share in that_may_take_most(trial, whole):
        if not share.chunks:
            shapes = share.shapes(whole)
            yield [step_memory(pieces(trial.model, trial.train, share), trial, _wrapped(trial, shapes))]
            continue
        models = [pieces(trial.model, trial.train, stage) for stage in share.stages]
        buffers = sum(model.buffers for model in models)
        models = [model._replace(buffers=buffers) for model in models]
        of_stages = [of_parts(trial, stage, model) for stage, model in zip(share.stages, models, strict=True)]
        yield [
            step_memory(models[turn.stage], turn.step, turn.states, turn, of_stages[turn.stage].handed_on)
            for turn in in_turns(trial, share, whole, of_stages, _wrapped)
        ]


class _LeftOut(NamedTuple):
    """What a device takes beyond tensors; lognormal, so that its logarithm has a mean and a standard deviation."""

    factor: float
    """Median of reserved bytes over the bytes that tensors take."""
    factor_spread: float
    fixed_bytes: float
    """Median of what is there whatever the tensors."""
    fixed_spread: float


FORECAST_SPREAD = 0.02
"""Standard deviation of a forecast's logarithm: more than twice what `benchmarks/memory.py` finds, which runs small
models and one version of each library."""

LEFT_OUT: dict[DeviceName, _LeftOut] = {
    # 90 % of factors between 1.02 and 1.15: blocks of the caching allocator that no tensor fits into. 1.11 is reported
    # in pytorch/pytorch issue 40989; where memory is short the allocator gives back wholly free blocks before it fails.
    # 90 % of the rest between 0.7 and 2.1 GB: a context with kernels loaded as they are used (0.29 GB of it at start:
    # pytorch/pytorch pull request 86509), and NCCL's buffers, linear in channels (NVIDIA/nccl issue 986; 1.06 GB with
    # the context on 8 H100: issue 1685). ViT-B/16 on one H200 had 0.82 GB plain, 1.40 under DDP, 1.81 under DeepSpeed.
    "cuda": _LeftOut(1.083, 0.036, 1.2e9, 0.35),
    # malloc hands tensors above 32 MiB out page by page and takes them back when they are freed; smaller ones do not
    # always fit into what is kept (decision 0033): 90 % of factors between 0.98 and 1.08. 0.35 to 0.75 GB: Python and
    # the libraries that a rank has loaded, less where ranks of a host share their pages; gloo's buffers.
    "cpu": _LeftOut(1.03, 0.03, 0.5e9, 0.23),
}


def _normal_below(values: FloatArray) -> FloatArray:
    below: FloatArray = np.frompyfunc(lambda value: 0.5 * math.erfc(-value / math.sqrt(2)), 1, 1)(values).astype(float)
    return below


_NODES = tuple(NormalDist().inv_cdf((i + 0.5) / 15) for i in range(15))
"""Standard normal at the middles of 15 equal chances."""


@overload
def oom_chance(forecast_bytes: float, capacity_bytes: float, device: DeviceName) -> float: ...
@overload
def oom_chance(forecast_bytes: FloatArray, capacity_bytes: float | FloatArray, device: DeviceName) -> FloatArray: ...
def oom_chance(
    forecast_bytes: float | FloatArray, capacity_bytes: float | FloatArray, device: DeviceName
) -> float | FloatArray:
    """The chance, in [0, 1], that tensors of `forecast_bytes` and all beside them exceed `capacity_bytes`.

    Needed are `forecast x F + R` bytes, with F and R lognormal. F is the error of forecasts times reserved over used
    memory; R is what is there whatever the tensors (`LEFT_OUT`). The chance rises with the forecast and falls with the
    capacity. NaN, where a forecast is unknown, stays NaN.

    Args:
        forecast_bytes: peak of a rank's tensors, at least 0.
        capacity_bytes: memory of the device that the rank has for itself; on a CPU its share of the host's memory. One
            for all forecasts, or one for each.
        device: where it runs.
    """
    left_out = LEFT_OUT[device]
    spread = math.hypot(FORECAST_SPREAD, left_out.factor_spread)
    rest = left_out.fixed_bytes * np.exp(left_out.fixed_spread * np.array(_NODES))
    room = np.asarray(capacity_bytes, dtype=float)[..., None] - rest
    needed = np.asarray(forecast_bytes, dtype=float)[..., None] * left_out.factor
    with np.errstate(divide="ignore"):
        # No tensors need no bytes: the logarithm is minus infinity, and the chance is that the rest does not fit.
        above = (np.log(needed) - np.log(np.maximum(room, 1.0))) / spread
    chance: FloatArray = np.where(room > 0, _normal_below(above), np.where(np.isnan(needed), np.nan, 1.0)).mean(axis=-1)
    return chance if isinstance(forecast_bytes, np.ndarray) else float(chance)
