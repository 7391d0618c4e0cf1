"""What layouts say of hosts."""

from __future__ import annotations

import pytest

from vitscale.importers.records import nodes_of


@pytest.mark.parametrize(
    ("layout", "gpus", "nodes"),
    [
        (None, 8, 1),
        ("single-node", 8, 1),
        ("one-gpu-per-node", 8, 8),
        ("one-gpu-per-node", 1, 1),
        ("8-gpus-per-node", 32, 4),
        ("8-gpus-per-node", 4, 1),
        ("4-per-node", 8, 2),
        ("4-per-node", 6, 2),
        ("2 nodes", 8, 2),
        ("3 nodes", 8, 3),
        ("multi-node", 8, None),
        ("0-per-node", 8, 8),
        ("5 nodes", 12, None),
        ("1 node", 8, 1),
        ("2x8", 16, 2),
        ("1 x 4", 4, 1),
        ("2x8", 8, None),
    ],
)
def test_hosts(layout: str | None, gpus: int, nodes: int | None) -> None:
    assert nodes_of(layout, gpus) == nodes
