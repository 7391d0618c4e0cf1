"""Records that the driver writes: the study, each run's header and outcome; and the whole folder as it is read back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, PrivateAttr

from vitscale.present.unread import Unread
from vitscale.store.lines import Count, Finite, Record, Seconds
from vitscale.store.records import FORMAT, RankRecord
from vitscale.trial.model_card import ModelCard
from vitscale.trial.trial import Mode, Trial

OutcomeKind = Literal["completed", "oom", "timeout", "hang", "failed", "skipped"]


class Outcome(Record):
    """How a run ended: exactly one per run, written last and by the driver alone."""

    format: int = FORMAT
    kind: OutcomeKind
    reason: str
    """One sentence; empty only where the run completed."""
    detail: str = ""
    """The guilty rank's traceback or the end of the log."""
    rank: int | None = None
    """The rank that failed first, where that is known."""
    external: bool = False
    """The cause lies outside the trial (disk full, cancelled): the next `vitscale run` does the run again."""
    host: str | None = None
    """The host of that rank, or the host itself that failed."""
    transient: bool = False
    """The cause may have passed by now (a port in use, a host without an answer): retried `measure.retries` times."""
    started_unix_seconds: Finite
    wall_seconds: Seconds


class ImportedFile(Record):
    """One file that was imported."""

    name: str
    """Name without the folder."""
    sha256: str


class Imported(Record):
    """Files and ranks that an imported run was made from."""

    log_format: str
    """epochs, deepspeed, trainer-state, train-log, csv, trace, or the name of a plugin's format."""
    files: tuple[ImportedFile, ...]
    ranks: tuple[Count, ...]
    """Ranks that the files tell of; not the whole world where they are one rank's log."""
    of_the_run: bool = False
    """The times are the whole run's, not those of one rank; they stand under rank 0."""
    batch_told: bool | None = None
    """Whether anybody told the trial's micro-batch, which is 1 otherwise; None: not recorded."""
    assumed: tuple[str, ...] = ()
    """Fields of the trial that nobody told and that have a usual value instead: train.precision, model.image_size."""


class StudyImport(Record):
    """How a folder of imported results was made: importing the same again finds it done."""

    log_format: str
    files: tuple[ImportedFile, ...]
    options: dict[str, str]
    """Options given on the command line."""
    notes: tuple[str, ...]
    """What was assumed because the files do not tell it."""
    problems: tuple[str, ...]
    """What could not be used of the files."""


class RunHeader(Record):
    """trial.json in a run's folder: what this run was to do."""

    format: int = FORMAT
    trial_id: str
    repeat: Count
    attempt: Count
    trial: Trial
    command: tuple[str, ...]
    """The first command, where one is started for each host; launch.json has all."""
    hosts: tuple[str, ...] = ()
    """The hosts it was given, in the order of their ranks; empty where it ran on the driver's own host."""
    dataset_fingerprint: str
    seed: int | None = None
    """The seed of this run; null where it is the trial's."""
    imported: Imported | None = None
    """Null where vitscale ran it itself."""
    vitscale: str | None = None
    """The program that wrote it (`base.program.identity`), "0.1.0+3fa9c1d2e4b5"; null in format 11."""

    @property
    def folder(self) -> str:
        """Name of its folder in `runs/`."""
        return f"{self.trial_id}-r{self.repeat}-a{self.attempt}"

    @property
    def log(self) -> str:
        """File inside the results folder with what the launcher and the ranks printed; empty for an imported run."""
        return "" if self.imported is not None else f"runs/{self.folder}/log.txt"


class Run(Record):
    """One execution of a trial, read back whole."""

    header: RunHeader
    outcome: Outcome
    ranks: tuple[RankRecord, ...]

    @property
    def ranks_needed(self) -> Sequence[int]:
        """Ranks whose records a figure of the whole run takes: all; in an imported run those that its files tell of."""
        imported = self.header.imported
        return range(self.header.trial.world.size) if imported is None else imported.ranks


_FIELDS_NOT_READ_AGAIN = ("rank", "start")
"""Fields that `LaterRank` keeps, whatever is in them."""


class LaterRank(RankRecord):
    """A rank's record without its lines, but for the first: any other is read when it is asked for.

    The lines of thousands of runs take longer to hand from process to process than to read again.
    """

    _read: Callable[[], Sequence[RankRecord]] = PrivateAttr()

    @classmethod
    def without_lines(cls, record: RankRecord, read: Callable[[], Sequence[RankRecord]]) -> Self:
        """Return a record that reads its lines when they are asked for.

        Args:
            record: the record. Empty fields are kept too: they need not be read again.
            read: reads the records of all ranks of the run. It can be pickled.
        """
        values = {name: value for name, value in record.__dict__.items() if name in _FIELDS_NOT_READ_AGAIN or not value}
        later = cls.model_construct(**values)
        for name in cls.model_fields.keys() - values.keys():
            later.__dict__.pop(name, None)  # a default would stand for what was not read
        later._read = read
        return later

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name not in RankRecord.model_fields:
                return super().__getattr__(name)
            whole_record = next(record for record in self._read() if record.rank == self.rank)
            return getattr(whole_record, name)


class CurvePoint(Record):
    """One trial's place on a curve."""

    gpus: int = Field(ge=1)
    trial_id: str


class Curve(Record):
    """Trials that differ only in rank count, under one batch policy."""

    mode: Mode
    labels: dict[str, Any]
    """The swept fields and their values, in the study's order."""
    points: tuple[CurvePoint, ...]


class StudyRecord(Record):
    """study.json: what the results folder holds."""

    format: int = FORMAT
    name: str
    text: str
    """The study file as it was read."""
    overrides: tuple[str, ...] = ()
    """Settings put over it on the command line, as typed: "train.micro_batch=16"."""
    repeats: int = Field(ge=1, le=1000)
    target_ci: float | None = None
    """Share of an epoch time within which its 95 % interval was to lie; null: as many runs as `repeats`, no more."""
    max_repeats: int | None = Field(default=None, ge=1, le=1000)
    """Most runs of a trial; null without `target_ci`."""
    curves: tuple[Curve, ...]
    trials: dict[str, Trial]
    versions: dict[str, str | None]
    dataset_fingerprints: dict[str, str]
    """Trial identity -> fingerprint of the data that it reads."""
    factory_digests: dict[str, str] = Field(default={})
    """Trial identity -> SHA-256 of the file of its `model.factory`; lacks trials without one, or whose file is no
    text. Empty in format 11: unknown."""
    cards: tuple[ModelCard, ...] = Field(default=(), max_length=1000)
    """Counts of the models that no formula counts, as they were traced when the study was planned."""
    imported: StudyImport | None = None
    """Null for a study of vitscale's own."""
    vitscale: str | None = None
    """The program that wrote it last, as in `RunHeader`; null in format 11."""


class Results(Record):
    """A results folder read back: finished runs of this study, and what was left out and why."""

    study: StudyRecord
    runs: tuple[Run, ...]
    problems: tuple[str, ...]
    """All that was left out, and why; what is `unread` too."""
    unread: tuple[Unread, ...] = ()
    """Finished runs without which every answer is made, for they cannot be read."""
