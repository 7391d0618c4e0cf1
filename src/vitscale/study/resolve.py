"""Settles what a study leaves open, from the user's DeepSpeed file and the machine, and checks that it fits there. Also
works out batch and data for each rank count under the three policies, and refuses what does not divide."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from vitscale.base.files import beside
from vitscale.engines import of_engine, readers_of
from vitscale.engines.deepspeed import config as deepspeed_config
from vitscale.errors import RequestError, shown, wrong_value
from vitscale.machine.hardware import Machine
from vitscale.study.sections import Study, TrainSection
from vitscale.trial.rank_batches import shares
from vitscale.trial.trial import Device, Mode, Precision, World, exact


def with_deepspeed_config(
    study_path: Path, study: Study, by_hand: frozenset[str]
) -> tuple[Study, dict[str, Any] | None]:
    """Reads the user's DeepSpeed file, if any, and takes from it what the study leaves open.

    Args:
        study_path: the study file; a relative path in it starts there.
        study: one point of the sweep.
        by_hand: the dotted fields that the study sets.

    Raises:
        RequestError: the file cannot be used, or contradicts the study.
    """
    train = study.train
    if train.deepspeed_config is None:
        return study, None
    wrapper = of_engine(train.accelerate_backend or train.engine)
    if "deepspeed_config" not in wrapper.options:
        what = f"train.deepspeed_config is set, but train.engine is {shown(train.engine)}"
        readers = " or ".join(f'"{name}"' for name in readers_of("deepspeed_config"))
        raise RequestError(what, next_step=f"Use train.engine = {readers}, or remove train.deepspeed_config")
    config = deepspeed_config.read(beside(study_path, train.deepspeed_config))
    values = train.model_dump()
    set_by_hand = {f"train.{key}": value for key, value in values.items() if f"train.{key}" in by_hand}
    wrong = deepspeed_config.contradictions(config, set_by_hand)
    if wrong:
        raise RequestError(
            "; ".join(wrong), next_step="Let one of the two decide: what the DeepSpeed file fixes cannot be varied"
        )
    fixed = deepspeed_config.fixed_fields(config)
    fixed.pop("train.optimizer", None)  # built by DeepSpeed as the file describes it
    sizes = deepspeed_config.batch_values(config)
    fixed |= {
        "train.micro_batch": sizes.get("train_micro_batch_size_per_gpu"),
        "train.grad_accum": sizes.get("gradient_accumulation_steps"),
        "train.global_batch": sizes.get("train_batch_size") if study.scaling.mode == "strong-global" else None,
    }
    adopted = {
        field.removeprefix("train."): value
        for field, value in fixed.items()
        if value is not None and field not in by_hand
    }
    try:
        # Validated again, because these values come from the user too.
        new_train = TrainSection.model_validate(values | adopted, strict=True)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        raise RequestError(
            "taken from the DeepSpeed configuration: " + wrong_value(problem, next_step="Correct it there")
        ) from None
    return study.model_copy(update={"train": new_train}), config


def device_of(study: Study, machine: Machine) -> Device:
    """cuda where there is a GPU, unless the study names a device.

    Raises:
        RequestError: it says cuda, and there is none; or it leaves that open, and GPUs that seem to be there cannot be
            read: nobody is to find out after hours that a host of GPUs computed on its CPU.
    """
    if study.train.device != "cpu" and machine.gpus_unreadable is not None:
        raise RequestError(
            f"train.device is '{study.train.device}', and no GPU can be read: {machine.gpus_unreadable}",
            next_step="Correct CUDA_VISIBLE_DEVICES, or give the container NVML (NVIDIA_DRIVER_CAPABILITIES with "
            "'utility'); or set train.device = 'cpu'",
        )
    if study.train.device == "auto":
        return "cuda" if machine.gpus else "cpu"
    if study.train.device == "cuda" and not machine.gpus:
        raise RequestError(
            "train.device is 'cuda', but this machine offers no GPU",
            valid=["cpu", "auto"],
            next_step=f"Check nvidia-smi and CUDA_VISIBLE_DEVICES if it should have one. {_ANOTHER}",
        )
    return study.train.device


def precision_of(study: Study, device: Device, machine: Machine) -> Precision:
    """Precision of the study or its DeepSpeed file; for "auto", bf16 where `device` is fast at it, else fp32."""
    precision = study.train.precision
    if precision == "auto":
        return "bf16" if machine.fast_bf16(device) else "fp32"
    return precision


def world_of(ranks: int, ranks_per_node: int | None, threads: int) -> World:
    """The hosts that `ranks` ranks take: one where they fit, else as many full ones as needed.

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
    study: Study, device: Device, machine: Machine, most_per_node: int | None = None, begun_with: int | None = None
) -> int:
    """Threads per rank, the same along the curve.

    The curve's largest world decides, by its fullest host, also for the baseline on one rank: all curves compute alike.

    Args:
        study: one point of the sweep.
        device: what its ranks compute on.
        machine: what one host offers.
        most_per_node: most ranks that one host takes; None: all.
        begun_with: threads that results were begun with, kept by a study that names none unless they are more than a
            rank's share of the cores.

    Raises:
        RequestError: the largest world needs more cores or GPUs than there are, and sharing them was not asked for.
    """
    ranks = min(max(study.scaling.gpus), most_per_node or max(study.scaling.gpus))
    share = machine.threads_for(ranks, device)
    kept = begun_with if begun_with is not None and (begun_with <= share or study.launch.oversubscribe) else None
    threads = study.launch.threads_per_rank or kept or share
    if study.launch.oversubscribe:
        return threads
    largest = 1 if of_engine(study.train.engine).alone else ranks
    where = " on one host" if most_per_node is not None else ""
    named = f"{largest} rank{'s' if largest > 1 else ''}{where}"
    if device == "cuda" and largest > len(machine.gpus):
        _refuse(f"{named} need {largest} GPUs, and this machine offers {len(machine.gpus)}", len(machine.gpus))
    if largest * threads > machine.cores:
        each = f" of {threads} threads" if threads > 1 else ""
        quota = machine.cpu_quota_cores
        counted = f" (a cgroup quota of {quota:g} cores counts)" if quota is not None else ""
        offered = f"this machine offers {machine.cores}{counted}"
        _refuse(f"{named}{each} need {largest * threads} cores, and {offered}", machine.cores // threads)
    return threads


def _refuse(what: str, fitting_ranks: int) -> None:
    fitting = f"scaling.gpus up to {fitting_ranks}" if fitting_ranks else "fewer launch.threads_per_rank"
    raise RequestError(
        what,
        valid=[fitting],
        next_step=f"Or set launch.oversubscribe = true to share them, which says nothing about scaling. {_ANOTHER}",
    )


_ANOTHER = "To plan for another machine describe it: node.cores=64 node.gpus=8"


_MOST_IMAGES = 1_000_000
"""Largest `trial.BatchCount`."""


def batch_of(mode: Mode, train: TrainSection, world_size: int, smallest_world: int) -> tuple[int, int]:
    """Micro-batch and accumulation of one trial under a batch policy.

    strong-micro and weak keep both. strong-global keeps `global_batch` = N x micro-batch x accumulation: as N grows
    first the accumulation shrinks, then the micro-batch, which never exceeds `train.micro_batch`.

    Raises:
        RequestError: the micro-batch is missing, or the global batch does not divide over the ranks.
    """
    if train.micro_batch is None:
        raise RequestError("train.micro_batch is missing", next_step="Add micro_batch = 64 to [train]")
    if mode != "strong-global":
        return train.micro_batch, train.grad_accum
    global_batch = train.global_batch or smallest_world * train.micro_batch * train.grad_accum
    if global_batch % world_size:
        nearby = sorted({global_batch // world_size * world_size, -(-global_batch // world_size) * world_size} - {0})
        raise RequestError(
            f"a global batch of {global_batch} does not divide over {world_size} ranks",
            valid=[f"train.global_batch = {size}" for size in nearby],
            next_step=f"Or leave {world_size} out of scaling.gpus",
        )
    share = global_batch // world_size
    # The largest micro-batch that divides the rank's share needs the fewest micro-steps.
    micro_batch = next(b for b in range(min(train.micro_batch, share), 0, -1) if share % b == 0)
    return micro_batch, share // micro_batch


def micro_batches_of(train: TrainSection, world_size: int, micro_batch: int) -> tuple[int, ...] | None:
    """Images per micro-step of each rank if `rank_speeds` makes them unequal; their mean is `micro_batch`.

    None where all are equal: that is the same trial as without `rank_speeds`.

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
    images = shares(world_size * micro_batch, train.rank_speeds[:world_size])
    if max(images) > _MOST_IMAGES:
        raise RequestError(
            f"train.rank_speeds gives one rank {max(images):,} of {world_size * micro_batch:,} images",
            valid=[f"at most {_MOST_IMAGES:,} images on a rank"],
            next_step="Use a smaller train.micro_batch",
        )
    return None if len(set(images)) == 1 else images


def fraction_of(study: Study, world_size: int) -> float:
    """Share of the training images used on `world_size` ranks; under weak scaling it grows with them, exactly.

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
