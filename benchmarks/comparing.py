"""How often `vitscale compare` shows a slowdown that it calls shown, and how often it claims one where there is none.

    python benchmarks/comparing.py [--seed N] [--studies N] [--write docs/comparing.md]

Two tables. "Power": a first study prints the smallest slowdown that its runs would show, and how many repeats would
show 5 %; a second study, of runs that spread as those of the first, has just that slowdown, or so many repeats. Its
trials are equal but for the one that is slower. "Sessions": two equal sides, whose runs differ by 1 % inside a session;
sessions, and the rounds of runs that alternate, differ by as much as the line says. Effects are log-normal; the
verdicts are those of `analysis.statistics` and `analysis.counterparts`.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from between_marks import write_between

from vitscale.analysis import power
from vitscale.analysis.counterparts import Measured, gate_of
from vitscale.analysis.statistics import compare, compare_pairs, corrected, log_mean, ratio

RUN_SPREAD = 0.01
SESSION_SPREADS = (0.0, 0.01, 0.02, 0.03)
LIMIT = 0.05


class Spreads(NamedTuple):
    """Standard deviations of the logarithms of runs."""

    first: float
    other: float
    rounds: float | None = None
    """Of what a round has in common; None: the sides are not run in turn."""


class Setting(NamedTuple):
    """A line of the table of power."""

    runs: int
    spreads: Spreads
    tests: int = 1
    limit: float | None = None


SETTINGS = (
    Setting(3, Spreads(0.02, 0.02)),
    Setting(3, Spreads(0.02, 0.02), limit=LIMIT),
    Setting(3, Spreads(0.02, 0.02), tests=20, limit=LIMIT),
    Setting(5, Spreads(0.02, 0.02), tests=20),
    Setting(5, Spreads(0.01, 0.04), limit=LIMIT),
    Setting(3, Spreads(0.05, 0.05), limit=LIMIT),
    Setting(10, Spreads(0.03, 0.03), tests=7, limit=LIMIT),
    Setting(5, Spreads(0.01, 0.01, rounds=0.03)),
    Setting(5, Spreads(0.02, 0.02, rounds=0.03), tests=7, limit=LIMIT),
)


def measured(random: np.random.Generator, runs: int, spreads: Spreads, slowdown: float = 0.0) -> Measured:
    """One trial of the first side against that of the other, which takes `1 + slowdown` times as long."""
    first, other = (np.exp(spread * random.standard_normal(runs)) for spread in spreads[:2])
    other *= 1 + slowdown
    if spreads.rounds is None:
        return side_by_side(first, other)
    of_round = np.exp(spreads.rounds * random.standard_normal(runs))
    return in_rounds(first * of_round, other * of_round)


def side_by_side(first: np.ndarray, other: np.ndarray) -> Measured:
    """The comparison of two sides from the seconds of their runs."""
    ours, theirs = first.tolist(), other.tolist()
    return Measured(compare(theirs, ours), ratio(theirs, ours), (log_mean(theirs), log_mean(ours)))


def in_rounds(first: np.ndarray, other: np.ndarray) -> Measured:
    """The same of runs in turn, a round at each place."""
    ours, theirs = first.tolist(), other.tolist()
    result = compare_pairs(theirs, ours)
    return Measured(result, result.ratio.into(1.0), (log_mean((other / first).tolist()),), len(ours))


def is_shown(random: np.random.Generator, setting: Setting, runs: int, slowdown: float, limit: float | None) -> bool:
    """Whether a study reports the one trial of it that is slower: as slower, or with a limit beyond it."""
    slower = measured(random, runs, setting.spreads, slowdown)
    equal = [measured(random, runs, setting.spreads) for _ in range(setting.tests - 1)]
    results = corrected([trial.result for trial in (slower, *equal)], range(setting.tests))
    slower = replace(slower, result=results[0])
    return slower.result.verdict == "slower" if limit is None else gate_of(slower, limit) == "slower"


def power_rows(random: np.random.Generator, studies: int) -> Iterator[str]:
    """A line for each setting."""
    for setting in SETTINGS:
        question = power.ComparisonQuestion(setting.tests, setting.limit)
        printed, shown, repeats, shown_by_repeats = [], [], [], []
        for _ in range(studies):
            sides = measured(random, setting.runs, setting.spreads).sides
            smallest = power.smallest_shown(sides, question)
            assert smallest is not None
            printed.append(smallest)
            shown.append(is_shown(random, setting, setting.runs, smallest, setting.limit))
            count = power.repeats_to_show(LIMIT, sides, power.ComparisonQuestion(setting.tests))
            repeats.append(count or power.MOST_REPEATS)
            if count is not None:
                shown_by_repeats.append(is_shown(random, setting, count, LIMIT, None))
        ends = " to ".join(f"{100 * value:.0f}" for value in np.quantile(printed, (0.1, 0.9)))
        some = " to ".join(f"{value:.0f}" for value in np.quantile(repeats, (0.1, 0.9)))
        yield (
            f"| {in_words(setting)} | {ends} % | {100 * np.mean(shown):.0f} % | {some} | "
            f"{100 * np.mean(shown_by_repeats):.0f} % |"
        )


def in_words(setting: Setting) -> str:
    """A setting as its line says it."""
    first, other, rounds = setting.spreads
    spread = f"{100 * first:g} %" if first == other else f"{100 * first:g} and {100 * other:g} %"
    in_turn = f", in turn, rounds {100 * rounds:g} % apart" if rounds is not None else ""
    asked = f"beyond {100 * setting.limit:g} %" if setting.limit is not None else "slower"
    tests = f"1 of {setting.tests}" if setting.tests > 1 else "1"
    return f"{setting.runs} runs, spread {spread}{in_turn} | {tests} | {asked}"


# --- sessions -------------------------------------------------------------------------------------------------------


def one_after_the_other(random: np.random.Generator, runs: int, spread: float) -> Measured:
    """Each side in a session of its own."""
    first, other = (
        np.exp(spread * random.standard_normal() + RUN_SPREAD * random.standard_normal(runs)) for _ in range(2)
    )
    return side_by_side(first, other)


def in_turn(random: np.random.Generator, runs: int, spread: float) -> Measured:
    """Each round in a session of its own, which both sides have in common."""
    sessions = spread * random.standard_normal(runs)
    first, other = (np.exp(sessions + RUN_SPREAD * random.standard_normal(runs)) for _ in range(2))
    return in_rounds(first, other)


def in_turn_with_drift(random: np.random.Generator, runs: int, spread: float) -> Measured:
    """The machine wanders from run to run, by `spread` from one round to the next; sides take turns in going first."""
    wandering = np.cumsum(spread / math.sqrt(2) * random.standard_normal(2 * runs)).reshape(runs, 2)
    wandering[1::2] = wandering[1::2, ::-1]
    first, other = np.exp(wandering + RUN_SPREAD * random.standard_normal((runs, 2))).T
    return in_rounds(first, other)


WAYS: dict[str, Callable[[np.random.Generator, int, float], Measured]] = {
    "one side after the other": one_after_the_other,
    "in turn": in_turn,
    "in turn, wandering inside rounds": in_turn_with_drift,
}


def session_rows(random: np.random.Generator, studies: int) -> Iterator[str]:
    """A line for each spread of sessions and number of runs."""
    for spread in SESSION_SPREADS:
        for runs in (3, 5, 10):
            cells = []
            for draw in WAYS.values():
                some = [draw(random, runs, spread) for _ in range(studies)]
                claims = np.mean([trial.result.verdict in ("faster", "slower") for trial in some])
                fails = np.mean([gate_of(trial, LIMIT) == "slower" for trial in some])
                cells.append(f"{100 * claims:.1f} % | {100 * fails:.1f} %")
            yield f"| {100 * spread:g} % | {runs} | " + " | ".join(cells) + " |"


def tables(random: np.random.Generator, studies: int) -> dict[str, str]:
    """Each mark's table."""
    heads = "| runs on each side | slower | asked | shown from (80 % of studies) | shown | repeats for 5 % | shown |"
    of_power = [heads, "| --- | --: | --- | --: | --: | --: | --: |", *power_rows(random, studies)]
    ways = " | ".join(f"{way}: claimed | fails" for way in WAYS)
    of_sessions = [f"| sessions differ by | runs | {ways} |", "| --: | --: " + "| --: | --: " * len(WAYS) + "|"]
    of_sessions += session_rows(random, 10 * studies)
    return {"power": "\n".join(of_power), "sessions": "\n".join(of_sessions)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=31)
    parser.add_argument("--studies", type=int, default=1_000, help="of each line; of sessions ten times as many")
    parser.add_argument("--write", type=Path, help="page to write the tables into")
    options = parser.parse_args()
    for mark, text in tables(np.random.default_rng(options.seed), options.studies).items():
        print(text, end="\n\n", flush=True)
        if options.write:
            write_between(options.write, mark, text)


if __name__ == "__main__":
    main()
