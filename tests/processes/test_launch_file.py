from __future__ import annotations

import os
from pathlib import Path

import pytest
from pydantic import ValidationError

from vitscale.processes import launch_file
from vitscale.processes.launch_file import LaunchFile
from vitscale.store import write_whole

WRITTEN = LaunchFile(
    token="0123",  # noqa: S106 - of no run
    commands=(("ssh", "--", "node1", "cd '/a b' && exec python"), ("python", "-m", "x")),
    hosts=("node1", "node2"),
    master_address="node1",
    master_port=20_001,
    lifeline="10.0.0.1:4567",
    environment={"COLOUR": 'it\'s "blue"; $(exit)\nand more'},
    driver_pid=77,
    host_id="boot pid:[1]",
    started_ns=2**62,
)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    write_whole(tmp_path / launch_file.NAME, WRITTEN.model_dump_json(indent=1))
    assert launch_file.read(tmp_path) == WRITTEN


def test_a_rank_started_by_hand_has_none(tmp_path: Path) -> None:
    assert launch_file.read(tmp_path) is None


@pytest.mark.parametrize("text", ["", "[]", "{}", "\xff", WRITTEN.model_dump_json()[:-9], '{"token": 1}'])
def test_what_is_not_such_a_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / launch_file.NAME).write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError):  # noqa: PT011 - ValidationError, UnicodeDecodeError
        launch_file.read(tmp_path)


def test_an_unknown_key_is_refused() -> None:
    """Of another version, whose meaning is not known here."""
    with pytest.raises(ValidationError):
        LaunchFile.model_validate(WRITTEN.model_dump() | {"shell": "true"})


def test_the_environment_is_this_one_with_the_run_s_put_over_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLOUR", "red")
    monkeypatch.setenv("SIZE", "large")
    monkeypatch.setenv(launch_file.TOKEN_VARIABLE, "of the run around")
    completed = launch_file.completed_environment(WRITTEN)
    assert completed["COLOUR"] == WRITTEN.environment["COLOUR"]
    assert (completed["SIZE"], completed[launch_file.TOKEN_VARIABLE]) == ("large", "0123")
    assert os.environ["COLOUR"] == "red"


@pytest.mark.parametrize(
    ("own", "study_variables", "expected"),
    [
        ("", (), "/opt/efa:/opt/nccl"),
        ("/.singularity.d/libs", (), "/.singularity.d/libs:/opt/efa:/opt/nccl"),
        ("/opt/nccl:/usr/x:", (), "/opt/nccl:/usr/x:/opt/efa"),
        ("/usr/x", ("LD_LIBRARY_PATH",), "/opt/efa:/opt/nccl"),
    ],
)
def test_a_host_s_own_folders_of_libraries_come_before_the_driver_s(
    own: str, study_variables: tuple[str, ...], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container has its libraries where another host has other ones; what the study sets stands alone."""
    changes = {"environment": {"LD_LIBRARY_PATH": "/opt/efa:/opt/nccl"}, "study_variables": study_variables}
    launch = WRITTEN.model_copy(update=changes)
    monkeypatch.setenv("LD_LIBRARY_PATH", own)
    once = launch_file.completed_environment(launch)["LD_LIBRARY_PATH"]
    assert once == expected
    monkeypatch.setenv("LD_LIBRARY_PATH", once)  # an agent's rank begins again
    assert launch_file.completed_environment(launch)["LD_LIBRARY_PATH"] == expected


def test_the_host_is_this_boot_and_this_view_of_its_processes() -> None:
    boot, _, view = launch_file.host_id().partition(" ")
    assert boot == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert view == str(Path("/proc/self/ns/pid").readlink())
