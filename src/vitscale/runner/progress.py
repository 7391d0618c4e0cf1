"""Progress of a study for the user: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from vitscale.engines.names import engine_name
from vitscale.present import units
from vitscale.present.terminal import redraws
from vitscale.processes.heartbeat import COMPILING
from vitscale.store.results import Outcome
from vitscale.trial.rank_batches import in_words
from vitscale.trial.trial import Trial

_PLAIN_LINE_SECONDS = 30.0
"""Time between two plain lines on the same run."""


def describe(trial: Trial) -> str:
    """Return a trial in one short phrase: "vit-b16 ddp, 4 ranks on 2 hosts, batch 8 x2, 0.5 of the data"."""
    model = trial.model_name or "model"
    engine = engine_name(trial.train)
    name = f"{model} {engine}" if trial.train.script is None else f"{engine} {model}"
    ranks = "1 rank" if trial.world.size == 1 else f"{trial.world.size} ranks"
    if trial.world.nodes > 1:
        ranks += f" on {trial.world.nodes} hosts"
    batch = in_words(trial.train.micro_batches) if trial.train.micro_batches else str(trial.train.micro_batch)
    if trial.train.grad_accum > 1:
        batch += f" x{trial.train.grad_accum}"
    share = f", {trial.data.fraction:.3g} of the data" if trial.data.fraction < 1 else ""
    return f"{name}, {ranks}, batch {batch}{share}"


@contextmanager
def decoding_progress(console: Console) -> Iterator[Callable[[int, int], None]]:
    """Give a function to call with (images decoded so far, images in all)."""
    last_line_seconds = time.monotonic()
    live = Progress(
        TextColumn("decoding images"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )
    bar = live.add_task("")

    def on_progress(done: int, images: int) -> None:
        nonlocal last_line_seconds
        if redraws(console):
            live.start()
            live.update(bar, completed=done, total=images)
        elif time.monotonic() - last_line_seconds >= _PLAIN_LINE_SECONDS:
            last_line_seconds = time.monotonic()
            console.print(f"  decoded {done:,} of {images:,} images", soft_wrap=True, highlight=False)

    try:
        yield on_progress
    finally:
        if live.live.is_started:
            live.stop()


class StudyProgress:
    """Shows which run of how many is under way, the step rate, and the time left.

    Time left is the mean duration of the runs done in this call, times the runs left, over the runs at a time. Before
    the first run has ended it is shown as unknown. Where runs may be added (`measure.target_ci`), the number of runs
    and the time left are the most that can come.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._runs = 0
        """Runs in all: done, left, and those that may be added."""
        self._may_be_fewer = False
        """Whether `_runs` counts runs that may be added."""
        self._ended_runs = 0
        self._ended_seconds = 0.0
        """Time of the runs that have ended, together."""
        self._under_way: list[Trial] = []
        self._live: Progress | None = None
        if redraws(console):
            self._live = Progress(
                BarColumn(bar_width=20),
                MofNCompleteColumn(),
                TextColumn("{task.description}"),
                TimeElapsedColumn(),
                console=console,
            )
            self._bar = self._live.add_task("", total=0)

    def __enter__(self) -> StudyProgress:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def expect(self, remaining: int, most_added: int) -> None:
        """Set how many runs are left to do, and how many more may be added to them at most."""
        self._runs = self._ended_runs + remaining + most_added
        self._may_be_fewer = most_added > 0
        if self._live:
            self._live.update(self._bar, total=self._runs)

    def begin(self, trial: Trial, repeat: int) -> Callable[[int, str], None]:
        """Announce a run; returns a function to call with its number of steps, and its phase before the first."""
        self._under_way.append(trial)
        runs = f"up to {self._runs}" if self._may_be_fewer else f"{self._runs}"
        number = self._ended_runs + len(self._under_way)
        title = f"run {number} of {runs}: {describe(trial)}, repeat {repeat + 1}"
        return _RunProgress(self, title).update

    def end(self, trial: Trial, outcome: Outcome) -> None:
        """Note that a run has ended, and print its outcome where that is not shown otherwise."""
        self._ended_runs += 1
        if trial in self._under_way:
            self._under_way.remove(trial)
        self._ended_seconds += outcome.wall_seconds
        if outcome.kind != "completed":
            self.say(f"  {outcome.kind}: {describe(trial)}: {outcome.reason}")
        elif not self._live:
            trial_name = f": {describe(trial)}" if self._under_way else ""
            self.say(f"  completed in {units.seconds(outcome.wall_seconds)}{trial_name}")
        if self._live:
            self._live.update(self._bar, completed=self._ended_runs)

    @property
    def is_live(self) -> bool:
        """Whether there is a live line, so that no plain lines are needed."""
        return self._live is not None

    def say(self, text: str) -> None:
        """Print a plain line, above the live one where there is one."""
        console = self._live.console if self._live else self._console
        console.print(escape(text), soft_wrap=True, highlight=False)

    def show(self, text: str) -> None:
        """Show a text on the live line; with several runs at a time the last one heard of is shown."""
        if self._live:
            at_a_time = f"{len(self._under_way)} at a time; " if len(self._under_way) > 1 else ""
            self._live.update(self._bar, description=escape(f"{at_a_time}{text}; {self.time_left()}"))

    def time_left(self) -> str:
        """Return "about 20.0 min left"; see the class."""
        if not self._ended_runs:
            return "time left unknown yet"
        mean_seconds = self._ended_seconds / self._ended_runs
        runs_at_a_time = max(1, len(self._under_way))
        remaining_seconds = mean_seconds * (self._runs - self._ended_runs) / runs_at_a_time
        precision = "up to" if self._may_be_fewer else "about"
        return f"{precision} {units.seconds(remaining_seconds)} left"


class _RunProgress:
    """Progress of one run, on the study's live line or as plain lines."""

    def __init__(self, study: StudyProgress, title: str) -> None:
        """`title`: of the run, as "run 2 of 6: vit-b16 ddp, 4 ranks, batch 8, repeat 1"."""
        self._study = study
        self._title = title
        self._first_steps: _StepsAtTime | None = None
        """When the run was first seen to have done a step; its rate is from then on."""
        self._last_line_seconds = time.monotonic()
        self._printed_phases: set[str] = set()
        """Phases of start-up that a plain line has named."""
        if study.is_live:
            study.show(f"{title}: starting")
        else:
            study.say(f"{title}; {study.time_left()}")

    def update(self, steps: int, phase: str) -> None:
        """Show the number of steps done, or before the first the phase of start-up (empty: unknown)."""
        now_seconds = time.monotonic()
        if not steps:
            self._show_start_up(phase)
            return
        if self._first_steps is None:
            self._first_steps = _StepsAtTime(now_seconds, steps)
        rate = self._first_steps.rate_until(now_seconds, steps)
        text = f"step {steps}" if not rate else f"step {steps}, {rate:.3g} steps/s"
        if self._study.is_live:
            self._study.show(f"{self._title}: {text}")
        elif now_seconds - self._last_line_seconds >= _PLAIN_LINE_SECONDS:
            self._last_line_seconds = now_seconds
            self._study.say(f"  {text}")

    def _show_start_up(self, phase: str) -> None:
        """Show that the run is starting, and its phase; as a plain line only where something is compiled."""
        if self._study.is_live:
            self._study.show(f"{self._title}: starting: {phase}" if phase else f"{self._title}: starting")
        elif phase.startswith(COMPILING) and phase not in self._printed_phases:
            # Printed at once, and once each: nothing else will be printed for minutes.
            self._printed_phases.add(phase)
            self._study.say(f"  starting: {phase}")


class _StepsAtTime(NamedTuple):
    """The steps that a run had done at one time."""

    seconds: float
    """On the monotonic clock."""
    steps: int

    def rate_until(self, seconds: float, steps: int) -> float | None:
        """Return the steps per second from this time to another; None where no time has passed, or no step was done."""
        if seconds <= self.seconds or steps <= self.steps:
            return None
        return (steps - self.steps) / (seconds - self.seconds)
