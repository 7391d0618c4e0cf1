"""A model in pipeline stages: which modules a rank keeps, under their names in the whole model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode
from typing_extensions import override

from vitscale.engines.splits import offered, own_group
from vitscale.errors import RequestError, shown
from vitscale.models.named import VisionTransformer
from vitscale.trial.model_cost import stage_blocks
from vitscale.trial.trial import Trial


@dataclass(frozen=True)
class StagePlan:
    """How a model is cut into stages."""

    parts: tuple[tuple[str, ...], ...]
    """Names of the modules of each stage; one after the other, all of them are the model's forward."""
    shapes: tuple[tuple[int, ...], ...]
    """Of what each stage but the last hands on of an image, on this rank."""


def stage_plan(model: nn.Module, trial: Trial) -> StagePlan | None:
    """The stages of a model that nothing has cut or wrapped yet, so that the largest has the fewest FLOPs; None where
    ranks hold no stages.

    Raises:
        RequestError: it does not say what makes up its forward (`in_order`), or in too few modules.
    """
    layout, stages = trial.layout, trial.parallel.stages
    if layout.pipeline == 1:
        return None
    if isinstance(model, VisionTransformer):
        embedding, *blocks = model.in_order[: 1 + len(model.vit.layers)]
        parts = [[blocks[block] for block in of_stage] for of_stage in stage_blocks(trial.model, stages)]
        parts[0].insert(0, embedding)
        parts[-1] += model.in_order[1 + len(blocks) :]
        tokens, at = model.vit.embeddings.position_embeddings.shape[1], layout.coordinates(dist.get_rank()).sequence
        own = tokens // layout.sequence + (at < tokens % layout.sequence)
        return StagePlan(tuple(map(tuple, parts)), ((own, model.vit.width),) * (stages - 1))
    order = list(offered(model, "in_order", trial))
    if len(order) < stages:
        what = f"parallel.pipeline = {layout.pipeline} makes {stages} stages, and {shown(trial.model.factory)} offers "
        raise RequestError(f"{what}{len(order)} modules in_order", valid=[f"1 to {len(order)} stages"])
    flops, shapes = _outline(model, order, trial)
    ends = balanced(flops, stages)
    return StagePlan(
        tuple(tuple(order[begin:end]) for begin, end in pairwise((0, *ends))),
        tuple(shapes[end - 1] for end in ends[:-1]),
    )


def balanced(costs: Sequence[int], groups: int) -> tuple[int, ...]:
    """Where each of so many runs of `costs` ends, so that the largest sum of a run is least."""

    @cache
    def cut(begin: int, left: int) -> tuple[int, tuple[int, ...]]:
        if left == 1:
            return sum(costs[begin:]), (len(costs),)
        tried = []
        for end in range(begin + 1, len(costs) - left + 2):
            largest, ends = cut(end, left - 1)
            tried.append((max(sum(costs[begin:end]), largest), (end, *ends)))
        return min(tried)

    return cut(0, groups)[1]


def _outline(model: nn.Module, order: Sequence[str], trial: Trial) -> tuple[list[int], list[tuple[int, ...]]]:
    """(FLOPs of each module, shape of what it gives of an image): on meta tensors, which compute nothing."""
    spec = trial.model
    hidden = torch.empty(2, spec.channels, spec.image_size, spec.image_size, device="meta")
    flops, shapes = [], []
    for name in order:
        module = model.get_submodule(name)
        tensors = chain(module.named_parameters(), module.named_buffers())
        stand_ins = {key: torch.empty_like(tensor, device="meta") for key, tensor in tensors}
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            hidden = functional_call(module, stand_ins, (hidden,))
        flops.append(counter.get_total_flops())
        shapes.append(tuple(hidden.shape[1:]))
    return flops, shapes


class Stage(nn.Module):
    """Some of a model's modules, one after the other; they and their names are the model's own."""

    def __init__(self, model: nn.Module, parts: Sequence[str]) -> None:
        """`parts`: which, in order."""
        super().__init__()
        self.parts = tuple(parts)
        for part in parts:
            *path, name = part.split(".")
            holder: nn.Module = self
            for step in path:
                if step not in dict(holder.named_children()):
                    holder.add_module(step, nn.Module())
                holder = holder.get_submodule(step)
            holder.add_module(name, model.get_submodule(part))

    @override
    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden states of hidden states; the first stage takes images, the last one makes logits."""
        for part in self.parts:
            hidden = self.get_submodule(part)(hidden)
        return hidden


@dataclass(frozen=True)
class Whole:
    """A parameter of the whole model."""

    parameter: nn.Parameter
    """Without elements (device "meta")."""
    owner: int
    """The rank of the pipeline's group that holds it."""


class Stages(nn.Module):
    """What one rank holds of a model in stages."""

    def __init__(self, model: nn.Module, plan: StagePlan, trial: Trial, wrap: Callable[[nn.Module], nn.Module]) -> None:
        """See `in_stages`; all ranks make one at once."""
        super().__init__()
        layout, ranks = trial.layout, trial.parallel.pipeline
        self.group = own_group(layout.groups("pipeline"))
        rank = layout.coordinates(dist.get_rank()).pipeline
        self.first, self.last = rank == 0, rank == ranks - 1
        self.shapes = plan.shapes
        holders = [Stage(model, list(chain(*plan.parts[other::ranks]))) for other in range(ranks)]
        self.own = holders[rank]
        """All that lies here; nothing goes forward through it, but names and weights are right."""
        owners = {name: other for other, held in enumerate(holders) for name, _ in held.named_parameters()}
        self.whole = {
            name: Whole(nn.Parameter(torch.empty(own.shape, device="meta"), own.requires_grad), owners[name])
            for name, own in model.named_parameters()
        }
        self.wrapped = nn.ModuleList(wrap(Stage(model, parts)) for parts in plan.parts[rank::ranks])
        """One for each stage of this rank, in the order of the model."""


def in_stages(
    model: nn.Module, plan: StagePlan | None, trial: Trial, wrap: Callable[[nn.Module], nn.Module]
) -> nn.Module:
    """Wraps the model; or, where ranks hold stages of it, each of this rank's stages (`Stages`).

    Args:
        model: on its device, alike on all ranks and with its blocks' options; cut along the other axes already.
        plan: its stages, made before it was cut.
        trial: whose layout says where this rank stands.
        wrap: what distributes a module over the ranks that hold the same of it.
    """
    return wrap(model) if plan is None else Stages(model, plan, trial, wrap)
