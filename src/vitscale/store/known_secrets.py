"""Values that were recognised as secrets somewhere, and are taken out everywhere."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from typing import NamedTuple
from urllib.parse import quote, quote_plus

from vitscale.store.secret_forms import FEWEST_KEY_CHARACTERS, has_letters_and_digits, key_lines, looks_like_key

_FEWEST_CHARACTERS_OF_SHORT = 5
"""Fewest characters of a mix of letters and digits that is taken out where it stands as a word by itself."""


class _Spelling(NamedTuple):
    """One way in which files write a secret."""

    text: str
    secret: str


class KnownSecrets:
    """Collects secrets from all files of a folder first, and then takes them out of each, wherever they stand.

    A value that is short or common would be taken out of words that have nothing to do with it ("1", "true", "cuda").
    So what becomes of a value depends on its length:

    - `FEWEST_KEY_CHARACTERS` characters or more: it goes wherever it stands.
    - `_FEWEST_CHARACTERS_OF_SHORT` or more, with letters and digits: it goes where it stands as a word by itself.
    - Others stay, and so do words of the format itself, names of models among them.
    """

    def __init__(self, words: Collection[str]) -> None:
        """Begin without secrets. `words`: those of the format itself, which stay."""
        self._format_words = words
        # Ordered sets.
        self._long_secrets: dict[str, None] = {}
        """Those that go wherever they stand."""
        self._short_secrets: dict[str, None] = {}
        """Those that go where they stand as a word by themselves."""
        self._spellings_of_long: list[_Spelling] | None = None
        """How the long ones may be written, the longest first; None after a new one, until texts are next searched."""
        self._short_pattern: re.Pattern[str] | None = None
        """Finds all short ones; None after a new one, until texts are next searched."""

    def add(self, value: str) -> None:
        """Add the value of something with a secret's name, whatever the value looks like."""
        value = value.strip()
        if value in self._format_words:
            return
        if len(value) >= FEWEST_KEY_CHARACTERS:
            self._add_long(value)
        elif len(value) >= _FEWEST_CHARACTERS_OF_SHORT and has_letters_and_digits(value):
            self._short_secrets[value] = None
            self._short_pattern = None

    def add_likely(self, value: str) -> None:
        """Add a value from text, if it looks like a key: behind "token:" may also stand "missing"."""
        if looks_like_key(value.strip()):
            self.add(value)

    def add_setting(self, value: str) -> None:
        """Add the value of a variable, if it has letters: lists of numbers identify nobody."""
        if any(map(str.isalpha, value)):
            self.add(value)

    def _add_long(self, value: str) -> None:
        """Add a value, and the lines of one that has several."""
        lines = key_lines(value) if "\n" in value else ()
        for text in (value, *lines):
            if text not in self._long_secrets:
                self._long_secrets[text] = None
                self._spellings_of_long = None

    def with_stand_ins(self, text: str, stand_in: Callable[[str], str]) -> str:
        """Return the text with a stand-in for each secret, in any of the ways in which it may be written.

        Args:
            text: the text.
            stand_in: gives the stand-in of a secret, which is as it was added.
        """
        for spelling in self._spellings():
            if spelling.text in text:
                text = text.replace(spelling.text, stand_in(spelling.secret))
        if not self._short_secrets:
            return text
        return self._pattern_of_short().sub(lambda match: stand_in(match[0]), text)

    def _spellings(self) -> list[_Spelling]:
        if self._spellings_of_long is None:
            spellings: list[_Spelling] = []
            for secret in self._long_secrets:
                spellings += [_Spelling(text, secret) for text in _ways_to_write(secret)]
            self._spellings_of_long = sorted(spellings, key=lambda spelling: len(spelling.text), reverse=True)
        return self._spellings_of_long

    def _pattern_of_short(self) -> re.Pattern[str]:
        if self._short_pattern is None:
            values = "|".join(map(re.escape, sorted(self._short_secrets, key=len, reverse=True)))
            self._short_pattern = re.compile(rf"(?<![A-Za-z0-9])(?:{values})(?![A-Za-z0-9])")
        return self._short_pattern

    def __contains__(self, value: str) -> bool:
        return value in self._long_secrets or value in self._short_secrets


def _ways_to_write(value: str) -> set[str]:
    """Return a value as it is, as JSON, TOML, Python and shells escape it, and as a part of a URL.

    Spellings that are too short are left out.
    """
    in_json = json.dumps(value)[1:-1]
    in_python = repr(value)[1:-1]
    ways = {
        value,
        in_json,
        json.dumps(value, ensure_ascii=False)[1:-1],
        json.dumps(in_json)[1:-1],  # JSON in JSON
        in_python,
        in_python.replace('"', '\\"'),
        value.replace("'", "\\'"),
        value.replace("'", "'\"'\"'"),  # in single quotes of a shell
        quote(value, errors="replace"),
        quote(value, safe="", errors="replace"),
        quote_plus(value, errors="replace"),
    }
    return {way for way in ways if len(way) >= FEWEST_KEY_CHARACTERS}
