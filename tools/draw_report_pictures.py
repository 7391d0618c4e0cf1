"""Draws the report's pictures in docs/images with a headless Chromium.

    python tools/draw_report_pictures.py demo/results BATCHES

`demo/results` is what `make demo` left; the paths stand in the pictures, so call it from the folder that holds them.
BATCHES are results of a sweep of train.micro_batch under several engines.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
IMAGES = ROOT / "docs" / "images"
OPENED = "(() => { const part = document.getElementById('where-the-time-goes'); part.open = true; %s })()"
PRINTED = "dispatchEvent(new Event('beforeprint'))"


def page_of(results: Path, folder: Path) -> Path:
    """The report of results as a file in `folder`."""
    page = folder / f"{results.parent.name}-{results.name}.html"
    command = [sys.executable, "-m", "vitscale", "report", str(results), "-o", str(page)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return page


def main() -> None:
    """Draws all pictures; a page that logs an error ends it."""
    from browser import shared_page

    demo, batches = map(Path, sys.argv[1:])
    with tempfile.TemporaryDirectory() as folder:
        first, second = (page_of(results, Path(folder)) for results in (demo, batches))
        page = shared_page()

        def draw(name: str, path: Path, *scripts: str, **how: Any) -> None:
            page.open(path, **how)
            for script in scripts:
                page.ask(script)
                page.settle()
            if page.logged:
                raise SystemExit(f"{name}: {page.logged}")
            page.picture(IMAGES / f"{name}.png")

        draw("report", first)
        draw("report-dark", first, dark=True)
        draw("report-phone", first, width=390, height=844)
        draw("report-time", first, OPENED % "", OPENED % "part.scrollIntoView();", height=900)
        swept = "#scaling.measure=throughput&scaling.along=train.micro_batch-2"
        draw("report-batch-sweep", second, "scrollTo(0, 0)", fragment=swept)
        page.open(first, width=710, height=1000)
        page.send("Emulation.setEmulatedMedia", media="print")
        page.ask(PRINTED)
        page.settle()
        page.picture(IMAGES / "report-print.png")


if __name__ == "__main__":
    main()
