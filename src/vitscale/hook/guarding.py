"""The hook's own errors: the first one turns the hook off, and the program goes on as if it had none."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

_Function = TypeVar("_Function", bound=Callable[..., Any])


class Switch:
    """Whether the hook is on, and notes on what it could not do."""

    def __init__(self) -> None:
        self.is_on = True
        self.notes: list[str] = []

    def turn_off(self, error: BaseException) -> None:
        """Turn the hook off for the rest of this process."""
        self.is_on = False
        self.notes.append(f"the hook turned itself off after step marks failed: {describe_error(error)}")


def describe_error(error: BaseException) -> str:
    """Class, message and the last line of code of an error, in at most 300 characters."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    place = "" if traceback is None else f" at {traceback.tb_frame.f_code.co_name}:{traceback.tb_lineno}"
    return f"{type(error).__name__}: {error}{place}"[:300]


def guarded(switch: Switch, function: _Function) -> _Function:
    """The function, which returns None once the hook is off, and turns it off where it raises an Exception."""

    @functools.wraps(function)
    def run_guarded(*args: Any) -> Any:
        if not switch.is_on:
            return None
        try:
            return function(*args)
        except Exception as error:
            switch.turn_off(error)
            return None

    return cast(_Function, run_guarded)
