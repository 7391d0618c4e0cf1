"""Writes `src/vitscale/deepspeed_lint/deepspeed_keys.json`: what each release of DeepSpeed does with each key.

    python tools/make_deepspeed_keys.py [FOLDER]

The source archives come from the package index by `pip download` (FOLDER keeps them; by default they are thrown away).
Nothing of them is imported here; pip itself asks each for its metadata. A release that is added goes to `RELEASES`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath
from typing import Any

from deepspeed_reads import Reading
from deepspeed_source import Release

RELEASES = (
    *("0.9.5", "0.10.3", "0.11.2", "0.12.6", "0.13.5", "0.14.5", "0.15.4", "0.16.9", "0.17.6", "0.18.9"),
    *("0.19.0", "0.19.1", "0.19.2", "0.19.3", "0.19.4", "0.19.5", "0.19.6", "0.19.7", "0.19.8"),
)
"""The last of each minor version, and all of the one that is supported now."""

TABLE = Path(__file__).parent.parent / "src/vitscale/deepspeed_lint/deepspeed_keys.json"


def archive_of(version: str, folder: Path) -> Path:
    """The source archive of a release, downloaded unless it lies in `folder` already."""
    archive = folder / f"deepspeed-{version}.tar.gz"
    if not archive.exists():
        pip = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--no-binary",
            ":all:",
            "--dest",
            folder,
        ]
        subprocess.run([*pip, f"deepspeed=={version}"], check=True, env=os.environ | {"DS_BUILD_OPS": "0"})
    return archive


def facts_of(archive: Path) -> dict[str, dict[str, str]]:
    """By table and dotted key what one release does with it."""
    release = Release(archive)
    reading = Reading(release)

    def listed(table: str, module: str) -> Iterable[str]:
        found = release.module(PurePosixPath(module))
        return (release.named(table, found) if found is not None else None) or ()

    clipping = release.named("GRADIENT_CLIPPING_DEFAULT", reading.config)
    return {
        "keys": {".".join(path): fact for path, fact in reading.facts.items()},
        "defaults": {"gradient_clipping": str(float(clipping))},
        "optimizers": dict.fromkeys(listed("DEEPSPEED_OPTIMIZERS", "deepspeed/runtime/config"), "known"),
        "schedulers": dict.fromkeys(listed("VALID_LR_SCHEDULES", "deepspeed/runtime/lr_schedules"), "known"),
    }


def spans(having: Callable[[str], bool]) -> str:
    """The releases for which `having` holds: "0.9.5..0.16.9", and "0.19.3.." where the newest is among them."""
    found: list[list[str]] = []
    before = False
    for version in RELEASES:
        if having(version):
            if not before:
                found.append([version, version])
            found[-1][1] = version
        before = having(version)
    return ", ".join(f"{a}..{'' if b == RELEASES[-1] else b}" for a, b in found)


def table_of(releases: dict[str, dict[str, dict[str, str]]]) -> dict[str, Any]:
    """By key and fact the releases in which it holds."""
    table: dict[str, Any] = {"releases": list(releases)}
    for part in ("defaults", "optimizers", "schedulers", "keys"):
        names = sorted({name for facts in releases.values() for name in facts[part]})
        table[part] = {name: _history(name, {v: facts[part] for v, facts in releases.items()}) for name in names}
    return table


def _history(name: str, by_release: dict[str, dict[str, str]]) -> dict[str, str]:
    kinds = dict.fromkeys(facts[name] for facts in by_release.values() if name in facts)
    return {kind: spans(lambda version, kind=kind: by_release[version].get(name) == kind) for kind in kinds}


def written(table: dict[str, Any]) -> str:
    """One line for each key, so that a new release shows as the lines that it changed."""
    parts = []
    for part, content in table.items():
        if isinstance(content, list):
            parts.append(f" {json.dumps(part)}: {json.dumps(content)}")
        else:
            lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(history)}" for name, history in content.items())
            parts.append(f" {json.dumps(part)}: {{\n{lines}\n }}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main(folder: Path) -> None:
    """Reads every release and writes the table."""
    TABLE.write_text(written(table_of({version: facts_of(archive_of(version, folder)) for version in RELEASES})))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(Path(temporary))
