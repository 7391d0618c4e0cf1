"""A simulated cluster as `vitscale.prediction` would see it: what a study there would have recorded."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from peers.runs import Array, Places, places
from simulator import Cluster, invent, play

from vitscale.analysis.runs.steps import WHOLE, decide_slow_steps, slow_steps
from vitscale.prediction.evidence import Evidence, MeasuredPoint, Series, StepParts
from vitscale.prediction.layouts import whole_steps
from vitscale.prediction.network.links import Link, Network
from vitscale.trial.model_spec import ModelSpec, resolve
from vitscale.trial.trial import DataSpec, TrainSpec, Trial, WindowSpec, World

TIMES = (4, 16, 64)
"""The largest measured rank count: where predictions are asked."""
LIGHT_STEPS, EXPLAINED_STEPS = 30, 8
TRUE_RUNS, TRUE_STEPS = 24, 15
"""Runs from which the true mean is taken; their job effects are the quantiles of the distribution, not draws."""
BANDWIDTH_ERROR, LATENCY_ERROR = 0.05, 0.20
"""Of a check, standard deviations of the logarithm."""


@dataclass(frozen=True)
class SimulatedStudy:
    """What was measured, and the truth beyond it."""

    cluster: Cluster
    points: tuple[MeasuredPoint, ...]
    checked: Network
    """What a check of the cluster measured."""
    targets: tuple[int, ...]
    step_means: Array
    """True mean step seconds at each target."""
    step_futures: Array
    """Of one run more."""

    def evidence(self, network: Network) -> Evidence:
        """The measured points, with what is known of the network."""
        return Evidence((Series("simulated", "strong-micro", {}, self.points),), network)

    def epochs_alone(self, network: Network) -> Evidence:
        """What an imported log of epochs would tell: step times, and neither model, engine nor parts."""
        points = tuple(
            MeasuredPoint(
                trial_id=point.trial_id,
                trial=point.trial.model_copy(
                    update={
                        "model": ModelSpec(factory="unknown:model"),
                        "train": point.trial.train.model_copy(update={"engine": "unknown"}),
                    }
                ),
                nodes=point.nodes,
                images=point.images,
                steps_per_epoch=point.steps_per_epoch,
                step_seconds=point.step_seconds,
                devices=point.devices,
            )
            for point in self.points
        )
        return Evidence((Series("simulated", "strong-micro", {}, points),), network)

    @property
    def runs(self) -> tuple[Places, Array]:
        """Rank counts and epoch seconds of each measured run."""
        counts = [point.gpus for point in self.points for _ in point.step_seconds]
        seconds = [time for point in self.points for time in point.step_seconds]
        where = self._places(counts)
        return where, np.array(seconds) * where.steps

    @property
    def where(self) -> Places:
        """The targets."""
        return self._places(self.targets)

    def _places(self, counts: object) -> Places:
        gpus = np.asarray(counts, dtype=float)
        a_step = gpus * self.cluster.micro_batch * self.cluster.grad_accum
        images, micro_batch = np.full_like(gpus, self.cluster.images), np.full_like(gpus, self.cluster.micro_batch)
        return places(gpus, images, whole_steps(images, a_step, micro_batch, drop_last=False))


def simulated_study(seed: int) -> SimulatedStudy:
    """The study of `invent(seed)`."""
    cluster = invent(seed)
    random = np.random.default_rng([seed, 11])
    points = tuple(measured_point(cluster, ranks, random) for ranks in cluster.measured)
    targets = tuple(times * cluster.measured[-1] for times in TIMES)
    return SimulatedStudy(
        cluster,
        points,
        checked_network(cluster, random),
        targets,
        np.array([true_mean(cluster, ranks, random) for ranks in targets]),
        np.array([future_run(cluster, ranks, random) for ranks in targets]),
    )


def true_mean(cluster: Cluster, ranks: int, random: np.random.Generator) -> float:
    """The mean over many runs of a run's step."""
    from scipy.special import ndtri

    grid = ndtri((np.arange(TRUE_RUNS) + 0.5) / TRUE_RUNS)
    jobs = np.stack([grid, random.permutation(grid)], axis=1)
    return float(step_seconds(play(cluster, ranks, jobs, TRUE_STEPS, random).step).mean())


def future_run(cluster: Cluster, ranks: int, random: np.random.Generator) -> float:
    """The step of one run more."""
    return float(step_seconds(play(cluster, ranks, random.standard_normal((1, 2)), LIGHT_STEPS, random).step)[0])


def step_seconds(steps: Array) -> Array:
    """Of each run of a trial, (runs,), from its steps (runs, steps), as the product has it: their mean without the slow
    step that is the only one of all runs."""
    runs, count = steps.shape
    slow = slow_steps(np.arange(count), steps, np.full(count, WHOLE, dtype=np.uint8))
    decided = decide_slow_steps(slow, [None] * runs)
    return np.array([np.delete(run, of_run.set_aside).mean() for run, of_run in zip(steps, decided, strict=True)])


def measured_point(cluster: Cluster, ranks: int, random: np.random.Generator) -> MeasuredPoint:
    """What `cluster.repeats` runs on so many ranks would have recorded."""
    nodes = math.ceil(ranks / cluster.ranks_per_node)
    jobs = random.standard_normal((cluster.repeats, 2))
    light = play(cluster, ranks, jobs, LIGHT_STEPS, random)
    explained = play(cluster, ranks, jobs, EXPLAINED_STEPS, random)
    quarters = np.quantile(light.step, [0.25, 0.5, 0.75], axis=1)
    speeds = 1 / explained.ranks_compute.mean(axis=0)
    bytes_sent = int(cluster.bucket_bytes.sum())
    return MeasuredPoint(
        trial_id=f"{ranks:012x}",
        trial=_trial(cluster, ranks, nodes),
        nodes=nodes,
        images=cluster.images,
        steps_per_epoch=math.ceil(cluster.images / (ranks * cluster.micro_batch * cluster.grad_accum)),
        step_seconds=tuple(map(float, step_seconds(light.step))),
        parts=StepParts(
            compute=float(explained.compute.mean()),
            backward=float(explained.backward.mean()),
            optimizer=cluster.optimizer_seconds * float(np.exp(0.02 * random.standard_normal())),
            data_wait=0.0,
            wait=float(explained.wait.mean()),
            wire=float(explained.wire.mean()),
            exposed=float(explained.exposed.mean()),
        ),
        sent_bytes={("all_reduce", "float32"): bytes_sent} if ranks > 1 else {},
        sent_calls={("all_reduce", "float32"): len(cluster.bucket_bytes)} if ranks > 1 else {},
        devices=cluster.device_kinds[:ranks],
        rank_speeds=tuple(round(float(speed / speeds.max()), 2) for speed in speeds),
        backend="nccl" if cluster.trees else "gloo",
        step_spread=float(np.median((quarters[2] - quarters[0]) / quarters[1])) / 1.349,
    )


def _trial(cluster: Cluster, ranks: int, nodes: int) -> Trial:
    return Trial(
        model=resolve(ModelSpec(name=cluster.model), 1000),
        data=DataSpec(name="synthetic", samples=cluster.images, classes=1000),
        train=TrainSpec(
            engine="ddp", precision="fp32", device="cuda", micro_batch=cluster.micro_batch,
            grad_accum=cluster.grad_accum, epochs=1,
        ),
        world=World(nodes=nodes, ranks_per_node=ranks // nodes, threads_per_rank=1),
        window=WindowSpec(),
        launcher="torchrun",
    )  # fmt: skip


def checked_network(cluster: Cluster, random: np.random.Generator) -> Network:
    """What a check of the cluster would have measured."""

    def link(bandwidth: float, latency: float) -> Link:
        errors = random.standard_normal(2)
        return Link(
            bandwidth_bytes_per_second=float(bandwidth * np.exp(BANDWIDTH_ERROR * errors[0])),
            latency_seconds=float(latency * np.exp(LATENCY_ERROR * errors[1])),
            bandwidth_spread=BANDWIDTH_ERROR,
            latency_spread=LATENCY_ERROR,
            source="check",
            described="check of the simulated cluster",
        )

    return Network(
        inside=link(cluster.inside_bandwidth, cluster.inside_latency),
        across=link(cluster.across_bandwidth, cluster.across_latency),
    )
