"""Redacts what shows whose results are: names of hosts and users, paths, addresses, serial numbers, keys, variables.

Each gets a stand-in, the same wherever it stands, so that what is grouped by host or allocation stays so. A first pass
over all files learns hosts, users, paths with blanks and secrets: what one file shows to be a secret is taken out of
all files (`store.secret_forms`, `store.known_secrets`).
"""

from __future__ import annotations

import getpass
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic.json_schema import models_json_schema

from vitscale.base.secret_names import is_plain_value, is_secret_name
from vitscale.store.checks import CheckedRank, CheckRecord
from vitscale.store.known_secrets import KnownSecrets
from vitscale.store.lines import WINDOWS, kinds_of
from vitscale.store.private_values import is_private, launch_variables, study_tables
from vitscale.store.records import RankRecord, StepLine
from vitscale.store.results import Outcome, RunHeader, StudyRecord
from vitscale.store.secret_forms import FORMS, is_secret_argument, secret_span, secrets_in_json, secrets_in_text
from vitscale.trial.model_spec import NAMED_MODELS

_LETTER_OF_FOLDER = r"(?:\\ |\\(?! )|[^\s/:\"',;()\[\]\\])"
"""A letter of a folder's name, or a blank as shells escape it."""
_NOT_A_NAME = r"[.~|<>]|&&|->|--?[A-Za-z]|\d+/\d+(?![\w/-])|\w+/s(?=[.,;:)]?(?:\s|$))|(?:and/or|w/o)(?![\w/-])"
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
    # A share of Windows, \\\\server\\share\\folder, also as Python and JSON write its backslashes.
    ("PATH", re.compile(r"(?<![\w\\])\\{2,4}[\w.$-]+(?:\\{1,2}[^\s\\\"':;,<>|]+)+\\{0,2}")),
    # What follows the port of a URL, or of a host that has its stand-in already: a colon ends any other path.
    (
        "PATH",
        re.compile(
            r"(?i)(?:\b[a-z][a-z0-9+.-]{0,20}://[^\s/\"'<>]{0,300}|\b(?:host|address)-\d+):\d{1,5}"
            r"[/?#]+(?P<taken>[^\s\"'<>]+)"
        ),
    ),
    # Nothing tells where a path with blanks ends: it goes on up to the last slash inside a word, up to three words on,
    # but not into what is no name (`_NOT_A_NAME`).
    (
        "PATH",
        re.compile(
            rf"(?<![\w.])(?:~[\w-]*|\.{{1,2}})?(?:/{_LETTER_OF_FOLDER}+)+/?"
            rf"(?:(?: (?!{_NOT_A_NAME}){_LETTER_OF_FOLDER}+){{1,3}}(?:/{_LETTER_OF_FOLDER}+)+/?)*"
        ),
    ),
)
"""Kind of what is taken out, and its pattern; where a pattern has a group `taken`, only that group is taken out."""
_STAND_IN = re.compile(r"[A-Za-z_]+-\d+")
_FIELDS_OF_IDENTITY = ("git_revision", "allocation", "uuid")
"""Fields whose text is replaced as a whole: whether they are set, and which are equal, is all that a reader learns."""
_HOST_FIELDS = ("host", "hosts")
_WHOLE_PATH = re.compile(r"([\w.-]+=)?((?:~[\w-]*|\.{1,2})?/[^\n:]*)")
"""A text that is a path and nothing else, or an option's: its folders may have blanks in their names."""
_PATH_CHARACTERS = re.compile(r"[\w.~/=+@,-]+")
_STEP = re.compile(
    rf'\{{"kind":"step"(?:,"(?:{"|".join(StepLine.model_fields)})":(?:[\d.eE+-]+|true|false|null|"(?:{"|".join(WINDOWS)})"))*\}}'
)
"""A step's line with nothing but numbers: most lines of most results."""
_QUOTED_PATH = re.compile(r'"((?:~[\w-]*|\.{1,2})?/[^"\\\n:]{1,4096})"')
_HOME = re.compile(r"/(?:home|Users)/([\w.-]+)")


NameKind = Literal["USER", "host"]
"""Whether a learnt name is a user's or a host's: also the word before the number of its stand-in."""


def _is_path(value: str) -> bool:
    """Whether a variable's value is redacted as a path wherever it stands.

    With other characters than these it is not: where such a path stands in a text, it may seem to end before them.

    Example: `nccl.plugin=/opt/lib/net.so` is one.
    """
    return _WHOLE_PATH.fullmatch(value) is not None and _PATH_CHARACTERS.fullmatch(value) is not None


class Redactor:
    """Redacts texts and JSON values; a value has the same stand-in in all that one redactor writes.

    `learn*` methods come first, over all files; the others then take out what was learnt. Kinds of stand-ins are the
    words before their numbers: "USER", "host", "PATH", "SECRET", ...
    """

    def __init__(self) -> None:
        """Learns this process's user, and the values of its variables with a secret's name."""
        # Learnt values.
        self._kind_by_name: dict[str, NameKind] = {}
        """Name of a user or a host, in small letters -> its kind."""
        self._name_pattern: re.Pattern[str] | None = None
        """Finds all names in `_kind_by_name`. Compiled by `_without_names` when it is needed; `learn` sets None."""
        self._spaced_paths: dict[str, None] = {}
        """Paths with blanks in them, as an ordered set: in other texts nothing shows where they end."""
        self._secrets = _no_secrets_yet()

        # Stand-ins that have been given.
        self._stand_ins: dict[str, str] = {}
        """Text that was taken out -> its stand-in: {"alice": "USER-0", "/data/faces": "PATH-0"}.

        The text alone is the key: if it is found again as something of another kind, it keeps its first stand-in.
        """
        self._counts: dict[str, int] = {}
        """Kind -> number of stand-ins of that kind."""

        self._learn_this_process()

    def _learn_this_process(self) -> None:
        """Learn the user of this process, and the values of variables with a secret's name."""
        with suppress(KeyError, OSError):  # no such user, no home
            self.learn("USER", (getpass.getuser(),))
        with suppress(RuntimeError):
            self.learn("USER", (Path.home().name,))
        for name, value in os.environ.items():
            if is_secret_name(name):
                self._secrets.add(value)

    def learn(self, kind: NameKind, names: Iterable[str]) -> None:
        """Take out these names from now on.

        Args:
            kind: whether they are names of users or of hosts. A host is learnt without its domain, unless it is an IP
                address.
            names: names as they were recorded; those of one letter are left out.
        """
        for name in names:
            bare_name = _host_without_domain(name) if kind == "host" else name
            if len(bare_name) > 1 and bare_name.lower() not in self._kind_by_name:
                self._kind_by_name[bare_name.lower()] = kind
                self._name_pattern = None

    def learn_variables(self, variables: Mapping[str, str]) -> None:
        """Take out values of variables from now on; plain words and numbers stay, and paths are redacted as paths."""
        for name, value in variables.items():
            if is_secret_name(name):
                self._secrets.add(value)
            elif not is_plain_value(value) and not _is_path(value):
                self._secrets.add_setting(value)

    def learn_study(self, study: StudyRecord) -> None:
        """Learn the secrets and variables of a study's text, and of the command line over it."""
        self.learn_variables(launch_variables(study))
        for table in study_tables(study.text, study.overrides):
            self._learn_value(table)

    def learn_from(self, text: str) -> str:
        """Learn hosts, users and secrets from stored text (a JSON value, lines of JSON, other text), and return it.

        A secret that a form of text shows is learnt if it looks like a key; the value of a field or an option with a
        secret's name is always learnt.
        """
        self.learn("USER", _HOME.findall(text))
        for path in _QUOTED_PATH.findall(text):
            has_folders = path.count("/") > 1
            if has_folders and " " in path:
                self._spaced_paths[path] = None
        try:
            self._learn_value(json.loads(text))
        except (ValueError, RecursionError):
            self._learn_lines(text)
        return text

    def _learn_lines(self, text: str) -> None:
        """Learn from lines, each a JSON value or not. A secret of several lines is found in the text as a whole."""
        for line in text.splitlines():
            if line.startswith("{") and not _STEP.fullmatch(line):
                with suppress(ValueError, RecursionError):
                    self._learn_value(json.loads(line))
        self._learn_text(text)

    def _learn_text(self, text: str) -> None:
        for secret in secrets_in_text(text):
            self._secrets.add_likely(secret)

    def _learn_value(self, value: Any) -> None:
        self._learn_hosts(value)
        for secret in secrets_in_json(value, _is_format_field):
            self._secrets.add(secret)
        for settings in _settings_in(value):
            self.learn_variables({name: item for name, item in settings.items() if isinstance(item, str)})
        for text in _texts_in(value):
            self._learn_text(text)

    def _learn_hosts(self, value: Any) -> None:
        """Learn the hosts in fields called `host` or `hosts`, at any depth of a JSON value."""
        if isinstance(value, dict):
            for key, item in value.items():
                if key in _HOST_FIELDS:
                    self.learn("host", _host_names(item))
                self._learn_hosts(item)
        elif isinstance(value, list):
            for item in value:
                self._learn_hosts(item)

    def _stand_in(self, kind: str, text: str) -> str:
        """Return the stand-in of a text, "KIND-NUMBER"; a stand-in is its own, and a learnt secret is a SECRET."""
        is_stand_in = _STAND_IN.fullmatch(text) and text in self._stand_ins.values()
        if is_stand_in:
            return text
        if text not in self._stand_ins:
            if text in self._secrets:
                kind = "SECRET"
            number = self._counts.get(kind, 0)
            self._counts[kind] = number + 1
            self._stand_ins[text] = f"{kind}-{number}"
        return self._stand_ins[text]

    def text(self, text: str) -> str:
        """Return the text without learnt values and names, and without what `FORMS` and `_PATTERNS` find.

        They go in this order: learnt secrets, learnt paths with blanks, `FORMS`, learnt names, `_PATTERNS`.
        """
        text = self._secrets.with_stand_ins(text, partial(self._stand_in, "SECRET"))
        text = self._without_spaced_paths(text)
        text = self._without_forms(text)
        text = self._without_names(text)
        for kind, pattern in _PATTERNS:
            text = pattern.sub(partial(self._match_with_stand_in, kind), text)
        return text

    def _without_spaced_paths(self, text: str) -> str:
        if not self._spaced_paths:
            return text
        paths = "|".join(map(re.escape, sorted(self._spaced_paths, key=len, reverse=True)))
        return re.sub(rf"(?:{paths})[^\s:\"',;()\[\]]*", partial(self._match_with_stand_in, "PATH"), text)

    def _without_forms(self, text: str) -> str:
        """Take out secrets by the forms in which they are written, learnt or not."""
        lowered = text.lower()
        for form in FORMS:
            if any(hint in lowered for hint in form.hints):
                text = form.pattern.sub(partial(self._match_with_stand_in, "SECRET", is_meant=form.is_secret), text)
        return text

    def _without_names(self, text: str) -> str:
        """Take out learnt names of users and hosts, in small or capital letters, with the domain behind a host."""
        if not self._kind_by_name:
            return text
        if self._name_pattern is None:
            names = "|".join(re.escape(name) for name in sorted(self._kind_by_name, key=len, reverse=True))
            domain = r"(?:\.[a-z][\w-]+)*"
            self._name_pattern = re.compile(rf"(?<![A-Za-z0-9])({names}){domain}(?![A-Za-z0-9])", re.IGNORECASE)
        return self._name_pattern.sub(self._name_replacement, text)

    def _name_replacement(self, match: re.Match[str]) -> str:
        """Return the stand-in of a learnt name; what follows a user's name after a dot stays, a host's domain goes."""
        name = match[1].lower()
        kind = self._kind_by_name[name]
        if kind == "host":
            return self._stand_in(kind, name)
        suffix = match[0][len(name) :]
        return self._stand_in(kind, name) + suffix

    def _match_with_stand_in(self, kind: str, match: re.Match[str], is_meant: Callable[[str], bool] = bool) -> str:
        """Return the text of a match with the stand-in in place of its `secret_span`.

        Args:
            kind: of the stand-in.
            match: a match of a pattern of this module or of `FORMS`.
            is_meant: whether a text in that place is to be taken out; where it is not, the match stays as it is.
        """
        begin, end = secret_span(match)
        text = match.string[begin:end]
        if not is_meant(text):
            return match[0]
        if kind == "host":
            text = text.lower()
        match_before_span = match.string[match.start() : begin]
        match_after_span = match.string[end : match.end()]
        return match_before_span + self._stand_in(kind, text) + match_after_span

    def value(self, value: Any, key: str = "") -> Any:
        """Return a JSON value with all its texts redacted.

        Words of the format itself (names of fields, values of a fixed choice) stay: they identify nobody, and a host
        that is called "failed" must not make a file unreadable. Variables (`settings`) stay where they are plain words
        or numbers.

        Args:
            value: the value.
            key: the field that it is the value of, or lies in a list of; empty for none.
        """
        if isinstance(value, str):
            return self._redact_text_of_field(value, key)
        if isinstance(value, list | tuple):
            return self._redact_list(value, key)
        if isinstance(value, dict):
            return self._redact_table(value)
        return value

    def _redact_text_of_field(self, text: str, key: str) -> str:
        if key not in _HOST_FIELDS and text in _format_words().choices:
            return text
        whole_path = _WHOLE_PATH.fullmatch(text)
        if whole_path is None:
            return self.text(text)
        option, path = whole_path.groups()
        return self.text(option or "") + self._stand_in("PATH", path)

    def _redact_list(self, items: Sequence[Any], key: str) -> list[Any]:
        """Redact a list. In a command's list of words an option may stand before a secret: ["--token", "abc"]."""
        redacted = []
        for previous_item, item in pairwise(("", *items)):
            if is_secret_argument(previous_item, item):
                redacted.append(self._stand_in("SECRET", item))
            else:
                redacted.append(self.value(item, key))
        return redacted

    def _redact_table(self, table: Mapping[str, Any]) -> dict[str, Any]:
        """Redact a JSON object, its names too, unless they are fields of the format."""
        redacted: dict[str, Any] = {}
        for name, item in table.items():
            if name == "settings" and isinstance(item, dict):
                redacted[name] = {
                    variable: self._redact_variable(variable, setting) for variable, setting in item.items()
                }
            elif name in _FIELDS_OF_IDENTITY and isinstance(item, str):
                redacted[name] = self._stand_in(name, item)
            elif _is_format_field(name):
                redacted[name] = self.value(item, name)
            elif isinstance(item, str) and is_secret_name(name):
                redacted[self.text(name)] = self._stand_in("SECRET", item)
            else:
                redacted[self.text(name)] = self.value(item, name)
        return redacted

    def _redact_variable(self, name: str, setting: Any) -> Any:
        """Redact one setting. GPU settings share the field's name with variables, but are numbers and truth values."""
        if not isinstance(setting, str):
            return self.value(setting)
        if is_secret_name(name) or not is_plain_value(setting):
            return self._stand_in("VALUE", setting)
        return self.text(setting)

    def json_text(self, text: str) -> str:
        """Redact a JSON value, or other text, and return it as text."""
        if _STEP.fullmatch(text):
            return text
        try:
            return json.dumps(self.value(json.loads(text)))
        except (ValueError, RecursionError):
            return self.text(text)

    def lines(self, text: str) -> str:
        """Redact lines of JSON values, one value a line."""
        return "\n".join(self.json_text(line) if line else "" for line in text.split("\n"))


NOT_SHOWN = "(not shown)"


def without_secrets(study: StudyRecord) -> StudyRecord:
    """Return the study with `NOT_SHOWN` for the secrets in its text and overrides, for a page that others read."""
    secrets = _no_secrets_yet()
    for name, value in launch_variables(study).items():
        if is_private(name, value):
            secrets.add(value)
    for table in study_tables(study.text, study.overrides):
        for secret in secrets_in_json(table, _is_format_field):
            secrets.add(secret)

    def shown(text: str) -> str:
        return secrets.with_stand_ins(text, lambda _: NOT_SHOWN)

    return study.model_copy(update={"text": shown(study.text), "overrides": tuple(map(shown, study.overrides))})


def _no_secrets_yet() -> KnownSecrets:
    """Return a collection of secrets that leaves the format's words and names of models where they stand."""
    return KnownSecrets(words=_format_words().choices | NAMED_MODELS.keys())


def _host_without_domain(name: str) -> str:
    """Return the part of a host's name before its first dot; an IPv4 address whole."""
    is_address = name.replace(".", "").isdigit()
    return name if is_address else name.partition(".")[0]


def _host_names(hosts: Any) -> Iterator[str]:
    """Yield the names in a recorded field `host` or `hosts`: a name, an object with a name, or a list of either."""
    items = hosts if isinstance(hosts, list) else [hosts]
    for item in items:
        name = item.get("name") if isinstance(item, dict) else item
        if isinstance(name, str):
            yield name


def _settings_in(value: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the variables that ranks have recorded, at any depth of a JSON value."""
    if isinstance(value, dict):
        settings = value.get("settings")
        if isinstance(settings, dict):
            yield settings
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _settings_in(item)


def _texts_in(value: Any) -> Iterator[str]:
    """Yield the texts in a JSON value, at any depth, keys among them."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from value
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _texts_in(item)


class _FormatWords(NamedTuple):
    """Words that vitscale itself writes into results."""

    fields: frozenset[str]
    """Names of all stored fields."""
    choices: frozenset[str]
    """Values that fields of a fixed choice may have."""


def _is_format_field(name: str) -> bool:
    return name in _format_words().fields


@cache
def _format_words() -> _FormatWords:
    """Return the words in the JSON schemas of all that a results folder stores, gathered at any depth."""
    kinds: list[Any] = [StudyRecord, RunHeader, Outcome, CheckRecord, *kinds_of(RankRecord), *kinds_of(CheckedRank)]
    fields: set[str] = set()
    choices: set[str] = set()
    _, schema_of_all = models_json_schema([(kind, "validation") for kind in kinds])
    to_visit: list[Any] = [schema_of_all]
    while to_visit:
        schema = to_visit.pop()
        if isinstance(schema, Mapping):
            properties = schema.get("properties")
            if isinstance(properties, Mapping):
                fields.update(properties)
            choices.update(_choices_of(schema))
            to_visit += schema.values()
        elif isinstance(schema, list):
            to_visit += schema
    return _FormatWords(frozenset(fields), frozenset(choices))


def _choices_of(schema: Mapping[str, Any]) -> list[str]:
    """Return the texts that a part of a JSON schema fixes, by `enum` or by `const`."""
    choices = schema.get("enum", [schema.get("const")])
    if not isinstance(choices, list):
        return []
    return [word for word in choices if isinstance(word, str)]
