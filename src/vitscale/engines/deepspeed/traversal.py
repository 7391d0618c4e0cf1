"""The all-gathers of ZeRO-3 on its way through forward and backward, as DeepSpeed's hooks do it.

A visit is one call of these hooks, at one module; a step is the number of a visit. A use is a visit that needs a
tensor. A gather is one all-gather of some tensors. Fetching ahead walks along all uses in their order, and passes each
of them once: what it passes it gathers if it is not there.

The messages (`weight_fetches`) decide by their number and their size how long a step takes. The weights that are there
(`gathered_moments`) decide what it takes of memory, unless all of them may stay (`states.part_gathers`).
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


class GatheredMoment(NamedTuple):
    """Large weights on a rank at one moment of the visit of a module, in elements."""

    in_forward: bool
    module: int
    """The module, in the order of forward."""
    copied: int
    """Elements in tensors of their own, whose buffers are gone."""
    buffered: int
    """Elements in the buffers in which weights arrive, and out of which they are copied."""
    started: int = 0
    """Buffered elements whose all-gather is started at this moment."""
    copying: int = 0
    """Buffered elements that lie in tensors of their own too, because they are copied at this moment."""


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
def weight_fetches(modules: tuple[PlacedModule, ...], settings: ZeroSettings, checkpointing: bool) -> tuple[Fetch, ...]:
    """Return the all-gathers of a micro-step, without those of small weights, which stay gathered.

    It goes through forward and backward as runtime/zero/partitioned_param_coordinator.py of DeepSpeed 0.19 does.

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
    return coordinator.fetches()


@lru_cache(maxsize=1024)
def gathered_moments(
    modules: tuple[PlacedModule, ...], settings: ZeroSettings, checkpointing: bool
) -> tuple[GatheredMoment, ...]:
    """Return what is gathered of large weights in a micro-step, in order of time: several moments for each visit.

    The last one in forward is when forward is over, and the loss is computed.

    Weights lie in the buffer of their all-gather until the first module that needs any of them waits for it, and are
    copied out of it then (`AllGatherCoalescedHandle` in runtime/zero/partition_parameters.py of DeepSpeed 0.19).

    Args:
        modules: those of the model, in the order of forward.
        settings: ZeRO's settings.
        checkpointing: whether backward computes each block again.
    """
    coordinator = _Coordinator(modules, settings, _visits(modules, checkpointing))
    coordinator.run()
    return tuple(coordinator.moments)


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

    A tensor is gathered or not (`_gathered`). At each step `run` gathers what the step's module lacks, passes the
    module's uses, fetches ahead, and releases the module if it is not used again soon. `fetches` reads the gathers
    (`_gathers`) that `run` has noted.
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
        self._gathered: set[TensorKey] = set()
        """The tensors that are gathered now."""
        self._live_elements = 0
        """Elements of the tensors that are gathered now."""
        self._gathers: list[_Gather] = []
        self._arriving: list[_Gather] = []
        """The gathers that no module has waited for."""
        self._buffered_elements = 0
        """Elements of the gathers that no module has waited for."""
        self.moments: list[GatheredMoment] = []

    def run(self) -> None:
        """Go through all visits, gathering and releasing."""
        elements_before = [0, *accumulate(map(self._elements_used_at, self._visits))]
        """Elements that are used in all steps before each step."""
        for step, visit in enumerate(self._visits):
            tensors = self._tensors[visit.module] if visit.uses_weights else []
            self._gather(step, [tensor for tensor in tensors if self._is_missing(tensor)])
            self._wait_for(step, tensors)
            self._pass_uses(step, tensors)
            self._prefetch(step)
            self._note_moment(step)
            next_step = self._next_step_with(visit.module, after=step)
            is_reused_soon = False
            if next_step is not None:
                elements_until_reuse = elements_before[next_step] - elements_before[step + 1]
                is_reused_soon = elements_until_reuse < self._settings.max_reuse
            if not is_reused_soon and not visit.torch_stops:
                self._release(step, tensors)
            is_forward_over = step + 1 == self._forward_steps
            if is_forward_over:
                self._note_moment(step)

    def _elements_used_at(self, visit: _Visit) -> int:
        """Return the elements of all tensors that a visit uses."""
        if not visit.uses_weights:
            return 0
        return sum(self._elements[tensor] for tensor in self._tensors[visit.module])

    def _is_missing(self, tensor: TensorKey) -> bool:
        """Whether a tensor must be gathered before it is used; small ones are never released."""
        return self._elements[tensor] > self._settings.persistence_threshold and tensor not in self._gathered

    def _gather(self, step: int, tensors: list[TensorKey]) -> None:
        """Gather these tensors at once."""
        if not tensors:
            return
        for tensor in tensors:
            self._gathered.add(tensor)
            self._live_elements += self._elements[tensor]
        gather = _Gather(step, tuple(tensors))
        self._gathers.append(gather)
        self._arriving.append(gather)
        self._buffered_elements += self._elements_of(gather)
        self._note_moment(step, started=self._elements_of(gather))

    def _wait_for(self, step: int, tensors: list[TensorKey]) -> None:
        """Copy all tensors of the gathers that bring any of these out of their buffers, which are freed behind that."""
        needed = [gather for gather in self._arriving if not set(tensors).isdisjoint(gather.tensors)]
        for gather in needed:
            elements = self._elements_of(gather)
            self._note_moment(step, copying=elements)
            self._arriving.remove(gather)
            self._buffered_elements -= elements

    def _elements_of(self, gather: _Gather) -> int:
        return sum(self._elements[tensor] for tensor in gather.tensors)

    def _note_moment(self, step: int, *, started: int = 0, copying: int = 0) -> None:
        """Note what is there, at a visit of this number; `started` and `copying` as in `GatheredMoment`."""
        moment = GatheredMoment(
            in_forward=step < self._forward_steps,
            module=self._visits[step].module,
            copied=self._live_elements - self._buffered_elements,
            buffered=self._buffered_elements,
            started=started,
            copying=copying,
        )
        self.moments.append(moment)

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
            if tensor in self._gathered and self._passed_use[tensor] <= step + 1:
                self._gathered.remove(tensor)
                self._live_elements -= self._elements[tensor]

    def _next_step_with(self, module: int, *, after: int) -> int | None:
        """Return the next step that uses the weights of a module; None where no later one does."""
        return next((step for step in self._steps_of_module[module] if step > after), None)

    def fetches(self) -> tuple[Fetch, ...]:
        """Return all gathers, each with the first module that needs any of its tensors."""
        fetches = []
        for gather in self._gathers:
            first_use = min(self._first_use(tensor, gather.step) for tensor in gather.tensors)
            fetches.append(self._fetch(gather, first_use))
        return tuple(fetches)

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
