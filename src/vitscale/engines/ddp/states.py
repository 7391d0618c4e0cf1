"""Bytes that a rank holds under DDP, beside activations."""

from __future__ import annotations

from dataclasses import replace

from vitscale.engines.dtypes import communicated_bytes, weight_bytes
from vitscale.engines.states import Parts, RankStates, added, sizes, whole_states
from vitscale.trial.model_cost import ParameterShapes
from vitscale.trial.trial import TrainSpec, Trial


def states(trial: Trial, shapes: ParameterShapes) -> RankStates:
    """Return what plain training holds, and the buckets that gradients travel in: one more copy, at any rank count.

    Buckets are allocated at construction, again in the order of the first backward, and then stay (torch/nn/parallel/
    distributed.py, reducer.cpp); `gradient_as_bucket_view` makes the gradients views of them, from the backward on that
    exchanges them: those of earlier micro-steps are tensors of their own. Where gradients travel in another dtype than
    they are, each bucket is copied into it (torch/distributed/algorithms/ddp_comm_hooks/default_hooks.py).

    On a GPU those of construction are there in the second step too: calls of NCCL hold what they work on until its
    watchdog, which looks every tenth of a second, has seen them end (ProcessGroupNCCL.cpp; seen under torch 2.11).
    Where copies travel it is these.
    """
    train = trial.train
    plain = whole_states(trial, shapes)
    if _is_left_unwrapped(trial):
        return plain
    elements = sizes(shapes).all
    bucket_bytes = elements * weight_bytes(train)
    copy_bytes = elements * communicated_bytes(train) if _copies_buckets(train) else 0
    buckets = {"buckets": bucket_bytes + _bytes_held_by_nccl(train, bucket_bytes, copy_bytes)}
    copies = {"buckets": copy_bytes} if copy_bytes else {}
    with_buckets = replace(plain, steady=added(plain.steady, buckets), exchange=added(plain.exchange, copies))
    if not train.gradient_as_bucket_view:
        return with_buckets
    with_views = replace(with_buckets, step=_without_gradients(plain.step))
    if train.grad_accum > 1:
        return with_views
    return replace(with_views, gradient_bytes=0, exchange=copies)


def _is_left_unwrapped(trial: Trial) -> bool:
    """Whether Accelerate wraps nothing in DDP, as it does for a single GPU."""
    return trial.train.engine == "accelerate" and trial.train.device == "cuda" and trial.world.size == 1


def _copies_buckets(train: TrainSpec) -> bool:
    """Whether gradients travel in another dtype than they are."""
    weight_dtype = "bf16" if train.precision == "bf16-params" else "fp32"
    return train.gradient_dtype is not None and train.gradient_dtype != weight_dtype


def _bytes_held_by_nccl(train: TrainSpec, bucket_bytes: int, copy_bytes: int) -> int:
    if train.device != "cuda":
        return 0
    return copy_bytes if copy_bytes else bucket_bytes


def _without_gradients(parts: Parts) -> Parts:
    return {name: part_bytes for name, part_bytes in parts.items() if name != "gradients"}
