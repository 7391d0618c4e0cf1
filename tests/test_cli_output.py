"""What the command line does when its output goes nowhere, or is asked for twice."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from driving import TINY_MODEL, vitscale
from vitscale import store

STUDY = f"""
name = "output"
{TINY_MODEL}
[data]
name = "digits"
[train]
precision = "fp32"
micro_batch = 8
[scaling]
gpus = [1]
[launch]
launcher = "LAUNCHER"
[measure]
steps = 20
repeats = 3
"""


def study(folder: Path, launcher: str) -> Path:
    path = folder / "study.toml"
    path.write_text(STUDY.replace("LAUNCHER", launcher))
    return path


@pytest.mark.parametrize("verb", ["--help", "plan"])
def test_a_verb_waits_for_no_library_that_it_has_no_use_for(tmp_path: Path, verb: str) -> None:
    """Help is to be there in 0.2 s, a plan in 0.8 (`benchmarks/configurations.py`)."""
    heavy = {"torch", "scipy", "polars", "PIL", "psutil", "tarfile", "multiprocessing", "vitscale.report"}
    words = [verb] if verb == "--help" else [verb, str(study(tmp_path, "local"))]
    heavy |= {"numpy", "pydantic", "vitscale.runner"} if verb == "--help" else set()
    program = f"import atexit, sys; atexit.register(lambda: print({heavy} & {{*sys.modules}}))"
    program += "; from vitscale.cli import main; main()"
    answer = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=True)
    assert {"--help": "completion", "plan": "3 runs"}[verb] in answer.stdout
    assert answer.stdout.endswith("set()\n")


def test_a_full_disk_behind_standard_output_is_told(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "vitscale", "plan", str(study(tmp_path, "in-process"))]
    for more in ([], ["--json"]):
        with Path("/dev/full").open("w") as full:
            answer = subprocess.run([*command, *more], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
        assert answer.returncode == 1
        assert answer.stderr == "vitscale: standard output cannot be written: No space left on device\n"


def test_a_study_goes_on_when_nobody_listens_any_more(tmp_path: Path) -> None:
    """As under `vitscale run ... | head -1`."""
    driver = Path(__file__).parent / "runner" / "record_only.py"
    process = subprocess.Popen(
        [sys.executable, driver, "cli", "run", study(tmp_path, "record-only"), "-o", tmp_path / "results"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline().startswith("run 1 of 3")
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait() == 0
    assert len(store.load(tmp_path / "results").runs) == 3


def test_json_and_a_format_are_not_both_taken(tmp_path: Path) -> None:
    answer = vitscale("report", tmp_path, "--json", "--format", "html")
    assert answer.returncode == 2
    assert "--json and --format are both given" in answer.stderr
