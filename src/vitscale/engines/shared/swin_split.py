"""Splits Swin V2: heads and MLPs over tensor ranks, rows of tokens over sequence ranks, modules in a row for stages.

The classifier is transformers' own. Its attention holds the number of heads and the scale of each head's logits: both
are cut with the heads. The small network of position biases is cut by what it gives each head.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor import parallel as tp
from typing_extensions import override

from vitscale.engines.shared.tokens import attend, sum_over, with_all_tokens
from vitscale.errors import RequestError
from vitscale.trial import model_counts
from vitscale.trial.model_counts import SwinShape
from vitscale.trial.model_spec import Task

SCALE = "logit_scale"
"""Name of the scale of each head's logits, a parameter of a block's attention."""


def swin_tensor_plan(task: Task) -> dict[str, tp.ParallelStyle]:
    """Return how DTensor cuts a `Swinv2ForImageClassification`, or for segmentation UperNet on a `Swinv2Backbone`.

    In each block it cuts attention by heads and the MLP by its width, and it cuts the classifier of images by classes.
    Embedding, norms, patch merging and UperNet's heads stay whole.

    Matrices are cut in pairs, as in Megatron-LM (arXiv 1909.08053, section 3). The first of a pair is cut by its
    outputs (`ColwiseParallel`): each rank computes some heads, or a part of the MLP's width. The second one takes just
    these and is cut by its inputs (`RowwiseParallel`): its outputs are summed over the ranks, once for each pair.

    Returns:
        Path of a module -> its style. A "*" stands for the number of a stage or of a block:
        "swinv2.encoder.layers.*.blocks.*.output.dense" is that matrix in all blocks.
    """
    body = "backbone" if task == "segmentation" else "swinv2"
    block = f"{body}.encoder.layers.*.blocks.*"
    attention = f"{block}.attention.self"
    plan: dict[str, tp.ParallelStyle] = {
        f"{attention}.query": tp.ColwiseParallel(),
        f"{attention}.key": tp.ColwiseParallel(),
        f"{attention}.value": tp.ColwiseParallel(),
        # The last matrix of the network that computes position biases: it has an output for each head.
        f"{attention}.continuous_position_bias_mlp.2": tp.ColwiseParallel(),
        attention: Heads(),
        f"{block}.attention.output.dense": tp.RowwiseParallel(),
        f"{block}.intermediate.dense": tp.ColwiseParallel(),
        f"{block}.output.dense": tp.RowwiseParallel(),
    }
    if task == "classification":
        # Every rank computes the loss, and so needs the logits of all classes.
        plan["classifier"] = tp.ColwiseParallel(output_layouts=Replicate())
    return plan


class SwinOrder(NamedTuple):
    """Paths of the modules that make up a forward, one after the other."""

    first: list[str]
    """Before the blocks."""
    blocks: list[list[str]]
    """The modules of each block: itself alone, or with the merging of patches that follows the last block of a stage.

    Example: [["swinv2.encoder.layers.0.blocks.0"],
    ["swinv2.encoder.layers.0.blocks.1", "swinv2.encoder.layers.0.downsample"], ...].
    """
    last: list[str]
    """Behind the blocks."""


def swin_in_order(depths: Sequence[int], heads: Sequence[str]) -> SwinOrder:
    """Return the order of modules in a `Swinv2ForImageClassification`, or in UperNet on a `Swinv2Backbone`.

    Args:
        depths: number of blocks of each stage.
        heads: names of UperNet's heads; empty for a classifier of images.
    """
    body = "backbone" if heads else "swinv2"
    modules_by_block: list[list[str]] = []
    for stage, depth in enumerate(depths):
        stage_path = f"{body}.encoder.layers.{stage}"
        modules_by_block += [[f"{stage_path}.blocks.{block}"] for block in range(depth)]
        is_last_stage = stage == len(depths) - 1
        if not is_last_stage:
            last_block_modules = modules_by_block[-1]
            last_block_modules.append(f"{stage_path}.downsample")
    after_blocks = list(heads) if heads else ["swinv2.layernorm", "swinv2.pooler", "classifier"]
    return SwinOrder(first=[f"{body}.embeddings"], blocks=modules_by_block, last=after_blocks)


def run_swin_module(name: str, module: nn.Module, inputs: Tensor | Sequence[Tensor]) -> Tensor | Sequence[Tensor]:
    """Return the output of one module of `swin_in_order`, which is the input of the next one.

    This follows transformers' modeling_swinv2.py.

    Args:
        name: the module's name in the whole model.
        module: the module.
        inputs: images [b, c, H, W] for the embeddings, else hidden states [b, h, w, width]. Where UperNet's heads
            follow, a sequence: the hidden states, and then the map [b, h, w, width] of each stage that is over.
    """
    hidden, *stage_maps = (inputs,) if isinstance(inputs, Tensor) else inputs
    if ".layers." in name:
        return _run_block_or_merging(name, module, hidden, stage_maps)
    output: Tensor
    if name.endswith("embeddings"):
        tokens, sides = module(hidden)
        output = tokens.unflatten(1, sides)
    elif name.endswith("_head"):
        output = module([stage_map.permute(0, 3, 1, 2) for stage_map in (*stage_maps, hidden)])
    elif name.endswith("pooler"):
        output = module(hidden.flatten(1, 2).transpose(1, 2)).flatten(1)
    else:
        output = module(hidden)
    return output


def _run_block_or_merging(
    name: str, module: nn.Module, hidden: Tensor, stage_maps: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Return the hidden states behind a block, or behind the merging of 2 x 2 patches, and the maps of stages."""
    height, width = hidden.shape[1:3]
    output = module(hidden.flatten(1, 2), (height, width))
    tokens: Tensor = output[0] if isinstance(output, tuple) else output
    if not name.endswith("downsample"):
        return tokens.unflatten(1, (height, width)), *stage_maps
    merged = tokens.unflatten(1, ((height + 1) // 2, (width + 1) // 2))
    if name.startswith("backbone"):
        return merged, *stage_maps, hidden
    return merged, *stage_maps


class Heads(tp.ParallelStyle):
    """How DTensor cuts a `Swinv2SelfAttention`: each rank has a part of the heads, and their scales of logits.

    Its input becomes one DTensor for the three matrices that read it, so that their gradients are reduced once.
    """

    @override
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        keep_heads(module, device_mesh.size())
        scale_of_all_heads = module.get_parameter(SCALE)
        sharded_scale = distribute_tensor(scale_of_all_heads.data, device_mesh, [Shard(0)], src_data_rank=None)
        module.register_parameter(SCALE, nn.Parameter(sharded_scale, scale_of_all_heads.requires_grad))

        def use_local_scale(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            """Before forward: let it read this rank's scales as a plain tensor, and make its input a DTensor."""
            scale = module.get_parameter(SCALE)
            if isinstance(scale, DTensor):
                # An attribute hides the parameter for as long as forward takes.
                module.__dict__[SCALE] = scale.to_local()
            hidden: Tensor = inputs[0]
            return DTensor.from_local(hidden, device_mesh, [Replicate()], run_check=False), *inputs[1:]

        def use_parameter_again(module: nn.Module, *_: object) -> None:
            """Behind forward: take back what `use_local_scale` has hidden."""
            module.__dict__.pop(SCALE, None)

        module.register_forward_pre_hook(use_local_scale)
        module.register_forward_hook(use_parameter_again, always_call=True)
        return module


def keep_heads(attention: nn.Module, ranks: int) -> None:
    """Set the numbers of a `Swinv2SelfAttention` to those of one rank's heads; each of `ranks` has as many heads."""
    swin_attention: Any = attention
    swin_attention.num_attention_heads //= ranks
    swin_attention.all_head_size //= ranks


def split_rows(model: nn.Module, shape: SwinShape, group: dist.ProcessGroup) -> None:
    """Make each rank of `group` compute some rows of every image's tokens; this changes the model in place.

    The first rank has the topmost rows. Each has as many as become whole rows of the last stage's map
    (`model_counts.rows_of_ranks`), so that patches that are merged lie on one rank.

    Three places of the model exchange or cut tokens from then on:

    - the embeddings take the rank's rows of pixels alone;
    - each block's attention exchanges rows as a vision transformer's does its tokens (`tokens.attend`): between the
      exchanges each rank has all windows of some heads;
    - the backbone's output is put together: the mean over an image's tokens goes to all ranks, and where pixels are
      labelled, each rank gets the whole maps of some images.
    """
    is_segmenter = hasattr(model, "backbone")
    backbone: Any = model.get_submodule("backbone" if is_segmenter else "swinv2")
    row_split = _RowSplit(shape, group)
    backbone.embeddings.register_forward_pre_hook(row_split.cut_images)
    for stage_number, stage in enumerate(backbone.encoder.layers):
        for block in stage.blocks:
            _split_block(block, row_split, stage_number)
    if is_segmenter:
        backbone.every_image = False  # evaluation sets it, where each rank needs the maps of all images
        backbone.register_forward_hook(row_split.join_maps)
    else:
        backbone.pooler.register_forward_hook(row_split.average_over_ranks)


def _split_block(block: Any, row_split: _RowSplit, stage_number: int) -> None:
    """Replace the forwards of a `Swinv2Layer` and its attention by ones that take this rank's rows of tokens."""
    # No block may refer to itself: blocks that belong to other ranks of a pipeline would stay.
    block_proxy = weakref.proxy(block)
    block.forward = functools.partial(_block_forward, block_proxy)
    block.attention.self.forward = functools.partial(_attention_forward, block_proxy, row_split, stage_number)


class _RowSplit:
    """Which rows of each stage's map lie on which rank of a group; its hooks cut and join what passes through Swin."""

    def __init__(self, shape: SwinShape, group: dist.ProcessGroup) -> None:
        self.shape = shape
        self.group = group
        self.first_map_rows = model_counts.stages(shape)[0].side
        """Rows of the first stage's map; those of the images that the embeddings took last."""

    def rows_by_rank(self, stage_number: int) -> list[int]:
        """Return how many rows of a stage's map each rank has; stages are counted from 0."""
        stages = len(self.shape.depths)
        return model_counts.rows_of_ranks(self.first_map_rows, stage_number, stages, self.group.size())

    def cut_images(self, _: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Before the embeddings: replace images [b, c, H, W] by the pixels [b, c, own H, W] of this rank's tokens.

        Raises:
            RequestError: images have too few rows for all ranks to get some.
        """
        images: Tensor = inputs[0]
        patch_size = self.shape.patch_size
        self.first_map_rows = math.ceil(images.shape[2] / patch_size)
        rows_by_rank = self.rows_by_rank(0)
        if rows_by_rank[-1] == 0:
            what = f"an image of {images.shape[2]} rows of pixels has too few for {len(rows_by_rank)} sequence ranks"
            raise RequestError(what, next_step='Set data.evaluation = "sliding", or parallel.sequence smaller')
        rank = self.group.rank()
        first_pixel_row = sum(rows_by_rank[:rank]) * patch_size
        end_pixel_row = first_pixel_row + rows_by_rank[rank] * patch_size
        return images[:, :, first_pixel_row:end_pixel_row], *inputs[1:]

    def average_over_ranks(self, _: nn.Module, __: tuple[Any, ...], own_mean: Tensor) -> Tensor:
        """Behind the pooler: replace the mean [b, width, 1] of this rank's tokens by that of all ranks' tokens."""
        last_stage_rows = self.rows_by_rank(len(self.shape.depths) - 1)
        own_share = last_stage_rows[self.group.rank()] / sum(last_stage_rows)
        return sum_over(own_mean[..., 0] * own_share, self.group).unsqueeze(-1)

    def join_maps(self, backbone: Any, _: tuple[Any, ...], output: Any) -> Any:
        """Behind the backbone: replace each stage's map [b, width, own rows, columns] by one with all rows.

        The whole map [b', width, rows, columns] is that of the images whose pixels this rank labels, or of all images
        where `backbone.every_image` is set.
        """
        whole_maps = []
        for stage_number, own_map in enumerate(output.feature_maps):
            columns = own_map.shape[3]
            tokens_by_rank = [rows * columns for rows in self.rows_by_rank(stage_number)]
            own_tokens = own_map.flatten(2).transpose(1, 2)  # [b, own rows * columns, width]
            all_tokens = with_all_tokens(
                own_tokens, every_image=backbone.every_image, tokens_by_rank=tokens_by_rank, group=self.group
            )
            whole_maps.append(all_tokens.transpose(1, 2).unflatten(2, (-1, columns)))
        output.feature_maps = tuple(whole_maps)
        return output


def _block_forward(
    block: Any, hidden: Tensor, map_sides: tuple[int, int], output_attentions: bool = False
) -> tuple[Tensor]:
    """Return what a `Swinv2Layer` makes of this rank's tokens, [b, own rows * columns, h].

    Args:
        block: the `Swinv2Layer`.
        hidden: its input, of the same shape.
        map_sides: rows and columns of this rank's part of the map.
        output_attentions: an argument of transformers, not used.
    """
    del output_attentions
    columns = map_sides[1]
    mixed = block.attention.output(block.attention.self(hidden, columns), hidden)
    hidden = hidden + block.layernorm_before(mixed)
    return (hidden + block.layernorm_after(block.output(block.intermediate(hidden))),)


def _attention_forward(block: Any, row_split: _RowSplit, stage_number: int, hidden: Tensor, columns: int) -> Tensor:
    """Return what a block's `Swinv2SelfAttention` makes of this rank's tokens [b, own rows * columns, h].

    Between its two exchanges each rank has the windows of all tokens, for some of the heads.
    """
    attention = block.attention.self
    group = row_split.group
    tokens_by_rank = [rows * columns for rows in row_split.rows_by_rank(stage_number)]
    heads_per_rank = attention.num_attention_heads // group.size()
    first_head = group.rank() * heads_per_rank
    own_heads = slice(first_head, first_head + heads_per_rank)
    attend_in_windows = functools.partial(
        _attention_in_windows, block, own_heads=own_heads, columns=columns, dtype=hidden.dtype
    )
    matrices = (attention.query, attention.key, attention.value)
    projected = (_by_heads(matrix(hidden), attention.attention_head_size) for matrix in matrices)
    mixed = attend(*projected, attention=attend_in_windows, tokens_by_rank=tokens_by_rank, group=group)
    return mixed.transpose(1, 2).flatten(2)


def _by_heads(projected: Tensor, head_width: int) -> Tensor:
    """Return [b, heads, tokens, d] from [b, tokens, heads * d]."""
    token_by_token: Tensor = projected.unflatten(-1, (-1, head_width))
    return token_by_token.transpose(1, 2)


def _attention_in_windows(block: Any, joint: Tensor, *, own_heads: slice, columns: int, dtype: torch.dtype) -> Tensor:
    """Return attention of some heads in a block's windows, [b, own heads, tokens, d].

    Windows are shifted and padded as in transformers' `Swinv2Layer`.

    Args:
        block: a `Swinv2Layer`.
        joint: queries, keys and values [3, b, own heads, tokens, d] of all tokens, row by row.
        own_heads: which of the block's heads.
        columns: number of tokens in a row.
        dtype: the dtype of the block's input, and so of its mask.
    """
    attention = block.attention.self
    side = block.window_size
    shift = block.shift_size
    maps = joint.unflatten(3, (-1, columns))  # [3, b, heads, rows, columns, d]
    rows = maps.shape[3]
    maps = _padded_to_windows(attention, maps, side=side, own_heads=own_heads)
    if shift:
        maps = maps.roll((-shift, -shift), dims=(3, 4))
    _, batch, heads, padded_rows, padded_columns, head_width = maps.shape
    # They are cut one by one, so that each is freed when it is no longer needed.
    query, key, value = [_cut_into_windows(projected, side) for projected in maps.unbind()]
    mask = block.get_attn_mask(padded_rows, padded_columns, dtype=dtype, device=maps.device)
    mixed = _window_attention(attention, own_heads, query=query, key=key, value=value, mask=mask)
    window_grid = (padded_rows // side, padded_columns // side)
    mixed_maps = _joined_windows(mixed.view(batch, *window_grid, side, side, heads, head_width))
    if shift:
        mixed_maps = mixed_maps.roll((shift, shift), dims=(2, 3))
    return mixed_maps[:, :, :rows, :columns].flatten(2, 3)


def _cut_into_windows(maps: Tensor, side: int) -> Tensor:
    """Return the tokens of each window, [b * windows, side * side, heads * d].

    Args:
        maps: [b, heads, rows, columns, d], where rows and columns are multiples of `side`.
        side: rows and columns of a window.
    """
    heads = maps.shape[1]
    head_width = maps.shape[4]
    # [b, heads, window row, row in it, window column, column in it, d]
    cut: Tensor = maps.unflatten(3, (-1, side)).unflatten(2, (-1, side))
    # [b, window row, window column, row in it, column in it, heads, d]
    window_by_window = cut.permute(0, 2, 4, 3, 5, 1, 6)
    return window_by_window.reshape(-1, side**2, heads * head_width)


def _joined_windows(windows: Tensor) -> Tensor:
    """Return maps [b, heads, rows, columns, d]: the way back from `_cut_into_windows`.

    Args:
        windows: [b, window row, window column, row in it, column in it, heads, d].
    """
    # [b, heads, window row, row in it, window column, column in it, d]
    row_by_row = windows.permute(0, 5, 1, 3, 2, 4, 6)
    batch, heads, window_rows, side, window_columns, _, head_width = row_by_row.shape
    return row_by_row.reshape(batch, heads, window_rows * side, window_columns * side, head_width)


_ROW_AXIS = 3
_COLUMN_AXIS = 4
"""Axes of the joint maps of queries, keys and values, [3, b, heads, rows, columns, d]."""


def _padded_to_windows(attention: Any, maps: Tensor, *, side: int, own_heads: slice) -> Tensor:
    """Return maps of queries, keys and values, padded at the right and the bottom to whole windows.

    Example: for windows of 8 x 8 a map of 14 x 14 tokens gets two columns and then two rows, and so is 16 x 16.

    Args:
        attention: a block's `Swinv2SelfAttention`.
        maps: [3, b, own heads, rows, columns, d].
        side: rows and columns of a window.
        own_heads: which of the block's heads.
    """
    head_width = maps.shape[-1]
    for axis in (_COLUMN_AXIS, _ROW_AXIS):
        missing = -maps.shape[axis] % side  # 2 for 14 tokens and a side of 8
        if missing > 0:
            padding_token = _projected_zero_token(attention, head_width)[:, own_heads]
            maps = _with_tokens_appended(maps, padding_token, axis=axis, count=missing)
    return maps


def _projected_zero_token(attention: Any, head_width: int) -> Tensor:
    """Return query, key and value of a token that is zero, [3, heads, d].

    transformers pads hidden states with zeros, of which the three matrices make their biases. Here the matrices have
    been applied before, so padding is made of the biases. The matrix of keys has none: its part is 0.
    """
    no_bias = torch.zeros_like(attention.query.bias)
    biases = [attention.query.bias, no_bias, attention.value.bias]  # three of [heads * d]
    local_biases = [bias.to_local() if isinstance(bias, DTensor) else bias for bias in biases]
    bias_by_head: Tensor = torch.stack(local_biases).unflatten(1, (-1, head_width))
    return bias_by_head


def _with_tokens_appended(maps: Tensor, token: Tensor, *, axis: int, count: int) -> Tensor:
    """Return maps with rows or columns appended in which all tokens are the same.

    Args:
        maps: [3, b, own heads, rows, columns, d].
        token: query, key and value of the token, [3, own heads, d].
        axis: `_ROW_AXIS` to append rows, `_COLUMN_AXIS` to append columns.
        count: number of rows or columns.
    """
    one_token_map = token[:, None, :, None, None].to(maps.dtype)  # [3, 1, own heads, 1, 1, d]
    appended_shape = list(maps.shape)
    appended_shape[axis] = count  # for two columns [3, b, own heads, rows, 2, d]
    return torch.cat((maps, one_token_map.expand(appended_shape)), dim=axis)


def _window_attention(
    attention: Any, own_heads: slice, *, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> Tensor:
    """Return transformers' attention in windows with some heads, [windows, tokens, own heads * d].

    Its forward runs on a stand-in of the module: one that has these heads alone, and whose matrices return the queries,
    keys and values that are computed already.

    Args:
        attention: a block's `Swinv2SelfAttention`.
        own_heads: which of its heads.
        query: queries of each window, of the same shape as the result.
        key: their keys.
        value: their values.
        mask: that of the block's shifted windows.
    """
    position_biases = attention.continuous_position_bias_mlp
    stand_in = SimpleNamespace(
        query=lambda _: query,
        key=lambda _: key,
        value=lambda _: value,
        num_attention_heads=own_heads.stop - own_heads.start,
        attention_head_size=attention.attention_head_size,
        all_head_size=query.shape[-1],
        logit_scale=attention.logit_scale[own_heads],
        continuous_position_bias_mlp=lambda table: position_biases(table)[..., own_heads],
        relative_coords_table=attention.relative_coords_table,
        relative_position_index=attention.relative_position_index,
        window_size=attention.window_size,
        dropout=attention.dropout,
    )
    mixed: Tensor = type(attention).forward(stand_in, query, mask)[0]
    return mixed
