"""Real ranks, one study: segmentation from files in ADE20K's layout, from JPEG and PNG to mean IoU in the JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from driving import vitscale
from image_files import blocks, write_scene
from vitscale import store
from vitscale.store.results import Results

pytestmark = pytest.mark.ranks

STUDY = """
name = "scenes"

[model]
task = "segmentation"
name = "swinv2-t"
image_size = 32
patch_size = 2
hidden_size = 8
heads = 1
depths = [1, 1, 1]
window_size = 4
decoder_size = 16

[data]
name = "ade20k"
root = "ADE 20K"
source_size = 64
classes = 5

[train]
precision = "fp32"
micro_batch = 4
epochs = 2
learning_rate = 6e-5

[scaling]
gpus = [1, 2]

[sweep]
"data.evaluation" = ["whole", "sliding"]

[measure]
repeats = 1
warmup_steps = 1
explain = false
"""
SIZES = [(64, 48), (48, 64), (30, 64), (40, 40), (20, 15), (96, 128), (64, 17)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("scenes")
    for number in range(16):
        write_scene(where / "ADE 20K", "training", f"ADE_train_{number:08d}", blocks(*SIZES[number % 7], 5, number))
    for number in range(7):
        write_scene(where / "ADE 20K", "validation", f"ADE_val_{number:08d}", blocks(*SIZES[number], 5, 100 + number))
    (where / "study.toml").write_text(STUDY)
    answer = vitscale("run", "study.toml", "-o", "results", cwd=where)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return where / "results"


@pytest.fixture(scope="module")
def results(folder: Path) -> Results:
    return store.load(folder)


def test_a_study_from_files_ends_in_scores(results: Results) -> None:
    assert [run.outcome.kind for run in results.runs] == ["completed"] * 4
    scores: dict[str, list[float]] = {"whole": [], "sliding": []}
    for run in results.runs:
        trial = run.header.trial
        for rank in run.ranks:
            assert [line.images for line in rank.epochs] == [16, 16]
            assert len(rank.steps) == 2 * 4 // trial.world.size
            last = rank.epochs[-1]
            assert last.mean_iou is not None
            assert last.held_out_accuracy is not None
            assert 0 < last.mean_iou <= last.held_out_accuracy < 1
            scores[trial.data.evaluation].append(last.held_out_loss or 0.0)
    assert not set(scores["whole"]) & set(scores["sliding"])


def test_the_json_has_them(folder: Path) -> None:
    answer = vitscale("report", folder, "--json")
    assert answer.returncode == 0, answer.stderr
    trials: list[dict[str, Any]] = json.loads(answer.stdout)["trials"]
    assert len(trials) == 4
    assert all(0 < trial["mean_iou"] <= trial["pixel_accuracy"] < 1 for trial in trials)
