"""What a run leaves behind: raw values per step and rank, the environment, one outcome.

Format history (`FORMAT`):
  1  first version: per-rank JSON lines (start, phase, step, epoch, error, end), outcome.json, trial.json, study.json.

A reader accepts its own format and older ones; a newer one is refused by name.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from vitscale.trial import Mode, Trial

FORMAT = 1

OutcomeKind = Literal["completed", "oom", "timeout", "hang", "failed", "skipped"]
Seconds = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class Record(BaseModel):
    """Base of everything stored. Unknown keys are refused: a record is read as it was meant, or not at all."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class Device(Record):
    """What a rank computes on."""

    type: Literal["cpu", "cuda"]
    name: str
    memory_bytes: int | None = None
    driver: str | None = None
    sm_clock_mhz: int | None = None
    uuid: str | None = None


class Environment(Record):
    """Where a rank ran, as it saw it itself."""

    host: str
    device: Device
    cores_allowed: tuple[int, ...]
    threads: int
    cpu_quota_cores: Finite | None
    versions: dict[str, str | None]
    backend: str | None
    settings: dict[str, str]
    """NCCL_*, GLOO_*, OMP_*, CUDA_* and TORCH_* variables that were set."""
    git_revision: str | None
    """Of the working directory, with "+changes" where it had any; null outside a repository."""


class StartLine(Record):
    """First line of a rank's file."""

    kind: Literal["start"] = "start"
    format: int
    trial: str
    rank: Count
    world_size: int
    environment: Environment


class PhaseLine(Record):
    """One part of the start-up, in the order it happened."""

    kind: Literal["phase"] = "phase"
    name: Literal["launch", "imports", "data", "model", "engine", "first_step"]
    seconds: Seconds


class ModelLine(Record):
    """What was really built, for models whose counts arithmetic cannot know; and how gradients travel."""

    kind: Literal["model"] = "model"
    parameters: int
    gradient_dtype: str | None
    synchronised_timing: bool
    dataset_fingerprint: str
    train_samples: int
    held_out_samples: int


class StepLine(Record):
    """One optimizer step as one rank saw it: from the end of the step before to its own end."""

    kind: Literal["step"] = "step"
    step: Count
    epoch: Count
    seconds: Seconds
    images: Count
    """Real images of this rank; padding is not counted."""
    loss: float | None
    """This rank's share of the loss; the mean over ranks is the mean over the step's real images. Null: not finite."""
    warmup: bool


class EpochLine(Record):
    """One epoch, with figures reduced over all ranks. The barrier that ends it is inside `seconds`."""

    kind: Literal["epoch"] = "epoch"
    epoch: Count
    steps: Count
    images: Count
    """Of all ranks."""
    seconds: Seconds
    complete: bool
    """False where the run ended (`measure.steps`) before the epoch did."""
    train_loss: float | None
    train_accuracy: float | None
    held_out_loss: float | None
    held_out_accuracy: float | None
    peak_bytes: int | None
    """Device memory at its highest so far; resident memory of the process on CPU."""


class ErrorLine(Record):
    """The exception that ended a rank."""

    kind: Literal["error"] = "error"
    error_type: str
    message: str
    traceback: str
    out_of_memory: bool
    disk_full: bool
    unix_seconds: Finite


class EndLine(Record):
    """Last line of a rank that did all its work."""

    kind: Literal["end"] = "end"


Line = Annotated[
    StartLine | PhaseLine | ModelLine | StepLine | EpochLine | ErrorLine | EndLine,
    Field(discriminator="kind"),
]
LINE: TypeAdapter[Line] = TypeAdapter(Line)


class RankRecord(Record):
    """All that one rank wrote, line by line in order; `broken` names the lines that could not be read."""

    rank: int
    start: StartLine | None
    model: ModelLine | None
    phases: tuple[PhaseLine, ...]
    steps: tuple[StepLine, ...]
    epochs: tuple[EpochLine, ...]
    error: ErrorLine | None
    ended: bool
    broken: tuple[str, ...]


class Outcome(Record):
    """How a run ended: exactly one per run, written last and by the driver alone."""

    format: int = FORMAT
    kind: OutcomeKind
    reason: str
    """One sentence; empty only where the run completed."""
    detail: str = ""
    """The guilty rank's traceback or the end of the log."""
    rank: int | None = None
    """The rank that failed first, where that is known."""
    external: bool = False
    """The cause lies outside the trial (disk full): the run is done again by the next `vitscale run`."""
    started_unix_seconds: Finite
    wall_seconds: Seconds


class RunHeader(Record):
    """trial.json in a run's folder: what this run was to do."""

    format: int = FORMAT
    trial_id: str
    repeat: Count
    attempt: Count
    trial: Trial
    command: tuple[str, ...]
    dataset_fingerprint: str


class Run(Record):
    """One execution of a trial, read back whole."""

    header: RunHeader
    outcome: Outcome
    ranks: tuple[RankRecord, ...]


class CurvePoint(Record):
    """One trial's place on a curve."""

    gpus: int
    trial_id: str


class Curve(Record):
    """Trials that differ in rank count alone, under one batch policy."""

    mode: Mode
    labels: dict[str, Any]
    """The swept fields and their values, in the study's order."""
    points: tuple[CurvePoint, ...]


class StudyRecord(Record):
    """study.json: what the results folder holds."""

    format: int = FORMAT
    name: str
    text: str
    """The study file as it was read."""
    repeats: int
    curves: tuple[Curve, ...]
    trials: dict[str, Trial]
    versions: dict[str, str | None]
    dataset_fingerprints: dict[str, str]
    """Trial identity to the fingerprint of the data it reads."""


class Results(Record):
    """A results folder read back: finished runs of this study, and what was left out and why."""

    study: StudyRecord
    runs: tuple[Run, ...]
    problems: tuple[str, ...]
