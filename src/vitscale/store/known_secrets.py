"""Values that were recognised as secrets somewhere, and are taken out everywhere."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator
from urllib.parse import quote, quote_plus

from vitscale.store.secret_forms import SHORTEST, key_lines, looks_like_key

_SHORTEST_MIXED = 5
"""Letters and digits from which a mix of both is taken out where it stands as a word by itself."""


class KnownSecrets:
    """Collects secrets from all files of a folder first, and then takes them out of each, wherever they stand.

    A value that is short or common would be taken out of words that have nothing to do with it ("1", "true", "cuda").
    So these are left where no form of text tells them: values of less than 8 letters, but for a mix of letters and
    digits of 5 or more, which goes where it stands alone; and words of the format itself, names of models among them.
    """

    def __init__(self, words: Collection[str]) -> None:
        """`words`: those of the format itself, which stay."""
        self._words = words
        self._long: dict[str, None] = {}
        self._short: dict[str, None] = {}
        self._written: list[tuple[str, str]] | None = None
        self._pattern: re.Pattern[str] | None = None

    def add(self, value: str) -> None:
        """Takes out a value that a name tells to be a secret."""
        value = value.strip()
        if value in self._words:
            return
        if len(value) >= SHORTEST:
            self._add_long(value)
        elif len(value) >= _SHORTEST_MIXED and _is_mixed(value):
            self._short[value] = None
            self._pattern = None

    def add_likely(self, value: str) -> None:
        """Takes out a value that a text tells to be one, if it looks like a key: "token: missing" tells none."""
        if looks_like_key(value.strip()):
            self.add(value)

    def add_setting(self, value: str) -> None:
        """Takes out the value of a variable, if it has letters: lists of numbers tell nobody."""
        if any(map(str.isalpha, value)):
            self.add(value)

    def _add_long(self, value: str) -> None:
        for text in (value, *key_lines(value)) if "\n" in value else (value,):
            if text not in self._long:
                self._long[text] = None
                self._written = None

    def replaced(self, text: str, stand_in: Callable[[str], str]) -> str:
        """The text with the stand-in of each value in its place, in any of the ways in which it may be written."""
        if self._written is None:
            self._written = sorted(self._all_written(), key=lambda pair: len(pair[0]), reverse=True)
        for written, value in self._written:
            if written in text:
                text = text.replace(written, stand_in(value))
        if not self._short:
            return text
        if self._pattern is None:
            values = "|".join(map(re.escape, sorted(self._short, key=len, reverse=True)))
            self._pattern = re.compile(rf"(?<![A-Za-z0-9])(?:{values})(?![A-Za-z0-9])")
        return self._pattern.sub(lambda match: stand_in(match[0]), text)

    def _all_written(self) -> Iterator[tuple[str, str]]:
        for value in self._long:
            for written in _ways_to_write(value):
                yield written, value

    def __contains__(self, value: str) -> bool:
        return value in self._long or value in self._short


def _is_mixed(value: str) -> bool:
    return any(map(str.isdigit, value)) and any(map(str.isalpha, value))


def _ways_to_write(value: str) -> set[str]:
    """A value as it is, as JSON, TOML, Python and shells escape it, and as a part of a URL."""
    in_json = json.dumps(value)[1:-1]
    ways = {value, in_json, json.dumps(value, ensure_ascii=False)[1:-1], json.dumps(in_json)[1:-1]}
    in_python = repr(value)[1:-1]
    ways |= {in_python, in_python.replace('"', '\\"'), value.replace("'", "\\'"), value.replace("'", "'\"'\"'")}
    ways |= {quote(value, errors="replace"), quote(value, safe="", errors="replace")}
    ways |= {quote_plus(value, errors="replace")}
    return {way for way in ways if len(way) >= SHORTEST}
