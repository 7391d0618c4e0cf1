"""Makes a trial from what a log says of its run; what the log leaves out is assumed, and a note says so.

A layout says how many hosts: "single-node", "one-gpu-per-node", "4-per-node", "2 nodes".
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from vitscale.importers.contents import LogRun, Options, Setting, model_of, precision
from vitscale.present.units import listed
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


def trial_of(run: LogRun, options: Options) -> Trial:
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


def _world(setting: Setting) -> World:
    told = per_node_of(setting.layout)
    fits = told is not None and -(-setting.gpus // told) == setting.nodes
    return world_of_hosts(setting.gpus, told if told and fits else -(-setting.gpus // setting.nodes), 1)


def micro_batch_of(run: LogRun, options: Options) -> int | None:
    """Images per GPU and micro-step; None where nobody tells."""
    return run.setting.micro_batch or options.micro_batch


def origin_of(setting: Setting) -> str:
    """Text that tells trials of two clusters apart: cluster, series, layout, devices and a model that is not known
    here, in the file's words."""
    model = None if setting.model in NAMED_MODELS else setting.model
    parts = [setting.cluster, setting.series, setting.layout, " and ".join(setting.devices), model]
    return "; ".join(part for part in parts if part) or UNKNOWN


def notes_on(runs: Sequence[LogRun], options: Options) -> Iterable[str]:
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
    if options.precision is None and any(run.setting.precision is None for run in runs):
        yield f"the precision is not told (--precision): {_ASSUMED_PRECISION} is assumed"
    if any(micro_batch_of(run, options) is None for run in runs):
        yield "the micro-batch is not told (--micro-batch): images/s, and all that follows from it, is unknown"
    if any(not rank.epochs for run in runs for rank in run.ranks[:1] if train_samples(run.setting, options) is None):
        yield "how many images the dataset has is not told (--train-samples): no epoch times, and no speedup from them"
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


def train_samples(setting: Setting, options: Options) -> int | None:
    """Training images of the whole dataset; None where nobody says."""
    if options.train_samples is not None:
        return options.train_samples
    if setting.train_samples is not None:
        return setting.train_samples
    return _TRAIN_SAMPLES.get("".join(c for c in (setting.dataset or "").lower() if c.isalnum()))


def an_epoch(setting: Setting, options: Options) -> tuple[int | None, int | None]:
    """(Optimizer steps, images of all ranks) of one epoch; None where unknown."""
    whole = train_samples(setting, options)
    if whole is None:
        return None, None
    images = samples_used(whole, setting.fraction)
    micro_batch = setting.micro_batch or options.micro_batch
    if micro_batch is None:
        return None, images
    return steps_per_epoch(images, setting.gpus, micro_batch, setting.grad_accum, drop_last=False), images


_SINGLE = re.compile(r"(single|one|1)[ _-]?(node|host)|packed|local")
_PER_NODE = re.compile(
    r"(?P<count>\d{1,6}|one|two|four|eight)[ _-]?((gpus?|ranks?|tasks?|process(es)?)[ _-]?)?per[ _-]?(node|host)"
)
_COUNTED = re.compile(r"(?P<count>\d{1,6}|one|two|three|four|eight)[ _-]?(nodes?|hosts?)")
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
        count = _number(match["count"])
        return count if 0 < count <= gpus and hold(gpus, count) else None
    return None


def per_node_of(layout: str | None) -> int | None:
    """GPUs that a full host takes under a layout; None where its text does not tell."""
    match = _PER_NODE.fullmatch((layout or "").strip().lower())
    return max(1, _number(match["count"])) if match else None


def counts_hosts(layout: str | None) -> bool:
    """Whether a layout only counts hosts: such layouts with another count are not different ones."""
    return layout is not None and _COUNTED.fullmatch(layout.strip().lower()) is not None


def hold(gpus: int, nodes: int) -> bool:
    """Whether `nodes` hosts can hold the ranks: all of them full, or all but the last."""
    return -(-gpus // -(-gpus // nodes)) == nodes


def _number(text: str) -> int:
    return _WORDS[text] if text in _WORDS else int(text)
