"""The report as data: JSON, whose form is a contract with a version, and the same trials as CSV.

Versions of the JSON:
  1  first version.
  2  where the time goes: each trial has breakdown, resources and convergence, and their most useful figures as values
     of their own; waterfalls stand beside the curves. Nothing of version 1 has changed.
  3  engines: each trial has its wrapper's options, its drift from the trials that compute the same, what an optimizer
     step sends, and what a checkpoint takes; a comparison has `fields`, all that differ. `zero_stage` is there under
     Accelerate with DeepSpeed too. Nothing else of version 2 has changed.
  4  clusters: each trial has `micro_batches`, the images per micro-step of each rank where they are not equal (else
     null), and `largest_micro_batch`; `micro_batch` is their mean. Nothing of version 3 has changed.
  5  predictions: `predictions`, the objects of `vitscale predict --json` (whose `_low` and `_high` are of a run still
     to be made, at 90 %), and `prediction_scores`, how well such predictions did where it is known. Both are empty
     where nothing was measured, and in what `vitscale run --json` prints. Nothing of version 4 has changed.
  6  uncertainty: `_low` and `_high` of the exposed share, MFU, share of the matmul rate, energy per image, bandwidth,
     straggler's share, parts of a step and points of a waterfall, null from fewer than 3 runs. A comparison has `p` and
     `p_adjusted` (Holm, over all pairs), a verdict "not significant among all comparisons", and no direction from fewer
     than 3 runs on a side. A trial has `allocations` and the two spreads of its epoch times. Centres of epochs, steps,
     images/s, MFU and energy are geometric means, where they were medians from 6 runs on.
     One estimator: times derive from timed steps. `step_seconds` is the mean elapsed whole step, `epoch_seconds` is
     `effective_steps` of them, and `images_per_second` x `epoch_seconds` is `epoch_images`, those trained in an epoch.
     `epoch_seconds_source` is steps, or epochs for imported logs of these alone; `last_step_source` says whether the
     short last step was measured or taken by its slots' share (null: there is none). `elapsed_epoch_seconds` is from
     barrier to barrier, over `elapsed_epochs` epochs. `slow_steps` were set aside, `slow_steps_kept` recur in
     the trial's runs, each with its share of the time. p95 and p99 are null where a run has fewer than 100 steps;
     `tail_steps` says how many are behind them.
  7  segmentation: a trial and each of its epochs have `mean_iou` and `pixel_accuracy`, on the held-out images; null in
     classification. `held_out_accuracy` is that of pixels there. `resolutions`: time and memory by image size, beside
     what arithmetic says (empty where the size does not vary). Parts of a step have `norm`, and predictions
     `norm_seconds`: the transfers of synchronised norms, which are not in `wire`. Nothing of version 6 has changed.
  8  one envelope: `vitscale` names the verb. A verdict has `severity` (was `level`), `ranks`, `hosts`, `key`, `source`.
     runs: each trial has `runs`, the figures of each, and `swept.FIELD` for every field that the study sweeps.
     In CSV `modes` has every batch policy of a trial, a blank between. Parts of a step have `bubble`, and predictions
     `bubble_seconds`: waiting for stages of other ranks.
     Nothing else of version 7 has changed. Added since: `rest_seconds` of predictions, what no other part has; `runs`
     of an epoch, of how many runs it is the mean; `ended_early` of `run` and `train`; `steps_left_out` of a breakdown,
     explained steps of which the profiler lost events. `image_size` is null where nobody names the model: a log does
     not tell it. `parameters_source`, and `flops_per_image` with `flops_source`, say how counts are known.

Unknown is null (an empty cell in CSV), never 0 and never NaN. Times are seconds, sizes bytes, shares in [0, 1].
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vitscale.analysis import Analysis, CurveComparison, CurveResult, ScalingPoint, TrialResult
from vitscale.analysis.model_counts import model_of_runs, parameters_of
from vitscale.analysis.runs.figures import EpochFigures
from vitscale.analysis.trials import Drift
from vitscale.engines.names import option_if_read
from vitscale.pages import contract_details, prediction_table, resolutions
from vitscale.pages.statements import PAIR, claim
from vitscale.prediction.results import Forecast
from vitscale.present.data import attributes, envelope, estimate_fields, estimates, finding_fields, nonfinite_as_null
from vitscale.present.unread import with_unread
from vitscale.trial.model_words import parameter_fields
from vitscale.trial.rank_batches import largest_micro_batch
from vitscale.trial.trial import Trial

if TYPE_CHECKING:
    import polars


def report_fields(analysis: Analysis, forecast: Forecast | None = None, **call_fields: str | None) -> dict[str, Any]:
    """Return the whole analysis as JSON fields, one object per trial.

    Args:
        analysis: the results.
        forecast: what is predicted from them; None: nothing.
        call_fields: fields on what the verb did just now.
    """
    study = analysis.study
    predictions = forecast.predictions if forecast else ()
    return {
        "study": {"name": study.name, "repeats": study.repeats, "versions": study.versions},
        "trials": trial_rows(analysis),
        "curves": [_curve_object(curve) for curve in analysis.curves],
        "waterfalls": [contract_details.waterfall(waterfall) for waterfall in analysis.waterfalls],
        "resolutions": resolutions.as_json(analysis),
        "comparisons": [_comparison_object(comparison) for comparison in analysis.comparisons],
        "verdicts": [finding_fields(finding) for finding in analysis.findings],
        "problems": list(analysis.problems),
        "predictions": [prediction_table.prediction(prediction) for prediction in predictions],
        "prediction_scores": prediction_table.scores(forecast) if forecast else [],
        **call_fields,
    }


def to_json(analysis: Analysis, forecast: Forecast | None = None) -> str:
    """Return the whole analysis as strict JSON, as `vitscale report --json` prints it."""
    return envelope("report", with_unread(report_fields(analysis, forecast), analysis.unread))


def frame(rows: Sequence[dict[str, Any]], columns: Mapping[str, Any], *, for_csv: bool = False) -> polars.DataFrame:
    """Return rows with the same keys as a data frame, without the columns that hold lists or objects (`_NESTED`).

    The list `modes` is the exception: it stays. A column has the same type in every frame, so that the frames of two
    results can be put together.

    Args:
        rows: the rows.
        columns: the columns of a frame without rows: column -> a value of its type, or None (`run_columns`).
        for_csv: whether cells are for CSV (`_csv_cell`).
    """
    import polars  # takes a moment, and only tables need it

    finite_rows = [nonfinite_as_null(row) for row in rows]
    examples = finite_rows[0] if finite_rows else columns
    flat_columns = [column for column in examples if column not in _NESTED]
    cells: dict[str, list[Any]] = {}
    schema: dict[str, polars.DataType] = {}
    for column in flat_columns:
        values = [row[column] for row in finite_rows]
        cells[column] = _cells_of_one_type([_csv_cell(value) for value in values] if for_csv else values)
        column_type = _column_type(column, examples[column], has_rows=bool(finite_rows), for_csv=for_csv)
        if column_type is not None:
            schema[column] = column_type
    return polars.DataFrame(cells, schema_overrides=schema, strict=False)


def _column_type(column: str, example: Any, *, has_rows: bool, for_csv: bool) -> polars.DataType | None:
    """Return the type of a column of a frame; None where polars finds it from the values.

    Args:
        column: the column's name.
        example: a value of it, or None.
        has_rows: whether the frame has rows, from which the type of a swept field is found.
        for_csv: whether lists are texts.
    """
    import polars

    polars_types = {"text": polars.String, "whole": polars.Int64, "flag": polars.Boolean, "real": polars.Float64}
    if column == "modes":
        return polars.String() if for_csv else polars.List(polars.String())
    if not column.startswith("swept."):
        return polars_types[_TYPE_BY_COLUMN.get(column, "real")]()
    if has_rows:
        return None
    return polars_types[_swept_type(example)]()


def _swept_type(value: Any) -> str:
    """Return the type of a swept field's column, as in `_TYPE_BY_COLUMN`.

    `value`: one of its values; where that is None, the type is text.
    """
    return {str: "text", int: "whole", bool: "flag", float: "real"}.get(type(value), "text")


def to_table(rows: Sequence[dict[str, Any]], table_format: str, columns: Mapping[str, Any] | None = None) -> bytes:
    """Return rows as CSV or Parquet.

    Args:
        rows: rows as `frame` takes them.
        table_format: csv or parquet.
        columns: as `frame` takes them; None: no columns where there are no rows.
    """
    table = frame(rows, columns or {}, for_csv=table_format == "csv")
    if table_format == "csv":
        return table.write_csv().encode()
    file = io.BytesIO()
    table.write_parquet(file)
    return file.getvalue()


def _cells_of_one_type(cells: list[Any]) -> list[Any]:
    """Return cells of one type: where a field was swept over numbers and words, all become words."""
    types = {type(cell) for cell in cells if cell is not None}
    if types <= {int, float} or len(types) < 2:
        return cells
    return [None if cell is None else str(cell) for cell in cells]


_TYPE_BY_COLUMN = {
    **dict.fromkeys(
        (
            "trial", "outcome", "reason", "model", "dataset", "engine", "accelerate_backend", "offload", "launcher",
            "device", "device_name", "mode", "curve", "precision", "epoch_seconds_source", "last_step_source",
            "baseline", "gradient_dtype", "drift", "drift_reference", "drift_reason", "sent_gradient_dtype", "log",
            "parameters_source", "flops_source",
        ),
        "text",
    ),
    **dict.fromkeys(
        (
            "image_size", "parameters", "zero_stage", "nodes", "gpus", "threads_per_rank", "micro_batch",
            "largest_micro_batch", "grad_accum", "global_batch", "repeats", "timed_steps", "tail_steps", "slow_steps",
            "slow_steps_kept", "allocations", "epoch_images", "elapsed_epochs", "peak_bytes", "drift_step",
            "peak_rss_bytes", "cuda_allocated_bytes", "cuda_reserved_bytes", "cuda_device_bytes",
            "collectives_per_step", "logical_bytes_per_step", "checkpoint_bytes", "repeat", "attempt",
            "flops_per_image",
        ),
        "whole",
    ),
    "synchronised_timing": "flag",
}  # fmt: skip
"""Column of `trial_rows` and `run_rows` -> its type; all others but `modes` and swept fields are real numbers."""
_NESTED = (
    "micro_batches", "startup", "epochs", "breakdown", "resources", "convergence", "traffic", "runs",
)  # fmt: skip


def _swept_values(analysis: Analysis) -> dict[str, dict[str, Any]]:
    """Return trial -> field -> value, for every field that a curve of the study was swept over.

    The value is None where no curve of the trial was swept over the field; of several curves the first has it.
    """
    fields: dict[str, None] = {}
    for curve in analysis.curves:
        fields |= dict.fromkeys(curve.labels)
    values_by_trial: dict[str, dict[str, Any]] = {trial_id: dict.fromkeys(fields) for trial_id in analysis.trials}
    for curve in analysis.curves:
        for point in curve.points:
            values = values_by_trial[point.trial_id]
            for field, value in curve.labels.items():
                if values[field] is None:
                    values[field] = value
    return values_by_trial


def _swept_columns(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of swept fields, named "swept." and the field. `values`: field -> value."""
    return {f"swept.{field}": _as_one_cell(value) for field, value in values.items()}


_TRIAL_COLUMNS = (
    "trial", "curve", "mode", "modes", "model", "dataset", "engine", "zero_stage", "device", "device_name", "nodes",
    "gpus", "micro_batch", "grad_accum", "global_batch", "precision",
)  # fmt: skip
_RUN_COLUMNS = (
    "repeat", "attempt", "timed_steps", "step_seconds", "images_per_second", "epoch_seconds", "elapsed_epoch_seconds",
    "startup_seconds", "peak_bytes", "loss", "held_out_accuracy", "log",
)  # fmt: skip


def run_columns(analysis: Analysis) -> dict[str, Any]:
    """Return column of `run_rows` -> an example of its values, in the order of the columns.

    The example of a swept field is one of its values, and None for all other columns. Columns are also returned where
    no run has completed, and `run_rows` is empty.
    """
    swept: dict[str, Any] = {}
    for values in _swept_values(analysis).values():
        for column, value in _swept_columns(values).items():
            if swept.get(column) is None:
                swept[column] = value
    return dict.fromkeys(_TRIAL_COLUMNS) | swept | dict.fromkeys(_RUN_COLUMNS)


def run_rows(analysis: Analysis) -> list[dict[str, Any]]:
    """Return one object per completed run, with its figures and the main fields of its trial."""
    swept = _swept_values(analysis)
    rows = []
    for trial in trial_rows(analysis):
        trial_fields = {column: trial[column] for column in _TRIAL_COLUMNS}
        swept_fields = _swept_columns(swept[trial["trial"]])
        rows += [trial_fields | swept_fields | run for run in trial["runs"]]
    return rows


def _run_objects(result: TrialResult) -> list[dict[str, Any]]:
    """Return the figures of each run of a trial."""
    return [
        {
            "repeat": record.header.repeat,
            "attempt": record.header.attempt,
            **attributes(run, "timed_steps", "step_seconds", "images_per_second", "epoch_seconds"),
            "elapsed_epoch_seconds": run.elapsed_epoch_seconds,
            "startup_seconds": start_up.seconds,
            "peak_bytes": run.peak_bytes,
            "loss": run.last_epoch.train_loss if run.last_epoch else None,
            **attributes(run.last_epoch, "held_out_accuracy"),
            "log": record.header.log,
        }
        for run, start_up, record in zip(result.run_figures, result.start_ups, result.recorded_runs, strict=True)
    ]


def _as_one_cell(value: Any) -> Any:
    """Return a swept value as one cell; a list becomes words."""
    return value if value is None or isinstance(value, str | int | float) else str(value)


def trial_rows(analysis: Analysis) -> list[dict[str, Any]]:
    """Return one object per trial, failed ones too, with the same keys in the same order."""
    swept = _swept_values(analysis)
    return [
        _trial_object(analysis, trial) | _swept_columns(swept[trial.trial_id]) | {"runs": _run_objects(trial)}
        for trial in analysis.trials.values()
    ]


def _trial_object(analysis: Analysis, result: TrialResult) -> dict[str, Any]:
    """Return the JSON object of a trial, without its swept fields and its runs."""
    trial = result.trial
    curve, point = analysis.curve_of(result.trial_id) or (None, None)
    model = model_of_runs(result)
    return {
        "trial": result.trial_id,
        **attributes(result, "outcome", "reason"),
        **_model_and_data_fields(result),
        **_engine_and_device_fields(result),
        **_position_in_study_fields(analysis, result, curve),
        **_batch_fields(result),
        "precision": trial.train.precision,
        **_step_fields(result),
        **_epoch_time_fields(result),
        "baseline": curve.baseline.trial_id if curve and curve.baseline else None,
        **_scaling_fields(point),
        "startup_seconds": result.startup_seconds,
        "startup": result.startup,
        **_learning_fields(trial, result.last_epoch),
        "epochs": [_epoch_object(trial, epoch) for epoch in result.epochs],
        "peak_bytes": result.peak_bytes,
        **attributes(model, "gradient_dtype", "synchronised_timing"),
        **_drift_fields(result.drift),
        **contract_details.flat(result),
        **contract_details.nested(result),
    }


def _model_and_data_fields(result: TrialResult) -> dict[str, Any]:
    """Return the model and the data of a trial."""
    trial = result.trial
    return {
        "model": result.model_name,
        "image_size": None if trial.model.unknown else trial.model.image_size,
        **parameter_fields(parameters_of(result)),
        "dataset": trial.data.hf or trial.data.name,
        "fraction": trial.data.fraction,
    }


def _engine_and_device_fields(result: TrialResult) -> dict[str, Any]:
    """Return the engine of a trial with its options, the launcher and the devices."""
    trial = result.trial
    return {
        **attributes(trial.train, "engine", "accelerate_backend"),
        "zero_stage": option_if_read(trial.train, "zero_stage"),
        "offload": trial.train.offload,
        "launcher": trial.launcher,
        "device": trial.train.device,
        "device_name": " and ".join(result.environment.devices) if result.environment else None,
    }


def _position_in_study_fields(analysis: Analysis, result: TrialResult, curve: CurveResult | None) -> dict[str, Any]:
    """Return the batch policies, the curve and the ranks of a trial. `curve`: the first that has it."""
    world = result.trial.world
    curves_of_trial = [other for other in analysis.curves if _has_trial(other, result.trial_id)]
    modes = list(dict.fromkeys(other.mode for other in curves_of_trial))
    return {
        "mode": modes[0] if modes else None,
        "modes": modes,
        "curve": curve.name if curve else None,
        "nodes": world.nodes,
        "gpus": world.size,
        "threads_per_rank": world.threads_per_rank if result.trial.origin is None else None,
    }


def _has_trial(curve: CurveResult, trial_id: str) -> bool:
    return any(point.trial_id == trial_id for point in curve.points)


def _batch_fields(result: TrialResult) -> dict[str, Any]:
    """Return the batch of a trial in images; None where an import does not record it."""
    trial = result.trial
    is_known = result.batch_known
    return {
        "micro_batch": trial.train.micro_batch if is_known else None,
        "largest_micro_batch": largest_micro_batch(trial.train) if is_known else None,
        "micro_batches": list(trial.train.micro_batches) if trial.train.micro_batches else None,
        "grad_accum": trial.train.grad_accum,
        "global_batch": trial.global_batch if is_known else None,
    }


def _step_fields(result: TrialResult) -> dict[str, Any]:
    """Return the number of runs of a trial and the seconds of their steps; None without a run."""
    runs = result.run_figures
    return {
        "repeats": len(runs),
        "timed_steps": min((run.timed_steps for run in runs), default=None),
        **estimate_fields("step_seconds", result.step_seconds),
        "step_seconds_p95": result.median_of(lambda run: run.step_seconds_p95),
        "step_seconds_p99": result.median_of(lambda run: run.step_seconds_p99),
        "tail_steps": min((run.tail_steps for run in runs), default=None),
        "slow_steps": sum(len(run.slow.set_aside) for run in runs) if runs else None,
        "slow_steps_share": result.slow_share,
        "slow_steps_kept": sum(len(run.slow.kept) for run in runs) if runs else None,
        "slow_steps_kept_share": result.kept_slow_share,
    }


def _epoch_time_fields(result: TrialResult) -> dict[str, Any]:
    """Return the pace of a trial, and the seconds and images of its epochs."""
    first_run = result.run_figures[0] if result.run_figures else None
    spread = result.components
    return {
        **estimates(result, "images_per_second", "epoch_seconds"),
        "epoch_seconds_source": result.epoch_seconds_source,
        "allocations": len(result.allocations) or None,
        "spread_between_allocations": spread.between if spread else None,
        "spread_within_allocations": spread.within if spread else None,
        "epoch_images": first_run.pace.epoch_images if first_run else None,
        **attributes(result, "images_left_out", "effective_steps"),
        "last_step_source": first_run.pace.last_step_source if first_run else None,
        **estimate_fields("elapsed_epoch_seconds", result.elapsed_epoch_seconds),
        "elapsed_epochs": result.elapsed_epochs if first_run else None,
    }


def _epoch_object(trial: Trial, epoch: EpochFigures) -> dict[str, Any]:
    """Return the JSON object of one epoch of a trial, whose figures are means over its runs."""
    return {
        "epoch": epoch.epoch,
        "complete": epoch.complete,
        "seconds": epoch.elapsed_seconds,
        "runs": epoch.runs,
        **_learning_fields(trial, epoch),
    }


def _learning_fields(trial: Trial, epoch: EpochFigures | None) -> dict[str, float | None]:
    """Return loss and accuracy at the end of an epoch; all are None without an epoch."""
    pixel_accuracy = None
    if epoch is not None and trial.model.task == "segmentation":
        pixel_accuracy = epoch.held_out_accuracy
    return {
        "loss": epoch.train_loss if epoch else None,
        "accuracy": epoch.train_accuracy if epoch else None,
        **attributes(epoch, "held_out_loss", "held_out_accuracy", "mean_iou"),
        "pixel_accuracy": pixel_accuracy,
    }


def _drift_fields(drift: Drift) -> dict[str, Any]:
    """Return the fields of a trial's drift: whether its losses agree with those of trials that compute the same.

    `drift` is "reference", "agrees", "drifts" or "unknown". An infinite `drift_difference`, where a loss is not finite,
    becomes null in JSON.
    """
    details = attributes(drift, "reference", "difference", "tolerance", "step", "reason", prefix="drift_")
    return {"drift": drift.status} | details


def _curve_object(curve: CurveResult) -> dict[str, Any]:
    """Return the JSON object of a curve, with the trial and the scaling figures of each point."""
    return {
        **attributes(curve, "name", "mode"),
        "labels": dict(curve.labels),
        "baseline": curve.baseline.trial_id if curve.baseline else None,
        "baseline_gpus": curve.baseline.gpus if curve.baseline else None,
        "plain": curve.plain_trial,
        "points": [{"gpus": point.gpus, "trial": point.trial_id, **_scaling_fields(point)} for point in curve.points],
    }


def _scaling_fields(point: ScalingPoint | None) -> dict[str, float | None]:
    return estimates(point, "speedup", "efficiency", "speedup_over_plain", "efficiency_over_plain")


def _comparison_object(comparison: CurveComparison) -> dict[str, Any]:
    """Return the JSON object of a comparison of two trials."""
    return {
        **attributes(comparison, "mode", "gpus", "first", "second", "first_trial", "second_trial"),
        "field": "train.engine" if "train.engine" in comparison.fields else comparison.fields[0],
        "fields": list(comparison.fields),
        "quantity": "epoch_seconds",
        **estimate_fields("times_as_fast", comparison.result.ratio),
        **attributes(comparison.result, "p", "p_adjusted", "verdict"),
        "sentence": claim(PAIR, comparison).text,
    }


def _csv_cell(value: Any) -> Any:
    """Return a cell for CSV: a list is its parts with blanks between.

    Text that a spreadsheet would take for a formula gets a leading apostrophe (OWASP, "CSV Injection").
    """
    if isinstance(value, list):
        value = " ".join(map(str, value))
    if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")):
        return f"'{value}"
    return value
