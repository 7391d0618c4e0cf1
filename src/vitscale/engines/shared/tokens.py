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
    tokens_by_rank = even_parts(model.vit.embeddings.position_embeddings.shape[1], group.size())
    sizes = [tokens.stop - tokens.start for tokens in tokens_by_rank]
    own_tokens = tokens_by_rank[group.rank()]
    model.vit.embeddings.own_tokens = range(own_tokens.start, own_tokens.stop)
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
    """Return attention over all ranks' tokens; takes and returns [b, heads, own tokens, d].

    Args:
        query: queries of all heads.
        key: keys of all heads.
        value: values of all heads.
        attention: mixes all tokens' queries, keys and values [3, b, heads / ranks, tokens, d].
        sizes: number of tokens of each rank.
        group: the ranks that exchange.
    """
    ranks = group.size()
    own_tokens = sizes[group.rank()]
    all_tokens = sum(sizes)
    batch, heads, _, width = query.shape
    heads_per_rank = heads // ranks
    # [3, b, heads, own, d] becomes, rank after rank, that rank's heads token by token: rows of one length for unequal
    # splits.
    joint = torch.stack((query, key, value)).unflatten(2, (ranks, heads_per_rank))
    del query, key, value
    rows = joint.permute(2, 4, 0, 1, 3, 5).reshape(ranks * own_tokens, -1)
    del joint
    rows = exchange(rows, sent=[own_tokens] * ranks, received=sizes, group=group)
    rows = rows.view(all_tokens, 3, batch, heads_per_rank, width)
    mixed = attention(rows.permute(1, 2, 3, 0, 4))
    rows = mixed.permute(2, 0, 1, 3).reshape(all_tokens, -1)
    del mixed
    returned = exchange(rows, sent=sizes, received=[own_tokens] * ranks, group=group)
    returned = returned.view(ranks, own_tokens, batch, heads_per_rank, width)
    return returned.permute(2, 0, 3, 1, 4).flatten(1, 2)


def _first_token_to_all(encoded: Tensor, *, group: dist.ProcessGroup) -> Tensor:
    """Give every rank the first token [b, h] of the first rank's `encoded` [b, own tokens, h]."""
    ranks = group.size()
    batch = len(encoded)
    from_first = [batch] + [0] * (ranks - 1)
    if group.rank() == 0:
        return exchange(encoded[:, 0].repeat(ranks, 1), sent=[batch] * ranks, received=from_first, group=group)
    nothing = encoded[:0, 0]
    return exchange(nothing, sent=[0] * ranks, received=from_first, group=group)


def sum_over(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Give every rank the sum over all ranks of their `own` [b, h]."""
    ranks = group.size()
    batch = len(own)
    of_all = exchange(own.repeat(ranks, 1), sent=[batch] * ranks, received=[batch] * ranks, group=group)
    return of_all.view(ranks, batch, -1).sum(0)


def with_all_tokens(encoded: Tensor, *, every_image: bool, sizes: list[int], group: dist.ProcessGroup) -> Tensor:
    """Return all ranks' tokens [b', tokens, h], from `encoded` [b, own tokens, h] of each rank.

    They are those of the rank's own part of the images, or with `every_image` of all images on every rank. `sizes`:
    number of tokens of each rank.
    """
    ranks = group.size()
    own_tokens, width = encoded.shape[1:]
    rows = encoded.flatten(0, 1)
    if every_image:
        images_by_rank = [len(encoded)] * ranks
        rows = rows.repeat(ranks, 1)
    else:
        images_by_rank = [part.stop - part.start for part in even_parts(len(encoded), ranks)]
    sent = [images * own_tokens for images in images_by_rank]
    received = [images_by_rank[group.rank()] * size for size in sizes]
    rows_by_rank = exchange(rows, sent=sent, received=received, group=group).split(received)
    tokens = [own_rows.view(-1, size, width) for own_rows, size in zip(rows_by_rank, sizes, strict=True)]
    return torch.cat(tokens, dim=1)


def exchange(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    """Exchange rows by `all_to_all_single` with unequal splits; backward sends the gradient the way back.

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
        context.sent = sent
        context.received = received
        context.group = group
        return _exchanged(rows, sent, received, group)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchanged(gradient, context.received, context.sent, context.group), None, None, None


def _exchanged(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    arrived = rows.new_empty((sum(received), *rows.shape[1:]))
    dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
    return arrived
