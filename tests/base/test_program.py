"""Which vitscale it is: digests that tell programs of one version apart, and which files decide a measurement."""

from __future__ import annotations

import ast
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from vitscale.base import program
from vitscale.engines.packages import installed_versions
from vitscale.present.data import envelope

DECIDES_NOTHING = ("base", "errors", "present", "store", "study")
"""Rooms that ranks import and that decide nothing of what is recorded: words, what is read, what a study may say.
(`store.writing` is an exception, and counts.)"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A small package: a file of the worker plane, one of the report, one that no installation has."""
    for name in ("worker/training.py", "pages/page.py", "pages/page.css"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"# {name}\n")
    return tmp_path


def digests(package: Path) -> tuple[str | None, str | None]:
    return program.installation_digest(package, ("",)), program.installation_digest(package, ("worker",))


def test_a_changed_file_changes_the_digest_and_only_a_measuring_one_the_other(package: Path) -> None:
    whole, measuring = digests(package)
    (package / "pages" / "page.py").write_text("# other words\n")
    assert digests(package)[0] != whole
    assert digests(package)[1] == measuring
    (package / "worker" / "training.py").write_text("# faster\n")
    assert digests(package)[1] != measuring


def test_a_renamed_or_added_file_changes_the_digest(package: Path) -> None:
    whole, _ = digests(package)
    (package / "pages" / "page.py").rename(package / "pages" / "side.py")
    renamed, _ = digests(package)
    (package / "pages" / "more.json").write_text("{}")
    assert len({whole, renamed, digests(package)[0]}) == 3


def test_what_no_installation_has_changes_nothing(package: Path) -> None:
    """Compiled code, which lies there after the first import, and an editor's copies."""
    before = digests(package)
    (package / "worker" / "__pycache__").mkdir()
    for name in ("worker/__pycache__/training.cpython-312.pyc", "worker/__pycache__/stray.py", "worker/training.py~"):
        (package / name).write_text("x")
    assert digests(package) == before


def test_a_copy_elsewhere_has_the_same_digest(tmp_path: Path) -> None:
    """A wheel's files in another folder are the same program as an editable install's."""
    shutil.copytree(program.PACKAGE, tmp_path / "copy", ignore=shutil.ignore_patterns("__pycache__"))
    assert program.installation_digest(tmp_path / "copy", ("",)) == program.installation_digest(program.PACKAGE, ("",))
    assert program.installation_digest(tmp_path / "copy", program.MEASURING) == program.measuring_digest()


def test_without_files_the_digest_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert program.installation_digest(tmp_path / "nowhere", ("",)) is None
    monkeypatch.setattr(program, "digest", lambda: None)
    monkeypatch.setattr(program, "measuring_digest", lambda: None)
    assert "+" not in program.identity()
    assert program.MEASURING_NAME not in installed_versions()


def test_every_measuring_room_and_file_exists() -> None:
    assert [name for name in program.MEASURING if not (program.PACKAGE / name).exists()] == []


def module_imports(path: Path) -> Iterator[str]:
    """Modules that a file imports as it is imported itself: not for types alone, and not inside a function."""
    waiting: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        waiting += ast.iter_child_nodes(node)


def file_of(module: str) -> Path | None:
    """The file of a module of the package; of a name inside a module, that module's."""
    parts = module.split(".")
    while parts and parts[0] == "vitscale":
        path = program.PACKAGE.joinpath(*parts[1:])
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file() and path != program.PACKAGE:
                return file
        parts.pop()
    return None


def is_measuring(file: Path) -> bool:
    inside = file.relative_to(program.PACKAGE)
    return any(inside.is_relative_to(name) for name in program.MEASURING)


def test_all_that_ranks_import_is_either_measuring_or_decides_nothing() -> None:
    """A new room of the worker plane asks whether runs before and after a change of it may be compared."""
    waiting = [file for room in ("worker", "engines", "probes") for file in (program.PACKAGE / room).rglob("*.py")]
    reached: set[Path] = set()
    while waiting:
        file = waiting.pop()
        if file not in reached:
            reached.add(file)
            waiting += filter(None, map(file_of, module_imports(file)))
    others = {file.relative_to(program.PACKAGE) for file in reached if not is_measuring(file)}
    assert {path.parts[0].removesuffix(".py") for path in others if path.name != "__init__.py"} <= {*DECIDES_NOTHING}
    assert program.PACKAGE / "store" / "writing.py" in reached
    assert is_measuring(program.PACKAGE / "store" / "writing.py")
    assert not is_measuring(program.PACKAGE / "pages" / "document.py")


def test_every_json_answer_names_the_program() -> None:
    assert json.loads(envelope("lint", {"findings": []}))["program"] == program.identity()
    with pytest.raises(ValueError, match="program"):
        envelope("lint", {"program": "x"})
