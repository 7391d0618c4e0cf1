"""Our draws of a fit against those of emcee, on the very same density.

    pip install emcee; python benchmarks/sampler.py FOLDER [--steps 8000] [--write docs/calibration-tables.md]

FOLDER has published tables, as `published_tables.py` takes them. Five of them, told apart by how far and on what they
were measured, are fitted on what their index says; both samplers answer for the largest count that is held back. emcee
(Foreman-Mackey et al., PASP 2013) is a peer and no dependency. Its own error shows in how far two halves of its chains
differ, ours in how far ten seeds do.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from between_marks import write_between
from product import imported
from published_folder import Table, read

from vitscale import analysis, store
from vitscale.base.arrays import FloatArray
from vitscale.prediction.evidence import gather
from vitscale.prediction.likelihood import Likelihood, by_name
from vitscale.prediction.network.checked import network_of
from vitscale.prediction.parameters import priors
from vitscale.prediction.sampling import sample
from vitscale.prediction.step.model import Worlds
from vitscale.prediction.step.of_series import model_of, worlds_of

MARK = "sampler"
TABLES = (
    "dlperf_ngc_pt_bert_fp16_b64_2node", "dlperf_paddle_bert_fp16_b64", "nv_gnmt_dgx2_amp", "tf_ec2_resnet152",
    "dlperf_of_rn50_fp32_7runs",
)  # fmt: skip
DRAWS, SEEDS = 512, 10
ENDS = (0.05, 0.5, 0.95)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=8000)
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    heads = ["table", "low, middle, high: ours over emcee's", "ten seeds of ours", "halves of emcee", "effective draws",
             "seconds: ours", "emcee"]  # fmt: skip
    lines = [f"| {' | '.join(heads)} |", f"| {' | '.join(['---'] * len(heads))} |"]
    for table in read(arguments.folder):
        if table.entry.name in TABLES:
            lines.append(compared(table, arguments.steps))
            print(lines[-1], flush=True)
    text = "\n".join([f"`python benchmarks/sampler.py FOLDER --steps {arguments.steps}`:", "", *lines])
    if arguments.write:
        write_between(arguments.write, MARK, text)


def compared(table: Table, steps: int) -> str:
    """A line of the page: quantiles of the step on the largest count asked, by both samplers."""
    likelihood, answer = density(table)
    began = time.perf_counter()
    of_ours = [sample(likelihood.log_density, likelihood.proposals(), rng, DRAWS) for rng in seeds()]
    ours_seconds = (time.perf_counter() - began) / SEEDS
    ours = np.array([np.quantile(answer(one.rows), ENDS) for one in of_ours])
    began = time.perf_counter()
    first, second = (np.quantile(answer(half), ENDS) for half in chains(likelihood, steps))
    peer_seconds = time.perf_counter() - began
    ratio = ours.mean(axis=0) - (first + second) / 2
    cells = [
        table.entry.name,
        ", ".join(f"{100 * math.expm1(value):+.1f}" for value in ratio) + " %",
        ", ".join(f"{100 * value:.1f}" for value in ours.std(axis=0)) + " %",
        ", ".join(f"{100 * abs(value):.1f}" for value in first - second) + " %",
        f"{min(one.effective_size for one in of_ours):.0f} or more",
        f"{ours_seconds:.2f}",
        f"{peer_seconds:.0f}",
    ]
    return f"| {' | '.join(cells)} |"


def seeds() -> list[np.random.Generator]:
    """Ten."""
    return [np.random.default_rng(seed) for seed in range(SEEDS)]


def density(table: Table) -> tuple[Likelihood, Callable[[FloatArray], FloatArray]]:
    """(what is sampled, its rows -> the logarithm of a step on the largest count that is held back)."""
    with tempfile.TemporaryDirectory() as folder:
        results = imported(table.at(table.entry.fit), Path(folder))
        evidence = gather(analysis.analyse(store.load(results)), network_of(None))
    (series,) = evidence.series
    model = model_of(series.points, evidence)
    likelihood = Likelihood(model, series.points, priors(series.points, evidence.network, model.messages is not None))
    largest = worlds_of(series.points[-1:])
    ranks = np.array([float(max(table.entry.held))])
    per_node = np.minimum(ranks, float(table.entry.per_node or ranks[0]))
    asked = Worlds(ranks, per_node, largest.micro_batch, largest.grad_accum, largest.slowdown)

    def answer(rows: FloatArray) -> FloatArray:
        total = model.times(by_name(likelihood.rows(rows)), asked).total[:, 0]
        return np.asarray(np.log(total), dtype=np.float64)

    return likelihood, answer


def chains(likelihood: Likelihood, steps: int) -> tuple[FloatArray, FloatArray]:
    """The second half of emcee's steps, of one half of its walkers and of the other: they start from our own first
    proposals, so that no mode that is known is missed."""
    import emcee

    size = len(likelihood.active) + 1
    walkers = 8 * size
    rng = np.random.default_rng(1)
    start = sample(likelihood.log_density, likelihood.proposals(), rng, walkers).rows
    moves = [(emcee.moves.DEMove(), 0.8), (emcee.moves.DESnookerMove(), 0.2)]
    peer = emcee.EnsembleSampler(walkers, size, likelihood.log_density, vectorize=True, moves=moves)
    peer.run_mcmc(start + 1e-6 * rng.standard_normal(start.shape), steps)
    chain = np.asarray(peer.get_chain(discard=steps // 2, thin=10), dtype=np.float64)
    first, second = chain[:, : walkers // 2], chain[:, walkers // 2 :]
    return first.reshape(-1, size), second.reshape(-1, size)


if __name__ == "__main__":
    main()
