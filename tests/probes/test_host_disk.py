"""The disk's probe writes what it says, leaves nothing, and sees what another rank shows."""

from __future__ import annotations

import threading
from pathlib import Path

from vitscale.probes import host


def test_records_are_timed_and_nothing_is_left(tmp_path: Path) -> None:
    size, seconds = host.time_records(tmp_path, 3)
    assert size == 300
    assert len(seconds) == 20
    assert all(one > 0 for one in seconds)
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_seen_when_it_is_there_with_its_content(tmp_path: Path) -> None:
    host.write_sign(tmp_path, "before")
    assert host.seconds_until_sign(tmp_path, "after", 0.05) is None
    begun = threading.Event()

    def show() -> None:
        begun.wait()
        host.write_sign(tmp_path, "after")

    thread = threading.Thread(target=show)
    thread.start()
    begun.set()
    seen = host.seconds_until_sign(tmp_path, "after", 60.0)
    thread.join()
    assert seen is not None


def test_room_is_that_of_the_disk(tmp_path: Path) -> None:
    assert host.free_bytes(tmp_path) > 0
