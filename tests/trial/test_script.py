"""What the arguments of a user's own script become, and what of a study it must be told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from study_factory import expanded
from vitscale.errors import RequestError
from vitscale.trial import script
from vitscale.trial.trial import Trial

TELLING = {"micro_batch": 8, "epochs": None, "precision": "fp32", "script": "train.py"}


def changes(**train: Any) -> dict[str, dict[str, Any]]:
    """A study of a script, in place of the factory's own model and data."""
    return {
        "model": {"name": None, "image_size": None, "patch_size": None},
        "data": {"name": None, "samples": 320},
        "train": TELLING | train,
        "measure": {"steps": 20},
    }


def trial_of(folder: Path, text: str = "print(1)\n", **train: Any) -> Trial:
    """The trial on two ranks of a study beside a script."""
    (folder / "train.py").write_text(text)
    return list(expanded(folder, changes(**train)).trials.values())[-1]


def filled(folder: Path, *arguments: str, **train: Any) -> list[str]:
    trial = trial_of(folder, arguments=arguments, **train)
    return script.filled(trial.train.arguments, trial, seed=7, repeat=2, output=Path("/r/output"))


def test_placeholders_take_the_values_of_the_run(tmp_path: Path) -> None:
    words = ("--b={micro_batch}", "{gpus}/{nodes}/{gpus_per_node}", "{seed}", "{repeat}", "{output}/x", "{steps}")
    assert filled(tmp_path, *words) == ["--b=8", "2/1/2", "7", "2", "/r/output/x", "20"]


def test_braces_are_doubled_and_no_shell_is_meant(tmp_path: Path) -> None:
    words = ('{{"a": {global_batch}}}', "$(rm -rf /)", "a b;c", "")
    assert filled(tmp_path, *words) == ['{"a": 16}', "$(rm -rf /)", "a b;c", ""]


def test_any_field_may_be_handed_on(tmp_path: Path) -> None:
    words = ("{zero_stage}", "{compile}", "{learning_rate}", "{data.samples}", "{model.image_size}")
    assert filled(tmp_path, *words, zero_stage=2, compile=True) == [
        "2",
        "true",
        "0.001",
        "1437",
        "224",
    ]  # images: the factory's


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("{micro_batches}", "Did you mean 'micro_batch'"),
        ("{__class__}", "unknown placeholder"),
        ("{}", "unknown placeholder"),
        ("{gpus", "Write {{ or }} for a brace"),
        ("a}", "Write {{ or }} for a brace"),
        ("{epochs}", "'{epochs}' has no value in this trial"),
        ("{model.name}", "has no value"),
    ],
)
def test_what_stands_for_nothing_is_refused_before_anything_starts(tmp_path: Path, word: str, says: str) -> None:
    with pytest.raises(RequestError, match=r"train\.arguments") as refused:
        trial_of(tmp_path, arguments=[word])
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("train", "says"),
    [
        ({"momentum": 0.5}, 'arguments = ["--momentum", "{momentum}"]'),
        ({"epochs": 3}, "or remove it and give measure.steps, as many as the script takes"),
        ({"compile": True}, "train.compile is set, and no argument of train.script hands it on"),
        ({"precision": None}, "train.precision is not told to train.script"),
        ({"engine": "ddp"}, "train.engine = 'ddp' has no meaning with train.script"),
        ({"rank_speeds": [1.0, 2.0]}, "train.rank_speeds has no meaning with train.script"),
        ({"script": None, "engine": "script"}, "train.engine = 'script' has no meaning without train.script"),
        ({"script": "gone.py"}, "gone.py"),
    ],
)
def test_what_a_script_never_hears_of_is_refused(tmp_path: Path, train: dict[str, Any], says: str) -> None:
    (tmp_path / "train.py").write_text("pass")
    asked = changes(**train)
    if train.get("script", "") is None:
        asked |= {"model": {}, "data": {"name": "digits"}}
    with pytest.raises(RequestError) as refused:
        expanded(tmp_path, asked)
    assert says in str(refused.value)


def test_how_many_images_an_epoch_has_is_not_guessed(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("pass")
    with pytest.raises(RequestError, match="how many images an epoch has is not told"):
        expanded(tmp_path, changes() | {"data": {"name": None}})


def test_a_script_that_is_no_python_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="line 1 is no Python"):
        trial_of(tmp_path, "torchrun train.py\n")


def test_the_identity_holds_the_script_s_text_and_arguments_and_not_its_place(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    other.mkdir()
    base = trial_of(one, arguments=["{gpus}"])
    assert trial_of(other, arguments=["{gpus}"]).identity() == base.identity()
    assert trial_of(other, arguments=["--n", "{gpus}"]).identity() != base.identity()
    assert trial_of(other, "print(2)\n", arguments=["{gpus}"]).identity() != base.identity()
    assert Trial.model_validate_json(base.model_dump_json()).identity() == base.identity()


def test_what_nobody_tells_is_unknown(tmp_path: Path) -> None:
    trial = trial_of(tmp_path)
    assert trial.model.unknown
    assert trial.train.engine == "script"


def test_arguments_and_scripts_may_be_swept(tmp_path: Path) -> None:
    for name in ("train.py", "other.py"):
        (tmp_path / name).write_text(f"print({name!r})")  # of one text they would be one trial
    sweep = {"sweep": {"train.script": ["train.py", "other.py"], "train.arguments": [["--a"], ["--b", "{gpus}"]]}}
    found = expanded(tmp_path, changes() | sweep)
    assert len(found.curves) == 4
    assert {Path(t.train.script or "").name for t in found.trials.values()} == {"train.py", "other.py"}
