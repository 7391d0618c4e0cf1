"""A new file that cannot be written is refused before the work whose result it would hold."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from vitscale.api.new_files import refuse_unwritable, write_new
from vitscale.errors import RequestError


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("there", "is there already. Name another file with --save-expect."),
        ("missing/new", r"cannot be written: there is no folder '.*missing'. Make it first, or name another file with"),
        ("there/new", "cannot be written: Not a directory. Name a file with --save-expect in a folder that you may"),
        ("n" * 300, "cannot be written: File name too long. Name a file with --save-expect"),
        ("new\0", "cannot be written: .*null"),
    ],
)
def test_what_cannot_be_a_new_file(name: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "there").touch()
    with pytest.raises(RequestError, match=words):
        refuse_unwritable(tmp_path / name, "--save-expect")
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_a_folder_that_may_not_be_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root, who often runs these tests, may write everywhere: so the kernel's answer is made up."""

    def refuse(path: Path, *arguments: object, **options: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(RequestError, match="cannot be written: Permission denied"):
        refuse_unwritable(tmp_path / "new", "--save-expect")


def test_a_file_that_can_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    refuse_unwritable(tmp_path / "new", "--save-expect")
    assert not (tmp_path / "new").exists()
    write_new(tmp_path / "new", "text", "--save-expect")
    assert (tmp_path / "new").read_text() == "text"
