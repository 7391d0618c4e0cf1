"""A model in pipeline stages: which modules a rank keeps, under their names in the whole model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode
from typing_extensions import override

from vitscale.engines import wrapper_facts
from vitscale.engines.base import blocks_of, weight_dtype
from vitscale.engines.shared.splits import offered, own_group
from vitscale.engines.shared.swin_split import run_swin_module, swin_in_order
from vitscale.errors import RequestError, shown
from vitscale.models.named import AUXILIARY_HEAD, DECODE_HEAD, PyramidSegmenter, VisionTransformer
from vitscale.trial.model_cost import balanced, stage_blocks, swin_shape
from vitscale.trial.model_counts import SwinShape, swin_maps
from vitscale.trial.parallel import even_parts
from vitscale.trial.trial import Trial

Activation = Tensor | Sequence[Tensor]
"""The output of one module and the input of the next: hidden states, and beside them any maps that a head will take."""
TensorShapes = tuple[tuple[int, ...], ...]
"""Shapes, for one image, of the tensors that a stage hands on."""
ActivationShapes = Callable[[int, int], tuple[TensorShapes, ...]]
"""Takes an image's height and width; gives the shapes of what each stage but the last hands on, on this rank."""


@dataclass(frozen=True)
class StagePlan:
    """The stages into which a model is cut."""

    parts: tuple[tuple[str, ...], ...]
    """Names of the modules of each stage; run one after the other, all of them are the model's forward."""
    shapes: ActivationShapes
    """Shapes of what each stage but the last hands on."""
    dtype: torch.dtype
    """The dtype of what each stage but the last hands on."""
    through: Callable[[str, nn.Module, Activation], Activation] = field(
        default=lambda _, module, activation: module(activation)
    )
    """Takes a module's name, the module and what is handed on to it; gives what the module makes of it."""
    blocks: tuple[str, ...] = ()
    """Names of the modules that are wrapped one by one, where they are not those of `base.blocks_of`."""
    resizes: bool = False
    """Whether the model gives logits [b, classes, H, W] of its images' size, while its last module's have another."""

    def blocks_of(self, model: nn.Module, trial: Trial) -> list[nn.Module]:
        """Return the blocks of this rank's stages.

        No block of another stage may refer to itself, as one with activation checkpointing does: it would stay, with
        its weights, until Python collects garbage.

        Raises:
            RequestError: an option works block by block, and the stages have no blocks.
        """
        rank = trial.layout.coordinates(dist.get_rank()).pipeline
        stages = self.parts[rank :: trial.parallel.pipeline]
        local_modules = _modules_in([model.get_submodule(name) for name in chain(*stages)])
        return [block for block in self._all_blocks(model, trial) if block in local_modules]

    def _all_blocks(self, model: nn.Module, trial: Trial) -> Sequence[nn.Module]:
        """Return the blocks of all stages."""
        blocks = [model.get_submodule(name) for name in self.blocks] or blocks_of(model)
        parts = [model.get_submodule(name) for name in chain(*self.parts)]
        if blocks and _modules_in(parts).issuperset(blocks):
            return blocks
        repeated = _repeated(parts)
        train = trial.train
        if not repeated and (train.activation_checkpointing or train.compile):
            option = "activation_checkpointing" if train.activation_checkpointing else "compile"
            raise RequestError(
                f"train.{option} works block by block, and in_order of {shown(trial.model.factory)} takes its "
                "blocks apart into modules of which no two are of one class",
                next_step=f"Name whole blocks in in_order, or leave {option} out",
            )
        return repeated


def _modules_in(parts: Sequence[nn.Module]) -> set[nn.Module]:
    return {module for part in parts for module in part.modules()}


def stage_plan(model: nn.Module, trial: Trial) -> StagePlan | None:
    """Return the stages of a model that nothing has cut or wrapped yet; None where ranks hold no stages.

    They are cut so that the largest has as few FLOPs as possible.

    Raises:
        RequestError: the model does not list the modules of its forward (`in_order`), lists too few, leaves out a
            parameter, or has one in two stages; or a stage trains nothing.
    """
    if trial.layout.pipeline == 1:
        return None
    if isinstance(model, VisionTransformer | PyramidSegmenter):
        return _vit_plan(model, trial)
    swin = swin_shape(trial.model)
    if swin is not None:
        return _swin_plan(model, swin, trial)
    return _factory_plan(model, trial)


def _vit_plan(model: VisionTransformer | PyramidSegmenter, trial: Trial) -> StagePlan:
    embedding, *blocks = model.in_order[: 1 + len(model.vit.layers)]
    heads = model.in_order[1 + len(blocks) :]
    all_tokens = model.vit.embeddings.position_embeddings.shape[1]
    tokens = even_parts(all_tokens, trial.layout.sequence)[_sequence_rank(trial)]
    handed_on = ((tokens.stop - tokens.start, model.vit.width),)
    shapes = (handed_on,) * (trial.parallel.stages - 1)
    return StagePlan(
        parts=_parts(trial, [embedding], [[block] for block in blocks], heads),
        shapes=lambda *_: shapes,
        dtype=weight_dtype(trial.train),
        blocks=tuple(blocks),
    )


def _swin_plan(model: nn.Module, swin: SwinShape, trial: Trial) -> StagePlan:
    layout = trial.layout
    sequence_rank = _sequence_rank(trial)
    heads = [name for name in (AUXILIARY_HEAD, DECODE_HEAD) if getattr(model, name, None) is not None]
    order = swin_in_order(swin.depths, heads)
    last_blocks = [blocks.stop - 1 for blocks in stage_blocks(trial.model, trial.parallel.stages)[:-1]]
    dtype = weight_dtype(trial.train)
    if trial.train.precision == "bf16" and trial.train.device == "cpu":
        dtype = torch.bfloat16  # autocast's norms give it there, and so has all that they are added to

    def maps_of_square(side: int) -> list[tuple[tuple[int, int, int], ...]]:
        square = swin._replace(image_size=side)
        return swin_maps(square, layout.sequence, sequence_rank, segments=bool(heads))

    def shapes(height: int, width: int) -> tuple[TensorShapes, ...]:
        of_height = maps_of_square(height)
        of_width = maps_of_square(width)
        return tuple(_rectangular(of_height[block], of_width[block]) for block in last_blocks)

    return StagePlan(
        parts=_parts(trial, order.first, order.blocks, order.last),
        shapes=shapes,
        dtype=dtype,
        through=run_swin_module,
        blocks=tuple(chain(*order.blocks)),
        resizes=bool(heads),
    )


def _rectangular(of_height: TensorShapes, of_width: TensorShapes) -> TensorShapes:
    """Return shapes [rows, columns, width] of an image's maps, from those of squares of its height and its width."""
    return tuple((tall[0], *wide[1:]) for tall, wide in zip(of_height, of_width, strict=True))


def _factory_plan(model: nn.Module, trial: Trial) -> StagePlan:
    """Return the stages of a user's model, which says itself which modules make up its forward (`in_order`)."""
    stages = trial.parallel.stages
    what = f"parallel.pipeline = {trial.layout.pipeline}"
    factory = shown(trial.model.factory)
    order = list(offered(model, "in_order", trial))
    listed = {parameter for part in order for parameter in model.get_submodule(part).parameters()}
    missing = next((name for name, parameter in model.named_parameters() if parameter not in listed), None)
    if missing is not None:
        raise RequestError(
            f"{what}: in_order of {factory} leaves out the parameter {shown(missing)}, and stages without it would be "
            "another model",
            next_step="Move it into a module that in_order names (docs/parallelism.md), or leave parallel.pipeline out",
        )
    if len(order) < stages:
        raise RequestError(
            f"{what} makes {stages} stages, and {factory} offers {len(order)} modules in_order",
            valid=[f"1 to {len(order)} stages"],
        )
    outlines = _outlines(model, order, trial)
    ends = balanced(tuple(outline.flops for outline in outlines), stages)
    shapes = tuple((outlines[end - 1].output_shape,) for end in ends[:-1])
    parts = tuple(tuple(order[begin:end]) for begin, end in pairwise((0, *ends)))
    _check_weights(model, parts, trial)
    return StagePlan(parts, shapes=lambda *_: shapes, dtype=weight_dtype(trial.train))


def _sequence_rank(trial: Trial) -> int:
    """Return this rank's place among those that share the tokens."""
    return trial.layout.coordinates(dist.get_rank()).sequence


def _check_weights(model: nn.Module, parts: Sequence[Sequence[str]], trial: Trial) -> None:
    """Refuses stages of a factory's model that share weights, which each would train for itself, or that train none.

    Raises:
        RequestError: two stages share a weight, or a stage trains none.
    """
    weights_by_stage = [_parameters_of(model, part) for part in parts]
    what = f"parallel.pipeline = {trial.parallel.pipeline}: "
    factory = shown(trial.model.factory)
    for name, parameter in model.named_parameters():
        sharing = [number for number, weights in enumerate(weights_by_stage, start=1) if parameter in weights]
        if len(sharing) > 1:
            raise RequestError(
                f"{what}stages {sharing[0]} and {sharing[1]} of {factory} share the parameter {shown(name)}, and each "
                "would train it for itself",
                next_step="Leave parallel.pipeline out, or give each of these modules its own weights",
            )
    ranks = trial.parallel.pipeline
    every_stage_must_train = wrapper_facts(trial.train).every_stage_must_train
    for stage, weights in enumerate(weights_by_stage):
        # One optimizer is for all stages of a rank, and one wrapper for each of them.
        trained_together = [weights] if every_stage_must_train else weights_by_stage[stage % ranks :: ranks]
        if not any(parameter.requires_grad for parameter in chain(*trained_together)):
            raise RequestError(
                f"{what}stage {stage + 1} of {factory} ({', '.join(parts[stage])}) trains no parameter, and neither "
                "DDP nor an optimizer goes without one",
                next_step="Leave parallel.pipeline out, or unfreeze a module of that stage",
            )


def _parameters_of(model: nn.Module, part: Sequence[str]) -> set[nn.Parameter]:
    return {parameter for name in part for parameter in model.get_submodule(name).parameters()}


def _repeated(parts: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the modules of the kind that has the most parameters, of those of which there are two or more.

    A kind is a class; of a `Sequential` also the classes that it holds. A `Sequential` of modules of one class stands
    for these.
    """
    modules_by_kind: dict[tuple[type[nn.Module], ...], list[nn.Module]] = {}
    for part in parts:
        for module in _opened(part):
            inner_classes = map(type, module.children()) if isinstance(module, nn.Sequential) else ()
            modules_by_kind.setdefault((type(module), *inner_classes), []).append(module)
    repeated = [modules for modules in modules_by_kind.values() if len(modules) > 1]
    return max(repeated, key=_parameter_count, default=[])


def _opened(part: nn.Module) -> Iterable[nn.Module]:
    """Return the modules of a `Sequential` of one class; any other part as it is."""
    is_uniform = isinstance(part, nn.Sequential) and len({type(module) for module in part}) == 1
    return part.children() if is_uniform else (part,)


def _parameter_count(modules: Sequence[nn.Module]) -> int:
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


def _parts(
    trial: Trial, first: Sequence[str], units: Sequence[Sequence[str]], last: Sequence[str]
) -> tuple[tuple[str, ...], ...]:
    """Return the names of each stage's modules.

    Args:
        trial: the trial.
        first: names of the modules before the blocks.
        units: names of each block with what goes with it.
        last: names of the modules behind the blocks.
    """
    parts = []
    for blocks in stage_blocks(trial.model, trial.parallel.stages):
        parts.append([name for block in blocks for name in units[block]])
    parts[0] = [*first, *parts[0]]
    parts[-1] = [*parts[-1], *last]
    return tuple(map(tuple, parts))


class _Outline(NamedTuple):
    """A module's work and output, known without computing."""

    flops: int
    output_shape: tuple[int, ...]
    """For one image."""


def _outlines(model: nn.Module, order: Sequence[str], trial: Trial) -> list[_Outline]:
    """Return the outline of each module, from a forward on meta tensors, which compute nothing."""
    spec = trial.model
    dtype = next((parameter.dtype for parameter in model.parameters()), None)
    hidden = torch.empty(2, spec.channels, spec.image_size, spec.image_size, dtype=dtype, device="meta")
    outlines = []
    for name in order:
        module = model.get_submodule(name)
        tensors = chain(module.named_parameters(), module.named_buffers())
        stand_ins = {key: torch.empty_like(tensor, device="meta") for key, tensor in tensors}
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            hidden = functional_call(module, stand_ins, (hidden,))
        outlines.append(_Outline(counter.get_total_flops(), tuple(hidden.shape[1:])))
    return outlines


class Stage(nn.Module):
    """Some of a model's modules, one after the other; they and their names are the model's own."""

    def __init__(self, model: nn.Module, plan: StagePlan, *numbers: int) -> None:
        """`numbers`: the plan's stages that it holds, one after the other."""
        super().__init__()
        self.parts = tuple(chain(*(plan.parts[number] for number in numbers)))
        self.through = plan.through
        is_last = numbers[-1] == len(plan.parts) - 1
        self.dtype_handed_on = None if is_last else plan.dtype
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
    def forward(self, *tensors: Tensor) -> Activation:
        """Makes what goes on from what came; the first stage takes images, the last one makes logits.

        An auxiliary head runs in training alone, and `AuxiliaryLogits` sees its output.
        """
        activation: Activation = tensors[0] if len(tensors) == 1 else tensors
        for part in self.parts:
            if part != AUXILIARY_HEAD:
                activation = self.through(part, self.get_submodule(part), activation)
            elif self.training:
                self.through(part, self.get_submodule(part), activation)
        if self.dtype_handed_on is None:
            return activation
        # As the next stage's buffers are: a factory's modules may give another dtype under autocast, or strided views.
        if isinstance(activation, Tensor):
            return activation.to(self.dtype_handed_on).contiguous()
        return tuple(tensor.to(self.dtype_handed_on).contiguous() for tensor in activation)


class StagedModel(nn.Module):
    """The stages of a model that one rank holds."""

    def __init__(self, model: nn.Module, plan: StagePlan, trial: Trial, wrap: Callable[[nn.Module], nn.Module]) -> None:
        """Wraps each of this rank's stages; all ranks make a `StagedModel` at once.

        Args:
            model: the model on its device, alike on all ranks, with its blocks' options, cut along the other axes.
            plan: its stages, made before it was cut.
            trial: the trial; its layout says where this rank stands.
            wrap: distributes a module over the ranks that hold the same of it.
        """
        super().__init__()
        layout = trial.layout
        ranks = trial.parallel.pipeline
        rank = layout.coordinates(dist.get_rank()).pipeline
        self.group = own_group(layout.groups("pipeline"))
        self.first = rank == 0
        self.last = rank == ranks - 1
        self.shapes = plan.shapes
        self.dtype = plan.dtype
        self.resizes = plan.resizes
        stages = range(len(plan.parts))
        modules_by_rank = [Stage(model, plan, *stages[other::ranks]) for other in range(ranks)]
        self.own = modules_by_rank[rank]
        """All modules of this rank; it runs no forward, but its names and weights are right."""
        self.owners = {name: other for other, modules in enumerate(modules_by_rank) for name in modules.state_dict()}
        """The rank of the pipeline's group that holds each parameter of the model, and each buffer that is saved."""
        self.parameters_of_model = {
            name: nn.Parameter(torch.empty(parameter.shape, device="meta"), parameter.requires_grad)
            for name, parameter in model.named_parameters()
        }
        """The whole model's parameters, without elements (device "meta")."""
        self.buffers_of_model = {
            name: torch.empty_like(buffer, device="meta")
            for name, buffer in model.named_buffers()
            if name in self.owners
        }
        """The whole model's buffers that are saved, without elements too."""
        self.wrapped = nn.ModuleList(wrap(Stage(model, plan, number)) for number in stages[rank::ranks])
        """A wrapped module for each stage of this rank, in the order of the model."""
