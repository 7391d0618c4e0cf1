"""From launch to first step under `local`: ranks forked from a prepared process, and started anew; and whether what
follows is the same.

    python benchmarks/start_up.py [--pairs 10] [--engine ddp|fsdp2|zero-0|zero-1|zero-2|zero-3] [--steps 60]

A small ViT on two ranks, `--pairs` runs of each kind in turn, each forked run from a prepared process of its own, as
the repeats of a study are. Launch to first step is from the driver's start of the ranks to the second forward of rank
0, on one clock. The step, its spread between runs and the peak memory of forks are set against those of new processes:
ratios of geometric means with 95 % intervals of paired runs, and both standard deviations between runs. Exit code 1
where the median of forks is above 0.5 s, or a loss differs.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

LIMIT_SECONDS = 0.5
ENGINES = {name: f'engine = "{name}"' for name in ("ddp", "fsdp2")} | {
    f"zero-{stage}": f'engine = "deepspeed"\nzero_stage = {stage}' + "\nbucket_mib = 25" * (stage > 0)
    for stage in range(4)
}
"""Of ZeRO with buckets like DDP's: those that DeepSpeed takes by itself are 2 GB, whatever the model."""
STUDY = """
name = "start-up"
[model]
factory = "start_up:build"
image_size = 32
[data]
name = "digits"
[train]
{engine}
precision = "fp32"
micro_batch = 32
[scaling]
gpus = [2]
[launch]
launcher = "local"
[measure]
steps = {steps}
repeats = 1
evaluate = false
explain = false
"""


def build(num_classes: int, image_size: int) -> object:
    """The model: vitscale's own ViT, which notes when its second forward begins, in the run's folder."""
    from vitscale.models.named import VisionTransformer
    from vitscale.trial.model_spec import ModelSpec, resolve

    class Noting(VisionTransformer):
        calls = 0

        def forward(self, images: object) -> object:  # type: ignore[override]  # a tensor: torch is imported later
            if self.training:
                self.calls += 1
                if self.calls == 2 and os.environ.get("RANK") == "0":
                    now = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
                    (Path(sys.argv[1]) / "first_step_ns").write_text(str(now))
            return super().forward(images)  # type: ignore[arg-type]  # a tensor: torch is imported later

    return Noting(resolve(ModelSpec(name="vit-ti16", image_size=image_size, patch_size=8, layers=4), num_classes))


class Runs:
    """What is known of one kind of runs."""

    def __init__(self) -> None:
        self.first_step_seconds: list[float] = []
        self.waited_seconds: list[float] = []
        self.step_seconds: list[float] = []
        self.peak_bytes: list[float] = []
        self.losses: set[tuple[float | None, ...]] = set()

    def add(self, folder: Path) -> None:
        from vitscale.processes import launch_file
        from vitscale.store import read_ranks

        launch = launch_file.read(folder)
        assert launch is not None
        first = int((folder / "first_step_ns").read_text())
        self.first_step_seconds.append((first - launch.started_ns) / 1e9)
        if launch.prepared_seconds is not None:
            self.waited_seconds.append(launch.prepared_seconds)
        ranks = read_ranks(folder)
        timed = [
            max(steps) for steps in zip(*([s.seconds for s in r.steps if not s.warmup] for r in ranks), strict=True)
        ]
        self.step_seconds.append(statistics.median(timed))
        self.peak_bytes.append(max(line.peak_rss_bytes or 0 for rank in ranks for line in rank.resources))
        self.losses.add(tuple(step.loss for rank in ranks for step in rank.steps))


def compared(forked: Sequence[float], anew: Sequence[float]) -> str:
    """The ratio of geometric means with its interval, and the ratio of the spreads."""
    from scipy import stats  # not above: ranks import this file too, for the model, and it would be in their start-up

    logs = [math.log(one / other) for one, other in zip(forked, anew, strict=True)]
    if len(logs) == 1:
        return f"{math.exp(logs[0]):.4f} (one pair has no interval)"
    mean, error = statistics.fmean(logs), statistics.stdev(logs) / math.sqrt(len(logs))
    reach = stats.t.ppf(0.975, len(logs) - 1) * error
    spreads = [statistics.stdev(map(math.log, values)) for values in (forked, anew)]
    ratio = f"{math.exp(mean):.4f} ({math.exp(mean - reach):.4f} to {math.exp(mean + reach):.4f})"
    return f"{ratio}; spread between runs {100 * spreads[0]:.2f} % and {100 * spreads[1]:.2f} %"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--engine", choices=ENGINES, default="ddp")
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    from vitscale import runner
    from vitscale.runner.one_run import run_task
    from vitscale.schedulers import LocalHost
    from vitscale.schedulers.prepared import PreparedProcesses
    from vitscale.store import write_study
    from vitscale.store.reading import RunKey

    kinds = {"forked": Runs(), "anew": Runs()}
    with tempfile.TemporaryDirectory() as kept, PreparedProcesses() as prepared:
        study = Path(kept) / "study.toml"
        study.write_text(STUDY.format(engine=ENGINES[options.engine], steps=options.steps))
        (Path(kept) / "start_up.py").write_text(Path(__file__).read_text())
        plan = runner.plan(study)
        results = Path(kept) / "results"
        results.mkdir()
        write_study(results, plan.record)
        (trial_id,) = plan.record.trials
        for pair in range(options.pairs):
            for turn, kind in enumerate(("forked", "anew") if pair % 2 else ("anew", "forked")):
                context = plan.in_folder(results)
                task = RunKey(trial_id, 2 * pair + turn)
                kept_ready = prepared if kind == "forked" else None
                outcome = run_task(context, LocalHost(), task, 0, lambda _steps, _phase: None, kept_ready)
                if outcome.kind != "completed":
                    sys.exit(f"a run did not complete: {outcome.reason}")
                kinds[kind].add(results / "runs" / f"{trial_id}-r{task.repeat}-a0")
    forked, anew = kinds["forked"], kinds["anew"]
    medians = {kind: statistics.median(runs.first_step_seconds) for kind, runs in kinds.items()}
    same = len(forked.losses | anew.losses) == 1
    print(f"{options.engine}, 2 ranks, {options.pairs} runs of each kind; load {os.getloadavg()[0]:.1f}")
    for kind, runs in kinds.items():
        low, high = min(runs.first_step_seconds), max(runs.first_step_seconds)
        print(f"launch to first step, {kind}: median {medians[kind]:.3f} s ({low:.3f} to {high:.3f})")
    print(f"a prepared process is ready after: median {statistics.median(forked.waited_seconds):.2f} s")
    print(f"step, forked / anew: {compared(forked.step_seconds, anew.step_seconds)}")
    print(f"peak resident memory, forked / anew: {compared(forked.peak_bytes, anew.peak_bytes)}")
    print(f"losses equal to the bit: {'yes' if same else 'NO'}")
    return 0 if same and medians["forked"] <= LIMIT_SECONDS else 1


if __name__ == "__main__":
    sys.exit(main())
