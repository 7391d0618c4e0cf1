"""The running vitscale as something to install elsewhere: its wheel, and the command that installs it with an extra.

Neither asks a package index for vitscale by its name: it is not published there, so whoever registers the name would
run code wherever such a command is copied to. A command names the folder or the wheel that is here.

A wheel is a zip archive with the package's files and a folder `NAME-VERSION.dist-info` with METADATA, WHEEL,
entry_points.txt and RECORD (https://packaging.python.org/en/latest/specifications/binary-distribution-format/).
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import shlex
import tomllib
import zipfile
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from vitscale import __version__
from vitscale.base.files import whole_file
from vitscale.errors import RequestError, shown

_NAME = "vitscale"
_PACKAGE = Path(__file__).resolve().parents[1]
_INFO_FOLDER = f"{_NAME}-{__version__}.dist-info"
WHEEL_NAME = f"{_NAME}-{__version__}-py3-none-any.whl"

_FILES_OF_INSTALLER = ("RECORD", "WHEEL", "INSTALLER", "REQUESTED", "direct_url.json")
"""Files of a dist-info folder that the installer wrote about this one installation, or that a new wheel has anew."""
_WHEEL_FILE = "Wheel-Version: 1.0\nGenerator: vitscale\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def install_command(extra: str) -> str:
    """Return the command that installs this vitscale with one of its extras, from the folder or wheel it came from.

    Example: "pip install -e '/home/me/vitscale[train]'" in a clone, "pip install '/path/to/vitscale[train]'" where it
    is unknown what it was installed from.
    """
    checkout = source_tree()
    if checkout is not None:
        return f"pip install -e {shlex.quote(f'{checkout}[{extra}]')}"
    origin = _installed_from() or "/path/to/vitscale"
    return f"pip install {shlex.quote(f'{origin}[{extra}]')}"


def source_tree() -> Path | None:
    """Return the folder of the clone or sdist that the running package lies in; None for an installed copy."""
    folder = _PACKAGE.parents[1]
    if _PACKAGE.parent.name != "src" or not (folder / "pyproject.toml").is_file():
        return None
    return folder if _project_table(folder).get("name") == _NAME else None


def write_wheel(folder: Path) -> Path:
    """Write the wheel of the running package into a folder, unless the same one lies there, and return its path.

    Two wheels of the same files are the same to the last bit.

    Raises:
        RequestError: the package's requirements are unknown, another wheel of this name lies there, or the folder
            cannot be written to.
    """
    path = folder / WHEEL_NAME
    content = _wheel_content()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(path):
            _refuse_other_content(path, content)
        else:
            with whole_file(path, follow_links=False) as file:
                file.write(content)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RequestError(f"{shown(str(path))} cannot be written: {reason}") from None
    return path


def _refuse_other_content(path: Path, content: bytes) -> None:
    """Refuse whatever already has the wheel's name, unless it is a file with this content.

    Raises:
        RequestError: it is something else.
        OSError: it cannot be read.
    """
    if not path.is_file() or path.read_bytes() != content:
        message = f"{shown(str(path))} is there already, and is of another vitscale"
        raise RequestError(message, next_step="Remove it, or write into another folder")


def _wheel_content() -> bytes:
    """Return the wheel's bytes: the package's files, its dist-info folder, and RECORD with the digest of each file."""
    files = {f"{_NAME}/{name}": content for name, content in _package_files().items()}
    info_files = {**_info_files(), "WHEEL": _WHEEL_FILE.encode()}
    files |= {f"{_INFO_FOLDER}/{name}": content for name, content in info_files.items()}
    files[f"{_INFO_FOLDER}/RECORD"] = _record_content(files)
    return _zip_archive(files)


def _record_content(files: Mapping[str, bytes]) -> bytes:
    """Return the RECORD of a wheel with these files: path, digest and size of each; of RECORD itself the path alone."""
    lines = [f"{name},sha256={_record_digest(content)},{len(content)}\n" for name, content in files.items()]
    return "".join([*lines, f"{_INFO_FOLDER}/RECORD,,\n"]).encode()


def _zip_archive(files: Mapping[str, bytes]) -> bytes:
    """Return a zip archive that depends on names and contents alone: all files have one date and the mode rw-r--r--."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, content in files.items():
            entry = zipfile.ZipInfo(name)  # dated 1980-01-01, whenever it is written
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = 0o644 << 16
            wheel.writestr(entry, content)
    return archive.getvalue()


def _package_files() -> dict[str, bytes]:
    """Return path inside the package -> content, in order of the paths, for all files but compiled and hidden ones."""
    inside_paths = [path.relative_to(_PACKAGE) for path in _PACKAGE.rglob("*") if path.is_file()]
    packed = sorted(inside for inside in inside_paths if not any(map(_is_left_out, inside.parts)))
    return {inside.as_posix(): (_PACKAGE / inside).read_bytes() for inside in packed}


def _is_left_out(path_part: str) -> bool:
    """Whether a wheel has no file whose path has this part: compiled modules and hidden files."""
    return path_part == "__pycache__" or path_part.startswith(".")


def _info_files() -> dict[str, bytes]:
    """Return path inside the dist-info folder -> content: METADATA, entry points and the licence.

    Raises:
        RequestError: the package neither lies in a clone nor is installed.
    """
    checkout = source_tree()
    if checkout is not None:
        return _info_files_of_clone(checkout)
    installed = _installed_distribution()
    if installed is None:
        message = "this vitscale does not know what it needs: it was neither installed nor runs in a clone"
        raise RequestError(message, next_step="Install it from a clone or a wheel, then ask again")
    return _info_files_of_installation(installed)


def _info_files_of_clone(checkout: Path) -> dict[str, bytes]:
    """Return what `_info_files` does, made from a clone's pyproject.toml."""
    project = _project_table(checkout)
    files = {"METADATA": _metadata_content(project), "entry_points.txt": _entry_points(project)}
    license_file = checkout / "LICENSE"
    if license_file.is_file():
        files["licenses/LICENSE"] = license_file.read_bytes()
    return files


def _info_files_of_installation(installed: metadata.Distribution) -> dict[str, bytes]:
    """Return what `_info_files` does, copied from an installation without the files that its installer wrote."""
    files = {}
    for path in sorted(installed.files or (), key=str):
        _, info_folder, name = str(path).partition(f"{_INFO_FOLDER}/")
        is_in_info_folder = info_folder != ""
        if is_in_info_folder and name not in _FILES_OF_INSTALLER:
            files[name] = Path(str(installed.locate_file(path))).read_bytes()
    return files


def _project_table(checkout: Path) -> dict[str, Any]:
    """Return the table [project] of a clone's pyproject.toml; empty where it cannot be read."""
    try:
        project = tomllib.loads((checkout / "pyproject.toml").read_text(encoding="utf-8")).get("project")
    except (OSError, ValueError):
        return {}
    return project if isinstance(project, dict) else {}


def _metadata_content(project: Mapping[str, Any]) -> bytes:
    """Return the METADATA of a clone, from its [project], with the requirements of each extra.

    https://packaging.python.org/en/latest/specifications/core-metadata/
    """
    lines = [
        "Metadata-Version: 2.4",
        f"Name: {_NAME}",
        f"Version: {__version__}",
        f"Summary: {project['description']}",
        f"License-Expression: {project['license']}",
        "License-File: LICENSE",
        f"Requires-Python: {project['requires-python']}",
    ]
    lines += [f"Requires-Dist: {requirement}" for requirement in project["dependencies"]]
    for extra, requirements in project["optional-dependencies"].items():
        lines.append(f"Provides-Extra: {extra}")
        lines += [f"Requires-Dist: {_requirement_of_extra(requirement, extra)}" for requirement in requirements]
    return ("\n".join(lines) + "\n").encode()


def _requirement_of_extra(requirement: str, extra: str) -> str:
    """Return a requirement with the condition that an extra is asked for.

    Example: "a>=1; os_name == 'nt'" becomes "a>=1; (os_name == 'nt') and extra == "train"".
    """
    package, _, marker = requirement.partition(";")
    condition = f'extra == "{extra}"'
    if marker.strip():
        condition = f"({marker.strip()}) and {condition}"
    return f"{package.strip()}; {condition}"


def _entry_points(project: Mapping[str, Any]) -> bytes:
    """Return the text of entry_points.txt, from which installers make commands."""
    lines = [f"{command} = {function}\n" for command, function in project["scripts"].items()]
    return "".join(["[console_scripts]\n", *lines]).encode()


def _installed_distribution() -> metadata.Distribution | None:
    """Return the installed distribution that the running package belongs to; None where it was not installed."""
    distributions = metadata.distributions(name=_NAME, path=[str(_PACKAGE.parent)])
    return next(iter(distributions), None)


def _installed_from() -> str | None:
    """Return the path of the folder or wheel that this package was installed from.

    pip records it as a URL in direct_url.json (PEP 610): {"url": "file:///home/me/vitscale", ...}. Return None where
    there is no such record, where its URL is not that of a file, and where the file or folder no longer exists.
    """
    installed = _installed_distribution()
    if installed is None:
        return None
    record = installed.read_text("direct_url.json")
    if record is None:
        return None
    try:
        url = urlsplit(json.loads(record)["url"])
    except (KeyError, TypeError, ValueError):
        return None
    if url.scheme != "file":
        return None
    path = unquote(url.path)
    return path if Path(path).exists() else None


def _record_digest(content: bytes) -> str:
    """Return the SHA-256 in the form of RECORD: URL-safe base64 without its padding."""
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


def versions_of(distributions: Iterable[str]) -> dict[str, str | None]:
    """Return name of a distribution -> its version, None where it is not installed. Nothing is imported."""
    versions: dict[str, str | None] = {}
    for name in distributions:
        try:
            versions[name] = _version(name)
        except metadata.PackageNotFoundError:  # not cached, because it may be installed later
            versions[name] = None
    return versions


_version = cache(metadata.version)
