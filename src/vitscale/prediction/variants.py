"""A measured series with something changed: its model, its draws, and what had to be assumed for it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from vitscale import engines
from vitscale.analysis.model_counts import known_parameters
from vitscale.engines import checks
from vitscale.errors import RequestError, unknown
from vitscale.prediction.evidence import PRECISION, MeasuredPoint
from vitscale.prediction.fitting import DRAWS, FittedSeries
from vitscale.prediction.gpu_types import GpuType, common_type, optimizer_factor, time_factors
from vitscale.prediction.network.links import Link, Network
from vitscale.prediction.results import Assumption
from vitscale.prediction.sampling import spread_out_normals
from vitscale.prediction.shares import compute_share, filling
from vitscale.prediction.step.messages import messages, norm_messages
from vitscale.prediction.step.model import Draws, StepModel
from vitscale.trial import model_cost
from vitscale.trial.model_cost import ParameterCount
from vitscale.trial.model_spec import ModelSpec
from vitscale.trial.trial import Trial

_RECOMPUTED = 4 / 3
"""Compute with activation checkpointing over compute without: each block's forward runs once more."""
_SPREAD_OF_MODELS, _SPREAD_OF_ENGINES, _SPREAD_OF_PRECISIONS, _SPREAD_OF_CHECKPOINTING = 0.25, 0.30, 0.50, 0.05
_SPREAD_OF_STATED_SIZES = 0.60
"""The same for FLOPs by parameters and pixels: a ResNet-50 has 0.8, an EfficientNet-B0 0.4 of a ViT-B/16's ratio."""
_SPREAD_OF_SPLITS = 0.15
"""Standard deviations of the logarithm of what is scaled by arithmetic instead of measured."""
_OF_HOSTS = ("model", "gpu", "network", "parallel")
_LINKS_FOLLOW, _SPREAD_OF_LINKS = 0.5, 0.2
_FIELDS = (
    "engine", "accelerate_backend", "zero_stage", "precision", "micro_batch", "grad_accum", "bucket_mib",
    "activation_checkpointing", "hpz",
)  # fmt: skip
_WRAPPER_CHANGES = frozenset({"engine", "accelerate_backend", "zero_stage"})


@dataclass(frozen=True)
class PredictionVariant:
    """What a prediction is worked out from."""

    fitted: FittedSeries
    trial: Trial
    """The largest measured point's trial with the changes; its world does not matter."""
    model: StepModel
    draws: Draws
    assumptions: tuple[Assumption, ...]
    """Assumptions that the changes make."""
    guessed: bool
    """Whether a change rests on arithmetic or general knowledge alone: nobody ran that engine, model, precision, split,
    checkpointing or GPU."""
    gpu: GpuType | None
    """The type of GPU, where it is another than the measured one."""

    @property
    def parameters(self) -> ParameterCount | None:
        """Parameters of its model: those that the measured ranks counted, unless it is another model."""
        measured_point = self.fitted.points[-1]
        if self.trial.model == measured_point.trial.model:
            return measured_point.parameters
        return known_parameters(self.trial.model)

    @property
    def untold(self) -> PredictionVariant | None:
        """The same without what was told of an import; None: nothing was, or more than batches and ranks is changed."""
        fitted = self.fitted.untold
        if fitted is None or self.assumptions:
            return None
        return replace(self, fitted=fitted, model=fitted.model, draws=fitted.draws)

    @property
    def memory_capacity_bytes(self) -> int | None:
        """Memory of a device: the other type's, else as it was recorded."""
        return self.fitted.points[-1].memory_capacity_bytes if self.gpu is None else self.gpu.memory_bytes

    @property
    def host_memory_capacity_bytes(self) -> int | None:
        """Memory of a host, as it was recorded; None where it was not, and of another type's hosts."""
        return self.fitted.points[-1].host_memory_bytes if self.gpu is None else None


def differing(points: Sequence[MeasuredPoint], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The changes (see `variant`) that the largest of the points was not measured with already."""
    last = points[-1]
    own: dict[str, Any] = {"model": last.trial.model, "parallel": last.trial.parallel, **last.trial.train.model_dump()}
    if "gpu" in changes:
        own["gpu"] = common_type(last.devices)
    return {name: value for name, value in changes.items() if own.get(name, ...) != value}


def variant(fitted: FittedSeries, changes: Mapping[str, Any]) -> PredictionVariant:
    """A series with some fields changed; with none it is the series itself.

    Args:
        fitted: the series' fit.
        changes: fields of `TrainSpec`, "model" with a resolved ModelSpec, "parallel" with a ParallelSpec, "gpu" with a
            GpuType, or "network" with the declared Link between hosts.

    Raises:
        RequestError: a field that cannot be changed, or options that the engine refuses.
    """
    base = fitted.points[-1].trial
    changes = differing(fitted.points, changes)
    for name in changes:
        if name not in (*_FIELDS, *_OF_HOSTS):
            raise unknown("field to change", name, [*_FIELDS, *_OF_HOSTS])
    train = base.train.model_copy(update={k: v for k, v in changes.items() if k in _FIELDS})
    if "micro_batch" in changes:
        train = train.model_copy(update={"micro_batches": None})
    if "zero_stage" in changes and train.zero_stage < 3:  # only stage 3 gathers: in buckets, and from second shards
        train = train.model_copy(update={"gather_bucket_mib": None, "hpz": 1})
    if not _WRAPPER_CHANGES.isdisjoint(changes):  # another wrapper has its defaults, and offloads nothing
        train = train.model_copy(update={"offload": "none"})
    spec: ModelSpec = changes.get("model", base.model)
    parallel = changes.get("parallel", base.parallel)
    whole = -(-base.world.size // parallel.least_ranks) * parallel.least_ranks
    world = (
        base.world
        if whole == base.world.size
        else base.world.model_copy(update={"nodes": 1, "ranks_per_node": whole, "ranks": None})
    )
    # A card of the new model is found without the digest of its configuration, if there is only one.
    digest = base.model_digest if spec.hf == base.model.hf and spec.factory == base.model.factory else None
    trial = base.model_copy(
        update={"train": train, "model": spec, "parallel": parallel, "world": world, "model_digest": digest}
    )
    if not changes:
        return PredictionVariant(fitted, trial, fitted.model, fitted.draws, (), False, None)
    if train.engine in engines.ENGINES or train.engine != base.train.engine:  # not an import of unknown engine
        checks.check(train)
    return _Changed(fitted, base, trial, changes.get("gpu"), changes.get("network")).variant()


class _Changed:
    def __init__(
        self, fitted: FittedSeries, base: Trial, trial: Trial, gpu: GpuType | None, network: Link | None
    ) -> None:
        self.fitted, self.base, self.trial, self.gpu, self.network = fitted, base, trial, gpu, network
        self.draws = dict(fitted.draws)
        self.model = fitted.model
        self.assumptions: list[Assumption] = []
        self.guessed = False
        self.rng = np.random.default_rng(7)

    def variant(self) -> PredictionVariant:
        old, new = self.base.train, self.trial.train
        if self.base.model != self.trial.model:
            self._other_model()
        if old.precision != new.precision:
            self._other_precision()
        if new.activation_checkpointing != old.activation_checkpointing:
            factor = _RECOMPUTED if new.activation_checkpointing else 1 / _RECOMPUTED
            self._scale("compute", factor, _SPREAD_OF_CHECKPOINTING)
            self._guess("activation checkpointing", f"{factor:.3g} times the compute", "run the study with it")
        if self.base.parallel.model_split != self.trial.parallel.model_split:
            self._other_split()
        is_split_otherwise = self.model.parallel != self.trial.parallel
        is_wrapped_otherwise = _wrapping(self.base) != _wrapping(self.trial)
        if is_wrapped_otherwise or is_split_otherwise or self.base.model != self.trial.model:
            self._other_engine()
        if self.gpu is not None:
            self._other_gpu(self.gpu)
        if self.network is not None:
            self._other_network(self.network)
        return PredictionVariant(
            self.fitted, self.trial, self.model, self.draws, tuple(self.assumptions), self.guessed, self.gpu
        )

    def _scale(self, name: str, factor: float, spread: float) -> None:
        noise = spread * self.rng.standard_normal((DRAWS, 1))
        self.draws[name] = self.draws[name] + math.log(factor) + noise

    def _assume(self, part: str, taken: str, measurement: str) -> None:
        self.assumptions.append(Assumption(part, taken, measurement))

    def _guess(self, part: str, taken: str, measurement: str) -> None:
        """Assumes what decides the answer and was not measured."""
        self._assume(part, taken, measurement)
        self.guessed = True

    def _other_model(self) -> None:
        """Scale what the model decides, by its FLOPs; by its parameters where nothing else is known of it.

        Raises:
            RequestError: the FLOPs or parameters of the measured or of the other model are unknown.
        """
        flops_ratio = _ratio(model_cost.training_flops(self.trial.model), model_cost.training_flops(self.base.model))
        parameter_ratio = _ratio(model_cost.parameters(self.trial.model), model_cost.parameters(self.base.model))
        has_stated_parameters = self.trial.model.parameter_count is not None
        if has_stated_parameters and parameter_ratio is not None:
            self._scale_by_stated_parameters(parameter_ratio)
            return
        if flops_ratio is None or parameter_ratio is None:
            raise RequestError(
                "the model cannot be exchanged: the FLOPs of the measured or of the wanted one are unavailable",
                next_step="Name models that can be counted here: vit-b16, or where torch is installed any of the hub",
            )
        self._scale("compute", flops_ratio, _SPREAD_OF_MODELS)
        self._scale("optimizer", parameter_ratio, _SPREAD_OF_MODELS)
        self._guess(
            "compute of another model",
            f"{flops_ratio:.3g} times, as its FLOPs are, within 25 %",
            "a study of one rank with it",
        )

    def _scale_by_stated_parameters(self, parameter_ratio: float) -> None:
        """Scale compute by parameters x pixels of an image, since the FLOPs of the other model are unknown.

        The optimizer is scaled by the parameters alone.

        Args:
            parameter_ratio: the stated parameters of the other model over those of the measured one.
        """
        side_ratio = self.trial.model.image_size / self.base.model.image_size
        compute_ratio = parameter_ratio * side_ratio**2
        self._scale("compute", compute_ratio, _SPREAD_OF_STATED_SIZES)
        self._scale("optimizer", parameter_ratio, _SPREAD_OF_MODELS)
        self._guess(
            "compute of another model",
            f"{compute_ratio:.3g} times, as parameters x pixels are, within a factor of 2.7: its FLOPs are unknown",
            "a study of one rank with it; or predict where it can be traced (torch installed, its files there)",
        )

    def _other_split(self) -> None:
        share = compute_share(self.trial) / compute_share(self.base)
        self._scale("compute", share, _SPREAD_OF_SPLITS)
        self._guess(
            "compute of ranks that share a model",
            f"{share:.3g} times, as their share of its products is, within 15 %",
            "a short study with this [parallel]",
        )

    def _other_precision(self) -> None:
        speed = {"fp32": 1.0, "bf16": 2.5, "fp16": 2.5, "bf16-params": 2.5}
        factor = speed[self.base.train.precision] / speed[self.trial.train.precision]
        self._scale("compute", factor, _SPREAD_OF_PRECISIONS)
        self._guess(
            "another precision", f"{factor:.3g} times the compute, within a factor of 1.6", "run the study with it"
        )

    def _other_network(self, across: Link) -> None:
        known = self.model.network
        inside = {key: link for key, link in known.by_operation.items() if key[0] == "inside"}
        of_two = {key: link for key, link in known.between_two.items() if key[0] == "inside"}
        self.model = replace(self.model, network=Network(known.inside, across, inside, of_two))
        for name, spread in (("bandwidth", across.bandwidth_spread), ("latency", across.latency_spread)):
            self.draws[f"{name} across"] = spread * spread_out_normals(self.rng, DRAWS)

    def _other_gpu(self, gpu: GpuType) -> None:
        old = common_type(self.fitted.points[-1].devices)
        normals = spread_out_normals(self.rng, DRAWS), spread_out_normals(self.rng, DRAWS)
        factors = time_factors(old, gpu, self.trial.train.precision, normals)
        middle = float(np.median(factors))
        self.draws["compute"] = self.draws["compute"] + factors
        self._scale("optimizer", math.exp(optimizer_factor(old, gpu)), _SPREAD_OF_MODELS)
        # Hosts of faster GPUs have faster links. By how much is not known: half of the logarithm, more or less.
        links = _LINKS_FOLLOW * middle
        spread = math.hypot(_SPREAD_OF_LINKS, links)
        self._scale("bandwidth inside", math.exp(-links), spread)
        self._scale("transfer share", math.exp(links - middle), spread)
        low, high = (math.exp(end) for end in np.quantile(factors, [0.05, 0.95]))
        self._guess(
            f"another GPU ({gpu.name} for {old.name})",
            f"{math.exp(middle):.2g} times the compute, {low:.2g} to {high:.2g}, by matrix rate and memory bandwidth",
            f"a study of one rank on {gpu.name}",
        )
        if PRECISION in self.fitted.points[-1].assumed:
            taken = f"{self.trial.train.precision}, which their import does not tell"
            self._assume("precision of the measured runs", taken, "say --precision")
        self._assume("network inside its hosts", "faster as half of what the GPUs are", "`vitscale check` on one host")

    def _other_engine(self) -> None:
        sent = messages(self.trial)
        train = self.trial.train
        if sent is None:
            raise RequestError(
                f"what engine {train.engine!r} sends for this model is unavailable",
                next_step="Name a model whose shape is known (vit-b16) and an engine that is measured or modelled",
            )
        norms = norm_messages(self.trial) or ()
        self.model = replace(
            self.model,
            messages=sent,
            norms=norms,
            parallel=self.trial.parallel,
            second_shard_ranks=engines.wrapper_facts(train).second_shard_ranks(train),
            filling=filling(self.trial),
            shards_optimizer=engines.wrapper_facts(train).shards(train),
        )
        if _wrapping(self.base) != _wrapping(self.trial):
            self.draws["overlap"] = _SPREAD_OF_ENGINES * self.rng.standard_normal((DRAWS, 1))
            self._guess(
                "an engine that was not measured",
                "what it sends and hides, by arithmetic, within 30 %",
                "a study with it",
            )
        if self.fitted.model.messages is None:
            self.guessed = True


def _ratio(other: int | None, measured: int | None) -> float | None:
    """Return a count of another model over that of the measured one; None where one of the two is unknown."""
    if not other or not measured:
        return None
    return other / measured


def _wrapping(trial: Trial) -> tuple[object, ...]:
    """Return what decides the messages of an engine, and how it hides them."""
    train = trial.train
    facts = engines.wrapper_facts(train)
    variant = tuple(getattr(train, option) for option in facts.name_options)
    return (train.wrapper, variant, train.bucket_mib, trial.parallel.replicate, facts.second_shard_ranks(train))
