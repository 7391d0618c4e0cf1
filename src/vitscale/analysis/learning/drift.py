"""Does an engine compute what the others do? Its loss, step by step, against that of a trial that does the same work.

Trials show the same loss at every optimizer step, but for rounding, if they differ only in how training is distributed
(`trial.WRAPPER_FIELDS`), how the global batch is split into ranks and micro-batches, and what trades memory for time.
The reference is the run without a wrapper; where the study has none, the trial that most others agree with. How far
rounding may reach, and from which measurements: docs/decisions/0010-drift-by-the-first-steps.md.

A trial drifts if its losses differ from the reference's by more than rounding explains. The difference of two runs in a
step is relative to the reference's loss: 0.01 is one per cent. In functions, the member is the trial that is compared.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import numpy as np

from vitscale.analysis.runs.figures import RunFigures
from vitscale.analysis.scaling import trial_name
from vitscale.analysis.trials import Drift, TrialFigures
from vitscale.engines import of_engine
from vitscale.engines.checks import computation
from vitscale.engines.facts import ONE_PROCESS
from vitscale.trial.fields import fields_where
from vitscale.trial.rank_batches import micro_batches
from vitscale.trial.trial import LOCATION_FIELDS, TrainSpec, Trial

STEPS = 20
"""Number of first optimizer steps that are compared: later ones amplify rounding."""
_LEAST_SCALE_SHARE = 0.01
"""Differences are relative to the reference's loss, or to this share of its first loss where that is more."""

Losses = Mapping[int, float | None]
"""Step -> loss; None where it is not finite."""


class StepDifference(NamedTuple):
    """How far two runs' losses of one step are apart."""

    step: int
    difference: float
    """Relative to the reference's loss; infinite where one loss is finite and the other is not."""


class RunLosses(NamedTuple):
    """The losses of a run's first steps."""

    repeat: int
    losses: Losses


class _NumberedRun(NamedTuple):
    """The figures of a completed run."""

    repeat: int
    figures: RunFigures


@dataclass(frozen=True)
class LossDifference:
    """How far two runs' losses are apart, step by step."""

    by_step: tuple[StepDifference, ...]

    @property
    def worst(self) -> StepDifference:
        """The first step with the largest difference."""
        return max(self.by_step, key=lambda step: step.difference)

    def equal_steps(self, tolerance: float) -> int:
        """Number of steps before the first one that differs by more than `tolerance`."""
        for position, step in enumerate(self.by_step):
            if step.difference > tolerance:
                return position
        return len(self.by_step)

    def differs_early(self, tolerance_of_first_two: float, tolerance_of_first_three: float) -> bool:
        """Whether losses differ by more than rounding explains in the first three steps, before training amplifies it.

        Args:
            tolerance_of_first_two: the largest difference that rounding explains in the first two steps.
            tolerance_of_first_three: the same in the first three steps, after two updates.
        """
        first_three = [step.difference for step in self.by_step[:3]]
        first_two = first_three[:2]
        return max(first_two) > tolerance_of_first_two or max(first_three) > tolerance_of_first_three


def largest_difference(member: TrialFigures, reference: TrialFigures) -> LossDifference | None:
    """Return how far the losses of two trials are apart, by the run of `member` that differs most.

    None where no two runs can be compared.
    """
    if not seeded(reference):
        difference = _largest_difference_at_equal_steps(member, reference)
        if difference is not None:
            return difference
    difference_by_run = [between_runs(run, reference) for run in losses(member)]
    known_differences = [difference for difference in difference_by_run if difference is not None]
    return max(known_differences, key=lambda difference: difference.worst.difference, default=None)


def _largest_difference_at_equal_steps(member: TrialFigures, reference: TrialFigures) -> LossDifference | None:
    """Return `largest_difference` in the usual case, worked out for all runs of `member` at once, which is fast.

    Return None where it is not that case: a run has other steps than the reference's first run, a loss is missing or
    not finite, or the reference's losses are 0.
    """
    reference_record = _runs_by_repeat(reference)[0].figures.loss_by_step
    steps = reference_record.step[:STEPS]  # numbers of S steps, at most the first 20
    reference_losses = reference_record.loss[:STEPS]  # (S,)
    member_records = [run.figures.loss_by_step for run in _runs_by_repeat(member)]
    steps_by_run = [record.step[:STEPS] for record in member_records]
    if len(steps) < 2 or not steps_by_run:
        return None
    if not all(np.array_equal(steps_of_run, steps) for steps_of_run in steps_by_run):
        return None
    losses_by_run = np.stack([record.loss[:STEPS] for record in member_records])  # (runs, S)
    scale = np.maximum(np.abs(reference_losses), _LEAST_SCALE_SHARE * abs(reference_losses[0]))  # (S,)
    with np.errstate(all="ignore"):
        gaps = np.abs(losses_by_run - reference_losses)
        differences_by_run = gaps / scale  # (runs, S)
    if not np.isfinite(gaps).all() or not (scale > 0).all():
        return None
    largest_by_run = differences_by_run.max(axis=1)
    differences_of_worst_run = differences_by_run[largest_by_run.argmax()].tolist()
    by_step = map(StepDifference, steps.tolist(), differences_of_worst_run)
    return LossDifference(tuple(by_step))


def _runs_by_repeat(result: TrialFigures) -> list[_NumberedRun]:
    """Return the completed runs of a trial in the order of repeats."""
    runs = []
    for record, figures in zip(result.recorded_runs, result.run_figures, strict=True):
        runs.append(_NumberedRun(record.header.repeat, figures))
    return sorted(runs, key=lambda run: run.repeat)


def between_runs(run: RunLosses, reference: TrialFigures) -> LossDifference | None:
    """Return how far a run is from the reference's first run; where repeats have own seeds, from the same repeat.

    Return None where the reference has no such run, or the two have fewer than two steps in common.
    """
    figures_by_repeat = {reference_run.repeat: reference_run.figures for reference_run in _runs_by_repeat(reference)}
    if seeded(reference) or not figures_by_repeat:
        figures = figures_by_repeat.get(run.repeat)
    else:
        first_repeat = min(figures_by_repeat)
        figures = figures_by_repeat[first_repeat]
    if figures is None:
        return None
    by_step = differences(run.losses, _first_losses(figures))
    return LossDifference(by_step) if by_step else None


def _first_losses(figures: RunFigures) -> Losses:
    """Return the losses of a run's first steps that are compared."""
    return dict(figures.loss_by_step[:STEPS])


def seeded(result: TrialFigures) -> bool:
    """Whether each repeat has a seed of its own, and losses of its own with it."""
    return result.trial.train.target_accuracy is not None


def losses(result: TrialFigures) -> list[RunLosses]:
    """Return the first losses of each completed run, in the order of repeats."""
    return [RunLosses(run.repeat, _first_losses(run.figures)) for run in _runs_by_repeat(result)]


def differences(member: Losses, reference: Losses) -> tuple[StepDifference, ...]:
    """Return the difference `|l - r| / max(|r|, |r_first| / 100)` in each step that both have.

    The comparison ends with the first loss that is not finite. Where only one of the two is finite there, this step has
    an infinite difference and is the last; where neither is, the step before is the last.

    Empty for fewer than two such steps.

    Args:
        member: the losses l.
        reference: the losses r.
    """
    common_steps = sorted(member.keys() & reference.keys())
    if len(common_steps) < 2:
        return ()
    first_reference_loss = abs(reference[common_steps[0]] or 0.0)
    by_step: list[StepDifference] = []
    for step in common_steps:
        loss = member[step]
        reference_loss = reference[step]
        if loss is None and reference_loss is None:
            break
        if loss is None or reference_loss is None:
            return (*by_step, StepDifference(step, math.inf))
        scale = max(abs(reference_loss), _LEAST_SCALE_SHARE * first_reference_loss)
        by_step.append(StepDifference(step, _relative_gap(abs(loss - reference_loss), scale)))
    return tuple(by_step) if len(by_step) > 1 else ()


def _relative_gap(gap: float, scale: float) -> float:
    """Return gap / scale. On a scale of 0 it is infinite, but 0 where there is no gap."""
    if scale > 0:
        return gap / scale
    return math.inf if gap else 0.0


TOLERANCES = {"fp32": 1e-5, "bf16": 2.0**-8, "bf16-params": 2.0**-7, "fp16": 2.0**-8}
"""Largest relative difference of a loss that rounding explains, by precision."""
_SIXTEEN_BIT_GRADIENTS_TOLERANCE = TOLERANCES["bf16"]
"""Tolerance of fp32 training whose gradients travel in 16 bits."""
_COMPILED_TOLERANCE = 1e-4
"""Tolerance in fp32 where one of the two is compiled: its sums are in another order (docs/equality.md)."""
_TOLERANCE_OF_FIRST_TWO = 1e-6
"""Tolerance in fp32 in the first two steps, before training has had the time to amplify rounding."""
_TOLERANCE_OF_FIRST_THREE = 1e-4
"""Tolerance in fp32 in the first three steps."""
_AMPLIFICATION_LIMIT = 30.0
"""How many times the largest difference of trials that agree a difference may be, and still be amplified rounding."""
_LARGEST_TOLERANCE = 0.01
"""Largest tolerance with which a drift is decided: beyond, the reference's own runs differ too much."""
_MOST_REFERENCE_CANDIDATES = 16
"""Most trials that are tried as the reference."""
_FIELDS_WITHOUT_EFFECT = set(fields_where(TrainSpec, lambda traits: traits.role))
"""Fields of `TrainSpec` that are left out of `_computation_key`.

They leave the loss of the first steps as it is, or the key has what follows from them, such as the global batch.
"""
_TRAINING_SECTIONS = (
    "scheduler",
    "curriculum_learning",
    "progressive_layer_drop",
    "compression_training",
    "data_efficiency",
)
"""Sections of a user's own DeepSpeed file that change what is trained."""

_ALONE_REASON = "no other trial of the study computes the same"
_IMPORTED_REASON = "neither the first weights nor the order of the images of an imported run are known"
_SCRIPT_REASON = "what a user's own script computes is its own affair"
_AMPLIFIED_REASON = (
    "equal over the first {} steps, then apart by up to {}: rounding that an unstable training has amplified, or a "
    "difference that comes late; too few trials agree to tell"
)


def drift_by_trial(trials: Mapping[str, TrialFigures]) -> dict[str, Drift]:
    """Return trial identity -> its drift: its losses against those of the trials that must show the same.

    Args:
        trials: the figures of all trials of a study, by identity.
    """
    trials_by_computation: dict[str, list[TrialFigures]] = {}
    drifts: dict[str, Drift] = {}
    for trial_id, figures in trials.items():
        reason = _reason_not_to_compare(figures)
        if reason:
            drifts[trial_id] = Drift("unknown", reason=reason)
        else:
            trials_by_computation.setdefault(_computation_key(figures), []).append(figures)
    for members in trials_by_computation.values():
        drifts |= _drifts_in_group(members)
    return {trial_id: drifts[trial_id] for trial_id in trials}


def _reason_not_to_compare(figures: TrialFigures) -> str:
    """Return why a trial's losses are compared with no others; empty where they are compared."""
    trial = figures.trial
    if trial.origin is not None:
        return _IMPORTED_REASON
    if trial.train.script is not None:
        return _SCRIPT_REASON
    if not of_engine(trial.train.wrapper).trains_like:
        return f"whom {trial.train.wrapper} trains alike with is not known"
    return "" if figures.recorded_runs else "no run has completed"


def _computation_key(result: TrialFigures) -> str:
    """Return all that decides which losses a trial shows, as JSON: equal texts mean that losses must agree."""
    trial = result.trial
    train = trial.train
    own_file = train.deepspeed_config or {}
    takes_optimizer_of_file = train.optimizer == "deepspeed_config"
    sections = (*_TRAINING_SECTIONS, "optimizer") if takes_optimizer_of_file else _TRAINING_SECTIONS
    # A model that has a digest is named by it, not by its configuration.
    unread_model_fields = {"weights", "hf"} if trial.model_digest else {"weights"}
    content: dict[str, Any] = {
        "model": trial.model.model_dump(mode="json", exclude=unread_model_fields),
        "digest": [trial.model_digest, trial.weights_digest],
        "data": trial.data.model_dump(mode="json", exclude={*LOCATION_FIELDS, "workers", "source"}),
        "fingerprint": result.recorded_runs[0].header.dataset_fingerprint,
        "train": train.model_dump(mode="json", exclude=_FIELDS_WITHOUT_EFFECT),
        "global_batch": trial.global_batch,
        "learning_rate": trial.peak_learning_rate,
        "normalised": _normalised_images(trial),
        "seed_by_repeat": seeded(result),
        "computation": computation(trial),
        "division": _batch_division(trial),
        "fp32_weights": _keeps_fp32_weights(train),
        "file": {section: own_file[section] for section in sections if section in own_file},
    }
    return json.dumps(content, sort_keys=True)


def _batch_division(trial: Trial) -> list[Any]:
    """Return how the global batch is divided into ranks and micro-batches, where that changes what is trained.

    Empty where it does not, as with engines that compute the same as one process.
    """
    if computation(trial) == ONE_PROCESS:
        return []
    return [trial.world.size, trial.train.micro_batch, trial.train.grad_accum, trial.train.micro_batches]


def _keeps_fp32_weights(train: TrainSpec) -> bool:
    """Whether training keeps weights in fp32, alone or beside 16-bit ones."""
    if train.precision not in ("bf16-params", "fp16"):
        return True
    return of_engine(train.wrapper).keeps_fp32_weights or train.master_weights


def _normalised_images(trial: Trial) -> object:
    """Return the numbers of images over which the batch norms of segmentation are taken; None in classification.

    With accumulation the number of ranks is among them: it decides into which micro-steps the short last step is cut.
    """
    train = trial.train
    if trial.model.task == "classification":
        return None
    images_by_rank = micro_batches(train, trial.layout.data)
    if train.batch_norm == "local":
        return images_by_rank
    has_short_micro_steps = train.grad_accum > 1 and not train.drop_last
    return sum(images_by_rank), trial.layout.data if has_short_micro_steps else 1


def _drifts_in_group(members: Sequence[TrialFigures]) -> dict[str, Drift]:
    """Return trial identity -> its drift, of trials that must all show the same losses."""
    if len(members) == 1:
        return {members[0].trial_id: Drift("unknown", reason=_ALONE_REASON)}
    reference = _reference(members)
    comparisons = [_Comparison.of(member, reference) for member in members if member is not reference]
    reference_spread = _reference_spread(reference, members)
    agreeing = [comparison for comparison in comparisons if comparison.agrees(reference_spread)]
    rounding_differences = [comparison.worst_difference for comparison in agreeing if comparison.worst_difference > 0]
    agreeing_spread = max(rounding_differences) if len(rounding_differences) >= 2 else math.inf
    drifts = {}
    for comparison in comparisons:
        drifts[comparison.member.trial_id] = _drift(comparison, reference_spread, agreeing_spread)
    drifts[reference.trial_id] = Drift("reference", reference.trial_id, trial_name(reference.trial))
    return drifts


def _reference(members: Sequence[TrialFigures]) -> TrialFigures:
    """Return the trial that trains without a wrapper, if there is one; else the one that most others agree with.

    Of several with the same number the first in the order of `_ReferenceRank` is taken.
    """
    ordered = sorted(members, key=lambda member: _reference_rank(member.trial))
    if of_engine(ordered[0].trial.train.engine).alone:
        return ordered[0]

    def trials_that_agree(candidate: TrialFigures) -> int:
        return sum(_Comparison.of(member, candidate).agrees(reference_spread=0.0) for member in members)

    return max(ordered[:_MOST_REFERENCE_CANDIDATES], key=trials_that_agree)  # the first of those with the most


class _ReferenceRank(NamedTuple):
    """The order in which trials are preferred as the reference: the smallest first."""

    has_wrapper: bool
    is_compiled: bool
    ranks: int
    is_unusual: bool
    """Whether the engine is another one than DDP."""
    grad_accum: int
    trial_id: str


def _reference_rank(trial: Trial) -> _ReferenceRank:
    """Return where a trial stands in that order."""
    facts = of_engine(trial.train.engine)
    return _ReferenceRank(
        has_wrapper=not facts.alone,
        is_compiled=trial.train.compile,
        ranks=trial.world.size,
        is_unusual=not facts.usual,
        grad_accum=trial.train.grad_accum,
        trial_id=trial.identity(),
    )


@dataclass(frozen=True)
class _Comparison:
    """One trial, the member, against the reference.

    Methods take `reference_spread`: the largest difference among the reference's own runs.
    """

    member: TrialFigures
    reference: TrialFigures
    difference: LossDifference | None
    """None where no two of their runs can be compared."""

    @classmethod
    def of(cls, member: TrialFigures, reference: TrialFigures) -> Self:
        """Compare the run of `member` that differs most."""
        return cls(member, reference, largest_difference(member, reference))

    @property
    def worst_difference(self) -> float:
        """The largest difference of a step; infinite where no two runs can be compared."""
        return self.difference.worst.difference if self.difference is not None else math.inf

    @property
    def _rounding_tolerance(self) -> float:
        """The largest difference that rounding explains, however the reference's own runs differ."""
        precision = self.member.trial.train.precision
        if precision == "fp32" and (_has_16_bit_gradients(self.member) or _has_16_bit_gradients(self.reference)):
            return _SIXTEEN_BIT_GRADIENTS_TOLERANCE
        tolerance = TOLERANCES[precision]
        if self.member.trial.train.compile != self.reference.trial.train.compile:
            return max(tolerance, _COMPILED_TOLERANCE)
        return tolerance

    def tolerance(self, reference_spread: float) -> float:
        """Return the largest difference that rounding explains, also judged by the reference's own runs."""
        return max(self._rounding_tolerance, 2 * reference_spread)

    def agrees(self, reference_spread: float) -> bool:
        """Whether the losses are equal but for rounding; False also where no two runs can be compared."""
        if self.difference is None:
            return False
        return self.worst_difference <= self.tolerance(reference_spread)

    def differs_early(self, reference_spread: float) -> bool:
        """Whether losses differ by more than rounding explains before training has had the time to amplify it.

        Where rounding is coarse (16 bits, or one of the two compiled), two updates are enough to amplify it, so that
        the third step decides nothing.
        """
        if self.difference is None:
            return False
        tolerance = self.tolerance(reference_spread)
        is_rounding_coarse = self._rounding_tolerance > TOLERANCES["fp32"]
        if is_rounding_coarse:
            return self.difference.differs_early(tolerance_of_first_two=tolerance, tolerance_of_first_three=math.inf)
        return self.difference.differs_early(
            tolerance_of_first_two=max(_TOLERANCE_OF_FIRST_TWO, 2 * reference_spread),
            tolerance_of_first_three=max(_TOLERANCE_OF_FIRST_THREE, tolerance),
        )


def _drift(comparison: _Comparison, reference_spread: float, agreeing_spread: float) -> Drift:
    """Return the drift of one trial: it agrees, it drifts, or it is unknown for a reason.

    Args:
        comparison: the trial against the reference.
        reference_spread: the largest difference among the reference's own runs.
        agreeing_spread: the largest difference of trials that agree with it; infinite if fewer than two of them differ.
    """
    trial = comparison.member.trial
    reference = comparison.reference.trial
    name = trial_name(reference)
    unknown = Drift("unknown", comparison.reference.trial_id, name)
    if trial.train.precision == "fp16":
        return replace(unknown, reason="with fp16 each engine's loss scaling skips steps of its own")
    if comparison.difference is None:
        return replace(unknown, reason=f"it has no two steps in common with {name}")
    tolerance = comparison.tolerance(reference_spread)
    step, difference = comparison.difference.worst
    compared = replace(unknown, difference=difference, tolerance=tolerance, step=step)  # its status is unknown still
    if tolerance > _LARGEST_TOLERANCE:
        return replace(compared, reason=f"runs of {name} differ by {reference_spread:.1%} among themselves")
    if difference <= tolerance:
        return replace(compared, status="agrees")
    other_cause = _cause_besides_engine(trial, reference)
    if other_cause:
        return replace(compared, reason=other_cause)
    is_beyond_amplified = difference > _AMPLIFICATION_LIMIT * agreeing_spread
    if comparison.differs_early(reference_spread) or is_beyond_amplified:
        return replace(compared, status="drifts")
    difference_in_words = f"{difference:.1e}" if math.isfinite(difference) else "a loss that is not finite"
    equal_steps = comparison.difference.equal_steps(tolerance)
    return replace(compared, reason=_AMPLIFIED_REASON.format(equal_steps, difference_in_words))


def _cause_besides_engine(trial: Trial, reference: Trial) -> str:
    """Return what else than the engine may cause a difference; empty where nothing else may."""
    if trial.model.own_name is not None:
        return ""  # ours, without dropout and without statistics over a batch
    circumstance = "under another engine" if _split(trial) == _split(reference) else "in another split"
    return (
        "the model is not one of ours: if it drops out at random or normalises over a batch, its loss differs "
        f"{circumstance}"
    )


class _Split(NamedTuple):
    """How a step's images are split."""

    micro_batches: tuple[int, ...]
    """Images of a micro-batch, by rank."""
    grad_accum: int


def _split(trial: Trial) -> _Split:
    return _Split(micro_batches(trial.train, trial.layout.data), trial.train.grad_accum)


def _has_16_bit_gradients(result: TrialFigures) -> bool:
    """Whether gradients travelled in 16 bits, as recorded; where no run recorded it, as configured."""
    models = [run.model for run in result.run_figures if run.model is not None]
    recorded_dtypes = {model.gradient_dtype for model in models if model.gradient_dtype}
    dtypes = recorded_dtypes or {result.trial.train.gradient_dtype or ""}
    return any("16" in dtype for dtype in dtypes)


def _reference_spread(reference: TrialFigures, members: Sequence[TrialFigures]) -> float:
    """Return the largest difference among the reference's own runs; 0 where there are none to compare.

    These are its repeats, if all have one seed. In 16 bits they are also the other trials without a wrapper, which
    differ in their micro-batch, where there are two or more: one alone shows too little.
    """
    compared: list[TrialFigures] = []
    if not seeded(reference):
        compared.append(reference)
    other_micro_batches = [
        member for member in members if of_engine(member.trial.train.engine).alone and member is not reference
    ]
    if reference.trial.train.precision != "fp32" and len(other_micro_batches) >= 2:
        compared += other_micro_batches
    comparisons = [_Comparison.of(member, reference) for member in compared]
    known_differences = [comparison.worst_difference for comparison in comparisons if comparison.difference is not None]
    return max(known_differences, default=0.0)
