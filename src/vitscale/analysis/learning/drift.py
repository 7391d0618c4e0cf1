"""Does an engine compute what the others do? Its loss, step by step, against that of a trial that does the same work.

Trials show the same loss at every optimizer step, but for rounding, if they differ only in how training is distributed
(`trial.WRAPPER_FIELDS`), how the global batch is split into ranks and micro-batches, and what trades memory for time.
The reference is the run without a wrapper; where the study has none, the trial that most others agree with. How far
rounding may reach, and from which measurements: docs/decisions/0010-drift-by-the-first-steps.md.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

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
_LEAST_SHARE = 0.01
"""Differences are relative to the reference's loss, or to this share of its first loss where that is more."""

Losses = Mapping[int, float | None]
"""Step to loss; None where it is not finite."""


@dataclass(frozen=True)
class LossDifference:
    """Step and relative difference of two runs' losses; infinite where one loss is finite and the other is not."""

    by_step: tuple[tuple[int, float], ...]

    @property
    def worst(self) -> tuple[int, float]:
        """The step with the largest difference, and that difference."""
        return max(self.by_step, key=lambda pair: pair[1])

    def equal_steps(self, tolerance: float) -> int:
        """Number of steps before the first one that differs by more than `tolerance`."""
        beyond = (at for at, (_, difference) in enumerate(self.by_step) if difference > tolerance)
        return next(beyond, len(self.by_step))

    def early(self, after_one_update: float, after_two: float) -> bool:
        """Whether losses differ by more than rounding explains before training has had the time to amplify it."""
        first = [difference for _, difference in self.by_step[:3]]
        return max(first[:2]) > after_one_update or max(first) > after_two


def largest(member: TrialFigures, reference: TrialFigures) -> LossDifference | None:
    """The difference of the run of `member` that differs most; None where no two of their runs can be compared."""
    if not seeded(reference) and (known := _of_like_steps(member, reference)) is not None:
        return known
    by_run = [between_runs(run, reference) for run in losses(member)]
    return max((known for known in by_run if known is not None), key=lambda known: known.worst[1], default=None)


def _of_like_steps(member: TrialFigures, reference: TrialFigures) -> LossDifference | None:
    """`largest` for all runs at once; None where one lacks a loss or has other steps than the reference's first run."""
    theirs = _by_repeat(reference)[0][1].loss_by_step
    step, loss = theirs.step[:STEPS], theirs.loss[:STEPS]
    ours = [figures.loss_by_step for _, figures in _by_repeat(member)]
    steps = [run.step[:STEPS] for run in ours]
    if len(step) < 2 or {len(own) for own in steps} != {len(step)} or (np.stack(steps) != step).any():
        return None
    scale = np.maximum(np.abs(loss), _LEAST_SHARE * abs(loss[0]))
    with np.errstate(all="ignore"):
        gaps = np.abs(np.stack([run.loss[:STEPS] for run in ours]) - loss)
        shares = gaps / scale
    if not (np.isfinite(gaps).all() and (scale > 0).all()):
        return None
    worst = shares[shares.max(axis=1).argmax()]
    return LossDifference(tuple(zip(step.tolist(), worst.tolist(), strict=True)))


def _by_repeat(result: TrialFigures) -> list[tuple[int, RunFigures]]:
    """Repeat and figures of each completed run, in the order of repeats."""
    numbered = (
        (run.header.repeat, figures) for run, figures in zip(result.recorded_runs, result.run_figures, strict=True)
    )
    return sorted(numbered, key=lambda pair: pair[0])


def between_runs(run: tuple[int, Losses], reference: TrialFigures) -> LossDifference | None:
    """A run against the reference's first run; where repeats have seeds of their own, against the same repeat."""
    repeat, ours = run
    numbered = {
        run.header.repeat: figures for run, figures in zip(reference.recorded_runs, reference.run_figures, strict=True)
    }
    first = numbered.get(repeat if seeded(reference) else min(numbered, default=repeat))
    by_step = differences(ours, _first_losses(first)) if first is not None else ()
    return LossDifference(by_step) if by_step else None


def _first_losses(figures: RunFigures) -> Losses:
    return dict(figures.loss_by_step[:STEPS])


def seeded(result: TrialFigures) -> bool:
    """Whether each repeat has a seed of its own, and losses of its own with it."""
    return result.trial.train.target_accuracy is not None


def losses(result: TrialFigures) -> list[tuple[int, Losses]]:
    """Repeat and first losses of each completed run, in the order of repeats."""
    return [(repeat, _first_losses(figures)) for repeat, figures in _by_repeat(result)]


def differences(ours: Losses, theirs: Losses) -> tuple[tuple[int, float], ...]:
    """Step and `|l - r| / max(r, r_first / 100)` of the steps that both have; empty for fewer than two such steps.

    Infinite where one loss is finite and the other is not; from the step on where neither is, nothing is told.
    """
    common = sorted(ours.keys() & theirs.keys())
    if len(common) < 2:
        return ()
    first = abs(theirs[common[0]] or 0.0)
    by_step: list[tuple[int, float]] = []
    for step in common:
        loss, reference = ours[step], theirs[step]
        if loss is None and reference is None:
            break
        if loss is None or reference is None:
            return (*by_step, (step, math.inf))
        scale = max(abs(reference), _LEAST_SHARE * first)
        gap = abs(loss - reference)
        by_step.append((step, gap / scale if scale > 0 else math.inf if gap else 0.0))
    return tuple(by_step) if len(by_step) > 1 else ()


TOLERANCES = {"fp32": 1e-5, "bf16": 2.0**-8, "bf16-params": 2.0**-7, "fp16": 2.0**-8}
"""Largest relative difference of a loss that rounding explains, by precision."""
SIXTEEN_BIT_GRADIENTS = TOLERANCES["bf16"]
"""The same for fp32 training whose gradients travel in 16 bits."""
COMPILED = 1e-4
"""The same in fp32 where one of the two is compiled: its sums are in another order (docs/equality.md)."""
_AFTER_ONE_UPDATE, _AFTER_TWO = 1e-6, 1e-4
"""The same in fp32 before training has had the time to amplify rounding."""
_BEYOND_THOSE_THAT_AGREE = 30.0
"""Factor on the largest difference of two or more trials that agree: amplified rounding scatters less."""
_WIDEST = 0.01
"""A tolerance beyond this says nothing: the study's own repeats differ too much."""
_MOST_CANDIDATES = 16
_NO_MATTER = set(fields_where(TrainSpec, lambda traits: traits.role))
"""Fields of `TrainSpec` that leave the loss of the first steps as it is, or that enter by what they amount to."""
_OF_THE_FILE = ("scheduler", "curriculum_learning", "progressive_layer_drop", "compression_training", "data_efficiency")
"""Sections of a user's own DeepSpeed file that change what is trained."""

ALONE = "no other trial of the study computes the same"
IMPORTED = "neither the first weights nor the order of the images of an imported run are known"
OF_SCRIPT = "what a user's own script computes is its own affair"
AMPLIFIED = (
    "equal over the first {} steps, then apart by up to {}: rounding that an unstable training has amplified, or a "
    "difference that comes late; too few trials agree to tell"
)


def drift_by_trial(trials: Mapping[str, TrialFigures]) -> dict[str, Drift]:
    """Trial identity to its drift: its losses against those of the trials that must show the same.

    Args:
        trials: the figures of all trials of a study, by identity.
    """
    groups: dict[str, list[TrialFigures]] = {}
    for figures in trials.values():
        if not _reason_not_to_compare(figures):
            groups.setdefault(_computation(figures), []).append(figures)
    drifts: dict[str, Drift] = {}
    for members in groups.values():
        drifts |= _judged_group(members)
    return {
        trial_id: drifts.get(trial_id) or Drift("unknown", reason=_reason_not_to_compare(figures))
        for trial_id, figures in trials.items()
    }


def _reason_not_to_compare(figures: TrialFigures) -> str:
    """Why a trial's losses are compared with no others; empty where they are."""
    trial = figures.trial
    if trial.origin is not None:
        return IMPORTED
    if trial.train.script is not None:
        return OF_SCRIPT
    if not of_engine(trial.train.wrapper).trains_like:
        return f"whom {trial.train.wrapper} trains alike with is not known"
    return "" if figures.recorded_runs else "no run has completed"


def _division(trial: Trial) -> list[Any]:
    """How the global batch is divided, where that changes what is trained; empty where it does not."""
    if computation(trial) == ONE_PROCESS:
        return []
    return [trial.world.size, trial.train.micro_batch, trial.train.grad_accum, trial.train.micro_batches]


def _computation(result: TrialFigures) -> str:
    """All that decides which losses a trial shows; equal for trials that must agree."""
    trial, train = result.trial, result.trial.train
    file = train.deepspeed_config or {}
    sections = (*_OF_THE_FILE, "optimizer") if train.optimizer == "deepspeed_config" else _OF_THE_FILE
    content: dict[str, Any] = {
        "model": trial.model.model_dump(mode="json", exclude={"weights", *(("hf",) if trial.model_digest else ())}),
        "digest": [trial.model_digest, trial.weights_digest],
        "data": trial.data.model_dump(mode="json", exclude={*LOCATION_FIELDS, "workers", "source"}),
        "fingerprint": result.recorded_runs[0].header.dataset_fingerprint,
        "train": train.model_dump(mode="json", exclude=_NO_MATTER),
        "global_batch": trial.global_batch,
        "learning_rate": trial.peak_learning_rate,
        "normalised": _normalised(trial),
        "seed_by_repeat": train.target_accuracy is not None,
        "computation": computation(trial),
        "division": _division(trial),
        # These keep weights in fp32 beside 16-bit ones; others do not.
        "fp32_weights": train.precision not in ("bf16-params", "fp16")
        or of_engine(train.wrapper).keeps_fp32_weights
        or train.master_weights,
        "file": {section: file[section] for section in sections if section in file},
    }
    return json.dumps(content, sort_keys=True)


def _normalised(trial: Trial) -> object:
    """The images over which batch norms of segmentation are taken; None in classification.

    Another number of ranks cuts the short last step into other micro-steps.
    """
    train, sizes = trial.train, micro_batches(trial.train, trial.layout.data)
    if trial.model.task == "classification":
        return None
    if train.batch_norm == "local":
        return sizes
    return sum(sizes), 1 if train.grad_accum == 1 or train.drop_last else trial.layout.data


def _judged_group(members: Sequence[TrialFigures]) -> dict[str, Drift]:
    """The drift of trials that must all show the same losses."""
    if len(members) == 1:
        return {members[0].trial_id: Drift("unknown", reason=ALONE)}
    reference = _reference(members)
    held = [_Held(member, reference, largest(member, reference)) for member in members if member is not reference]
    own = _of_its_own(reference, members)
    worst = [(trial.difference.worst[1], trial.tolerance(own)) for trial in held if trial.difference]
    agreeing = [difference for difference, tolerance in worst if 0 < difference <= tolerance]
    scatter = max(agreeing) if len(agreeing) >= 2 else math.inf
    drifts = {trial.member.trial_id: _drift(trial, own, scatter) for trial in held}
    return drifts | {reference.trial_id: Drift("reference", reference.trial_id, trial_name(reference.trial))}


def _reference(members: Sequence[TrialFigures]) -> TrialFigures:
    """The run without a wrapper; else the trial that most others agree with, preferring few ranks and then DDP."""
    ordered = sorted(members, key=lambda member: _nearness(member.trial))
    if of_engine(ordered[0].trial.train.engine).alone:
        return ordered[0]

    def agreeing(candidate: TrialFigures) -> int:
        held = [_Held(member, candidate, largest(member, candidate)) for member in members]
        return sum(trial.difference is not None and trial.difference.worst[1] <= trial.tolerance(0.0) for trial in held)

    return max(ordered[:_MOST_CANDIDATES], key=agreeing)  # the first of those with the most


def _nearness(trial: Trial) -> tuple[bool, bool, int, bool, int, str]:
    train, ranks = trial.train, trial.world.size
    facts = of_engine(train.engine)
    return not facts.alone, train.compile, ranks, not facts.usual, train.grad_accum, trial.identity()


@dataclass(frozen=True)
class _Held:
    """One trial against the reference."""

    member: TrialFigures
    reference: TrialFigures
    difference: LossDifference | None

    @property
    def _rounding(self) -> float:
        precision = self.member.trial.train.precision
        both = (self.member, self.reference)
        if precision == "fp32" and any("16" in dtype for result in both for dtype in _gradients(result)):
            return SIXTEEN_BIT_GRADIENTS
        compiled = len({result.trial.train.compile for result in both}) > 1
        return max(TOLERANCES[precision], COMPILED) if compiled else TOLERANCES[precision]

    def tolerance(self, own: float) -> float:
        """The largest difference that rounding explains where the reference's own runs differ by `own`."""
        return max(self._rounding, 2 * own)

    def early(self, own: float) -> bool:
        """Whether they differ by more than rounding explains before training has had the time to amplify it.

        In 16 bits, or beside what is compiled, training has had it after two updates.
        """
        if self.difference is None:
            return False
        tolerance = self.tolerance(own)
        if self._rounding > TOLERANCES["fp32"]:
            return self.difference.early(tolerance, math.inf)
        return self.difference.early(max(_AFTER_ONE_UPDATE, 2 * own), max(_AFTER_TWO, tolerance))


def _drift(held: _Held, own: float, scatter: float) -> Drift:
    """The drift of one trial.

    `own`: the largest difference among the reference's own runs; `scatter`: that of the trials which agree with it,
    infinite if these are too few.
    """
    trial, reference = held.member.trial, held.reference.trial
    name = trial_name(reference)
    against = Drift("unknown", held.reference.trial_id, name)
    if trial.train.precision == "fp16":
        return replace(against, reason="with fp16 each engine's loss scaling skips steps of its own")
    if held.difference is None:
        return replace(against, reason=f"it has no two steps in common with {name}")
    tolerance = held.tolerance(own)
    step, difference = held.difference.worst
    against = replace(against, difference=difference, tolerance=tolerance, step=step)
    if tolerance > _WIDEST:
        return replace(against, reason=f"runs of {name} differ by {own:.1%} among themselves")
    if difference <= tolerance:
        return replace(against, status="agrees")
    if reason := _not_comparable(trial, reference):
        return replace(against, reason=reason)
    if not held.early(own) and not difference > _BEYOND_THOSE_THAT_AGREE * scatter:
        apart = f"{difference:.1e}" if math.isfinite(difference) else "a loss that is not finite"
        return replace(against, reason=AMPLIFIED.format(held.difference.equal_steps(tolerance), apart))
    return replace(against, status="drifts")


def _not_comparable(trial: Trial, reference: Trial) -> str:
    """Why a difference need not be the engine's doing; empty where it is."""
    if trial.model.name is not None:
        return ""  # ours, without dropout and without statistics over a batch
    how = "under another engine" if _split(trial) == _split(reference) else "in another split"
    return f"the model is not one of ours: if it drops out at random or normalises over a batch, its loss differs {how}"


def _split(trial: Trial) -> tuple[tuple[int, ...], int]:
    return micro_batches(trial.train, trial.layout.data), trial.train.grad_accum


def _gradients(result: TrialFigures) -> set[str]:
    """The dtypes in which gradients travelled, as recorded; where they are not, as asked for."""
    recorded = {
        run.model.gradient_dtype for run in result.run_figures if run.model is not None and run.model.gradient_dtype
    }
    return recorded or {result.trial.train.gradient_dtype or ""}


def _of_its_own(reference: TrialFigures, members: Sequence[TrialFigures]) -> float:
    """The largest difference among runs of the reference: its repeats, and in 16 bits its other micro-batches.

    Other micro-batches count only where there are two or more: one alone shows too little to go by.
    """
    of_own_runs: list[LossDifference | None] = []
    if not seeded(reference):
        of_own_runs.append(largest(reference, reference))
    plain = [member for member in members if of_engine(member.trial.train.engine).alone and member is not reference]
    if reference.trial.train.precision != "fp32" and len(plain) >= 2:
        of_own_runs += [largest(member, reference) for member in plain]
    return max((difference.worst[1] for difference in of_own_runs if difference is not None), default=0.0)
