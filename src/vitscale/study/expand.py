"""Expands a study to its trials: "auto" resolved, batch sizes worked out, trials joined to curves.

Trials that several curves share (strong-micro and strong-global at one rank) exist once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from vitscale import engines
from vitscale.base import plugins
from vitscale.base.files import beside, read_text
from vitscale.engines import checks, step_schedule
from vitscale.engines.deepspeed import config as deepspeed_config
from vitscale.errors import RequestError, shown, unknown
from vitscale.machine.hardware import Machine
from vitscale.present.units import counted, listed
from vitscale.sources import Summary
from vitscale.store.results import Curve, CurvePoint
from vitscale.study import model_checks, resolve, user_model
from vitscale.study.file import StudyFile, SweepPoint
from vitscale.study.sections import AUTO, Study, TrainSection
from vitscale.trial import fields, model_spec, rank_batches, script
from vitscale.trial.parallel import RankLayout
from vitscale.trial.trial import (
    DataSpec,
    DeviceName,
    Mode,
    Precision,
    TrainFields,
    TrainSpec,
    Trial,
    WindowSpec,
    World,
    samples_used,
)


@dataclass(frozen=True)
class Expansion:
    """All trials that a study asks for, on this machine and this data."""

    curves: tuple[Curve, ...]
    trials: dict[str, Trial]
    fingerprints: dict[str, str]
    """Trial identity -> fingerprint of its data."""
    train_samples: dict[str, int]
    """Trial identity -> number of images in its whole training split."""
    notes: tuple[str, ...]
    factory_digests: dict[str, str]
    """Trial identity -> digest of the file of its model's factory, where it has one."""


class _WorldPlan(NamedTuple):
    """One rank count of a curve."""

    train: TrainSpec
    world: World
    fraction: float
    """Share of the training images that is used."""


@dataclass(frozen=True)
class _SettledPoint:
    """One point of the sweep in which all that needs no data is settled; its model still lacks the class count."""

    labels: dict[str, Any]
    study: Study
    data: DataSpec
    model: model_spec.ModelSpec
    worlds: tuple[_WorldPlan, ...]
    script_digest: str | None


class _ModelDigests(NamedTuple):
    """Digests of the files that a model is made of; None where it has no such file."""

    config: str | None
    weights: str | None
    factory: str | None


class _PlannedTrial(NamedTuple):
    """A trial, the data that it takes, and the digest of its model's factory."""

    trial: Trial
    summary: Summary
    factory_digest: str | None


@dataclass(frozen=True)
class _Hosts:
    """The hosts that a study will run on, as far as worlds and threads depend on them."""

    machine: Machine
    """One of them."""
    slots: int | None
    """Ranks that one host takes where a point does not say; None: all."""
    most_per_node: int | None
    """Most ranks on one host at any point of the sweep; None: all ranks."""
    begun_with: int | None
    """Threads per rank that results were begun with."""


def expand(
    file: StudyFile,
    machine: Machine,
    check_data: Callable[[DataSpec], Summary],
    slots: int | None = None,
    launcher: str = "torchrun",
    threads: int | None = None,
) -> Expansion:
    """Return every trial of a study, on its curves.

    Data come last: they may have to be downloaded, which a mistake elsewhere should not have to wait for.

    Args:
        file: the study.
        machine: one host of those it will run on.
        check_data: finds and verifies a dataset (`vitscale.sources.check`); called once per different dataset.
        slots: ranks that one host takes, where the study does not say; None: all.
        launcher: launcher of points that name none.
        threads: threads per rank of points that name none, where each rank's share of the cores is as large.

    Raises:
        RequestError: the study asks for something that cannot be, with the value and the next step.
    """
    _refuse_idle_fields(file)
    sweep_points = list(file.points())
    hosts = _Hosts(machine, slots, _most_ranks_per_node(sweep_points, slots), begun_with=threads)
    points = [_settled(file.path, point, hosts) for point in sweep_points]
    digests = _checked_models(file.path, points)
    summaries: dict[DataSpec, Summary] = {}
    planned: dict[str, _PlannedTrial] = {}
    curves: list[Curve] = []
    for point in points:
        if point.data not in summaries:
            summaries[point.data] = check_data(point.data)
        summary = summaries[point.data]
        curve_points = []
        for plan in point.worlds:
            trial = _trial(point, plan, summary, digests[point.model], launcher)
            identity = trial.identity()
            planned[identity] = _PlannedTrial(trial, summary, digests[point.model].factory)
            curve_points.append(CurvePoint(gpus=plan.world.size, trial_id=identity))
        labels = {field: value for field, value in point.labels.items() if field != "scaling.mode"}
        curves.append(Curve(mode=point.study.scaling.mode, labels=labels, points=tuple(curve_points)))
    return Expansion(
        curves=tuple(curves),
        trials={identity: plan.trial for identity, plan in planned.items()},
        fingerprints={identity: plan.summary.fingerprint for identity, plan in planned.items()},
        train_samples={identity: plan.summary.train_samples for identity, plan in planned.items()},
        notes=_notes(file, points, summaries.values()),
        factory_digests={
            identity: plan.factory_digest for identity, plan in planned.items() if plan.factory_digest is not None
        },
    )


def _most_ranks_per_node(points: Sequence[SweepPoint], slots: int | None) -> int | None:
    """Return the most ranks that one host takes at any point of the sweep; None where one takes all.

    The same number of threads on all curves, packed or spread: a rank alone on its host must not compute with more.
    """
    limits = [point.study.scaling.gpus_per_node or slots for point in points]
    known_limits = [limit for limit in limits if limit is not None]
    return max(known_limits) if len(known_limits) == len(limits) else None


def _checked_models(path: Path, points: Sequence[_SettledPoint]) -> dict[model_spec.ModelSpec, _ModelDigests]:
    """Check that the models of all points are there, and return the digests of their files.

    All are checked before the first digest of weights, which takes longer.
    """
    models = dict.fromkeys(point.model for point in points)
    configs = {model: user_model.check(path, model) for model in models}
    weights = {model: user_model.weights_digest(model) for model in models}
    factories = {model: user_model.factory_digest(path, model) for model in models}
    return {model: _ModelDigests(configs[model], weights[model], factories[model]) for model in models}


def _notes(file: StudyFile, points: Sequence[_SettledPoint], summaries: Iterable[Summary]) -> tuple[str, ...]:
    """Return all notes on a study, each once: on its data, its micro-batches, and rank counts that it leaves out."""
    notes = [note for summary in summaries for note in summary.notes]
    for point in points:
        notes += _micro_step_notes(point)
    distributed = [gpus for gpus in sorted(set(file.study.scaling.gpus)) if gpus > 1]
    if distributed and all(engines.of_engine(point.study.train.engine).alone for point in points):
        engine = shown(points[0].study.train.engine)
        left_out = f"{listed(distributed)} of scaling.gpus left out"
        notes.append(f"train.engine = {engine} trains on one rank: {left_out}. Name an engine")
    return tuple(dict.fromkeys(notes))


def _micro_step_notes(point: _SettledPoint) -> Iterator[str]:
    """Yield notes on rank counts whose share of a constant global batch divides badly."""
    largest_micro_batch = point.study.train.micro_batch
    if point.study.scaling.mode != "strong-global" or largest_micro_batch is None:
        return
    for plan in point.worlds:
        ranks = plan.world.size
        cut = rank_batches.needless_micro_steps(plan.train, largest_micro_batch)
        if cut:
            yield (
                f"{ranks} ranks take {cut}: small micro-batches are slow, and the curve shows that as a loss of "
                f"scaling. Choose train.global_batch so that its share of {ranks} ranks has a larger divisor"
            )


def _refuse_idle_fields(file: StudyFile) -> None:
    """Refuse a field of one batch policy where no curve has that policy."""
    study = file.study
    _refuse_idle_field(file, "train.global_batch", study.train.global_batch, mode="strong-global")
    _refuse_idle_field(file, "scaling.fraction_per_gpu", study.scaling.fraction_per_gpu, mode="weak")


def _refuse_idle_field(file: StudyFile, field: str, value: float | None, *, mode: Mode) -> None:
    """Refuse a dotted field that belongs to the batch policy `mode` where no curve has it.

    A field that is swept must have no other policy beside it.
    """
    is_swept = field in file.swept_fields
    is_set = value is not None
    if (is_swept or is_set) and mode not in file.modes:
        setting = f"{field} = {value}" if is_set else f"sweep.'{field}'"
        what = f"{setting} has no meaning under scaling.mode = {', '.join(shown(mode) for mode in file.modes)}"
        raise RequestError(what, next_step=f'Remove it, or set scaling.mode = "{mode}"')
    if is_swept and set(file.modes) != {mode}:
        what = f"sweep.'{field}' varies nothing under other batch policies than {mode}"
        raise RequestError(what, next_step="Split the study")


def _refuse_idle_values(study: Study, set_fields: frozenset[str]) -> None:
    """Refuse a value that the study sets and that has no effect because of another value."""
    if study.train.script is None:
        for name in TrainSection.model_fields:
            if f"train.{name}" in set_fields:
                _check_need(study.train, name)
    scaling = study.scaling
    if scaling.mode == "weak" and scaling.fraction_per_gpu is not None and "data.fraction" in set_fields:
        cause = "scaling.mode = 'weak' with scaling.fraction_per_gpu"
        raise _idle("data.fraction", cause, remedy="leave one of the two out")


def _check_need(train: TrainSection, name: str) -> None:
    """Refuse a field of [train] that has a meaning only with certain values of another one, which has none of them."""
    need = fields.traits_of(TrainSection, name).needs
    if need is None:
        return
    other_field, needed_values = need
    value = getattr(train, other_field)
    if value not in needed_values:
        valid = " or ".join(json.dumps(needed) for needed in needed_values)
        raise _idle(
            f"train.{name}", f"train.{other_field} = {_as_written(value)}", remedy=f"set {other_field} = {valid}"
        )


def _idle(field: str, cause: str, *, remedy: str) -> RequestError:
    return RequestError(f"{field} has no meaning under {cause}", next_step=f"Remove it, or {remedy}")


@dataclass(frozen=True)
class _CurveSettings:
    """All that the rank counts of one point of the sweep have in common."""

    path: Path
    """The study file."""
    study: Study
    """With the values of the user's DeepSpeed file, and the script's path made absolute."""
    swept: dict[str, Any]
    """Swept fields of [train] with their values at this point, those in tables left out."""
    train: dict[str, Any]
    """Values of `TrainSpec` without batch sizes."""
    deepspeed_config: dict[str, Any] | None
    model: model_spec.ModelSpec
    """Resolved, but for the class count."""
    fewest_data_ranks: int
    """Data-parallel ranks of the smallest world."""
    most_data_ranks: int
    """Data-parallel ranks of the largest world."""
    ranks_per_node: int | None
    """Most ranks on one host; None: all."""
    threads: int
    """Threads of each rank."""


def _settled(path: Path, point: SweepPoint, hosts: _Hosts) -> _SettledPoint:
    """Settle all of a point that needs no data, and check it.

    Raises:
        RequestError: it asks for something that cannot be.
    """
    study = point.study
    ranks = _rank_counts(study, split_varies=any(field.startswith("parallel.") for field in point.labels))
    _refuse_idle_values(study, point.set_fields)
    study, script_digest = _with_script(path, study, point.set_fields)
    study, config = resolve.with_deepspeed_config(path, study, point.set_fields)
    _check_length(study)
    _check_meters(path, study.measure.meters)
    device = resolve.device_of(study, hosts.machine)
    precision = resolve.precision_of(study, device, hosts.machine)
    threads = resolve.threads_of(study, device, hosts.machine, hosts.most_per_node, hosts.begun_with)
    located = user_model.located(path, study.model)
    is_known_to_script_alone = located.unknown and script_digest is not None
    settings = _CurveSettings(
        path=path,
        study=study,
        swept={field: point.labels[field] for field in study.sweep if field.startswith("train.")},
        train=_train_values(study, device, precision, config, point.set_fields),
        deepspeed_config=config,
        # Whatever the number of classes, all else must be right.
        model=located if is_known_to_script_alone else model_spec.resolve(located, dataset_classes=1),
        fewest_data_ranks=RankLayout.of(min(ranks), study.parallel).data,
        most_data_ranks=RankLayout.of(max(ranks), study.parallel).data,
        ranks_per_node=study.scaling.gpus_per_node or hosts.slots,
        threads=threads,
    )
    worlds = tuple(_world_plan(settings, gpus) for gpus in ranks)
    return _SettledPoint(point.labels, study, _located_data(path, study.data), located, worlds, script_digest)


def _check_meters(path: Path, meters: Sequence[str]) -> None:
    """Refuse a meter that no installed package offers, or whose class lacks what is called."""
    for meter in meters:
        reference = plugins.target("meter", meter)
        if reference is None:
            raise unknown("meter", meter, plugins.names("meter"), next_step="Correct measure.meters")
        what = f"meter {shown(meter)} of {plugins.package('meter', meter)} ({reference})"
        user_model.check_reference(path, what, reference, methods=("begin", "end"))


def _train_values(
    study: Study,
    device: DeviceName,
    precision: Precision,
    config: dict[str, Any] | None,
    set_fields: frozenset[str],
) -> dict[str, Any]:
    """Return the values of a trial's `TrainSpec` without its batch sizes.

    Args:
        study: one point of the sweep.
        device: the device that was settled on.
        precision: the precision that was settled on.
        config: the user's DeepSpeed configuration; None where there is none.
        set_fields: dotted fields that the study sets.
    """
    values = {field: getattr(study.train, field) for field in TrainFields.model_fields}
    values |= {"precision": precision, "device": device, "deepspeed_config": config}
    default_scope = "synchronised" if study.model.task == "segmentation" else "local"
    values["batch_norm"] = study.train.batch_norm or default_scope
    for field, default in engines.known(study.train.engine).defaults.items():
        if values[field] is None:
            values[field] = default
    if config is not None:
        if "train.optimizer" in deepspeed_config.fixed_fields(config):
            values["optimizer"] = "deepspeed_config"
        is_gradient_dtype_open = "train.gradient_dtype" not in set_fields
        if precision == "bf16" and values["zero_stage"] and is_gradient_dtype_open:
            values["gradient_dtype"] = None  # the file's has no effect under DeepSpeed's autocast, as the linter says
    return values


def _world_plan(settings: _CurveSettings, gpus: int) -> _WorldPlan:
    """Return training and world at one rank count of a curve.

    Raises:
        RequestError: batch, engine, split or hosts do not allow it.
    """
    study = settings.study
    mode = study.scaling.mode
    data_ranks = RankLayout.of(gpus, study.parallel).data
    batch = resolve.batch_of(mode, study.train, data_ranks, settings.fewest_data_ranks)
    global_batch = data_ranks * batch.micro_batch * batch.grad_accum
    if settings.deepspeed_config is not None:
        sizes_by_key = dict(zip(deepspeed_config.BATCH_KEYS, (global_batch, *batch), strict=True))
        deepspeed_config.check_batch(settings.deepspeed_config, mode, sizes_by_key)
    sizes_in_trial = {
        "micro_batch": batch.micro_batch,
        "grad_accum": batch.grad_accum,
        "micro_batches": resolve.micro_batches_of(study.train, gpus, batch.micro_batch),
    }
    train = TrainSpec(**settings.train | sizes_in_trial)
    _check_engine(train, settings.swept)
    _check_references(settings.path, train)
    divided = model_checks.DividedBatch(global_batch, settings.most_data_ranks) if mode == "strong-global" else None
    model_checks.check_split(study.parallel, train, settings.model, divided)
    if study.measure.checkpoint:
        checks.check_checkpoint(train)
    world = resolve.world_of(gpus, settings.ranks_per_node, settings.threads)
    return _WorldPlan(train, world, resolve.fraction_of(study, gpus))


def _check_engine(train: TrainSpec, swept: dict[str, Any]) -> None:
    """Check training against its engine; where all values of several fields are combined, say how only some are."""
    try:
        checks.check(train)
    except RequestError as error:
        if len(swept) < 2:
            raise
        assignments = []
        for field, value in swept.items():
            assignments.append(f"{field.removeprefix('train.')} = {_as_written(value)}")
        table = f"{{ {', '.join(assignments)} }}"
        together = f"To sweep only what goes together, list tables in [sweep]: train = [{table}, ...]"
        raise RequestError(str(error), next_step=together) from None


def _as_written(value: object) -> str:
    """Return a study's value as its file has it: 'sgd', 16, true."""
    return shown(value) if isinstance(value, str) else str(value).lower()


def _check_references(path: Path, train: TrainSpec) -> None:
    """Refuse another package's engine whose facts refer to what is not there: else the ranks would find out."""
    engine_facts = engines.known(train.engine)
    if train.engine in engines.ENGINES:
        return
    for reference in engine_facts.references:
        what = f"engine {shown(train.engine)} of {plugins.package('engine', train.engine)} ({reference})"
        user_model.check_reference(path, what, reference)


class _WithScript(NamedTuple):
    """A study, and the digest of its training script."""

    study: Study
    digest: str | None


def _with_script(path: Path, study: Study, set_fields: frozenset[str]) -> _WithScript:
    """Return the study with its script's path seen from the study file's folder; its digest is None without a script.

    Raises:
        RequestError: the script cannot be read, or the study sets what the script never gets.
    """
    train = study.train
    if train.script is None:
        return _WithScript(study, digest=None)
    for obstacle in script.not_handed_on(train, set_fields):
        raise RequestError(obstacle.what, next_step=obstacle.next_step)
    if study.data.name == script.NAME and "data.samples" not in set_fields:
        what = "how many images an epoch has is not told, and train.script reads them itself"
        raise RequestError(what, next_step="Add [data] with samples = 50000, or the name and root of the dataset")
    if study.measure.meters:
        raise RequestError("measure.meters are of vitscale's own loop", next_step="Remove them")
    located = beside(path, train.script)
    located_train = train.model_copy(update={"script": str(located)})
    return _WithScript(study.model_copy(update={"train": located_train}), user_model.script_digest(located))


def _located_data(path: Path, data: DataSpec) -> DataSpec:
    """Return `data` with paths resolved from the study file's folder, and with the classes that its file names."""
    update: dict[str, Any] = {}
    if data.root is not None:
        update["root"] = str(beside(path, data.root))
    if data.hf is not None:
        folder = beside(path, data.hf)
        if folder.is_dir():  # else it is a name on the hub
            update["hf"] = str(folder)
    if isinstance(data.classes, str):
        update["classes"] = _classes_in(beside(path, data.classes))
    return data.model_copy(update=update)


def _classes_in(path: Path) -> tuple[str, ...]:
    """Return the classes that a file names, one a line; empty lines and repeated names are left out."""
    text = read_text(path, "file of classes", next_step="Name a class a line, or remove data.classes")
    lines = (line.strip() for line in text.splitlines())
    return tuple(dict.fromkeys(line for line in lines if line))


def _rank_counts(study: Study, *, split_varies: bool) -> list[int]:
    """Return the rank counts of one point, ascending: 1 alone under an engine that trains on one rank.

    Args:
        study: one point of the sweep.
        split_varies: whether the sweep varies the split; counts too small for this point's split then belong to others.

    Raises:
        RequestError: a count is no multiple of the ranks that share one model, or 1 is missing.
    """
    counts = sorted(set(study.scaling.gpus))
    engine = study.train.engine
    is_alone = engines.known(engine).alone
    if split_varies and not is_alone:
        large_enough = [count for count in counts if count >= study.parallel.ranks_per_model]
        counts = large_enough or counts
    model_checks.check_ranks(study.parallel, counts, engine)
    if not is_alone:
        return counts
    if 1 not in counts:
        what = f"train.engine = {shown(engine)} trains on one rank, but scaling.gpus is {shown(counts)}"
        raise RequestError(what, next_step="Add 1 to scaling.gpus, or use another engine")
    return [1]


def _trial(point: _SettledPoint, plan: _WorldPlan, summary: Summary, digests: _ModelDigests, launcher: str) -> Trial:
    """Return one trial of a curve, now that its data are known.

    Raises:
        RequestError: model, data and batch do not go together, or no step counts.
    """
    study = point.study
    is_scripted = point.script_digest is not None
    model = point.model
    if not (model.unknown and is_scripted):
        model = model_spec.resolve(model, len(summary.classes), channels=summary.image_shape[2])
    data_update: dict[str, Any] = {"fraction": plan.fraction}
    if is_scripted:
        data_update["samples"] = summary.train_samples  # the rank does not count the images itself
    window = {field: getattr(study.measure, field) for field in WindowSpec.model_fields}
    are_steps_open = window["steps"] == AUTO
    if are_steps_open:
        window["steps"] = None
    trial = Trial(
        model=model,
        script_digest=point.script_digest,
        model_digest=digests.config,
        weights_digest=digests.weights,
        data=point.data.model_copy(update=data_update),
        train=plan.train,
        world=plan.world,
        window=WindowSpec(**window),
        parallel=study.parallel,
        launcher=launcher if study.launch.launcher == AUTO else study.launch.launcher,
    )
    steps_per_epoch = _steps_per_epoch(trial, summary)
    if are_steps_open:
        shortest = step_schedule.shortest_run(trial, steps_per_epoch)
        trial = trial.model_copy(update={"window": trial.window.model_copy(update={"steps": shortest})})
    if trial.train.script is None:
        model_checks.check_labels(trial, summary)
        model_checks.check_blocks(trial)
    else:
        script.filled(trial.train.arguments, trial, seed=trial.train.seed, repeat=0, output=Path(script.OUTPUT))
    return trial


def _check_length(study: Study) -> None:
    """Require a length of a run in epochs or in steps, and in epochs where training ends at a target accuracy."""
    train = study.train
    has_epochs = train.epochs is not None
    has_steps = study.measure.steps is not None
    if train.target_accuracy is not None and not (has_epochs and study.measure.evaluate):
        lacking = "measure.evaluate is false" if has_epochs else "train.epochs is not given"
        what = f"train.target_accuracy = {train.target_accuracy} is looked for after each epoch, and {lacking}"
        raise RequestError(what, next_step="Give train.epochs as the limit, and leave measure.evaluate at true")
    if has_epochs == has_steps:
        number = "both are given" if has_epochs else "neither is given"
        next_step = "Give one: epochs = 3 under [train], or steps = 50 under [measure]"
        if train.script is not None:
            next_step = 'Give steps = 50 under [measure], as many as the script takes, or hand on epochs: "{epochs}"'
        raise RequestError(f"a run's length is train.epochs or measure.steps, and {number}", next_step=next_step)


def _steps_per_epoch(trial: Trial, summary: Summary) -> int:
    """Return the optimizer steps of an epoch.

    Raises:
        RequestError: the images do not fill a step, or all steps are warm-up.
    """
    train = trial.train
    window = trial.window
    images = samples_used(summary.train_samples, trial.data.fraction)
    steps = trial.steps_per_epoch(images)
    if steps == 0:
        raise RequestError(
            f"{images} training images do not fill one global batch of {trial.global_batch}, and train.drop_last "
            "leaves incomplete ones out",
            next_step="Use a smaller train.micro_batch, fewer ranks, or drop_last = false",
        )
    if train.epochs is not None and steps * train.epochs <= window.warmup_steps:
        trained = f"{counted(train.epochs, 'epoch')} of {counted(steps, 'step')} on {counted(trial.world.size, 'rank')}"
        raise RequestError(
            f"{trained}: all of it is warm-up (measure.warmup_steps = {window.warmup_steps})",
            next_step="Train more epochs, or warm up for fewer steps",
        )
    return steps
