"""What training needs of torch's release, and what happens under an older one. Imports no torch.

Each need was seen to fail under the release before (docs/versions.md). Those of one engine stand in its facts
(`EngineFacts.torch_needs`), and those of all in `COMMON`. `engines.checks.unmet_torch_needs` has both.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from vitscale.trial.trial import TrainSpec

_RELEASE = re.compile(r"(\d+)\.(\d+)")


class TorchRelease(NamedTuple):
    """A release of torch by major and minor number; earlier ones are smaller."""

    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"

    @staticmethod
    def of_version(version: str) -> TorchRelease | None:
        """Return the release of a version such as "2.12.0+cu130" or "2.12.0a0+git1f2e3d"; None for another form.

        A build before its release counts as the release: whether it has all of it is unknown.
        """
        match = _RELEASE.match(version)
        if match is None:
            return None
        return TorchRelease(int(match[1]), int(match[2]))


class TorchNeed(NamedTuple):
    """A use of torch that an older release lacks, or does wrongly."""

    release: TorchRelease
    """The first that has it."""
    what: str
    """The use, by fields of a study where it has some: "train.compile with zero_stage = 3"."""
    under_older: str
    """What happens under an older release, as the end of a sentence."""
    remedy: str
    """What else to do than to install another torch."""
    is_refused: bool
    """Whether ranks refuse to train under an older release; else they train, and lack what `under_older` says."""
    concerns: Callable[[TrainSpec], bool]
    """Whether a [train] has this use."""

    def is_unmet(self, train: TrainSpec, installed: TorchRelease) -> bool:
        """Whether a [train] needs a later release than the installed one."""
        return installed < self.release and self.concerns(train)


OLDEST = TorchRelease(2, 10)
"""The oldest release that `pyproject.toml` takes; a cluster's own torch may be older."""
COMMON = (
    TorchNeed(
        OLDEST,
        what="training by vitscale",
        under_older="has not been tried whole",
        remedy="try it with vitscale check --training first",
        is_refused=False,
        concerns=lambda _: True,
    ),
)
"""Needs of every engine."""
