"""Ranks under a real srun that only write records: `slurm.python` is a program that starts them in place of real ones.

A run takes a fraction of a second, unless `folder/hold` exists: its ranks then record one step and wait until it is
gone.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

_PROGRAM = """\
#!/bin/sh
if [ "$3" = vitscale.worker ]; then
    exec "{python}" "{file}" "{folder}" "$4"
fi
exec "{python}" "$@"
"""


def install(folder: Path) -> Path:
    """Writes the program that stands for Python on the nodes; returns its path."""
    path = folder / "python"
    path.write_text(_PROGRAM.format(python=sys.executable, file=__file__, folder=folder))
    path.chmod(0o755)
    return path


def rank(folder: Path, run_folder: Path) -> None:
    """Writes one line per step; each names its run, so that a mixture would show."""
    from vitscale.store import RankLog
    from vitscale.store.records import EndLine, StepLine
    from vitscale.store.results import RunHeader

    number = int(os.environ["SLURM_PROCID"])
    header = RunHeader.model_validate_json((run_folder / "trial.json").read_text())
    log = RankLog(run_folder, number)
    mark = int(header.trial_id, 16) % 1_000_000 + header.repeat
    for step in range(5):
        log.write(StepLine(step=step, epoch=0, seconds=0.001, images=mark, loss=float(number), warmup=False))
        while (folder / "hold").exists():
            time.sleep(0.02)
    log.write(EndLine())
    log.close()


if __name__ == "__main__":
    rank(Path(sys.argv[1]), Path(sys.argv[2]))
