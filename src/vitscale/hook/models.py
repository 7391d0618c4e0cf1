"""The line of the trained model, and DDP's times once the model is known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .exchange import DdpTimes, ddp_times, find_ddp
from .facts import model_line
from .lines import HookedModelLine
from .roots import TimedCall
from .steps import BackwardTimes


class ModelDescriber:
    """Describes a root when it is new, and again when its autocast has become known."""

    def __init__(self) -> None:
        self._described: TimedCall | None = None
        self._autocast: str | None = None
        self._ddp_times: DdpTimes | None = None

    def describe(self, root: TimedCall, roots: Sequence[Any], autocast: str | None) -> HookedModelLine | None:
        """The root's line; None if nothing is new.

        Args:
            root: the first one that the program has called.
            roots: modules of all roots, this one included.
            autocast: dtype inside its forward, "none", or None while that is not known.
        """
        if root is self._described and autocast == self._autocast:
            return None
        if root is not self._described:
            ddp = find_ddp(roots)
            self._ddp_times = None if ddp is None else ddp_times(ddp)
        self._described = root
        self._autocast = autocast
        return model_line(root.module, compiled_in_place=root.is_compiled, autocast=autocast)

    def backward_times(self) -> BackwardTimes | None:
        """DDP's times of the last backward; None where it has none."""
        return None if self._ddp_times is None else self._ddp_times.read()
