"""Behaviour that depends on the release and that no key of the table of keys shows: from which release to which.

Each row was established in DeepSpeed's own history: the pull request that brought it and the one that mended it, and
the first releases whose tags contain them. A release that is not in the table of keys has its behaviour all the same.
"""

from __future__ import annotations

from typing import NamedTuple

Version = tuple[int, int, int]

_PULL = "https://github.com/deepspeedai/DeepSpeed/pull"


class Behaviour(NamedTuple):
    """What DeepSpeed does in some of its releases."""

    first: Version | None
    """None: it was so before 0.9.5, the oldest release that lint judges for."""
    last: Version | None
    """None: it is so in the newest release."""
    effect: str
    """What happens, as the end of a sentence that begins with the release."""
    source: str

    def holds_in(self, version: Version) -> bool:
        """Whether a release behaves so."""
        return (self.first is None or self.first <= version) and (self.last is None or version <= self.last)

    def releases(self) -> str:
        """The releases in words: "from 0.17.5 to 0.18.4", "until 0.12.6", "since 0.19.3"."""
        first, last = _worded(self.first), _worded(self.last)
        if first and last:
            return f"from {first} to {last}"
        return f"until {last}" if last else f"since {first}"


def _worded(version: Version | None) -> str:
    return "" if version is None else ".".join(map(str, version))


STAGE_1_IGNORES_OVERLAP = Behaviour(
    None, (0, 12, 6), "ignores overlap_comm at stage 1", f"{_PULL}/4887 (mended in 0.13.0)"
)
OVERLAP_WAITS = Behaviour(
    (0, 17, 5), (0, 18, 4),
    "lets backward wait at stages 1 and 2 until each bucket that it sends has arrived, so that overlap_comm overlaps "
    "nothing",
    f"{_PULL}/7371 (since 0.17.5) and {_PULL}/7805 (mended in 0.18.5)",
)  # fmt: skip
OVERLAP_OVERWRITES: tuple[Behaviour, ...] = (
    Behaviour(
        None, (0, 14, 2),
        "lets backward write into a bucket that is still being sent, where sending takes longer than computing",
        f"{_PULL}/5606 (mended in 0.14.3)",
    ),
    Behaviour(
        (0, 17, 2), (0, 17, 4),
        "writes all buckets but the first into one buffer, also while it is being sent",
        f"{_PULL}/6993 (since 0.17.2) and {_PULL}/7805 (which says so)",
    ),
    Behaviour(
        (0, 18, 5), (0, 18, 9),
        "may reuse the memory of gradients that are still being sent, which made a loss NaN at stage 2",
        f"{_PULL}/7965 (mended in 0.19.0)",
    ),
)  # fmt: skip
"""Where gradients that overlap_comm sends at stages 1 and 2 may be spoilt."""
WARMUP_STEPS_REFUSED = Behaviour(
    (0, 19, 3), None, "refuses a warmup_num_steps that is no positive whole number", f"{_PULL}/8126 (since 0.19.3)"
)

BEHAVIOURS = (STAGE_1_IGNORES_OVERLAP, OVERLAP_WAITS, *OVERLAP_OVERWRITES, WARMUP_STEPS_REFUSED)
"""All of them, which docs/lint.md lists."""

OVERLAPS_WELL = (0, 19, 0)
"""The first release since which `overlap_comm` does at stages 1 and 2 what it says, and spoils nothing that is known.
"""
