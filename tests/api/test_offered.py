"""What `import vitscale` offers: typed for checkers, imported when it is used, never replaced by a module."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import subprocess
import sys
import typing
from pathlib import Path

import pytest
from typer.main import get_command

import vitscale
from vitscale import cli

PROBES = {"Probe", "composer_callback", "lightning_callback", "trainer_callback"}
"""What runs inside a rank; the rest is the control plane."""
FUNCTIONS = sorted(
    name for name in vitscale.__all__ if name not in PROBES and inspect.isfunction(getattr(vitscale, name))
)
WANTED = {"plan", "run", "load", "report", "predict", "advise", "compare", "check", "lint", "import_results"}
TRAIN_OR_SEND = {
    "check_training": "trains with each engine for minutes",
    "compare_studies": "trains two studies",
    "explain": "runs a training script of the user's",
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


CHOOSE_WHAT_IS_PRINTED = {"--verbose", "--json"}
SAID_OTHERWISE = {
    "init": {"--from": "from_file"},
    "plan": {"--commands": "api.planning.commands", "--from": "from_results"},
    "run": {"--dry-run": "api.running.commands_to_do"},
    "report": {
        "--output": "ReportResult.write", "--format": "ReportResult.write", "--chart": "charts",
        "--like": "report_like", "--like-paper": "report_like",
    },
    "predict": {"--node-mtbf": "TrainingPlan.node_mtbf_hours"},
    "advise": {
        "--deadline": "AdviceLimits.deadline_seconds", "--node-mtbf": "TrainingPlan.node_mtbf_hours",
        "--format": "output_format",
    },
    "compare": {"--run": "compare_studies", "--repeats": "compare_studies", "compared": "results"},
    "import": {"--format": "log_format"},
    "check": {"--training": "check_training"},
    "export": {"--to": "send"},
    "watch": {"--once": "watch looks once"},
}  # fmt: skip
"""Options of a verb that its function does not take under their name -> what stands for them."""
FUNCTION_OF = {"import": "import_results"}


def taken_by(function: object) -> set[str]:
    """Names of a function's parameters, and of the fields of the options that it takes together."""
    names: set[str] = set()
    for name, hint in typing.get_type_hints(function).items():
        together = [kind for kind in typing.get_args(hint) if dataclasses.is_dataclass(kind)]
        names |= {field.name for kind in together for field in dataclasses.fields(kind)} or {name}
    return names


@pytest.mark.parametrize(
    "verb", ["plan", "run", "train", "init", "report", "predict", "advise", "compare", "import", "check", "lint",
             "explain", "export", "watch"],
)  # fmt: skip
def test_a_function_takes_the_options_of_its_verb_under_their_names(verb: str) -> None:
    command = get_command(cli.app).commands[verb]  # type: ignore[attr-defined]  # a group of commands
    options = {max(parameter.opts, key=len) for parameter in command.params} - CHOOSE_WHAT_IS_PRINTED
    otherwise = {*SAID_OTHERWISE.get(verb, ())}
    assert otherwise <= options
    names = taken_by(getattr(vitscale, FUNCTION_OF.get(verb, verb)))
    missing = {option for option in options - otherwise if option.lstrip("-").replace("-", "_") not in names}
    assert missing == set()
