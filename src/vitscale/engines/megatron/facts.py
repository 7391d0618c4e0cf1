"""Facts of Megatron-Core, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator

from vitscale.base.distribution import install_command, versions_of
from vitscale.engines.facts import BLOCK_OPTIONS, ONE_PROCESS, EngineFacts, Refusal
from vitscale.errors import shown
from vitscale.trial.model_spec import ModelSpec
from vitscale.trial.parallel import ParallelSpec
from vitscale.trial.trial import DeviceName


def _unavailable(device: DeviceName) -> str | None:
    """Return why Megatron-Core cannot run here; None where it can."""
    if device == "cpu":
        return (
            "Megatron-Core needs a CUDA GPU: it allocates its gradient buffers on the current CUDA device and "
            "takes CUDA tensors alone for weights"
        )
    is_installed = versions_of(["megatron-core"])["megatron-core"] is not None
    return None if is_installed else f"megatron-core is not installed ({install_command('megatron')})"


def _split_refusals(parallel: ParallelSpec, model: ModelSpec) -> Iterator[Refusal]:
    """Refuse ways to share a model over tensor ranks that Megatron-Core's layers do not have."""
    if parallel.shard_norms:
        yield Refusal(
            f"parallel.shard_norms under train.engine = 'megatron' does not go with {parallel.in_words}: Megatron-Core "
            "shards tokens into equal parts alone, and a class token makes their number odd",
            "Set shard_norms = false, or engine = 'fsdp2', or do not split",
        )
    if model.factory is not None:
        yield Refusal(
            f"{parallel.in_words} of model.factory = {shown(model.factory)} is not taken by train.engine = 'megatron': "
            "a module says how DTensor cuts it",
            "Use that engine",
            valid=("train.engine = 'fsdp2'",),
        )


FACTS = EngineFacts(
    engine="vitscale.engines.megatron.wrap:MegatronEngine",
    title="Megatron-Core",
    packages=("megatron-core",),
    options=("overlap_comm", "bucket_mib", "gradient_dtype", *BLOCK_OPTIONS),
    splits=("tensor",),
    own_tensor_layers=True,
    cannot={
        ("precision", "fp16"): Refusal(
            "train.engine = 'megatron' keeps fp16 weights where every other engine computes in fp16 over fp32 weights",
            "Use train.precision = 'bf16', 'bf16-params' or 'fp32'",
        ),
        ("optimizer", "sgd"): Refusal(
            "train.engine = 'megatron' shards the states of Adam alone (DistributedOptimizer of Megatron-Core 0.16)",
            "Use train.optimizer = 'adamw'",
        ),
    },
    split_refusals=_split_refusals,
    unavailable=_unavailable,
    instead="Use another engine; engine = 'fsdp2' takes [parallel] tensor too, by torch's DTensor",
    norms_unknown=lambda _: "Megatron-Core scatters gradients into buffers of its own",
    trains_like=ONE_PROCESS,
    steps_between_exchanges=lambda _: 1,
    shards=lambda _: True,
    keeps_fp32_weights=True,
    messages="vitscale.engines.megatron.messages:messages",
    checked=({}, {"parallel.tensor": 2}),
)
