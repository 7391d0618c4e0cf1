"""Lines of a configuration's keys in its file, which is Hjson, of which JSON is a part.

Hjson adds to JSON: comments (`#`, `//`, `/* */`), keys and texts without quotes or in single quotes, texts of several
lines (`'''`), a root without braces, and commas that trail or lack (https://hjson.github.io/syntax.html). A text
without quotes ends with its line; a number, true, false or null ends before a comma, a bracket or a comment too.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field

_GAP = re.compile(r"(?:[ \t\n\r,]|#[^\r\n]*|//[^\r\n]*|/\*.*?\*/)+", re.DOTALL)
_QUOTED = re.compile(r"""'''.*?'''|"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'""", re.DOTALL)
_BARE_KEY = re.compile(r"[^{}\[\],:\s]+")
_PLAIN_VALUE = re.compile(
    r"(?:true|false|null|-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?)[ \t]*(?=[,\]}#\r\n]|//|/\*|$(?![\r\n]))"
)
_REST_OF_LINE = re.compile(r"[^\r\n]*")


def lines_of_keys(text: str) -> dict[str, int]:
    """Dotted key -> its line, counted from 1, the first where keys in a list have one name; `text` is valid Hjson."""
    walk = _Walk(text)
    walk.run()
    return walk.lines


@dataclass
class _Walk:
    """A walk through the text, from key to key."""

    text: str
    lines: dict[str, int] = field(default_factory=dict)
    position: int = 0
    _line: int = 1
    _counted_to: int = 0

    def run(self) -> None:
        """Fills `lines`."""
        above: list[str] = []
        """Dotted keys of the objects and lists around the position."""
        is_list: list[bool] = []
        key = ""
        while self._skip_gap():
            character = self.text[self.position]
            if character in "{[":
                above.append(key)
                is_list.append(character == "[")
                self.position += 1
            elif character in "}]":
                key = above.pop() if above else ""
                del is_list[-1:]
                self.position += 1
            elif is_list and is_list[-1]:
                self._skip_value()
            else:
                key = self._read_key(above[-1] if above else "")
                if self._skip_gap() and self.text[self.position] == ":":
                    self.position += 1
                    self._skip_gap()
                if self.text[self.position : self.position + 1] not in ("{", "["):
                    self._skip_value()

    def _skip_gap(self) -> bool:
        """Skips blanks, commas and comments; whether anything follows."""
        match = _GAP.match(self.text, self.position)
        if match:
            self.position = match.end()
        return self.position < len(self.text)

    def _read_key(self, above: str) -> str:
        """Reads a key and notes its line; the dotted key."""
        match = _QUOTED.match(self.text, self.position) or _BARE_KEY.match(self.text, self.position)
        if match is None:
            self.position += 1
            return above
        self._line += self.text.count("\n", self._counted_to, self.position)
        self._counted_to = self.position
        self.position = match.end()
        name = _unquoted(match[0])
        key = f"{above}.{name}" if above else name
        self.lines.setdefault(key, self._line)
        return key

    def _skip_value(self) -> None:
        for pattern in (_QUOTED, _PLAIN_VALUE, _REST_OF_LINE):
            match = pattern.match(self.text, self.position)
            if match and match.end() > self.position:
                self.position = match.end()
                return
        self.position += 1


def _unquoted(name: str) -> str:
    """The name that a key in quotes stands for; others as they are."""
    if name[0] not in "\"'":
        return name
    inside = name[1:-1]
    if name[0] == "'":
        inside = inside.replace("\\'", "'").replace('"', '\\"')
    try:
        return str(json.loads(f'"{inside}"'))
    except ValueError:
        return inside
