"""Studies that were explained, with known truth in every part of a step, for tests of the report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from results_factory import explained_run, make_curve, make_results, make_trial, steps_of_epoch
from vitscale.analysis.runs.compute import SHORTEST_SECONDS
from vitscale.store.records import EnergyReading, GpuSamples, GradientLine, MatmulLine, RankRecord, ResourcesLine
from vitscale.store.results import Results, Run
from vitscale.trial.trial import Mode, Trial

NO_ENERGY = "the kernel lets only root read RAPL"
NO_GPU = "the trial ran on CPU"
NOISE_SCALE = 100.0
"""Images: tr(Sigma) = 100, |G|^2 = 1."""
SLOWDOWN = 0.05
FORWARD, BACKWARD, DATA_WAIT, WIRE, OPTIMIZER, OTHER = 0.001, 0.002, 0.002, 0.010, 0.004, 0.001
"""Seconds: the first two per image of the micro-batch, the others per step."""
SLOWER = 0.25
"""The last of several ranks computes so much longer; the others wait for it."""


def parts(trial: Trial, rank: int, told_apart: bool = True) -> dict[str, Any]:
    """One rank's explained step. On one rank nothing is waited for and nothing is transferred."""
    several = trial.world.size > 1
    slow = several and rank == trial.world.size - 1
    images = trial.train.micro_batch
    pace = 1 + SLOWER if slow else 1.0
    return {
        "data_wait": DATA_WAIT,
        "forward": FORWARD * images * pace,
        "backward": BACKWARD * images * pace,
        "wait": (FORWARD + BACKWARD) * images * SLOWER if several and not slow else 0.0,
        "wire": WIRE if several else 0.0,
        "optimizer": OPTIMIZER,
        "other": OTHER,
        "told_apart": told_apart,
    }


def run_of(trial: Trial, repeat: int = 0, *, told_apart: bool = True) -> Run:
    """A run of `trial` with its explained steps, and what it used."""
    run = explained_run(
        trial,
        [parts(trial, rank, told_apart) for rank in range(trial.world.size)],
        repeat=repeat,
        slowdown=SLOWDOWN,
    )
    return run.model_copy(update={"ranks": tuple(_with_resources(trial, rank) for rank in run.ranks)})


def _with_resources(trial: Trial, rank: RankRecord) -> RankRecord:
    """Rank k computes 80 - 10 k % of the time (10 at least) and holds 1 + k GiB; on cuda it reserves twice that."""
    on_gpu = trial.train.device == "cuda"
    gibibyte = 2**30
    held = (1 + rank.rank) * gibibyte
    gpu = GpuSamples(
        samples=10,
        utilisation=max(0.1, 0.9 - 0.1 * rank.rank),
        sm_clock_mhz_median=1700.0,
        sm_clock_mhz_min=1400.0,
        temperature_celsius_max=70.0,
        power_watts_mean=400.0,
        throttle_reasons=("SW power cap",),
        throttled_share=0.2,
    )
    lines = tuple(
        ResourcesLine(
            epoch=epoch.epoch,
            steps=steps_of_epoch(rank, epoch.epoch),
            seconds=max(epoch.seconds, SHORTEST_SECONDS),
            cpu_seconds=max(epoch.seconds, SHORTEST_SECONDS) * max(0.1, 0.8 - 0.1 * rank.rank),
            cpu_throttled_seconds=None,
            rss_bytes=held,
            peak_rss_bytes=held,
            cuda_allocated_bytes=held if on_gpu else None,
            cuda_reserved_bytes=2 * held if on_gpu else None,
            cuda_device_bytes=10 * gibibyte if on_gpu else None,
            gpu=gpu if on_gpu else None,
            gpu_reason=None if on_gpu else NO_GPU,
            energy=EnergyReading(joules=0.5 * (epoch.images or 0) / trial.world.size, source="NVML", reason=None)
            if on_gpu
            else EnergyReading(joules=None, source=None, reason=NO_ENERGY),
        )
        for epoch in rank.epochs
    )
    small, big = trial.train.micro_batch, trial.global_batch
    gradients = tuple(
        GradientLine(
            step=step,
            small_images=small,
            small_squared_norm=1 + NOISE_SCALE / small,
            big_images=big,
            big_squared_norm=1 + NOISE_SCALE / big,
        )
        for step in range(8)
        if big > small
    )
    matmul = MatmulLine(dtype="float32", size=1024, flops_per_second=1e12)
    return rank.model_copy(update={"resources": lines, "gradients": gradients, "matmul": matmul})


def batch_study(
    batches: Sequence[int] = (16, 64),
    gpus: Sequence[int] = (1, 2),
    *,
    engines: Sequence[str] = ("ddp",),
    told_apart: bool = True,
    repeats: int = 1,
    mode: Mode = "strong-micro",
    **train: Any,
) -> Results:
    """Micro-batches and rank counts of one batch policy; 3 epochs, more where a batch leaves too few steps."""
    curves, runs = [], []
    for engine in engines:
        for micro_batch in batches:
            fields = {"epochs": max(3, micro_batch // 16)} | train
            trials = [make_trial(engine, count, micro_batch=micro_batch, **fields) for count in gpus]
            labels = {"train__micro_batch": micro_batch} if len(batches) > 1 else {}
            curves.append((make_curve(trials, mode, **labels), trials))
            runs += [run_of(trial, repeat, told_apart=told_apart) for trial in trials for repeat in range(repeats)]
    return make_results(curves, runs, repeats=repeats)
