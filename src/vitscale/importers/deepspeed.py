"""Reads DeepSpeed's logs with `wall_clock_breakdown`: from one rank, from several in one file, or one file per rank.

Steps are made of each rank's timers: how long each took, and where its time went.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from vitscale.errors import RequestError, shown
from vitscale.importers import contents
from vitscale.importers.contents import BrokenLines, ImportOptions, LogContents, LogRank, LogRun, TrialSetting
from vitscale.importers.deepspeed_lines import (
    MOST_MICRO_STEPS,
    Broken,
    LogFacts,
    Times,
    rate_of,
    timers,
    without_colours,
)
from vitscale.importers.records import step_line
from vitscale.present.units import listed
from vitscale.store.records import ExplainedLine, PhaseName, StepLine
from vitscale.store.results import ImportedFile

MOST_EXPLAINED = 2000
"""Most steps of a rank that are explained; from a longer run, evenly spaced ones."""
WARMUP_STEPS = 1
"""The first step of a log builds kernels and allocates memory; further slow ones are found by the analysis."""
_PAUSE = 0.2
"""Share of a step's time: a gap that is longer than usual by more is a pause (evaluation, checkpoint, lost line)."""
_ROUNDING = 0.005
"""Seconds by which a timestamp and the timers may disagree."""
UNTOLD = {
    "data_wait": "DeepSpeed's timers leave out what lies between two steps",
    "h2d": "DeepSpeed's timers leave out what lies between two steps",
    "launch_gaps": "DeepSpeed's timers do not tell when the device is idle",
}
ONE_RANK = (
    "the exchange of gradients on rank {} holds the transfer and the wait for the slowest rank: without the times of "
    "the others they cannot be told apart"
)


@dataclass
class RankTimes:
    """One rank's timers in order; None stands for a step whose line is broken."""

    steps: list[tuple[Times, tuple[Times, ...]] | None] = field(default_factory=list)
    """Each step, with its micro-steps where all of them were printed."""
    broken_at: dict[int, float | None] = field(default_factory=dict)
    """Step number to the time of its broken line."""
    micro: list[Times] = field(default_factory=list)
    """Micro-steps of the step that is not over yet."""
    rates: dict[int, float] = field(default_factory=dict)
    """Optimizer step to the samples/s of all ranks in it, where the throughput timer printed them."""

    def take(self, timer: Times | Broken) -> None:
        """Takes the next line."""
        if timer.micro:
            if isinstance(timer, Times):
                self.micro.append(timer)
        elif isinstance(timer, Broken):
            self.broken_at[len(self.steps)] = timer.unix_seconds
            self.steps.append(None)
            self.micro = []
        else:
            self.steps.append((timer, tuple(self.micro)))
            self.micro = []


@dataclass(frozen=True)
class _Timed:
    number: int
    times: Times
    micro: tuple[Times, ...]
    gap: float | None
    """Seconds between the end of the step before and the first timer of this one; null where no time was printed."""


def step_lines(
    rank: RankTimes, images: int, grad_accum: int, untold: str
) -> tuple[tuple[StepLine, ...], tuple[ExplainedLine, ...]]:
    """The steps of one rank, and where their time went.

    As in `StepLine`, a step lasts from the previous step's line to its own. So it includes what lies between two steps
    (data, Python), which the timers leave out. Where lines carry no time it is the timers' sum. A step after a pause is
    kept, but marked as settling.

    Args:
        rank: its timers.
        images: images of one step of one rank.
        grad_accum: micro-steps of a step.
        untold: why waiting and transfer cannot be told apart; empty where they can.
    """
    timed = _timed(rank)
    gaps = [step.gap for step in timed if step.gap is not None]
    usual = statistics.median(gaps) if gaps else 0.0
    stride = max(1, -(-len(timed) // MOST_EXPLAINED))
    steps, explained = [], []
    for step in timed:
        gap = usual if step.gap is None else step.gap
        paused = step.gap is not None and gap > usual + _PAUSE * step.times.total
        # The first line of a log has no step before it.
        seconds = step.times.total + (gap if step.number else 0.0)
        steps.append(step_line(step.number, seconds, images, warmup=step.number < WARMUP_STEPS, settling=paused))
        if step.number % stride == 0 and not paused:
            micro = step.micro if len(step.micro) == grad_accum and grad_accum > 1 else (step.times,)
            explained.append(_explained(step, micro, seconds, untold))
    return tuple(steps), tuple(explained)


def _timed(rank: RankTimes) -> list[_Timed]:
    timed_steps = []
    before: float | None = None
    for number, step in enumerate(rank.steps):
        if step is None:
            before = rank.broken_at.get(number)
            continue
        times, micro = step
        gap = None
        if before is not None and times.unix_seconds is not None:
            gap = times.unix_seconds - before - times.total
            # A negative gap: the clock was set, or lines were held back.
            gap = None if gap < -_ROUNDING else max(0.0, gap)
        timed_steps.append(_Timed(number, times, micro, gap))
        before = times.unix_seconds
    return timed_steps


def _explained(step: _Timed, micro: Sequence[Times], seconds: float, untold: str) -> ExplainedLine:
    """The parts in their order: between the steps, then forward, backward and the exchange of each micro-step."""
    at = max(0.0, seconds - step.times.total)
    # Micro-steps are printed with two decimals each, so they are scaled to add up to the step's own figures.
    scale = (step.times.total - step.times.step) / (sum(times.total - times.step for times in micro) or 1.0)
    phases: list[tuple[PhaseName, float, float]] = []
    exchanges: list[tuple[float, float]] = []
    for times in micro:
        forward = at + scale * times.forward
        computed = forward + scale * times.inner
        exchanged = computed + scale * (times.allreduce or 0.0)
        phases += [("forward", at, forward), ("backward", forward, exchanged)]
        if times.allreduce:
            exchanges.append((computed, exchanged))
        at = exchanged
    phases.append(("optimizer", at, seconds))
    return ExplainedLine(
        step=step.number,
        block=0,
        device="cuda",
        seconds=seconds,
        phases=tuple(phases),
        idle=tuple(exchanges),
        collectives=tuple(("world", "all_reduce", start, end) for start, end in exchanges),
        unknown=UNTOLD | ({"wait": untold, "wire": untold} if untold else {}),
    )


_UNKNOWN_GPU = "unknown GPU"
_RANK_IN_NAME = re.compile(r"rank[-_.]?(\d{1,6})(?!\d)", re.IGNORECASE)
_BEGINS = "DeepSpeed info: version="


@dataclass
class _Part:
    """One run in one file; a log that was appended to holds several."""

    files: tuple[ImportedFile, ...]
    gpus: int | None
    """What the user says of its file."""
    facts: LogFacts = field(default_factory=LogFacts)
    ranks: dict[int, RankTimes] = field(default_factory=dict)
    pipeline: bool = False
    """Whether DeepSpeed's pipeline engine printed it, which times no optimizer step by parts."""

    @property
    def has_steps(self) -> bool:
        return any(rank.rates or any(step is not None for step in rank.steps) for rank in self.ranks.values())

    @property
    def began(self) -> float | None:
        """When its first step ended, in Unix seconds; None where no time was printed."""
        times = (step[0].unix_seconds for rank in self.ranks.values() for step in rank.steps[:1] if step)
        return next((unix_seconds for unix_seconds in times if unix_seconds is not None), None)


def read(paths: Sequence[Path], options: ImportOptions) -> LogContents:
    """The runs of all files. Files of the same world that tell of different ranks are one run.

    Raises:
        RequestError: a log does not tell how many GPUs it is of, or tells another number than --gpus.
        StoreError: a file cannot be read.
    """
    parts: list[_Part] = []
    problems: list[str] = []
    notes: dict[str, None] = {}
    for number, path in enumerate(paths):
        told = BrokenLines(path.name)
        own = _parts(path, told, options.of_file(number).gpus)
        parts += [part for part in own if part.has_steps]
        problems += told.told()
        if own[-1].pipeline and not any(part.has_steps for part in own):
            what = f"{path.name}: its timers are a pipeline's"
            problems.append(f"{what}: say --format train-log, which reads rank 0's lines of iter time")
    runs: list[LogRun] = []
    for group in _one_run_each(parts):
        run, said = _run(group, replace(options, gpus=group[0].gpus), len(runs))
        runs.append(run)
        notes |= dict.fromkeys(said)
    return LogContents(tuple(runs), tuple(notes), tuple(problems))


def _parts(path: Path, told: BrokenLines, gpus: int | None) -> list[_Part]:
    files = (contents.identified(path),)
    match = _RANK_IN_NAME.search(path.name)
    own = int(match[1]) if match else 0
    parts = [_Part(files, gpus)]
    for number, raw, whole in contents.lines(path):
        text = without_colours(raw)
        if _BEGINS in text and parts[-1].has_steps:
            parts.append(_Part(files, gpus))  # started again, into the same file
        elif _BEGINS in text:
            parts[-1].facts.anew()
        part = parts[-1]
        part.facts.take(text)
        part.pipeline |= "iter time (s): " in text or "| pipe_" in text
        if (printed := rate_of(text)) is not None:
            part.ranks.setdefault(own, RankTimes()).rates.setdefault(*printed)
        for timer in timers(text):
            if isinstance(timer, Broken):
                told.line(number, timer.why, "broken" if whole else "cut-off")
                if not whole:
                    continue  # the last line of the file: no step comes after it
            rank = own if timer.rank is None else timer.rank
            part.ranks.setdefault(rank, RankTimes()).take(timer)
    return parts


def _one_run_each(parts: Iterable[_Part]) -> list[list[_Part]]:
    """Groups parts into runs: parts of one run have the same world size, and tell each rank only once."""
    groups: list[list[_Part]] = []
    for part in parts:
        home = next((group for group in groups if _belongs(part, group)), None)
        if home is None:
            groups.append([part])
        else:
            home.append(part)
    return groups


def _belongs(part: _Part, group: Sequence[_Part]) -> bool:
    taken = {rank for other in group for rank in other.ranks}
    sizes = [next(iter(each.facts.world_sizes().values()), None) for each in (part, *group)]
    known = {size or each.gpus for size, each in zip(sizes, (part, *group), strict=True)} - {None}
    begins = [each.began for each in (part, *group)]
    times = [each for each in begins if each is not None]
    # Ranks end their first step within the same collective; the hour allows for clocks that disagree.
    together = not times or max(times) - min(times) < 3600
    return not taken & part.ranks.keys() and len(known) <= 1 and together


def _run(group: Sequence[_Part], options: ImportOptions, number: int) -> tuple[LogRun, list[str]]:
    facts = [part.facts for part in group]
    name = group[0].files[0].name
    ranks = {rank: times for part in group for rank, times in part.ranks.items() if any(times.steps)}
    of_rates = not ranks  # without wall_clock_breakdown
    ranks = ranks or {rank: times for part in group for rank, times in part.ranks.items() if times.rates}
    gpus, notes = _gpus(facts, options, name)
    if beyond := [rank for rank in sorted(ranks) if rank >= gpus]:
        notes.append(f"{name} is of {gpus} GPUs: times of rank {listed(beyond)} are left out")
        ranks = {rank: times for rank, times in ranks.items() if rank < gpus}
    if not ranks:
        raise RequestError(f"{shown(name)} tells of no rank of its world of {gpus}")
    accum = next((n for f in facts if 0 < (n := f.numbers.get("grad_accum", 0)) <= MOST_MICRO_STEPS), 1)
    micro_batch = next((known for f in facts if (known := f.micro_batch(gpus, accum)) is not None), None)
    nodes = next((known for f in facts if (known := f.nodes(gpus)) is not None), None)
    hosts_told = nodes is not None
    if nodes is None:
        nodes = 1
        if gpus > 1:
            notes.append(f"{name} does not tell on how many hosts its {gpus} GPUs were: one is assumed")
    hosts = {rank: host for f in facts for rank, host in f.hosts.items()}
    untold = ONE_RANK.format(listed(sorted(ranks))) if len(ranks) < gpus and not of_rates else ""
    images = (micro_batch or options.micro_batch or 0) * accum
    own: list[LogRank] = []
    for rank in sorted(ranks):
        steps, explained = step_lines(ranks[rank], images, accum, untold)
        if of_rates:
            each = max(1, images)  # without a batch a step stands for one image per GPU
            steps = tuple(step_line(step, gpus * each / rate, each) for step, rate in sorted(ranks[rank].rates.items()))
        host = hosts.get(rank)
        own.append(LogRank(rank, device=_UNKNOWN_GPU, host=host, steps=steps, explained=explained))
    if of_rates:
        notes.append(f"{name} tells samples/s alone (CurrSamplesPerSec), which leave out what lies between two steps")
    if untold:
        notes.append(f"{name} tells of rank {listed(sorted(ranks))} of {gpus}: {untold}")
    timers_ran = not of_rates or any(f.flags.get("breakdown") for f in facts)  # else nobody knows
    setting = TrialSetting(
        gpus=gpus,
        nodes=nodes,
        micro_batch=micro_batch,
        grad_accum=accum,
        engine="deepspeed",
        zero_stage=next((f.numbers["zero_stage"] for f in facts if "zero_stage" in f.numbers), None),
        precision=next((f.precision for f in facts if f.precision is not None), None),
    )
    run = LogRun(
        setting=setting,
        name=f"{name} {number}",
        files=tuple(dict.fromkeys(file for part in group for file in part.files)),
        ranks=tuple(own),
        versions={key: value for f in reversed(facts) for key, value in f.versions.items()},
        synchronised=any(f.synchronised for f in facts) if timers_ran else None,
        started_unix_seconds=max(0.0, group[0].began or 0.0),
        warmup_steps=0 if of_rates else WARMUP_STEPS,
        one_host_told=hosts_told,
    )
    return run, notes


def _gpus(facts: Iterable[LogFacts], options: ImportOptions, name: str) -> tuple[int, list[str]]:
    """The world size, and a note where the log contradicts itself.

    Raises:
        RequestError: nobody tells it, or --gpus is another.
    """
    said: dict[str, int] = {}
    for fact in facts:
        said = fact.world_sizes() | said
    told = next((said[key] for key in ("world_size", "NCCL's nranks", "train_batch_size") if key in said), None)
    if told is not None and options.gpus is not None and options.gpus != told:
        raise RequestError(f"--gpus is {options.gpus}, but {shown(name)} is of {told}", next_step="Leave --gpus out")
    gpus = told or options.gpus
    if gpus is None:
        how = f"Give it: --gpus 8, of all ranks together; for several files {contents.EACH_GPUS}"
        raise RequestError(f"{shown(name)} does not tell its world size", next_step=how)
    others = [f"{key} {size}" for key, size in said.items() if size != gpus]
    return gpus, [f"{name} is taken for one of {gpus} GPUs; it also says {listed(others)}"] if others else []
