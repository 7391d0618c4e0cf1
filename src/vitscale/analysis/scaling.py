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
from typing import Any

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

_LAYOUTS = {"one-gpu-per-node": "one GPU per node", "single-node": "one node", "": "layout not told"}
_BATCHES = {"train.micro_batch": "micro-batch", "train.global_batch": "global batch"}
_LOCAL_NORM = NORMS["local"]
_OF_AN_IMPORT: Mapping[str, FieldTraits] = {"layout": FieldTraits(curve_words=_LAYOUTS)} | dict.fromkeys(
    ("series", "cluster", "device"), FieldTraits(curve_words="{}")
)
"""Labels of imports that are not fields of a study."""


def curve_name(labels: Mapping[str, Any], trial: Trial | None) -> str:
    """The engine, then what else was swept: "ddp", "deepspeed ZeRO-2", "accelerate (FSDP2), micro_batch 16".

    Args:
        labels: the swept fields and their values.
        trial: the curve's trial with the most ranks, for what was not swept.
    """
    train = trial.train if trial is not None else None

    def value_of(option: str) -> Any:
        return labels.get(f"train.{option}", getattr(train, option, None))

    engine = value_of("engine")
    stands_for = of_engine(str(engine)).stands_for
    wrapper = value_of(stands_for) if stands_for else engine
    options = of_engine(str(wrapper)).name_options
    swept_options = [option for option in options if f"train.{option}" in labels]
    variant = variant_in_words(str(wrapper), {option: value_of(option) for option in options}, always=swept_options)
    of_the_name = {f"train.{option}" for option in ("engine", stands_for, *options)}
    others = {field: value for field, value in labels.items() if field not in of_the_name}
    keys = [field.rpartition(".")[2] for field in others]
    imported = trial is not None and trial.origin is not None
    # An import's engine may be unknown, which need not be said where something else tells its curves apart.
    untold = imported and engine in (None, UNKNOWN) and bool(others)
    return ", ".join(
        [
            *([] if untold else [composed_name(engine, wrapper, variant)]),
            *(
                f"{_BATCHES[field]} {value}"
                if imported and field in _BATCHES
                else _swept(field, value, keys.count(field.rpartition(".")[2]) > 1)
                for field, value in others.items()
            ),
            *(["unequal shares"] if train and train.micro_batches and "train.rank_speeds" not in labels else []),
            *([_LOCAL_NORM] if trial and _norms_locally(trial) and "train.batch_norm" not in labels else []),
        ]
    )


def trial_name(trial: Trial) -> str:
    """The engine and rank count of one trial, with its accumulation if above 1 and each rank's images if unequal: "ddp
    on 2 ranks, accumulation 3, shares 16 + 8".
    """
    train = trial.train
    ranks = f"{trial.world.size} rank{'s' if trial.world.size != 1 else ''}"
    accumulated = f", accumulation {train.grad_accum}" if train.grad_accum > 1 else ""
    shares = f", shares {in_words(train.micro_batches)}" if train.micro_batches else ""
    norm = f", {_LOCAL_NORM}" if _norms_locally(trial) else ""
    split = f", {split_name(trial.parallel)}" if trial.parallel != NO_SPLIT else ""
    return f"{engine_name(train)} on {ranks}{split}{accumulated}{shares}{norm}"


def split_name(parallel: ParallelSpec) -> str:
    """ "tensor 2, pipeline 4, gpipe": how ranks share a model; empty where each has one for itself."""
    return ", ".join(
        _swept(f"parallel.{field}", value, ambiguous=False)
        for field, value in parallel
        if value != getattr(NO_SPLIT, field)
    )


def trial_names(trials: Mapping[str, Trial], curves: Sequence[Curve]) -> dict[str, str]:
    """Trial identity -> a name that tells it apart from the study's others: "ddp on 2 ranks, micro-batch 16".

    A name is the engine and the rank count. Where several trials share these, each gets those of its additions
    (`_name_additions`) that are not the same for all of them.

    Args:
        trials: all trials of a study, by identity.
        curves: the study's curves; each has points, of these trials.
    """
    curve_names = _curve_name_by_trial(curves, trials)
    names = {}
    for name, trial_ids in _ids_by_name(trials).items():
        additions = [_name_additions(trials[trial_id], curve_names.get(trial_id, "")) for trial_id in trial_ids]
        for trial_id, different in zip(trial_ids, _without_common(additions), strict=True):
            names[trial_id] = ", ".join([name, *different])
    return names


def _curve_name_by_trial(curves: Sequence[Curve], trials: Mapping[str, Trial]) -> dict[str, str]:
    """Trial identity -> the name of the first curve that has it."""
    names: dict[str, str] = {}
    for curve in curves:
        name = curve_name(curve.labels, trials[_in_order(curve)[-1].trial_id])
        for point in curve.points:
            names.setdefault(point.trial_id, name)
    return names


def _in_order(curve: Curve) -> list[CurvePoint]:
    """The points of a curve by their number of ranks."""
    return sorted(curve.points, key=lambda point: point.gpus)


def _ids_by_name(trials: Mapping[str, Trial]) -> dict[str, list[str]]:
    """Name of a trial by itself -> the identities of all trials with that name."""
    ids: dict[str, list[str]] = {}
    for trial_id, trial in trials.items():
        ids.setdefault(trial_name(trial), []).append(trial_id)
    return ids


def _name_additions(trial: Trial, curve_name: str) -> dict[str, str]:
    """What may be added to a trial's name, by kind; empty texts where there is nothing to say.

    Args:
        trial: the trial.
        curve_name: the name of a curve that has it: the engine, then what was swept ("ddp, micro_batch 16").
    """
    engine, _, swept = curve_name.partition(", ")
    if not swept and engine != engine_name(trial.train):
        swept = engine
    micro_batch = f"micro-batch {trial.train.micro_batch}" if "micro_batch" not in swept else ""
    images = f"{trial.data.fraction:.3g} of the images" if trial.data.fraction < 1 else ""
    return {"swept": swept, "micro_batch": micro_batch, "images": images}


def _without_common(additions: Sequence[Mapping[str, str]]) -> list[list[str]]:
    """For each trial, the texts of those kinds of additions in which the trials differ."""
    different_kinds = []
    for kind in additions[0]:
        texts = {addition[kind] for addition in additions}
        if len(texts) > 1:
            different_kinds.append(kind)
    different = []
    for addition in additions:
        different.append([addition[kind] for kind in different_kinds if addition[kind]])
    return different


def _norms_locally(trial: Trial) -> bool:
    """Whether its batch norms compute something else than in one process; classification leaves no choice."""
    return trial.model.task == "segmentation" and trial.train.batch_norm == "local"


def _swept(field: str, value: Any, ambiguous: bool) -> str:
    """One swept value, with as little of its field's name as tells it apart from every other field's."""
    if ambiguous:
        return f"{field} {value}"
    if field == "train.rank_speeds" and isinstance(value, (list, tuple)):
        alike = "equal shares" if len(set(map(str, value))) == 1 else "shares"
        return f"{alike} {in_words(value, ' : ')}"
    short = (_OF_AN_IMPORT.get(field) or traits_of_label(field)).curve_words
    if isinstance(short, tuple):
        return short[0 if value else 1] if isinstance(value, bool) else _plainly(field, value)
    if isinstance(short, str):
        return short.format(value) if short else _plainly(field, value)
    return short.get(str(value)) or (str(value) if field == "layout" else _plainly(field, value))


def _plainly(field: str, value: Any) -> str:
    return f"{field.rpartition('.')[2]} {value}"


@dataclass(frozen=True)
class ScalingPoint:
    """One trial's place on a curve. None stands for what is unknown."""

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
    unlike: Mapping[str, str]
    """Trials not compared with the baseline, and how their surroundings differ from its."""


def by_mode(curves: Iterable[CurveResult]) -> dict[Mode, list[CurveResult]]:
    """The curves of each batch policy, in the order of the study's curves."""
    modes: dict[Mode, list[CurveResult]] = {}
    for curve in curves:
        modes.setdefault(curve.mode, []).append(curve)
    return modes


def base_of(ordered: Sequence[TrialResult]) -> TrialResult | None:
    """The first trial that others may be compared with: one whose costs are of the kind that most of them tell, for an
    epoch's time is never compared with a rate of images."""
    told = [trial for trial in ordered if trial.comparable_costs]
    rates = 2 * sum(trial.of_rates for trial in told) > len(told)
    return next((trial for trial in told if trial.of_rates == rates), None)


def scale(curve: Curve, trials: Mapping[str, TrialResult], combine_unlike: bool) -> CurveResult:
    """Works out one curve."""
    ordered = _in_order(curve)
    first = base_of([trials[point.trial_id] for point in ordered])
    base = next((point for point in ordered if first is not None and point.trial_id == first.trial_id), None)
    plain = _plain_twin(curve.mode, trials[ordered[0].trial_id].trial, trials) if ordered else None
    points, unlike = [], {}
    for point in ordered:
        result = trials[point.trial_id]
        speedup = efficiency = over_plain = efficiency_over_plain = None
        if base is not None and result.comparable_costs:
            reference = trials[base.trial_id]
            between = reference.unlike(result, combine_unlike)
            if between:
                unlike[point.trial_id] = f"{point.gpus} ranks: {'; '.join(between)}"
            else:
                speedup, efficiency = _against(reference, result, curve.mode, point.gpus / base.gpus)
        if plain is not None and result.comparable_costs and not plain.unlike(result, combine_unlike):
            over_plain, efficiency_over_plain = _against(plain, result, curve.mode, point.gpus)
        points.append(ScalingPoint(point.gpus, point.trial_id, speedup, efficiency, over_plain, efficiency_over_plain))
    return CurveResult(
        name=curve_name(curve.labels, trials[ordered[-1].trial_id].trial if ordered else None),
        mode=curve.mode,
        labels=curve.labels,
        points=tuple(points),
        baseline=next((point for point in points if base is not None and point.gpus == base.gpus), None),
        plain_trial=plain.trial_id if plain is not None else None,
        unlike=unlike,
    )


def _against(
    reference: TrialResult, result: TrialResult, mode: Mode, times_the_ranks: float
) -> tuple[Estimate, Estimate]:
    """Speedup and efficiency of `result` on `times_the_ranks` as many ranks as `reference`."""
    fast = times_as_fast(reference, result)
    return (fast.times(times_the_ranks), fast) if mode == "weak" else (fast, fast.times(1 / times_the_ranks))


def times_as_fast(reference: TrialResult, result: TrialResult) -> Estimate:
    """How many times as fast `result` needs all images as `reference`; 1 by definition for a trial and itself."""
    if reference.trial_id == result.trial_id:
        by_definition = 1.0 if len(result.comparable_costs) > 1 else None
        return Estimate(1.0, by_definition, by_definition, note="" if by_definition else ONE_RUN)
    return ratio(reference.comparable_costs, result.comparable_costs, (reference.looked, result.looked))


def _plain_twin(mode: Mode, trial: Trial, trials: Mapping[str, TrialResult]) -> TrialResult | None:
    """The completed trial without a wrapper that does on one rank what `trial`'s curve does on N."""
    return next(
        (
            other
            for other in trials.values()
            if of_engine(other.trial.train.engine).alone
            and other.comparable_costs
            and _same_work(mode, other.trial, trial)
        ),
        None,
    )


def _same_work(mode: Mode, plain: Trial, trial: Trial) -> bool:
    ranks = trial.world.size
    if mode == "strong-global":
        batch = plain.global_batch == trial.global_batch
    else:
        ours, theirs = plain.train, trial.train
        batch = (ours.micro_batch, ours.grad_accum) == (theirs.micro_batch, theirs.grad_accum)
    share = exact(trial.data.fraction) / (ranks if mode == "weak" else 1)
    # Each share has passed through a float; their exact product has not.
    fraction = abs(exact(plain.data.fraction) - share) < 1e-9
    return batch and fraction and plain.world.size == 1 and _rest(plain) == _rest(trial)


def _rest(trial: Trial) -> tuple[Any, ...]:
    """All that must agree in every mode. The launcher is left out: it affects the start-up alone."""
    return (
        trial.model,
        trial.data.model_dump(exclude={"fraction", *LOCATION_FIELDS}),
        trial.train.model_dump(exclude={*WRAPPER_FIELDS, *BATCH_FIELDS}),
        trial.window,
        trial.world.threads_per_rank,
        computation(trial),
    )
