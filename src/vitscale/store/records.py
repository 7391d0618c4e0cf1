"""What the ranks of a run leave behind: raw values per step and rank, and the environment.

What the driver writes around them stands in `store.results`, under the same format.

Format history (`FORMAT`):
 11  the oldest that is read (`OLDEST_FORMAT`). Imported.batch_told, ParallelSpec.schedule and stages_per_rank, and
     MeterLine.reason came while it was current: some of its records lack them.
 12  which vitscale: RunHeader.vitscale and StudyRecord.vitscale; "vitscale's measuring code" among the versions of
     Environment and StudyRecord, a digest. Null or missing in format 11: unknown, and like any other.
     StudyRecord.factory_digests and Imported.assumed, empty in format 11. The line meter and WindowSpec.meters: in
      format 11 the line probe and WindowSpec.probes. Two things came while it was current, so that some of its records
      lack them: ModelLine.parameters_source and flops_source, without which a script's counts have an unknown source,
      and Environment.host_memory_bytes.

A reader accepts the formats from `OLDEST_FORMAT` to its own; others are refused by name (`store.formats`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import AliasChoices, Field, PlainSerializer, PlainValidator

from vitscale.store.formats import ReadableFormats
from vitscale.store.lines import Count, Finite, IfThere, RankLine, RankLines, Record, Seconds, Steps
from vitscale.store.lines import StepLine as StepLine

FORMAT = 12
OLDEST_FORMAT = 11
READABLE_RECORDS = ReadableFormats("record", OLDEST_FORMAT, FORMAT)

PhaseName = Literal["data", "h2d", "forward", "backward", "bubble", "optimizer"]

EXPOSED = ("wait", "wire", "norm")
PARTS = ("data_wait", "h2d", "forward", "backward", "bubble", *EXPOSED, "optimizer", "launch_gaps", "other")
"""Parts of an explained step (`vitscale.analysis.time.breakdown`)."""
COMMUNICATION = "communication"
"""The part that replaces EXPOSED where these cannot be told apart."""
NORM_MARK = "vitscale.norm"
"""Name under which a profile records what synchronised norms exchange."""
FULL_DISK_BYTES = 64 * 1024
"""Free bytes at which a disk counts as full: a record's last lines find no room then."""
UNKNOWN_OPERATION = "unknown"
"""Operation of a collective whose kernel does not tell it; it may have a root."""


class GpuSettings(Record):
    """How a GPU was set and linked when the rank began; null where NVML does not tell."""

    power_limit_watts: Finite | None = None
    """The enforced limit, which is the lowest of all."""
    power_limit_default_watts: Finite | None = None
    application_clock_mhz: int | None = None
    memory_application_clock_mhz: int | None = None
    persistence: bool | None = None
    ecc: bool | None = None
    mig: bool | None = None
    pcie_generation: int | None = None
    """The highest generation that both GPU and slot allow."""
    pcie_width: int | None = None
    nvlinks: int | None = None
    """Number of NVLink connections that were up."""


class DeviceRecord(Record):
    """What a rank computes on."""

    type: Literal["cpu", "cuda"]
    name: str
    memory_bytes: int | None = None
    driver: str | None = None
    sm_clock_mhz: int | None = None
    """Always null: the clock of an idle GPU tells nothing. `GpuSamples` has the clock under load."""
    uuid: str | None = None
    numa_node: int | None = None
    """The memory node that a GPU is attached to; null where it is not known."""
    settings: GpuSettings | None = None


class Environment(Record):
    """A rank's host and software, as the rank saw them itself."""

    host: str
    device: DeviceRecord
    cores_allowed: tuple[int, ...]
    threads: int | None
    """Null where an imported log does not tell."""
    cpu_quota_cores: Finite | None
    versions: dict[str, str | None]
    backend: str | None
    settings: dict[str, str]
    """NCCL_*, GLOO_*, FI_*, UCX_*, OMP_*, CUDA_*, TORCH_* and similar variables that were set, and LD_LIBRARY_PATH.

    On a GPU the settings in NCCL's files (/etc/nccl.conf, ~/.nccl.conf) too, where no variable replaces them.
    """
    numa_nodes: tuple[int, ...] | None = None
    """The memory nodes of `cores_allowed`; null where the kernel does not tell."""
    git_revision: str | None
    """Revision of rank 0's working directory, with "+changes" if it has any; null without one and on other ranks."""
    tf32: bool | None = None
    """Whether fp32 products may be computed in TF32, by whatever setting; null on cpu."""
    physical_cores: tuple[int, ...] | None = None
    """The physical cores behind `cores_allowed`, each by its lowest number; null where the kernel does not tell."""
    cpu: str | None = None
    """The host's processor."""
    cpu_governor: str | None = None
    """Governor of its clocks ("performance", "powersave"); null where it is unknown, as in most virtual machines."""
    cpu_boost: bool | None = None
    """Whether cores may clock above their base (turbo)."""
    kernel: str | None = None
    network_adapters: tuple[str, ...] | None = None
    """Type, firmware and rate of the InfiniBand and RoCE adapters that are up, each once; null: the host has none."""
    gpus_unused: int | None = None
    """Number of CUDA devices that torch sees though the rank computes on the host's processor."""
    allocation: str | None = None
    """The batch system's job around the rank ("slurm 4711"): runs of one allocation share its hosts. Null outside."""
    host_memory_bytes: int | None = None
    """Memory of the host, which all its ranks share."""


class StartLine(RankLine):
    """The first line of a rank's file."""

    kind: Literal["start"] = "start"
    format: int
    trial: str
    rank: Count
    world_size: int
    environment: Environment


class PhaseLine(RankLine):
    """One part of the start-up; parts come in the order in which they happened.

    `prepare`: what the driver waited for a prepared process to be ready, in the first run that it serves. It belongs to
    all runs that follow on it, so that no start-up figure has it.
    """

    kind: Literal["phase"] = "phase"
    name: Literal["prepare", "launch", "imports", "data", "model", "engine", "script", "first_step"]
    seconds: Seconds
    compiled: tuple[str, ...] = ()
    """What this phase compiled, or waited for another rank to compile: extensions, blocks. Later runs reuse it."""


class ModelLine(RankLine):
    """The model that was really built, for counts that arithmetic cannot know, and how its gradients travel."""

    kind: Literal["model"] = "model"
    parameters: int | None
    """Null, here and below, where an imported log does not tell."""
    gradient_dtype: str | None
    synchronised_timing: bool | None
    dataset_fingerprint: str
    train_samples: int | None
    held_out_samples: int | None
    flops_per_image: Count | None = None
    """FLOPs of training one image, as a user's own script states them, or as they were counted of the module that it
    describes; null for models that are known here."""
    parameters_source: Literal["measured", "told"] | None = None
    """Whether a user's own script had its module counted, or states the number; null for all other models, and in older
    records."""
    flops_source: Literal["traced", "told"] | None = None
    """Whether a user's own script had its module traced, or states the FLOPs; null for all other models, and in older
    records."""


class ExplainedLine(RankLine):
    """One explained step's time on one rank: raw intervals, from which its parts are worked out later.

    All times are seconds from the step's beginning, in the rank's own clock.
    """

    kind: Literal["explained"] = "explained"
    step: Count
    block: Count
    """The explained block of the run that it belongs to."""
    device: Literal["cpu", "cuda"]
    """The device that was measured: on cuda all intervals but `host_data` are the GPU's own."""
    seconds: Seconds
    phases: tuple[tuple[PhaseName, Finite, Finite], ...]
    """(name, start, end) in order, without overlap; a phase occurs once per micro-step."""
    idle: tuple[tuple[Finite, Finite], ...]
    """(start, end) of the intervals in which nothing is computed, not counting gaps between kernels of one operator. On
    cuda a copy other than from the host is no such interval."""
    collectives: tuple[tuple[str, str, Finite, Finite], ...]
    """(communicator, operation, start, end) in the order of issue; start is when this rank issued it."""
    norms: tuple[Count, ...] = ()
    """Indices into `collectives` of those that synchronised norms exchange by."""
    copies: tuple[tuple[Finite, Finite], ...] = ()
    """Copies from host to device; empty on cpu."""
    host_data: tuple[tuple[Finite, Finite], ...] = ()
    """(start, end) while the host waited for the loader, on cuda."""
    unknown: dict[str, str] = Field(default_factory=dict)
    """Parts of the breakdown that this backend cannot tell, and why. If COMMUNICATION is among them, not even the sum
    of wait and wire is known."""


class EnergyReading(Record):
    """Energy used in a span of time, or why it is unknown."""

    joules: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] | None
    source: str | None
    """ "NVML" or "RAPL", with what it covers; null where unavailable."""
    reason: str | None
    """Why it is unavailable; null where it is not."""
    devices: tuple[str, ...] = ()
    """What was measured (GPU UUIDs, RAPL packages with their host): do not add up ranks that share one."""


GPU_LIMITS = ("power cap", "sync boost", "board limit", "reliability")
"""Reasons for held clocks that are normal for a GPU under load, or for its group: neither heat nor fault."""


class GpuSamples(Record):
    """What NVML reported of a rank's GPU in these steps, once a second; null where it does not tell."""

    samples: Count
    utilisation: Finite | None
    """Mean share of time in which a kernel ran, in [0, 1]."""
    sm_clock_mhz_median: Finite | None
    sm_clock_mhz_min: Finite | None
    unheld_sm_clock_mhz: Finite | None = None
    """Highest clock while it worked and nothing but the user's own setting held it back: the locked clock (which NVML
    sets but does not report), the application clock, or else the boost clock. Null: never so, or not told."""
    temperature_celsius_max: Finite | None
    power_watts_mean: Finite | None
    throttle_reasons: tuple[str, ...]
    """Heat and faults that slowed the clocks; empty where there were none."""
    throttled_share: Finite | None
    """Share of samples with at least one of these reasons."""
    limits: tuple[str, ...] | None = None
    """Limits at which the GPU held its clocks, as most do under load: its power limit."""
    limited_share: Finite | None = None


class ResourcesLine(RankLine):
    """What one rank used in the longest stretch of timed steps of an epoch. Null: not available.

    Where an epoch has no timed steps: in all its steps. Memory is that of the whole epoch.
    """

    kind: Literal["resources"] = "resources"
    epoch: Count
    steps: tuple[Count, Count] | None = None
    """The first and the last of these steps; null where the epoch has no step."""
    seconds: Seconds
    cpu_seconds: Seconds
    """Processor time of this process, all threads together."""
    cpu_throttled_seconds: Seconds | None
    """Seconds for which the CPU controller kept this rank's cgroup waiting; null without a quota."""
    rss_bytes: Count | None
    """Resident memory of the process at the end, without pages of files (`vitscale.base.resident_memory`)."""
    peak_rss_bytes: Count | None
    """The highest of it since the process began."""
    cuda_allocated_bytes: Count | None = None
    """Highest allocated memory in this epoch; null on cpu."""
    cuda_reserved_bytes: Count | None = None
    cuda_device_bytes: Count | None = None
    """Memory of the whole device in use at the end, by any process."""
    gpu: GpuSamples | None = None
    gpu_reason: str | None = None
    """Why `gpu` is null."""
    energy: EnergyReading | None = None


class MatmulLine(RankLine):
    """The matrix-multiply rate of this rank's own device, measured after training in the trial's arithmetic."""

    kind: Literal["matmul"] = "matmul"
    dtype: str
    size: Count
    """Rows and columns of the square matrices."""
    flops_per_second: Annotated[float, Field(gt=0.0, allow_inf_nan=False)]


class GradientLine(RankLine):
    """Squared norms of the gradient at two batch sizes in one step, for the gradient noise scale.

    Both norms are there, or neither is and `reason` says why.
    """

    kind: Literal["gradient"] = "gradient"
    step: Count
    small_images: Annotated[int, Field(ge=1)]
    """Images of one unreduced gradient: those of a rank's micro-batch."""
    small_squared_norm: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] | None
    """Mean over this rank's micro-steps."""
    big_images: Annotated[int, Field(ge=1)]
    big_squared_norm: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] | None
    """Squared norm of the gradient that the optimizer gets, before clipping."""
    reason: str | None = None
    """Why the norms of this step are null; null where they are known."""


class Collective(Record):
    """One collective as a rank called it: sizes before the backend's algorithm adds anything."""

    communicator: str
    ranks: Annotated[int, Field(ge=1)]
    """Number of ranks in the communicator."""
    operation: str
    """all_reduce, all_gather, reduce_scatter, broadcast, ...: the field's names without the backend's prefix."""
    dtype: str
    """torch's name: float32, bfloat16, ..."""
    input_elements: Count
    output_elements: Count


class TrafficLine(RankLine):
    """All collectives of one optimizer step in the order in which a rank called them, counted without synchronising."""

    kind: Literal["traffic"] = "traffic"
    step: Count
    backend: str
    """nccl or gloo: decides what carries out a collective, and how."""
    collectives: tuple[Collective, ...] | None
    """Null where they could not be counted; `reason` says why."""
    reason: str | None = None


class CheckpointLine(RankLine):
    """What saving and restoring a checkpoint took on one rank, with all ranks taking part."""

    kind: Literal["checkpoint"] = "checkpoint"
    save_seconds: Seconds
    load_seconds: Seconds
    bytes: Count
    """Size of all files of the checkpoint, whichever rank wrote them."""


class EpochLine(RankLine):
    """One epoch, with figures reduced over all ranks. `seconds` includes the barrier that ends it."""

    kind: Literal["epoch"] = "epoch"
    epoch: Count
    steps: Count | None
    """Null, here and below, where an imported log does not tell."""
    images: Count | None
    """Images of all ranks together."""
    seconds: Seconds
    complete: bool
    """False where the run ended (`measure.steps`) before the epoch."""
    train_loss: float | None
    train_accuracy: float | None
    held_out_loss: float | None
    held_out_accuracy: float | None
    """Accuracy over images; in segmentation over the pixels that count, where the training's is null."""
    mean_iou: float | None = None
    """Intersection over union on the held-out images of segmentation, mean over classes. Null in other tasks."""
    peak_bytes: int | None
    """Highest device memory so far; on CPU, resident memory of the process."""
    evaluation_seconds: Seconds | None = None
    """Seconds of the evaluation after the epoch, in no other figure; null without one."""
    loader_images_per_second: float | None = None
    """Images per second that this rank's loader reads if none of its threads ever waits; null where it is not known."""
    loader_reading_seconds: Seconds | None = None
    """Seconds that its threads spent on reading stored images, added up. Null, as decoding, where the two cannot be
    told apart (arrays, generated images)."""
    loader_decoding_seconds: Seconds | None = None
    """Seconds spent on decoding what was read into pixels; 0 where pixels are stored decoded."""


class MeterLine(RankLine):
    """What a meter of another package measured in an epoch."""

    kind: Literal["meter", "probe"] = "meter"
    """"probe" in formats 9 to 11."""
    meter: str = Field(validation_alias=AliasChoices("meter", "probe"))
    """Its name."""
    epoch: Count
    values: dict[str, Finite | None]
    """Figures by the meter's own names, which should end in their unit; null where unavailable."""
    reason: str | None = None
    """Why figures are null, or why there are none; null where all are known."""


class ErrorLine(RankLine):
    """The exception that ended a rank."""

    kind: Literal["error"] = "error"
    error_type: str
    message: str
    traceback: str
    out_of_memory: bool
    disk_full: bool
    unix_seconds: Finite


class EndLine(RankLine):
    """The last line of a rank that did all its work."""

    kind: Literal["end"] = "end"


class RankRecord(RankLines):
    """All that one rank wrote, line by line in order; `broken` names the lines that could not be read."""

    rank: int
    start: StartLine | None
    model: ModelLine | None
    phases: tuple[PhaseLine, ...]
    steps: Annotated[Sequence[StepLine], PlainValidator(Steps.of), PlainSerializer(list)]
    """Always `Steps`."""
    epochs: tuple[EpochLine, ...]
    explained: tuple[ExplainedLine, ...] = ()
    resources: tuple[ResourcesLine, ...] = ()
    matmul: MatmulLine | None = None
    gradients: tuple[GradientLine, ...] = ()
    traffic: tuple[TrafficLine, ...] = ()
    checkpoint: CheckpointLine | None = None
    meters: tuple[MeterLine, ...] = ()
    error: ErrorLine | None
    ended: Annotated[bool, IfThere(EndLine)]
    broken: tuple[str, ...]

    @property
    def last_sign(self) -> str:
        """In words, how far the rank has come."""
        if self.steps:
            return f"last step {self.steps[-1].step}"
        return f"last start-up phase {self.phases[-1].name}" if self.phases else "nothing recorded"
