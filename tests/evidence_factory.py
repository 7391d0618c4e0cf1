"""Evidence with known truth, for tests of predictions and advice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vitscale.prediction.evidence import Evidence, MeasuredPoint, Series, StepParts
from vitscale.prediction.network.links import Link, Network
from vitscale.trial.model_spec import ModelSpec, resolve
from vitscale.trial.parallel import NO_SPLIT, ParallelSpec
from vitscale.trial.trial import DataSpec, Mode, TrainSpec, Trial, WindowSpec, World, steps_per_epoch

IMAGES = 50_000
FAST = Link(100e9, 1e-5, 0.07, 0.3, "check", "a check")
SLOWER = Link(12e9, 3e-5, 0.07, 0.3, "check", "a check")
MEASURED = Network(FAST, SLOWER)
UNKNOWN = Network(
    Link(8e9, 1e-5, 1.0, 1.0, "assumed", "nothing measured"), Link(3e9, 3e-5, 1.2, 1.0, "assumed", "nothing measured")
)


def make_trial(
    gpus: int,
    *,
    per_node: int = 8,
    model: str | ModelSpec | None = "vit-b16",
    workers: int = 0,
    parallel: ParallelSpec = NO_SPLIT,
    **train: Any,
) -> Trial:
    """A resolved trial on GPUs; without a model it is an import that tells nothing of its own."""
    named = ModelSpec(name=model) if isinstance(model, str) else model
    spec = ModelSpec() if named is None else resolve(named, 10)
    settings: dict[str, Any] = {
        "engine": "ddp",
        "precision": "bf16",
        "device": "cuda",
        "micro_batch": 64,
        "epochs": 1,
    } | train
    return Trial(
        model=spec,
        data=DataSpec(name="cifar10", workers=workers),
        train=TrainSpec(**settings),
        world=World(nodes=-(-gpus // per_node), ranks_per_node=min(gpus, per_node), threads_per_rank=1),
        window=WindowSpec(),
        launcher="torchrun",
        parallel=parallel,
    )


def make_point(
    gpus: int, seconds: float | Sequence[float], *, parts: StepParts | None = None, **how: Any
) -> MeasuredPoint:
    """One measured trial; `how` goes to the trial, but for fields of the point itself."""
    own = {name: how.pop(name) for name in ("step_spread", "rank_speeds", "devices", "joules_per_image",
                                            "memory_capacity_bytes", "host_memory_bytes", "sent_bytes")
           if name in how}  # fmt: skip
    images: int | None = how.pop("images", IMAGES)
    trial = make_trial(gpus, **how)
    train = trial.train
    runs = (seconds,) if isinstance(seconds, float) else tuple(seconds)
    return MeasuredPoint(
        trial_id=trial.identity(),
        trial=trial,
        nodes=trial.world.nodes,
        images=images,
        steps_per_epoch=None
        if images is None
        else steps_per_epoch(images, trial.layout.data, train.micro_batch, train.grad_accum, False),
        step_seconds=runs,
        parts=parts,
        **own,
    )


def make_evidence(
    points: Sequence[MeasuredPoint], network: Network = UNKNOWN, *, name: str = "ddp", mode: Mode = "strong-micro"
) -> Evidence:
    """One series."""
    labels: Mapping[str, Any] = {}
    return Evidence((Series(name, mode, labels, tuple(points)),), network)
