"""Runs two or more studies in turn, round by round, so that what changes on the machine changes for all of them.

A round is one run of each trial of each study. Sides take turns in going first (A B, B A, A B, ...), so that steady
drift favours none. Each side has its own results folder, as `vitscale run` makes it; the same call resumes where it was
interrupted. That the sides alternated is recorded by the times of their runs alone, which `vitscale.analysis.rounds`
reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from vitscale.errors import RequestError, shown
from vitscale.runner import driver
from vitscale.runner.planning import Plan, Report, plan
from vitscale.runner.todo import outstanding_runs
from vitscale.schedulers import Submitter
from vitscale.store import RunIndex
from vitscale.study.file import StudyFile


class Side(NamedTuple):
    """One of the studies that are run in turn."""

    name: str
    plan: Plan
    """With as many repeats of each trial as there are rounds."""
    results: Path


def sides_of(studies: Sequence[Path], folder: Path, repeats: int | None = None) -> list[Side]:
    """Plan the studies as sides, with their results in subfolders of `folder`.

    Args:
        studies: study files, two or more.
        folder: for the results; the subfolders have the names of the sides (`_side_names`).
        repeats: number of rounds; None: `measure.repeats` of the first study.

    Raises:
        RequestError: a study cannot be run, or not round by round.
    """
    if repeats is None:
        repeats = StudyFile.read(studies[0]).study.measure.repeats
    sides = []
    for study, name in zip(studies, _side_names(studies), strict=True):
        file = StudyFile.read(study, None, [f"measure.repeats={repeats}"])
        _refuse_study_without_rounds(study, file)
        results = folder / name
        planned = plan(file, results=results)
        if isinstance(planned.scheduler, Submitter):
            raise RequestError(
                f"{shown(str(study))} is run as batch jobs, whose order the batch system decides",
                next_step="Run compare --run inside an allocation "
                f"({planned.scheduler.facts.allocation_command}), where runs go on one after the other",
            )
        sides.append(Side(name, planned, results))
    return sides


def run_in_turn(sides: Sequence[Side], console: Console) -> list[Report]:
    """Do the missing runs of all sides, round by round, and return each side's last report.

    Raises:
        VitscaleError: as `driver.run`.
    """
    rounds = max(side.plan.measure.repeats for side in sides)
    reports: dict[str, Report] = {}
    for round_index in range(rounds):
        is_last_round = round_index == rounds - 1
        for side in _round_order(sides, round_index):
            plan_so_far = _plan_through_round(side.plan, round_index)
            if is_last_round or _has_work(plan_so_far, side.results):  # the last gives the report even without work
                console.print(f"round {round_index + 1} of {rounds}: {side.name}", markup=False, highlight=False)
                reports[side.name] = driver.run(plan_so_far, side.results, driver.RunOptions(), console)
    return [reports[side.name] for side in sides]


def _round_order(sides: Sequence[Side], round_index: int) -> Sequence[Side]:
    """Return the sides as given in even rounds (from 0), and in reverse in odd ones."""
    return sides if round_index % 2 == 0 else tuple(reversed(sides))


def _refuse_study_without_rounds(study: Path, file: StudyFile) -> None:
    """Refuse a study whose runs cannot be made a given number of times, one after the other.

    Raises:
        RequestError: the study adds runs until their results are precise enough, or runs several at a time.
    """
    measure = file.study.measure
    if measure.target_ci is not None:
        raise RequestError(
            f"{shown(str(study))} has measure.target_ci, which adds runs to one side and not to the other",
            next_step="Leave it out; --repeats N says how many rounds are made",
        )
    if (measure.parallel_runs or 1) > 1:
        raise RequestError(
            f"{shown(str(study))} has measure.parallel_runs = {measure.parallel_runs}, and runs side by side are in no "
            "order",
            next_step="Leave it out",
        )


def _side_names(studies: Sequence[Path]) -> list[str]:
    """Return different names for the studies: those of their files, else of their folders, else numbered ones."""
    file_names = [study.stem for study in studies]
    folder_names = [study.absolute().parent.name for study in studies]
    for names in (file_names, folder_names):
        are_different = len({*names}) == len(names)
        if are_different and all(names):
            return names
    return [f"{number}-{name}" for number, name in enumerate(file_names, start=1)]


def _plan_through_round(planned: Plan, round_index: int) -> Plan:
    """Return the plan with the runs of rounds 0 to `round_index` alone."""
    tasks = tuple(task for task in planned.tasks if task.repeat <= round_index)
    return replace(planned, tasks=tasks)


def _has_work(planned: Plan, results: Path) -> bool:
    """Whether a run of this plan is still to be done."""
    if not (results / "study.json").exists():
        return True
    return bool(outstanding_runs(planned, RunIndex(results), retry_failed=False))
