"""The revision that a rank records: true, and found without running anything that the repository names."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from vitscale.worker.git_revision import git_revision


def git(folder: Path, *arguments: str) -> str:
    own = {
        "GIT_AUTHOR_NAME": "a",
        "GIT_AUTHOR_EMAIL": "a@b.c",
        "GIT_COMMITTER_NAME": "a",
        "GIT_COMMITTER_EMAIL": "a@b.c",
    }
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | own).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "--quiet")
    (folder / "train.py").write_text("print(1)\n")
    (folder / ".gitattributes").write_text("*.py filter=evil\n")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "-m", "one")
    return folder


def test_the_revision_tells_whether_tracked_files_differ(repository: Path) -> None:
    revision = git(repository, "rev-parse", "HEAD")
    assert git_revision(repository) == revision
    (repository / "untracked.py").write_text("")
    assert git_revision(repository) == revision
    (repository / "train.py").write_text("print(2)\n")
    assert git_revision(repository) == f"{revision}+changes"


def test_a_folder_without_a_repository_has_none(tmp_path: Path) -> None:
    assert git_revision(tmp_path) is None


@pytest.mark.parametrize(
    "setting", ["core.fsmonitor", "core.hooksPath", "filter.evil.clean", "filter.evil.process", "filter.e=v.clean"]
)
def test_no_program_of_the_repository_is_run(repository: Path, tmp_path: Path, setting: str) -> None:
    """Each of these is run by a plain `git status` here, which the test makes sure of first."""
    ran = tmp_path / "ran"
    program = tmp_path / "programs" / "post-index-change"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ntouch {ran}\ncat\n")
    program.chmod(0o755)
    git(repository, "config", setting, str(program.parent if setting == "core.hooksPath" else program))
    (repository / ".gitattributes").write_text(f"*.py filter={'e=v' if 'e=v' in setting else 'evil'}\n")
    # Of another time than the index knows: git looks at its content, and would then write the index.
    os.utime(repository / "train.py", (1, 1))
    expected = None if "e=v" in setting else git(repository, "rev-parse", "HEAD")
    told = git_revision(repository)
    assert not ran.exists()
    assert told == expected or told == f"{expected}+changes"
    if "process" not in setting:  # which does not answer as git asks
        subprocess.run(["git", "-C", str(repository), "status"], check=False, capture_output=True)
        assert ran.exists()
