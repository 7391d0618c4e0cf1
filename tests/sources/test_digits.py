"""scikit-learn's digits: the images it ships, split once and for all."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from vitscale import sources
from vitscale.errors import RequestError
from vitscale.trial.trial import DataSpec


def test_images_and_labels_are_those_of_scikit_learn(tmp_path: Path) -> None:
    from sklearn.datasets import load_digits

    dataset = sources.load(DataSpec(name="digits", held_out=0.25), tmp_path)
    bunch = load_digits()
    both = np.concatenate([split.take(np.arange(len(split))) for split in (dataset.train, dataset.held_out)])
    labels = np.concatenate([dataset.train.labels, dataset.held_out.labels])
    assert both.shape == (1797, 8, 8, 3)
    assert (both == both[..., :1]).all()
    back = np.rint(both[..., 0] / 255 * 16).astype(int).reshape(1797, 64)
    found = sorted(map(tuple, np.column_stack([back, labels]).tolist()))
    assert found == sorted(map(tuple, np.column_stack([bunch.data, bunch.target]).astype(int).tolist()))
    assert (both.min(), both.max()) == (0, 255)


@pytest.mark.parametrize("share", [0.0001, 0.2, 0.5, 0.9999])
def test_check_foretells_what_load_gives(tmp_path: Path, share: float) -> None:
    spec = DataSpec(name="digits", held_out=share)
    summary, dataset = sources.check(spec), sources.load(spec, tmp_path)
    assert (summary.train_samples, summary.held_out_samples) == (len(dataset.train), len(dataset.held_out))
    assert dataset.summary == summary
    assert summary.image_shape == (8, 8, 3)
    assert summary.classes == tuple("0123456789")


def test_digits_of_another_scikit_learn_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitscale.sources.digits._SHA256", "0" * 64)
    with pytest.raises(RequestError, match="not the images that 'digits' stands for"):
        sources.load(DataSpec(name="digits"), tmp_path)


def test_without_scikit_learn_a_plan_is_told_all_and_reading_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert sources.check(DataSpec(name="digits", held_out=0.25)).train_samples == 1797 - 449
    with pytest.raises(RequestError, match=r"which is not installed\. Run pip install .*/.*\[train\]'"):
        sources.load(DataSpec(name="digits"), tmp_path)
