"""Sees autocast's dtype inside a model's forward: Accelerate turns it on there, out of the root's sight."""

from __future__ import annotations

import weakref
from typing import Any

from .facts import autocast_dtype, first_leaf

_CALL = "_compiled_call_impl"


class AutocastProbe:
    """Stands in for one leaf of the model until that is called, and takes autocast's dtype then."""

    def __init__(self) -> None:
        self.dtype: str | None = None
        """Such as "bfloat16"; "none" without autocast; None as long as no leaf was called."""

    def place_in(self, root: Any) -> None:
        """Look at the next call of the root's first leaf; not in a model whose calls would change by it.

        That is a compiled one, and DataParallel, whose replicas copy what stands in a module's place: each of them
        would call the leaf of the first device.
        """
        if any(is_compiled(module) or type(module).__name__ == "DataParallel" for module in root.modules()):
            return
        leaf = first_leaf(root)
        if leaf is not None and leaf is not root:
            leaf.__dict__[_CALL] = _LookingCall(self, leaf)


class _LookingCall:
    """One call of a leaf, which then is called as before."""

    def __init__(self, probe: AutocastProbe, leaf: Any) -> None:
        self._probe = probe
        self._leaf = weakref.ref(leaf)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaf: Any = self._leaf()
        leaf.__dict__.pop(_CALL, None)
        try:
            self._probe.dtype = autocast_dtype(next(leaf.parameters()).device.type)
        except Exception:
            self._probe.dtype = None
        return leaf(*args, **kwargs)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def is_compiled(module: Any) -> bool:
    """Whether torch.compile works on this module itself; a timed call in its place is none of torch.compile's."""
    if type(module).__name__ == "OptimizedModule":
        return True
    call = module.__dict__.get(_CALL)
    return call is not None and getattr(call, "is_compiled", True)
