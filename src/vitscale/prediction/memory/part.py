"""One piece of a model whose blocks are not alike."""

from __future__ import annotations

import math
from typing import NamedTuple

from vitscale.model_counts import Module


class Part(NamedTuple):
    """One piece of a model; bytes of a micro-batch.

    Where it depends on sizes which moment is widest, all that can be are named: each is a straight line in the number
    of images, and their maximum is not.
    """

    kept: int = 0
    """For backward."""
    forward: tuple[int, ...] = (0,)
    """Beside that, where its forward can be widest."""
    backward: tuple[int, ...] = (0,)
    """Gradients passed on, and those that wait, where its backward can be widest; what is kept is there too."""
    modules: tuple[Module, ...] = ()
    """In the order of forward."""
    block: int = 0
    """The number of the wrapped block that holds it, from 1 on; less than 1: none, before them (0) or behind (-1)."""

    @property
    def elements(self) -> int:
        """Of all its tensors."""
        return sum(module.elements for module in self.modules)

    @property
    def tensors(self) -> list[int]:
        """Elements of each tensor, in the order of forward."""
        return [math.prod(shape) for module in self.modules for shape in reversed(module.gradients)]
