"""Expands a study to its trials: "auto" resolved, batch sizes worked out, curves laid through them.

Trials that several curves share (strong-micro and strong-global at one rank) exist once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
from vitscale.study.file import StudyFile
from vitscale.study.sections import AUTO, Study, TrainSection
from vitscale.trial import fields, model_spec, rank_batches, script
from vitscale.trial.parallel import RankLayout
from vitscale.trial.trial import DataSpec, TrainFields, TrainSpec, Trial, WindowSpec, World, samples_used


@dataclass(frozen=True)
class Expansion:
    """All trials that a study asks for, on this machine and this data."""

    curves: tuple[Curve, ...]
    trials: dict[str, Trial]
    fingerprints: dict[str, str]
    """Trial identity to the fingerprint of its data."""
    train_samples: dict[str, int]
    """Trial identity to the number of images in its whole training split."""
    notes: tuple[str, ...]
    factory_digests: dict[str, str]
    """Trial identity to the digest of the file of its model's factory, where it has one."""


@dataclass(frozen=True)
class _Settled:
    """One point of the sweep in which all that needs no data is settled; its model still lacks the class count."""

    labels: dict[str, Any]
    study: Study
    data: DataSpec
    model: model_spec.ModelSpec
    worlds: tuple[tuple[TrainSpec, World, float], ...]
    """For each rank count: training, world, and the share of the training images that is used."""
    script_digest: str | None


def expand(
    file: StudyFile,
    machine: Machine,
    check_data: Callable[[DataSpec], Summary],
    slots: int | None = None,
    launcher: str = "torchrun",
    threads: int | None = None,
) -> Expansion:
    """Every trial of a study, on its curves.

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
    of_sweep = list(file.points())
    shapes = [study.scaling.gpus_per_node or slots for _, study, _ in of_sweep]
    # The same number of threads on all curves, packed or spread: a rank alone on its host must not compute with more.
    most = None if None in shapes else max(shape for shape in shapes if shape is not None)
    points = [
        _settled(file.path, labels, study, by_hand, machine, slots, most, threads)
        for labels, study, by_hand in of_sweep
    ]
    summaries: dict[DataSpec, Summary] = {}
    digests = {model: user_model.check(file.path, model) for model in dict.fromkeys(point.model for point in points)}
    weights = {model: user_model.weights_digest(model) for model in digests}
    factories = {model: user_model.factory_digest(file.path, model) for model in digests}
    curves: list[Curve] = []
    trials: dict[str, Trial] = {}
    fingerprints: dict[str, str] = {}
    train_samples: dict[str, int] = {}
    factory_digests: dict[str, str] = {}
    for point in points:
        if point.data not in summaries:
            summaries[point.data] = check_data(point.data)
        summary = summaries[point.data]
        on_curve = []
        for train, world, fraction in point.worlds:
            of_model = (digests[point.model], weights[point.model])
            trial = _trial(point, train, world, fraction, summary, of_model, launcher)
            identity = trial.identity()
            trials[identity] = trial
            fingerprints[identity] = summary.fingerprint
            train_samples[identity] = summary.train_samples
            if (factory := factories[point.model]) is not None:
                factory_digests[identity] = factory
            on_curve.append(CurvePoint(gpus=world.size, trial_id=identity))
        labels = {field: value for field, value in point.labels.items() if field != "scaling.mode"}
        curves.append(Curve(mode=point.study.scaling.mode, labels=labels, points=tuple(on_curve)))
    notes = dict.fromkeys(note for summary in summaries.values() for note in summary.notes)
    notes |= dict.fromkeys(note for point in points for note in _micro_step_notes(point))
    more = [gpus for gpus in sorted(set(file.study.scaling.gpus)) if gpus > 1]
    if more and all(engines.of_engine(point.study.train.engine).alone for point in points):
        engine = shown(points[0].study.train.engine)
        notes[
            f"train.engine = {engine} trains on one rank: {listed(more)} of scaling.gpus left out. Name an engine"
        ] = None
    return Expansion(tuple(curves), trials, fingerprints, train_samples, tuple(notes), factory_digests)


def _micro_step_notes(point: _Settled) -> Iterator[str]:
    """Notes on rank counts whose share of a constant global batch divides badly."""
    train = point.study.train
    if point.study.scaling.mode != "strong-global" or train.micro_batch is None:
        return
    for spec, world, _ in point.worlds:
        if cut := rank_batches.needless_micro_steps(spec, train.micro_batch):
            yield (
                f"{world.size} ranks take {cut}: small micro-batches are slow, and the curve shows that as a loss of "
                f"scaling. Choose train.global_batch so that its share of {world.size} ranks has a larger divisor"
            )


def _refuse_idle_fields(file: StudyFile) -> None:
    """Refuses a field of one batch policy where no curve has that policy."""
    study, modes = file.study, file.modes
    for field, value, mode in (
        ("train.global_batch", study.train.global_batch, "strong-global"),
        ("scaling.fraction_per_gpu", study.scaling.fraction_per_gpu, "weak"),
    ):
        given = field in file.swept_fields or value is not None
        if given and mode not in modes:
            said = f"{field} = {value}" if value is not None else f"sweep.'{field}'"
            what = f"{said} has no meaning under scaling.mode = {', '.join(shown(m) for m in modes)}"
            raise RequestError(what, next_step=f'Remove it, or set scaling.mode = "{mode}"')
        if field in file.swept_fields and set(modes) != {mode}:
            raise RequestError(
                f"sweep.'{field}' varies nothing under other batch policies than {mode}", next_step="Split the study"
            )


def _refuse_idle_values(study: Study, by_hand: frozenset[str]) -> None:
    """Refuses a value set by hand that has no effect because of another value."""
    for name in TrainSection.model_fields if study.train.script is None else ():
        field, values = fields.traits_of(TrainSection, name).needs or ("", ())
        if f"train.{name}" in by_hand and values and (value := getattr(study.train, field)) not in values:
            valid = " or ".join(f'"{valid}"' for valid in values)
            raise _idle(f"train.{name}", f"train.{field} = {shown(value)}", f"set {field} = {valid}")
    scaling = study.scaling
    if scaling.mode == "weak" and scaling.fraction_per_gpu is not None and "data.fraction" in by_hand:
        where = "scaling.mode = 'weak' with scaling.fraction_per_gpu"
        raise _idle("data.fraction", where, "leave one of the two out")


def _idle(field: str, where: str, otherwise: str) -> RequestError:
    return RequestError(f"{field} has no meaning under {where}", next_step=f"Remove it, or {otherwise}")


def _settled(
    path: Path,
    labels: dict[str, Any],
    study: Study,
    by_hand: frozenset[str],
    machine: Machine,
    slots: int | None,
    most_per_node: int | None,
    begun_with: int | None,
) -> _Settled:
    ranks = _rank_counts(study, split_varies=any(field.startswith("parallel.") for field in labels))
    _refuse_idle_values(study, by_hand)
    study, digest = _with_script(path, study, by_hand)
    study, config = resolve.with_deepspeed_config(path, study, by_hand)
    _check_length_is_said(study)
    for meter in study.measure.meters:
        if (target := plugins.target("meter", meter)) is None:
            raise unknown("meter", meter, plugins.names("meter"), next_step="Correct measure.meters")
        what = f"meter {shown(meter)} of {plugins.package('meter', meter)} ({target})"
        user_model.check_reference(path, what, target, methods=("begin", "end"))
    device = resolve.device_of(study, machine)
    precision = resolve.precision_of(study, device, machine)
    threads = resolve.threads_of(study, device, machine, most_per_node, begun_with)
    kept = {field: getattr(study.train, field) for field in TrainFields.model_fields}
    kept |= {"precision": precision, "device": device, "deepspeed_config": config}
    by_task = "synchronised" if study.model.task == "segmentation" else "local"
    kept["batch_norm"] = study.train.batch_norm or by_task
    for field, default in engines.known(study.train.engine).defaults.items():
        kept[field] = default if kept[field] is None else kept[field]
    if config is not None and "train.optimizer" in deepspeed_config.fixed_fields(config):
        kept["optimizer"] = "deepspeed_config"
    if config is not None and precision == "bf16" and kept["zero_stage"] and "train.gradient_dtype" not in by_hand:
        kept["gradient_dtype"] = None  # the file's has no effect under DeepSpeed's autocast, as the linter says
    located = user_model.located(path, study.model)
    # Whatever the number of classes, all else must be right.
    model = located if located.unknown and digest else model_spec.resolve(located, 1)
    worlds = []
    for gpus in ranks:
        data_ranks = RankLayout.of(gpus, study.parallel).data
        fewest = RankLayout.of(min(ranks), study.parallel).data
        micro_batch, grad_accum = resolve.batch_of(study.scaling.mode, study.train, data_ranks, fewest)
        if config is not None:
            batch = (data_ranks * micro_batch * grad_accum, micro_batch, grad_accum)
            values = dict(zip(deepspeed_config.BATCH_KEYS, batch, strict=True))
            deepspeed_config.check_batch(config, study.scaling.mode, values)
        shares = resolve.micro_batches_of(study.train, gpus, micro_batch)
        sizes = {"micro_batch": micro_batch, "grad_accum": grad_accum, "micro_batches": shares}
        train = TrainSpec(**kept | sizes)
        _check_engine(train, {field: labels[field] for field in study.sweep if field.startswith("train.")})
        _check_references(path, train)
        most = RankLayout.of(max(ranks), study.parallel).data
        divided = (data_ranks * micro_batch * grad_accum, most) if study.scaling.mode == "strong-global" else None
        model_checks.check_split(study.parallel, train, model, divided)
        if study.measure.checkpoint:
            checks.check_checkpoint(train)
        world = resolve.world_of(gpus, study.scaling.gpus_per_node or slots, threads)
        worlds.append((train, world, resolve.fraction_of(study, gpus)))
    data = _located(path, study.data)
    return _Settled(labels, study, data, located, tuple(worlds), digest)


def _check_engine(train: TrainSpec, swept: dict[str, Any]) -> None:
    """Checks training against its engine; where all values of several fields are combined, says how some are."""
    try:
        checks.check(train)
    except RequestError as error:
        if len(swept) < 2:
            raise
        values = {
            field: shown(value) if isinstance(value, str) else str(value).lower() for field, value in swept.items()
        }
        table = ", ".join(f"{field.removeprefix('train.')} = {value}" for field, value in values.items())
        together = f"To sweep only what goes together, list tables in [sweep]: train = [{{ {table} }}, ...]"
        raise RequestError(str(error), next_step=together) from None


def _check_references(path: Path, train: TrainSpec) -> None:
    """Refuses another package's engine whose facts refer to what is not there: else the ranks would find out."""
    facts_of_engine = engines.known(train.engine)
    if train.engine not in engines.ENGINES:
        for reference in facts_of_engine.references:
            what = f"engine {shown(train.engine)} of {plugins.package('engine', train.engine)} ({reference})"
            user_model.check_reference(path, what, reference)


def _with_script(path: Path, study: Study, by_hand: frozenset[str]) -> tuple[Study, str | None]:
    """The study with its script's path seen from the study file's folder, and the script's digest; None without one."""
    train = study.train
    if train.script is None:
        return study, None
    for what, next_step in script.not_handed_on(train, by_hand):
        raise RequestError(what, next_step=next_step)
    if study.data.name == script.NAME and "data.samples" not in by_hand:
        what = "how many images an epoch has is not told, and train.script reads them itself"
        raise RequestError(what, next_step="Add [data] with samples = 50000, or the name and root of the dataset")
    if study.measure.meters:
        raise RequestError("measure.meters are of vitscale's own loop", next_step="Remove them")
    located = beside(path, train.script)
    update = {"script": str(located)}
    return study.model_copy(update={"train": train.model_copy(update=update)}), user_model.script_digest(located)


def _located(path: Path, data: DataSpec) -> DataSpec:
    """`data` with paths resolved from the study file's folder, and with the classes that its file names."""
    settled: dict[str, Any] = {} if data.root is None else {"root": str(beside(path, data.root))}
    if data.hf is not None and (folder := beside(path, data.hf)).is_dir():
        settled["hf"] = str(folder)
    if isinstance(data.classes, str):
        file = beside(path, data.classes)
        text = read_text(file, "file of classes", next_step="Name a class a line, or remove data.classes")
        settled["classes"] = tuple(dict.fromkeys(line.strip() for line in text.splitlines() if line.strip()))
    return data.model_copy(update=settled)


def _rank_counts(study: Study, *, split_varies: bool) -> list[int]:
    """Rank counts of one point. With `split_varies`, those too small for its split belong to other points."""
    gpus = sorted(set(study.scaling.gpus))
    engine = study.train.engine
    if not engines.known(engine).alone:
        enough = [ranks for ranks in gpus if ranks >= study.parallel.ranks_per_model]
        gpus = enough if split_varies and enough else gpus
        model_checks.check_ranks(study.parallel, gpus, study.train.engine)
        return gpus
    model_checks.check_ranks(study.parallel, gpus, study.train.engine)
    if 1 not in gpus:
        what = f"train.engine = {shown(engine)} trains on one rank, but scaling.gpus is {shown(gpus)}"
        raise RequestError(what, next_step="Add 1 to scaling.gpus, or use another engine")
    return [1]


def _trial(
    point: _Settled,
    train: TrainSpec,
    world: World,
    fraction: float,
    summary: Summary,
    digests: tuple[str | None, str | None],
    launcher: str,
) -> Trial:
    study = point.study
    measured = {field: getattr(study.measure, field) for field in WindowSpec.model_fields}
    auto = measured["steps"] == AUTO
    model, samples = point.model, {"samples": summary.train_samples}  # the rank does not count the images itself
    if not (model.unknown and point.script_digest):
        model = model_spec.resolve(model, len(summary.classes), summary.image_shape[2])
    trial = Trial(
        model=model,
        script_digest=point.script_digest,
        model_digest=digests[0],
        weights_digest=digests[1],
        data=point.data.model_copy(update={"fraction": fraction} | (samples if point.script_digest else {})),
        train=train,
        world=world,
        window=WindowSpec(**measured | ({"steps": None} if auto else {})),
        parallel=point.study.parallel,
        launcher=launcher if study.launch.launcher == AUTO else study.launch.launcher,
    )
    per_epoch = _steps_per_epoch(trial, summary)
    if auto:
        window = trial.window.model_copy(update={"steps": step_schedule.shortest_run(trial, per_epoch)})
        trial = trial.model_copy(update={"window": window})
    if trial.train.script is None:
        model_checks.check_labels(trial, summary)
        model_checks.check_blocks(trial)
    else:
        script.filled(trial.train.arguments, trial, seed=trial.train.seed, repeat=0, output=Path(script.OUTPUT))
    return trial


def _check_length_is_said(study: Study) -> None:
    if study.train.target_accuracy is not None and (study.train.epochs is None or not study.measure.evaluate):
        lacking = "train.epochs is not given" if study.train.epochs is None else "measure.evaluate is false"
        what = f"train.target_accuracy = {study.train.target_accuracy} is looked for after each epoch, and {lacking}"
        raise RequestError(what, next_step="Give train.epochs as the limit, and leave measure.evaluate at true")
    if (study.train.epochs is None) == (study.measure.steps is None):
        both = "both are given" if study.train.epochs is not None else "neither is given"
        what = f"a run's length is train.epochs or measure.steps, and {both}"
        give = "Give one: epochs = 3 under [train], or steps = 50 under [measure]"
        scripted = 'Give steps = 50 under [measure], as many as the script takes, or hand on epochs: "{epochs}"'
        raise RequestError(what, next_step=give if study.train.script is None else scripted)


def _steps_per_epoch(trial: Trial, summary: Summary) -> int:
    """Optimizer steps of an epoch; refuses a run without a step that counts."""
    train, window = trial.train, trial.window
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
