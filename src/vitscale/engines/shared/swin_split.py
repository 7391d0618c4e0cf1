"""Splits Swin V2: heads and MLPs over tensor ranks, rows of tokens over sequence ranks, modules in a row for stages.

The classifier is transformers' own. Its attention holds the number of heads and the scale of each head's logits: both
are cut with the heads. The small network of position biases is cut by what it gives each head.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

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
    """How DTensor cuts a `Swinv2ForImageClassification`, or UperNet on a `Swinv2Backbone`.

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


def swin_in_order(depths: Sequence[int], heads: Sequence[str]) -> tuple[list[str], list[list[str]], list[str]]:
    """Names of the modules that make up a forward, one after the other.

    It is the forward of a `Swinv2ForImageClassification`, or with `heads` of UperNet on a `Swinv2Backbone`.

    Returns:
        The modules before the blocks, those of each block (a stage's last block has the merging too), and those behind.
    """
    units, body = [], "backbone" if heads else "swinv2"
    for stage, depth in enumerate(depths):
        path = f"{body}.encoder.layers.{stage}"
        units += [[f"{path}.blocks.{block}"] for block in range(depth)]
        if stage < len(depths) - 1:
            units[-1].append(f"{path}.downsample")
    return [f"{body}.embeddings"], units, list(heads) or ["swinv2.layernorm", "swinv2.pooler", "classifier"]


def swin_through(name: str, module: nn.Module, given: Tensor | Sequence[Tensor]) -> Tensor | Sequence[Tensor]:
    """What a module of `swin_in_order` makes of hidden states [b, h, w, width]; the embeddings take images.

    This follows transformers' modeling_swinv2.py. For heads of UperNet each stage's output goes on beside the states.
    """
    hidden, *maps = (given,) if isinstance(given, Tensor) else given
    if name.endswith("embeddings"):
        embedded, sides = module(hidden)
        whole: Tensor = embedded.unflatten(1, sides)
    elif ".layers." in name:
        height, width = hidden.shape[1:3]
        made = module(hidden.flatten(1, 2), (height, width))
        if name.endswith("downsample"):
            maps += [hidden] * name.startswith("backbone")
            height, width = (height + 1) // 2, (width + 1) // 2
        return (made[0] if isinstance(made, tuple) else made).unflatten(1, (height, width)), *maps
    elif name.endswith("_head"):
        whole = module([of_stage.permute(0, 3, 1, 2) for of_stage in (*maps, hidden)])
    elif name.endswith("pooler"):
        whole = module(hidden.flatten(1, 2).transpose(1, 2)).flatten(1)
    else:
        whole = module(hidden)
    return whole


class Heads(tp.ParallelStyle):
    """Attention that has a part of the heads.

    Its input becomes one DTensor for the three matrices that read it, so that their gradients are reduced once.
    """

    @override
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        keep_heads(module, device_mesh.size())
        whole = module.get_parameter(SCALE)
        shared = distribute_tensor(whole.data, device_mesh, [Shard(0)], src_data_rank=None)
        module.register_parameter(SCALE, nn.Parameter(shared, whole.requires_grad))

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
    """Tells a `Swinv2SelfAttention` that one of `ranks` has as many of its heads as any other."""
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
    whole: Any = model
    rows = _Rows(shape, group)
    backbone = whole.backbone if hasattr(model, "backbone") else whole.swinv2
    backbone.embeddings.register_forward_pre_hook(rows.own_images)
    for number, stage in enumerate(backbone.encoder.layers):
        for block in stage.blocks:
            # No block may refer to itself: blocks that belong to other ranks of a pipeline would stay.
            held = weakref.proxy(block)
            block.forward = functools.partial(_through_block, held)
            block.attention.self.forward = functools.partial(_attention, held, rows, number)
    if hasattr(model, "backbone"):
        backbone.every_image = False
        backbone.register_forward_hook(rows.whole_maps)
    else:
        backbone.pooler.register_forward_hook(rows.mean_of_all)


class _Rows:
    """Which rows of each stage's map lie on which rank of a group."""

    def __init__(self, shape: SwinShape, group: dist.ProcessGroup) -> None:
        self.shape, self.group = shape, group
        self.side = model_counts.stages(shape)[0].side
        """Number of rows of the first stage's map, for the images at hand."""

    def of_ranks(self, stage: int) -> list[int]:
        """How many rows of a stage's map each rank has."""
        return model_counts.rows_of_ranks(self.side, stage, len(self.shape.depths), self.group.size())

    def own_images(self, _: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """The rows of pixels [b, c, h, W] of images [b, c, H, W] that make this rank's tokens.

        Raises:
            RequestError: images have too few rows for all ranks to get some.
        """
        images, patch = inputs[0], self.shape.patch_size
        self.side = -(-images.shape[2] // patch)
        own, rank = self.of_ranks(0), self.group.rank()
        if not own[-1]:
            what = f"an image of {images.shape[2]} rows of pixels has too few for {len(own)} sequence ranks"
            raise RequestError(what, next_step='Set data.evaluation = "sliding", or parallel.sequence smaller')
        before = sum(own[:rank]) * patch
        return images[:, :, before : before + own[rank] * patch], *inputs[1:]

    def mean_of_all(self, _: nn.Module, __: tuple[Any, ...], own: Tensor) -> Tensor:
        """The mean [b, h, 1] over the tokens of all ranks, from the mean over this rank's own."""
        rows = self.of_ranks(len(self.shape.depths) - 1)
        return sum_over(own[..., 0] * (rows[self.group.rank()] / sum(rows)), self.group).unsqueeze(-1)

    def whole_maps(self, backbone: Any, _: tuple[Any, ...], given: Any) -> Any:
        """A backbone's outputs with whole maps [b', h, H, W] of the images that are labelled here."""
        maps = []
        for stage, own in enumerate(given.feature_maps):
            sizes = [rows * own.shape[3] for rows in self.of_ranks(stage)]
            tokens = own.flatten(2).transpose(1, 2)
            whole = with_all_tokens(tokens, every_image=backbone.every_image, sizes=sizes, group=self.group)
            maps.append(whole.transpose(1, 2).unflatten(2, (-1, own.shape[3])))
        given.feature_maps = tuple(maps)
        return given


def _through_block(block: Any, hidden: Tensor, rows: tuple[int, int], output_attentions: bool = False) -> tuple[Tensor]:
    """A `Swinv2Layer`'s forward of this rank's tokens [b, rows x width, h]; `rows`: their number and width."""
    del output_attentions
    mixed = block.attention.output(block.attention.self(hidden, rows[1]), hidden)
    hidden = hidden + block.layernorm_before(mixed)
    return (hidden + block.layernorm_after(block.output(block.intermediate(hidden))),)


def _attention(block: Any, rows: _Rows, stage: int, hidden: Tensor, width: int) -> Tensor:
    """What a block's `Swinv2SelfAttention` makes of own tokens [b, own, h], in windows of all tokens of some heads."""
    heads = block.attention.self
    sizes = [own * width for own in rows.of_ranks(stage)]
    count = heads.num_attention_heads // rows.group.size()
    own = slice(rows.group.rank() * count, (rows.group.rank() + 1) * count)
    attention = functools.partial(_in_windows, block, own=own, width=width, dtype=hidden.dtype)
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
    heads, side, shift = block.attention.self, block.window_size, block.shift_size
    maps = joint.unflatten(3, (-1, width))
    height = maps.shape[3]
    for axis, missing in ((4, -width % side), (3, -height % side)):
        if missing:
            # Padding before the matrices would become their biases behind them.
            biases = [heads.query.bias, torch.zeros_like(heads.query.bias), heads.value.bias]
            parts = [bias.to_local() if isinstance(bias, DTensor) else bias for bias in biases]
            padding = torch.stack(parts).unflatten(1, (-1, joint.shape[-1]))[:, None, own, None, None].to(maps.dtype)
            shape = [*maps.shape[:axis], missing, *maps.shape[axis + 1 :]]
            maps = torch.cat((maps, padding.expand(shape)), dim=axis)
    if shift:
        maps = maps.roll((-shift, -shift), dims=(3, 4))
    _, batch, count, *padded, each = maps.shape
    cut = maps.unflatten(4, (-1, side)).unflatten(3, (-1, side))
    # They are cut one by one, so that each is freed when it is no longer needed.
    windows = [of.permute(0, 2, 4, 3, 5, 1, 6).reshape(-1, side**2, count * each) for of in cut.unbind()]
    mixed = _of_heads(heads, own, windows, block.get_attn_mask(*padded, dtype=dtype, device=maps.device))
    joined = mixed.view(batch, padded[0] // side, padded[1] // side, side, side, count, each).permute(
        0, 5, 1, 3, 2, 4, 6
    )
    whole = joined.reshape(batch, count, *padded, each)
    if shift:
        whole = whole.roll((shift, shift), dims=(2, 3))
    return whole[:, :, :height, :width].flatten(2, 3)


def _of_heads(heads: Any, own: slice, windows: Sequence[Tensor], mask: Tensor | None) -> Tensor:
    """transformers' attention in windows with some heads, [windows, tokens, h].

    `windows`: their queries, keys and values of the same shape, which are there already.
    """
    biases = heads.continuous_position_bias_mlp
    query, key, value = windows
    some = SimpleNamespace(
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
    mixed: Tensor = type(heads).forward(some, query, mask)[0]
    return mixed
