"""Makes a card of two recordings of the same model: what grows with the images is a line through both."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import NamedTuple

from torch import nn

from vitscale.models.tracing.errors import TraceError
from vitscale.models.tracing.lines import line, upper_envelope
from vitscale.models.tracing.passes import AFTER_BLOCKS, BETWEEN_BLOCKS, LOSS
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
    for few, many in zip(pair.few.operations, pair.many.operations, strict=False):
        if (few.name, few.part, few.is_backward) != (many.name, many.part, many.is_backward):
            return f"{few.name} at the smaller one and {many.name} at the larger one"
    counts = [len(recording.operations) for recording in pair]
    return None if counts[0] == counts[1] else f"{counts[0]} operations and {counts[1]}"


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
    memory = _MemoryLines.of(pair)
    modules = _modules_by_part(model, pair.few)
    parts_with_storages = {storage.part for storage in pair.few.storages}
    last_block = _last_block(pair.few)
    for index, part in enumerate(pair.few.parts):
        is_empty = not modules[index] and index not in parts_with_storages
        if part.name == BETWEEN_BLOCKS and is_empty:
            continue
        is_behind = part.name in (BETWEEN_BLOCKS, LOSS) and index > last_block
        yield CardPart(
            name=AFTER_BLOCKS if is_behind and part.name == BETWEEN_BLOCKS else part.name,
            block=-1 if is_behind else part.block,
            modules=tuple(modules[index]),
            kept=memory.kept[index],
            forward=upper_envelope(memory.forward[index]) or (PerImage(),),
            backward=upper_envelope(memory.backward[index]) or (PerImage(),),
            forward_flops=_part_flops(pair, index),
        )


def _last_block(recording: Recording) -> int:
    """Return the index of the last part that is a block; -1 where none is."""
    blocks = [index for index, part in enumerate(recording.parts) if part.block > 0]
    return max(blocks, default=-1)


class _MemoryLines(NamedTuple):
    """Bytes by part; in lists with one item for each part.

    At any moment of a part's forward or backward, the bytes that are there are what this part and those before it keep,
    and the part's line beside it. A line may be negative: in backward the output of a block is given back before the
    block's own backward begins, though it counts as kept by the block that has made it.
    """

    kept: list[PerImage]
    forward: list[list[PerImage]]
    """For each operation of the part's forward the bytes beside what is kept up to and with this part."""
    backward: list[list[PerImage]]

    @classmethod
    def of(cls, pair: TracePair) -> _MemoryLines:
        """Measure both recordings."""
        kept_few, kept_many = (_kept_bytes(recording) for recording in pair)
        forward: list[list[PerImage]] = [[] for _ in pair.few.parts]
        backward: list[list[PerImage]] = [[] for _ in pair.few.parts]
        so_far_few, so_far_many = (list(accumulate(kept)) for kept in (kept_few, kept_many))
        live_few, live_many = (_live_bytes(recording) for recording in pair)
        for operation, few, many in zip(pair.few.operations, live_few, live_many, strict=True):
            part = operation.part
            lines = backward if operation.is_backward else forward
            lines[part].append(line(few - so_far_few[part], many - so_far_many[part]))
        kept = [line(few, many) for few, many in zip(kept_few, kept_many, strict=True)]
        return cls(kept, forward, backward)


def _kept_bytes(recording: Recording) -> list[int]:
    """Return for each part the bytes that its forward made, and that are there when backward begins."""
    kept = [0] * len(recording.parts)
    for storage in recording.storages:
        is_there = not storage.is_backward and storage.is_live_at(recording.backward_begin)
        if storage.is_counted and is_there:
            kept[storage.part] += storage.storage_bytes
    return kept


def _live_bytes(recording: Recording) -> list[int]:
    """Return for each operation the bytes that are there right after it has made its outputs."""
    changes = [0] * (len(recording.operations) + 1)
    for storage in recording.storages:
        if storage.is_counted:
            changes[storage.made] += storage.storage_bytes
            if storage.freed is not None:
                changes[storage.freed] -= storage.storage_bytes
    return list(accumulate(changes[:-1]))


def _modules_by_part(model: nn.Module, recording: Recording) -> list[list[CardModule]]:
    """Return for each part the modules with trainable tensors that it uses first, in the order of first use."""
    modules: list[list[CardModule]] = [[] for _ in recording.parts]
    part_of_module: dict[str, int] = {}
    for parameter_name, part in recording.parameter_uses.items():
        part_of_module.setdefault(parameter_name.rpartition(".")[0], part)
    trained = {name: tensor for name, tensor in model.named_parameters() if tensor.requires_grad}
    for module_name, part in part_of_module.items():
        module = model.get_submodule(module_name)
        full_names = [name for name, _ in module.named_parameters(prefix=module_name, recurse=False)]
        # A tensor that two modules share has one name in the whole model, that of its first module.
        names = [name for name in full_names if name in trained]
        if names:
            card_module = CardModule(
                name=module_name,
                shapes=tuple(tuple(trained[name].shape) for name in names),
                is_cast=isinstance(module, _CAST_MODULES),
                cast_elements=sum(trained[name].numel() for name in names if name in recording.cast_parameters),
            )
            modules[part].append(card_module)
    return modules


def _part_flops(pair: TracePair, part: int) -> PerImage:
    """Return the FLOPs of a part's forward."""
    few, many = (_sum_of_flops(_forward_of(recording, part)) for recording in pair)
    return line(few, many)


def _forward_of(recording: Recording, part: int) -> Iterator[TracedOperation]:
    for operation in recording.operations:
        if operation.part == part and not operation.is_backward:
            yield operation


def _flops_by_kind(pair: TracePair, *, is_backward: bool) -> dict[str, PerImage]:
    """Kind of operation -> FLOPs of forward, or of backward without what is computed again."""
    few, many = (_totals_by_kind(recording, is_backward=is_backward) for recording in pair)
    return {kind: line(few[kind], many[kind]) for kind in few}


def _totals_by_kind(recording: Recording, *, is_backward: bool) -> dict[str, int]:
    totals: dict[str, int] = {}
    for operation in recording.operations:
        is_meant = operation.is_backward == is_backward and not operation.is_recomputed
        if is_meant and operation.flops is not None:
            totals[operation.flops.kind] = totals.get(operation.flops.kind, 0) + operation.flops.flops
    return totals


def _recomputed_flops(pair: TracePair) -> PerImage:
    """Return the FLOPs that checkpointing computes again in backward."""
    few, many = (_sum_of_flops(_recomputed(recording)) for recording in pair)
    return line(few, many)


def _recomputed(recording: Recording) -> Iterator[TracedOperation]:
    return (operation for operation in recording.operations if operation.is_recomputed)


def _sum_of_flops(operations: Iterable[TracedOperation]) -> int:
    return sum(operation.flops.flops for operation in operations if operation.flops is not None)
