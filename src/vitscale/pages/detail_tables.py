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
_MOST_RANKS_NAMED = 8
_FOUR = ("MFU", "of the measured matmul rate", "exposed communication")
"""Three of the headings of `four_figures`; the speed's depends on the device."""
_NOT_EXPLAINED = "no step was explained"


def four_figures(analysis: Analysis) -> Table | None:
    """Put speed beside how much of the device it takes: never one of the four without the others."""
    measured = [trial for trial in analysis.trials.values() if trial.run_figures]
    has_gpus = any(trial.trial.train.device == "cuda" for trial in measured)
    speed = "images/s/GPU" if has_gpus else "images/s/rank"
    columns: list[TrialColumn] = [
        (speed, lambda trial: _cell(trial.images_per_second, units.number, 1 / trial.trial.world.size)),
        ("MFU", _figure_of(_resources, lambda used: used.mfu, _percent)),
        ("of the measured matmul rate", _figure_of(_resources, lambda used: used.share_of_matmul, _percent)),
        ("exposed communication", _figure_of(_breakdown, lambda step: step.exposed_share, _percent)),
        ("explaining cost", _figure_of(_breakdown, lambda step: step.overhead, _signed)),
        ("waited for", _figure_of(_breakdown, lambda step: _straggler(step.straggler))),
    ]
    peaks: dict[str, None] = {}
    for trial in measured:
        if trial.resources is not None and trial.resources.mfu is not None and trial.resources.peak_name:
            peaks[trial.resources.peak_name] = None
    notes = [
        *[f"MFU is against {peak}." for peak in peaks],
        *_unavailable("MFU", [trial.resources.mfu_reason if trial.resources else "" for trial in measured]),
        *_unavailable("Share of the measured matmul rate", [_why_no_matmul_share(trial) for trial in measured]),
        *_unavailable("Exposed communication", ["" if trial.breakdown else _NOT_EXPLAINED for trial in measured]),
    ]
    title = "Four figures that stand together"
    return grouped_table(analysis, title, columns, lambda trial: trial.run_figures, always=(speed, *_FOUR), notes=notes)


def parts_table(analysis: Analysis) -> Table | None:
    """Every part of the typical rank's step, in milliseconds."""
    trials = list(analysis.trials.values())
    breakdowns = [trial.breakdown for trial in trials if trial.breakdown is not None]
    columns: list[TrialColumn] = [("whole step", _part_in_milliseconds(None))]
    for part, name in PART_NAMES.items():
        is_rare = part in ("norm", "bubble")
        if not is_rare or any(breakdown.typical.parts[part] for breakdown in breakdowns):
            columns.append((name, _part_in_milliseconds(part)))
    notes = [
        *unknown_parts([breakdown.reasons for breakdown in breakdowns]),
        *map(_left_out, trials),
        *map(_bubble, trials),
    ]
    title = "Parts of a step, in milliseconds"
    return grouped_table(analysis, title, columns, _breakdown, notes=[note for note in notes if note])


def _left_out(trial: TrialResult) -> str:
    """Name the explained steps, repeats and ranks that are not in a trial's parts; empty where all are."""
    breakdown = trial.breakdown
    if breakdown is None:
        return ""
    clauses = []
    if breakdown.left_out:
        left_out = len(breakdown.left_out)
        reasons = "; ".join(dict.fromkeys(breakdown.left_out))
        clauses.append(f"{left_out} of {breakdown.steps + left_out} explained steps ({reasons})")
    repeats = [
        run.header.repeat + 1 for run, parts in zip(trial.recorded_runs, breakdown.by_run, strict=True) if parts is None
    ]
    if repeats:
        clauses.append(f"repeat {units.listed(repeats)} (no step of which all of these ranks tell the parts)")
    ranks = sorted(set(range(trial.trial.world.size)) - {rank.rank for rank in breakdown.ranks})
    if ranks:
        plural = "s" if len(ranks) > 1 else ""
        clauses.append(f"rank{plural} {_ranges(ranks)} (no explained step in one repeat or more)")
    return f"{trial.name}: not in the parts: {'; '.join(clauses)}." if clauses else ""


def _bubble(trial: TrialResult) -> str:
    """Put the pipeline's bubble beside what equal stages would leave; empty where there is none, or it is unknown."""
    if trial.breakdown is None or trial.trial.parallel.pipeline == 1:
        return ""
    bubble_seconds = trial.breakdown.typical.parts["bubble"]
    if bubble_seconds is None:
        return ""
    share = units.percent(bubble_seconds / trial.breakdown.typical.seconds)
    ideal = units.percent(trial.trial.parallel.bubble_share(trial.trial.train.grad_accum))
    return f"{trial.name}: the pipeline bubble is {share} of the step; of equal stages and free transfer, {ideal}."


def resource_table(analysis: Analysis) -> Table | None:
    """What each trial used, and why figures are missing."""
    columns: list[TrialColumn] = [
        ("cores by rank", _figure_of(_resources, lambda used: _places([rank.cores for rank in used.by_rank]))),
        ("NUMA nodes", _figure_of(_resources, lambda used: _places([rank.numa_nodes or () for rank in used.by_rank]))),
        ("CPU utilisation", _figure_of(_resources, lambda used: used.cpu_utilisation, units.percent)),
        ("of the CPU quota", _figure_of(_resources, lambda used: used.cpu_utilisation_of_quota, units.percent)),
        ("held back by the quota", _figure_of(_resources, lambda used: used.cpu_throttled_share, _percent)),
        ("resident", _figure_of(_resources, lambda used: used.peak_rss_bytes, units.size)),
        ("GPU allocated", _figure_of(_resources, lambda used: used.cuda_allocated_bytes, units.size)),
        ("GPU reserved", _figure_of(_resources, lambda used: used.cuda_reserved_bytes, units.size)),
        ("whole GPU", _figure_of(_resources, lambda used: used.cuda_device_bytes, units.size)),
        ("GPU utilisation", _figure_of(_resources, lambda used: used.gpu_utilisation, units.percent)),
        ("SM clock (MHz)", _figure_of(_resources, lambda used: used.sm_clock_mhz, _whole)),
        ("lowest", _figure_of(_resources, lambda used: used.sm_clock_mhz_min, _whole)),
        ("hottest (\N{DEGREE SIGN}C)", _figure_of(_resources, lambda used: used.temperature_celsius_max, _whole)),
        ("power per GPU (W)", _figure_of(_resources, lambda used: used.power_watts, _whole)),
        ("throttled", _figure_of(_resources, lambda used: used.throttled_share, _percent)),
        ("because of", _figure_of(_resources, lambda used: ", ".join(used.throttle_reasons))),
        ("energy per image (J)", _figure_of(_resources, lambda used: used.joules_per_image)),
        ("checkpoint saved (s)", _figure_of(_checkpoint, lambda cost: cost.save_seconds)),
        ("restored (s)", _figure_of(_checkpoint, lambda cost: cost.load_seconds)),
        ("its files", _figure_of(_checkpoint, lambda cost: cost.bytes, units.size)),
    ]
    resources = [trial.resources for trial in analysis.trials.values() if trial.resources is not None]
    sources = dict.fromkeys(used.energy_source for used in resources if used.energy_source)
    notes = [
        *[f"Energy was read by {source}." for source in sources],
        *_unavailable("Energy per image", [used.energy_reason for used in resources]),
        *_unavailable("GPU figures", [used.gpu_reason for used in resources]),
    ]
    return grouped_table(analysis, "What each trial used", columns, _resources, notes=notes)


def accuracy_table(analysis: Analysis, curves: Sequence[CurveResult]) -> Table | None:
    """Accuracy at the end, after equal images and seconds, the noise scale and what a target took; for one policy."""
    limits = reach(analysis, curves)
    images = limits.images
    seconds = limits.seconds
    columns: list[TrialColumn] = [
        ("epochs", _figure_of(lambda trial: trial if trial.convergence else None, _epochs)),
        ("held-out accuracy", _figure_of(lambda trial: trial.last_epoch, lambda last: last.held_out_accuracy, _score)),
    ]
    if images is not None and unequal_images(analysis, curves):
        at_images = _figure_of(_convergence, lambda course: accuracy_at_images(course, images), _score)
        columns.append((images_panel(images), at_images))
    if seconds is not None:
        at_seconds = _figure_of(_convergence, lambda course: accuracy_at_seconds(course, seconds), _score)
        columns.append((seconds_panel(seconds), at_seconds))
    columns += [
        ("noise scale (images)", _figure_of(_convergence, lambda course: course.noise_scale_images)),
        ("target", _figure_of(_convergence, lambda course: course.target_accuracy, _score)),
        ("reached by", lambda trial: Cell(reached(trial))),
        ("images to target", _figure_of(_convergence, _images_to_target)),
        ("time to target", _figure_of(_convergence, _time_to_target, units.seconds)),
    ]
    notes = []
    if images is not None or seconds is not None:
        notes.append("Between epochs accuracy is taken as linear; before the first and after the last it is unknown.")
    trial_ids = dict.fromkeys(point.trial_id for curve in curves for point in curve.points)
    courses = [analysis.trials[trial_id].convergence for trial_id in trial_ids]
    notes += _unavailable("Noise scale", [course.noise_reason for course in courses if course is not None])
    title = f"Accuracy ({curves[0].mode})" if curves else "Accuracy"
    return grouped_table(analysis, title, columns, _convergence, curves=curves, notes=notes)


def _epochs(trial: TrialResult) -> str:
    """ "3"; "3 to 5" where runs with a target accuracy ended at epochs of their own; a dash without any."""
    last_epochs = [run.last_epoch for run in trial.run_figures if run.last_epoch is not None]
    if not last_epochs:
        return units.UNKNOWN
    counts = [epoch.epoch + 1 for epoch in last_epochs if epoch.complete]
    if not counts:
        return "less than 1"
    fewest = min(counts)
    most = max(counts)
    return f"{fewest}" if fewest == most else f"{fewest} to {most}"


def _resources(trial: TrialResult) -> ResourceFigures | None:
    return trial.resources


def _breakdown(trial: TrialResult) -> Breakdown | None:
    return trial.breakdown


def _convergence(trial: TrialResult) -> Convergence | None:
    return trial.convergence


def _checkpoint(trial: TrialResult) -> CheckpointCost | None:
    return trial.checkpoint


def _traffic(trial: TrialResult) -> Traffic | None:
    return trial.traffic


def _figure_of(
    part: Callable[[TrialResult], Part | None],
    figure: Callable[[Part], Estimate | float | str | None],
    show: Callable[[float], str] = units.number,
    times: float = 1.0,
) -> Callable[[TrialResult], Cell]:
    """Make the cells of a column with a figure of one part of what is known of a trial; a dash without this part.

    Args:
        part: resources, breakdown, ...
        figure: the part's figure, or a text.
        show: words for the figure.
        times: the factor from the figure's unit to the shown one.
    """

    def cell(trial: TrialResult) -> Cell:
        part_of_trial = part(trial)
        value = None if part_of_trial is None else figure(part_of_trial)
        return _cell(value, show, times)

    return cell


def _cell(figure: Estimate | float | str | None, show: Callable[[float], str], times: float = 1.0) -> Cell:
    """A cell with a figure in its unit times `times`, or a text; a dash where it is unknown or empty."""
    if isinstance(figure, Estimate):
        return interval_cell(figure.times(times), show)
    text = show(figure * times) if isinstance(figure, float | int) else figure
    return Cell(text or units.UNKNOWN)


def _images_to_target(course: Convergence) -> Estimate | str | None:
    """The images that the target took; "> 3,072" where a run did not reach it."""
    if course.images_to_target_at_least is not None:
        return f"> {units.number(course.images_to_target_at_least)}"
    return course.images_to_target


def _time_to_target(course: Convergence) -> Estimate | str | None:
    """The seconds that the target took; "> 12.8 s" where a run did not reach it."""
    if course.seconds_to_target_at_least is not None:
        return f"> {units.seconds(course.seconds_to_target_at_least)}"
    return course.seconds_to_target


def _part_in_milliseconds(part: str | None) -> Callable[[TrialResult], Cell]:
    """Make the cells of a column with a part of the typical rank's step. `part`: None means the whole step."""

    def cell(trial: TrialResult) -> Cell:
        if trial.breakdown is None:
            return Cell(units.UNKNOWN)
        typical = trial.breakdown.typical
        seconds = typical.seconds if part is None else parts_of(trial.breakdown).get(part)
        if seconds is None:
            return Cell(units.UNKNOWN)
        over_runs = trial.breakdown.part_seconds(typical.rank, part)
        estimate = Estimate(seconds, over_runs.low, over_runs.high) if over_runs else Estimate(seconds)
        return _cell(estimate, units.number, times=1000.0)

    return cell


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
    texts = [_ranges(numbers) for numbers in by_rank[:_MOST_RANKS_NAMED]]
    if not any(texts):
        return units.UNKNOWN
    if len(by_rank) > _MOST_RANKS_NAMED:
        texts.append("...")
    return " | ".join(text or units.UNKNOWN for text in texts)


def _ranges(numbers: Sequence[int]) -> str:
    """ "0-3,6": as `taskset` writes them."""
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in units.runs_of(numbers))


def _straggler(straggler: Straggler | None) -> str:
    """ "rank 3 in 92 % of steps, 21 % slower"."""
    if straggler is None:
        return units.UNKNOWN
    text = f"rank {straggler.rank} in {units.percent(straggler.share_of_steps)} of steps"
    if straggler.slower_by is not None and straggler.slower_by > 0:
        text += f", {units.percent(straggler.slower_by)} slower"
    return text


def _why_no_matmul_share(trial: TrialResult) -> str:
    """Why the share of the measured matmul rate is unknown; empty where it is known."""
    used = trial.resources
    if used is not None and used.share_of_matmul is not None:
        return ""
    if used is None or used.matmul_flops_per_second is None:
        return "the rate was not measured"
    return "the FLOPs or the seconds of a step are unknown"


def _unavailable(figure: str, reasons: Sequence[str]) -> list[str]:
    """Say each reason once, with the number of trials for which it holds.

    Args:
        figure: what is unavailable.
        reasons: why, a reason for each trial; empty where the figure is known.
    """
    return [
        f"{figure}: unavailable in {reasons.count(reason)} of {len(reasons)} trials: {reason}."
        for reason in dict.fromkeys(reasons)
        if reason
    ]


NOTHING = "nothing"


def traffic_table(analysis: Analysis) -> Table | None:
    """What each trial sends in an optimizer step; None where no trial recorded it."""
    columns: list[TrialColumn] = [
        ("collectives", _figure_of(_traffic, _collectives)),
        ("logical (MB)", _figure_of(_traffic, lambda traffic: traffic.logical_bytes, times=1e-6)),
        ("on the wire per rank (MB)", _figure_of(_traffic, lambda traffic: traffic.physical_bytes, times=1e-6)),
        ("transfer (ms)", _figure_of(_traffic, lambda traffic: traffic.wire_seconds, times=1000.0)),
        ("reached (MB/s)", _figure_of(_traffic, lambda traffic: traffic.bytes_per_second, times=1e-6)),
        ("gradients in", _figure_of(_traffic, _gradients)),
    ]
    traffics = [trial.traffic for trial in analysis.trials.values() if trial.traffic is not None]
    unavailable = _unavailable("Bytes", [traffic.reason for traffic in traffics])
    notes = [
        "Logical bytes are what the engine asks for, an all-reduce counted twice; those on the wire are what a rank "
        "sends under a ring.",
        *unavailable,
    ]
    always = ("collectives",) if unavailable else ()  # a dash at least, with its reason below
    return grouped_table(analysis, "What an optimizer step sends", columns, _traffic, always=always, notes=notes)


def _collectives(traffic: Traffic) -> str:
    """ "2 all_reduce float32 + 1 broadcast int32"; the largest first."""
    if traffic.calls is None:
        return units.UNKNOWN
    largest_first = sorted(traffic.sent, key=lambda message: message.logical_bytes or 0, reverse=True)
    return " + ".join(f"{message.calls} {message.operation} {message.dtype}" for message in largest_first) or NOTHING


def _gradients(traffic: Traffic) -> str:
    """ "bfloat16", or several with their shares."""
    shares = traffic.gradient_dtypes
    if len(shares) < 2:
        return next(iter(shares), units.UNKNOWN)
    return " and ".join(f"{dtype} ({units.percent(share)})" for dtype, share in shares.items())
