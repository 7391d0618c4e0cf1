"""What one optimizer step of a trial sends, and when: by arithmetic, or made equal to what was counted.

Each message is one collective; the module also says what of them the step's computing does not hide.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from vitscale.base.arrays import FloatArray
from vitscale.base.plugins import referred
from vitscale.engines import wrapper_facts
from vitscale.engines.messages import Message, MessageKind, MicroSteps, RankGroup
from vitscale.prediction.shares import shares
from vitscale.trial import model_counts
from vitscale.trial.model_cost import ParameterShapes, batch_norms, recorded_shapes, swin_shape, vit_shape
from vitscale.trial.model_counts import Module
from vitscale.trial.trial import Trial


def exposed_seconds(
    messages: Sequence[Message],
    collective: Callable[[Message], FloatArray],
    forward_seconds: FloatArray,
    backward_seconds: FloatArray,
    grad_accum: int | FloatArray,
) -> FloatArray:
    """Exposed transfer time of one optimizer step, (draws, configs): how much longer it takes than its computing.

    Where messages are not sent in every step, it is the mean over steps.

    Messages of a phase pass one after the other, in their order. Message i may start at `r_i = T F_i`, the time T of
    the phase times its share `ready`, plus what computing has waited so far; it ends at `e_i = max(r_i, e_(i-1)) +
    T_coll(S_i)` (Li et al., arXiv 2006.15704, section 3.2.3). Where computing needs it (`needed`), computing waits for
    `e_i`. The time by which the last message outlasts the phase is exposed, and so are messages that nothing hides.

    The result is never less than 0 and never more than all transfers. It is 0 where they take no time, and all of them
    where nothing is computed.

    Args:
        messages: the step's messages, as `messages.messages` makes them.
        collective: gives the seconds of one call of a message, (draws, configs).
        forward_seconds: forward's seconds in one micro-step.
        backward_seconds: backward's seconds in one micro-step.
        grad_accum: micro-steps in a step, one number for all configurations or one for each.
    """
    always = [message for message in messages if message.steps_between == 1]
    exposed = _exposed_in_a_step(always, collective, forward_seconds, backward_seconds, grad_accum)
    for steps in sorted({message.steps_between for message in messages} - {1}):
        with_these = [message for message in messages if message.steps_between in (1, steps)]
        longer = _exposed_in_a_step(with_these, collective, forward_seconds, backward_seconds, grad_accum) - exposed
        exposed = exposed + longer / steps
    return exposed


def _exposed_in_a_step(
    messages: Sequence[Message],
    collective: Callable[[Message], FloatArray],
    forward_seconds: FloatArray,
    backward_seconds: FloatArray,
    grad_accum: int | FloatArray,
) -> FloatArray:
    """`exposed_seconds` of a step that sends all of these messages."""
    known: dict[tuple[MessageKind, float], FloatArray] = {}

    def seconds(message: Message) -> FloatArray:
        key = (message.kind, message.calls)
        if key not in known:
            known[key] = collective(message) * message.calls
        return known[key]

    lengths = {"forward": forward_seconds, "backward": backward_seconds, "after": np.zeros_like(backward_seconds)}
    total: FloatArray = np.zeros(np.broadcast_shapes(forward_seconds.shape, backward_seconds.shape))
    for phase, length in lengths.items():
        of_phase = [message for message in messages if message.phase == phase]
        total = total + _exposed_in_a_phase(of_phase, seconds, length, grad_accum)
    return total


def _exposed_in_a_phase(
    messages: Sequence[Message],
    seconds: Callable[[Message], FloatArray],
    length: FloatArray,
    grad_accum: int | FloatArray,
) -> FloatArray:
    """Exposed transfer time of one phase, forward for example, of all micro-steps of a step.

    Args:
        messages: those of the phase.
        seconds: gives the seconds of all calls of a message in one micro-step, (draws, configs).
        length: the phase's seconds of computing in one micro-step.
        grad_accum: micro-steps in a step.
    """

    def exposed(*micro_steps: MicroSteps) -> FloatArray:
        sent = [message for message in messages if message.micro_steps in micro_steps]
        return _sticking_out(sent, seconds, length)

    kinds = {message.micro_steps for message in messages}
    if kinds <= {"all"}:
        return grad_accum * exposed("all")
    in_only_one = exposed("all", "first", "last")
    if not np.any(np.greater(grad_accum, 1)) or kinds <= {"last"}:
        return in_only_one
    if kinds <= {"all", "last"}:
        return in_only_one + (grad_accum - 1) * exposed("all")
    in_several = exposed("all", "first") + exposed("all", "later", "last")
    in_several = in_several + (grad_accum - 2) * exposed("all", "later")
    return np.where(np.greater(grad_accum, 1), in_several, in_only_one)


def _sticking_out(
    messages: Iterable[Message], seconds: Callable[[Message], FloatArray], length: FloatArray
) -> FloatArray:
    """How much longer a phase takes than its `length` seconds of computing.

    It is assumed that a message that computing waits for holds up the later messages too. That is so where each is
    asked for when the one before has come. Messages with a stream of their own (`Message.beside_later`) hold up only
    each other.
    """
    serial: FloatArray | float = 0.0
    waited: FloatArray | float = 0.0
    ended: FloatArray | float = 0.0
    ended_beside: FloatArray | float = 0.0
    for message in messages:
        if message.ready is None:
            serial = serial + seconds(message)
            continue
        if message.beside_later:
            ended_beside = np.maximum(ended, ended_beside) + seconds(message)
            continue
        begin, takes = length * message.ready, seconds(message)
        if isinstance(waited, np.ndarray):  # for thousands of configurations these arrays are large
            begin = begin + waited
        begin = np.maximum(begin, ended, out=begin)
        ended = np.add(begin, takes, out=begin if takes.shape == begin.shape else None)
        if message.needed is not None:
            waited = np.maximum(waited, ended - length * message.needed)
    last_end = np.maximum(ended, ended_beside)
    exposed: FloatArray = serial + np.maximum(waited, last_end - length)
    return exposed


_EXCHANGES = "vitscale.prediction.step.shared_model:exchanges"
"""What makes the messages of ranks that share a model; a name, as `EngineFacts` has them."""
_NORM_BYTES = 8
"""Bytes of each number that norms exchange: float64."""
_KNOWN_OPTIMIZERS = ("adamw", "lamb", "sgd")


def messages(trial: Trial) -> tuple[Message, ...] | None:
    """What an optimizer step of a resolved trial sends, in the order in which each phase asks for it.

    One rank has messages too, as engines send them; they cost nothing there. Those of synchronised norms are left out.
    Where only a model's parameter count is known, its tensors are taken as alike (`_evenly`). Where ranks share a
    model, these are the messages of the rank that sends most.

    None where unknown: a model that only building it could count; an engine that does not say what it sends, or how
    often; an optimizer that exchanges something of its own; a DeepSpeed file that asks for other exchanges.
    """
    train, reference = trial.train, wrapper_facts(trial.train).messages
    shapes = recorded_shapes(trial.model)
    if shapes is None and trial.model.parameter_count:
        shapes = _evenly(trial.model.parameter_count)
    if shapes is None or not reference or train.optimizer not in _KNOWN_OPTIMIZERS:
        return None
    steps_between = wrapper_facts(train).steps_between_exchanges(train)
    if steps_between is None:
        return None
    of_engine: Callable[[Trial, ParameterShapes], tuple[Message, ...] | None] = referred(reference)

    def make(trial: Trial, shapes: ParameterShapes) -> tuple[Message, ...] | None:
        sent = of_engine(trial, shapes)
        if sent is None:
            return None
        return tuple(replace(message, steps_between=max(steps_between, message.steps_between)) for message in sent)

    if trial.parallel.ranks_per_model == 1:
        return make(trial, shapes)
    if vit_shape(trial.model) is None and swin_shape(trial.model) is None:
        return None
    unlike = {(own, tuple(map(len, share.chunks))): share for share in shares(trial) for own in [share.shapes(shapes)]}
    of_ranks: list[tuple[Message, ...]] = []
    for (own, _), share in unlike.items():
        among_replicas = make(trial, own)
        if among_replicas is None:
            return None
        of_ranks.append((*among_replicas, *referred(_EXCHANGES)(trial, share)))
    return max(of_ranks, key=lambda own: sum(message.tensor_bytes * message.times(train.grad_accum) for message in own))


_PIECE, _MOST_PIECES = 2**18, 480
"""Elements of a tensor where only their sum is known (1 MiB), and the most tensors of that size; beyond, they grow."""
_BLOCKS = 24


def _evenly(count: int) -> ParameterShapes:
    """Shapes of `count` parameters in alike tensors, each with its share of the work, in 24 like blocks.

    So DDP's buckets are of 25 MiB after one of 1 MiB, and fill evenly through backward. The other engines send the
    right sums, in as many calls as for a transformer of 24 blocks.
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

    A norm of C channels exchanges 2 C + 1 numbers in forward (sums, sums of squares, the count) and 2 C in backward.
    Local norms do so among sequence ranks, which share the images of one data-parallel rank. Empty without such norms;
    None where only building the model could tell how many it has.
    """
    synchronised = trial.train.batch_norm == "synchronised"
    shared = trial.parallel.sequence > 1 and trial.model.task == "segmentation"
    channels = batch_norms(trial.model) if synchronised or shared else ()
    group: RankGroup = "replicas" if synchronised else "sequence"
    if channels is None:
        return None
    return tuple(
        message
        for count, calls in Counter(channels).items()
        for message in (
            Message(
                "all_reduce", _NORM_BYTES * (2 * count + 1), calls, "forward", None, micro_steps="all", group=group
            ),
            Message("all_reduce", _NORM_BYTES * 2 * count, calls, "backward", None, micro_steps="all", group=group),
        )
    )


def rescaled(
    by_arithmetic: Sequence[Message], sent_bytes: Mapping[tuple[str, str], int], grad_accum: int
) -> tuple[Message, ...]:
    """The same schedule with the bytes of each operation made equal to what was counted in an optimizer step.

    Messages of an operation that was not counted are left out. An operation that was counted but has no message is sent
    after backward, where nothing hides it.

    Args:
        by_arithmetic: the messages to rescale.
        sent_bytes: (operation, dtype) -> bytes of the whole tensors, all calls together.
        grad_accum: micro-steps in an optimizer step of the trial that was counted.
    """
    counted: defaultdict[str, float] = defaultdict(float)
    for (operation, _), amount in sent_bytes.items():
        counted[operation] += amount
    planned: defaultdict[str, float] = defaultdict(float)
    for message in by_arithmetic:
        planned[message.operation] += message.tensor_bytes * message.times(grad_accum)
    kept = [
        replace(message, tensor_bytes=message.tensor_bytes * counted[message.operation] / planned[message.operation])
        for message in by_arithmetic
        if counted[message.operation] > 0
    ]
    missing = [
        Message(operation, amount, 1, "after", None, micro_steps="last")
        for operation, amount in counted.items()
        if amount > 0 and operation not in planned
    ]
    return (*kept, *missing)
