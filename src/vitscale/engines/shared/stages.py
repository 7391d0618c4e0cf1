"""A model in pipeline stages: which modules a rank keeps, under their names in the whole model.

A stage hands its output, an `Activation`, on to the next stage. A rank may hold several stages: rank r of n ranks of a
pipeline holds the stages r, r + n, r + 2 n and so on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode
from typing_extensions import override

from vitscale.engines import wrapper_facts
from vitscale.engines.base import weight_dtype
from vitscale.engines.shared.splits import offered, own_group
from vitscale.engines.shared.swin_split import run_swin_module, swin_in_order
from vitscale.errors import RequestError, shown
from vitscale.models.blocks import blocks_of
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


def _call_module(name: str, module: nn.Module, activation: Activation) -> Activation:
    """Return a module's output for what is handed on to it: `StagePlan.run_module` of most models."""
    del name
    output: Activation = module(activation)
    return output


@dataclass(frozen=True)
class StagePlan:
    """The stages into which a model is cut."""

    parts: tuple[tuple[str, ...], ...]
    """Names of the modules of each stage; run one after the other, all of them are the model's forward."""
    shapes: ActivationShapes
    """Shapes of what each stage but the last hands on."""
    dtype: torch.dtype
    """The dtype of what each stage but the last hands on."""
    run_module: Callable[[str, nn.Module, Activation], Activation] = _call_module
    """Takes a module's name, the module and its input; returns the input of the next module in `parts`."""
    blocks: tuple[str, ...] = ()
    """Names of the modules that are wrapped one by one, where they are not those of `blocks_of`."""
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
        own_stages = self.parts[rank :: trial.parallel.pipeline]
        local_modules = _modules_in([model.get_submodule(name) for name in chain(*own_stages)])
        return [block for block in self._all_blocks(model, trial) if block in local_modules]

    def _all_blocks(self, model: nn.Module, trial: Trial) -> Sequence[nn.Module]:
        """Return the blocks of all stages.

        Raises:
            RequestError: an option works block by block, and the stages have no blocks.
        """
        blocks = [model.get_submodule(name) for name in self.blocks] or blocks_of(model)
        parts = [model.get_submodule(name) for name in chain(*self.parts)]
        if blocks and _modules_in(parts).issuperset(blocks):
            return blocks
        repeated = _repeated(parts)
        train = trial.train
        needs_blocks = train.activation_checkpointing or train.compile
        if needs_blocks and not repeated:
            option = "activation_checkpointing" if train.activation_checkpointing else "compile"
            raise RequestError(
                f"train.{option} works block by block, and in_order of {shown(trial.model.factory)} takes its "
                "blocks apart into modules of which no two are of one class",
                next_step=f"Name whole blocks in in_order, or leave {option} out",
            )
        return repeated


def _modules_in(parts: Sequence[nn.Module]) -> set[nn.Module]:
    """Return all modules in these ones, and they themselves."""
    return set(chain.from_iterable(part.modules() for part in parts))


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
    """Return the stages of a vision transformer: its embedding, its blocks, and what follows them."""
    block_count = len(model.vit.layers)
    embedding, *blocks = model.in_order[: 1 + block_count]
    heads = model.in_order[1 + block_count :]
    all_tokens = model.vit.embeddings.position_embeddings.shape[1]
    own_range = even_parts(all_tokens, trial.layout.sequence)[_sequence_rank(trial)]
    own_tokens = own_range.stop - own_range.start
    hidden_shape = (own_tokens, model.vit.width)
    return StagePlan(
        parts=_parts(trial, [embedding], [[block] for block in blocks], heads),
        shapes=_same_at_any_size([(hidden_shape,)] * (trial.parallel.stages - 1)),
        dtype=weight_dtype(trial.train),
        blocks=tuple(blocks),
    )


def _same_at_any_size(shapes: Sequence[TensorShapes]) -> ActivationShapes:
    """Return `StagePlan.shapes` of a model whose stages hand on these shapes, whatever the size of the images."""

    def shapes_at(height: int, width: int) -> tuple[TensorShapes, ...]:
        del height, width
        return tuple(shapes)

    return shapes_at


def _swin_plan(model: nn.Module, swin: SwinShape, trial: Trial) -> StagePlan:
    """Return the stages of a Swin; what they hand on depends on the size of the images."""
    layout = trial.layout
    sequence_rank = _sequence_rank(trial)
    heads = [name for name in (AUXILIARY_HEAD, DECODE_HEAD) if getattr(model, name, None) is not None]
    order = swin_in_order(swin.depths, heads)
    blocks_by_stage = stage_blocks(trial.model, trial.parallel.stages)
    last_blocks = [blocks.stop - 1 for blocks in blocks_by_stage[:-1]]  # whose output goes on to the next stage
    dtype = weight_dtype(trial.train)
    if trial.train.precision == "bf16" and trial.train.device == "cpu":
        dtype = torch.bfloat16  # autocast's norms give it there, and so has all that they are added to

    def shapes_of_square(side: int) -> list[tuple[tuple[int, int, int], ...]]:
        """Return (rows, columns, width) of the tensors behind each block, for square images."""
        square = swin._replace(image_size=side)
        return swin_maps(square, layout.sequence, sequence_rank, segments=bool(heads))

    def shapes_at(height: int, width: int) -> tuple[TensorShapes, ...]:
        tall = shapes_of_square(height)
        wide = shapes_of_square(width)
        return tuple(_rectangular(tall[block], wide[block]) for block in last_blocks)

    return StagePlan(
        parts=_parts(trial, order.first, order.blocks, order.last),
        shapes=shapes_at,
        dtype=dtype,
        run_module=run_swin_module,
        blocks=tuple(chain(*order.blocks)),
        resizes=bool(heads),
    )


def _rectangular(tall: TensorShapes, wide: TensorShapes) -> TensorShapes:
    """Return shapes (rows, columns, width) of an image's maps.

    Args:
        tall: the shapes of a square image of its height; they give the rows.
        wide: the shapes of a square image of its width; they give the columns and the width.
    """
    return tuple((tall_map[0], *wide_map[1:]) for tall_map, wide_map in zip(tall, wide, strict=True))


def _factory_plan(model: nn.Module, trial: Trial) -> StagePlan:
    """Return the stages of a factory's model, which lists the modules of its forward (`in_order`).

    Raises:
        RequestError: the list is missing, is too short or leaves out a parameter; or its stages cannot be trained
            (`_check_weights`).
    """
    module_names = list(offered(model, "in_order", trial))
    _check_listed(model, module_names, trial)
    outlines = _outlines(model, module_names, trial)
    stage_ranges = _balanced_ranges(outlines, trial.parallel.stages)
    parts = tuple(tuple(module_names[numbers.start : numbers.stop]) for numbers in stage_ranges)
    _check_weights(model, parts, trial)
    output_shapes = [outlines[numbers[-1]].output_shape for numbers in stage_ranges]
    shapes_handed_on = [(shape,) for shape in output_shapes[:-1]]  # the last stage hands nothing on
    return StagePlan(parts, shapes=_same_at_any_size(shapes_handed_on), dtype=weight_dtype(trial.train))


def _check_listed(model: nn.Module, module_names: Sequence[str], trial: Trial) -> None:
    """Check that a factory's `in_order` lists all of its model, and enough modules for the stages.

    Raises:
        RequestError: a parameter lies in none of the modules, or there are fewer modules than stages.
    """
    setting = f"parallel.pipeline = {trial.layout.pipeline}"
    factory = shown(trial.model.factory)
    missing = _first_unlisted_parameter(model, module_names)
    if missing is not None:
        raise RequestError(
            f"{setting}: in_order of {factory} leaves out the parameter {shown(missing)}, and stages without it would "
            "be another model",
            next_step="Move it into a module that in_order names (docs/parallelism.md), or leave parallel.pipeline out",
        )
    stages = trial.parallel.stages
    if len(module_names) < stages:
        raise RequestError(
            f"{setting} makes {stages} stages, and {factory} offers {len(module_names)} modules in_order",
            valid=[f"1 to {len(module_names)} stages"],
        )


def _first_unlisted_parameter(model: nn.Module, module_names: Sequence[str]) -> str | None:
    """Return the name of the first parameter that lies in none of these modules; None where all do."""
    listed = _parameters_of(model, module_names)
    for name, parameter in model.named_parameters():
        if parameter not in listed:
            return name
    return None


def _balanced_ranges(outlines: Sequence[_Outline], stages: int) -> list[range]:
    """Return the numbers of each stage's modules, cut so that the largest stage has as few FLOPs as possible.

    Example: five modules may make the two stages [range(0, 3), range(3, 5)].
    """
    ends = balanced(tuple(outline.flops for outline in outlines), stages)
    begins = (0, *ends[:-1])
    return [range(begin, end) for begin, end in zip(begins, ends, strict=True)]


def _sequence_rank(trial: Trial) -> int:
    """Return this rank's number among those that share the tokens."""
    return trial.layout.coordinates(dist.get_rank()).sequence


def _check_weights(model: nn.Module, parts: Sequence[Sequence[str]], trial: Trial) -> None:
    """Check the weights of a factory's model in stages.

    Args:
        model: the model.
        parts: names of the modules of each stage.
        trial: the trial.

    Raises:
        RequestError: two stages share a weight, which each would train for itself, or a stage trains none.
    """
    weights_by_stage = [_parameters_of(model, part) for part in parts]
    setting = f"parallel.pipeline = {trial.parallel.pipeline}"
    factory = shown(trial.model.factory)
    for name, parameter in model.named_parameters():
        sharing = [number for number, weights in enumerate(weights_by_stage, start=1) if parameter in weights]
        if len(sharing) > 1:
            raise RequestError(
                f"{setting}: stages {sharing[0]} and {sharing[1]} of {factory} share the parameter {shown(name)}, and "
                "each would train it for itself",
                next_step="Leave parallel.pipeline out, or give each of these modules its own weights",
            )
    idle_stage = _first_stage_without_training(weights_by_stage, trial)
    if idle_stage is not None:
        raise RequestError(
            f"{setting}: stage {idle_stage + 1} of {factory} ({', '.join(parts[idle_stage])}) trains no parameter, and "
            "neither DDP nor an optimizer goes without one",
            next_step="Leave parallel.pipeline out, or unfreeze a module of that stage",
        )


def _first_stage_without_training(weights_by_stage: Sequence[set[nn.Parameter]], trial: Trial) -> int | None:
    """Return the number, from 0 on, of the first stage for which its rank has nothing to train; None where all have.

    A rank has one optimizer for all its stages, so one of them that trains will do. But it has a wrapper for each of
    them, and DDP wraps no stage that trains nothing.
    """
    ranks = trial.parallel.pipeline
    every_stage_must_train = wrapper_facts(trial.train).every_stage_must_train
    for stage, weights in enumerate(weights_by_stage):
        stages_of_rank = weights_by_stage[stage % ranks :: ranks]
        trained_together = [weights] if every_stage_must_train else stages_of_rank
        if not any(parameter.requires_grad for parameter in chain(*trained_together)):
            return stage
    return None


def _parameters_of(model: nn.Module, module_names: Iterable[str]) -> set[nn.Parameter]:
    """Return all parameters of some modules of a model."""
    modules = [model.get_submodule(name) for name in module_names]
    return set(chain.from_iterable(module.parameters() for module in modules))


def _repeated(parts: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the modules of the kind that has the most parameters, of kinds with two modules or more; [] without any.

    A kind is a class; of a `Sequential` also the classes that it holds. Modules of one class in a `Sequential` count
    in its stead.
    """
    modules_by_kind: dict[tuple[type[nn.Module], ...], list[nn.Module]] = {}
    for module in chain.from_iterable(map(_without_uniform_sequential, parts)):
        inner_classes = map(type, module.children()) if isinstance(module, nn.Sequential) else ()
        modules_by_kind.setdefault((type(module), *inner_classes), []).append(module)
    repeated = [modules for modules in modules_by_kind.values() if len(modules) > 1]
    return max(repeated, key=_parameter_count, default=[])


def _without_uniform_sequential(part: nn.Module) -> Iterable[nn.Module]:
    """Return the modules of a `Sequential` if all are of one class, else the part as it is."""
    is_uniform = isinstance(part, nn.Sequential) and len({type(module) for module in part}) == 1
    return part.children() if is_uniform else (part,)


def _parameter_count(modules: Sequence[nn.Module]) -> int:
    """Return the elements of all parameters of some modules."""
    parameters = chain.from_iterable(module.parameters() for module in modules)
    return sum(parameter.numel() for parameter in parameters)


def _parts(
    trial: Trial, first: Sequence[str], modules_by_block: Sequence[Sequence[str]], last: Sequence[str]
) -> tuple[tuple[str, ...], ...]:
    """Return the names of each stage's modules.

    Args:
        trial: the trial.
        first: names of the modules before the blocks.
        modules_by_block: names of each block with what goes with it (`SwinOrder.blocks`).
        last: names of the modules behind the blocks.
    """
    modules_by_stage: list[list[str]] = []
    for blocks in stage_blocks(trial.model, trial.parallel.stages):
        modules = chain.from_iterable(modules_by_block[block] for block in blocks)
        modules_by_stage.append(list(modules))
    modules_by_stage[0] = [*first, *modules_by_stage[0]]
    modules_by_stage[-1] = [*modules_by_stage[-1], *last]
    return tuple(map(tuple, modules_by_stage))


class _Outline(NamedTuple):
    """A module's work and output, known without computing."""

    flops: int
    output_shape: tuple[int, ...]
    """For one image."""


def _outlines(model: nn.Module, order: Sequence[str], trial: Trial) -> list[_Outline]:
    """Return the outline of each module, from a forward of two images on meta tensors, which compute nothing.

    Args:
        model: the model.
        order: names of its modules, each of which takes the output of the one before.
        trial: the trial, which has the size of images.
    """
    spec = trial.model
    dtype = next((parameter.dtype for parameter in model.parameters()), None)
    activation = torch.empty(2, spec.channels, spec.image_size, spec.image_size, dtype=dtype, device="meta")
    outlines = []
    for name in order:
        module = model.get_submodule(name)
        tensors = chain(module.named_parameters(), module.named_buffers())
        meta_tensors = {key: torch.empty_like(tensor, device="meta") for key, tensor in tensors}
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            activation = functional_call(module, meta_tensors, (activation,))
        output_shape = tuple(activation.shape[1:])
        outlines.append(_Outline(counter.get_total_flops(), output_shape))
    return outlines


class Stage(nn.Module):
    """Some of a model's modules, one after the other; they and their names are the model's own."""

    def __init__(self, model: nn.Module, plan: StagePlan, *numbers: int) -> None:
        """`numbers`: the plan's stages that it holds, one after the other."""
        super().__init__()
        self.module_names = tuple(chain.from_iterable(plan.parts[number] for number in numbers))
        """Names of its modules in the whole model, in the order of forward."""
        self.run_module = plan.run_module
        is_last = numbers[-1] == len(plan.parts) - 1
        self.dtype_handed_on = None if is_last else plan.dtype
        """The dtype of what goes on to the next stage; None for the last stage, which gives logits."""
        # DDP is not to broadcast these, which keep their names.
        self._ddp_params_and_buffers_to_ignore = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
        for name in self.module_names:
            _add_under_name(self, name, model.get_submodule(name))

    @override
    def forward(self, *tensors: Tensor) -> Activation:
        """Return what goes on to the next stage, or logits from the last stage.

        In training the auxiliary head of segmentation runs beside this chain of modules: it reads what the decode head
        reads too. Its logits reach the loss by a hook (`models.named.AuxiliaryLogits`), not through what is returned.

        Args:
            tensors: images for the first stage; for others what the stage before hands on: the hidden states, and then
                the maps of earlier stages that a head will take.
        """
        activation: Activation = tensors[0] if len(tensors) == 1 else tensors
        for name in self.module_names:
            module = self.get_submodule(name)
            is_beside_chain = name == AUXILIARY_HEAD
            if not is_beside_chain:
                activation = self.run_module(name, module, activation)
            elif self.training:
                self.run_module(name, module, activation)
        if self.dtype_handed_on is None:
            return activation
        return _as_handed_on(activation, self.dtype_handed_on)


def _as_handed_on(activation: Activation, dtype: torch.dtype) -> Activation:
    """Return an activation that fits into the buffers of the next stage: of this dtype, and contiguous.

    A factory's modules may give another dtype under autocast, or strided views.
    """
    if isinstance(activation, Tensor):
        return activation.to(dtype).contiguous()
    return tuple(tensor.to(dtype).contiguous() for tensor in activation)


def _add_under_name(root: nn.Module, name: str, module: nn.Module) -> None:
    """Add a module under a dotted name, such as "vit.layers.0"; parents that are missing become empty modules."""
    *parent_names, own_name = name.split(".")
    parent = root
    for parent_name in parent_names:
        if parent_name not in dict(parent.named_children()):
            parent.add_module(parent_name, nn.Module())
        parent = parent.get_submodule(parent_name)
    parent.add_module(own_name, module)


class StagedModel(nn.Module):
    """The stages of a model that one rank holds, and where the parts of the model lie on the other ranks."""

    def __init__(self, model: nn.Module, plan: StagePlan, trial: Trial, wrap: Callable[[nn.Module], nn.Module]) -> None:
        """Wrap each of this rank's stages; all ranks make a `StagedModel` at once.

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
        self.has_first_stage = rank == 0
        """Whether this rank holds the first stage, which takes images."""
        self.has_last_stage = rank == ranks - 1
        """Whether this rank holds the last stage, which gives logits."""
        self.shapes = plan.shapes
        self.dtype = plan.dtype
        self.resizes = plan.resizes
        stages = range(len(plan.parts))
        # Of n ranks rank r holds the stages r, r + n, r + 2 n and so on.
        modules_by_rank = [Stage(model, plan, *stages[holder::ranks]) for holder in range(ranks)]
        self.local_modules = modules_by_rank[rank]
        """All modules of this rank; it runs no forward, but its names and weights are right."""
        self.holder_by_name: dict[str, int] = {}
        """Name of a parameter, or of a buffer that is saved -> the rank of the pipeline's group that holds it."""
        for holder, modules in enumerate(modules_by_rank):
            self.holder_by_name |= dict.fromkeys(modules.state_dict(), holder)
        self.parameters_of_model = {
            name: nn.Parameter(torch.empty(parameter.shape, device="meta"), parameter.requires_grad)
            for name, parameter in model.named_parameters()
        }
        """The whole model's parameters, without elements (device "meta")."""
        saved_buffers = [(name, buffer) for name, buffer in model.named_buffers() if name in self.holder_by_name]
        self.buffers_of_model = {name: torch.empty_like(buffer, device="meta") for name, buffer in saved_buffers}
        """The whole model's buffers that are saved, without elements too."""
        self.wrapped = nn.ModuleList(wrap(Stage(model, plan, number)) for number in stages[rank::ranks])
        """A wrapped module for each stage of this rank, in the order of the model."""
