"""What a test needs and a machine may lack: skipped with its reason, or failed where all is meant to be there."""

from __future__ import annotations

import os
import shutil
from typing import NoReturn

import pytest


def skip_or_fail(reason: str) -> NoReturn:
    """Skips the test; fails it where `VITSCALE_TESTS_MUST_RUN` is set, for `.ci/run` has installed all there is."""
    if os.environ.get("VITSCALE_TESTS_MUST_RUN"):
        pytest.fail(reason)
    pytest.skip(reason)


def root_and(*programs: str) -> None:
    """Returns where this is root and all programs are installed."""
    missing = [program for program in programs if shutil.which(program) is None]
    if missing:
        skip_or_fail(f"not installed: {', '.join(missing)}")
    if os.geteuid() != 0:
        skip_or_fail("needs root")
