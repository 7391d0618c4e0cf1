"""Packs: the files of finished runs as columns, a hundred runs to a file, so that ten thousand are read in seconds.

packs/NUMBER-DIGEST.parquet     a row per rank of a run (one row of a run without ranks): `folder`, `rank`, the columns
                                of its steps as lists, its other `lines` as it wrote them; and on the run's first row
                                `header` (trial.json without its trial), `trial` and `outcome`
packs/NUMBER-DIGEST.removing    while the packed files are being removed

A run's own files are the truth until its pack lies on disk, was read back and says the same. Then they go: outcome.json
first, so that a folder with an outcome has all files of its run. A pack is never changed; its name has its digest.
"""

from __future__ import annotations

import io
import itertools
import json
import math
import re
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from pydantic import TypeAdapter

from vitscale.base.files import open_regular, sync_folder
from vitscale.base.parquet import DecoderEndedError, ParquetError, content_digest, decoded
from vitscale.errors import StoreError
from vitscale.store.formats import refuse_unreadable
from vitscale.store.lines import COLUMNS, STEP_PREFIX, WINDOWS, RankLine, Steps, first_reason, refuse_unwritable_numbers
from vitscale.store.records import READABLE_RECORDS, RankRecord
from vitscale.store.results import Outcome, Run, RunHeader
from vitscale.store.writing import write_record
from vitscale.trial.trial import Trial

if TYPE_CHECKING:
    import polars as pl

PACK_RUNS = 100
"""Runs per pack. Fewer stay as they are: a small study remains readable by eye."""
RUN_FOLDER = re.compile(r"(?P<trial>[0-9a-f]{12})-r(?P<repeat>\d{1,6})-a(?P<attempt>\d{1,6})")
_PACK_NAME = re.compile(r"(\d{6})-([0-9a-f]{16})\.parquet")
_LINE_SEPARATOR = ",\n"
"""Separator of a rank's lines in a pack: no line of JSON holds a line break."""
_MAYBE_UNWRITABLE_NUMBER = r"NaN|Infinity|[0-9]{19}|[:,\[] ?-?[0-9.]+[eE][+]?[0-9]{3}"
"""Text without any match holds only numbers that `refuse_unwritable_numbers` lets pass."""
_RUN_COLUMNS = ("header", "trial", "outcome")
"""Columns that a run's first row has alone; each holds a JSON value."""
_TEXT_COLUMNS = (*_RUN_COLUMNS, "lines")
_TRIAL = TypeAdapter(Trial)


def pack_files(results: Path) -> list[Path]:
    """Return the packs of a results folder, in the order they were written."""
    try:
        return sorted(path for path in (results / "packs").iterdir() if _PACK_NAME.fullmatch(path.name))
    except OSError:
        return []


def is_pack_file(name: str) -> bool:
    """Whether a path below a results folder is that of a pack: "packs/000002-0123456789abcdef.parquet"."""
    folder, _, file = name.partition("/")
    return folder == "packs" and _PACK_NAME.fullmatch(file) is not None


def read_outcomes(path: Path) -> dict[str, Outcome]:
    """Return folder -> outcome for the runs of a pack; nothing else of it is read.

    Raises:
        StoreError: it cannot be read.
    """
    frame = _read_frame(path, ["folder", "outcome"])
    rows = zip(frame["folder"].to_list(), frame["outcome"].to_list(), strict=True)
    with _PackErrors(path):
        return {folder: _parse_outcome(text, path) for folder, text in rows if text is not None}


def read_pack(path: Path) -> dict[str, Run]:
    """Return folder -> run for a pack.

    Raises:
        StoreError: it is damaged, or no file of this program's.
    """
    (runs,) = read_packs([path])
    if isinstance(runs, StoreError):
        raise runs
    return runs


def read_packs(paths: Sequence[Path], only: Collection[str] | None = None) -> Iterator[dict[str, Run] | StoreError]:
    """Yield for each pack its runs by folder, or why it cannot be read.

    While the records of one pack are made, the next one is decoded; no more than these two are in memory.

    Args:
        paths: the packs.
        only: names of the run folders whose runs are read; None: all.
    """
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(max_workers=1) as decoder:
        being_decoded = deque(decoder.submit(_decode, path, only) for path in paths[:1])
        for next_index, path in enumerate(paths, start=1):
            if next_index < len(paths):
                being_decoded.append(decoder.submit(_decode, paths[next_index], only))
            try:
                with _PackErrors(path):
                    runs = dict(_runs_in(path, being_decoded.popleft().result()))
            except StoreError as error:
                yield error
            else:
                yield runs


def undecodable_pack(results: Path) -> str | None:
    """Return the name of the first pack of a folder whose content ends the process that decodes it.

    Return None where there is no such pack.
    """
    for path in pack_files(results):
        try:
            decoded(path, [*_column_types()], whole=True)
        except DecoderEndedError:
            return path.name
        except ParquetError:
            continue  # one message, to whoever reads it
    return None


class _DecodedPack(NamedTuple):
    """The rows of a pack."""

    frame: pl.DataFrame
    has_unwritable_numbers: bool
    """Whether its lines may hold a number that vitscale does not write; where False they hold none."""


def _decode(path: Path, only: Collection[str] | None) -> _DecodedPack:
    """Decode a pack, and keep the rows of the folders in `only` (None: all).

    Raises:
        StoreError: it cannot be read.
    """
    frame = _read_frame(path)
    with _PackErrors(path):
        if only is not None:
            are_wanted = [folder in only for folder in frame["folder"].to_list()]
            frame = frame if all(are_wanted) else frame.filter(are_wanted)
        return _DecodedPack(frame, _may_have_unwritable_numbers(frame))


def _may_have_unwritable_numbers(frame: pl.DataFrame) -> bool:
    return bool(frame["lines"].str.contains(_MAYBE_UNWRITABLE_NUMBER).any())


def _runs_in(path: Path, pack: _DecodedPack) -> Iterator[tuple[str, Run]]:
    """Yield (folder, run) for each run of a pack, whose ranks are neighbouring rows.

    Raises:
        StoreError: a record is of a format that is not read.
        ValueError: the content is not as `pack_runs` writes it.
    """
    frame = pack.frame
    records = iter(_rank_records(pack, _steps_by_row(frame)))
    columns = [frame[name].to_list() for name in _RunRow._fields]
    rows = itertools.starmap(_RunRow, zip(*columns, strict=True))
    for folder, rows_of_run in itertools.groupby(rows, key=lambda row: row.folder):
        first_row, *further_rows = rows_of_run
        if first_row.header is None or first_row.trial is None or first_row.outcome is None:
            raise ValueError(f"{folder} has no header")
        # `records` has one for each row with a rank, in the order of rows.
        ranks = tuple(next(records) for row in (first_row, *further_rows) if row.rank is not None)
        header = _parse_header(first_row.header, first_row.trial, path)
        yield folder, Run(header=header, outcome=_parse_outcome(first_row.outcome, path), ranks=ranks)


class _RunRow(NamedTuple):
    """A row's columns without the rank's lines and steps."""

    folder: str
    rank: int | None
    header: str | None
    trial: str | None
    outcome: str | None


def _steps_by_row(frame: pl.DataFrame) -> list[Steps]:
    """Return the steps of each row, as slices of columns over all rows.

    Raises:
        ValueError: columns have different lengths, or values that no rank writes.
    """
    import polars as pl

    lists = frame.select(*COLUMNS)
    lengths = lists.select(pl.all().list.len().fill_null(0))
    for name in COLUMNS:
        if not lengths[name].equals(lengths["step"], check_names=False):
            raise ValueError(f"{name} has other steps than step has")
    bounds = [0, *lengths["step"].cum_sum().to_list()]  # rows of 3, 0 and 2 steps: [0, 3, 3, 5]
    # Rows without steps are left out: exploding would turn their empty lists into nulls.
    values = lists.filter(lengths["step"] > 0).select(pl.all().explode()).with_columns(pl.col("loss").fill_nan(None))
    columns: dict[str, np.ndarray[Any, Any]] = {}
    for name, kind in COLUMNS.items():
        column = values[name].fill_null(math.nan) if name == "loss" else values[name]
        if column.null_count() or len(column) != bounds[-1]:
            raise ValueError(f"{name} lacks values")
        columns[name] = column.to_numpy().astype(kind, copy=False)
    _refuse_unwritable_columns(columns)
    all_steps = Steps(**columns)
    return [all_steps[begin:end] for begin, end in itertools.pairwise(bounds)]


class _RankRow(NamedTuple):
    """A row with a rank."""

    rank: int
    first_line: str
    """It describes the rank's environment. It is long, and the same in all runs of a trial, so it is parsed once."""
    other_lines: str
    steps: Steps

    @property
    def other_line_count(self) -> int:
        return self.other_lines.count(_LINE_SEPARATOR) + 1 if self.other_lines else 0


def _rank_rows(frame: pl.DataFrame, steps_by_row: Sequence[Steps]) -> list[_RankRow]:
    """Return the rows of a pack that have a rank."""
    rows: list[_RankRow] = []
    for rank, lines, steps in zip(frame["rank"].to_list(), frame["lines"].to_list(), steps_by_row, strict=True):
        if rank is not None:
            first_line, _, other_lines = (lines or "").partition(_LINE_SEPARATOR)
            rows.append(_RankRow(rank, first_line, other_lines, steps))
    return rows


def _rank_records(pack: _DecodedPack, steps_by_row: Sequence[Steps]) -> Iterator[RankRecord]:
    """Yield the record of each row with a rank.

    Raises:
        ValueError: a line is none of a rank's, or holds a number that vitscale does not write.
    """
    rows = _rank_rows(pack.frame, steps_by_row)
    # All lines of the pack are parsed at once: a call for each row takes longer.
    joined_lines = ",".join(row.other_lines for row in rows if row.other_lines)
    parsed_lines = RankRecord.parse_all(f"[{joined_lines}]".encode())
    if len(parsed_lines) != sum(row.other_line_count for row in rows):
        raise ValueError("lines are not one below the other")
    remaining_lines = iter(parsed_lines)
    for row in rows:
        rank_lines = [*_parse_first_line(row.first_line), *itertools.islice(remaining_lines, row.other_line_count)]
        if pack.has_unwritable_numbers:
            for line in rank_lines:
                refuse_unwritable_numbers(line)
        yield RankRecord.of(rank_lines, rank=row.rank, broken=(), steps=row.steps)


@lru_cache(maxsize=1 << 14)
def _parse_first_line(line: str) -> list[RankLine]:
    """Parse a rank's first line; no line for an empty text."""
    return RankRecord.parse_all(f"[{line}]".encode())


def _refuse_unwritable_columns(columns: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """Refuse values that no rank writes, as the reader of lines does."""
    for name in ("step", "epoch", "images", "seconds"):
        if (columns[name] < 0).any():
            raise ValueError(f"{name} is below 0")
    if not np.isfinite(columns["seconds"]).all() or np.isinf(columns["loss"]).any():
        raise ValueError("a time or a loss is not finite")
    if (columns["window"] >= len(WINDOWS)).any():
        raise ValueError("a window is none of vitscale's")


def _parse_header(text: str, trial: str, path: Path) -> RunHeader:
    """Return the header of a run in the pack `path`.

    Raises:
        StoreError: it is of a format that is not read.
        ValueError: it is none.
    """
    content = json.loads(text)
    refuse_unreadable(content, READABLE_RECORDS, f"a run in packs/{path.name}")
    return RunHeader.model_validate({**content, "trial": _parse_trial(trial)})


def _parse_outcome(text: str, path: Path) -> Outcome:
    """Return the outcome of a run in the pack `path`; raises as `_parse_header`."""
    refuse_unreadable(json.loads(text), READABLE_RECORDS, f"a run in packs/{path.name}")
    return Outcome.model_validate_json(text)


@cache
def _parse_trial(text: str) -> Trial:
    """Return the trial with this JSON; cached, since all runs of a trial have the same text."""
    return _TRIAL.validate_json(text)


def pack_runs(results: Path, runs: Mapping[str, Run]) -> Path:
    """Pack finished runs, and remove their own files once the pack, read back, says the same.

    Args:
        results: the results folder.
        runs: name of the run's folder -> the run, as read from that folder.

    Returns:
        The pack.

    Raises:
        OSError: the disk does not take it; nothing is lost.
        StoreError: the pack says something else; it is taken away again.
    """
    folder = results / "packs"
    folder.mkdir(exist_ok=True)
    for left_over in folder.glob(".*"):
        left_over.unlink()
    content = _pack_content(results, runs)
    last_number = max((_pack_number(path) for path in pack_files(results)), default=0)
    path = folder / f"{last_number + 1:06}-{content_digest(content)}.parquet"
    draft = folder / f".{path.name}"
    write_record(draft, content)
    if not _holds_runs(draft, runs):
        draft.unlink()
        raise StoreError(f"{path} would not say what the runs' own files say: these stay as they are")
    marker = path.with_suffix(".removing")
    write_record(marker, "")
    draft.replace(path)
    sync_folder(folder)
    _remove_packed_files(results, runs)
    marker.unlink()
    return path


def _pack_content(results: Path, runs: Mapping[str, Run]) -> bytes:
    """Return the content of a pack of these runs."""
    import polars as pl

    memory = io.BytesIO()
    frame = pl.DataFrame(list(_pack_rows(results, runs)), schema=_column_types(), orient="row")
    frame.write_parquet(memory, compression="zstd")
    return memory.getvalue()


def _holds_runs(draft: Path, runs: Mapping[str, Run]) -> bool:
    """Whether a pack that was just written holds exactly these runs."""
    is_same = _read_back(draft) == runs
    # A driver packs as long as its study lasts: what was parsed only for this check is not needed again.
    _parse_first_line.cache_clear()
    _parse_trial.cache_clear()
    return is_same


def _pack_number(pack: Path) -> int:
    """Return the number in a pack's name: 2 for "000002-0123456789abcdef.parquet"."""
    return int(pack.name.partition("-")[0])


def _read_back(path: Path) -> dict[str, Run]:
    """Read a pack back that this process has just written, and so may decode by itself.

    Raises:
        StoreError: the disk gives back something else.
    """
    import polars as pl

    with _PackErrors(path):
        data = path.read_bytes()
        if content_digest(data) not in path.name:
            raise ValueError("it is damaged: its content has another digest than its name")
        frame = pl.read_parquet(io.BytesIO(data), columns=[*_column_types()])
        return dict(_runs_in(path, _DecodedPack(frame, _may_have_unwritable_numbers(frame))))


class PackContent(NamedTuple):
    """A pack that is not on disk."""

    name: str
    """It holds the digest of the content."""
    content: bytes


def rewritten(path: Path, change: Callable[[str], str]) -> PackContent:
    """Return a pack with each of its texts changed.

    Args:
        path: the pack, which stays as it is.
        change: takes a JSON value as text, also each line of a rank, and returns it changed.

    Raises:
        StoreError: it is damaged, or is no pack any more once it is changed.
    """
    import polars as pl

    def change_lines(lines: str) -> str:
        return _LINE_SEPARATOR.join(change(line) for line in lines.split(_LINE_SEPARATOR))

    frame = _read_frame(path)
    with _PackErrors(path):
        columns = []
        for name in _TEXT_COLUMNS:
            change_text = change_lines if name == "lines" else change
            texts = [None if text is None else change_text(text) for text in frame[name]]
            columns.append(pl.Series(name, texts, dtype=pl.String))
        memory = io.BytesIO()
        frame.with_columns(columns).write_parquet(memory, compression="zstd")
        content = memory.getvalue()
        return PackContent(f"{_pack_number(path):06}-{content_digest(content)}.parquet", content)


def finish_removing(results: Path) -> None:
    """Remove files that a driver had packed but not removed when it died."""
    for marker in (results / "packs").glob("*.removing"):
        pack = marker.with_suffix(".parquet")
        if pack.exists():
            _remove_packed_files(results, read_pack(pack))
        marker.unlink()


def _remove_packed_files(results: Path, folders: Iterable[str]) -> None:
    """Remove the files of packed runs from these folders of `runs/`, the outcome first.

    Logs stay, and so does all in a folder that is a link.
    """
    for name in folders:
        folder = results / "runs" / name
        if folder.is_symlink():
            continue
        (folder / "outcome.json").unlink(missing_ok=True)
        for path in (*folder.glob("rank-*.jsonl"), folder / "trial.json"):
            path.unlink(missing_ok=True)


def _pack_rows(results: Path, runs: Mapping[str, Run]) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of a pack with these runs by folder, each in the order of `_column_types`."""
    for folder, run in runs.items():
        header = json.loads(run.header.model_dump_json())
        trial = run.header.trial.model_dump_json()
        del header["trial"]
        run_texts: tuple[str | None, ...] = (json.dumps(header), trial, run.outcome.model_dump_json())
        if not run.ranks:
            yield folder, None, *run_texts, None, *_step_lists(Steps.of(()))
        for record in run.ranks:
            lines = _read_other_lines(results / "runs" / folder / f"rank-{record.rank}.jsonl")
            yield folder, record.rank, *run_texts, lines, *_step_lists(Steps.of(record.steps))
            run_texts = (None, None, None)  # the run's first row alone has them


def _step_lists(steps: Steps) -> list[list[Any]]:
    """Return the columns of steps as lists, in their order; a loss that is NaN becomes None."""
    columns = {name: column.tolist() for name, column in steps.columns().items()}
    columns["loss"] = [None if math.isnan(loss) else loss for loss in columns["loss"]]
    return list(columns.values())


def _read_other_lines(path: Path) -> str:
    """Return a rank's lines as it wrote them, without those of steps and empty ones."""
    with open_regular(path) as file:
        lines = [raw.decode().strip() for raw in file if not _is_step(raw)]
    return _LINE_SEPARATOR.join(line for line in lines if line)


def _is_step(raw: bytes) -> bool:
    """Whether a line is a step's, also one that somebody wrote in another form than a rank does."""
    return raw.startswith(STEP_PREFIX) or (b'"step"' in raw and json.loads(raw).get("kind") == "step")


@cache
def _column_types() -> Mapping[str, Any]:
    """Return column of a pack -> its type in polars, in the order of the columns."""
    import polars as pl

    types = {np.int64: pl.Int64, np.float64: pl.Float64, np.bool_: pl.Boolean, np.uint8: pl.UInt8}
    lists = {name: pl.List(types[kind]) for name, kind in COLUMNS.items()}
    return {"folder": pl.String, "rank": pl.Int64, **dict.fromkeys(_TEXT_COLUMNS, pl.String), **lists}


def _read_frame(path: Path, columns: Sequence[str] | None = None) -> pl.DataFrame:
    """Read a whole pack and check its digest, or read only some columns of it.

    Raises:
        StoreError: it is damaged, or is no pack.
    """
    names = [*(columns or _column_types())]
    with _PackErrors(path):
        frame, digest = decoded(path, names, whole=columns is None)
        if digest not in path.name:
            raise ValueError("it is damaged: its content has another digest than its name")
        expected_types = {name: _column_types()[name] for name in names}
        if dict(frame.schema) != expected_types:
            raise ValueError("its columns are not those of a pack")
        for folder in frame["folder"].unique().to_list():
            # Names become paths, below which files are removed.
            if folder is None or not RUN_FOLDER.fullmatch(folder):
                raise ValueError("a row is of no run")
        return frame


class _PackErrors:
    """Turns whatever a damaged pack raises inside `with` into a StoreError that names it.

    polars' own panics are no `Exception`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is None or isinstance(error, StoreError):
            return
        is_panic = type(error).__name__ == "PanicException"
        if not (is_panic or isinstance(error, Exception)):
            return
        raise StoreError(f"packs/{self._path.name} cannot be read: {first_reason(error)}") from error
