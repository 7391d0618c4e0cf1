"""What one rank's forward and backward keep beside weights and gradients: activations, and the largest temporaries."""

from __future__ import annotations

import math
from typing import NamedTuple

from vitscale.engines.dtypes import weight_bytes
from vitscale.prediction.shares import WHOLE, Share
from vitscale.trial.model_cost import VitShape
from vitscale.trial.model_spec import ModelSpec
from vitscale.trial.rank_batches import largest_micro_batch
from vitscale.trial.trial import TrainSpec

_AUTOCAST_PRECISIONS = ("bf16", "fp16")


def is_autocast(train: TrainSpec) -> bool:
    """Whether fp32 weights are cast to 16 bits as they are used; DeepSpeed's fp16 has fp16 weights instead."""
    return train.precision in _AUTOCAST_PRECISIONS and weight_bytes(train) == 4


class Activations(NamedTuple):
    """Bytes of one micro-batch on the rank that takes the most images."""

    kept_of_block: int
    """What each block keeps for backward."""
    recomputed: int
    """What one block computes again in its backward; 0 without activation checkpointing."""
    head: int
    """What the last norm and the classifier keep, or what is held just before, where that is more."""
    backward_of_block: int
    """The gradients that are passed on, at the moment of a block's backward when they take most."""
    stream: int
    """The gradient that one block hands to the next."""
    handed_back: int
    """The gradient that a stage's last block is handed; it lies in a buffer, which is counted elsewhere."""


def activations(spec: ModelSpec, train: TrainSpec, vit: VitShape, share: Share = WHOLE) -> Activations:
    """The activations of one micro-batch of a resolved ViT with fused attention.

    Korthikanti et al., "Reducing Activation Recomputation" (arXiv 2205.05198), section 4.1 counts them per layer of a
    language model; here there is no dropout. A block keeps 8h + 2m elements a token: the inputs of both norms (2h) and
    their outputs (2h), q, k, v (3h), the attention's output (h), the input and the output of GELU (2m). With m = 4h
    that is 64 bytes a token and unit of width in fp32, 32 under bf16-params, and 36 under autocast, where the residual
    stream stays in fp32; 40 in transformers' models, whose q, k and v each cast the first norm's output. To this are
    added the norms' mean and deviation, the attention's log-sum-exp, the last norm and the logits, and what backward
    holds for a moment: the gradients of a block's output and of GELU's, where a block is widest.

    Where ranks share a model, matrices give each rank 1/T of their output and attention 1/(T S) of its own, for all
    tokens. All else covers 1/S of the tokens; under `shard_norms` norms and residuals cover 1/(T S) (the same paper,
    section 4.2.2).

    Args:
        spec: the model, resolved.
        train: its options, and its micro-batch: the largest where ranks take unequal shares.
        vit: its shape.
        share: the part of it that a rank has.
    """
    hidden, classes, parallel = vit.hidden, vit.classes, share.parallel
    images = largest_micro_batch(train)
    own_tokens = math.ceil(vit.tokens / parallel.sequence)
    rows = own_tokens * images
    shared_rows = math.ceil(own_tokens / parallel.tensor) * images if parallel.shard_norms else rows
    # The residual stream stays in fp32 under autocast.
    pure = weight_bytes(train) == 2
    autocast = is_autocast(train)
    stream_bytes = 2 if pure else 4
    compute_bytes = 2 if pure or autocast else 4
    narrow, wide = (rows * math.ceil(width / parallel.tensor) * compute_bytes for width in (hidden, vit.mlp))
    of_heads = narrow if parallel.sequence == 1 else vit.tokens * images * hidden * compute_bytes // (
        parallel.tensor * parallel.sequence
    )  # fmt: skip
    read, stream = rows * hidden * compute_bytes, shared_rows * hidden * stream_bytes
    # Attention's output goes back to the ranks of its tokens, as another tensor.
    mixed = of_heads + (narrow if parallel.sequence > 1 else 0)
    heads = (spec.heads or 0) // (parallel.tensor * parallel.sequence)
    statistics = shared_rows * 2 * 2 * stream_bytes + vit.tokens * images * heads * 4
    # In transformers' models autocast casts the first norm's output for each of the three matrices that read it.
    block = 2 * stream + (4 if autocast and spec.hf else 2) * read + 3 * of_heads + mixed + 2 * wide + statistics
    checkpointed = train.activation_checkpointing
    # A 16-bit product on a CPU works on a copy of its widest operand (scratch memory of oneDNN, which torch's allocator
    # hands out): 0.87 MB at the peak of a step whose MLP's activations are 0.80 MB wide. How many bytes exactly depends
    # on the processor.
    packed = wide if compute_bytes == 2 and train.device == "cpu" else 0
    passed = rows * hidden * stream_bytes
    widest = stream + (passed if parallel.shard_norms else 0) + wide + (rows * hidden * 2 if autocast else 0) + packed
    # The classifier keeps the norm's whole output, though it uses one token. Autocast casts only that token, and where
    # ranks share the tokens only that token goes to all of them.
    normed = 0 if autocast or parallel.sequence > 1 else passed
    head = stream + normed + shared_rows * 2 * stream_bytes + 2 * images * classes * 4 if share.last else 0
    # Before that the last block's output is scattered. Held then are the matrix's output, padded to equal parts, cut
    # and, on gloo, cloned; and the parts of that output, of attention's and of both residuals.
    padded = shared_rows * parallel.tensor * hidden * stream_bytes
    scattered = passed + (3 if train.device == "cpu" else 2) * padded + 4 * stream if parallel.shard_norms else 0
    return Activations(
        kept_of_block=stream if checkpointed else block,
        recomputed=block - stream if checkpointed else 0,
        head=max(head, scattered),
        backward_of_block=widest,
        stream=stream,
        handed_back=0 if share.last else stream,
    )
