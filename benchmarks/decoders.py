"""Which JPEG decoder is fastest here, whether all give the same pixels, and how decoding into the cache scales.

    python benchmarks/decoders.py [--images 400] [--side 256] [--rounds 5] [--processes 1 2]

Pictures of 500 x 375 pixels, as ImageNet's are in the mean, 4:2:0 at quality 90. Each decoder takes them all in turn,
`--rounds` times, from file to the centre square of `--side` pixels, on one core; the figure is the least processor time
of a round. Pillow-SIMD takes Pillow's place where it is installed, so it is measured by running this program in an
environment that has it. Then the whole set is decoded into a cache by each number of processes: wall and processor time
without those of starting them, and the shares of linear speed-up. Wall time tells on a quiet machine alone; processor
time, which other work hardly changes, tells what the driver and its processes cost each other.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, features
from PIL import __version__ as pillow_version

WIDTH, HEIGHT = 500, 375
DISTINCT = 2000


def write_pictures(folder: Path, count: int) -> list[str]:
    """Smooth colours with noise; about 70 kB each. Those after the first `DISTINCT` are copies, files of their own."""
    rng = np.random.default_rng(0)
    paths = []
    for number in range(count):
        path = folder / f"class{number % 2}" / f"{number:06}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        paths.append(str(path))
        if number >= DISTINCT:
            shutil.copyfile(paths[number % DISTINCT], path)
            continue
        smooth = Image.fromarray(rng.integers(0, 256, (24, 32, 3)).astype(np.uint8)).resize((WIDTH, HEIGHT))
        noisy = np.asarray(smooth).astype(int) + rng.normal(0, 8, (HEIGHT, WIDTH, 3))
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(path, quality=90)
    return paths


def decoders(side: int) -> dict[str, Callable[[str], np.ndarray] | str]:
    """Name -> what makes the square of a file, or why it is not here."""
    from vitscale.sources import pictures

    is_simd = "post" in pillow_version
    turbo = features.version("libjpeg_turbo") or "another libjpeg"

    def by_pillow(path: str) -> np.ndarray:
        with pictures._opened_picture(path, "") as image:
            image.draft("RGB", (side, side))
            return pictures._scale_centre(pictures._as_rgb(image), side, 3)

    found: dict[str, Callable[[str], np.ndarray] | str] = {
        f"{'pillow-simd' if is_simd else 'pillow'} {pillow_version} (libjpeg-turbo {turbo})": by_pillow
    }
    try:
        import simplejpeg
    except ImportError as error:
        found["simplejpeg"] = str(error)
    else:
        found[f"simplejpeg {simplejpeg.__version__}, scaled by Pillow"] = lambda path: pictures.decode_square(
            path, side
        )
    try:
        import torch
        from torchvision.io import ImageReadMode, decode_jpeg, read_file
        from torchvision.transforms.functional import center_crop, resize
    except Exception as error:  # its extension is built for one torch alone, and says so in several ways
        found["torchvision"] = f"{type(error).__name__}: {error}".splitlines()[0]
    else:
        torch.set_num_threads(1)

        def by_torchvision(path: str) -> np.ndarray:
            image = decode_jpeg(read_file(path), ImageReadMode.RGB)
            return center_crop(resize(image, [side], antialias=True), [side]).permute(1, 2, 0).numpy()

        found["torchvision"] = by_torchvision
    return found


def least_seconds(decode: Callable[[str], np.ndarray], paths: list[str], rounds: int) -> float:
    """Processor seconds an image of the quickest round, in one thread."""
    times = []
    for _ in range(rounds):
        began = time.process_time()
        for path in paths:
            decode(path)
        times.append((time.process_time() - began) / len(paths))
    return min(times)


class Seconds(NamedTuple):
    """Of an image."""

    wall: float
    processor: float
    """Of all processes."""


def cache_seconds(few: Path, many: Path, side: int, processes: int) -> Seconds:
    """What the images that `many` has beyond `few` take: what it takes to start the processes is in both."""
    (images, wall, processor), (more, more_wall, more_processor) = (
        decoded(root, side, processes) for root in (few, many)
    )
    return Seconds((more_wall - wall) / (more - images), (more_processor - processor) / (more - images))


def decoded(root: Path, side: int, processes: int) -> tuple[int, float, float]:
    """Images in a cache of its own, and the wall and processor seconds that decoding them took."""
    from vitscale import sources
    from vitscale.sources import cache, decoding
    from vitscale.trial.trial import DataSpec

    decoding.FEWEST_FOR_PROCESSES, cache._CHUNK_BYTES = 1, 16 * side * side * 3
    allowed = os.sched_getaffinity(0)
    images = 0

    def told(_done: int, of: int) -> None:
        nonlocal images
        images = of

    with tempfile.TemporaryDirectory() as folder:
        os.environ["VITSCALE_CACHE"] = folder
        os.sched_setaffinity(0, set(sorted(allowed)[:processes]))
        before, began = os.times(), time.perf_counter()
        try:
            sources.prepare(DataSpec(name="folder", root=str(root), source_size=side, held_out=0.01), told)
        finally:
            os.sched_setaffinity(0, allowed)
        return images, time.perf_counter() - began, sum(os.times()[:4]) - sum(before[:4])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=400)
    parser.add_argument("--side", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--processes", type=int, nargs="*", default=[])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        images = Path(folder) / "images"
        paths = write_pictures(images, options.images)
        size = sum(Path(path).stat().st_size for path in paths) / len(paths) / 1000
        side = options.side
        print(f"{len(paths)} pictures of {WIDTH} x {HEIGHT}, {size:.0f} kB each, to {side} x {side}", flush=True)
        reference: np.ndarray | None = None
        for name, decode in decoders(side).items():
            if isinstance(decode, str):
                print(f"{name:50} not here: {decode}")
                continue
            ms = least_seconds(decode, paths[:DISTINCT], options.rounds) * 1e3
            pixels = np.stack([decode(path) for path in paths[:20]]).astype(int)
            reference = pixels if reference is None else reference
            apart = abs(pixels - reference).max()
            print(f"{name:50} {ms:5.2f} ms, {1e3 / ms:4.0f} images/s a core, pixels differ by {apart}", flush=True)
        few = Path(folder) / "few"
        for path in paths[: len(paths) // 4]:
            (few / Path(path).parent.name).mkdir(parents=True, exist_ok=True)
            (few / Path(path).parent.name / Path(path).name).hardlink_to(path)
        alone: Seconds | None = None
        if options.processes:
            print("\n| processes | images/s (wall) | share of linear, wall | ms of processor time an image | share of "
                  "linear, processor time |\n| --- | ---: | ---: | ---: | ---: |", flush=True)  # fmt: skip
        for processes in options.processes:
            rounds = [cache_seconds(few, images, side, processes) for _ in range(options.rounds)]
            least = Seconds(*map(min, zip(*rounds, strict=True)))
            if min(least) <= 0:
                print(f"| {processes} | too few images to tell from what starting takes | | | |")
                continue
            alone = alone or Seconds(least.wall * processes, least.processor)
            wall, processor = alone.wall / least.wall / processes, alone.processor / least.processor
            print(
                f"| {processes} | {1 / least.wall:.0f} | {100 * wall:.0f} % | {least.processor * 1e3:.2f} | "
                f"{100 * processor:.0f} % |",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
