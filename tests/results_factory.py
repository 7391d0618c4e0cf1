"""Records with known truth, for tests of the analysis and the report."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vitscale import store
from vitscale.engines.step_schedule import windows
from vitscale.store.lines import RankLine
from vitscale.store.records import (
    Device,
    EndLine,
    Environment,
    EpochLine,
    ErrorLine,
    ExplainedLine,
    ModelLine,
    PhaseLine,
    RankRecord,
    StartLine,
    StepLine,
)
from vitscale.store.results import Curve, CurvePoint, Outcome, OutcomeKind, Results, Run, RunHeader, StudyRecord
from vitscale.trial.model_spec import ModelSpec
from vitscale.trial.rank_batches import micro_batches
from vitscale.trial.trial import DataSpec, Mode, TrainSpec, Trial, WindowSpec, World, samples_used, steps_per_epoch

TRAIN_SAMPLES = 1024
PHASE_SECONDS = {"launch": 0.5, "imports": 3.0, "data": 0.25, "model": 0.5, "engine": 0.25, "first_step": 1.5}
STARTUP_SECONDS = 6.0
"""The sum of the phases."""
VERSIONS: dict[str, str | None] = {"torch": "2.13.0", "deepspeed": "0.19.8", "python": "3.11.2"}


def make_trial(
    engine: str = "ddp",
    gpus: int = 1,
    *,
    micro_batch: int = 8,
    grad_accum: int = 1,
    fraction: float = 1.0,
    epochs: int = 3,
    warmup_steps: int = 3,
    model: str = "vit-ti16",
    **train: Any,
) -> Trial:
    """A resolved trial on synthetic data; `train` sets further fields of its TrainSpec."""
    return Trial(
        model=ModelSpec(name=model, image_size=32, patch_size=16, num_classes=10),
        data=DataSpec(name="synthetic", samples=TRAIN_SAMPLES, fraction=fraction),
        train=TrainSpec(
            **{
                "engine": engine,
                "precision": "fp32",
                "device": "cpu",
                "micro_batch": micro_batch,
                "grad_accum": grad_accum,
                "epochs": epochs,
                **train,
            }
        ),
        world=World(ranks_per_node=gpus, threads_per_rank=1),
        window=WindowSpec(warmup_steps=warmup_steps),
        launcher="torchrun",
    )


def make_environment(rank: int = 0, **changes: Any) -> Environment:
    """Rank `rank`, pinned to one core of its own, on one CPU type."""
    fields: dict[str, Any] = {
        "host": "node1",
        "device": Device(type="cpu", name="Example CPU"),
        "cores_allowed": (rank,),
        "threads": 1,
        "cpu_quota_cores": None,
        "versions": VERSIONS,
        "backend": "gloo",
        "settings": {},
        "git_revision": None,
    }
    return Environment(**(fields | changes))


def make_rank(
    trial: Trial,
    rank: int,
    steps: Sequence[float],
    *,
    warmup: int = 0,
    images: int | None = None,
    steps_in_epoch: int | None = None,
    losses: Sequence[float | None] | None = None,
    environment: Environment | None = None,
    model: Mapping[str, Any] | None = None,
    phases: Mapping[str, float] = PHASE_SECONDS,
) -> RankRecord:
    """One rank's record: `steps` are the seconds of its optimizer steps, epochs their sums."""
    per_epoch = steps_in_epoch or len(steps)
    of_all = trial.global_batch if images is None else images * trial.world.size
    if images is None:
        images = micro_batches(trial.train, trial.world.size)[rank] * trial.train.grad_accum
    losses = [2.0 / (1 + 0.1 * k) for k in range(len(steps))] if losses is None else losses
    step_lines = [
        StepLine(step=k, epoch=k // per_epoch, seconds=s, images=images, loss=losses[k], warmup=k < warmup)
        for k, s in enumerate(steps)
    ]
    epochs = []
    for epoch in range(math.ceil(len(steps) / per_epoch)):
        own = [line for line in step_lines if line.epoch == epoch]
        epochs.append(
            EpochLine(
                epoch=epoch,
                steps=len(own),
                images=len(own) * of_all,
                seconds=sum(line.seconds for line in own),
                complete=len(own) == per_epoch,
                train_loss=own[-1].loss,
                train_accuracy=min(0.95, 0.4 + 0.15 * epoch),
                held_out_loss=None if own[-1].loss is None else own[-1].loss + 0.1,
                held_out_accuracy=min(0.9, 0.35 + 0.15 * epoch),
                peak_bytes=500_000_000 + 1_000_000 * rank,
            )
        )
    model_fields: dict[str, Any] = {
        "parameters": 5_500_000,
        "gradient_dtype": "float32",
        "synchronised_timing": False,
        "dataset_fingerprint": "synthetic",
        "train_samples": TRAIN_SAMPLES,
        "held_out_samples": 205,
    }
    return RankRecord(
        rank=rank,
        start=StartLine(
            format=1,
            trial=trial.identity(),
            rank=rank,
            world_size=trial.world.size,
            environment=environment or make_environment(rank),
        ),
        model=ModelLine(**(model_fields | dict(model or {}))),
        phases=tuple(PhaseLine(name=name, seconds=seconds) for name, seconds in phases.items()),  # type: ignore[arg-type]  # names of phases
        steps=tuple(step_lines),
        epochs=tuple(epochs),
        error=None,
        ended=True,
        broken=(),
    )


def steps_of_epoch(record: RankRecord, epoch: int) -> tuple[int, int]:
    """The first and the last step of an epoch, as a line of resources has them."""
    numbers = [line.step for line in record.steps if line.epoch == epoch]
    return numbers[0], numbers[-1]


def make_run(
    trial: Trial,
    ranks: Sequence[RankRecord],
    repeat: int = 0,
    *,
    kind: OutcomeKind = "completed",
    reason: str = "",
    detail: str = "",
    rank: int | None = None,
) -> Run:
    """One run of `trial`."""
    return Run(
        header=RunHeader(
            trial_id=trial.identity(),
            repeat=repeat,
            attempt=0,
            trial=trial,
            command=("python", "-m", "vitscale.worker"),
            dataset_fingerprint="synthetic",
        ),
        outcome=Outcome(
            kind=kind,
            reason=reason,
            detail=detail,
            rank=rank,
            started_unix_seconds=1_700_000_000.0 + 100 * repeat,
            wall_seconds=20.0,
        ),
        ranks=tuple(ranks),
    )


def steady_run(trial: Trial, step_seconds: float, repeat: int = 0, **rank_fields: Any) -> Run:
    """A run whose every step takes `step_seconds` on every rank, as long as its trial asks for, after warm-up."""
    samples = samples_used(TRAIN_SAMPLES, trial.data.fraction)
    train = trial.train
    per_epoch = steps_per_epoch(samples, trial.world.size, train.micro_batch, train.grad_accum, train.drop_last)
    steps = [step_seconds] * (per_epoch * (train.epochs or 1))
    environments = rank_fields.pop("environments", None)
    ranks = [
        make_rank(
            trial,
            rank,
            steps,
            **{
                "warmup": trial.window.warmup_steps,
                "steps_in_epoch": per_epoch,
                "environment": environments[rank] if environments else None,
                **rank_fields,
            },
        )
        for rank in range(trial.world.size)
    ]
    left = 0 if train.drop_last else samples % trial.global_batch
    return make_run(trial, [_with_short_steps(rank, per_epoch, left, trial.world.size) for rank in ranks], repeat)


def _with_short_steps(rank: RankRecord, per_epoch: int, left: int, ranks: int) -> RankRecord:
    """The last step of each epoch holds what is `left` of the images, where that is any; its time stays."""
    own = left // ranks + (rank.rank < left % ranks)
    steps = tuple(
        line.model_copy(update={"images": own}) if left and line.step % per_epoch == per_epoch - 1 else line
        for line in rank.steps
    )
    return rank.model_copy(update={"steps": steps})


NOT_TOLD_APART = "the ranks recorded different collectives"


def explained_line(
    step: int,
    block: int,
    *,
    data_wait: float = 0.0,
    forward: float,
    backward: float,
    wait: float = 0.0,
    wire: float = 0.0,
    norm: float = 0.0,
    bubble: float = 0.0,
    optimizer: float = 0.0,
    other: float = 0.0,
    told_apart: bool = True,
) -> ExplainedLine:
    """One explained step of a CPU rank: its parts in seconds, with one all-reduce at the end of backward.

    The transfer is the shortest service of all ranks: one rank must have `wait=0`, and `wire` be the same on all.
    With `norm`, as long on all of them, a norm's comes ahead of it, and has the wait. Without `told_apart` they are
    exposed communication, of which no more is known. `bubble` is waiting for a stage, behind backward.
    """
    exchanged = data_wait + forward + backward
    computed = exchanged + (wait + norm if norm else 0.0)
    arrived = exchanged + wait + norm + wire
    filled = arrived + bubble
    updated = filled + optimizer
    unknown = {"h2d": "the device is the host", "launch_gaps": "a host launches no kernels"}
    return ExplainedLine(
        step=step,
        block=block,
        device="cpu",
        seconds=updated + other,
        phases=(
            ("data", 0.0, data_wait),
            ("forward", data_wait, data_wait + forward),
            ("backward", data_wait + forward, arrived),
            ("bubble", arrived, filled),
            ("optimizer", filled, updated),
        ),
        idle=((exchanged, filled),),
        collectives=(
            *([("gloo", "all_reduce", exchanged, computed)] if norm else []),
            ("gloo", "all_reduce", computed, arrived),
            *([("gloo", "recv", arrived, filled)] if bubble else []),
        ),
        norms=(0,) if norm else (),
        unknown=unknown if told_apart else unknown | {"wait": NOT_TOLD_APART, "wire": NOT_TOLD_APART},
    )


def explained_run(
    trial: Trial,
    parts_by_rank: Sequence[Mapping[str, Any]],
    step_seconds: float | None = None,
    repeat: int = 0,
    *,
    slowdown: float = 0.0,
    **rank_fields: Any,
) -> Run:
    """A run as long as its trial asks for, whose explained steps lie where `windows` puts them.

    Args:
        trial: with as many ranks as `parts_by_rank`.
        parts_by_rank: what `explained_line` takes, of each rank's explained steps.
        step_seconds: of every other step; by default the slowest rank's explained step less the slowdown.
        repeat: which repeat it is.
        slowdown: of the explained steps: 0.03 is 3 %.
        rank_fields: for `make_rank`, through `steady_run`.
    """
    slowest = max(explained_line(0, 0, **parts).seconds for parts in parts_by_rank)
    run = steady_run(trial, slowest / (1 + slowdown) if step_seconds is None else step_seconds, repeat, **rank_fields)
    return run.model_copy(
        update={
            "ranks": tuple(
                _with_explained_steps(trial, rank, parts) for rank, parts in zip(run.ranks, parts_by_rank, strict=True)
            )
        }
    )


def _with_explained_steps(trial: Trial, rank: RankRecord, parts: Mapping[str, Any]) -> RankRecord:
    """`rank` with its explained steps in place; an epoch lasts as long as its steps, as in `make_rank`."""
    per_epoch = rank.epochs[0].steps
    marks = windows(trial, len(rank.steps), per_epoch or len(rank.steps))
    places = [place for place, window in enumerate(marks) if window == "explained"]
    if not places:
        raise ValueError(f"a run of {len(rank.steps)} steps is too short for an explained one")
    explained = tuple(explained_line(place, block, **parts) for block, place in enumerate(places))
    steps = [line.model_copy(update={"window": window}) for line, window in zip(rank.steps, marks, strict=True)]
    for line in explained:
        steps[line.step] = steps[line.step].model_copy(update={"seconds": line.seconds})
    epochs = [
        epoch.model_copy(update={"seconds": sum(line.seconds for line in steps if line.epoch == epoch.epoch)})
        for epoch in rank.epochs
    ]
    return rank.model_copy(update={"steps": tuple(steps), "epochs": tuple(epochs), "explained": explained})


def ended_in(run: Run, accuracies: Sequence[float], *, fragment: bool = False) -> Run:
    """The run as it were if it had ended after these held-out accuracies; `fragment`: with half of its last epoch."""
    last = len(accuracies) - 1
    ranks = []
    for rank in run.ranks:
        lines = [
            line.model_copy(update={"held_out_accuracy": accuracy})
            for line, accuracy in zip(rank.epochs, accuracies, strict=False)
        ]
        steps = [line for line in rank.steps if line.epoch <= last]
        if fragment:
            half = (lines[last].steps or 0) // 2
            steps = steps[:-half]
            seconds = sum(line.seconds for line in steps if line.epoch == last)
            cut = {"steps": half, "images": (lines[last].images or 0) // 2, "seconds": seconds, "complete": False}
            lines[last] = lines[last].model_copy(update=cut)
        ranks.append(rank.model_copy(update={"steps": tuple(steps), "epochs": tuple(lines)}))
    return run.model_copy(update={"ranks": tuple(ranks)})


def failed_run(
    trial: Trial, kind: OutcomeKind, reason: str, detail: str = "", repeat: int = 0, rank: int | None = 0
) -> Run:
    """A run that ended early, after no step."""
    return make_run(trial, [], repeat, kind=kind, reason=reason, detail=detail, rank=rank)


def make_curve(trials: Sequence[Trial], mode: Mode = "strong-micro", **labels: Any) -> Curve:
    """A curve through `trials`. Labels are swept fields, with `__` for the dot; the engine is one by default."""
    fields = {field.replace("__", "."): value for field, value in labels.items()}
    return Curve(
        mode=mode,
        labels={"train.engine": trials[0].train.engine} | fields,
        points=tuple(CurvePoint(gpus=trial.world.size, trial_id=trial.identity()) for trial in trials),
    )


def make_results(
    curves: Sequence[tuple[Curve, Sequence[Trial]]],
    runs: Sequence[Run],
    *,
    name: str = "example",
    repeats: int = 3,
    problems: Sequence[str] = (),
    text: str = 'name = "example"\n',
) -> Results:
    """A results folder as it is read back."""
    trials = {trial.identity(): trial for _, members in curves for trial in members}
    study = StudyRecord(
        name=name,
        text=text,
        repeats=repeats,
        curves=tuple(curve for curve, _ in curves),
        trials=trials,
        versions=VERSIONS,
        dataset_fingerprints=dict.fromkeys(trials, "synthetic"),
    )
    return Results(study=study, runs=tuple(runs), problems=tuple(problems))


def one_curve(
    step_seconds: Mapping[int, Sequence[float]], engine: str = "ddp", mode: Mode = "strong-micro", **study: Any
) -> Results:
    """One curve: rank count to the step seconds of each repeat. Weak: each rank has a sixteenth of the images."""
    trials = [make_trial(engine, gpus, fraction=gpus / 16 if mode == "weak" else 1.0) for gpus in step_seconds]
    runs = [
        steady_run(trial, seconds, repeat)
        for trial in trials
        for repeat, seconds in enumerate(step_seconds[trial.world.size])
    ]
    return make_results([(make_curve(trials, mode), trials)], runs, **({"repeats": 1} | study))


@functools.cache
def rich_study(seed: int = 0) -> Results:
    """Two engines x three modes x 1, 2, 4, 8 ranks, 1 to 6 repeats, with a failed, an OOM and an unfinished trial."""
    random_ = random.Random(seed)  # test data, no secret
    curves: list[tuple[Curve, Sequence[Trial]]] = []
    runs: dict[tuple[str, int], Run] = {}
    for mode in ("strong-micro", "strong-global", "weak"):
        for engine, pace in (("ddp", 1.0), ("deepspeed", 1.12)):
            trials = []
            for gpus in (1, 2, 4, 8):
                micro_batch = 8 // gpus if mode == "strong-global" else 8
                trial = make_trial(engine, gpus, micro_batch=micro_batch, fraction=gpus / 16 if mode == "weak" else 1.0)
                trials.append(trial)
                identity = trial.identity()
                if (engine, mode, gpus) == ("deepspeed", "weak", 8):
                    continue  # not run yet
                if (engine, mode, gpus) == ("ddp", "strong-global", 8):
                    reason = "rank 3 raised RuntimeError: gloo: connection reset by peer"
                    trace = 'Traceback (most recent call last):\n  File "worker.py", line 88, in main\n' + reason
                    for repeat in range(3):
                        runs[identity, repeat] = failed_run(trial, "failed", reason, trace, repeat, rank=3)
                    continue
                if (engine, mode, gpus) == ("deepspeed", "strong-micro", 8):
                    reason = "rank 0 ran out of memory: 11.2 GiB asked for, 3.1 GiB free"
                    for repeat in range(3):
                        runs[identity, repeat] = failed_run(trial, "oom", reason, "torch.OutOfMemoryError", repeat)
                    continue
                for repeat in range({1: 6, 2: 3, 4: 2, 8: 3}[gpus]):
                    seconds = pace * (0.02 + 0.01 * micro_batch) * (1 + 0.05 * math.log2(gpus))
                    seconds *= random_.lognormvariate(0, 0.015)
                    runs[identity, repeat] = steady_run(trial, seconds, repeat)
            curves.append((make_curve(trials, mode), trials))
    plain = make_trial("none", 1)
    for repeat in range(3):
        runs[plain.identity(), repeat] = steady_run(plain, 0.097 * random_.lognormvariate(0, 0.01), repeat)
    curves.append((make_curve([plain]), [plain]))
    text = 'name = "rich"\n\n[sweep]\n"train.engine" = ["ddp", "deepspeed", "none"]\n'
    return make_results(curves, list(runs.values()), name="rich", repeats=3, text=text)


def write_results(results: Results, folder: Path) -> None:
    """Writes `results` as a driver and its ranks would, for tests that read a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    store.write_study(folder, results.study)
    for run in results.runs:
        run_folder = store.new_run_folder(folder, run.header)
        for rank in run.ranks:
            log = store.RankLog(run_folder, rank.rank)
            lines: list[RankLine | None] = [rank.start, *rank.phases, rank.model, *rank.steps, *rank.explained]
            lines += [*rank.epochs, *rank.resources, *rank.gradients, *rank.traffic, rank.matmul]
            lines += [rank.checkpoint, rank.error]
            for line in lines:
                if line is not None:
                    log.write(line)
            if rank.ended:
                log.write(EndLine())
            log.close()
        store.write_outcome(run_folder, run.outcome)


def error_line(message: str) -> ErrorLine:
    """The exception that ended a rank."""
    return ErrorLine(
        error_type="RuntimeError",
        message=message,
        traceback=f"Traceback (most recent call last):\nRuntimeError: {message}",
        out_of_memory=False,
        disk_full=False,
        unix_seconds=1_700_000_000.0,
    )
