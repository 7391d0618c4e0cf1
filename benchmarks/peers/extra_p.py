"""Extra-P, in an environment of its own beside the benchmarks: it is a peer, never a dependency."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np

from peers.models import Peer
from peers.runs import Array, Places

ENVIRONMENT = Path(__file__).parents[1] / ".peers-venv"
PROGRAM = Path(__file__).parent / "inside_extra_p.py"
REQUIREMENT = "extrap==4.2.5"


def installed() -> str | None:
    """Makes the environment where there is none; None, or why Extra-P cannot be had."""
    python = ENVIRONMENT / "bin/python"
    if _works(python):
        return None
    try:
        subprocess.run([sys.executable, "-m", "venv", str(ENVIRONMENT)], check=True, capture_output=True, timeout=120)
        (ENVIRONMENT / ".gitignore").write_text("*\n", encoding="utf-8")
        argv = [str(python), "-m", "pip", "install", "--quiet", REQUIREMENT]
        subprocess.run(argv, check=True, capture_output=True, text=True, timeout=600)
    except subprocess.CalledProcessError as error:
        lines = str(error.stderr or error).strip().splitlines()
        return f"pip could not install {REQUIREMENT}: {lines[-1] if lines else error}"
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None if _works(python) else f"{REQUIREMENT} is installed in {ENVIRONMENT.name}, but does not import"


def extra_p() -> Peer:
    """Calotoiu et al., SC 2013: the best of a family c0 + c1 N^i log2(N)^j, also with negative i, for strong scaling.

    It is fitted when it is asked: its functions stay in its own environment, and a "coefficient" is the run's seconds.
    """
    kept: dict[str, Places] = {}

    def fit(runs: Places, seconds: Array) -> Array:
        kept["runs"] = runs
        return seconds

    def ask(found: Array, where: Places) -> Array:
        question = {
            "gpus": kept["runs"].gpus.tolist(),
            "seconds": np.asarray(found).tolist(),
            "where": where.gpus.tolist(),
        }
        argv = [str(ENVIRONMENT / "bin/python"), "-W", "ignore", str(PROGRAM)]
        asked = json.dumps(question)
        answer = subprocess.run(argv, input=asked, capture_output=True, text=True, check=True, timeout=900)
        return np.asarray(json.loads(answer.stdout), dtype=float)

    return Peer("Extra-P", "SC 2013", fit, ask, 2)


def _works(python: Path) -> bool:
    if not python.exists():
        return False
    argv = [str(python), "-W", "ignore", "-c", "import extrap.modelers.model_generator"]
    return subprocess.run(argv, capture_output=True, check=False, timeout=120).returncode == 0
