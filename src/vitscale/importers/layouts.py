"""How many hosts a layout stands for: "single-node", "one-gpu-per-node", "4-per-node"."""

from __future__ import annotations

import re

_SINGLE = re.compile(r"(single|one|1)[ _-]?(node|host)|packed|local")
_PER_NODE = re.compile(
    r"(?P<count>\d{1,6}|one|two|four|eight)[ _-]?((gpus?|ranks?|tasks?|process(es)?)[ _-]?)?per[ _-]?(node|host)"
)
_SEVERAL = re.compile(r"(?P<count>\d{1,6}|two|three|four|eight)[ _-]?(nodes|hosts)")
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
    if match := _PER_NODE.fullmatch(text):
        each = min(gpus, max(1, _number(match["count"])))
        return gpus // each if gpus % each == 0 else None
    if match := _SEVERAL.fullmatch(text):
        count = _number(match["count"])
        return count if count and gpus % count == 0 else None
    return None


def _number(text: str) -> int:
    return _WORDS[text] if text in _WORDS else int(text)
