"""What a prediction is: every figure with two intervals, a label, and what had to be assumed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Literal

from vitscale.prediction.evidence import Evidence
from vitscale.present.estimate import Estimate
from vitscale.trial.model_cost import ParameterCount
from vitscale.trial.trial import Mode, Trial

CONFIDENCE = 0.90
"""Confidence of both intervals. (What was measured has 95 % intervals, as the report says: `analysis.statistics`.)"""
REACH = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
"""Standard deviations of a normal distribution from its middle to the ends of such an interval."""

Label = Literal["measured", "interpolated", "extrapolated", "prior-driven", "does not fit"]
"""measured: its own runs answer; only in advice and plans. interpolated: between rank counts that were measured, on
no more hosts. extrapolated: beyond them, with every part of the answer resting on something measured or declared.
prior-driven: a part that decides the answer rests on nothing but arithmetic (an engine that nobody ran), or what is
known of clusters in general. does not fit:
the model is far from some of the measured points themselves, and the intervals are wide enough to hold those."""


def predicted(value: float, low: float, high: float, future_low: float, future_high: float) -> Estimate:
    """A figure with two 90 % intervals: of the mean over many runs, and of one run still to be made.

    Job-to-job variation makes the second one wider.
    """
    return Estimate(value, low, high, CONFIDENCE, future_low=future_low, future_high=future_high)


@dataclass(frozen=True)
class Assumption:
    """A part of the answer that nothing measured says anything about."""

    part: str
    """In a few words: "network between hosts"."""
    taken: str
    """What was taken for it: "about 3 GB/s, within a factor of 4 either way"."""
    measurement: str
    """The cheapest measurement that would replace it, as a command or a study."""


MEMORY, START_UP = "memory", "start-up"
BESIDE_STEPS = (MEMORY, START_UP)
"""Assumptions that leave the time of a step as it is."""


PART_FIELDS = tuple(f"{part}_seconds" for part in ("compute", "wait", "wire", "norm", "bubble", "rest"))
"""Fields of a prediction that tell of the parts of a step."""
STEP_FIELDS = ("step_seconds", *PART_FIELDS)
"""Fields of a prediction that tell of a step, and of its parts."""
REST_TOLD = 0.01
"""Share of a step from which it is told that its parts come to less, and up to which they may come to more."""


@dataclass(frozen=True)
class Prediction:
    """One series at one rank count. None where unavailable; `reasons` says why, by field."""

    series: str
    """The report's name of the curve it continues; for a configuration that no curve has, what it differs in."""
    mode: Mode
    labels: Mapping[str, Any]
    """What tells the series apart from others of the same results."""
    trial: Trial
    """The resolved trial: its world has `gpus` ranks, its batch sizes are those at that rank count."""
    gpus: int
    nodes: int
    label: Label
    images: int | None
    """Images of an epoch, all ranks together."""
    steps_per_epoch: int | None
    step_seconds: Estimate
    """With a reason beside it, it and its parts are those of one image of each rank, and not to be shown."""
    epoch_seconds: Estimate | None
    """Rounded steps x step seconds; the start-up of a run is not in it."""
    images_per_second: Estimate | None
    speedup: Estimate | None
    """Against the smallest measured rank count of the series, as `vitscale.analysis.scaling` defines it."""
    efficiency: Estimate | None
    compute_seconds: Estimate | None
    """Part of a step: all that a rank does itself."""
    wait_seconds: Estimate | None
    """Exposed part of a step: waiting for the slowest rank."""
    wire_seconds: Estimate | None
    """Exposed part of a step: the transfers themselves, but for those of synchronised norms."""
    norm_seconds: Estimate | None
    """Part of a step: what synchronised norms exchange."""
    bubble_seconds: Estimate | None
    """Part of a step: waiting for stages of other ranks."""
    rest_seconds: Estimate | None
    """What the parts are short of the step, without an interval: waiting for data, slower further hosts, what the model
    leaves out, and that medians do not add up."""
    memory_bytes: int | None
    """Forecast peak of one rank's tensors."""
    memory_capacity_bytes: int | None
    """Memory of the device."""
    oom_chance: float | None
    """Chance that it will not fit into the device, in [0, 1]."""
    joules_per_epoch: Estimate | None
    cost_per_epoch: Estimate | None
    """In the currency of the price that was given."""
    startup_seconds: Estimate | None
    """Start-up of one run, with its own intervals. Compiling an extension, which is done once, is not in it."""
    effective_draws: float
    """Independent draws that the intervals rest on."""
    assumptions: tuple[Assumption, ...]
    reasons: Mapping[str, str]
    """Field -> why it is None."""
    gpu: str | None = None
    """Its type of GPU, where the series was measured on another."""
    parameters: ParameterCount | None = None
    """Parameters of its model, and how they are known."""
    host_memory_bytes: int | None = 0
    """Bytes that all ranks of a host offload to its memory together; 0 where none are offloaded."""
    host_memory_capacity_bytes: int | None = None
    """Memory of a host, as it was recorded."""
    host_oom_chance: float | None = 0.0
    """Chance that what is offloaded will not fit into the host, in [0, 1]; 0 where nothing is offloaded."""


@dataclass(frozen=True)
class Score:
    """How well larger rank counts are predicted that were measured but left out of the fit."""

    series: str
    fitted_gpus: tuple[int, ...]
    held_out_gpus: tuple[int, ...]
    runs: int
    """How many runs were held out."""
    mean_absolute_percentage_error: float
    """Error of step seconds, as a share: 0.027 is 2.7 %."""
    worst_error: float
    held: int
    """Held-out runs within the 90 % interval of a future run."""
    interval_score: float
    """Gneiting & Raftery (2007), equation 43, at 90 %, over the run's own value: lower is better."""
    baseline_error: float
    """The same error of the baseline, constant seconds per step x rounded steps."""
    baseline_interval_score: float


@dataclass(frozen=True)
class Forecast:
    """An answer with all it rests on: the predictions, and how well such predictions did."""

    evidence: Evidence
    predictions: tuple[Prediction, ...]
    """Series by series, in rising order of ranks."""
    scores: tuple[Score, ...]
    """Scores of the series that allow one: predicted from the smaller counts and compared with the larger."""
    left_out: tuple[str, ...] = ()
    """What was asked and cannot be answered, and why."""
