"""The study: what to vary and what to hold fixed, as a study file says it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from vitscale.model_spec import ModelSpec
from vitscale.trial import (
    AccelerateBackend,
    Accuracy,
    BatchCount,
    BucketMib,
    DataSpec,
    EpochCount,
    GradientDtype,
    LearningRateScaling,
    Mode,
    Offload,
    Seed,
    Spec,
    StepCount,
    WarmupCount,
    ZeroStage,
)

RankCounts = Annotated[
    tuple[Annotated[int, Field(ge=1, le=1_000_000)], ...],
    Field(min_length=1, max_length=1000),
    BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value),
]


class TrainSection(Spec):
    """[train]: the fields of `trial.TrainSpec`, with "auto" where the machine or the data decide."""

    engine: str = "ddp"
    precision: Literal["fp32", "bf16", "bf16-params", "fp16", "auto"] = "auto"
    """auto: bf16 where the processor or GPU is fast at it, else fp32."""
    device: Literal["cpu", "cuda", "auto"] = "auto"
    """auto: cuda where there is a GPU."""
    micro_batch: BatchCount | None = None
    global_batch: int | None = Field(default=None, ge=1, le=1_000_000_000)
    """Of strong-global; by default that of the smallest world."""
    grad_accum: BatchCount = 1
    epochs: EpochCount | None = None
    optimizer: Literal["adamw", "sgd", "lamb", "onebit-adam", "onebit-lamb"] = "adamw"
    learning_rate: float = Field(default=1e-3, gt=0.0)
    learning_rate_scaling: LearningRateScaling = "none"
    learning_rate_base_batch: BatchCount = 256
    learning_rate_warmup_steps: WarmupCount = 0
    weight_decay: float = Field(default=0.05, ge=0.0)
    momentum: float = Field(default=0.9, ge=0.0, lt=1.0)
    onebit_freeze_steps: WarmupCount = 100
    gradient_clipping: float = Field(default=0.0, ge=0.0)
    accelerate_backend: AccelerateBackend | None = None
    zero_stage: ZeroStage = 0
    offload: Offload = "none"
    overlap_comm: bool | None = None
    bucket_mib: BucketMib | None = None
    gather_bucket_mib: BucketMib | None = None
    gradient_dtype: GradientDtype | None = None
    reshard_after_forward: bool | None = None
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    activation_checkpointing: bool = False
    compile: bool = False
    deepspeed_config: str | None = None
    drop_last: bool = False
    target_accuracy: Accuracy | None = None
    seed: Seed = 0


class ScalingSection(Spec):
    """[scaling]: the batch policy and the rank counts."""

    mode: Mode = "strong-micro"
    gpus: RankCounts = (1,)
    """Ranks in all; on CPU too."""
    fraction_per_gpu: float | None = Field(default=None, gt=0.0, le=1.0)
    """Of weak: share of the training images per rank; by default `data.fraction / max(gpus)`."""


class LaunchSection(Spec):
    """[launch]: how ranks are started and placed."""

    launcher: str = "torchrun"
    threads_per_rank: int | None = Field(default=None, ge=1, le=4096)
    """Equal along a curve; by default the machine's cores / max(gpus)."""
    oversubscribe: bool = False
    """Allow more threads or ranks than there are cores or GPUs."""


class MeasureSection(Spec):
    """[measure]: how long, how often, and when to give up."""

    repeats: int = Field(default=3, ge=1, le=1000)
    target_ci: float | None = Field(default=None, gt=0.0, lt=1.0)
    """Whole runs are added to a trial until the 95 % interval of its epoch time lies within this share of it."""
    max_repeats: int = Field(default=10, ge=1, le=1000)
    """Of `target_ci`: runs of a trial at most."""
    steps: StepCount | None = None
    warmup_steps: WarmupCount = 3
    evaluate: bool = True
    explain: bool = True
    """Say where the time of a step goes: a few steps are profiled, apart from those that are timed."""
    traces: bool = False
    """Keep the profiler's traces of explained steps, for Perfetto or chrome://tracing."""
    checkpoint: bool = False
    """After training save a checkpoint, restore it, and record what both took."""
    hang_seconds: float = Field(default=300.0, gt=0.0)
    """A run in which no rank records anything for so long is ended as `hang`."""
    timeout_seconds: float | None = Field(default=None, gt=0.0)
    order_seed: Seed = 0
    """Seed of the random order of runs."""


class Study(Spec):
    """One study file, or one point of its sweep."""

    name: str
    model: ModelSpec
    data: DataSpec
    train: TrainSection = TrainSection()
    scaling: ScalingSection = ScalingSection()
    launch: LaunchSection = LaunchSection()
    measure: MeasureSection = MeasureSection()
    sweep: dict[str, list[Any]] = Field(default_factory=dict)
