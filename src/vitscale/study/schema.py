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
    """JSON Schema (draft 2020-12) of a study file, with docstrings of the code as descriptions."""
    schema = Study.model_json_schema()
    definitions = schema["$defs"]
    kinds: list[type[Spec]] = [Study, *SECTIONS.values()]
    for kind in kinds:
        body = schema if kind is Study else definitions[kind.__name__]
        told = _docstrings(kind)
        body["description"] = inspect.cleandoc(kind.__doc__ or "").partition("\n\n")[0]
        body["properties"] = {
            key: _as_toml(value) | ({"description": told[key]} if key in told else {})
            for key, value in body["properties"].items()
        }
    for field, names in _OFFERED.items():
        section, _, key = field.partition(".")
        properties = definitions[SECTIONS[section].__name__]["properties"]
        described = {word: properties[key][word] for word in ("description", "default") if word in properties[key]}
        properties[key] = {"anyOf": [{"enum": sorted(names)}, {"type": "string"}]} | described
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


def _sweep() -> dict[str, Any]:
    """Schema of [sweep]: a list of values for each field, or of tables of a section's fields, in which other sections'
    fields go by dotted names."""
    fields = {
        field: {"$ref": f"#/$defs/{SECTIONS[section].__name__}/properties/{key}"}
        for field in SWEEPABLE
        for section, _, key in [field.partition(".")]
    }
    by_section: dict[str, dict[str, Any]] = {}
    for field, value in fields.items():
        section, _, key = field.partition(".")
        by_section.setdefault(section, {})[key] = value
    tables = {
        section: {"type": "object", "additionalProperties": False, "properties": keys | fields, "minProperties": 1}
        for section, keys in by_section.items()
    }
    return {
        "description": "What varies: every combination is a curve.",
        "type": "object",
        "additionalProperties": False,
        "properties": {key: {"type": "array", "minItems": 1, "items": item} for key, item in (fields | tables).items()},
    }


def _as_toml(value: dict[str, Any]) -> dict[str, Any]:
    """`value` without null, which TOML does not have, and without titles, which repeat the key."""
    kept = {key: part for key, part in value.items() if key != "title" and not (key == "default" and part is None)}
    choices = [choice for choice in kept.pop("anyOf", []) if choice.get("type") != "null"]
    return kept | (choices[0] if len(choices) == 1 else {"anyOf": choices} if choices else {})


def _docstrings(kind: type[Spec]) -> dict[str, str]:
    """Docstrings of the fields that have one below them; a base class's where the class has none."""
    told: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if not issubclass(base, Spec):
            continue
        (declared,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        body = declared.body if isinstance(declared, ast.ClassDef) else []
        for field, below in itertools.pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(below, ast.Expr):
                told[field.target.id] = inspect.cleandoc(str(getattr(below.value, "value", "")))
    return told
