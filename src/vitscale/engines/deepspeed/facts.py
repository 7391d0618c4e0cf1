"""Facts of DeepSpeed at each ZeRO stage, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator

from vitscale.engines.deepspeed.config import flag, section
from vitscale.engines.deepspeed.extensions import unmodelled_setting, zero_plus_plus
from vitscale.engines.facts import BLOCK_OPTIONS, ONE_PROCESS, EngineFacts, Refusal
from vitscale.engines.torch_needs import TorchNeed, TorchRelease
from vitscale.errors import shown
from vitscale.trial.rank_batches import in_words
from vitscale.trial.trial import TrainSpec

_OPTIONS_FROM_STAGE_1 = ("offload", "overlap_comm", "bucket_mib")
"""Options that DeepSpeed takes from stage 1 on. At stage 0 it exchanges whole gradients after backward, in buckets of a
fixed 5e8 elements (`allreduce_gradients` in deepspeed/runtime/engine.py, 0.19)."""
_ZERO_STAGES = tuple({"zero_stage": stage} for stage in range(4))
_CHECKED_SECOND_SHARD = {"zero_stage": 3, "hpz": 2, "micro_batch": 4}
"""ZeRO-3 with second shards, as `check --training` trains it: in two micro-steps of 4 of a rank's 8 images, for weights
that stay from forward to backward are gathered from a second shard in the second micro-step alone."""
_COMPRESSING_OPTIMIZERS = ("onebitadam", "onebitlamb", "zerooneadam")
"""Optimizers of a DeepSpeed file, in lower case, that exchange data of their own instead of gradients."""


_COMPILED_STAGE_3 = TorchNeed(
    TorchRelease(2, 12),
    what="train.compile with zero_stage = 3",
    # Its first gradients are wrong: the second loss is 0.6 % off (on a CPU, and on an H200, under 2.11).
    under_older="trains wrongly",
    remedy="leave compile out",
    is_refused=True,
    concerns=lambda train: train.compile and train.zero_stage == 3,
)


def _refusals(train: TrainSpec) -> Iterator[Refusal]:
    """Yield the reasons to refuse a [train] whose model DeepSpeed wraps: by itself, or under Accelerate."""
    yield from _stage_0_refusals(train)
    yield from _stage_refusals(train)
    yield from _micro_batch_refusals(train)


def _stage_0_refusals(train: TrainSpec) -> Iterator[Refusal]:
    """Refuse options that DeepSpeed reads from stage 1 on, where they are set at stage 0."""
    if train.zero_stage != 0:
        return
    for option in _OPTIONS_FROM_STAGE_1:
        value = getattr(train, option)
        if value != TrainSpec.model_fields[option].default:
            what = f"train.{option} = {shown(value)} has no effect under DeepSpeed at zero_stage = 0"
            yield Refusal(what, "Remove it, or set zero_stage = 1, 2 or 3")


def _stage_refusals(train: TrainSpec) -> Iterator[Refusal]:
    """Refuse options that do not go with the stage."""
    stage = train.zero_stage
    if stage > 0 and train.precision == "bf16" and train.gradient_dtype is not None:
        yield Refusal(
            f"train.gradient_dtype = {shown(train.gradient_dtype)} has no effect under DeepSpeed with precision = "
            f"'bf16' at zero_stage = {stage}: its autocast decides, and sends linear layers in bf16, the rest in fp32",
            "Remove it, or use precision = 'fp32' or 'bf16-params', or zero_stage = 0",
        )
    if train.offload == "parameters" and stage != 3:
        yield Refusal(
            f"train.offload = 'parameters' needs zero_stage = 3, and this is {stage}: below it every rank computes "
            "with whole weights",
            "Set zero_stage = 3, or offload = 'optimizer'",
        )
    if train.hpz > 1 and stage != 3:
        yield Refusal(
            f"train.hpz = {train.hpz} needs zero_stage = 3, and this is {stage}: below it every rank has whole "
            "weights, and gathers none in forward",
            "Or remove hpz",
            valid=("zero_stage = 3", "hpz = 1"),
        )
    if stage == 3 and train.compile_mode == "reduce-overhead":
        what = "train.compile_mode = 'reduce-overhead' needs weights that stay in place, and ZeRO-3 gathers them anew"
        yield Refusal(what, "Set compile_mode = 'default', or zero_stage = 0, 1 or 2")


def _rank_refusals(train: TrainSpec, ranks: int) -> Iterator[Refusal]:
    """Refuse groups with a second shard that do not divide the ranks (`_ensure_divisibility` in utils/groups.py).

    A world of fewer ranks than a group is one group (`_create_zero_param_parallel_group` there).
    """
    group_ranks = zero_plus_plus(train).second_shard_ranks
    if ranks <= group_ranks or ranks % group_ranks == 0:
        return
    setting = f"train.hpz = {group_ranks}"
    if train.hpz == 1:
        setting = f"zero_hpz_partition_size = {group_ranks} in the DeepSpeed configuration"
    fewer = max(count for count in range(1, group_ranks) if ranks % count == 0)
    more = min(count for count in range(group_ranks, ranks + 1) if ranks % count == 0)
    below = ranks // group_ranks * group_ranks
    yield Refusal(
        f"{setting} does not divide {ranks} ranks: groups that share a second copy of the weights have equally many",
        f"Set it, or take {below} or {below + group_ranks} ranks",
        valid=(f"hpz = {fewer} or {more}",),
    )


def _micro_batch_refusals(train: TrainSpec) -> Iterator[Refusal]:
    """Refuse different batches per rank where a DeepSpeed file gives one micro-batch to all."""
    fixed = (train.deepspeed_config or {}).get("train_micro_batch_size_per_gpu")
    if train.micro_batches is not None and isinstance(fixed, int):
        yield Refusal(
            f"train.rank_speeds gives ranks {in_words(train.micro_batches)} images, and the DeepSpeed configuration "
            f"says train_micro_batch_size_per_gpu = {fixed} for all of them",
            'Remove that key from the file (or set it to "auto"), or leave rank_speeds out',
        )


def _norms_unknown(train: TrainSpec) -> str | None:
    """Return why the norm of the gradient cannot be measured; None where it can."""
    if train.engine == "accelerate":
        return "Accelerate takes DeepSpeed's optimizer step, and with it the gradients, inside its backward"
    optimizer = str(section(train.deepspeed_config, "optimizer").get("type")).lower()
    if optimizer in _COMPRESSING_OPTIMIZERS:
        return "the optimizer exchanges no gradients once it compresses"
    if train.zero_stage == 0:
        return None
    if optimizer == "muon":
        return "under Muon DeepSpeed takes the norm of the update, not of the gradient"
    if flag(train, "compute_grad_norm") is False:
        return "the DeepSpeed file sets compute_grad_norm to false"
    return None


def _states_unknown(train: TrainSpec) -> str:
    """Return why memory is not modelled; empty where it is."""
    setting = unmodelled_setting(train)
    return f"{setting} of the DeepSpeed file is not modelled" if setting else ""


FACTS = EngineFacts(
    engine="vitscale.engines.deepspeed.wrap:DeepSpeedEngine",
    title="DeepSpeed",
    packages=("deepspeed",),
    options=(
        "zero_stage",
        "offload",
        "overlap_comm",
        "bucket_mib",
        "gather_bucket_mib",
        "hpz",
        "gradient_dtype",
        "deepspeed_config",
        *BLOCK_OPTIONS,
    ),
    name_options=("zero_stage",),
    splits=("sequence",),
    refusals=_refusals,
    rank_refusals=_rank_refusals,
    torch_needs=(_COMPILED_STAGE_3,),
    norms_unknown=_norms_unknown,
    trains_like=ONE_PROCESS,
    steps_between_exchanges=lambda _: 1,
    shards=lambda train: train.zero_stage > 0,
    second_shard_ranks=lambda train: zero_plus_plus(train).second_shard_ranks,
    own_loss_scaling=True,
    keeps_fp32_weights=True,
    fp16_weights=True,
    casts_again=lambda train: train.zero_stage == 3,
    messages="vitscale.engines.deepspeed.messages:messages",
    states="vitscale.engines.deepspeed.states:states",
    states_unknown=_states_unknown,
    part_gathers="vitscale.engines.deepspeed.states:part_gathers",
    variants=_ZERO_STAGES,
    checked=(*_ZERO_STAGES, _CHECKED_SECOND_SHARD, {"zero_stage": 2, "parallel.sequence": 2}),
    preloaded=lambda train: (train.zero_stage > 0,),
    marked_by="DeepSpeed",
)
