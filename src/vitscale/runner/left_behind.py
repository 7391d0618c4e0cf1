"""What a script without a Probe leaves of its training: Hugging Face's trainer_state.json, in the run's own `{output}`.

Its epochs take the place of the script's time as a whole, which has its imports and its last words in it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from vitscale.errors import RequestError, StoreError
from vitscale.importers.contents import LogRun, Options
from vitscale.importers.trainer_state import read
from vitscale.store import read_ranks, write_whole
from vitscale.store.lines import rank_files
from vitscale.trial.script import OUTPUT
from vitscale.trial.trial import Trial

_NAME = "trainer_state.json"
_MOST_FOLDERS = 1000
"""That are looked into; a Trainer keeps its state in the folder that it was given, and in those of its checkpoints."""


def take_in(folder: Path, trial: Trial) -> None:
    """Puts what was left into the ranks' records; where nothing can be used, these stay as they are.

    Args:
        folder: of a run whose ranks have ended, and which has no outcome yet.
        trial: what it ran.

    Raises:
        OSError: a record cannot be written.
    """
    told = read_ranks(folder)
    if trial.train.script is None or not all(rank.ended and not rank.steps and len(rank.epochs) == 1 for rank in told):
        return  # a Probe told more than any file
    path = max(_states(folder / OUTPUT), key=lambda state: state.stat().st_mtime_ns, default=None)
    if path is None:
        return
    try:
        contents = read([path], Options(gpus=trial.world.size, micro_batch=trial.train.micro_batch))
    except (RequestError, StoreError) as error:
        _note(folder, path, str(error))
        return
    if not contents.runs or not contents.runs[0].ranks[0].epochs:
        _note(folder, path, "; ".join(contents.problems) or "it has no whole epoch")
        return
    for file in rank_files(folder).values():
        write_whole(file, "".join(_lines(file, contents.runs[0])))
    _note(folder, path, "")


def _states(output: Path) -> Iterator[Path]:
    """No link is followed: a script may leave any."""
    if output.is_symlink():
        return
    for count, (where, folders, files) in enumerate(os.walk(output)):
        folders.sort()
        path = Path(where) / _NAME
        if _NAME in files and path.is_file() and not path.is_symlink():
            yield path
        if count >= _MOST_FOLDERS:
            return


def _lines(file: Path, run: LogRun) -> Iterator[str]:
    """A rank's record with the epochs of the whole run: each ends in all ranks at once."""
    for line in file.read_text(encoding="utf-8").splitlines(keepends=True):
        samples = run.setting.train_samples
        if line.startswith('{"kind":"model"') and samples is not None:
            line = re.sub(r'"train_samples":null', f'"train_samples":{samples}', line, count=1)
        if not line.startswith('{"kind":"epoch"'):
            yield line
            continue
        yield from (f"{epoch.model_dump_json()}\n" for epoch in run.ranks[0].epochs)


def _note(folder: Path, path: Path, why: str) -> None:
    """Says in the run's log what was done."""
    used = "was not used" if why else "stands for the time of the script as a whole"
    with (folder / "log.txt").open("a", encoding="utf-8", errors="replace") as log:
        log.write(f"vitscale: {path.relative_to(folder)} {used}{f': {why}' if why else ''}\n")
