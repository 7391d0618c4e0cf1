"""The collectives of a step under DeepSpeed at each ZeRO stage, as counted (docs/traffic.md): not as its paper says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from vitscale.engines.deepspeed.config import flag, section
from vitscale.engines.deepspeed.extensions import unmodelled_setting, zero_plus_plus
from vitscale.engines.deepspeed.settings import STAGE_0_BUCKET_ELEMENTS, zero_settings
from vitscale.engines.deepspeed.states import optimizer_groups
from vitscale.engines.deepspeed.traversal import Fetch, TensorKey, modules_in_forward, weight_fetches
from vitscale.engines.dtypes import communicated_bytes, weight_bytes
from vitscale.engines.gradients import Tensor, flushed_before_full, of_backward, tensors, up_to_multiple
from vitscale.engines.messages import Message, MicroSteps, StepPhase
from vitscale.engines.states import sizes
from vitscale.trial.model_cost import ParameterShapes
from vitscale.trial.trial import TrainSpec, Trial


def messages(trial: Trial, shapes: ParameterShapes) -> tuple[Message, ...] | None:
    """Return what DeepSpeed 0.19 sends at the trial's stage; see the function of each stage.

    None where the user's own file asks for other exchanges than these.
    """
    train = trial.train
    if unmodelled_setting(_without_offload(train)) or not _has_plain_exchange(train):
        return None
    by_stage = {0: _stage_0, 1: _stages_1_and_2, 2: _stages_1_and_2, 3: _stage_3}
    return by_stage[train.zero_stage](trial, shapes)


def _without_offload(train: TrainSpec) -> TrainSpec:
    """Return the settings without offloading, which changes where states lie but not what is sent."""
    config = dict(train.deepspeed_config or {})
    zero = config.get("zero_optimization")
    if isinstance(zero, dict):
        config["zero_optimization"] = {key: value for key, value in zero.items() if "offload" not in key}
    return train.model_copy(update={"deepspeed_config": config})


def _has_plain_exchange(train: TrainSpec) -> bool:
    """Whether a DeepSpeed file whose memory is modelled leaves alone what changes only the exchanges."""
    config = train.deepspeed_config or {}
    has_other_exchange = "optimizer" in config or section(config, "zero_optimization").get("zeropp_loco_param")
    return not has_other_exchange and not zero_plus_plus(train).quantises


def _stage_0(trial: Trial, shapes: ParameterShapes) -> tuple[Message, ...]:
    """One all-reduce of everything after backward, whatever bucket size is set."""
    train = trial.train
    elements = sizes(shapes).all
    calls = up_to_multiple(elements, STAGE_0_BUCKET_ELEMENTS) // STAGE_0_BUCKET_ELEMENTS
    gradients = Message(
        "all_reduce",
        tensor_bytes=elements * communicated_bytes(train) / calls,
        calls=calls,
        phase="after",
        ready=None,
        micro_steps="last",
    )
    if train.gradient_clipping == 0:
        return (gradients,)
    return gradients, _scalars(calls=1, scalar_bytes=4)


def _stages_1_and_2(trial: Trial, shapes: ParameterShapes) -> tuple[Message, ...]:
    """All-reduces of all gradients on all ranks, in stage 2 in every micro-step; then all-gathers of weights.

    Without overlap stage 2 stops backward for each bucket. Overlap hardly helps: the default bucket of 5e8 elements is
    larger than most vision transformers, so that nothing is left to hide it.
    """
    train = trial.train
    settings = zero_settings(train)
    is_stage_2 = train.zero_stage == 2
    buckets = _gradient_buckets(
        "all_reduce",
        train,
        tensors(shapes),
        bucket_elements=settings.reduce_bucket,
        phase="backward" if is_stage_2 or settings.overlap else "after",
        overlaps=settings.overlap,
        micro_steps="all" if is_stage_2 else "last",
    )
    if flag(train, "use_multi_rank_bucket_allreduce") is False:
        buckets = [_reduced_to_owners(bucket, trial.world.size) for bucket in buckets]
    scalars = _scalars(calls=3 if weight_bytes(train) == 2 else 2, scalar_bytes=4)
    return (*buckets, scalars, *_updated_weight_gathers(trial, shapes))


def _reduced_to_owners(bucket: Message, ranks: int) -> Message:
    """Return a bucket of which each gradient is reduced to the one rank that needs it, as the paper has it."""
    return replace(bucket, operation="reduce", tensor_bytes=bucket.tensor_bytes / ranks, calls=bucket.calls * ranks)


def _updated_weight_gathers(trial: Trial, shapes: ParameterShapes) -> list[Message]:
    """Return all-gathers of updated weights, one for each group of the optimizer, padded to 2 elements per rank.

    Each group goes in one call, whatever `allgather_bucket_size` says: DeepSpeed reads that only where torch has no
    `all_gather_into_tensor` (`all_gather_dp_groups` in runtime/utils.py).
    """
    gathers = []
    for group in optimizer_groups(shapes):
        padded = up_to_multiple(sum(group), 2 * trial.world.size)
        group_bytes = padded * weight_bytes(trial.train)
        gathers.append(Message("all_gather", group_bytes, calls=1, phase="after", ready=None, micro_steps="last"))
    return gathers


def _stage_3(trial: Trial, shapes: ParameterShapes) -> tuple[Message, ...]:
    """All-gathers of what no rank keeps, in every forward; reduce-scatters in every backward.

    Tensors up to `stage3_param_persistence_threshold` are gathered once, one by one, after the step. The others are
    fetched `stage3_prefetch_bucket_size` ahead of their use. Backward finds them still there, unless the way through
    the rest of forward and back to them exceeds `stage3_max_reuse_distance`; then it gathers them anew
    (`weight_fetches`). With hpZ all gathers but the first of each weight in an optimizer step are among the ranks that
    share a second shard (`_gathers_with_second_shard`).
    """
    train = trial.train
    settings = zero_settings(train)
    padded = _padded_tensors(shapes, trial.world.size)
    fetches = weight_fetches(modules_in_forward(shapes), settings, train.activation_checkpointing)
    gradient_buckets = _gradient_buckets(
        "reduce_scatter",
        train,
        padded,
        bucket_elements=settings.reduce_bucket,
        phase="backward",
        overlaps=_stage_3_overlaps(train),
        micro_steps="all",
    )
    return (
        *_weight_gathers(fetches, padded, train),
        *gradient_buckets,
        _scalars(calls=2, scalar_bytes=8),
        *_small_weight_gathers(padded, settings.persistence_threshold, train),
    )


def _padded_tensors(shapes: ParameterShapes, ranks: int) -> list[Tensor]:
    """Return the model's tensors as stage 3 cuts them: each is padded to equal parts for all ranks."""
    return [tensor._replace(elements=up_to_multiple(tensor.elements, ranks)) for tensor in tensors(shapes)]


def _stage_3_overlaps(train: TrainSpec) -> bool:
    """Whether gradients are exchanged beside backward: by default in stage 3, unlike in the others.

    `overlap_comm_valid` in runtime/zero/config.py has the default. On a CPU there is no second stream: a bucket's
    exchange holds backward up all the same (docs/calibration-lab.md).
    """
    setting = train.overlap_comm
    if setting is None:
        setting = flag(train, "overlap_comm")
    return setting is not False and train.device == "cuda"


def _small_weight_gathers(padded: Sequence[Tensor], threshold: int, train: TrainSpec) -> list[Message]:
    """Return the all-gathers of weights that every rank keeps, one call for each tensor, once they are updated."""
    small = [tensor for tensor in padded if tensor.elements <= threshold]
    if not small:
        return []
    total_bytes = sum(tensor.elements for tensor in small) * weight_bytes(train)
    mean_bytes = total_bytes / len(small)
    return [Message("all_gather", mean_bytes, calls=len(small), phase="after", ready=None, micro_steps="last")]


def _weight_gathers(fetches: Sequence[Fetch], padded: Sequence[Tensor], train: TrainSpec) -> list[Message]:
    """Return all-gathers of weights, each beside what is computed until their use; those for forward come first."""
    tensors_by_module: dict[int, list[Tensor]] = {}
    for tensor in padded:
        tensors_by_module.setdefault(tensor.module, []).append(tensor)
    if zero_plus_plus(train).second_shard_ranks > 1:
        weight_gathers = _gathers_with_second_shard(fetches, tensors_by_module, train)
    else:
        weight_gathers = [_weight_gather(fetch, tensors_by_module, train) for fetch in fetches]
    return sorted(weight_gathers, key=lambda gather: gather.phase == "backward")


def _gathers_with_second_shard(
    fetches: Sequence[Fetch], tensors_by_module: Mapping[int, Sequence[Tensor]], train: TrainSpec
) -> list[Message]:
    """Return all-gathers under hpZ, where only a weight's first gather in an optimizer step goes over all ranks.

    Its second shard is made when it is released after that, and is dropped at the end of the step
    (`_partition_param_sec` in runtime/zero/partition_parameters.py, `invalidate_secondary_tensor` in stage3.py). A
    fetch of some weights that have one and of others that have none is two gathers, the former first
    (`__all_gather_params_` in partitioned_param_coordinator.py).
    """
    gathered_before: set[TensorKey] = set()
    weight_gathers = []
    for fetch in fetches:
        again = tuple(key for key in fetch.tensors if key in gathered_before)
        new = tuple(key for key in fetch.tensors if key not in gathered_before)
        gathered_before.update(new)
        whole_fetch = replace(_weight_gather(fetch, tensors_by_module, train), group="second shard")
        if not new:
            weight_gathers.append(whole_fetch)
            continue
        if again:
            part = _weight_gather(fetch._replace(tensors=again), tensors_by_module, train)
            weight_gathers.append(replace(part, group="second shard", micro_steps="first"))
        part = _weight_gather(fetch._replace(tensors=new), tensors_by_module, train)
        weight_gathers.append(replace(part, micro_steps="first"))
        weight_gathers.append(replace(whole_fetch, micro_steps="later"))
    return weight_gathers


def _weight_gather(fetch: Fetch, tensors_by_module: Mapping[int, Sequence[Tensor]], train: TrainSpec) -> Message:
    """Return the message of one fetch: a call for the weights that travel in 16 bits, and one for those in 32 bits."""
    bytes_by_width: Counter[int] = Counter()
    for key in fetch.tensors:
        tensor = _in_order_of_registration(tensors_by_module[key.module])[key.position]
        element_bytes = _gathered_bytes(tensor, train)
        bytes_by_width[element_bytes] += tensor.elements * element_bytes
    calls = len(bytes_by_width)
    needed = _progress_at(tensors_by_module[fetch.needed], in_forward=fetch.needed_in_forward)
    ready = 0.0  # what forward fetches for backward is there when backward begins
    if fetch.in_forward == fetch.needed_in_forward:
        ready = _progress_at(tensors_by_module[fetch.at], in_forward=fetch.in_forward)
    return Message(
        "all_gather",
        tensor_bytes=bytes_by_width.total() / calls,
        calls=calls,
        phase="forward" if fetch.needed_in_forward else "backward",
        ready=min(ready, needed),
        micro_steps="all",
        needed=needed,
    )


def _in_order_of_registration(module_tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return a module's tensors as it registers them; `tensors` has those of norms and convolutions reversed."""
    is_matrix_first = len(module_tensors[0].shape) > 1
    return module_tensors if is_matrix_first else module_tensors[::-1]


def _gathered_bytes(tensor: Tensor, train: TrainSpec) -> int:
    """Return the bytes of an element as it is gathered: under autocast weights of linear layers travel in 16 bits."""
    return 2 if train.precision == "bf16" and tensor.cast else weight_bytes(train)


def _progress_at(module_tensors: Sequence[Tensor], *, in_forward: bool) -> float:
    """Return the share of forward, or of backward, that is computed when it comes to a module."""
    first = module_tensors[0]
    return first.begins if in_forward else 1.0 - first.ends


def _gradient_buckets(
    operation: str,
    train: TrainSpec,
    model_tensors: Sequence[Tensor],
    *,
    bucket_elements: int,
    phase: StepPhase,
    overlaps: bool,
    micro_steps: MicroSteps,
) -> list[Message]:
    """Return a message for each bucket of gradients, in the order in which backward fills them.

    Autocast makes two kinds of buckets: gradients of what it casts travel in bf16, all others in fp32.
    """
    tensors_by_width = {communicated_bytes(train): list(model_tensors)}
    if train.precision == "bf16":
        cast = [tensor for tensor in model_tensors if tensor.cast]
        others = [tensor for tensor in model_tensors if not tensor.cast]
        tensors_by_width = {2: cast, 4: others}
    buckets = []
    for element_bytes, same_width in tensors_by_width.items():
        for bucket in flushed_before_full(of_backward(same_width), max(1, bucket_elements)):
            message = Message(
                operation,
                tensor_bytes=bucket.elements * element_bytes,
                calls=1,
                phase=phase,
                ready=bucket.ready if overlaps else None,
                micro_steps=micro_steps,
            )
            buckets.append(message)
    return sorted(buckets, key=lambda message: message.ready or 0.0)


def _scalars(*, calls: int, scalar_bytes: int) -> Message:
    """Return all-reduces of single numbers: the gradients' norm, and whether anything overflowed."""
    return Message("all_reduce", scalar_bytes, calls, phase="after", ready=None, micro_steps="last")
