"""Where ranks stand that share models and images."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trial.test_trial import trial
from vitscale.trial.model_cost import forward_flops, most_stages, parameter_shapes, stage_blocks
from vitscale.trial.model_spec import ModelSpec, resolve
from vitscale.trial.parallel import ParallelSpec, RankLayout

COUNTS = st.integers(1, 4)


def test_a_layout_by_hand() -> None:
    """Eight ranks, two models of two tensor x two sequence ranks: neighbours are of a tensor group."""
    layout = RankLayout.of(8, ParallelSpec(tensor=2, sequence=2))
    assert layout == RankLayout(pipeline=1, data=2, sequence=2, tensor=2)
    assert layout.coordinates(5) == (0, 1, 0, 1)
    assert layout.exchanges_in_groups
    assert not RankLayout.of(4, ParallelSpec(tensor=4)).exchanges_in_groups  # a group is all ranks
    assert layout.groups("tensor") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert layout.groups("sequence") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert layout.groups("data", "sequence") == ((0, 2, 4, 6), (1, 3, 5, 7))


@given(pipeline=COUNTS, data=COUNTS, sequence=COUNTS, tensor=COUNTS)
def test_every_rank_stands_somewhere_of_its_own(pipeline: int, data: int, sequence: int, tensor: int) -> None:
    parallel = ParallelSpec(tensor=tensor, sequence=sequence, pipeline=pipeline)
    ranks = pipeline * data * sequence * tensor
    layout = RankLayout.of(ranks, parallel)
    assert (layout.data, layout.sizes) == (data, (pipeline, data, sequence, tensor))
    assert len({layout.coordinates(rank) for rank in range(ranks)}) == ranks
    for axis, size in zip(layout.coordinates(0)._fields, layout.sizes, strict=True):
        groups = layout.groups(axis)  # type: ignore[arg-type]
        assert {len(group) for group in groups} == {size}
        assert sorted(rank for group in groups for rank in group) == list(range(ranks))


def test_ranks_that_do_not_divide_are_none() -> None:
    with pytest.raises(ValueError, match="6 ranks are not a multiple of 4, which share one model"):
        RankLayout.of(6, ParallelSpec(tensor=2, sequence=2))


def test_replicas_by_hand() -> None:
    """Eight ranks in two replicas of four: neighbours shard one, and every fourth rank holds the same shard."""
    layout = RankLayout.of(8, ParallelSpec(replicate=2))
    assert (layout.data, layout.replicas, layout.replicate, layout.sharding_ranks) == (8, 8, 2, 4)
    assert (layout.sharding_group(6), layout.replication_group(6)) == ((4, 5, 6, 7), (2, 6))
    assert layout.groups_in_words(6) == "sharding 4+5+6+7, replication 2+6"
    assert layout.exchanges_in_groups
    for replicas, ranks in ((1, 8), (8, 1)):  # one group is all ranks, the other each rank for itself
        whole = RankLayout.of(8, ParallelSpec(replicate=replicas))
        assert (whole.sharding_ranks, whole.exchanges_in_groups, whole.groups_in_words(6)) == (ranks, False, "")
    with pytest.raises(ValueError, match="6 ranks do not divide into 4 equal replicas"):
        RankLayout.of(6, ParallelSpec(replicate=4))


@given(replicas=COUNTS, sharding=COUNTS, sequence=COUNTS, tensor=COUNTS, pipeline=COUNTS)
def test_every_rank_has_a_place_in_its_replica(
    replicas: int, sharding: int, sequence: int, tensor: int, pipeline: int
) -> None:
    """A rank alone is in both its sharding and its replication group; over the sharding groups of the latter its
    gradients are averaged."""
    parallel = ParallelSpec(tensor=tensor, sequence=sequence, pipeline=pipeline, replicate=replicas)
    layout = RankLayout.of(parallel.least_ranks * sharding, parallel)
    assert layout.sharding_ranks * replicas == layout.replicas
    for rank in {0, layout.ranks // 2, layout.ranks - 1}:
        own_shards, own_copies = layout.sharding_group(rank), layout.replication_group(rank)
        assert (len(own_shards), len(own_copies)) == (layout.sharding_ranks, replicas)
        assert {*own_shards} & {*own_copies} == {rank}
        averaged = {other for holder in own_copies for other in layout.sharding_group(holder)}
        (group,) = [ranks for ranks in layout.groups("data", "sequence") if rank in ranks]
        assert averaged == {*group}


def test_the_bubble_by_hand() -> None:
    """Four ranks and eight micro-batches: three of eleven times; with two stages each, three of nineteen."""
    assert ParallelSpec(pipeline=4).bubble_share(8) == pytest.approx(3 / 11)
    assert ParallelSpec(pipeline=4, schedule="interleaved").bubble_share(8) == pytest.approx(3 / 19)
    assert ParallelSpec().bubble_share(8) == 0.0


@given(layers=st.integers(1, 40), stages=st.integers(1, 12), classes=st.sampled_from([10, 21_843]))
def test_stages_are_balanced(layers: int, stages: int, classes: int) -> None:
    """Every block once and in order; no other cut has a smaller largest stage."""
    stages = min(layers, stages)
    model = ModelSpec(name="vit-ti16", image_size=32, patch_size=8, layers=layers, hidden_size=48, heads=6)
    spec = resolve(model, classes)
    found = stage_blocks(spec, stages)
    assert [block for own in found for block in own] == list(range(layers))
    tokens, width = 17, 48
    block = tokens * (4 * width**2 + 2 * tokens * width + 2 * width * 4 * width)
    ends = {0: 16 * 3 * 8 * 8 * width}
    ends[stages - 1] = ends.get(stages - 1, 0) + width * classes
    macs = [len(own) * block + ends.get(stage, 0) for stage, own in enumerate(found)]
    assert 2 * sum(macs) == forward_flops(spec)
    # With any less, the stages would hold fewer blocks in all, but for the one that each has at least.
    room = sum(max(1, (max(macs) - 1 - ends.get(stage, 0)) // block) for stage in range(stages))
    assert room < layers or max(macs) == max(block + ends.get(stage, 0) for stage in range(stages))


@pytest.mark.parametrize("stages", [2, 3, 5, 8])
def test_no_other_cut_of_a_swin_has_a_smaller_largest_stage(stages: int) -> None:
    """All ways to cut eight blocks, each with what merges its stage behind it: of 32 x 32 patches of 12 pixels to
    widths of 16, 32 and 64, their number halved along each side. MACs of a block, by hand: four products of c x c and
    two of c x 4 c a token, windows of 4 x 4, and the two layers of the biases of 7 x 7 distances."""
    model = ModelSpec(
        name="swinv2-t", image_size=64, patch_size=2, hidden_size=16, heads=1, depths=(2, 5, 1), window_size=4
    )
    spec = resolve(model, 10)
    macs = []
    for number, depth in enumerate((2, 5, 1)):
        tokens, width, heads = 32**2 // 4**number, 16 << number, 1 << number
        macs += [tokens * (12 * width**2 + 2 * 16 * width) + 49 * 512 * (2 + heads)] * depth
        macs[-1] += 0 if number == 2 else tokens // 4 * 4 * width * 2 * width
    macs[0], macs[-1] = macs[0] + 32**2 * 12 * 16, macs[-1] + 64 * 10
    assert 2 * sum(macs) == forward_flops(spec)
    cut = stage_blocks(spec, stages)
    assert [block for own in cut for block in own] == list(range(8))
    ways = [pairwise((0, *ends, 8)) for ends in combinations(range(1, 8), stages - 1)]
    least = min(max(sum(macs[begin:end]) for begin, end in way) for way in ways)
    assert max(sum(macs[block] for block in own) for own in cut) == least


@pytest.mark.parametrize("name", ["vit-ti16", "swinv2-t"])
@pytest.mark.parametrize("decoder_size", [8, 256])
def test_heads_of_segmentation_are_weighed_and_may_be_a_stage(name: str, decoder_size: int) -> None:
    """All ways to cut four blocks, of which the last stage need not have any; wide heads outweigh them."""
    swin = {"image_size": 64, "patch_size": 2, "hidden_size": 16, "heads": 1, "depths": (1, 2, 1), "window_size": 4}
    vit = {"image_size": 64, "patch_size": 8, "layers": 4, "hidden_size": 48, "heads": 6}
    fields = swin if name == "swinv2-t" else vit
    model = ModelSpec.model_validate(fields | {"name": name, "task": "segmentation", "decoder_size": decoder_size})
    spec = resolve(model, 10)
    assert most_stages(spec) == 5
    shapes = parameter_shapes(spec)
    assert shapes is not None
    assert len(shapes.in_a_row) == 4
    embedding, head = (sum(module.macs for module in own.modules) for own in (shapes.blocks[0], shapes.blocks[-1]))
    macs = [sum(module.macs for block in unit for module in block.modules) for unit in shapes.in_a_row]
    assert 2 * (sum(macs) + embedding + head) == forward_flops(spec)

    def largest(ends: Sequence[int]) -> int:
        of_stages = [sum(macs[begin:end]) for begin, end in pairwise((0, *ends, 4))]
        return max(of_stages[0] + embedding, *of_stages[1:-1], of_stages[-1] + head)

    for stages in (2, 3, 4, 5):
        cut = stage_blocks(spec, stages)
        assert [block for own in cut for block in own] == list(range(4))
        assert largest([own.stop for own in cut[:-1]]) == min(map(largest, combinations(range(1, 5), stages - 1)))
        if decoder_size == 256 or stages == 5:
            assert not cut[-1]
            of_others = [
                max(sum(macs[begin:end]) for begin, end in pairwise((0, *ends, 4)))
                for ends in combinations(range(1, 4), stages - 2)
            ]
            assert max(sum(macs[block] for block in own) for own in cut[:-1]) == min(of_others)
        elif name == "swinv2-t":  # a ViT's pyramid outweighs these blocks whatever the heads
            assert cut[-1]
    with pytest.raises(ValueError, match="4 blocks do not make 6 stages"):
        stage_blocks(spec, 6)


def test_a_global_batch_is_of_the_data_parallel_ranks() -> None:
    """Two ranks that share a model take together what one takes of its own."""
    whole = trial()
    shared = whole.model_copy(update={"parallel": ParallelSpec(tensor=2)})
    each = whole.train.micro_batch * whole.train.grad_accum
    assert (whole.world.size, whole.global_batch, shared.global_batch) == (8, 8 * each, 4 * each)
    assert shared.identity() != whole.identity()
    assert whole.model_copy(update={"parallel": ParallelSpec()}).identity() == whole.identity()
