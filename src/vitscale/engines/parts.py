"""A model part by part, and the bytes that an engine holds around the parts.

`Parts` (of `engines.states`) are bytes by their purpose, such as "weights"; a `Part` is a piece of a model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from vitscale.engines.states import Parts, RankStates
from vitscale.trial.model_counts import Module
from vitscale.trial.trial import Trial


class Part(NamedTuple):
    """One piece of a model; bytes of a micro-batch.

    Where sizes decide which moment is widest, every moment that can be widest is listed: each is a straight line in
    the number of images, and their maximum is not.
    """

    kept: int = 0
    """Kept for backward."""
    forward: tuple[int, ...] = (0,)
    """Held by its forward beside `kept`, at each moment that can be the widest."""
    backward: tuple[int, ...] = (0,)
    """Gradients passed on, and those that wait, at each moment of its backward that can be the widest; what is kept is
    there too."""
    modules: tuple[Module, ...] = ()
    """Its modules in the order of forward."""
    copied_elements: int | None = None
    """Elements of weights that autocast copies, as a traced model has them; None: those of all products."""
    block: int = 0
    """The number of the wrapped block that holds it, from 1 on; outside blocks 0 before them and -1 behind them."""
    output_gradient: int = 0
    """The gradient of its output, with which its backward begins; 0 where a moment of `backward` is always higher."""

    @property
    def elements(self) -> int:
        """Elements of all its tensors."""
        return sum(self.tensors)

    def cast_bytes(self, *, linear: bool) -> int:
        """Return the bytes of the 16-bit copies that autocast makes of its weights; `linear`: of linear layers too."""
        if linear and self.copied_elements is not None:
            return 2 * self.copied_elements
        cast = [module for module in self.modules if module.macs > 0]
        if not linear:
            cast = [module for module in cast if _is_convolution(module)]
        return 2 * sum(module.elements for module in cast)

    @property
    def tensors(self) -> tuple[int, ...]:
        """Elements of each tensor, in the order of forward."""
        return _tensor_elements(self.modules)


@lru_cache(maxsize=1024)
def _tensor_elements(modules: tuple[Module, ...]) -> tuple[int, ...]:
    elements: list[int] = []
    for module in modules:
        # A module lists its tensors in the order in which backward makes their gradients.
        elements += [math.prod(shape) for shape in reversed(module.gradients)]
    return tuple(elements)


def _is_convolution(module: Module) -> bool:
    return len(module.tensors[0]) == 4


class AtMoment(NamedTuple):
    """Bytes at a moment of backward beside those at which parts are widest."""

    part: int
    """Number of the part whose activations, and those of all parts before it, are there."""
    released_share: float
    """The share of the part's activations that is gone."""
    parts: Parts
    is_bucket_full: bool = False
    """Whether a full bucket is exchanged amid the part's backward; else its backward has not begun."""


class Around(NamedTuple):
    """Bytes beside `RankStates.steady`, activations and what backward passes on."""

    forward: Sequence[Parts]
    """In each part's forward."""
    backward: Sequence[Parts]
    """In each part's backward, where it is widest: gradients included."""
    between: Sequence[AtMoment]
    """At other moments of backward."""
    exchange: Parts
    """When backward is over."""


class PartGathers(NamedTuple):
    """Weights that are gathered at each part."""

    forward: Sequence[Parts]
    backward: Sequence[Parts]


class InTurn(NamedTuple):
    """A pipeline stage in its turn: while a micro-batch goes through it. At the end of the step, the whole rank."""

    stage: int
    """Number of the stage among the rank's own."""
    moments: tuple[str, ...]
    """Names of the moments of this turn: "end of forward", "backward", "exchange", "step"."""
    step: Trial
    """The micro-batch as a step of its own; as the second of two where another's backward came before."""
    states: RankStates
    """Bytes of the stage in its wrapper, and those that stay on the rank."""
    beside: Parts
    """Bytes of other micro-batches and other stages."""
    whole: bool = False
    """Whether the stage's weights, where they are sharded, are all gathered when the turn begins."""
