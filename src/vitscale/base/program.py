"""Which vitscale this is: its version number, and digests of its files, which differ where programs of one number do.

`digest`            of all files of the package: names the program that wrote a record
`measuring_digest`  of the files that decide what a run measures: runs are comparable only where it is the same

The files are those that every installation has, wheel or editable: `SUFFIXES` inside the package's folder. A
digest is worked out once in a process: of all files in 15 to 25 ms, of the measuring ones in 4 to 10 ms.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import vitscale

PACKAGE = Path(__file__).parents[1]
SUFFIXES = frozenset({".py", ".typed", ".json", ".css", ".js"})
"""Suffixes of the files that an installation has. Others are an editor's, a debugger's or the interpreter's own."""
MEASURING = (
    "worker",
    "engines",
    "models",
    "datasets",
    "probes",
    "trial",
    "machine",
    "processes",
    "sources",
    "launchers",
    "schedulers",
    "base/resident_memory.py",
    "profiles/flight_recorder.py",
    "profiles/kernels.py",
    "profiles/step_trace.py",
    "profiles/timeline.py",
    "profiles/trace_json.py",
    "runner/one_run.py",
    "store/writing.py",
)
"""Folders and files, inside the package, that decide what a run measures: what runs inside a rank, and what starts
ranks and gives them their cores and variables. Reports, predictions, importers and the reading of records do not."""
MEASURING_NAME = "vitscale's measuring code"
"""Name under which records have `measuring_digest` beside the versions of libraries."""
_DIGEST_DIGITS = 12
"""Hexadecimal digits of a digest."""


def identity() -> str:
    """Return the version with the digest of all files: "0.1.0+3fa9c1d2e4b5".

    Return the version alone where the files cannot be read.
    """
    package_digest = digest()
    if package_digest is None:
        return vitscale.__version__
    return f"{vitscale.__version__}+{package_digest}"


@cache
def digest() -> str | None:
    """Return the digest of all files of this installation, as they are at the first call; None: one is unreadable."""
    return installation_digest(PACKAGE, ("",))


@cache
def measuring_digest() -> str | None:
    """Return the digest of the files in `MEASURING`, as they are at the first call; None: one is unreadable."""
    return installation_digest(PACKAGE, MEASURING)


def installation_digest(package: Path, parts: Iterable[str]) -> str | None:
    """Return the digest of names and contents of a package's files; None where it has none, or one is unreadable.

    Args:
        package: folder of the package.
        parts: folders and files inside it; "" is all of it.
    """
    hasher = hashlib.sha256()
    try:
        files: set[Path] = set()
        for part in parts:
            files.update(_installed_files(package / part))
        for file in sorted(files):
            content = file.read_bytes()
            hasher.update(f"{file.relative_to(package).as_posix()}\0{len(content)}\0".encode())
            hasher.update(content)
    except OSError:
        return None
    return hasher.hexdigest()[:_DIGEST_DIGITS] if files else None


def _installed_files(part: Path) -> list[Path]:
    """Return the file `part`, or the files below the folder `part`: those that every installation has."""
    paths = [part] if part.is_file() else part.rglob("*")
    return [path for path in paths if _is_installed(path)]


def _is_installed(path: Path) -> bool:
    return path.suffix in SUFFIXES and "__pycache__" not in path.parts
