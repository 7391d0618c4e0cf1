from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launching import BareLauncher
from results_factory import make_run, one_curve, write_results
from study_factory import EIGHT_CORES, summary, write_study
from vitscale.base import program
from vitscale.engines.packages import installed_versions
from vitscale.errors import RequestError, StoreError
from vitscale.launchers import LAUNCHERS
from vitscale.launchers.mpirun import Mpirun
from vitscale.machine.hardware import Machine
from vitscale.runner.one_run import new_attempt
from vitscale.runner.planning import Plan, check_folder, plan
from vitscale.runner.todo import outstanding_runs
from vitscale.sources import Summary
from vitscale.store import RunIndex, new_run_folder, write_outcome
from vitscale.store import write_study as write_study_record
from vitscale.store.reading import RunKey
from vitscale.store.results import Outcome, OutcomeKind, RunHeader, StudyRecord
from vitscale.trial.trial import DataSpec


def planned(
    folder: Path,
    changes: dict[str, dict[str, Any]] | None = None,
    name: str = "example",
    fingerprint: str = "f",
    machine: Machine = EIGHT_CORES,
    results: Path | None = None,
) -> Plan:
    def check(_: DataSpec) -> Summary:
        return summary(fingerprint=fingerprint)

    return plan(write_study(folder, changes, name), machine, check, results=results)


def tree(folder: Path) -> dict[str, bytes | None]:
    """Every path below `folder` with its content."""
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in sorted(folder.rglob("*"))}


# --- the plan ------------------------------------------------------------------------------------------------------


def test_a_plan_holds_every_repeat_of_every_trial_once(tmp_path: Path) -> None:
    found = planned(tmp_path, {"measure": {"repeats": 3}, "scaling": {"gpus": [1, 2, 4]}})
    assert sorted((task.trial_id, task.repeat) for task in found.tasks) == sorted(
        (trial, repeat) for trial in found.expansion.trials for repeat in range(3)
    )
    assert found.record.trials == found.expansion.trials
    assert found.record.text == (tmp_path / "study.toml").read_text()
    assert found.record.repeats == 3


def test_the_order_is_random_but_the_same_again(tmp_path: Path) -> None:
    changes: dict[str, dict[str, Any]] = {"measure": {"repeats": 10}, "scaling": {"gpus": [1, 2, 4]}}
    first = planned(tmp_path, changes).tasks
    assert planned(tmp_path, changes).tasks == first
    in_order = [RunKey(trial, repeat) for trial in planned(tmp_path, changes).expansion.trials for repeat in range(10)]
    assert list(first) != in_order
    other = planned(tmp_path, {**changes, "measure": {"repeats": 10, "order_seed": 1}}).tasks
    assert other != first
    assert set(other) == set(first)


def test_runs_come_in_rounds_of_one_of_each_trial(tmp_path: Path) -> None:
    """A drift favours no repeat, and a process that forks ranks serves a round."""
    found = planned(tmp_path, {"measure": {"repeats": 6}, "scaling": {"gpus": [1, 2, 4]}})
    rounds = [found.tasks[3 * n : 3 * n + 3] for n in range(6)]
    assert [{task.repeat for task in tasks} for tasks in rounds] == [{n} for n in range(6)]
    assert {frozenset(task.trial_id for task in tasks) for tasks in rounds} == {frozenset(found.expansion.trials)}
    assert len({tuple(task.trial_id for task in tasks) for tasks in rounds}) > 1, "in random order"


def test_results_go_on_under_the_launcher_that_they_were_begun_with(tmp_path: Path) -> None:
    """Where the study names none; another launcher would make other trials of them."""

    def launchers(of: Plan) -> set[str]:
        return {trial.launcher for trial in of.record.trials.values()}

    results = tmp_path / "begun"
    begun = planned(tmp_path, {"launch": {"launcher": "torchrun"}})
    assert launchers(begun) == {"torchrun"}
    results.mkdir()
    write_study_record(results, begun.record)
    study = write_study(tmp_path)
    fresh = plan(study, EIGHT_CORES, lambda _: summary(), results=tmp_path / "new")
    assert launchers(fresh) == {"local"}
    again = plan(study, EIGHT_CORES, lambda _: summary(), results=results)
    assert launchers(again) == {"torchrun"}
    assert set(again.record.trials) == set(begun.record.trials)
    named = plan(study, EIGHT_CORES, lambda _: summary(), {"launch": {"launcher": "local"}}, results)
    other = plan(write_study(tmp_path, name="other"), EIGHT_CORES, lambda _: summary(), results=results)
    assert launchers(other) == {"local"}, "what is begun there is not this study"
    assert launchers(named) == {"local"}
    (results / "study.json").write_text("{")
    assert launchers(plan(study, EIGHT_CORES, lambda _: summary(), results=results)) == {"local"}


def test_a_folder_begun_with_threads_from_logical_cores_keeps_them(tmp_path: Path) -> None:
    """Four physical cores with two threads each: 4 threads for each of two ranks then, 2 by default now."""
    smt = replace(EIGHT_CORES, node_cores=((0, 4),))

    def threads(machine: Machine, results: Path) -> set[int]:
        found = plan(path, machine, lambda _: summary(fingerprint="f"), results=results)
        return {trial.world.threads_per_rank for trial in found.record.trials.values()}

    path = write_study(tmp_path, {"scaling": {"gpus": [1, 2]}}, "example")
    begun = plan(path, EIGHT_CORES, lambda _: summary(fingerprint="f"), results=tmp_path / "new")
    (tmp_path / "old").mkdir()
    write_study_record(tmp_path / "old", begun.record)
    assert threads(smt, tmp_path / "new") == {2}
    assert threads(smt, tmp_path / "old") == {4}
    assert threads(replace(smt, cores=6, node_cores=((0, 3),)), tmp_path / "old") == {1}  # another machine's


def test_planning_writes_nothing(tmp_path: Path) -> None:
    planned(tmp_path)
    assert list(tree(tmp_path)) == ["study.toml"]


@pytest.mark.parametrize(
    "changes",
    [
        {"launch": {"launcher": "torchrum"}},
        {"sweep": {"launch.launcher": ["torchrun", "torchrum"]}},
    ],
)
def test_an_unknown_launcher_is_refused_before_data_are_asked_for(
    tmp_path: Path, changes: dict[str, dict[str, Any]]
) -> None:
    def check(_: DataSpec) -> Summary:
        raise AssertionError("the data were asked for")

    with pytest.raises(RequestError, match=r"unknown launcher 'torchrum'.*Did you mean 'torchrun'\?"):
        plan(write_study(tmp_path, changes), EIGHT_CORES, check)


def test_a_launcher_that_cannot_start_the_world_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LAUNCHERS, "bare", BareLauncher())
    with pytest.raises(RequestError, match="it starts one rank, not 2"):
        planned(tmp_path, {"launch": {"launcher": "bare"}})


def test_an_unknown_dataset_is_refused_by_the_sources(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"unknown dataset 'cifra10'.*Did you mean 'cifar10'\?"):
        plan(write_study(tmp_path, {"data": {"name": "cifra10"}}), EIGHT_CORES)


def test_versions_are_known_without_importing() -> None:
    versions = installed_versions()
    assert versions["torch"]
    assert versions["vitscale"]


# --- the results folder --------------------------------------------------------------------------------------------


def begun(folder: Path, record: StudyRecord, *, finished: bool = True) -> Path:
    """A results folder of `record`, with one finished run."""
    folder.mkdir()
    write_study_record(folder, record)
    (folder / "lock").write_text("1")
    if finished:
        trial = next(iter(record.trials.values()))
        run = make_run(trial, [])
        write_outcome(new_run_folder(folder, run.header), run.outcome)
    return folder


def refused(folder: Path, record: StudyRecord, said: str, **options: Any) -> None:
    before = tree(folder.parent)
    with pytest.raises(StoreError) as caught:
        check_folder(folder, record, **({"allow_version_change": False} | options))
    assert said in str(caught.value)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 600
    assert tree(folder.parent) == before


def accepted(folder: Path, record: StudyRecord, **options: Any) -> None:
    before = tree(folder.parent)
    check_folder(folder, record, **({"allow_version_change": False} | options))
    assert tree(folder.parent) == before


@pytest.fixture
def record(tmp_path: Path) -> StudyRecord:
    return planned(tmp_path).record


def test_a_new_folder_an_empty_one_and_its_own_are_accepted(tmp_path: Path, record: StudyRecord) -> None:
    accepted(tmp_path / "new", record)
    accepted(tmp_path / "new" / "deeper", record)
    (tmp_path / "empty").mkdir()
    accepted(tmp_path / "empty", record)
    accepted(begun(tmp_path / "own", record), record)


def test_what_a_driver_that_died_at_once_leaves_is_accepted(tmp_path: Path, record: StudyRecord) -> None:
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "lock").write_text("1")
    (tmp_path / "results" / ".study.json.77.draft").write_text("{")
    accepted(tmp_path / "results", record)


def test_a_folder_that_was_checked_first_is_accepted(tmp_path: Path, record: StudyRecord) -> None:
    """`vitscale check -o results`, then `vitscale run -o results`."""
    (tmp_path / "results" / "checks").mkdir(parents=True)
    accepted(tmp_path / "results", record)


@pytest.mark.parametrize("entry", ["thesis.tex", "runs", "report.html"])
def test_a_folder_with_something_else_is_refused(tmp_path: Path, record: StudyRecord, entry: str) -> None:
    """TensorBoard writes to `runs` too."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / entry).write_text("precious")
    refused(
        tmp_path / "mine",
        record,
        f"is not empty and holds no results of vitscale (it has '{entry}', but no study.json)",
    )


def test_what_is_no_folder_is_refused(tmp_path: Path, record: StudyRecord) -> None:
    (tmp_path / "file").write_text("precious")
    refused(tmp_path / "file", record, "cannot be a results folder: Not a directory")
    refused(tmp_path / "file" / "below", record, "cannot be a results folder: Not a directory")
    refused(tmp_path / ("a" * 5000), record, "cannot be a results folder: File name too long")
    refused(tmp_path / "nul\x00", record, "cannot be a results folder: no such path")


def test_another_study_is_refused(tmp_path: Path, record: StudyRecord) -> None:
    folder = begun(tmp_path / "results", record)
    other = planned(tmp_path, name="another").record
    refused(
        folder, other, "holds another study: 'example'. Give the results of 'another' a folder of their own with -o"
    )


def test_other_trials_under_the_same_name_are_refused(tmp_path: Path, record: StudyRecord) -> None:
    folder = begun(tmp_path / "results", record)
    other = planned(tmp_path, {"train": {"micro_batch": 8}}).record
    assert not set(other.trials) & set(record.trials)
    refused(folder, other, "other trials under the name 'example' (train.micro_batch was 32 and is 8)")
    moved = {
        f"{number:012x}": t.model_copy(update={"launcher": "srun"}) for number, t in enumerate(record.trials.values())
    }
    by_option = record.model_copy(update={"trials": moved})
    refused(folder, by_option, "under the name 'example' (launch.launcher was local and is srun)")


def test_where_studies_are_alike_the_training_of_their_trials_tells(tmp_path: Path, record: StudyRecord) -> None:
    """Since a field is taken from the DeepSpeed file that the study names, its trials are others than they were."""
    folder = begun(tmp_path / "results", record)
    others = {
        f"{number:012x}": trial.model_copy(update={"train": trial.train.model_copy(update={"gradient_dtype": "fp32"})})
        for number, trial in enumerate(record.trials.values())
    }
    now = record.model_copy(update={"trials": others})
    refused(folder, now, "under the name 'example' (train.gradient_dtype was not given and is 'fp32')")


@pytest.mark.parametrize(
    ("before", "changes"),
    [
        ({"launch": {"threads_per_rank": 2}}, {"scaling": {"gpus": [1, 2, 4]}, "launch": {"threads_per_rank": 2}}),
        ({"launch": {"threads_per_rank": 2}}, {}),
        ({"scaling": {"gpus": [1, 2, 3]}}, {"scaling": {"gpus": [1, 2, 3, 4]}}),
        ({"scaling": {"gpus": [1, 2, 4]}}, {"scaling": {"gpus": [1, 2]}}),
        ({}, {"measure": {"repeats": 9}}),
        ({}, {"measure": {"order_seed": 5, "hang_seconds": 7.0}}),
        ({}, {"sweep": {"train.engine": ["ddp", "deepspeed"]}}),
        ({}, {"scaling": {"gpus": [2]}, "launch": {"threads_per_rank": 4}}),
        ({}, {"scaling": {"gpus": [1, 2, 4]}, "launch": {"oversubscribe": True}}),
    ],
)
def test_more_of_the_same_study_is_accepted(
    tmp_path: Path, before: dict[str, dict[str, Any]], changes: dict[str, dict[str, Any]]
) -> None:
    folder = begun(tmp_path / "results", planned(tmp_path, before).record)
    accepted(folder, planned(tmp_path, changes, results=folder).record)


def test_the_same_study_goes_on_where_there_are_more_cores_and_says_where_there_are_too_few(
    tmp_path: Path, record: StudyRecord
) -> None:
    """Two ranks of 4 threads were begun on 8 cores."""
    folder = begun(tmp_path / "results", record)
    accepted(folder, planned(tmp_path, machine=replace(EIGHT_CORES, cores=12), results=folder).record)
    fewer = planned(tmp_path, machine=replace(EIGHT_CORES, cores=4), results=folder).record
    refused(folder, fewer, "under the name 'example' (launch.threads_per_rank was 4 and is 2). Give")
    more_ranks = planned(tmp_path, {"scaling": {"gpus": [1, 2, 4]}}, results=folder).record
    told = "(launch.threads_per_rank was 4 and is 2 and scaling.gpus was [1, 2] and is [1, 2, 4])"
    refused(folder, more_ranks, told)
    named = {"launch": {"threads_per_rank": 2}}
    refused(folder, planned(tmp_path, named, results=folder).record, "(launch.threads_per_rank was not given and is 2)")


def test_changed_data_are_refused(tmp_path: Path, record: StudyRecord) -> None:
    folder = begun(tmp_path / "results", record)
    changed = planned(tmp_path, fingerprint="0").record
    refused(folder, changed, "has changed since these results were begun (fingerprint f, now 0)")
    refused(folder, changed, "Restore the data, or begin a new folder with -o", allow_version_change=True)


def test_changed_versions_are_refused_unless_asked_for(tmp_path: Path, record: StudyRecord) -> None:
    folder = begun(tmp_path / "results", record)
    newer = record.model_copy(update={"versions": record.versions | {"torch": "99.0", "numpy": None}})
    refused(folder, newer, f"torch {record.versions['torch']} -> 99.0")
    refused(folder, newer, f"numpy {record.versions['numpy']} -> absent")
    refused(folder, newer, "--allow-version-change")
    accepted(folder, newer, allow_version_change=True)


def test_versions_matter_only_where_there_is_something_to_mix_with(tmp_path: Path, record: StudyRecord) -> None:
    folder = begun(tmp_path / "results", record, finished=False)
    accepted(folder, record.model_copy(update={"versions": record.versions | {"torch": "99.0"}}))


def test_results_of_another_measuring_code_are_not_gone_on_with_unless_asked(
    tmp_path: Path, record: StudyRecord
) -> None:
    """Both call themselves by one version number; what is measured may differ all the same."""
    assert record.vitscale == program.identity()
    assert record.versions[program.MEASURING_NAME] == program.measuring_digest()
    folder = begun(tmp_path / "results", record)
    other = record.model_copy(update={"versions": record.versions | {program.MEASURING_NAME: "0" * 12}})
    refused(folder, other, f"{program.MEASURING_NAME} {program.measuring_digest()} -> {'0' * 12}")
    refused(folder, other, "go on under the new ones with --allow-version-change: the report then leaves")
    accepted(folder, other, allow_version_change=True)


def test_a_run_says_which_program_wrote_it(tmp_path: Path) -> None:
    of = planned(tmp_path)
    (tmp_path / "results").mkdir()
    folder = new_attempt(of.in_folder(tmp_path / "results"), of.tasks[0], 0)
    header = RunHeader.model_validate_json((folder / "trial.json").read_text())
    assert header.vitscale == program.identity()


def test_results_of_another_program_with_the_same_measuring_code_go_on(tmp_path: Path, record: StudyRecord) -> None:
    """A change of the report alone."""
    folder = begun(tmp_path / "results", record)
    accepted(folder, record.model_copy(update={"vitscale": "0.1.0+000000000000"}))


def test_results_that_do_not_say_which_measuring_code_it_was_go_on(tmp_path: Path, record: StudyRecord) -> None:
    """As those of older formats: unknown is not different."""
    older = {name: version for name, version in record.versions.items() if name != program.MEASURING_NAME}
    folder = begun(tmp_path / "results", record.model_copy(update={"versions": older, "vitscale": None}))
    accepted(folder, record)


@pytest.mark.parametrize("content", ["{", "[]", '{"format": 99}'])
def test_a_study_that_cannot_be_read_is_not_overwritten(tmp_path: Path, record: StudyRecord, content: str) -> None:
    folder = begun(tmp_path / "results", record)
    (folder / "study.json").write_text(content)
    refused(folder, record, "study.json")


def test_results_of_a_real_layout_are_their_own(tmp_path: Path) -> None:
    results = one_curve({1: [0.1], 2: [0.1]})
    write_results(results, tmp_path / "results")
    accepted(tmp_path / "results", results.study)


# --- what is still to be done --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "external", "retry_failed", "again"),
    [
        ("completed", False, False, False),
        ("completed", False, True, False),
        ("failed", False, False, False),
        ("failed", False, True, True),
        ("failed", True, False, True),
        ("oom", False, False, False),
        ("oom", False, True, True),
        ("hang", False, True, True),
        ("timeout", False, False, False),
        ("skipped", False, True, True),
        (None, False, False, True),
    ],
)
def test_which_runs_are_done_again(
    tmp_path: Path, kind: OutcomeKind | None, external: bool, retry_failed: bool, again: bool
) -> None:
    study = planned(tmp_path, {"measure": {"repeats": 2}})
    task = study.tasks[1]
    header = make_run(study.record.trials[task.trial_id], [], task.repeat).header
    folder = new_run_folder(tmp_path / "results", header)
    if kind is not None:
        outcome = Outcome(kind=kind, reason="r", external=external, started_unix_seconds=1.0, wall_seconds=1.0)
        write_outcome(folder, outcome)
    todo = outstanding_runs(study, RunIndex(tmp_path / "results"), retry_failed=retry_failed)
    # The others are still to be done in any case, in the plan's order.
    assert todo == [t for t in study.tasks if t != task or again]


def test_shares_of_ranks_go_to_the_ranks_that_mpirun_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gives the first ranks to its own host; shares are in the order of the hostfile."""
    monkeypatch.setattr(Mpirun, "unavailable", lambda _: None)
    monkeypatch.setattr("vitscale.launchers.base.is_this_machine", lambda name: name == "192.0.2.2")
    changes: dict[str, dict[str, Any]] = {
        "train": {"rank_speeds": [1.0, 0.25]},
        "scaling": {"gpus": [2], "gpus_per_node": 1},
        "launch": {"launcher": "mpirun", "hostfile": "hosts", "threads_per_rank": 1},
    }
    (tmp_path / "hosts").write_text("192.0.2.1 slots=1\n192.0.2.2 slots=1\n")
    with pytest.raises(RequestError, match=r"first ranks to '192.0.2.2', this machine\. Begin the hostfile"):
        planned(tmp_path, changes)
    (tmp_path / "hosts").write_text("192.0.2.2 slots=1\n192.0.2.1 slots=1\n")
    (trial,) = planned(tmp_path, changes).record.trials.values()
    assert trial.train.micro_batches is not None
