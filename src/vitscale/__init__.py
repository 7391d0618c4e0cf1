"""vitscale: how the training of vision transformers scales, where the time goes, and what to rent."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vitscale.api.arguments import LaunchOptions
    from vitscale.api.linting import LintResult, lint
    from vitscale.pages.outputs import load
    from vitscale.worker.probe import Probe, composer_callback, lightning_callback, trainer_callback

__version__ = "0.1.0"
__all__ = [
    "LaunchOptions",
    "LintResult",
    "Probe",
    "composer_callback",
    "lightning_callback",
    "lint",
    "load",
    "trainer_callback",
]
_MODULES = {
    "vitscale.api.arguments": ("LaunchOptions",),
    "vitscale.api.linting": ("LintResult", "lint"),
    "vitscale.pages.outputs": ("load",),
    "vitscale.worker.probe": ("Probe", "composer_callback", "lightning_callback", "trainer_callback"),
}
"""Modules -> the names that they offer to users' own code. A module is imported when one of its names is first used."""
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)
