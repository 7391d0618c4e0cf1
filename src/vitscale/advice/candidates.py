"""What could be rented and trained: every engine, batch and rank count that the model and the precision allow."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress, product
from typing import TYPE_CHECKING

from vitscale.advice.comparable_series import ComparableSeries, measured_micro_batches
from vitscale.engines import of_engine
from vitscale.engines.checks import check, computation
from vitscale.engines.variants import PROPOSED, EngineVariant
from vitscale.errors import RequestError
from vitscale.prediction.configurations import Candidate
from vitscale.prediction.evidence import Series
from vitscale.prediction.layouts import MOST_RANKS, equal_hosts, host_size
from vitscale.prediction.step.messages import messages
from vitscale.study.model_checks import check_split
from vitscale.trial.model_cost import most_stages
from vitscale.trial.model_spec import ModelSpec
from vitscale.trial.parallel import NO_SPLIT, ParallelSpec
from vitscale.trial.script import placeholders
from vitscale.trial.trial import WRAPPER_FIELDS, TrainSpec

if TYPE_CHECKING:
    from vitscale.prediction.instances import Instance  # with readers of tables

BEYOND = 8
"""Times the largest measured count up to which counts are looked at, where the user does not say."""
_HOSTS_ONE_BY_ONE = 16
"""Hosts up to which every count of hosts is looked at; beyond, four to each doubling."""


def rank_counts(
    series: Sequence[Series], *, gpus: tuple[int, ...] | None, max_gpus: int | None, ranks_per_node: int | None
) -> tuple[tuple[int, int], ...]:
    """(ranks, ranks on each host) in rising order of ranks.

    Without `gpus`: powers of two, what was measured, and whole hosts, up to `max_gpus`.

    Args:
        series: the measured ones.
        gpus: exactly these counts.
        max_gpus: the largest count. None: eight times the largest measured one.
        ranks_per_node: ranks of a full host. None: as `layouts.host_size` has it, and a count of `gpus` that does not
            fill such hosts lies on smaller, equal ones.

    Raises:
        RequestError: a count of `gpus` does not fill its hosts, or no count is left.
    """
    points = [point for own in series for point in own.points]
    per_node = ranks_per_node or host_size(points)[0]
    measured = {point.gpus for point in points}
    if gpus is not None:
        uneven = [count for count in gpus if count > per_node and count % per_node]
        if uneven and ranks_per_node is not None:
            raise RequestError(
                f"{uneven[0]} ranks do not fill hosts of {per_node}",
                valid=[f"multiples of {per_node}, or fewer than that"],
                next_step="Say how many ranks a host has with --nodes-of",
            )
        wanted = set(gpus)
    else:
        most = min(MOST_RANKS, BEYOND * max(measured) if max_gpus is None else max_gpus)
        wanted = {2**power for power in range(most.bit_length())} | measured
        wanted |= {per_node * hosts for hosts in _hosts(most // per_node)}
        wanted = {count for count in wanted if count <= most and (count <= per_node or count % per_node == 0)}
    if max_gpus is not None:
        wanted = {count for count in wanted if count <= max_gpus}
    if not wanted:
        raise RequestError("no rank count is left", next_step="Raise --max-gpus, or leave --gpus out")
    return tuple((count, equal_hosts(count, per_node)) for count in sorted(wanted))


def counts_of(
    instance: Instance, series: Sequence[Series], gpus: tuple[int, ...] | None, max_gpus: int | None
) -> tuple[int, ...]:
    """Rank counts on whole instances: those of `gpus`, else up to `max_gpus`.

    Without either they go up to eight times the largest measured count; one instance is then looked at in any case.
    """
    largest = max(point.gpus for own in series for point in own.points)
    most = min(MOST_RANKS, max(instance.gpus, BEYOND * largest) if max_gpus is None else max_gpus)
    if gpus is not None:
        limit = max(gpus) if max_gpus is None else max_gpus
        return tuple(sorted({count for count in gpus if count <= limit and count % instance.gpus == 0}))
    hosts = _hosts(most // instance.gpus)
    return tuple(sorted(n * instance.gpus for n in hosts if n & (n - 1) == 0 or instance.gpus > 1))


def _hosts(most: int) -> set[int]:
    counts = set(range(1, min(most, _HOSTS_ONE_BY_ONE) + 1))
    quarters = (4, 5, 6, 7)
    return counts | {
        hosts for power in range(2, most.bit_length()) for four in quarters if (hosts := four * 2**power) <= most
    }


_SMALLER, _LARGER = 4, 3
"""Powers of two by which micro-batches go below the smallest measured one, and beyond the largest."""
_ACCUMULATIONS = (1, 2, 4)
"""Accumulations of candidates that train with another global batch."""
_MOST_IMAGES = 1_000_000
"""Most images of a micro-batch: `trial.BatchCount`."""


@dataclass(frozen=True)
class Candidates:
    """All candidates, which of them keep the study's global batch, and what was not even looked at."""

    combinations: tuple[Candidate, ...]
    keeps_batch: tuple[bool, ...]
    """Whether a candidate has a global batch that the study's policy gives at its rank count, or was measured."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Engine, as a reader would call it -> why it cannot train this."""
    indivisible: tuple[int, ...] = ()
    """Rank counts over which the study's one global batch does not divide."""

    def beside(self, other: Candidates) -> Candidates:
        """These candidates and others."""
        return replace(
            self,
            combinations=self.combinations + other.combinations,
            keeps_batch=self.keeps_batch + other.keeps_batch,
            refused={**self.refused, **other.refused},
        )


def candidates(
    comparable: ComparableSeries, counts: tuple[tuple[int, int], ...], *, hosts_given: bool = False
) -> Candidates:
    """Every combination of engine, stage, micro-batch, accumulation, checkpointing and rank count.

    What was measured at one of the rank counts is among them.

    Args:
        comparable: the series to advise about.
        counts: (ranks, ranks on each host).
        hosts_given: whether ranks must lie on hosts as in `counts`; else they may also lie as they were measured.
    """
    variants, refused = _variants(comparable)
    ladder, trainable = _micro_batches(comparable), _trainable(comparable)
    every: list[Candidate] = []
    keeps: list[bool] = []
    indivisible = []
    for gpus, per_node in counts:
        own = shares_of_batch(comparable, gpus)
        if not own:
            indivisible.append(gpus)
        batches = {batch: True for share in own for batch in _kept(share, ladder)}
        for micro_batch in ladder:
            for accum in _ACCUMULATIONS:
                batches.setdefault((micro_batch, accum), False)
        for variant in variants:
            if of_engine(variant.engine).alone and gpus > 1:
                continue
            for (micro_batch, accum), kept in batches.items():
                for checkpointing in trainable(micro_batch, accum):
                    every.append(Candidate(gpus, per_node, variant, micro_batch, accum, checkpointing))
                    keeps.append(kept)
    per_host = dict(counts)
    measured = {
        replace(candidate, activation_checkpointing=checkpointing)
        for candidate in comparable.measured
        if (host := per_host.get(candidate.gpus)) is not None
        and candidate.gpus % candidate.ranks_per_node == 0  # a study cannot ask for a host that is not full
        and not (hosts_given and candidate.ranks_per_node != min(candidate.gpus, host))
        for checkpointing in trainable(candidate.micro_batch, candidate.grad_accum)
    }
    counts_of_runs = {candidate.gpus for candidate in measured}
    known = [candidate.gpus in counts_of_runs and candidate in measured for candidate in every]
    keeps = [kept or of_a_run for kept, of_a_run in zip(keeps, known, strict=True)]
    # Pairs stay together, first the one without checkpointing.
    for candidate in sorted(measured.difference(compress(every, known)), key=_in_pairs):
        every.append(candidate)
        keeps.append(True)
    return Candidates(tuple(every), tuple(keeps), refused, tuple(indivisible))


def _in_pairs(candidate: Candidate) -> tuple[str, bool]:
    return str(replace(candidate, activation_checkpointing=False)), candidate.activation_checkpointing


def _trainable(comparable: ComparableSeries) -> Callable[[int, int], tuple[bool, ...]]:
    """(micro-batch, accumulation) -> which can be trained: without recomputed activations, with them, or both.

    A script of the user's own trains what it trained, or what an argument tells it to.
    """
    train = comparable.trial.train
    told = placeholders(train.arguments)
    batches = {(candidate.micro_batch, candidate.grad_accum) for candidate in comparable.measured}
    micro_batches, accums = ({batch[index] for batch in batches} for index in (0, 1))

    def of_batch(micro_batch: int, accum: int) -> tuple[bool, ...]:
        if train.script is None:
            return (False, True)
        both = (False, True) if "activation_checkpointing" in told else (train.activation_checkpointing,)
        can = micro_batch in micro_batches or not told.isdisjoint(("micro_batch", "global_batch"))
        return both if can and (accum in accums or "grad_accum" in told) else ()

    return of_batch


_MOST_ALONG = 64
"""Most stages, and most ranks that share the tokens."""


def of_shared_models(comparable: ComparableSeries, counts: tuple[tuple[int, int], ...]) -> Candidates:
    """Candidates whose ranks share models, with the study's own global batches and with pipelines of 1F1B.

    Ranks share by powers of two along each axis that the model and an engine allow, and as they were measured. Ranks
    that cut matrices share a host.

    Args:
        comparable: the series to advise about.
        counts: (ranks, ranks on each host).
    """
    variants, _ = _variants(comparable)
    ladder = _micro_batches(comparable)
    trial, sharing = comparable.trial, list[Candidate]()
    splits = list(_splits(trial.model, max((local for _, local in counts), default=1)))
    splits += {point.trial.parallel for series in comparable.members for point in series.points} - {NO_SPLIT, *splits}
    for variant in variants:
        train = with_variant(trial.train, variant)
        # With enough micro-batches for every schedule.
        many = train.model_copy(update={"grad_accum": _MOST_ALONG})
        for parallel in filter(lambda split: not _refused(split, many, trial.model), splits):
            for gpus, per_node in counts:
                if gpus % parallel.ranks_per_model or per_node % min(per_node, parallel.tensor):
                    continue
                shares = sorted(shares_of_batch(comparable, gpus, parallel.ranks_per_model))
                for micro_batch, accum in dict.fromkeys(batch for share in shares for batch in _kept(share, ladder)):
                    if _refused(parallel, train.model_copy(update={"grad_accum": accum}), trial.model):
                        continue
                    sharing += [
                        Candidate(gpus, per_node, variant, micro_batch, accum, again, None, parallel)
                        for again in (False, True)
                    ]
    return Candidates(tuple(sharing), (True,) * len(sharing))


def _splits(model: ModelSpec, ranks_per_node: int) -> Iterator[ParallelSpec]:
    def powers(most: int) -> list[int]:
        return [2**power for power in range(most.bit_length()) if 2**power <= most]

    for tensor, sequence, pipeline in product(
        powers(ranks_per_node), powers(_MOST_ALONG), powers(min(_MOST_ALONG, most_stages(model) or 1))
    ):
        parallel = ParallelSpec(tensor=tensor, sequence=sequence, pipeline=pipeline)
        if parallel != NO_SPLIT and (model.heads or 1) % (tensor * sequence) == 0:
            yield parallel


def _refused(parallel: ParallelSpec, train: TrainSpec, model: ModelSpec) -> bool:
    """Whether a study with this split would be refused."""
    try:
        check_split(parallel, train, model)
    except RequestError:
        return True
    return False


def rented(
    comparable: ComparableSeries, instances: Sequence[Instance], gpus: tuple[int, ...] | None, max_gpus: int | None
) -> Candidates:
    """Candidates on whole instances, with only the engines that were measured and the study's own batches.

    Raises:
        RequestError: none of them trains in the study's precision, or comes to the counts asked for.
    """
    ladder, trainable = _micro_batches(comparable), _trainable(comparable)
    refused = {}
    for gpu in dict.fromkeys(instance.gpu for instance in instances):
        try:
            gpu.flops_per_second(comparable.trial.train.precision)
        except RequestError as error:
            refused[gpu.name] = str(error)
    counts = {each: counts_of(each, comparable.members, gpus, max_gpus) for each in instances}
    for instance in instances:
        if not counts[instance] and instance.gpu.name not in refused:
            refused[instance.name] = "no whole number of them has a rank count that was asked for"
    on_instances = [
        Candidate(ranks, instance.gpus, variant, *batch, checkpointing, instance)
        for instance in instances
        if instance.gpu.name not in refused
        for ranks in counts[instance]
        for variant in sorted(comparable.variants)
        if not of_engine(variant.engine).alone or ranks == 1
        for batch in dict.fromkeys(
            b for share in sorted(shares_of_batch(comparable, ranks)) for b in _kept(share, ladder)
        )
        for checkpointing in trainable(*batch)
    ]
    if not on_instances:
        raise RequestError("no instance can train this", next_step="; ".join(dict.fromkeys(refused.values())))
    return Candidates(tuple(on_instances), (True,) * len(on_instances), refused)


def shares_of_batch(comparable: ComparableSeries, gpus: int, ranks_per_model: int = 1) -> frozenset[int]:
    """Images per model and optimizer step by the study's batch policy, for each batch that it was measured with.

    There are none where no batch divides.

    Args:
        comparable: the series to advise about.
        gpus: ranks, a multiple of `ranks_per_model`.
        ranks_per_model: ranks that share a model; 1: each has its own.
    """
    trials = [series.points[-1].trial for series in comparable.of_the_policy]
    if comparable.reference.mode == "strong-global":
        batches = {(trial.global_batch * ranks_per_model, gpus) for trial in trials}
    else:  # a rank's part of the global batch stays, whoever shares its model
        batches = {
            (trial.train.micro_batch * trial.train.grad_accum * ranks_per_model, trial.parallel.ranks_per_model)
            for trial in trials
        }
    return frozenset(images // among for images, among in batches if images % among == 0)


def _variants(comparable: ComparableSeries) -> tuple[list[EngineVariant], dict[str, str]]:
    """(engines that can train this, measured ones first; why others cannot)."""
    kept = sorted(comparable.variants)
    refused = {}
    # A script distributes training itself; no other engine has the optimizer of the user's own DeepSpeed file.
    own = comparable.trial.train.script is not None or comparable.trial.train.optimizer == "deepspeed_config"
    for variant in () if own else PROPOSED:
        if variant in comparable.variants:
            continue
        train = with_variant(comparable.trial.train, variant)
        try:
            check(train)
        except RequestError as error:
            refused[variant.name] = str(error)
            continue
        trial = comparable.trial.model_copy(update={"train": train})
        if computation(trial) != computation(comparable.trial):
            refused[variant.name] = "it trains otherwise than what was measured"
        elif messages(trial) is None:
            refused[variant.name] = "no run used it, and what it sends for this model is unavailable"
        else:
            kept.append(variant)
    return kept, refused


def as_configured(own: TrainSpec, candidate: Candidate) -> TrainSpec:
    """How a candidate would train, where what is measured trains as `own`."""
    train = with_variant(own, candidate.variant)
    changes = {name: getattr(candidate, name) for name in ("micro_batch", "grad_accum", "activation_checkpointing")}
    return train.model_copy(update=changes)


def with_variant(train: TrainSpec, variant: EngineVariant) -> TrainSpec:
    """The same training under another wrapper at its defaults; unchanged under the one it has."""
    if EngineVariant.of_train(train) == variant:
        return train
    defaults = {name: TrainSpec.model_fields[name].default for name in WRAPPER_FIELDS - {"engine"}}
    return train.model_copy(update=defaults | variant.changes)


def _micro_batches(comparable: ComparableSeries) -> tuple[int, ...]:
    """Micro-batches that were measured, and powers of two times the smallest and the largest."""
    measured = measured_micro_batches(comparable.members)
    least, most = min(measured), max(measured)
    sizes = set(measured)
    sizes |= {least >> power for power in range(1, _SMALLER + 1) if least % (1 << power) == 0}
    sizes |= {most << power for power in range(1, _LARGER + 1)}
    return tuple(sorted(size for size in sizes if 1 <= size <= _MOST_IMAGES))


def _kept(share: int, ladder: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """(micro-batch, accumulation) whose product is a rank's share of the global batch."""
    for micro_batch in sorted({*ladder, share}):
        if share % micro_batch == 0 and micro_batch <= _MOST_IMAGES:
            yield micro_batch, share // micro_batch
