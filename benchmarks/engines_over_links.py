"""Engines side by side on two hosts over links of known rate: seconds of a step, and what of it transfers leave.

    sudo python benchmarks/engines_over_links.py [--links vit-b16:500mbit,vit-b16:2gbit,vit-ti16:100mbit]
        [--steps 4] [--repeats 1] [--keep FOLDER] [--write docs/benchmarks/README.md]
    sudo python benchmarks/engines_over_links.py --splits 64x32:100mbit,64x32:1gbit,4x224:100mbit
        [--steps 4] [--keep FOLDER] [--write docs/parallelism.md]

The hosts are those of `vitscale lab`: namespaces of this machine with one core and a shaped link each, so root, Linux,
Open MPI and OpenSSH. A check of both hosts says what the link really carries. Each model trains alone on one host as
well: what a step takes without anybody to talk to. DeepSpeed stands there with the bucket sizes that it is shipped with
and with those that `vitscale lint` advises. Ten minutes with what is declared; what lies in `--keep` is not done again.
`--write` puts the table between the marks `links` of a page.

`--splits IMAGESxPIXELS:LINK,...` trains, instead, one model on four ranks, two to a host of 0.9 cores: as four copies
for data parallelism, and as models that ranks share, each time with as many images a step. Ranks that share matrices or
tokens by twos are of one host, stages on both. It takes two to four minutes for each, and its marks are `splits over
links`.
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
from vitscale.analysis.scaling import split_name
from vitscale.deepspeed_lint.rules.overlap import good_bucket
from vitscale.lab import Laboratory, laboratory, parse_bandwidth
from vitscale.store.checks import latest
from vitscale.trial import model_cost, model_spec
from vitscale.trial.model_spec import ModelSpec
from vitscale.trial.trial import TrainSpec, Trial

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


SPLIT_STUDY = """\
name = "{name}"
[model]
name = "vit-ti16"
image_size = {pixels}
patch_size = 8
layers = 6
heads = 4
[data]
name = "synthetic"
samples = 4096
augment = false
[train]
precision = "fp32"
micro_batch = {images}
global_batch = {images}
[scaling]
gpus = [4]
gpus_per_node = 2
mode = "strong-global"
[launch]
threads_per_rank = 1
oversubscribe = true
[measure]
steps = {steps}
warmup_steps = 2
repeats = {repeats}
evaluate = false
explain = false
[sweep]
train = [
  {{ engine = "ddp" }},
  {{ engine = "fsdp2" }},
  {{ engine = "fsdp2", "parallel.tensor" = 2 }},
  {{ engine = "fsdp2", "parallel.tensor" = 4 }},
  {{ engine = "ddp", "parallel.sequence" = 2 }},
  {{ engine = "ddp", "parallel.sequence" = 4 }},
  {{ engine = "ddp", "parallel.pipeline" = 2, "parallel.schedule" = "gpipe", micro_batch = {of_stages} }},
]
"""
MOST_MICRO_BATCHES = 4
"""Of stages, of each data-parallel rank's images."""
CORES_PER_HOST = 0.9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", default="vit-b16:500mbit,vit-b16:2gbit,vit-ti16:100mbit")
    parser.add_argument("--splits", metavar="IMAGESxPIXELS:LINK,...")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--keep", type=Path, metavar="FOLDER")
    parser.add_argument("--write", type=Path, metavar="PAGE")
    asked = parser.parse_args()
    rows: list[str] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = (asked.keep or Path(scratch)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        if asked.splits:
            write_splits(folder, asked)
            return
        for link in asked.links.split(","):
            model, _, bandwidth = link.partition(":")
            with laboratory(2, parse_bandwidth(bandwidth), 1.0) as lab:
                rows += rows_of(lab, folder, model, bandwidth, asked.steps, asked.repeats)
            print(*rows[-6:], sep="\n", flush=True)
    head = (
        f"`python benchmarks/engines_over_links.py --links {asked.links} --steps {asked.steps} "
        f"--repeats {asked.repeats}`: two hosts of one core each on {machine('torch', 'deepspeed', 'accelerate')}; "
        f"fp32, micro-batch 64 at 32 pixels, {runs_of(asked.repeats)} of {asked.steps} steps a "
        "figure, the spread of runs behind it.\n\n"
        "| parameters | link; as checked | engine | step (s) | of it beyond one host alone |\n|---|---|---|---|---|"
    )
    text = "\n".join([head, *rows])
    print(text)
    if asked.write:
        write_between(asked.write, "links", text)


def machine(*packages: str) -> str:
    """The processor and the versions of all that decides."""
    cpu = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name"))
    versions = ", ".join(f"{name} {version(name)}" for name in packages)
    return f"{cpu.partition(':')[2].strip()}, {versions}, Python {platform.python_version()}"


def runs_of(repeats: int) -> str:
    return "one run" if repeats == 1 else f"{repeats} runs"


def write_splits(folder: Path, asked: argparse.Namespace) -> None:
    """Splits against data parallelism on as many ranks."""
    rows: list[str] = []
    for case in asked.splits.split(","):
        size, _, bandwidth = case.partition(":")
        images, pixels = map(int, size.split("x"))
        name = f"splits-{size}-{bandwidth}"
        text = SPLIT_STUDY.format(
            name=name,
            images=images,
            pixels=pixels,
            of_stages=max(1, images // 2 // MOST_MICRO_BATCHES),
            steps=asked.steps,
            repeats=asked.repeats,
        )
        with laboratory(2, parse_bandwidth(bandwidth), CORES_PER_HOST, 2) as lab:
            trained = run_file(lab, folder / name, text)
        steps = [statistics.median(seconds) for _, seconds in trained]
        rows += [
            f"| {images} of {pixels} px | {bandwidth} | {split_of(trial)} | {step:.2f} | {steps[0] / step:.2f} |"
            for (trial, _), step in zip(trained, steps, strict=True)
        ]
        print(*rows[-len(steps) :], sep="\n", flush=True)
    head = (
        f"{machine('torch')}; two hosts of two ranks and {CORES_PER_HOST} cores each; fp32, {runs_of(asked.repeats)} "
        f"of {asked.steps} steps a figure.\n\n"
        "| images a step | link | four ranks as | step (s) | times as fast as data 4, ddp |\n|---|---|---|---:|---:|"
    )
    text = "\n".join([head, *rows])
    print(text)
    if asked.write:
        write_between(asked.write, "splits over links", f"\n{text}\n")


def split_of(trial: Trial) -> str:
    """As the table has it."""
    split = split_name(trial.parallel).removesuffix(", gpipe")
    data = f"data {trial.layout.data}" * (trial.layout.data > 1)
    stages = f", {trial.train.grad_accum} micro-batches" * (trial.parallel.pipeline > 1)
    return f"{' x '.join(filter(None, (split, data)))}, {trial.train.engine}{stages}"


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
    asked = {"name": results.name, "model": model, "gpus": gpus, "engines": engines, "steps": steps, "repeats": repeats}
    return [
        ((model_cost.parameters(trial.model) or 0) / 1e6, trial.train, seconds)
        for trial, seconds in run_file(lab, results, STUDY.format(**asked))
    ]


def run_file(lab: Laboratory, results: Path, study: str) -> list[tuple[Trial, list[float]]]:
    """Does what is not done yet; each trial in the order of the study, and the step of each of its runs."""
    file = results.with_suffix(".toml")
    file.write_text(study, encoding="utf-8")
    on_host_0(lab, "run", str(file), "-o", str(results), "--hostfile", str(lab.hostfile), "--launcher", "mpirun")
    return [
        (result.trial, [run.step_seconds for run in result.run_figures if run.step_seconds is not None])
        for result in analysis.analyse(store.load(results)).trials.values()
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
