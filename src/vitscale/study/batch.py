"""The three batch policies: how batch and data follow the rank count. Arithmetic, and what does not divide."""

from __future__ import annotations

from vitscale.errors import RequestError
from vitscale.study.sections import Study, TrainSection
from vitscale.trial.rank_batches import shares
from vitscale.trial.trial import Mode, TrainSpec, exact

_MOST_IMAGES = 1_000_000
"""Of `trial.BatchCount`."""


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


def needless_micro_steps(train: TrainSpec, largest_micro_batch: int) -> str:
    """How a rank's share is cut into more micro-steps than it has to be; empty where it is not.

    A prime share of 37 images can be cut into 37 of one image alone, where 3 of at most 16 would hold them.

    Args:
        train: of a trial under strong-global.
        largest_micro_batch: that its study allows.
    """
    share = train.micro_batch * train.grad_accum
    fewest = -(-share // largest_micro_batch)
    if train.grad_accum <= fewest:
        return ""
    return (
        f"{train.grad_accum} x {train.micro_batch} of {share} images a rank, where {fewest} micro-steps would hold them"
    )


def micro_batches_of(train: TrainSection, world_size: int, micro_batch: int) -> tuple[int, ...] | None:
    """Images per micro-step of each rank where `rank_speeds` makes them unequal; their mean is `micro_batch`.

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
    found = shares(world_size * micro_batch, train.rank_speeds[:world_size])
    if max(found) > _MOST_IMAGES:
        raise RequestError(
            f"train.rank_speeds gives one rank {max(found):,} of {world_size * micro_batch:,} images",
            valid=[f"at most {_MOST_IMAGES:,} images on a rank"],
            next_step="Use a smaller train.micro_batch",
        )
    return None if len(set(found)) == 1 else found


def fraction_of(study: Study, world_size: int) -> float:
    """Share of the training images used on `world_size` ranks: grows with them under weak scaling, exactly.

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
