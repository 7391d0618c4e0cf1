"""KEY=VALUE words of the command line, put over a study file; and other programs' words for keys and values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from study_factory import EIGHT_CORES, summary, write_study
from vitscale import engines, sources
from vitscale.errors import RequestError, StoreError
from vitscale.launchers import find_launcher
from vitscale.runner import Plan, plan
from vitscale.runner.planning import check_folder
from vitscale.store.writing import write_study as write_record
from vitscale.study.file import StudyFile, overlay, parse_overrides
from vitscale.study.sections import SECTIONS, Study
from vitscale.trial import hints
from vitscale.trial.trial import DataSpec

SWEPT: dict[str, dict[str, Any]] = {"sweep": {"train.engine": ["ddp", "fsdp2"]}}


def read(folder: Path, *words: str, changes: dict[str, dict[str, Any]] | None = None) -> StudyFile:
    return StudyFile.read(write_study(folder, changes), overrides=words)


def refusal(folder: Path, *words: str, changes: dict[str, dict[str, Any]] | None = None) -> str:
    with pytest.raises(RequestError) as caught:
        read(folder, *words, changes=changes)
    return str(caught.value)


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("train.micro_batch=16", 16),
        ("train.learning_rate=3e-4", 3e-4),
        ("train.compile=true", True),
        ("train.engine=fsdp2", "fsdp2"),
        ('train.engine="fsdp2"', "fsdp2"),
        ("data.root=~/my data", "~/my data"),
        ("data.root=/data#1", "/data#1"),
        ("train.seed=7#2", "7#2"),
        ("slurm.time=2:00:00", "2:00:00"),
        ("train.arguments=['a=b', \"c\"]", ["a=b", "c"]),
        ("scaling.gpus=[1, 2]", [1, 2]),
        ("launch.environment={A = '1'}", {"A": "1"}),
        ("train.engine=1\nname = 'x'", "1\nname = 'x'"),
    ],
)
def test_a_value_is_toml_and_a_bare_word_a_string(word: str, value: object) -> None:
    section, _, key = word.partition("=")[0].partition(".")
    assert parse_overrides([word]) == {section: {key: value}}


def test_they_come_over_the_file_the_site_and_the_options(tmp_path: Path) -> None:
    over = overlay(None, launcher="mpirun", scheduler=None, hostfile=None)
    words = ("name=other", "train.micro_batch=64", "launch.launcher=torchrun", "scaling.gpus=[4]")
    file = StudyFile.read(write_study(tmp_path, {"train": {"micro_batch": 8}}), over, words)
    assert (file.study.name, file.study.train.micro_batch) == ("other", 64)
    assert (file.study.launch.launcher, file.study.scaling.gpus) == ("torchrun", (4,))
    assert file.text == (tmp_path / "study.toml").read_text()
    assert file.overrides == words


def test_a_length_of_the_command_line_takes_the_place_of_the_file_s(tmp_path: Path) -> None:
    """`train.epochs` and `measure.steps` are one choice; who gives both has not chosen."""
    steps: dict[str, dict[str, Any]] = {"train": {"epochs": None}, "measure": {"steps": 20}}
    epochs: dict[str, dict[str, Any]] = {"train": {"epochs": 3}, "measure": {"steps": None}}
    for changes, word, length in (
        (steps, "train.epochs=2", (2, None)),
        (epochs, "measure.steps=5", (None, 5)),
        (steps, "measure.steps=5", (None, 5)),
        (epochs, "train.seed=1", (3, None)),
    ):
        asked = read(tmp_path, word, changes=changes).study
        assert (asked.train.epochs, asked.measure.steps) == length
    both = read(tmp_path, "train.epochs=2", "measure.steps=5", changes=steps).study
    assert (both.train.epochs, both.measure.steps) == (2, 5)
    swept = read(tmp_path, "sweep.train.epochs=[1, 2]", changes=steps)
    assert [(point.train.epochs, point.measure.steps) for _, point, _ in swept.points()] == [(1, None), (2, None)]


def test_a_length_of_the_command_line_is_named_beside_one_that_the_study_sweeps(tmp_path: Path) -> None:
    swept: dict[str, dict[str, Any]] = {"train": {"epochs": None}, "sweep": {"train.epochs": [1, 2]}}
    said = refusal(tmp_path, "measure.steps=5", changes=swept)
    assert "sweep.'train.epochs' varies a run's length, which measure.steps on the command line decides" in said


def test_a_sweep_is_put_over_by_its_own_key(tmp_path: Path) -> None:
    file = read(tmp_path, 'sweep.train.engine=["ddp"]', "sweep.train.micro_batch=[2, 4]", changes=SWEPT)
    assert [list(labels.values()) for labels, _, _ in file.points()] == [["ddp", 2], ["ddp", 4]]


@pytest.mark.parametrize(
    ("word", "said"),
    [
        (
            "train.micro_batch=many",
            "command line: train.micro_batch is 'many', but should be a whole number. Correct it on the command line.",
        ),
        ("train.compile=True", "command line: train.compile is 'True', but should be true or false. Write true."),
        ("scaling.gpus=1,2", "scaling.gpus is '1,2', but should be a list. Write 'scaling.gpus=[1, 2]'."),
        ("scaling.gpus=2", "Write 'scaling.gpus=[2]'."),
        ("measure.meters=a,b", """Write 'measure.meters=["a", "b"]'."""),
        ("train.micro_bach=2", "unknown key 'micro_bach' in [train]"),
        ("train.lr=0.1", "unknown key 'lr' in [train]. Write learning_rate in [train]."),
        ("lr=0.1", "unknown key 'lr' on the command line. Write train.learning_rate=VALUE."),
        ("micro_batch=3", "unknown key 'micro_batch' on the command line. Write train.micro_batch=VALUE."),
        ("tarin.seed=3", "unknown key 'tarin.seed' on the command line. Write train.seed=VALUE."),
        ("tarin.x=3", "Valid: model.KEY=VALUE, data.KEY=VALUE"),
        ("tarin.x=3", "Did you mean 'train'?"),
        ("micro_batch", "'micro_batch' is no KEY=VALUE. Write train.micro_batch=16."),
        ("=3", "'=3' is no KEY=VALUE"),
        ("sweep={}", "'sweep' is a section, and no key. Write sweep.KEY=VALUE."),
        ("train.engine=", "train.engine is '', which is no TOML value"),
        ("scaling.gpus=[1,", "scaling.gpus is '[1,', which is no TOML value. Quote it for the shell"),
        ("train.seed=" + "[" * 20_000, "which is no TOML value"),
        ("train.engine=ddp", "sweep.'train.engine' varies what the command line decides. Remove one of the two."),
        ("sweep.train.engine=ddp", "sweep.train.engine=ddp sweeps one value. Give a list: "),
        (
            "sweep.train.lr=[1, 2]",
            "sweep.'train.lr' is no field that can be swept. Write \"train.learning_rate\" = [...]",
        ),
        ("sweep.train.enginee=[1]", "Did you mean 'train.engine'?"),
        ("name=[1]", "name is [1], but should be text in quotes"),
    ],
)
def test_a_mistake_is_one_message(tmp_path: Path, word: str, said: str) -> None:
    assert said in refusal(tmp_path, word, changes=SWEPT)


def test_one_key_is_given_once(tmp_path: Path) -> None:
    for key in ("train.seed", "name"):
        assert f"{key} is given twice on the command line" in refusal(tmp_path, f"{key}=1", f"{key}=2")


def planned(folder: Path, *words: str) -> Plan:
    return plan(read(folder, *words), EIGHT_CORES, lambda _: summary())


def test_the_record_keeps_them_and_a_resume_agrees_or_is_told_how(tmp_path: Path) -> None:
    begun = planned(tmp_path, "train.micro_batch=16")
    results = tmp_path / "results"
    results.mkdir()
    write_record(results, begun.record)
    assert json.loads((results / "study.json").read_text())["overrides"] == ["train.micro_batch=16"]
    assert {trial.train.micro_batch for trial in begun.record.trials.values()} == {16}
    check_folder(results, planned(tmp_path, "train.micro_batch=16").record, allow_version_change=False)
    with pytest.raises(StoreError, match=r"go on as it was begun, with train.micro_batch=16 on the command line"):
        check_folder(results, planned(tmp_path).record, allow_version_change=False)
    # What decides no result may differ, as it may in the file.
    again = planned(tmp_path, "train.micro_batch=16", "measure.hang_seconds=60.0")
    check_folder(results, again.record, allow_version_change=False)


# --- other programs' words -------------------------------------------------------------------------------------------


def test_every_word_leads_to_a_field_that_there_is() -> None:
    for words, (field, _, _) in hints._MEANINGS_BY_WORDS:
        section, _, key = field.partition(".")
        assert key in SECTIONS[section].model_fields, field
        assert not {*words.split()} & SECTIONS[section].model_fields.keys() - {key}, words
    for field in hints._ADVICE_BY_FIELD:
        section, _, key = field.partition(".")
        assert key in SECTIONS[section].model_fields, field


@pytest.mark.parametrize(
    ("section", "key", "value", "said"),
    [
        ("train", "precision", "amp", 'Write precision = "bf16", which is autocast.'),
        ("train", "precision", "float16", 'Write precision = "fp16".'),
        ("train", "device", "gpu", 'Write device = "cuda".'),
        ("train", "optimizer", "adam", 'Write optimizer = "adamw".'),
        ("scaling", "mode", "strong", 'Write mode = "strong-micro"'),
        ("data", "gpus", [1], "Write gpus = [1, 2, 4] in [scaling]."),
        ("train", "accum", 2, "Write grad_accum in [train]."),
        ("measure", "fp16", True, 'Write precision = "bf16" in [train].'),
    ],
)
def test_values_and_keys_of_other_programs(tmp_path: Path, section: str, key: str, value: Any, said: str) -> None:
    assert said in refusal(tmp_path, changes={section: {key: value}})


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("imagenet", 'Write name = "folder" with root = the folder that holds train/ and val/.'),
        ("ILSVRC2012", 'Write name = "folder" with root'),
        ("cifar-10", "Did you mean 'cifar10'?"),
        ("CIFAR", 'Write name = "cifar10" or "cifar100".'),
        ("webdataset", 'Write name = "shards".'),
        ("timm/{x}", 'Write hf = "timm/{x}" in place of name.'),
    ],
)
def test_datasets_of_other_programs(name: str, said: str) -> None:
    with pytest.raises(RequestError) as caught:
        sources.check(DataSpec(name=name))
    assert said in str(caught.value)


def test_engines_launchers_and_models_of_other_programs(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match='Write engine = "fsdp2"'):
        engines.known("fsdp")
    with pytest.raises(RequestError, match='Write launcher = "mpirun"'):
        find_launcher("mpi")
    write_study(tmp_path)
    resnet = StudyFile.read(tmp_path / "study.toml", overrides=["model.name=resnet50"])
    with pytest.raises(RequestError, match=r'Write name = "timm/resnet50" or "torchvision/resnet50"'):
        plan(resnet, EIGHT_CORES, lambda _: summary())
    assert isinstance(resnet.study, Study)
