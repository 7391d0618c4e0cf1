"""Engines side by side on two hosts over links of known rate: seconds of a step, and what of it transfers leave.

    sudo python benchmarks/engines_over_links.py [--links vit-b16:500mbit,vit-b16:2gbit,vit-ti16:100mbit]
        [--steps 4] [--repeats 1] [--keep FOLDER] [--write docs/benchmarks/README.md]

The hosts are those of `vitscale lab`: namespaces of this machine with one core and a shaped link each, so root, Linux,
Open MPI and OpenSSH. A check of both hosts says what the link really carries. Each model trains alone on one host as
well: what a step takes without anybody to talk to. DeepSpeed stands there with the bucket sizes that it is shipped with
and with those that `vitscale lint` advises. Ten minutes with what is declared; what lies in `--keep` is not done again.
`--write` puts the table between the marks `links` of a page.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from between_marks import write_between

from vitscale import analysis, store
from vitscale.lab import Laboratory, laboratory, parse_bandwidth
from vitscale.lint.rules.overlap import good_bucket
from vitscale.store.checks import latest
from vitscale.trial import model_cost, model_spec
from vitscale.trial.model_spec import ModelSpec
from vitscale.trial.trial import TrainSpec

STUDY = """\
name = "{name}"
[model]
name = "{model}"
image_size = 32
patch_size = 16
[data]
name = "synthetic"
samples = 4096
augment = false
[train]
precision = "fp32"
micro_batch = 64
[scaling]
gpus = [{gpus}]
gpus_per_node = 1
mode = "weak"
[launch]
threads_per_rank = 1
[measure]
steps = {steps}
warmup_steps = 2
repeats = {repeats}
evaluate = false
explain = false
[sweep]
train = [{engines}]
"""
ALONE = '{ engine = "none" }'
ENGINES = """
  { engine = "ddp" },
  { engine = "fsdp2" },
  { engine = "accelerate" },
  { engine = "deepspeed", zero_stage = 2 },
  { engine = "deepspeed", zero_stage = 2, bucket_mib = BUCKET, gather_bucket_mib = BUCKET },
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", default="vit-b16:500mbit,vit-b16:2gbit,vit-ti16:100mbit")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--keep", type=Path, metavar="FOLDER")
    parser.add_argument("--write", type=Path, metavar="PAGE")
    asked = parser.parse_args()
    rows: list[str] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = (asked.keep or Path(scratch)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        for link in asked.links.split(","):
            model, _, bandwidth = link.partition(":")
            with laboratory(2, parse_bandwidth(bandwidth), 1.0) as lab:
                rows += rows_of(lab, folder, model, bandwidth, asked.steps, asked.repeats)
            print(*rows[-6:], sep="\n", flush=True)
    cpu = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name"))
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "deepspeed", "accelerate"))
    runs = "one run" if asked.repeats == 1 else f"{asked.repeats} runs"
    head = (
        f"`python benchmarks/engines_over_links.py --links {asked.links} --steps {asked.steps} "
        f"--repeats {asked.repeats}`: two hosts of one core each on{cpu.partition(':')[2]}, {packages}, "
        f"Python {platform.python_version()}; fp32, micro-batch 64 at 32 pixels, {runs} of {asked.steps} steps a "
        "figure, the spread of runs behind it.\n\n"
        "| parameters | link; as checked | engine | step (s) | of it beyond one host alone |\n|---|---|---|---|---|"
    )
    text = "\n".join([head, *rows])
    print(text)
    if asked.write:
        write_between(asked.write, "links", text)


def rows_of(lab: Laboratory, folder: Path, model: str, bandwidth: str, steps: int, repeats: int) -> list[str]:
    """Lines of the table: one host alone, and each engine on two."""
    own = folder / f"{model}-{bandwidth}"
    if not list((own / "checks").glob("*.json")):
        on_host_0(lab, "check", "--quick", "--hostfile", str(lab.hostfile), "--launcher", "mpirun", "-o", str(own))
    check = latest(own)
    fits = check.fits if check is not None else ()
    carried = max((fit.bandwidth_bytes_per_second for fit in fits if fit.operation == "all_reduce"), default=None)
    spec = model_spec.resolve(ModelSpec(name=model, image_size=32, patch_size=16), 10)
    advised = round(4 * good_bucket(model_cost.parameters(spec) or 0) / 2**20)
    alone = run_study(lab, folder / f"{model}-alone", model, "1", ALONE, steps, repeats)
    two = run_study(lab, own, model, "2", ENGINES.replace("BUCKET", str(advised)), steps, repeats)
    (base,) = (statistics.median(seconds) for _, _, seconds in alone)
    told = "" if carried is None else f"; {8 * carried / 1e6:,.0f} Mbit/s"
    rows = []
    for millions, train, seconds in (*alone, *two):
        step = statistics.median(seconds)
        spread = f" ({min(seconds):.2f} to {max(seconds):.2f})" if len(seconds) > 1 else ""
        link = "none" if train.engine == "none" else f"{bandwidth}{told}"
        beyond = "" if train.engine == "none" else f"{max(0.0, 1 - base / step):.0%}"
        rows.append(f"| {millions:.1f} M | {link} | {engine_of(train)} | {step:.2f}{spread} | {beyond} |")
    return rows


def run_study(
    lab: Laboratory, results: Path, model: str, gpus: str, engines: str, steps: int, repeats: int
) -> list[tuple[float, TrainSpec, list[float]]]:
    """Does what is not done yet; of each trial its millions of parameters, its training and the step of each run."""
    file = results.with_suffix(".toml")
    asked = {"name": results.name, "model": model, "gpus": gpus, "engines": engines, "steps": steps, "repeats": repeats}
    file.write_text(STUDY.format(**asked), encoding="utf-8")
    on_host_0(lab, "run", str(file), "-o", str(results), "--hostfile", str(lab.hostfile), "--launcher", "mpirun")
    analysed = analysis.analyse(store.load(results))
    return [
        (
            (model_cost.parameters(result.trial.model) or 0) / 1e6,
            result.trial.train,
            [run.step_seconds for run in result.runs if run.step_seconds is not None],
        )
        for result in analysed.trials.values()
    ]


def on_host_0(lab: Laboratory, *arguments: str) -> None:
    """A command of vitscale, as on a cluster's head node. Ends the benchmark where it fails."""
    subprocess.run(lab.command(0, [sys.executable, "-m", "vitscale", *arguments]), check=True, stdout=sys.stderr)


def engine_of(train: TrainSpec) -> str:
    """As the table has it."""
    names = {"none": "one host alone", "ddp": "DDP", "fsdp2": "FSDP2", "accelerate": "Accelerate"}
    shipped = "as shipped" if train.bucket_mib is None else f"buckets of {train.bucket_mib} MiB, as advised"
    return names.get(train.engine) or f"DeepSpeed, ZeRO-{train.zero_stage}, {shipped}"


if __name__ == "__main__":
    main()
