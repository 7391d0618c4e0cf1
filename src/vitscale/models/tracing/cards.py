"""Makes a card of two recordings of the same model: what grows with the images is a line through both."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from typing import NamedTuple

from torch import nn

from vitscale.models.tracing.errors import TraceError
from vitscale.models.tracing.lines import line, upper_envelope
from vitscale.models.tracing.passes import AFTER_BLOCKS, BETWEEN_BLOCKS
from vitscale.models.tracing.recorder import Recording, TracedOperation
from vitscale.trial.model_card import CardModule, CardPart, ModelCard, PerImage, TraceRequest

_CAST_MODULES = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


class TracePair(NamedTuple):
    """The recordings of a model at `FEW_IMAGES` and at `MANY_IMAGES` images."""

    few: Recording
    many: Recording

    @property
    def part_count(self) -> int:
        """Number of parts of forward."""
        return len(self.few.parts)


def first_difference(pair: TracePair) -> str | None:
    """Return the first operation in which the two recordings differ, in words; None where they do the same."""
    few_operations = pair.few.operations
    many_operations = pair.many.operations
    for few, many in zip(few_operations, many_operations, strict=False):
        if (few.name, few.part, few.is_backward) != (many.name, many.part, many.is_backward):
            return f"{few.name} at the smaller one and {many.name} at the larger one"
    if len(few_operations) != len(many_operations):
        return f"{len(few_operations)} operations and {len(many_operations)}"
    return None


def card(request: TraceRequest, model: nn.Module, pair: TracePair, versions: dict[str, str]) -> ModelCard:
    """Return the model's card.

    Raises:
        TraceError: the two recordings do not take the same operations, or an amount is no line.
    """
    difference = first_difference(pair)
    if difference is not None:
        raise TraceError(f"the model takes different operations for different numbers of images: {difference}")
    return ModelCard(
        request=request,
        versions=versions,
        parts=tuple(_parts(model, pair)),
        frozen_elements=_frozen_elements(model),
        buffer_bytes=sum(buffer.numel() * buffer.element_size() for buffer in model.buffers()),
        batch_norm_channels=tuple(pair.few.batch_norm_channels),
        logits=line(pair.few.logits_bytes, pair.many.logits_bytes),
        forward_flops=_flops_by_kind(pair, is_backward=False),
        backward_flops=_flops_by_kind(pair, is_backward=True),
        recomputed_flops=_recomputed_flops(pair),
    )


def _frozen_elements(model: nn.Module) -> int:
    """Return the elements of parameters that are not trained."""
    return sum(parameter.numel() for parameter in model.parameters() if not parameter.requires_grad)


def _parts(model: nn.Module, pair: TracePair) -> Iterator[CardPart]:
    """Yield the parts of the card; stretches between blocks that only take views are left out."""
    memory = _MemoryLines.measured_in(pair)
    modules_by_part = _modules_by_part(model, pair.few)
    parts_with_storages = {storage.part for storage in pair.few.storages}
    labels = _part_labels(pair.few)
    for index, part in enumerate(pair.few.parts):
        only_takes_views = not modules_by_part[index] and index not in parts_with_storages
        if part.name == BETWEEN_BLOCKS and only_takes_views:
            continue
        yield CardPart(
            name=labels[index].name,
            block=labels[index].block,
            modules=tuple(modules_by_part[index]),
            kept=memory.kept[index],
            forward=_highest(memory.forward[index]),
            backward=_highest(memory.backward[index]),
            largest_batch_norm=_largest_batch_norm(pair, index),
            forward_flops=_part_flops(pair, index),
        )


def _largest_batch_norm(pair: TracePair, index: int) -> PerImage:
    """Return the bytes in fp32 of the largest input of a part's batch norms; 0 for a part without any."""
    few, many = (recording.largest_batch_norm_bytes.get(index, 0) for recording in pair)
    return line(few, many)


class _PartLabel(NamedTuple):
    """How a card names a part of forward; see the fields of these names in `CardPart`."""

    name: str
    block: int


_BEHIND_BLOCKS = -1
"""`CardPart.block` of what follows the last block."""


def _part_labels(recording: Recording) -> list[_PartLabel]:
    """Return the label of each part of forward.

    The recorder calls everything that follows a block "between blocks", since it does not know which block is the last.
    Example: before the blocks, block 1, between blocks, block 2, between blocks (here: after the blocks), loss.
    """
    last_block = _last_block(recording)
    labels: list[_PartLabel] = []
    for index, part in enumerate(recording.parts):
        if index <= last_block:
            labels.append(_PartLabel(part.name, part.block))
        elif part.name == BETWEEN_BLOCKS:
            labels.append(_PartLabel(AFTER_BLOCKS, _BEHIND_BLOCKS))
        else:  # the loss
            labels.append(_PartLabel(part.name, _BEHIND_BLOCKS))
    return labels


def _last_block(recording: Recording) -> int:
    """Return the index of the last part that is a block; 0, the part before all blocks, where the model has none."""
    blocks = [index for index, part in enumerate(recording.parts) if part.block > 0]
    return max(blocks, default=0)


def _highest(lines: list[PerImage]) -> tuple[PerImage, ...]:
    """Return the lines that are the highest for some number of images; a part without operations has 0 bytes."""
    return upper_envelope(lines) if lines else (PerImage(),)


class _MemoryLines(NamedTuple):
    """Bytes by part, as lines in the number of images; in lists with one item for each part.

    At any moment of a part's forward or backward, the bytes that are there are what this part and those before it keep,
    and the part's line beside it. A line may be negative: in backward the output of a block is given back before the
    block's own backward begins, though it counts as kept by the block that has made it.
    """

    kept: list[PerImage]
    forward: list[list[PerImage]]
    """For each operation of the part's forward the bytes beside what is kept up to and with this part."""
    backward: list[list[PerImage]]
    """The same for each operation of its backward."""

    @classmethod
    def measured_in(cls, pair: TracePair) -> _MemoryLines:
        """Measure both recordings."""
        few_kept = _kept_bytes(pair.few)
        many_kept = _kept_bytes(pair.many)
        forward: list[list[PerImage]] = [[] for _ in pair.few.parts]
        backward: list[list[PerImage]] = [[] for _ in pair.few.parts]
        few_beside = _bytes_beside_kept(pair.few, few_kept)
        many_beside = _bytes_beside_kept(pair.many, many_kept)
        for operation, at_few, at_many in zip(pair.few.operations, few_beside, many_beside, strict=True):
            lines_by_part = backward if operation.is_backward else forward
            lines_by_part[operation.part].append(line(at_few, at_many))
        kept = [line(at_few, at_many) for at_few, at_many in zip(few_kept, many_kept, strict=True)]
        return cls(kept, forward, backward)


def _kept_bytes(recording: Recording) -> list[int]:
    """Return for each part the bytes that its forward made, and that are there when backward begins."""
    kept = [0] * len(recording.parts)
    for storage in recording.storages:
        is_kept = not storage.is_backward and storage.is_live_at(recording.backward_begin)
        if storage.is_counted and is_kept:
            kept[storage.part] += storage.storage_bytes
    return kept


def _bytes_beside_kept(recording: Recording, kept_bytes: list[int]) -> list[int]:
    """Return for each operation the bytes that are there beside what its part and those before it keep.

    Args:
        recording: with the operations.
        kept_bytes: for each part, as `_kept_bytes` returns them.
    """
    kept_so_far = list(accumulate(kept_bytes))
    live_bytes = _live_bytes(recording)
    operations_with_bytes = zip(recording.operations, live_bytes, strict=True)
    return [live - kept_so_far[operation.part] for operation, live in operations_with_bytes]


def _live_bytes(recording: Recording) -> list[int]:
    """Return for each operation the bytes that are there right after it has made its outputs."""
    operation_count = len(recording.operations)
    changes = [0] * (operation_count + 1)  # the last item: what is freed behind the last operation
    for storage in recording.storages:
        if not storage.is_counted:
            continue
        changes[storage.made] += storage.storage_bytes
        if storage.freed is not None:
            changes[storage.freed] -= storage.storage_bytes
    return list(accumulate(changes[:operation_count]))


def _modules_by_part(model: nn.Module, recording: Recording) -> list[list[CardModule]]:
    """Return for each part the modules with trainable tensors that it uses first, in the order of first use."""
    trained = {name: tensor for name, tensor in model.named_parameters() if tensor.requires_grad}
    modules_by_part: list[list[CardModule]] = [[] for _ in recording.parts]
    for module_name, part in _first_part_by_module(recording).items():
        module = model.get_submodule(module_name)
        full_names = [name for name, _ in module.named_parameters(prefix=module_name, recurse=False)]
        # A tensor that two modules share has one name in the whole model, that of its first module.
        tensors = {name: trained[name] for name in full_names if name in trained}
        if tensors:
            modules_by_part[part].append(_card_module(module_name, module, tensors, recording))
    return modules_by_part


def _first_part_by_module(recording: Recording) -> dict[str, int]:
    """Name of a module -> the index of the part that first uses one of its parameters; in the order of first use."""
    part_by_module: dict[str, int] = {}
    for parameter_name, part in recording.parameter_uses.items():
        module_name = parameter_name.rpartition(".")[0]
        part_by_module.setdefault(module_name, part)
    return part_by_module


def _card_module(
    module_name: str, module: nn.Module, tensors: Mapping[str, nn.Parameter], recording: Recording
) -> CardModule:
    """Return a module as the card has it; `tensors` are its trainable ones by their names in the model."""
    cast_tensors = [tensor for name, tensor in tensors.items() if name in recording.cast_parameters]
    return CardModule(
        name=module_name,
        shapes=tuple(tuple(tensor.shape) for tensor in tensors.values()),
        is_cast=isinstance(module, _CAST_MODULES),
        cast_elements=sum(tensor.numel() for tensor in cast_tensors),
    )


def _part_flops(pair: TracePair, part: int) -> PerImage:
    """Return the FLOPs of the forward of the part with this index."""
    few, many = (_sum_of_flops(_forward_operations(recording, part)) for recording in pair)
    return line(few, many)


def _forward_operations(recording: Recording, part: int) -> Iterator[TracedOperation]:
    """Yield the operations of a part's forward."""
    for operation in recording.operations:
        if operation.part == part and not operation.is_backward:
            yield operation


def _flops_by_kind(pair: TracePair, *, is_backward: bool) -> dict[str, PerImage]:
    """Kind of operation -> FLOPs of forward, or of backward without what is computed again."""
    few, many = (_flop_sums_by_kind(recording, is_backward=is_backward) for recording in pair)
    return {kind: line(few[kind], many[kind]) for kind in few}


def _flop_sums_by_kind(recording: Recording, *, is_backward: bool) -> dict[str, int]:
    """The same for one recording."""
    sums: dict[str, int] = {}
    for operation in recording.operations:
        if operation.is_backward != is_backward or operation.is_recomputed:
            continue
        if operation.flops is not None:
            kind = operation.flops.kind
            sums[kind] = sums.get(kind, 0) + operation.flops.flops
    return sums


def _recomputed_flops(pair: TracePair) -> PerImage:
    """Return the FLOPs that checkpointing computes again in backward."""
    few, many = (_sum_of_flops(_recomputed_operations(recording)) for recording in pair)
    return line(few, many)


def _recomputed_operations(recording: Recording) -> Iterator[TracedOperation]:
    return (operation for operation in recording.operations if operation.is_recomputed)


def _sum_of_flops(operations: Iterable[TracedOperation]) -> int:
    return sum(operation.flops.flops for operation in operations if operation.flops is not None)
