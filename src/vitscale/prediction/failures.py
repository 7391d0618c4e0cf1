"""From compute time to time to finish: hosts fail, and work since the last checkpoint is done again.

All of it rests on how often hosts fail, which no study measures: it is a line of its own beside what is predicted,
driven by a prior until the user says otherwise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from vitscale.prediction.results import Assumption

_DAY = 86_400.0

NODE_MTBF_SECONDS = 160 * _DAY
"""Mean time between failures of a host with eight GPUs that end a job: the geometric mean of four published figures.

- Llama 3 (arXiv 2407.21783, section 3.3.4): 419 unexpected interruptions in 54 days on 16,384 H100, so on 2,048 hosts:
  264 days.
- Kokolis et al., "Revisiting Reliability in Large-Scale Machine Learning Research Clusters" (HPCA 2025, arXiv
  2410.21680): 6.50 failures per thousand node-days on one A100 cluster and 2.34 on another: 154 and 427 days. Jobs of
  1,024 GPUs, 128 hosts, on the first of them lasted 7.9 hours in the mean: 42 days.
"""
NODE_MTBF_SPREAD = 1.0
"""Of its logarithm: that of the four."""
_LARGEST_EXPONENT = 600.0
"""e^709 is the largest that a float holds."""


@dataclass(frozen=True)
class TimeToFinish:
    """A job that saves its state every so often and goes on from there when a host fails."""

    interval_seconds: float
    """Work between two checkpoints that makes the job the shortest; all of the work where it is less than that."""
    wall_seconds: float
    """Expected, with checkpoints, restarts and work done again; infinite where the job would practically never end."""
    failures: float
    """Expected while it runs."""
    lost_share: float
    """Of the wall time, in [0, 1]: what is not work."""


def time_to_finish(
    work_seconds: float,
    nodes: int,
    checkpoint_seconds: float,
    restart_seconds: float,
    node_mtbf_seconds: float = NODE_MTBF_SECONDS,
) -> TimeToFinish:
    """The expected wall time of a job on hosts that fail independently, at the best interval between checkpoints.

    Failures come as a Poisson process, at M = MTBF of a host / hosts; checkpoints and restarts may fail too. With an
    interval of tau, a checkpoint of delta, a restart of R and work of T: `M e^(R/M) (e^((tau + delta)/M) - 1) T/tau`;
    the best tau is about `sqrt(2 delta M) (1 + sqrt(delta/(2M))/3 + (delta/(2M))/9) - delta`, and M from delta = 2M
    on. Both are of Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future
    Generation Computer Systems 22 (2006), which refines Young, CACM 17 (1974).

    Args:
        work_seconds: of the job without failures and checkpoints.
        nodes: hosts.
        checkpoint_seconds: training stands still so long for each.
        restart_seconds: from a failure until work goes on: noticing it, another host, loading the checkpoint.
        node_mtbf_seconds: of one host; see `NODE_MTBF_SECONDS`.

    Raises:
        ValueError: a time below 0, no host, or an MTBF of 0.
    """
    times = (work_seconds, checkpoint_seconds, restart_seconds, node_mtbf_seconds)
    if nodes < 1 or node_mtbf_seconds <= 0 or not all(time >= 0 and math.isfinite(time) for time in times):
        raise ValueError(f"no job of {nodes} hosts and these times: {times}")
    between = node_mtbf_seconds / nodes
    interval = min(work_seconds, best_interval(checkpoint_seconds, between))
    restarting, working = restart_seconds / between, (interval + checkpoint_seconds) / between
    if restarting + working > _LARGEST_EXPONENT:
        return TimeToFinish(interval, math.inf, math.inf, 1.0)
    # Where checkpoints cost nothing they are taken all the time, and no work is lost but that of restarts.
    pieces = between * math.expm1(working) / interval if interval > 0 else 1.0
    wall = math.exp(restarting) * pieces * work_seconds
    lost = 1.0 - work_seconds / wall if wall > 0 else 0.0
    return TimeToFinish(interval, wall, wall / between, max(0.0, lost))


def best_interval(checkpoint_seconds: float, between_failures_seconds: float) -> float:
    """Work between two checkpoints that makes a long job the shortest: Daly (2006), as in `time_to_finish`."""
    delta, between = checkpoint_seconds, between_failures_seconds
    if delta >= 2 * between:
        return between
    ratio = delta / (2 * between)
    # Of a checkpoint so short that the root of its product is 0, no more than that is left of the formula.
    return max(0.0, math.sqrt(2 * delta * between) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - delta)


def assumption(nodes: int, node_mtbf_seconds: float = NODE_MTBF_SECONDS) -> Assumption:
    """What the answer takes for granted, in words."""
    days, hours = node_mtbf_seconds / _DAY, node_mtbf_seconds / nodes / 3600
    hosts = "the host fails" if nodes == 1 else f"one of {nodes:,} hosts fails"
    every = f"{hours / 24:.3g} days" if hours > 48 else f"{hours:.3g} hours"
    return Assumption(
        part="failures of hosts",
        taken=f"a host fails every {days:.0f} days, within a factor of 3 either way, so that {hosts} every {every}",
        measurement="the cluster's own record: node-days over the jobs that a host has ended",
    )
