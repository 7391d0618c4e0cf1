"""How long a results folder of many runs takes to report, to resume and to import, and how that grows with the runs.

    python benchmarks/big_results.py FOLDER [--runs 100 1000 10000] [--page docs/benchmarks/README.md [--alone]]

It makes folders of up to 10,000 runs of 200 trials with 500 step rows each, as ranks write them, has the product pack
them, and times the product's own commands on them: seconds of the processor and of the clock, and the most memory.
With `--page` the figures go beside that page as growth.json, are drawn as growth.svg, and stand in its table. They are
those of the processor, which other work on the machine changes least; with `--alone` those of the clock.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from between_marks import write_between

from vitscale import runner, store
from vitscale.machine.hardware import Machine
from vitscale.pages.charts.axes import Plot, add_curves, quantity, tooltip
from vitscale.present.document import FigureView
from vitscale.present.drawing import picture
from vitscale.store.lines import RankLine
from vitscale.store.records import (
    FORMAT,
    DeviceRecord,
    EndLine,
    Environment,
    EpochLine,
    MatmulLine,
    ModelLine,
    PhaseLine,
    ResourcesLine,
    StartLine,
)
from vitscale.store.results import Outcome, RunHeader, StudyRecord
from vitscale.trial.trial import Trial

ROWS = 500
"""Step rows of a run, over all of its ranks."""
TRIALS = 200
EPOCHS = 2
HOST = Machine(cores=16, cpu_quota_cores=None, gpus=(), cpu_has_fast_bf16=False)
STUDY = """name = "big"
[model]
name = "vit-ti16"
image_size = 16
patch_size = 4
layers = 2
[data]
name = "digits"
[train]
epochs = 2
device = "cpu"
[scaling]
gpus = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
[launch]
launcher = "torchrun"
threads_per_rank = 1
oversubscribe = true
[measure]
explain = false
repeats = REPEATS
[sweep]
"train.engine" = ["ddp", "fsdp2"]
"train.micro_batch" = [1, 2, 4, 8, 16]
"train.precision" = ["fp32", "bf16"]
"""


def make_study(folder: Path, runs: int) -> tuple[Path, StudyRecord]:
    """The study file, of so many repeats that it has at least `runs` runs, and its record."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "study.toml"
    path.write_text(STUDY.replace("REPEATS", str(max(2, -(-runs // TRIALS)))), encoding="utf-8")
    return path, runner.plan(path, machine=HOST).record


def make_results(results: Path, record: StudyRecord, runs: int, seed: int = 0) -> None:
    """Writes a results folder of `runs` finished runs, as the driver and its ranks do."""
    draw = random.Random(seed)  # noqa: S311 - data, no secret
    results.mkdir(parents=True)
    store.write_study(results, record)
    trials = list(record.trials.items())
    for number in range(runs):
        repeat, place = divmod(number, len(trials))
        trial_id, trial = trials[place]
        header = RunHeader(
            trial_id=trial_id,
            repeat=repeat,
            attempt=0,
            trial=trial,
            command=("torchrun", "-m", "vitscale.worker"),
            dataset_fingerprint=record.dataset_fingerprints[trial_id],
            seed=0,
        )
        folder = results / "runs" / f"{trial_id}-r{repeat}-a0"
        folder.mkdir(parents=True)
        (folder / "trial.json").write_text(header.model_dump_json(indent=1), encoding="utf-8")
        (folder / "log.txt").write_text("", encoding="utf-8")
        step_seconds = 0.05 * (1 + 0.4 / trial.world.size) * draw.gauss(1.0, 0.02)
        for rank in range(trial.world.size):
            (folder / f"rank-{rank}.jsonl").write_text(
                "".join(_rank_text(trial_id, trial, rank, step_seconds, draw)), encoding="utf-8"
            )
        outcome = Outcome(kind="completed", reason="", started_unix_seconds=1.7e9 + 60 * number, wall_seconds=40.0)
        (folder / "outcome.json").write_text(outcome.model_dump_json(indent=1), encoding="utf-8")


def _rank_text(trial_id: str, trial: Trial, rank: int, step_seconds: float, draw: random.Random) -> Iterator[str]:
    steps, images = ROWS // trial.world.size, trial.train.micro_batch
    per_epoch = steps // EPOCHS
    environment = Environment(
        host="node1",
        device=DeviceRecord(type="cpu", name="Example CPU"),
        cores_allowed=(rank,),
        threads=1,
        cpu_quota_cores=None,
        versions={"torch": "2.13.0", "python": "3.11.2", "numpy": "2.3.0", "vitscale": "0.1.0"},
        backend="gloo",
        settings={"OMP_NUM_THREADS": "1"},
        git_revision="0123456789abcdef0123456789abcdef01234567",
    )
    before: list[RankLine] = [
        StartLine(format=FORMAT, trial=trial_id, rank=rank, world_size=trial.world.size, environment=environment),
        *(PhaseLine(name=name, seconds=draw.uniform(0.2, 0.3)) for name in ("launch", "imports", "data", "model")),  # type: ignore[arg-type]  # names of phases
        *(PhaseLine(name=name, seconds=draw.uniform(0.2, 0.3)) for name in ("engine", "first_step")),  # type: ignore[arg-type]  # names of phases
        ModelLine(
            parameters=5_500_000,
            gradient_dtype="float32",
            synchronised_timing=False,
            dataset_fingerprint="digits",
            train_samples=per_epoch * trial.global_batch,
            held_out_samples=360,
        ),
    ]
    yield from (line.model_dump_json() + "\n" for line in before)
    for epoch in range(EPOCHS):
        passed = 0.0
        for step in range(epoch * per_epoch, (epoch + 1) * per_epoch):
            seconds = step_seconds * (1 + 0.05 * draw.random())
            passed += seconds
            yield (
                f'{{"kind":"step","step":{step},"epoch":{epoch},"seconds":{seconds!r},"images":{images},'
                f'"loss":{2.3 / (1 + 0.01 * step) + 0.01 * draw.random()!r},"warmup":{str(step < 5).lower()},'
                f'"window":"light"}}\n'
            )
        figures = (0.5, 0.9, 0.6, 0.85)
        after: list[RankLine] = [
            EpochLine(
                epoch=epoch,
                steps=per_epoch,
                images=per_epoch * trial.global_batch,
                seconds=passed,
                complete=True,
                train_loss=figures[0],
                train_accuracy=figures[1],
                held_out_loss=figures[2],
                held_out_accuracy=figures[3],
                peak_bytes=500_000_000,
                evaluation_seconds=0.2,
            ),
            ResourcesLine(
                epoch=epoch,
                steps=(epoch * per_epoch + 5, (epoch + 1) * per_epoch - 1),
                seconds=passed,
                cpu_seconds=passed * 0.98,
                cpu_throttled_seconds=None,
                rss_bytes=400_000_000,
                peak_rss_bytes=500_000_000,
                gpu_reason="the device is the host",
            ),
        ]
        yield from (line.model_dump_json() + "\n" for line in after)
    rate = MatmulLine(dtype="float32", size=1024, flops_per_second=5e10 * draw.gauss(1.0, 0.01))
    yield rate.model_dump_json() + "\n"
    yield EndLine().model_dump_json() + "\n"


_PACK = "import pathlib, sys; from vitscale import store; store.pack_finished(pathlib.Path(sys.argv[1]))"


@dataclass(frozen=True)
class Cost:
    """What a command took."""

    cpu_seconds: float
    wall_seconds: float
    peak_bytes: int

    def __str__(self) -> str:
        return (
            f"{self.cpu_seconds:7.2f} s of the processor, {self.wall_seconds:7.2f} s, {self.peak_bytes / 1e6:6.0f} MB"
        )


def cost_of(command: Sequence[str], folder: Path) -> Cost:
    """Runs a command to its end; what it prints is left in `folder`."""
    begin = time.monotonic()
    with (folder / "out.txt").open("wb") as out, (folder / "error.txt").open("wb") as error:
        process = subprocess.Popen(command, stdout=out, stderr=error, cwd=folder)
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{command} exited with {process.returncode}: {(folder / 'error.txt').read_text()[-2000:]}")
    return Cost(usage.ru_utime + usage.ru_stime, time.monotonic() - begin, usage.ru_maxrss * 1024)


def cost_of_resuming(study: Path, results: Path) -> Cost:
    """Until the study, with one more repeat, has told a rank what to do; then it is interrupted."""
    more = study.with_name("more.toml")
    repeats = 1 + int(re.findall(r"repeats = (\d+)", study.read_text(encoding="utf-8"))[0])
    more.write_text(STUDY.replace("REPEATS", str(repeats)), encoding="utf-8")
    before = {path.name for path in (results / "runs").iterdir()}
    begin = time.monotonic()
    with (study.parent / "out.txt").open("wb") as out:
        command = [_program(), "run", str(more), "-o", str(results)]
        # What a shell starts in the background is deaf to Ctrl-C, and hands that on.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        process = subprocess.Popen(command, stdout=out, stderr=out, cwd=study.parent)
    try:
        while not any((results / "runs" / name / "launch.json").exists() for name in _new(results, before)):
            if process.poll() is not None:
                raise RuntimeError(
                    f"it ended with {process.returncode}: {(study.parent / 'out.txt').read_text()[-2000:]}"
                )
            time.sleep(0.01)
        wall = time.monotonic() - begin
        spent = psutil.Process(process.pid)
        return Cost(sum(spent.cpu_times()[:2]), wall, spent.memory_info().rss)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)
        for name in _new(results, before):
            shutil.rmtree(results / "runs" / name)


def _new(results: Path, before: set[str]) -> set[str]:
    return {path.name for path in (results / "runs").iterdir()} - before


def _program() -> str:
    return str(Path(sys.executable).with_name("vitscale"))


ROWS_IMPORTED = 100_000


def cost_of_importing(folder: Path) -> Cost:
    """Of a table with 100,000 rows, each a step: 200 runs on up to 128 GPUs."""
    draw = random.Random(0)  # noqa: S311 - data, no secret
    table = folder / "rows.csv"
    with table.open("w", encoding="utf-8") as file:
        file.write("gpus,micro_batch,run,step_seconds\n")
        for row in range(ROWS_IMPORTED):
            run = row // ROWS
            file.write(f"{2 ** (run % 8)},{16 << run // 8 % 5},run{run},{0.1 * draw.gauss(1.0, 0.02):.6f}\n")
    shutil.rmtree(folder / "imported", ignore_errors=True)
    told = ("--model", "vit-b16", "--train-samples", "50000")
    return cost_of([_program(), "import", str(table), "-o", str(folder / "imported"), *told], folder)


Figures = Mapping[str, Mapping[str, Mapping[str, float]]]
"""What was done -> number of runs -> `Cost`'s fields."""


GOALS = {
    "report --json": "10 s",
    "report": "20 s, 2 GB",
    "resume, to the next run's start": "2 s",
}
"""Of 10,000 runs."""


def page_of(figures: Figures, others: Sequence[str], page: Path, alone: bool) -> None:
    """Puts the table, with `others` below it, into the page, with growth.json and growth.svg beside it."""
    measured, told = ("wall_seconds", "seconds") if alone else ("cpu_seconds", "processor seconds")
    machine = f"{len(os.sched_getaffinity(0))} cores, Python {platform.python_version()}"
    raw = {"machine": machine, "alone": alone, "figures": figures}
    page.with_name("growth.json").write_text(json.dumps(raw, indent=1) + "\n", encoding="utf-8")
    counts = sorted({int(runs) for of_runs in figures.values() for runs in of_runs})
    lines = [
        f"| {told}, memory | {' | '.join(f'{runs:,} runs' for runs in counts)} | goal at 10,000 |",
        f"|---|{'---|' * (len(counts) + 1)}",
    ]
    rows, ideal = [], []
    for name, of_runs in figures.items():
        cells = [
            f"{cost[measured]:.1f} s, {cost['peak_bytes'] / 1e6:.0f} MB" if (cost := of_runs.get(str(runs))) else ""
            for runs in counts
        ]
        lines.append(f"| {name} | {' | '.join(cells)} | {GOALS[name]} |")
        (first, least), *_ = of_runs.items()
        for runs, cost in of_runs.items():
            shown = f"{cost[measured]:.1f} s"
            rows.append({"series": name, "runs": int(runs), "value": cost[measured], "shown": shown, "low": None})
            linear = least[measured] * int(runs) / int(first)
            ideal.append({"series": name, "runs": int(runs), "value": linear})
    lines += ["", f"On {machine}. {' '.join(others)}"]
    if not alone:
        lines += ["", "(Of the processor, all forks together, while other processes shared its cores.)"]
    write_between(page, "growth", "\n".join(lines))
    plot = Plot({"rows": rows, "ideal": ideal})
    told_of = tooltip(series="command", runs="runs", shown=told)
    x = quantity("runs", "runs", scale={"type": "log", "padding": 18}, axis={"values": counts, "format": ",d"})
    y = quantity("value", told, scale={"type": "log"})
    add_curves(plot, x, y, told_of, one_ideal=False)
    title, subtitle = "What a command takes as results grow", "dashed: growth in proportion, from the smallest"
    view = FigureView("growth", {}, title, subtitle, plot.spec(title), {"series": "command", "shown": told}, title)
    page.with_name("growth.svg").write_bytes(picture(view, "svg"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--runs", type=int, nargs="+", default=[100, 1000, 10_000])
    parser.add_argument("--page", type=Path)
    parser.add_argument("--alone", action="store_true", help="nothing else runs on this machine")
    arguments = parser.parse_args()
    figures: dict[str, dict[str, dict[str, float]]] = {}

    def keep(name: str, runs: int, cost: Cost) -> None:
        figures.setdefault(name, {})[str(runs)] = asdict(cost)
        print(f"{runs:6} runs  {name:14} {cost}", flush=True)

    for runs in arguments.runs:
        folder = (arguments.folder / str(runs)).absolute()
        results = folder / "results"
        study, record = make_study(folder, runs)
        if not results.exists():
            make_results(results, record, runs)
        page = folder / "page.html"
        report = [_program(), "report", str(results)]
        print(f"{runs:6} runs  {'pack':14} {cost_of([sys.executable, '-c', _PACK, str(results)], folder)}", flush=True)
        keep("report --json", runs, cost_of([*report, "--json"], folder))
        keep("report", runs, cost_of([*report, "-o", str(page)], folder))
        keep("resume, to the next run's start", runs, cost_of_resuming(study, results))
        page_megabytes = page.stat().st_size / 1e6
        print(f"{runs:6} runs  page of {page_megabytes:.1f} MB", flush=True)
    importing = cost_of_importing(arguments.folder.absolute())
    print(f"import of {ROWS_IMPORTED:,} rows  {importing}", flush=True)
    if arguments.page is not None:
        seconds = importing.wall_seconds if arguments.alone else importing.cpu_seconds
        others = (
            f"The page of {runs:,} runs has {page_megabytes:.1f} MB (goal 5 MB).",
            f"An import of {ROWS_IMPORTED:,} rows of a table takes {seconds:.1f} s (goal 5 s).",
        )
        page_of(figures, others, arguments.page, arguments.alone)


if __name__ == "__main__":
    main()
