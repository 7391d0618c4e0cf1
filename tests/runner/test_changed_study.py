"""A folder that was begun by another study: what was changed is named, and the advice, once followed, works."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from results_factory import make_run
from study_factory import EIGHT_CORES, summary, write_study
from vitscale.errors import StoreError
from vitscale.runner.planning import Plan, check_folder, plan
from vitscale.store import new_run_folder, write_outcome
from vitscale.store import write_study as write_record
from vitscale.study.file import StudyFile
from vitscale.trial.trial import DataSpec

SCRIPT: dict[str, Any] = {
    "train": {"script": "train.py", "arguments": ["--depth", "2"], "precision": "fp32", "epochs": None},
    "measure": {"steps": 20},
    "data": {"name": None, "samples": 100},
    "model": {"name": None, "image_size": None, "patch_size": None},
}
CONFIG = {"zero_optimization": {"stage": 1}, "gradient_clipping": 1.0}
TINY = {
    "model_type": "vit",
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "image_size": 32,
    "patch_size": 8,
}
DEEPSPEED: dict[str, Any] = {"train": {"engine": "deepspeed", "deepspeed_config": "ds.json"}}
HUGGING_FACE: dict[str, Any] = {"model": {"name": None, "image_size": None, "patch_size": None, "hf": "tiny"}}
FACTORY: dict[str, Any] = {"model": {"name": None, "patch_size": None, "factory": "mine:build"}}
CLASSES: dict[str, Any] = {"data": {"name": "folder", "root": ".", "classes": "names.txt"}}


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All files that the studies here name, beside the study."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print('first')\n")
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG))
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(TINY))
    (tmp_path / "mine.py").write_text("def build(num_classes, image_size):\n    return 1\n")
    (tmp_path / "names.txt").write_text("cat\ndog\n")


def planned(folder: Path, changes: dict[str, Any], *words: str) -> Plan:
    def check(data: DataSpec) -> Any:
        return summary(fingerprint="f", classes=len(data.classes) if isinstance(data.classes, tuple) else 10)

    return plan(StudyFile.read(write_study(folder, changes), overrides=words), EIGHT_CORES, check)


def begun(results: Path, of: Plan) -> Path:
    """A results folder of a plan with one completed run."""
    results.mkdir()
    write_record(results, of.record)
    run = make_run(next(iter(of.record.trials.values())), [])
    write_outcome(new_run_folder(results, run.header), run.outcome)
    return results


def refusal(results: Path, now: Plan) -> str:
    with pytest.raises(StoreError) as caught:
        check_folder(results, now.record, allow_version_change=True)
    return str(caught.value)


class Case(NamedTuple):
    """A study whose file is changed after its results were begun."""

    changes: dict[str, Any]
    file: str
    text: str
    said: str
    restore: str


CASES = {
    "script": Case(
        SCRIPT, "train.py", "print('second')\n", "(the content of train.script 'train.py' has changed)",
        "or put train.py back as it was",
    ),
    "DeepSpeed file": Case(
        DEEPSPEED, "ds.json", json.dumps(CONFIG | {"zero_optimization": {"stage": 2}}),
        "the content of train.deepspeed_config has changed: zero_optimization.stage was 1 and is 2",
        "or put that file back as it was",
    ),
    "Hugging Face configuration": Case(
        HUGGING_FACE, "tiny/config.json", json.dumps(TINY | {"num_hidden_layers": 3}),
        "(the config.json of model.hf 'tiny' has changed)", "or put tiny back as it was",
    ),
    "list of classes": Case(
        CLASSES, "names.txt", "cat\nfox\n", "(the names in the file of data.classes have changed)",
        "or put that file back as it was",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_changed_file_is_named_and_its_restoring_goes_on(tmp_path: Path, case: Case) -> None:
    path = tmp_path / case.file
    shutil.copy(path, tmp_path / "as-it-was")
    results = begun(tmp_path / "results", planned(tmp_path, case.changes))
    path.write_text(case.text)
    changed = planned(tmp_path, case.changes)
    said = refusal(results, changed)
    assert case.said in said
    assert case.restore in said
    assert "command line" not in said
    assert "Give the results of 'example' a folder of their own with -o" in said
    check_folder(tmp_path / "own-folder", changed.record, allow_version_change=False)
    shutil.copy(tmp_path / "as-it-was", path)
    check_folder(results, planned(tmp_path, case.changes).record, allow_version_change=False)


def test_a_changed_script_is_named_though_the_command_line_differs_too(tmp_path: Path) -> None:
    """The number of repeats makes no other trials: to leave it out again would not help."""
    results = begun(tmp_path / "results", planned(tmp_path, SCRIPT, "measure.repeats=6"))
    (tmp_path / "train.py").write_text("print('second')\n")
    said = refusal(results, planned(tmp_path, SCRIPT))
    assert "(the content of train.script 'train.py' has changed)" in said
    assert "command line" not in said


def test_changed_arguments_of_a_script_are_named(tmp_path: Path) -> None:
    results = begun(tmp_path / "results", planned(tmp_path, SCRIPT))
    other = SCRIPT | {"train": SCRIPT["train"] | {"arguments": ["--depth", "4"]}}
    said = refusal(results, planned(tmp_path, other))
    assert re.search(r"\(train.arguments was \['--depth', '2'\] and is \['--depth', '4'\]\)", said)
    assert "train.py" not in said


def test_what_decides_no_trial_is_not_named_as_the_cause(tmp_path: Path) -> None:
    results = begun(tmp_path / "results", planned(tmp_path, {"measure": {"repeats": 2, "hang_seconds": 9.0}}))
    said = refusal(results, planned(tmp_path, {"measure": {"repeats": 5}, "train": {"micro_batch": 8}}))
    assert "(train.micro_batch was 32 and is 8)" in said


def test_words_of_the_command_line_are_advised_where_they_are_the_cause(tmp_path: Path) -> None:
    results = begun(tmp_path / "results", planned(tmp_path, {}, "train.micro_batch=16"))
    said = refusal(results, planned(tmp_path, {}))
    assert "(train.micro_batch was 16 and is 32)" in said
    (words,) = re.findall(r"go on as it was begun, with (\S+) on the command line", said)
    check_folder(results, planned(tmp_path, {}, words).record, allow_version_change=False)


def change_factory(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def build(num_classes, image_size):\n    return 2\n")


def change_nothing(_: Path) -> None:
    pass


@pytest.mark.parametrize(("change", "is_refused"), [(change_factory, True), (change_nothing, False)])
def test_a_changed_factory_is_named_and_does_not_mix_two_models(
    tmp_path: Path, change: Callable[[Path], None], is_refused: bool
) -> None:
    """A trial is named by "mine:build", whatever that builds."""
    shutil.copy(tmp_path / "mine.py", tmp_path / "as-it-was")
    results = begun(tmp_path / "results", planned(tmp_path, FACTORY))
    change(tmp_path)
    now = planned(tmp_path, FACTORY)
    if not is_refused:
        check_folder(results, now.record, allow_version_change=False)
        return
    said = refusal(results, now)
    assert "the file of model.factory 'mine:build' has changed since the results" in said
    assert "Put that file back as it was, or begin a new folder with -o" in said
    check_folder(tmp_path / "new", now.record, allow_version_change=False)
    shutil.copy(tmp_path / "as-it-was", tmp_path / "mine.py")
    check_folder(results, planned(tmp_path, FACTORY).record, allow_version_change=False)


def test_a_factory_may_be_mended_while_nothing_has_completed(tmp_path: Path) -> None:
    results = tmp_path / "results"
    results.mkdir()
    write_record(results, planned(tmp_path, FACTORY).record)
    change_factory(tmp_path)
    check_folder(results, planned(tmp_path, FACTORY).record, allow_version_change=False)


def test_results_that_do_not_say_which_factory_it_was_go_on(tmp_path: Path) -> None:
    """As those of older formats: unknown is not different."""
    older = planned(tmp_path, FACTORY)
    results = begun(tmp_path / "results", older)
    write_record(results, older.record.model_copy(update={"factory_digests": {}}))
    change_factory(tmp_path)
    check_folder(results, planned(tmp_path, FACTORY).record, allow_version_change=False)
