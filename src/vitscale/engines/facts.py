"""Facts of an engine, for all that must not import it: `study`, `analysis`, `prediction`, `advice`. No torch here.

A fact that is left out is unknown, and whoever asks says so: nothing is guessed of an engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vitscale.engines.torch_needs import TorchNeed
from vitscale.trial.model_spec import ModelSpec
from vitscale.trial.parallel import ParallelAxis, ParallelSpec
from vitscale.trial.trial import DeviceName, TrainSpec

ONE_PROCESS = "one process"
"""`EngineFacts.trains_like` of engines whose every step is that of one process with the whole global batch."""
BLOCK_OPTIONS = ("activation_checkpointing", "compile", "compile_mode")
"""Fields of [train] that `engines.base.with_options` reads."""


class Refusal(NamedTuple):
    """A reason for which an engine cannot do what is asked."""

    what: str
    """The request, and what prevents it."""
    next_step: str
    valid: tuple[str, ...] = ()
    """Values that would be taken."""


@dataclass(frozen=True)
class EngineFacts:
    """All that others need to know of an engine. References are "module:name", and imported when needed."""

    engine: str
    """Reference to the class that trains: a `vitscale.engines.base.Engine`."""
    title: str = ""
    """Its name in sentences: "DDP"."""
    label: str = ""
    """Its name in curves and tables; empty: the name that a study writes."""
    packages: tuple[str, ...] = ()
    """Distributions beyond torch that decide its results; their versions are recorded."""
    alone: bool = False
    """Whether it trains on one rank, without a process group; what distributes is compared with it."""
    usual: bool = False
    """Whether it is what most would use: the reference of comparisons among engines that distribute."""

    options: tuple[str, ...] = ()
    """Fields of [train] that it reads, of those that say how training is distributed or executed (`engines.OPTIONS`);
    others are refused."""
    name_options: tuple[str, ...] = ()
    """Those of `options` whose value is part of its name: "deepspeed ZeRO-2"."""
    stands_for: str = ""
    """The field of [train] that names the engine which wraps the model; empty: it does so itself."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values for fields of [train] that a study leaves open."""
    splits: tuple[ParallelAxis, ...] = ()
    """Axes of [parallel] along which several ranks may share a model under it."""
    replicates: bool = False
    """Whether it takes [parallel] replicate: shards weights over a part of the ranks, and keeps replicas of them."""
    replicas_must_shard: bool = False
    """Whether each replica must have two ranks or more."""
    own_tensor_layers: bool = False
    """Whether ranks that share matrices compute with layers of the engine's library, which leave a classifier whole."""

    cannot: Mapping[tuple[str, str], Refusal] = field(default_factory=dict)
    """(Field of [train], value) -> why it is refused."""
    refusals: Callable[[TrainSpec], Iterator[Refusal]] = lambda _: iter(())
    """Further refusals of a [train]."""
    rank_refusals: Callable[[TrainSpec, int], Iterator[Refusal]] = lambda _, __: iter(())
    """Refusals of a [train] on a number of ranks."""
    split_refusals: Callable[[ParallelSpec, ModelSpec], Iterator[Refusal]] = lambda _, __: iter(())
    """Refusals of a model that ranks share, along axes that are among `splits`."""
    unavailable: Callable[[DeviceName], str | None] = lambda _: None
    """Why it cannot run here at all; None where it can."""
    instead: str = "Use another engine"
    """What to do where it cannot."""
    torch_needs: tuple[TorchNeed, ...] = ()
    """Uses of torch that need a later release than the oldest that pip takes."""
    checkpoint_unknown: str | None = None
    """Why no checkpoint can be saved and restored."""
    norms_unknown: Callable[[TrainSpec], str | None] = lambda _: None
    """Why no rank sees the gradients whose norms are to be measured; None where it does. Other reasons, which are not
    the engine's alone, are in `checks.why_no_gradient_norms`."""

    trains_like: str = ""
    """Name of what it computes: `ONE_PROCESS`, or a name of its own. Losses of trials with one name must agree; with a
    name of its own, only where the global batch is divided alike. Empty: unknown; then no losses are compared, and
    `checks.computation` takes the engine to be like itself alone."""
    steps_between_exchanges: Callable[[TrainSpec], int | None] = lambda _: None
    """Optimizer steps from one exchange among the ranks to the next: 1 where each step exchanges. None: unknown."""
    shards: Callable[[TrainSpec], bool] = lambda _: False
    """Whether each rank updates only a part of the parameters: shards or flat groups, not the model's own tensors."""
    second_shard_ranks: Callable[[TrainSpec], int] = lambda _: 1
    """Ranks that share a second shard of the weights, neighbours in the world, which they gather among themselves; all
    ranks of a smaller world. 1: there is none."""
    every_stage_must_train: bool = False
    """Whether its wrapper refuses a pipeline's stage that trains nothing; others need one that trains on each rank."""
    updates_dtensors: bool = False
    """Whether its optimizer updates torch's DTensors, over which torch 2.13 has no fused SGD."""
    own_loss_scaling: bool = False
    """Whether its library scales fp16's losses and skips steps that overflow; for others torch's GradScaler does, which
    leaves the skipping to a fused optimizer."""
    keeps_fp32_weights: bool = False
    """Whether it keeps fp32 weights beside those of 16 bits."""
    fp16_weights: bool = False
    """Whether `fp16` makes its weights fp16. Other engines keep fp32 weights and cast in forward."""
    casts_again: Callable[[TrainSpec], bool] = lambda _: False
    """Whether backward casts the weights of linear layers again, so that autocast's copies need not be kept."""

    messages: str = ""
    """Reference to what an optimizer step sends: `(trial, shapes) -> tuple[engines.messages.Message, ...] | None`."""
    states: str = ""
    """Reference to what a rank holds beside activations: `(trial, shapes) -> engines.states.RankStates`."""
    states_unknown: Callable[[TrainSpec], str] = lambda _: ""
    """Why `states` has no answer for this [train]; empty where it has."""
    stage_states: str = ""
    """Reference to what a rank holds while a micro-batch is in one of its pipeline stages, for an engine that gathers
    weights block by block: `(trial, shapes, *, later) -> RankStates`."""
    around_parts: str = ""
    """Reference to what a rank holds at each part of a model, where `RankStates` does not say it:
    `(trial, states, parts, turn) -> engines.parts.Around`."""
    part_gathers: str = ""
    """Reference to the weights that it gathers in each part's forward and backward:
    `(trial, parts) -> engines.parts.PartGathers | None`."""

    variants: tuple[Mapping[str, Any], ...] = ()
    """What `vitscale advise` considers even if no run used it: fields of [train], those that `name_options` names."""
    checked: tuple[Mapping[str, Any], ...] = ()
    """What `vitscale check --training` trains: fields of [train], and of [parallel] by dotted names."""
    preloaded: Callable[[TrainSpec], tuple[object, ...]] = lambda _: ()
    """Values of a [train] that decide which libraries `Engine.preload` imports, besides the engine and the device."""
    gradients_on_host: Callable[[TrainSpec], bool] = lambda _: False
    """Whether ranks of GPUs exchange gradients on the host."""
    marked_by: str = ""
    """Beginning of the annotations by which its training is recognised in a trace."""

    @property
    def references(self) -> tuple[str, ...]:
        """All references that it gives, "module:name"."""
        references = (self.engine, self.messages, self.states, self.stage_states, self.around_parts, self.part_gathers)
        return tuple(reference for reference in references if reference)
