"""Facts of DDP, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator

from vitscale.engines.facts import BLOCK_OPTIONS, ONE_PROCESS, EngineFacts, Refusal
from vitscale.errors import shown
from vitscale.trial.trial import TrainSpec


def _refusals(train: TrainSpec) -> Iterator[Refusal]:
    if train.static_graph and train.grad_accum > 1:
        yield Refusal(
            f"train.static_graph does not go with train.grad_accum = {train.grad_accum}: a first micro-step without "
            "exchange breaks DDP's record of the graph (an internal assertion of torch 2.13)",
            "Set grad_accum = 1, or leave static_graph out",
        )
    if train.gradient_dtype == "bf16" and train.device == "cpu" and train.precision != "bf16-params":
        what = "train.gradient_dtype = 'bf16' needs NCCL under DDP (torch's bf16_compress_hook refuses gloo)"
        yield Refusal(what, "Use gradient_dtype = 'fp16', or fsdp2 or deepspeed")
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
