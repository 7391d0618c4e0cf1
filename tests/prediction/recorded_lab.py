"""Runs and checks of a lab as they were recorded: evidence that real ranks and a real network once gave.

From benchmarks/lab_prediction.py on two cores of an AMD EPYC (torch 2.13.0, DeepSpeed 0.19.8, gloo): hosts of 0.35
cores, links of 100 and of 400 Mbit/s, one run of 12 steps for each figure, others at work on the machine: the table in
docs/calibration-lab.md. A row holds what `prediction.evidence` made of a run on 1 or 2 hosts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from check_factory import checked, record
from vitscale.prediction.evidence import Evidence, MeasuredPoint, Series, StepParts
from vitscale.prediction.network.checked import network_of
from vitscale.store.checks import CollectiveFit, Operation
from vitscale.trial.model_spec import ModelSpec, resolve
from vitscale.trial.trial import DataSpec, TrainSpec, Trial, WindowSpec, World

IMAGES = 4096
_BUCKETS = {"bucket_mib": 4, "gather_bucket_mib": 4}
ENGINES: Mapping[str, Mapping[str, Any]] = {
    "DDP": {"engine": "ddp", "bucket_mib": 2},
    "ZeRO-1": {"engine": "deepspeed", "zero_stage": 1} | _BUCKETS,
    "ZeRO-2": {"engine": "deepspeed", "zero_stage": 2} | _BUCKETS,
    "ZeRO-3": {"engine": "deepspeed", "zero_stage": 3} | _BUCKETS,
    "FSDP2": {"engine": "fsdp2"},
}
SENT: Mapping[str, Mapping[str, int]] = {
    "DDP": {"all_reduce": 10_848_040},
    "ZeRO-1": {"all_reduce": 10_848_048, "all_gather": 10_848_048},
    "ZeRO-2": {"all_reduce": 10_848_048, "all_gather": 10_848_048},
    "ZeRO-3": {"all_gather": 10_848_040, "reduce_scatter": 10_848_040},
    "FSDP2": {"all_gather": 21_538_600, "reduce_scatter": 10_861_864},
}
"""Bytes of a step's tensors by operation, on two hosts."""


class Row(NamedTuple):
    """One run: seconds of a step and of its parts."""

    link: str
    engine: str
    hosts: int
    step: float
    compute: float
    backward: float
    optimizer: float
    data_wait: float
    wait: float
    wire: float
    spread: float


def _fit(
    operation: Operation, latency: float, bandwidth: float, largest_mib: int, seconds: float, residual: float
) -> CollectiveFit:
    return CollectiveFit(
        group="across nodes",
        operation=operation,
        ranks=2,
        latency_seconds=latency,
        bandwidth_bytes_per_second=bandwidth,
        largest_size_bytes=largest_mib * 2**20,
        largest_seconds=seconds,
        worst_residual=residual,
    )


FITS: Mapping[str, tuple[CollectiveFit, ...]] = {
    "100mbit": (
        _fit("all_reduce", 0.330e-3, 11.43e6, 16, 1.443, 0.860),
        _fit("all_gather", 0.000e-3, 9.01e6, 16, 1.042, 0.974),
        _fit("reduce_scatter", 0.000e-3, 5.88e6, 16, 1.432, 0.978),
        _fit("all_to_all", 0.721e-3, 6.81e6, 16, 1.385, 1.017),
    ),
    "400mbit": (
        _fit("all_reduce", 1.988e-3, 47.56e6, 64, 1.408, 0.349),
        _fit("all_gather", 0.540e-3, 31.19e6, 64, 1.120, 0.739),
        _fit("reduce_scatter", 2.537e-3, 22.51e6, 64, 1.521, 0.381),
        _fit("all_to_all", 0.964e-3, 24.46e6, 64, 1.402, 1.132),
    ),
}
"""What the check of two hosts found, by link: latency of a call, bus bandwidth, the largest size."""
ROWS = (
    Row("100mbit", "DDP", 1, 0.4006, 0.3890, 0.2541, 0.0103, 0.0007, 0.0000, 0.0001, 0.0173),
    Row("100mbit", "DDP", 2, 1.1900, 0.5203, 0.3375, 0.0104, 0.0027, 0.0044, 0.6350, 0.0540),
    Row("100mbit", "ZeRO-1", 1, 0.4616, 0.4177, 0.2831, 0.0465, 0.0007, 0.0000, 0.0001, 0.0378),
    Row("100mbit", "ZeRO-1", 2, 1.9727, 0.3765, 0.2506, 0.0152, 0.0015, 0.0306, 1.3496, 0.0650),
    Row("100mbit", "ZeRO-2", 1, 0.4372, 0.3966, 0.2613, 0.0466, 0.0007, 0.0000, 0.0001, 0.0060),
    Row("100mbit", "ZeRO-2", 2, 1.9452, 0.3531, 0.2336, 0.0119, 0.0028, 0.2386, 1.2928, 0.0548),
    Row("100mbit", "ZeRO-3", 1, 0.6009, 0.5614, 0.3568, 0.0385, 0.0007, 0.0000, 0.0001, 0.0070),
    Row("100mbit", "ZeRO-3", 2, 1.9860, 0.5552, 0.3531, 0.0424, 0.0007, 0.1332, 1.2521, 0.0577),
    Row("100mbit", "FSDP2", 1, 0.4969, 0.4815, 0.3091, 0.0201, 0.0007, 0.0000, 0.0000, 0.0617),
    Row("100mbit", "FSDP2", 2, 2.2890, 0.3024, 0.2143, 0.0057, 0.0008, 0.3289, 1.6420, 0.0144),
    Row("400mbit", "DDP", 1, 0.3999, 0.3963, 0.2739, 0.0034, 0.0006, 0.0000, 0.0001, 0.0044),
    Row("400mbit", "DDP", 2, 0.4675, 0.3975, 0.2789, 0.0057, 0.0007, 0.0018, 0.0586, 0.0220),
    Row("400mbit", "ZeRO-1", 1, 0.4571, 0.3933, 0.2658, 0.0596, 0.0014, 0.0000, 0.0001, 0.0890),
    Row("400mbit", "ZeRO-1", 2, 0.7651, 0.3651, 0.2519, 0.0125, 0.0034, 0.0620, 0.3223, 0.0220),
    Row("400mbit", "ZeRO-2", 1, 0.4394, 0.4069, 0.2815, 0.0321, 0.0008, 0.0000, 0.0001, 0.0584),
    Row("400mbit", "ZeRO-2", 2, 0.7540, 0.3467, 0.2293, 0.0140, 0.0006, 0.0725, 0.3206, 0.0236),
    Row("400mbit", "ZeRO-3", 1, 0.5408, 0.5021, 0.3193, 0.0371, 0.0007, 0.0000, 0.0001, 0.0298),
    Row("400mbit", "ZeRO-3", 2, 1.0066, 0.5080, 0.3097, 0.0428, 0.0006, 0.0527, 0.3996, 0.0228),
    Row("400mbit", "FSDP2", 1, 0.4617, 0.4413, 0.2767, 0.0192, 0.0013, 0.0000, 0.0000, 0.0187),
    Row("400mbit", "FSDP2", 2, 0.8734, 0.3586, 0.2408, 0.0075, 0.0033, 0.0843, 0.4252, 0.0104),
)
TRUTH: Mapping[str, Mapping[str, Mapping[int, float]]] = {
    "100mbit": {
        "DDP": {3: 1.461, 4: 1.692},
        "ZeRO-1": {3: 2.246, 4: 2.635},
        "ZeRO-2": {3: 2.301, 4: 2.527},
        "ZeRO-3": {3: 2.383, 4: 2.705},
        "FSDP2": {3: 2.810, 4: 3.125},
    },
    "400mbit": {
        "DDP": {3: 0.555, 4: 0.591},
        "ZeRO-1": {3: 0.878, 4: 0.953},
        "ZeRO-2": {3: 0.868, 4: 0.935},
        "ZeRO-3": {3: 1.265, 4: 1.373},
        "FSDP2": {3: 0.988, 4: 1.088},
    },
}
"""Link, engine, hosts: seconds of a step."""


def evidence(link: str) -> Evidence:
    """All engines on 1 and 2 hosts over such a link, and the check."""
    series = tuple(
        Series(
            engine, "strong-micro", {}, tuple(_point(row) for row in ROWS if (row.link, row.engine) == (link, engine))
        )
        for engine in ENGINES
    )
    return Evidence(series, network_of(record(checked(0), checked(1), fits=FITS[link])))


def _point(row: Row) -> MeasuredPoint:
    trial = Trial(
        model=resolve(ModelSpec(name="vit-ti16", image_size=32, patch_size=8, layers=6), 10),
        data=DataSpec(name="synthetic", samples=IMAGES),
        train=TrainSpec(precision="fp32", device="cpu", micro_batch=32, **ENGINES[row.engine]),
        world=World(nodes=row.hosts, ranks_per_node=1, threads_per_rank=1),
        window=WindowSpec(steps=12, warmup_steps=2, evaluate=False),
        launcher="mpirun",
    )
    sent = SENT[row.engine] if row.hosts > 1 else {}
    return MeasuredPoint(
        trial_id=trial.identity(),
        trial=trial,
        nodes=row.hosts,
        images=IMAGES,
        steps_per_epoch=-(-IMAGES // (32 * row.hosts)),
        step_seconds=(row.step,),
        parts=StepParts(
            row.compute, row.backward, row.optimizer, row.data_wait, row.wait, row.wire, row.wait + row.wire
        ),
        sent_bytes={(operation, "float32"): size for operation, size in sent.items()},
        devices=("AMD EPYC",) * row.hosts,
        step_spread=row.spread,
        backend="gloo",
    )
