"""Facts of DDP, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator

from vitscale.engines.facts import BLOCK_OPTIONS, ONE_PROCESS, EngineFacts, Refusal
from vitscale.errors import shown
from vitscale.trial.trial import TrainSpec


def _refusals(train: TrainSpec) -> Iterator[Refusal]:
    """Yield the reasons to refuse a [train] whose model DDP wraps: by itself, or under Accelerate."""
    # DDP records the graph in its first backward and expects the same exchange in each one after it. With accumulation
    # only the last micro-step of a step exchanges.
    if train.static_graph and train.grad_accum > 1:
        yield Refusal(
            f"train.static_graph does not go with train.grad_accum = {train.grad_accum}: a first micro-step without "
            "exchange breaks DDP's record of the graph (an internal assertion of torch 2.13)",
            "Set grad_accum = 1, or leave static_graph out",
        )
    # Weights of bf16-params have bf16 gradients, which travel as they are: no hook compresses them, so gloo will do.
    needs_bf16_hook = train.gradient_dtype == "bf16" and train.precision != "bf16-params"
    if needs_bf16_hook and train.device == "cpu":
        what = "train.gradient_dtype = 'bf16' needs NCCL under DDP (torch's bf16_compress_hook refuses gloo)"
        yield Refusal(what, "Use gradient_dtype = 'fp16', or fsdp2 or deepspeed")
    # DDP has hooks that cast gradients to 16 bits before they are sent, and none that casts them to 32.
    if train.gradient_dtype == "fp32" and train.precision == "bf16-params":
        yield Refusal(
            f"under DDP gradients travel in the dtype of the weights or in a shorter one; with train.precision = "
            f"{shown(train.precision)} that is not fp32",
            "Leave gradient_dtype out, or use fsdp2 or deepspeed",
        )


FACTS = EngineFacts(
    engine="vitscale.engines.ddp.wrap:DdpEngine",
    title="DDP",
    usual=True,
    options=("bucket_mib", "gradient_dtype", "gradient_as_bucket_view", "static_graph", *BLOCK_OPTIONS),
    splits=("sequence", "pipeline"),
    every_stage_must_train=True,
    refusals=_refusals,
    trains_like=ONE_PROCESS,
    steps_between_exchanges=lambda _: 1,
    messages="vitscale.engines.ddp.messages:messages",
    states="vitscale.engines.ddp.states:states",
    variants=({},),
    checked=({}, {"parallel.sequence": 2}, {"parallel.pipeline": 2, "parallel.schedule": "gpipe"}),
    marked_by="DistributedDataParallel.forward",
)
