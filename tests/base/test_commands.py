"""A program that is asked something gets no input and a limited time, and its answer comes back whole."""

from __future__ import annotations

import subprocess
import sys

import pytest

from vitscale.base.commands import answer_to

SECONDS = 60.0


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_what_a_program_prints_and_its_code_come_back() -> None:
    answer = answer_to(python("import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"), SECONDS)
    assert (answer.stdout, answer.stderr, answer.returncode) == ("out\n", "err\n", 3)


def test_a_program_gets_no_input_and_the_named_variables_alone() -> None:
    code = "import os, sys; print(repr(sys.stdin.read()), os.environ.get('ASKED'), 'HOME' in os.environ)"
    assert answer_to(python(code), SECONDS, {"ASKED": "yes"}).stdout == "'' yes False\n"


def test_bytes_that_are_no_text_are_replaced_or_given_on_to_another_program() -> None:
    printing = python("import sys; sys.stdout.buffer.write(b'name-\\xff')")
    assert answer_to(printing, SECONDS).stdout == "name-\N{REPLACEMENT CHARACTER}"
    name = answer_to(printing, SECONDS, undecodable="surrogateescape").stdout
    repeating = [*python("import os, sys; print(os.fsencode(sys.argv[1]))"), name]
    assert answer_to(repeating, SECONDS).stdout == "b'name-\\xff'\n"


def test_ctrl_c_is_kept_from_a_program_with_a_session_of_its_own() -> None:
    code = "import os; print(os.getsid(0) == os.getpid())"
    assert answer_to(python(code), SECONDS, own_session=True).stdout == "True\n"
    assert answer_to(python(code), SECONDS).stdout == "False\n"


def test_a_program_that_takes_too_long_is_killed_and_one_that_is_missing_named() -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        answer_to(python("import time; time.sleep(600)"), 0.01)
    with pytest.raises(OSError, match="no-such-program"):
        answer_to(["/nowhere/no-such-program"], SECONDS)
