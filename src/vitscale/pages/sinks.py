"""Results in the tracker that a group already uses: TensorBoard, MLflow and Weights & Biases, by their own clients.

Each run becomes a run there. Its parameters are the fields of its trial, its summary its figures, and its curves the
loss and seconds by step and the accuracy by epoch. The tracker decides where the run is kept (MLFLOW_TRACKING_URI,
WANDB_MODE=offline). A run that the tracker already has is left as it is.
"""

from __future__ import annotations

import hashlib
import importlib
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from vitscale.analysis import Analysis
from vitscale.analysis.runs.figures import LEARNING_FIGURES
from vitscale.base.distribution import install_command
from vitscale.errors import RequestError
from vitscale.pages.contract import run_rows
from vitscale.store.lines import Steps
from vitscale.store.records import EpochLine
from vitscale.store.results import Run

_FIGURE_COLUMNS = (
    "timed_steps", "step_seconds", "images_per_second", "epoch_seconds", "elapsed_epoch_seconds", "startup_seconds",
    "peak_bytes",
)  # fmt: skip
"""Columns of a run that are its figures; the other columns are its parameters."""
_SKIPPED_COLUMNS = ("log", "modes", "loss", "held_out_accuracy")
"""Columns of a run that are neither parameters nor figures here."""
_LONGEST_PARAMETER = 250
"""Longest value of a parameter: MLflow's limit for what any of its stores takes."""
_MOST_MLFLOW_METRICS = 1000
"""Most metrics that MLflow takes at once."""
_LONGEST_REASON = 300
"""Most characters of a client's error that are repeated."""


@dataclass(frozen=True)
class TrackedRun:
    """A run as a tracker shows it."""

    key: str
    """Identifier of the run of the study. It does not depend on the folder of the results, so sending twice is seen."""
    study: str
    name: str
    parameters: Mapping[str, str]
    figures: Mapping[str, float]
    curves: Mapping[int, Mapping[str, float]]
    """Step -> its values by name, in the order of steps: {0: {"step_seconds": 0.1, "loss": 2.3}, ...}."""
    started_unix_seconds: float


class SentRuns(NamedTuple):
    """Number of runs that a tracker was sent, and that it had before."""

    sent: int
    present_before: int


def tracked_runs(analysis: Analysis) -> Iterator[TrackedRun]:
    """Yield every completed run from which figures were made."""
    runs: list[Run] = []
    for result in analysis.trials.values():
        runs += result.recorded_runs
    for row, run in zip(run_rows(analysis), runs, strict=True):
        yield _tracked_run(analysis.study.name, row, run)


def _tracked_run(study_name: str, row: Mapping[str, Any], run: Run) -> TrackedRun:
    """Return a run for trackers. `row`: its columns in the report's table of runs."""
    study = _folder_name(study_name)
    started = run.outcome.started_unix_seconds
    identity = f"{study} {run.header.folder} {started}"
    values = {name: value for name, value in row.items() if value is not None}
    parameters = {}
    for name, value in values.items():
        if name not in _FIGURE_COLUMNS and name not in _SKIPPED_COLUMNS:
            parameters[name] = str(value)[:_LONGEST_PARAMETER]
    return TrackedRun(
        key=hashlib.sha256(identity.encode()).hexdigest()[:16],
        study=study,
        name=f"{row['curve']}, {row['gpus']} ranks, repeat {run.header.repeat + 1}",
        parameters=parameters,
        figures={name: float(values[name]) for name in _FIGURE_COLUMNS if name in values},
        curves=_values_by_step(run),
        started_unix_seconds=started,
    )


def _folder_name(study_name: str) -> str:
    """Return the name of a study as one that a folder may have, for results of others may have any name.

    Example: "x" for "../../x".
    """
    return re.sub(r"[^A-Za-z0-9_-]+", "-", study_name).strip("-")[:100] or "study"


def _values_by_step(run: Run) -> dict[int, dict[str, float]]:
    """Return the loss and the seconds of each step of rank 0, or of the first recorded rank.

    The loss is that of the rank's own micro-batches. The figures of an epoch, such as its held-out accuracy, are among
    the values of the epoch's last step.
    """
    if not run.ranks:
        return {}
    steps = Steps.of(run.ranks[0].steps)
    columns = (steps.step.tolist(), steps.epoch.tolist(), steps.seconds.tolist(), steps.loss.tolist())
    curves: dict[int, dict[str, float]] = {}
    last_step_by_epoch: dict[int, int] = {}
    for step, epoch, seconds, loss in zip(*columns, strict=True):
        curves[step] = {"step_seconds": seconds}
        if math.isfinite(loss):
            curves[step]["loss"] = loss
        last_step_by_epoch[epoch] = step
    for line in run.ranks[0].epochs:
        if line.epoch in last_step_by_epoch:
            curves[last_step_by_epoch[line.epoch]] |= _epoch_values(line)
    return dict(sorted(curves.items()))


def _epoch_values(line: EpochLine) -> dict[str, float]:
    """Return the loss and accuracies of an epoch that are known, by name."""
    values = {name: getattr(line, name) for name in LEARNING_FIGURES}
    return {name: value for name, value in values.items() if value is not None}


def send(tracker: str, analysis: Analysis, folder: Path) -> SentRuns:
    """Send every run to a tracker, except those that it already has.

    Args:
        tracker: one of `SINKS`, which is also the name of its client's module.
        analysis: the results.
        folder: where TensorBoard's files go; the others have places of their own.

    Raises:
        RequestError: the client is not installed, or it raised an error of any kind.
    """
    client = _imported_client(tracker)
    send_run = SINKS[tracker]
    try:
        runs = list(tracked_runs(analysis))
        sent_runs = [run for run in runs if send_run(client, run, folder)]
    except Exception as error:  # whatever a client raises is one message: no network, no key, a full disk
        raise RequestError(f"{tracker} does not take the runs: {_first_line(error)}") from error
    return SentRuns(sent=len(sent_runs), present_before=len(runs) - len(sent_runs))


def _imported_client(tracker: str) -> Any:
    """Return the module of a tracker's client.

    Raises:
        RequestError: it is not installed.
    """
    try:
        return importlib.import_module(tracker)
    except ImportError as error:
        message = f"the client of {tracker} is not installed ({error.name or tracker})"
        raise RequestError(message, next_step=f"Run {install_command('track')}") from None


def _first_line(error: Exception) -> str:
    """Return the beginning of an error's first line; the error's type where it has no text."""
    lines = str(error).strip().splitlines()
    return lines[0][:_LONGEST_REASON] if lines else type(error).__name__[:_LONGEST_REASON]


# Each of these sends one run and returns True. Where the tracker has the run, it sends nothing and returns False.


def _send_to_tensorboard(_: Any, run: TrackedRun, folder: Path) -> bool:
    """Write a folder of event files for the run. Its parameters are a table in a text."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.types_pb2 import DT_STRING
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    run_folder = folder / run.study / run.key
    if run_folder.exists():
        return False
    writer = EventFileWriter(str(run_folder))
    rows = "".join(f"|{name}|{value}|\n" for name, value in run.parameters.items())
    description = f"{run.name}\n\n|parameter|value|\n|--|--|\n{rows}"
    metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    tensor = TensorProto(dtype=DT_STRING, string_val=[description.encode()])
    values = [Summary.Value(tag="trial", metadata=metadata, tensor=tensor)]
    values += [Summary.Value(tag=f"summary/{name}", simple_value=value) for name, value in run.figures.items()]
    writer.add_event(Event(wall_time=run.started_unix_seconds, step=0, summary=Summary(value=values)))
    unix_seconds = run.started_unix_seconds
    for step, values_by_name in run.curves.items():
        unix_seconds += values_by_name["step_seconds"]
        points = [Summary.Value(tag=name, simple_value=value) for name, value in values_by_name.items()]
        writer.add_event(Event(wall_time=unix_seconds, step=step, summary=Summary(value=points)))
    writer.close()
    return True


def _send_to_mlflow(mlflow: Any, run: TrackedRun, _: Path) -> bool:
    """Make a run in the experiment of its study; metrics go in batches, as the client sends them itself."""
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name(run.study)
    experiment_id = client.create_experiment(run.study) if experiment is None else experiment.experiment_id
    same_key = f"tags.`vitscale.run` = '{run.key}'"
    if client.search_runs([experiment_id], filter_string=same_key, max_results=1):
        return False
    start_ms = int(run.started_unix_seconds * 1000)
    created = client.create_run(experiment_id, start_time=start_ms, tags={"vitscale.run": run.key}, run_name=run.name)
    run_id = created.info.run_id
    client.log_batch(run_id, params=[mlflow.entities.Param(name, value) for name, value in run.parameters.items()])
    metrics = [mlflow.entities.Metric(name, value, start_ms, 0) for name, value in run.figures.items()]
    unix_seconds = run.started_unix_seconds
    for step, values_by_name in run.curves.items():
        unix_seconds += values_by_name["step_seconds"]
        step_ms = int(unix_seconds * 1000)
        for name, value in values_by_name.items():
            # Without "curve/" the mean step_seconds of the run, a figure, would be a point of the curve.
            metrics.append(mlflow.entities.Metric(f"curve/{name}", value, step_ms, step))
    for start in range(0, len(metrics), _MOST_MLFLOW_METRICS):
        client.log_batch(run_id, metrics=metrics[start : start + _MOST_MLFLOW_METRICS])
    client.set_terminated(run_id, end_time=int(unix_seconds * 1000))
    return True


def _send_to_wandb(wandb: Any, run: TrackedRun, folder: Path) -> bool:
    """Make a run in the project of its study. Its key is the id there, so that sending it twice makes one run."""
    with wandb.init(
        project=run.study,
        id=run.key,
        name=run.name,
        config=dict(run.parameters),
        dir=str(folder),
        resume="allow",
        settings=wandb.Settings(silent=True),
    ) as tracked:
        if tracked.resumed:
            return False
        for step, values_by_name in run.curves.items():
            tracked.log(dict(values_by_name), step=step)
        tracked.summary.update({f"run/{name}": value for name, value in run.figures.items()})
    return True


SINKS: Mapping[str, Callable[[Any, TrackedRun, Path], bool]] = {
    "tensorboard": _send_to_tensorboard,
    "mlflow": _send_to_mlflow,
    "wandb": _send_to_wandb,
}
"""Name of a client's module -> the function that sends a run to it."""
