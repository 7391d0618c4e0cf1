"""Makes trials from what logs say of their runs, and writes these as a results folder, renamed into place as a whole.

What a log leaves out is assumed, and a note says so. A layout says how many hosts: "single-node", "one-gpu-per-node",
"4-per-node", "2 nodes".
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from vitscale.base.files import draft_of
from vitscale.errors import StoreError, shown
from vitscale.importers.contents import ImportOptions, LogRank, LogRun, TrialSetting, model_of, precision
from vitscale.present.units import listed
from vitscale.store import read_study
from vitscale.store.lines import RankLine
from vitscale.store.records import (
    FORMAT,
    DeviceRecord,
    EndLine,
    Environment,
    EpochLine,
    ModelLine,
    RankRecord,
    StartLine,
    StepLine,
)
from vitscale.store.results import Outcome, RunHeader, StudyImport, StudyRecord
from vitscale.trial.model_cost import parameters
from vitscale.trial.model_spec import NAMED_MODELS
from vitscale.trial.trial import (
    DataSpec,
    Precision,
    TrainSpec,
    Trial,
    WindowSpec,
    World,
    samples_used,
    steps_per_epoch,
    world_of_hosts,
)

UNKNOWN = "unknown"
_ASSUMED_PRECISION: Precision = "fp32"
_ASSUMED_MICRO_BATCH = 1


def trial_of(run: LogRun, options: ImportOptions) -> Trial:
    """The trial of one run."""
    setting = run.setting
    engine = options.engine or setting.engine or UNKNOWN
    stage = options.zero_stage if options.zero_stage is not None else setting.zero_stage
    told = precision(options.precision) if options.precision else setting.precision
    return Trial(
        model=model_of(options, setting),
        data=DataSpec(name=setting.dataset or UNKNOWN, fraction=setting.fraction),
        train=TrainSpec(
            engine=engine,
            precision=told or _ASSUMED_PRECISION,
            device=setting.device,
            micro_batch=micro_batch_of(run, options) or _ASSUMED_MICRO_BATCH,
            grad_accum=setting.grad_accum,
            zero_stage=stage or 0,
        ),
        world=_world(setting),
        window=WindowSpec(
            warmup_steps=run.warmup_steps, evaluate=False, explain=any(rank.explained for rank in run.ranks)
        ),
        launcher=UNKNOWN,
        origin=origin_of(setting),
    )


def _world(setting: TrialSetting) -> World:
    told = per_node_of(setting.layout)
    fits = told is not None and -(-setting.gpus // told) == setting.nodes
    return world_of_hosts(setting.gpus, told if told and fits else -(-setting.gpus // setting.nodes), 1)


def micro_batch_of(run: LogRun, options: ImportOptions) -> int | None:
    """Images per GPU and micro-step; None where nobody tells."""
    return run.setting.micro_batch or options.micro_batch


def origin_of(setting: TrialSetting) -> str:
    """Text that tells trials of two clusters apart: cluster, series, layout, devices and a model that is not known
    here, in the file's words."""
    model = None if setting.model in NAMED_MODELS else setting.model
    parts = [setting.cluster, setting.series, setting.layout, " and ".join(setting.devices), model]
    return "; ".join(part for part in parts if part) or UNKNOWN


def assumed_fields(run: LogRun, options: ImportOptions) -> tuple[str, ...]:
    """Fields of a run's trial that are assumed, for neither its file nor the user tells them: "train.precision".

    What is measured under an assumed value must not be converted from that value to another one.
    """
    setting = run.setting
    model = model_of(options, setting)
    size_is_assumed = not model.unknown and model.hf is None and options.image_size is None
    layout_tells = setting.layout is not None and nodes_of(setting.layout, setting.gpus) is not None
    hosts_are_told = setting.nodes > 1 or layout_tells or run.one_host_told
    is_assumed = {
        "train.precision": options.precision is None and setting.precision is None,
        "train.micro_batch": micro_batch_of(run, options) is None,
        "model.image_size": size_is_assumed,
        "world.nodes": setting.gpus > 1 and not hosts_are_told,
    }
    return tuple(field for field, assumed in is_assumed.items() if assumed)


def notes_on(runs: Sequence[LogRun], options: ImportOptions) -> Iterable[str]:
    """Notes on what had to be assumed for these runs, or stays unknown."""
    settings = {(s.model, s.parameters, s.dataset): s for s in (run.setting for run in runs)}
    models = {model_of(options, setting) for setting in settings.values()}
    if any(model.unknown and model.parameter_count is None for model in models):
        yield "the model is unknown (--model names it, or --parameters says its size): no parameters, FLOPs or MFU"
    elif any(model.unknown for model in models):
        yield "nothing but the number of its parameters is known of the model (--model names it): no FLOPs or MFU"
    if options.image_size is None and (sizes := sorted({model.image_size for model in models if not model.unknown})):
        told = " or ".join(f"{size} x {size}" for size in sizes)
        yield f"the image size is not told (--image-size): {told} pixels are assumed"
    if options.engine is None and any(run.setting.engine is None for run in runs):
        yield "the engine is unknown (--engine names it)"
    if options.precision is None and (untold_in := [run.setting for run in runs if run.setting.precision is None]):
        loose = all(setting.series and setting.series.endswith("AMP") for setting in untold_in)
        told = "AMP names no precision (--precision says it)" if loose else "the precision is not told (--precision)"
        yield f"{told}: {_ASSUMED_PRECISION} is assumed"
    untold = [run for run in runs if micro_batch_of(run, options) is None]
    if any(run.of_images for run in untold):
        yield "the micro-batch is not told (--micro-batch): the time of a step is unknown, and how the batch grows"
    if not all(run.of_images for run in untold):
        yield "the micro-batch is not told (--micro-batch): images/s, and all that follows from it, is unknown"
    if any(not rank.epochs for run in runs for rank in run.ranks[:1] if train_samples(run.setting, options) is None):
        yield "how many images the dataset has is not told (--train-samples): no epoch times"
    unsized = sorted({run.setting.dataset or "(not named)" for run in runs if _unsized(run)})
    if unsized:
        yield (
            f"how many images dataset {listed(unsized)} has is not known (--train-samples): no steps of an epoch, and "
            "no images/s from epochs"
        )


def _unsized(run: LogRun) -> bool:
    return any(line.images is None for rank in run.ranks for line in rank.epochs)


# Krizhevsky, "Learning Multiple Layers of Features from Tiny Images" (2009): both have 50,000 training images.
_TRAIN_SAMPLES = {"cifar10": 50_000, "cifar100": 50_000}


def train_samples(setting: TrialSetting, options: ImportOptions) -> int | None:
    """Training images of the whole dataset; None where nobody says."""
    dataset = "".join(c for c in (setting.dataset or "").lower() if c.isalnum())
    return options.train_samples or setting.train_samples or _TRAIN_SAMPLES.get(dataset)


def an_epoch(setting: TrialSetting, options: ImportOptions) -> tuple[int | None, int | None]:
    """(Optimizer steps, images of all ranks) of one epoch; None where unknown."""
    whole = train_samples(setting, options)
    if whole is None:
        return None, None
    images = samples_used(whole, setting.fraction)
    micro_batch = setting.micro_batch or options.micro_batch
    if micro_batch is None:
        return None, images
    return steps_per_epoch(images, setting.gpus, micro_batch, setting.grad_accum, drop_last=False), images


def step_line(step: int, seconds: float, images: int, *, warmup: bool = False, settling: bool = False) -> StepLine:
    """A step as a log has it; `images`: those of one rank, 0 where unknown."""
    return StepLine(step=step, epoch=0, seconds=seconds, images=images, loss=None, warmup=warmup,
                    window="settling" if settling else "light")  # fmt: skip


def epoch_line(
    epoch: int,
    seconds: float,
    sizes: tuple[int | None, int | None],
    *,
    train_loss: float | None = None,
    train_accuracy: float | None = None,
    held_out_loss: float | None = None,
    held_out_accuracy: float | None = None,
) -> EpochLine:
    """A whole epoch as a log has it; `sizes`: its steps and images (`an_epoch`)."""
    steps, images = sizes
    return EpochLine(epoch=epoch, steps=steps, images=images, seconds=seconds, complete=True, train_loss=train_loss,
                     train_accuracy=train_accuracy, held_out_loss=held_out_loss, held_out_accuracy=held_out_accuracy,
                     peak_bytes=None)  # fmt: skip


_SINGLE = re.compile(r"(single|one|1)[ _-]?(node|host)|packed|local")
_PER_NODE = re.compile(
    r"(?P<count>\d{1,6}|one|two|four|eight)[ _-]?((gpus?|ranks?|tasks?|process(es)?)[ _-]?)?per[ _-]?(node|host)"
)
_COUNTED = re.compile(
    r"(?P<count>\d{1,6}|one|two|three|four|eight)[ _-]?(nodes?|hosts?)|(?P<hosts>\d{1,6}) ?[x\u00d7] ?(?P<each>\d{1,6})"
)
_WORDS = {"one": 1, "two": 2, "three": 3, "four": 4, "eight": 8}


def nodes_of(layout: str | None, gpus: int) -> int | None:
    """Number of hosts of `gpus` ranks under a layout; None where its text does not tell.

    Fewer ranks than one host takes lie on one.
    """
    text = (layout or "").strip().lower()
    if not text or _SINGLE.fullmatch(text):
        return 1
    if text == "spread":
        return gpus
    if (each := per_node_of(text)) is not None:
        return -(-gpus // each)
    if match := _COUNTED.fullmatch(text):
        count = _number(match["count"] or match["hosts"])
        if match["each"] and count * int(match["each"]) != gpus:
            return None
        return count if 0 < count <= gpus and hold(gpus, count) else None
    return None


def per_node_of(layout: str | None) -> int | None:
    """GPUs that a full host takes under a layout; None where its text does not tell."""
    match = _PER_NODE.fullmatch((layout or "").strip().lower())
    return max(1, _number(match["count"])) if match else None


def counts_hosts(layout: str | None) -> bool:
    """Whether a layout only counts hosts: such layouts with another count are not different ones."""
    return layout is not None and _COUNTED.fullmatch(layout.strip().lower()) is not None


def unknown_layouts(runs: Iterable[LogRun]) -> Iterable[str]:
    """A note on layouts that do not tell how many hosts there were."""
    settings = [run.setting for run in runs]
    odd = sorted({s.layout for s in settings if s.layout and nodes_of(s.layout, s.gpus) is None and s.nodes == 1})
    if odd:
        said = listed([repr(layout) for layout in odd])
        yield f"layout {said} does not tell how many hosts: one is assumed (a column nodes would tell)"


def hold(gpus: int, nodes: int) -> bool:
    """Whether `nodes` hosts can hold the ranks: all of them full, or all but the last."""
    return -(-gpus // -(-gpus // nodes)) == nodes


def _number(text: str) -> int:
    return _WORDS[text] if text in _WORDS else int(text)


_UNKNOWN_HOST = "unknown host"


@dataclass(frozen=True)
class TrialRun:
    """One run, with the header of its record."""

    run: LogRun
    header: RunHeader
    train_samples: int | None


def write(results: Path, study: StudyRecord, runs: Sequence[TrialRun]) -> bool:
    """Writes the folder; returns False, and writes nothing, where it holds this import already.

    Raises:
        StoreError: the folder holds something else, or cannot be written.
    """
    results = results.resolve()  # "." has no name of its own
    if _held(results, study, runs):
        return False
    draft = draft_of(results)
    try:
        results.parent.mkdir(parents=True, exist_ok=True)
        draft.mkdir()
        for run in runs:
            _write_run(draft / "runs" / run.header.folder, run)
        (draft / "study.json").write_text(study.model_dump_json(indent=1), encoding="utf-8")
        os.sync()
        draft.replace(results)  # takes the place of an empty folder too
    except OSError as error:
        why = error.strerror or str(error)
        raise StoreError(
            f"{shown(str(results))} cannot be written: {why}", next_step="Give another folder with -o"
        ) from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return True


def _held(results: Path, study: StudyRecord, runs: Iterable[TrialRun]) -> bool:
    """Whether the folder holds this import completely.

    Raises:
        StoreError: it holds something else, or only a part.
    """
    try:
        there = results.is_symlink() or (results.exists() and (not results.is_dir() or any(results.iterdir())))
    except OSError as error:
        raise StoreError(f"{shown(str(results))} cannot be read: {error.strerror}") from None
    if not there:
        return False
    held = read_study(results) if results.is_dir() else None
    other = "Give another folder with -o, or remove this one"
    if held is None or held.imported is None:
        what = "results of another kind" if held is not None else "something else than results"
        raise StoreError(f"{shown(str(results))} exists already and holds {what}", next_step=other)
    files = ", ".join(file.name for file in held.imported.files)
    is_of_this_program = held.vitscale == study.vitscale
    if not _is_same_import(held, study) or (is_of_this_program and held != study):
        raise StoreError(f"{shown(str(results))} holds another import already (of {shown(files)})", next_step=other)
    if not all((results / "runs" / run.header.folder / "outcome.json").is_file() for run in runs):
        raise StoreError(f"{shown(str(results))} holds a part of this import only", next_step=other)
    if not is_of_this_program and not _reads_the_same(results, held, study, runs):
        raise StoreError(
            f"{shown(str(results))} holds this import as vitscale {held.vitscale or 'of an older format'} read "
            f"{shown(files)}; this one, {study.vitscale}, reads it otherwise",
            next_step="Give another folder with -o, or remove this one to import anew",
        )
    return True


def _is_same_import(stored: StudyRecord, study: StudyRecord) -> bool:
    """Whether both are of the same files, read as the same format under the same options; not what was read in them."""

    def request(record: StudyRecord) -> tuple[str, StudyImport | None]:
        imported = record.imported
        return record.name, imported and imported.model_copy(update={"notes": (), "problems": ()})

    return request(stored) == request(study)


def _reads_the_same(results: Path, stored: StudyRecord, study: StudyRecord, runs: Iterable[TrialRun]) -> bool:
    """Whether a folder that another vitscale imported holds what this one reads in the same files."""
    as_now = {"format": study.format, "vitscale": study.vitscale}
    if stored.model_copy(update=as_now) != study:
        return False
    for run in runs:
        folder = results / "runs" / run.header.folder
        for rank in run.run.ranks:
            lines = [_without_format(line) for line in _lines(run, rank)]
            if _stored_lines(folder / f"rank-{rank.rank}.jsonl") != lines:
                return False
    return True


def _stored_lines(path: Path) -> list[RankLine] | None:
    """The lines of a rank's file without the format in which they are stored; None where one cannot be read."""
    try:
        return [_without_format(RankRecord.parse(line)) for line in path.read_bytes().splitlines()]
    except (OSError, ValueError):
        return None


def _without_format(line: RankLine) -> RankLine:
    return line.model_copy(update={"format": 0}) if isinstance(line, StartLine) else line


def _write_run(folder: Path, trial_run: TrialRun) -> None:
    folder.mkdir(parents=True)
    run = trial_run.run
    (folder / "trial.json").write_text(trial_run.header.model_dump_json(indent=1), encoding="utf-8")
    for rank in run.ranks:
        with (folder / f"rank-{rank.rank}.jsonl").open("w", encoding="utf-8") as file:
            file.writelines(f"{line.model_dump_json()}\n" for line in _lines(trial_run, rank))
    outcome = Outcome(
        kind="completed", reason="", started_unix_seconds=run.started_unix_seconds, wall_seconds=_wall_seconds(run)
    )
    (folder / "outcome.json").write_text(outcome.model_dump_json(indent=1), encoding="utf-8")


def _lines(trial_run: TrialRun, rank: LogRank) -> Iterable[RankLine]:
    run, header = trial_run.run, trial_run.header
    if rank.device is not None:
        yield StartLine(
            format=FORMAT,
            trial=header.trial_id,
            rank=rank.rank,
            world_size=header.trial.world.size,
            environment=Environment(
                host=rank.host or _UNKNOWN_HOST,
                device=DeviceRecord(type=run.setting.device, name=rank.device),
                cores_allowed=(),
                threads=None,
                cpu_quota_cores=None,
                versions=run.versions,
                backend=None,
                settings={},
                git_revision=None,
            ),
        )
    yield ModelLine(
        parameters=parameters(header.trial.model),
        gradient_dtype=None,
        synchronised_timing=run.synchronised,
        dataset_fingerprint=header.dataset_fingerprint,
        train_samples=trial_run.train_samples,
        held_out_samples=None,
    )
    yield from rank.steps
    yield from rank.explained
    yield from rank.traffic
    yield from rank.epochs
    yield EndLine()


def fingerprint(trial: Trial) -> str:
    """Stands in for the fingerprint of a dataset of which only the name is known."""
    return f"imported: {trial.data.name}"


def _wall_seconds(run: LogRun) -> float:
    """Wall seconds of the rank with the most, as far as they are told."""
    return max(
        max(sum(line.seconds for line in rank.epochs), sum(line.seconds for line in rank.steps)) for rank in run.ranks
    )
