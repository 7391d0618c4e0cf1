"""Results in the tracker that a group already uses: TensorBoard, MLflow and Weights & Biases, by their own clients.

Each run becomes a run there, with its trial's fields as parameters, its figures as a summary, loss and seconds by step,
and what was learned by epoch. The tracker decides where it is kept (MLFLOW_TRACKING_URI, WANDB_MODE=offline). A run
that is there already is left as it is.
"""

from __future__ import annotations

import hashlib
import importlib
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitscale.analysis import Analysis
from vitscale.analysis.runs.figures import LEARNED
from vitscale.base.distribution import install_command
from vitscale.errors import RequestError
from vitscale.pages.contract import run_rows
from vitscale.store.lines import Steps
from vitscale.store.results import Run

_OF_FIGURES = (
    "timed_steps", "step_seconds", "images_per_second", "epoch_seconds", "elapsed_epoch_seconds", "startup_seconds",
    "peak_bytes",
)  # fmt: skip
_NOT_KNOWN = ("log", "modes", "loss", "held_out_accuracy")
"""Columns of a run that are neither parameters nor figures here: the curves have them."""
_MOST_CHARACTERS = 250
"""Longest value of a parameter: MLflow's limit for what any of its stores takes."""


@dataclass(frozen=True)
class TrackedRun:
    """A run as trackers see it."""

    key: str
    """The same for the same run of the same study, wherever its results lie."""
    study: str
    name: str
    parameters: Mapping[str, str]
    figures: Mapping[str, float]
    curves: Mapping[int, Mapping[str, float]]
    """Step to the values that belong to it, in the order of steps."""
    started_unix_seconds: float


def tracked_runs(analysis: Analysis) -> Iterator[TrackedRun]:
    """Every completed run that counts in the figures."""
    records = [record for result in analysis.trials.values() for record in result.recorded_runs]
    for row, record in zip(run_rows(analysis), records, strict=True):
        header = record.header
        # Results of others may have any name, and the name becomes a folder's.
        study = re.sub(r"[^A-Za-z0-9_-]+", "-", analysis.study.name).strip("-")[:100] or "study"
        key = hashlib.sha256(f"{study} {header.folder} {record.outcome.started_unix_seconds}".encode()).hexdigest()
        told = {name: value for name, value in row.items() if name not in _NOT_KNOWN and value is not None}
        yield TrackedRun(
            key=key[:16],
            study=study,
            name=f"{row['curve']}, {row['gpus']} ranks, repeat {header.repeat + 1}",
            parameters={k: str(v)[:_MOST_CHARACTERS] for k, v in told.items() if k not in _OF_FIGURES},
            figures={name: float(told[name]) for name in _OF_FIGURES if name in told},
            curves=_curves(record),
            started_unix_seconds=record.outcome.started_unix_seconds,
        )


def _curves(run: Run) -> dict[int, dict[str, float]]:
    """Curves of rank 0, or of the first recorded rank: losses of its own micro-batches, seconds of its steps."""
    if not run.ranks:
        return {}
    steps = Steps.of(run.ranks[0].steps)
    curves: dict[int, dict[str, float]] = {}
    last: dict[int, int] = {}
    of_steps = (steps.step.tolist(), steps.epoch.tolist(), steps.seconds.tolist(), steps.loss.tolist())
    for step, epoch, seconds, loss in zip(*of_steps, strict=True):
        curves[step] = {"step_seconds": seconds} | ({"loss": loss} if math.isfinite(loss) else {})
        last[epoch] = step
    for line in run.ranks[0].epochs:
        if line.epoch in last:
            known = {name: getattr(line, name) for name in LEARNED}
            curves[last[line.epoch]] |= {name: value for name, value in known.items() if value is not None}
    return dict(sorted(curves.items()))


def send(kind: str, analysis: Analysis, folder: Path) -> tuple[int, int]:
    """Sends every run to a tracker.

    Args:
        kind: one of `SINKS`.
        analysis: the results.
        folder: where TensorBoard's files go; the others have places of their own.

    Returns:
        Runs sent, and runs that were there already.

    Raises:
        RequestError: its client is not installed, or refuses.
    """
    try:
        client = importlib.import_module(kind)
    except ImportError as error:
        what = f"the client of {kind} is not installed ({error.name or kind})"
        raise RequestError(what, next_step=f"Run {install_command('track')}") from None
    try:
        runs = list(tracked_runs(analysis))
        sent = [SINKS[kind](client, run, folder) for run in runs]
    except Exception as error:  # whatever a client raises is one message: no network, no key, a full disk
        told = str(error).strip().splitlines()
        raise RequestError(f"{kind} does not take the runs: {(told or [type(error).__name__])[0][:300]}") from error
    return sum(sent), len(sent) - sum(sent)


def _tensorboard(_: Any, run: TrackedRun, folder: Path) -> bool:
    """A folder of event files for each run, with its parameters as a text."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.types_pb2 import DT_STRING
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    own = folder / run.study / run.key
    if own.exists():
        return False
    writer = EventFileWriter(str(own))
    table = "|parameter|value|\n|--|--|\n" + "".join(f"|{name}|{value}|\n" for name, value in run.parameters.items())
    about = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    text = TensorProto(dtype=DT_STRING, string_val=[f"{run.name}\n\n{table}".encode()])
    values = [Summary.Value(tag="trial", metadata=about, tensor=text)]
    values += [Summary.Value(tag=f"summary/{name}", simple_value=value) for name, value in run.figures.items()]
    writer.add_event(Event(wall_time=run.started_unix_seconds, step=0, summary=Summary(value=values)))
    passed = run.started_unix_seconds
    for step, told in run.curves.items():
        passed += told["step_seconds"]
        points = [Summary.Value(tag=name, simple_value=value) for name, value in told.items()]
        writer.add_event(Event(wall_time=passed, step=step, summary=Summary(value=points)))
    writer.close()
    return True


def _mlflow(mlflow: Any, run: TrackedRun, _: Path) -> bool:
    """An experiment for the study; metrics in batches, as its own client sends them."""
    client = mlflow.MlflowClient()
    known = client.get_experiment_by_name(run.study)
    experiment = known.experiment_id if known is not None else client.create_experiment(run.study)
    there = client.search_runs([experiment], filter_string=f"tags.`vitscale.run` = '{run.key}'", max_results=1)
    if there:
        return False
    begun = int(run.started_unix_seconds * 1000)
    tags = {"vitscale.run": run.key}
    own = client.create_run(experiment, start_time=begun, tags=tags, run_name=run.name).info.run_id
    params = [mlflow.entities.Param(name, value) for name, value in run.parameters.items()]
    client.log_batch(own, params=params)
    metrics = [mlflow.entities.Metric(name, value, begun, 0) for name, value in run.figures.items()]
    passed = run.started_unix_seconds
    for step, told in run.curves.items():
        passed += told["step_seconds"]
        at = int(passed * 1000)
        # A metric has one name: the mean of the run is not a point of its curve.
        metrics += [mlflow.entities.Metric(f"curve/{name}", value, at, step) for name, value in told.items()]
    for first in range(0, len(metrics), 1000):
        client.log_batch(own, metrics=metrics[first : first + 1000])
    client.set_terminated(own, end_time=int(passed * 1000))
    return True


def _wandb(wandb: Any, run: TrackedRun, folder: Path) -> bool:
    """A project for the study; the run's key is its id there, so that sending it again is no second run."""
    with wandb.init(
        project=run.study,
        id=run.key,
        name=run.name,
        config=dict(run.parameters),
        dir=str(folder),
        resume="allow",
        settings=wandb.Settings(silent=True),
    ) as own:
        if own.resumed:
            return False
        for step, told in run.curves.items():
            own.log(dict(told), step=step)
        own.summary.update({f"run/{name}": value for name, value in run.figures.items()})
    return True


SINKS: Mapping[str, Callable[[Any, TrackedRun, Path], bool]] = {
    "tensorboard": _tensorboard,
    "mlflow": _mlflow,
    "wandb": _wandb,
}
"""Name of a client's module to what sends a run to it."""
