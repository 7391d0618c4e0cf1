"""What a results folder says for a prediction: series of measured points, and the network, as a check of it tells."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vitscale import store
from vitscale.analysis import Analysis
from vitscale.analysis.model_counts import known_parameters, recorded_parameters
from vitscale.analysis.scaling import trial_name
from vitscale.analysis.time.breakdown import Breakdown
from vitscale.analysis.trials import TrialResult
from vitscale.errors import RequestError, shown
from vitscale.prediction.network.checked import network_of
from vitscale.prediction.network.links import Network, declared_link
from vitscale.prediction.shares import slowest_ranks
from vitscale.prediction.step.messages import messages
from vitscale.store import checks
from vitscale.store.results import Run
from vitscale.trial import model_cost
from vitscale.trial.model_cost import ParameterCount
from vitscale.trial.model_spec import ModelSpec
from vitscale.trial.trial import Mode, Trial, samples_used

_QUARTILES_APART = 1.349
"""Distance of a normal distribution's quartiles, in standard deviations."""


PRECISION, IMAGE_SIZE, MICRO_BATCH = "train.precision", "model.image_size", "train.micro_batch"
HOSTS = "world.nodes"
"""Fields that an import may assume (`Point.assumed`)."""


@dataclass(frozen=True)
class StepParts:
    """Mean seconds of an explained step on the rank with the median wait. None where unknown."""

    compute: float
    """Copies to the device, forward and backward, and what lies between them."""
    backward: float | None
    """The part of `compute` that is backward, under which transfers may hide."""
    optimizer: float | None
    data_wait: float | None
    wait: float | None
    wire: float | None
    exposed: float
    """Wait, wire and norm together; known also where they cannot be told apart."""
    norm: float | None = 0.0


@dataclass(frozen=True)
class MeasuredPoint:
    """One measured trial."""

    trial_id: str
    trial: Trial
    nodes: int
    images: int | None
    """Images of an epoch, all ranks together."""
    steps_per_epoch: int | None
    step_seconds: tuple[float, ...]
    """Mean whole step of each run (`analysis.runs.steps`)."""
    parts: StepParts | None = None
    sent_bytes: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """What an optimizer step was counted to send: (operation, dtype) -> bytes of the whole tensors, all calls together;
    empty where it was not counted."""
    sent_calls: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """The number of those calls: (operation, dtype) -> calls."""
    devices: tuple[str, ...] = ()
    """The device of each rank, by name; empty where unknown."""
    rank_speeds: tuple[float, ...] | None = None
    """Speed of each rank against the fastest."""
    step_spread: float | None = None
    """Spread of like steps within a run: standard deviation over median, robustly (interquartile range / 1.349)."""
    joules_per_image: float | None = None
    startup_seconds: tuple[float, ...] = ()
    """Start-up of each run that tells it, without one-off compilations."""
    outside_seconds: tuple[float, ...] = ()
    """What else than steps and evaluations each of these runs took: start-up, pauses for what is recorded, its end."""
    evaluation_seconds: float | None = None
    """Seconds after an epoch; None where nothing was evaluated."""
    memory_capacity_bytes: int | None = None
    """Memory of the smallest of its devices."""
    host_memory_bytes: int | None = None
    """Memory of the smallest of its hosts; None where it was not recorded."""
    backend: str = "nccl"
    """What carries collectives: nccl or gloo."""
    batch_known: bool = True
    """Whether anybody told the micro-batch (`TrialResult.batch_known`)."""
    assumed: frozenset[str] = frozenset()
    """Fields of the trial that its import assumed (`Imported.assumed`), and nobody told since."""
    rate_known: bool = True
    """Whether a step takes the trial's images, be it for want of a batch one of each rank, as where a rate was told."""
    trace_steps: int = 0
    """Steps that its runs hold if all are profiler traces, with the profiler's cost in each; else 0."""
    recorded_parameters: ParameterCount | None = None
    """Parameters of its model as its ranks counted them; None where they did not."""

    @property
    def gpus(self) -> int:
        """Ranks."""
        return self.trial.world.size

    @property
    def parameters(self) -> ParameterCount | None:
        """Parameters of its model, and how they are known; None where they are unavailable."""
        return self.recorded_parameters or known_parameters(self.trial.model)


@dataclass(frozen=True)
class Series:
    """Points that differ in rank count alone, under one batch policy: what a prediction continues."""

    name: str
    mode: Mode
    labels: Mapping[str, Any]
    points: tuple[MeasuredPoint, ...]
    """In rising order of ranks; only points with a completed run."""


@dataclass(frozen=True)
class Evidence:
    """All that a prediction rests on."""

    series: tuple[Series, ...]
    network: Network
    """The network as a check measured it, as the user declared it, or as it is assumed."""
    loader_images_per_second: float | None = None
    """Rate of one rank's data loader alone, as a check measured it; None: not measured."""
    completed: bool = False
    """Whether any run completed. If so and there is no series, no run tells how long a step takes."""

    shared_models: int = 0
    """Measured trials that are left out: their ranks share a model ([parallel]), and what these send is not known."""
    epochs_told: bool = False
    """Whether any run tells how long an epoch took."""
    left_out: tuple[str, ...] = ()
    """Trials whose runs tell of steps that cannot be, as sentences."""

    def refusal(self, purpose: str) -> RequestError:
        """The error where there is no series; `purpose` is "to predict from" or "to advise from"."""
        what, then = (
            "have no completed run",
            "`vitscale report` on them says what happened to each trial; run the study again",
        )
        if self.shared_models:
            what = "tell alone of ranks that share a model ([parallel]) and send what is not known, and have nothing"
            then = "Take results without a DeepSpeed file's own exchanges; `vitscale report` shows these as measured"
        elif self.completed:
            what = "tell of no step how long it took, and have nothing"
            then = "Import traces that mark their steps (torch.profiler.schedule and step()), or the training's own log"
            if self.left_out:
                what = f"tell of no step that can be ({self.left_out[0]}), and have nothing"
                then = "Look at the unit of the times that were recorded or imported"
            elif self.epochs_told:
                what = "tell how long epochs took and not how many steps these had, and have nothing"
                then = "Import the files again with both --train-samples and --micro-batch: the steps follow from them"
        return RequestError(f"the results {what} {purpose}", next_step=then)


def gather(analysis: Analysis, network: Network, loader_images_per_second: float | None = None) -> Evidence:
    """The evidence in an analysed results folder. Trials that drift do other work than the rest and are left out."""
    names = [curve.name for curve in analysis.curves]
    shared: set[str] = set()
    impossible: dict[str, str] = {}
    series = []
    for curve in analysis.curves:
        measured = [analysis.trials[point.trial_id] for point in curve.points]
        usable = [result for result in measured if result.run_figures and not result.drifts and _costs(result)]
        impossible |= {result.trial_id: _why_impossible(result) for result in measured if _impossible_costs(result)}
        unknown = {
            result.trial_id
            for result in usable
            if result.trial.parallel.ranks_per_model > 1 and messages(result.trial) is None
        }
        points = tuple(_point(result) for result in usable if result.trial_id not in unknown)
        shared |= unknown
        if points:
            name = curve.name if names.count(curve.name) == 1 else f"{curve.name}, {curve.mode}"
            series.append(Series(name, curve.mode, curve.labels, points))
    completed = any(result.run_figures for result in analysis.trials.values())
    epochs_told = any(result.epoch_costs for result in analysis.trials.values())
    return Evidence(
        tuple(series),
        network,
        loader_images_per_second,
        completed=completed,
        shared_models=len(shared),
        epochs_told=epochs_told,
        left_out=tuple(impossible.values()),
    )


_SHORTEST_STEP, _LONGEST_STEP = 1e-9, 1e9
"""Seconds of a step that are believed: those of which importers take times, too."""


def _costs(result: TrialResult) -> tuple[float, ...]:
    """Seconds of a step in each run, without what no step takes."""
    return tuple(step for step in _recorded_costs(result) if _SHORTEST_STEP <= step <= _LONGEST_STEP)


def _impossible_costs(result: TrialResult) -> tuple[float, ...]:
    possible = _costs(result)
    return tuple(step for step in _recorded_costs(result) if step not in possible)


def _why_impossible(result: TrialResult) -> str:
    """ "ddp on 2 ranks: runs with steps of 1e-320 s, for none is shorter than 1e-09 s."."""
    step = _impossible_costs(result)[0]
    limit = f"shorter than {_SHORTEST_STEP:g}" if step < _SHORTEST_STEP else f"longer than {_LONGEST_STEP:g}"
    name = result.name or trial_name(result.trial)
    return f"{name}: runs with steps of {step:.3g} s, for none is {limit} s."


def _recorded_costs(result: TrialResult) -> tuple[float, ...]:
    pairs = [(run.step_seconds, run.images_per_second) for run in result.run_figures]
    # Rates without a batch are "steps" of one image per GPU, as the records have them.
    steps = [result.trial.world.size / rate if step is None and rate else step for step, rate in pairs]
    return tuple(step for step in steps if step is not None)


def _of_its_images(result: TrialResult) -> bool:
    lines = [line for run in result.recorded_runs for rank in run.ranks for line in rank.steps]
    return bool(lines) and all(
        line.images == result.trial.train.micro_batch * result.trial.train.grad_accum for line in lines
    )


def _point(result: TrialResult) -> MeasuredPoint:
    trial = _with_measured_parameters(result)
    dataset = result.train_samples
    images = None if dataset is None or not result.batch_known else samples_used(dataset, trial.data.fraction)
    train, steps = trial.train, None if images is None else trial.steps_per_epoch(images)
    spreads = [run.step_spread for run in result.run_figures if run.step_spread is not None]
    sent = result.traffic.sent if result.traffic else ()
    environments = [rank.start.environment for run in result.recorded_runs[:1] for rank in run.ranks if rank.start]
    devices = [environment.device for environment in environments]
    hosts = [environment.host_memory_bytes for environment in environments if environment.host_memory_bytes]
    capacities = [device.memory_bytes for device in devices if device.memory_bytes]
    backend = result.traffic.backend if result.traffic else None
    joules = result.resources.joules_per_image if result.resources else None
    traces = all(run.header.imported and run.header.imported.log_format == "trace" for run in result.recorded_runs)
    return MeasuredPoint(
        trial_id=result.trial_id,
        trial=trial,
        nodes=trial.world.nodes,
        images=images,
        steps_per_epoch=steps or None,
        step_seconds=_costs(result),
        parts=_parts(result.breakdown, trial),
        sent_bytes={(row.operation, row.dtype): row.tensor_bytes for row in sent if row.tensor_bytes is not None},
        sent_calls={(row.operation, row.dtype): row.calls for row in sent if row.tensor_bytes is not None},
        devices=tuple(device.name for device in devices),
        rank_speeds=result.rank_speeds if result.breakdown else None,
        step_spread=statistics.median(spreads) / _QUARTILES_APART if spreads else None,
        joules_per_image=joules.value if joules else None,
        startup_seconds=tuple(start_up.seconds for start_up in result.start_ups if start_up.seconds),
        outside_seconds=_outside(result),
        evaluation_seconds=result.median_of(lambda run: run.evaluation_seconds),
        memory_capacity_bytes=min(capacities) if capacities else None,
        host_memory_bytes=min(hosts) if hosts else None,
        batch_known=result.batch_known,
        assumed=frozenset(field for run in result.recorded_runs for field in _assumed_by_the_import(run)),
        rate_known=result.batch_known or _of_its_images(result),
        trace_steps=sum(run.timed_steps for run in result.run_figures) if traces else 0,
        recorded_parameters=recorded_parameters(result),
        backend=backend if backend in ("nccl", "gloo") else ("nccl" if train.device == "cuda" else "gloo"),
    )


def _with_measured_parameters(result: TrialResult) -> Trial:
    """Return the trial, with the parameters that its ranks counted where neither a formula nor a card counts them."""
    trial = result.trial
    is_counted = not _is_resolved(trial.model) or model_cost.parameters(trial.model) is not None
    if is_counted:
        return trial
    for run in result.recorded_runs:
        for rank in run.ranks:
            if rank.model is not None and rank.model.parameters:
                model = trial.model.model_copy(update={"parameter_count": rank.model.parameters})
                return trial.model_copy(update={"model": model})
    return trial


def _assumed_by_the_import(run: Run) -> tuple[str, ...]:
    return run.header.imported.assumed if run.header.imported is not None else ()


def _outside(result: TrialResult) -> tuple[float, ...]:
    """Seconds of each run but for its steps after the first at their pace, evaluations, and one-off compilations."""
    outside = []
    for record, run, start_up in zip(result.recorded_runs, result.run_figures, result.start_ups, strict=True):
        if start_up.seconds and run.step_seconds is not None:
            later = max(0, run.steps - 1) * run.step_seconds + len(run.epochs) * (run.evaluation_seconds or 0.0)
            rest = record.outcome.wall_seconds - sum(start_up.one_off.values()) - later
            outside.append(max(start_up.seconds, rest))  # which is part of it
    return tuple(outside)


def _parts(breakdown: Breakdown | None, trial: Trial) -> StepParts | None:
    """Parts of the typical rank's step, of stages of one that computes most, without the cost of explaining it; None
    where exposed transfers are unknown, or no such rank was explained.

    That cost is taken off all parts alike where the CPU computes; on a GPU the breakdown is without it already.
    """
    if breakdown is None:
        return None
    if trial.parallel.pipeline > 1:  # whose ranks wait for the one that computes most
        slowest = set(slowest_ranks(trial))
        own = tuple(rank for rank in breakdown.ranks if rank.rank in slowest)
        if not own:
            return None
        breakdown = replace(breakdown, ranks=own, typical_rank=None)
    rank = breakdown.typical
    if rank.seconds <= 0 or rank.exposed_seconds is None:
        return None
    slower = 1.0 if trial.train.device == "cuda" else breakdown.slowdown
    known = {name: None if own is None else own / slower for name, own in rank.parts.items()}
    exposed = rank.exposed_seconds / slower
    elsewhere = sum(known[name] or 0.0 for name in ("optimizer", "data_wait", "bubble")) + exposed
    return StepParts(
        compute=max(0.0, rank.seconds / slower - elsewhere),
        backward=known["backward"],
        optimizer=known["optimizer"],
        data_wait=known["data_wait"],
        wait=known["wait"],
        wire=known["wire"],
        exposed=exposed,
        norm=known["norm"],
    )


def evidence_of(
    folder: Path, analysis: Analysis, *, declared: str | None = None, check: Path | None = None
) -> Evidence:
    """What the results of a folder say, with the network as it was declared or checked.

    Args:
        folder: the results folder, for the checks in it.
        analysis: the analysis of its records.
        declared: the link between hosts by name or figures ("25GbE"); it takes the place of a checked one. "check": the
            checked one, which must be there.
        check: a stored check to take the network from. None: the newest of the results folder; where it has none, the
            newest of the user's own that ran on the very hosts of the results.

    Raises:
        RequestError: the declared network is unknown, or a check is asked for and there is none.
        StoreError: `check` cannot be read.
    """
    record = checks.read_check(check) if check is not None else _found(folder, analysis.runs)
    if declared == "check" and record is None:
        raise RequestError(
            "--network check: there is no check of the hosts of these results",
            next_step=f"Run vitscale check --hostfile HOSTS -o {shown(str(folder))}, or say --network 25GbE",
        )
    link = None if declared in (None, "check") else declared_link(declared)
    gathered = gather(analysis, network_of(record, link), _loader(record))
    resolved = tuple(own for own in gathered.series if all(_is_resolved(point.trial.model) for point in own.points))
    return replace(gathered, series=resolved)


def _is_resolved(spec: ModelSpec) -> bool:
    """Whether a model's shapes are resolved, as in every study of this program.

    A folder that something else wrote may leave shapes open, and nothing here can count those.
    """
    try:
        model_cost.parameters(spec)
    except ValueError:
        return False
    return True


def _loader(record: checks.CheckRecord | None) -> float | None:
    """Images per second of the median rank's data loader alone; None: not measured."""
    rates = [rank.loader.images_per_second for rank in record.ranks if rank.loader] if record is not None else []
    return statistics.median(rates) if rates else None


def _found(folder: Path, runs: Sequence[Run]) -> checks.CheckRecord | None:
    """The newest check of the folder, else of these very hosts; none whose ranks computed on another kind of device, or
    on other GPUs: many machines have one name, and what ranks send on a host's processors says nothing of its GPUs."""
    ran_on = [rank.start.environment for run in runs for rank in run.ranks if rank.start is not None]
    hosts, kinds = tuple(sorted({own.host for own in ran_on})), {own.device.type for own in ran_on}
    gpus = {own.device.name for own in ran_on if own.device.type == "cuda"}

    def of_devices(check: checks.CheckRecord) -> bool:
        checked = {rank.facts.environment.device.name for rank in check.ranks if rank.facts}
        return kinds == {check.request.device} and gpus <= checked

    own = checks.load_checks(checks.check_folder(store.folder_of(folder))).records
    alike = [check for check in own if not kinds or check.request.device in kinds]
    return alike[0] if alike else checks.latest(None, hosts, of_devices) if hosts else None
