"""Redacts what tells whose results are: names of hosts and users, paths, addresses, serial numbers, keys, variables.

Each gets a stand-in, the same wherever it stands, so that what is grouped by host or allocation stays so. A first pass
over all files learns hosts, users, paths with blanks and secrets: what one file tells to be a secret is taken out of
all (`store.secret_forms`, `store.known_secrets`).
"""

from __future__ import annotations

import getpass
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

from pydantic.json_schema import models_json_schema

from vitscale.base.secret_names import is_plain_value, is_secret_name
from vitscale.store.checks import CheckedRank, CheckRecord
from vitscale.store.known_secrets import KnownSecrets
from vitscale.store.lines import WINDOWS, kinds_of
from vitscale.store.private_values import is_private, launch_variables, study_tables
from vitscale.store.records import RankRecord, StepLine
from vitscale.store.results import Outcome, RunHeader, StudyRecord
from vitscale.store.secret_forms import FORMS, is_secret_of, secret_span, secrets_in, secrets_of
from vitscale.trial.model_spec import NAMED_MODELS

_PART = r"(?:\\ |\\(?! )|[^\s/:\"',;()\[\]\\])"
"""A letter of a folder's name, or a blank as shells escape it."""
_NO_NAME = r"[.~|<>]|&&|->|--?[A-Za-z]|\d+/\d+(?![\w/-])|\w+/s(?=[.,;:)]?(?:\s|$))|(?:and/or|w/o)(?![\w/-])"
"""How another path, a shell's sign, an option, "1/2", "images/s" and "and/or" begin."""
_DOMAINS = (
    "com org net edu gov mil int local internal lan corp intranet localdomain cluster hpc cloud "
    "ai at au be br ca ch cn cz de dk es eu fi fr gr hk hu ie il in io is it jp kr mx nl no nz pl ro ru se sg tr tw uk "
    "us za"
).replace(" ", "|")
"""Ends of full host names. Countries that code looks like are not among them: x.to, best.pt, main.py, libc.so."""
_PATTERNS = (
    ("ADDRESS", re.compile(r"\b[0-9a-fA-F]{1,4}(?::[0-9a-fA-F]{1,4}){0,7}::[0-9a-fA-F]{1,4}(?::[0-9a-fA-F]{1,4})*\b")),
    ("ADDRESS", re.compile(r"\b(?:[0-9a-fA-F]{1,4}:){3,7}[0-9a-fA-F]{1,4}\b")),
    ("ADDRESS", re.compile(r"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?![\w.])")),
    ("UUID", re.compile(r"\b[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b")),
    ("MAIL", re.compile(r"(?<![\w.+-])[\w.+-]+@[\w-]+(?:\.[\w-]+)+")),
    ("USER", re.compile(r"\b(?!USER-\d)[A-Za-z_][\w.-]*@(?!host-\d|cu\d|v?\d)[\w-]+\b")),
    ("host", re.compile(rf"(?i)(?<![\w.-])(?:[a-z0-9][a-z0-9-]{{0,62}}\.){{2,8}}(?:{_DOMAINS})(?![\w(\[-]|\.\w)")),
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
_STAND_IN = re.compile(r"[A-Za-z_]+-\d+")
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
        self._secrets = KnownSecrets(words=_own_words()[1] | NAMED_MODELS.keys())
        with suppress(KeyError, OSError):  # no such user, no home
            self.learn("USER", (getpass.getuser(),))
        with suppress(RuntimeError):
            self.learn("USER", (Path.home().name,))
        for name, value in os.environ.items():
            if is_secret_name(name):
                self._secrets.add(value)

    def learn(self, kind: str, names: Iterable[str]) -> None:
        """Takes out these names from now on; for kind "host", also what follows a name after a dot."""
        for name in names:
            bare = name.partition(".")[0] if kind == "host" and not name.replace(".", "").isdigit() else name
            if len(bare) > 1 and bare.lower() not in self._names:
                self._names[bare.lower()] = kind
                self._pattern = None

    def learn_variables(self, variables: Mapping[str, str]) -> None:
        """Takes out the values of variables from now on, but for plain words, numbers and paths (which go as paths)."""
        for name, value in variables.items():
            if is_secret_name(name):
                self._secrets.add(value)
            elif not is_plain_value(value) and not _WHOLE_PATH.fullmatch(value):
                self._secrets.add_setting(value)

    def learn_study(self, study: StudyRecord) -> None:
        """Learns the secrets and variables that a study's own text tells, and the command line over it."""
        self.learn_variables(launch_variables(study))
        for table in study_tables(study.text, study.overrides):
            self._learn_value(table)

    def learn_from(self, text: str) -> str:
        """Learns hosts, users and secrets from stored text (a JSON value, lines of JSON, other text), and returns it.

        Secrets of a text are learnt if they look like keys; those that names of fields and options tell, always.
        """
        self.learn("USER", _HOME.findall(text))
        spaced = [path for path in _QUOTED_PATH.findall(text) if " " in path and path.count("/") > 1]
        self._spaced_paths |= dict.fromkeys(spaced)
        try:
            self._learn_value(json.loads(text))
        except (ValueError, RecursionError):
            self._learn_lines(text)
        return text

    def _learn_lines(self, text: str) -> None:
        """Learns from lines, each a JSON value or not. A secret of several lines is found in the text as a whole."""
        for line in text.splitlines():
            if line.startswith("{") and not _STEP.fullmatch(line):
                with suppress(ValueError, RecursionError):
                    self._learn_value(json.loads(line))
        self._learn_text(text)

    def _learn_text(self, text: str) -> None:
        for secret in secrets_in(text):
            self._secrets.add_likely(secret)

    def _learn_value(self, value: Any) -> None:
        self._learn_hosts(value)
        for secret in secrets_of(value, _own_words()[0].__contains__):
            self._secrets.add(secret)
        for settings in _settings_in(value):
            self.learn_variables({name: item for name, item in settings.items() if isinstance(item, str)})
        for text in _texts_in(value):
            self._learn_text(text)

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
        if _STAND_IN.fullmatch(text) and text in self._stand_ins.values():
            return text  # what was taken out already
        if text in self._secrets:
            kind = "SECRET"  # one value has one stand-in, whatever it is recognised by
        known = self._stand_ins.get((kind, text))
        if known is None:
            known = f"{kind}-{self._counts.setdefault(kind, 0)}"
            self._counts[kind] += 1
            self._stand_ins[kind, text] = known
        return known

    def text(self, text: str) -> str:
        """The text without learnt names and without what `_PATTERNS` finds."""
        text = self._secrets.replaced(text, partial(self._stand_in, "SECRET"))
        if self._spaced_paths:
            known = "|".join(map(re.escape, sorted(self._spaced_paths, key=len, reverse=True)))
            text = re.sub(rf"(?:{known})[^\s:\"',;()\[\]]*", partial(self._taken, "PATH"), text)
        lowered = text.lower()
        for form in FORMS:
            if any(hint in lowered for hint in form.hints):
                text = form.pattern.sub(partial(self._taken, "SECRET", is_one=form.is_one), text)
        if self._pattern is None:
            names = "|".join(re.escape(name) for name in sorted(self._names, key=len, reverse=True))
            domain = r"(?:\.[a-z][\w-]+)*"
            self._pattern = re.compile(rf"(?<![A-Za-z0-9])({names}){domain}(?![A-Za-z0-9])", re.IGNORECASE)
        if self._names:
            text = self._pattern.sub(self._named, text)
        for kind, pattern in _PATTERNS:
            text = pattern.sub(partial(self._taken, kind), text)
        return text

    def _named(self, match: re.Match[str]) -> str:
        name = match[1].lower()
        rest = "" if self._names[name] == "host" else match[0][len(name) :]
        return self._stand_in(self._names[name], name) + rest

    def _taken(self, kind: str, match: re.Match[str], is_one: Callable[[str], bool] = bool) -> str:
        begin, end = secret_span(match)
        text = match.string[begin:end]
        if not is_one(text):
            return match[0]
        if kind == "host":
            text = text.lower()
        return match.string[match.start() : begin] + self._stand_in(kind, text) + match.string[end : match.end()]

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
            return [
                self._stand_in("SECRET", item) if is_secret_of(before, item) else self.value(item, key)
                for before, item in zip(("", *value), value, strict=False)
            ]
        if not isinstance(value, dict):
            return value
        told: dict[str, Any] = {}
        for name, item in value.items():
            if name == "settings" and isinstance(item, dict):
                told[name] = {variable: self._variable(variable, setting) for variable, setting in item.items()}
            elif name in _TAKEN_WHOLE and isinstance(item, str):
                told[name] = self._stand_in(name, item)
            elif name not in _own_words()[0] and isinstance(item, str) and is_secret_name(name):
                told[self.text(name)] = self._stand_in("SECRET", item)
            else:
                told[name if name in _own_words()[0] else self.text(name)] = self.value(item, name)
        return told

    def _variable(self, name: str, setting: Any) -> Any:
        """Redacts one setting. GPU settings share the field's name with variables, but are numbers and truth values."""
        if not isinstance(setting, str):
            return self.value(setting)
        if is_secret_name(name) or not is_plain_value(setting):
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


NOT_SHOWN = "(not shown)"


def without_secrets(study: StudyRecord) -> StudyRecord:
    """The study with `NOT_SHOWN` in place of the secrets in its text and overrides, for a page that others read."""
    secrets = KnownSecrets(words=_own_words()[1] | NAMED_MODELS.keys())
    for name, value in launch_variables(study).items():
        if is_private(name, value):
            secrets.add(value)
    for table in study_tables(study.text, study.overrides):
        for secret in secrets_of(table, _own_words()[0].__contains__):
            secrets.add(secret)

    def shown(text: str) -> str:
        return secrets.replaced(text, lambda _: NOT_SHOWN)

    return study.model_copy(update={"text": shown(study.text), "overrides": tuple(map(shown, study.overrides))})


def _settings_in(value: Any) -> Iterator[Mapping[str, Any]]:
    """The variables that ranks have recorded, at any depth of a JSON value."""
    if isinstance(value, dict):
        settings = value.get("settings")
        if isinstance(settings, dict):
            yield settings
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _settings_in(item)


def _texts_in(value: Any) -> Iterator[str]:
    """The texts in a JSON value, at any depth, keys among them."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from value
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _texts_in(item)


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
