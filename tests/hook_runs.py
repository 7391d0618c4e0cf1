"""Runs programs under the hook as `vitscale explain` places it, and reads what their ranks wrote."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import vitscale.hook
from vitscale.hook.lines import (
    HOOK_FOLDER,
    PLAN_FILE,
    RANKS_FOLDER,
    SETTINGS_FILE,
    TRACES_FOLDER,
    HookedBreakLine,
    HookedEndLine,
    HookedNoteLine,
    HookedRankLine,
    HookedSamplesLine,
    HookedStepLine,
    HookPlan,
    HookSettings,
    Line,
    parse_line,
)

SOURCE = Path(vitscale.hook.__file__).parent
_Line = TypeVar("_Line", bound=Line)


@dataclass(frozen=True)
class RankFile:
    """All lines of one rank."""

    lines: list[Line]

    def of(self, line_type: type[_Line]) -> list[_Line]:
        """Lines of one type, in order."""
        return [line for line in self.lines if isinstance(line, line_type)]

    @property
    def rank(self) -> HookedRankLine:
        (line,) = self.of(HookedRankLine)
        return line

    @property
    def steps(self) -> list[HookedStepLine]:
        return self.of(HookedStepLine)

    @property
    def breaks(self) -> list[HookedBreakLine]:
        return self.of(HookedBreakLine)

    @property
    def notes(self) -> list[str]:
        return [note.text for note in self.of(HookedNoteLine)]

    @property
    def end(self) -> HookedEndLine:
        (line,) = self.of(HookedEndLine)
        return line

    def samples(self, part: str) -> HookedSamplesLine:
        """The last samples of a part."""
        return [line for line in self.of(HookedSamplesLine) if line.part == part][-1]


@dataclass(frozen=True)
class HookedRun:
    """A program that ended."""

    exit_code: int
    output: str
    results: Path
    ranks: list[RankFile]
    """In order of their rank."""

    @property
    def only_rank(self) -> RankFile:
        (rank,) = self.ranks
        return rank

    def said(self, key: str) -> float:
        """The number that the program printed as `key=number`, the last one."""
        values = [word.partition("=")[2] for word in self.output.split() if word.startswith(f"{key}=")]
        return float(values[-1])


def place_hook(results: Path, plan: HookPlan | None = None) -> Path:
    """Place the hook into a results folder; its own folder, for PYTHONPATH."""
    folder = results / HOOK_FOLDER
    shutil.copytree(SOURCE, folder / "vitscale_hook", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "vitscale_hook/sitecustomize.py").rename(folder / "sitecustomize.py")
    (folder / SETTINGS_FILE).write_text(json.dumps(HookSettings(results=str(results), sample_seconds=0.005).to_dict()))
    if plan is not None:
        (folder / PLAN_FILE).write_text(json.dumps(plan.to_dict()))
    for name in (RANKS_FOLDER, TRACES_FOLDER):
        (results / name).mkdir()
    return folder


def environment(hook_folder: Path | None) -> dict[str, str]:
    """This environment with the hook's folder first in PYTHONPATH."""
    values = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    if hook_folder is not None:
        values["PYTHONPATH"] = os.pathsep.join([str(hook_folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    return values


def run_hooked(
    folder: Path,
    program: str,
    *,
    launcher: Sequence[str] = (),
    options: Sequence[str] = (),
    plan: HookPlan | None = None,
    variables: Mapping[str, str] | None = None,
) -> HookedRun:
    """Run a program under the hook.

    Args:
        folder: empty; gets the program and the results.
        program: text of the script.
        launcher: words between python and the script, such as -m torch.distributed.run.
        options: words after the script.
        plan: the driver's, as it stands from the beginning.
        variables: of the environment, besides.
    """
    script = folder / "train.py"
    script.write_text(program)
    results = folder / "results"
    hook_folder = place_hook(results, plan)
    done = subprocess.run(
        [sys.executable, *launcher, str(script), *options],
        cwd=folder,
        env={**environment(hook_folder), **(variables or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return HookedRun(done.returncode, done.stdout, results, read_ranks(results))


def read_ranks(results: Path) -> list[RankFile]:
    """Files of all ranks, in order of their rank."""
    files = [RankFile(_lines(path)) for path in (results / RANKS_FOLDER).iterdir()]
    return sorted(files, key=lambda file: file.rank.rank)


def _lines(path: Path) -> list[Line]:
    lines = [parse_line(text) for text in path.read_text().splitlines()]
    return [line for line in lines if line is not None]
