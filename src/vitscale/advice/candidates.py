"""What could be rented and trained: every engine, batch and rank count that the model and the precision allow.

candidate    a configuration: engine variant, ranks and hosts, micro-batch, accumulation, checkpointing
variant      an engine with those options that decide how it distributes training (deepspeed ZeRO-2)
split        how ranks share one model: by tensors, sequences or pipeline stages; usually they do not
share        images that one model takes of a global batch
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import compress, product
from typing import TYPE_CHECKING, NamedTuple

from vitscale.advice.comparable_series import ComparableSeries, measured_micro_batches
from vitscale.engines import of_engine, wrapper_facts
from vitscale.engines.checks import check, computation, takes_ranks
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
from vitscale.trial.trial import WRAPPER_FIELDS, TrainSpec, Trial

if TYPE_CHECKING:
    from vitscale.prediction.instances import Instance  # with readers of tables

_FARTHEST_TIMES_MEASURED = 8
"""Times the largest measured count up to which counts are candidates, where the user does not say."""
_HOSTS_ONE_BY_ONE = 16
"""Hosts up to which every count of hosts is looked at; beyond, four to each doubling."""


class RankCount(NamedTuple):
    """A number of ranks, and how they lie on equal hosts."""

    gpus: int
    """The ranks, whatever their device."""
    ranks_per_node: int


class _Batch(NamedTuple):
    """How a model's share of a global batch is trained: in `grad_accum` micro-batches."""

    micro_batch: int
    grad_accum: int


def rank_counts(
    series: Sequence[Series], *, gpus: tuple[int, ...] | None, max_gpus: int | None, ranks_per_node: int | None
) -> tuple[RankCount, ...]:
    """Return the rank counts of candidates, in rising order.

    Args:
        series: the measured series.
        gpus: exactly these counts. None: powers of two, measured counts and whole hosts, up to `max_gpus`.
        max_gpus: the largest count. None: eight times the largest measured one.
        ranks_per_node: ranks of a full host. None: as `layouts.host_size` has it, and a count of `gpus` that does not
            fill such hosts lies on smaller, equal ones.

    Raises:
        RequestError: a count of `gpus` does not fill its hosts, or no count is left.
    """
    points = [point for member in series for point in member.points]
    measured_host, _ = host_size(points)
    full_host = ranks_per_node or measured_host
    if gpus is None:
        counts = _usual_counts({point.gpus for point in points}, max_gpus, full_host)
    else:
        counts = set(gpus)
        if ranks_per_node is not None:
            _refuse_uneven_counts(gpus, ranks_per_node)
    if max_gpus is not None:
        counts = {count for count in counts if count <= max_gpus}
    if not counts:
        raise RequestError("no rank count is left", next_step="Raise --max-gpus, or leave --gpus out")
    return tuple(RankCount(count, equal_hosts(count, full_host)) for count in sorted(counts))


def _refuse_uneven_counts(counts: Sequence[int], full_host: int) -> None:
    """Raise RequestError where a count takes several hosts and does not fill them. Args: full_host: its ranks."""
    uneven = [count for count in counts if count > full_host and count % full_host != 0]
    if uneven:
        raise RequestError(
            f"{uneven[0]} ranks do not fill hosts of {full_host}",
            valid=[f"multiples of {full_host}, or fewer than that"],
            next_step="Say how many ranks a host has with --nodes-of",
        )


def _usual_counts(measured: set[int], max_gpus: int | None, full_host: int) -> set[int]:
    """Return powers of two, measured counts and whole hosts, as far as they fit on one host or fill all of theirs.

    Args:
        measured: the measured counts.
        max_gpus: the largest count. None: eight times the largest measured one.
        full_host: ranks of a full host.
    """
    requested_limit = _FARTHEST_TIMES_MEASURED * max(measured) if max_gpus is None else max_gpus
    limit = min(MOST_RANKS, requested_limit)
    counts = {*measured, *_powers_of_two(limit)}
    counts |= {full_host * hosts for hosts in _host_counts(limit // full_host)}
    within_limit = {count for count in counts if count <= limit}
    return {count for count in within_limit if count <= full_host or count % full_host == 0}


def rank_counts_on_instances(
    instance: Instance, series: Sequence[Series], gpus: tuple[int, ...] | None, max_gpus: int | None
) -> tuple[int, ...]:
    """Return the rank counts that fill whole instances, in rising order.

    Args:
        instance: the kind of instance.
        series: the measured series.
        gpus: exactly these counts, as far as they fill instances. None: all numbers of instances up to `max_gpus`.
        max_gpus: the largest count. None: eight times the largest measured one, but at least one instance.
    """
    if gpus is not None:
        limit = max(gpus) if max_gpus is None else max_gpus
        within_limit = {count for count in gpus if count <= limit}
        return tuple(sorted(count for count in within_limit if count % instance.gpus == 0))
    if max_gpus is None:
        largest_measured = max(point.gpus for member in series for point in member.points)
        max_gpus = max(instance.gpus, _FARTHEST_TIMES_MEASURED * largest_measured)
    limit = min(MOST_RANKS, max_gpus)
    instance_counts = _host_counts(limit // instance.gpus)
    if instance.gpus == 1:
        instance_counts = {count for count in instance_counts if count.bit_count() == 1}  # powers of two
    return tuple(sorted(count * instance.gpus for count in instance_counts))


def _host_counts(limit: int) -> set[int]:
    """Return numbers of hosts up to `limit`: each up to 16, then 4, 5, 6 and 7 times each power of two."""
    counts = set(range(1, min(limit, _HOSTS_ONE_BY_ONE) + 1))
    for power in range(2, limit.bit_length()):
        counts |= {times * 2**power for times in (4, 5, 6, 7)}
    return {count for count in counts if count <= limit}


_HALVINGS = 4
"""Powers of two by which micro-batches go below the smallest measured one."""
_DOUBLINGS = 3
"""Powers of two by which micro-batches go beyond the largest measured one."""
_ACCUMULATIONS = (1, 2, 4)
"""Accumulations of candidates that train with another global batch."""
_LARGEST_MICRO_BATCH = 1_000_000
"""Most images of a micro-batch: `trial.BatchCount`."""


@dataclass(frozen=True)
class Candidates:
    """All candidates, which of them keep the study's global batch, and what is no candidate."""

    combinations: tuple[Candidate, ...]
    keeps_batch: tuple[bool, ...]
    """For each of them whether its global batch is one that the study's policy gives at its rank count, or was
    measured."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Engine, as a reader would call it -> why it cannot train this."""
    indivisible: tuple[int, ...] = ()
    """Rank counts over which the study's one global batch does not divide."""

    def joined_with(self, other: Candidates) -> Candidates:
        """Return these candidates and others together."""
        return replace(
            self,
            combinations=self.combinations + other.combinations,
            keeps_batch=self.keeps_batch + other.keeps_batch,
            refused={**self.refused, **other.refused},
        )


def candidates(
    comparable: ComparableSeries, counts: Sequence[tuple[int, int]], *, hosts_given: bool = False
) -> Candidates:
    """Return every combination of engine variant, micro-batch, accumulation, checkpointing and rank count.

    What was measured at one of the rank counts is among them. Each rank has a model of its own, else see
    `shared_model_candidates`. Over which ranks weights are sharded is in `_possible_shardings`.

    Args:
        comparable: the series to advise about.
        counts: (ranks, ranks on each host), as `rank_counts` has them.
        hosts_given: whether ranks must lie on hosts as in `counts`; else they may also lie as they were measured.
    """
    variants, refused = _engine_variants(comparable)
    micro_batches = _micro_batches(comparable)
    trainable = _Trainable.of(comparable)
    combinations: list[Candidate] = []
    keeps_by_policy: list[bool] = []  # for each combination
    indivisible = []
    for gpus, per_node in counts:
        shares = shares_of_batch(comparable, gpus)
        if not shares:
            indivisible.append(gpus)
        keeps_by_batch = _keeps_by_batch(shares, micro_batches)
        for variant in variants:
            if of_engine(variant.engine).alone and gpus > 1:
                continue
            shardings = _possible_shardings(comparable, variant, RankCount(gpus, per_node))
            for sharding, (batch, keeps) in product(shardings, keeps_by_batch.items()):
                for checkpointing in trainable.checkpointing_options(*batch):
                    combinations.append(
                        Candidate(gpus, per_node, variant, *batch, checkpointing, instance=None, **sharding._asdict())
                    )
                    keeps_by_policy.append(keeps)

    measured = _measured_candidates(comparable, trainable, dict(counts), hosts_given)
    measured_counts = {candidate.gpus for candidate in measured}  # a look at the count first saves most look-ups
    was_measured = [candidate.gpus in measured_counts and candidate in measured for candidate in combinations]
    keeps_batch = [keeps or is_measured for keeps, is_measured in zip(keeps_by_policy, was_measured, strict=True)]
    # Those measured with a batch, or on hosts, that no combination has.
    other_measured = measured.difference(compress(combinations, was_measured))
    combinations += sorted(other_measured, key=_pair_order)
    keeps_batch += [True] * len(other_measured)
    return Candidates(tuple(combinations), tuple(keeps_batch), refused, tuple(indivisible))


class _Sharding(NamedTuple):
    """Over which ranks weights are sharded; the fields are those of `Candidate`."""

    parallel: ParallelSpec = NO_SPLIT
    """With the replicas."""
    second_shard_ranks: int = 1


def _possible_shardings(comparable: ComparableSeries, variant: EngineVariant, count: RankCount) -> Iterator[_Sharding]:
    """Yield the shardings to choose from: over all ranks, and such that weights are gathered within a host.

    On several hosts of several ranks an engine that takes replicas has one on each host: shards are gathered over fast
    links, and only gradients of shards travel between hosts. One that takes second shards has one on each host, from
    which weights are gathered again. Second shards of as many ranks as were measured are among them.
    """
    train = with_variant(comparable.trial.train, variant)
    hosts = count.gpus // count.ranks_per_node
    has_fast_groups = hosts > 1 and count.ranks_per_node > 1
    second_shards = {1, *comparable.second_shard_ranks(variant)}
    if has_fast_groups:
        second_shards.add(count.ranks_per_node)
    for ranks in sorted(second_shards):
        if _takes_second_shard(train, ranks, count.gpus):
            yield _Sharding(second_shard_ranks=ranks)
    if has_fast_groups and wrapper_facts(train).replicates:
        yield _Sharding(ParallelSpec(replicate=hosts))


def _takes_second_shard(train: TrainSpec, second_shard_ranks: int, ranks: int) -> bool:
    """Whether so many ranks can train with a second shard of the weights in groups of `second_shard_ranks`; 1: none.

    A DeepSpeed file that asks for such groups itself decides alone.
    """
    without_groups = train.model_copy(update={"hpz": 1})
    if second_shard_ranks == 1:
        return takes_ranks(without_groups, ranks)
    has_groups_of_file = wrapper_facts(train).second_shard_ranks(without_groups) > 1
    with_groups = train.model_copy(update={"hpz": second_shard_ranks})
    return not has_groups_of_file and _is_trainable(with_groups) and takes_ranks(with_groups, ranks)


def _is_trainable(train: TrainSpec) -> bool:
    """Whether the engine takes a [train]."""
    try:
        check(train)
    except RequestError:
        return False
    return True


def _keeps_by_batch(shares: Iterable[int], micro_batches: Sequence[int]) -> dict[_Batch, bool]:
    """Return batch of a rank -> whether it keeps the study's global batch; those that do come first.

    Args:
        shares: a rank's images of each global batch of the study.
        micro_batches: the micro-batches of candidates.
    """
    keeps_by_batch: dict[_Batch, bool] = {}
    for share in shares:
        for batch in _batches_of_share(share, micro_batches):
            keeps_by_batch[batch] = True
    for micro_batch, accum in product(micro_batches, _ACCUMULATIONS):
        batch = _Batch(micro_batch, accum)
        if batch not in keeps_by_batch:
            keeps_by_batch[batch] = False
    return keeps_by_batch


def _measured_candidates(
    comparable: ComparableSeries, trainable: _Trainable, ranks_per_node: Mapping[int, int], hosts_given: bool
) -> set[Candidate]:
    """Return what was measured at one of the rank counts, with activation checkpointing and without.

    Args:
        comparable: the series to advise about.
        trainable: what can be trained.
        ranks_per_node: rank count -> ranks on each host.
        hosts_given: whether ranks must lie on hosts like that.
    """
    measured = set()
    for candidate in comparable.series_by_candidate:
        planned_ranks_per_node = ranks_per_node.get(candidate.gpus)
        has_partly_filled_host = candidate.gpus % candidate.ranks_per_node != 0
        if planned_ranks_per_node is None or has_partly_filled_host:
            continue  # a study cannot ask for a host that is not full
        if hosts_given and candidate.ranks_per_node != min(candidate.gpus, planned_ranks_per_node):
            continue
        for checkpointing in trainable.checkpointing_options(candidate.micro_batch, candidate.grad_accum):
            measured.add(replace(candidate, activation_checkpointing=checkpointing))
    return measured


def _pair_order(candidate: Candidate) -> tuple[str, bool]:
    """Return a sort key by which candidates that differ in checkpointing alone are neighbours, first without it."""
    return str(replace(candidate, activation_checkpointing=False)), candidate.activation_checkpointing


@dataclass(frozen=True)
class _Trainable:
    """Which batches can be trained, and whether with recomputed activations.

    vitscale's own training takes every batch. A user's script takes the batches that it was measured with, and others
    if it has a command-line argument for them.
    """

    train: TrainSpec
    """How the series trains."""
    micro_batches: frozenset[int]
    """The measured micro-batches."""
    accumulations: frozenset[int]
    """The measured accumulations."""

    @classmethod
    def of(cls, comparable: ComparableSeries) -> _Trainable:
        """Collects the measured batches."""
        return cls(
            train=comparable.trial.train,
            micro_batches=frozenset(candidate.micro_batch for candidate in comparable.series_by_candidate),
            accumulations=frozenset(candidate.grad_accum for candidate in comparable.series_by_candidate),
        )

    def checkpointing_options(self, micro_batch: int, grad_accum: int) -> tuple[bool, ...]:
        """Return whether a batch can be trained with activation checkpointing, without it (False), or both ways.

        Empty where it cannot be trained.
        """
        if self.train.script is None:
            return (False, True)
        arguments = self._arguments
        takes_micro_batch = "micro_batch" in arguments or "global_batch" in arguments
        if micro_batch not in self.micro_batches and not takes_micro_batch:
            return ()
        if grad_accum not in self.accumulations and "grad_accum" not in arguments:
            return ()
        return (False, True) if "activation_checkpointing" in arguments else (self.train.activation_checkpointing,)

    @cached_property
    def _arguments(self) -> Set[str]:
        """The fields of a trial that the script takes as command-line arguments."""
        return placeholders(self.train.arguments)


_LARGEST_SPLIT = 64
"""Most stages of a pipeline, and most ranks that share the tokens of an image."""


def shared_model_candidates(comparable: ComparableSeries, counts: Sequence[tuple[int, int]]) -> Candidates:
    """Return candidates whose ranks share models, with the study's own global batches and with pipelines of 1F1B.

    Ranks share by powers of two along each axis that the model and an engine allow, and as they were measured. Ranks
    that cut matrices share a host.

    Args:
        comparable: the series to advise about.
        counts: (ranks, ranks on each host), as `rank_counts` has them.
    """
    variants, _ = _engine_variants(comparable)
    micro_batches = _micro_batches(comparable)
    trial = comparable.trial
    combinations: list[Candidate] = []
    largest_host = max((per_node for _, per_node in counts), default=1)
    splits = list(_possible_splits(trial.model, ranks_per_node=largest_host))
    splits += _measured_splits(comparable).difference([NO_SPLIT, *splits])
    for variant in variants:
        train = with_variant(trial.train, variant).model_copy(update={"hpz": 1})  # refused where ranks share models
        # A pipeline needs as many micro-batches as stages: a split that is refused even with most is never possible.
        with_most_micro_batches = train.model_copy(update={"grad_accum": _LARGEST_SPLIT})
        for parallel in splits:
            if _is_refused(parallel, with_most_micro_batches, trial.model):
                continue
            for gpus, per_node in counts:
                if _fits_hosts(parallel, gpus, per_node):
                    batches = _study_batches(comparable, gpus, micro_batches, parallel.ranks_per_model)
                    on_hosts = RankCount(gpus, per_node)
                    combinations += _on_split(trial.model, train, variant, parallel, on_hosts, batches)
    return Candidates(tuple(combinations), (True,) * len(combinations))


def _on_split(
    model: ModelSpec,
    train: TrainSpec,
    variant: EngineVariant,
    parallel: ParallelSpec,
    count: RankCount,
    batches: Sequence[_Batch],
) -> Iterator[Candidate]:
    """Yields the candidates under one engine, with one split, on one number of ranks.

    Args:
        model: the model.
        train: training under the engine variant.
        variant: the engine variant.
        parallel: how ranks share a model.
        count: the ranks, and their hosts.
        batches: the batches to choose from; those with too few micro-steps for a pipeline are passed over.
    """
    for micro_batch, accum in batches:
        if _is_refused(parallel, train.model_copy(update={"grad_accum": accum}), model):
            continue
        for checkpointing in (False, True):
            yield Candidate(
                count.gpus,
                count.ranks_per_node,
                variant,
                micro_batch,
                accum,
                checkpointing,
                instance=None,
                parallel=parallel,
            )


def _possible_splits(model: ModelSpec, ranks_per_node: int) -> Iterator[ParallelSpec]:
    """Yields the ways in which ranks may share a model, by powers of two along each axis.

    Args:
        model: the model, which limits the stages and the ranks that share its heads.
        ranks_per_node: most ranks on a host, which limits those that cut matrices.
    """
    stages = min(_LARGEST_SPLIT, most_stages(model) or 1)
    for tensor, sequence, pipeline in product(
        _powers_of_two(ranks_per_node), _powers_of_two(_LARGEST_SPLIT), _powers_of_two(stages)
    ):
        parallel = ParallelSpec(tensor=tensor, sequence=sequence, pipeline=pipeline)
        # Both axes hand whole attention heads to their ranks.
        divides_heads = (model.heads or 1) % (tensor * sequence) == 0
        if parallel != NO_SPLIT and divides_heads:
            yield parallel


def _powers_of_two(limit: int) -> list[int]:
    """Return 1, 2, 4, ... up to `limit`."""
    return [2**power for power in range(limit.bit_length())]


def _measured_splits(comparable: ComparableSeries) -> set[ParallelSpec]:
    """Return the ways in which ranks shared a model in any measured point, `NO_SPLIT` included."""
    return {point.trial.parallel for series in comparable.members for point in series.points}


def _fits_hosts(parallel: ParallelSpec, gpus: int, ranks_per_node: int) -> bool:
    """Whether so many ranks make whole models, and hosts hold whole groups of the ranks that cut matrices.

    Groups that are larger than a host always fit.
    """
    ranks_of_group_on_host = min(ranks_per_node, parallel.tensor)
    return gpus % parallel.least_ranks == 0 and ranks_per_node % ranks_of_group_on_host == 0


def _is_refused(parallel: ParallelSpec, train: TrainSpec, model: ModelSpec) -> bool:
    """Whether a study with this split would be refused."""
    try:
        check_split(parallel, train, model)
    except RequestError:
        return True
    return False


def candidates_on_instances(
    comparable: ComparableSeries, instances: Sequence[Instance], gpus: tuple[int, ...] | None, max_gpus: int | None
) -> Candidates:
    """Return candidates on whole instances, with only the engines that were measured and the study's own batches.

    Args:
        comparable: the series to advise about.
        instances: the instances to choose from.
        gpus: exactly these rank counts; None: all that fill instances up to `max_gpus`.
        max_gpus: the largest rank count; None: see `rank_counts_on_instances`.

    Raises:
        RequestError: none of them trains in the study's precision, or comes to the counts asked for.
    """
    refused_gpus: dict[str, str] = {}
    for gpu in dict.fromkeys(instance.gpu for instance in instances):
        try:
            gpu.flops_per_second(comparable.trial.train.precision)
        except RequestError as error:
            refused_gpus[gpu.name] = str(error)
    refused_instances: dict[str, str] = {}  # apart from GPUs: an instance may be named like its GPU
    combinations: list[Candidate] = []
    for instance in instances:
        if instance.gpu.name in refused_gpus:
            continue
        counts = rank_counts_on_instances(instance, comparable.members, gpus, max_gpus)
        if not counts:
            refused_instances[instance.name] = "no whole number of them has a rank count that was asked for"
        combinations += _on_instances(comparable, instance, counts)
    refused = refused_gpus | refused_instances
    if not combinations:
        raise RequestError("no instance can train this", next_step="; ".join(dict.fromkeys(refused.values())))
    return Candidates(tuple(combinations), (True,) * len(combinations), refused)


def _on_instances(comparable: ComparableSeries, instance: Instance, counts: Sequence[int]) -> Iterator[Candidate]:
    """Yields the candidates on instances of one kind, at each of the rank counts."""
    micro_batches = _micro_batches(comparable)
    trainable = _Trainable.of(comparable)
    for gpus in counts:
        batches = _study_batches(comparable, gpus, micro_batches)
        for variant in sorted(comparable.variants):
            if of_engine(variant.engine).alone and gpus > 1:
                continue
            second_shards = _measured_second_shards(comparable, variant, gpus)
            for second_shard_ranks, (micro_batch, accum) in product(second_shards, batches):
                for checkpointing in trainable.checkpointing_options(micro_batch, accum):
                    yield Candidate(
                        gpus,
                        instance.gpus,
                        variant,
                        micro_batch,
                        accum,
                        checkpointing,
                        instance,
                        second_shard_ranks=second_shard_ranks,
                    )


def _measured_second_shards(comparable: ComparableSeries, variant: EngineVariant, ranks: int) -> list[int]:
    """Return the ranks that shared a second shard in series of a variant, as far as so many ranks can have it.

    1 stands for none. Empty where the variant cannot train on so many ranks.
    """
    train = with_variant(comparable.trial.train, variant)
    measured = sorted(comparable.second_shard_ranks(variant))
    return [second_shard for second_shard in measured if _takes_second_shard(train, second_shard, ranks)]


def _study_batches(
    comparable: ComparableSeries, gpus: int, micro_batches: Sequence[int], ranks_per_model: int = 1
) -> list[_Batch]:
    """Return the batches of a model that keep the study's global batch, each once.

    Args:
        comparable: the series to advise about.
        gpus: ranks, a multiple of `ranks_per_model`.
        micro_batches: the micro-batches of candidates.
        ranks_per_model: ranks that share a model.
    """
    shares = sorted(shares_of_batch(comparable, gpus, ranks_per_model))
    return list(dict.fromkeys(batch for share in shares for batch in _batches_of_share(share, micro_batches)))


def shares_of_batch(comparable: ComparableSeries, gpus: int, ranks_per_model: int = 1) -> frozenset[int]:
    """Return the images per model and optimizer step, for each global batch that the study was measured with.

    They follow from the study's batch policy. Batches that do not divide over the models are left out.

    Example: a strong-global study with a global batch of 512 has 64 images for each of 8 ranks without a split. With 2
    ranks a model these are 4 models, of 128 images each.

    Args:
        comparable: the series to advise about.
        gpus: ranks, a multiple of `ranks_per_model`.
        ranks_per_model: ranks that share a model; 1: each has its own.
    """
    shares = []
    for series in comparable.members_of_policy:
        trial = series.points[-1].trial
        if comparable.reference.mode == "strong-global":
            images = trial.global_batch * ranks_per_model
            ranks = gpus
        else:  # a rank's part of the global batch stays, however many ranks share its model
            images = trial.train.micro_batch * trial.train.grad_accum * ranks_per_model
            ranks = trial.parallel.ranks_per_model
        if images % ranks == 0:
            shares.append(images // ranks)
    return frozenset(shares)


class _EngineVariants(NamedTuple):
    """Variants of engines, by whether they can train what was measured."""

    trainable: list[EngineVariant]
    """Measured ones first."""
    refused: dict[str, str]
    """Name of a variant -> why it cannot."""


def _engine_variants(comparable: ComparableSeries) -> _EngineVariants:
    """Return the measured variants, and the unmeasured ones of `PROPOSED` that could train the same."""
    trainable = sorted(comparable.variants)
    refused: dict[str, str] = {}
    train = comparable.trial.train
    # A script distributes training itself; no other engine has the optimizer of the user's own DeepSpeed file.
    allows_no_other = train.script is not None or train.optimizer == "deepspeed_config"
    unmeasured = [] if allows_no_other else [variant for variant in PROPOSED if variant not in comparable.variants]
    for variant in unmeasured:
        reason = _variant_refusal(comparable.trial, variant)
        if reason:
            refused[variant.name] = reason
        else:
            trainable.append(variant)
    return _EngineVariants(trainable, refused)


def _variant_refusal(measured: Trial, variant: EngineVariant) -> str:
    """Return why an unmeasured variant cannot train what was measured; empty where it can."""
    train = with_variant(measured.train, variant)
    try:
        check(train)
    except RequestError as error:
        return str(error)
    trial = measured.model_copy(update={"train": train})
    if computation(trial) != computation(measured):
        return "it trains otherwise than what was measured"
    if messages(trial) is None:
        return "no run used it, and what it sends for this model is unavailable"
    return ""


def as_configured(measured: TrainSpec, candidate: Candidate) -> TrainSpec:
    """Return how a candidate would train: as the measured training, with the candidate's engine and batch."""
    train = with_variant(measured, candidate.variant)
    changes = {name: getattr(candidate, name) for name in ("micro_batch", "grad_accum", "activation_checkpointing")}
    return train.model_copy(update={**changes, "hpz": candidate.second_shard_ranks})


def with_variant(train: TrainSpec, variant: EngineVariant) -> TrainSpec:
    """Return the same training under another wrapper at its defaults; unchanged under the one that it has."""
    if EngineVariant.of_train(train) == variant:
        return train
    defaults = {name: TrainSpec.model_fields[name].default for name in WRAPPER_FIELDS - {"engine"}}
    return train.model_copy(update=defaults | variant.changes)


def _micro_batches(comparable: ComparableSeries) -> tuple[int, ...]:
    """Return the measured micro-batches, with halves of the smallest and doubles of the largest, in rising order.

    Example: 32 and 64 give 2, 4, 8, 16, 32, 64, 128, 256 and 512. The smallest is halved while it is even.
    """
    measured = measured_micro_batches(comparable.members)
    smallest = min(measured)
    largest = max(measured)
    smaller = {smallest // 2**power for power in range(1, _HALVINGS + 1) if smallest % 2**power == 0}
    larger = {largest * 2**power for power in range(1, _DOUBLINGS + 1)}
    sizes = measured | smaller | larger
    return tuple(sorted(size for size in sizes if 1 <= size <= _LARGEST_MICRO_BATCH))


def _batches_of_share(share: int, micro_batches: Sequence[int]) -> Iterator[_Batch]:
    """Yields the ways to train a model's share of the global batch in equal micro-batches; one is the whole share.

    Example: a share of 12 images with micro-batches 4 and 8 gives 4 x 3 and 12 x 1.
    """
    for micro_batch in sorted({*micro_batches, share}):
        if share % micro_batch == 0 and micro_batch <= _LARGEST_MICRO_BATCH:
            yield _Batch(micro_batch, grad_accum=share // micro_batch)
