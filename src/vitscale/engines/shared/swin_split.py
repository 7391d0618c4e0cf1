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
    """Return how DTensor cuts a `Swinv2ForImageClassification`, or UperNet on a `Swinv2Backbone`.

    In each block it cuts attention by heads and the MLP by its width, and it cuts the classifier of images by classes.
    Embedding, norms, patch merging and UperNet's heads stay whole.
    """
    block = f"{'backbone' if task == 'segmentation' else 'swinv2'}.encoder.layers.*.blocks.*"
    attention = f"{block}.attention.self"
    by_heads = ("query", "key", "value", "continuous_position_bias_mlp.2")
    plan: dict[str, tp.ParallelStyle] = {f"{attention}.{name}": tp.ColwiseParallel() for name in by_heads}
    plan[attention] = Heads()
    plan |= {
        f"{block}.attention.output.dense": tp.RowwiseParallel(),
        f"{block}.intermediate.dense": tp.ColwiseParallel(),
        f"{block}.output.dense": tp.RowwiseParallel(),
    }
    if task == "classification":
        plan["classifier"] = tp.ColwiseParallel(output_layouts=Replicate())
    return plan


class SwinOrder(NamedTuple):
    """Names of the modules that make up a forward, one after the other."""

    first: list[str]
    """Before the blocks."""
    blocks: list[list[str]]
    """One list for each block; a stage's last block has the merging too."""
    last: list[str]
    """Behind the blocks."""


def swin_in_order(depths: Sequence[int], heads: Sequence[str]) -> SwinOrder:
    """Return the order of modules in a `Swinv2ForImageClassification`.

    With `heads`, the names of UperNet's heads, it is that of UperNet on a `Swinv2Backbone`.
    """
    body = "backbone" if heads else "swinv2"
    blocks = []
    for stage, depth in enumerate(depths):
        path = f"{body}.encoder.layers.{stage}"
        blocks += [[f"{path}.blocks.{block}"] for block in range(depth)]
        if stage < len(depths) - 1:
            blocks[-1].append(f"{path}.downsample")
    last = list(heads) if heads else ["swinv2.layernorm", "swinv2.pooler", "classifier"]
    return SwinOrder([f"{body}.embeddings"], blocks, last)


def swin_through(name: str, module: nn.Module, given: Tensor | Sequence[Tensor]) -> Tensor | Sequence[Tensor]:
    """Return what a module of `swin_in_order` makes of hidden states [b, h, w, width]; the embeddings take images.

    This follows transformers' modeling_swinv2.py. For heads of UperNet each stage's output goes on beside the states.
    """
    hidden, *maps = (given,) if isinstance(given, Tensor) else given
    if ".layers." in name:
        height, width = hidden.shape[1:3]
        output = module(hidden.flatten(1, 2), (height, width))
        tokens: Tensor = output[0] if isinstance(output, tuple) else output
        if not name.endswith("downsample"):
            return tokens.unflatten(1, (height, width)), *maps
        stage_maps = [hidden] if name.startswith("backbone") else []
        merged = tokens.unflatten(1, ((height + 1) // 2, (width + 1) // 2))
        return merged, *maps, *stage_maps
    states: Tensor
    if name.endswith("embeddings"):
        embedded, sides = module(hidden)
        states = embedded.unflatten(1, sides)
    elif name.endswith("_head"):
        states = module([stage_map.permute(0, 3, 1, 2) for stage_map in (*maps, hidden)])
    elif name.endswith("pooler"):
        states = module(hidden.flatten(1, 2).transpose(1, 2)).flatten(1)
    else:
        states = module(hidden)
    return states


class Heads(tp.ParallelStyle):
    """Attention that has a part of the heads.

    Its input becomes one DTensor for the three matrices that read it, so that their gradients are reduced once.
    """

    @override
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        keep_heads(module, device_mesh.size())
        scale = module.get_parameter(SCALE)
        cut = distribute_tensor(scale.data, device_mesh, [Shard(0)], src_data_rank=None)
        module.register_parameter(SCALE, nn.Parameter(cut, scale.requires_grad))

        def take_parts(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            scale = module.get_parameter(SCALE)
            if isinstance(scale, DTensor):
                # An attribute hides the parameter for as long as forward takes.
                module.__dict__[SCALE] = scale.to_local()
            hidden: Tensor = inputs[0]
            return DTensor.from_local(hidden, device_mesh, [Replicate()], run_check=False), *inputs[1:]

        def leave_parts(module: nn.Module, *_: object) -> None:
            module.__dict__.pop(SCALE, None)

        module.register_forward_pre_hook(take_parts)
        module.register_forward_hook(leave_parts, always_call=True)
        return module


def keep_heads(attention: nn.Module, ranks: int) -> None:
    """Gives a `Swinv2SelfAttention` the number of heads that each of `ranks` has: all have as many."""
    heads: Any = attention
    heads.num_attention_heads //= ranks
    heads.all_head_size //= ranks


def split_rows(model: nn.Module, shape: SwinShape, group: dist.ProcessGroup) -> None:
    """Gives each rank of `group` some rows of every image's tokens, in order.

    It gets as many as become whole rows of the last stage's map (`model_counts.rows_of_ranks`), so that patches that
    are merged lie on one rank. Attention exchanges rows as it does a vision transformer's tokens (`tokens.attend`);
    between the exchanges each rank has all windows of some heads. The mean over an image's tokens goes to all ranks;
    where pixels are labelled, each rank gets the whole maps of some images.
    """
    segments = hasattr(model, "backbone")
    backbone: Any = getattr(model, "backbone" if segments else "swinv2")
    rows = _Rows(shape, group)
    backbone.embeddings.register_forward_pre_hook(rows.own_images)
    for number, stage in enumerate(backbone.encoder.layers):
        for block in stage.blocks:
            # No block may refer to itself: blocks that belong to other ranks of a pipeline would stay.
            proxy = weakref.proxy(block)
            block.forward = functools.partial(_through_block, proxy)
            block.attention.self.forward = functools.partial(_attention, proxy, rows, number)
    if segments:
        backbone.every_image = False
        backbone.register_forward_hook(rows.whole_maps)
    else:
        backbone.pooler.register_forward_hook(rows.mean_of_all)


class _Rows:
    """Which rows of each stage's map lie on which rank of a group."""

    def __init__(self, shape: SwinShape, group: dist.ProcessGroup) -> None:
        self.shape = shape
        self.group = group
        self.side = model_counts.stages(shape)[0].side
        """Number of rows of the first stage's map, for the images at hand."""

    def of_ranks(self, stage: int) -> list[int]:
        """Return how many rows of a stage's map each rank has."""
        return model_counts.rows_of_ranks(self.side, stage, len(self.shape.depths), self.group.size())

    def own_images(self, _: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Replace images [b, c, H, W] by the rows of pixels [b, c, h, W] that make this rank's tokens.

        Raises:
            RequestError: images have too few rows for all ranks to get some.
        """
        images: Tensor = inputs[0]
        patch = self.shape.patch_size
        self.side = math.ceil(images.shape[2] / patch)
        rows_by_rank = self.of_ranks(0)
        if rows_by_rank[-1] == 0:
            what = f"an image of {images.shape[2]} rows of pixels has too few for {len(rows_by_rank)} sequence ranks"
            raise RequestError(what, next_step='Set data.evaluation = "sliding", or parallel.sequence smaller')
        rank = self.group.rank()
        begin = sum(rows_by_rank[:rank]) * patch
        end = begin + rows_by_rank[rank] * patch
        return images[:, :, begin:end], *inputs[1:]

    def mean_of_all(self, _: nn.Module, __: tuple[Any, ...], own: Tensor) -> Tensor:
        """Replace the mean [b, h, 1] over this rank's tokens by the mean over those of all ranks."""
        rows = self.of_ranks(len(self.shape.depths) - 1)
        share = rows[self.group.rank()] / sum(rows)
        return sum_over(own[..., 0] * share, self.group).unsqueeze(-1)

    def whole_maps(self, backbone: Any, _: tuple[Any, ...], output: Any) -> Any:
        """Replace the maps of a backbone's output by whole ones [b', h, H, W] of the images that are labelled here."""
        maps = []
        for stage, own_rows in enumerate(output.feature_maps):
            width = own_rows.shape[3]
            sizes = [rows * width for rows in self.of_ranks(stage)]
            own_tokens = own_rows.flatten(2).transpose(1, 2)
            tokens = with_all_tokens(own_tokens, every_image=backbone.every_image, sizes=sizes, group=self.group)
            maps.append(tokens.transpose(1, 2).unflatten(2, (-1, width)))
        output.feature_maps = tuple(maps)
        return output


def _through_block(block: Any, hidden: Tensor, rows: tuple[int, int], output_attentions: bool = False) -> tuple[Tensor]:
    """Return a `Swinv2Layer`'s forward of this rank's tokens [b, rows x width, h]; `rows`: their number and width."""
    del output_attentions
    width = rows[1]
    mixed = block.attention.output(block.attention.self(hidden, width), hidden)
    hidden = hidden + block.layernorm_before(mixed)
    return (hidden + block.layernorm_after(block.output(block.intermediate(hidden))),)


def _attention(block: Any, rows: _Rows, stage: int, hidden: Tensor, width: int) -> Tensor:
    """Return what a block's `Swinv2SelfAttention` makes of this rank's tokens [b, own, h].

    In between each rank has the windows of all tokens, for some of the heads.
    """
    heads = block.attention.self
    sizes = [row_count * width for row_count in rows.of_ranks(stage)]
    count = heads.num_attention_heads // rows.group.size()
    first_head = rows.group.rank() * count
    own_heads = slice(first_head, first_head + count)
    attention = functools.partial(_in_windows, block, own=own_heads, width=width, dtype=hidden.dtype)
    matrices = (heads.query, heads.key, heads.value)
    projected = (matrix(hidden).unflatten(-1, (-1, heads.attention_head_size)).transpose(1, 2) for matrix in matrices)
    return attend(*projected, attention=attention, sizes=sizes, group=rows.group).transpose(1, 2).flatten(2)


def _in_windows(block: Any, joint: Tensor, *, own: slice, width: int, dtype: torch.dtype) -> Tensor:
    """Attention of some heads in a block's windows, which are shifted and padded as in transformers' `Swinv2Layer`.

    Args:
        block: a `Swinv2Layer`.
        joint: queries, keys and values [3, b, heads, tokens, d] of all tokens, row by row.
        own: which of the block's heads.
        width: number of tokens in a row.
        dtype: the dtype of the block's input, and so of its mask.

    Returns:
        What they mix to, [b, heads, tokens, d].
    """
    heads = block.attention.self
    side = block.window_size
    shift = block.shift_size
    maps = joint.unflatten(3, (-1, width))
    height = maps.shape[3]
    maps = _padded_to_windows(heads, maps, side=side, own=own)
    if shift:
        maps = maps.roll((-shift, -shift), dims=(3, 4))
    _, batch, count, *padded, head_width = maps.shape
    cut = maps.unflatten(4, (-1, side)).unflatten(3, (-1, side))
    # They are cut one by one, so that each is freed when it is no longer needed.
    windows = [part.permute(0, 2, 4, 3, 5, 1, 6).reshape(-1, side**2, count * head_width) for part in cut.unbind()]
    mask = block.get_attn_mask(*padded, dtype=dtype, device=maps.device)
    mixed = _window_attention(heads, own, windows, mask)
    rows_of_windows = padded[0] // side
    columns_of_windows = padded[1] // side
    joined = mixed.view(batch, rows_of_windows, columns_of_windows, side, side, count, head_width)
    whole = joined.permute(0, 5, 1, 3, 2, 4, 6).reshape(batch, count, *padded, head_width)
    if shift:
        whole = whole.roll((shift, shift), dims=(2, 3))
    return whole[:, :, :height, :width].flatten(2, 3)


def _padded_to_windows(heads: Any, maps: Tensor, *, side: int, own: slice) -> Tensor:
    """Return maps [3, b, heads, height, width, d] of queries, keys and values, padded to whole windows.

    Padding before the matrices would become their biases behind them.

    Args:
        heads: a block's `Swinv2SelfAttention`.
        maps: without padding.
        side: rows and columns of a window.
        own: which of the block's heads.
    """
    for axis in (4, 3):
        missing = -maps.shape[axis] % side
        if missing == 0:
            continue
        biases = [heads.query.bias, torch.zeros_like(heads.query.bias), heads.value.bias]
        local_biases = [bias.to_local() if isinstance(bias, DTensor) else bias for bias in biases]
        by_head = torch.stack(local_biases).unflatten(1, (-1, maps.shape[-1]))
        padding = by_head[:, None, own, None, None].to(maps.dtype)
        shape = [*maps.shape[:axis], missing, *maps.shape[axis + 1 :]]
        maps = torch.cat((maps, padding.expand(shape)), dim=axis)
    return maps


def _window_attention(heads: Any, own: slice, windows: Sequence[Tensor], mask: Tensor | None) -> Tensor:
    """Return transformers' attention in windows with some heads, [windows, tokens, h].

    Its forward runs on a stand-in of the module that has these heads alone, and whose matrices give what is computed
    already.

    Args:
        heads: a block's `Swinv2SelfAttention`.
        own: which of its heads.
        windows: their queries, keys and values, each [windows, tokens, h].
        mask: that of the block's shifted windows.
    """
    biases = heads.continuous_position_bias_mlp
    query, key, value = windows
    stand_in = SimpleNamespace(
        query=lambda _: query,
        key=lambda _: key,
        value=lambda _: value,
        num_attention_heads=own.stop - own.start,
        attention_head_size=heads.attention_head_size,
        all_head_size=query.shape[-1],
        logit_scale=heads.logit_scale[own],
        continuous_position_bias_mlp=lambda table: biases(table)[..., own],
        relative_coords_table=heads.relative_coords_table,
        relative_position_index=heads.relative_position_index,
        window_size=heads.window_size,
        dropout=heads.dropout,
    )
    mixed: Tensor = type(heads).forward(stand_in, query, mask)[0]
    return mixed
