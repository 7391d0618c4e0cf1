"""Writes the page of the Python API from the docstrings of what `vitscale` offers."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any

import vitscale
from vitscale.errors import VitscaleError
from vitscale.present.verb_result import VerbResult

_HEADINGS = ("Args", "Returns", "Raises", "Example")
_SECTION = re.compile(rf"^({'|'.join(_HEADINGS)}):$", re.MULTILINE)
_LONGEST_LINE = 100
_ENTRY = re.compile(r"^(\*?\w+): (.*(?:\n {4,}.*)*)", re.MULTILINE)
_INTRODUCTION = """# Python API

Written from the code: what the verbs of the command line do, as functions. How they are used: [in a
notebook](../notebook.md). A function takes the options of its verb under the same names (`--nodes-of` is `nodes_of`),
and messages of errors name them as the command line has them. `None` is what was not given, or is unavailable.
"""


def python_api() -> str:
    """The page: functions, then the options and results that they take and return, then the errors."""
    offered = {name: getattr(vitscale, name) for name in vitscale.__all__}
    functions = {name: value for name, value in offered.items() if inspect.isfunction(value)}
    classes = {name: value for name, value in offered.items() if inspect.isclass(value)}
    errors = {name: value for name, value in classes.items() if issubclass(value, VitscaleError)}
    results = {name: value for name, value in classes.items() if name.endswith("Result") or name == "Frames"}
    others = {name: value for name, value in classes.items() if name not in errors | results}
    lines = [_INTRODUCTION]
    for title, group in (("Functions", functions), ("Options and probes", others)):
        lines += [f"## {title}", ""]
        for name, value in group.items():
            lines += _described(name, value)
    lines += ["## Results", "", *_verb_result()]
    for name, value in results.items():
        lines += _described(name, value)
    lines += ["## Errors", ""]
    for name, value in errors.items():
        lines += [f"- `vitscale.{name}`: {_in_one_line(inspect.getdoc(value))}"]
    return "\n".join(lines) + "\n"


def _verb_result() -> Iterator[str]:
    """What all results of verbs have."""
    yield f"{_in_one_line(inspect.getdoc(VerbResult))} Each has:"
    yield ""
    yield from _members(VerbResult)
    yield ""


def _described(name: str, value: Any) -> Iterator[str]:
    """A heading, the signature of a function, and the docstring."""
    yield f"### vitscale.{name}"
    yield ""
    if inspect.isfunction(value):
        yield from ("```python", _signature(name, value), "```", "")
    yield from _docstring(inspect.getdoc(value) or "")
    if inspect.isclass(value):
        yield from _fields(value)
        members = [*_members(value)]
        yield from [*members, ""] if members else []


def _signature(name: str, function: Any) -> str:
    """A function with its arguments, one a line where they are many."""
    signature = inspect.signature(function)
    parameters = [*_parameters(signature)]
    whole = f"{name}({', '.join(parameters)}) -> {signature.return_annotation}"
    if len(whole) <= _LONGEST_LINE:
        return whole
    body = "".join(f"    {parameter},\n" for parameter in parameters)
    return f"{name}(\n{body}) -> {signature.return_annotation}"


def _parameters(signature: inspect.Signature) -> Iterator[str]:
    """Each parameter as it is declared, and the star before those that are named."""
    needs_star = True
    for parameter in signature.parameters.values():
        star = "*" if parameter.kind is parameter.VAR_POSITIONAL else ""
        if parameter.kind is parameter.KEYWORD_ONLY and needs_star:
            yield "*"
        needs_star = needs_star and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
        yield f"{star}{parameter.name}: {parameter.annotation}{default}"


def _docstring(text: str) -> Iterator[str]:
    """A docstring as Markdown: its sections as lists, its example as code."""
    first, *rest = _SECTION.split(text)
    yield from (_escaped(first.strip()), "")
    for heading, body in zip(rest[::2], rest[1::2], strict=True):
        dedented = textwrap.dedent(body).strip("\n")
        if heading == "Example":
            yield from ("```pycon", dedented, "```", "")
        elif heading == "Returns":
            yield from (f"**Returns** {_in_one_line(dedented)}", "")
        else:
            yield from (f"**{'Arguments' if heading == 'Args' else heading}**", "")
            yield from (f"- `{name}`: {_in_one_line(what)}" for name, what in _ENTRY.findall(dedented))
            yield ""


@dataclass(frozen=True)
class _Field:
    """A field of a dataclass as its source has it."""

    type: str
    what: str


def _fields(value: type) -> Iterator[str]:
    """A table of a dataclass's fields; nothing of another class."""
    if not is_dataclass(value):
        return
    declared = _declared(value)
    yield from ("| field | type | default | what |", "| --- | --- | --- | --- |")
    for field in fields(value):
        source = declared[field.name]
        default = "" if field.default is MISSING else f"`{field.default!r}`"
        kind = source.type.replace("|", "\\|")
        yield f"| `{field.name}` | `{kind}` | {default} | {_in_a_cell(source.what)} |"
    yield ""


def _declared(value: type) -> dict[str, _Field]:
    """Each annotated field of a class, with the docstring below it."""
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(value))).body
    body = node.body if isinstance(node, ast.ClassDef) else []
    declared: dict[str, _Field] = {}
    for line, following in zip(body, [*body[1:], ast.Pass()], strict=True):
        if not isinstance(line, ast.AnnAssign) or not isinstance(line.target, ast.Name):
            continue
        is_told = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
        what = str(following.value.value) if is_told else ""  # type: ignore[attr-defined]  # told: an Expr
        declared[line.target.id] = _Field(ast.unparse(line.annotation), what)
    return declared


_OF_EVERY_RESULT = frozenset(name for name in vars(VerbResult) if not name.startswith("_"))


def _members(value: type) -> Iterator[str]:
    """A line for each public property and method of a class, but for what every result has."""
    for name, member in vars(value).items():
        if name.startswith("_") or (value is not VerbResult and name in _OF_EVERY_RESULT):
            continue
        function = getattr(member, "fget", None) or getattr(member, "func", None) or member
        told = inspect.getdoc(function)
        if not inspect.isfunction(function) or told is None:
            continue
        called = "()" if inspect.isfunction(member) else ""
        yield f"- `.{name}{called}`: {_in_one_line(_SECTION.split(told)[0])}"


def _in_one_line(text: str | None) -> str:
    return _escaped(re.sub(r"\s+", " ", text or "").strip())


def _in_a_cell(text: str) -> str:
    return _in_one_line(text).replace("|", "\\|")


def _escaped(text: str) -> str:
    """Text in which a bracketed word is no link and a pointed one no tag; what is in backticks stays as it is."""
    pieces = re.split(r"(`[^`]*`)", text)
    return "".join(piece if piece.startswith("`") else re.sub(r"([\[\]<*])", r"\\\1", piece) for piece in pieces)
