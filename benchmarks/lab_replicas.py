"""FSDP2 over all ranks, FSDP2 with a replica on each host (HSDP) and DDP, on four hosts of two ranks on one machine.

    python benchmarks/lab_replicas.py [--bandwidths 100mbit,400mbit] [--keep FOLDER] [--write docs/parallelism.md]

As root, on Linux, with OpenSSH, on hosts of `vitscale lab` as in lab_prediction.py. At each bandwidth two
results folders are made: `fit` has a check of two hosts, and runs of FSDP2 over all ranks and of DDP on one host and on
two; `truth` has runs of all three on four hosts. HSDP is predicted from `fit`, where nobody ran it. What lies in
`--keep` already is not measured again. `--write` puts the table between the markers of a document.

A reduce-scatter of gloo is an all-reduce, and sends twice the bytes that NCCL's does: the table counts them as sent.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from between_marks import write_between
from lab_prediction import STEPS, STUDY, machine, on_host_0
from lab_prediction import Series as LabSeries

from vitscale import analysis, store
from vitscale.analysis.trials import TrialResult
from vitscale.engines.variants import EngineVariant
from vitscale.lab import Laboratory, laboratory
from vitscale.prediction.configurations import Candidate
from vitscale.prediction.evidence import evidence_of
from vitscale.prediction.fitting import fit
from vitscale.prediction.workloads import evaluate_all
from vitscale.present.estimate import Estimate
from vitscale.trial.parallel import NO_SPLIT, ParallelSpec
from vitscale.trial.trial import Trial

HOSTS, RANKS_PER_HOST, MICRO_BATCH = 4, 2, 32
LAUNCHER = ("--launcher", "torchrun")
DDP, FSDP2 = '  { engine = "ddp", bucket_mib = 2 },\n', '  { engine = "fsdp2" },\n'
HSDP = f'  {{ engine = "fsdp2", "parallel.replicate" = {HOSTS} }},\n'
ON_HOSTS = LabSeries(DDP + FSDP2, RANKS_PER_HOST, held_out=(HOSTS, HOSTS))


@dataclass(frozen=True)
class Row:
    """One way of training on all hosts."""

    bandwidth: str
    name: str
    measured_seconds: float
    """Of a step."""
    predicted: Estimate
    """Of a step, in seconds."""
    sent: str
    """Bytes that a rank sends in a step, by operation and group."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--bandwidths", default="100mbit,400mbit")
    parser.add_argument("--keep", type=Path, metavar="FOLDER")
    parser.add_argument("--write", type=Path, metavar="DOCUMENT")
    options = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as scratch:
        for bandwidth in options.bandwidths.split(","):
            folder = (options.keep or Path(scratch)).resolve() / bandwidth
            folder.mkdir(parents=True, exist_ok=True)
            measure(folder, float(bandwidth.removesuffix("mbit")))
            rows += compared(folder, bandwidth)
    text = f"{machine([ON_HOSTS])}\n\n{table(rows)}"
    print(text)
    if options.write:
        write_between(options.write, "lab table of replicas", f"\n{text}\n")


def measure(folder: Path, bandwidth_mbit: float) -> None:
    """Makes the results folders `fit`, with a check of two hosts, and `truth`."""
    with laboratory(HOSTS, bandwidth_mbit, ON_HOSTS.cores_per_host, RANKS_PER_HOST) as lab:
        two_hosts = folder / "two-hosts"
        lines = lab.hostfile.read_text(encoding="utf-8").splitlines(keepends=True)
        two_hosts.write_text("".join(lines[:2]), encoding="utf-8")
        fitted = folder / "fit"
        if not list((fitted / "checks").glob("*.json")):
            on_host_0(lab, ["check", "--hostfile", str(two_hosts), *LAUNCHER, "-o", str(fitted)])
        run(lab, two_hosts, fitted, study("fit", DDP + FSDP2, hosts=(1, 2)))
        run(lab, lab.hostfile, folder / "truth", study("truth", DDP + FSDP2 + HSDP, hosts=(HOSTS,)))


def run(lab: Laboratory, hostfile: Path, results: Path, study_text: str) -> None:
    """Run what is not done yet of a study."""
    file = results.with_suffix(".toml")
    file.write_text(study_text, encoding="utf-8")
    on_host_0(lab, ["run", str(file), "-o", str(results), "--hostfile", str(hostfile), *LAUNCHER])


def study(name: str, engines: str, hosts: Sequence[int]) -> str:
    """Return the text of a study of these engines on so many hosts."""
    return STUDY.format(
        name=name,
        heads="",
        micro_batch=MICRO_BATCH,
        gpus=", ".join(str(count * RANKS_PER_HOST) for count in hosts),
        ranks_per_host=RANKS_PER_HOST,
        engines=engines,
        oversubscribe="oversubscribe = true\n",
        steps=STEPS,
        repeats=1,
        meters="",
    )


def compared(folder: Path, bandwidth: str) -> list[Row]:
    """Return each way of training on four hosts: measured, and predicted from `fit` alone."""
    fitted = fit(evidence_of(folder / "fit", analysis.analyse(store.load(folder / "fit"))))
    truth = analysis.analyse(store.load(folder / "truth"))
    rows = []
    for result in truth.trials.values():
        trial = result.trial
        name = name_of(trial)
        series = next(series for series in fitted.series if series.startswith(trial.train.engine))
        found = evaluate_all(fitted, series, [candidate_of(trial)])
        rows.append(
            Row(
                bandwidth=bandwidth,
                name=name,
                measured_seconds=statistics.median(run.step_seconds or 0.0 for run in result.run_figures),
                predicted=found.step.at(0),
                sent=sent_in_words(result),
            )
        )
    return rows


def candidate_of(trial: Trial) -> Candidate:
    """Return a trial's configuration as a prediction asks for it."""
    parallel = NO_SPLIT if trial.parallel.replicate == 1 else ParallelSpec(replicate=trial.parallel.replicate)
    variant = EngineVariant.of_train(trial.train)
    return Candidate(trial.world.size, RANKS_PER_HOST, variant, MICRO_BATCH, 1, instance=None, parallel=parallel)


def name_of(trial: Trial) -> str:
    """Return a way of training as the table has it."""
    if trial.train.engine == "ddp":
        return "DDP"
    replicas, ranks = trial.parallel.replicate, trial.layout.sharding_ranks
    return f"FSDP2 over {ranks} ranks" if replicas == 1 else f"FSDP2, {replicas} replicas of {ranks}"


def sent_in_words(result: TrialResult) -> str:
    """Return what a rank sends in a step: "all_gather among 2 ranks 10.4 MB, all_reduce among 4 ranks 8.1 MB"."""
    if result.traffic is None or result.traffic.reason:
        return "unavailable"
    parts = []
    for kind in result.traffic.sent:
        megabytes = (kind.physical_bytes or 0.0) / 1e6
        if megabytes > 0.1:
            parts.append(f"{kind.operation} among {kind.ranks} ranks {megabytes:.1f} MB")
    return ", ".join(parts)


def table(rows: Sequence[Row]) -> str:
    """Return seconds of a step, measured and predicted, and the bytes that a rank sends in it."""
    lines = [
        "| link | training | step, measured | predicted | 90 % of runs | error | sent by a rank in a step |",
        "| --- | --- | ---: | ---: | --- | ---: | --- |",
    ]
    for row in rows:
        low, high = row.predicted.future_ends
        error = 100 * (row.predicted.value / row.measured_seconds - 1)
        lines.append(
            f"| {row.bandwidth} | {row.name} | {row.measured_seconds:.2f} s | {row.predicted.value:.2f} s | "
            f"{low:.2f} to {high:.2f} s | {error:+.1f} % | {row.sent} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
