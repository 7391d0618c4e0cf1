"""What DeepSpeed sends at each ZeRO stage, as it was counted (docs/traffic.md): that is not what its paper says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from vitscale.engines.deepspeed import states as zero
from vitscale.engines.deepspeed.config import flag, section, states_are_modelled
from vitscale.engines.dtypes import communicated_bytes, weight_bytes
from vitscale.engines.gradients import Tensor, flushed_before_full, of_backward, tensors
from vitscale.engines.messages import Message, Phase
from vitscale.engines.states import sizes
from vitscale.trial.model_cost import ParameterShapes
from vitscale.trial.trial import TrainSpec, Trial


def messages(trial: Trial, shapes: ParameterShapes) -> tuple[Message, ...] | None:
    """DeepSpeed 0.19 at the trial's stage; see the functions below.

    None where the user's own file asks for other exchanges than these.
    """
    train = trial.train
    if not states_are_modelled(_without_offload(train)) or not _has_plain_exchange(train):
        return None
    return (_stage_0, _stages_1_and_2, _stages_1_and_2, _stage_3)[trial.train.zero_stage](trial, shapes)


def _without_offload(train: TrainSpec) -> TrainSpec:
    """The settings without offloading, which changes where states lie but not what is sent."""
    config = dict(train.deepspeed_config or {})
    zero = config.get("zero_optimization")
    if isinstance(zero, dict):
        config["zero_optimization"] = {key: value for key, value in zero.items() if "offload" not in key}
    return train.model_copy(update={"deepspeed_config": config})


def _has_plain_exchange(train: TrainSpec) -> bool:
    """Whether a DeepSpeed file whose memory is modelled leaves alone what changes only the exchanges."""
    config = train.deepspeed_config or {}
    return "optimizer" not in config and not section(config, "zero_optimization").get("zeropp_loco_param")


def _stage_0(trial: Trial, shapes: ParameterShapes) -> tuple[Message, ...]:
    """One all-reduce of everything after backward, whatever bucket size is set."""
    train, count = trial.train, sizes(shapes).all
    pieces = -(-count // zero.FLATTENED_AT_MOST)
    whole = Message("all_reduce", count * communicated_bytes(train) / pieces, pieces, "after", None, False)
    norm = [_scalars(1, 4)] if train.gradient_clipping > 0 else []
    return (whole, *norm)


def _stages_1_and_2(trial: Trial, shapes: ParameterShapes) -> tuple[Message, ...]:
    """All-reduces of all gradients on all ranks, in stage 2 in every micro-step; then all-gathers of weights.

    Without overlap stage 2 stops backward for each bucket. Overlap hardly helps: the default bucket of 5e8 elements is
    larger than most vision transformers, so that nothing is left to hide it.
    """
    train, ranks = trial.train, trial.world.size
    settings = zero.zero_settings(train)
    overlap, every = settings.overlap, train.zero_stage == 2
    phase: Phase = "backward" if every or overlap else "after"
    reduced = _reduced("all_reduce", train, tensors(shapes), settings, phase, overlap, every)
    if flag(train, "use_multi_rank_bucket_allreduce") is False:
        # Each gradient is reduced to the one rank that needs it, as the paper has it.
        reduced = [
            replace(bucket, operation="reduce", tensor_bytes=bucket.tensor_bytes / ranks, calls=bucket.calls * ranks)
            for bucket in reduced
        ]
    each = weight_bytes(train)
    return (*reduced, _scalars(3 if each == 2 else 2, 4), *_gathered_after(trial, shapes, each))


def _gathered_after(trial: Trial, shapes: ParameterShapes, each: int) -> list[Message]:
    """All-gathers of updated weights, with weight decay and without; each group is padded to 2 elements per rank.

    Each group goes in one call, whatever `allgather_bucket_size` says: DeepSpeed reads that only where torch has no
    `all_gather_into_tensor` (`all_gather_dp_groups` in runtime/utils.py).
    """
    unit = 2 * trial.world.size
    padded = [-(-sum(group) // unit) * unit for group in zero.groups(shapes)]
    return [Message("all_gather", elements * each, 1, "after", None, False) for elements in padded]


def _stage_3(trial: Trial, shapes: ParameterShapes) -> tuple[Message, ...]:
    """All-gathers of what no rank keeps, in every forward; reduce-scatters in every backward.

    Tensors up to `stage3_param_persistence_threshold` are gathered once, one by one, after the step. The others are
    fetched `stage3_prefetch_bucket_size` ahead of their use. Backward finds them still there, unless the way through
    the rest of forward and back to them exceeds `stage3_max_reuse_distance`; then it gathers them anew (`traversal`).
    """
    train, ranks = trial.train, trial.world.size
    settings = zero.zero_settings(train)
    # Each tensor is cut into equal parts, and padded for that.
    everything = [tensor._replace(elements=-(-tensor.elements // ranks) * ranks) for tensor in tensors(shapes)]
    kept = [tensor for tensor in everything if tensor.elements <= settings.persistence_threshold]
    each = weight_bytes(train)

    def gathered_bytes(tensor: Tensor) -> int:
        return 2 if train.precision == "bf16" and tensor.cast else each

    went = zero.traversal(zero.in_forward(shapes), settings, train.activation_checkpointing)
    sent = _fetched(went, everything, gathered_bytes)
    # Overlap is the default of stage 3 alone (`overlap_comm_valid` in runtime/zero/config.py).
    # On a CPU there is no second stream: a bucket's exchange holds backward up all the same (docs/calibration-lab.md).
    chosen = flag(train, "overlap_comm") if train.overlap_comm is None else train.overlap_comm
    overlap = chosen is not False and train.device == "cuda"
    sent += _reduced("reduce_scatter", train, everything, settings, "backward", overlap, True)
    sent.append(_scalars(2, 8))
    if kept:
        amount = sum(tensor.elements for tensor in kept) * each
        sent.append(Message("all_gather", amount / len(kept), len(kept), "after", None, False))
    return tuple(sent)


def _fetched(
    went: zero.Traversal, everything: Sequence[Tensor], gathered_bytes: Callable[[Tensor], int]
) -> list[Message]:
    """Gathers of weights, each while what comes before their use is computed.

    Weights of a piece that travel in 16 bits and in 32 bits go one after the other. What forward fetches for backward
    counts with backward.
    """
    of_module: dict[int, list[Tensor]] = {}
    for tensor in everything:
        of_module.setdefault(tensor.module, []).append(tensor)

    def reached(module: int, *, forward: bool) -> float:
        first = of_module[module][0]
        return first.begins if forward else 1.0 - first.ends

    gathers: list[Message] = []
    for fetch in sorted(went.fetches, key=lambda fetch: not fetch.needed_in_forward):
        sizes: dict[int, int] = {}
        for module, index in fetch.tensors:
            own = of_module[module]
            # `tensors` has those of norms and convolutions the other way round.
            tensor = own[index] if len(own[0].shape) > 1 else own[::-1][index]
            each = gathered_bytes(tensor)
            sizes[each] = sizes.get(each, 0) + tensor.elements * each
        forward = fetch.needed_in_forward
        ready = reached(fetch.at, forward=forward) if forward is fetch.in_forward else 0.0
        needed = reached(fetch.needed, forward=forward)
        amount = sum(sizes.values()) / len(sizes)
        phase: Phase = "forward" if forward else "backward"
        gathers.append(Message("all_gather", amount, len(sizes), phase, min(ready, needed), True, needed))
    return gathers


def _reduced(
    operation: str,
    train: TrainSpec,
    everything: Sequence[Tensor],
    settings: zero.ZeroSettings,
    phase: Phase,
    overlap: bool,
    every: bool,
) -> list[Message]:
    """Buckets of gradients. Autocast makes two kinds: what it casts travels in bf16, all else in fp32."""
    if train.precision == "bf16":
        kinds = [([tensor for tensor in everything if tensor.cast is cast], 2 if cast else 4) for cast in (True, False)]
    else:
        kinds = [(list(everything), communicated_bytes(train))]
    buckets = [
        Message(operation, filled.elements * each, 1, phase, filled.ready if overlap else None, every)
        for some, each in kinds
        for filled in flushed_before_full(of_backward(some), max(1, settings.reduce_bucket))
    ]
    return sorted(buckets, key=lambda bucket: bucket.ready or 0.0)


def _scalars(calls: int, size: int) -> Message:
    """Messages that tell norms, and whether anything overflowed."""
    return Message("all_reduce", size, calls, "after", None, False)
