"""A launcher whose one rank leaves what a script says: how long the epoch of each run took, or that it failed.

Everything else is the product: driver, folders, watching, outcomes, analysis.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from vitscale.launchers.base import Spawn
from vitscale.machine.hosts import Host
from vitscale.store import RankLog
from vitscale.store.records import EndLine, EpochLine, ModelLine, StepLine
from vitscale.trial.trial import World

FAILS = None
_STEPS = 8


class Scripted:
    """Starts `cp`, which puts a rank's finished record into the run's folder; or `false`, which fails."""

    def __init__(self, folder: Path, script: Mapping[str, Sequence[float | None]]) -> None:
        """`script`: trial to the epoch seconds of each of its repeats, or `FAILS`; `folder`: for the records."""
        self.folder = folder
        self.script = dict(script)
        self.started: list[tuple[str, int]] = []
        """Trial and repeat of each run, in order."""
        self.interrupt_at: int | None = None
        """Once so many runs have been started, Ctrl-C comes instead of the next."""

    def launch(self, world: World, spawn: Spawn) -> Spawn:
        return replace(spawn, commands=(tuple(self._command(spawn.run_folder)),))

    def _command(self, run_folder: Path) -> list[str]:
        if run_folder.name.count("-") != 2:
            return ["cp", "RECORD", str(run_folder)]  # what `vitscale plan` shows
        trial_id, repeat, _ = run_folder.name.split("-")
        if len(self.started) == self.interrupt_at:
            raise KeyboardInterrupt
        self.started.append((trial_id, int(repeat[1:])))
        seconds = self.script[trial_id][int(repeat[1:])]
        return ["false"] if seconds is FAILS else ["cp", str(self._record(seconds)), str(run_folder)]

    def unavailable(self) -> str | None:
        return None

    def unfit(self, world: World, hosts: tuple[Host, ...]) -> str | None:
        return None

    def _record(self, epoch_seconds: float) -> Path:
        """A rank's file with one epoch of equal steps."""
        folder = self.folder / str(epoch_seconds)
        if folder.exists():
            return folder / "rank-0.jsonl"
        folder.mkdir(parents=True)
        log = RankLog(folder, 0)
        log.write(
            ModelLine(
                parameters=1,
                gradient_dtype="float32",
                synchronised_timing=False,
                dataset_fingerprint="scripted",
                train_samples=_STEPS,
                held_out_samples=1,
            )
        )
        for step in range(_STEPS):
            log.write(StepLine(step=step, epoch=0, seconds=epoch_seconds / _STEPS, images=1, loss=1.0, warmup=False))
        log.write(
            EpochLine(
                epoch=0,
                steps=_STEPS,
                images=_STEPS,
                seconds=epoch_seconds,
                complete=True,
                train_loss=1.0,
                train_accuracy=0.5,
                held_out_loss=None,
                held_out_accuracy=None,
                peak_bytes=None,
            )
        )
        log.write(EndLine())
        log.close()
        return folder / "rank-0.jsonl"
