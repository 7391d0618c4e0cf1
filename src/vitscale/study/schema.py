"""The study file as a JSON schema, with which an editor completes, explains and checks it as one types.

It accepts all that a study may say. How values depend on one another is for `vitscale plan` to check.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import textwrap
from collections.abc import Collection
from typing import Any

from vitscale.engines import ENGINES
from vitscale.sources import SOURCES
from vitscale.study.sections import SECTIONS, SWEEPABLE, Study
from vitscale.trial.fields import Spec
from vitscale.trial.model_spec import NAMED_MODELS

_OFFERED: dict[str, Collection[str]] = {"model.name": NAMED_MODELS, "data.name": SOURCES, "train.engine": ENGINES}
"""Names that an editor offers; other packages may add more."""


def study_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a study file, with docstrings of the code as descriptions."""
    schema = Study.model_json_schema()
    definitions = schema["$defs"]
    _describe(schema, Study)
    for section_type in SECTIONS.values():
        _describe(definitions[section_type.__name__], section_type)
    for field, names in _OFFERED.items():
        section, _, key = field.partition(".")
        properties = definitions[SECTIONS[section].__name__]["properties"]
        kept = {word: properties[key][word] for word in ("description", "default") if word in properties[key]}
        properties[key] = {"anyOf": [{"enum": sorted(names)}, {"type": "string"}]} | kept
    # A script knows model and data itself, and data.hf names the dataset.
    del definitions["DataSpec"]["required"]
    scripted = {"properties": {"script": {}}, "required": ["script"]}
    schema |= {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A study of vitscale",
        "required": ["name"],
        "anyOf": [{"required": ["model", "data"]}, {"required": ["train"], "properties": {"train": scripted}}],
    }
    schema["anyOf"].append({"required": ["sweep"], "properties": {"sweep": {"required": ["train.script"]}}})
    schema["properties"]["sweep"] = _sweep()
    return schema


def _describe(schema: dict[str, Any], section_type: type[Spec]) -> None:
    """Put the docstrings of a section and its fields into its schema, and leave out of it what TOML does not have."""
    descriptions = _docstrings(section_type)
    schema["description"] = inspect.cleandoc(section_type.__doc__ or "").partition("\n\n")[0]
    for key, value in schema["properties"].items():
        schema["properties"][key] = _as_toml(value)
        if key in descriptions:
            schema["properties"][key]["description"] = descriptions[key]


def _sweep() -> dict[str, Any]:
    """Return the schema of [sweep]: a list of values for each field, or of tables of a section's fields.

    In these tables other sections' fields go by dotted names.
    """
    fields: dict[str, Any] = {}
    fields_by_section: dict[str, dict[str, Any]] = {}
    for field in SWEEPABLE:
        section, _, key = field.partition(".")
        reference = {"$ref": f"#/$defs/{SECTIONS[section].__name__}/properties/{key}"}
        fields[field] = reference
        fields_by_section.setdefault(section, {})[key] = reference
    tables = {
        section: {"type": "object", "additionalProperties": False, "properties": keys | fields, "minProperties": 1}
        for section, keys in fields_by_section.items()
    }
    return {
        "description": "What varies: every combination is a curve.",
        "type": "object",
        "additionalProperties": False,
        "properties": {key: {"type": "array", "minItems": 1, "items": item} for key, item in (fields | tables).items()},
    }


def _as_toml(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a field's schema without null, which TOML does not have, and without titles, which repeat the key."""
    kept = {key: value for key, value in schema.items() if key != "title"}
    if kept.get("default", ...) is None:
        del kept["default"]
    choices = [choice for choice in kept.pop("anyOf", []) if choice.get("type") != "null"]
    if not choices:
        return kept
    return kept | choices[0] if len(choices) == 1 else kept | {"anyOf": choices}


def _docstrings(section_type: type[Spec]) -> dict[str, str]:
    """Return field -> the docstring below it, or below a base class's field of this name; fields without are left out.

    Python does not keep the docstrings of fields: they are read from the source.
    """
    docstrings: dict[str, str] = {}
    for base in reversed(section_type.__mro__):
        if not issubclass(base, Spec):
            continue
        (declaration,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        statements = declaration.body if isinstance(declaration, ast.ClassDef) else []
        for statement, following in itertools.pairwise(statements):
            if not isinstance(statement, ast.AnnAssign) or not isinstance(following, ast.Expr):
                continue
            if isinstance(statement.target, ast.Name):
                docstrings[statement.target.id] = inspect.cleandoc(str(getattr(following.value, "value", "")))
    return docstrings
