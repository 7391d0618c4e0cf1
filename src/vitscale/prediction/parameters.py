"""The parameters of a step that are estimated, the prior of each, and the part of a step that it belongs to.

All are logarithms of what they are named for, and normal before measurements. Their priors are about clusters in
general, and were chosen with simulated studies and the published one in view: docs/log.md tells what was tried.

compute          nothing is known; the measured steps decide
alone            a rank that is alone computes as fast as one of many, within 2 % on a GPU; on a CPU, where ranks share
                 memory, turbo clocks and quotas, within 15 %
fixed share      the share of a micro-step that does not depend on its images: 5 %, within a factor of 3
optimizer        2 % of a step, within a factor of 3, until it is measured
devices          like devices differ by 1 %, within a factor of 2. Sinha et al., "Not All GPUs Are Created Equal"
                 (arXiv 2208.11035), saw 8 % on average between all devices of a cluster
jitter           0.5 % from step to step, until it is measured
lateness         what two ranks wait beyond jitter, because they stop for more than one collective of a step: 0.1 % of
                 compute on a GPU, within a factor of 5; 0.3 % on a CPU, within a factor of 7. Nothing where messages
                 are unknown, unless norms are synchronised
bandwidth ...    as surely as the link is known (`network.links`)
overlap          exposed transfers are what arithmetic says, within 15 %, or 30 % for an engine that nobody measured.
                 They are two thirds of that, within a factor of 1.5, for a model of which only the number of
                 parameters was told: chosen on every second published table, tried on the others (docs/log.md)
contention       a hidden second of transfers costs the compute beside it a tenth, within a factor of 2.2

For an engine whose messages are unknown, chosen by empirical Bayes over published tables (docs/calibration-tables.md):

transfer share   transfers at two ranks, as a share of compute. What is sent takes as long in a short step as in a long
                 one, so the shorter the micro-step, the larger the share is expected to be
across share     the same between two hosts, over the square root of the transfer share; larger in short steps too.
                 Nothing where all that was measured lies between hosts: the transfer share then contains it
growth           how much both grow with each doubling of ranks
share of each    the share of compute that each further rank adds (Amdahl's serial part)
rank
slower inside    how much slower a step becomes beyond what was measured, with each doubling of ranks; "slower across"
                 is with each doubling of hosts. Lognormal: mostly small, and at times large. Known messages have a
                 sixth of both, unless the runs were imported
either way       standard deviation of what is left, with each doubling of ranks
further growth   the logit of the share that there is of waiting, transfers between hosts, "growth", "share of each
                 rank" and "slower": more than half in four of five jobs, less than a tenth in one of nine. Each of
                 them is above 0, so without this a curve that stops growing would lie below every interval. The tables
                 hold no such curve; simulated ones and the tables' scores chose it, and "share of each rank" with it
                 (docs/log.md). All of it where messages are known

tree advantage   the logit of a share anywhere between none and all: what two hosts are spared of the bytes that each of
                 many sends, whether messages are known or not
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from vitscale.prediction.evidence import MeasuredPoint
from vitscale.prediction.network.links import Network
from vitscale.prediction.step.messages import messages
from vitscale.prediction.step.model import ALIKE_ACROSS
from vitscale.trial.trial import Trial

JOB_TO_JOB, OF_UNKNOWN_JOBS = 0.015, 0.023
"""Relative standard deviation of one run against the next. The second is for logs that do not tell what was run: what
they time holds more than steps. Hoefler & Belli (SC'15) and the published study see 1 to 5 %."""
JOB_TO_JOB_RUNS = 4.0
"""How many runs that knowledge is worth (a scaled inverse chi-squared prior)."""
JOB_FREEDOM = 4.0
"""Degrees of freedom of the t by which the logarithm of a run's step differs from the mean of many."""
JOB_DEVIATION = math.sqrt(JOB_FREEDOM / (JOB_FREEDOM - 2))
"""Standard deviation of that t over its scale."""
PARTS: Mapping[str, tuple[str, ...]] = {
    "compute": ("compute", "alone", "fixed share"),
    "network inside hosts": ("bandwidth inside", "latency inside"),
    "network between hosts": ("bandwidth across", "latency across", "across share", "tree advantage"),
    "overlap": ("overlap", "contention", "transfer share", "growth", "share of each rank"),
    "optimizer": ("optimizer",),
    "stragglers": ("devices", "jitter", "lateness"),
    "what was not measured": ("slower inside", "slower across", "either way", "further growth"),
}
"""Part of a step -> its parameters. What they leave is job-to-job variation."""
NAMES = tuple(name for names in PARTS.values() for name in names)


@dataclass(frozen=True)
class Prior:
    """Normal prior of one parameter's logarithm."""

    mean: float
    spread: float


PRIORS: Mapping[str, Prior] = {
    "compute": Prior(0.0, 3.0),
    "alone, cuda": Prior(0.0, 0.02),
    "alone, cpu": Prior(0.0, 0.15),
    "fixed share": Prior(math.log(0.05), 1.0),
    "optimizer": Prior(math.log(0.02), 1.0),
    "devices": Prior(math.log(0.01), 0.7),
    "jitter": Prior(math.log(0.005), 0.7),
    "jitter, measured": Prior(0.0, 0.3),
    "lateness, cuda": Prior(math.log(0.001), 1.5),
    "lateness, cpu": Prior(math.log(0.003), 2.0),
    "overlap": Prior(0.0, 0.3),
    "overlap, measured": Prior(0.0, 0.15),
    "overlap, told": Prior(-0.4, 0.4),
    "contention": Prior(math.log(0.1), 0.8),
    "transfer share": Prior(math.log(0.025), 1.5),
    "across share": Prior(math.log(0.45), 1.0),
    "growth": Prior(math.log(0.02), 2.0),
    "share of each rank": Prior(math.log(5.5e-4), 1.7),
    "tree advantage": Prior(1.0, 1.5),
    "slower inside": Prior(math.log(0.004), 1.8),
    "slower across": Prior(math.log(0.0025), 1.8),
    "either way": Prior(0.0, 0.005),
    "further growth": Prior(5.0, 6.0),
}
"""The priors. "compute" and "optimizer" are relative to a step, "jitter, measured" to the jitter that was measured; the
two shares are those of a micro-step of `_USUAL_STEP`."""
STEP_POWER = 1.0
"""Transfers' shares are expected to go with this power of one over the length of a micro-step. The same bytes take the
same time, so it is 1; published tables chose 1.4 to 1.9 where it was left open (docs/log.md)."""
_USUAL_STEP, _SHORTEST, _LONGEST = 0.3, 0.1, 3.0
"""Seconds of a micro-step in published tables, and how far from that it is believed. Where rates count tokens and
batches sentences, steps look shorter than they are."""
_ALWAYS = (
    "fixed share", "devices", "contention", "growth", "share of each rank", "tree advantage", "either way",
    "further growth",
)  # fmt: skip
_LEFT_OUT = ("slower inside", "slower across")
_LEFT_OUT_OF_KNOWN = 6.0
_NOTHING = Prior(math.log(1e-5), 0.01)


def priors(points: Sequence[MeasuredPoint], network: Network, known_messages: bool) -> dict[str, Prior]:
    """Prior of every parameter of a series, before its steps are looked at.

    Args:
        points: those of the series. Of their times only the scale, the jitter and a timed optimizer are used.
        network: for its links' spreads.
        known_messages: whether what the engine sends is known.
    """
    device = points[-1].trial.train.device
    step = min(statistics.median(point.step_seconds) / point.trial.train.grad_accum for point in points)
    timed = [point.parts.optimizer for point in points if point.parts and point.parts.optimizer]
    jitter = _jitter(points)
    told_by_others = not known_messages or points[-1].trial.origin is not None
    late = known_messages or points[-1].trial.train.batch_norm == "synchronised"
    shorter = _shorter_than_usual(points[0])
    # The share inside hosts carries a part of it over to that between hosts.
    across = _of(shorter ** (1 - ALIKE_ACROSS), PRIORS["across share"])
    return {
        "compute": _of(step, PRIORS["compute"]),
        "alone": PRIORS[f"alone, {device}"],
        # Where nothing tells the optimizer from the rest it is left in the rest.
        "optimizer": _of(timed[0], replace(PRIORS["optimizer"], mean=0.0))
        if timed
        else _of(step, PRIORS["optimizer"] if known_messages else Prior(math.log(1e-6), 0.01)),
        "jitter": PRIORS["jitter"] if jitter is None else _of(max(1e-4, jitter), PRIORS["jitter, measured"]),
        "lateness": PRIORS[f"lateness, {device}"] if late else _NOTHING,
        "bandwidth inside": Prior(0.0, network.inside.bandwidth_spread),
        "latency inside": Prior(0.0, network.inside.latency_spread),
        "bandwidth across": Prior(0.0, network.across.bandwidth_spread),
        "latency across": Prior(0.0, network.across.latency_spread),
        "overlap": PRIORS[_overlap(points)],
        "transfer share": _of(shorter, PRIORS["transfer share"]),
        "across share": _NOTHING if _all_across(points) else across,
        **{name: PRIORS[name] for name in _ALWAYS},
        **{name: _of(1.0 if told_by_others else 1 / _LEFT_OUT_OF_KNOWN, PRIORS[name]) for name in _LEFT_OUT},
    }


def _shorter_than_usual(point: MeasuredPoint) -> float:
    """How many times as large transfers' shares are expected to be as in a usual micro-step; 1 without a batch."""
    if not point.batch_known:
        return 1.0
    micro_step = statistics.median(point.step_seconds) / point.trial.train.grad_accum
    return float((_USUAL_STEP / min(_LONGEST, max(_SHORTEST, micro_step))) ** STEP_POWER)


def _overlap(points: Sequence[MeasuredPoint]) -> str:
    if points[-1].trial.model.unknown:
        return "overlap, told"
    return "overlap, measured" if any(point.gpus > 1 for point in points) else "overlap"


def job_scale(trial: Trial) -> float:
    """Prior scale by which the logarithm of a trial's step differs from one run to the next."""
    return OF_UNKNOWN_JOBS if trial.origin is not None or messages(trial) is None else JOB_TO_JOB


def _of(quantity: float, prior: Prior) -> Prior:
    """The prior of `quantity` times what `prior` is of."""
    return replace(prior, mean=prior.mean + math.log(quantity))


_OF_THE_LARGEST = (1.0, 0.826, 0.701, 0.611, 0.540, 0.486, 0.443)
"""Standard deviation of the largest of 1, 2, 4, ... 64 standard normals (Teichroew, Annals of Math. Stat. 1956)."""


def _jitter(points: Sequence[MeasuredPoint]) -> float | None:
    """Relative standard deviation of one rank's step; None: not measured.

    It is from the fewest ranks: there least of it is transfers, and least is lost by taking the slowest rank's.
    """
    known = next((point for point in points if point.step_spread), None)
    if known is None or known.step_spread is None:
        return None
    return known.step_spread / _OF_THE_LARGEST[min(round(math.log2(known.gpus)), len(_OF_THE_LARGEST) - 1)]


def _all_across(points: Sequence[MeasuredPoint]) -> bool:
    several = [point for point in points if point.gpus > 1]
    return bool(several) and all(point.nodes > 1 for point in several)
