"""How often intervals of predictions hold where runs of one configuration differ much from one another.

    python benchmarks/noisy_studies.py [--studies 60] [--first-seed 80000] [--write docs/calibration.md]

Each study has three runs of every measured rank count, on a cluster of `benchmarks/simulator.py` whose network was
checked. Only these runs differ from one another, by a law that is known: log-normal of a spread, or with one run of
three at twice the time. So the truth is exact: the share of new runs that an interval holds follows from the law, and
the mean is the geometric one, which is the report's centre of times. Asked are the measured counts, and twice and four
times the largest. About four minutes on one core.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist, fmean
from typing import Any, NamedTuple

import numpy as np
from between_marks import write_between
from peers.runs import Array
from simulated_study import checked_network, measured_point, true_mean
from simulator import invent

from vitscale.prediction.evidence import Evidence, MeasuredPoint, Series
from vitscale.prediction.fitting import fit
from vitscale.prediction.network.links import Network
from vitscale.prediction.predicting import Question, predict
from vitscale.present.estimate import Estimate

MARK = "noisy studies"
RUNS = 3
"""Runs of each measured rank count."""
SPREADS = (0.01, 0.02, 0.05, 0.10, 0.30, 0.60)
"""Standard deviations of the logarithm of a run's step."""
TIMES_THE_LARGEST = (2, 4)
"""Rank counts that nobody measured, over the largest measured one."""


@dataclass(frozen=True)
class Law:
    """How runs of one configuration differ: each takes the quiet step times a log-normal factor, or twice that."""

    name: str
    spread: float
    """Standard deviation of the factor's logarithm."""
    slow_share: float = 0.0
    """Share of the runs that take twice as long."""

    @property
    def mean_log(self) -> float:
        """Logarithm of the geometric mean of all factors."""
        return self.slow_share * math.log(2)

    def factors(self, random: np.random.Generator) -> Array:
        """Factors of the runs of one rank count; of them exactly the slow share is slow."""
        slow = random.permutation(RUNS) < round(self.slow_share * RUNS)
        return np.asarray(np.exp(self.spread * random.standard_normal(RUNS)) * np.where(slow, 2.0, 1.0))

    def share_between(self, low: float, high: float) -> float:
        """Share of runs whose factor lies between two."""
        normal = NormalDist(0.0, self.spread)
        log_low, log_high = math.log(low), math.log(high)
        usual = normal.cdf(log_high) - normal.cdf(log_low)
        slow = normal.cdf(log_high - math.log(2)) - normal.cdf(log_low - math.log(2))
        return (1 - self.slow_share) * usual + self.slow_share * slow


LAWS = (
    *(Law(f"{100 * spread:.0f} % apart", spread) for spread in SPREADS),
    Law("2 % apart, one of three at twice the time", 0.02, slow_share=1 / RUNS),
)


class QuietStudy(NamedTuple):
    """A study whose runs do not differ, and the truth."""

    points: tuple[MeasuredPoint, ...]
    ranks_per_node: int
    network: Network
    """As a check found it."""
    true_seconds: dict[int, float]
    """Rank count -> seconds of a step, at measured counts and beyond."""


class Held(NamedTuple):
    """Of one answer: the share of new runs in the interval of a run, and whether that of the mean holds the mean."""

    times: int
    """Its rank count over the largest measured; 1 for all measured counts."""
    runs: float
    mean: float
    width: float
    """Upper over lower end of the interval of a run."""


def quiet_study(seed: int) -> QuietStudy:
    """The study of the cluster `invent(seed)`, with three runs that do not differ but for the jitter of their steps."""
    cluster = replace(invent(seed), repeats=RUNS, job_spread=0.0)
    random = np.random.default_rng([seed, 21])
    largest = cluster.measured[-1]
    counts = (*cluster.measured, *(times * largest for times in TIMES_THE_LARGEST))
    return QuietStudy(
        points=tuple(measured_point(cluster, ranks, random) for ranks in cluster.measured),
        ranks_per_node=cluster.ranks_per_node,
        network=checked_network(cluster, random),
        true_seconds={ranks: true_mean(cluster, ranks, random) for ranks in counts},
    )


def with_noise(point: MeasuredPoint, law: Law, random: np.random.Generator) -> MeasuredPoint:
    """The point as its runs would have been measured under the law; parts of its step are those of the mean run."""
    factors = law.factors(random)
    seconds = tuple(float(step * factor) for step, factor in zip(point.step_seconds, factors, strict=True))
    if point.parts is None:
        return replace(point, step_seconds=seconds)
    mean_factor = float(np.exp(np.log(factors).mean()))
    parts: dict[str, Any] = {
        name: value if value is None else value * mean_factor for name, value in vars(point.parts).items()
    }
    return replace(point, step_seconds=seconds, parts=replace(point.parts, **parts))


def held_by_answers(study: QuietStudy, law: Law, seed: int) -> list[Held]:
    """What the intervals of a study hold, for each measured count and each count beyond."""
    random = np.random.default_rng([seed, 23])
    points = tuple(with_noise(point, law, random) for point in study.points)
    evidence = Evidence((Series("simulated", "strong-micro", {}, points),), study.network)
    question = Question(gpus=tuple(study.true_seconds), nodes_of=study.ranks_per_node)
    largest = points[-1].gpus
    return [
        _held(answer.step_seconds, study.true_seconds[answer.gpus], law, times=max(1, answer.gpus // largest))
        for answer in predict(fit(evidence), question)
    ]


def _held(step: Estimate, quiet_seconds: float, law: Law, *, times: int) -> Held:
    low, high = step.ends
    future_low, future_high = step.future_ends
    true_mean_seconds = quiet_seconds * math.exp(law.mean_log)
    return Held(
        times=times,
        runs=law.share_between(future_low / quiet_seconds, future_high / quiet_seconds),
        mean=float(low <= true_mean_seconds <= high),
        width=future_high / future_low,
    )


def table(held_by_law: Mapping[Law, Sequence[Held]]) -> list[str]:
    """A row for each law: what intervals hold at the measured counts, and at twice and four times the largest."""
    distances = (1, *TIMES_THE_LARGEST)
    names = ["measured", *(f"{times}x" for times in TIMES_THE_LARGEST)]
    heads = ["runs", *(f"new runs held, {name}" for name in names), *(f"mean held, {name}" for name in names)]
    heads.append("ends apart, measured")
    lines = [f"| {' | '.join(heads)} |", f"| {' | '.join(['---'] * len(heads))} |"]
    for law, held in held_by_law.items():
        at = {times: [one for one in held if one.times == times] for times in distances}
        cells = [law.name]
        cells += [f"{fmean(one.runs for one in at[times]):.0%}" for times in distances]
        cells += [f"{fmean(one.mean for one in at[times]):.0%}" for times in distances]
        cells.append(f"{np.median([one.width for one in at[1]]):.2f} times")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--studies", type=int, default=60, help="of each row")
    parser.add_argument("--first-seed", type=int, default=80_000)
    parser.add_argument("--write", type=Path, help="the page in which the table stands")
    arguments = parser.parse_args()
    held_by_law: dict[Law, list[Held]] = {law: [] for law in LAWS}
    for seed in range(arguments.first_seed, arguments.first_seed + arguments.studies):
        study = quiet_study(seed)
        for law, held in held_by_law.items():
            held += held_by_answers(study, law, seed)
    command = f"python benchmarks/noisy_studies.py --studies {arguments.studies} --first-seed {arguments.first_seed}"
    text = "\n".join([f"`{command}`:", "", *table(held_by_law)])
    print(text)
    if arguments.write:
        write_between(arguments.write, MARK, text)


if __name__ == "__main__":
    main()
