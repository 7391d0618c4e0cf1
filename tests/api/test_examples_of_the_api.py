"""The example of each function runs, twice, after all modules of the package have been imported."""

from __future__ import annotations

import doctest
import re
import subprocess
import sys
from pathlib import Path

import pytest

from api_places import make_place

ROOT = Path(__file__).parent.parent.parent
PROGRAM = """
import doctest, importlib, inspect, pkgutil, sys, vitscale
trains = sys.argv[1] == "trains"
for module in pkgutil.walk_packages(vitscale.__path__, "vitscale."):
    if module.name != "vitscale.__main__":
        try:
            importlib.import_module(module.name)
        except ImportError as error:  # an extra that is not installed
            assert not (error.name or "").startswith("vitscale"), error
parser, ran = doctest.DocTestParser(), []
for name in vitscale.__all__:
    function = getattr(vitscale, name)
    if not inspect.isfunction(function) or (name in ("run", "train", "check")) != trains:
        continue
    for _ in range(2):
        test = parser.get_doctest(function.__doc__, {"vitscale": vitscale}, name, None, 0)
        assert doctest.DocTestRunner().run(test).failed == 0, name
    ran += [name] if test.examples else []
print(*ran)
"""


def ran(folder: Path, which: str) -> list[str]:
    """The functions whose example ran twice in a process that has imported every module."""
    make_place(folder)
    program = folder / "examples.py"
    program.write_text(PROGRAM)
    answer = subprocess.run([sys.executable, program, which], cwd=folder, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return answer.stdout.splitlines()[-1].split()


def test_examples_that_start_no_ranks(tmp_path: Path) -> None:
    assert ran(tmp_path, "reads") == [
        *("advise", "compare", "export", "import_results", "init", "lint", "load", "plan", "predict", "report", "watch")
    ]


@pytest.mark.ranks
def test_examples_that_start_ranks(tmp_path: Path) -> None:
    assert ran(tmp_path, "trains") == ["check", "run", "train"]


def test_the_page_on_notebooks_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_place(tmp_path)
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs/notebook.md").read_text(encoding="utf-8")
    examples = "\n".join(re.findall(r"^```pycon\n(.*?)^```", page, re.MULTILINE | re.DOTALL))
    test = doctest.DocTestParser().get_doctest(examples, {}, "notebook.md", None, 0)
    said: list[str] = []
    result = doctest.DocTestRunner().run(test, out=said.append)
    assert result.attempted > 10
    assert result.failed == 0, "".join(said)


IN_A_THREAD = """
import vitscale
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(1) as threads:
    print(threads.submit(vitscale.run, "study.toml", ["measure.steps=2"], output="own").result())
"""


@pytest.mark.ranks
def test_a_study_runs_in_a_thread_of_a_server(tmp_path: Path) -> None:
    """Such a thread gets no signals, and may not ask for any."""
    make_place(tmp_path)
    program = tmp_path / "thread.py"
    program.write_text(IN_A_THREAD)
    answer = subprocess.run([sys.executable, program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert answer.stdout == "<run: documented, 2 of 2 runs completed, in own>\n", answer.stderr
