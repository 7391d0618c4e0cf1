"""How secrets are written in text and in JSON: the forms by which a value is recognised as a secret.

Words before a value show more or less surely that it is a secret: behind `password=` anything is one, behind `pass:`
only what looks like a key (`Form.is_secret`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from vitscale.base.secret_names import LONE_WORD, SECRET_WORD, is_secret_name

FEWEST_KEY_CHARACTERS = 8
"""Fewest letters of a value that is taken for a key by its looks alone: shorter ones are words by chance."""
_FEWEST_RANDOM_CHARACTERS = 12
"""Letters and digits in a row that no name of a model, a dataset or a device has."""


class SecretForm(NamedTuple):
    """One way to write a secret. Where the pattern has a group `taken`, that alone is the secret."""

    pattern: re.Pattern[str]
    hints: tuple[str, ...]
    """Texts in small letters, at least one of which stands in any text with this form: other text is not searched."""
    is_secret: Callable[[str], bool] = bool
    """Whether a value in this place is a secret."""


def looks_like_key(value: str) -> bool:
    """Whether a value has letters and digits, as keys have and words have not, and is `FEWEST_KEY_CHARACTERS` long."""
    return len(value) >= FEWEST_KEY_CHARACTERS and has_letters_and_digits(value)


def has_letters_and_digits(value: str) -> bool:
    """Whether a value has both letters and digits."""
    return any(map(str.isdigit, value)) and any(map(str.isalpha, value))


def looks_random(value: str) -> bool:
    """Whether letters and digits run on for longer than in any name ("vit-base-patch16-224")."""
    runs = re.findall(r"[A-Za-z0-9]+", value)
    return any(has_letters_and_digits(run) for run in runs if len(run) >= _FEWEST_RANDOM_CHARACTERS)


_QUOTE = r"""\\{0,4}["']"""
_VALUE = rf"(?P<quote>{_QUOTE})?(?P<taken>(?(quote)(?:(?!(?P=quote))[^\n]){{4,}}|[^\s\"',;]{{4,}}))"
"""A value, up to its closing quote where it has quotes, else up to a blank, a quote, a comma or a semicolon."""
_ASSIGNED = rf"(?:{_QUOTE})?\s*[=:]\s*"
_NEXT_WORD = rf"(?:\s*=\s*|\s+|{_QUOTE}\s*,\s*(?={_QUOTE}))"
"""Between an option and its value: in a shell, and in a list of words as Python and JSON print it."""
# Not a stand-in ("SECRET-0"), behind which another secret may stand.
# From the beginning of a word, or a short way on: else a word of 10,000 letters would take half a minute.
_NAME = rf"(?<![\w-])(?!SECRET-\d)[\w-]*(?:{SECRET_WORD})[\w-]{{0,200}}"
_LONE_NAME = rf"(?<![\w-])(?:[\w-]*[_-]|(?!key))(?:{LONE_WORD})"
# An option begins behind a letter too, as after a colour's "\x1b[1m" or an escaped line break.
_OPTION = rf"(?<!-)--[\w-]{{0,100}}?(?:{SECRET_WORD}|key)[\w-]{{0,200}}"
_LONE_OPTION = rf"(?<!-)--(?:[\w-]{{0,100}}[_-])?(?:{LONE_WORD})(?![\w-])"
_STRONG_HINTS = ("token", "secret", "passw", "passphrase", "passcode", "credential", "bearer", "key", "accesssignature")
_LONE_HINTS = ("key", "pat", "pwd", "pass", "cred", "auth", "sas", "sig", "dsn", "jwt", "cookie")


def _form(pattern: str, *hints: str, is_secret: Callable[[str], bool] = bool) -> SecretForm:
    return SecretForm(re.compile(pattern), hints, is_secret)


FORMS = (
    _form(r"(?<=://)[^\s/@]+(?=@)", "://"),
    _form(r"\b(?:hf_|gh[pousr]_|github_pat_|glpat-|sk-|xox[a-z]-|AKIA|eyJ)[\w.-]{8,}",
          "hf_", "gh", "github_pat_", "glpat-", "sk-", "xox", "akia", "eyj"),
    _form(r"\b(?:npm_|dckr_pat_|pypi-|nvapi-|hvs\.|[sr]k_live_)[\w.-]{8,}|\bASIA[A-Z0-9]{12,}|\bAIza[\w-]{16,}",
          "npm_", "dckr_pat_", "pypi-", "nvapi-", "hvs.", "k_live_", "asia", "aiza"),
    _form(rf"(?i){_NAME}{_ASSIGNED}{_VALUE}", *_STRONG_HINTS),
    _form(rf"(?i){_OPTION}{_NEXT_WORD}{_VALUE}", "--"),
    _form(rf"(?i){_LONE_OPTION}{_NEXT_WORD}{_VALUE}", "--"),
    _form(rf"(?i){_LONE_NAME}{_ASSIGNED}{_VALUE}", *_LONE_HINTS, is_secret=looks_like_key),
    # A variable as `env` of some shells prints it, and a sentence: AWS_SECRET_ACCESS_KEY wJal..., password is ...
    _form(rf"(?i){_NAME}(?:\s+is)?\s+{_VALUE}", *_STRONG_HINTS, is_secret=looks_like_key),
    _form(rf"(?<![\w-])[A-Z0-9_]*_(?:{LONE_WORD.upper()})\s+{_VALUE}", *_LONE_HINTS, is_secret=looks_like_key),
    _form(rf"(?i)(?<!-)--wandb{_NEXT_WORD}{_VALUE}", "--wandb", is_secret=looks_random),
    _form(rf"(?<![\w-])-[kp]{_NEXT_WORD}{_VALUE}", "-k", "-p", is_secret=looks_random),
    _form(rf"(?<![\w-])(?:-u|--user){_NEXT_WORD}(?:{_QUOTE})?[^\s:\"']+:(?P<taken>[^\s\"']{{4,}})", "-u", "--user"),
    _form(rf"(?i)[?&](?:[\w-]*(?:{SECRET_WORD})[\w-]*|[\w-]*(?<![a-z])(?:{LONE_WORD}))=(?P<taken>[^\s&\"'#]{{4,}})",
          "?", "&"),
    _form(r"(?i)\bBearer\s+(?P<taken>[\w.~+/=-]{8,})", "bearer"),
    _form(rf"(?i)\bAuthorization{_ASSIGNED}(?:{_QUOTE})?(?:\w+\s+)?(?P<taken>[\w.~+/=-]{{8,}})", "authorization"),
    # Nothing but the end marks where a key ends that a log cuts off, or has put other words between.
    _form(r"-----BEGIN [A-Z ]*PRIVATE KEY[A-Z ]*-----(?:(?!-----)[\s\S]){0,20000}(?:-----END [A-Z ]*-----)?",
          "private key"),
)  # fmt: skip
"""Forms of secrets in text, in the order in which they are looked for."""


def secrets_in_text(text: str) -> Iterator[str]:
    """Yield the secrets that `FORMS` find in a text, and a password alone where it stands behind a user's name."""
    lowered = text.lower()
    for form in FORMS:
        if any(hint in lowered for hint in form.hints):
            yield from _secrets_in_form(form, text)


def _secrets_in_form(form: SecretForm, text: str) -> Iterator[str]:
    """Yield the secrets that are written in one form, and their parts (`_secret_parts`)."""
    for match in form.pattern.finditer(text):
        begin, end = secret_span(match)
        secret = text[begin:end]
        if form.is_secret(secret):
            yield secret
            yield from _secret_parts(secret)


def _secret_parts(secret: str) -> Iterator[str]:
    """Yield the parts of a secret that are secrets by themselves.

    These are the password of "user:password", and the lines of a private key.
    """
    _, colon, password = secret.partition(":")
    if colon:
        yield password
    if "PRIVATE KEY" in secret:
        yield from key_lines(secret)


def key_lines(block: str) -> Iterator[str]:
    """Yield the lines of a text of several lines that may be part of a key; logs put other words between them."""
    for line in re.split(r"[\r\n]+|\\n", block):
        if looks_like_key(line.strip()) and "PRIVATE KEY" not in line:
            yield line.strip()


class TextSpan(NamedTuple):
    """A part of a text."""

    begin: int
    end: int


def secret_span(match: re.Match[str]) -> TextSpan:
    """Return the part of the searched text that is to be taken out: the match's group `taken` if there is one."""
    if "taken" in match.re.groupindex:
        return TextSpan(*match.span("taken"))
    return TextSpan(*match.span())


def is_secret_argument(option: object, value: object) -> bool:
    """Whether `value` is a secret, as the word after `option` in a command's list of words: ["--token", "abc"].

    The two may be any neighbours in a JSON list: False where `option` is no option, or either is no text.
    """
    if not isinstance(option, str) or not isinstance(value, str):
        return False
    if not option.startswith("-") or "=" in option:
        return False
    if option in ("-k", "-p", "--wandb"):
        return looks_random(value)
    if option in ("-u", "--user"):
        return ":" in value
    return is_secret_name(option)


def secrets_in_json(value: Any, is_format_field: Callable[[str], bool]) -> Iterator[str]:
    """Yield texts that stand under a key with a secret's name, or after such an option in a list, at any depth.

    Examples: "abc" of {"api_key": "abc"} and of ["--token", "abc"]. Texts are not searched: see `secrets_in_text`.

    Args:
        value: the value.
        is_format_field: whether a key is a field of the results' format: its value is no secret, whatever its name.
    """
    if isinstance(value, Mapping):
        for name, item in value.items():
            has_secret_name = is_secret_name(name) and not is_format_field(name)
            if isinstance(item, str) and has_secret_name:
                yield item
            yield from secrets_in_json(item, is_format_field)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for previous_item, item in pairwise(("", *value)):
            if is_secret_argument(previous_item, item):
                yield item
                yield from _secret_parts(item)
            yield from secrets_in_json(item, is_format_field)
