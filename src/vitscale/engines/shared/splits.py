"""One model on several ranks: its matrices cut by torch's DTensor, its tokens exchanged for heads around attention.

Ranks that share a model hold the same images, and the loss comes out the same on each of them. Everything is cut so
that gradients are right once a data-parallel wrapper has averaged them over data x sequence:

- tensor: what a rank holds whole has the same gradient on all ranks of a tensor group; each part has its own.
- sequence: each exchange is followed backwards by its exact adjoint. A rank's loss then reaches the tokens of all, and
  the sum over a sequence group counts each image as often as there are ranks in it; the mean counts it once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import parallel as tp

from vitscale.engines.shared.swin_split import split_rows, swin_tensor_plan
from vitscale.engines.shared.tokens import split_tokens
from vitscale.errors import RequestError, shown
from vitscale.models.batch_norm import norms_of
from vitscale.models.named import PyramidSegmenter, VisionTransformer
from vitscale.trial.model_cost import swin_shape
from vitscale.trial.model_spec import Task
from vitscale.trial.trial import Trial

PIPELINE, REPLICAS, TENSOR = "pipeline", "replicas", "tensor"
"""Axes of the mesh; replicas are data x sequence, over which gradients are averaged."""
REPLICATION, SHARDING = "replication", "sharding"
"""Axes in place of `REPLICAS` where weights are sharded within replicas. The ranks of a replica are neighbours."""


def split(model: nn.Module, trial: Trial, device: torch.device) -> DeviceMesh:
    """Cut a model as the trial's layout says, in place.

    This comes before anything that wraps blocks or holds parameters, because parameters that are cut are replaced.

    Args:
        model: the whole model, alike on all ranks, and on its device.
        trial: the trial.
        device: this rank's device.

    Returns:
        The mesh over which the weights of this rank's stages are replicated or sharded: one axis, data x sequence; with
        [parallel] replicate two, of which the first replicates and the second shards (`fully_shard` takes it so).
    """
    layout = trial.layout
    if layout.replicate > 1:  # nothing of a model is cut then (`study.model_checks`)
        shape = (layout.replicate, layout.sharding_ranks)
        return init_device_mesh(device.type, shape, mesh_dim_names=(REPLICATION, SHARDING))
    size_by_axis = {REPLICAS: layout.replicas}
    if layout.pipeline > 1:
        size_by_axis = {PIPELINE: layout.pipeline} | size_by_axis
    if layout.tensor > 1:
        size_by_axis |= {TENSOR: layout.tensor}
    mesh = init_device_mesh(device.type, tuple(size_by_axis.values()), mesh_dim_names=tuple(size_by_axis))
    sequence_group = own_group(layout.groups("sequence")) if layout.sequence > 1 else None
    if trial.parallel.ranks_per_model > 1:
        exchange_norms(model, replicas=mesh[REPLICAS].get_group(), sequence=sequence_group)
    if sequence_group is not None:
        _split_sequence(model, trial, sequence_group)
    if layout.tensor > 1:
        tp.parallelize_module(model, mesh[TENSOR], tensor_plan_of(model, trial), src_data_rank=None)
    return mesh[REPLICAS]


def _split_sequence(model: nn.Module, trial: Trial, group: dist.ProcessGroup) -> None:
    """Make each rank of `group` compute its tokens of every image.

    Raises:
        RequestError: a factory's model does not say how, or refuses.
    """
    swin = swin_shape(trial.model)
    if isinstance(model, VisionTransformer | PyramidSegmenter):
        split_tokens(model, group)
    elif swin is not None:
        split_rows(model, swin, group)
    else:
        _call_offer(offered(model, "split_tokens", trial), trial, group)


def exchange_norms(model: nn.Module, replicas: dist.ProcessGroup, sequence: dist.ProcessGroup | None) -> None:
    """Set the ranks over whose images batch norms are taken.

    Args:
        model: the model.
        replicas: the ranks that synchronised norms are over.
        sequence: the ranks that share the images of a data-parallel rank, which local norms are over; None: this rank
            has its images to itself. Tensor ranks have the same images.
    """
    for norm in norms_of(model):
        norm.replicas = replicas
        norm.group = replicas if norm.synchronised else sequence


def tensor_plan_of(model: nn.Module, trial: Trial) -> dict[str, tp.ParallelStyle]:
    """Return how a model's matrices are cut over the trial's tensor ranks: DTensor's style by module.

    Raises:
        RequestError: a factory's model does not say so.
    """
    shard_norms = trial.parallel.shard_norms
    if isinstance(model, VisionTransformer | PyramidSegmenter):
        return tensor_plan(trial.model.task, shard_norms=shard_norms)
    if swin_shape(trial.model) is not None:
        return swin_tensor_plan(trial.model.task)
    offer = offered(model, "tensor_plan", trial)
    plan: dict[str, tp.ParallelStyle] = _call_offer(offer, trial, trial.parallel.tensor, shard_norms=shard_norms)
    return plan


class _Offer(NamedTuple):
    """An attribute by which a factory's model says how it is split along an axis."""

    axis: str
    """The axis: a field of [parallel]."""
    description: str
    """The attribute in words, after "Give it"."""


_OFFERS = {
    "tensor_plan": _Offer(
        axis="tensor",
        description="a method tensor_plan(ranks, shard_norms) that returns styles of torch's DTensor by module",
    ),
    "split_tokens": _Offer(
        axis="sequence",
        description="a method split_tokens(group) after which each rank of it takes its own tokens",
    ),
    "in_order": _Offer(
        axis="pipeline",
        description="a list in_order of names of modules that make up its forward, one after the other",
    ),
}
"""Attribute of a factory's model -> what it is for."""


def offered(model: nn.Module, name: str, trial: Trial) -> Any:
    """Return what a factory's model offers by this name, one of `_OFFERS`.

    Raises:
        RequestError: it does not offer it; the error names the axes along which it can be split.
    """
    if hasattr(model, name):
        return getattr(model, name)
    axis, description = _OFFERS[name]
    raise RequestError(
        f"parallel.{axis} = {getattr(trial.parallel, axis)}: the model of {shown(trial.model.factory)}, "
        f"{type(model).__name__}, does not say how it is split",
        valid=[f"parallel.{offer.axis}" for attribute, offer in _OFFERS.items() if hasattr(model, attribute)],
        next_step=f"Give it {description} (docs/parallelism.md), or leave parallel.{axis} out",
    )


def _call_offer(offer: Callable[..., Any], trial: Trial, *arguments: Any, **keywords: Any) -> Any:
    """Return what a model's offer returns.

    Raises:
        RequestError: the model refuses by a ValueError, for instance ranks that do not divide its heads.
    """
    try:
        return offer(*arguments, **keywords)
    except ValueError as error:
        what = f"model.factory {shown(trial.model.factory)} cannot be split over these ranks: {error}"
        raise RequestError(what, next_step="Change [parallel], or the model") from error


def tensor_plan(task: Task, *, shard_norms: bool) -> dict[str, tp.ParallelStyle]:
    """Return how DTensor cuts a ViT: attention by heads, MLPs by their width, the classifier by classes.

    Matrices are cut in pairs, the first by its outputs (`ColwiseParallel`) and the second by its inputs
    (`RowwiseParallel`), so that ranks exchange once for each pair (Megatron-LM, arXiv 1909.08053, section 3).

    The embedding stays whole: cut by width it would have to be gathered, token by token, before the first norm. Heads
    of segmentation stay whole too: their convolutions read all channels.

    Args:
        task: the model's task.
        shard_norms: whether tokens of norms and residuals are cut too. The all-reduce after each pair of matrices then
            becomes a reduce-scatter there and an all-gather before the next pair.

    Returns:
        Path of a module -> its style; "vit.layers.*.mlp" stands for the MLPs of all blocks.
    """
    block = "vit.layers.*"
    plan: dict[str, tp.ParallelStyle] = {
        f"{block}.{name}": tp.ColwiseParallel()
        for name in ("attention.q_proj", "attention.k_proj", "attention.v_proj", "mlp.fc1")
    }
    if task == "classification":
        plan["classifier"] = tp.ColwiseParallel(output_layouts=Replicate())
    # One DTensor for all matrices that read it: their gradients are added and then reduced once, instead of three times
    # for queries, keys and values.
    token_placement = Shard(1) if shard_norms else Replicate()
    for name in (f"{block}.attention", f"{block}.mlp"):
        plan[name] = tp.PrepareModuleInput(
            input_layouts=(token_placement,), desired_input_layouts=(Replicate(),), use_local_output=False
        )
    if not shard_norms:
        return plan | {f"{block}.attention.o_proj": tp.RowwiseParallel(), f"{block}.mlp.fc2": tp.RowwiseParallel()}
    # They are DTensors from the first block to the last norm: a local part alone does not tell that parts are unequal.
    plan |= {
        f"{block}.{name}": tp.RowwiseParallel(output_layouts=token_placement, use_local_output=False)
        for name in ("attention.o_proj", "mlp.fc2")
    }
    for name in (f"{block}.layernorm_before", f"{block}.layernorm_after", "vit.layernorm"):
        plan[name] = tp.SequenceParallel()
    plan["vit.layers.0"] = tp.PrepareModuleInput(
        input_layouts=(Replicate(),), desired_input_layouts=(token_placement,), use_local_output=False
    )
    plan["vit"] = tp.PrepareModuleOutput(output_layouts=(token_placement,), desired_output_layouts=(Replicate(),))
    return plan


def squared_gradient_norm(gradients: Sequence[Tensor], ranks: int) -> Tensor:
    """Return the squared L2 norm of the whole gradient on all ranks; each part counts once, wherever it lies.

    `torch.nn.utils.clip_grad_norm_` refuses parameters of several meshes, and DTensors beside tensors.

    A gradient is cut into p parts over N ranks, so that each part is on N / p of them. Each of these counts p / N of
    its part, and one all-reduce adds up. With p = 2 and N = 8, four ranks count a quarter each of the first half.

    Args:
        gradients: those of this rank's parameters; they have been averaged.
        ranks: N, the ranks that hold any part of what this rank holds; in a pipeline those of its stages.

    Raises:
        RuntimeError: no parameter has a gradient.
    """
    if not gradients:
        raise RuntimeError("no parameter has a gradient")
    total = torch.zeros((), dtype=torch.float64, device=gradients[0].device)
    for gradient in gradients:
        counted_share = _part_count(gradient) / ranks
        local_norm = torch.linalg.vector_norm(_local_part(gradient), dtype=torch.float64)
        total += local_norm.square() * counted_share
    dist.all_reduce(total)
    return total


def _part_count(gradient: Tensor) -> int:
    """Return into how many parts a gradient is cut; 1 where each rank of its mesh has all of it."""
    if not isinstance(gradient, DTensor):
        return 1
    axes = zip(gradient.device_mesh.shape, gradient.placements, strict=True)
    return math.prod(size for size, placement in axes if not placement.is_replicate())


def _local_part(gradient: Tensor) -> Tensor:
    """Return the part of a gradient that lies on this rank; all of it where it is not cut."""
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def clip(parameters: Iterable[nn.Parameter], largest_norm: float, ranks: int) -> None:
    """Scale gradients so that their norm over all ranks is `largest_norm` at most, as `clip_grad_norm_` does.

    Args:
        parameters: those of this rank.
        largest_norm: the L2 norm to which a larger one is scaled down.
        ranks: the number of ranks that hold any part of what this rank holds; in a pipeline those of its stages.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = squared_gradient_norm(gradients, ranks).sqrt()
    factor = (largest_norm / (norm + 1e-6)).clamp(max=1.0)  # 1e-6 as in torch's `clip_grad_norm_`
    for gradient in gradients:
        local_part = _local_part(gradient)
        local_part.mul_(factor.to(local_part.dtype))


def own_group(groups: Iterable[tuple[int, ...]]) -> dist.ProcessGroup:
    """Return the process group of this rank, one of `groups`; all ranks make all groups, in the same order."""
    group: dist.ProcessGroup
    group, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in groups])
    return group
