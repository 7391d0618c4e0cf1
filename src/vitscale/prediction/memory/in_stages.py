"""What a rank of a pipeline holds: one micro-batch in one of its stages, and beside it those that are under way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from vitscale.base.plugins import referred
from vitscale.engines import wrapper_facts
from vitscale.engines.dtypes import weight_bytes
from vitscale.engines.parts import InTurn
from vitscale.engines.states import Parts, RankStates, added, sizes
from vitscale.prediction.memory.activations import is_autocast
from vitscale.prediction.shares import Share, Turn, shares
from vitscale.trial.model_cost import ParameterShapes
from vitscale.trial.rank_batches import largest_micro_batch
from vitscale.trial.trial import Trial

Wrapped = Callable[[Trial, ParameterShapes], RankStates]
"""Takes a trial and shapes of tensors; gives what the trial's wrapper holds of them."""


class StageBytes(NamedTuple):
    """Bytes of a micro-batch in one stage."""

    kept: int
    """What the stage keeps from forward to backward, beside the buffer of what it takes."""
    received: int
    handed_on: int
    """What it hands on, without `passed_on`."""
    passed_on: int = 0
    """Maps for a head that it received and hands on as they are."""


def in_turns(
    trial: Trial, share: Share, whole: ParameterShapes, of_stages: Sequence[StageBytes], wrapped: Wrapped
) -> Iterator[InTurn]:
    """The turns of a rank at which it may hold most, and the end of the step.

    Args:
        trial: the trial, with all micro-batches.
        share: the rank's share of the model.
        whole: the model's tensors.
        of_stages: bytes of a micro-batch in each of the rank's stages.
        wrapped: gives what the trial's wrapper holds outside a pipeline.
    """
    stages = [stage.shapes(whole) for stage in share.stages]
    count = trial.train.grad_accum
    facts = wrapper_facts(trial.train)
    gathers_blocks = bool(facts.stage_states)
    steps = [trial.model_copy(update={"train": trial.train.model_copy(update={"grad_accum": n})}) for n in (1, 2)]
    own = stages[0] if len(stages) == 1 else share.shapes(whole)
    steady = added(wrapped(steps[0], own).steady, _kept_by_schedule(trial, share, of_stages))

    @cache
    def held(stage: int | None, *, later: bool) -> tuple[Trial, RankStates]:
        shapes = own if stage is None else stages[stage]
        step = steps[later]
        if gathers_blocks:
            holding: RankStates = referred(facts.stage_states)(step, shapes, later=later)
        else:
            holding = wrapped(step, shapes)
        return step, replace(holding, steady=steady)

    step, end = held(None, later=count > 1)
    if share.first and is_autocast(trial.train):  # autocast casts images for the patches
        of_stages = [of_stages[0]._replace(kept=of_stages[0].kept + 2 * _pixels(trial)), *of_stages[1:]]
    for turn in share.turns(count, sharded=gathers_blocks):
        later, gathered = turn.finished[turn.stage] > 0, turn.whole[turn.stage]
        step, holding = held(turn.stage, later=later)
        beside = added(
            *(_of_other_stage(trial, held, shapes, turn, n) for n, shapes in enumerate(stages) if n != turn.stage),
            {"activations of other micro-batches": _under_way(trial, share, turn, of_stages)},
        )
        moments = ("backward",) if turn.backward else ("end of forward",)
        yield InTurn(turn.stage, moments, step, holding, beside, gathered)
    yield InTurn(0, ("exchange", "step"), step, end, {})


def _under_way(trial: Trial, share: Share, turn: Turn, of_stages: Sequence[StageBytes]) -> int:
    """Bytes of other micro-batches, which include what a stage hands on: it stays until its backward is over.

    By torch/distributed/pipelining/schedules.py gpipe and interleaved schedules hold all that was sent, gradients too,
    until the step is over (`..._sends_to_wait`, `send_ops`: works of sends, which hold their tensors). 1f1b holds the
    last gradient (`bwd_sends`), and while stages take turns what the last forward but one before that sent
    (`send_work`).
    """
    total = 0
    for own, others, finished in zip(of_stages, turn.others, turn.finished, strict=True):
        total += others * (own.kept + own.handed_on)
        if trial.parallel.schedule != "1f1b":
            total += finished * (own.received + own.handed_on)
        elif finished:
            ahead = share.in_flight(trial.train.grad_accum) - 1
            total += own.received + (own.handed_on if 0 < ahead == others and finished >= ahead else 0)
    return total


def _of_other_stage(
    trial: Trial, held: Callable[..., tuple[Trial, RankStates]], shapes: ParameterShapes, turn: Turn, number: int
) -> Parts:
    """What a wrapper holds of a stage while another one works."""
    others, finished = turn.others[number], turn.finished[number]
    gathers_blocks = bool(wrapper_facts(trial.train).stage_states)
    over = finished == trial.train.grad_accum and gathers_blocks
    gradients = held(number, later=True)[1].held if finished and not over else {}
    if not gathers_blocks or over:
        return gradients
    count = sizes(shapes)
    gathered = count.all if turn.whole[number] else count.root if others + finished else 0
    return added(gradients, {"gathered weights": gathered * weight_bytes(trial.train)})


def _kept_by_schedule(trial: Trial, share: Share, of_stages: Sequence[StageBytes]) -> Parts:
    """What torch's schedule keeps for the whole step.

    For each micro-batch a stage has a buffer for the activations that it takes, and one for the gradients of those that
    it hands on (`_setup_forward_recv_info` and `_create_grad_recv_info` in torch/distributed/pipelining/stage.py).
    Beside them are all images, in the dtype in which the first stage takes them and on that stage once more as one
    tensor, and the labels of all pixels.
    """
    count = trial.train.grad_accum
    images = (count * (1 + share.first) - 1) * _pixels(trial) * weight_bytes(trial.train)
    labels = (count - 1) * _pixels(trial) // trial.model.channels * 8 * (trial.model.task == "segmentation")
    buffers = count * sum(own.received + own.handed_on + own.passed_on for own in of_stages)
    return {"buffers of stages": buffers, "images": images + labels}


def _pixels(trial: Trial) -> int:
    """Pixels of a micro-batch, counted in each channel."""
    return trial.model.channels * trial.model.image_size**2 * largest_micro_batch(trial.train)


def that_may_take_most(trial: Trial, whole: ParameterShapes) -> list[Share]:
    """The shares of those places in the pipeline that may take most memory.

    Of places with the same tensors it is the one with most micro-batches under way, and the one with most among those
    that begin a backward before the last forward: the others hold less at every moment. It is every place where a stage
    may keep less of a micro-batch, which it computes again, than an interleaved schedule keeps of what was sent.
    """
    if trial.train.activation_checkpointing and trial.parallel.schedule == "interleaved":
        return list(shares(trial))
    most: dict[tuple[object, ...], Share] = {}
    count = trial.train.grad_accum
    for share in sorted(shares(trial), key=lambda share: share.in_flight(count)):
        under_way = share.in_flight(count)
        most[share.shapes(whole), under_way == count * len(share.chunks)] = share
    return list(most.values())
