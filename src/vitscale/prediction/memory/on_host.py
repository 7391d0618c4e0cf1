"""Bytes that ranks on GPUs offload to their host's memory, and the chance that the host does not have them.

All ranks of a host share its memory. On a CPU nothing is offloaded: device and host are one memory, which the forecast
of a rank has.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vitscale.base.arrays import FloatArray
from vitscale.prediction.memory.forecast import configurations_by_world, host_parts, oom_chance, unavailable
from vitscale.trial.trial import Trial


def offloaded_bytes(trial: Trial) -> int | None:
    """Return the bytes that all ranks of a trial's full host offload together; 0 where none are offloaded.

    None where `unavailable` has a reason.
    """
    if unavailable(trial):
        return None
    bytes_of_rank = sum(host_parts(trial).values())
    return bytes_of_rank * trial.world.ranks_per_node


def offloaded_bytes_of_many(
    template: Trial, gpus: NDArray[np.int_], ranks_per_node: NDArray[np.int_], grad_accum: int
) -> FloatArray:
    """Return `offloaded_bytes` of `template` in each configuration of hosts, (configurations,); NaN where unknown.

    Args:
        template: the trial; its world and its micro-steps are ignored.
        gpus: ranks of each configuration.
        ranks_per_node: ranks of a full host in each configuration; more than `gpus` are one host.
        grad_accum: micro-steps of a step; two stand for any larger number.
    """
    offloaded: FloatArray = np.full(len(gpus), np.nan)
    train = template.train.model_copy(update={"grad_accum": grad_accum})
    trial = template.model_copy(update={"train": train})
    if unavailable(trial):
        return offloaded
    if not host_parts(trial):  # whether a rank offloads does not depend on its world
        return np.zeros(len(gpus))
    for world, positions in configurations_by_world(trial, gpus, ranks_per_node):
        bytes_of_rank = sum(host_parts(trial.model_copy(update={"world": world})).values())
        offloaded[positions] = bytes_of_rank * world.ranks_per_node
    return offloaded


def host_oom_chance(offloaded: FloatArray, capacity_bytes: float, ranks: NDArray[np.int_]) -> FloatArray:
    """Return the chance, in [0, 1], that a host's memory does not suffice for what its ranks offload, (hosts,).

    Each rank has an equal share of the host, in which it also needs what a process takes beside tensors
    (`forecast.LEFT_OUT` of a CPU). 0 where nothing is offloaded; NaN where the offloaded bytes are unknown.

    Args:
        offloaded: bytes that all ranks of a host offload together, (hosts,).
        capacity_bytes: memory of a host.
        ranks: ranks of each host, (hosts,).
    """
    chance = oom_chance(offloaded / ranks, capacity_bytes / ranks, "cpu")
    return np.where(offloaded == 0, 0.0, chance)
