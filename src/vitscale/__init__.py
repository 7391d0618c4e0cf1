"""vitscale: how the training of vision transformers scales, where the time goes, and what to rent."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vitscale.report.outputs import load as load
    from vitscale.worker.probe import Probe as Probe
    from vitscale.worker.probe import composer_callback as composer_callback
    from vitscale.worker.probe import lightning_callback as lightning_callback
    from vitscale.worker.probe import trainer_callback as trainer_callback

__version__ = "0.1.0"
_OFFERED = {"load": "vitscale.report.outputs"} | dict.fromkeys(
    ("Probe", "composer_callback", "lightning_callback", "trainer_callback"), "vitscale.worker.probe"
)
"""Names for users' own code -> modules, which are imported when the name is used."""


def __getattr__(name: str) -> Any:
    if name not in _OFFERED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_OFFERED[name]), name)
