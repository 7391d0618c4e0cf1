"""What one optimizer step of a trial sends, and when: by arithmetic, or made equal to what was counted."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from vitscale.base.plugins import referred
from vitscale.prediction.memory.zero import modelled
from vitscale.prediction.step.message import Message
from vitscale.trial import model_counts
from vitscale.trial.engines import of_engine
from vitscale.trial.model_cost import ParameterShapes, batch_norms, recorded_shapes
from vitscale.trial.model_counts import Module
from vitscale.trial.trial import TrainSpec, Trial

__all__ = ["Message", "messages", "norm_messages", "rescaled"]

_NORM_BYTES = 8
"""Of each number that norms exchange: float64."""
_KNOWN_OPTIMIZERS = ("adamw", "lamb", "sgd")
_OTHERWISE = (
    "zero_quantized_weights", "zero_quantized_gradients", "zero_quantized_nontrainable_weights",
    "zero_hpz_partition_size", "mics_shard_size", "zeropp_loco_param",
)  # fmt: skip
"""Of `zero_optimization`: what sends something else."""


def messages(trial: Trial) -> tuple[Message, ...] | None:
    """What an optimizer step of a resolved trial sends, in the order in which each phase asks for it.

    For one rank too, as engines do; it costs nothing there. Without those of synchronised norms. Of a model of which
    the parameters alone are known as if they were alike (`_evenly`). None where unknown: a model that only building it
    could count, or whose largest list of like modules is the decoder's (FSDP2 wraps that);
    an optimizer that exchanges something of its own; a DeepSpeed file that asks for other exchanges; ranks that share
    a model.
    """
    train, sent = trial.train, of_engine(trial.train.wrapper).messages
    shapes = recorded_shapes(trial.model)
    if shapes is None and trial.model.parameter_count:
        shapes = _evenly(trial.model.parameter_count)
    if trial.parallel.ranks_per_model > 1:
        return None
    if shapes is None or not sent or train.optimizer not in _KNOWN_OPTIMIZERS:
        return None
    if train.wrapper == "fsdp2" and shapes.wrapped_in_decoder:
        return None
    if train.wrapper == "deepspeed" and not (modelled(_without_offload(train)) and _plain_exchange(train)):
        return None
    made: tuple[Message, ...] = referred(sent)(trial, shapes)
    return made


_PIECE, _MOST_PIECES = 2**18, 480
"""Elements of a tensor where only their sum is known: 1 MiB, as far as that makes no more of them."""
_BLOCKS = 24


def _evenly(count: int) -> ParameterShapes:
    """As if so many parameters were alike tensors, each with its share of the work, in 24 like blocks.

    So DDP's buckets are of 25 MiB after one of 1 MiB, and fill evenly through backward; the sums that the other engines
    send are right, and how many calls they take is as of a transformer of 24 blocks.
    """
    each = min(count, max(_PIECE, -(-count // _MOST_PIECES)))
    pieces = count // each
    blocks = min(_BLOCKS, pieces)
    own = model_counts.in_order([_piece(each)] * (pieces // blocks))._replace(repeats=blocks, wrapped=blocks > 1)
    rest = [each] * (pieces % blocks) + [count % each] * (count % each > 0)
    return ParameterShapes((*([model_counts.in_order(map(_piece, rest))] if rest else []), own))


def _piece(elements: int) -> Module:
    return Module(((elements, 1),), elements, cast=True)


def norm_messages(trial: Trial) -> tuple[Message, ...] | None:
    """What synchronised norms exchange in an optimizer step, under any engine: nothing is computed meanwhile.

    Of C channels 2 C + 1 numbers in forward (sums, sums of squares, the count) and 2 C in backward. Empty without such
    norms; None where only building the model could tell how many it has.
    """
    channels = batch_norms(trial.model) if trial.train.batch_norm == "synchronised" else ()
    if channels is None:
        return None
    return tuple(
        message
        for count, calls in Counter(channels).items()
        for message in (
            Message("all_reduce", _NORM_BYTES * (2 * count + 1), calls, "forward", None, True),
            Message("all_reduce", _NORM_BYTES * 2 * count, calls, "backward", None, True),
        )
    )


def _without_offload(train: TrainSpec) -> TrainSpec:
    """Offloading changes where states lie, not what is sent."""
    config = dict(train.deepspeed_config or {})
    zero = config.get("zero_optimization")
    if isinstance(zero, dict):
        config["zero_optimization"] = {key: value for key, value in zero.items() if not key.startswith("offload_")}
    return train.model_copy(update={"deepspeed_config": config})


def _plain_exchange(train: TrainSpec) -> bool:
    config = train.deepspeed_config or {}
    zero = config.get("zero_optimization")
    asked = zero if isinstance(zero, dict) else {}
    return "optimizer" not in config and not any(_asks(asked.get(key)) for key in _OTHERWISE)


def _asks(value: object) -> bool:
    """Whether a setting is on; groups of 1 or -1 rank are DeepSpeed's own way of saying that there are none."""
    return value is True or (not isinstance(value, bool) and value not in (None, 1, -1, 0))


def rescaled(
    found: Sequence[Message], sent_bytes: Mapping[tuple[str, str], int], grad_accum: int
) -> tuple[Message, ...]:
    """The same schedule with the bytes of each operation made equal to what was counted in an optimizer step.

    An operation that was not counted is left out; one that no message has is sent after backward, hidden by nothing.

    Args:
        found: by arithmetic.
        sent_bytes: (operation, dtype) -> bytes of the whole tensors, all calls together.
        grad_accum: micro-steps in an optimizer step of the trial that was counted.
    """
    counted: defaultdict[str, float] = defaultdict(float)
    for (operation, _), amount in sent_bytes.items():
        counted[operation] += amount
    planned: defaultdict[str, float] = defaultdict(float)
    for one in found:
        planned[one.operation] += one.tensor_bytes * one.times(grad_accum)
    kept = [
        replace(one, tensor_bytes=one.tensor_bytes * counted[one.operation] / planned[one.operation])
        for one in found
        if counted[one.operation] > 0
    ]
    missing = [
        Message(operation, amount, 1, "after", None, False)
        for operation, amount in counted.items()
        if amount > 0 and operation not in planned
    ]
    return (*kept, *missing)
