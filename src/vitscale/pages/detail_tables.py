"""The tables beside the scaling ones: four figures that stand together, parts of a step, resources, accuracy, bytes.

Each has a row for each trial. A column is made by `_resource_column` and its like: from a heading, from the figure of
one record of the trial (its resources, breakdown, convergence, checkpoint or traffic), and from how it is printed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from vitscale.analysis import Analysis, CurveResult, TrialResult
from vitscale.analysis.learning.convergence import Convergence, accuracy_at_images, accuracy_at_seconds
from vitscale.analysis.runs.compute import FlopsSource
from vitscale.analysis.runs.resources import ResourceFigures
from vitscale.analysis.time.breakdown import Breakdown, Straggler
from vitscale.analysis.time.traffic import Traffic
from vitscale.analysis.trials import CheckpointCost
from vitscale.pages.charts.accuracy import (
    after_images_title,
    after_seconds_title,
    common_reach_of_curves,
    have_unequal_images,
    runs_that_reached_target,
)
from vitscale.pages.charts.time import PART_NAMES, known_part_seconds, unknown_parts
from vitscale.pages.tables import TrialColumn, grouped_table, interval_cell
from vitscale.present import units
from vitscale.present.document import Cell, Table
from vitscale.present.estimate import Estimate
from vitscale.trial.model_words import source_in_words

Record = TypeVar("Record")
_FigureOrText = Estimate | float | str | None
"""A figure or a text; None or an empty text is shown as a dash."""
_FigureToText = Callable[[float], str]
"""Prints a figure."""
_MOST_RANKS_NAMED = 8
_MOST_FLOPS_NAMED = 4
"""Different FLOPs of an image that a note names at most."""
_HEADINGS_OF_FOUR = ("MFU", "of the measured matmul rate", "exposed communication")
"""Three of the headings of `four_figures`; that of the speed depends on the device."""
_NOT_EXPLAINED = "no step was explained"


def four_figures(analysis: Analysis) -> Table | None:
    """Return the table of speed, model FLOPs utilisation, share of the measured matmul rate and exposed communication.

    All four columns are always there, because none of them should be read without the others. Return None where no
    trial was measured.
    """
    measured = [trial for trial in analysis.trials.values() if trial.run_figures]
    has_gpus = any(trial.trial.train.device == "cuda" for trial in measured)
    speed = "images/s/GPU" if has_gpus else "images/s/rank"
    columns: list[TrialColumn] = [
        (speed, _images_per_second_and_rank),
        _resource_column("MFU", lambda used: used.mfu, show=_percent_text),
        _resource_column("of the measured matmul rate", lambda used: used.share_of_matmul, show=_percent_text),
        _breakdown_column("exposed communication", lambda step: step.exposed_share, show=_percent_text),
        _breakdown_column("explaining cost", lambda step: step.overhead, show=_signed_percent_text),
        _breakdown_column("waited for", lambda step: _straggler_text(step.straggler)),
    ]
    notes = [
        *[f"MFU is against {peak}." for peak in _peak_names(measured)],
        *_flops_sentences(measured),
        *_unavailable_sentences("MFU", [trial.resources.mfu_reason if trial.resources else "" for trial in measured]),
        *_unavailable_sentences(
            "Share of the measured matmul rate", [_why_no_matmul_share(trial) for trial in measured]
        ),
        *_unavailable_sentences(
            "Exposed communication", ["" if trial.breakdown else _NOT_EXPLAINED for trial in measured]
        ),
    ]
    return grouped_table(
        analysis,
        title="Four figures that stand together",
        columns=columns,
        is_shown=lambda trial: trial.run_figures,
        always=(speed, *_HEADINGS_OF_FOUR),
        notes=notes,
    )


def _images_per_second_and_rank(trial: TrialResult) -> Cell:
    return _figure_cell(trial.images_per_second, units.number, factor=1 / trial.trial.world.size)


def _peak_names(trials: Sequence[TrialResult]) -> list[str]:
    """Return the names of the peak rates that trials' MFU is a share of, each once."""
    peak_names: dict[str, None] = {}
    for trial in trials:
        used = trial.resources
        if used is not None and used.mfu is not None and used.peak_name:
            peak_names[used.peak_name] = None
    return list(peak_names)


def _flops_sentences(trials: Sequence[TrialResult]) -> list[str]:
    """Return a sentence on how the FLOPs are known that trials' MFU or share of the matmul rate rests on.

    Example: "FLOPs of training on an image: 105 GFLOP by formula in vit-b16.".
    """
    names_by_flops: dict[str, dict[str, None]] = {}
    for trial in trials:
        used = trial.resources
        if used is None or used.flops_per_image is None:
            continue
        rests_on_flops = used.mfu is not None or used.share_of_matmul is not None
        if rests_on_flops:
            words = _flops_with_source(used.flops_per_image, used.flops_source)
            names_by_flops.setdefault(words, {})[trial.model_name] = None
    if not names_by_flops:
        return []
    clauses = [f"{words} in {', '.join(names)}" for words, names in names_by_flops.items()]
    return [f"FLOPs of training on an image: {units.listed(clauses, most=_MOST_FLOPS_NAMED)}."]


def _flops_with_source(flops: int, source: FlopsSource | None) -> str:
    """Return FLOPs and how they are known: "105 GFLOP by formula", "720 FLOP (unknown source: ...)"."""
    if source is None or source == "unknown":
        return f"{units.rate(flops, 'FLOP')} ({source_in_words('unknown')})"
    return f"{units.rate(flops, 'FLOP')} {source}"


def parts_table(analysis: Analysis) -> Table | None:
    """Return the table of the parts of the typical rank's step, in milliseconds; None where no step was explained."""
    trials = list(analysis.trials.values())
    breakdowns = [trial.breakdown for trial in trials if trial.breakdown is not None]
    columns: list[TrialColumn] = [_milliseconds_column("whole step", part=None)]
    for part, name in PART_NAMES.items():
        is_rare = part in ("norm", "bubble")
        if not is_rare or any(breakdown.typical.parts[part] for breakdown in breakdowns):
            columns.append(_milliseconds_column(name, part))
    notes = [
        *unknown_parts([breakdown.reasons for breakdown in breakdowns]),
        *[_note_on_skipped(trial) for trial in trials],
        *[_note_on_bubble(trial) for trial in trials],
    ]
    return grouped_table(
        analysis,
        title="Parts of a step, in milliseconds",
        columns=columns,
        is_shown=_trial_breakdown,
        notes=[note for note in notes if note],
    )


def _note_on_skipped(trial: TrialResult) -> str:
    """Return a note on the explained steps, repeats and ranks that a trial's parts do not include; "" without any."""
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
        clauses.append(f"rank{plural} {_number_ranges_text(ranks)} (no explained step in one repeat or more)")
    return f"{trial.name}: not in the parts: {'; '.join(clauses)}." if clauses else ""


def _note_on_bubble(trial: TrialResult) -> str:
    """Return a note on the idle share ("bubble") of a pipeline, and on that of one with equal stages.

    Return "" where the trial has no pipeline, or its bubble is unknown.
    """
    if trial.breakdown is None or trial.trial.parallel.pipeline == 1:
        return ""
    bubble_seconds = trial.breakdown.typical.parts["bubble"]
    if bubble_seconds is None:
        return ""
    share = units.percent(bubble_seconds / trial.breakdown.typical.seconds)
    ideal = units.percent(trial.trial.parallel.bubble_share(trial.trial.train.grad_accum))
    return f"{trial.name}: the pipeline bubble is {share} of the step; of equal stages and free transfer, {ideal}."


def resource_table(analysis: Analysis) -> Table | None:
    """Return the table of what each trial used, with notes on why figures are missing; None where nothing is known."""
    columns: list[TrialColumn] = [
        _resource_column("cores by rank", _cores_by_rank),
        _resource_column("NUMA nodes", _numa_nodes_by_rank),
        _resource_column("CPU utilisation", lambda used: used.cpu_utilisation, show=units.percent),
        _resource_column("of the CPU quota", lambda used: used.cpu_utilisation_of_quota, show=units.percent),
        _resource_column("held back by the quota", lambda used: used.cpu_throttled_share, show=_percent_text),
        _resource_column("resident", lambda used: used.peak_rss_bytes, show=units.size),
        _resource_column("GPU allocated", lambda used: used.cuda_allocated_bytes, show=units.size),
        _resource_column("GPU reserved", lambda used: used.cuda_reserved_bytes, show=units.size),
        _resource_column("whole GPU", lambda used: used.cuda_device_bytes, show=units.size),
        _resource_column("GPU utilisation", lambda used: used.gpu_utilisation, show=units.percent),
        _resource_column("SM clock (MHz)", lambda used: used.sm_clock_mhz, show=_integer_text),
        _resource_column("lowest", lambda used: used.sm_clock_mhz_min, show=_integer_text),
        _resource_column("hottest (\N{DEGREE SIGN}C)", lambda used: used.temperature_celsius_max, show=_integer_text),
        _resource_column("power per GPU (W)", lambda used: used.power_watts, show=_integer_text),
        _resource_column("throttled", lambda used: used.throttled_share, show=_percent_text),
        _resource_column("because of", lambda used: ", ".join(used.throttle_reasons)),
        _resource_column("energy per image (J)", lambda used: used.joules_per_image),
        _checkpoint_column("checkpoint saved (s)", lambda cost: cost.save_seconds),
        _checkpoint_column("restored (s)", lambda cost: cost.load_seconds),
        _checkpoint_column("its files", lambda cost: cost.bytes, show=units.size),
    ]
    resources = [trial.resources for trial in analysis.trials.values() if trial.resources is not None]
    sources = dict.fromkeys(used.energy_source for used in resources if used.energy_source)
    notes = [
        *[f"Energy was read by {source}." for source in sources],
        *_unavailable_sentences("Energy per image", [used.energy_reason for used in resources]),
        *_unavailable_sentences("GPU figures", [used.gpu_reason for used in resources]),
        *_notes_on_waiting_gpus(analysis),
    ]
    return grouped_table(analysis, "What each trial used", columns, _trial_resources, notes=notes)


def _notes_on_waiting_gpus(analysis: Analysis) -> list[str]:
    """Return a note on trials whose GPUs wait for a rank: NVML counts a kernel of NCCL that waits as a busy GPU."""
    waiting = []
    for trial in analysis.trials.values():
        has_utilisation = trial.resources is not None and trial.resources.gpu_utilisation is not None
        if has_utilisation and trial.breakdown is not None and trial.breakdown.straggler is not None:
            waiting.append(f"{trial.name} (for rank {trial.breakdown.straggler.rank})")
    if not waiting:
        return []
    return [
        f"GPU utilisation counts waiting as work: a GPU runs a kernel of NCCL while it waits for another rank, as in "
        f"{units.listed(waiting)}."
    ]


def accuracy_table(analysis: Analysis, curves: Sequence[CurveResult]) -> Table | None:
    """Return the table of accuracy, noise scale and the way to a target accuracy, for curves of one batch policy.

    Accuracy is that at the end of training, after equally many images, and after equally many seconds. Return None
    where no trial recorded how it learned.
    """
    limits = common_reach_of_curves(analysis, curves)
    notes = []
    if limits.images is not None or limits.seconds is not None:
        notes.append("Between epochs accuracy is taken as linear; before the first and after the last it is unknown.")
    trial_ids = dict.fromkeys(point.trial_id for curve in curves for point in curve.points)
    convergences = [analysis.trials[trial_id].convergence for trial_id in trial_ids]
    notes += _unavailable_sentences(
        "Noise scale", [course.noise_reason for course in convergences if course is not None]
    )
    return grouped_table(
        analysis,
        title=f"Accuracy ({curves[0].mode})" if curves else "Accuracy",
        columns=_accuracy_columns(
            equal_images=limits.images if have_unequal_images(analysis, curves) else None, equal_seconds=limits.seconds
        ),
        is_shown=_trial_convergence,
        curves=curves,
        notes=notes,
    )


def _accuracy_columns(*, equal_images: int | None, equal_seconds: float | None) -> list[TrialColumn]:
    """Return the columns of `accuracy_table`.

    Args:
        equal_images: images after which accuracies are compared; None: without this column.
        equal_seconds: seconds of training after which accuracies are compared; None: without this column.
    """
    columns: list[TrialColumn] = [("epochs", _epochs_cell), ("held-out accuracy", _held_out_accuracy_cell)]
    if equal_images is not None:
        after_images = partial(accuracy_at_images, images=equal_images)
        columns.append(_convergence_column(after_images_title(equal_images), after_images, show=_score_text))
    if equal_seconds is not None:
        after_seconds = partial(accuracy_at_seconds, seconds=equal_seconds)
        columns.append(_convergence_column(after_seconds_title(equal_seconds), after_seconds, show=_score_text))
    return [
        *columns,
        _convergence_column("noise scale (images)", lambda course: course.noise_scale_images),
        _convergence_column("target", lambda course: course.target_accuracy, show=_score_text),
        ("reached by", lambda trial: Cell(runs_that_reached_target(trial))),
        _convergence_column("images to target", _images_to_target),
        _convergence_column("time to target", _time_to_target, show=units.seconds),
    ]


def _epochs_cell(trial: TrialResult) -> Cell:
    return Cell(_whole_epochs_text(trial) if trial.convergence else units.UNKNOWN)


def _held_out_accuracy_cell(trial: TrialResult) -> Cell:
    """Return the held-out accuracy at the end of training."""
    last_epoch = trial.last_epoch
    return _figure_cell(last_epoch.held_out_accuracy if last_epoch is not None else None, _score_text)


def _whole_epochs_text(trial: TrialResult) -> str:
    """Return the number of whole epochs of a trial's runs; a dash where no run recorded an epoch.

    Examples: "3"; "3 to 5" where runs stopped at a target accuracy after different epochs; "less than 1".
    """
    last_epochs = [run.last_epoch for run in trial.run_figures if run.last_epoch is not None]
    if not last_epochs:
        return units.UNKNOWN
    counts = [epoch.epoch + 1 for epoch in last_epochs if epoch.complete]
    if not counts:
        return "less than 1"
    fewest = min(counts)
    most = max(counts)
    return f"{fewest}" if fewest == most else f"{fewest} to {most}"


def _trial_resources(trial: TrialResult) -> ResourceFigures | None:
    return trial.resources


def _trial_breakdown(trial: TrialResult) -> Breakdown | None:
    return trial.breakdown


def _trial_convergence(trial: TrialResult) -> Convergence | None:
    return trial.convergence


def _trial_checkpoint(trial: TrialResult) -> CheckpointCost | None:
    return trial.checkpoint


def _trial_traffic(trial: TrialResult) -> Traffic | None:
    return trial.traffic


def _record_column(
    heading: str,
    record_of: Callable[[TrialResult], Record | None],
    figure_of: Callable[[Record], _FigureOrText],
    *,
    show: _FigureToText,
    factor: float = 1.0,
) -> TrialColumn:
    """Return a column with a figure of one record of each trial; a dash for a trial without this record.

    Args:
        heading: the column's heading.
        record_of: returns the trial's record: its resources, breakdown, ...
        figure_of: returns the record's figure, or a text.
        show: prints the figure.
        factor: the figure is multiplied by it: 1000 from seconds to milliseconds.
    """

    def cell(trial: TrialResult) -> Cell:
        record = record_of(trial)
        return _figure_cell(None if record is None else figure_of(record), show, factor)

    return heading, cell


def _resource_column(
    heading: str, figure_of: Callable[[ResourceFigures], _FigureOrText], *, show: _FigureToText = units.number
) -> TrialColumn:
    """Return a column with a figure of the resources of each trial (`_record_column`)."""
    return _record_column(heading, _trial_resources, figure_of, show=show)


def _breakdown_column(
    heading: str, figure_of: Callable[[Breakdown], _FigureOrText], *, show: _FigureToText = units.number
) -> TrialColumn:
    """Return a column with a figure of the breakdown of each trial's steps (`_record_column`)."""
    return _record_column(heading, _trial_breakdown, figure_of, show=show)


def _convergence_column(
    heading: str, figure_of: Callable[[Convergence], _FigureOrText], *, show: _FigureToText = units.number
) -> TrialColumn:
    """Return a column with a figure of how each trial learned (`_record_column`)."""
    return _record_column(heading, _trial_convergence, figure_of, show=show)


def _checkpoint_column(
    heading: str, figure_of: Callable[[CheckpointCost], _FigureOrText], *, show: _FigureToText = units.number
) -> TrialColumn:
    """Return a column with a figure of the checkpoint of each trial (`_record_column`)."""
    return _record_column(heading, _trial_checkpoint, figure_of, show=show)


def _traffic_column(heading: str, figure_of: Callable[[Traffic], _FigureOrText], *, factor: float = 1.0) -> TrialColumn:
    """Return a column with a figure of what each trial sends (`_record_column`)."""
    return _record_column(heading, _trial_traffic, figure_of, show=units.number, factor=factor)


def _figure_cell(value: _FigureOrText, show: _FigureToText, factor: float = 1.0) -> Cell:
    """Return a cell with `factor` times a figure, or with a text; with a dash where the value is None or empty."""
    if isinstance(value, Estimate):
        return interval_cell(value.times(factor), show)
    text = show(value * factor) if isinstance(value, float | int) else value
    return Cell(text or units.UNKNOWN)


def _images_to_target(course: Convergence) -> Estimate | str | None:
    """Return the images that reaching the target took; "> 3,072" where a run did not reach it."""
    if course.images_to_target_at_least is not None:
        return f"> {units.number(course.images_to_target_at_least)}"
    return course.images_to_target


def _time_to_target(course: Convergence) -> Estimate | str | None:
    """Return the seconds that reaching the target took; "> 12.8 s" where a run did not reach it."""
    if course.seconds_to_target_at_least is not None:
        return f"> {units.seconds(course.seconds_to_target_at_least)}"
    return course.seconds_to_target


def _milliseconds_column(heading: str, part: str | None) -> TrialColumn:
    """Return a column with the milliseconds of a part of the typical rank's step. `part`: None means the whole step."""

    def cell(trial: TrialResult) -> Cell:
        if trial.breakdown is None:
            return Cell(units.UNKNOWN)
        typical = trial.breakdown.typical
        seconds = typical.seconds if part is None else known_part_seconds(trial.breakdown).get(part)
        if seconds is None:
            return Cell(units.UNKNOWN)
        over_runs = trial.breakdown.part_seconds(typical.rank, part)
        estimate = Estimate(seconds, over_runs.low, over_runs.high) if over_runs else Estimate(seconds)
        return _figure_cell(estimate, units.number, factor=1000.0)

    return heading, cell


def _percent_text(value: float) -> str:
    return units.percent(value, 1)


def _signed_percent_text(value: float) -> str:
    return f"{100 * value:+z.1f} %"


def _score_text(value: float) -> str:
    return f"{value:.1%}"


def _integer_text(value: float) -> str:
    return f"{value:,.0f}"


def _cores_by_rank(used: ResourceFigures) -> str:
    return _numbers_by_rank([rank.cores for rank in used.by_rank])


def _numa_nodes_by_rank(used: ResourceFigures) -> str:
    return _numbers_by_rank([rank.numa_nodes or () for rank in used.by_rank])


def _numbers_by_rank(by_rank: Sequence[Sequence[int]]) -> str:
    """Return the cores or memory nodes of each of the first ranks: "0-3 | 4-7" for two ranks."""
    texts = [_number_ranges_text(numbers) for numbers in by_rank[:_MOST_RANKS_NAMED]]
    if not any(texts):
        return units.UNKNOWN
    if len(by_rank) > _MOST_RANKS_NAMED:
        texts.append("...")
    return " | ".join(text or units.UNKNOWN for text in texts)


def _number_ranges_text(numbers: Sequence[int]) -> str:
    """Return numbers as `taskset` writes them: "0-3,6" for 0, 1, 2, 3, 6."""
    ranges = []
    for consecutive in units.runs_of(numbers):
        first = consecutive[0]
        last = consecutive[-1]
        ranges.append(f"{first}" if first == last else f"{first}-{last}")
    return ",".join(ranges)


def _straggler_text(straggler: Straggler | None) -> str:
    """Return the rank that the others waited for: "rank 3 in 92 % of steps, 21 % slower"."""
    if straggler is None:
        return units.UNKNOWN
    text = f"rank {straggler.rank} in {units.percent(straggler.share_of_steps)} of steps"
    if straggler.slower_by is not None and straggler.slower_by > 0:
        text += f", {units.percent(straggler.slower_by)} slower"
    return text


def _why_no_matmul_share(trial: TrialResult) -> str:
    """Return why the share of the measured matmul rate is unknown; empty where it is known."""
    used = trial.resources
    if used is not None and used.share_of_matmul is not None:
        return ""
    if used is None or used.matmul_flops_per_second is None:
        return "the rate was not measured"
    return "the FLOPs or the seconds of a step are unknown"


def _unavailable_sentences(figure: str, reasons: Sequence[str]) -> list[str]:
    """Return a sentence on each reason, with the number of trials for which it holds.

    Args:
        figure: name of the unavailable figure.
        reasons: for each trial why it lacks the figure; empty where the figure is known.
    """
    return [
        f"{figure}: unavailable in {reasons.count(reason)} of {len(reasons)} trials: {reason}."
        for reason in dict.fromkeys(reasons)
        if reason
    ]


NOTHING = "nothing"


def traffic_table(analysis: Analysis) -> Table | None:
    """Return the table of what each trial sends in an optimizer step; None where no trial recorded it."""
    columns: list[TrialColumn] = [
        _traffic_column("collectives", _collectives_text),
        _traffic_column("logical (MB)", lambda traffic: traffic.logical_bytes, factor=1e-6),
        _traffic_column("on the wire per rank (MB)", lambda traffic: traffic.physical_bytes, factor=1e-6),
        _traffic_column("transfer (ms)", lambda traffic: traffic.wire_seconds, factor=1000.0),
        _traffic_column("reached (MB/s)", lambda traffic: traffic.bytes_per_second, factor=1e-6),
        _traffic_column("gradients in", _gradient_dtypes),
    ]
    traffics = [trial.traffic for trial in analysis.trials.values() if trial.traffic is not None]
    unavailable = _unavailable_sentences("Bytes", [traffic.reason for traffic in traffics])
    notes = [
        "Logical bytes are what the engine asks for, an all-reduce counted twice; those on the wire are what a rank "
        "sends under a ring.",
        *unavailable,
    ]
    always = ("collectives",) if unavailable else ()  # a dash at least, with its reason below
    return grouped_table(analysis, "What an optimizer step sends", columns, _trial_traffic, always=always, notes=notes)


def _collectives_text(traffic: Traffic) -> str:
    """Return the collectives, those with the most bytes first: "2 all_reduce float32 + 1 broadcast int32"."""
    if traffic.calls is None:
        return units.UNKNOWN
    largest_first = sorted(traffic.sent, key=lambda message: message.logical_bytes or 0, reverse=True)
    return " + ".join(f"{message.calls} {message.operation} {message.dtype}" for message in largest_first) or NOTHING


def _gradient_dtypes(traffic: Traffic) -> str:
    """Return the types in which gradients are sent: "bfloat16", or "bfloat16 (75 %) and float32 (25 %)"."""
    shares = traffic.gradient_dtypes
    if len(shares) < 2:
        return next(iter(shares), units.UNKNOWN)
    return " and ".join(f"{dtype} ({units.percent(share)})" for dtype, share in shares.items())
