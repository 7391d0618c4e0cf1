"""A step's allocations on one axis of moments: a ViT of two blocks, added up by hand."""

from __future__ import annotations

from prediction.memory.test_forecast import PSI, TINY, trial
from vitscale.base.plugins import referred
from vitscale.engines import wrapper_facts
from vitscale.prediction.memory.allocations import Allocation, StepMemory, step_memory
from vitscale.prediction.memory.in_parts import pieces
from vitscale.trial.model_cost import parameter_shapes
from vitscale.trial.trial import Trial

EMBEDDING, BLOCK, HEAD = 76, 154, 23
"""Parameters of the parts; the largest tensors have 48, 24 and 12."""


def memory_of(wanted: Trial) -> StepMemory:
    shapes = parameter_shapes(wanted.model)
    assert shapes is not None
    states = referred(wrapper_facts(wanted.train).states)(wanted, shapes)
    return step_memory(pieces(wanted.model, wanted.train), wanted, states)


def test_bytes_at_a_moment_are_those_that_span_it() -> None:
    memory = StepMemory(
        ("forward", "backward", "step"),
        (Allocation("weights", 10, 0, 2), Allocation("activations", 5, 0, 1), Allocation("gradients", 7, 1, 2)),
    )
    assert memory.totals().tolist() == [15, 22, 17]
    assert memory.parts_at(2) == {"weights": 10, "gradients": 7}


def test_of_several_moments_with_a_name_the_highest_is_shown_and_those_of_other_turns_are_not() -> None:
    memory = StepMemory(
        ("backward", "backward", ""), (Allocation("activations", 3, 1, 1), Allocation("weights", 9, 2, 2))
    )
    assert memory.highest() == {"backward": {"activations": 3}}
    assert memory.own_totals() == [0, 3]


def test_a_step_of_two_blocks_by_hand() -> None:
    """Two images of 5 tokens of width 4: 10 rows, a stream of 160 bytes.

    A block keeps 10 x 50 x 4 bytes, and its backward passes on a stream and the MLP's 6 a row. The head keeps its
    norm's input and output, statistics, and logits twice. Behind the embedding's backward nothing is kept.
    """
    memory = memory_of(trial())
    stream, block, head = 160, 2_000, 10 * (8 + 2) * 4 + 2 * 2 * 3 * 4
    steady = 12 * PSI + 2 * 3 * 16 * 4  # weights and AdamW's two moments; images
    assert memory.moments == (*["end of forward"] * 4, *["backward"] * 4, "exchange", "step")
    assert memory.totals().tolist() == [
        steady,
        steady + block,
        steady + 2 * block,
        steady + 2 * block + head,
        steady + 2 * block + head + 4 * 12,
        steady + 2 * block + stream + 240 + 4 * (HEAD + 24),
        steady + block + stream + 240 + 4 * (HEAD + BLOCK + 24),
        steady + 2 * stream + 4 * (HEAD + 2 * BLOCK + 48),
        steady + 4 * PSI,
        steady + 4 * PSI,
    ]  # fmt: skip
    assert EMBEDDING + 2 * BLOCK + HEAD == PSI


def test_every_allocation_lies_on_the_axis() -> None:
    for engine in ({"engine": "fsdp2"}, {"engine": "deepspeed", "zero_stage": 2, "bucket_mib": 1}):
        memory = memory_of(trial(2, TINY, "cpu", **engine))
        assert all(0 <= part.first <= part.last < len(memory.moments) for part in memory.allocations)
        assert memory.totals()[-1] == sum(memory.parts_at(len(memory.moments) - 1).values())
