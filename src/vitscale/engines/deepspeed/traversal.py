"""The weights that ZeRO-3 gathers and releases on its way through forward and backward, as DeepSpeed's hooks do it.

A visit is one call of these hooks, at one module; a step is the number of a visit. A use is a visit that needs a
tensor. A gather is one all-gather of some tensors. Fetching ahead walks along all uses in their order, and passes each
of them once: what it passes it gathers if it is not there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from vitscale.engines.deepspeed.settings import ZeroSettings
from vitscale.trial.model_cost import ParameterShapes
from vitscale.trial.model_counts import Module


class PlacedModule(NamedTuple):
    """A module and the block that holds it."""

    module: Module
    block: int
    """The number of its wrapped block, from 1 on; outside blocks 0 before them and -1 behind them."""


class TensorKey(NamedTuple):
    """One tensor of a model: its module, in the order of forward, and its position among the module's tensors."""

    module: int
    position: int


class Fetch(NamedTuple):
    """An all-gather of ZeRO-3's weights, or two where some of them travel in 16 bits and some in 32."""

    in_forward: bool
    at: int
    """The module that asks for it, for itself or for modules that come later."""
    needed_in_forward: bool
    needed: int
    """The module that waits for it first."""
    tensors: tuple[TensorKey, ...]


class Traversal(NamedTuple):
    """The gathers of ZeRO-3 in a micro-step; numbers are elements, without small weights, which stay gathered."""

    fetches: tuple[Fetch, ...]
    forward: tuple[int, ...]
    """The most that is gathered or on its way in each module's forward, buffers included."""
    backward: tuple[int, ...]
    """The same in each module's backward."""
    coming: tuple[int, ...]
    """The most that each module asks for ahead in forward, of which gloo has a copy while it comes."""
    gathered_twice: int
    """Elements that are released after they were used, and gathered again."""


@lru_cache(maxsize=256)
def modules_in_forward(shapes: ParameterShapes) -> tuple[PlacedModule, ...]:
    """Return a model's modules in the order of forward."""
    modules: list[PlacedModule] = []
    blocks = 0
    for block in shapes.each():
        if block.wrapped:
            blocks += 1
            number = blocks
        else:
            number = -1 if blocks else 0
        modules += [PlacedModule(module, number) for module in block.in_forward]
    return tuple(modules)


@lru_cache(maxsize=1024)
def traversal(
    modules: tuple[PlacedModule, ...], settings: ZeroSettings, checkpointing: bool, *, has_buffers: bool = True
) -> Traversal:
    """Go through forward and backward as runtime/zero/partitioned_param_coordinator.py of DeepSpeed 0.19 does.

    At each module `fetch_sub_module` gathers what the module lacks, and then `stage3_prefetch_bucket_size` elements of
    what comes next, as long as fewer than `stage3_max_live_parameters` are gathered. The module is released
    (`__params_to_release`) unless fewer than `stage3_max_reuse_distance` elements are gone through until it is used
    again, on the way through the rest of forward and back; or unless that use was passed over by fetching ahead.
    With large buckets that saves all modules but the first few, because it is done at every module, those without
    weights included: there is one around each block, each attention and each MLP, here before a block and behind a
    norm. Of a block that is computed again the last module is still there when its backward begins, because torch
    stops there.

    Args:
        modules: those of the model, in the order of forward.
        settings: ZeRO's settings.
        checkpointing: whether backward computes each block again.
        has_buffers: whether weights arrive in a buffer, out of which they are copied.
    """
    coordinator = _Coordinator(modules, settings, _visits(modules, checkpointing))
    coordinator.run()
    return coordinator.summary(has_buffers=has_buffers)


class _Visit(NamedTuple):
    """A call of DeepSpeed's hooks at one module, in forward or backward."""

    module: int
    """Its number in the order of forward."""
    uses_weights: bool
    """False: it is a module without weights beside the one of this number."""
    torch_stops: bool = False
    """Whether recomputing a block ends here, so that the module is not released."""


def _visits(modules: Sequence[PlacedModule], checkpointing: bool) -> list[_Visit]:
    """Return the visits of forward and backward, modules without weights included."""
    blocks = _forward_visits(modules)
    visits: list[_Visit] = []
    for block in blocks:
        visits += block.visits
    for block in reversed(blocks):
        if checkpointing and block.number > 0:
            *earlier, last = block.visits
            visits += [*earlier, last._replace(torch_stops=True)]
        visits += reversed(block.visits)
    return visits


class _BlockVisits(NamedTuple):
    """The visits of one block in forward, or of modules in a row that lie in no block."""

    number: int
    """The number of the block; outside blocks as in `PlacedModule.block`."""
    visits: list[_Visit]


def _forward_visits(modules: Sequence[PlacedModule]) -> list[_BlockVisits]:
    """Return the visits of a forward, block by block."""
    blocks: list[_BlockVisits] = []
    for module_number, (module, block_number) in enumerate(modules):
        if not blocks or blocks[-1].number != block_number:
            blocks.append(_BlockVisits(block_number, visits=[_Visit(module_number, uses_weights=False)]))
        visits = blocks[-1].visits
        visits.append(_Visit(module_number, uses_weights=True))
        is_norm = all(len(shape) == 1 for shape in module.tensors)
        if is_norm:
            visits.append(_Visit(module_number, uses_weights=False))
    return blocks


class _Use(NamedTuple):
    """A tensor is needed at a step."""

    tensor: TensorKey
    step: int


class _Gather(NamedTuple):
    """Tensors that are gathered together at a step."""

    step: int
    tensors: tuple[TensorKey, ...]


class _Coordinator:
    """DeepSpeed's `PartitionedParameterCoordinator`, for elements in place of tensors.

    A tensor is gathered or not (`_gather_by_tensor`). At each step `run` gathers what the step's module lacks, passes
    the module's uses, fetches ahead, and releases the module if it is not used again soon. `summary` reads the gathers
    (`_gathers`) and the releases (`_released`) that `run` has noted.
    """

    def __init__(self, modules: Sequence[PlacedModule], settings: ZeroSettings, visits: list[_Visit]) -> None:
        self._settings = settings
        self._visits = visits
        # Where nothing is computed again, backward has as many visits as forward.
        self._forward_steps = len(_visits(modules, checkpointing=False)) // 2
        self._tensors: list[list[TensorKey]] = []
        """The tensors of each module."""
        self._elements: dict[TensorKey, int] = {}
        """The elements of each tensor."""
        for number, (module, _) in enumerate(modules):
            keys = [TensorKey(number, position) for position in range(len(module.tensors))]
            self._tensors.append(keys)
            self._elements |= zip(keys, map(math.prod, module.tensors), strict=True)
        self._uses: list[_Use] = []
        """Every use of every tensor, in order."""
        self._steps_of_module: list[list[int]] = [[] for _ in modules]
        """The steps that use the weights of each module, in order."""
        for step, visit in enumerate(visits):
            if visit.uses_weights:
                self._uses += [_Use(tensor, step) for tensor in self._tensors[visit.module]]
                self._steps_of_module[visit.module].append(step)

        self._next_use = 0
        """Index in `_uses` of the first use that has not been passed."""
        self._passed_use: dict[TensorKey, int] = {}
        """Step of each tensor's latest use that has been passed."""
        self._gather_by_tensor: dict[TensorKey, int] = {}
        """The tensors that are gathered now, each with the number of its gather."""
        self._live_elements = 0
        """Elements of the tensors that are gathered now."""
        self._gathers: list[_Gather] = []
        self._released: dict[tuple[TensorKey, int], int] = {}
        """(Tensor, number of its gather) -> step after which it is released."""

    def run(self) -> None:
        """Go through all visits, gathering and releasing."""
        elements_before = [0, *accumulate(map(self._elements_used_at, self._visits))]
        """Elements that are used in all steps before each step."""
        for step, visit in enumerate(self._visits):
            tensors = self._tensors[visit.module] if visit.uses_weights else []
            self._gather(step, [tensor for tensor in tensors if self._is_missing(tensor)])
            self._pass_uses(step, tensors)
            self._prefetch(step)
            next_step = self._next_step_with(visit.module, after=step)
            is_reused_soon = False
            if next_step is not None:
                elements_until_reuse = elements_before[next_step] - elements_before[step + 1]
                is_reused_soon = elements_until_reuse < self._settings.max_reuse
            if not is_reused_soon and not visit.torch_stops:
                self._release(step, tensors)

    def _elements_used_at(self, visit: _Visit) -> int:
        """Return the elements of all tensors that a visit uses."""
        if not visit.uses_weights:
            return 0
        return sum(self._elements[tensor] for tensor in self._tensors[visit.module])

    def _is_missing(self, tensor: TensorKey) -> bool:
        """Whether a tensor must be gathered before it is used; small ones are never released."""
        return self._elements[tensor] > self._settings.persistence_threshold and tensor not in self._gather_by_tensor

    def _gather(self, step: int, tensors: list[TensorKey]) -> None:
        """Gather these tensors at once."""
        if not tensors:
            return
        for tensor in tensors:
            self._gather_by_tensor[tensor] = len(self._gathers)
            self._live_elements += self._elements[tensor]
        self._gathers.append(_Gather(step, tuple(tensors)))

    def _pass_uses(self, step: int, tensors: list[TensorKey]) -> None:
        """Pass as many uses as this step has, those left out that fetching ahead has passed before."""
        not_passed = [tensor for tensor in tensors if self._passed_use.get(tensor, -1) < step]
        for _ in not_passed:
            self._pass_next_use()

    def _pass_next_use(self) -> TensorKey:
        """Pass the first use that has not been passed; return its tensor."""
        use = self._uses[self._next_use]
        self._passed_use[use.tensor] = use.step
        self._next_use += 1
        return use.tensor

    def _prefetch(self, step: int) -> None:
        """Gather what the next uses lack, until the bucket or the room for gathered weights is full."""
        limit = min(self._settings.max_live - self._live_elements, self._settings.prefetch_bucket)
        elements = 0
        prefetched: dict[TensorKey, None] = {}
        while self._next_use < len(self._uses) and elements < limit:
            tensor = self._pass_next_use()
            if self._is_missing(tensor) and tensor not in prefetched:
                prefetched[tensor] = None
                elements += self._elements[tensor]
        self._gather(step, list(prefetched))

    def _release(self, step: int, tensors: list[TensorKey]) -> None:
        """Release these tensors, but those of which a later use has been passed."""
        for tensor in tensors:
            if tensor in self._gather_by_tensor and self._passed_use[tensor] <= step + 1:
                self._released[tensor, self._gather_by_tensor.pop(tensor)] = step
                self._live_elements -= self._elements[tensor]

    def _next_step_with(self, module: int, *, after: int) -> int | None:
        """Return the next step that uses the weights of a module; None where no later one does."""
        return next((step for step in self._steps_of_module[module] if step > after), None)

    def summary(self, *, has_buffers: bool) -> Traversal:
        """Return all gathers, and the most that is gathered at each module.

        Tensors of one gather lie in one buffer, which is there from the gather on until each of them has been used.
        They are copied out of it at the first use of any of them. A single tensor needs no buffer.
        """
        gathered = _Timeline(len(self._visits))
        incoming = _Timeline(len(self._visits))
        fetches = []
        end_step = len(self._visits) - 1
        for number, gather in enumerate(self._gathers):
            elements = sum(self._elements[tensor] for tensor in gather.tensors)
            first_uses = [self._first_use(tensor, gather.step) for tensor in gather.tensors]
            first_use = min(first_uses)
            has_buffer = has_buffers and len(gather.tensors) > 1
            if has_buffer:
                gathered.add(elements, first=gather.step, last=max(first_uses))
            own_memory_step = first_use if has_buffer else gather.step
            for tensor in gather.tensors:
                release_step = self._released.get((tensor, number), end_step)
                gathered.add(self._elements[tensor], first=own_memory_step, last=release_step)
            is_fetched_ahead = first_use > gather.step
            if is_fetched_ahead:
                incoming.add(elements, first=gather.step, last=gather.step)
            fetches.append(self._fetch(gather, first_use))
        forward = range(self._forward_steps)
        backward = range(self._forward_steps, len(self._visits))
        return Traversal(
            fetches=tuple(fetches),
            forward=self._peak_by_module(gathered, forward),
            backward=self._peak_by_module(gathered, backward),
            coming=self._peak_by_module(incoming, forward),
            gathered_twice=self._gathered_twice(),
        )

    def _first_use(self, tensor: TensorKey, step: int) -> int:
        """Return the first step from `step` on that uses a tensor."""
        return next(use for use in self._steps_of_module[tensor.module] if use >= step)

    def _fetch(self, gather: _Gather, first_use: int) -> Fetch:
        """Return a gather with the modules that ask and wait for it; `first_use`: the step that waits."""
        return Fetch(
            in_forward=gather.step < self._forward_steps,
            at=self._visits[gather.step].module,
            needed_in_forward=first_use < self._forward_steps,
            needed=self._visits[first_use].module,
            tensors=gather.tensors,
        )

    def _peak_by_module(self, timeline: _Timeline, steps: range) -> tuple[int, ...]:
        """Return the most elements at any of these steps, for each module."""
        elements_at_step = timeline.totals()
        peaks = [0] * len(self._steps_of_module)
        for step in steps:
            module = self._visits[step].module
            peaks[module] = max(peaks[module], elements_at_step[step])
        return tuple(peaks)

    def _gathered_twice(self) -> int:
        """Return the elements of all gathers but the first one of each tensor."""
        all_gathers_elements = 0
        gathered_tensors: set[TensorKey] = set()
        for gather in self._gathers:
            all_gathers_elements += sum(self._elements[tensor] for tensor in gather.tensors)
            gathered_tensors.update(gather.tensors)
        first_gathers_elements = sum(self._elements[tensor] for tensor in gathered_tensors)
        return all_gathers_elements - first_gathers_elements


class _Timeline:
    """Elements at each step, as the sum of spans."""

    def __init__(self, steps: int) -> None:
        self._changes = [0] * (steps + 1)

    def add(self, elements: int, first: int, last: int) -> None:
        """Add elements that are there from the first step to the last, both included."""
        self._changes[first] += elements
        self._changes[last + 1] -= elements

    def totals(self) -> list[int]:
        """Return the elements at each step."""
        return list(accumulate(self._changes))[:-1]
