"""The Python source of one release of DeepSpeed: modules, names and constants, looked up without running anything."""

from __future__ import annotations

import ast
import tarfile
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

UNKNOWN = object()
"""What is no constant."""


@dataclass
class Module:
    """One file: what its top level defines and imports."""

    path: PurePosixPath
    tree: ast.Module
    defined: dict[str, ast.stmt | ast.expr] = field(default_factory=dict)
    imported: dict[str, tuple[PurePosixPath, str]] = field(default_factory=dict)
    starred: list[PurePosixPath] = field(default_factory=list)


class Release:
    """The modules of one source archive, parsed when asked for."""

    def __init__(self, archive: Path) -> None:
        self._texts: dict[PurePosixPath, str] = {}
        with tarfile.open(archive) as members:
            for member in members:
                inside = PurePosixPath(*PurePosixPath(member.name).parts[1:])
                content = members.extractfile(member) if inside.suffix == ".py" else None
                if content is not None and inside.parts[:1] == ("deepspeed",):
                    self._texts[inside] = content.read().decode()
        self._modules: dict[PurePosixPath, Module] = {}

    def module(self, path: PurePosixPath) -> Module | None:
        """The module or package at `path` ("deepspeed/runtime/config"); None where the release has none."""
        found = next((p for p in (path.with_suffix(".py"), path / "__init__.py") if p in self._texts), None)
        if found is None:
            return None
        if found not in self._modules:
            self._modules[found] = self._parsed(found)
        return self._modules[found]

    def _parsed(self, path: PurePosixPath) -> Module:
        module = Module(path, ast.parse(self._texts[path]))
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ImportFrom):
                start = path.parents[node.level - 1] if node.level else PurePosixPath()
                source = start.joinpath(*(node.module or "").split("."))
                for name in node.names:
                    if name.name == "*":
                        module.starred.append(source)
                    else:
                        module.imported[name.asname or name.name] = (source, name.name)
        for node in module.tree.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                module.defined[node.name] = node
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                module.defined[node.targets[0].id] = node.value
        return module

    def find(self, name: str, module: Module, depth: int = 0) -> tuple[Any, Module] | None:
        """What `name` stands for in `module`, and where that is defined; None outside of the release."""
        if name in module.defined:
            return module.defined[name], module
        if depth > 8:
            return None
        if name in module.imported:
            source, original = module.imported[name]
            there = self.module(source)
            return self.find(original, there, depth + 1) if there is not None else None
        for source in module.starred:
            there = self.module(source)
            found = self.find(name, there, depth + 1) if there is not None else None
            if found is not None:
                return found
        return None

    def named(self, name: str, module: Module) -> Any:
        """The value of the constant `name`; None where there is none."""
        value = self.constant(ast.Name(name), module)
        return None if value is UNKNOWN else value

    def constant(self, node: ast.expr, module: Module) -> Any:
        """The value of a literal or of a name for one; `UNKNOWN` otherwise."""
        if isinstance(node, ast.Name):
            found = self.find(node.id, module)
            return self.constant(found[0], found[1]) if found and isinstance(found[0], ast.expr) else UNKNOWN
        if isinstance(node, (ast.List, ast.Tuple)):
            return [self.constant(item, module) for item in node.elts]
        if isinstance(node, ast.Dict):
            return {self.constant(key, module): None for key in node.keys if key is not None}
        try:
            return ast.literal_eval(node)
        except ValueError:
            return UNKNOWN
