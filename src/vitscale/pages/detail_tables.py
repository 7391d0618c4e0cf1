"""The tables beside the scaling ones: four figures that stand together, parts of a step, resources, accuracy, bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from vitscale.analysis import Analysis, CurveResult, TrialResult
from vitscale.analysis.learning.convergence import Convergence, accuracy_at_images, accuracy_at_seconds
from vitscale.analysis.runs.resources import ResourceFigures
from vitscale.analysis.time.breakdown import Breakdown, Straggler
from vitscale.analysis.time.traffic import Traffic
from vitscale.analysis.trials import CheckpointCost
from vitscale.pages.charts.accuracy import images_panel, reach, reached, seconds_panel, unequal_images
from vitscale.pages.charts.time import PART_NAMES, parts_of, unknown_parts
from vitscale.pages.tables import TrialColumn, grouped_table, interval_cell
from vitscale.present import units
from vitscale.present.document import Cell, Table
from vitscale.present.estimate import Estimate

Part = TypeVar("Part")
_MOST_RANKS_TOLD = 8
_FOUR = ("MFU", "of the measured matmul rate", "exposed communication")


def four_figures(analysis: Analysis) -> Table | None:
    """Speed and how much of the device it takes: never one of the four without the others."""
    measured = [trial for trial in analysis.trials.values() if trial.run_figures]
    speed = f"images/s/{'GPU' if any(trial.trial.train.device == 'cuda' for trial in measured) else 'rank'}"
    columns: list[TrialColumn] = [
        (speed, lambda trial: _cell(trial.images_per_second, units.number, 1 / trial.trial.world.size)),
        ("MFU", _of(_resources, lambda used: used.mfu, _percent)),
        ("of the measured matmul rate", _of(_resources, lambda used: used.share_of_matmul, _percent)),
        ("exposed communication", _of(_breakdown, lambda step: step.exposed_share, _percent)),
        ("explaining cost", _of(_breakdown, lambda step: step.overhead, _signed)),
        ("waited for", _of(_breakdown, lambda step: _straggler(step.straggler))),
    ]
    peaks = dict.fromkeys(t.resources.peak_name for t in measured if t.resources and t.resources.mfu is not None)
    notes = [
        *[f"MFU is against {peak}." for peak in peaks if peak],
        *_unknown("MFU", measured, lambda trial: trial.resources.mfu_reason if trial.resources else ""),
        *_unknown("Share of the measured matmul rate", measured, _why_no_share),
        *_unknown("Exposed communication", measured, lambda t: "" if t.breakdown else "no step was explained"),
    ]
    title = "Four figures that stand together"
    return grouped_table(analysis, title, columns, lambda trial: trial.run_figures, always=(speed, *_FOUR), notes=notes)


def parts_table(analysis: Analysis) -> Table | None:
    """Every part of the typical rank's step, in milliseconds."""
    breakdowns = [trial.breakdown for trial in analysis.trials.values() if trial.breakdown is not None]
    columns: list[TrialColumn] = [("whole step", lambda trial: _milliseconds(trial, None))]
    columns += [
        (name, lambda trial, part=part: _milliseconds(trial, part))  # type: ignore[misc]  # its default is of this round
        for part, name in PART_NAMES.items()
        if part not in ("norm", "bubble") or any(breakdown.typical.parts[part] for breakdown in breakdowns)
    ]
    notes = [
        *unknown_parts([breakdown.reasons for breakdown in breakdowns]),
        *(of_trial(trial) for of_trial in (_left_out, _bubble) for trial in analysis.trials.values()),
    ]
    title = "Parts of a step, in milliseconds"
    return grouped_table(analysis, title, columns, _breakdown, notes=list(filter(None, notes)))


def _left_out(trial: TrialResult) -> str:
    """The explained steps, repeats and ranks that are not in a trial's parts; empty where all are."""
    if (own := trial.breakdown) is None:
        return ""
    repeats = [run.header.repeat + 1 for run, used in zip(trial.recorded_runs, own.by_run, strict=True) if used is None]
    ranks = sorted(set(range(trial.trial.world.size)) - {rank.rank for rank in own.ranks})
    steps = f"{len(own.left_out)} of {own.steps + len(own.left_out)} explained steps"
    said = [
        f"{steps} ({'; '.join(dict.fromkeys(own.left_out))})" if own.left_out else "",
        f"repeat {units.listed(repeats)} (no step of which all of these ranks tell the parts)" if repeats else "",
        f"rank{'s' * (len(ranks) > 1)} {_ranges(ranks)} (no explained step in one repeat or more)" if ranks else "",
    ]
    return f"{trial.name}: not in the parts: {'; '.join(filter(None, said))}." if any(said) else ""


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
        ("cores by rank", _of(_resources, lambda used: _places([rank.cores for rank in used.by_rank]))),
        ("NUMA nodes", _of(_resources, lambda used: _places([rank.numa_nodes or () for rank in used.by_rank]))),
        ("CPU utilisation", _of(_resources, lambda used: used.cpu_utilisation, units.percent)),
        ("of the CPU quota", _of(_resources, lambda used: used.cpu_utilisation_of_quota, units.percent)),
        ("held back by the quota", _of(_resources, lambda used: used.cpu_throttled_share, _percent)),
        ("resident", _of(_resources, lambda used: used.peak_rss_bytes, units.size)),
        ("GPU allocated", _of(_resources, lambda used: used.cuda_allocated_bytes, units.size)),
        ("GPU reserved", _of(_resources, lambda used: used.cuda_reserved_bytes, units.size)),
        ("whole GPU", _of(_resources, lambda used: used.cuda_device_bytes, units.size)),
        ("GPU utilisation", _of(_resources, lambda used: used.gpu_utilisation, units.percent)),
        ("SM clock (MHz)", _of(_resources, lambda used: used.sm_clock_mhz, _whole)),
        ("lowest", _of(_resources, lambda used: used.sm_clock_mhz_min, _whole)),
        ("hottest (\N{DEGREE SIGN}C)", _of(_resources, lambda used: used.temperature_celsius_max, _whole)),
        ("power per GPU (W)", _of(_resources, lambda used: used.power_watts, _whole)),
        ("throttled", _of(_resources, lambda used: used.throttled_share, _percent)),
        ("because of", _of(_resources, lambda used: ", ".join(used.throttle_reasons))),
        ("energy per image (J)", _of(_resources, lambda used: used.joules_per_image)),
        ("checkpoint saved (s)", _of(_checkpoint, lambda cost: cost.save_seconds)),
        ("restored (s)", _of(_checkpoint, lambda cost: cost.load_seconds)),
        ("its files", _of(_checkpoint, lambda cost: cost.bytes, units.size)),
    ]
    measured = [trial for trial in analysis.trials.values() if trial.resources is not None]
    sources = dict.fromkeys(t.resources.energy_source for t in measured if t.resources and t.resources.energy_source)
    notes = [
        *[f"Energy was read by {source}." for source in sources],
        *_unknown("Energy per image", measured, lambda t: t.resources.energy_reason if t.resources else ""),
        *_unknown("GPU figures", measured, lambda t: t.resources.gpu_reason if t.resources else ""),
    ]
    return grouped_table(analysis, "What each trial used", columns, _resources, notes=notes)


def accuracy_table(analysis: Analysis, curves: Sequence[CurveResult]) -> Table | None:
    """Accuracy at the end, after equal images and seconds, the noise scale and what a target took; for one policy."""
    limits = reach(analysis, curves)
    images, seconds = limits.images, limits.seconds
    columns: list[TrialColumn] = [
        ("epochs", _of(lambda trial: trial if trial.convergence else None, _epochs)),
        ("held-out accuracy", _of(lambda trial: trial.last_epoch, lambda last: last.held_out_accuracy, _score)),
    ]
    if images is not None and unequal_images(analysis, curves):
        at_images = _of(_learnt, lambda own: accuracy_at_images(own, images), _score)
        columns.append((images_panel(images), at_images))
    if seconds is not None:
        at_seconds = _of(_learnt, lambda own: accuracy_at_seconds(own, seconds), _score)
        columns.append((seconds_panel(seconds), at_seconds))
    columns += [
        ("noise scale (images)", _of(_learnt, lambda own: own.noise_scale_images)),
        ("target", _of(_learnt, lambda own: own.target_accuracy, _score)),
        ("reached by", lambda trial: Cell(reached(trial))),
        ("images to target", _of(_learnt, lambda own: _above(own.images_to_target_at_least) or own.images_to_target)),
        ("time to target", _of(_learnt, _time_to_target, units.seconds)),
    ]
    ids = dict.fromkeys(point.trial_id for curve in curves for point in curve.points)
    measured = [analysis.trials[trial_id] for trial_id in ids if analysis.trials[trial_id].convergence is not None]
    notes = _unknown("Noise scale", measured, lambda t: t.convergence.noise_reason if t.convergence else "")
    if images is not None or seconds is not None:
        notes.insert(
            0, "Between epochs accuracy is taken as linear; before the first and after the last it is unknown."
        )
    title = f"Accuracy ({curves[0].mode})" if curves else "Accuracy"
    return grouped_table(analysis, title, columns, _learnt, curves=curves, notes=notes)


def _epochs(trial: TrialResult) -> str:
    """ "3"; "3 to 5" where runs with a target accuracy ended at epochs of their own."""
    ends = [run.last_epoch for run in trial.run_figures if run.last_epoch is not None]
    last = [end.epoch + 1 for end in ends if end.complete]
    fewest = " to ".join(map(str, dict.fromkeys((min(last), max(last))))) if last else "less than 1"
    return fewest if ends else units.UNKNOWN


def _resources(trial: TrialResult) -> ResourceFigures | None:
    return trial.resources


def _breakdown(trial: TrialResult) -> Breakdown | None:
    return trial.breakdown


def _learnt(trial: TrialResult) -> Convergence | None:
    return trial.convergence


def _checkpoint(trial: TrialResult) -> CheckpointCost | None:
    return trial.checkpoint


def _traffic(trial: TrialResult) -> Traffic | None:
    return trial.traffic


def _of(
    part: Callable[[TrialResult], Part | None],
    figure: Callable[[Part], Estimate | float | str | None],
    show: Callable[[float], str] = units.number,
    times: float = 1.0,
) -> Callable[[TrialResult], Cell]:
    """The cell with a figure of one part of what is known of a trial; a dash for a trial without this part.

    Args:
        part: resources, breakdown, ...
        figure: the part's figure, or a text.
        show: words for the figure.
        times: the factor from the figure's unit to the shown one.
    """

    def cell(trial: TrialResult) -> Cell:
        known = part(trial)
        return _cell(None if known is None else figure(known), show, times)

    return cell


def _cell(figure: Estimate | float | str | None, show: Callable[[float], str], times: float = 1.0) -> Cell:
    if isinstance(figure, Estimate):
        return interval_cell(figure.times(times), show)
    text = show(figure * times) if isinstance(figure, float | int) else figure
    return Cell(text or units.UNKNOWN)


def _above(at_least: float | None, show: Callable[[float], str] = units.number) -> str:
    """What the target took at least, where a run did not reach it."""
    return "" if at_least is None else f"> {show(at_least)}"


def _time_to_target(learnt: Convergence) -> Estimate | str | None:
    return _above(learnt.seconds_to_target_at_least, units.seconds) or learnt.seconds_to_target


def _milliseconds(trial: TrialResult, part: str | None) -> Cell:
    if trial.breakdown is None:
        return Cell(units.UNKNOWN)
    seconds = parts_of(trial.breakdown).get(part) if part else trial.breakdown.typical.seconds
    if seconds is None:
        return Cell(units.UNKNOWN)
    over_runs = trial.breakdown.part_seconds(trial.breakdown.typical.rank, part)
    bounds = (over_runs.low, over_runs.high) if over_runs else (None, None)
    return _cell(Estimate(seconds, *bounds), units.number, 1000.0)


def _percent(value: float) -> str:
    return units.percent(value, 1)


def _signed(value: float) -> str:
    return f"{100 * value:+z.1f} %"


def _score(value: float) -> str:
    return f"{value:.1%}"


def _whole(value: float) -> str:
    return f"{value:,.0f}"


def _places(by_rank: Sequence[Sequence[int]]) -> str:
    """ "0-3 | 4-7": ranks' cores or memory nodes, ranges as `taskset` writes them; for the first ranks only."""
    texts = [_ranges(numbers) for numbers in by_rank[:_MOST_RANKS_TOLD]]
    if not any(texts):
        return units.UNKNOWN
    return " | ".join(text or units.UNKNOWN for text in texts) + (" | ..." if len(by_rank) > _MOST_RANKS_TOLD else "")


def _ranges(numbers: Sequence[int]) -> str:
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in units.runs_of(numbers))


def _straggler(straggler: Straggler | None) -> str:
    """ "rank 3 in 92 % of steps, 21 % slower"."""
    if straggler is None:
        return units.UNKNOWN
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


NOTHING = "nothing"


def traffic_table(analysis: Analysis) -> Table | None:
    """What each trial sends in an optimizer step; None where no trial recorded it."""
    columns: list[TrialColumn] = [
        ("collectives", _of(_traffic, _collectives)),
        ("logical (MB)", _of(_traffic, lambda sent: sent.logical_bytes, times=1e-6)),
        ("on the wire per rank (MB)", _of(_traffic, lambda sent: sent.physical_bytes, times=1e-6)),
        ("transfer (ms)", _of(_traffic, lambda sent: sent.wire_seconds, times=1000.0)),
        ("reached (MB/s)", _of(_traffic, lambda sent: sent.bytes_per_second, times=1e-6)),
        ("gradients in", _of(_traffic, _gradients)),
    ]
    counted = [trial for trial in analysis.trials.values() if trial.traffic is not None]
    unknown = _unknown("Bytes", counted, lambda trial: trial.traffic.reason if trial.traffic else "")
    notes = [
        "Logical bytes are what the engine asks for, an all-reduce counted twice; those on the wire are what a rank "
        "sends under a ring.",
        *unknown,
    ]
    always = ("collectives",) if unknown else ()  # a dash at least, with its reason below
    return grouped_table(analysis, "What an optimizer step sends", columns, _traffic, always=always, notes=notes)


def _collectives(traffic: Traffic) -> str:
    """ "2 all_reduce float32 + 1 broadcast int32"; the largest first."""
    if traffic.calls is None:
        return units.UNKNOWN
    largest_first = sorted(traffic.sent, key=lambda sent: sent.logical_bytes or 0, reverse=True)
    return " + ".join(f"{message.calls} {message.operation} {message.dtype}" for message in largest_first) or NOTHING


def _gradients(traffic: Traffic) -> str:
    """ "bfloat16", or several with their shares."""
    shares = traffic.gradient_dtypes
    if len(shares) < 2:
        return next(iter(shares), units.UNKNOWN)
    return " and ".join(f"{dtype} ({units.percent(share)})" for dtype, share in shares.items())
