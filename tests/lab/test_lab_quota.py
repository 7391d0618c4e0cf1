"""Both versions of the kernel's interface for CPU quotas; which one this machine has, other tests use for real."""

from __future__ import annotations

from pathlib import Path

import pytest

from vitscale.lab.quota import Controller, find_controller

FIRST = "cgroup {root}/cpu,cpuacct cgroup rw,relatime,cpu,cpuacct 0 0\n"
SECOND = "cgroup2 {root}/unified cgroup2 rw,nosuid 0 0\n"


def mounts(folder: Path, *lines: str, controllers: str = "cpuset cpu io memory") -> Path:
    (folder / "unified").mkdir()
    (folder / "unified" / "cgroup.controllers").write_text(controllers + "\n")
    listed = folder / "mounts"
    listed.write_text("proc /proc proc rw 0 0\n" + "".join(line.format(root=folder) for line in lines))
    return listed


@pytest.mark.parametrize(
    ("lines", "controllers", "version", "root"),
    [
        ((SECOND,), "cpuset cpu io memory", 2, "unified"),
        ((FIRST, SECOND), "", 1, "cpu,cpuacct"),
        ((SECOND, FIRST), "hugetlb", 1, "cpu,cpuacct"),
    ],
)
def test_the_controller_is_found(
    tmp_path: Path, lines: tuple[str, ...], controllers: str, version: int, root: str
) -> None:
    found = find_controller(mounts(tmp_path, *lines, controllers=controllers))
    assert found == Controller(version, tmp_path / root)


@pytest.mark.parametrize(("lines", "controllers"), [((), "cpu"), ((SECOND,), "cpuset hugetlb"), ((SECOND,), "")])
def test_a_machine_without_one_is_told(tmp_path: Path, lines: tuple[str, ...], controllers: str) -> None:
    assert find_controller(mounts(tmp_path, *lines, controllers=controllers)) is None


@pytest.fixture
def second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that behaves as a cgroup of version 2: every folder in it is born with its files."""
    plain = Path.mkdir

    def mkdir(path: Path, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        plain(path, mode, parents, exist_ok)
        (path / "cgroup.subtree_control").write_text("\n")

    (tmp_path / "cgroup.subtree_control").write_text("memory pids\n")
    monkeypatch.setattr(Path, "mkdir", mkdir)
    return tmp_path


def test_version_2_to_the_letter(second: Path) -> None:
    controller = Controller(2, second)
    controller.create("lab", ("host0", "host1"))
    controller.limit("lab", "host0", 0.4)
    assert (second / "cgroup.subtree_control").read_text() == "+cpu"
    assert (second / "lab" / "cgroup.subtree_control").read_text() == "+cpu"
    assert (second / "lab" / "host0" / "cpu.max").read_text() == "8000 20000"
    assert controller.members("lab", "host1") == second / "lab" / "host1" / "cgroup.procs"
    assert controller.cores("lab", "host0") == 0.4
    (second / "lab" / "host1" / "cpu.max").write_text("max 100000\n")
    assert controller.cores("lab", "host1") is None


def test_what_is_enabled_already_is_left_alone(second: Path) -> None:
    (second / "cgroup.subtree_control").write_text("cpu memory\n")
    Controller(2, second).create("lab", ("host0",))
    assert (second / "cgroup.subtree_control").read_text() == "cpu memory\n"


def test_version_1_to_the_letter(tmp_path: Path) -> None:
    controller = Controller(1, tmp_path)
    controller.create("lab", ("host0",))
    assert sorted(path.name for path in (tmp_path / "lab").iterdir()) == ["cpu.shares", "host0"]
    assert (tmp_path / "lab" / "cpu.shares").read_text() == "262144"  # before everything else on the machine
    controller.limit("lab", "host0", 1.5)
    assert (tmp_path / "lab" / "host0" / "cpu.cfs_period_us").read_text() == "20000"
    assert (tmp_path / "lab" / "host0" / "cpu.cfs_quota_us").read_text() == "30000"
    assert controller.cores("lab", "host0") == 1.5
    (tmp_path / "lab" / "host0" / "cpu.cfs_quota_us").write_text("-1\n")
    assert controller.cores("lab", "host0") is None


def test_removing_what_is_not_there_is_no_error(tmp_path: Path) -> None:
    controller = Controller(1, tmp_path)
    controller.remove("lab")
    controller.create("lab", ("host0",))
    (tmp_path / "lab" / "cpu.shares").unlink()  # the kernel's own files go with their cgroup
    controller.remove("lab")
    assert list(tmp_path.iterdir()) == []
