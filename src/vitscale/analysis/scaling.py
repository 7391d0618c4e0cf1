"""Speedup and efficiency along a curve, against its baseline and against the plain run without a wrapper.

The baseline is the curve's smallest rank count with a completed run, N_base. All figures of a curve are relative to it:

    strong modes   speedup    = baseline epoch seconds / epoch seconds
                   efficiency = speedup / (N / N_base)
    weak           efficiency = baseline epoch seconds / epoch seconds     (equal samples per rank)
                   speedup    = efficiency x N / N_base                    (scaled speedup)

so with N_base > 1 a speedup of 2 means twice as fast as N_base ranks, not as one rank. Strong and weak scaling:
Amdahl (AFIPS 1967) and Gustafson (CACM 31, 1988). A trial that drifts (`learning.drift`) does other work: it keeps its
place on the curve, but has no speedup and is no baseline.

Curves are named here too: briefly, and apart where a sweep makes them differ ("deepspeed ZeRO-2, compile").
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from vitscale.analysis.statistics import ONE_RUN, ratio
from vitscale.analysis.trials import TrialResult
from vitscale.engines import of_engine
from vitscale.engines.checks import computation
from vitscale.engines.names import UNKNOWN, composed_name, engine_name, variant_in_words
from vitscale.present.estimate import Estimate
from vitscale.store.results import Curve, CurvePoint
from vitscale.study.sections import traits_of_label
from vitscale.trial.fields import FieldTraits
from vitscale.trial.parallel import NO_SPLIT, ParallelSpec
from vitscale.trial.rank_batches import in_words
from vitscale.trial.trial import (
    BATCH_FIELDS,
    LOCATION_FIELDS,
    NORMS,
    WRAPPER_FIELDS,
    Mode,
    Trial,
    exact,
)

_LAYOUT_WORDS = {"one-gpu-per-node": "one GPU per node", "single-node": "one node", "": "layout not told"}
"""Layout that an import gives -> its name in a curve."""
_BATCH_WORDS = {"train.micro_batch": "micro-batch", "train.global_batch": "global batch"}
"""Swept batch field -> its name in the curve of an import."""
_LOCAL_NORM_WORDS = NORMS["local"]
_IMPORT_LABEL_TRAITS: Mapping[str, FieldTraits] = {"layout": FieldTraits(curve_words=_LAYOUT_WORDS)} | dict.fromkeys(
    ("series", "cluster", "device"), FieldTraits(curve_words="{}")
)
"""Labels of imports that are not fields of a study -> how their values are put into words."""


def curve_name(labels: Mapping[str, Any], trial: Trial | None) -> str:
    """Return the engine, then what else was swept: "ddp", "deepspeed ZeRO-2", "accelerate (FSDP2), micro_batch 16".

    Args:
        labels: the swept fields and their values.
        trial: the curve's trial with the most ranks, for what was not swept.
    """
    engine = _curve_engine(labels, trial)
    other_labels = {field: value for field, value in labels.items() if field not in engine.label_fields}
    is_imported = trial is not None and trial.origin is not None
    # An import's engine may be unknown, which need not be said where something else tells its curves apart.
    leaves_out_engine = is_imported and engine.is_unknown and bool(other_labels)
    parts = [] if leaves_out_engine else [engine.name]
    parts += _swept_values(other_labels, is_imported=is_imported)
    if trial is not None and trial.train.micro_batches and "train.rank_speeds" not in labels:
        parts.append("unequal shares")
    if trial is not None and _norms_locally(trial) and "train.batch_norm" not in labels:
        parts.append(_LOCAL_NORM_WORDS)
    return ", ".join(parts)


class _CurveEngine(NamedTuple):
    """The engine of a curve."""

    name: str
    """With its options: "deepspeed ZeRO-2", "accelerate (FSDP2)"."""
    is_unknown: bool
    label_fields: set[str]
    """Labels of the curve that the name covers: "train.engine", "train.zero_stage"."""


def _curve_engine(labels: Mapping[str, Any], trial: Trial | None) -> _CurveEngine:
    """Return the engine of a curve. Arguments are those of `curve_name`."""
    train = trial.train if trial is not None else None

    def value_of(option: str) -> Any:
        """The value of a field of [train]: as it was swept, else as the trial has it; None where nobody says."""
        return labels.get(f"train.{option}", getattr(train, option, None))

    engine = value_of("engine")
    wrapper_option = of_engine(str(engine)).stands_for  # "accelerate_backend"; empty where the engine wraps itself
    wrapper = value_of(wrapper_option) if wrapper_option else engine
    options = of_engine(str(wrapper)).name_options
    swept_options = [option for option in options if f"train.{option}" in labels]
    variant = variant_in_words(str(wrapper), {option: value_of(option) for option in options}, always=swept_options)
    return _CurveEngine(
        name=composed_name(engine, wrapper, variant),
        is_unknown=engine in (None, UNKNOWN),
        label_fields={f"train.{option}" for option in ("engine", wrapper_option, *options)},
    )


def _swept_values(labels: Mapping[str, Any], *, is_imported: bool) -> list[str]:
    """Return each swept value in words: "micro_batch 16", of an import "micro-batch 16"."""
    last_names = [_last_name(field) for field in labels]
    values = []
    for field, value in labels.items():
        if is_imported and field in _BATCH_WORDS:
            values.append(f"{_BATCH_WORDS[field]} {value}")
        else:
            is_ambiguous = last_names.count(_last_name(field)) > 1
            values.append(_value_in_words(field, value, is_ambiguous=is_ambiguous))
    return values


def trial_name(trial: Trial) -> str:
    """Return the engine and rank count of one trial, and what else is unusual: "ddp on 2 ranks, accumulation 3".

    It has how ranks share a model, the accumulation if above 1, each rank's images if unequal ("shares 16 + 8"), and
    batch norms that are computed locally.
    """
    train = trial.train
    ranks = "rank" if trial.world.size == 1 else "ranks"
    parts = [f"{engine_name(train)} on {trial.world.size} {ranks}"]
    if trial.parallel != NO_SPLIT:
        parts.append(split_name(trial.parallel))
    if train.grad_accum > 1:
        parts.append(f"accumulation {train.grad_accum}")
    if train.micro_batches:
        parts.append(f"shares {in_words(train.micro_batches)}")
    if _norms_locally(trial):
        parts.append(_LOCAL_NORM_WORDS)
    return ", ".join(parts)


def split_name(parallel: ParallelSpec) -> str:
    """Return how ranks share a model: "tensor 2, pipeline 4, gpipe"; empty where each has one for itself."""
    parts = []
    for field, value in parallel:
        if value != getattr(NO_SPLIT, field):
            parts.append(_value_in_words(f"parallel.{field}", value, is_ambiguous=False))
    return ", ".join(parts)


def trial_names(trials: Mapping[str, Trial], curves: Sequence[Curve]) -> dict[str, str]:
    """Return trial identity -> a name that no other trial of the study has: "ddp on 2 ranks, micro-batch 16".

    A name is the engine and the rank count. Where several trials share these, each gets those of its additions
    (`_name_additions`) that are not the same for all of them.

    Args:
        trials: all trials of a study, by identity.
        curves: the study's curves; each has points, of these trials.
    """
    curve_names = _curve_name_by_trial(curves, trials)
    names = {}
    for shared_name, trial_ids in _trial_ids_by_name(trials).items():
        all_additions = [_name_additions(trials[trial_id], curve_names.get(trial_id, "")) for trial_id in trial_ids]
        for trial_id, additions in zip(trial_ids, _different_additions(all_additions), strict=True):
            names[trial_id] = ", ".join([shared_name, *additions])
    return names


def _curve_name_by_trial(curves: Sequence[Curve], trials: Mapping[str, Trial]) -> dict[str, str]:
    """Return trial identity -> the name of the first curve that has it."""
    names: dict[str, str] = {}
    for curve in curves:
        name = curve_name(curve.labels, trials[_points_by_ranks(curve)[-1].trial_id])
        for point in curve.points:
            names.setdefault(point.trial_id, name)
    return names


def _points_by_ranks(curve: Curve) -> list[CurvePoint]:
    """Return the points of a curve, from few ranks to many."""
    return sorted(curve.points, key=lambda point: point.gpus)


def _trial_ids_by_name(trials: Mapping[str, Trial]) -> dict[str, list[str]]:
    """Return name of a trial (`trial_name`) -> the identities of all trials with that name."""
    trial_ids: dict[str, list[str]] = {}
    for trial_id, trial in trials.items():
        trial_ids.setdefault(trial_name(trial), []).append(trial_id)
    return trial_ids


def _name_additions(trial: Trial, curve_name: str) -> dict[str, str]:
    """Return what may be added to a trial's name: kind of addition -> text, empty where there is nothing to add.

    Example: {"swept": "compile", "micro_batch": "micro-batch 16", "images": ""}.

    Args:
        trial: the trial.
        curve_name: the name of a curve that has it: the engine, then what was swept ("ddp, micro_batch 16").
    """
    engine, _, swept = curve_name.partition(", ")
    if not swept and engine != engine_name(trial.train):
        swept = engine  # its options were swept: "deepspeed ZeRO-2"
    micro_batch = f"micro-batch {trial.train.micro_batch}" if "micro_batch" not in swept else ""
    images = f"{trial.data.fraction:.3g} of the images" if trial.data.fraction < 1 else ""
    return {"swept": swept, "micro_batch": micro_batch, "images": images}


def _different_additions(additions: Sequence[Mapping[str, str]]) -> list[list[str]]:
    """Return for each trial its texts of those kinds of additions in which the trials differ, without empty ones."""
    different_kinds = []
    for kind in additions[0]:
        texts = {addition[kind] for addition in additions}
        if len(texts) > 1:
            different_kinds.append(kind)
    different_texts = []
    for addition in additions:
        different_texts.append([addition[kind] for kind in different_kinds if addition[kind]])
    return different_texts


def _norms_locally(trial: Trial) -> bool:
    """Whether each rank's batch norms see its own images alone; in classification there is no such choice."""
    return trial.model.task == "segmentation" and trial.train.batch_norm == "local"


def _value_in_words(field: str, value: Any, *, is_ambiguous: bool) -> str:
    """Return a swept value in words: "micro_batch 16", "compile"; "train.micro_batch 16" where that is ambiguous."""
    if is_ambiguous:
        return f"{field} {value}"
    if field == "train.rank_speeds" and isinstance(value, (list, tuple)):
        shares = "equal shares" if len(set(map(str, value))) == 1 else "shares"
        return f"{shares} {in_words(value, ' : ')}"
    words = (_IMPORT_LABEL_TRAITS.get(field) or traits_of_label(field)).curve_words
    if isinstance(words, tuple) and isinstance(value, bool):
        when_on, when_off = words
        return when_on if value else when_off
    if isinstance(words, str) and words:
        return words.format(value)
    if isinstance(words, Mapping) and words.get(str(value)):
        return words[str(value)]
    if field == "layout":
        return str(value)
    return f"{_last_name(field)} {value}"


def _last_name(field: str) -> str:
    """Return the part of a field behind its last dot: "train.micro_batch" gives "micro_batch"."""
    return field.rpartition(".")[2]


@dataclass(frozen=True)
class ScalingPoint:
    """One trial on a curve. None stands for what is unknown."""

    gpus: int
    trial_id: str
    speedup: Estimate | None = None
    efficiency: Estimate | None = None
    speedup_over_plain: Estimate | None = None
    """Speedup over one rank without a distributed wrapper (engine = "none"), where the study has such a run."""
    efficiency_over_plain: Estimate | None = None


@dataclass(frozen=True)
class CurveResult:
    """Trials that differ in rank count alone, under one batch policy."""

    name: str
    """Engine and swept values, as a reader would name the curve."""
    mode: Mode
    labels: Mapping[str, Any]
    points: tuple[ScalingPoint, ...]
    baseline: ScalingPoint | None
    """None: no trial of the curve has completed, or each that has drifts."""
    plain_trial: str | None
    """Identity of the run on one rank without a distributed wrapper that does the curve's work; None without one."""
    unlike: Mapping[str, str]
    """Identity of a trial that is not compared with the baseline -> how its hardware or software differs."""


def by_mode(curves: Iterable[CurveResult]) -> dict[Mode, list[CurveResult]]:
    """Return batch policy -> its curves, in the order of the study's curves."""
    curves_by_mode: dict[Mode, list[CurveResult]] = {}
    for curve in curves:
        curves_by_mode.setdefault(curve.mode, []).append(curve)
    return curves_by_mode


def base_of(ordered: Sequence[TrialResult]) -> TrialResult | None:
    """Return the baseline of a curve: the first trial with costs; None where no trial has any.

    Costs come from epoch times, or from rates of images alone, and the two kinds are never compared. So it is the first
    trial whose costs are of the kind that most trials have.

    Args:
        ordered: the trials of the curve, from few ranks to many.
    """
    trials_with_costs = [trial for trial in ordered if trial.comparable_costs]
    trials_with_rates = sum(trial.has_rates_alone for trial in trials_with_costs)
    most_have_rates = 2 * trials_with_rates > len(trials_with_costs)
    for trial in trials_with_costs:
        if trial.has_rates_alone == most_have_rates:
            return trial
    return None


def curve_result(curve: Curve, trials: Mapping[str, TrialResult], combine_unlike: bool) -> CurveResult:
    """Work out the speedup and the efficiency of each point of a curve.

    Args:
        curve: the curve as it was recorded.
        trials: trial identity -> its result, for all trials of the study.
        combine_unlike: whether points are compared whose hardware or software differs.
    """
    recorded_points = _points_by_ranks(curve)
    ordered_trials = [trials[point.trial_id] for point in recorded_points]
    base = base_of(ordered_trials)
    base_gpus = None
    if base is not None:
        base_gpus = next(point.gpus for point in recorded_points if point.trial_id == base.trial_id)
    plain = _plain_twin(curve.mode, ordered_trials[0].trial, trials) if ordered_trials else None
    points = []
    differences = {}  # trial identity -> why it is not compared with the baseline
    for point, result in zip(recorded_points, ordered_trials, strict=True):
        over_base = _NO_SCALING
        if base is not None and base_gpus is not None and result.comparable_costs:
            reasons = base.reasons_not_to_compare(result, combine_unlike)
            if reasons:
                differences[point.trial_id] = f"{point.gpus} ranks: {'; '.join(reasons)}"
            else:
                over_base = _scaling(base, result, curve.mode, times_the_ranks=point.gpus / base_gpus)
        over_plain = _NO_SCALING
        if plain is not None and result.comparable_costs and not plain.reasons_not_to_compare(result, combine_unlike):
            over_plain = _scaling(plain, result, curve.mode, times_the_ranks=point.gpus)  # the plain run has 1 rank
        points.append(
            ScalingPoint(
                gpus=point.gpus,
                trial_id=point.trial_id,
                speedup=over_base.speedup,
                efficiency=over_base.efficiency,
                speedup_over_plain=over_plain.speedup,
                efficiency_over_plain=over_plain.efficiency,
            )
        )
    return CurveResult(
        name=curve_name(curve.labels, ordered_trials[-1].trial if ordered_trials else None),
        mode=curve.mode,
        labels=curve.labels,
        points=tuple(points),
        baseline=next((point for point in points if point.gpus == base_gpus), None),
        plain_trial=plain.trial_id if plain is not None else None,
        unlike=differences,
    )


class _Scaling(NamedTuple):
    """How one trial scales against another; None where they cannot be compared."""

    speedup: Estimate | None
    efficiency: Estimate | None


_NO_SCALING = _Scaling(speedup=None, efficiency=None)


def _scaling(reference: TrialResult, result: TrialResult, mode: Mode, times_the_ranks: float) -> _Scaling:
    """Return the scaling of `result`, on `times_the_ranks` times as many ranks, against `reference`.

    The formulas are those of the module's docstring.
    """
    time_ratio = times_as_fast(reference, result)
    if mode == "weak":
        return _Scaling(speedup=time_ratio.times(times_the_ranks), efficiency=time_ratio)
    return _Scaling(speedup=time_ratio, efficiency=time_ratio.times(1 / times_the_ranks))


def times_as_fast(reference: TrialResult, result: TrialResult) -> Estimate:
    """Return how many times as fast `result` trains all images as `reference`; 1 by definition for one trial twice."""
    if reference.trial_id == result.trial_id:
        if len(result.comparable_costs) > 1:
            return Estimate(1.0, 1.0, 1.0)
        return Estimate(1.0, note=ONE_RUN)
    return ratio(reference.comparable_costs, result.comparable_costs, (reference.deciding_runs, result.deciding_runs))


def _plain_twin(mode: Mode, trial: Trial, trials: Mapping[str, TrialResult]) -> TrialResult | None:
    """Return the completed trial without a wrapper that does on one rank what `trial`'s curve does on N ranks.

    None where the study has no such trial.
    """
    for other in trials.values():
        is_plain = of_engine(other.trial.train.engine).alone
        if is_plain and other.comparable_costs and _does_same_work(mode, other.trial, trial):
            return other
    return None


def _does_same_work(mode: Mode, plain: Trial, trial: Trial) -> bool:
    """Whether a trial on one rank does the work that a mode compares with that of `trial`.

    strong-global compares equal global batches, the other modes equal batches of a rank; weak compares the images of
    one rank, the other modes all images.
    """
    if plain.world.size != 1:
        return False
    if mode == "strong-global":
        has_same_batch = plain.global_batch == trial.global_batch
    else:
        has_same_batch = _has_same_rank_batch(plain, trial)
    compared_ranks = trial.world.size if mode == "weak" else 1
    fraction = exact(trial.data.fraction) / compared_ranks
    # Each share has passed through a float; their exact product has not.
    has_same_fraction = abs(exact(plain.data.fraction) - fraction) < 1e-9
    return has_same_batch and has_same_fraction and _other_work(plain) == _other_work(trial)


def _has_same_rank_batch(plain: Trial, trial: Trial) -> bool:
    """Whether a rank trains on equally many images in a micro-step, in equally many micro-steps."""
    return plain.train.micro_batch == trial.train.micro_batch and plain.train.grad_accum == trial.train.grad_accum


def _other_work(trial: Trial) -> tuple[Any, ...]:
    """Return all else that must agree in every mode. The launcher is left out: it affects the start-up alone."""
    return (
        trial.model,
        trial.data.model_dump(exclude={"fraction", *LOCATION_FIELDS}),
        trial.train.model_dump(exclude={*WRAPPER_FIELDS, *BATCH_FIELDS}),
        trial.window,
        trial.world.threads_per_rank,
        computation(trial),
    )
