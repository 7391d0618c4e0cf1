"""A field of [train] says its facts where it is declared, and nowhere else."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import vitscale
from study_factory import expanded
from vitscale.base.plugins import referred
from vitscale.engines import ENGINES, OPTIONS, readers_of
from vitscale.study.sections import SWEEPABLE, TrainSection
from vitscale.trial.fields import traits_of
from vitscale.trial.trial import TrainFields, TrainSpec

OF_ONE = {"global_batch", "rank_speeds", "micro_batches"}
"""Fields that only a study or only a trial has: the one says what the other comes to."""


def test_a_study_and_a_trial_have_the_same_fields() -> None:
    assert TrainSection.model_fields.keys() ^ TrainSpec.model_fields.keys() == OF_ONE
    assert TrainFields.model_fields.keys() == TrainSpec.model_fields.keys() & TrainSection.model_fields.keys()


@pytest.mark.parametrize("field", TrainFields.model_fields)
def test_facts_hold_together(field: str) -> None:
    fact = traits_of(TrainSpec, field)
    assert fact == traits_of(TrainSection, field), "what narrows a field's type keeps its facts"
    assert f"train.{field}" in SWEEPABLE
    if fact.needs is not None:
        other, values = fact.needs
        for value in values:
            TrainSection.model_validate({other: value}, strict=True)
    if isinstance(fact.curve_words, str):
        assert not fact.curve_words or "{" in fact.curve_words


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_of_engines_is_read_by_one(option: str) -> None:
    assert readers_of(option)


NEW = """    dry_gather: Annotated[bool, wrapper_option(curve_words=("dry gather", "wet gather"))] = False
    hollow: Annotated[bool, wrapper_option()] = False
    boost: Annotated[float, FieldTraits(needs=("optimizer", ("sgd",)))] = Field(default=0.5, ge=0.0)
"""
BEFORE = '    seed: Seed = 0\n    """Seed of weights, order and augmentation.'
PROGRAM = """
import json, sys
from pathlib import Path
from study_factory import expanded
from vitscale.advice.study_text import _train_section
from vitscale.analysis.scaling import curve_name
from vitscale.errors import RequestError

folder = Path(sys.argv[1])

def refused(train):
    try:
        expanded(folder, {"train": train})
    except RequestError as error:
        return str(error)

def only(changes):
    (trial,) = expanded(folder, {"scaling": {"gpus": [2]}, **changes}).trials.values()
    return trial

swept = expanded(folder, {"train": {"engine": "fsdp2"}, "sweep": {"train.dry_gather": [True, False]}})
dry = only({"train": {"engine": "fsdp2", "dry_gather": True}})
print(json.dumps({
    "names": [curve_name(curve.labels, swept.trials[curve.points[-1].trial_id]) for curve in swept.curves],
    "trials": len(swept.trials),
    "value": dry.train.dry_gather,
    "default": only({}).identity(),
    "text": _train_section(dry.train)["dry_gather"],
    "of_ddp": refused({"dry_gather": True}),
    "of_nobody": refused({"hollow": True}),
    "idle": refused({"boost": 0.7}),
    "wrong": refused({"boost": -1.0}),
    "boosted": only({"train": {"boost": 0.7, "optimizer": "sgd"}}).train.boost,
}))
"""


def test_a_new_field_is_a_declaration_and_a_word_of_the_engine_that_reads_it(tmp_path: Path) -> None:
    """More fields, in one file, one of them read by an engine: they are validated, swept, named, refused where idle,
    written into studies and left out of the identity of trials that do without."""
    package = tmp_path / "src" / "vitscale"
    shutil.copytree(Path(vitscale.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    declared = (package / "trial" / "trial.py").read_text()
    assert declared.count(BEFORE) == 1
    (package / "trial" / "trial.py").write_text(declared.replace(BEFORE, NEW + BEFORE))
    facts = (package / "engines" / "fsdp2" / "facts.py").read_text()
    assert facts.count('"master_weights", ') == 1
    (package / "engines" / "fsdp2" / "facts.py").write_text(
        facts.replace('"master_weights", ', '"master_weights", "dry_gather", ')
    )
    environment = os.environ | {"PYTHONPATH": f"{package.parent}:{Path(__file__).parents[1]}"}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    said = json.loads(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)
    before = expanded(tmp_path, {"scaling": {"gpus": [2]}}).trials
    assert said["names"] == ["fsdp2, dry gather", "fsdp2, wet gather"]
    assert (said["trials"], said["value"], said["text"], said["boosted"]) == (4, True, True, 0.7)
    assert [said["default"]] == list(before)
    assert "train.dry_gather = True has no meaning under train.engine = 'ddp'" in said["of_ddp"]
    assert (
        "train.hollow = True has no meaning under train.engine = 'ddp'. Remove it: no engine reads it"
        in said["of_nobody"]
    )
    assert "train.boost has no meaning under train.optimizer = 'adamw'" in said["idle"]
    assert 'set optimizer = "sgd"' in said["idle"]
    assert "train.boost is -1.0" in said["wrong"]


@pytest.mark.parametrize("engine", ENGINES)
def test_what_an_engine_s_row_refers_to_is_there(engine: str) -> None:
    facts = ENGINES[engine]
    for reference in facts.references:
        assert callable(referred(reference))
    assert set(facts.options) <= set(OPTIONS)
    assert set(facts.name_options) <= set(facts.options)
    for (field, value), refusal in facts.cannot.items():
        TrainSpec.model_validate(
            {"engine": engine, "precision": "fp32", "device": "cpu", "micro_batch": 1, field: value}
        )
        assert refusal.next_step
