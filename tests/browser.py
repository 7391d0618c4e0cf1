"""Chromium without a network, for tests of what a page really draws."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import needs


def drawn(page: Path) -> str:
    """The DOM of a page after its scripts have run; skipped where no Chromium is installed."""
    names = ("chromium", "chromium-browser", "google-chrome")
    program = next((name for name in names if shutil.which(name) is not None), None)
    if program is None:
        needs.programs("chromium")
    answer = subprocess.run(
        [
            str(program), "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--disable-sync",
            "--disable-dev-shm-usage", "--host-resolver-rules=MAP * ~NOTFOUND",
            f"--user-data-dir={page.with_suffix('.profile')}", "--window-size=1200,3000",
            "--virtual-time-budget=20000", "--dump-dom", page.as_uri(),
        ],
        capture_output=True, text=True, timeout=240, check=True,
    )  # fmt: skip
    return answer.stdout
