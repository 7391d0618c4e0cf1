"""Behaviour of DeepSpeed that some releases have and others have not, beyond which keys they accept.

The releases of each row are from DeepSpeed's history: the first whose tag contains the pull request that brought the
behaviour, and the first whose tag contains the one that mended it. Releases without a table of keys are judged too.
"""

from __future__ import annotations

from typing import NamedTuple

Version = tuple[int, int, int]

_PULL = "https://github.com/deepspeedai/DeepSpeed/pull"


class Behaviour(NamedTuple):
    """What DeepSpeed does in its releases from `first` to `last`, both of which do so."""

    first: Version | None
    """None: it was so before 0.9.5, the oldest release that lint judges for."""
    last: Version | None
    """None: it is so in the newest release."""
    effect: str
    """What happens, as the end of a sentence that begins with the release."""
    source: str

    def holds_in(self, version: Version) -> bool:
        """Whether a release behaves so."""
        has_begun = self.first is None or self.first <= version
        has_ended = self.last is not None and self.last < version
        return has_begun and not has_ended

    def releases(self) -> str:
        """Return the releases in words: "from 0.17.5 to 0.18.4", "until 0.12.6", "since 0.19.3"."""
        if self.last is None:
            return f"since {_dotted(self.first)}"
        if self.first is None:
            return f"until {_dotted(self.last)}"
        return f"from {_dotted(self.first)} to {_dotted(self.last)}"


def _dotted(version: Version | None) -> str:
    """Return "0.19.3" for (0, 19, 3)."""
    return "" if version is None else ".".join(map(str, version))


STAGE_1_IGNORES_OVERLAP = Behaviour(
    first=None,
    last=(0, 12, 6),
    effect="ignores overlap_comm at stage 1",
    source=f"{_PULL}/4887 (mended in 0.13.0)",
)
OVERLAP_WAITS = Behaviour(
    first=(0, 17, 5),
    last=(0, 18, 4),
    effect="lets backward wait at stages 1 and 2 until each bucket that it sends has arrived, so that overlap_comm "
    "overlaps nothing",
    source=f"{_PULL}/7371 (since 0.17.5) and {_PULL}/7805 (mended in 0.18.5)",
)
OVERLAP_OVERWRITES: tuple[Behaviour, ...] = (
    Behaviour(
        first=None,
        last=(0, 14, 2),
        effect="lets backward write into a bucket that is still being sent, where sending takes longer than computing",
        source=f"{_PULL}/5606 (mended in 0.14.3)",
    ),
    Behaviour(
        first=(0, 17, 2),
        last=(0, 17, 4),
        effect="writes all buckets but the first into one buffer, also while it is being sent",
        source=f"{_PULL}/6993 (since 0.17.2) and {_PULL}/7805 (which says so)",
    ),
    Behaviour(
        first=(0, 18, 5),
        last=(0, 18, 9),
        effect="may reuse the memory of gradients that are still being sent, which made a loss NaN at stage 2",
        source=f"{_PULL}/7965 (mended in 0.19.0)",
    ),
)
"""Ways in which gradients that overlap_comm sends at stages 1 and 2 may be spoilt."""
WARMUP_STEPS_REFUSED = Behaviour(
    first=(0, 19, 3),
    last=None,
    effect="refuses a warmup_num_steps that is no positive whole number",
    source=f"{_PULL}/8126 (since 0.19.3)",
)

BEHAVIOURS = (STAGE_1_IGNORES_OVERLAP, OVERLAP_WAITS, *OVERLAP_OVERWRITES, WARMUP_STEPS_REFUSED)
"""All rows, in the order in which docs/lint.md lists them."""
