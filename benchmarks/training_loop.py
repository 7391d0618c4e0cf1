"""Steps of `vitscale run` beside those of loops that people would write or take instead: training_loop.py.

    --layers 12 --size 224 --micro-batch 4 --precision bf16
    --ranks 1 2         of each in turn; one rank computes on all cores, more on a share of them each
    --rounds 5 --steps 5
    --device cuda       one rank on a GPU; times are then of the device
    --only NAME ...     these of the contestants
    --write PAGE        puts the table between the marks `training loop` of this page

In each round every contestant trains once, in an order that moves on from round to round, so that a machine's moods
fall on all. A step's time is the median of a run's; what is compared is a round's. Peers live in an environment of
their own (`.loops-venv`), which sees the project's torch, transformers and Accelerate; what does not import there is
said. Half an hour with what is declared, on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from between_marks import write_between

from vitscale import store
from vitscale.analysis.statistics import interval

MARK = "training loop"
ENVIRONMENT = Path(__file__).parent / ".loops-venv"
INSIDE = Path(__file__).parent / "peers/inside_training_loop.py"
PEERS = ("lightning-fabric==2.6.6", "lightning-utilities", "timm")
WARMUP_STEPS = 2
OURS = "vitscale run"
CONTESTANTS = {
    "bare": ("a loop by hand: one projection for q, k, v; fused attention and AdamW", 1.0),
    "transformers": ("transformers' ViT in that loop", None),
    "trainer": ("Hugging Face Trainer", 1.05),
    "accelerate": ("Accelerate", 1.05),
    "fabric": ("Lightning Fabric", 1.05),
    "timm": ("timm's ViT in the loop by hand", None),
    "published": ("as studies are written: fp32, images resized one by one, loss and accuracy read in each step", 3.0),
}
"""Name -> (what it is, the goal: how many times as fast as it a step of ours is)."""
STUDY = """
name = "loop"
[model]
name = "vit-b16"
image_size = {size}
layers = {layers}
[data]
name = "synthetic"
samples = {samples}
source_size = {size}
augment = false
workers = {workers}
[train]
device = "{device}"
engine = "{engine}"
precision = "{precision}"
micro_batch = {micro_batch}
[scaling]
gpus = [{ranks}]
mode = "weak"
[measure]
steps = {steps}
warmup_steps = {warmup}
repeats = 1
evaluate = false
explain = false
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--only", nargs="+", choices=tuple(CONTESTANTS), default=tuple(CONTESTANTS))
    parser.add_argument("--write", type=Path)
    asked = parser.parse_args()
    lines = ["| ranks | beside | step (s), median | vitscale is as fast, times | goal |", "|---|---|---|---|---|"]
    for ranks in asked.ranks:
        steps, unavailable = rounds(ranks, asked)
        lines += table(ranks, steps, unavailable)
    words = " ".join(sys.argv[1:]).partition(" --write")[0]
    head = (
        f"`python benchmarks/training_loop.py {words}`: vit-b16 with {asked.layers} layers at {asked.size}, "
        f"{asked.precision}, micro-batch {asked.micro_batch}, {asked.rounds} rounds of {asked.steps} steps, "
        f"on {where(asked.device)}, torch {installed_torch()}."
    )
    text = "\n".join([head, "", *lines])
    print(text)
    if asked.write:
        write_between(asked.write, MARK, text)


def rounds(ranks: int, asked: argparse.Namespace) -> tuple[dict[str, list[float]], dict[str, str]]:
    """(contestant -> the median step of each round, contestant -> why it is unavailable)."""
    python = environment(asked.device)
    steps: dict[str, list[float]] = {}
    unavailable: dict[str, str] = {}
    names = [OURS, *asked.only]
    for number in range(asked.rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            if name in unavailable:
                continue
            answer = ours(ranks, asked) if name == OURS else peer(python, name, ranks, asked)
            if isinstance(answer, str):
                unavailable[name] = answer
            else:
                steps.setdefault(name, []).append(statistics.median(answer))
            print(f"round {number + 1}, {ranks} ranks, {name}: {answer}", file=sys.stderr)
    return steps, unavailable


def ours(ranks: int, asked: argparse.Namespace) -> list[float]:
    """Seconds of the timed steps of a study of one run: of each the slowest rank's."""
    study = STUDY.format(
        size=asked.size, layers=asked.layers, micro_batch=asked.micro_batch, ranks=ranks, precision=asked.precision,
        steps=asked.steps, warmup=WARMUP_STEPS, engine="none" if ranks == 1 else "ddp",
        device=asked.device, workers=8 if asked.device == "cuda" else 0,
        samples=asked.micro_batch * ranks * (asked.steps + WARMUP_STEPS + 1),
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        path, results = Path(folder) / "study.toml", Path(folder) / "results"
        path.write_text(study, encoding="utf-8")
        command = [sys.executable, "-m", "vitscale", "run", str(path), "-o", str(results)]
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
        if answer.returncode:
            sys.exit(answer.stderr)
        (run,) = store.load(results).runs
    by_step: dict[int, float] = {}
    for line in (line for rank in run.ranks for line in rank.steps if not line.warmup):
        by_step[line.step] = max(by_step.get(line.step, 0.0), line.seconds)
    return [by_step[step] for step in sorted(by_step)]


def peer(python: Path, name: str, ranks: int, asked: argparse.Namespace) -> list[float] | str:
    """The same of a loop of others; why it is unavailable."""
    cores = sorted(os.sched_getaffinity(0))
    each = max(1, len(cores) // ranks)
    processes = []
    with a_free_port() as port:
        for rank in range(ranks):
            own = ",".join(map(str, cores[rank * each : (rank + 1) * each] or cores))
            facts = [
                name, asked.size, asked.layers, asked.micro_batch, asked.precision, WARMUP_STEPS, asked.steps, own,
                asked.device,
            ]  # fmt: skip
            environment = dict(os.environ) | {"OMP_NUM_THREADS": str(each)}
            if ranks > 1:
                environment |= {
                    "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks),
                    "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
                    "TORCHELASTIC_RUN_ID": "loop", "GROUP_RANK": "0",
                }  # fmt: skip
            argv = [str(python), str(INSIDE), *map(str, facts)]
            processes.append(
                subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            )
        told = [process.communicate()[0].strip().splitlines() for process in processes]
    if any(process.returncode for process in processes) or not all(told):
        return f"ended with {[process.returncode for process in processes]}"
    answers: list[Mapping[str, Any]] = [json.loads(lines[-1]) for lines in told]
    if "unavailable" in answers[0]:
        return str(answers[0]["unavailable"])
    return [max(seconds) for seconds in zip(*(answer["step_seconds"] for answer in answers), strict=True)]


def table(ranks: int, steps: Mapping[str, Sequence[float]], unavailable: Mapping[str, str]) -> list[str]:
    """A row for each contestant."""
    own = steps[OURS]
    rows = [f"| {ranks} | {OURS} | {statistics.median(own):.3f} | | |"]
    for name, (what, goal) in CONTESTANTS.items():
        if name not in steps and name not in unavailable:
            continue
        cells = [str(ranks), what]
        if name in unavailable:
            rows.append(f"| {' | '.join([*cells, f'unavailable: {unavailable[name]}', '', ''])} |")
            continue
        ratio = interval([theirs / mine for theirs, mine in zip(steps[name], own, strict=True)])
        times = f"{ratio.value:.2f}"
        if not ratio.note:
            low, high = ratio.ends
            times += f" ({low:.2f} to {high:.2f})"
        cells += [f"{statistics.median(steps[name]):.3f}", times, "" if goal is None else f"{goal:.2f}"]
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def environment(device: str) -> Path:
    """The interpreter of the peers' environment, made where there is none; on a GPU ours, which must have them."""
    if device == "cuda":
        return Path(sys.executable)
    python = ENVIRONMENT / "bin/python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(ENVIRONMENT)], check=True)
        (ENVIRONMENT / ".gitignore").write_text("*\n", encoding="utf-8")
        paths = {"base": str(ENVIRONMENT), "platbase": str(ENVIRONMENT)}
        site = Path(sysconfig.get_path("purelib", "venv", paths))
        (site / "torch_of_the_project.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
        # Without what they depend on: a torch of their own, in gigabytes.
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", "--no-deps", *PEERS], check=True)
    return python


@contextmanager
def a_free_port() -> Iterator[str]:
    """Of this host, free a moment ago."""
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    yield str(port)


def where(device: str) -> str:
    """The processor as the kernel calls it, or the GPU."""
    if device == "cuda":
        from vitscale.machine.gpus import host_gpus

        return " and ".join(gpu.name for gpu in host_gpus())
    return f"{os.cpu_count()} cores ({processor()})"


def processor() -> str:
    """As the kernel calls it."""
    from vitscale.machine.cores import cpu_facts

    return cpu_facts().get("model name") or platform.machine()


def installed_torch() -> str:
    """Its version."""
    from importlib.metadata import version

    return version("torch")


if __name__ == "__main__":
    main()
