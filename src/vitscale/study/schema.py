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
from vitscale.trial.fields import Spec, sections_of
from vitscale.trial.model_spec import NAMED_MODELS

_OFFERED_NAMES: dict[str, Collection[str]] = {"model.name": NAMED_MODELS, "data.name": SOURCES, "train.engine": ENGINES}
"""Names that an editor offers; other packages may add more."""


def study_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a study file, with docstrings of the code as descriptions."""
    schema = Study.model_json_schema()
    definitions = schema["$defs"]
    _describe(schema, Study)
    for section_type in SECTIONS.values():
        _describe(definitions[section_type.__name__], section_type)
        for table_type in sections_of(section_type).values():  # tables in a list of the section
            _describe(definitions[table_type.__name__], table_type)
    for field, names in _OFFERED_NAMES.items():
        section, _, key = field.partition(".")
        properties = definitions[SECTIONS[section].__name__]["properties"]
        properties[key] = _with_offered_names(properties[key], names)
    del definitions["DataSpec"]["required"]  # the dataset's name, which a script or data.hf stands for
    needs_model_and_data = {"required": ["model", "data"]}
    has_script = {"properties": {"script": {}}, "required": ["script"]}
    trains_by_script = {"required": ["train"], "properties": {"train": has_script}}
    sweeps_scripts = {"required": ["sweep"], "properties": {"sweep": {"required": ["train.script"]}}}
    schema |= {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A study of vitscale",
        "required": ["name"],
        "anyOf": [needs_model_and_data, trains_by_script, sweeps_scripts],  # a script knows model and data itself
    }
    schema["properties"]["sweep"] = _sweep_schema()
    return schema


def _with_offered_names(field_schema: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return a field's schema that offers these names, and takes any other text too."""
    kept = {word: field_schema[word] for word in ("description", "default") if word in field_schema}
    return {"anyOf": [{"enum": sorted(names)}, {"type": "string"}]} | kept


def _describe(schema: dict[str, Any], section_type: type[Spec]) -> None:
    """Put the docstrings of a section and its fields into its schema, and leave out of it what TOML does not have."""
    descriptions = _docstrings(section_type)
    schema["description"] = inspect.cleandoc(section_type.__doc__ or "").partition("\n\n")[0]
    for key, value in schema["properties"].items():
        schema["properties"][key] = _without_null(value)
        if key in descriptions:
            schema["properties"][key]["description"] = descriptions[key]


def _sweep_schema() -> dict[str, Any]:
    """Return the schema of [sweep].

    A key of [sweep] is a dotted field with a list of its values, or a section with a list of tables:

        "train.micro_batch" = [8, 16]
        train = [{ engine = "ddp" }, { engine = "fsdp2", "parallel.tensor" = 2 }]

    A table has keys of its section, and fields of other sections by their dotted names.
    """
    field_schemas: dict[str, Any] = {}  # "train.engine" -> schema of one value
    key_schemas_by_section: dict[str, dict[str, Any]] = {}  # "train" -> "engine" -> the same schema
    for field in SWEEPABLE:
        section, _, key = field.partition(".")
        value_schema = {"$ref": f"#/$defs/{SECTIONS[section].__name__}/properties/{key}"}
        field_schemas[field] = value_schema
        key_schemas_by_section.setdefault(section, {})[key] = value_schema
    properties = {field: _list_schema(value_schema) for field, value_schema in field_schemas.items()}
    for section, key_schemas in key_schemas_by_section.items():
        table_schema = {
            "type": "object",
            "additionalProperties": False,
            "properties": {**key_schemas, **field_schemas},
            "minProperties": 1,
        }
        properties[section] = _list_schema(table_schema)
    return {
        "description": "What varies: every combination is a curve.",
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
    }


def _list_schema(item_schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a list with at least one such item."""
    return {"type": "array", "minItems": 1, "items": item_schema}


def _without_null(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a field's schema without null, which TOML does not have, and without its title, which repeats the key.

    Example: {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None} becomes {"type": "integer"}.
    """
    kept = {key: value for key, value in schema.items() if key != "title"}
    has_null_default = "default" in kept and kept["default"] is None
    if has_null_default:
        del kept["default"]
    choices = [choice for choice in kept.pop("anyOf", []) if choice.get("type") != "null"]
    if not choices:
        return kept
    merged: dict[str, Any] = choices[0] if len(choices) == 1 else {"anyOf": choices}
    return kept | merged


def _docstrings(section_type: type[Spec]) -> dict[str, str]:
    """Return field -> the docstring below it. A field without one takes that of a base class, or is left out.

    Python does not keep the docstrings of fields: they are read from the source.
    """
    docstrings: dict[str, str] = {}
    for base in reversed(section_type.__mro__):
        if issubclass(base, Spec):
            docstrings |= _declared_docstrings(base)
    return docstrings


def _declared_docstrings(section_type: type[Spec]) -> dict[str, str]:
    """Return field -> docstring for the fields that a class itself declares, without those of its bases."""
    docstrings: dict[str, str] = {}
    (declaration,) = ast.parse(textwrap.dedent(inspect.getsource(section_type))).body
    statements = declaration.body if isinstance(declaration, ast.ClassDef) else []
    for statement, following in itertools.pairwise(statements):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue  # no declaration of a field
        if isinstance(following, ast.Expr):
            docstrings[statement.target.id] = inspect.cleandoc(str(getattr(following.value, "value", "")))
    return docstrings
