"""vitscale: how the training of vision transformers scales, where the time goes, and what to rent."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vitscale.api.advising import AdviceChoices, AdviceLimits, AdviseResult, advise
    from vitscale.api.arguments import LaunchOptions
    from vitscale.api.checking import CheckResult, TrainingCheckResult, check, check_training
    from vitscale.api.comparing import CompareResult, compare, compare_studies
    from vitscale.api.explaining import ExplainResult, explain
    from vitscale.api.importing import ImportResult, LinkImportResult, import_results
    from vitscale.api.linting import LintResult, lint
    from vitscale.api.planning import PlanResult, plan
    from vitscale.api.predicting import PredictResult, TrainingPlan, predict
    from vitscale.api.reporting import LikeResult, ReportResult, report, report_like
    from vitscale.api.running import RunResult, run, train
    from vitscale.api.sharing import ExportResult, SendResult, WatchResult, export, send, watch
    from vitscale.api.starting import InitResult, init
    from vitscale.errors import RequestError, StoreError, VitscaleError
    from vitscale.pages.outputs import Frames, UnreadWarning, load
    from vitscale.prediction.answering import Changes
    from vitscale.worker.callbacks import composer_callback, lightning_callback, trainer_callback
    from vitscale.worker.probe import Probe

__version__ = "0.1.0"
__all__ = [
    "AdviceChoices",
    "AdviceLimits",
    "AdviseResult",
    "Changes",
    "CheckResult",
    "CompareResult",
    "ExplainResult",
    "ExportResult",
    "Frames",
    "ImportResult",
    "InitResult",
    "LaunchOptions",
    "LikeResult",
    "LinkImportResult",
    "LintResult",
    "PlanResult",
    "PredictResult",
    "Probe",
    "ReportResult",
    "RequestError",
    "RunResult",
    "SendResult",
    "StoreError",
    "TrainingCheckResult",
    "TrainingPlan",
    "UnreadWarning",
    "VitscaleError",
    "WatchResult",
    "advise",
    "check",
    "check_training",
    "compare",
    "compare_studies",
    "composer_callback",
    "explain",
    "export",
    "import_results",
    "init",
    "lightning_callback",
    "lint",
    "load",
    "plan",
    "predict",
    "report",
    "report_like",
    "run",
    "send",
    "train",
    "trainer_callback",
    "watch",
]
_MODULES = {
    "vitscale.api.advising": ("AdviceChoices", "AdviceLimits", "AdviseResult", "advise"),
    "vitscale.api.arguments": ("LaunchOptions",),
    "vitscale.api.checking": ("CheckResult", "TrainingCheckResult", "check", "check_training"),
    "vitscale.api.comparing": ("CompareResult", "compare", "compare_studies"),
    "vitscale.api.explaining": ("ExplainResult", "explain"),
    "vitscale.api.importing": ("ImportResult", "LinkImportResult", "import_results"),
    "vitscale.api.linting": ("LintResult", "lint"),
    "vitscale.api.planning": ("PlanResult", "plan"),
    "vitscale.api.predicting": ("PredictResult", "TrainingPlan", "predict"),
    "vitscale.api.reporting": ("LikeResult", "ReportResult", "report", "report_like"),
    "vitscale.api.running": ("RunResult", "run", "train"),
    "vitscale.api.sharing": ("ExportResult", "SendResult", "WatchResult", "export", "send", "watch"),
    "vitscale.api.starting": ("InitResult", "init"),
    "vitscale.errors": ("RequestError", "StoreError", "VitscaleError"),
    "vitscale.pages.outputs": ("Frames", "UnreadWarning", "load"),
    "vitscale.prediction.answering": ("Changes",),
    "vitscale.worker.callbacks": ("composer_callback", "lightning_callback", "trainer_callback"),
    "vitscale.worker.probe": ("Probe",),
}
"""Modules -> the names that they offer to users' own code. A module is imported when one of its names is first used."""
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)
