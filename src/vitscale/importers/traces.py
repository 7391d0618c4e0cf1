"""Reads traces of the PyTorch profiler: each file is one rank, and the files of a job are one run."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vitscale.base.forks import spread
from vitscale.engines import ENGINES
from vitscale.errors import RequestError, StoreError, shown
from vitscale.importers.contents import MOST_GPUS, LogContents, LogRank, LogRun, Options, Setting, identified
from vitscale.importers.records import step_line
from vitscale.importers.step_traces import exported_run
from vitscale.present.units import listed
from vitscale.profiles import kernels, step_trace, timeline, trace_figures
from vitscale.profiles.trace_figures import DeviceTime, TimeShares, product_rate, step_spans, traffic_lines
from vitscale.profiles.trace_file import Group, Product, Trace, read_trace
from vitscale.store.reading import without_collection
from vitscale.store.records import ExplainedLine, TrafficLine
from vitscale.store.results import ImportedFile

_IN_THE_NAME = re.compile(
    r"(?:(?<![A-Za-z])rank|Rank|(?<![A-Z])RANK)[-_ =.]?(\d{1,12})(?!\d)|\[(\d{1,12})\]"  # longer: the time of day
)
_LONG = 20_000_000
"""Total bytes of files from which on they are read in parallel."""
ONE_RANK = (
    "a collective of rank {} holds the transfer and the wait for the slowest rank: without the traces of the others "
    "they cannot be told apart"
)
_PROFILED = "every step of a trace was profiled, so its time has the profiler's cost in it, which a trace cannot tell"
_HOSTS = "a trace does not tell how ranks were spread over hosts: one host is assumed"


@dataclass(frozen=True)
class RankTrace:
    """What one file holds."""

    file: ImportedFile
    rank: int | None
    world_size: int | None
    device: str | None
    trace_id: str | None
    versions: dict[str, str | None]
    groups: tuple[Group, ...]
    started_unix_seconds: float
    found_by: str
    lines: tuple[ExplainedLine, ...]
    traffic: tuple[TrafficLine, ...]
    whole: TimeShares
    """Time shares from the device's first event to its last."""
    steps: tuple[tuple[int, TimeShares, bool], ...]
    """(Number, time shares, whether the trace holds all of it) of each step."""
    kernel_seconds: dict[str, float]
    flops_per_second: float | None
    """Rate that matrix products achieved while the device computed."""
    micro_batch: int | None
    passes: int
    """Passes of `micro_batch` images in each step, whose gradients add up; 0 where steps with shapes do not tell."""
    engine: str | None
    communicates: bool
    """Whether collectives of several ranks ran."""
    least_world: int
    """The fewest ranks that its process groups and the sizes of its collectives allow."""
    devices: int
    """Number of GPUs that something ran on."""
    unknown: dict[str, int]

    def may_train_with(self, other: RankTrace) -> bool:
        """Whether both may be of one job: the process groups that each names itself in hold the other too."""
        if (self.device, self.world_size) != (other.device, other.world_size):
            return False
        if self.rank == other.rank:
            return self.groups == other.groups
        own, others = (
            {group.ranks for group in mine.groups if theirs.rank in group.ranks}
            for mine, theirs in ((self, other), (other, self))
        )
        return own == others

    def as_json(self, rank: int) -> dict[str, Any]:
        """Its figures over the whole trace."""
        return {
            "rank": rank,
            "file": self.file.name,
            "device": self.device,
            "world_size": self.world_size,
            **self.whole.as_json(),
            "kernel_seconds": self.kernel_seconds,
            "achieved_flops_per_second": self.flops_per_second,
            "steps_told": self.found_by,
        }


def read(paths: Sequence[Path], options: Options) -> LogContents:
    """The runs that these files are traces of.

    Raises:
        RequestError: two files are of one rank of one job, or a rank cannot be in its job.
        StoreError: a file cannot be read, is no trace, or holds nothing that ran on a GPU.
    """
    own = {path for path in paths if step_trace.is_step_trace(path)}
    ranks = _read_all([path for path in paths if path not in own])
    jobs = [_numbered(job, options) for job in _jobs(ranks)]
    labels = _labels(jobs, options)
    runs: list[LogRun] = []
    notes, problems = [_PROFILED] if jobs else [], list[str]()
    data: dict[str, list[Any]] = {"ranks": [], "steps": []}
    worlds = [_world(job, options) for job in jobs]
    for number, (job, world) in enumerate(zip(jobs, worlds, strict=True)):
        runs.append(_run(job, world, labels[number], options))
        for rank, traced in job:
            data["ranks"].append({"job": number, **traced.as_json(rank)})
            data["steps"] += [
                {"job": number, "rank": rank, "step": step, "whole": whole, **shares.as_json()}
                for step, shares, whole in traced.steps
            ]
        notes += _notes_on(job, world)
        problems += _problems_of(job)
    if any(world.ranks > 1 for world in worlds):
        notes.append(_HOSTS)
    for path in sorted(own):
        runs.append(exported_run(path, data, len(runs)))
        notes.append(f"{path.name}: explained steps as vitscale wrote them; others are not in it")
    return LogContents(tuple(runs), tuple(dict.fromkeys(notes)), tuple(problems), data)


@dataclass(frozen=True)
class _World:
    """How many ranks a job has."""

    ranks: int
    """As told, else the fewest that can be."""
    known: bool
    """Whether a file or the user tells it, or no collective asks for others than these."""
    lacks_some: bool
    """Whether there are ranks without a file."""


def _world(job: Sequence[tuple[int, RankTrace]], options: Options) -> _World:
    told = options.gpus or job[0][1].world_size
    fewest = max(len(job), job[-1][0] + 1, *(rank.least_world for _, rank in job))
    communicates = any(rank.communicates for _, rank in job)
    ranks = told or fewest
    # Collectives of one rank are none: where they ran and nothing counts their ranks, the others lack a file.
    return _World(ranks, bool(told) or not communicates, len(job) < ranks or (not told and communicates and ranks == 1))


def _labels(jobs: Sequence[Sequence[tuple[int, RankTrace]]], options: Options) -> list[str]:
    """The device of each job, with a number where jobs on one device are different trainings.

    They are taken for one training on several rank counts where engine and micro-batch are known and the same.
    """
    trainings: list[tuple[object, ...]] = []
    worlds: set[tuple[object, ...]] = set()
    for number, job in enumerate(jobs):
        engine = next(filter(None, (rank.engine for _, rank in job)), None)
        batch = next(filter(None, (rank.micro_batch for _, rank in job)), None)
        training: tuple[object, ...] = (job[0][1].device, engine, batch or options.micro_batch)
        world = (*training, job[0][1].world_size)
        if None in world or world in worlds:
            training = (job[0][1].device, number)
        worlds.add(world)
        trainings.append(training)
    labels = []
    for training in trainings:
        alone = all(other == training for other in trainings if other[0] == training[0])
        labels.append(f"{training[0] or 'unknown GPU'}" + ("" if alone else f", job {trainings.index(training) + 1}"))
    return labels


def _read_all(paths: Sequence[Path]) -> list[RankTrace]:
    long = sum(path.stat().st_size for path in paths if path.is_file()) > _LONG
    return spread(rank_trace, paths, fewest=2 if long else len(paths) + 1)


@without_collection()
def rank_trace(path: Path) -> RankTrace:
    """Reads what one file tells.

    Raises:
        StoreError: it cannot be read, is no trace, or holds nothing that ran on a GPU.
    """
    file = identified(path)
    trace = read_trace(path)
    device = DeviceTime(trace)
    if device.span is None:
        what = f"nothing in {shown(path.name)} ran on a GPU"
        raise StoreError(what, next_step="Profile with ProfilerActivity.CUDA, with no other profiler attached")
    steps = trace_figures.steps_of(trace)
    named = _IN_THE_NAME.search(path.name)
    told = int(named[1] or named[2]) if named else None
    micro_batch, passes = _passes(trace, steps)
    sizes = [call.ranks or 0 for call in trace.calls]
    counts = [1, *sizes, *(max(group.ranks, default=0) + 1 for group in trace.groups)]
    return RankTrace(
        file=file,
        rank=trace.rank if trace.rank is not None else told,
        world_size=trace.world_size if 0 < (trace.world_size or 0) <= MOST_GPUS else None,
        device=trace.device,
        trace_id=trace.trace_id,
        versions=trace.versions,
        groups=trace.groups,
        started_unix_seconds=max(0.0, trace.started_unix_seconds or 0.0),
        found_by=steps.found_by,
        lines=_explained(trace, steps),
        traffic=traffic_lines(trace, steps),
        whole=device.shares(device.span),
        steps=tuple((number, device.shares(span), whole) for number, span, whole in step_spans(trace, steps)),
        kernel_seconds=dict(sorted(device.kernel_seconds.items(), key=lambda pair: -pair[1])),
        flops_per_second=product_rate(trace, steps, device),
        micro_batch=micro_batch,
        passes=passes,
        engine=_engine(trace),
        communicates=kernels.COMMUNICATION in device.kernel_seconds or max(sizes, default=0) > 1,
        least_world=max(count for count in counts if count <= MOST_GPUS),
        devices=trace.devices,
        unknown=dict(trace.unknown),
    )


def _explained(trace: Trace, steps: trace_figures.Steps) -> tuple[ExplainedLine, ...]:
    events = [*(event for event in trace.events if event.kind != "annotation"), *steps.annotations]
    world = trace.world_size or max((call.ranks or 1 for call in trace.calls), default=1)
    lines = timeline.steps_on_cuda(
        events,
        steps.numbers,
        0,
        world,
        first_is_whole=steps.first_is_whole,
        first_begin_ns=steps.first_begin_ns,
    )
    return tuple(lines)


def _passes(trace: Trace, steps: trace_figures.Steps) -> tuple[int | None, int]:
    """(Images of one forward pass, passes of each step), by the first convolution of a step that has few channels.

    None: no shapes are recorded. 0 passes: steps do not agree, or it is not clear what a step trains on. Passes are of
    accumulated gradients if each has its own backward pass and no update comes between: a teacher's, a discriminator's
    or a loss's use of the layer has not. In a backward function the layer runs again for what was not kept.
    """
    updates = (event for event in steps.annotations if event.name == f"{timeline.PHASE_PREFIX}optimizer")
    moments: list[tuple[int, int, Product | Literal["backward", "update"]]] = [
        *((event.start_ns, event.end_ns, "backward") for event in trace.events if event.kind == "operator"),
        *((event.start_ns, event.end_ns, "update") for event in updates),
        *((product.start_ns, product.start_ns, product) for product in trace.products if _is_of_images(product)),
    ]
    passes: list[tuple[Product, int, int]] = []
    backwards = updated = reached = 0
    for start, end, what in sorted(moments, key=lambda moment: moment[:2]):
        if what == "backward":
            backwards, reached = backwards + 1, max(reached, end)
        elif what == "update":
            updated += 1
        elif start >= reached:
            passes.append((what, backwards, updated))
    if not passes or steps.found_by == trace_figures.UNTOLD:
        return (passes[0][0].shapes[0][0] if passes else None), 1
    spans = sorted((event.start_ns, event.end_ns) for event in steps.annotations if event.name == timeline.STEP)
    told = {  # a first step that may have begun before the trace is not recorded
        _passes_of([each for each in passes if start <= each[0].start_ns < end])
        for start, end in spans[not steps.first_is_whole :] or spans
    }
    return told.pop() if len(told) == 1 else (None, 0)


def _is_of_images(product: Product) -> bool:
    """Whether it is a model's first convolution; one of each channel, or to no more channels, is a blur or the like."""
    if product.name != "aten::convolution" or not len(product.shapes[0]) == len(product.shapes[1]) == 4:
        return False
    return product.shapes[0][1] <= 4 and product.shapes[1][0] > product.shapes[0][1] == product.shapes[1][1]


def _passes_of(step: Sequence[tuple[Product, int, int]]) -> tuple[int | None, int]:
    """(Images, passes) of one step, from its convolutions of images with the backward functions and updates before."""
    first = step[0][0] if step else None
    same = [each for each in step if first and each[0].shapes[1] == first.shapes[1]]
    batches = {product.shapes[0][0] for product, _, _ in same}
    alternate = len({backwards for _, backwards, _ in same}) == len(same)
    if len(batches) != 1 or not alternate or len({updated for _, _, updated in same}) > 1:
        return None, 0
    return batches.pop(), len(same)


def _engine(trace: Trace) -> str | None:
    names = {event.name for event in trace.events if event.kind == "annotation"}
    for engine, facts in ENGINES.items():
        if facts.marked_by and any(name.startswith(facts.marked_by) for name in names):
            return engine
    return None


def _jobs(ranks: Iterable[RankTrace]) -> list[list[RankTrace]]:
    """Groups files into jobs by device, world and process groups; where a rank occurs twice in one, by the trace's id.

    Where no two ids are the same, each rank's first file is of one job, each rank's second of the next, and so on. A
    file that tells no rank, itself or in its name, is a job of its own.
    """
    alike: list[list[RankTrace]] = []
    for rank in ranks:
        fits = (some for some in alike if rank.rank is not None and all(rank.may_train_with(other) for other in some))
        if (job := next(fits, None)) is None:
            alike.append(job := [])
        job.append(rank)
    jobs = []
    for some in alike:
        by_id: dict[str | None, list[RankTrace]] = {}
        for rank in some:
            by_id.setdefault(rank.trace_id, []).append(rank)
        if _repeated(some) is None:
            jobs.append(some)
        else:
            jobs += (_windows(some) if len(by_id) == len(some) else []) or list(by_id.values())
    for job in jobs:
        if (twice := _repeated(job)) is not None:
            raise RequestError(
                f"{shown(twice[0].file.name)} and {shown(twice[1].file.name)} are both of rank {twice[0].rank} "
                "of one job",
                next_step="Import one of them, or each into a folder of its own",
            )
    return jobs


def _windows(ranks: Iterable[RankTrace]) -> list[list[RankTrace]]:
    """The i-th files of all ranks together, by when they began; none if ranks differ in files or in step numbers."""
    of_rank: dict[int | None, list[RankTrace]] = {}
    for rank in sorted(ranks, key=lambda rank: rank.started_unix_seconds):
        of_rank.setdefault(rank.rank, []).append(rank)
    if len({len(files) for files in of_rank.values()}) > 1:
        return []
    windows = [list(window) for window in zip(*of_rank.values(), strict=True)]
    numbers = ([{number for number, _, _ in rank.steps} for rank in window] for window in windows)
    return windows if all(set.intersection(*of_window) for of_window in numbers) else []


def _repeated(ranks: Sequence[RankTrace]) -> tuple[RankTrace, RankTrace] | None:
    seen: dict[int | None, RankTrace] = {}
    for rank in ranks:
        if (other := seen.setdefault(rank.rank, rank)) is not rank:
            return other, rank
    return None


def _numbered(job: Sequence[RankTrace], options: Options) -> list[tuple[int, RankTrace]]:
    world = options.gpus or job[0].world_size
    numbered = sorted(((rank.rank or 0, rank) for rank in job), key=lambda pair: pair[0])
    most = min(world or MOST_GPUS, MOST_GPUS)
    for number, rank in numbered:
        if not 0 <= number < most:
            raise RequestError(
                f"{shown(rank.file.name)} is of rank {number}",
                valid=[f"0 to {most - 1:,}, of {most:,} ranks"],
                next_step="Say how many ranks there were with --gpus" if world is None else "",
            )
    return numbered


def _run(job: Sequence[tuple[int, RankTrace]], world: _World, label: str, options: Options) -> LogRun:
    first = job[0][1]
    micro_batch, passes = next(((rank.micro_batch, rank.passes) for _, rank in job if rank.micro_batch), (None, 1))
    images = (micro_batch or options.micro_batch or 0) * passes
    return LogRun(
        setting=Setting(
            gpus=world.ranks,
            micro_batch=micro_batch,
            grad_accum=passes,
            engine=next(filter(None, (rank.engine for _, rank in job)), None),
            series=label,
        ),
        name=label,
        files=tuple(rank.file for _, rank in job),
        ranks=tuple(_log_rank(number, rank, images, some=world.lacks_some) for number, rank in job),
        versions=dict(first.versions),
        started_unix_seconds=min(rank.started_unix_seconds for _, rank in job),
    )


def explained(number: int, rank: RankTrace, *, some: bool) -> tuple[ExplainedLine, ...]:
    """The steps of a rank, as its record has them.

    Args:
        number: number of the rank.
        rank: its trace.
        some: whether other ranks of its world have none.
    """
    untold = dict.fromkeys(("wait", "wire"), ONE_RANK.format(number)) if some else {}
    return tuple(line.model_copy(update={"unknown": untold | line.unknown}) for line in rank.lines)


def _log_rank(number: int, rank: RankTrace, images: int, *, some: bool) -> LogRank:
    lines = explained(number, rank, some=some)
    steps = tuple(  # an untold trace may be of any number of steps: its parts are known, no step's time
        step_line(line.step, line.seconds, images) for line in lines if rank.found_by != trace_figures.UNTOLD
    )
    return LogRank(number, rank.device, None, steps, explained=lines, traffic=rank.traffic)


def _notes_on(job: Sequence[tuple[int, RankTrace]], world: _World) -> Iterable[str]:
    for rank in {rank.found_by: rank for _, rank in job}.values():
        yield f"{rank.file.name}: steps are told {rank.found_by}"
    if not world.known and world.ranks > 1:
        fewest = f"{world.ranks} are taken, the fewest that files, ranks and process groups allow"
        yield f"how many ranks there were is not told (--gpus): {fewest}"
    if len(job) < world.ranks:
        yield f"of {world.ranks} ranks there are {len(job)}: waiting and transfer cannot be told apart, nor who is slow"
    elif world.lacks_some:
        yield (
            f"{job[0][1].file.name}: collectives ran, and how many ranks there were is not told (--gpus): waiting and "
            "transfer cannot be told apart, and what stands for all GPUs is of this one"
        )
    several = world.ranks > 1 or world.lacks_some
    if any(not rank.traffic or rank.traffic[0].collectives is None for _, rank in job) and several:
        yield "what collectives sent is not recorded: traffic is unavailable"
    for _, rank in job:
        if rank.rank is None and (several or rank.communicates):
            yield f"{rank.file.name} does not tell its rank: it stands alone (ranks may be named in files: rank0.json)"
        if rank.passes > 1:
            passes = f"{rank.passes} passes of {rank.micro_batch} images"
            yield f"{rank.file.name}: a step is {passes}, whose gradients add up"
        if rank.passes == 0:
            yield (
                f"{rank.file.name}: what a step trains on is not clear, for the number of its passes changes, or there "
                "is no backward pass between two of them (--micro-batch: images of a whole step and GPU)"
            )
        if rank.devices > 1:
            yield f"{rank.file.name}: {rank.devices} GPUs are in one file; together they stand as one, busy when any is"
        if seconds := rank.kernel_seconds.get(kernels.UNKNOWN, 0.0):
            share = 100 * seconds / sum(rank.kernel_seconds.values())
            yield f"{rank.file.name}: kernels of no known kind took {seconds:.3g} s, {share:.2g} % of what ran"


def _problems_of(job: Sequence[tuple[int, RankTrace]]) -> Iterable[str]:
    for _, rank in job:
        if rank.unknown:
            yield f"{rank.file.name}: left out {listed([f'{count:,} {what}' for what, count in rank.unknown.items()])}"
        if lost := [why for line in rank.lines if (why := line.unknown.get(kernels.COMMUNICATION))]:
            steps = f"{len(lost)} of {len(rank.lines)} steps"
            yield f"{rank.file.name}: in {steps} the device may have idled less than is told: {lost[0]}"
