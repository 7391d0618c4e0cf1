"""Instances that could be rented, from a price table with this program's columns or SkyPilot's public catalogue."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vitscale.errors import RequestError, printable, shown
from vitscale.importers import tables
from vitscale.importers.contents import BrokenLines, parse_finite, parse_whole
from vitscale.prediction.gpu_types import GpuType, gpu_type
from vitscale.prediction.network.links import Link, declared_link
from vitscale.present.units import listed

_COLUMNS = {
    "instance": "instancetype", "gpu": "acceleratorname", "count": "acceleratorcount", "price": "price",
    "network": "network",
}  # fmt: skip
"""Our columns -> those of SkyPilot's catalogues; their others (SpotPrice, Region, GpuInfo, ...) decide nothing here."""
_MOST_GPUS = 1024


@dataclass(frozen=True)
class Instance:
    """One kind of host."""

    name: str
    gpu: GpuType
    gpus: int
    price_per_hour: float
    """Price of the whole instance, on demand, in any currency."""
    network: Link | None = None
    """Link to other instances of its kind; None: not declared."""

    @property
    def price_per_gpu_hour(self) -> float:
        """A GPU's share of the price."""
        return self.price_per_hour / self.gpus


def read_instances(path: Path) -> tuple[tuple[Instance, ...], tuple[str, ...]]:
    """(instances of the table, what was left out of it and why).

    Of equal instances (regions have prices of their own) the cheapest is taken. Rows without a GPU are passed over.

    Raises:
        RequestError: columns are missing, or not one row can be used.
        StoreError: the file cannot be read.
    """
    head, *_ = tables.headers(path)
    sky = "acceleratorname" in head.columns
    column = {own: theirs if sky else own for own, theirs in _COLUMNS.items()}
    problems, unknown = BrokenLines(path.name), dict[str, str]()
    cheapest: dict[tuple[str, int, str], Instance] = {}
    for row in tables.rows(path, head, [name for own, name in column.items() if own != "network"], problems):
        cells = {own: row[name] for own, name in column.items()}
        if not cells["gpu"]:
            continue
        try:
            instance = _instance(cells)
        except ValueError as error:
            problems.line(row.line, str(error))
            continue
        except RequestError as error:
            unknown.setdefault(printable(cells["gpu"])[:60], str(error))
            continue
        key = (instance.gpu.name, instance.gpus, cells["network"])
        if key not in cheapest or instance.price_per_hour < cheapest[key].price_per_hour:
            cheapest[key] = instance
    if not cheapest:
        why = "; ".join([*unknown.values(), *problems.told()][:1]) or "no row has a GPU"
        raise RequestError(f"{shown(path.name)} holds no instance that can be used: {why}")
    left = [f"{path.name}: GPUs that are unknown here are left out: {listed(sorted(unknown))}"] if unknown else []
    return tuple(cheapest.values()), (*left, *problems.told())


def _instance(cells: dict[str, str]) -> Instance:
    """The instance of a row.

    Raises:
        ValueError: there is no name, or a number cannot be.
        RequestError: the GPU or the network is unknown.
    """
    if not cells["instance"]:
        raise ValueError("it names no instance")
    price = parse_finite(cells["price"]) if cells["price"].replace(".", "", 1).isdecimal() else None
    if not price:
        raise ValueError(f"{cells['price'][:40]!r} is no price")
    return Instance(
        name=printable(cells["instance"])[:60],
        gpu=gpu_type(cells["gpu"]),
        gpus=parse_whole(cells["count"], 1, _MOST_GPUS),
        price_per_hour=price,
        network=declared_link(cells["network"]) if cells["network"] else None,
    )
