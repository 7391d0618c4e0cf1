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
    """Make each rank of `group` compute a run of every image's tokens; this changes the model in place.

    The first rank has the first tokens, the class token among them. Tokens need not divide evenly. Attention exchanges
    them: one rank's tokens with all heads become all tokens with some heads, and back. Before the classifier the class
    token goes to all ranks. Where pixels are labelled, each rank gets all tokens of some images (`even_parts`): what
    comes behind the blocks is most of the work there.
    """
    token_ranges = even_parts(model.vit.embeddings.position_embeddings.shape[1], group.size())
    tokens_by_rank = [tokens.stop - tokens.start for tokens in token_ranges]
    own_range = token_ranges[group.rank()]
    model.vit.embeddings.own_tokens = range(own_range.start, own_range.stop)
    for module in model.modules():
        if isinstance(module, Attention):
            module.attend = functools.partial(
                attend, attention=_fused_attention, tokens_by_rank=tokens_by_rank, group=group
            )
    if isinstance(model, VisionTransformer):
        model.class_token.taken_of = functools.partial(_first_token_to_all, group=group)
    else:
        model.pyramid.with_all_tokens = functools.partial(with_all_tokens, tokens_by_rank=tokens_by_rank, group=group)


def _fused_attention(joint: Tensor) -> Tensor:
    """Return attention [b, heads, tokens, d] of queries, keys and values [3, b, heads, tokens, d]."""
    query, key, value = joint.unbind()
    return scaled_dot_product_attention(query, key, value)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    attention: Callable[[Tensor], Tensor],
    tokens_by_rank: list[int],
    group: dist.ProcessGroup,
) -> Tensor:
    """Return attention of this rank's tokens to the tokens of all ranks, [b, heads, own tokens, d].

    Each rank sends its tokens to all others, to each of them the heads that it computes; then `attention` runs with all
    tokens and some heads; then its output goes the way back. `exchange` splits the first axis of what it sends, and
    tokens may divide unevenly among ranks, so a row of that axis is one token with the heads of one rank.

    Args:
        query: queries [b, heads, own tokens, d].
        key: keys, of the same shape.
        value: values, of the same shape.
        attention: takes queries, keys and values of all tokens, [3, b, heads / ranks, tokens, d], and returns
            [b, heads / ranks, tokens, d].
        tokens_by_rank: number of tokens of each rank.
        group: the ranks that exchange.
    """
    ranks = group.size()
    own_tokens = tokens_by_rank[group.rank()]
    all_tokens = sum(tokens_by_rank)
    batch, heads, _, width = query.shape
    heads_per_rank = heads // ranks

    # In the shapes below, "rank" is the rank that computes these heads, and "heads" are the heads of one rank.
    # Tensors are deleted where they are not needed any more: each is as large as all hidden states.
    by_rank = torch.stack((query, key, value)).unflatten(2, (ranks, heads_per_rank))  # [3, b, rank, heads, own, d]
    del query, key, value
    rank_by_rank = by_rank.permute(2, 4, 0, 1, 3, 5)  # [rank, own, 3, b, heads, d]
    own_rows = rank_by_rank.reshape(ranks * own_tokens, -1)
    del by_rank, rank_by_rank
    all_rows = exchange(own_rows, sent_counts=[own_tokens] * ranks, received_counts=tokens_by_rank, group=group)
    del own_rows

    token_by_token = all_rows.view(all_tokens, 3, batch, heads_per_rank, width)
    mixed = attention(token_by_token.permute(1, 2, 3, 0, 4))  # takes [3, b, heads, all, d], gives [b, heads, all, d]
    mixed_rows = mixed.permute(2, 0, 1, 3).reshape(all_tokens, -1)  # [all, b * heads * d]
    del all_rows, token_by_token, mixed

    own_mixed_rows = exchange(mixed_rows, sent_counts=tokens_by_rank, received_counts=[own_tokens] * ranks, group=group)
    mixed_by_rank = own_mixed_rows.view(ranks, own_tokens, batch, heads_per_rank, width)
    return mixed_by_rank.permute(2, 0, 3, 1, 4).flatten(1, 2)  # [b, rank, heads, own, d] -> [b, all heads, own, d]


def _first_token_to_all(encoded: Tensor, *, group: dist.ProcessGroup) -> Tensor:
    """Return the first rank's first token of each image, [b, h], on every rank.

    Args:
        encoded: this rank's tokens [b, own tokens, h].
        group: the ranks that share an image's tokens.
    """
    ranks = group.size()
    batch = len(encoded)
    received_counts = [batch] + [0] * (ranks - 1)  # all from the first rank, nothing from the others
    if group.rank() == 0:
        copies = encoded[:, 0].repeat(ranks, 1)
        return exchange(copies, sent_counts=[batch] * ranks, received_counts=received_counts, group=group)
    nothing = encoded[:0, 0]
    return exchange(nothing, sent_counts=[0] * ranks, received_counts=received_counts, group=group)


def sum_over(local: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum over all ranks of their `local` tensors [b, h], on every rank."""
    ranks = group.size()
    batch = len(local)
    rows_of_all = exchange(
        local.repeat(ranks, 1), sent_counts=[batch] * ranks, received_counts=[batch] * ranks, group=group
    )
    return rows_of_all.view(ranks, batch, -1).sum(0)


def with_all_tokens(
    encoded: Tensor, *, every_image: bool, tokens_by_rank: list[int], group: dist.ProcessGroup
) -> Tensor:
    """Return all tokens of some images, [b', tokens, h].

    Args:
        encoded: this rank's tokens of all images, [b, own tokens, h].
        every_image: whether each rank gets all b images; else it gets its own part of them (`even_parts`).
        tokens_by_rank: number of tokens of each rank.
        group: the ranks that share an image's tokens.
    """
    ranks = group.size()
    own_tokens, width = encoded.shape[1:]
    # Rows to send are tokens, image by image: [b * own tokens, h], as often as there are ranks that get all images.
    if every_image:
        images_by_rank = [len(encoded)] * ranks
        sent_rows = encoded.flatten(0, 1).repeat(ranks, 1)
    else:
        images_by_rank = [part.stop - part.start for part in even_parts(len(encoded), ranks)]
        sent_rows = encoded.flatten(0, 1)
    own_images = images_by_rank[group.rank()]
    sent_counts = [images * own_tokens for images in images_by_rank]
    received_counts = [own_images * tokens for tokens in tokens_by_rank]
    received_rows = exchange(sent_rows, sent_counts=sent_counts, received_counts=received_counts, group=group)
    # From each rank [own images * its tokens, h]; together [own images, tokens, h].
    rows_by_rank = received_rows.split(received_counts)
    encoded_by_rank = [rows.view(-1, tokens, width) for rows, tokens in zip(rows_by_rank, tokens_by_rank, strict=True)]
    return torch.cat(encoded_by_rank, dim=1)


def exchange(rows: Tensor, sent_counts: list[int], received_counts: list[int], group: dist.ProcessGroup) -> Tensor:
    """Return the rows that the group's ranks send to this one, [sum(received_counts), ...], rank by rank.

    It is `all_to_all_single` with unequal splits. Its backward sends the gradient of each row back to where the row
    came from.

    Args:
        rows: the rows to send, [sum(sent_counts), ...].
        sent_counts: number of rows for each rank of the group, in order.
        received_counts: number of rows from each of them.
        group: the ranks that exchange.
    """
    exchanged: Tensor = _Exchange.apply(rows, sent_counts, received_counts, group)  # type: ignore[no-untyped-call]
    return exchanged


class _Exchange(torch.autograd.Function):
    """`exchange` forwards, and backwards with the numbers of sent and received rows swapped."""

    @staticmethod
    def forward(
        context: Any, rows: Tensor, sent_counts: list[int], received_counts: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        context.sent_counts = sent_counts
        context.received_counts = received_counts
        context.group = group
        return _all_to_all(rows, sent_counts, received_counts, group)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all(gradient, context.received_counts, context.sent_counts, context.group), None, None, None


def _all_to_all(rows: Tensor, sent_counts: list[int], received_counts: list[int], group: dist.ProcessGroup) -> Tensor:
    """Return the rows that arrive, [sum(received_counts), ...]; autograd sees nothing of it."""
    arrived = rows.new_empty((sum(received_counts), *rows.shape[1:]))
    dist.all_to_all_single(arrived, rows.contiguous(), received_counts, sent_counts, group=group)
    return arrived
