"""How long 10,000 configurations take to forecast, as `vitscale advise` looks at them.

python benchmarks/configurations.py [--write docs/calibration.md]
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from pathlib import Path

from between_marks import write_between
from simulated_study import simulated_study

from vitscale.prediction.evaluating import ROUGH, Candidate, evaluate_all
from vitscale.prediction.fitting import fit

MARK = "configurations"
ENGINES = (("ddp", 0), ("fsdp2", 0), ("deepspeed", 0), ("deepspeed", 1), ("deepspeed", 2), ("deepspeed", 3))
COUNTS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024, 2048, 4096, 8192)
WANTED = 10_000


def candidates() -> list[Candidate]:
    """10,000 that differ."""
    found = itertools.product(
        COUNTS, ENGINES, (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256), (1, 2, 3, 4, 8), (False, True)
    )
    every = [
        Candidate(gpus, min(8, gpus), engine, stage, micro_batch, accumulation, checkpointing)
        for gpus, (engine, stage), micro_batch, accumulation, checkpointing in found
    ]
    return every[:: len(every) // WANTED][:WANTED]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--write", type=Path)
    write = parser.parse_args().write
    study = simulated_study(0)
    fitted = fit(study.evidence(study.checked))
    asked = candidates()
    assert len(asked) == len(set(asked)) == WANTED
    seconds, of_cpu = [], []
    for _ in range(5):
        begin, cpu = time.perf_counter(), time.process_time()
        forecasts = evaluate_all(fitted, "simulated", asked, draws=ROUGH)
        seconds.append(time.perf_counter() - begin)
        of_cpu.append(time.process_time() - cpu)
    assert len(forecasts.step.value) == WANTED
    text = (
        f"`python benchmarks/configurations.py`: {WANTED:,} configurations in "
        f"{statistics.median(seconds):.2f} s ({statistics.median(of_cpu):.2f} s of one core's time; medians of 5). The "
        f"machine has {os.cpu_count()} cores, and {os.getloadavg()[0]:.0f} processes wanted them."
    )
    print(text)
    if write:
        write_between(write, MARK, text)


if __name__ == "__main__":
    main()
