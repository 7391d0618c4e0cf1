"""How far a trial's step time lies from the long-run mean where slow steps recur, and how often its interval holds it.

    python benchmarks/slow_steps.py [--seed N] [--studies N] [--write docs/concepts.md]

Each study has 3 or 5 runs of 100 or 500 steps. Steps differ by 2 % and runs by 1 % (log-normal); some steps, each with
the same chance, take 3, 10 or 30 times as long. The product's rule finds and sets aside (`analysis.runs.steps`), and
its interval is `statistics.interval`. "Alone" is the same rule asked by each run for itself, as it was before. A second
table has slow steps of unlike size: they exceed the usual by exponential times with that mean.

The rule (a single step of its size, a quarter for "its size") was chosen with seed 3; run it with another.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from between_marks import write_between

from vitscale.analysis.runs.steps import WHOLE, SlowSteps, decide_slow_steps, slow_steps
from vitscale.analysis.statistics import interval

MARK = "slow steps"
CHANCES = (0.001, 0.005, 0.01, 0.02)
TIMES_AS_LONG = (3.0, 10.0, 30.0)
SIZES = ((3, 100), (3, 500), (5, 100), (5, 500))
"""Runs of a study and steps of a run."""
STEP_SPREAD = 0.02
RUN_SPREAD = 0.01


class Study(NamedTuple):
    """One study's answer over the truth."""

    ratio: float
    holds: bool
    ratio_alone: float
    """The same where each run decides alone."""


def simulated(
    random: np.random.Generator, chance: float, times_as_long: float, runs: int, steps: int, *, unlike: bool
) -> Study:
    """One study. `unlike`: slow steps exceed the usual by exponential times, not all by the same."""
    is_slow = random.random((runs, steps)) < chance
    excess = (times_as_long - 1) * (random.exponential(1.0, (runs, steps)) if unlike else 1.0)
    noise = np.exp(STEP_SPREAD * random.standard_normal((runs, steps)))
    of_run = np.exp(RUN_SPREAD * random.standard_normal((runs, 1)))
    seconds = of_run * noise * (1.0 + is_slow * excess)
    truth = 1.0 + chance * (times_as_long - 1)
    slow = slow_steps(np.arange(steps), seconds, np.full(steps, WHOLE, dtype=np.uint8))
    together = means(seconds, decide_slow_steps(slow, [None] * runs))
    alone = means(seconds, [decide_slow_steps([run], [None])[0] for run in slow])
    answer = interval(together)
    low, high = answer.ends
    return Study(answer.value / truth, low <= truth <= high, interval(alone).value / truth)


def means(seconds: np.ndarray, decided: Sequence[SlowSteps]) -> list[float]:
    """Each run's mean step without those that are set aside."""
    return [float(np.delete(of_run, slow.set_aside).mean()) for of_run, slow in zip(seconds, decided, strict=True)]


def rows(random: np.random.Generator, studies: int, *, unlike: bool) -> Iterator[str]:
    """A row for each chance and length."""
    for chance in CHANCES:
        for times_as_long in TIMES_AS_LONG:
            cells = []
            for runs, steps in SIZES:
                some = [simulated(random, chance, times_as_long, runs, steps, unlike=unlike) for _ in range(studies)]
                bias, alone = (100 * (np.mean([getattr(s, name) for s in some]) - 1) for name in Study._fields[::2])
                held = 100 * np.mean([study.holds for study in some])
                cells.append(f"{bias:+.1f} ({alone:+.1f}) % | {held:.0f} %")
            yield f"| {100 * chance:g} %, {times_as_long:g} times | " + " | ".join(cells) + " |"


def table(random: np.random.Generator, studies: int, *, unlike: bool) -> str:
    """The table of steps of one size, or of unlike ones."""
    what = "of unlike size" if unlike else "of one size"
    heads = " | ".join(f"{runs} x {steps}: off (alone) | holds" for runs, steps in SIZES)
    rules = "| --- " + "| --: | --: " * len(SIZES) + "|"
    return "\n".join([f"| slow steps {what} | {heads} |", rules, *rows(random, studies, unlike=unlike)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=29)
    parser.add_argument("--studies", type=int, default=1_000, help="of each cell")
    parser.add_argument("--write", type=Path, help="page to write the tables into")
    options = parser.parse_args()
    random = np.random.default_rng(options.seed)
    text = "\n\n".join(table(random, options.studies, unlike=unlike) for unlike in (False, True))
    print(text)
    if options.write:
        write_between(options.write, MARK, text)


if __name__ == "__main__":
    main()
