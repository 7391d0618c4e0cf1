"""What should never grow back, by name: types and modules that say what another says already.

A name that is added here is a decision: first look whether `vitscale.present` has it.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from results_factory import rich_study, write_results

pytestmark = pytest.mark.computing

SRC = Path(__file__).parent.parent / "src/vitscale"

LOOSE_MODULES = {"__init__.py", "__main__.py", "errors.py"}
TABLES = {
    "present/document.py: Table",
    "present/terminal_table.py: LaidTable",  # the lines of one
    "advice/forecast_table.py: ForecastTable",  # arrays of numbers, which nobody reads
}
FINDINGS = {
    "present/document.py: Finding",
    "runner/evidence.py: Verdict",  # why one run ended
}
ESTIMATES = {
    "present/estimate.py: Estimate",
    "prediction/configurations.py: Estimates",  # arrays of them
}
FORMATTERS = {
    "present/units.py",
    "advice/sentences.py",  # a whole option in words
    "analysis/quality/wording.py",
    "pages/like/doublings.py",
    "pages/like/hosts.py",
    "pages/like/thesis.py",
    "pages/detail_tables.py",
    "pages/prediction_table.py",
    "pages/prediction_words.py",
}
OF_UNITS = {
    *("seconds", "duration", "time", "size", "bytes_text", "rate", "number", "figures", "three_digits", "percent"),
    *("share", "ratio", "amount", "money", "count", "counted", "ranks", "listed", "relative"),
}  # fmt: skip


@cache
def modules() -> dict[Path, ast.Module]:
    """Path to what is written there, of every module."""
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(SRC.rglob("*.py"))}


def classes() -> Iterator[tuple[str, str, set[str]]]:
    """(where it stands and its name, its name, its annotated fields) of every class of a module."""
    for path, module in modules().items():
        for node in module.body:
            if isinstance(node, ast.ClassDef):
                lines = [line.target for line in node.body if isinstance(line, ast.AnnAssign)]
                fields = {target.id for target in lines if isinstance(target, ast.Name)}
                yield f"{path.relative_to(SRC)}: {node.name}", node.name, fields


def formatters() -> Iterator[str]:
    """Modules with a function that makes text of a quantity, by the names that such functions have."""
    for path, module in modules().items():
        for node in module.body:
            if not isinstance(node, ast.FunctionDef) or node.name.lstrip("_") not in OF_UNITS:
                continue
            if node.returns is not None and ast.unparse(node.returns) == "str":
                yield str(path.relative_to(SRC))


def test_a_report_imports_no_module_of_another_verb(tmp_path: Path) -> None:
    """Nor of another form than its page: each costs start-up time."""
    write_results(rich_study(), tmp_path)
    told = "print(*sorted(name for name, module in sys.modules.items() if not hasattr(module, '__path__')))"
    program = f"import atexit, sys; atexit.register(lambda: {told}); from vitscale.cli import main; main()"
    answer = subprocess.run(
        [sys.executable, "-c", program, "report", tmp_path], capture_output=True, text=True, check=True
    )
    entered = [name for name in answer.stdout.splitlines()[-1].split() if name.startswith("vitscale.")]
    assert "vitscale.pages.document" in entered
    others = {
        "cli.studies",
        "cli.predicting",
        "present.latex",
        "present.markdown",
        "importers.importing",
        "runner.driver",
    }
    assert not {f"vitscale.{name}" for name in others} & set(entered)


def test_no_module_is_loose() -> None:
    """The root holds no subject: a module that has none of the rooms asks for one."""
    assert {path.name for path in SRC.glob("*.py")} == LOOSE_MODULES


def test_one_type_of_a_table() -> None:
    assert {place for place, name, _ in classes() if name.endswith("Table")} <= TABLES


def test_one_type_of_a_finding() -> None:
    found = {place for place, name, of in classes() if name in ("Finding", "Verdict") or {"message", "advice"} <= of}
    assert found <= FINDINGS


def test_one_type_of_a_value_with_its_interval() -> None:
    assert {place for place, _, fields in classes() if {"value", "low", "high"} <= fields} <= ESTIMATES


def test_one_family_of_formatters() -> None:
    assert set(formatters()) <= FORMATTERS


def raised_here(node: ast.AST) -> Iterator[ast.Raise]:
    """What a function raises itself: neither in a function inside it, nor where it catches it again."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.Raise) and child.exc is not None:
            yield child
        elif isinstance(child, ast.Try) and child.handlers:
            for part in (*child.handlers, *child.orelse, *child.finalbody):
                yield from raised_here(part)
        else:
            yield from raised_here(child)


def test_public_functions_say_what_they_raise() -> None:
    """But verbs, whose docstrings are their help, and what is said where it is declared ("See `Encoded`.")."""
    silent = []
    for path, module in modules().items():
        public = [node for node in module.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
        for function in (node for body in (module.body, *(own.body for own in public)) for node in body):
            if not isinstance(function, ast.FunctionDef) or function.name.startswith("_") or path.parent.name == "cli":
                continue
            told = ast.get_docstring(function)
            if told is not None and not told.startswith("See `") and "aises" not in told and any(raised_here(function)):
                silent.append(f"{path.relative_to(SRC)}: {function.name}")
    assert silent == []


def test_strings_that_explain_begin_with_what_they_speak_of() -> None:
    """A reader of "Of each rank." must look up what is meant: "Bytes of each rank."."""
    dangling = [
        f"{path.relative_to(SRC)}:{node.lineno}"
        for path, module in modules().items()
        for node in ast.walk(module)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        if node.value.value.split(maxsplit=1)[0] in {"Of", "By", "From", "Whose"}
    ]
    assert dangling == []


def public_types() -> Iterator[tuple[str, str]]:
    """Name and module of each public class and alias of a type; variables of types, which say nothing, are left out."""
    for path, tree in modules().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                name = node.name
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and not _is_type_variable(node):
                name = node.targets[0].id
            else:
                continue
            if name[0].isupper() and not name.isupper():
                yield name, str(path)


def _is_type_variable(node: ast.Assign) -> bool:
    return isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "TypeVar"


def test_a_type_s_name_stands_for_one_thing() -> None:
    """Whoever searches for a name finds one definition."""
    places: dict[str, list[str]] = {}
    for name, path in public_types():
        places.setdefault(name, []).append(path)
    assert {name: of_name for name, of_name in places.items() if len(of_name) > 1} == {}
