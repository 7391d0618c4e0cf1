"""Predictions held against hosts on one machine: fitted on 1 and 2 hosts and a check, compared with 3 and 4.

    python benchmarks/lab_prediction.py [--bandwidths 100mbit,400mbit] [--repeats 1] [--keep FOLDER]
                                        [--splits tensor sequence pipeline sleeping] [--write docs/calibration-lab.md]

As root, on Linux, with Open MPI and OpenSSH: the hosts are those of `vitscale lab`, each with a fixed share of a core
and a link of fixed rate, and every engine trains the same small ViT on them. At each bandwidth two results folders are
made: `fit` (a check of two hosts, runs on 1 and 2) and `truth` (runs on 3 and 4), which the prediction never sees.
About half an hour with one repeat; what lies in `--keep` already is not measured again. `--write` puts the table
between the markers of a document. Exits with 1 where an error is above 10 %.

`--splits` trains, instead of the engines, models that two ranks share: matrices and tokens inside each host of two
ranks; stages on hosts of one rank, of which 2 and 4 are fitted to and 6 and 8 held out, and the same with stages that
sleep, so that what two cores do to eight hosts that compute is left out. Its table has markers of its own. A split at
one bandwidth takes four to seven minutes.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

from between_marks import write_between

from vitscale import analysis, store
from vitscale.analysis.scaling import split_name
from vitscale.lab import Laboratory, laboratory
from vitscale.prediction.evidence import evidence_of
from vitscale.prediction.fitting import fit
from vitscale.prediction.predicting import Question, predict
from vitscale.present.estimate import Estimate
from vitscale.trial.trial import Trial

MICRO_BATCH, STEPS = 32, 12
BOUND = 0.10
STUDY = """\
name = "lab-{name}"

[model]
name = "vit-ti16"           # 2.7 million parameters: 10.8 MB of gradients
image_size = 32
patch_size = 8
layers = 6
{heads}
[data]
name = "synthetic"

[train]
precision = "fp32"
micro_batch = {micro_batch}

[scaling]
mode = "strong-micro"
gpus = [{gpus}]
gpus_per_node = {ranks_per_host}

[sweep]
train = [
{engines}]

[launch]
threads_per_rank = 1
{oversubscribe}
[measure]
steps = {steps}
warmup_steps = 2
repeats = {repeats}
evaluate = false
{meters}"""
ENGINES = """\
  { engine = "ddp", bucket_mib = 2 },
  { engine = "deepspeed", zero_stage = 1, bucket_mib = 4, gather_bucket_mib = 4 },
  { engine = "deepspeed", zero_stage = 2, bucket_mib = 4, gather_bucket_mib = 4 },
  { engine = "deepspeed", zero_stage = 3, bucket_mib = 4, gather_bucket_mib = 4 },
  { engine = "fsdp2" },
"""


@dataclass(frozen=True)
class Series:
    """What is trained on how many hosts."""

    engines: str
    """Tables of [sweep]."""
    ranks_per_host: int
    heads: str = ""
    fitted: tuple[int, int] = (1, 2)
    held_out: tuple[int, int] = (3, 4)
    cores_per_host: float = 0.35
    """All hosts take 1.4 cores: on two, what else runs on the machine finds room."""
    stages_sleep: bool = False
    """As `SLEEPING` has it."""
    repeats: int = 1
    """Runs of each figure, which is their median."""

    @property
    def hosts(self) -> int:
        """In all."""
        return max(self.held_out)

    @property
    def sharing(self) -> range:
        """Hosts that are fitted to. Two of them share a core, as hosts do among all, with the same bursts. Four keep
        both cores at work, for each core computes more slowly while the other one does, too."""
        return range(self.hosts // 2) if max(self.fitted) > 2 else range(0, self.hosts, 2)

    def study(self, name: str, hosts: Sequence[int]) -> str:
        """Its study on so many hosts."""
        return STUDY.format(
            name=name,
            micro_batch=MICRO_BATCH,
            gpus=", ".join(str(count * self.ranks_per_host) for count in hosts),
            steps=STEPS,
            repeats=self.repeats,
            engines=self.engines,
            heads=self.heads,
            oversubscribe="oversubscribe = true\n" * (self.ranks_per_host > 1),
            ranks_per_host=self.ranks_per_host,
            meters='meters = ["sleeping-stages"]\n' * self.stages_sleep,
        )


STAGES = '  { engine = "ddp", bucket_mib = 2, micro_batch = 8, grad_accum = 4, "parallel.pipeline" = 2 },\n'
SPLITS = {
    "tensor": Series('  { engine = "fsdp2", "parallel.tensor" = 2 },\n', 2, "heads = 4\n"),
    "sequence": Series('  { engine = "ddp", bucket_mib = 2, "parallel.sequence" = 2 },\n', 2, "heads = 4\n"),
    "pipeline": Series(STAGES, 1, "heads = 4\n", (2, 4), (6, 8), 0.175, repeats=3),
    "sleeping": Series(STAGES, 1, "heads = 4\n", (2, 4), (6, 8), 1.0, stages_sleep=True),
}
"""Of four heads, which two ranks divide. Stages have a host each: of two that share a host's quota one computes at
twice the pace while the other stands in the bubble."""
SLEEPING = """\
import time

from torch.distributed.pipelining import PipelineStage


class Stages:
    def __init__(self):
        for name, seconds in (("forward_one_chunk", 0.1), ("backward_one_chunk", 0.2)):
            setattr(PipelineStage, name, sleeping(getattr(PipelineStage, name), seconds))

    def begin(self, device):
        pass

    def end(self):
        return {}


def sleeping(compute, seconds):
    def longer(*arguments, **named):
        time.sleep(seconds)
        return compute(*arguments, **named)

    return longer
"""
"""A meter of another package: each stage sleeps in a micro-batch's forward, and twice as long in its backward, beside
the little that it computes."""


@dataclass(frozen=True)
class Row:
    """One engine on one rank count at one bandwidth. `predicted` and `measured` are seconds of a step."""

    bandwidth: str
    engine: str
    hosts: int
    fitted: dict[int, float]
    """Hosts -> measured."""
    predicted: Estimate
    measured: float
    label: str

    @property
    def error(self) -> float:
        """As a share of what was measured."""
        return self.predicted.value / self.measured - 1

    @property
    def held(self) -> bool:
        """Whether the 90 % interval of a future run holds it."""
        low, high = self.predicted.future_ends
        return low <= self.measured <= high


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--bandwidths", default="100mbit,400mbit")
    parser.add_argument("--repeats", type=int, help="runs of each figure")
    parser.add_argument("--keep", type=Path, metavar="FOLDER")
    parser.add_argument("--splits", nargs="*", choices=SPLITS, default=())
    parser.add_argument("--write", type=Path, metavar="DOCUMENT")
    asked = parser.parse_args()
    every = {split: SPLITS[split] for split in asked.splits} or {"": Series(ENGINES, 1)}
    if asked.repeats:
        every = {split: replace(series, repeats=asked.repeats) for split, series in every.items()}
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as scratch:
        for bandwidth in asked.bandwidths.split(","):
            for split, series in every.items():
                folder = (asked.keep or Path(scratch)).resolve() / bandwidth / split
                measure(folder, float(bandwidth.removesuffix("mbit")), series)
                rows += compared(folder, bandwidth, series)
    text = f"{machine(every.values())}\n\n{table(rows)}\n\n{summary(rows)}"
    print(text)
    if asked.write:
        write_between(asked.write, "lab table of splits" if asked.splits else "lab table", f"\n{text}\n")
    if not all(abs(row.error) <= BOUND for row in rows):
        sys.exit(1)


def measure(folder: Path, bandwidth_mbit: float, series: Series) -> None:
    """Makes the results folders `fit`, with a check of its hosts, and `truth`."""
    package = folder / "sleeping_stages-1.dist-info"
    package.mkdir(parents=True, exist_ok=True)
    (package / "METADATA").write_text("Name: sleeping-stages\nVersion: 1\n")
    (package / "entry_points.txt").write_text("[vitscale.meters]\nsleeping-stages = sleeping_stages:Stages\n")
    (folder / "sleeping_stages.py").write_text(SLEEPING)
    os.environ["PYTHONPATH"] = str(folder)
    with laboratory(series.hosts, bandwidth_mbit, series.cores_per_host, series.ranks_per_host) as lab:
        some = folder / "some-hosts"
        hosts = lab.hostfile.read_text(encoding="utf-8").splitlines(keepends=True)
        some.write_text("".join(hosts[place] for place in series.sharing))
        fitted = folder / "fit"
        if not list((fitted / "checks").glob("*.json")):
            on_host_0(lab, ["check", "--hostfile", str(some), "--launcher", "mpirun", "-o", str(fitted)])
        run_study(lab, some, fitted, series.study("fit", series.fitted))
        run_study(lab, lab.hostfile, folder / "truth", series.study("truth", series.held_out))


def run_study(lab: Laboratory, hostfile: Path, results: Path, study: str) -> None:
    """Runs what is not done yet."""
    file = results.with_suffix(".toml")
    file.write_text(study, encoding="utf-8")
    on_host_0(lab, ["run", str(file), "-o", str(results), "--hostfile", str(hostfile), "--launcher", "mpirun"])


def on_host_0(lab: Laboratory, arguments: Sequence[str]) -> None:
    """A command of vitscale, as on a cluster's head node. Ends the benchmark where it fails."""
    began = time.monotonic()
    subprocess.run(lab.command(0, [sys.executable, "-m", "vitscale", *arguments]), check=True, stdout=sys.stderr)
    print(f"vitscale {arguments[0]}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)


def compared(folder: Path, bandwidth: str, series: Series) -> list[Row]:
    """Each engine on more hosts: predicted from `fit` alone, beside the measured runs of `truth`."""
    results = store.load(folder / "fit")
    known = analysis.analyse(results)
    predictions = predict(
        fit(evidence_of(folder / "fit", known)),
        Question(tuple(hosts * series.ranks_per_host for hosts in series.held_out)),
    )
    truth = analysis.analyse(store.load(folder / "truth"))
    measured = {
        (engine_of(one.trial), one.trial.world.size): statistics.median(
            run.step_seconds or 0.0 for run in one.run_figures
        )
        for some in (known, truth)
        for one in some.trials.values()
        if one.run_figures
    }
    return [
        Row(
            bandwidth=bandwidth,
            engine=(engine := engine_of(one.trial)),
            hosts=one.gpus // series.ranks_per_host,
            fitted={count: measured[engine, count * series.ranks_per_host] for count in series.fitted},
            predicted=one.step_seconds,
            measured=measured[engine, one.gpus],
            label=one.label,
        )
        for one in predictions
    ]


def engine_of(trial: Trial) -> str:
    """As the table has it."""
    train = trial.train
    engine = {"ddp": "DDP", "fsdp2": "FSDP2"}.get(train.engine) or f"ZeRO-{train.zero_stage}"
    return ", ".join(filter(None, (engine, split_name(trial.parallel), "sleeping" * bool(trial.window.meters))))


def machine(every: Iterable[Series]) -> str:
    """What it was measured on."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "deepspeed"))
    cores = {own: f"{own.cores_per_host:g} core{'s' * (own.cores_per_host != 1)}" for own in every}
    runs = {own.repeats: "one run" if own.repeats == 1 else f"the median of {own.repeats} runs" for own in cores}
    several = " on " + " or ".join(f"{own.hosts} hosts of {cores[own]}" for own in cores if own.repeats > 1)
    told = ", or ".join(runs[count] + several * (count > 1 and len(runs) > 1) for count in sorted(runs))
    labs = {f"{own.hosts} hosts of {of_each}, {own.ranks_per_host} to a host" for own, of_each in cores.items()}
    return (
        f"{cpu}, {os.cpu_count()} cores, {platform.system()} {platform.release()}; {packages}; Python "
        f"{platform.python_version()}. Ranks on {' or '.join(sorted(labs))}; {MICRO_BATCH} images a rank; {STEPS} "
        f"steps a run; {told} for each figure."
    )


def table(rows: Sequence[Row]) -> str:
    """Seconds of a step."""
    lines = [
        "| link | engine | fitted to | hosts | predicted | 90 % of runs | measured | error |",
        "| --- | --- | --- | ---: | ---: | --- | ---: | ---: |",
    ]
    for row in sorted(rows, key=lambda row: row.bandwidth):
        between = f"{row.predicted.future_low:.2f} to {row.predicted.future_high:.2f}"
        fitted = ", ".join(f"{hosts}: {seconds:.2f} s" for hosts, seconds in row.fitted.items())
        cells = [row.bandwidth, row.engine, fitted, str(row.hosts)]
        cells += [f"{row.predicted.value:.2f} s", between if row.held else f"{between}: outside"]
        cells += [f"{row.measured:.2f} s", f"{100 * row.error:+.1f} %"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def summary(rows: Sequence[Row]) -> str:
    """How far off, how often within the interval, and how far off the simplest answer would be."""
    errors = [abs(row.error) for row in rows]
    as_fitted = [abs(row.fitted[max(row.fitted)] / row.measured - 1) for row in rows]
    return (
        f"Mean error {100 * statistics.fmean(errors):.1f} %, worst {100 * max(errors):.1f} %; "
        f"{sum(row.held for row in rows)} of {len(rows)} within the 90 % interval of a future run. The step of the "
        f"most fitted hosts, taken for more: mean {100 * statistics.fmean(as_fitted):.1f} %, worst "
        f"{100 * max(as_fitted):.1f} %."
    )


if __name__ == "__main__":
    main()
