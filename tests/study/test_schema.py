"""The schema of the study file takes whatever a study may say, and refuses what is plainly wrong."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from study_factory import toml
from vitscale.study.schema import study_schema
from vitscale.study.sections import SECTIONS, SWEEPABLE

jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed: make install")
ROOT = Path(__file__).parent.parent.parent
SCHEMA = study_schema()
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
BLOCK = re.compile(r"^```toml\n(.*?)^```", re.M | re.S)


def whole_studies() -> list[Any]:
    """The examples, and the blocks of the docs that begin a study of their own."""
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in sorted((ROOT / "examples").rglob("*.toml"))}
    for page in sorted((ROOT / "docs").rglob("*.md")):
        blocks = [block for block in BLOCK.findall(page.read_text()) if re.search(r"^name = ", block, re.M)]
        texts |= {f"{page.relative_to(ROOT)} {number}": block for number, block in enumerate(blocks)}
    whole = {name: text for name, text in texts.items() if "[train]" in text and not text.startswith("[")}
    return [pytest.param(tomllib.loads(text), id=name) for name, text in whole.items()]


def test_it_is_a_schema() -> None:
    VALIDATOR.check_schema(SCHEMA)


@pytest.mark.parametrize("study", whole_studies())
def test_examples_and_documented_studies_are_valid(study: dict[str, Any]) -> None:
    assert [error.message for error in VALIDATOR.iter_errors(study)] == []


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("train", "micro_bach", 3),
        ("train", "micro_batch", "64"),
        ("train", "micro_batch", 0),
        ("train", "precision", "amp"),
        ("train", "target_accuracy", 1.5),
        ("model", "image_size", 0),
        ("data", "classes", 1),
        ("scaling", "gpus", []),
        ("scaling", "mode", "strong"),
        ("node", "gpus", 4),
        ("sweep", "train.micro_batch", [4, "8"]),
        ("sweep", "train.micro_batch", 4),
        ("sweep", "scaling.gpus", [[1], [2]]),
        ("sweep", "train.lr", [0.1]),
        ("messure", "steps", 3),
    ],
)
def test_what_is_plainly_wrong_is_refused(section: str, key: str, value: Any) -> None:
    study = tomllib.loads(toml())
    assert VALIDATOR.is_valid(study)
    assert not VALIDATOR.is_valid(study | {section: study.get(section, {}) | {key: value}})


def test_a_script_needs_neither_model_nor_data() -> None:
    assert VALIDATOR.is_valid({"name": "own", "train": {"script": "train.py", "micro_batch": 8}})
    assert VALIDATOR.is_valid({"name": "own", "sweep": {"train.script": ["a.py", "b.py"]}})
    assert not VALIDATOR.is_valid({"name": "own", "train": {"micro_batch": 8}})


def test_an_editor_is_told_what_the_sources_say() -> None:
    for section in (SCHEMA, *SCHEMA["$defs"].values()):
        assert [key for key, value in section["properties"].items() if not {"$ref", "description"} & set(value)] == []
    train = SCHEMA["$defs"]["TrainSection"]["properties"]
    assert train["grad_accum"]["description"] == "Micro-steps per optimizer step."
    assert train["precision"]["description"].startswith("auto: bf16 where")  # the section's own, not its base's
    assert train["engine"]["anyOf"][0]["enum"] == sorted(train["engine"]["anyOf"][0]["enum"])
    assert "ddp" in train["engine"]["anyOf"][0]["enum"]
    assert train["engine"]["default"] == "ddp"
    swept = SCHEMA["properties"]["sweep"]["properties"]
    assert set(SWEEPABLE) < set(swept)
    assert set(SECTIONS) <= set(SCHEMA["properties"])
