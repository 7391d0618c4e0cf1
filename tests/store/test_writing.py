from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from results_factory import make_run, make_trial, one_curve
from vitscale.errors import StoreError
from vitscale.store import is_stream, locked, new_run_folder, read_study, write_outcome, write_study, write_whole
from vitscale.store.results import Outcome, RunHeader


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def header(gpus: int = 1, attempt: int = 0) -> RunHeader:
    return make_run(make_trial(gpus=gpus), []).header.model_copy(update={"attempt": attempt})


OUTCOME = Outcome(kind="failed", reason="because", started_unix_seconds=1.0, wall_seconds=2.0)


# --- whole files ---------------------------------------------------------------------------------------------------


def test_a_file_is_written_and_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    write_whole(path, "first")
    write_whole(path, "second é")
    assert path.read_text(encoding="utf-8") == "second é"
    assert names(tmp_path) == ["file.json"]


def fails(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def interrupted(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("how", [fails, interrupted])
@pytest.mark.parametrize("where", ["fsync", "replace"])
def test_what_was_there_stays_when_writing_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, how: Any
) -> None:
    path = tmp_path / "file.json"
    write_whole(path, "before")
    with monkeypatch.context() as broken:
        target: object = os if where == "fsync" else Path
        broken.setattr(target, where, how)
        with pytest.raises((OSError, KeyboardInterrupt)):
            write_whole(path, "after")
    assert path.read_text() == "before"
    assert names(tmp_path) == ["file.json"]


def test_a_file_is_written_where_its_folder_cannot_be_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a folder of mode 0300, or on some mounts."""
    sync = os.fsync

    def of_files_alone(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", of_files_alone)
    write_whole(tmp_path / "file.json", "content")
    assert (tmp_path / "file.json").read_text() == "content"
    assert names(tmp_path) == ["file.json"]


def test_what_a_link_leads_to_is_replaced_and_the_link_stays(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    real, link, ahead = tmp_path / "real" / "real.md", tmp_path / "link.md", tmp_path / "ahead.md"
    real.write_text("old")
    link.symlink_to("real/real.md")
    ahead.symlink_to("real/new.md")
    write_whole(link, "new")
    write_whole(ahead, "also")
    assert (real.read_text(), (tmp_path / "real/new.md").read_text()) == ("new", "also")
    assert link.is_symlink()
    assert ahead.is_symlink()
    assert names(tmp_path / "real") == ["new.md", "real.md"]


def test_a_pipe_is_written_to_and_stays(tmp_path: Path) -> None:
    """So does a device, which a rename by root would remove."""
    pipe, link = tmp_path / "pipe.md", tmp_path / "link.md"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    for path in (pipe, link):
        write_whole(path, "told")
        assert os.read(reading, 100) == b"told"
    os.close(reading)
    assert pipe.is_fifo()
    assert is_stream(link)
    assert names(tmp_path) == ["link.md", "pipe.md"]


def test_a_name_of_an_open_file_is_that_file(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file:
        file.write(b"before, ")
        file.flush()
        path = Path(f"/proc/self/fd/{file.fileno()}")
        write_whole(path, "after")
        assert is_stream(path)
        assert os.fstat(file.fileno()).st_nlink == 1
    assert (tmp_path / "file").read_text() == "before, after"


def test_a_link_to_a_name_of_an_open_file_is_that_file_too(tmp_path: Path) -> None:
    """As one to /dev/stdout in a log: the file behind it must keep what others wrote."""
    link, further, standard, endless = (tmp_path / name for name in ("link", "further", "standard", "endless"))
    with (tmp_path / "file").open("wb") as file:
        file.write(b"before, ")
        file.flush()
        link.symlink_to(f"/proc/self/fd/{file.fileno()}")
        further.symlink_to("link")
        write_whole(further, "after")
        assert is_stream(link)
    assert (tmp_path / "file").read_text() == "before, after"
    standard.symlink_to("/dev/stdout")
    assert is_stream(standard)
    endless.symlink_to("endless")
    assert not is_stream(tmp_path / "file")
    with contextlib.suppress(OSError, RuntimeError):  # Path.exists of some versions
        assert not is_stream(endless)


def test_an_error_names_the_file_and_no_draft(tmp_path: Path) -> None:
    (tmp_path / "folder.md").mkdir()
    for path in (tmp_path / "folder.md", tmp_path / "none" / "file.md"):
        with pytest.raises(OSError, match=r"folder|file") as caught:
            write_whole(path, "x")
        assert caught.value.filename == str(path)
    assert names(tmp_path) == ["folder.md"]


def test_text_that_cannot_be_encoded_leaves_no_draft(tmp_path: Path) -> None:
    with pytest.raises(UnicodeEncodeError):
        write_whole(tmp_path / "file.json", "\udcff")
    assert names(tmp_path) == []


def test_content_is_on_disk_before_its_name_and_its_name_before_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash after the rename must not find an empty file, and one after the return no file at all."""
    done: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def told_fsync(file: int) -> None:
        done.append(str(Path(f"/proc/self/fd/{file}").readlink()))
        fsync(file)

    def told_replace(draft: Path, target: Path) -> Path:
        done.append("replace")
        return replace(draft, target)

    monkeypatch.setattr(os, "fsync", told_fsync)
    monkeypatch.setattr(Path, "replace", told_replace)
    write_whole(tmp_path / "file.json", "x")
    assert len(done) == 3
    assert ".draft" in done[0]
    assert done[1:] == ["replace", str(tmp_path)]


def changed_at(path: Path) -> int:
    return path.stat().st_mtime_ns if path.exists() else 0


def test_killed_at_any_moment_the_file_is_the_old_or_the_new(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    program = (
        "import sys, itertools; from pathlib import Path; from vitscale.store import write_whole\n"
        "for n in itertools.count():\n  write_whole(Path(sys.argv[1]), str(n % 10) * 200_000)"
    )
    for _ in range(5):
        writer = subprocess.Popen([sys.executable, "-c", program, str(path)])
        seen = changed_at(path)
        while changed_at(path) == seen:
            assert writer.poll() is None
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        text = path.read_text()
        assert len(text) == 200_000
        assert len(set(text)) == 1


def test_a_study_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    study = one_curve({1: [0.1], 2: [0.1]}).study
    write_study(tmp_path, study)
    assert read_study(tmp_path) == study


# --- run folders ---------------------------------------------------------------------------------------------------


def test_a_run_folder_keeps_room_for_the_last_words(tmp_path: Path) -> None:
    folder = new_run_folder(tmp_path, header(gpus=2))
    assert folder.parent == tmp_path / "runs"
    assert folder.name == f"{make_trial(gpus=2).identity()}-r0-a0"
    kept = {path.name: path.stat().st_blocks * 512 for path in folder.glob(".*reserve")}
    assert kept == {".reserve": 256 * 1024, ".rank-0.reserve": 64 * 1024, ".rank-1.reserve": 64 * 1024}
    assert RunHeader.model_validate_json((folder / "trial.json").read_text()) == header(gpus=2)


def test_an_attempt_has_a_folder_of_its_own(tmp_path: Path) -> None:
    first = new_run_folder(tmp_path, header())
    with pytest.raises(FileExistsError):
        new_run_folder(tmp_path, header())
    assert new_run_folder(tmp_path, header(attempt=1)) != first


def test_an_outcome_gives_the_room_back(tmp_path: Path) -> None:
    folder = new_run_folder(tmp_path, header(gpus=2))
    write_outcome(folder, OUTCOME)
    assert names(folder) == ["outcome.json", "trial.json"]
    assert Outcome.model_validate_json((folder / "outcome.json").read_text()) == OUTCOME


def fill(disk: Path) -> None:
    """Until not a byte more fits."""
    with contextlib.suppress(OSError), (disk / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)
    assert shutil.disk_usage(disk).free == 0


def test_on_a_full_disk_the_outcome_is_still_told(small_disk: Path) -> None:
    folder = new_run_folder(small_disk, header())
    fill(small_disk)
    with pytest.raises(OSError, match="No space left"):
        write_whole(small_disk / "other.json", "x" * 5000)
    long = OUTCOME.model_copy(update={"detail": "x" * 100_000})
    write_outcome(folder, long)
    assert Outcome.model_validate_json((folder / "outcome.json").read_text()) == long


def test_without_room_for_the_last_words_a_run_does_not_begin(small_disk: Path) -> None:
    fill(small_disk)
    with pytest.raises(OSError, match="No space left"):
        new_run_folder(small_disk, header())


# --- the lock ------------------------------------------------------------------------------------------------------

HOLDER = """
import sys, time
from pathlib import Path
from vitscale.store import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def hold(results: Path) -> subprocess.Popen[str]:
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(results)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    return holder


def test_a_second_process_is_refused_and_told_who_holds_the_lock(tmp_path: Path) -> None:
    holder = hold(tmp_path)
    try:
        with pytest.raises(StoreError) as caught, locked(tmp_path):
            pytest.fail("two processes hold one lock")
        assert f"another `vitscale run` (process {holder.pid}) is writing to '{tmp_path}'" in str(caught.value)
        assert "Wait for it, stop it with Ctrl-C" in str(caught.value)
    finally:
        holder.kill()
        holder.wait()
        assert holder.stdout is not None
        holder.stdout.close()


def test_the_lock_is_free_again_when_its_holder_is_killed(tmp_path: Path) -> None:
    with hold(tmp_path) as holder:
        holder.send_signal(signal.SIGKILL)
    with locked(tmp_path):
        assert (tmp_path / "lock").read_text() == str(os.getpid())


def test_the_lock_is_free_again_after_use(tmp_path: Path) -> None:
    for _ in range(2):
        with locked(tmp_path):
            pass


def test_a_program_that_the_holder_starts_does_not_keep_the_lock(tmp_path: Path) -> None:
    program = "import time; print('runs', flush=True); time.sleep(600)"
    with locked(tmp_path):
        child = subprocess.Popen([sys.executable, "-c", program], close_fds=False, stdout=subprocess.PIPE)
    with child:
        assert child.stdout is not None
        child.stdout.readline()
        try:
            with locked(tmp_path):
                pass
        finally:
            child.kill()


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"not a number", b"1" * 100_000, b""])
def test_what_a_lock_file_says_is_not_trusted(tmp_path: Path, content: bytes) -> None:
    holder = hold(tmp_path)
    (tmp_path / "lock").write_bytes(content)
    with pytest.raises(StoreError, match="another `vitscale run`") as caught, locked(tmp_path):
        pass
    assert len(str(caught.value)) < 500
    with holder:
        holder.kill()
    with locked(tmp_path):
        pass
