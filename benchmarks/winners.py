"""How far the time of the fastest trial is off, as measured and corrected for having been chosen.

    python benchmarks/winners.py [--seed N] [--studies N] [--write docs/concepts.md]

Each study has 2, 5, 10 or 30 trials with 3 or 5 runs each, whose noise is log-normal with a standard deviation of 2, 5
or 19 %. True times are equal; or evenly spread over three standard deviations; or equal for two trials and ten standard
deviations longer for all others. In a last part the noise of the trials is not alike, which the method takes it to be:
half of them, or the fastest alone, have three times that of the others.

A line says, of the trial that was fastest in each study: by how much its time is off from its own true one on average,
and in how many studies the 95 % interval holds that true time. Its three figures are for noise of 2, 5 and 19 %.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from between_marks import write_between

from vitscale.analysis.statistics import interval
from vitscale.analysis.winners import winner

MARK = "fastest of many"
HEAD = (
    "| trials | true times | noise | runs | measured: off by (%) | held (%) | corrected: off by (%) | held (%) |\n"
    "| --: | --- | --- | --: | --: | --: | --: | --: |"
)
TRIALS = (2, 5, 10, 30)
RUNS = (3, 5)
SPREADS = (0.02, 0.05, 0.19)
UNLIKE = 3.0

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Setting:
    """The trials of a simulated study: true logarithms and noise of each, in standard deviations of a run."""

    name: str
    noise: str
    truths: Callable[[int], Floats]
    """Number of trials -> true logarithm of each."""
    noises: Callable[[int], Floats] = np.ones


ALIKE = (
    Setting("equal", "alike", np.zeros),
    Setting("spread over 3 sd", "alike", lambda trials: np.linspace(0.0, 3.0, trials)),
    Setting("two equal, others far", "alike", lambda trials: np.where(np.arange(trials) < 2, 0.0, 10.0)),
)
UNLIKE_NOISE = (
    Setting("equal", "half x 3", np.zeros, lambda trials: np.where(np.arange(trials) % 2, UNLIKE, 1.0)),
    Setting(
        "one ahead by 2 sd",
        "its own x 3",
        lambda trials: np.where(np.arange(trials) > 0, 2.0, 0.0),
        lambda trials: np.where(np.arange(trials) > 0, 1.0, UNLIKE),
    ),
)


@dataclass(frozen=True)
class Errors:
    """Over many studies, of the fastest trial's time."""

    measured_bias: float
    """Mean of the logarithm's error."""
    measured_coverage: float
    corrected_bias: float
    corrected_coverage: float


def errors(setting: Setting, *, trials: int, runs: int, spread: float, studies: int, seed: int) -> Errors:
    """Simulates studies, and holds the fastest trial of each against its true time."""
    random = np.random.default_rng(seed)
    truths = setting.truths(trials) * spread
    scales = setting.noises(trials) * spread
    rows = []
    for _ in range(studies):
        logs = truths[:, None] + scales[:, None] * random.standard_normal((trials, runs))
        costs = [[float(cost) for cost in row] for row in np.exp(logs)]
        found = winner(costs)
        truth = float(np.exp(truths[found.position]))
        measured, corrected = interval(costs[found.position]), found.corrected
        assert corrected is not None  # there are several trials of 3 runs or more
        rows.append(
            [
                math.log(measured.value / truth),
                measured.ends[0] <= truth <= measured.ends[1],
                math.log(corrected.value / truth),
                corrected.ends[0] <= truth <= corrected.ends[1],
            ]
        )
    return Errors(*np.mean(rows, axis=0).tolist())


def table(settings: tuple[Setting, ...], trials: tuple[int, ...], studies: int, seed: int) -> Iterator[str]:
    """A line for each number of trials, setting and number of runs, with a figure for each of `SPREADS`."""
    for count in trials:
        for setting in settings:
            for runs in RUNS:
                seed += len(SPREADS)
                found = [
                    errors(setting, trials=count, runs=runs, spread=spread, studies=studies, seed=seed + place)
                    for place, spread in enumerate(SPREADS)
                ]
                cells = [
                    " / ".join(f"{100 * math.expm1(each.measured_bias):+.1f}" for each in found),
                    " / ".join(f"{100 * each.measured_coverage:.0f}" for each in found),
                    " / ".join(f"{100 * math.expm1(each.corrected_bias):+.1f}" for each in found),
                    " / ".join(f"{100 * each.corrected_coverage:.0f}" for each in found),
                ]
                yield f"| {count} | {setting.name} | {setting.noise} | {runs} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--studies", type=int, default=1000)
    parser.add_argument("--write", type=Path, help="page whose table is replaced")
    asked = parser.parse_args()
    lines = [HEAD]
    print(HEAD)
    for settings, trials in ((ALIKE, TRIALS), (UNLIKE_NOISE, (10,))):
        for line in table(settings, trials, asked.studies, 10_000 * asked.seed):
            print(line, flush=True)
            lines.append(line)
    if asked.write is not None:
        write_between(asked.write, MARK, "\n".join(lines))


if __name__ == "__main__":
    main()
