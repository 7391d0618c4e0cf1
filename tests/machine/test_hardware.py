from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from vitscale.machine import hardware
from vitscale.machine.cores import cpu_facts
from vitscale.machine.hardware import (
    Gpu,
    Machine,
    cpu_quota_cores,
    cpu_throttled_seconds,
    this_machine,
)
from vitscale.trial.trial import DeviceName


def put(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")


def quota(folder: Path, membership: str) -> float | None:
    (folder / "membership").write_text(membership)
    return cpu_quota_cores(folder / "membership", folder / "cgroup")


# --- CPU quota, version 2 ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "cores"),
    [
        ("150000 100000", 1.5),
        ("max 100000", None),
        ("400000 200000", 2.0),
        ("100000 0", None),
        ("junk", None),
        ("", None),
    ],
)
def test_v2_quota(tmp_path: Path, content: str, cores: float | None) -> None:
    put(tmp_path / "cgroup/job", cpu__max=content)
    assert quota(tmp_path, "0::/job\n") == cores


def test_v2_the_tightest_ancestor_binds(tmp_path: Path) -> None:
    put(tmp_path / "cgroup/slice", cpu__max="200000 100000")
    put(tmp_path / "cgroup/slice/job", cpu__max="max 100000")
    put(tmp_path / "cgroup/slice/job/step", cpu__max="300000 100000")
    assert quota(tmp_path, "0::/slice/job/step\n") == 2.0
    put(tmp_path / "cgroup/slice/job/step", cpu__max="50000 100000")
    assert quota(tmp_path, "0::/slice/job/step\n") == 0.5


def test_v2_in_a_container_whose_path_lies_outside_its_view(tmp_path: Path) -> None:
    """The namespace shows the container's own group as the root of the mount."""
    put(tmp_path / "cgroup", cpu__max="250000 100000")
    assert quota(tmp_path, "0::/docker/4f2a\n") == 2.5
    assert quota(tmp_path, "0::/../4f2a\n") == 2.5


def test_v2_mounted_beside_v1(tmp_path: Path) -> None:
    put(tmp_path / "cgroup/unified/job", cpu__max="100000 100000")
    assert quota(tmp_path, "3:memory:/\n0::/job\n") == 1.0


# --- version 1 -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("controllers", ["cpu", "cpu,cpuacct"])
def test_v1_quota(tmp_path: Path, controllers: str) -> None:
    put(tmp_path / "cgroup" / controllers / "job", cpu__cfs_quota_us="350000", cpu__cfs_period_us="100000")
    assert quota(tmp_path, f"9:name=systemd:/job\n4:{controllers}:/job\n2:memory:/other\n") == 3.5


def test_v1_the_tightest_ancestor_binds_and_minus_one_is_no_limit(tmp_path: Path) -> None:
    put(tmp_path / "cgroup/cpu", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    put(tmp_path / "cgroup/cpu/a", cpu__cfs_quota_us="150000", cpu__cfs_period_us="100000")
    put(tmp_path / "cgroup/cpu/a/b", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    assert quota(tmp_path, "1:cpu:/a/b\n") == 1.5
    assert quota(tmp_path, "1:cpu:/\n") is None


def test_v1_a_period_of_zero_is_no_limit(tmp_path: Path) -> None:
    put(tmp_path / "cgroup/cpu/a", cpu__cfs_quota_us="1000", cpu__cfs_period_us="0")
    assert quota(tmp_path, "1:cpu:/a\n") is None


@pytest.mark.parametrize("membership", ["", "junk\n", "1:memory:/job\n", "0::\n", "5:cpuset:/job\n"])
def test_without_a_cpu_controller_there_is_no_limit(tmp_path: Path, membership: str) -> None:
    put(tmp_path / "cgroup/cpu", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    assert quota(tmp_path, membership) is None


def test_without_cgroups_there_is_no_limit(tmp_path: Path) -> None:
    assert cpu_quota_cores(tmp_path / "none", tmp_path) is None


@pytest.fixture
def limited_group() -> Iterator[Path]:
    """A real group of the CPU controller, version 1, that grants one and a half cores."""
    controller = Path("/sys/fs/cgroup/cpu")
    group = controller / f"vitscale-test-{secrets.token_hex(4)}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no group can be made below {controller}: {error.strerror}")
    try:
        (group / "cpu.cfs_quota_us").write_text("150000")
    except OSError as error:
        group.rmdir()
        pytest.skip(f"the quota of {group} cannot be set: {error.strerror}")
    yield group
    group.rmdir()


def test_a_real_quota_of_the_kernel_is_found(limited_group: Path) -> None:
    program = "from vitscale.machine.hardware import this_machine as of; m = of(); print(m.cpu_quota_cores, m.cores)"
    # The shell joins the group, then becomes the program.
    join = f'echo $$ > {limited_group}/cgroup.procs && exec "$@"'
    answer = subprocess.run(
        ["/bin/sh", "-c", join, "sh", sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert answer.stdout.split() == ["1.5", "1"]


def test_a_quota_cuts_the_cores_down_and_never_to_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(hardware, "visible_gpus", tuple)
    for granted, cores in ((None, 8), (2.5, 2), (0.25, 1), (64.0, 8)):
        monkeypatch.setattr(hardware, "cpu_quota_cores", lambda granted=granted: granted)
        assert this_machine().cores == cores


# --- throttling ----------------------------------------------------------------------------------------------------


def throttled(folder: Path, membership: str) -> float | None:
    (folder / "membership").write_text(membership)
    return cpu_throttled_seconds(folder / "membership", folder / "cgroup")


def test_v2_throttled_time_is_in_microseconds(tmp_path: Path) -> None:
    stat = "usage_usec 900\nnr_periods 10\nnr_throttled 4\nthrottled_usec 2500000"
    put(tmp_path / "cgroup/job", cpu__max="150000 100000", cpu__stat=stat)
    assert throttled(tmp_path, "0::/job\n") == 2.5


def test_v1_throttled_time_is_in_nanoseconds(tmp_path: Path) -> None:
    stat = "nr_periods 10\nnr_throttled 4\nthrottled_time 2500000000"
    put(tmp_path / "cgroup/cpu/job", cpu__cfs_quota_us="150000", cpu__cfs_period_us="100000", cpu__stat=stat)
    assert throttled(tmp_path, "4:cpu:/job\n") == 2.5


def test_throttled_time_is_that_of_the_group_whose_quota_binds(tmp_path: Path) -> None:
    put(tmp_path / "cgroup/slice", cpu__max="100000 100000", cpu__stat="throttled_usec 3000000")
    put(tmp_path / "cgroup/slice/job", cpu__max="300000 100000", cpu__stat="throttled_usec 0")
    assert throttled(tmp_path, "0::/slice/job\n") == 3.0


def test_without_a_quota_throttled_time_is_unknown_and_not_zero(tmp_path: Path) -> None:
    put(tmp_path / "cgroup/job", cpu__max="max 100000", cpu__stat="throttled_usec 0")
    assert throttled(tmp_path, "0::/job\n") is None
    assert throttled(tmp_path, "junk\n") is None


@pytest.mark.parametrize("stat", ["", "junk", "throttled_usec", "throttled_usec many", "nr_throttled 3"])
def test_a_kernel_that_does_not_tell_of_throttling(tmp_path: Path, stat: str) -> None:
    put(tmp_path / "cgroup/job", cpu__max="100000 100000")
    assert throttled(tmp_path, "0::/job\n") is None
    put(tmp_path / "cgroup/job", cpu__stat=stat)
    assert throttled(tmp_path, "0::/job\n") is None


def test_real_throttling_by_the_kernel_is_seen(limited_group: Path) -> None:
    """A process that computes without a pause under a twentieth of a core is held back nearly all of the time, in the
    one of five seconds in which it waits least for a core that others use. On one core, for the kernel adds up over
    cores: moved to a second one it leaves the first held back as well."""
    (limited_group / "cpu.cfs_quota_us").write_text("5000")
    program = """
import os, pathlib, sys, time
from vitscale.machine.hardware import cpu_throttled_seconds
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
pathlib.Path(sys.argv[1]).write_text("0")
for _ in range(5):
    began, before, used = time.perf_counter(), cpu_throttled_seconds(), time.process_time()
    while time.perf_counter() - began < 1:
        pass
    seconds = time.perf_counter() - began
    held_back = (cpu_throttled_seconds() - before) / seconds
    print(held_back, (time.process_time() - used) / seconds)
    if held_back > 0.5:
        break
"""
    answer = subprocess.run(
        [sys.executable, "-c", program, limited_group / "cgroup.procs"], capture_output=True, text=True, check=True
    )
    tries = [tuple(map(float, line.split())) for line in answer.stdout.splitlines()]
    assert max(throttled_share for throttled_share, _ in tries) > 0.5
    assert all(throttled_share < 1.02 - computing for throttled_share, computing in tries)


# --- cores and GPUs of a machine -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cpuinfo", "fast"),
    [
        ("flags\t\t: fpu avx512f avx512_bf16 amx_tile\n", True),
        ("processor : 0\nflags : fpu amx_bf16\n", True),
        ("flags : fpu avx2 avx512f\n", False),
        ("Features : fp asimd\n", False),
        ("", False),
    ],
)
def test_bf16_is_fast_where_the_processor_has_instructions_for_it(tmp_path: Path, cpuinfo: str, fast: bool) -> None:
    (tmp_path / "cpuinfo").write_text(cpuinfo)
    flags = cpu_facts(tmp_path / "cpuinfo").get("flags", "").split()
    assert bool({*flags} & {"amx_bf16", "avx512_bf16"}) is fast


def gpu(node: int | None, capability: tuple[int, int] | None = (9, 0)) -> Gpu:
    return Gpu(f"GPU-{node}", "NVIDIA H100 80GB HBM3", None, None, capability, node)


def test_bf16_is_fast_from_compute_capability_8_on_every_gpu() -> None:
    def fast(*gpus: Gpu) -> bool:
        return Machine(1, None, gpus, False).fast_bf16("cuda")

    assert fast(gpu(0))
    assert not fast(gpu(0, (7, 5)))
    assert not fast(gpu(0), gpu(1, None))
    assert not fast()


@pytest.mark.parametrize(
    ("machine", "ranks", "device", "threads"),
    [
        (Machine(32, None, (), False, ((0, 16),)), 2, "cpu", 8),  # SMT: 16 cores of 32 threads
        (Machine(32, None, (), False), 2, "cpu", 16),  # a kernel that does not tell, or [node] of a study
        (Machine(6, 6.0, (), False, ((0, 16),)), 2, "cpu", 3),  # a quota
        (Machine(32, None, (), False, ((0, 16),)), 40, "cpu", 1),
        # DGX H100: 112 physical cores, 8 GPUs.
        (Machine(224, None, tuple(gpu(n // 4) for n in range(8)), False, ((0, 56), (1, 56))), 8, "cuda", 14),
        # All GPUs on one socket: eight ranks lie there together, two have it to themselves.
        (Machine(224, None, (gpu(0),) * 8, False, ((0, 56), (1, 56))), 8, "cuda", 7),
        (Machine(224, None, (gpu(0),) * 8, False, ((0, 56), (1, 56))), 2, "cuda", 28),
        (Machine(224, None, (gpu(None),) * 8, False, ((0, 56), (1, 56))), 8, "cuda", 14),
        (Machine(224, None, (gpu(0),) * 8, False, ((0, 56), (1, 56))), 8, "cpu", 14),
    ],
)
def test_default_threads_are_physical_cores(machine: Machine, ranks: int, device: DeviceName, threads: int) -> None:
    assert machine.threads_for(ranks, device) == threads


def test_a_job_s_share_of_a_node_is_as_much_of_its_physical_cores() -> None:
    node = Machine(64, None, (), False, ((0, 16), (1, 16)))
    assert node.limited_to(32).physical_cores == 16
    assert node.limited_to(96) == node
