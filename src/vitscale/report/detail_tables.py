"""The tables beside the scaling ones: four figures that stand together, the parts of a step, resources, accuracy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vitscale.analysis import Analysis, CurveResult, TrialResult
from vitscale.analysis.learning.convergence import Convergence, accuracy_at_images, accuracy_at_seconds
from vitscale.analysis.runs.resources import RankResources, ResourceFigures
from vitscale.analysis.time.breakdown import Straggler
from vitscale.analysis.trials import CheckpointCost
from vitscale.present import units
from vitscale.present.document import Cell, Table
from vitscale.present.estimate import Estimate
from vitscale.present.units import UNKNOWN
from vitscale.report.charts.accuracy import images_panel, reach, reached, seconds_panel, unlike_images
from vitscale.report.charts.time import PART_NAMES, parts_of, unknown_parts
from vitscale.report.tables import TrialColumn, grouped_table, interval_cell

_MOST_RANKS_TOLD = 8
_FOUR = ("MFU", "of the measured matmul rate", "exposed communication")


def four_figures(analysis: Analysis) -> Table | None:
    """Speed and how much of the device it takes: never one of the four without the others."""
    measured = [trial for trial in analysis.trials.values() if trial.runs]
    speed = f"images/s/{'GPU' if any(trial.trial.train.device == 'cuda' for trial in measured) else 'rank'}"
    columns: list[TrialColumn] = [
        (speed, lambda trial: _interval(trial.images_per_second, units.number, 1 / trial.trial.world.size)),
        ("MFU", lambda trial: _interval(trial.resources.mfu if trial.resources else None, _percent)),
        (
            "of the measured matmul rate",
            lambda trial: _interval(trial.resources.share_of_matmul if trial.resources else None, _percent),
        ),
        (
            "exposed communication",
            lambda trial: _interval(trial.breakdown.exposed_share if trial.breakdown else None, _percent),
        ),
        ("explaining cost", lambda trial: Cell(_signed(trial.breakdown.overhead if trial.breakdown else None))),
        ("waited for", lambda trial: Cell(_straggler(trial.breakdown.straggler if trial.breakdown else None))),
    ]
    peaks = dict.fromkeys(t.resources.peak_name for t in measured if t.resources and t.resources.mfu is not None)
    notes = [
        *[f"MFU is against {peak}." for peak in peaks if peak],
        *_unknown("MFU", measured, lambda trial: trial.resources.mfu_reason if trial.resources else ""),
        *_unknown("Share of the measured matmul rate", measured, _why_no_share),
        *_unknown("Exposed communication", measured, lambda t: "" if t.breakdown else "no step was explained"),
    ]
    title = "Four figures that stand together"
    return grouped_table(
        analysis, title, analysis.curves, columns, lambda trial: bool(trial.runs), always=(speed, *_FOUR), notes=notes
    )


def parts_table(analysis: Analysis) -> Table | None:
    """Every part of the typical rank's explained step, in milliseconds."""
    breakdowns = [trial.breakdown for trial in analysis.trials.values() if trial.breakdown is not None]
    columns: list[TrialColumn] = [("explained step", lambda trial: _milliseconds(trial, None))]
    columns += [
        (name, lambda trial, part=part: _milliseconds(trial, part))  # type: ignore[misc]  # its default is of this round
        for part, name in PART_NAMES.items()
        if part not in ("norm", "bubble") or any(breakdown.typical.parts[part] for breakdown in breakdowns)
    ]
    notes = [*unknown_parts([breakdown.reasons for breakdown in breakdowns]), *map(_bubble, analysis.trials.values())]
    title = "Parts of an explained step, in milliseconds"
    return grouped_table(
        analysis,
        title,
        analysis.curves,
        columns,
        lambda trial: trial.breakdown is not None,
        notes=[n for n in notes if n],
    )


def _bubble(trial: TrialResult) -> str:
    """The pipeline's bubble, beside what equal stages would leave; empty where there is none, or it is unknown."""
    bubble = trial.breakdown.typical.parts["bubble"] if trial.breakdown is not None else None
    if trial.breakdown is None or bubble is None or trial.trial.parallel.pipeline == 1:
        return ""
    share = units.percent(bubble / trial.breakdown.typical.seconds)
    ideal = units.percent(trial.trial.parallel.bubble_share(trial.trial.train.grad_accum))
    return f"{trial.name}: the pipeline bubble is {share} of the step; of equal stages and free transfer, {ideal}."


def resource_table(analysis: Analysis) -> Table | None:
    """What each trial used, and why figures are missing."""
    columns: list[TrialColumn] = [
        ("cores by rank", lambda trial: Cell(_places(trial.resources, lambda rank: rank.cores))),
        ("NUMA nodes", lambda trial: Cell(_places(trial.resources, lambda rank: rank.numa_nodes or ()))),
        ("CPU utilisation", _resource(lambda used: used.cpu_utilisation, units.percent)),
        ("of the CPU quota", _resource(lambda used: used.cpu_utilisation_of_quota, units.percent)),
        ("held back by the quota", _resource(lambda used: used.cpu_throttled_share, _percent)),
        ("resident", _resource(lambda used: used.peak_rss_bytes, _bytes)),
        ("GPU allocated", _resource(lambda used: used.cuda_allocated_bytes, _bytes)),
        ("GPU reserved", _resource(lambda used: used.cuda_reserved_bytes, _bytes)),
        ("whole GPU", _resource(lambda used: used.cuda_device_bytes, _bytes)),
        ("GPU utilisation", _resource(lambda used: used.gpu_utilisation, units.percent)),
        ("SM clock (MHz)", _resource(lambda used: used.sm_clock_mhz, _whole)),
        ("lowest", _resource(lambda used: used.sm_clock_mhz_min, _whole)),
        ("hottest (\N{DEGREE SIGN}C)", _resource(lambda used: used.temperature_celsius_max, _whole)),
        ("power per GPU (W)", _resource(lambda used: used.power_watts, _whole)),
        ("throttled", _resource(lambda used: used.throttled_share, _percent)),
        ("because of", lambda trial: Cell(_reasons(trial.resources))),
        (
            "energy per image (J)",
            lambda trial: _interval(trial.resources.joules_per_image if trial.resources else None, units.number),
        ),
        ("checkpoint saved (s)", _checkpoint(lambda cost: units.number(cost.save_seconds))),
        ("restored (s)", _checkpoint(lambda cost: units.number(cost.load_seconds))),
        ("its files", _checkpoint(lambda cost: _bytes(cost.bytes))),
    ]
    measured = [trial for trial in analysis.trials.values() if trial.resources is not None]
    sources = dict.fromkeys(t.resources.energy_source for t in measured if t.resources and t.resources.energy_source)
    notes = [
        *[f"Energy was read by {source}." for source in sources],
        *_unknown("Energy per image", measured, lambda t: t.resources.energy_reason if t.resources else ""),
        *_unknown("GPU figures", measured, lambda t: t.resources.gpu_reason if t.resources else ""),
    ]
    return grouped_table(
        analysis,
        "What each trial used",
        analysis.curves,
        columns,
        lambda trial: trial.resources is not None,
        notes=notes,
    )


def _checkpoint(show: Callable[[CheckpointCost], str]) -> Callable[[TrialResult], Cell]:
    return lambda trial: Cell(show(trial.checkpoint) if trial.checkpoint else UNKNOWN)


def accuracy_table(analysis: Analysis, curves: Sequence[CurveResult]) -> Table | None:
    """Accuracy at the end, after equal images and seconds, the noise scale and what a target took; for one policy."""
    limits = reach(analysis, curves)
    images, seconds = limits.images, limits.seconds
    columns: list[TrialColumn] = [
        ("epochs", _convergence(lambda known: str(len(known.points)) if known.points else UNKNOWN)),
        (
            "held-out accuracy",
            _convergence(lambda known: _accuracy(known.points[-1].held_out_accuracy if known.points else None)),
        ),
    ]
    if images is not None and unlike_images(analysis, curves):
        columns.append((images_panel(images), _convergence(lambda known: _accuracy(accuracy_at_images(known, images)))))
    if seconds is not None:
        columns.append(
            (seconds_panel(seconds), _convergence(lambda known: _accuracy(accuracy_at_seconds(known, seconds))))
        )
    columns += [
        (
            "noise scale (images)",
            lambda trial: _interval(trial.convergence.noise_scale_images if trial.convergence else None, units.number),
        ),
        ("target", _convergence(lambda known: _accuracy(known.target_accuracy))),
        ("reached by", lambda trial: Cell(reached(trial))),
        (
            "images to target",
            _to_target(lambda known: (known.images_to_target, known.images_to_target_at_least), units.number),
        ),
        (
            "time to target",
            _to_target(lambda known: (known.seconds_to_target, known.seconds_to_target_at_least), units.seconds),
        ),
    ]
    ids = dict.fromkeys(point.trial_id for curve in curves for point in curve.points)
    measured = [analysis.trials[trial_id] for trial_id in ids if analysis.trials[trial_id].convergence is not None]
    notes = _unknown("Noise scale", measured, lambda t: t.convergence.noise_reason if t.convergence else "")
    if images is not None or seconds is not None:
        notes.insert(
            0, "Between epochs accuracy is taken as linear; before the first and after the last it is unknown."
        )
    title = f"Accuracy ({curves[0].mode})" if curves else "Accuracy"
    return grouped_table(analysis, title, curves, columns, lambda trial: trial.convergence is not None, notes=notes)


def _resource(
    figure: Callable[[ResourceFigures], float | None], show: Callable[[float | None], str]
) -> Callable[[TrialResult], Cell]:
    return lambda trial: Cell(show(figure(trial.resources)) if trial.resources else UNKNOWN)


def _convergence(show: Callable[[Convergence], str]) -> Callable[[TrialResult], Cell]:
    return lambda trial: Cell(show(trial.convergence) if trial.convergence else UNKNOWN)


def _to_target(
    took: Callable[[Convergence], tuple[Estimate | None, float | None]], show: Callable[[float | None], str]
) -> Callable[[TrialResult], Cell]:
    """What the target took; where a run did not reach it, the lower bound that it exceeds."""

    def cell(trial: TrialResult) -> Cell:
        interval, at_least = took(trial.convergence) if trial.convergence else (None, None)
        return _interval(interval, show) if at_least is None else Cell(f"> {show(at_least)}")

    return cell


def _interval(interval: Estimate | None, show: Callable[[float | None], str], times: float = 1.0) -> Cell:
    return interval_cell(interval.times(times) if interval else None, show)


def _milliseconds(trial: TrialResult, part: str | None) -> Cell:
    if trial.breakdown is None:
        return Cell(UNKNOWN)
    seconds = parts_of(trial.breakdown).get(part) if part else trial.breakdown.typical.seconds
    if seconds is None:
        return Cell(UNKNOWN)
    over_runs = trial.breakdown.part_seconds(trial.breakdown.typical.rank, part)
    bounds = (over_runs.low, over_runs.high) if over_runs else (None, None)
    return _interval(Estimate(seconds, *bounds), units.number, 1000.0)


def _percent(value: float | None) -> str:
    return units.percent(value, 1)


def _signed(value: float | None) -> str:
    return UNKNOWN if value is None else f"{100 * value:+.1f} %"


def _accuracy(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.1%}"


def _whole(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:,.0f}"


def _bytes(value: float | None) -> str:
    return UNKNOWN if value is None else units.size(value)


def _places(used: ResourceFigures | None, numbers: Callable[[RankResources], Sequence[int]]) -> str:
    """ "0-3 | 4-7": ranks' cores or memory nodes, ranges as `taskset` writes them; for the first ranks only."""
    ranks = used.by_rank if used else ()
    texts = [_ranges(numbers(rank)) for rank in ranks[:_MOST_RANKS_TOLD]]
    if not any(texts):
        return UNKNOWN
    return " | ".join(text or UNKNOWN for text in texts) + (" | ..." if len(ranks) > _MOST_RANKS_TOLD else "")


def _ranges(numbers: Sequence[int]) -> str:
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in units.runs_of(numbers))


def _reasons(used: ResourceFigures | None) -> str:
    return ", ".join(used.throttle_reasons) if used and used.throttle_reasons else UNKNOWN


def _straggler(straggler: Straggler | None) -> str:
    """ "rank 3 in 92 % of steps, 21 % slower"."""
    if straggler is None:
        return UNKNOWN
    by = straggler.slower_by
    slower = f", {units.percent(by)} slower" if by is not None and by > 0 else ""
    return f"rank {straggler.rank} in {units.percent(straggler.share_of_steps)} of steps{slower}"


def _why_no_share(trial: TrialResult) -> str:
    used = trial.resources
    if used is not None and used.share_of_matmul is not None:
        return ""
    if used is None or used.matmul_flops_per_second is None:
        return "the rate was not measured"
    return "the FLOPs or the seconds of a step are unknown"


def _unknown(what: str, trials: Sequence[TrialResult], reason_of: Callable[[TrialResult], str]) -> list[str]:
    """Each reason once, with the number of trials for which it holds."""
    reasons = [reason_of(trial) for trial in trials]
    return [
        f"{what}: unavailable in {reasons.count(reason)} of {len(reasons)} trials: {reason}."
        for reason in dict.fromkeys(reasons)
        if reason
    ]
