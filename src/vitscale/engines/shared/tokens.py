"""An image's tokens on several ranks, exchanged for heads around attention: every rank gets all tokens of some heads.

Each exchange is followed backwards by its exact adjoint (see `engines.shared.splits`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from vitscale.models.named import Attention, PyramidSegmenter, VisionTransformer
from vitscale.trial.parallel import even_parts


def split_tokens(model: VisionTransformer | PyramidSegmenter, group: dist.ProcessGroup) -> None:
    """Gives each rank of `group` a run of every image's tokens, in order; the first rank has the class token.

    Attention exchanges them: one rank's tokens with all heads become all tokens with some heads, and back. Tokens need
    not divide evenly. Before the classifier the class token goes to all ranks. Where pixels are labelled, each rank
    gets all tokens of some images (`even_parts`): what comes behind the blocks is most of the work there.
    """
    tokens = even_parts(model.vit.embeddings.position_embeddings.shape[1], group.size())
    own, sizes = tokens[group.rank()], [part.stop - part.start for part in tokens]
    model.vit.embeddings.own_tokens = range(own.start, own.stop)
    for module in model.modules():
        if isinstance(module, Attention):
            module.attend = functools.partial(attend, attention=_fused, sizes=sizes, group=group)
    if isinstance(model, VisionTransformer):
        model.class_token.taken_of = functools.partial(_first_token_to_all, group=group)
    else:
        model.pyramid.with_all_tokens = functools.partial(with_all_tokens, sizes=sizes, group=group)


def _fused(joint: Tensor) -> Tensor:
    query, key, value = joint.unbind()
    return scaled_dot_product_attention(query, key, value)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    attention: Callable[[Tensor], Tensor],
    sizes: list[int],
    group: dist.ProcessGroup,
) -> Tensor:
    """Attention over all ranks' tokens; takes and returns [b, heads, own tokens, d].

    Args:
        query: queries of all heads.
        key: keys of all heads.
        value: values of all heads.
        attention: mixes all tokens' queries, keys and values [3, b, heads / ranks, tokens, d].
        sizes: number of tokens of each rank.
        group: the ranks that exchange.
    """
    ranks, own = group.size(), sizes[group.rank()]
    batch, heads, _, width = query.shape
    # [3, b, heads, own, d] becomes, rank after rank, that rank's heads token by token: rows of one length for unequal
    # splits.
    joint = torch.stack((query, key, value)).unflatten(2, (ranks, heads // ranks))
    del query, key, value
    rows = joint.permute(2, 4, 0, 1, 3, 5).reshape(ranks * own, -1)
    del joint
    rows = exchange(rows, [own] * ranks, sizes, group).view(sum(sizes), 3, batch, heads // ranks, width)
    of_heads = attention(rows.permute(1, 2, 3, 0, 4))
    rows = of_heads.permute(2, 0, 1, 3).reshape(sum(sizes), -1)
    del of_heads
    returned = exchange(rows, sizes, [own] * ranks, group).view(ranks, own, batch, heads // ranks, width)
    return returned.permute(2, 0, 3, 1, 4).flatten(1, 2)


def _first_token_to_all(encoded: Tensor, *, group: dist.ProcessGroup) -> Tensor:
    """The first token [b, h] of the first rank's `encoded` [b, own tokens, h], given to every rank."""
    ranks, batch = group.size(), len(encoded)
    if group.rank() == 0:
        rows, sent = encoded[:, 0].repeat(ranks, 1), [batch] * ranks
    else:
        rows, sent = encoded[:0, 0], [0] * ranks
    return exchange(rows, sent, [batch] + [0] * (ranks - 1), group)


def sum_over(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over all ranks of their `own` [b, h], given to every rank."""
    ranks, batch = group.size(), len(own)
    return exchange(own.repeat(ranks, 1), [batch] * ranks, [batch] * ranks, group).view(ranks, batch, -1).sum(0)


def with_all_tokens(encoded: Tensor, *, every_image: bool, sizes: list[int], group: dist.ProcessGroup) -> Tensor:
    """All ranks' tokens [b', tokens, h], from `encoded` [b, own tokens, h] of each rank.

    They are those of the rank's own part of the images, or with `every_image` of all images on every rank. `sizes`:
    number of tokens of each rank.
    """
    parts = [slice(0, len(encoded))] * group.size() if every_image else even_parts(len(encoded), group.size())
    images = [part.stop - part.start for part in parts]
    own, width = encoded.shape[1:]
    rows = encoded.flatten(0, 1).repeat(group.size() if every_image else 1, 1)
    received = [images[group.rank()] * size for size in sizes]
    arrived = exchange(rows, [count * own for count in images], received, group).split(received)
    return torch.cat([rows.view(-1, size, width) for rows, size in zip(arrived, sizes, strict=True)], dim=1)


def exchange(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    """`all_to_all_single` of rows with unequal splits; backward sends the gradient the way back.

    Args:
        rows: the rows to send, [sum(sent), ...].
        sent: number of rows for each rank of the group, in order.
        received: number of rows from each of them.
        group: the ranks that exchange.
    """
    exchanged: Tensor = _Exchange.apply(rows, sent, received, group)  # type: ignore[no-untyped-call]
    return exchanged


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        context.sent, context.received, context.group = sent, received, group
        return _exchanged(rows, sent, received, group)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchanged(gradient, context.received, context.sent, context.group), None, None, None


def _exchanged(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    arrived = rows.new_empty((sum(received), *rows.shape[1:]))
    dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
    return arrived
