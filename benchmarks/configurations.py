"""How long advice among 10,000 configurations takes, and whole processes of predict, plan, advise and --help.

python benchmarks/configurations.py [--times 5] [--wanted 10000] [--results FOLDER --study STUDY.toml]
                                    [--write docs/calibration.md]

FOLDER: results to ask about, such as those of `make demo`; STUDY.toml: what `plan --from FOLDER` plans.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from between_marks import write_between
from simulated_study import simulated_study

from vitscale.advice.pipeline import advise
from vitscale.advice.request import NoiseScale, Request
from vitscale.prediction.configurations import Candidate, Evaluated
from vitscale.prediction.evaluating import ROUGH
from vitscale.prediction.fitting import DRAWS, fit
from vitscale.prediction.workloads import evaluate_all

MARK = "configurations"


def among_many(wanted: int) -> tuple[Callable[[], int], int]:
    """(advice among at least so many configurations, how many)."""
    study = simulated_study(0)
    evidence = study.evidence(study.checked)
    fitted = fit(evidence)
    fitted.series["simulated"]  # fitted beforehand: that takes a process once

    def forecaster(series: str, candidates: Sequence[Candidate], rough: bool) -> Evaluated:
        return evaluate_all(fitted, series, candidates, with_memory=rough, draws=ROUGH if rough else DRAWS)

    def looked_at(counts: int) -> int:
        asked = Request(gpus=tuple(8 * n for n in range(1, counts + 1)), ranks_per_node=8, epochs=90, images=1_281_167)
        return advise(evidence, asked, NoiseScale.unknown("not measured"), forecaster).looked_at

    counts = -(-wanted // looked_at(1))
    return lambda: looked_at(counts), looked_at(counts)


def process_seconds(arguments: Sequence[str], times: int) -> tuple[float, float]:
    """(seconds that a whole process takes, of one core's time), medians."""
    wall, cpu = [], []
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    for _ in range(times + 1):  # the first compiles, as installing does
        begin, used = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "vitscale", *arguments], check=True, capture_output=True, env=environment)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        wall.append(time.perf_counter() - begin)
        cpu.append(after.ru_utime - used.ru_utime + after.ru_stime - used.ru_stime)
    return statistics.median(wall[1:]), statistics.median(cpu[1:])


def whole_processes(results: Path, study: Path | None, times: int) -> list[str]:
    """A row of a table for each command."""
    from vitscale import analysis, store
    from vitscale.prediction.evidence import evidence_of
    from vitscale.prediction.predicting import can_grow

    records = store.load(results)
    found = evidence_of(results, analysis.analyse(records)).series
    series = next(one.name for one in found if can_grow(one))
    commands = [["--help"], ["predict", str(results), "--gpus", "4,8,16", "--series", series], ["advise", str(results)]]
    commands += [["plan", str(study), "--from", str(results)]] if study is not None else []
    rows = ["| command | seconds | of one core's time |", "| --- | --- | --- |"]
    for command in commands:
        wall, cpu = process_seconds(command, times)
        shown = " ".join(part.replace(str(results), "RESULTS") for part in command)
        rows.append(f"| `{shown}` | {wall:.2f} | {cpu:.2f} |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--wanted", type=int, default=10_000)
    parser.add_argument("--results", type=Path)
    parser.add_argument("--study", type=Path)
    parser.add_argument("--write", type=Path)
    asked = parser.parse_args()
    advice, count = among_many(asked.wanted)
    seconds, of_cpu = [], []
    for _ in range(asked.times):
        begin, cpu = time.perf_counter(), sum(os.times()[:4])
        advice()
        seconds.append(time.perf_counter() - begin)
        of_cpu.append(sum(os.times()[:4]) - cpu)  # of its forks too
    took, of_core = statistics.median(seconds), statistics.median(of_cpu)
    lines = [
        f"`python benchmarks/configurations.py`: advice among {count:,} configurations in {took:.2f} s "
        f"({of_core:.2f} s of one core's time; medians of {asked.times}). The machine has {os.cpu_count()} cores, and "
        f"the load was {os.getloadavg()[0]:.0f}."
    ]
    if asked.results is not None:
        lines += ["", *whole_processes(asked.results, asked.study, asked.times)]
    text = "\n".join(lines)
    print(text)
    if asked.write:
        write_between(asked.write, MARK, text)


if __name__ == "__main__":
    main()
