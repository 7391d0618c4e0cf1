"""One point of a study: what is trained, on what, by which engine, on how many ranks; its arithmetic and identity.

A trial is resolved: no "auto", no default left to the machine it runs on. Two trials with the same identity are
the same experiment, so a result may stand on several curves but is measured once.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import lru_cache
from pathlib import PurePath
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, ValidationError, WrapValidator, model_validator
from pydantic_core import PydanticCustomError

from vitscale.trial.fields import FieldTraits, Spec, fields_where, sections_of, switch_words, traits_of, wrapper_option
from vitscale.trial.model_spec import ModelSpec
from vitscale.trial.parallel import ParallelSpec, RankLayout

Mode = Literal["strong-micro", "strong-global", "weak"]
Precision = Literal["fp32", "bf16", "bf16-params", "fp16"]
DeviceName = Literal["cpu", "cuda"]
Seed = Annotated[int, Field(ge=0, lt=2**31)]

Accuracy = Annotated[float, Field(gt=0.0, le=1.0)]
LearningRateScaling = Literal["none", "linear", "sqrt"]
AccelerateBackend = Literal["ddp", "fsdp2", "deepspeed"]
Offload = Literal["none", "optimizer", "parameters"]
GradientDtype = Literal["fp32", "bf16", "fp16"]
CompileMode = Literal["default", "reduce-overhead"]
BatchNormScope = Literal["local", "synchronised"]
BucketMib = Annotated[int, Field(ge=1, le=65_536)]
SecondShardRanks = Annotated[int, Field(ge=1, le=4096)]
ZeroStage = Annotated[int, Field(ge=0, le=3)]
MOST_RANKS = 1_000_000
"""The largest world that a study may ask for, or that is read back."""
BatchCount = Annotated[int, Field(ge=1, le=1_000_000)]
EpochCount = Annotated[int, Field(ge=1, le=1_000_000)]
StepCount = Annotated[int, Field(ge=1, le=1_000_000_000)]
ArgumentWord = Annotated[str, Field(max_length=4096, pattern=r"^[^\x00]*$")]
WarmupCount = Annotated[int, Field(ge=0, le=1_000_000)]

PixelType = Literal["uint8", "uint16", "float32"]
PixelSource = Literal["jpeg", "cache", "memory"]
SceneEvaluation = Literal["whole", "sliding"]
StepWindow = Literal["light", "explained", "settling", "gradients", "attached"]
"""light: timed and reported. explained: profiled. settling: after a pause of the measurement. gradients: norms of
gradients are taken. attached: on a GPU, timed after the profiler first started, which stays attached. Only light steps
are in a reported time; warm-up is marked apart."""


def _tuple_from_list(value: Any) -> Any:
    """Return a tuple for a list, which TOML and JSON have in its place; any other value as it is."""
    return tuple(value) if isinstance(value, list) else value


FROM_LIST = BeforeValidator(_tuple_from_list)
"""Makes tuples of the lists that TOML and JSON have."""


def _with_one_message(expected: str) -> WrapValidator:
    """Make a validator that takes lists for tuples, and has one message where a value fits none of several types.

    pydantic by itself has a message for each of the types.
    """

    def validate(value: Any, validate_types: Callable[[Any], Any]) -> Any:
        try:
            return validate_types(_tuple_from_list(value))
        except ValidationError:
            raise PydanticCustomError("wrong_value", "Input should be {expected}", {"expected": expected}) from None

    return WrapValidator(validate)


Classes = Annotated[
    Annotated[int, Field(ge=2, le=100_000)]
    | Annotated[str, Field(min_length=1)]
    | Annotated[tuple[str, ...], Field(min_length=2, max_length=100_000)],
    _with_one_message("a number from 2 to 100000, or a file that names a class a line"),
]
Columns = Annotated[tuple[str, str], _with_one_message("the names of the images' and of the classes' column")]

ADE20K_CLASSES = 150
_REMOVED_FROM_TRAIN = ("onebit_freeze_steps",)
"""Fields of [train] in records of earlier versions that had no effect but with an optimizer that is gone too."""
OFFLOADED = {"none": "no offload", "optimizer": "optimizer offloaded", "parameters": "parameters offloaded"}
COMPILE_MODES = {"default": "compiled without CUDA graphs", "reduce-overhead": "CUDA graphs"}
NORMS = {"local": "local norm", "synchronised": "synchronised norm"}


class DataSpec(Spec):
    """Which images are used, and how many of them.

    The fields in `LOCATION_FIELDS` stay out of a trial's identity: what was really read is recorded as a fingerprint
    of its content.
    """

    name: Annotated[str, FieldTraits(curve_words="{}")]
    """Dataset: one of vitscale's (`synthetic` makes images, `folder` reads your own), or another package's."""
    hf: str | None = Field(default=None, min_length=1, max_length=4096)
    """A dataset of Hugging Face's library: a folder on disk, or a name on the hub ("NAME", "NAME:CONFIGURATION")."""
    columns: Columns | None = None
    """The columns of images and labels of an `hf` dataset, where it has several."""
    root: Annotated[str | None, FieldTraits(role="location")] = None
    """Folder of the images, or the archive that holds them; a relative path starts in the study file's folder."""
    download: Annotated[bool, FieldTraits(role="location")] = False
    """Fetch the archive into `root` where it is not there yet."""
    verify: Annotated[bool, FieldTraits(role="location")] = True
    """Refuse an archive that has another MD5 than the official one."""
    md5: Annotated[str | None, FieldTraits(role="location")] = None
    """MD5 that the archive shall have instead of the official one."""
    fraction: float = Field(default=1.0, gt=0.0, le=1.0)
    """Share of the training images that is used."""
    held_out: float = Field(default=0.2, gt=0.0, lt=1.0)
    """Share kept for evaluation where a dataset has no split of its own."""
    samples: int = Field(default=4096, ge=2, le=10_000_000)
    """Training images of the synthetic dataset; a share `held_out` of as many again are made for evaluation."""
    classes: Classes = 10
    """Number of classes of the synthetic dataset; for an image set, which classes are taken (a file with one name a
    line; in a trial the names themselves)."""
    source_size: int = Field(default=32, ge=4, le=8192)
    """Side in pixels of generated images, and of those from files as stored; for scenes the longer side at most."""
    channels: Annotated[int, FieldTraits(curve_words="{} channels")] = Field(default=3, ge=1, le=4096)
    """Channels of synthetic images and of those from files; pictures are grey (1) or in colour (3)."""
    dtype: PixelType = "uint8"
    """Type in which decoded files are stored. Arrays of fewer bits are widened, those of more are refused."""
    source: Annotated[PixelSource | None, FieldTraits(curve_words="from {}")] = None
    """Source of files' pixels: decoded anew each time, from the decoded cache, or from a copy of it in each rank's
    memory. Null: the cache where it fits, else memory, else files."""
    skip_broken: Annotated[int, FieldTraits(role="location")] = Field(default=0, ge=0, le=10_000_000)
    """Most broken files that may be left out; with more, and always at 0, they are named and nothing starts."""
    augment: Annotated[bool, FieldTraits(curve_words=switch_words("augment"))] = True
    """Random shift and horizontal flip of training images, on the device."""
    evaluation: SceneEvaluation = "whole"
    """How scenes are evaluated: each whole in one forward, or windows of `model.image_size` that move by two thirds."""
    workers: int = Field(default=0, ge=0, le=256)
    """Threads per rank that prepare batches ahead; 0 prepares them between steps."""

    @model_validator(mode="before")
    @classmethod
    def _with_implied_fields(cls, values: Any) -> Any:
        """Fill in what other fields imply: `hf` the dataset's name, and ADE20K's name the number of classes."""
        if not isinstance(values, dict):
            return values
        implied: dict[str, Any] = {}
        if values.get("hf") is not None:
            implied["name"] = "hf"
        if values.get("name") == "ade20k":
            implied["classes"] = ADE20K_CLASSES
        return implied | values  # a value that is given counts


LOCATION_FIELDS = fields_where(DataSpec, lambda traits: traits.role == "location")
"""Fields of `DataSpec` that say how the images are found, and change nothing in what is computed."""


class TrainFields(Spec):
    """How a trial is trained, applied alike by every engine. A study's [train] may leave some of it open."""

    engine: Annotated[str, FieldTraits(role="wrapper")]
    """What distributes training over the ranks; `none` trains on one rank, unwrapped."""
    precision: Annotated[str, FieldTraits(affects_step_time=True, curve_words="{}")]
    device: Annotated[str, FieldTraits(affects_step_time=True)]
    micro_batch: Annotated[BatchCount | None, FieldTraits(role="batch")]
    """Images per rank per micro-step."""
    grad_accum: Annotated[BatchCount, FieldTraits(role="batch")] = 1
    """Micro-steps per optimizer step."""
    epochs: Annotated[EpochCount | None, FieldTraits(role="duration")] = None
    """Length of a run in epochs, warm-up included; or give `measure.steps`."""
    optimizer: Annotated[str, FieldTraits(affects_step_time=True, curve_words="{}")] = "adamw"
    """Optimizer, computed alike under every engine."""
    learning_rate: Annotated[float, FieldTraits(role="rate")] = Field(default=1e-3, gt=0.0)
    """Rate after warm-up, at a global batch of `learning_rate_base_batch` unless `learning_rate_scaling` is none."""
    learning_rate_scaling: Annotated[LearningRateScaling, FieldTraits(role="rate")] = "none"
    """How the learning rate follows the global batch: by its ratio to the base batch, or by the ratio's square root."""
    learning_rate_base_batch: Annotated[
        BatchCount, FieldTraits(role="rate", needs=("learning_rate_scaling", ("linear", "sqrt")))
    ] = 256
    """Global batch to which `learning_rate` belongs where it is scaled."""
    learning_rate_warmup_steps: WarmupCount = 0
    """Optimizer steps over which the learning rate rises linearly from 1/n of itself; then it is constant."""
    weight_decay: float = Field(default=0.05, ge=0.0)
    """Weight decay of the optimizer; tensors of one dimension (biases and norms) have none."""
    momentum: Annotated[float, FieldTraits(needs=("optimizer", ("sgd",)))] = Field(default=0.9, ge=0.0, lt=1.0)
    """Momentum of SGD."""
    gradient_clipping: Annotated[float, FieldTraits(affects_step_time=True)] = Field(default=0.0, ge=0.0)
    """Largest global L2 norm of the gradient; 0 means no clipping."""
    accelerate_backend: Annotated[AccelerateBackend | None, FieldTraits(role="wrapper")] = None
    """The engine by which Accelerate wraps the model; null under every other engine."""
    zero_stage: Annotated[ZeroStage, wrapper_option(curve_words="ZeRO-{}")] = 0
    """What DeepSpeed shards: 0 nothing, 1 the optimizer's states, 2 the gradients too, 3 the weights too."""
    offload: Annotated[Offload, wrapper_option(curve_words=OFFLOADED)] = "none"
    """What lies in the host's memory instead of the device's: nothing, the optimizer's states, or the weights too."""
    overlap_comm: Annotated[bool | None, wrapper_option(curve_words=switch_words("overlap"))] = None
    """Exchange gradients while backward runs. Null: the engine's own default."""
    bucket_mib: Annotated[BucketMib | None, wrapper_option(curve_words="{} MiB buckets")] = None
    """Size of the buckets in which gradients travel, in the dtype in which they travel. Null: the engine's own; for DDP
    25 MiB after a first one of 1 MiB, for DeepSpeed 5e8 elements."""
    gather_bucket_mib: Annotated[BucketMib | None, wrapper_option(curve_words="{} MiB gather buckets")] = None
    """Size of the buckets in which stage 3 fetches weights ahead; below it they are gathered at once."""
    hpz: Annotated[SecondShardRanks, wrapper_option(curve_words="hpZ {}")] = 1
    """Ranks that share a second copy of stage 3's weights, out of which they gather what a step needs again (ZeRO++'s
    hpZ; Wang et al., arXiv 2306.10209, section 3.2). 1: there is none, unless the DeepSpeed file asks for one."""
    gradient_dtype: Annotated[GradientDtype | None, wrapper_option(curve_words="{} gradients")] = None
    """The dtype in which gradients travel. Null: the engine's own."""
    master_weights: Annotated[bool, wrapper_option(curve_words=("fp32 master weights", "no master weights"))] = False
    """Whether under `bf16-params` shards and optimizer states are fp32, and weights are cast to bf16 to be gathered."""
    reshard_after_forward: Annotated[bool | None, wrapper_option(curve_words=switch_words("reshard"))] = None
    """Free the gathered weights of a block after forward, and gather them again in backward. Null: true."""
    gradient_as_bucket_view: Annotated[bool, wrapper_option(curve_words=switch_words("bucket view"))] = False
    """Gradients are views into the buckets instead of copies."""
    static_graph: Annotated[bool, wrapper_option(curve_words=switch_words("static graph"))] = False
    """Take the graph of the first step as that of every step."""
    activation_checkpointing: Annotated[
        bool,
        FieldTraits(role="execution", affects_step_time=True, curve_words=switch_words("activation checkpointing")),
    ] = False
    """Keep only each block's input for backward and compute the rest of the block again."""
    compile: Annotated[
        bool,
        FieldTraits(role="execution", affects_step_time=True, curve_words=switch_words("compile")),
    ] = False
    """Compile each block by torch.compile."""
    compile_mode: Annotated[
        CompileMode,
        FieldTraits(role="execution", affects_step_time=True, needs=("compile", (True,)), curve_words=COMPILE_MODES),
    ] = "default"
    """torch.compile's mode: `reduce-overhead` replays a block's kernels as CUDA graphs."""
    batch_norm: Annotated[BatchNormScope | None, FieldTraits(curve_words=NORMS)] = None
    """Images that a batch norm in training is over: the rank's own, or those of all ranks, exchanged in each norm."""
    deepspeed_config: Annotated[Any, wrapper_option()] = None
    """Your own DeepSpeed file (JSON), for what [train] has no field for; batch sizes are the study's."""
    script: Annotated[str | None, FieldTraits(curve_words="{}")] = Field(default=None, min_length=1, max_length=4096)
    """The user's own training script, which each rank runs in place of vitscale's loop (`trial.script`)."""
    arguments: Annotated[tuple[ArgumentWord, ...], Field(max_length=1000), FROM_LIST] = ()
    """Words of the command line of `script`, in which "{micro_batch}" stands for the trial's value."""
    drop_last: Annotated[bool, FieldTraits(curve_words=("drop last", "keep last"))] = False
    """Leave out the images of an epoch that do not fill a whole global batch."""
    target_accuracy: Annotated[Accuracy | None, FieldTraits(role="duration")] = None
    """Training ends after the first epoch whose held-out accuracy reaches this; `epochs` is then the limit."""
    seed: Seed = 0
    """Seed of weights, order and augmentation. With `target_accuracy` repeat r uses `seed + r`."""


class TrainSpec(TrainFields):
    """How it is trained, with nothing left open."""

    precision: Precision
    device: DeviceName
    micro_batch: BatchCount
    optimizer: Literal["adamw", "sgd", "lamb", "deepspeed_config"] = "adamw"
    """deepspeed_config: the optimizer that the user's own file describes."""
    batch_norm: BatchNormScope = "local"
    deepspeed_config: dict[str, Any] | None = None
    """The user's own DeepSpeed configuration, as read; null where there is none."""
    micro_batches: Annotated[tuple[BatchCount, ...] | None, FieldTraits(role="batch")] = None
    """Images per micro-step of each rank, where ranks differ in speed; they add up to ranks x `micro_batch`. Null:
    `micro_batch` on every rank."""

    @model_validator(mode="before")
    @classmethod
    def _without_removed(cls, values: Any) -> Any:
        """Leave out fields that only earlier versions had."""
        if not isinstance(values, dict):
            return values
        return {name: value for name, value in values.items() if name not in _REMOVED_FROM_TRAIN}

    @property
    def wrapper(self) -> str:
        """What finally wraps the model: the engine, or the one that Accelerate stands for."""
        return self.accelerate_backend or self.engine


WRAPPER_FIELDS = frozenset(fields_where(TrainSpec, lambda traits: traits.role == "wrapper"))
"""Fields of `TrainSpec` that say how training is distributed. They do not change what is computed; only the dtype in
which gradients travel may round it."""
BATCH_FIELDS = frozenset(fields_where(TrainSpec, lambda traits: traits.role == "batch"))


class WindowSpec(Spec):
    """How long a run is, and which of its steps count."""

    steps: StepCount | None = None
    """Optimizer steps after warm-up; null where `train.epochs` decides how long the run is."""
    warmup_steps: WarmupCount = 3
    """First optimizer steps; they are kept in the record but marked, and left out of every figure."""
    evaluate: bool = True
    """Measure held-out loss and accuracy after each epoch, outside every timing window."""
    explain: bool = True
    """Explain some steps between light ones: see `vitscale.engines.step_schedule`."""
    traces: bool = False
    """Keep the profiler's trace of each explained block in the run's folder."""
    checkpoint: bool = False
    """Save a checkpoint after training, restore it, and record what both took."""
    meters: Annotated[tuple[str, ...], Field(max_length=100), FROM_LIST] = ()
    """Names of other packages' meters; what they measure in each epoch is recorded too."""

    @model_validator(mode="before")
    @classmethod
    def _with_meters(cls, fields: Any) -> Any:
        """Read a trial of format 11 or older, which calls meters probes; a study's [measure] has no such key."""
        is_of_trial = cls is WindowSpec
        if not (is_of_trial and isinstance(fields, dict) and "probes" in fields):
            return fields
        return {("meters" if name == "probes" else name): value for name, value in fields.items()}


class World(Spec):
    """Nodes x ranks per node, and the threads each rank computes with."""

    nodes: int = Field(default=1, ge=1)
    ranks_per_node: int = Field(ge=1)
    """Ranks of a full node."""
    threads_per_rank: int = Field(ge=1)
    ranks: int | None = Field(default=None, ge=1)
    """Ranks in all, where the last node has fewer than the others. Null: every node is full."""

    @model_validator(mode="after")
    def _ranks_fill_nodes(self) -> Self:
        """Refuse a number of ranks that leaves the last node empty, or fills it, and too large a world."""
        ranks_of_full_nodes = self.nodes * self.ranks_per_node
        ranks_before_last_node = ranks_of_full_nodes - self.ranks_per_node
        if self.ranks is not None and not ranks_before_last_node < self.ranks < ranks_of_full_nodes:
            raise ValueError(f"{self.ranks} ranks are not on {self.nodes} nodes of {self.ranks_per_node}")
        if self.size > MOST_RANKS:
            raise ValueError(f"a world of {self.size} ranks is more than {MOST_RANKS:,}")
        return self

    @property
    def size(self) -> int:
        """Number of ranks in all."""
        return self.ranks or self.nodes * self.ranks_per_node


def world_of_hosts(ranks: int, ranks_per_node: int, threads_per_rank: int) -> World:
    """Return the world that a scheduler gives: full hosts of `ranks_per_node` ranks, and one with the remaining ranks.

    One host where all ranks fit on it. Example: 6 ranks on hosts of 4 are 4 and 2.
    """
    ranks_of_full_node = min(ranks, ranks_per_node)
    is_every_node_full = ranks % ranks_of_full_node == 0
    return World(
        nodes=-(-ranks // ranks_of_full_node),
        ranks_per_node=ranks_of_full_node,
        threads_per_rank=threads_per_rank,
        ranks=None if is_every_node_full else ranks,
    )


class Trial(Spec):
    """One point: everything that decides its result."""

    model: ModelSpec
    data: DataSpec
    train: TrainSpec
    world: World
    window: WindowSpec
    launcher: str
    parallel: ParallelSpec = ParallelSpec()
    model_digest: str | None = None
    """Digest of what a Hugging Face configuration says, wherever its folder lies; null for other models."""
    weights_digest: str | None = None
    """Digest of the pretrained weights that training begins with, wherever they lie; null where weights are random."""
    script_digest: str | None = None
    """SHA-256 of the user's own training script, wherever it lies; null for vitscale's own loop."""
    origin: str | None = None
    """Cluster and devices of an imported trial, as the log names them, for nothing else is known that decides its
    result. Null for trials of vitscale's own."""

    @model_validator(mode="after")
    def _micro_batches_add_up(self) -> Self:
        """Refuse unequal micro-batches that are not one for each data-parallel rank, or have another sum."""
        ranks = self.layout.data
        mean = self.train.micro_batch
        images_by_rank = self.train.micro_batches
        if images_by_rank is None:
            return self
        if len(images_by_rank) != ranks or sum(images_by_rank) != ranks * mean:
            raise ValueError(f"micro_batches are not the shares of {ranks} ranks with {mean} images in the mean")
        return self

    @property
    def model_name(self) -> str | None:
        """The model as the user named it, else the name of the script that holds it; None where neither is known."""
        model_name = self.model.name or self.model.hf or self.model.factory
        if model_name:
            return model_name
        script = self.train.script
        return PurePath(script).name if script is not None else None

    @property
    def layout(self) -> RankLayout:
        """How its ranks share models and images; ranks that share a model take the same images."""
        return RankLayout.of(self.world.size, self.parallel)

    @property
    def global_batch(self) -> int:
        """Images per optimizer step: data-parallel ranks x micro-batch x accumulation."""
        return self.layout.data * self.train.micro_batch * self.train.grad_accum

    def steps_per_epoch(self, images: int) -> int:
        """Return the optimizer steps in an epoch of this many images, already a fraction of the dataset.

        See `steps_per_epoch` of this module.
        """
        train = self.train
        return steps_per_epoch(images, self.layout.data, train.micro_batch, train.grad_accum, train.drop_last)

    @property
    def peak_learning_rate(self) -> float:
        """The learning rate after warm-up, scaled with the global batch.

        Linear: Goyal et al., "Accurate, Large Minibatch SGD" (2017), section 2.1. Square root: Krizhevsky, "One weird
        trick" (2014), section 5; for Adam, Malladi et al., "On the SDEs and Scaling Rules for Adaptive Gradient
        Algorithms" (2022), definition 5.2.
        """
        ratio = self.global_batch / self.train.learning_rate_base_batch
        factor = {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[self.train.learning_rate_scaling]
        return self.train.learning_rate * factor

    def learning_rate_at(self, step: int) -> float:
        """Return the learning rate of an optimizer step, counted from 0.

        It is `min(1, (step + 1) / warm-up steps)` of the peak.
        """
        warmup_steps = self.train.learning_rate_warmup_steps
        if not warmup_steps:
            return self.peak_learning_rate
        return self.peak_learning_rate * min(1.0, (step + 1) / warmup_steps)

    def identity(self) -> str:
        """Return the identity of the trial: 12 hexadecimal digits of SHA-256 over all that affects the result."""
        canonical = json.dumps(self._identity_content(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:12]

    def _identity_content(self) -> dict[str, Any]:
        """Return everything that affects the result, as JSON values by field.

        The names and values must stay as they are: identities of earlier results are made of the same ones.
        """
        content = self.model_dump(mode="json")
        for key in LOCATION_FIELDS:
            del content["data"][key]
        for section, defaults in _DEFAULTS_LEFT_OUT.items():
            for key, default in defaults.items():
                if content[section][key] == default:
                    del content[section][key]
        if not content["parallel"]:
            del content["parallel"]
        if "meters" in content["window"]:  # called so before format 12
            content["window"]["probes"] = content["window"].pop("meters")
        if self.origin is None:  # imports brought it; trials of vitscale's own keep their identity
            del content["origin"]
        # A digest stands in place of the path that it was made of.
        if self.model_digest is not None:
            del content["model"]["hf"]
        if self.script_digest is None:
            del content["script_digest"]
        else:
            content["train"].pop("script", None)
        if self.weights_digest is None:
            del content["weights_digest"]
        else:
            content["model"].pop("weights", None)
        return content


_DEFAULTS_IN_IDENTITY: Mapping[str, frozenset[str]] = {
    "model": frozenset(
        {"name", "hf", "factory", "image_size", "patch_size", "num_classes"}
        | {"hidden_size", "layers", "heads", "mlp_size"}
    ),
    "data": frozenset({"fraction", "held_out", "samples", "classes", "source_size", "augment", "workers"}),
    "train": frozenset(
        {"grad_accum", "epochs", "optimizer", "learning_rate", "weight_decay", "momentum", "gradient_clipping"}
        | {"zero_stage", "deepspeed_config", "drop_last", "seed"}
    ),
    "world": frozenset({"nodes"}),
    "window": frozenset({"steps", "warmup_steps", "evaluate"}),
}
"""Section -> fields that are part of every identity, also with their default. Nothing is added here: the default of any
other field is left out, so that a trial keeps its identity when fields come that it does without."""


def _defaults_left_out(section: str, spec: type[Spec]) -> dict[str, Any]:
    """Return field -> its default in JSON, for the fields of a section whose default is no part of an identity."""
    defaults = {}
    for name, field in spec.model_fields.items():
        is_always_in = name in _DEFAULTS_IN_IDENTITY.get(section, frozenset())
        is_never_in = traits_of(spec, name).role == "location"
        if not (is_always_in or is_never_in or field.is_required()):
            defaults[name] = json.loads(json.dumps(field.default))
    return defaults


_DEFAULTS_LEFT_OUT = {section: _defaults_left_out(section, spec) for section, spec in sections_of(Trial).items()}


@lru_cache(maxsize=1 << 12)
def samples_used(dataset_samples: int, fraction: float) -> int:
    """Return the number of training images that a fraction of a dataset is, rounded up.

    It is exact: 0.1 * 3 of 50,000 images are 15,000, not 15,001.
    """
    return math.ceil(dataset_samples * exact(fraction))


def steps_per_epoch(samples: int, data_ranks: int, micro_batch: int, grad_accum: int, drop_last: bool) -> int:
    """Return the optimizer steps in an epoch of `samples` images (already a fraction of the dataset).

    On each of N data-parallel ranks they are ceil(ceil(samples / N) / micro_batch) micro-steps, of which `grad_accum`
    make a step. Nested ceilings collapse, so this is ceil(samples / (N * micro_batch * grad_accum)). With `drop_last`
    the incomplete last step is left out.
    """
    global_batch = data_ranks * micro_batch * grad_accum
    whole_steps, remaining = divmod(samples, global_batch)
    has_short_step = remaining > 0 and not drop_last
    return whole_steps + 1 if has_short_step else whole_steps


def last_step_share(trial: Trial, samples: int) -> float | None:
    """Return the length of an epoch's short last step as a share of a whole step, on the rank where it is longest.

    `datasets.batches` shrinks a rank's micro-batch of m images to ceil(m * R / G) in that step, where R images remain
    for a global batch of G. Example: 0.75, where 3 images remain for a micro-batch of 4.

    Return None where no step is shorter than the others: the epoch has one step, its images fill all steps, or
    `drop_last` leaves the last one out.

    Args:
        trial: gives the batch sizes.
        samples: images of an epoch.
    """
    global_batch = trial.global_batch
    remaining = samples % global_batch
    if not remaining or samples < global_batch or trial.train.drop_last:
        return None
    images_by_rank = trial.train.micro_batches or (trial.train.micro_batch,)
    # -(-a // b) is a / b rounded up.
    return max(-(-images * remaining // global_batch) / images for images in images_by_rank)


def effective_steps(trial: Trial, samples: int) -> float:
    """Return the length of an epoch of `samples` images in whole steps; its short last step counts `last_step_share`.

    Example: 10 whole steps and one of half the length are 10.5.
    """
    steps = trial.steps_per_epoch(samples)
    share = last_step_share(trial, samples)
    return float(steps) if share is None else steps - 1 + share


def exact(share: float) -> Fraction:
    """Return the rational number that a float was meant to be: 3/10 for 0.3 and 0.1 * 3, 5/7 for 0.7142857142857143.

    It is the one with the smallest denominator, to a power of ten, within a few rounding errors of the float. With it
    exactly 15,000 images are not rounded up to 15,001.
    """
    for digits in range(1, 16):
        candidate = Fraction(share).limit_denominator(10**digits)
        if math.isclose(candidate, share, rel_tol=1e-14):
            return candidate
    return Fraction(share)
