"""The running vitscale as something to install elsewhere: its wheel, and the command that installs it with an extra.

No package index is asked for vitscale by its name: it is not published there, so whoever registers the name would run
code wherever such a command is copied to. What is installed is always the folder or the wheel at hand.

A wheel is a zip archive with the package's files and a folder `NAME-VERSION.dist-info` with METADATA, WHEEL,
entry_points.txt and RECORD (https://packaging.python.org/en/latest/specifications/binary-distribution-format/).
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import shlex
import tomllib
import zipfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from vitscale import __version__
from vitscale.errors import RequestError, shown

_NAME = "vitscale"
_PACKAGE = Path(__file__).resolve().parents[1]
_INFO = f"{_NAME}-{__version__}.dist-info"
WHEEL_NAME = f"{_NAME}-{__version__}-py3-none-any.whl"

_OF_AN_INSTALLATION = ("RECORD", "WHEEL", "INSTALLER", "REQUESTED", "direct_url.json")
"""Files of a dist-info folder that say how it was installed, and are no part of what is."""
_WHEEL = "Wheel-Version: 1.0\nGenerator: vitscale\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def install_command(extra: str) -> str:
    """The command that installs this vitscale with one of its extras, from where it came from.

    Example: "pip install -e '/home/me/vitscale[train]'" in a clone, "pip install '/path/to/vitscale[train]'" where the
    folder or wheel that it was installed from is not known.
    """
    checkout = source_tree()
    if checkout is not None:
        return f"pip install -e {shlex.quote(f'{checkout}[{extra}]')}"
    origin = _installed_from() or "/path/to/vitscale"
    return f"pip install {shlex.quote(f'{origin}[{extra}]')}"


def source_tree() -> Path | None:
    """The folder of the clone or sdist that the running package lies in; None for an installed copy."""
    folder = _PACKAGE.parents[1]
    if _PACKAGE.parent.name != "src" or not (folder / "pyproject.toml").is_file():
        return None
    return folder if _project(folder).get("name") == _NAME else None


def write_wheel(folder: Path) -> Path:
    """Writes the wheel of the running package into a folder, unless the same one lies there; its path.

    Two wheels of the same files are the same to the last bit.

    Raises:
        RequestError: the package says nothing of what it needs, another wheel of this name lies there, or the folder
            cannot be written to.
    """
    path = folder / WHEEL_NAME
    content = _wheel()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with path.open("xb") as file:
            file.write(content)
    except FileExistsError:
        if not path.is_file() or path.read_bytes() != content:
            what = f"{shown(str(path))} is there already, and is of another vitscale"
            raise RequestError(what, next_step="Remove it, or write into another folder") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RequestError(f"{shown(str(path))} cannot be written: {reason}") from None
    return path


def _wheel() -> bytes:
    """The wheel's bytes: the package's files as they are, what installers need to know, and the digest of each."""
    files = {f"{_NAME}/{name}": content for name, content in _package_files().items()}
    files |= {f"{_INFO}/{name}": content for name, content in (_described() | {"WHEEL": _WHEEL.encode()}).items()}
    lines = [f"{name},sha256={_digest(content)},{len(content)}\n" for name, content in files.items()]
    files[f"{_INFO}/RECORD"] = "".join([*lines, f"{_INFO}/RECORD,,\n"]).encode()
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, content in files.items():
            entry = zipfile.ZipInfo(name)  # of 1980, whenever it is written
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = 0o644 << 16
            wheel.writestr(entry, content)
    return archive.getvalue()


def _package_files() -> dict[str, bytes]:
    """Name inside the package -> content, of all files but compiled ones and hidden ones, by name."""
    paths = [path for path in _PACKAGE.rglob("*") if path.is_file()]
    names = {path.relative_to(_PACKAGE): path for path in paths}
    own = [name for name in names if not any(part == "__pycache__" or part.startswith(".") for part in name.parts)]
    return {name.as_posix(): names[name].read_bytes() for name in sorted(own)}


def _described() -> dict[str, bytes]:
    """Name inside the dist-info folder -> content: METADATA, entry points and the licence.

    Raises:
        RequestError: the package lies in no clone, and has no such folder beside it.
    """
    checkout = source_tree()
    if checkout is not None:
        project = _project(checkout)
        described = {"METADATA": _metadata(project), "entry_points.txt": _entry_points(project)}
        license_file = checkout / "LICENSE"
        return described | ({"licenses/LICENSE": license_file.read_bytes()} if license_file.is_file() else {})
    installed = _distribution()
    if installed is None:
        what = "this vitscale does not know what it needs: it was neither installed nor runs in a clone"
        raise RequestError(what, next_step="Install it from a clone or a wheel, then ask again")
    names = {str(file): file for file in installed.files or () if f"{_INFO}/" in f"{file}"}
    described = {}
    for name, file in sorted(names.items()):
        inside = name.partition(f"{_INFO}/")[2]
        if inside not in _OF_AN_INSTALLATION:
            described[inside] = Path(str(installed.locate_file(file))).read_bytes()
    return described


def _project(checkout: Path) -> dict[str, Any]:
    """The table [project] of a clone's pyproject.toml; empty where it cannot be read."""
    try:
        project = tomllib.loads((checkout / "pyproject.toml").read_text(encoding="utf-8")).get("project")
    except (OSError, ValueError):
        return {}
    return project if isinstance(project, dict) else {}


def _metadata(project: Mapping[str, Any]) -> bytes:
    """METADATA of a clone, from its [project]: what is needed, by each extra too."""
    lines = ["Metadata-Version: 2.4", f"Name: {_NAME}", f"Version: {__version__}"]
    lines += [
        f"Summary: {project['description']}",
        f"License-Expression: {project['license']}",
    ]
    lines += ["License-File: LICENSE", f"Requires-Python: {project['requires-python']}"]
    lines += [f"Requires-Dist: {requirement}" for requirement in project["dependencies"]]
    for extra, requirements in project["optional-dependencies"].items():
        lines.append(f"Provides-Extra: {extra}")
        lines += [f"Requires-Dist: {_of_an_extra(requirement, extra)}" for requirement in requirements]
    return ("\n".join(lines) + "\n").encode()


def _of_an_extra(requirement: str, extra: str) -> str:
    package, _, marker = requirement.partition(";")
    condition = f'extra == "{extra}"'
    return f"{package.strip()}; " + (f"({marker.strip()}) and {condition}" if marker.strip() else condition)


def _entry_points(project: Mapping[str, Any]) -> bytes:
    return ("[console_scripts]\n" + "".join(f"{name} = {of}\n" for name, of in project["scripts"].items())).encode()


def _distribution() -> metadata.Distribution | None:
    """The installed distribution that the running package is of."""
    for found in metadata.distributions(name=_NAME, path=[str(_PACKAGE.parent)]):
        return found
    return None


def _installed_from() -> str | None:
    """The folder or wheel that an installed copy came from, where the installer noted it (PEP 610) and it still lies
    there."""
    installed = _distribution()
    text = None if installed is None else installed.read_text("direct_url.json")
    if text is None:
        return None
    try:
        url = urlsplit(json.loads(text)["url"])
    except (KeyError, TypeError, ValueError):
        return None
    path = unquote(url.path)
    return path if url.scheme == "file" and Path(path).exists() else None


def _digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
