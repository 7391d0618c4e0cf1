"""Makes the environment in which tests train models of timm and torchvision, beside the one of `make install`.

    python tools/make_vision_environment.py .venv .venv-vision

It holds these two packages alone and takes all others from the first environment, whose torch it must not replace: the
CPU build, for which the default package index has no torchvision. So both are installed without their requirements, and
torchvision's compiled operators are declared without an implementation (vision_environment/torchvision_operators.py).

Exit code 0, and a line that says why, also where the packages cannot be had: those tests are then left out.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
from pathlib import Path

TOOLS = Path(__file__).resolve().parent
REQUIREMENTS = TOOLS / "vision_environment" / "requirements.txt"
INSTALLED = ".installed"
"""File that says that an environment is whole."""
SECONDS = 110
"""Longest time that an installation may take."""


def make(main: Path, vision: Path) -> str:
    """Make the environment `vision` beside `main`.

    Returns:
        Why it could not be made; empty where it was.
    """
    shutil.rmtree(vision, ignore_errors=True)
    venv.create(vision, with_pip=False, symlinks=True)
    python = vision / "bin" / "python"
    pip = [main / "bin" / "python", "-m", "pip", "--python", python, "install", "--quiet", "--no-deps"]
    try:
        installed = subprocess.run(
            [*pip, "--retries", "1", "-r", REQUIREMENTS], capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return f"installing them takes longer than {SECONDS} seconds"
    if installed.returncode != 0:
        lines = installed.stderr.strip().splitlines() or ["pip failed"]
        return lines[-1]
    _share_packages(main, vision)
    check = [python, "-c", "import torchvision, timm"]
    imported = subprocess.run(check, capture_output=True, text=True, timeout=SECONDS, check=False)
    if imported.returncode != 0:
        return imported.stderr.strip().splitlines()[-1]
    (vision / INSTALLED).touch()
    return ""


def _share_packages(main: Path, vision: Path) -> None:
    """Let the environment `vision` import all packages of `main`, after its own."""
    (main_packages,) = main.absolute().glob("lib/python*/site-packages")
    (own_packages,) = vision.glob("lib/python*/site-packages")
    # addsitedir reads the .pth files there too, such as that of an editable installation.
    lines = [
        f"import site; site.addsitedir({str(main_packages)!r})",
        str(TOOLS / "vision_environment"),
        "import torchvision_operators",
    ]
    (own_packages / "vitscale_vision.pth").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    reason = make(Path(sys.argv[1]), Path(sys.argv[2]))
    if reason:
        print(f"tests of timm and torchvision are left out, for they cannot be installed: {reason}")
