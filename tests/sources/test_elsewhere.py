"""A study whose images lie on another machine is planned with what is known of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from vitscale.errors import RequestError
from vitscale.sources.elsewhere import check_or_expect
from vitscale.trial.trial import DataSpec

ABSENT = "/no/such/folder"


@pytest.mark.parametrize(("name", "classes"), [("cifar10", 10), ("cifar100", 100)])
def test_cifar_is_known(name: str, classes: int) -> None:
    summary = check_or_expect(DataSpec(name=name, root=ABSENT))
    assert (summary.train_samples, summary.held_out_samples) == (50_000, 10_000)
    assert len(summary.classes) == classes
    assert summary.image_shape == (32, 32, 3)
    assert summary.notes == (
        f"data.root '{ABSENT}' is not on this machine: planned with 50,000 images of {classes} classes, as published",
    )


def test_scenes_are_known() -> None:
    summary = check_or_expect(DataSpec(name="ade20k", root=ABSENT, source_size=256))
    assert (summary.train_samples, len(summary.classes), summary.task) == (20_210, 150, "segmentation")
    assert summary.image_shape[:2] == (256, 256)


def test_other_images_are_as_the_study_says() -> None:
    spec = DataSpec(name="folder", root=ABSENT, samples=1000, classes=7, source_size=64, held_out=0.1)
    summary = check_or_expect(spec)
    assert (summary.train_samples, summary.held_out_samples, len(summary.classes)) == (1000, 100, 7)
    assert summary.image_shape == (64, 64, 3)
    assert "as data.samples and data.classes say" in summary.notes[0]


@pytest.mark.parametrize("given", [{}, {"samples": 1000}, {"classes": 7}])
def test_what_nobody_says_is_asked_for(given: dict[str, int]) -> None:
    with pytest.raises(RequestError, match=r"data.samples=50000 data.classes=100"):
        check_or_expect(DataSpec.model_validate({"name": "folder", "root": ABSENT} | given))


def test_images_that_are_here_are_checked(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(RequestError, match="0 class folders"):
        check_or_expect(DataSpec(name="folder", root=str(tmp_path / "empty"), samples=1000, classes=7))
