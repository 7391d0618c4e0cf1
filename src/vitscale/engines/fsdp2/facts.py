"""Facts of FSDP2, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator

from vitscale.engines.facts import BLOCK_OPTIONS, ONE_PROCESS, EngineFacts, Refusal
from vitscale.engines.torch_needs import TorchNeed, TorchRelease
from vitscale.errors import shown
from vitscale.trial.trial import TrainSpec

_ACCUMULATED = TorchNeed(
    TorchRelease(2, 10),
    what="train.grad_accum > 1 under FSDP2",
    # Under 2.8 the loss of SGD is 2.6 % off on two ranks of gloo, and 8.7 % on three with unequal shares; under 2.10 it
    # is right. Nobody has tried 2.9.
    under_older="is not known to train rightly",
    remedy="set grad_accum = 1",
    is_refused=True,
    concerns=lambda train: train.grad_accum > 1,
)


def _refusals(train: TrainSpec) -> Iterator[Refusal]:
    """Yield the reasons to refuse a [train] whose model FSDP2 wraps: by itself, or under Accelerate."""
    if train.engine == "accelerate":
        yield from _refusals_under_accelerate(train)
    if train.master_weights and train.precision != "bf16-params":
        what = f"train.master_weights has no meaning with precision = {shown(train.precision)}: its weights are fp32"
        yield Refusal(what, "Set precision = 'bf16-params', or remove it")
    yield from _offload_refusals(train)
    # A CUDA graph reads weights at fixed addresses, and FSDP2 gathers a block's weights into new memory at each use.
    if train.compile_mode == "reduce-overhead":
        what = "train.compile_mode = 'reduce-overhead' needs weights that stay in place, and FSDP2 gathers them anew"
        yield Refusal(what, "Set compile_mode = 'default', or use ddp or deepspeed with zero_stage 0 to 2")


def _refusals_under_accelerate(train: TrainSpec) -> Iterator[Refusal]:
    """Refuse what Accelerate does not pass on to FSDP2."""
    if train.device == "cpu":
        yield Refusal(
            "train.accelerate_backend = 'fsdp2' cannot run here: on CPU Accelerate drops its FSDP plugin without a "
            "word and trains with DDP (AcceleratorState of Accelerate 1.15)",
            "Use engine = 'fsdp2', or accelerate_backend = 'ddp' or 'deepspeed'",
        )
    if train.master_weights:
        what = "train.master_weights has no meaning under accelerate with FSDP2, which casts no weights here"
        yield Refusal(what, "Remove it, or use engine = 'fsdp2'")
    if train.gradient_dtype is not None:
        what = "train.gradient_dtype has no meaning under accelerate with FSDP2: it takes the dtype from its precision"
        yield Refusal(what, "Remove it, or use engine = 'fsdp2'")


def _offload_refusals(train: TrainSpec) -> Iterator[Refusal]:
    """Refuse offloads that FSDP2 does not have, or that move nothing."""
    if train.offload == "optimizer":
        yield Refusal(
            "train.offload = 'optimizer' has no meaning under FSDP2, which offloads weights, gradients and optimizer "
            "together",
            "Set offload = 'parameters'",
        )
    if train.offload == "parameters" and train.device == "cpu":
        yield Refusal(
            "train.offload = 'parameters' has no meaning under FSDP2 on the CPU: all lies in the host's memory already",
            "Remove it, or run on a machine with a GPU",
        )


FACTS = EngineFacts(
    engine="vitscale.engines.fsdp2.wrap:Fsdp2Engine",
    title="FSDP2",
    options=("offload", "gradient_dtype", "master_weights", "reshard_after_forward", *BLOCK_OPTIONS),
    splits=("tensor", "sequence", "pipeline"),
    replicates=True,
    refusals=_refusals,
    torch_needs=(_ACCUMULATED,),
    # FSDP2 gives autograd weights of its own, so no hook sees the gradient of one micro-batch.
    norms_unknown=lambda _: "FSDP2 scatters gradients before a rank's own can be seen whole",
    trains_like=ONE_PROCESS,
    steps_between_exchanges=lambda _: 1,
    shards=lambda _: True,
    updates_dtensors=True,
    messages="vitscale.engines.fsdp2.messages:messages",
    states="vitscale.engines.fsdp2.states:states",
    stage_states="vitscale.engines.fsdp2.states:stage_states",
    around_parts="vitscale.engines.fsdp2.parts:around_parts",
    variants=({},),
    checked=(
        {},
        {"parallel.tensor": 2},
        {"parallel.tensor": 2, "parallel.shard_norms": True},
        {"parallel.replicate": 2},
    ),
    gradients_on_host=lambda train: train.offload == "parameters",
    marked_by="FSDP::",
)
