"""Records the operations of a forward and a backward on meta tensors, and when each storage is made and freed.

Views share a storage, so memory is counted by storage. A storage is known by its address (`_cdata`) for as long as it
lives; a weak reference notes when it is freed, before its address can come back.

A model runs through its parts one after the other (`begin_part`). Operations of backward belong to the part in whose
forward their autograd node was made: autograd numbers its nodes, and each part has a range of numbers.

Operations, storages and parts are numbered from 0 on, by their position in the lists of the `Recording`.
"""

from __future__ import annotations

import bisect
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from vitscale.models.tracing.flops import OperationFlops, operation_flops


@dataclass
class TracedPart:
    """One stretch of forward: a block, or what lies before, between or behind blocks."""

    name: str
    block: int
    """The number of the repeated block, from 1 on; 0 outside blocks."""
    first_node: int
    """The autograd number of the first node that its forward makes."""


class TracedOperation(NamedTuple):
    """One operation, in the order of time."""

    name: str
    part: int
    is_backward: bool
    is_recomputed: bool
    """Whether checkpointing computes it again, in backward."""
    flops: OperationFlops | None


@dataclass
class Storage:
    """Memory that an operation made."""

    made: int
    """Index of the operation that made it."""
    storage_bytes: int
    part: int
    is_backward: bool
    freed: int | None = None
    """Index of the first operation that began after it was freed; None: it outlives backward."""
    is_counted: bool = True
    """False for gradients of parameters and autocast's copies of weights, which depend on the engine."""

    def is_live_at(self, operation: int) -> bool:
        """Whether it is there right after the operation with this index has made its outputs."""
        is_freed = self.freed is not None and self.freed <= operation
        return self.made <= operation and not is_freed


@dataclass
class Recording:
    """All that one forward and backward did."""

    parts: list[TracedPart] = field(default_factory=list)
    operations: list[TracedOperation] = field(default_factory=list)
    storages: list[Storage] = field(default_factory=list)
    backward_begin: int = 0
    """Index of the first operation of backward."""
    parameter_uses: dict[str, int] = field(default_factory=dict)
    """Name of a parameter -> the part that used it first; in the order of first use."""
    cast_parameters: set[str] = field(default_factory=set)
    """Names of the parameters of which autocast made a copy."""
    largest_batch_norm_bytes: dict[int, int] = field(default_factory=dict)
    """Index of a part -> bytes in fp32 of the largest input of its batch norms; parts without any are left out."""
    batch_norm_channels: list[int] = field(default_factory=list)
    """Channels of each batch norm, in the order of forward."""
    logits_bytes: int = 0


class Recorder(TorchDispatchMode):
    """Records while it is entered, from the first part's forward to the end of backward.

    The caller says what the model does: `begin_part` before each part of forward, then `begin_backward`. `close` ends
    the recording; storages that live on after it are not recorded as freed.
    """

    def __init__(self, model: nn.Module, inputs: Iterable[Tensor]) -> None:
        """The storages of parameters, buffers and `inputs` are there before, and not recorded."""
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no types
        self.recording = Recording()
        self.attempted: str | None = None
        """The operation that has begun and not returned; after an error the one that raised it."""
        self._parameter_names = {_address(parameter): name for name, parameter in model.named_parameters()}
        """Address of a parameter's storage -> its name."""
        existing = [*model.parameters(), *model.buffers(), *inputs]
        self._existing_storages = [tensor.untyped_storage() for tensor in existing]
        """Held, so that none of their addresses comes back where a model replaces a buffer."""
        self._existing_addresses = {*map(_address, existing)}
        self._storage_numbers: dict[int, int] = {}
        """Address of a living storage -> its number."""
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        """Number of a living storage -> the reference that notes when it is freed."""
        self.is_backward = False
        """Whether backward has begun."""
        self._is_recomputing = False
        self._part = -1
        """Index of the part that the model runs through; in backward the one of the last node that was run."""

    def begin_part(self, name: str, block: int) -> None:
        """Begin the forward of another part."""
        self.recording.parts.append(TracedPart(name, block, first_node=torch._C._autograd._get_sequence_nr()))
        self._part = len(self.recording.parts) - 1

    def begin_backward(self) -> None:
        """Begin the backward, in the last part."""
        self.is_backward = True
        self.recording.backward_begin = len(self.recording.operations)

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """The context in which checkpointing computes a block again, in backward."""
        self._is_recomputing = True
        try:
            yield
        finally:
            self._is_recomputing = False

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        """Leave the storages of these tensors out of all sums, from when they were made."""
        for tensor in tensors:
            number = self._storage_numbers.get(_address(tensor))
            if number is not None:
                self.recording.storages[number].is_counted = False

    def note_weight_copy(self, weight: Tensor, copy: Tensor) -> None:
        """Note that autocast has cast a weight."""
        self.leave_out([copy])
        name = self._parameter_names.get(_address(weight))
        if name is not None:
            self.recording.cast_parameters.add(name)

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call an operation and record it; torch calls this for each one while the recorder is entered."""
        del types
        name = func.overloadpacket.__name__
        self.attempted = name
        part = self._current_part()
        options = dict(kwargs or {})
        output = func(*args, **options)
        if not self.is_backward:
            self._note_parameter_uses([*args, *options.values()], part)
        flops = operation_flops(name, args, output)
        self.recording.operations.append(TracedOperation(name, part, self.is_backward, self._is_recomputing, flops))
        for tensor in _tensors(output):
            self._note_storage(tensor, part)
        self.attempted = None
        return output

    def _current_part(self) -> int:
        """Return the index of the part that the operation which now runs belongs to.

        In backward it is the part in whose forward the running node was made. Two kinds of operation have no such node,
        and belong to the part of the operation before: gradients that meet are added outside of nodes, and the nodes
        of parameters have the largest number there is.
        """
        if not self.is_backward:
            return self._part
        node: Any = torch._C._current_autograd_node()  # None outside of nodes, which torch's stubs leave out
        if node is None:
            return self._part
        node_number = node._sequence_nr()
        if node_number < torch._C._autograd._get_sequence_nr():
            self._part = self._part_of_node(node_number)
        return self._part

    def _part_of_node(self, node_number: int) -> int:
        """Return the index of the part whose forward made an autograd node; 0 for nodes that were made before.

        Example: parts whose first nodes are 10, 14 and 20 have the nodes 10 to 13, 14 to 19, and 20 and above.
        """
        first_nodes = [part.first_node for part in self.recording.parts]
        begun_parts = bisect.bisect_right(first_nodes, node_number)
        return max(0, begun_parts - 1)

    def _note_parameter_uses(self, arguments: Any, part: int) -> None:
        """Note the first part that uses each parameter among an operation's arguments."""
        for tensor in _tensors(arguments):
            name = self._parameter_names.get(_address(tensor))
            if name is not None:
                self.recording.parameter_uses.setdefault(name, part)

    def _note_storage(self, tensor: Tensor, part: int) -> None:
        """Record the storage of an output of the last operation, unless it was there before."""
        address = _address(tensor)
        is_there_already = address in self._storage_numbers or address in self._existing_addresses
        if is_there_already or tensor.device.type != "meta":
            return
        storage = tensor.untyped_storage()
        number = len(self.recording.storages)
        last_operation = len(self.recording.operations) - 1
        self.recording.storages.append(
            Storage(made=last_operation, storage_bytes=storage.nbytes(), part=part, is_backward=self.is_backward)
        )
        self._storage_numbers[address] = number

        def note_free(reference: object) -> None:
            del reference
            self.recording.storages[number].freed = len(self.recording.operations)
            del self._storage_numbers[address]
            del self._references[number]

        self._references[number] = weakref.ref(storage, note_free)

    def close(self) -> None:
        """Stop noting which storages are freed."""
        self._references.clear()


def _address(tensor: Tensor) -> int:
    """Return the address of a tensor's storage, which its views share."""
    return int(tensor.untyped_storage()._cdata)


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of an operation's arguments or outputs, those in lists included."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
