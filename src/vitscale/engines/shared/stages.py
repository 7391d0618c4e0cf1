"""A model in pipeline stages: which modules a rank keeps, under their names in the whole model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode
from typing_extensions import override

from vitscale.engines.base import blocks_of, weight_dtype
from vitscale.engines.shared.splits import offered, own_group
from vitscale.engines.shared.swin_split import swin_in_order, swin_through
from vitscale.errors import RequestError, shown
from vitscale.models.named import AUXILIARY_HEAD, DECODE_HEAD, PyramidSegmenter, VisionTransformer
from vitscale.trial.model_cost import balanced, stage_blocks, swin_shape
from vitscale.trial.model_counts import swin_maps
from vitscale.trial.parallel import even_parts
from vitscale.trial.trial import Trial

Given = Tensor | Sequence[Tensor]
"""What one module gives and the next one takes: hidden states, and beside them any maps that a head will take."""
Shapes = Callable[[int, int], tuple[tuple[tuple[int, ...], ...], ...]]
"""Takes an image's height and width; gives the shapes of what each stage but the last hands on, on this rank."""


@dataclass(frozen=True)
class StagePlan:
    """How a model is cut into stages."""

    parts: tuple[tuple[str, ...], ...]
    """Names of the modules of each stage; run one after the other, all of them are the model's forward."""
    shapes: Shapes
    """Shapes of what each stage but the last hands on."""
    dtype: torch.dtype
    """The dtype of what each stage but the last hands on."""
    through: Callable[[str, nn.Module, Given], Given] = field(default=lambda _, module, given: module(given))
    """Takes a module's name, the module and what is handed on to it; gives what the module makes of it."""
    blocks: tuple[str, ...] = ()
    """Names of the modules that are wrapped one by one, where they are not those of `base.blocks_of`."""
    resizes: bool = False
    """Whether the model gives logits [b, classes, H, W] of its images' size, while its last module's have another."""

    def blocks_of(self, model: nn.Module, trial: Trial) -> list[nn.Module]:
        """The blocks of this rank's stages.

        No block of another stage may refer to itself, as one with activation checkpointing does: it would stay, with
        its weights, until Python collects garbage.

        Raises:
            RequestError: an option works block by block, and the stages have no blocks.
        """
        own = self.parts[trial.layout.coordinates(dist.get_rank()).pipeline :: trial.parallel.pipeline]
        here = {module for name in chain(*own) for module in model.get_submodule(name).modules()}
        blocks = [model.get_submodule(name) for name in self.blocks] or blocks_of(model)
        parts = [model.get_submodule(name) for name in chain(*self.parts)]
        if not blocks or not {*blocks} <= {module for part in parts for module in part.modules()}:
            blocks = _repeated(parts)
            if not blocks and (trial.train.activation_checkpointing or trial.train.compile):
                option = "activation_checkpointing" if trial.train.activation_checkpointing else "compile"
                raise RequestError(
                    f"train.{option} works block by block, and in_order of {shown(trial.model.factory)} takes its "
                    "blocks apart into modules of which no two are of one class",
                    next_step=f"Name whole blocks in in_order, or leave {option} out",
                )
        return [block for block in blocks if block in here]


def stage_plan(model: nn.Module, trial: Trial) -> StagePlan | None:
    """The stages of a model that nothing has cut or wrapped yet; None where ranks hold no stages.

    They are cut so that the largest has as few FLOPs as possible.

    Raises:
        RequestError: the model does not list the modules of its forward (`in_order`), lists too few, leaves out a
            parameter, or has one in two stages; or a stage trains nothing.
    """
    layout, stages, dtype = trial.layout, trial.parallel.stages, weight_dtype(trial.train)
    if layout.pipeline == 1:
        return None
    if isinstance(model, VisionTransformer | PyramidSegmenter):
        embedding, *blocks = model.in_order[: 1 + len(model.vit.layers)]
        tokens, at = model.vit.embeddings.position_embeddings.shape[1], layout.coordinates(dist.get_rank()).sequence
        own = even_parts(tokens, layout.sequence)[at]
        parts = _parts(trial, [embedding], [[block] for block in blocks], model.in_order[1 + len(blocks) :])
        hidden = (((own.stop - own.start, model.vit.width),),) * (stages - 1)
        return StagePlan(parts, lambda *_: hidden, dtype, blocks=tuple(blocks))
    if swin := swin_shape(trial.model):
        heads = [name for name in (AUXILIARY_HEAD, DECODE_HEAD) if getattr(model, name, None) is not None]
        first, units, last = swin_in_order(swin.depths, heads)
        behind = [blocks.stop - 1 for blocks in stage_blocks(trial.model, stages)[:-1]]
        if trial.train.precision == "bf16" and trial.train.device == "cpu":
            dtype = torch.bfloat16  # autocast's norms give it there, and so has all that they are added to

        at = layout.coordinates(dist.get_rank()).sequence

        def shapes(height: int, width: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
            high, wide = (
                swin_maps(swin._replace(image_size=n), layout.sequence, at, segments=bool(heads))
                for n in (height, width)
            )
            of_stages = (zip(high[block], wide[block], strict=True) for block in behind)
            return tuple(tuple((rows, *other[1:]) for (rows, *_), other in of_stage) for of_stage in of_stages)

        parts = _parts(trial, first, units, last)
        return StagePlan(parts, shapes, dtype, swin_through, tuple(chain(*units)), resizes=bool(heads))
    order = list(offered(model, "in_order", trial))
    held = {parameter for part in order for parameter in model.get_submodule(part).parameters()}
    if left_out := next((name for name, parameter in model.named_parameters() if parameter not in held), None):
        raise RequestError(
            f"parallel.pipeline = {layout.pipeline}: in_order of {shown(trial.model.factory)} leaves out the parameter "
            f"{shown(left_out)}, and stages without it would be another model",
            next_step="Move it into a module that in_order names (docs/parallelism.md), or leave parallel.pipeline out",
        )
    if len(order) < stages:
        what = f"parallel.pipeline = {layout.pipeline} makes {stages} stages, and {shown(trial.model.factory)} offers "
        raise RequestError(f"{what}{len(order)} modules in_order", valid=[f"1 to {len(order)} stages"])
    flops, given = _outline(model, order, trial)
    ends = balanced(tuple(flops), stages)
    handed_on = tuple((given[end - 1],) for end in ends[:-1])
    parts = tuple(tuple(order[begin:end]) for begin, end in pairwise((0, *ends)))
    _check_weights(model, parts, trial)
    return StagePlan(parts, lambda *_: handed_on, dtype)


def _check_weights(model: nn.Module, parts: Sequence[Sequence[str]], trial: Trial) -> None:
    """Refuses stages of a factory's model that share weights, which each would train for itself, or that train none."""
    of_stages = [{own for name in part for own in model.get_submodule(name).parameters()} for part in parts]
    what = f"parallel.pipeline = {trial.parallel.pipeline}: "
    for name, parameter in model.named_parameters():
        at = [number for number, held in enumerate(of_stages, start=1) if parameter in held]
        if len(at) > 1:
            raise RequestError(
                f"{what}stages {at[0]} and {at[1]} of {shown(trial.model.factory)} share the parameter {shown(name)}, "
                "and each would train it for itself",
                next_step="Leave parallel.pipeline out, or give each of these modules its own weights",
            )
    for number, held in enumerate(of_stages):
        # DDP wraps each stage by itself; otherwise one optimizer is for all stages of a rank.
        ranks = trial.parallel.pipeline
        together = [held] if trial.train.engine == "ddp" else of_stages[number % ranks :: ranks]
        if not any(parameter.requires_grad for parameter in chain(*together)):
            raise RequestError(
                f"{what}stage {number + 1} of {shown(trial.model.factory)} ({', '.join(parts[number])}) trains no "
                "parameter, and neither DDP nor an optimizer goes without one",
                next_step="Leave parallel.pipeline out, or unfreeze a module of that stage",
            )


def _repeated(parts: Sequence[nn.Module]) -> list[nn.Module]:
    """The modules of the class that holds the most parameters, of those of which there are two or more.

    A `Sequential` of modules of one class stands for these; others are of one kind if they hold the same classes.
    """
    of_kind: dict[tuple[type[nn.Module], ...], list[nn.Module]] = {}
    for part in parts:
        alike = isinstance(part, nn.Sequential) and len({type(module) for module in part}) == 1
        for module in part.children() if alike else (part,):
            held = map(type, module.children()) if isinstance(module, nn.Sequential) else ()
            of_kind.setdefault((type(module), *held), []).append(module)
    repeated = [modules for modules in of_kind.values() if len(modules) > 1]
    return max(repeated, key=lambda modules: sum(p.numel() for m in modules for p in m.parameters()), default=[])


def _parts(
    trial: Trial, first: Sequence[str], units: Sequence[Sequence[str]], last: Sequence[str]
) -> tuple[tuple[str, ...], ...]:
    """Names of each stage's modules; `units`: names of each block with what goes with it."""
    of_stages = stage_blocks(trial.model, trial.parallel.stages)
    parts = [[name for block in blocks for name in units[block]] for blocks in of_stages]
    return tuple(map(tuple, ([*first, *parts[0]], *parts[1:-1], [*parts[-1], *last])))


def _outline(model: nn.Module, order: Sequence[str], trial: Trial) -> tuple[list[int], list[tuple[int, ...]]]:
    """FLOPs of each module, and the shape of its output for one image; on meta tensors, which compute nothing."""
    spec = trial.model
    dtype = next((parameter.dtype for parameter in model.parameters()), None)
    hidden = torch.empty(2, spec.channels, spec.image_size, spec.image_size, dtype=dtype, device="meta")
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

    def __init__(self, model: nn.Module, plan: StagePlan, *numbers: int) -> None:
        """`numbers`: the plan's stages that it holds, one after the other."""
        super().__init__()
        self.parts, self.through = tuple(chain(*(plan.parts[number] for number in numbers))), plan.through
        self.handed_on = plan.dtype if numbers[-1] < len(plan.parts) - 1 else None
        # DDP is not to broadcast these, which keep their names.
        self._ddp_params_and_buffers_to_ignore = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
        for part in self.parts:
            *path, name = part.split(".")
            holder: nn.Module = self
            for step in path:
                if step not in dict(holder.named_children()):
                    holder.add_module(step, nn.Module())
                holder = holder.get_submodule(step)
            holder.add_module(name, model.get_submodule(part))

    @override
    def forward(self, *tensors: Tensor) -> Given:
        """Makes what goes on from what came; the first stage takes images, the last one makes logits.

        An auxiliary head runs in training alone, and `AuxiliaryLogits` sees its output.
        """
        given: Given = tensors[0] if len(tensors) == 1 else tensors
        for part in self.parts:
            if part != AUXILIARY_HEAD:
                given = self.through(part, self.get_submodule(part), given)
            elif self.training:
                self.through(part, self.get_submodule(part), given)
        if self.handed_on is None:
            return given
        # As the next stage's buffers are: a factory's modules may give another dtype under autocast, or strided views.
        if isinstance(given, Tensor):
            return given.to(self.handed_on).contiguous()
        return tuple(tensor.to(self.handed_on).contiguous() for tensor in given)


class Stages(nn.Module):
    """What one rank holds of a model in stages."""

    def __init__(self, model: nn.Module, plan: StagePlan, trial: Trial, wrap: Callable[[nn.Module], nn.Module]) -> None:
        """Wraps each of this rank's stages; all ranks make a `Stages` at once.

        Args:
            model: the model on its device, alike on all ranks, with its blocks' options, cut along the other axes.
            plan: its stages, made before it was cut.
            trial: the trial; its layout says where this rank stands.
            wrap: distributes a module over the ranks that hold the same of it.
        """
        super().__init__()
        layout, ranks = trial.layout, trial.parallel.pipeline
        self.group = own_group(layout.groups("pipeline"))
        rank = layout.coordinates(dist.get_rank()).pipeline
        self.first, self.last = rank == 0, rank == ranks - 1
        self.shapes, self.dtype, self.resizes = plan.shapes, plan.dtype, plan.resizes
        stages = range(len(plan.parts))
        holders = [Stage(model, plan, *stages[other::ranks]) for other in range(ranks)]
        self.own = holders[rank]
        """All modules of this rank; it runs no forward, but its names and weights are right."""
        self.owners = {name: other for other, held in enumerate(holders) for name in held.state_dict()}
        """The rank of the pipeline's group that holds each parameter of the model, and each buffer that is saved."""
        self.of_model = {
            name: nn.Parameter(torch.empty(own.shape, device="meta"), own.requires_grad)
            for name, own in model.named_parameters()
        }
        """The whole model's parameters, without elements (device "meta")."""
        buffers = {name: own for name, own in model.named_buffers() if name in self.owners}
        self.buffers_of_model = {name: torch.empty_like(own, device="meta") for name, own in buffers.items()}
        """The whole model's buffers that are saved, without elements too."""
        self.wrapped = nn.ModuleList(wrap(Stage(model, plan, number)) for number in stages[rank::ranks])
        """A wrapped module for each stage of this rank, in the order of the model."""
