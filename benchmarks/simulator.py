"""Clusters that never were: training by DDP simulated rank by rank and bucket by bucket, so that the truth is known.

Nothing here is shared with `vitscale.prediction`: no formula, no constant, no prior. A step is played, not summed up:

- Each device has a speed of its own for good; each run multiplies compute and transfers by a factor of its own; each
  rank's forward and backward jitter from step to step, with a heavier tail above.
- Gradients become ready bucket by bucket through backward (1 MiB first, then 25 MiB; the buckets of the last micro-step
  only). A bucket's all-reduce starts when the slowest rank has it and the one before is done. While transfers and
  backward overlap, backward runs slower (`contention`).
- An all-reduce is a ring over all ranks: every piece makes 2 (N-1) hops, of which those inside a host take that link's
  latency and those between hosts the other's; the slowest link sets the pace. Or a pair of trees over the hosts, of
  depth log2, each for half of the bytes, with a chain inside the host. Where there are two hosts, each is the root of
  one tree and the leaf of the other, and its interface sends only half of what it does in a ring (NCCL's maintainers
  in nccl-tests#196). The library takes the faster; one cluster in four has rings alone.
- The optimizer, and what lies between steps, take their own time.

Ranges are of clusters in general, and broad: see `invent`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

MODELS = {
    "vit-ti16": (192, 12, 1.26e9),
    "vit-s16": (384, 12, 4.6e9),
    "vit-b16": (768, 12, 17.6e9),
    "vit-l16": (1024, 24, 61.6e9),
}
"""Width, blocks, and multiply-accumulates of an image's forward pass at 224 x 224 (as their papers print them)."""
CLASSES, TOKENS, PATCH = 1000, 197, 16
DATASETS = (50_000, 126_689, 1_281_167)
"""Training images of CIFAR, ImageNet-100 and ImageNet-1k."""
MIB = 1024 * 1024


@dataclass(frozen=True)
class Cluster:
    """One training job on one cluster."""

    model: str
    images: int
    micro_batch: int
    grad_accum: int
    ranks_per_node: int
    measured: tuple[int, ...]
    """Rank counts."""
    repeats: int
    forward_seconds: float
    """Of a micro-step on the typical device."""
    backward_seconds: float
    optimizer_seconds: float
    between_seconds: float
    inside_bandwidth: float
    """Bytes per second; so `across_bandwidth`, of a host's interface."""
    across_bandwidth: float
    inside_latency: float
    across_latency: float
    trees: bool
    """Whether the library has them, as NCCL; gloo has rings alone."""
    contention: float
    device_factors: Array
    """Of each rank's device: its time over the typical one's. 512 of them."""
    device_kinds: tuple[str, ...]
    job_spread: float
    jitter: float
    tail: float
    """Share of steps in which a rank is held up by several times its jitter."""

    @property
    def bucket_bytes(self) -> Array:
        """In the order in which backward fills them: each is closed by the tensor that makes it full."""
        filled, sizes, limit = 0, list[int](), MIB
        for size in gradient_sizes(self.model):
            filled += size
            if filled >= limit:
                sizes.append(filled)
                filled, limit = 0, 25 * MIB
        return np.array([*sizes, *([filled] if filled else [])], dtype=float)


@dataclass(frozen=True)
class Played:
    """Steps of a run, (runs, steps) each, of the rank of median compute; `ranks_compute` of every rank."""

    step: Array
    compute: Array
    backward: Array
    wait: Array
    wire: Array
    exposed: Array
    ranks_compute: Array
    """(runs, ranks): mean forward and backward of a step."""


def gradient_sizes(model: str) -> list[int]:
    """Bytes of each tensor's fp32 gradient, from the classifier back to the patches."""
    width, blocks, _ = MODELS[model]
    block = [
        width, 4 * width * width, 4 * width, 4 * width * width, width, width,  # MLP and its norm
        width, width * width, 3 * width, 3 * width * width, width, width,  # attention and its norm
    ]  # fmt: skip
    head = [CLASSES, CLASSES * width, width, width]
    return [4 * count for count in [*head, *(block * blocks), width, 3 * PATCH**2 * width, TOKENS * width, width]]


def invent(seed: int) -> Cluster:
    """A cluster and a job of broad ranges."""
    random = np.random.default_rng([seed, 7])

    def between(low: float, high: float) -> float:
        return float(np.exp(random.uniform(np.log(low), np.log(high))))

    model = str(random.choice(list(MODELS)))
    micro_batch = int(random.choice([8, 16, 32, 64, 128]))
    operations = 2 * MODELS[model][2] * micro_batch
    # 10 ms to 2 s a micro-step: what people run; devices of 2 to 300 useful TFLOP/s.
    forward = float(np.clip(operations / between(2e12, 3e14), 0.004, 0.6))
    backward = forward * random.uniform(1.8, 2.3)
    ranks_per_node = int(random.choice([1, 2, 4, 8]))
    measured = (1, 2, 4) if random.random() < 0.5 else (1, 2, 4, 8)
    mixed = random.random() < 0.2 and measured[-1] > ranks_per_node
    factors = np.exp(random.uniform(0, 0.03) * random.standard_normal(512))
    kinds = ["fast"] * 512
    if mixed:
        slower = random.uniform(1.15, 2.0)
        hosts = measured[-1] // ranks_per_node
        slow_hosts = random.random(512 // ranks_per_node) < random.uniform(0.2, 0.6)
        slow_hosts[random.integers(0, hosts)] = True  # or no measurement could tell
        for rank in np.flatnonzero(np.repeat(slow_hosts, ranks_per_node)):
            kinds[rank] = "slow"
            factors[rank] *= slower
    return Cluster(
        model=model,
        images=int(random.choice(DATASETS)),
        micro_batch=micro_batch,
        grad_accum=int(random.choice([1, 1, 1, 2, 4])),
        ranks_per_node=ranks_per_node,
        measured=measured,
        repeats=int(random.integers(1, 4)),
        forward_seconds=forward,
        backward_seconds=backward,
        optimizer_seconds=7 * sum(gradient_sizes(model)) / between(2e11, 2e12),
        between_seconds=forward * random.uniform(0.002, 0.03),
        inside_bandwidth=between(5e9, 2.5e11),
        across_bandwidth=between(1.0e9, 4.5e10),
        inside_latency=between(2e-6, 12e-6),
        across_latency=between(6e-6, 50e-6),
        trees=bool(random.random() < 0.75),
        contention=float(random.uniform(0, 0.3)),
        device_factors=factors,
        device_kinds=tuple(kinds),
        job_spread=float(random.uniform(0.005, 0.04)),
        jitter=between(0.005, 0.05),
        tail=float(random.uniform(0, 0.02)),
    )


def all_reduce_seconds(cluster: Cluster, ranks: int, size: Array) -> Array:
    """One all-reduce of `size` bytes, as the faster of a ring and of trees plays it."""
    if ranks == 1:
        return np.zeros_like(size)
    hosts = math.ceil(ranks / cluster.ranks_per_node)
    links = [cluster.inside_bandwidth] * (cluster.ranks_per_node > 1) + [cluster.across_bandwidth] * (hosts > 1)
    pace = min(links)
    outer_hops = hosts - 1
    inner_hops = ranks - 1 - outer_hops
    per_lap = inner_hops * cluster.inside_latency + outer_hops * cluster.across_latency
    # Two laps; in each every rank sends all pieces but one.
    ring = 2 * (per_lap + size / ranks * (ranks - 1) / pace)
    if not cluster.trees:
        return np.asarray(ring)
    depth = math.ceil(math.log2(hosts)) if hosts > 1 else 0
    chain = min(ranks, cluster.ranks_per_node) - 1
    one_way = depth * cluster.across_latency + chain * cluster.inside_latency
    # A host within one tree sends its half to its parent and to two children, 3/2 S, and S/2 as a leaf of the other.
    # Of two hosts each sends one half up and one half down.
    inside = 2 * size / cluster.inside_bandwidth if chain else 0.0
    across = (2 if hosts > 2 else 1) * size / cluster.across_bandwidth if hosts > 1 else 0.0
    tree = 2 * one_way + np.maximum(inside, across) / 0.9
    return np.asarray(np.minimum(ring, tree))


def play(cluster: Cluster, ranks: int, jobs: Array, steps: int, random: np.random.Generator) -> Played:
    """Runs of `steps` steps on the first `ranks` devices; `jobs` (runs, 2) are standard normal: compute, transfers."""
    runs = len(jobs)
    on_compute = np.exp(cluster.job_spread * jobs[:, 0])[:, None]
    on_wire = np.exp(cluster.job_spread * jobs[:, 1])[:, None]
    noise = random.standard_normal((runs, steps, ranks), dtype=np.float32)
    held_up = random.random((runs, steps, ranks), dtype=np.float32) < cluster.tail
    noise[held_up] = np.abs(noise[held_up]) * 3
    of_ranks = cluster.device_factors[:ranks] * np.exp(cluster.jitter * noise) * on_compute[:, :, None]
    slowest, own = of_ranks.max(axis=2), np.quantile(of_ranks, 0.5, axis=2, method="lower")
    before = (cluster.grad_accum - 1) * (cluster.forward_seconds + cluster.backward_seconds) + cluster.forward_seconds
    sizes = cluster.bucket_bytes
    taken = all_reduce_seconds(cluster, ranks, sizes)[:, None, None] * on_wire
    filled = np.cumsum(sizes) / sizes.sum()
    begin, end = _exchange(before, cluster.backward_seconds, slowest, filled, taken)
    overlapped = _within(begin, end, slowest * before, slowest * (before + cluster.backward_seconds))
    # Transfers take memory bandwidth and multiprocessors from backward: every rank's backward grows alike.
    backward = cluster.backward_seconds + (cluster.contention * overlapped / slowest if ranks > 1 else 0.0)
    begin, end = _exchange(before, backward, slowest, filled, taken)
    own_end = own * (before + backward)
    left = np.maximum(end[-1], slowest * (before + backward))
    wire = _within(begin, end, own_end, left) if ranks > 1 else np.zeros_like(own)
    after = (cluster.optimizer_seconds + cluster.between_seconds) * np.ones_like(own) * on_compute
    exposed = left - own_end
    return Played(
        step=left + after,
        compute=own_end + cluster.between_seconds,
        backward=own * (backward + (cluster.grad_accum - 1) * cluster.backward_seconds),
        wait=exposed - wire,
        wire=wire,
        exposed=exposed,
        ranks_compute=of_ranks.mean(axis=1) * (cluster.forward_seconds + cluster.backward_seconds),
    )


def _exchange(
    before: float, backward: Array | float, slowest: Array, filled: Array, taken: Array
) -> tuple[Array, Array]:
    """When each bucket's all-reduce begins and ends, (buckets, runs, steps)."""
    ready = slowest * (before + backward * filled[:, None, None])
    begin, end = np.empty_like(ready), np.empty_like(ready)
    free: Array | float = 0.0
    for bucket in range(len(filled)):
        begin[bucket] = np.maximum(ready[bucket], free)
        end[bucket] = free = begin[bucket] + taken[bucket]
    return begin, end


def _within(begin: Array, end: Array, low: Array, high: Array) -> Array:
    """Seconds of the transfers between `low` and `high`."""
    return np.asarray(np.clip(np.minimum(end, high) - np.maximum(begin, low), 0.0, None).sum(axis=0))
