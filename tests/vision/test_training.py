"""The example with a model of timm, of torchvision, a DINOv2, a SigLIP and a ConvNeXt, on two ranks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

pytest.importorskip("timm", reason="timm is not installed: .venv-vision/bin/python -m pytest tests/vision runs this")
pytest.importorskip("torchvision", reason="torchvision is not installed")

from driving import vitscale

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "models_by_name"


@pytest.mark.ranks
def test_models_by_name_train_on_two_ranks(tmp_path: Path) -> None:
    shutil.copytree(EXAMPLE, tmp_path / "example")
    options = ["measure.steps=8", "measure.repeats=1", "launch.oversubscribe=true"]
    run = vitscale("run", "study.toml", *options, "-o", tmp_path / "results", cwd=tmp_path / "example")
    assert run.returncode == 0, run.stdout + run.stderr
    report = vitscale("report", tmp_path / "results", "--format", "json")
    assert report.returncode == 0, report.stderr
    trials = json.loads(report.stdout)["trials"]
    assert {trial["outcome"] for trial in trials} == {"completed"}
    assert {Path(trial["model"]).name for trial in trials} == {
        "test_vit", "mobilenet_v3_small", "dinov2", "siglip", "convnext",
    }  # fmt: skip


STUDY = """
name = "one"
[model]
name = "{name}"
image_size = 32
[data]
name = "digits"
[train]
engine = "ddp"
epochs = 1
micro_batch = 16
[launch]
oversubscribe = true
"""


@pytest.mark.parametrize(
    ("name", "note"),
    [
        ("vit_b_32", 'model.name = "vit_b_32" is taken as "torchvision/vit_b_32"'),
        ("timm/resnet18.a1_in1k", 'weights set model.weights = "timm/resnet18.a1_in1k"'),
    ],
)
def test_plan_notes_which_model_a_name_is_taken_for(tmp_path: Path, name: str, note: str) -> None:
    (tmp_path / "study.toml").write_text(STUDY.format(name=name))
    plan = vitscale("plan", "study.toml", cwd=tmp_path)
    assert plan.returncode == 0, plan.stderr
    assert note in " ".join(plan.stdout.split())
