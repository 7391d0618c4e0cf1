"""The command line with one launcher more, whose ranks only write records: a run takes a fraction of a second.

Everything else is the product: driver, lock, folders, watching, outcomes. As a rank: `record_only.py RUN_FOLDER RANK`.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from vitscale.record import EndLine, RunHeader, StepLine
from vitscale.store import RankLog
from vitscale.trial import World
from vitscale.worker.place import die_with_parent


class RecordOnly:
    """Starts a process that starts the ranks, as torchrun does."""

    def command(self, world: World, run_folder: Path) -> list[str]:
        return [sys.executable, __file__, str(run_folder), *(str(rank) for rank in range(world.size))]

    def unavailable(self) -> str | None:
        return None

    def unfit(self, world: World) -> str | None:
        return None


def agent(run_folder: Path, ranks: list[str]) -> int:
    """Starts the ranks in sessions of their own and waits for them."""
    die_with_parent()
    children = [
        subprocess.Popen([sys.executable, __file__, str(run_folder), rank], start_new_session=True) for rank in ranks
    ]
    return max(child.wait() for child in children)


def rank(run_folder: Path, number: int) -> int:
    """Writes one line per step; each names its run, so that a mixture would show."""
    die_with_parent()
    header = RunHeader.model_validate_json((run_folder / "trial.json").read_text())
    log = RankLog(run_folder, number)
    mark = int(header.trial_id, 16) % 1_000_000 + header.repeat
    for step in range(20):
        log.write(StepLine(step=step, epoch=0, seconds=0.001, images=mark, loss=float(number), warmup=False))
        time.sleep(0.002)
    log.write(EndLine())
    log.close()
    return 0


if __name__ == "__main__":
    folder, *numbers = sys.argv[1:]
    if folder == "cli":
        from vitscale import cli, launchers

        launchers.LAUNCHERS["record-only"] = RecordOnly()
        sys.argv = ["vitscale", *numbers]
        cli.main()
    elif len(numbers) > 1:
        sys.exit(agent(Path(folder), numbers))
    else:
        sys.exit(rank(Path(folder), int(numbers[0])))
