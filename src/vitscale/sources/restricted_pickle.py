"""Reads the pickles that CIFAR comes in without unpickling: nothing that a file names is looked up or called.

The standard library splits the file into opcodes; this module gives a meaning only to those that build dicts,
lists, tuples, strings, integers and numpy arrays of a few integer types. A name such as `numpy.ndarray` becomes a
symbol that the rules below understand, and any other name is refused; so are the text opcodes of protocol 0, since
the official files are of protocol 2. Work and memory are bounded by the size of the file and by `_MOST_OPCODES`,
never by a number that stands in it.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitscale.errors import RequestError, shown

_MOST_OPCODES = 1_000_000
"""Most opcodes of a file; CIFAR-100's training file has about 250,000."""
_ELEMENT_TYPE_CODES = ("u1", "i4", "i8")

_MEANING_BY_NAME = {
    ("numpy.core.multiarray", "_reconstruct"): "empty array",
    ("numpy._core.multiarray", "_reconstruct"): "empty array",
    ("numpy.core.numeric", "_frombuffer"): "whole array",
    ("numpy._core.numeric", "_frombuffer"): "whole array",
    ("numpy", "ndarray"): "array type",
    ("numpy", "dtype"): "element type",
    ("_codecs", "encode"): "encode",
    ("__builtin__", "bytes"): "no bytes",  # how Python 3 writes b"" in protocol 2
}
"""Every name in CIFAR files as written by Python 2 and 3 and by numpy 1 and 2, and what stands for it."""


@dataclass(frozen=True)
class _Symbol:
    """What a pickle's name stands for; nothing is looked up by the name itself."""

    meaning: str
    """One of the values of `_MEANING_BY_NAME`."""


@dataclass
class _ElementType:
    """A numpy dtype; a later BUILD instruction sets its byte order."""

    dtype: np.dtype[Any]


@dataclass
class _Array:
    """A numpy array."""

    values: NDArray[Any] | None
    """None until a BUILD instruction fills it."""


class _Refused(Exception):
    """Content that no CIFAR file has."""


def read_pickle(content: bytes, name: str) -> dict[str, Any]:
    """Returns the dictionary in `content`; keys are str, values int, str, bytes, list, tuple, dict or integer arrays.

    Strings of Python 2 come as bytes.

    Args:
        content: the pickle.
        name: name of its file, for messages.

    Raises:
        RequestError: anything else is in it: a name outside the few that CIFAR needs, a foreign opcode, or damage.
    """
    try:
        return _as_result(_Machine().run(content))
    except _Refused as refusal:
        what = f"{name} was refused, and nothing in it was executed: it contains {refusal}, which no CIFAR file does"
        raise RequestError(what, next_step="Get the official archive again, from a source you trust") from None
    except (ValueError, IndexError, KeyError, OverflowError, RecursionError) as error:
        raise RequestError(
            f"{name} is damaged or not a CIFAR file ({shown(str(error))})", next_step="Get the official archive again"
        ) from None


def _as_result(value: object) -> dict[str, Any]:
    """Returns the machine's last value as `read_pickle` gives it.

    Raises:
        ValueError: it is no dictionary, or a key of it is no string.
    """
    if not isinstance(value, dict):
        raise ValueError("not a dictionary")
    result = {}
    for key, item in value.items():
        result[_string(key)] = item.values if isinstance(item, _Array) else item
    return result


class _Machine:
    """The machine that carries out the instructions of a pickle, reduced to those that make data.

    Each instruction takes values from a stack and pushes its result. A mark begins a new stack on top, whose values a
    later instruction takes all at once, as those of a list.
    """

    def __init__(self) -> None:
        self.stacks: list[list[Any]] = [[]]
        """The stack of values, and above it one for each open mark; the last one is in use."""
        self.memo: dict[int, Any] = {}
        """Values that were pushed before and may be pushed again, by number."""

    def run(self, content: bytes) -> object:
        """Carries out all instructions; returns the value that is on top in the end."""
        for instruction_number, (opcode, argument, _) in enumerate(pickletools.genops(content)):
            if instruction_number == _MOST_OPCODES:
                raise _Refused(f"more than {_MOST_OPCODES:,} instructions")
            if opcode.name == "STOP":
                break
            if opcode.name in _LITERALS:
                self.push(_LITERALS[opcode.name](argument))
            elif opcode.name in _ACTIONS:
                _ACTIONS[opcode.name](self, argument)
            elif opcode.name not in ("PROTO", "FRAME"):
                raise _Refused(f"the instruction {opcode.name}")
        return self.pop()

    def push(self, value: object) -> None:
        """Puts a value on top of the stack in use."""
        self.stacks[-1].append(value)

    def pop(self) -> Any:
        """Takes the value on top off the stack in use, and returns it."""
        return self.stacks[-1].pop()

    def last(self) -> Any:
        """Returns the value on top, which stays there."""
        return self.stacks[-1][-1]

    def pop_to_mark(self) -> list[Any]:
        """Takes all values since the last mark, and the mark itself, off; returns the values."""
        if len(self.stacks) == 1:
            raise ValueError("no mark")
        return self.stacks.pop()

    def push_tuple(self, size: int) -> None:
        """Replaces the `size` values on top by a tuple of them."""
        items = [self.pop() for _ in range(size)]
        self.push(tuple(reversed(items)))

    def remember(self, number: int) -> None:
        """Stores the value on top in the memo."""
        self.memo[number] = self.last()

    def push_global(self, names: str) -> None:
        """Pushes what a name stands for. Args: names: module and name, as "numpy dtype"."""
        module, _, name = names.partition(" ")
        self.push_symbol(module, name)

    def push_stack_global(self) -> None:
        """Pushes what a name stands for; the name is on top of the stack, its module below."""
        name = self.pop()
        module = self.pop()
        self.push_symbol(module, name)

    def push_symbol(self, module: object, name: object) -> None:
        """Pushes what a name stands for; refuses one that no CIFAR file has."""
        if not isinstance(module, str) or not isinstance(name, str):
            raise ValueError("a name that is not a string")
        if (module, name) not in _MEANING_BY_NAME:
            raise _Refused(f"the name {shown(f'{module}.{name}')}")
        self.push(_Symbol(_MEANING_BY_NAME[module, name]))

    def append(self, items: list[Any]) -> None:
        """Adds items to the list on top of the stack."""
        target = self.last()
        if not isinstance(target, list):
            raise ValueError("items for something that is not a list")
        target.extend(items)

    def set_item(self) -> None:
        """Adds one entry to a dictionary; its value is on top of the stack, its key below."""
        value = self.pop()
        key = self.pop()
        self.set_items([key, value])

    def set_items(self, items: list[Any]) -> None:
        """Adds entries to the dictionary on top of the stack. Args: items: key, value, key, value, ..."""
        target = self.last()
        if not isinstance(target, dict) or len(items) % 2:
            raise ValueError("items for something that is not a dictionary")
        for key, value in zip(items[::2], items[1::2], strict=True):
            # Only flat keys: hashing a tuple nested a million deep would overflow C's stack.
            if not isinstance(key, (str, bytes, int)):
                raise _Refused(f"a dictionary key of the type {type(key).__name__}")
            target[key] = value

    def reduce(self) -> None:
        """Calls a symbol; its arguments are on top of the stack."""
        arguments = self.pop()
        symbol = self.pop()
        if not isinstance(symbol, _Symbol) or not isinstance(arguments, tuple):
            raise _Refused("a call of something that is not a name")
        self.push(_call_symbol(symbol.meaning, arguments))

    def build(self) -> None:
        """Gives the state on top of the stack to the array or element type below it."""
        state = self.pop()
        target = self.last()
        if isinstance(target, _ElementType):
            target.dtype = _with_byte_order(target.dtype, state)
        elif isinstance(target, _Array):
            _fill_array(target, state)
        else:
            raise _Refused("a state for something that is neither array nor element type")


def _call_symbol(meaning: str, arguments: tuple[Any, ...]) -> object:
    """Returns what a call of a name would return, by what the name stands for.

    Raises:
        _Refused: the arguments are not those with which numpy and Python pickle arrays and bytes.
    """
    match meaning, arguments:
        case "empty array", (_Symbol("array type"), (0,), b"b" | "b"):
            return _Array(None)
        case "whole array", (bytes() | bytearray() as content, _ElementType() as element, shape, "C" | "F" as order):
            return _Array(_shaped(bytes(content), element.dtype, shape, order == "F"))
        case "element type", (code, _, _):
            name = _string(code)
            if name not in _ELEMENT_TYPE_CODES:
                raise _Refused(f"an array of the type {shown(name)}")
            return _ElementType(np.dtype(name))
        case "encode", (str() as text, "latin1" | "latin-1"):
            return text.encode("latin-1")
        case "no bytes", ():
            return b""
    raise _Refused(f"a call of {meaning!r} with other arguments than usual")


def _with_byte_order(dtype: np.dtype[Any], state: object) -> np.dtype[Any]:
    """Returns the type with the byte order in the state that numpy pickles of it: (version, order, ...)."""
    match state:
        case (3, b">" | ">", None, None, None, -1, -1, 0):
            return dtype.newbyteorder(">")
        case (3, b"|" | b"<" | "|" | "<", None, None, None, -1, -1, 0):
            return dtype.newbyteorder("<")
    raise _Refused("an element type that is not a plain integer")


def _fill_array(array: _Array, state: object) -> None:
    """Sets an array's values from the state that numpy pickles of it: (version, shape, type, is Fortran, bytes)."""
    match state:
        case (1, shape, _ElementType() as element, is_fortran, bytes() as content):
            array.values = _shaped(content, element.dtype, shape, bool(is_fortran))
        case _:
            raise _Refused("an array with another state than usual")


def _shaped(content: bytes, dtype: np.dtype[Any], shape: object, is_fortran: bool) -> NDArray[Any]:
    """Returns an array of these bytes. Args: is_fortran: whether columns, not rows, follow one another in memory."""
    if not isinstance(shape, tuple) or len(shape) > 4 or not all(map(_is_length, shape)):
        raise ValueError("an array without a proper shape")
    # Both raise ValueError where the content does not fit; neither allocates memory.
    return np.frombuffer(content, dtype=dtype).reshape(shape, order="F" if is_fortran else "C")


def _is_length(value: object) -> bool:
    """Whether a value can be the length of an axis."""
    return type(value) is int and value >= 0


def _string(value: object) -> str:
    """Returns a string of Python 2, which comes as bytes, or of Python 3."""
    if isinstance(value, bytes):
        return value.decode("latin-1")
    if isinstance(value, str):
        return value
    raise ValueError("not a string")


def _small_integer(argument: int) -> int:
    """Returns an integer as it is; refuses one of more than 64 bits, which a few bytes may claim."""
    if not -(2**63) <= argument < 2**63:
        raise _Refused("an integer of more than 64 bits")
    return argument


_LITERALS: dict[str, Callable[[Any], object]] = {
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "LONG1", "LONG4"), _small_integer),
    # Strings of Python 2: pickletools gives their bytes as text in this encoding.
    **dict.fromkeys(("BINSTRING", "SHORT_BINSTRING"), lambda text: text.encode("latin-1")),
    **dict.fromkeys(("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"), lambda text: text),
    **dict.fromkeys(("BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"), lambda content: content),
    "NONE": lambda _: None,
    "NEWTRUE": lambda _: True,
    "NEWFALSE": lambda _: False,
    "EMPTY_LIST": lambda _: [],
    "EMPTY_DICT": lambda _: {},
    "EMPTY_TUPLE": lambda _: (),
}


_ACTIONS: dict[str, Callable[[_Machine, Any], None]] = {
    "MARK": lambda machine, _: machine.stacks.append([]),
    "TUPLE": lambda machine, _: machine.push(tuple(machine.pop_to_mark())),
    "TUPLE1": lambda machine, _: machine.push_tuple(1),
    "TUPLE2": lambda machine, _: machine.push_tuple(2),
    "TUPLE3": lambda machine, _: machine.push_tuple(3),
    "APPEND": lambda machine, _: machine.append([machine.pop()]),
    "APPENDS": lambda machine, _: machine.append(machine.pop_to_mark()),
    "SETITEM": lambda machine, _: machine.set_item(),
    "SETITEMS": lambda machine, _: machine.set_items(machine.pop_to_mark()),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT"), lambda machine, number: machine.remember(number)),
    "MEMOIZE": lambda machine, _: machine.remember(len(machine.memo)),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), lambda machine, number: machine.push(machine.memo[number])),
    "GLOBAL": lambda machine, names: machine.push_global(names),
    "STACK_GLOBAL": lambda machine, _: machine.push_stack_global(),
    "REDUCE": lambda machine, _: machine.reduce(),
    "BUILD": lambda machine, _: machine.build(),
}
