"""One model on several ranks: its matrices cut by torch's DTensor, its tokens exchanged for heads around attention.

Ranks that share a model hold the same images, and the loss comes out the same on each of them. Everything is cut so
that gradients are right once a data-parallel wrapper has averaged them over data x sequence:

- tensor: what a rank holds whole has the same gradient on all ranks of a tensor group, what it holds in part its own.
- sequence: each exchange is followed backwards by its exact adjoint. A rank's loss then reaches the tokens of all, and
  the sum over a sequence group counts each image as often as there are ranks in it; the mean counts it once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import parallel as tp
from torch.nn.functional import scaled_dot_product_attention

from vitscale.engines.swin_split import swin_tensor_plan
from vitscale.errors import RequestError, shown
from vitscale.models.batch_norm import norms_of
from vitscale.models.named import Attention, PyramidSegmenter, VisionTransformer
from vitscale.trial.model_spec import Task
from vitscale.trial.parallel import even_parts
from vitscale.trial.trial import Trial

PIPELINE, REPLICAS, TENSOR = "pipeline", "replicas", "tensor"
"""Axes of the mesh; replicas are data x sequence, over which gradients are averaged."""


def split(model: nn.Module, trial: Trial, device: torch.device) -> DeviceMesh:
    """Cuts a model, whole and alike on all ranks and on its device, as the trial's layout says.

    Before anything that wraps blocks or holds parameters: those that are cut are replaced.

    Returns:
        The mesh over which weights are replicated or sharded: one axis, data x sequence, of this rank's stages.
    """
    layout = trial.layout
    sizes = {PIPELINE: layout.pipeline, REPLICAS: layout.replicas, TENSOR: layout.tensor}
    axes = tuple(axis for axis, size in sizes.items() if size > 1 or axis == REPLICAS)
    mesh = init_device_mesh(device.type, tuple(map(sizes.__getitem__, axes)), mesh_dim_names=axes)
    group = own_group(layout.groups("sequence")) if layout.sequence > 1 else None
    for norm in norms_of(model) if trial.parallel.ranks_per_model > 1 else ():
        # Tensor ranks have the same images. Sequence ranks share those of one data-parallel rank.
        norm.replicas = mesh[REPLICAS].get_group()
        norm.group = norm.replicas if norm.synchronised else group
    if group is not None:
        if isinstance(model, VisionTransformer | PyramidSegmenter):
            split_tokens(model, group)
        else:
            _asked(offered(model, "split_tokens", trial), trial, group)
    if layout.tensor > 1:
        norms = trial.parallel.shard_norms
        if isinstance(model, VisionTransformer | PyramidSegmenter):
            plan = tensor_plan(trial.model.task, shard_norms=norms)
        elif trial.model.depths is not None:
            plan = swin_tensor_plan(trial.model.task)
        else:
            plan = _asked(offered(model, "tensor_plan", trial), trial, layout.tensor, shard_norms=norms)
        tp.parallelize_module(model, mesh[TENSOR], plan, src_data_rank=None)
    return mesh[REPLICAS]


_OFFERS = {
    "tensor": (
        "tensor_plan",
        "a method tensor_plan(ranks, shard_norms) that returns styles of torch's DTensor by module",
    ),
    "sequence": ("split_tokens", "a method split_tokens(group) after which each rank of it takes its own tokens"),
    "pipeline": ("in_order", "a list in_order of names of modules that make up its forward, one after the other"),
}
"""What a model of a factory has to offer, to be split along an axis."""


def offered(model: nn.Module, name: str, trial: Trial) -> Any:
    """What a model of a factory offers by this name, one of `_OFFERS`.

    Raises:
        RequestError: it does not, with the axes along which it can be split.
    """
    if hasattr(model, name):
        return getattr(model, name)
    axis, what = next((axis, what) for axis, (offer, what) in _OFFERS.items() if offer == name)
    raise RequestError(
        f"parallel.{axis} = {getattr(trial.parallel, axis)}: the model of {shown(trial.model.factory)}, "
        f"{type(model).__name__}, does not say how it is split",
        valid=[f"parallel.{axis}" for axis, (offer, _) in _OFFERS.items() if hasattr(model, offer)],
        next_step=f"Give it {what} (docs/parallelism.md), or leave parallel.{axis} out",
    )


def _asked(offer: Callable[..., Any], trial: Trial, *arguments: Any, **named: Any) -> Any:
    """What a model answers; a ValueError is its refusal, of ranks that do not divide its heads."""
    try:
        return offer(*arguments, **named)
    except ValueError as error:
        what = f"model.factory {shown(trial.model.factory)} cannot be split over these ranks: {error}"
        raise RequestError(what, next_step="Change [parallel], or the model") from error


def tensor_plan(task: Task, *, shard_norms: bool) -> dict[str, tp.ParallelStyle]:
    """How DTensor cuts a ViT: in each block attention by heads and the MLP by its width, and the classifier by classes.

    The embedding stays whole: cut by width it would have to be gathered, token by token, before the first norm. So do
    heads of segmentation: their convolutions read all channels.

    Args:
        task: of the model.
        shard_norms: tokens of norms and residuals are cut too, so that what was an all-reduce after each pair of
            matrices is a reduce-scatter there and an all-gather before the next pair.
    """
    block = "vit.layers.*"
    plan: dict[str, tp.ParallelStyle] = {
        f"{block}.{name}": tp.ColwiseParallel()
        for name in ("attention.q_proj", "attention.k_proj", "attention.v_proj", "mlp.fc1")
    }
    if task == "classification":
        plan["classifier"] = tp.ColwiseParallel(output_layouts=Replicate())
    # One DTensor for all matrices that read it: their gradients are added before they are reduced, once instead of
    # thrice for queries, keys and values.
    own = Shard(1) if shard_norms else Replicate()
    for name in (f"{block}.attention", f"{block}.mlp"):
        plan[name] = tp.PrepareModuleInput(
            input_layouts=(own,), desired_input_layouts=(Replicate(),), use_local_output=False
        )
    if not shard_norms:
        return plan | {f"{block}.attention.o_proj": tp.RowwiseParallel(), f"{block}.mlp.fc2": tp.RowwiseParallel()}
    # As DTensors from the first block to the last norm: of a local part alone nobody knows that parts are unequal.
    plan |= {
        f"{block}.{name}": tp.RowwiseParallel(output_layouts=own, use_local_output=False)
        for name in ("attention.o_proj", "mlp.fc2")
    }
    for name in (f"{block}.layernorm_before", f"{block}.layernorm_after", "vit.layernorm"):
        plan[name] = tp.SequenceParallel()
    plan["vit.layers.0"] = tp.PrepareModuleInput(
        input_layouts=(Replicate(),), desired_input_layouts=(own,), use_local_output=False
    )
    plan["vit"] = tp.PrepareModuleOutput(output_layouts=(own,), desired_output_layouts=(Replicate(),))
    return plan


def squared_gradient_norm(parameters: Iterable[nn.Parameter], ranks: int) -> Tensor:
    """Squared L2 norm of the whole gradient, each part of it counted once, wherever it lies; on all ranks.

    `torch.nn.utils.clip_grad_norm_` refuses parameters of several meshes, and DTensors beside tensors. A part that k of
    N ranks hold is taken by each of them to 1/k, and one all-reduce adds up.

    Args:
        parameters: of this rank; gradients have been averaged.
        ranks: N, those that hold any part of what this rank does: of a pipeline, those of its stages.

    Raises:
        RuntimeError: no parameter has a gradient.
    """
    total: Tensor | None = None
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        parts = 1
        if isinstance(gradient, DTensor):
            for size, placement in zip(gradient.device_mesh.shape, gradient.placements, strict=True):
                parts *= 1 if placement.is_replicate() else size
            gradient = gradient.to_local()
        own = torch.linalg.vector_norm(gradient, dtype=torch.float64).square() * (parts / ranks)
        total = own if total is None else total + own
    if total is None:
        raise RuntimeError("no parameter has a gradient")
    dist.all_reduce(total)
    return total


def clip(parameters: Iterable[nn.Parameter], largest: float, ranks: int) -> None:
    """Scales gradients so that their norm over all ranks is `largest` at most, as `clip_grad_norm_` does."""
    held = [parameter for parameter in parameters if parameter.grad is not None]
    factor = (largest / (squared_gradient_norm(held, ranks).sqrt() + 1e-6)).clamp(max=1.0)
    for parameter in held:
        gradient = parameter.grad
        if gradient is not None:
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            local.mul_(factor.to(local.dtype))


def split_tokens(model: VisionTransformer | PyramidSegmenter, group: dist.ProcessGroup) -> None:
    """Gives each rank of `group` a run of every image's tokens, in order; the class token lies with the first rank.

    Attention exchanges them: tokens of one rank and all heads become all tokens and some heads, and back. Tokens need
    not divide evenly. Before the classifier the class token goes to all ranks. Where pixels are labelled all tokens of
    some images go to each rank, of `even_parts`: what comes behind the blocks is most of the work there.
    """
    tokens = even_parts(model.vit.embeddings.position_embeddings.shape[1], group.size())
    own, sizes = tokens[group.rank()], [part.stop - part.start for part in tokens]
    model.vit.embeddings.own_tokens = range(own.start, own.stop)
    for module in model.modules():
        if isinstance(module, Attention):
            module.attend = functools.partial(_attend, sizes=sizes, group=group)
    if isinstance(model, VisionTransformer):
        model.class_token.taken_of = functools.partial(_first_token_to_all, group=group)
    else:
        model.pyramid.with_all_tokens = functools.partial(_with_all_tokens, sizes=sizes, group=group)


def _attend(query: Tensor, key: Tensor, value: Tensor, *, sizes: list[int], group: dist.ProcessGroup) -> Tensor:
    """Attention over all tokens of [b, heads, own tokens, d]; the result is of the own tokens again."""
    ranks, own = group.size(), sizes[group.rank()]
    batch, heads, _, width = query.shape
    # [3, b, heads, own, d] to rank after rank its heads, token by token: rows of one length for unequal splits.
    joint = torch.stack((query, key, value)).unflatten(2, (ranks, heads // ranks))
    rows = joint.permute(2, 4, 0, 1, 3, 5).reshape(ranks * own, -1)
    gathered = exchange(rows, [own] * ranks, sizes, group).view(sum(sizes), 3, batch, heads // ranks, width)
    queries, keys, values = gathered.permute(1, 2, 3, 0, 4).unbind()
    of_heads = scaled_dot_product_attention(queries, keys, values)
    rows = of_heads.permute(2, 0, 1, 3).reshape(sum(sizes), -1)
    returned = exchange(rows, sizes, [own] * ranks, group).view(ranks, own, batch, heads // ranks, width)
    return returned.permute(2, 0, 3, 1, 4).flatten(1, 2)


def _first_token_to_all(encoded: Tensor, *, group: dist.ProcessGroup) -> Tensor:
    """The first token [b, h] of the first rank's [b, own tokens, h], on every rank."""
    ranks, batch = group.size(), len(encoded)
    if group.rank() == 0:
        rows, sent = encoded[:, 0].repeat(ranks, 1), [batch] * ranks
    else:
        rows, sent = encoded[:0, 0], [0] * ranks
    return exchange(rows, sent, [batch] + [0] * (ranks - 1), group)


def _with_all_tokens(encoded: Tensor, *, every_image: bool, sizes: list[int], group: dist.ProcessGroup) -> Tensor:
    """All tokens [b', tokens, h] of each rank's [b, own tokens, h]: of the rank's own part of the images, or of every
    image on every rank."""
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
        rows: [sum(sent), ...].
        sent: rows for each rank of the group, in order.
        received: rows from each of them.
        group: who exchanges.
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


def own_group(groups: Iterable[tuple[int, ...]]) -> dist.ProcessGroup:
    """The process group of those to which this rank belongs; all ranks make all of them, in the same order."""
    own: dist.ProcessGroup
    own, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in groups])
    return own
