"""Lines of a configuration's keys in its file, which is Hjson, of which JSON is a part.

Hjson adds to JSON: comments (`#`, `//`, `/* */`), keys and texts without quotes or in single quotes, texts of several
lines (`'''`), a root without braces, and commas that trail or lack (https://hjson.github.io/syntax.html). A text
without quotes ends with its line; a number, true, false or null ends before a comma, a bracket or a comment too.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import NamedTuple

_GAP = re.compile(r"(?:[ \t\n\r,]|#[^\r\n]*|//[^\r\n]*|/\*.*?\*/)+", re.DOTALL)
_QUOTED = re.compile(r"""'''.*?'''|"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'""", re.DOTALL)
_BARE_KEY = re.compile(r"[^{}\[\],:\s]+")
_PLAIN_VALUE = re.compile(
    r"(?:true|false|null|-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?)[ \t]*(?=[,\]}#\r\n]|//|/\*|$(?![\r\n]))"
)
_REST_OF_LINE = re.compile(r"[^\r\n]*")


def lines_of_keys(text: str) -> dict[str, int]:
    """Dotted key -> its line, counted from 1; `text` is valid Hjson.

    Keys of objects in a list share the list's dotted key as their prefix; of several with one name the first counts.
    """
    walk = _Walk(text)
    walk.run()
    return walk.lines


class _Container(NamedTuple):
    """An object or a list that the walk is in."""

    key: str
    """Its dotted key; empty for the root."""
    is_list: bool


@dataclass
class _Walk:
    """A walk through the text, from key to key."""

    text: str
    lines: dict[str, int] = field(default_factory=dict)
    """What the walk has found: dotted key -> line."""
    position: int = 0
    """Index in the text of what is read next."""
    _line: int = 1
    """Line of `_counted_to`, up to where line breaks are counted."""
    _counted_to: int = 0

    def run(self) -> None:
        """Fill `lines`."""
        containers: list[_Container] = []
        key = ""
        while self._skip_gap():
            character = self.text[self.position]
            if character in "{[":
                containers.append(_Container(key, is_list=character == "["))
                self.position += 1
            elif character in "}]":
                key = containers.pop().key if containers else ""
                self.position += 1
            elif containers and containers[-1].is_list:
                self._skip_value()
            else:
                key = self._read_key(containers[-1].key if containers else "")
                self._skip_colon()
                if self.text[self.position : self.position + 1] not in ("{", "["):
                    self._skip_value()

    def _skip_colon(self) -> None:
        """Skip the colon behind a key, and what may stand around it."""
        if self._skip_gap() and self.text[self.position] == ":":
            self.position += 1
            self._skip_gap()

    def _skip_gap(self) -> bool:
        """Skip blanks, commas and comments; return whether anything follows."""
        match = _GAP.match(self.text, self.position)
        if match:
            self.position = match.end()
        return self.position < len(self.text)

    def _read_key(self, outer_key: str) -> str:
        """Read a key and note its line; return its dotted key.

        What is no key is skipped by one character, and `outer_key`, that of the object around it, is returned.
        """
        match = _QUOTED.match(self.text, self.position) or _BARE_KEY.match(self.text, self.position)
        if match is None:
            self.position += 1
            return outer_key
        self._line += self.text.count("\n", self._counted_to, self.position)
        self._counted_to = self.position
        self.position = match.end()
        name = _unquoted(match[0])
        key = f"{outer_key}.{name}" if outer_key else name
        self.lines.setdefault(key, self._line)
        return key

    def _skip_value(self) -> None:
        """Skip a value that is no object and no list, or one character that begins none."""
        for pattern in (_QUOTED, _PLAIN_VALUE, _REST_OF_LINE):
            match = pattern.match(self.text, self.position)
            if match and match.end() > self.position:
                self.position = match.end()
                return
        self.position += 1


def _unquoted(name: str) -> str:
    """Return the name that a key in quotes stands for; a key without quotes as it is."""
    if name[0] not in "\"'":
        return name
    inside = name[1:-1]
    if name[0] == "'":
        inside = inside.replace("\\'", "'").replace('"', '\\"')
    try:
        return str(json.loads(f'"{inside}"'))
    except ValueError:
        return inside
