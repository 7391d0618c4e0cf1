"""What `import vitscale` offers: typed for checkers, imported when it is used, never replaced by a module."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
import typing
from pathlib import Path

import pytest

import vitscale

ROOT = Path(__file__).parent.parent.parent
PROBES = {"Probe", "composer_callback", "lightning_callback", "trainer_callback"}
"""What runs inside a rank; the rest is the control plane."""
FUNCTIONS = sorted(
    name for name in vitscale.__all__ if name not in PROBES and inspect.isfunction(getattr(vitscale, name))
)
WANTED = {"plan", "run", "load", "report", "predict", "advise", "compare", "check", "lint", "import_results"}
TRAIN_OR_SEND = {
    "check_training": "trains with each engine for minutes",
    "compare_studies": "trains two studies",
    "report_like": "needs results like those of a published study",
    "send": "needs the client of a tracker",
}
"""Functions without an example -> why."""


def test_every_wanted_function_is_offered() -> None:
    assert {*FUNCTIONS} >= WANTED


def test_type_checkers_see_each_name_where_it_is_imported_from() -> None:
    tree = ast.parse(Path(vitscale.__file__).read_text(encoding="utf-8"))
    (guarded,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {
        alias.name: node.module for node in guarded.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert sorted(seen) == sorted(vitscale.__all__)
    assert seen == vitscale._MODULE_OF


def test_importing_the_package_imports_no_module_below_it() -> None:
    program = "import vitscale, sys; print(*(name for name in sys.modules if name.startswith('vitscale')))"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert answer.stdout.split() == ["vitscale"]


def test_no_function_brings_torch() -> None:
    names = [name for name in vitscale.__all__ if name not in PROBES]
    program = f"import vitscale, sys; [getattr(vitscale, name) for name in {names}]; print('torch' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert answer.stdout.split() == ["False"]


def test_no_module_of_the_package_has_the_name_of_what_is_offered() -> None:
    """Importing such a module would put it in the function's place."""
    package = Path(vitscale.__file__).parent
    assert {path.stem for path in package.iterdir()} & {*vitscale.__all__} == set()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_says_what_it_does_takes_and_raises(name: str) -> None:
    function = getattr(vitscale, name)
    told = inspect.getdoc(function) or ""
    assert told.split()[0].endswith("s"), "begins with a verb: Plans, Runs, ..."
    hints = typing.get_type_hints(function)
    parameters = inspect.signature(function).parameters
    assert {*parameters, "return"} == hints.keys()
    arguments = told.partition("\nArgs:\n")[2].partition("\n\n")[0]
    assert [parameter for parameter in parameters if f"\n    {parameter}: " not in f"\n{arguments}"] == []
    assert "\nRaises:\n" in told
    assert ("\nExample:\n" in told) != (name in TRAIN_OR_SEND)
