"""Image files whose content a test knows: flat colours in folders, and pictures like photographs."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from vitscale import sources


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own; import it where images are read."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("VITSCALE_CACHE", str(folder))
    return folder


def fill(folder: Path, count: int, colour: int) -> None:
    """`count` images of side 12: red tells the class, green the image."""
    folder.mkdir(parents=True)
    for number in range(count):
        Image.new("RGB", (12, 12), (colour, number, 0)).save(folder / f"{number:02d}.png")


def seen(split: sources.Split) -> set[tuple[int, int, int]]:
    """Label, red and green of every image of a split."""
    images = split.take(np.arange(len(split)))
    return {
        (int(label), int(image[0, 0, 0]), int(image[0, 0, 1]))
        for label, image in zip(split.labels, images, strict=True)
    }


def photograph(width: int = 50, height: int = 40, seed: int = 0) -> Image.Image:
    """Smooth colours with noise: something that JPEG compresses, but not to nothing."""
    rng = np.random.default_rng(seed)
    smooth = Image.fromarray(rng.integers(0, 256, (5, 6, 3)).astype(np.uint8)).resize((width, height))
    noisy = np.asarray(smooth).astype(int) + rng.normal(0, 8, (height, width, 3))
    return Image.fromarray(noisy.clip(0, 255).astype(np.uint8))


def encoded(image: Image.Image, kind: str = "PNG") -> bytes:
    """The bytes of a file of that kind."""
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


def write_scene(
    root: Path, split: str, name: str, labels: NDArray[np.uint8], picture: Image.Image | None = None
) -> tuple[Path, Path]:
    """A picture (a photograph, unless given) and its annotation `labels` [h, w], laid out as ADE20K is."""
    paths = root / "images" / split / f"{name}.jpg", root / "annotations" / split / f"{name}.png"
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
    (picture or photograph(labels.shape[1], labels.shape[0])).save(paths[0], quality=95)
    Image.fromarray(labels).save(paths[1])
    return paths


def blocks(height: int, width: int, classes: int, seed: int) -> NDArray[np.uint8]:
    """Labels 0 to `classes` in blocks, [height, width]: each of up to a quarter of a side."""
    rng = np.random.default_rng(seed)
    few = rng.integers(0, classes + 1, (4, 4)).astype(np.uint8)
    return few[np.arange(height)[:, None] * 4 // height, np.arange(width) * 4 // width]


def write_tar(path: Path, members: dict[str, bytes]) -> Path:
    """A tar file of these members."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path
