"""How many hosts a layout stands for: "single-node", "one-gpu-per-node", "4-per-node", "2 nodes"."""

from __future__ import annotations

import re

_SINGLE = re.compile(r"(single|one|1)[ _-]?(node|host)|packed|local")
_PER_NODE = re.compile(
    r"(?P<count>\d{1,6}|one|two|four|eight)[ _-]?((gpus?|ranks?|tasks?|process(es)?)[ _-]?)?per[ _-]?(node|host)"
)
_COUNTED = re.compile(r"(?P<count>\d{1,6}|one|two|three|four|eight)[ _-]?(nodes?|hosts?)")
_WORDS = {"one": 1, "two": 2, "three": 3, "four": 4, "eight": 8}


def nodes_of(layout: str | None, gpus: int) -> int | None:
    """Hosts of `gpus` ranks under a layout; None where its text does not tell.

    Fewer ranks than one host takes lie on one.
    """
    text = (layout or "").strip().lower()
    if not text or _SINGLE.fullmatch(text):
        return 1
    if text == "spread":
        return gpus
    if (each := per_node_of(text)) is not None:
        return -(-gpus // each)
    if match := _COUNTED.fullmatch(text):
        count = _number(match["count"])
        return count if 0 < count <= gpus and hold(gpus, count) else None
    return None


def per_node_of(layout: str | None) -> int | None:
    """GPUs that a full host takes under a layout; None where its text does not tell."""
    match = _PER_NODE.fullmatch((layout or "").strip().lower())
    return max(1, _number(match["count"])) if match else None


def counts_hosts(layout: str | None) -> bool:
    """Whether it says how many hosts there are and no more: another count of them is no other layout."""
    return layout is not None and _COUNTED.fullmatch(layout.strip().lower()) is not None


def hold(gpus: int, nodes: int) -> bool:
    """Whether so many hosts can have the ranks: all of them full, or all but the last."""
    return -(-gpus // -(-gpus // nodes)) == nodes


def _number(text: str) -> int:
    return _WORDS[text] if text in _WORDS else int(text)
