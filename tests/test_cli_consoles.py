"""What is printed is what was said: nothing in it is taken for an emoji or for markup."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import vitscale
from driving import vitscale as run
from vitscale.cli.base import ProgramConsole


def test_a_name_with_colons_is_printed_as_it_is(tmp_path: Path) -> None:
    said = run("import", "./nope:b:.csv", "-o", "results", cwd=tmp_path)
    assert said.returncode != 0
    assert "nope:b:.csv" in said.stderr


def test_an_address_with_colons_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    ProgramConsole().print("fe80:a:b::1", markup=False, highlight=False)
    assert capsys.readouterr().out == "fe80:a:b::1\n"


def test_no_console_puts_emojis_in() -> None:
    """A console that is made elsewhere would have them again: rich's default."""
    for path in Path(vitscale.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Console":
                options = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                assert options.get("emoji") == "False", f"{path}:{node.lineno}"
