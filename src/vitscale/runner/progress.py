"""What a user sees while a study runs: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

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


def describe(trial: Trial) -> str:
    """A trial in one short phrase."""
    accumulation = f" x{trial.train.grad_accum}" if trial.train.grad_accum > 1 else ""
    share = f", {trial.data.fraction:.3g} of the data" if trial.data.fraction < 1 else ""
    named = (trial.model_name or "model", engine_name(trial.train))
    what = " ".join(named if trial.train.script is None else reversed(named))
    ranks = f"{trial.world.size} rank{'s' if trial.world.size > 1 else ''}"
    ranks += f" on {trial.world.nodes} hosts" if trial.world.nodes > 1 else ""
    batch = in_words(trial.train.micro_batches) if trial.train.micro_batches else str(trial.train.micro_batch)
    return f"{what}, {ranks}, batch {batch}{accumulation}{share}"


@contextmanager
def decoding_progress(console: Console) -> Iterator[Callable[[int, int], None]]:
    """Gives a function to call with (images decoded so far, images in all)."""
    spoken = time.monotonic()
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
        nonlocal spoken
        if redraws(console):
            live.start()
            live.update(bar, completed=done, total=images)
        elif time.monotonic() - spoken >= _PLAIN_LINE_SECONDS:
            spoken = time.monotonic()
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
        self._may_be_fewer = False
        self._done = 0
        self._spent_seconds = 0.0
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

    def _say(self, text: str) -> None:
        (self._live.console if self._live else self._console).print(escape(text), soft_wrap=True, highlight=False)

    def expect(self, left: int, added: int) -> None:
        """Sets how many runs are left, and how many more may be added to them."""
        self._runs = self._done + left + added
        self._may_be_fewer = added > 0
        if self._live:
            self._live.update(self._bar, total=self._runs)

    def _left(self) -> str:
        if not self._done:
            return "time left unknown yet"
        how = "up to" if self._may_be_fewer else "about"
        seconds = self._spent_seconds / self._done * (self._runs - self._done) / max(1, len(self._under_way))
        return f"{how} {units.seconds(seconds)} left"

    def _show(self, text: str) -> None:
        """Shows a text on the live line; with several runs at a time the last one heard of is shown."""
        several = f"{len(self._under_way)} at a time; " if len(self._under_way) > 1 else ""
        if self._live:
            self._live.update(self._bar, description=escape(f"{several}{text}; {self._left()}"))

    def begin(self, trial: Trial, repeat: int) -> Callable[[int, str], None]:
        """Announces a run; returns a function to call with its number of steps, and its phase before the first."""
        of = f"up to {self._runs}" if self._may_be_fewer else f"{self._runs}"
        self._under_way.append(trial)
        what = f"run {self._done + len(self._under_way)} of {of}: {describe(trial)}, repeat {repeat + 1}"
        first: tuple[float, int] | None = None
        spoken = time.monotonic()
        told: set[str] = set()
        if self._live:
            self._show(f"{what}: starting")
        else:
            self._say(f"{what}; {self._left()}")

        def on_progress(steps: int, phase: str) -> None:
            nonlocal first, spoken
            now = time.monotonic()
            if not steps:
                if self._live:
                    self._show(f"{what}: starting: {phase}" if phase else f"{what}: starting")
                elif phase.startswith(COMPILING) and phase not in told:
                    # Said at once, and once each: nothing else will be said for minutes.
                    told.add(phase)
                    self._say(f"  starting: {phase}")
                return
            if first is None:
                first = (now, steps)
            rate = (steps - first[1]) / (now - first[0]) if now > first[0] and steps > first[1] else None
            text = f"step {steps}" + (f", {rate:.3g} steps/s" if rate else "")
            if self._live:
                self._show(f"{what}: {text}")
            elif now - spoken >= _PLAIN_LINE_SECONDS:
                spoken = now
                self._say(f"  {text}")

        return on_progress

    def end(self, trial: Trial, outcome: Outcome) -> None:
        """Notes and tells that a run has ended."""
        self._done += 1
        if trial in self._under_way:
            self._under_way.remove(trial)
        self._spent_seconds += outcome.wall_seconds
        if outcome.kind != "completed":
            self._say(f"  {outcome.kind}: {describe(trial)}: {outcome.reason}")
        elif not self._live:
            which = f": {describe(trial)}" if self._under_way else ""
            self._say(f"  completed in {units.seconds(outcome.wall_seconds)}{which}")
        if self._live:
            self._live.update(self._bar, completed=self._done)
