"""Nothing is imported from the current folder, or from beside a study, ahead of what is installed.

Every Python that a verb starts, and every one that these start in turn, says how it was started; and the folder has a
module for each name of the standard library that leaves a mark when it is run.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from driving import TINY_MODEL
from results_factory import rich_study, write_results

RECORDS_STARTS = """
import json, os, sys
with open(os.environ["STARTS"], "a") as file:
    file.write(json.dumps([sys.flags.safe_path, sys.orig_argv]) + "\\n")
"""
"""A `sitecustomize` module: every Python imports it as it starts, unless it is isolated (-I), as is wanted too."""
COMMAND_LINE = "import sys; from vitscale.cli import main; sys.argv[0] = 'vitscale'; main()"
"""What the installed program `vitscale` does."""
STUDY = """
name = "hostile"
[model]
factory = "model_of_mine:build"
image_size = 8
[data]
name = "digits"
[train]
precision = "fp32"
micro_batch = 8
[scaling]
gpus = [2]
[launch]
launcher = "LAUNCHER"
threads_per_rank = 1
oversubscribe = true
[measure]
steps = 3
warmup_steps = 1
repeats = 1
evaluate = false
explain = false
"""
MODEL = """
from torch import nn

def build(num_classes, image_size):
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * image_size**2, num_classes))
"""


@dataclass(frozen=True)
class Hostile:
    """A folder that somebody else has filled."""

    folder: Path
    starts: Path

    def run(self, *arguments: str | Path) -> None:
        """Runs a verb in the folder."""
        site = self.starts.parent / "site"
        answer = subprocess.run(
            [sys.executable, "-P", "-c", COMMAND_LINE, *map(str, arguments)],
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
            env=os.environ | {"PYTHONPATH": str(site), "STARTS": str(self.starts), "COLUMNS": "120"},
        )
        assert (answer.returncode, self.executed()) == (0, []), answer.stdout + answer.stderr

    def started(self) -> list[list[str]]:
        """The argv of every Python so far; each of them left the current folder out."""
        lines = [json.loads(line) for line in self.starts.read_text().splitlines()]
        assert [argv for is_safe, argv in lines if not is_safe] == []
        return [argv for _, argv in lines]

    def executed(self) -> list[str]:
        return sorted(path.name for path in self.starts.parent.glob("executed-*"))


def fill(folder: Path, marks: Path) -> None:
    """A module of each name that is installed, of the standard library and of libraries that verbs and ranks import."""
    libraries = (
        "numpy",
        "polars",
        "pydantic",
        "torch",
        "typer",
        "rich",
        "vl_convert",
        "deepspeed",
        "psutil",
        "msgspec",
    )
    installed = [name for name in sys.stdlib_module_names if importlib.util.find_spec(name) is not None]
    for name in (*installed, *libraries):
        marked = marks / f"executed-{name}"
        (folder / f"{name}.py").write_text(f"open({str(marked)!r}, 'w')\nraise SystemExit(99)\n")


@pytest.fixture
def hostile(tmp_path: Path) -> Hostile:
    folder, site = tmp_path / "folder", tmp_path / "site"
    folder.mkdir()
    site.mkdir()
    (site / "sitecustomize.py").write_text(RECORDS_STARTS)
    fill(folder, tmp_path)
    return Hostile(folder, tmp_path / "starts")


def test_verbs_that_only_read_run_nothing_of_the_current_folder(hostile: Hostile) -> None:
    write_results(rich_study(), hostile.folder / "results")
    (hostile.folder / "study.toml").write_text(
        STUDY.replace("LAUNCHER", "local")
        .replace('factory = "model_of_mine:build"', 'name = "vit-ti16"')
        .replace("image_size = 8", "image_size = 32")
    )
    (hostile.folder / "table.csv").write_text("gpus,images_per_second\n1,100\n2,190\n4,350\n")
    for arguments in (
        ("report", "results", "-o", "page.html"),
        ("report", "results", "--json"),
        ("report", "results", "--format", "png"),
        ("compare", "results", "results"),
        ("watch", "results", "--once"),
        ("export", "results", "-o", "bundle.tar.gz"),
        ("report", "bundle.tar.gz", "--json"),
        ("plan", "study.toml"),
        ("import", "table.csv", "-o", "imported"),
    ):
        hostile.run(*arguments)
    drawing = [argv for argv in hostile.started() if any("draw_for_parent" in word for word in argv)]
    assert drawing or len(os.sched_getaffinity(0)) < 2, "the page's pictures are drawn by another process"


@pytest.mark.ranks
@pytest.mark.parametrize("launcher", ["local", "torchrun", "deepspeed"])
def test_ranks_find_the_user_s_model_and_run_nothing_else_of_the_current_folder(
    hostile: Hostile, launcher: str
) -> None:
    """The study lies in another hostile folder, with the model beside it."""
    beside = hostile.folder / "beside"
    beside.mkdir()
    fill(beside, hostile.starts.parent)
    (beside / "study.toml").write_text(STUDY.replace("LAUNCHER", launcher))
    (beside / "model_of_mine.py").write_text(MODEL)
    hostile.run("run", beside / "study.toml", "-o", "results")
    modules = {argv[argv.index("-m") + 1] for argv in hostile.started() if "-m" in argv}
    starts_ranks = {
        "local": {"vitscale.processes.parent_death", "vitscale.worker.prepared"},
        "torchrun": {"vitscale.processes.parent_death", "torch.distributed.run", "vitscale.worker"},
        "deepspeed": {"vitscale.processes.parent_death", "deepspeed.launcher.launch", "vitscale.worker"},
    }
    assert starts_ranks[launcher] <= modules


SCRIPT = """
import subprocess, sys
import colorsys  # the script's own, ahead of the library's, as python does

import beside_study  # of the study's folder, behind all that is installed

assert colorsys.MINE
code = "import os, sys; assert not os.environ.get('PYTHONSAFEPATH') and not sys.flags.safe_path"
subprocess.run([sys.executable, "-c", code], check=True)
subprocess.run([sys.executable, "helper.py"], check=True, cwd=sys.path[0])
"""


@pytest.mark.ranks
def test_a_script_of_the_user_s_finds_modules_as_python_does(tmp_path: Path) -> None:
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    (tmp_path / "beside_study.py").write_text("")
    (scripts / "train.py").write_text(SCRIPT)
    (scripts / "colorsys.py").write_text("MINE = True\n")
    (scripts / "helper.py").write_text("import colorsys\nassert colorsys.MINE\n")
    study = STUDY.replace("LAUNCHER", "local").replace("[train]\n", '[train]\nscript = "scripts/train.py"\n')
    study = study.replace('factory = "model_of_mine:build"\nimage_size = 8\n', TINY_MODEL.replace("[model]", ""))
    (tmp_path / "study.toml").write_text(study.replace("gpus = [2]", "gpus = [1]"))
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(RECORDS_STARTS)
    Hostile(tmp_path, tmp_path / "starts").run("run", "study.toml", "-o", "results")
