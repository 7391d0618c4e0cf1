"""An optimizer step as a sum of parts, over draws of what is uncertain and any number of rank counts at once.

    step = max(loading, slowest rank's compute + exposed transfers + bubble + norms + optimizer)

    loading     reading the step's images; where they are not read ahead it is added instead
    compute     A micro-steps, each `(q + (1-q) b / b_ref)` of the one at the reference micro-batch b_ref, where the
                share q does not depend on the images; plus a share of the transfers that run beside it
    slowest     compute x (1 + z(N) sqrt(devices^2 + jitter^2)), where z(N) is the expected largest of N standard
                normals; times the slowest type's factor on unlike devices; plus a lateness that grows with z(N) too:
                ranks that stop for many collectives of a step wait in each, which one sum over the step does not show
    transfers   the engine's messages at the links' bandwidths, less what computing hides, times an efficiency
    bubble      where ranks have stages of a model: the micro-steps, with what they exchange, in which the pipeline
                fills and runs empty; (P - 1) / v with equal ranks (arXiv 2104.04473, section 2.2)
    norms       what synchronised norms exchange in every micro-step; nothing hides it, and it is mostly latency
    optimizer   the update of all that a rank holds, or of 1/N of it where the engine shards its states over N ranks
                (N/R where they are R replicas)

Where an engine's messages are unknown, its transfers are shares of one micro-step's compute. One share grows as a
ring's bytes do, by 2(N-1)/N over N ranks. Another is added between n hosts; it grows by up to 2(n-1)/n, and is larger
the more passes inside hosts. Both grow a little with each doubling of ranks, for latency and for what computing can no
longer hide (Ernest's logarithm; Venkataraman et al., NSDI 2016). The last share is added once for each further rank, as
Amdahl's serial part is to a step of like batches (AFIPS 1967). `left_out` is for what no part covers. Of all but the
first share, and of waiting, there may be little or nothing: "further growth" says how much.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache, partial
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from vitscale.base.arrays import FloatArray
from vitscale.engines.messages import Message, MessageKind, RankGroup
from vitscale.prediction.network.links import AffineCost, Level, LinkDraws, Network, cheapest, lines
from vitscale.prediction.step.messages import exposed_seconds
from vitscale.trial.parallel import NO_SPLIT, ParallelSpec

Draws = Mapping[str, FloatArray]
"""Parameter -> its logarithm, (draws, 1). `vitscale.prediction.parameters` names them."""
Calls = Mapping[MessageKind, FloatArray]
ALIKE_ACROSS = 0.5
"""The transfer share between hosts goes with this power of the one inside: who sends much inside sends much between."""
_MOST_LEFT_OUT = 3.0


def expected_slowest(ranks: FloatArray) -> FloatArray:
    """Expected largest of N independent standard normals: `Phi^-1((N - 0.375) / (N + 0.25))`; 0 at one rank.

    Blom, "Statistical Estimates and Transformed Beta-Variables" (1958). Within 0.03 of the exact value (Harter,
    Biometrika 48, 1961, table 1) from 2 to a million ranks.
    """
    counts, places = np.unique(np.asarray(ranks, dtype=np.float64), return_inverse=True)
    return np.array([_of_count(float(count)) for count in counts])[places].reshape(np.shape(ranks))


@lru_cache(maxsize=100_000)
def _of_count(ranks: float) -> float:
    return NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25)) if ranks > 1 else 0.0


_SLOWER_OF_TWO = float(expected_slowest(np.array([2.0]))[0])


@dataclass(frozen=True)
class Worlds:
    """The configurations whose steps are asked for: arrays of one length, with a place for each configuration."""

    ranks: FloatArray
    ranks_per_node: FloatArray
    micro_batch: FloatArray
    """Images per micro-step of a rank."""
    grad_accum: FloatArray
    slowdown: FloatArray
    """How much slower the slowest device type is than the one that `compute` stands for; 1 where all are alike."""

    @cached_property
    def slowest(self) -> FloatArray:
        """`expected_slowest` of the ranks, kept because a fit asks for it hundreds of times."""
        return expected_slowest(self.ranks)

    @cached_property
    def alike(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(first, again): the first place of each distinct layout of ranks, and which of these each place has."""
        layout = self.ranks * (self.ranks.max() + 1) + self.ranks_per_node  # unique: a host has no more than all ranks
        _, first, again = np.unique(layout, return_index=True, return_inverse=True)
        return first, again


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a step, (draws, configurations)."""

    compute: FloatArray
    """Compute of a rank of median speed."""
    optimizer: FloatArray
    data_wait: FloatArray
    wait: FloatArray
    """Waiting for the slowest rank."""
    wire: FloatArray
    """Exposed transfers."""
    norm: FloatArray
    """Transfers of synchronised norms, which are not in `wire`."""
    bubble: FloatArray
    """Waiting for other stages."""

    @property
    def total(self) -> FloatArray:
        """The whole step."""
        return self.compute + self.optimizer + self.data_wait + self.wait + self.wire + self.norm + self.bubble


@dataclass(frozen=True)
class Loading:
    """How long a rank takes to read an image, and whether training goes on meanwhile."""

    seconds_per_image: float
    ahead: bool


@dataclass(frozen=True)
class StepModel:
    """What arithmetic says of a series' step; the rest are parameters."""

    messages: tuple[Message, ...] | None
    norms: tuple[Message, ...]
    """Messages of synchronised norms, which are not among `messages`."""
    backend: str
    shards_optimizer: bool
    backward_share: float
    """Share of compute that is backward."""
    reference_micro_batch: int
    network: Network
    loading: Loading | None
    imported: bool = False
    """Whether somebody else's program was timed. A program that got little of the links inside hosts then gets less of
    those between hosts too, by `ALIKE_ACROSS`, unless a check measured either."""
    parallel: ParallelSpec = NO_SPLIT
    """How many ranks share a model; every world holds a multiple of that."""
    second_shard_ranks: int = 1
    """Ranks that share a second shard of the weights (`EngineFacts.second_shard_ranks`)."""
    filling: float | None = None
    """Micro-steps that the slowest rank of a pipeline waits while it fills and runs empty (`shares.filling`); None: as
    many as with equal ranks."""

    def times(self, draws: Draws, worlds: Worlds, calls: Calls | None = None) -> StepTimes:
        """The parts of a step.

        Args:
            draws: the logarithms of all parameters.
            worlds: the configurations.
            calls: what `self.calls` gives for the same draws and worlds, where it is known already.
        """
        fixed = np.minimum(0.9, np.exp(draws["fixed share"]))
        alone = np.where(worlds.ranks == 1, draws["alone"], 0.0)
        images = fixed + (1 - fixed) * worlds.micro_batch / self.reference_micro_batch
        micro_step = np.exp(draws["compute"] + alone) * images
        exposed, hidden, filling = self._transfers(draws, worlds, micro_step, calls)
        # Hidden transfers slow backward down: they take memory bandwidth, cores and multiprocessors from it.
        compute = micro_step * worlds.grad_accum + np.exp(draws["contention"]) * hidden
        spread = np.hypot(np.exp(draws["devices"]), np.exp(draws["jitter"])) * self._further(draws)
        late = worlds.slowdown * (1 + spread * worlds.slowest) - 1
        late += np.exp(draws["lateness"]) * worlds.slowest / _SLOWER_OF_TWO
        replicas = worlds.ranks * (self.parallel.sequence / self.parallel.ranks_per_model)
        shards = replicas / self.parallel.replicate if self.shards_optimizer else np.ones_like(worlds.ranks)
        optimizer = np.exp(draws["optimizer"]) / shards
        wait = compute * late
        wire = exposed * np.exp(draws["overlap"])
        norm = np.zeros_like(wire)
        for message in self.norms:
            ranks, _, _ = self._group(worlds, message.group)
            algorithms = self._lines(draws, worlds, message.operation, message.group)
            passes = cheapest(algorithms, message.tensor_bytes_at(ranks, worlds.micro_batch))
            norm = norm + passes * message.calls * worlds.grad_accum
        stages = self.parallel.stages // self.parallel.pipeline
        handed_on = (self.parallel.pipeline - 1) / stages
        computed = handed_on if self.filling is None else self.filling
        bubble = computed * micro_step + handed_on * filling * np.exp(draws["overlap"])
        rest = compute + wait + wire + norm + optimizer + bubble
        return StepTimes(compute, optimizer + 0 * rest, self._data_wait(worlds, rest), wait, wire, norm, bubble)

    def left_out(self, draws: Draws, worlds: Worlds, measured: Worlds) -> FloatArray:
        """Factor on a step, (draws, configurations), for what no part of the model covers beyond the measured counts.

        A step may become slower with each doubling of ranks on as many hosts, and with each doubling of hosts: fewer
        ranks may not have filled a socket, a switch or a file server. It may also differ a little either way.
        """
        hosts, most_hosts = _hosts(worlds), float(_hosts(measured).max())
        doublings = np.log2(np.maximum(1.0, worlds.ranks / measured.ranks.max()))
        # Going from one host to two has a parameter of its own.
        first = 2.0 if most_hosts == 1 else most_hosts
        across = np.minimum(doublings, np.log2(np.maximum(1.0, hosts / first)))
        inside = doublings - np.minimum(doublings, np.log2(np.maximum(1.0, hosts / most_hosts)))
        slower = np.exp(draws["slower inside"]) * inside + np.exp(draws["slower across"]) * across
        slower = np.minimum(slower * self._further(draws), _MOST_LEFT_OUT)
        factor: FloatArray = np.exp(slower + draws["either way"] * doublings)
        return factor

    def _data_wait(self, worlds: Worlds, rest: FloatArray) -> FloatArray:
        if self.loading is None:
            return np.zeros_like(rest)
        loading = self.loading.seconds_per_image * worlds.micro_batch * worlds.grad_accum
        return np.maximum(0.0, loading - rest) if self.loading.ahead else loading + 0 * rest

    def _transfers(
        self, draws: Draws, worlds: Worlds, micro_step: FloatArray, known: Calls | None
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        """(exposed, hidden) seconds of a step's transfers, and in a pipeline a micro-step's that nothing hides."""
        shape = np.broadcast_shapes(micro_step.shape, worlds.ranks.shape)
        hidden, filling = np.zeros(shape), np.zeros(shape)
        if self.messages is None:
            return self._as_a_ring(draws, worlds), hidden, filling
        slowest, seconds = micro_step * worlds.slowdown, self.calls(draws, worlds) if known is None else known
        exposed = exposed_seconds(
            self.messages,
            partial(_looked_up, seconds),
            slowest * (1 - self.backward_share),
            slowest * self.backward_share,
            worlds.grad_accum,
        )
        calls: dict[MessageKind, float | FloatArray] = {}
        for message in self.messages:
            calls[message.kind] = calls.get(message.kind, 0.0) + message.times(worlds.grad_accum)
        for kind, count in calls.items():
            hidden += seconds[kind] * count
        if self.parallel.pipeline > 1:
            per_step = (message for message in self.messages if message.micro_steps == "all" and message.ready is None)
            filling = filling + sum(seconds[message.kind] * message.calls for message in per_step)
        return exposed, np.maximum(0.0, hidden - exposed), filling

    def calls(self, draws: Draws, worlds: Worlds) -> Calls:
        """Seconds of one call of each kind of message, (draws, configurations); they do not depend on compute.

        They are worked out once for all configurations whose ranks lie alike, unless a message grows with the images.
        """
        kinds = {message.kind: message for message in self.messages or ()}
        first, again = worlds.alike
        if once := len(first) < len(again) and all(message.images is None for message in kinds.values()):
            worlds = Worlds(*(getattr(worlds, field.name)[first] for field in fields(worlds)))
        sorts = {(message.operation, message.group) for message in kinds.values()}
        algorithms = {sort: self._lines(draws, worlds, *sort) for sort in sorts}
        sharding_groups = {message.sharding_group for message in kinds.values()}
        ranks = {group: self._group(worlds, group)[0] for group in sharding_groups}
        seconds = {}
        for kind, message in kinds.items():
            tensor_bytes = message.tensor_bytes_at(ranks[message.sharding_group], worlds.micro_batch)
            seconds[kind] = cheapest(algorithms[message.operation, message.group], tensor_bytes)
        if not once:
            return seconds
        shape = len(draws["compute"]), len(first)
        return {kind: np.broadcast_to(of_kind, shape)[:, again] for kind, of_kind in seconds.items()}

    def _lines(self, draws: Draws, worlds: Worlds, operation: str, group: RankGroup) -> tuple[AffineCost, ...]:
        advantage = _share(draws["tree advantage"])
        ranks, per_node, sharing = self._group(worlds, group)

        def link(level: Level) -> LinkDraws:
            several, two = (of(level, operation) for of in (self.network.link, self.network.link_between_two))
            pair = ranks == 2
            # `checked` takes a link seen on two hosts to have the whole advantage: keep the time that was seen there.
            of_two = 2 - advantage if several.hosts == 2 and operation == "all_reduce" else 1.0
            several_bandwidth = several.bandwidth_bytes_per_second * (of_two if self.backend != "gloo" else 1.0)
            bandwidth = draws[f"bandwidth {level}"]
            if self.imported and level == "across" and "check" not in (several.source, self.network.inside.source):
                bandwidth = bandwidth + ALIKE_ACROSS * np.minimum(0.0, draws["bandwidth inside"])
            shared = sharing if level == "across" else 1.0
            return LinkDraws(
                np.where(pair, two.bandwidth_bytes_per_second, several_bandwidth) * np.exp(bandwidth) / shared,
                np.where(pair, two.latency_seconds, several.latency_seconds) * np.exp(draws[f"latency {level}"]),
            )

        return lines(
            operation,
            ranks,
            per_node,
            link("inside"),
            link("across"),
            self.backend,
            advantage,
        )

    def _group(self, worlds: Worlds, group: RankGroup) -> tuple[FloatArray, FloatArray, FloatArray]:
        """(ranks of a group, how many of them are on one host, groups of a host that send beyond it at once).

        Ranks lie in a row as in `RankLayout`: tensor counts fastest, then sequence, data, pipeline.
        """
        parallel, local = self.parallel, np.minimum(worlds.ranks, worlds.ranks_per_node)
        replicas = worlds.ranks * (parallel.sequence / parallel.ranks_per_model)
        sharding = replicas / parallel.replicate
        size, stride = {
            "tensor": (parallel.tensor, 1),
            "sequence": (parallel.sequence, parallel.tensor),
            "replicas": (replicas, parallel.tensor),
            "sharding": (sharding, parallel.tensor),
            "replication": (parallel.replicate, sharding * parallel.tensor),
            "second shard": (np.minimum(self.second_shard_ranks, worlds.ranks), 1),
            "pipeline": (parallel.pipeline, replicas * parallel.tensor),
            "all": (worlds.ranks, 1),
        }[group]
        ranks = np.broadcast_to(np.asarray(size, dtype=np.float64), worlds.ranks.shape)
        per_node = np.clip(np.floor(local / stride), 1.0, ranks)
        return ranks, per_node, np.where(ranks > per_node, np.maximum(1.0, np.floor(local / per_node)), 1.0)

    def _further(self, draws: Draws) -> FloatArray | float:
        """How much there is of what makes steps longer as ranks join, beyond a ring's bytes; 1 for known messages."""
        return 1.0 if self.messages is not None else _share(draws["further growth"])

    def _as_a_ring(self, draws: Draws, worlds: Worlds) -> FloatArray:
        """Shares of the reference micro-step's compute, because what is sent does not grow with the images."""
        ranks, hosts = worlds.ranks, _hosts(worlds)
        inside = np.exp(draws["transfer share"])
        # From two hosts to many, a ring over hosts doubles what each sends; a ring over all ranks hardly sends more.
        among_hosts = np.where(hosts > 1, 1 + _share(draws["tree advantage"]) * (1 - 2 / hosts), 0.0)
        further = self._further(draws)
        across = further * np.exp(draws["across share"]) * inside**ALIKE_ACROSS * among_hosts
        growth = 1 + further * np.exp(draws["growth"]) * np.log2(np.maximum(1.0, ranks / 2))
        of_each = further * np.exp(draws["share of each rank"]) * (ranks - 1)
        wire: FloatArray = np.exp(draws["compute"]) * ((inside * 2 * (ranks - 1) / ranks + across) * growth + of_each)
        return wire


def _share(logit: FloatArray) -> FloatArray:
    return np.asarray(1 / (1 + np.exp(-logit)), dtype=np.float64)


def _hosts(worlds: Worlds) -> FloatArray:
    return np.asarray(np.ceil(worlds.ranks / worlds.ranks_per_node), dtype=np.float64)


def _looked_up(known: Calls, message: Message) -> FloatArray:
    return known[message.kind]
