"""The cache builds once, shares, survives kills and damage, and is never needed."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from vitscale.errors import RequestError
from vitscale.sources.cache import DecodedDataset, Room, cached, find, in_memory

SHAPE = (4, 4, 3)


def build(room: Room) -> tuple[str, ...]:
    for split, samples in (("train", 30), ("held_out", 10)):
        images, labels = room(split, samples, SHAPE)
        images[:] = np.arange(samples, dtype=np.uint8)[:, None, None, None]
        labels[:] = np.arange(samples) % 2
    return ("cat", "dög")


def is_right(decoded: DecodedDataset | None) -> bool:
    assert decoded is not None
    taken = decoded.train.take(np.array([29, 3]))
    return taken[:, 0, 0, 0].tolist() == [29, 3] and decoded.classes == ("cat", "dög") and len(decoded.held_out) == 10


def left_behind(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if not path.name.endswith(".lock"))


def start(program: str, root: Path) -> subprocess.Popen[str]:
    """A process that runs `program` with `root`, `build` and `cached`, and says a line when it is ready."""
    start = f"""
        import os, sys
        from pathlib import Path
        import numpy as np
        from vitscale.sources.cache import cached
        root = Path({str(root)!r})
        def fill(room):
            for split, samples in (("train", 30), ("held_out", 10)):
                images, labels = room(split, samples, {SHAPE})
                images[:] = np.arange(samples, dtype=np.uint8)[:, None, None, None]
                labels[:] = np.arange(samples) % 2
            return ("cat", "d\\u00f6g")
        print("ready", flush=True)
    """
    source = textwrap.dedent(start) + textwrap.dedent(program)
    return subprocess.Popen(
        [sys.executable, "-c", source], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_it_is_built_once_and_then_mapped(tmp_path: Path) -> None:
    assert is_right(cached(tmp_path, "x", build))
    again = cached(tmp_path, "x", lambda _: pytest.fail("built again"))
    assert is_right(again)
    assert again is not None
    assert isinstance(again.train.images.base, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        again.train.images[0] = 1
    again.train.take(np.array([0]))[0] = 1  # the caller's own
    assert left_behind(tmp_path) == ["x"]


def test_ids_outside_are_refused(tmp_path: Path) -> None:
    for bad in (-1, 30):
        with pytest.raises(IndexError, match="split of 30"):
            in_memory(build).train.take(np.array([bad]))


def test_of_many_processes_one_builds_and_all_read(tmp_path: Path) -> None:
    program = """
        def build(room):
            os.close(os.open(root / "inside", os.O_CREAT | os.O_EXCL))  # fails where two build at once
            with open(root / "log", "a") as log:
                log.write("built\\n")
            classes = fill(room)
            os.unlink(root / "inside")
            return classes
        sys.stdin.readline()
        print(int(cached(root / "cache", "x", build).train.images[:, 0, 0, 0].sum()), flush=True)
    """
    processes = [start(program, tmp_path) for _ in range(6)]
    assert [line_of(process) for process in processes] == ["ready"] * 6
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
    assert [process.communicate()[0].strip() for process in processes] == [str(sum(range(30)))] * 6
    assert (tmp_path / "log").read_text() == "built\n"
    assert left_behind(tmp_path / "cache") == ["x"]


def test_a_builder_that_is_killed_leaves_room_for_the_next(tmp_path: Path) -> None:
    program = """
        def build(room):
            images, labels = room("train", 30, (4, 4, 3))
            print("building", flush=True)
            sys.stdin.readline()
        cached(root, "x", build)
    """
    process = start(program, tmp_path)
    assert [line_of(process), line_of(process)] == ["ready", "building"]
    waiting = start("cached(root, 'x', fill)\nprint('done')", tmp_path)  # waits for the lock, or comes too late for it
    assert find(tmp_path, "x") is None
    assert len(left_behind(tmp_path)) == 1
    process.kill()
    process.communicate()
    assert waiting.communicate()[0].split() == ["ready", "done"]
    assert waiting.returncode == 0
    assert is_right(find(tmp_path, "x"))
    assert left_behind(tmp_path) == ["x"]


def test_what_build_raises_is_passed_on_and_leaves_nothing(tmp_path: Path) -> None:
    def fail(room: Room) -> tuple[str, ...]:
        room("train", 30, SHAPE)
        raise RequestError("broken image")

    with pytest.raises(RequestError, match="broken image"):
        cached(tmp_path, "x", fail)
    assert left_behind(tmp_path) == []
    assert is_right(cached(tmp_path, "x", build))


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    assert cached(tmp_path / "file", "x", build) is None
    assert cached(tmp_path / "file" / "below", "x", build) is None
    assert is_right(in_memory(build))


def test_blocks_are_reserved_before_anything_is_written(tmp_path: Path) -> None:
    """Written through a map of a sparse file, a full disk would be a SIGBUS."""

    def build_large(room: Room) -> tuple[str, ...]:
        for split in ("train", "held_out"):
            room(split, 10_000, SHAPE)
        for file in tmp_path.glob("*.partial/*.npy"):
            assert file.stat().st_blocks * 512 >= file.stat().st_size > 10_000
        return ()

    assert cached(tmp_path, "x", build_large) is not None


def test_no_room_on_the_disk_is_done_without(tmp_path: Path) -> None:
    """A limit on file sizes stands for a full disk."""
    program = """
        import resource, signal
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        print(cached(root, "x", fill), flush=True)
    """
    output, _ = (process := start(program, tmp_path)).communicate()
    assert (process.returncode, output.split()) == (0, ["ready", "None"])
    assert left_behind(tmp_path) == []


@pytest.mark.parametrize(
    "damage", ["truncated", "empty", "text", "other type", "pickle", "no labels", "few labels", "facts", "names"]
)
def test_a_damaged_entry_is_built_again(tmp_path: Path, damage: str) -> None:
    cached(tmp_path, "x", build)
    images, labels, facts = (tmp_path / "x" / name for name in ("train_images.npy", "train_labels.npy", "facts.json"))
    match damage:
        case "truncated":
            images.write_bytes(images.read_bytes()[:-1])
        case "empty":
            images.write_bytes(b"")
        case "text":
            images.write_text("hello")
        case "other type":
            np.save(images, np.zeros((30, *SHAPE), np.float32))
        case "pickle":
            np.save(labels, np.array([{}], dtype=object))
        case "no labels":
            labels.unlink()
        case "few labels":
            np.save(labels, np.zeros(29, np.int64))
        case "facts":
            facts.write_text("{")
        case "names":
            facts.write_text('{"classes": [1, 2]}')
    assert find(tmp_path, "x") is None
    assert is_right(cached(tmp_path, "x", build))
    assert left_behind(tmp_path) == ["x"]


def test_a_cache_that_can_only_be_read_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached(tmp_path, "x", build)
    (tmp_path / "x.lock").unlink()
    monkeypatch.setattr(Path, "mkdir", lambda *_, **__: pytest.fail("tried to write"))
    assert is_right(cached(tmp_path, "x", build))
    assert not (tmp_path / "x.lock").exists()
