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
from vitscale.base.files import path_named_in, read_text
from vitscale.engines import checks, step_schedule
from vitscale.engines.deepspeed import config as deepspeed_config
from vitscale.errors import RequestError, shown, unknown
from vitscale.machine.hardware import Machine
from vitscale.present.units import counted, listed
from vitscale.sources import Summary
from vitscale.store.results import Curve, CurvePoint
from vitscale.study import model_checks, model_names, resolve, user_model
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
    """How a point of the sweep is trained on one number of ranks."""

    train: TrainSpec
    """With the batch sizes for this number of ranks."""
    world: World
    fraction: float
    """Share of the training images that is used."""


@dataclass(frozen=True)
class _SettledPoint:
    """One point of the sweep, after everything is worked out that does not need its data."""

    labels: dict[str, Any]
    """Swept fields by dotted name, with their values at this point."""
    study: Study
    data: DataSpec
    """With absolute paths."""
    model: model_spec.ModelSpec
    """With absolute paths, but as the user wrote it otherwise: the number of classes comes from the data."""
    worlds: tuple[_WorldPlan, ...]
    """One plan for each rank count of the point's curve."""
    script_digest: str | None
    """SHA-256 of the user's training script; None without one."""


class _ModelDigests(NamedTuple):
    """Digests of the files that a model is made of; None where it has no such file."""

    config: str | None
    weights: str | None
    factory: str | None


class _PlannedTrial(NamedTuple):
    """A trial, the data that it takes, and the digest of its model's factory."""

    identity: str
    trial: Trial
    summary: Summary
    factory_digest: str | None


@dataclass(frozen=True)
class _Hosts:
    """The hosts that a study will run on, as far as worlds and threads depend on them."""

    machine: Machine
    """One of them."""
    slots: int | None
    """Ranks that one host takes, for points that set no scaling.gpus_per_node; None: all."""
    most_per_node: int | None
    """Most ranks on one host at any point of the sweep; None: all ranks."""
    begun_with: int | None
    """Threads per rank of earlier runs of this study; None where there are none."""


def expand(
    file: StudyFile,
    machine: Machine,
    check_data: Callable[[DataSpec], Summary],
    slots: int | None = None,
    launcher: str = "torchrun",
    threads: int | None = None,
) -> Expansion:
    """Return every trial of a study, on its curves.

    The data of a point are checked after everything else: they may have to be downloaded, and a mistake elsewhere
    should be reported before that.

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
    points = [_settle_point(file.path, point, hosts) for point in sweep_points]
    digests_by_model = _check_models(file.path, points)
    summaries: dict[DataSpec, Summary] = {}
    planned: dict[str, _PlannedTrial] = {}  # by identity: a trial on several curves exists once
    curves: list[Curve] = []
    for point in points:
        if point.data not in summaries:
            summaries[point.data] = check_data(point.data)
        trials = _plan_trials(point, summaries[point.data], digests_by_model[point.model], launcher)
        curves.append(_curve(point, trials))
        planned |= {item.identity: item for item in trials}
    factory_digests = {}
    for identity, item in planned.items():
        if item.factory_digest is not None:
            factory_digests[identity] = item.factory_digest
    return Expansion(
        curves=tuple(curves),
        trials={identity: item.trial for identity, item in planned.items()},
        fingerprints={identity: item.summary.fingerprint for identity, item in planned.items()},
        train_samples={identity: item.summary.train_samples for identity, item in planned.items()},
        notes=_study_notes(file, points, summaries.values()),
        factory_digests=factory_digests,
    )


def _plan_trials(point: _SettledPoint, summary: Summary, digests: _ModelDigests, launcher: str) -> list[_PlannedTrial]:
    """Return the trials of a point of the sweep, one for each of its rank counts.

    Raises:
        RequestError: as `_resolved_trial`.
    """
    trials = []
    for plan in point.worlds:
        trial = _resolved_trial(point, plan, summary, digests, launcher)
        trials.append(_PlannedTrial(trial.identity(), trial, summary, digests.factory))
    return trials


def _curve(point: _SettledPoint, trials: Sequence[_PlannedTrial]) -> Curve:
    """Return the curve of a point of the sweep through its trials; the batch policy is no label, but its `mode`."""
    labels = {field: value for field, value in point.labels.items() if field != "scaling.mode"}
    curve_points = [CurvePoint(gpus=item.trial.world.size, trial_id=item.identity) for item in trials]
    return Curve(mode=point.study.scaling.mode, labels=labels, points=tuple(curve_points))


def _most_ranks_per_node(points: Sequence[SweepPoint], slots: int | None) -> int | None:
    """Return the most ranks that one host takes at any point of the sweep; None where some point puts all on one host.

    The number of threads per rank follows from it. So threads are equal on all curves: a rank that is alone on its
    host does not compute with more threads than one that shares its host.
    """
    limits = [point.study.scaling.gpus_per_node or slots for point in points]
    known_limits = [limit for limit in limits if limit is not None]
    return max(known_limits) if len(known_limits) == len(limits) else None


def _check_models(path: Path, points: Sequence[_SettledPoint]) -> dict[model_spec.ModelSpec, _ModelDigests]:
    """Check that the models of all points are there, and return model -> digests of its files.

    All models are checked before the weights of the first are read, because that takes longer.

    Raises:
        RequestError: a model's files are missing or cannot be used.
    """
    models = dict.fromkeys(point.model for point in points)  # each once, in order
    hf_fields = {point.model: "model.hf" if point.study.model.name is None else "model.name" for point in points}
    config_digests = {model: user_model.check(path, model, hf_fields[model]) for model in models}
    weights_digests = {model: user_model.weights_digest(model) for model in models}
    factory_digests = {model: user_model.factory_digest(path, model) for model in models}
    return {
        model: _ModelDigests(config_digests[model], weights_digests[model], factory_digests[model]) for model in models
    }


def _study_notes(file: StudyFile, points: Sequence[_SettledPoint], summaries: Iterable[Summary]) -> tuple[str, ...]:
    """Return all notes on a study, each once: on its data, its micro-batches, and rank counts that it leaves out."""
    notes: list[str] = []
    for summary in summaries:
        notes += summary.notes
    for point in points:
        notes += _model_name_notes(point)
        notes += _micro_step_notes(point)
    skipped_counts = [ranks for ranks in sorted(set(file.study.scaling.gpus)) if ranks > 1]
    all_train_alone = all(engines.of_engine(point.study.train.engine).alone for point in points)
    if skipped_counts and all_train_alone:
        engine = shown(points[0].study.train.engine)
        left_out = f"{listed(skipped_counts)} of scaling.gpus left out"
        notes.append(f"train.engine = {engine} trains on one rank: {left_out}. Name an engine")
    return tuple(dict.fromkeys(notes))


def _model_name_notes(point: _SettledPoint) -> Iterator[str]:
    """Yield a note where the study's name of the model stands for another one."""
    note = model_names.note(point.study.model.name, name=point.model.name, hf=point.model.hf)
    if note and point.model.factory is None:
        yield note


def _micro_step_notes(point: _SettledPoint) -> Iterator[str]:
    """Yield a note for each rank count at which a constant global batch can only be cut into needlessly many pieces."""
    largest_micro_batch = point.study.train.micro_batch
    if point.study.scaling.mode != "strong-global" or largest_micro_batch is None:
        return
    for plan in point.worlds:
        ranks = plan.world.size
        needless_cut = rank_batches.needless_micro_steps(plan.train, largest_micro_batch)  # "37 x 1 of 37 images ..."
        if needless_cut:
            yield (
                f"{ranks} ranks take {needless_cut}: small micro-batches are slow, and the curve shows that as a loss "
                f"of scaling. Choose train.global_batch so that its share of {ranks} ranks has a larger divisor"
            )


def _refuse_idle_fields(file: StudyFile) -> None:
    """Refuse a field of one batch policy where no curve has that policy."""
    study = file.study
    _refuse_idle_field(file, "train.global_batch", study.train.global_batch, mode="strong-global")
    _refuse_idle_field(file, "scaling.fraction_per_gpu", study.scaling.fraction_per_gpu, mode="weak")


def _refuse_idle_field(file: StudyFile, field: str, value: float | None, *, mode: Mode) -> None:
    """Refuse a dotted field that only the batch policy `mode` reads, where no curve has that policy.

    A swept field is refused too where some curves have another policy, because it would vary nothing on those.
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
        raise _idle_field("data.fraction", cause, remedy="leave one of the two out")


def _check_need(train: TrainSection, name: str) -> None:
    """Refuse a field of [train] that depends on another field, where that one has a value without use for it.

    Example: `momentum` has a meaning with optimizer = "sgd" alone.
    """
    needs = fields.traits_of(TrainSection, name).needs
    if needs is None:
        return
    other_field, needed_values = needs
    value = getattr(train, other_field)
    if value not in needed_values:
        cause = f"train.{other_field} = {_as_written(value)}"
        valid = " or ".join(json.dumps(needed) for needed in needed_values)
        raise _idle_field(f"train.{name}", cause, remedy=f"set {other_field} = {valid}")


def _idle_field(field: str, cause: str, *, remedy: str) -> RequestError:
    """Return the error for a field that has no effect because of `cause`. Args: remedy: beside removing the field."""
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


def _settle_point(path: Path, point: SweepPoint, hosts: _Hosts) -> _SettledPoint:
    """Work out and check everything about a point of the sweep that does not need its data.

    Args:
        path: the study file.
        point: the point, as the study file has it.
        hosts: where it will run.

    Raises:
        RequestError: the point asks for something that cannot be.
    """
    split_varies = any(field.startswith("parallel.") for field in point.labels)
    rank_counts = _rank_counts(point.study, split_varies=split_varies)
    _refuse_idle_values(point.study, point.set_fields)
    scripted = _with_script(path, point.study, point.set_fields)
    completed = resolve.with_deepspeed_config(path, scripted.study, point.set_fields)
    study = completed.study  # all that follows is about this one
    _check_length(study)
    _check_meters(path, study.measure.meters)
    device = resolve.device_of(study, hosts.machine)
    precision = resolve.precision_of(study, device, hosts.machine)
    threads = resolve.threads_of(study, device, hosts.machine, hosts.most_per_node, hosts.begun_with)
    located_model = user_model.with_located_files(path, study.model)
    settings = _CurveSettings(
        path=path,
        study=study,
        swept={field: point.labels[field] for field in study.sweep if field.startswith("train.")},
        model=_model_without_data(located_model, is_scripted=scripted.digest is not None),
        train=_train_values(study, device, precision, completed.config, point.set_fields),
        deepspeed_config=completed.config,
        fewest_data_ranks=RankLayout.of(min(rank_counts), study.parallel).data,
        most_data_ranks=RankLayout.of(max(rank_counts), study.parallel).data,
        ranks_per_node=study.scaling.gpus_per_node or hosts.slots,
        threads=threads,
    )
    return _SettledPoint(
        labels=point.labels,
        study=study,
        worlds=tuple(_world_plan(settings, ranks) for ranks in rank_counts),
        data=_located_data(path, study.data),
        model=located_model,
        script_digest=scripted.digest,
    )


def _model_without_data(located_model: model_spec.ModelSpec, *, is_scripted: bool) -> model_spec.ModelSpec:
    """Return a model with its shape filled in and a class count of 1, to be checked before its data are known.

    A model that only the user's training script knows is returned as it is.

    Raises:
        RequestError: the model cannot be built, whatever the number of classes.
    """
    if located_model.unknown and is_scripted:
        return located_model
    return model_spec.resolve(located_model, dataset_classes=1)


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
    """Return the values of a trial's `TrainSpec`, without its batch sizes.

    They are those of [train]; where that leaves a field open, the engine's default; and over both, what the user's
    DeepSpeed file decides.

    Args:
        study: one point of the sweep, with the values that its DeepSpeed file adds.
        device: the device to train on.
        precision: the precision to train in.
        config: the user's DeepSpeed configuration; None where there is none.
        set_fields: dotted fields that the study itself sets.
    """
    train = study.train
    values = {field: getattr(train, field) for field in TrainFields.model_fields}
    values["device"] = device
    values["precision"] = precision
    values["deepspeed_config"] = config
    default_scope = "synchronised" if study.model.task == "segmentation" else "local"
    values["batch_norm"] = train.batch_norm or default_scope
    for field, default in engines.known(train.engine).defaults.items():
        if values[field] is None:
            values[field] = default
    if config is None:
        return values
    if "train.optimizer" in deepspeed_config.fixed_fields(config):
        values["optimizer"] = "deepspeed_config"
    # In bf16, ZeRO trains under DeepSpeed's autocast, which sends gradients in its own type and ignores the file's
    # communication_data_type. A value that the study itself sets stays.
    uses_deepspeeds_autocast = precision == "bf16" and values["zero_stage"] != 0
    if uses_deepspeeds_autocast and "train.gradient_dtype" not in set_fields:
        values["gradient_dtype"] = None
    return values


def _world_plan(settings: _CurveSettings, ranks: int) -> _WorldPlan:
    """Return training and world at one rank count of a curve.

    Raises:
        RequestError: batch, engine, split or hosts do not allow it.
    """
    study = settings.study
    mode = study.scaling.mode
    data_ranks = RankLayout.of(ranks, study.parallel).data
    batch = resolve.batch_of(mode, study.train, data_ranks, settings.fewest_data_ranks)
    global_batch = data_ranks * batch.micro_batch * batch.grad_accum
    if settings.deepspeed_config is not None:
        sizes = (global_batch, batch.micro_batch, batch.grad_accum)
        sizes_by_key = dict(zip(deepspeed_config.BATCH_KEYS, sizes, strict=True))
        deepspeed_config.check_batch(settings.deepspeed_config, mode, sizes_by_key)
    batch_values = {
        "micro_batch": batch.micro_batch,
        "grad_accum": batch.grad_accum,
        "micro_batches": resolve.micro_batches_of(study.train, ranks, batch.micro_batch),
    }
    train = TrainSpec(**settings.train | batch_values)
    _check_engine(train, settings.swept)
    _check_references(settings.path, train)
    divided_batch = None
    if mode == "strong-global":
        divided_batch = model_checks.DividedBatch(global_batch, settings.most_data_ranks)
    model_checks.check_split(study.parallel, train, settings.model, divided_batch)
    if study.measure.checkpoint:
        checks.check_checkpoint(train)
    world = resolve.world_of(ranks, settings.ranks_per_node, settings.threads)
    return _WorldPlan(train, world, resolve.fraction_of(study, ranks))


def _check_engine(train: TrainSpec, swept: dict[str, Any]) -> None:
    """Refuse training that its engine cannot do.

    Where the sweep combines several fields of [train], the error adds how to sweep some of their combinations only.

    Args:
        train: training at one rank count.
        swept: swept fields of [train] by dotted name, with their values at this point.
    """
    try:
        checks.check(train)
    except RequestError as error:
        if len(swept) < 2:
            raise
        assignments = [f"{field.removeprefix('train.')} = {_as_written(value)}" for field, value in swept.items()]
        table = f"{{ {', '.join(assignments)} }}"
        next_step = f"To sweep only what goes together, list tables in [sweep]: train = [{table}, ...]"
        raise RequestError(str(error), next_step=next_step) from None


def _as_written(value: object) -> str:
    """Return a value as a study file would write it: 'sgd', 16, true."""
    return shown(value) if isinstance(value, str) else str(value).lower()


def _check_references(path: Path, train: TrainSpec) -> None:
    """Refuse an engine of another package that refers to a module or an object which does not exist.

    Without this check only the ranks would find that out.
    """
    engine_facts = engines.known(train.engine)
    is_vitscales_own = train.engine in engines.ENGINES
    if is_vitscales_own:
        return
    for reference in engine_facts.references:
        what = f"engine {shown(train.engine)} of {plugins.package('engine', train.engine)} ({reference})"
        user_model.check_reference(path, what, reference)


class _WithScript(NamedTuple):
    """A study whose training script has an absolute path, and the script's SHA-256; None without a script."""

    study: Study
    digest: str | None


def _with_script(path: Path, study: Study, set_fields: frozenset[str]) -> _WithScript:
    """Check the user's training script, if the study has one, and make its path absolute.

    Args:
        path: the study file; a relative path of the script starts in its folder.
        study: one point of the sweep.
        set_fields: dotted fields that the study sets.

    Raises:
        RequestError: the script cannot be read, or the study sets what the script never gets.
    """
    train = study.train
    if train.script is None:
        return _WithScript(study, digest=None)
    for obstacle in script.fields_not_handed_on(train, set_fields):
        raise RequestError(obstacle.what, next_step=obstacle.next_step)
    if study.data.name == script.NAME and "data.samples" not in set_fields:
        what = "how many images an epoch has is not told, and train.script reads them itself"
        raise RequestError(what, next_step="Add [data] with samples = 50000, or the name and root of the dataset")
    if study.measure.meters:
        raise RequestError("measure.meters are of vitscale's own loop", next_step="Remove them")
    script_path = path_named_in(path, train.script)
    located_train = train.model_copy(update={"script": str(script_path)})
    located_study = study.model_copy(update={"train": located_train})
    return _WithScript(located_study, user_model.script_digest(script_path))


def _located_data(path: Path, data: DataSpec) -> DataSpec:
    """Return `data` with absolute paths, and with the classes themselves where it names a file of them.

    `hf` is a folder or a name on the hub, and only a folder that exists gets an absolute path. `classes` is a number,
    which stays; or a file, which is replaced by the names in it.

    Args:
        path: the study file; relative paths start in its folder.
        data: the data of one point of the sweep.
    """
    changes: dict[str, Any] = {}
    if data.root is not None:
        changes["root"] = str(path_named_in(path, data.root))
    if data.hf is not None:
        folder = path_named_in(path, data.hf)
        if folder.is_dir():  # else it is a name on the hub
            changes["hf"] = str(folder)
    if isinstance(data.classes, str):  # the path of a file
        changes["classes"] = _read_classes(path_named_in(path, data.classes))
    return data.model_copy(update=changes)


def _read_classes(path: Path) -> tuple[str, ...]:
    """Return the classes that a file names, one a line; empty lines and repeated names are left out."""
    text = read_text(path, "file of classes", next_step="Name a class a line, or remove data.classes")
    lines = [line.strip() for line in text.splitlines()]
    return tuple(dict.fromkeys(line for line in lines if line))


def _rank_counts(study: Study, *, split_varies: bool) -> list[int]:
    """Return the rank counts of one point of the sweep, in ascending order.

    They are [1] under an engine that trains on one rank.

    Args:
        study: one point of the sweep.
        split_varies: whether the sweep varies the split of the model over ranks, or its replicas. Then counts that are
            too small for this point's are left out: they belong to points with smaller ones.

    Raises:
        RequestError: a count is no multiple of the ranks that share one model or of the replicas, or 1 is missing.
    """
    counts = sorted(set(study.scaling.gpus))
    engine = study.train.engine
    is_alone = engines.known(engine).alone
    if split_varies and not is_alone:
        large_enough = [count for count in counts if count >= study.parallel.least_ranks]
        counts = large_enough or counts
    model_checks.check_ranks(study.parallel, counts, engine)
    if not is_alone:
        return counts
    if 1 not in counts:
        what = f"train.engine = {shown(engine)} trains on one rank, but scaling.gpus is {shown(counts)}"
        raise RequestError(what, next_step="Add 1 to scaling.gpus, or use another engine")
    return [1]


def _resolved_trial(
    point: _SettledPoint, plan: _WorldPlan, summary: Summary, digests: _ModelDigests, launcher: str
) -> Trial:
    """Return one trial of a curve, now that its data are known.

    Args:
        point: the point of the sweep that the curve is for.
        plan: training and world at one of its rank counts.
        summary: what the data have: classes, image shape, number of images.
        digests: those of the model's files.
        launcher: launcher of a study that names none.

    Raises:
        RequestError: model, data and batch do not go together, or no step counts.
    """
    study = point.study
    is_scripted = point.script_digest is not None
    model = point.model
    if not (model.unknown and is_scripted):
        model = model_spec.resolve(model, len(summary.classes), channels=summary.image_shape[2])
    data_changes: dict[str, Any] = {"fraction": plan.fraction}
    if is_scripted:
        data_changes["samples"] = summary.train_samples  # the rank does not count the images itself
    window = {field: getattr(study.measure, field) for field in WindowSpec.model_fields}
    are_steps_open = window["steps"] == AUTO
    if are_steps_open:
        window["steps"] = None  # worked out below, from a whole trial
    trial = Trial(
        model=model,
        script_digest=point.script_digest,
        model_digest=digests.config,
        weights_digest=digests.weights,
        data=point.data.model_copy(update=data_changes),
        train=plan.train,
        world=plan.world,
        window=WindowSpec(**window),
        parallel=study.parallel,
        launcher=launcher if study.launch.launcher == AUTO else study.launch.launcher,
    )
    steps_per_epoch = _checked_steps_per_epoch(trial, summary)
    if are_steps_open:
        fewest_steps = step_schedule.shortest_run(trial, steps_per_epoch)
        trial = trial.model_copy(update={"window": trial.window.model_copy(update={"steps": fewest_steps})})
    if trial.train.script is None:
        model_checks.check_labels(trial, summary)
        model_checks.check_blocks(trial)
    else:  # refuses placeholders that have no value
        script.filled(trial.train.arguments, trial, seed=trial.train.seed, repeat=0, output=Path(script.OUTPUT))
    return trial


def _check_length(study: Study) -> None:
    """Refuse a study whose runs have no length, or two; and one with a target accuracy that is never looked for.

    A run's length is a number of epochs or of steps. A target accuracy is looked for after each epoch, by evaluation.
    """
    train = study.train
    has_epochs = train.epochs is not None
    has_steps = study.measure.steps is not None
    if train.target_accuracy is not None and not (has_epochs and study.measure.evaluate):
        obstacle = "measure.evaluate is false" if has_epochs else "train.epochs is not given"
        what = f"train.target_accuracy = {train.target_accuracy} is looked for after each epoch, and {obstacle}"
        raise RequestError(what, next_step="Give train.epochs as the limit, and leave measure.evaluate at true")
    if has_epochs != has_steps:
        return
    fault = "both are given" if has_epochs else "neither is given"
    next_step = "Give one: epochs = 3 under [train], or steps = 50 under [measure]"
    if train.script is not None:
        next_step = 'Give steps = 50 under [measure], as many as the script takes, or hand on epochs: "{epochs}"'
    raise RequestError(f"a run's length is train.epochs or measure.steps, and {fault}", next_step=next_step)


def _checked_steps_per_epoch(trial: Trial, summary: Summary) -> int:
    """Return the number of optimizer steps in an epoch, and refuse a trial that has none to measure.

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
