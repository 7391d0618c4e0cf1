"""Packs: the files of finished runs as columns, a hundred runs to a file, so that ten thousand are read in seconds.

packs/NUMBER-DIGEST.parquet     a row per rank of a run (one row of a run without ranks): `folder`, `rank`, the columns
                                of its steps as lists, its other `lines` as it wrote them; and on the run's first row
                                `header` (trial.json without its trial), `trial` and `outcome`
packs/NUMBER-DIGEST.removing    while the packed files are being removed

A run's own files are the truth until its pack lies on disk, was read back and says the same. Then they go: outcome.json
first, so that a folder which has one has all that it tells. A pack is never written again; its name holds its digest.
"""

from __future__ import annotations

import io
import itertools
import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
_NAME = re.compile(r"(\d{6})-([0-9a-f]{16})\.parquet")
_BETWEEN = ",\n"
"""Separator of a rank's lines: no line of JSON holds a line break."""
_MAY_BE_WILD = r"NaN|Infinity|[0-9]{19}|[:,\[] ?-?[0-9.]+[eE][+]?[0-9]{3}"
"""Text without any match holds only numbers that `refuse_unwritable_numbers` lets pass."""
_TEXTS = ("header", "trial", "outcome", "lines")
_TRIAL = TypeAdapter(Trial)


def pack_files(results: Path) -> list[Path]:
    """The packs of a results folder, in the order they were written."""
    try:
        return sorted(path for path in (results / "packs").iterdir() if _NAME.fullmatch(path.name))
    except OSError:
        return []


def is_pack_file(name: str) -> bool:
    """Whether a path below a results folder is that of a pack: "packs/000002-0123456789abcdef.parquet"."""
    folder, _, file = name.partition("/")
    return folder == "packs" and _NAME.fullmatch(file) is not None


def read_outcomes(path: Path) -> dict[str, Outcome]:
    """Folder to outcome for the runs of a pack; nothing else of it is read.

    Raises:
        StoreError: it cannot be read.
    """
    frame = _frame(path, ["folder", "outcome"])
    told = zip(frame["folder"].to_list(), frame["outcome"].to_list(), strict=True)
    with _named(path):
        return {folder: _outcome(text, path) for folder, text in told if text is not None}


def read_pack(path: Path) -> dict[str, Run]:
    """Reads a pack: folder to run.

    Raises:
        StoreError: it is damaged, or no file of this program's.
    """
    (runs,) = read_each([path])
    if isinstance(runs, StoreError):
        raise runs
    return runs


def read_each(paths: Sequence[Path], only: Collection[str] | None = None) -> Iterator[dict[str, Run] | StoreError]:
    """Reads each pack, or says why it cannot be read; the next one is decoded while a pack's records are made.

    `only`: the folders whose runs are wanted; None: all.
    """
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(max_workers=1) as decoding:
        ahead = [decoding.submit(_decoded, path, only) for path in paths[:1]]
        for number, path in enumerate(paths):
            ahead += [decoding.submit(_decoded, following, only) for following in paths[number + 1 : number + 2]]
            try:
                with _named(path):
                    runs = dict(_runs(path, *ahead.pop(0).result()))
            except StoreError as error:
                yield error
            else:
                yield runs


def undecodable(results: Path) -> str | None:
    """Name of the first pack of a folder that ends the process that decodes it; None: there is none."""
    for path in pack_files(results):
        try:
            decoded(path, [*_schema()], whole=True)
        except DecoderEndedError:
            return path.name
        except ParquetError:
            continue  # one message, to whoever reads it
    return None


def _decoded(path: Path, only: Collection[str] | None) -> tuple[pl.DataFrame, bool]:
    """A pack's rows, and whether its lines may hold a number that vitscale does not write."""
    frame = _frame(path)
    with _named(path):
        if only is not None:
            wanted = [folder in only for folder in frame["folder"].to_list()]
            frame = frame if all(wanted) else frame.filter(wanted)
        return frame, bool(frame["lines"].str.contains(_MAY_BE_WILD).any())


def _runs(path: Path, frame: pl.DataFrame, wild: bool) -> Iterator[tuple[str, Run]]:
    import polars as pl

    steps = frame.select(*COLUMNS)
    lengths = steps.select(pl.all().list.len().fill_null(0))
    edges = [0, *lengths["step"].cum_sum().to_list()]
    if odd := [name for name in COLUMNS if not lengths[name].equals(lengths["step"], check_names=False)]:
        raise ValueError(f"{odd[0]} has other steps than step has")
    # Rows without steps are left out: exploding would turn their empty lists into nulls.
    values = steps.filter(lengths["step"] > 0).select(pl.all().explode()).with_columns(pl.col("loss").fill_nan(None))
    columns: dict[str, np.ndarray[Any, Any]] = {}
    for name, kind in COLUMNS.items():
        column = values[name].fill_null(math.nan) if name == "loss" else values[name]
        if column.null_count() or len(column) != edges[-1]:
            raise ValueError(f"{name} lacks values")
        columns[name] = column.to_numpy().astype(kind, copy=False)
    _refuse_unwritable_columns(columns)
    ranks = iter(_rank_records(frame, wild, columns, edges))
    texts = zip(*(frame[name].to_list() for name in ("folder", "rank", "header", "trial", "outcome")), strict=True)
    for folder, own in itertools.groupby(texts, key=lambda row: row[0]):
        rows = list(own)
        header, trial, outcome = rows[0][2:]
        if header is None or trial is None or outcome is None:
            raise ValueError(f"{folder} has no header")
        records = tuple(next(ranks) for row in rows if row[1] is not None)
        yield folder, Run(header=_header(header, trial, path), outcome=_outcome(outcome, path), ranks=records)


def _rank_records(
    frame: pl.DataFrame, wild: bool, columns: Mapping[str, np.ndarray[Any, Any]], edges: Sequence[int]
) -> Iterator[RankRecord]:
    """Yields the record of each row with a rank."""
    rows = [
        # The first line describes the rank's environment. It is long, and the same in all runs of a trial, so it is
        # parsed once.
        (rank, *(lines or "").partition(_BETWEEN)[::2], begin, end)
        for rank, lines, (begin, end) in zip(
            frame["rank"].to_list(), frame["lines"].to_list(), itertools.pairwise(edges), strict=True
        )
        if rank is not None
    ]
    rest = RankRecord.parse_all(f"[{','.join(row[2] for row in rows if row[2])}]".encode())
    ends = list(itertools.accumulate((row[2].count(_BETWEEN) + 1 if row[2] else 0 for row in rows), initial=0))
    if ends[-1] != len(rest):
        raise ValueError("lines are not one below the other")
    for (rank, first, _, begin, end), own in zip(rows, itertools.pairwise(ends), strict=True):
        lines = [*_first(first), *rest[slice(*own)]]
        for line in lines if wild else ():
            refuse_unwritable_numbers(line)
        steps = Steps(**{name: column[begin:end] for name, column in columns.items()})
        yield RankRecord.of(lines, rank=rank, broken=(), steps=steps)


@lru_cache(maxsize=1 << 14)
def _first(line: str) -> list[RankLine]:
    return RankRecord.parse_all(f"[{line}]".encode())


def _refuse_unwritable_columns(columns: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """Refuses values that no rank writes, as the reader of lines does."""
    for name in ("step", "epoch", "images", "seconds"):
        if (columns[name] < 0).any():
            raise ValueError(f"{name} is below 0")
    if not np.isfinite(columns["seconds"]).all() or np.isinf(columns["loss"]).any():
        raise ValueError("a time or a loss is not finite")
    if (columns["window"] >= len(WINDOWS)).any():
        raise ValueError("a window is none of vitscale's")


def _header(text: str, trial: str, path: Path) -> RunHeader:
    """The header of a run in the pack `path`.

    Raises:
        StoreError: it is of a format that is not read.
        ValueError: it is none.
    """
    content = json.loads(text)
    refuse_unreadable(content, READABLE_RECORDS, f"a run in packs/{path.name}")
    return RunHeader.model_validate({**content, "trial": _trial(trial)})


def _outcome(text: str, path: Path) -> Outcome:
    """The outcome of a run in the pack `path`; raises as `_header`."""
    refuse_unreadable(json.loads(text), READABLE_RECORDS, f"a run in packs/{path.name}")
    return Outcome.model_validate_json(text)


@cache
def _trial(text: str) -> Trial:
    return _TRIAL.validate_json(text)


def pack_runs(results: Path, runs: Mapping[str, Run]) -> Path:
    """Packs finished runs, given by folder, removes their own files once the pack says the same, and returns the pack.

    Raises:
        OSError: the disk does not take it; nothing is lost.
        StoreError: the pack says something else; it is taken away again.
    """
    import polars as pl

    folder = results / "packs"
    folder.mkdir(exist_ok=True)
    for draft in folder.glob(".*"):
        draft.unlink()
    memory = io.BytesIO()
    pl.DataFrame(list(_rows(results, runs)), schema=_schema(), orient="row").write_parquet(memory, compression="zstd")
    data = memory.getvalue()
    number = max((int(path.name[:6]) for path in pack_files(results)), default=0) + 1
    path = folder / f"{number:06}-{content_digest(data)}.parquet"
    marker = path.with_suffix(".removing")
    draft = folder / f".{path.name}"
    write_record(draft, data)
    same = _read_own(draft) == runs
    # A driver packs as long as its study lasts: what was parsed only for this check is not needed again.
    _first.cache_clear()
    _trial.cache_clear()
    if not same:
        draft.unlink()
        raise StoreError(f"{path} would not say what the runs' own files say: these stay as they are")
    write_record(marker, "")
    draft.replace(path)
    sync_folder(folder)
    _remove(results, runs)
    marker.unlink()
    return path


def _read_own(path: Path) -> dict[str, Run]:
    """Reads a pack back that this process has just written, and so may decode by itself.

    Raises:
        StoreError: the disk gives back something else.
    """
    import polars as pl

    with _named(path):
        data = path.read_bytes()
        if content_digest(data) not in path.name:
            raise ValueError("it is damaged: its content has another digest than its name")
        frame = pl.read_parquet(io.BytesIO(data), columns=[*_schema()])
        return dict(_runs(path, frame, bool(frame["lines"].str.contains(_MAY_BE_WILD).any())))


def rewritten(path: Path, change: Callable[[str], str]) -> tuple[str, bytes]:
    """Changes each text of a pack, a JSON value or `lines` with one JSON value per line.

    Returns:
        Its name, which holds its digest, and its content.

    Raises:
        StoreError: it is damaged, or is no pack any more once it is changed.
    """
    import polars as pl

    frame = _frame(path)
    with _named(path):
        texts = {name: [None if text is None else change(text) for text in frame[name]] for name in _TEXTS[:-1]}
        lines = [None if own is None else own.split(_BETWEEN) for own in frame["lines"]]
        texts["lines"] = [None if own is None else _BETWEEN.join(map(change, own)) for own in lines]
        memory = io.BytesIO()
        columns = [pl.Series(name, own, dtype=pl.String) for name, own in texts.items()]
        frame.with_columns(columns).write_parquet(memory, compression="zstd")
        return f"{path.name[:6]}-{content_digest(memory.getvalue())}.parquet", memory.getvalue()


def finish_removing(results: Path) -> None:
    """Removes files that a driver had packed but not removed when it died."""
    for marker in (results / "packs").glob("*.removing"):
        pack = marker.with_suffix(".parquet")
        if pack.exists():
            _remove(results, read_pack(pack))
        marker.unlink()


def _remove(results: Path, folders: Mapping[str, Run]) -> None:
    for name in folders:
        folder = results / "runs" / name
        if folder.is_symlink():
            continue
        (folder / "outcome.json").unlink(missing_ok=True)
        for path in (*folder.glob("rank-*.jsonl"), folder / "trial.json"):
            path.unlink(missing_ok=True)


def _rows(results: Path, runs: Mapping[str, Run]) -> Iterator[tuple[Any, ...]]:
    for folder, run in runs.items():
        header = json.loads(run.header.model_dump_json())
        trial = run.header.trial.model_dump_json()
        del header["trial"]
        texts: tuple[str | None, ...] = (json.dumps(header), trial, run.outcome.model_dump_json())
        for record in run.ranks or (None,):
            lines = None
            steps = Steps.of(record.steps if record is not None else ())
            if record is not None:
                with open_regular(results / "runs" / folder / f"rank-{record.rank}.jsonl") as file:
                    others = [raw.decode().strip() for raw in file if not _is_step(raw)]
                lines = _BETWEEN.join(filter(None, others))
            columns = [column.tolist() for column in steps.columns().values()]
            columns[4] = [None if loss != loss else loss for loss in columns[4]]
            yield (folder, None if record is None else record.rank, *texts, lines, *columns)
            texts = (None,) * len(texts)


def _is_step(raw: bytes) -> bool:
    return raw.startswith(STEP_PREFIX) or (b'"step"' in raw and json.loads(raw).get("kind") == "step")


@cache
def _schema() -> Mapping[str, Any]:
    import polars as pl

    types = {np.int64: pl.Int64, np.float64: pl.Float64, np.bool_: pl.Boolean, np.uint8: pl.UInt8}
    lists = {name: pl.List(types[kind]) for name, kind in COLUMNS.items()}
    return {"folder": pl.String, "rank": pl.Int64, **dict.fromkeys(_TEXTS, pl.String), **lists}


def _frame(path: Path, columns: Sequence[str] | None = None) -> pl.DataFrame:
    """Reads a whole pack and checks its digest, or only some columns of it."""
    names = [*(columns or _schema())]
    with _named(path):
        frame, digest = decoded(path, names, whole=columns is None)
        if digest not in path.name:
            raise ValueError("it is damaged: its content has another digest than its name")
        if dict(frame.schema) != {name: _schema()[name] for name in names}:
            raise ValueError("its columns are not those of a pack")
        # Names become paths, below which files are removed.
        if not all(
            folder is not None and RUN_FOLDER.fullmatch(folder) for folder in frame["folder"].unique().to_list()
        ):
            raise ValueError("a row is of no run")
        return frame


class _named:
    """Turns whatever a damaged file raises into one error; polars' own panics are no `Exception`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        panicked = type(error).__name__ == "PanicException"
        if isinstance(error, StoreError) or error is None or not (panicked or isinstance(error, Exception)):
            return
        raise StoreError(f"packs/{self._path.name} cannot be read: {first_reason(error)}") from error
