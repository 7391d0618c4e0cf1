"""Programs of a batch system that replay answers, and write down how they were called: nobody here has the system."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

# A word may hold spaces and line breaks, so that other separators stand between words and between calls.
_PROGRAM = """\
#!/bin/sh
folder={folder}
name="$(basename "$0")"
{{ printf '%s' "$name"; for word in "$@"; do printf '\\037%s' "$word"; done; printf '\\036'; }} >> "$folder/calls"
[ "$name" != bsub ] || cat > "$folder/read"
[ "$1" != --parent ] || shift
for answer in "$name-$1-$2" "$name-$1" "$name"; do
  [ -e "$folder/$answer.code" ] && break
done
cat "$folder/$answer.err" >&2
cat "$folder/$answer.out"
exit "$(cat "$folder/$answer.code")"
"""


class BatchPrograms:
    """Programs on PATH, and what they answer."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
        self.folder = folder / "programs"
        self.folder.mkdir()
        for name in names:
            program = self.folder / name
            program.write_text(_PROGRAM.format(folder=self.folder))
            program.chmod(program.stat().st_mode | stat.S_IXUSR)
            self.answers(name)
        monkeypatch.setenv("PATH", str(self.folder), prepend=os.pathsep)

    def answers(self, program: str, out: str = "", err: str = "", code: int = 0) -> None:
        """Let a program answer so from now on; "flux-jobs" is `flux jobs`, "qselect--N" is `qselect -N`."""
        for suffix, text in (("out", out), ("err", err), ("code", str(code))):
            (self.folder / f"{program}.{suffix}").write_text(text)

    def calls(self) -> list[list[str]]:
        """Return all calls so far: argvs."""
        path = self.folder / "calls"
        calls = path.read_text().split("\x1e") if path.exists() else []
        return [call.split("\x1f") for call in calls if call]

    def read(self) -> str:
        """Return what the last bsub read."""
        return (self.folder / "read").read_text()
