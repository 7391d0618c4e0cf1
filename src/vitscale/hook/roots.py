"""Finds the model's *root*, the outermost module that the program calls, and times its calls.

Torch's hooks are not used: global ones warn in compiled models, and a module's own ones end up in pickled checkpoints.
`Module.__call__` looks for `_compiled_call_impl` on the instance (torch 2.1 and later) and leaves it out of pickles and
copies; a `TimedCall` stands there, and pickles as None where DDP copies it nonetheless.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .hooking import ProcessHook
    from .optimizers import LiveOptimizers

_CALL = "_compiled_call_impl"
_MOST_SEARCHES = 3
_MOST_DESCENTS = 6
_PATIENCE_STEPS = 3
"""Steps without a forward before the root is searched again."""


class TimedCall:
    """Stands in for a module's compiled call: times it, and calls what was there, or the module's usual code."""

    __slots__ = ("__weakref__", "_call", "_hook", "_module", "was_called")

    def __init__(self, hook: ProcessHook, module: Any, call: Callable[..., Any] | None) -> None:
        """Time a module.

        Args:
            call: the module's compiled call; None for a module that is not compiled.
        """
        self._hook = hook
        self._module = weakref.ref(module)
        self._call = call
        self.was_called = False
        """With gradients."""

    @property
    def module(self) -> Any:
        """The module; None once it is gone."""
        return self._module()

    @property
    def is_compiled(self) -> bool:
        """Whether `module.compile()` was called before."""
        return self._call is not None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        call = self._call if self._call is not None else self.module._call_impl
        if self._hook.is_compiling():
            return call(*args, **kwargs)
        opening = self._hook.enter_forward()
        if opening is None:
            return call(*args, **kwargs)
        try:
            return call(*args, **kwargs)
        finally:
            self._hook.leave_forward(opening, self, args, kwargs)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    def put_in_place(self) -> None:
        """Let the module be called through this object."""
        self.module.__dict__[_CALL] = self

    def remove(self) -> None:
        """Let the module be called as before."""
        module = self.module
        if module is None or module.__dict__.get(_CALL) is not self:
            return
        if self._call is None:
            del module.__dict__[_CALL]
        else:
            module.__dict__[_CALL] = self._call


class RootFinder:
    """Times the outermost modules with trained parameters, and goes down to their children if nobody calls them."""

    def __init__(self, hook: ProcessHook) -> None:
        self._hook = hook
        self._calls: list[TimedCall] = []
        self._searches = 0
        self._descents = 0
        self._steps_without_forward = 0

    @property
    def is_in_place(self) -> bool:
        """Whether calls of modules are timed, be they the root or not."""
        return bool(self._calls)

    @property
    def is_timing(self) -> bool:
        """Whether one of the timed modules has been called with gradients: the root is among them."""
        return any(call.was_called for call in self._calls)

    def modules(self) -> list[Any]:
        """The timed modules that the program still has."""
        return [call.module for call in self._calls if call.module is not None]

    def called_root(self) -> TimedCall | None:
        """The call of the root that the program has called with gradients; None as long as there is none."""
        for call in self._calls:
            if call.was_called and call.module is not None:
                return call
        return None

    def after_step(self, *, has_forward: bool, optimizers: LiveOptimizers) -> None:
        """Search the root if it is not known or no longer called.

        Args:
            has_forward: whether a root was called with gradients in the step.
            optimizers: those whose parameters are trained.
        """
        if has_forward:
            self._steps_without_forward = 0
            return
        self._steps_without_forward += 1
        if self._calls and not self.is_timing and self._descents < _MOST_DESCENTS:
            self._descend()
            return
        is_due = not self._calls or self._steps_without_forward >= _PATIENCE_STEPS
        if is_due and self._searches < _MOST_SEARCHES:
            self._search(optimizers.alive())

    def _search(self, optimizers: Iterable[Any]) -> None:
        self._searches += 1
        self._descents = 0
        self._steps_without_forward = 0
        self._time_instead(outermost_modules(trained_parameter_ids(optimizers)))

    def _descend(self) -> None:
        """Time the children of all modules that were timed in vain."""
        self._descents += 1
        self._time_instead([child for module in self.modules() for child in trained_children(module)])

    def _time_instead(self, modules: Iterable[Any]) -> None:
        for call in self._calls:
            call.remove()
        self._calls = [TimedCall(self._hook, module, module.__dict__.get(_CALL)) for module in modules]
        for call in self._calls:
            call.put_in_place()


def can_time_modules() -> bool:
    """Whether this torch's modules look for a compiled call."""
    return hasattr(sys.modules["torch.nn.modules.module"].Module, _CALL)


def trained_parameter_ids(optimizers: Iterable[Any]) -> set[int]:
    """Identities of all parameters in the optimizers' groups."""
    parameter_ids: set[int] = set()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            parameter_ids.update(map(id, group["params"]))
    return parameter_ids


def outermost_modules(parameter_ids: set[int]) -> list[Any]:
    """Modules that no other module holds, with at least one of these parameters.

    Where no module has any (ZeRO's optimizer holds flat copies): those with parameters that want gradients.
    """
    module_classes = _with_subclasses(sys.modules["torch.nn.modules.module"].Module)
    modules = [candidate for candidate in gc.get_objects() if type(candidate) in module_classes]
    child_ids: set[int] = set()
    for module in modules:
        child_ids.update(map(id, _children(module)))
    outermost = [module for module in modules if id(module) not in child_ids]
    trained = [module for module in outermost if _holds(module, parameter_ids)]
    if trained:
        return trained
    return [module for module in outermost if _wants_gradients(module)]


def trained_children(module: Any) -> list[Any]:
    """Children with parameters that want gradients; a list or dict of modules is replaced by its items."""
    forward_of_containers = sys.modules["torch.nn.modules.module"].Module.forward
    children = []
    for child in _children(module):
        if not _wants_gradients(child):
            continue
        if type(child).forward is forward_of_containers:
            children += trained_children(child)
        else:
            children.append(child)
    return children


def _with_subclasses(module_class: type) -> set[type]:
    """The class and all below it: to look a type up in them is the fastest test for a million objects."""
    classes = {module_class}
    unvisited = [module_class]
    while unvisited:
        subclasses: list[type] = type.__subclasses__(unvisited.pop())
        for subclass in subclasses:
            if subclass not in classes:
                classes.add(subclass)
                unvisited.append(subclass)
    return classes


def _children(module: Any) -> list[Any]:
    try:
        return [child for child in module._modules.values() if child is not None]
    except Exception:  # a half-built module, or one with attributes of its own making
        return []


def _wants_gradients(module: Any) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def _holds(module: Any, parameter_ids: set[int]) -> bool:
    try:
        return any(id(parameter) in parameter_ids for parameter in module.parameters())
    except Exception:  # as in _children
        return False
