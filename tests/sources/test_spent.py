"""What loaders' threads spent: reading and decoding apart, or unknown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from image_files import cache, encoded, photograph
from vitscale import sources
from vitscale.sources.base import Meter, Spent
from vitscale.sources.pictures import decode_square
from vitscale.trial.trial import DataSpec

__all__ = ["cache"]


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock of a second a look, for what is counted one after the other."""
    ticks = iter(range(10_000))
    monkeypatch.setattr("vitscale.sources.base.time.perf_counter", lambda: float(next(ticks)))


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_a_file_is_read_and_then_decoded_and_bytes_are_decoded_alone(seconds: None, tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"photograph.{kind.lower()}"
    path.write_bytes(encoded(photograph(), kind))
    meter = Meter()
    pixels = decode_square(str(path), 8)
    assert meter.read() == Spent(reading=1.0, decoding=1.0)
    meter = Meter()
    assert (decode_square(path.read_bytes(), 8, name="it") == pixels).all()
    assert meter.read() == Spent(reading=0.0, decoding=1.0)


def test_a_file_too_large_to_read_at_once_is_not_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitscale.sources.pictures._MOST_BYTES_AT_ONCE", 10)
    path = tmp_path / "photograph.png"
    path.write_bytes(encoded(photograph()))
    meter = Meter()
    decode_square(str(path), 8)
    assert meter.read() is None


def loaded(tmp_path: Path, suffix: str, **keys: Any) -> Spent | None:
    """What taking four images of a folder spent."""
    for number in range(8):
        folder = tmp_path / "images" / ("a", "b")[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        if suffix == "npy":
            np.save(folder / f"{number}.npy", np.full((8, 8, 3), number, np.uint8))
        else:
            (folder / f"{number}.{suffix}").write_bytes(encoded(photograph(20, 20, number)))
    spec = DataSpec(name="folder", root=str(tmp_path / "images"), source_size=8, held_out=0.25, **keys)
    sources.prepare(spec)
    train = sources.load(spec).train
    meter = Meter()
    train.take(np.arange(4))
    return meter.read()


def test_files_are_read_and_decoded_and_what_is_stored_decoded_is_read_alone(tmp_path: Path) -> None:
    spent = loaded(tmp_path / "files", "png", source="jpeg")
    assert spent is not None
    assert min(spent) > 0
    for source in ("cache", "memory"):
        stored = loaded(tmp_path / source, "png", source=source)
        assert stored is not None
        assert (stored.decoding, stored.reading > 0) == (0.0, True)


def test_arrays_and_images_that_are_made_are_unknown(tmp_path: Path) -> None:
    assert loaded(tmp_path, "npy", source="jpeg", channels=3, dtype="uint8") is None
    made = sources.load(DataSpec(name="synthetic", samples=8, source_size=8)).train
    meter = Meter()
    made.take(np.arange(4))
    assert meter.read() is None
