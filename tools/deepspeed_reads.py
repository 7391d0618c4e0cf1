"""Which keys of a configuration a release of DeepSpeed reads, found in its source without running it.

`DeepSpeedConfig` is followed like a reader would: wherever the configuration, or a part of it, is indexed, asked with
`.get` or `in`, handed to a function, or unpacked into a pydantic model, the key is noted. So the same program reads ten
releases over three years, whichever torch or pydantic they need.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from deepspeed_models import fields_of
from deepspeed_source import Module, Release

Keys = tuple[str, ...]
_READERS = ("get_scalar_param", "get_dict_param", "get_list_param")
_COPIES = ("copy.copy", "copy.deepcopy", "copy", "deepcopy", "dict")
_ROOT: Keys = ()
_REFUSED = (("_REMOVED_TOP_LEVEL_CONFIG_KEYS", ()), ("_REMOVED_ZERO_CONFIG_KEYS", ("zero_optimization",)))
_NOT_HELD = ("compression_training", "expert_parallel", "data_efficiency", "autotuning")
"""Parts whose own keys nobody tunes for vision transformers: they would be a third of the table."""


@dataclass
class Scope:
    """Where an expression stands: which names are parts of the configuration, which are known strings."""

    module: Module
    paths: dict[str, Keys] = field(default_factory=dict)
    strings: dict[str, str] = field(default_factory=dict)
    methods: dict[str, ast.FunctionDef] = field(default_factory=dict)


class Reading:
    """Follows one release's `DeepSpeedConfig`, and keeps in `facts` what it does with each key.

    A fact is "value" (read; where pydantic holds it to a type: "bool", "int gt=0", "bool or null", "one of A, B"),
    "read" (a part of which the named keys are read and others ignored), "strict" (a part that refuses keys it does not
    know), "open" (a part handed on whole), "deprecated: NEW" or "refused".
    """

    def __init__(self, release: Release) -> None:
        self.release = release
        self.facts: dict[Keys, str] = {}
        self._open: set[Keys] = set()
        self._twins: list[tuple[Keys, Keys]] = []
        self._followed: set[tuple[int, str, str]] = set()
        config = release.module(PurePosixPath("deepspeed/runtime/config"))
        assert config is not None, "no deepspeed/runtime/config.py"  # noqa: S101 - ends the program with the reason
        self.config = config
        whole = config.defined["DeepSpeedConfig"]
        assert isinstance(whole, ast.ClassDef), "no DeepSpeedConfig"  # noqa: S101 - ends the program with the reason
        self._call_class(whole, Scope(config, {"config": _ROOT}))
        self._tables()
        for one, other in self._twins:
            for path, fact in [*self.facts.items()]:
                if path[: len(other)] == other:
                    self.facts[(*one, *path[len(other) :])] = fact
        parents = {path[:-1] for path in self.facts}
        for path in [*self.facts]:
            if self.facts[path] == "value" and path in parents:
                self.facts[path] = "open" if path in self._open else "read"
        for path in [path for path in self.facts if path[0] in _NOT_HELD]:
            if len(path) > 1:
                del self.facts[path]
            elif self.facts[path] == "read":
                self.facts[path] = "open"

    def _tables(self) -> None:
        """What is written as tables instead of reads: the pipeline's defaults, and keys refused since they went."""
        reader = self.config.defined.get("get_pipeline_config")
        for node in ast.walk(reader) if reader is not None else ():
            if isinstance(node, ast.Dict):
                for key in node.keys:
                    self.facts[("pipeline", str(self.release.constant(key, self.config)))] = "value"
        for table, parent in _REFUSED:
            for key in self.release.named(table, self.config) or ():
                self.facts[(*parent, key)] = "refused"

    def _note(self, path: Keys, fact: str = "value") -> Keys:
        if fact != "value" or path not in self.facts:
            self.facts[path] = fact
        return path

    def _follow(self, function: ast.FunctionDef, scope: Scope) -> Keys | None:
        key = (id(function), repr(sorted(scope.paths.items())), repr(sorted(scope.strings.items())))
        if key in self._followed:
            return None
        self._followed.add(key)
        return self._block(function.body, scope)

    def _block(self, body: list[ast.stmt], scope: Scope) -> Keys | None:
        """Follows statements in order, every branch of them; gives what they return."""
        returned: Keys | None = None
        for node in body:
            if isinstance(node, ast.Assign):
                path = self._path(node.value, scope)
                for target in node.targets if path is not None else ():
                    self._assign(target, path, scope)
                continue
            for child in ast.iter_child_nodes(node):
                path = self._path(child, scope) if isinstance(child, ast.expr) else None
                returned = path if path is not None and isinstance(node, ast.Return) else returned
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                continue
            blocks = [getattr(node, name, []) for name in ("body", "orelse", "finalbody")]
            blocks += [handler.body for handler in getattr(node, "handlers", [])]
            for string in self._looped(node, scope):
                if string is not None:
                    scope.strings[ast.unparse(node.target)] = string
                for block in blocks:
                    path = self._block(block, scope)
                    returned = path if path is not None else returned
        return returned

    def _looped(self, node: ast.stmt, scope: Scope) -> list[str | None]:
        """The strings of a loop like "for key in [BFLOAT16, BFLOAT16_OLD]"; [None] for what is no such loop."""
        values = self.release.constant(node.iter, scope.module) if isinstance(node, ast.For) else None
        strings = [value for value in values if isinstance(value, str)] if isinstance(values, list) else []
        return strings or [None]

    def _assign(self, target: ast.expr, path: Keys, scope: Scope) -> None:
        name = ast.unparse(target)
        before = scope.paths.get(name)
        if before is not None and before != path and before[:-1] == path[:-1]:
            self._twins.append((before, path))  # an old name of a part, taken where the new one is absent
        scope.paths[name] = path
        if path != _ROOT and not isinstance(target, ast.Name):
            self._open.add(path)  # kept whole, for whoever wants it

    def _call_class(self, node: ast.ClassDef, scope: Scope) -> None:
        methods = {item.name: item for item in node.body if isinstance(item, ast.FunctionDef)}
        if "__init__" in methods:
            self._follow(methods["__init__"], Scope(scope.module, scope.paths, scope.strings, methods))

    def _call(self, node: ast.Call, scope: Scope) -> Keys | None:
        name = ast.unparse(node.func)
        positional = [self._path(item, scope) for item in node.args]
        if name in _READERS and positional and positional[0] is not None:
            return self._read(positional[0], node.args[1], scope)
        if name in _COPIES and positional:
            return positional[0]
        if isinstance(node.func, ast.Attribute):
            base = self._path(node.func.value, scope)
            if base is not None and node.func.attr in ("get", "pop") and node.args:
                return self._read(base, node.args[0], scope)
            if base not in (None, _ROOT) and node.func.attr == "items":
                self._open.add(base)
            if name.startswith("self.") and node.func.attr in scope.methods:
                method = scope.methods[node.func.attr]
                inner = self._bound(method, node, scope, of_method=True)
                own = {key: path for key, path in scope.paths.items() if key.startswith("self.")}
                return self._follow(method, Scope(scope.module, own | inner.paths, inner.strings, scope.methods))
            return None
        found = self.release.find(name, scope.module)
        if found is None:
            return None
        for keyword in node.keywords:
            path = self._path(keyword.value, scope)
            if keyword.arg is None and path is not None and isinstance(found[0], ast.ClassDef):
                for below, fact in fields_of(found[0], found[1], self.release):
                    if path + below != _ROOT:  # the monitors are picked out of the whole configuration
                        self._note(path + below, fact)
        if isinstance(found[0], ast.FunctionDef):
            inner = self._bound(found[0], node, scope, of_method=False)
            return self._follow(found[0], Scope(found[1], inner.paths, inner.strings)) if inner.paths else None
        if isinstance(found[0], ast.ClassDef):
            starts = [item for item in found[0].body if isinstance(item, ast.FunctionDef) and item.name == "__init__"]
            for start in starts:
                inner = self._bound(start, node, scope, of_method=True)
                if inner.paths:
                    self._call_class(found[0], Scope(found[1], inner.paths, inner.strings))
        return None

    def _bound(self, function: ast.FunctionDef, call: ast.Call, scope: Scope, *, of_method: bool) -> Scope:
        """The names inside `function` as this call gives them, with its defaults."""
        names = [argument.arg for argument in function.args.args][int(of_method) :]
        defaults = function.args.defaults
        given: dict[str, ast.expr] = dict(zip(names[len(names) - len(defaults) :], defaults, strict=False))
        strings = {name: self._string(node, scope) for name, node in given.items()}
        given = dict(zip(names, call.args, strict=False)) | {k.arg: k.value for k in call.keywords if k.arg}
        strings |= {name: self._string(node, scope) for name, node in given.items()}
        paths = {name: self._path(node, scope) for name, node in given.items()}
        return Scope(
            scope.module,
            {name: path for name, path in paths.items() if path is not None},
            {name: string for name, string in strings.items() if string is not None},
        )

    def _string(self, node: ast.expr, scope: Scope) -> str | None:
        if isinstance(node, ast.Name) and node.id in scope.strings:
            return scope.strings[node.id]
        value = self.release.constant(node, scope.module)
        return value if isinstance(value, str) else None

    def _read(self, base: Keys, key: ast.expr, scope: Scope) -> Keys | None:
        string = self._string(key, scope)
        return self._note((*base, string)) if string is not None else None

    def _path(self, node: ast.expr, scope: Scope) -> Keys | None:
        """The part of the configuration that an expression stands for; None where it is none."""
        if isinstance(node, (ast.Name, ast.Attribute)):
            return scope.paths.get(ast.unparse(node))
        if isinstance(node, ast.Subscript):
            base = self._path(node.value, scope)
            return self._read(base, node.slice, scope) if base is not None else None
        if isinstance(node, ast.Call):
            return self._call(node, scope)
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.In, ast.NotIn)):
            right = node.comparators[0]
            if isinstance(right, ast.Call) and isinstance(right.func, ast.Attribute) and right.func.attr == "keys":
                right = right.func.value
            base = self._path(right, scope)
            if base is not None:
                self._read(base, node.left, scope)
            return None
        if isinstance(node, ast.DictComp):  # {key: config.get(key, {}) for key in (...)}: those parts of the whole
            keys = self.release.constant(node.generators[0].iter, scope.module)
            for key in keys if isinstance(keys, list) else ():
                self._note((key,))
            return _ROOT
        parts = [self._path(child, scope) for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
        if isinstance(node, (ast.IfExp, ast.BoolOp)):
            return next((path for path in parts if path is not None), None)
        return None
