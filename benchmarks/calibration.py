"""Predictions where the truth is known: simulated studies, their intervals and errors, beside Amdahl, USL and Ernest.

    python benchmarks/calibration.py [--studies 500] [--first-seed 50000] [--json] [--write docs/calibration.md]

Each study measures up to 4 or 8 ranks of a cluster that `benchmarks/simulator.py` invents, and is asked for 4, 16 and
64 times as many: with what a check of the network found, without, and from epoch times alone. Truth is the mean over
runs there, and one run more. Seeds from 50,000 are of the published table, those below 42,000 were looked at while the
model was made; whoever changes it looks at those, and takes new ones for a new table. Three minutes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from between_marks import write_between
from peers.intervals import KNOWN, Told, interval_score, told
from peers.models import AMDAHL, CONSTANT, ERNEST, USL
from peers.runs import Array
from simulated_study import TIMES, SimulatedStudy, simulated_study

from vitscale.prediction.evidence import Evidence
from vitscale.prediction.fitting import fit
from vitscale.prediction.network.checked import network_of
from vitscale.prediction.predicting import Question, predict

MARK = "calibration"
WITH, WITHOUT = "**vitscale**, network checked", "**vitscale**, network unknown"
EPOCHS = "**vitscale**, epochs alone"
PEERS = (CONSTANT, AMDAHL, USL, ERNEST)


@dataclass(frozen=True)
class Answers:
    """One model on all studies, (studies, targets) each."""

    model: str
    errors: Array
    """Absolute, of the mean's epoch seconds, as a share."""
    mean_held: Array
    future_held: Array
    scores: Array
    """Of the interval of a future run."""
    bias: Array
    """Logarithm of the prediction over the truth."""
    labels: tuple[tuple[str, ...], ...] = ()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--studies", type=int, default=500)
    parser.add_argument("--first-seed", type=int, default=50_000)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    studies = [simulated_study(arguments.first_seed + number) for number in range(arguments.studies)]
    answers = calibrate(studies)
    if arguments.json:
        print(json.dumps([as_json(one) for one in answers]))
        return
    command = f"python benchmarks/calibration.py --studies {arguments.studies} --first-seed {arguments.first_seed}"
    lines = [f"`{command}`:", "", *table(answers)]
    text = "\n".join(lines)
    print(text)
    if arguments.write:
        write_between(arguments.write, MARK, text)


def calibrate(studies: Sequence[SimulatedStudy]) -> list[Answers]:
    """Ours with and without the network, and each peer, on all studies."""
    found = []
    for name in (WITH, WITHOUT, EPOCHS):
        said = [ours(study, evidence(study, name)) for study in studies]
        found.append(_answers(name, studies, [one for one, _ in said], tuple(labels for _, labels in said)))
    for peer in PEERS:
        said_by_peer = [told(peer, *study.runs, study.where, KNOWN, seed) for seed, study in enumerate(studies)]
        found.append(_answers(peer.name, studies, said_by_peer))
    return found


def evidence(study: SimulatedStudy, known: str) -> Evidence:
    """What is known: the steps explained and the network checked, the steps explained, or epoch times alone."""
    if known == EPOCHS:
        return study.epochs_alone(network_of(None))
    return study.evidence(study.checked if known == WITH else network_of(None))


def ours(study: SimulatedStudy, known: Evidence) -> tuple[Told, tuple[str, ...]]:
    """What the product says of the study's targets, and its labels."""
    question = Question(gpus=study.targets, nodes_of=study.cluster.ranks_per_node)
    predictions = predict(fit(known), question)
    epochs = [one.epoch_seconds for one in predictions]
    rows = [(e.value, e.low, e.high, e.future_low, e.future_high) for e in epochs if e is not None]
    assert len(rows) == len(study.targets), "an epoch is unavailable"
    return Told(*np.array(rows).T), tuple(one.label for one in predictions)


def _answers(
    model: str, studies: Sequence[SimulatedStudy], said: Sequence[Told], labels: tuple[tuple[str, ...], ...] = ()
) -> Answers:
    def column(name: str) -> Array:
        return np.stack([getattr(one, name) for one in said])

    steps = np.stack([study.where.steps for study in studies])
    mean = steps * np.stack([study.step_means for study in studies])
    future = steps * np.stack([study.step_futures for study in studies])
    low, high = column("future_low"), column("future_high")
    return Answers(
        model,
        np.abs(column("value") / mean - 1),
        ((column("low") <= mean) & (mean <= column("high"))).astype(float),
        ((low <= future) & (future <= high)).astype(float),
        interval_score(low, high, future),
        np.log(column("value") / mean),
        labels,
    )


def as_json(one: Answers) -> dict[str, object]:
    """A row per study, a column per target."""
    return {
        "model": one.model.replace("*", ""),
        "errors": one.errors.tolist(),
        "mean_held": one.mean_held.astype(int).tolist(),
        "future_held": one.future_held.astype(int).tolist(),
        "scores": one.scores.tolist(),
        "labels": [list(each) for each in one.labels],
    }


def table(answers: Sequence[Answers]) -> list[str]:
    """Error by distance, and how many of the intervals hold."""
    heads = ["model", *(f"{times}x: mean error (median)" for times in TIMES)]
    heads += ["90 % of a future run", *(f"{times}x" for times in TIMES)]
    heads += ["90 % of the mean", *(f"{times}x" for times in TIMES), "interval score"]
    lines = [f"| {' | '.join(heads)} |", f"| {' | '.join(['---'] * len(heads))} |"]
    for one in answers:
        cells = [one.model]
        cells += [f"{each.mean():.1%} ({np.median(each):.1%})" for each in one.errors.T]
        for held in (one.future_held, one.mean_held):
            cells += [f"{held.mean():.1%}", *(f"{each.mean():.0%}" for each in held.T)]
        cells.append(f"{one.scores.mean():.3f}")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    main()
