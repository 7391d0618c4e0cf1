"""What a study of segmentation is refused for before anything of it starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from image_files import blocks, cache, write_scene
from models.test_models import hf_spec
from study_factory import EIGHT_CORES, expanded, write_study
from vitscale import sources
from vitscale.datasets.batches import EpochOrder
from vitscale.errors import RequestError
from vitscale.study.expand import Expansion, expand
from vitscale.study.file import StudyFile
from vitscale.study.model_checks import fewest_normalised

__all__ = ["cache"]

MODEL = {
    "task": "segmentation", "name": "swinv2-t", "image_size": 32, "patch_size": 2, "hidden_size": 8, "heads": 1,
    "depths": [1, 1, 1], "window_size": 4, "decoder_size": 16,
}  # fmt: skip


def segmented(folder: Path, changes: dict[str, dict[str, Any]] | None = None, samples: int = 24) -> Expansion:
    given: dict[str, dict[str, Any]] = {
        "model": MODEL | {"name": "swinv2-t"},
        "data": {"name": "synthetic-masks", "samples": samples, "classes": 5},
        "train": {"micro_batch": 4, "epochs": 3},
    }
    for section, keys in (changes or {}).items():
        given[section] = given.get(section, {}) | keys
    return expand(StudyFile.read(write_study(folder, given)), EIGHT_CORES, sources.check)


@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    grad_accum=st.integers(1, 3),
    samples=st.integers(1, 70),
    local=st.booleans(),
    drop_last=st.booleans(),
)
def test_the_fewest_images_of_a_norm_are_those_of_the_slots(
    sizes: list[int], grad_accum: int, samples: int, local: bool, drop_last: bool
) -> None:
    order = EpochOrder(samples, seed=0, epoch=0, micro_batches=sizes, grad_accum=grad_accum, drop_last=drop_last)
    seen = []
    for step in range(order.steps):
        for micro in range(grad_accum):
            real = [order.slot(step, micro, rank).real for rank in range(len(sizes))]
            seen += [count for count in (real if local else [sum(real)]) if count]
    if seen:
        assert fewest_normalised(sizes, grad_accum, samples, local=local, drop_last=drop_last) == min(seen)


def test_norms_are_synchronised_unless_asked_otherwise_and_each_is_a_trial_of_its_own(tmp_path: Path) -> None:
    found = segmented(tmp_path)
    assert {trial.train.batch_norm for trial in found.trials.values()} == {"synchronised"}
    assert {trial.model.num_classes for trial in found.trials.values()} == {5}
    local = segmented(tmp_path, {"train": {"batch_norm": "local"}})
    assert {trial.train.batch_norm for trial in local.trials.values()} == {"local"}
    assert not found.trials.keys() & local.trials.keys()
    both = segmented(tmp_path, {"sweep": {"train.batch_norm": ["local", "synchronised"]}})
    assert both.trials.keys() == found.trials.keys() | local.trials.keys()
    without = segmented(tmp_path, {"model": {"auxiliary_weight": 0.0}})
    assert not found.trials.keys() & without.trials.keys()


def test_classification_keeps_its_local_norms(tmp_path: Path) -> None:
    assert {trial.train.batch_norm for trial in expanded(tmp_path).trials.values()} == {"local"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"data": {"name": "synthetic"}},
            r"data.name = 'synthetic' has labels for classification, and the model is for",
        ),
        (
            {"train": {"micro_batch": 1}},
            r"on 1 rank train.micro_batch = 1 leaves a batch norm over the images of all",
        ),
        (
            {"train": {"micro_batch": 1, "batch_norm": "local"}, "scaling": {"gpus": [2]}},
            r"on 2 ranks train.micro_batch = 1 .*own images only one.*micro_batch = 2 or more, or .*synchron",
        ),
        (
            {"data": {"samples": 25}},
            r"on 1 rank the last step of an epoch, 1 images, leaves a batch norm.*Set train.drop_last = true",
        ),
    ],
)
def test_what_cannot_be_trained_is_refused_with_what_to_do(
    tmp_path: Path, changes: dict[str, dict[str, Any]], said: str
) -> None:
    with pytest.raises(RequestError, match=said):
        segmented(tmp_path, changes)


@pytest.mark.parametrize("option", ["activation_checkpointing", "compile"])
def test_what_works_block_by_block_is_refused_for_a_single_block(tmp_path: Path, option: str) -> None:
    """Which else each rank would find out for itself."""
    vit = {"name": "vit-ti16", "image_size": 32, "patch_size": 8, "hidden_size": 24, "heads": 2}
    given: dict[str, dict[str, Any]] = {
        "data": {"name": "synthetic", "samples": 24},
        "train": {"micro_batch": 4, "epochs": 5, option: True},
    }

    def asked(model: dict[str, Any]) -> Expansion:
        return expand(StudyFile.read(write_study(tmp_path, given | {"model": model})), EIGHT_CORES, sources.check)

    with pytest.raises(RequestError, match=rf"train\.{option} works block by block, and 'vit-ti16' has one block here"):
        asked(vit | {"layers": 1})
    assert asked(vit | {"layers": 2}).trials
    assert segmented(tmp_path, {"train": {option: True}}).trials, "three stages of one block each"


def test_one_image_a_rank_is_enough_where_ranks_share_their_norms(tmp_path: Path) -> None:
    assert segmented(tmp_path, {"train": {"micro_batch": 1}, "scaling": {"gpus": [2, 4]}}).trials
    assert segmented(tmp_path, {"train": {"drop_last": True}}, samples=25).trials


def test_a_hugging_face_model_is_refused_by_its_configuration(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    changes: dict[str, dict[str, Any]] = {
        "model": dict.fromkeys(MODEL) | {"task": "segmentation", "hf": "hf", "image_size": 64},
        "train": {"micro_batch": 1},
    }
    for kind in ("upernet", "mobilevit", "mobilenet_v2"):
        hf_spec(tmp_path / "hf", kind)
        with pytest.raises(RequestError, match="one value has no variance"):
            segmented(tmp_path, changes)
    hf_spec(tmp_path / "hf", "upernet", pool_scales=[2, 3])
    assert segmented(tmp_path, changes).trials
    hf_spec(tmp_path / "hf", "segformer")
    assert segmented(tmp_path, changes).trials


def test_pixels_take_labels_for_images_as_little(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"has labels for segmentation.*Set model.task = 'segmentation'"):
        expand(StudyFile.read(write_study(tmp_path, {"data": {"name": "synthetic-masks"}})), EIGHT_CORES, sources.check)


def test_images_of_unlike_sizes_are_evaluated_by_what_the_model_takes(tmp_path: Path) -> None:
    for split, number in (("training", 0), ("training", 1), ("validation", 2)):
        write_scene(tmp_path / "scenes", split, str(number), blocks(20, 30, 5, number))
    data = {"name": "ade20k", "root": "scenes", "classes": 5, "source_size": 32, "samples": 4096}
    vit = dict.fromkeys(MODEL) | {"task": "segmentation", "name": "vit-ti16", "image_size": 32, "patch_size": 8}
    train = {"micro_batch": 2, "epochs": 4}
    with pytest.raises(RequestError, match=r"vit-ti16 takes images of one size.*Set data.evaluation = \"sliding\""):
        segmented(tmp_path, {"model": vit, "data": data, "train": train})
    assert segmented(tmp_path, {"model": vit, "data": data | {"evaluation": "sliding"}, "train": train}).trials
    assert segmented(tmp_path, {"model": vit, "data": data, "train": train, "measure": {"evaluate": False}}).trials
    alone = segmented(tmp_path, {"data": data, "train": train})
    both = segmented(tmp_path, {"data": data, "train": train, "sweep": {"data.evaluation": ["whole", "sliding"]}})
    assert len(both.trials) == 2 * len(alone.trials)
    assert both.trials.keys() > alone.trials.keys()
