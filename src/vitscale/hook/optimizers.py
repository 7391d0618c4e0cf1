"""Times the calls that end a step: torch's optimizers, and DeepSpeed's engine, which calls them inside."""

from __future__ import annotations

import functools
import weakref
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .lines import HookedOptimizerLine
from .marks import Opening

if TYPE_CHECKING:
    from .hooking import ProcessHook


class LiveOptimizers:
    """Optimizers that took part in steps, as long as the program has them."""

    def __init__(self) -> None:
        self._references: dict[int, weakref.ref[Any]] = {}
        self._new_lines: list[HookedOptimizerLine] = []

    def add(self, optimizer: Any) -> None:
        """Remember an optimizer that ended a step."""
        reference = self._references.get(id(optimizer))
        if reference is None or reference() is not optimizer:
            self._references[id(optimizer)] = weakref.ref(optimizer)
            self._new_lines.append(optimizer_line(optimizer))

    def alive(self) -> list[Any]:
        """All that the program still has."""
        optimizers = [reference() for reference in self._references.values()]
        return [optimizer for optimizer in optimizers if optimizer is not None]

    def take_new_lines(self) -> list[HookedOptimizerLine]:
        """Lines of the optimizers that were added since the last call."""
        lines = self._new_lines
        self._new_lines = []
        return lines


class OpenOptimizerCalls:
    """Optimizer calls between their pre- and post-hook; a call that raises never has the latter."""

    def __init__(self) -> None:
        self._calls: list[tuple[int, Opening | None]] = []

    def push(self, optimizer_id: int, opening: Opening | None) -> None:
        """A call has begun; `opening` is None if it lies in another one."""
        self._calls.append((optimizer_id, opening))

    def pop(self, optimizer_id: int) -> Opening | None:
        """The begin of this optimizer's call; calls inside it that never ended are dropped."""
        while self._calls:
            open_id, opening = self._calls.pop()
            if open_id == optimizer_id:
                return opening
        return None

    def clear(self) -> None:
        """Forget all calls: they raised."""
        self._calls.clear()

    def __bool__(self) -> bool:
        return bool(self._calls)


def optimizer_line(optimizer: Any) -> HookedOptimizerLine:
    """Facts of a torch optimizer."""
    groups = optimizer.param_groups
    first_group = groups[0] if groups else {}
    return HookedOptimizerLine(
        class_name=type(optimizer).__name__,
        groups=len(groups),
        fused=_flag(first_group.get("fused")),
        foreach=_flag(first_group.get("foreach")),
    )


def time_optimizers(optimizer_module: ModuleType, hook: ProcessHook) -> None:
    """Time `step` of all torch optimizers by torch's global hooks; they must return None."""
    register_before = getattr(optimizer_module, "register_optimizer_step_pre_hook", None)
    register_after = getattr(optimizer_module, "register_optimizer_step_post_hook", None)
    if register_before is None or register_after is None:
        hook.switch.notes.append(
            "this torch has no global hooks of optimizers (2.1 and later have): no step can be seen"
        )
        return

    def begin(optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if not hook.is_compiling():
            hook.enter_optimizer(optimizer)

    def end(optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if not hook.is_compiling():
            hook.leave_optimizer(optimizer)

    register_before(begin)
    register_after(end)


def time_deepspeed_engine(engine_module: ModuleType, hook: ProcessHook) -> None:
    """Time `DeepSpeedEngine.step`, which ends a step only at the boundary of accumulation."""
    engine_class = engine_module.DeepSpeedEngine
    step = engine_class.step

    @functools.wraps(step)
    def timed_step(engine: Any, *args: Any, **kwargs: Any) -> Any:
        opening = hook.enter_engine(engine)
        if opening is None:
            return step(engine, *args, **kwargs)
        steps_before = engine.global_steps
        try:
            return step(engine, *args, **kwargs)
        finally:
            hook.leave_engine(opening, engine, engine.global_steps != steps_before)

    engine_class.step = timed_step


def _flag(value: Any) -> bool | None:
    return None if value is None else bool(value)
