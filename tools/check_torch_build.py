"""Stops `make install` before it downloads gigabytes of CUDA libraries onto a machine without a GPU.

Which build of torch pip takes depends on the package index it is set up with: some serve the CPU build, the default one
serves the CUDA build. pip is asked what it would install, which downloads metadata only.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ADVICE = """\
vitscale: this machine has no GPU, and pip would install a build of torch with CUDA: {count} packages named nvidia-*.
Either point pip at PyTorch's index of CPU wheels (see "Get started" on the PyTorch site) through PIP_EXTRA_INDEX_URL,
or say that the CUDA build is wanted:  VITSCALE_CUDA_BUILD=1 make install
"""


def cuda_packages(report: str) -> list[str]:
    """The CUDA packages in a report of `pip install --dry-run --report`."""
    names = [item["metadata"]["name"] for item in json.loads(report)["install"]]
    return [name for name in names if name.startswith("nvidia-") or name == "cuda-toolkit"]


def main(constraints: Path) -> int:
    """0 where the installation may go on."""
    if shutil.which("nvidia-smi") or os.environ.get("VITSCALE_CUDA_BUILD"):
        return 0
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--report", "-", "-c", str(constraints)]
    answer = subprocess.run([*pip, "torch"], capture_output=True, text=True, check=False)
    if answer.returncode != 0:
        sys.stderr.write(answer.stderr)
        return answer.returncode
    found = cuda_packages(answer.stdout)
    if found:
        sys.stderr.write(ADVICE.format(count=len(found)))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
