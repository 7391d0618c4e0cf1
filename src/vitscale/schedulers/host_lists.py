"""Lists of hosts as Slurm writes them: `node[01-04,7],login1` names six."""

from __future__ import annotations

import re

_MOST_HOSTS = 100_000
_LONGEST_TEXT = 100_000
_ITEM = re.compile(r"(?P<before>[A-Za-z0-9._-]+)(\[(?P<numbers>[0-9,-]+)\](?P<after>[A-Za-z0-9._-]*))?")
"""A name, or a name with one bracket of numbers."""
_RANGE = re.compile(r"(?P<first>\d{1,9})(-(?P<last>\d{1,9}))?")
_COMMA_OUTSIDE_BRACKETS = re.compile(r",(?![^\[\]]*\])")


def expand_host_list(text: str) -> list[str]:
    """Return the names that a list stands for, in its order, each once.

    A number keeps its leading zeros: `node[08-10]` is node08, node09, node10.

    Raises:
        ValueError: the text is no such list, has a name with two brackets, or names very many hosts.
    """
    if len(text) > _LONGEST_TEXT:
        raise ValueError("the list is too long")
    names: dict[str, None] = {}
    for item in _COMMA_OUTSIDE_BRACKETS.split(text):
        names |= dict.fromkeys(_names_of_item(item))
        if len(names) > _MOST_HOSTS:
            raise ValueError(f"more than {_MOST_HOSTS:,} hosts")
    return list(names)


def _names_of_item(item: str) -> list[str]:
    """Return the names of one item of a list: of "node[1-2]" or "node7".

    Raises:
        ValueError: it is no item.
    """
    match = _ITEM.fullmatch(item)
    if match is None:
        raise ValueError(f"no name of a host: {item[:100]!r}")
    if match["numbers"] is None:
        return [match["before"]]
    names = []
    for numbers in match["numbers"].split(","):
        names += [f"{match['before']}{number}{match['after']}" for number in _numbers_of_range(numbers)]
    return names


def _numbers_of_range(text: str) -> list[str]:
    """Return the numbers of "08-10", or of a single number.

    Raises:
        ValueError: it is no range, or a very long one.
    """
    match = _RANGE.fullmatch(text)
    if match is None:
        raise ValueError(f"no range of numbers: {text[:100]!r}")
    first = match["first"]
    last = match["last"] or first
    count = int(last) - int(first) + 1
    if not 1 <= count <= _MOST_HOSTS:
        raise ValueError(f"no range of numbers: {text[:100]!r}")
    return [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
