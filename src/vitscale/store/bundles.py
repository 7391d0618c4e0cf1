"""Bundles: a results folder as one file to send, checked when it is read, and redacted where that is asked for.

    vitscale-bundle/
      study.json, packs/, checks/, runs/RUN/    as in the folder (`vitscale.store`), without what starts ranks and locks
      manifest.json                             last: whether it is redacted, and the SHA-256 of every other file

The same results give the same bytes. A bundle is read as anybody's: files of a folder's names alone, bounded in size
and number, all of them as the manifest says, unpacked into a folder that goes with this process.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import itertools
import json
import re
import stat
import tarfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from typing_extensions import override

from vitscale.base.files import open_regular, whole_file
from vitscale.errors import StoreError, shown
from vitscale.present.unread import Unread
from vitscale.store.lines import first_reason
from vitscale.store.packs import RUN_FOLDER, rewritten, undecodable_pack
from vitscale.store.reading import read_study
from vitscale.store.redaction import Redactor

_TOP_FOLDER = "vitscale-bundle"
_MEMBER_NAME = re.compile(
    r"(?:study|manifest|answer)\.json|packs/\d{6}-[0-9a-f]{16}\.parquet|checks/[\w-]{1,80}\.json"
    r"|runs/[0-9a-f]{12}-r\d{1,6}-a\d{1,6}"
    r"(?:/(?:trial\.json|outcome\.json|rank-\d{1,6}\.jsonl|log\.txt|stack-rank-\d{1,6}\.txt|recorder-rank-\d{1,6}\.json"
    r"|trace-rank-\d{1,6}-block-\d{1,6}\.json\.gz))?",
    re.ASCII,
)
"""Files of a results folder, and folders of runs; that of a packed run may be empty."""
_MOST_LOG_BYTES = 8 << 20
"""Bytes of a redacted log that are kept, from its beginning."""
_MOST_FILES = 1_000_000
_MOST_UNPACKED_BYTES = 8 << 30
_MOST_UNPACKED_PER_BYTE = 300
"""Most unpacked bytes for a byte of the archive: compressed records have a tenth to a thirtieth of their size."""
_ALWAYS_ALLOWED_BYTES = 64 << 20
"""Unpacked bytes that an archive of any size may have."""
_LARGEST_READ_BYTES = 1 << 20
_ADVICE = "Make a new one: vitscale export RESULTS -o bundle.tar.gz"


def write_bundle(
    results: Path,
    path: Path,
    *,
    redact: bool,
    answer: Mapping[str, Any] | None = None,
    unread: Sequence[Unread] = (),
) -> Mapping[str, str]:
    """Write a results folder as a bundle; a run still going on is in it as far as it has come.

    Args:
        results: the folder.
        path: the file, which is replaced; its folder is made where missing.
        redact: whether names, paths, addresses and variables get stand-ins (`Redactor`).
        answer: an answer about the results, as JSON: answer.json.
        unread: what cannot be read of the results. Packs among it are left out, for nobody could read or redact them;
            the manifest names them, and who reads the bundle learns of them.

    Returns:
        Name of each file -> its SHA-256.

    Raises:
        StoreError: it cannot be read or written.
    """
    left_out = {item.file: item.reason for item in unread if item.is_pack}
    files = {}
    for file in _bundled_files(results):
        name = str(file.relative_to(results))
        if name not in left_out:
            files[name] = file
    is_private = not redact and _is_private(results / "study.json")
    try:
        with (
            whole_file(path, make_folder=True, private=is_private) as raw,
            # No name and no time in it: the same results give the same bytes.
            gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as packed,
            tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
        ):
            digests: dict[str, str] = {}
            for member in _read_members(results, files, answer, redact=redact):
                digests[member.name] = hashlib.sha256(member.content).hexdigest()
                _add_member(archive, member)
            _add_run_folders(archive, results / "runs")
            manifest = {"vitscale": "export", "version": 1, "redacted": redact, "sha256": digests}
            if left_out:
                manifest["left_out"] = left_out
            _add_member(archive, _Member("manifest.json", json.dumps(manifest, indent=1).encode()))
    except OSError as error:
        message = f"{shown(str(error.filename or path))} cannot be bundled: {error.strerror or error}"
        raise StoreError(message, next_step="Give another file with -o") from None
    return digests


def _is_private(study: Path) -> bool:
    """Whether only the owner of a study may read it (`store.private_values`)."""
    return study.is_file() and study.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH) == 0


class _Member(NamedTuple):
    """A file of a bundle."""

    name: str
    """Below the top folder: "runs/0123456789ab-r0-a0/trial.json"."""
    content: bytes


def _bundled_files(results: Path) -> Iterator[Path]:
    """Yield the files of a results folder that a bundle takes, links left out, in an order that is always the same."""
    for pattern in ("study.json", "packs/*", "checks/*", "runs/*/*"):
        for file in sorted(results.glob(pattern)):
            is_regular = file.is_file() and not file.is_symlink() and not file.parent.is_symlink()
            if is_regular and _MEMBER_NAME.fullmatch(str(file.relative_to(results))):
                yield file


def _read_members(
    results: Path, files: Mapping[str, Path], answer: Mapping[str, Any] | None, *, redact: bool
) -> Iterator[_Member]:
    """Yield the files of a bundle, without its manifest.

    Args:
        results: the results folder.
        files: name in the bundle -> file in the folder.
        answer: an answer about the results; None: none.
        redact: whether names, paths, addresses and variables get stand-ins.
    """
    if redact:
        yield from _redact_members(results, files, answer)
        return
    if answer is not None:
        yield _Member("answer.json", json.dumps(answer, indent=1).encode())
    for name, file in files.items():
        with open_regular(file) as opened:
            yield _Member(name, opened.read())


def _redact_members(results: Path, files: Mapping[str, Path], answer: Mapping[str, Any] | None) -> Iterator[_Member]:
    """Yield the files of a bundle with stand-ins, as `_read_members` does."""
    redactor = Redactor()
    _learn_private_values(redactor, files, results)
    if answer is not None:
        redactor.learn_from(json.dumps(answer))
        yield _Member("answer.json", json.dumps(redactor.value(answer), indent=1).encode())
    redact_by_suffix = {".json": redactor.json_text, ".jsonl": redactor.lines, ".txt": redactor.text}
    for name, file in files.items():
        if file.suffix == ".parquet":
            pack = rewritten(file, redactor.json_text)
            yield _Member(f"packs/{pack.name}", pack.content)
        elif file.suffix != ".gz":  # a profiler's own trace may hold anything
            redact_text = redact_by_suffix[file.suffix]
            yield _Member(name, redact_text(_text_to_redact(file)).encode())


def _learn_private_values(redactor: Redactor, files: Mapping[str, Path], results: Path) -> None:
    """Have the redactor learn what is to be taken out, from all files of a bundle and from launch files.

    Launch files are no part of a bundle. They have the variables that ranks were started with, those of a site file's
    [launch.environment] among them.
    """
    with suppress(StoreError):  # one that cannot be read is text like any other
        study = read_study(results)
        if study is not None:
            redactor.learn_study(study)
    for pattern in ("runs/*/launch.json", "jobs/*.json"):
        for file in results.glob(pattern):
            redactor.learn_variables(_variables_in(file))
    for file in files.values():
        if file.suffix == ".parquet":
            rewritten(file, redactor.learn_from)
        elif file.suffix != ".gz":
            redactor.learn_from(_text_to_redact(file))


def _variables_in(file: Path) -> Mapping[str, str]:
    """Return the variables of ranks in a run's launch file or a job's file; none where it cannot be read."""
    try:
        with open_regular(file, follow_links=False) as opened:
            content = json.load(opened)
    except (OSError, ValueError, RecursionError):
        return {}
    launch = content.get("launch", content) if isinstance(content, dict) else None
    variables = launch.get("environment") if isinstance(launch, dict) else None
    if not isinstance(variables, dict):
        return {}
    return {name: value for name, value in variables.items() if isinstance(value, str)}


def _text_to_redact(file: Path) -> str:
    """Return the text of a file; of a log longer than `_MOST_LOG_BYTES` only the whole lines that fit into these.

    Of a line that is cut, half a secret at its end would not be recognised.
    """
    with open_regular(file) as opened:
        if file.suffix != ".txt":
            return opened.read().decode("utf-8", errors="replace")
        content = opened.read(_MOST_LOG_BYTES + 1)
    if len(content) > _MOST_LOG_BYTES:
        end_of_last_line = content.rfind(b"\n", 0, _MOST_LOG_BYTES) + 1
        content = content[:end_of_last_line]
    return content.decode("utf-8", errors="replace")


def _add_member(archive: tarfile.TarFile, member: _Member) -> None:
    entry = tarfile.TarInfo(f"{_TOP_FOLDER}/{member.name}")
    entry.size = len(member.content)
    archive.addfile(entry, io.BytesIO(member.content))


def _add_run_folders(archive: tarfile.TarFile, runs: Path) -> None:
    """Add the folders of all runs: a packed run's folder has no files, and shows that nobody deleted the run."""
    if not runs.is_dir():
        return
    for run in sorted(runs.iterdir()):
        if RUN_FOLDER.fullmatch(run.name) and not run.is_symlink():
            entry = tarfile.TarInfo(f"{_TOP_FOLDER}/runs/{run.name}")
            entry.type = tarfile.DIRTYPE
            entry.mode = 0o755
            archive.addfile(entry)


class _BundleState(NamedTuple):
    """A bundle as it was when it was unpacked; a file that is replaced has another one."""

    path: str
    modified_ns: int
    size_bytes: int


_UNPACKED: dict[_BundleState, TemporaryDirectory[str]] = {}
"""Bundle -> the folder that holds its files until this process ends."""


def is_bundle(path: Path) -> bool:
    """Whether a file begins as bundles do."""
    try:
        with _BoundedArchive(path) as packed, tarfile.open(fileobj=packed, mode="r:") as archive:
            first = archive.next()
    except (OSError, EOFError, ValueError, zlib.error, tarfile.TarError):
        return False
    return first is not None and first.name.startswith(f"{_TOP_FOLDER}/")


def unpacked(bundle: Path) -> Path:
    """Return the folder with a bundle's checked files; it is unpacked once, and removed when this process ends.

    Raises:
        StoreError: it is no bundle, is damaged, or has anything in it that no bundle has.
    """
    try:
        status = bundle.stat()
        state = _BundleState(str(bundle.absolute()), status.st_mtime_ns, status.st_size)
        if state not in _UNPACKED:
            folder = TemporaryDirectory(prefix="vitscale-bundle-")
            _unpack(bundle, Path(folder.name))
            _UNPACKED[state] = folder
        return Path(_UNPACKED[state].name)
    except (OSError, EOFError, ValueError, OverflowError, RecursionError, zlib.error, tarfile.TarError) as error:
        reason = first_reason(error)
        raise StoreError(f"{shown(str(bundle))} is no bundle that can be read: {reason}", next_step=_ADVICE) from None


class _BoundedArchive(gzip.GzipFile):
    """Unzips an archive that may be a stranger's, within limits.

    A single read is small, for `tarfile` reads as much as a header says. All reads together are no more than an honest
    archive of this size could hold: a few bytes may unzip to terabytes.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, "rb")
        plausible_bytes = max(_ALWAYS_ALLOWED_BYTES, _MOST_UNPACKED_PER_BYTE * path.stat().st_size)
        self._limit_bytes = min(_MOST_UNPACKED_BYTES, plausible_bytes)

    @override
    def read(self, size: int | None = -1) -> bytes:
        if size is None or not 0 <= size <= _LARGEST_READ_BYTES:
            raise ValueError("a header is larger than any bundle's")
        if self.tell() > self._limit_bytes:
            raise ValueError(f"it unpacks to more than {self._limit_bytes >> 20} MiB")
        return super().read(size)


def _unpack(path: Path, folder: Path) -> None:
    """Unpack a bundle into an empty folder, and check all of it against its manifest.

    A bundle may be a stranger's: every member must be a file that vitscale itself writes, with the content that the
    manifest names, and tables are decoded in a process of their own before anything here reads them.

    Raises:
        ValueError, EOFError, OSError: it is no whole bundle, and why.
    """
    digests: dict[str, str] = {}
    with _BoundedArchive(path) as unzipped, tarfile.open(fileobj=unzipped, mode="r:") as archive:
        for entry in _headers(archive):
            name = _name_in_bundle(entry)
            target = folder / name
            if entry.isdir():
                target.mkdir(parents=True, exist_ok=True)
            else:
                target.parent.mkdir(parents=True, exist_ok=True)
                digests[name] = _write_member(unzipped, entry, target)
    _check_manifest(folder, digests)
    pack = undecodable_pack(folder)
    if pack is not None:
        raise ValueError(f"packs/{pack} in it cannot be decoded")


def _headers(archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Yield the headers of an archive one by one, in constant memory.

    `tarfile` remembers every header that it has read, and has no public way to forget them.
    """
    read_headers: list[tarfile.TarInfo] = vars(archive)["members"]
    for count in itertools.count():
        read_headers.clear()
        entry = archive.next()
        if entry is None:
            return
        if count >= _MOST_FILES:
            raise ValueError(f"it has more than {_MOST_FILES:,} files")
        yield entry


def _name_in_bundle(entry: tarfile.TarInfo) -> str:
    """Return the path of a member below the bundle's top folder: "runs/0123456789ab-r0-a0/log.txt".

    Raises:
        ValueError: it lies elsewhere, has a name that no results folder has, or is a link, a device or a sparse file.
    """
    top, _, name = entry.name.partition("/")
    is_file = entry.type in (tarfile.REGTYPE, tarfile.AREGTYPE) and not entry.issparse()
    is_known_name = top == _TOP_FOLDER and _MEMBER_NAME.fullmatch(name) is not None
    if not is_known_name or not (is_file or entry.isdir()):
        raise ValueError(f"{shown(entry.name)} in it is no file of a bundle")
    return name


def _write_member(unzipped: _BoundedArchive, entry: tarfile.TarInfo, target: Path) -> str:
    """Copy a member's content, which follows its header, into a new file piece by piece; return its SHA-256."""
    digest = hashlib.sha256()
    remaining = entry.size
    with target.open("xb") as file:
        while remaining > 0:
            content = unzipped.read(min(remaining, _LARGEST_READ_BYTES))
            if not content:
                raise EOFError(f"it ends inside {entry.name.removeprefix(f'{_TOP_FOLDER}/')}")
            file.write(content)
            digest.update(content)
            remaining -= len(content)
    return digest.hexdigest()


def _check_manifest(folder: Path, digests: dict[str, str]) -> None:
    """Compare the unpacked files with those that the manifest lists.

    Args:
        folder: the unpacked bundle.
        digests: name of each unpacked file, the manifest's included -> its SHA-256.

    Raises:
        ValueError: the manifest is missing, or a file is missing, is not in it, or has another content.
    """
    manifest = json.loads((folder / "manifest.json").read_bytes()) if "manifest.json" in digests else None
    listed_digests = manifest.get("sha256") if isinstance(manifest, dict) else None
    if not isinstance(listed_digests, dict):
        raise ValueError("its manifest is missing")
    unpacked_digests = {name: digest for name, digest in digests.items() if name != "manifest.json"}
    for name in sorted({*listed_digests, *unpacked_digests}):
        if unpacked_digests.get(name) != listed_digests.get(name):
            raise ValueError(f"{shown(name)} in it is not what its manifest says")
