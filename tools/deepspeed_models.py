"""The fields of DeepSpeed's pydantic models, which refuse every key that they do not know."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

from deepspeed_source import Module, Release

_BASES = ("DeepSpeedConfigModel", "BaseModel")


def fields_of(node: ast.ClassDef, module: Module, release: Release) -> Iterator[tuple[tuple[str, ...], str]]:
    """(place below the model, fact) of the model itself and all fields in it; the facts are those of `Reading`."""
    yield (), "open" if re.search(r"extra\s*=\s*'allow'", ast.unparse(node)) else "strict"
    for base in node.bases:
        found = release.find(ast.unparse(base), module)
        if found is not None and isinstance(found[0], ast.ClassDef) and found[0].name not in _BASES:
            yield from fields_of(found[0], found[1], release)
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            for name in (item.target.id, _keyword(item.value, "alias")):
                if isinstance(name, str):
                    for below, fact in _field(item, module, release):
                        yield (name, *below), fact


def _field(item: ast.AnnAssign, module: Module, release: Release) -> Iterator[tuple[tuple[str, ...], str]]:
    extra = _keyword(item.value, "json_schema_extra")
    told = extra if isinstance(extra, dict) else {k: _keyword(item.value, k) for k in ("deprecated", "new_param")}
    if told.get("deprecated"):
        yield (), f"deprecated: {told.get('new_param') or ''}"
        return
    yield (), _type_of(item, module, release)
    for name in ast.walk(item.annotation):
        found = release.find(name.id, module) if isinstance(name, ast.Name) else None
        if found is not None and isinstance(found[0], ast.ClassDef) and _is_model(found[0], found[1], release):
            yield from fields_of(found[0], found[1], release)


def _type_of(item: ast.AnnAssign, module: Module, release: Release) -> str:
    """The type of a field with its limits, or the values it may have; "value" for all else."""
    written = ast.unparse(item.annotation)
    name = written.removeprefix("Optional[").removesuffix("]")
    null = " or null" if written != name else ""
    if name in ("bool", "int", "float", "str"):
        limits = [(limit, _keyword(item.value, limit)) for limit in ("gt", "ge", "lt", "le")]
        return " ".join([name, *(f"{limit}={value:g}" for limit, value in limits if value is not None)]) + null
    found = release.find(name, module)
    if found is None or not isinstance(found[0], ast.ClassDef) or "Enum" not in ast.unparse(found[0].bases[-1]):
        return "value"
    values = [release.constant(node.value, module) for node in found[0].body if isinstance(node, ast.Assign)]
    return "one of " + ", ".join(dict.fromkeys(str(value) for value in values)) + null


def _is_model(node: ast.ClassDef, module: Module, release: Release) -> bool:
    for base in node.bases:
        if ast.unparse(base) in _BASES:
            return True
        found = release.find(ast.unparse(base), module)
        if found is not None and isinstance(found[0], ast.ClassDef) and _is_model(found[0], found[1], release):
            return True
    return False


def _keyword(call: ast.expr | None, name: str) -> Any:
    """The literal that a call of `Field` gives to `name`; None where it gives none."""
    for keyword in call.keywords if isinstance(call, ast.Call) else ():
        if keyword.arg == name:
            if isinstance(keyword.value, ast.Dict):  # beside literals it holds functions
                pairs = zip(keyword.value.keys, keyword.value.values, strict=True)
                return {key.value: value.value for key, value in pairs if isinstance(value, ast.Constant)}
            return keyword.value.value if isinstance(keyword.value, ast.Constant) else None
    return None
