"""Redacts what tells whose results are: names of hosts and users, paths, addresses, serial numbers, keys, variables.

Each gets a stand-in, the same wherever it stands, so that what is grouped by host or allocation stays so.
"""

from __future__ import annotations

import getpass
import json
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

from pydantic.json_schema import models_json_schema

from vitscale.store.checks import CheckedRank, CheckRecord
from vitscale.store.lines import WINDOWS, kinds_of
from vitscale.store.records import RankRecord, StepLine
from vitscale.store.results import Outcome, RunHeader, StudyRecord

_PART = r"(?:\\ |\\(?! )|[^\s/:\"',;()\[\]\\])"
"""A letter of a folder's name, or a blank as shells escape it."""
_NO_NAME = r"[.~|<>]|&&|->|--?[A-Za-z]|\d+/\d+(?![\w/-])|\w+/s(?=[.,;:)]?(?:\s|$))|(?:and/or|w/o)(?![\w/-])"
"""How another path, a shell's sign, an option, "1/2", "images/s" and "and/or" begin."""
_PATTERNS = (
    ("SECRET", re.compile(r"(?<=://)[^\s/@]+(?=@)")),
    ("SECRET", re.compile(r"\b(?:hf_|gh[pousr]_|github_pat_|glpat-|sk-|xox[a-z]-|AKIA|eyJ)[\w.-]{8,}")),
    (
        "SECRET",
        re.compile(
            # From the beginning of a word, or a short way on: else a word of 10,000 letters would take half a minute.
            # An option begins behind a letter too, as after a colour's "\x1b[1m" or an escaped line break.
            r"(?i)(?:(?<![\w-])[\w-]*(?:token|secret|passwor[dt]|passwd|api[_-]?key|access[_-]?key|credential)"
            r"[\w-]{0,200}[\"']?\s*[=:]\s*"
            r"|(?<!-)--[\w-]{0,100}?(?:token|secret|passw|key|credential)[\w-]{0,200}\s+)[\"']?"
            r"(?P<taken>[^\s\"',;]{4,})"
        ),
    ),
    ("ADDRESS", re.compile(r"\b[0-9a-fA-F]{1,4}(?::[0-9a-fA-F]{1,4}){0,7}::[0-9a-fA-F]{1,4}(?::[0-9a-fA-F]{1,4})*\b")),
    ("ADDRESS", re.compile(r"\b(?:[0-9a-fA-F]{1,4}:){3,7}[0-9a-fA-F]{1,4}\b")),
    ("ADDRESS", re.compile(r"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?![\w.])")),
    ("UUID", re.compile(r"\b[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b")),
    ("MAIL", re.compile(r"(?<![\w.+-])[\w.+-]+@[\w-]+(?:\.[\w-]+)+")),
    ("USER", re.compile(r"\b(?!USER-\d)[A-Za-z_][\w.-]*@(?!host-\d|cu\d|v?\d)[\w-]+\b")),
    ("REVISION", re.compile(r"\b[0-9a-f]{40}\b")),
    ("PATH", re.compile(r"(?P<quote>['\"])(?P<taken>(?:~[\w-]*|\.{1,2})?/(?:(?!(?P=quote))[^\n])+)(?P=quote)")),
    ("PATH", re.compile(r"\b[A-Za-z]:\\[^\s\"':;,]+")),
    # Nothing tells where a path with blanks ends: it goes on up to the last slash inside a word, up to three words on,
    # but not into what is no name (`_NO_NAME`).
    (
        "PATH",
        re.compile(
            rf"(?<![\w.])(?:~[\w-]*|\.{{1,2}})?(?:/{_PART}+)+/?(?:(?: (?!{_NO_NAME}){_PART}+){{1,3}}(?:/{_PART}+)+/?)*"
        ),
    ),
)
"""Kind of what is taken out, and its pattern; where a pattern has a group `taken`, only that group is taken out."""
_SECRET_NAME = re.compile(r"(?i)token|secret|passw|credential|(?:^|[_-])key")
_PLAIN = re.compile(r"[A-Za-z_]{1,20}|\d{1,6}|\d\.\d+")
"""Values of variables that are kept: words and numbers. Others may be names, paths or keys."""
_TAKEN_WHOLE = ("git_revision", "allocation", "uuid")
"""Fields that get a stand-in as a whole: whether they are set, and which are equal, is all that is kept."""
_HOST_FIELDS = ("host", "hosts")
_WHOLE_PATH = re.compile(r"([\w.-]+=)?((?:~[\w-]*|\.{1,2})?/[^\n:]*)")
"""A text that is a path and nothing else, or an option's: its folders may have blanks in their names."""
_STEP = re.compile(
    rf'\{{"kind":"step"(?:,"(?:{"|".join(StepLine.model_fields)})":(?:[\d.eE+-]+|true|false|null|"(?:{"|".join(WINDOWS)})"))*\}}'
)
"""A step's line with nothing but numbers: most lines of most results."""
_QUOTED_PATH = re.compile(r'"((?:~[\w-]*|\.{1,2})?/[^"\\\n:]{1,4096})"')
_HOME = re.compile(r"/(?:home|Users)/([\w.-]+)")


class Redactor:
    """Redacts texts and JSON values; a name keeps its stand-in once it was met."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        """Names to take out, in small letters, with their kind: USER or host."""
        self._stand_ins: dict[tuple[str, str], str] = {}
        self._counts: dict[str, int] = {}
        self._spaced_paths: dict[str, None] = {}
        """Paths with blanks in them: in other texts nothing tells where they end."""
        self._pattern: re.Pattern[str] | None = None
        with suppress(KeyError, OSError):  # no such user, no home
            self.learn("USER", (getpass.getuser(),))
        with suppress(RuntimeError):
            self.learn("USER", (Path.home().name,))
        self._secrets = [value for name, value in os.environ.items() if _SECRET_NAME.search(name) and len(value) >= 8]

    def learn(self, kind: str, names: Iterable[str]) -> None:
        """Takes out these names from now on; for kind "host", also what follows a name after a dot."""
        for name in names:
            bare = name.partition(".")[0] if kind == "host" and not name.replace(".", "").isdigit() else name
            if len(bare) > 1 and bare.lower() not in self._names:
                self._names[bare.lower()] = kind
                self._pattern = None

    def learn_from(self, text: str) -> str:
        """Learns hosts and users from stored text (a JSON value, lines of JSON, other text), and returns the text."""
        self.learn("USER", _HOME.findall(text))
        spaced = [path for path in _QUOTED_PATH.findall(text) if " " in path and path.count("/") > 1]
        self._spaced_paths |= dict.fromkeys(spaced)
        for piece in (text, *text.splitlines()) if '"host' in text else ():
            if '"host' in piece:
                with suppress(ValueError, RecursionError):
                    self._learn_hosts(json.loads(piece))
        return text

    def _learn_hosts(self, value: Any) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                if key in _HOST_FIELDS:
                    named = item if isinstance(item, list) else [item]
                    named = [host.get("name") if isinstance(host, dict) else host for host in named]
                    self.learn("host", (host for host in named if isinstance(host, str)))
                self._learn_hosts(item)
        elif isinstance(value, list):
            for item in value:
                self._learn_hosts(item)

    def _stand_in(self, kind: str, text: str) -> str:
        known = self._stand_ins.get((kind, text))
        if known is None:
            known = f"{kind}-{self._counts.setdefault(kind, 0)}"
            self._counts[kind] += 1
            self._stand_ins[kind, text] = known
        return known

    def text(self, text: str) -> str:
        """The text without learnt names and without what `_PATTERNS` finds."""
        for secret in self._secrets:
            text = text.replace(secret, self._stand_in("SECRET", secret))
        if self._spaced_paths:
            known = "|".join(map(re.escape, sorted(self._spaced_paths, key=len, reverse=True)))
            text = re.sub(rf"(?:{known})[^\s:\"',;()\[\]]*", partial(self._taken, "PATH"), text)
        for kind, pattern in _PATTERNS[:3]:
            text = pattern.sub(partial(self._taken, kind), text)
        if self._pattern is None:
            names = "|".join(re.escape(name) for name in sorted(self._names, key=len, reverse=True))
            domain = r"(?:\.[a-z][\w-]+)*"
            self._pattern = re.compile(rf"(?<![A-Za-z0-9])({names}){domain}(?![A-Za-z0-9])", re.IGNORECASE)
        if self._names:
            text = self._pattern.sub(self._named, text)
        for kind, pattern in _PATTERNS[3:]:
            text = pattern.sub(partial(self._taken, kind), text)
        return text

    def _named(self, match: re.Match[str]) -> str:
        name = match[1].lower()
        rest = "" if self._names[name] == "host" else match[0][len(name) :]
        return self._stand_in(self._names[name], name) + rest

    def _taken(self, kind: str, match: re.Match[str]) -> str:
        if "taken" not in match.groupdict():
            return self._stand_in(kind, match[0])
        before, behind = match.start("taken") - match.start(), match.end("taken") - match.start()
        return match[0][:before] + self._stand_in(kind, match["taken"]) + match[0][behind:]

    def value(self, value: Any, key: str = "") -> Any:
        """A JSON value with all its texts redacted; of variables (`settings`) only plain words and numbers are kept.

        Words of the format itself (names of fields, values of a fixed choice) stay: they tell of nobody, and a host
        that is called "failed" must not make a file unreadable.
        """
        if isinstance(value, str):
            if key not in _HOST_FIELDS and value in _own_words()[1]:
                return value
            if path := _WHOLE_PATH.fullmatch(value):
                return self.text(path[1] or "") + self._stand_in("PATH", path[2])
            return self.text(value)
        if isinstance(value, list | tuple):
            # In a command the name of a secret stands before it: "--token", "abc".
            told_before = ("", *(item if isinstance(item, str) and item.startswith("-") else "" for item in value))
            return [
                self._stand_in("SECRET", item)
                if isinstance(item, str) and _SECRET_NAME.search(before) and "=" not in before
                else self.value(item, key)
                for before, item in zip(told_before, value, strict=False)
            ]
        if not isinstance(value, dict):
            return value
        told: dict[str, Any] = {}
        for name, item in value.items():
            if name == "settings" and isinstance(item, dict):
                told[name] = {variable: self._variable(variable, setting) for variable, setting in item.items()}
            elif name in _TAKEN_WHOLE and isinstance(item, str):
                told[name] = self._stand_in(name, item)
            elif name not in _own_words()[0] and isinstance(item, str) and _SECRET_NAME.search(name):
                told[self.text(name)] = self._stand_in("SECRET", item)
            else:
                told[name if name in _own_words()[0] else self.text(name)] = self.value(item, name)
        return told

    def _variable(self, name: str, setting: Any) -> Any:
        """Redacts one setting. GPU settings share the field's name with variables, but are numbers and truth values."""
        if not isinstance(setting, str):
            return self.value(setting)
        if _SECRET_NAME.search(name) or not _PLAIN.fullmatch(setting):
            return self._stand_in("VALUE", setting)
        return self.text(setting)

    def json_text(self, text: str) -> str:
        """A JSON value, or other text, redacted and as text."""
        if _STEP.fullmatch(text):
            return text
        try:
            return json.dumps(self.value(json.loads(text)))
        except (ValueError, RecursionError):
            return self.text(text)

    def lines(self, text: str) -> str:
        """Redacts lines of JSON values, one value a line."""
        return "\n".join(self.json_text(line) if line else "" for line in text.split("\n"))


@cache
def _own_words() -> tuple[frozenset[str], frozenset[str]]:
    """Names of all stored fields, and the values that fields of a fixed choice may have."""
    kinds: list[Any] = [StudyRecord, RunHeader, Outcome, CheckRecord, *kinds_of(RankRecord), *kinds_of(CheckedRank)]
    fields: set[str] = set()
    fixed: set[str] = set()
    waiting: list[Any] = [models_json_schema([(kind, "validation") for kind in kinds])[1]]
    while waiting:
        schema = waiting.pop()
        if isinstance(schema, Mapping):
            fields.update(schema["properties"] if isinstance(schema.get("properties"), Mapping) else ())
            choice = schema.get("enum", [schema.get("const")])
            fixed.update(word for word in choice if isinstance(word, str)) if isinstance(choice, list) else None
            waiting += schema.values()
        elif isinstance(schema, list):
            waiting += schema
    return frozenset(fields), frozenset(fixed)
