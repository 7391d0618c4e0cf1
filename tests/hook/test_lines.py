"""Lines turn into JSON and back; what is no such line is refused with its reason."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import vitscale.hook
from vitscale.hook.lines import HookedSamplesLine, HookedStepLine, HookPlan, SampleRow, parse_line

pytestmark = pytest.mark.computing

STEP = HookedStepLine(
    number=3,
    began_ns=10**15,
    seconds=0.25,
    images=None,
    micro_steps=2,
    data_seconds=0.1,
    copy_seconds=None,
    forward_seconds=0.05,
    backward_seconds=0.05,
    own_backward_seconds=None,
    first_bucket_seconds=None,
    optimizer_seconds=0.01,
    other_seconds=0.04,
)


def test_lines_come_back_as_they_went() -> None:
    rows = [SampleRow(file="train.py", line=7, function="<module>", count=3, of_all=4)]
    for line in (STEP, HookedSamplesLine(part="data", rows=rows)):
        assert parse_line(line.to_json()) == line


def test_unknown_types_and_keys_are_left_out() -> None:
    assert parse_line('{"type": "of_tomorrow"}') is None
    assert parse_line(json.dumps({**json.loads(STEP.to_json()), "of_tomorrow": [1]})) == STEP
    assert HookPlan.from_dict({"stop_after": 9}) == HookPlan(stop_after=9)


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("number", 1.5, "number is no whole number"),
        ("number", True, "number is no whole number"),
        ("seconds", None, "seconds is no number"),
        ("seconds", "0.25", "seconds is no number"),
        ("seconds", 10**400, "seconds is too large"),
        ("data_seconds", float("nan"), "data_seconds is not finite"),
        ("profiled", 1, "profiled is neither true nor false"),
    ],
)
def test_a_wrong_value_is_refused_by_name(key: str, value: object, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_line(json.dumps({**json.loads(STEP.to_json()), key: value}))


def test_a_missing_field_is_refused() -> None:
    values = json.loads(STEP.to_json())
    del values["seconds"]
    with pytest.raises(ValueError, match="HookedStepLine has no seconds"):
        parse_line(json.dumps(values))


@given(st.text())
def test_any_text_is_a_line_or_a_value_error(text: str) -> None:
    try:
        parse_line(text)
    except ValueError:
        return


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[" * 100_000, "a line is nested too deeply"),
        ('{"type": {}}', "a line has no type"),
        ("3", "a line is no JSON object"),
        (STEP.to_json()[:-9], "delimiter|Expecting|Unterminated"),
    ],
)
def test_torn_and_hostile_lines_are_refused(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_line(text)


def test_the_hook_is_code_of_python_3_9_that_imports_the_standard_library_alone() -> None:
    program = """
import ast, pathlib, sys
for path in pathlib.Path(sys.argv[1]).glob("*.py"):
    tree = ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 9))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module]
        else:
            continue
        for name in names:
            root = name.partition(".")[0]
            assert root in sys.stdlib_module_names or root == "vitscale_hook", (path.name, name)
"""
    folder = Path(vitscale.hook.__file__).parent
    subprocess.run([sys.executable, "-c", program, str(folder)], check=True)
