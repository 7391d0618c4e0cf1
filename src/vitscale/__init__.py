"""vitscale: how the training of vision transformers scales, where the time goes, and what to rent."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vitscale.pages.outputs import load
    from vitscale.worker.callbacks import composer_callback, lightning_callback, trainer_callback
    from vitscale.worker.probe import Probe

__version__ = "0.1.0"
__all__ = ["Probe", "composer_callback", "lightning_callback", "load", "trainer_callback"]
_OFFERED = {
    "Probe": "vitscale.worker.probe",
    "composer_callback": "vitscale.worker.callbacks",
    "lightning_callback": "vitscale.worker.callbacks",
    "load": "vitscale.pages.outputs",
    "trainer_callback": "vitscale.worker.callbacks",
}
"""Names for users' own code -> modules, which are imported when the name is used."""


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name not in _OFFERED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_OFFERED[name]), name)
