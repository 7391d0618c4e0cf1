"""Holds parameters of models that vitscale builds by name against what others publish.

    .venv-vision/bin/python benchmarks/model_counts.py [--timm results-imagenet.csv] [--only NAME ...]

torchvision states the parameters of each model with its weights (`num_params`), which the package holds. timm publishes
a table, results/results-imagenet.csv of its repository, in millions with two decimals; its package does not hold it,
so its path is given. Only differences are printed, and models that could not be built, with the reason; then how many
were equal. Models are built on meta tensors, which takes no memory.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torchvision

from vitscale.models import libraries
from vitscale.trial.library_names import default_image_size, library_name
from vitscale.trial.model_spec import ModelSpec, resolve

LARGEST_BUILT = 150_000_000
"""Parameters of the largest model that is built with values, where it cannot be built without."""


class Published(NamedTuple):
    """What somebody else says that a model has."""

    name: str
    classes: int
    image_size: int | None
    """None: that of the name."""
    parameters: int
    rounded_to: int
    """The published number is a multiple of this."""


class Difference(NamedTuple):
    """A row of the table that is printed."""

    name: str
    published: int
    counted: int | None
    reason: str = ""


def of_torchvision() -> Iterator[Published]:
    for name in torchvision.models.list_models(module=torchvision.models):
        for weights in torchvision.models.get_model_weights(name):
            size = weights.meta.get("min_size", (224, 224))[0]
            is_fixed = name.startswith("vit_")
            image_size = weights.transforms().crop_size[0] if is_fixed else max(224, size)
            classes = len(weights.meta["categories"] or range(1000))
            yield Published(f"torchvision/{name}", classes, image_size, weights.meta["num_params"], rounded_to=1)


def of_timm(table: Path) -> Iterator[Published]:
    with table.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            name = f"timm/{row['model'].partition('.')[0]}"
            millions = float(row["param_count"].replace(",", ""))
            yield Published(name, 1000, int(row["img_size"]), round(millions * 1e6), rounded_to=10_000)


def counted(published: Published) -> int:
    """The parameters of the model as vitscale builds it: without Inception's auxiliary classifier."""
    library = library_name(published.name)
    assert library is not None
    spec = ModelSpec(name=published.name, image_size=published.image_size or default_image_size(library))
    resolved = resolve(spec, published.classes)
    build = libraries.builder(library.library)
    try:
        with torch.device("meta"):
            model = build(resolved, library.model)
    except NotImplementedError:  # a RegNet of torchvision reads values while it is built
        if published.parameters > LARGEST_BUILT:
            raise
        model = build(resolved, library.model)
    return sum(parameter.numel() for parameter in model.parameters())


def differences(rows: list[Published]) -> Iterator[Difference]:
    for row in rows:
        try:
            count = counted(row)
        except Exception as error:
            yield Difference(row.name, row.parameters, None, f"{type(error).__name__}: {str(error)[:80]}")
            continue
        if abs(count - row.parameters) > row.rounded_to / 2:
            yield Difference(row.name, row.parameters, count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--timm", type=Path, help="results-imagenet.csv of timm's repository")
    parser.add_argument("--only", nargs="*", default=[], help="names with their library in front")
    options = parser.parse_args()
    rows = list(dict.fromkeys(of_torchvision()))
    if options.timm is not None:
        rows += dict.fromkeys(of_timm(options.timm))
    if options.only:
        rows = [row for row in rows if row.name in options.only]
    found = list(differences(rows))
    print("| model | published | counted | reason |\n| --- | --: | --: | --- |")
    for row in found:
        count = "not built" if row.counted is None else f"{row.counted:,}"
        print(f"| {row.name} | {row.published:,} | {count} | {row.reason} |")
    print(f"\n{len(rows) - len(found)} of {len(rows)} rows are equal.")


if __name__ == "__main__":
    main()
