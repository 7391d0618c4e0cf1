"""Settles what a study leaves open, from the user's DeepSpeed file and the machine, and checks that it fits there.

Also works out batch and data for each rank count under the three batch policies, and refuses what does not divide.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from vitscale.base.files import path_named_in
from vitscale.engines import of_engine, readers_of
from vitscale.engines.deepspeed import config as deepspeed_config
from vitscale.errors import RequestError, shown, wrong_value
from vitscale.machine.gpus import VENDORS
from vitscale.machine.hardware import Machine
from vitscale.study.sections import Study, TrainSection
from vitscale.trial.rank_batches import largest_divisor, shares
from vitscale.trial.trial import DeviceName, Mode, Precision, World, exact


class WithDeepspeedConfig(NamedTuple):
    """A study, and the content of the user's DeepSpeed file; None without one."""

    study: Study
    config: dict[str, Any] | None


def with_deepspeed_config(study_path: Path, study: Study, set_fields: frozenset[str]) -> WithDeepspeedConfig:
    """Read the user's DeepSpeed file, if any, and take from it what the study leaves open.

    Args:
        study_path: the study file; a relative path in it starts there.
        study: one point of the sweep.
        set_fields: the dotted fields that the study sets.

    Raises:
        RequestError: the file cannot be used, or contradicts the study.
    """
    train = study.train
    if train.deepspeed_config is None:
        return WithDeepspeedConfig(study, config=None)
    wrapper = of_engine(train.accelerate_backend or train.engine)
    if "deepspeed_config" not in wrapper.options:
        what = f"train.deepspeed_config is set, but train.engine is {shown(train.engine)}"
        readers = " or ".join(f'"{name}"' for name in readers_of("deepspeed_config"))
        raise RequestError(what, next_step=f"Use train.engine = {readers}, or remove train.deepspeed_config")
    config = deepspeed_config.read(path_named_in(study_path, train.deepspeed_config))
    study_values = train.model_dump()
    set_values = {f"train.{key}": value for key, value in study_values.items() if f"train.{key}" in set_fields}
    contradictions = deepspeed_config.contradictions(config, set_values)
    if contradictions:
        next_step = "Let one of the two decide: what the DeepSpeed file fixes cannot be varied"
        raise RequestError("; ".join(contradictions), next_step=next_step)
    adopted_values = {}
    for field, value in _fields_in_config(config, study.scaling.mode).items():
        if value is not None and field not in set_fields:
            adopted_values[field.removeprefix("train.")] = value
    try:
        # Validated again, because these values come from the user too.
        new_train = TrainSection.model_validate(study_values | adopted_values, strict=True)
    except ValidationError as error:
        problem = wrong_value(error.errors(include_url=False)[0], next_step="Correct it there")
        raise RequestError(f"taken from the DeepSpeed configuration: {problem}") from None
    return WithDeepspeedConfig(study.model_copy(update={"train": new_train}), config)


def _fields_in_config(config: dict[str, Any], mode: Mode) -> dict[str, Any]:
    """Return dotted field of [train] -> its value in a DeepSpeed configuration; None where the file leaves it open.

    The global batch is left to the batch policy `mode` unless that keeps it constant.
    """
    fixed = deepspeed_config.fixed_fields(config)
    fixed.pop("train.optimizer", None)  # built by DeepSpeed as the file describes it
    sizes = deepspeed_config.batch_values(config)
    fixed["train.micro_batch"] = sizes.get("train_micro_batch_size_per_gpu")
    fixed["train.grad_accum"] = sizes.get("gradient_accumulation_steps")
    fixed["train.global_batch"] = sizes.get("train_batch_size") if mode == "strong-global" else None
    return fixed


def device_of(study: Study, machine: Machine) -> DeviceName:
    """Return the device that the study names; for "auto" "cuda" where there is a GPU, else "cpu".

    Raises:
        RequestError: the study says cuda, and there is no GPU. Or it does not say cpu, and there are signs of GPUs that
            cannot be read: otherwise a host with GPUs might compute on its CPU for hours before anybody notices.
    """
    device = study.train.device
    if device != "cpu" and machine.gpus_unreadable is not None:
        raise RequestError(
            f"train.device is '{device}', and no GPU can be read: {machine.gpus_unreadable}",
            next_step=f"{_unreadable_advice(machine.gpus_unreadable)}; or set train.device = 'cpu'",
        )
    if device == "auto":
        return "cuda" if machine.gpus else "cpu"
    if device == "cuda" and not machine.gpus:
        raise RequestError(
            "train.device is 'cuda', but this machine offers no GPU",
            valid=["cpu", "auto"],
            next_step=f"Check {_VENDOR_TOOLS} and CUDA_VISIBLE_DEVICES if it should have one. "
            f"{_ANOTHER_MACHINE_ADVICE}",
        )
    return device


def _unreadable_advice(problem: str) -> str:
    """Return what to do where GPUs cannot be read: the advice of each vendor whose library the problem names."""
    concerned = [vendor for vendor in VENDORS if vendor.library in problem] or VENDORS
    return "; ".join(vendor.unreadable_advice for vendor in concerned)


def precision_of(study: Study, device: DeviceName, machine: Machine) -> Precision:
    """Return the precision of the study or its DeepSpeed file; for "auto", bf16 where it is fast on `device`."""
    precision = study.train.precision
    if precision != "auto":
        return precision
    return "bf16" if machine.fast_bf16(device) else "fp32"


def world_of(ranks: int, ranks_per_node: int | None, threads: int) -> World:
    """Return the hosts that `ranks` ranks take: one where they fit, else as many full ones as needed.

    Args:
        ranks: number of ranks in all.
        ranks_per_node: most ranks that one host takes; None: all.
        threads: threads of each rank.

    Raises:
        RequestError: the last host would have fewer ranks than the others.
    """
    if ranks_per_node is None or ranks <= ranks_per_node:
        return World(ranks_per_node=ranks, threads_per_rank=threads)
    if ranks % ranks_per_node:
        raise RequestError(
            f"{ranks} ranks do not fill hosts of {ranks_per_node}",
            valid=[f"scaling.gpus in multiples of {ranks_per_node}, or below it"],
            next_step="Or set scaling.gpus_per_node to a number that divides them all",
        )
    return World(nodes=ranks // ranks_per_node, ranks_per_node=ranks_per_node, threads_per_rank=threads)


def threads_of(
    study: Study, device: DeviceName, machine: Machine, most_per_node: int | None = None, begun_with: int | None = None
) -> int:
    """Return the threads per rank, which are the same on the whole curve, the baseline on one rank included.

    Where the study does not set them, they are each rank's share of a host's cores in the largest world of the curve.

    Args:
        study: one point of the sweep.
        device: what its ranks compute on.
        machine: what one host offers.
        most_per_node: most ranks that one host takes; None: all.
        begun_with: threads per rank of earlier runs of the study. A study that sets none keeps them, unless they are
            more than a rank's share of the cores.

    Raises:
        RequestError: the largest world needs more cores or GPUs than there are, and the study does not allow sharing
            (launch.oversubscribe).
    """
    launch = study.launch
    largest_world = max(study.scaling.gpus)
    ranks_on_host = min(largest_world, most_per_node or largest_world)
    share_of_cores = machine.threads_for(ranks_on_host, device)
    threads = share_of_cores
    if launch.threads_per_rank is not None:
        threads = launch.threads_per_rank
    elif begun_with is not None and (begun_with <= share_of_cores or launch.oversubscribe):
        threads = begun_with
    if not launch.oversubscribe:
        ranks = 1 if of_engine(study.train.engine).alone else ranks_on_host
        _check_host_has_room(machine, ranks, threads, device, hosts_are_limited=most_per_node is not None)
    return threads


def _check_host_has_room(
    machine: Machine, ranks: int, threads: int, device: DeviceName, *, hosts_are_limited: bool
) -> None:
    """Refuse more ranks on one host than it has GPUs or cores for.

    Args:
        machine: what the host offers.
        ranks: ranks on the host.
        threads: threads of each rank.
        device: what the ranks compute on.
        hosts_are_limited: whether a host takes a limited number of ranks, so that the message speaks of one host.
    """
    subject = f"{ranks} ranks" if ranks > 1 else "1 rank"
    if hosts_are_limited:
        subject += " on one host"
    if device == "cuda" and ranks > len(machine.gpus):
        what = f"{subject} need {ranks} GPUs, and this machine offers {len(machine.gpus)}"
        raise _too_small_error(what, fitting_ranks=len(machine.gpus))
    needed_cores = ranks * threads
    if needed_cores > machine.cores:
        with_threads = f" of {threads} threads" if threads > 1 else ""
        what = f"{subject}{with_threads} need {needed_cores} cores, and this machine offers {_cores_offered(machine)}"
        raise _too_small_error(what, fitting_ranks=machine.cores // threads)


def _cores_offered(machine: Machine) -> str:
    """Return the number of cores in words: "8", or "2 (a cgroup quota of 2 cores counts)"."""
    if machine.cpu_quota_cores is None:
        return str(machine.cores)
    return f"{machine.cores} (a cgroup quota of {machine.cpu_quota_cores:g} cores counts)"


def _too_small_error(what: str, *, fitting_ranks: int) -> RequestError:
    """Return the error for a machine that is too small, with the number of ranks that fit on it; 0: not even one."""
    valid = f"scaling.gpus up to {fitting_ranks}" if fitting_ranks else "fewer launch.threads_per_rank"
    return RequestError(
        what,
        valid=[valid],
        next_step="Or set launch.oversubscribe = true to share them, which says nothing about scaling. "
        f"{_ANOTHER_MACHINE_ADVICE}",
    )


_VENDOR_TOOLS = " or ".join(vendor.tool for vendor in VENDORS)
_ANOTHER_MACHINE_ADVICE = "To plan for another machine describe it: node.cores=64 node.gpus=8"


_LARGEST_MICRO_BATCH = 1_000_000
"""Largest `trial.BatchCount`."""


class RankBatch(NamedTuple):
    """How many images a rank takes in an optimizer step, and how: micro-batch x accumulation."""

    micro_batch: int
    grad_accum: int


def batch_of(mode: Mode, train: TrainSection, world_size: int, smallest_world: int) -> RankBatch:
    """Return micro-batch and accumulation of one trial under a batch policy.

    The policies strong-micro and weak keep both as the study has them. The policy strong-global keeps the global batch
    = N x micro-batch x accumulation: with more ranks N the accumulation shrinks first, and then the micro-batch.

    Args:
        mode: the batch policy.
        train: [train] at one point of the sweep.
        world_size: N, data-parallel ranks of the trial.
        smallest_world: data-parallel ranks of the curve's smallest world, whose global batch strong-global keeps where
            the study names none.

    Raises:
        RequestError: the micro-batch is missing, or the global batch does not divide over the ranks.
    """
    if train.micro_batch is None:
        raise RequestError("train.micro_batch is missing", next_step="Add micro_batch = 64 to [train]")
    if mode != "strong-global":
        return RankBatch(train.micro_batch, train.grad_accum)
    global_batch = train.global_batch or smallest_world * train.micro_batch * train.grad_accum
    share, remainder = divmod(global_batch, world_size)
    if remainder:
        next_below = share * world_size
        nearby = [size for size in (next_below, next_below + world_size) if size > 0]
        raise RequestError(
            f"a global batch of {global_batch} does not divide over {world_size} ranks",
            valid=[f"train.global_batch = {size}" for size in nearby],
            next_step=f"Or leave {world_size} out of scaling.gpus",
        )
    # The largest micro-batch that divides the rank's share needs the fewest micro-steps.
    micro_batch = largest_divisor(share, at_most=train.micro_batch)
    return RankBatch(micro_batch, share // micro_batch)


def micro_batches_of(train: TrainSection, world_size: int, micro_batch: int) -> tuple[int, ...] | None:
    """Return the images per micro-step of each rank, where `rank_speeds` makes them unequal.

    Return None where all are equal, so that the trial is the same as without `rank_speeds`.

    Args:
        train: [train] at one point of the sweep.
        world_size: data-parallel ranks of the trial.
        micro_batch: images per micro-step of a rank in the mean.

    Raises:
        RequestError: there are fewer speeds than ranks, or a share is too large.
    """
    if train.rank_speeds is None:
        return None
    if len(train.rank_speeds) < world_size:
        raise RequestError(
            f"train.rank_speeds holds {len(train.rank_speeds)} speeds for {world_size} ranks",
            next_step=f"Give {world_size}, one for each rank in order (fewer ranks use the first of them), or "
            f"leave {world_size} out of scaling.gpus",
        )
    images_of_all = world_size * micro_batch
    images_by_rank = shares(images_of_all, train.rank_speeds[:world_size])
    if max(images_by_rank) > _LARGEST_MICRO_BATCH:
        raise RequestError(
            f"train.rank_speeds gives one rank {max(images_by_rank):,} of {images_of_all:,} images",
            valid=[f"at most {_LARGEST_MICRO_BATCH:,} images on a rank"],
            next_step="Use a smaller train.micro_batch",
        )
    are_equal = len(set(images_by_rank)) == 1
    return None if are_equal else images_by_rank


def fraction_of(study: Study, world_size: int) -> float:
    """Return the share of the training images that `world_size` ranks use; under weak scaling it grows with the ranks.

    Raises:
        RequestError: weak scaling would need more images than there are.
    """
    if study.scaling.mode != "weak":
        return study.data.fraction
    per_gpu = study.scaling.fraction_per_gpu
    if per_gpu is None:
        share = exact(study.data.fraction) * world_size / max(study.scaling.gpus)
    else:
        share = exact(per_gpu) * world_size
    if share > 1:
        raise RequestError(
            f"weak scaling with scaling.fraction_per_gpu = {per_gpu} needs {float(share):g} of the training images "
            f"at {world_size} ranks",
            valid=[f"scaling.fraction_per_gpu <= 1/{max(study.scaling.gpus)}"],
            next_step="Use a smaller share per rank, or fewer ranks",
        )
    return float(share)
